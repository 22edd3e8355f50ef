"""What every backend must do that hands regions to another project's compiler; each has a test class made of this."""

import concurrent.futures
import copy
import functools
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import dovetail
from dovetail import Region, zoo
from dovetail.lowering.backend_protocol import Answer, Backend, Compiled, resolve
from dovetail.lowering.lower import lower
from tests.backends.external_models import OPERATORS, Applied, Chain, Layers, whole
from tests.backends.external_numbers import ExternalNumericsTests
from tests.lowering import faulty
from tests.lowering.helpers import Blocks, events, fused
from tests.lowering.test_failures import FAULTS, WRONG_NUMBERS, scaled

ROOT = Path(__file__).parent.parent.parent
QUICK = ("mlp", "resnet")


class Spoiled(Backend):
    """A backend whose code goes wrong in the way of one of `faulty`."""

    def __init__(self, inner: Any, fault: faulty.Sound) -> None:
        self.inner, self.fault, self.name = inner, fault, fault.name

    def supports(self, region: Region) -> Answer:
        answer = self.inner.supports(region)
        return self.fault.supports(region) if answer is True else answer

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        code: Any = self.inner.compile(region, examples)
        return self.fault.compile(replace(region, body=code), examples)


@functools.cache
def program() -> GraphModule:
    gm = dovetail.capture(scaled, (torch.ones(2, 3), torch.ones(2, 3)))
    return dovetail.outline(gm, ["add", "relu", "mul"], kind="scaled")


def outcomes(gm: GraphModule) -> list[tuple[str, str]]:
    return [(e.backend, e.outcome) for e in events(gm)]


def off(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


SECOND = """
import json, sys
import torch, dovetail
from tests.backends.external_numbers import ExternalNumericsTests
from tests.backends.external_models import Layers, whole
from tests.lowering.helpers import events

torch.manual_seed(0)
torch.set_num_threads(1)
model, x = Layers().eval(), torch.randn(2, 3, 6, 6)
with torch.no_grad():
    lowered = dovetail.lower(whole(model, x), [sys.argv[1]], cache=sys.argv[2], on_error="raise")
    right = [torch.allclose(a, b, atol=1e-5) for a, b in zip(lowered(x), model(x))]
print(json.dumps({"right": right, "events": [e.outcome for e in events(lowered)]}))
"""


class ExternalBackendTests(ExternalNumericsTests):
    """Tests of one backend. `isolated` and `dies` are variants of it that compile in a process of their own."""

    isolated: ClassVar[type[Backend]]
    dies: ClassVar[type[Backend]]
    tolerance: ClassVar[float] = 1e-5
    share: ClassVar[float] = 0.8

    def check_same(self, got: Any, expected: Any) -> None:
        pairs = list(zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True))
        for a, b in pairs:
            assert a.stride() == b.stride()
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-4, atol=self.tolerance * float(b.abs().max()))

    @pytest.mark.parametrize(
        "model", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in zoo.names()]
    )
    def test_values_on_the_zoo(self, model: str) -> None:
        entry = zoo.get(model)
        original, inputs = entry.build().eval(), entry.example_inputs()
        fast = dovetail.compile(
            original,
            inputs.args,
            inputs.kwargs,
            backends=[self.name],
            cache=False,
            verify=True,
            on_error="raise",
        )
        got = fast(*inputs.args, **inputs.kwargs)
        self.check_same(got, original(*inputs.args, **inputs.kwargs))
        taken = [r for r in dovetail.regions(fast.graphs[0]) if r.backend == self.name]
        assert len(taken) == 1, "all of it is one region"

    def test_without_its_package_it_names_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        find, gone = importlib.util.find_spec, self.backend.packages
        gm = whole(lambda x: torch.relu(x) * 2, torch.ones(3))
        monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n in gone else find(n, *a))
        assert f"pip install 'dovetail[{self.name}]'" in self.declined(gm)
        assert gone[0] in self.declined(gm)
        x = torch.randn(3)
        assert torch.equal(lower(gm, self.name, cache=False)(x), torch.relu(x) * 2)
        model = Blocks().eval()
        fast = dovetail.compile(model, (torch.ones(2, 8),), backends=[self.name], cache=False)
        assert torch.equal(fast(torch.ones(2, 8)), model(torch.ones(2, 8)))

    def test_what_it_does_not_take(self) -> None:
        x = torch.randn(4, 8)
        assert self.answer(whole(lambda x: x.relu() + 1, x)) is True
        assert "(random)" in self.declined(whole(lambda x: F.dropout(x.relu(), 0.5), x))
        assert "(writes)" in self.declined(whole(lambda x: x.add_(1).relu(), x.clone()))
        assert "complex64" in self.declined(whole(lambda x: torch.fft.rfft(x).real + 1, x))
        assert "svd" in self.declined(whole(lambda x: torch.linalg.svdvals(x).relu(), x))
        assert "float16" in self.declined(whole(lambda x: x.relu() + 1, x.half()))

    def test_sizes_that_vary(self) -> None:
        dims = {"x": {0: torch.export.Dim("rows", min=2, max=64)}}
        gm = whole(lambda x: x.relu() + 1, torch.randn(4, 8), dynamic_shapes=dims)
        if self.fixed_sizes:
            assert self.declined(gm) == "the sizes of its operand 'x' may vary"
        else:
            assert self.answer(gm) is True
            lowered = lower(gm, self.backend, cache=False, on_error="raise")
            for rows in (2, 5):
                x = torch.randn(rows, 8)
                assert torch.equal(lowered(x), x.relu() + 1)

    def test_float32_is_float32(self) -> None:
        torch.manual_seed(0)
        model, x = Chain().eval(), torch.randn(32, 192)
        exact = copy.deepcopy(model).double()(x.double())
        fast = dovetail.compile(model, (x,), backends=[self.name], cache=False, on_error="raise")
        assert [r.backend for r in dovetail.regions(fast.graphs[0])] == [self.name]
        assert off(fast(x), exact) < self.tolerance
        # The measure would show it: what fewer bits do is far above it.
        rough = copy.deepcopy(model).bfloat16()(x.bfloat16())
        assert off(rough, exact) > 100 * self.tolerance

    def test_operators_give_what_torch_gives(self) -> None:
        """Many small operations in one region, each with a result of its own; what is not taken is left out."""
        torch.manual_seed(0)
        x, y, w = torch.randn(2, 4, 6), torch.randn(2, 4, 6), torch.randn(3, 6)
        image, i = torch.randn(2, 4, 8, 8), torch.tensor([[2, 0, 1], [1, 1, 0]])
        taken: list[Any] = []
        for each in OPERATORS:
            gm = dovetail.capture(Applied([each]), (x, y, w, image, i))
            reasons = [self.backend.takes(n) for n in gm.graph.nodes if n.op == "call_function"]
            if all(reason is True for reason in reasons):
                taken.append(each)
        assert len(taken) >= self.share * len(OPERATORS)
        model = Applied(taken)
        args = (x, y, w, image, i)
        lowered = lower(whole(model, *args), self.backend, cache=False, verify=True, on_error="raise")
        assert dovetail.regions(lowered)[0].backend == self.name
        for number, (got, expected) in enumerate(zip(lowered(*args), model(*args), strict=True)):
            assert got.dtype == expected.dtype, number
            bound = self.tolerance * float(expected.abs().max()) if expected.dtype.is_floating_point else 0
            torch.testing.assert_close(got, expected, rtol=0, atol=bound, msg=lambda m, n=number: f"{n}: {m}")

    def test_new_weights_are_noticed(self) -> None:
        model, x = Layers().eval(), torch.randn(2, 3, 6, 6)
        lowered = lower(whole(model, x), self.backend, cache=False, on_error="raise")
        self.check_same(lowered(x), model(x))
        for _ in range(7):
            model.head.weight.mul_(-1.5)
            model.norm.running_mean.add_(1)  # type: ignore[operator]
            self.check_same(lowered(x), model(x))
        model.conv.weight.data = torch.randn_like(model.conv.weight)
        lowered = lower(whole(model, x), self.backend, cache=False, on_error="raise")
        self.check_same(lowered(x), model(x))
        assert {r.backend for r in dovetail.regions(lowered)} == {self.name}
        assert [e.outcome for e in events(lowered)] == ["compiled"]

    def test_threads_may_call_at_once(self) -> None:
        model = Layers().eval()
        inputs = [torch.randn(2, 3, 6, 6) for _ in range(24)]
        lowered = lower(whole(model, inputs[0]), self.backend, cache=False, on_error="raise")

        def run(x: Tensor) -> Any:
            with torch.no_grad():
                return lowered(x)

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            for x, got in zip(inputs, pool.map(run, inputs), strict=True):
                self.check_same(got, model(x))
        assert {r.backend for r in dovetail.regions(lowered)} == {self.name}

    def test_the_number_of_threads_is_that_of_torch(self) -> None:
        model, x = Layers().eval(), torch.randn(2, 3, 6, 6)
        lowered = lower(whole(model, x), self.backend, cache=False, on_error="raise")
        before = torch.get_num_threads()
        try:
            for count in (1, 2, 1):
                torch.set_num_threads(count)
                self.check_same(lowered(x), model(x))
        finally:
            torch.set_num_threads(before)
        assert {r.backend for r in dovetail.regions(lowered)} == {self.name}

    def test_strides_are_those_of_the_body(self) -> None:
        model = Layers().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
        lowered = lower(whole(model, x), self.backend, cache=False, verify=True, on_error="raise")
        assert not lowered(x)[0].is_contiguous()
        self.check_same(lowered(x), model(x))

        def turned(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            z = torch.relu(x).transpose(0, 2)
            mean = y.mean(1, keepdim=True)
            return z, z * 2, y[:, 1:] + 1, mean.t().expand(4, 5), (mean * 2)[:, :, None].expand(5, 200, 100)

        x, y = torch.randn(4, 3, 2).permute(2, 0, 1), torch.randn(5, 6)[:, ::2]
        lowered = lower(whole(turned, x, y), self.backend, cache=False, verify=True, on_error="raise")
        self.check_same(lowered(x, y), turned(x, y))

    def test_views_of_one_value_share_its_memory(self) -> None:
        """As in eager code: the code returns the value, and its parts are not copied."""

        def parts(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            y = torch.relu(x @ w)
            first, second = y.split([4, 8], 1)
            return first, y * 2, second.view(6, 2, 4).transpose(1, 2), first, y[1:, ::2].expand(2, 5, 6)

        x, w = torch.randn(6, 8), torch.randn(8, 12)
        lowered = lower(whole(parts, x, w), self.backend, cache=False, verify=True, on_error="raise")
        got, expected = lowered(x, w), parts(x, w)
        self.check_same(got, expected)
        assert [t.untyped_storage().data_ptr() for t in got].count(got[0].untyped_storage().data_ptr()) == 4
        assert got[1].untyped_storage().data_ptr() != got[0].untyped_storage().data_ptr()

    def test_operands_may_begin_anywhere(self) -> None:
        def run(x: Tensor, w: Tensor) -> Tensor:
            return torch.relu(x @ w) + x

        x, w = torch.randn(1 + 16 * 16)[1:].view(16, 16), torch.randn(3 + 16 * 16)[3:].view(16, 16)
        lowered = lower(whole(run, x, w), self.backend, cache=False, on_error="raise")
        self.check_same(lowered(x, w), run(x, w))

    def test_results_have_memory_of_their_own(self) -> None:
        def shaped(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = torch.relu(x) + 1
            return y.reshape(2, 6) * 1, torch.relu(x), y.clone()

        x = torch.randn(3, 4)
        gm = whole(shaped, x)
        lowered = lower(gm, self.backend, cache=False, on_error="raise")
        first = lowered(x)
        kept = [one.clone() for one in first]
        again = lowered(torch.randn(3, 4))
        for one in again:
            one.zero_()
        self.check_same(first, kept)
        self.check_same(lowered(x), shaped(x))

    def test_an_index_out_of_range_is_reported_and_costs_nothing(self) -> None:
        def picked(table: Tensor, rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            return F.embedding(rows, table) * 2, table[at].relu()

        table, rows, at = torch.randn(5, 4), torch.tensor([0, 4]), torch.tensor([-1, -5, 3])
        lowered = lower(whole(picked, table, rows, at), self.backend, cache=False, on_error="fallback")
        self.check_same(lowered(table, rows, at), picked(table, rows, at))
        for bad in (
            (torch.tensor([0, 5]), at),
            (torch.tensor([-1, 0]), at),
            (rows, torch.tensor([0, 1, -6])),
        ):
            with pytest.raises(IndexError):
                lowered(table, *bad)
        self.check_same(lowered(table, rows, at), picked(table, rows, at))
        assert {r.backend for r in dovetail.regions(lowered)} == {self.name}

    def test_calls_that_need_gradients_run_the_body(self) -> None:
        model, x = Blocks(), torch.randn(3, 8)
        with torch.enable_grad():
            lowered = lower(fused(model, x), self.backend, cache=False)
            lowered(x).sum().backward()
        assert {r.backend for r in dovetail.regions(lowered)} == {None}
        assert model.layers[0].weight.grad is not None
        assert "autograd cannot go through" in events(lowered)[0].reason

    def test_code_is_kept_on_disk(self, tmp_path: Path) -> None:
        model, x = Layers().eval(), torch.randn(2, 3, 6, 6)
        gm = whole(model, x)
        first = lower(gm, type(self.backend)(), cache=tmp_path, on_error="raise")
        second = lower(gm, type(self.backend)(), cache=tmp_path, on_error="raise")
        assert [e.outcome for e in events(first)] == ["compiled"]
        assert [e.outcome for e in events(second)] == ["disk"]
        for a, b in zip(first(x), second(x), strict=True):
            assert torch.equal(a, b)
        self.check_same(second(x), model(x))

    @pytest.mark.long
    def test_another_process_compiles_nothing(self, tmp_path: Path) -> None:
        for expected in ("compiled", "disk"):
            done = subprocess.run(
                [sys.executable, "-c", SECOND, self.name, str(tmp_path)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout.splitlines()[-1]) == {"right": [True, True], "events": [expected]}

    def test_copies_and_pickles_run_alike(self) -> None:
        model, x = Layers().eval(), torch.randn(2, 3, 6, 6)
        lowered = lower(whole(model, x), self.backend, cache=False, on_error="raise")
        expected = lowered(x)
        for copied in (copy.deepcopy(lowered), pickle.loads(pickle.dumps(lowered))):
            self.check_same(copied(x), expected)
            assert {r.backend for r in dovetail.regions(copied)} == {self.name}

    def check_scaled(self, lowered: GraphModule) -> None:
        for _ in range(3):
            x, y = torch.randn(2, 3), torch.randn(2, 3)
            copies = x.clone(), y.clone()
            assert torch.equal(lowered(x, y), scaled(*copies))
            assert torch.equal(x, copies[0])
            assert torch.equal(y, copies[1])

    @pytest.mark.parametrize(("kind", "stage", "reason"), FAULTS, ids=lambda v: getattr(v, "name", ""))
    def test_the_next_one_takes_what_goes_wrong(self, kind: Any, stage: str, reason: str) -> None:
        lowered = lower(program(), [Spoiled(self.backend, kind()), self.backend], cache=False)
        self.check_scaled(lowered)
        outcomes = [(e.backend, e.outcome, e.reason) for e in events(lowered)]
        assert outcomes == [(kind.name, stage, reason), (self.name, "compiled", "")]
        assert dovetail.regions(lowered)[0].backend == self.name
        with pytest.raises(dovetail.LoweringError, match=stage):
            lower(program(), Spoiled(self.backend, kind()), cache=False, on_error="raise")

    @pytest.mark.parametrize("kind", WRONG_NUMBERS, ids=lambda v: v.name)
    def test_wrong_numbers_are_detected_when_verifying(self, kind: Any) -> None:
        lowered = lower(program(), [Spoiled(self.backend, kind()), self.backend], cache=False, verify=True)
        self.check_scaled(lowered)
        assert outcomes(lowered) == [(kind.name, "verify"), (self.name, "compiled")]

    def test_code_that_raises_later_is_replaced(self) -> None:
        lowered = lower(program(), [Spoiled(self.backend, faulty.RaisesLater()), self.backend], cache=False)
        self.check_scaled(lowered)
        expected = [("raises_later", "compiled"), ("raises_later", "call"), (self.name, "compiled")]
        assert outcomes(lowered) == expected

    @pytest.mark.long
    def test_it_compiles_in_a_process_of_its_own(self) -> None:
        model, x = Layers().eval(), torch.randn(2, 3, 6, 6)
        (backend,) = resolve(self.isolated)
        lowered = lower(whole(model, x), backend, cache=False, on_error="raise")
        self.check_same(lowered(x), model(x))
        assert outcomes(lowered) == [(self.name, "compiled")]

    @pytest.mark.long
    def test_a_process_that_dies_takes_nothing_with_it(self) -> None:
        model, x = Layers().eval(), torch.randn(2, 3, 6, 6)
        (dies,) = resolve(self.dies)
        lowered = lower(whole(model, x), [dies, self.backend], cache=False)
        self.check_same(lowered(x), model(x))
        assert outcomes(lowered) == [(dies.name, "compile"), (self.name, "compiled")]
        assert events(lowered)[0].reason == "its process died of SIGABRT"
