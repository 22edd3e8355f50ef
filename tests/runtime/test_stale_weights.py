"""Weights written after lowering, in every way there is: noticed at once, or within the stated number of calls."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from dovetail.backends.int8.int8_backend import Int8
from dovetail.lowering.lowered_state import lowered_state_of
from dovetail.runtime.compiled_module import CompiledModule
from tests.backends.int8_helpers import needs_int8
from tests.lowering.helpers import Counting, fused
from tests.runtime.weight_writes import (
    COUNTED,
    UNCOUNTED,
    Net,
    X,
    array,
    array_of_a_buffer,
    bare_batch_norm,
    data,
    net,
    one_vector,
    same,
    train_forward,
)


def _missing(*packages: str) -> Any:
    gone = [p for p in packages if importlib.util.find_spec(p) is None]
    return pytest.mark.skipif(bool(gone), reason=f"{gone} not installed")


def by(backend: Any, *passes: Any) -> Callable[..., Any]:
    """Compile a model for a backend, or with some passes."""

    def compiled(model: nn.Module, **options: Any) -> Any:
        instance = backend() if callable(backend) else backend
        if passes:
            options["pipeline"] = [*passes, dovetail.Fuse(dovetail.rules.groups())]
        return dovetail.compile(model, (X,), backends=instance, cache=False, **options)

    return compiled


def lowered(model: nn.Module, **options: Any) -> GraphModule:
    """The same without `compile`."""
    gm = dovetail.fuse(dovetail.capture(model, (X,)), dovetail.rules.groups())
    return dovetail.lower(gm, "onnxruntime", cache=False, **options)


FOLDS = (dovetail.FoldConvBatchNorm(), dovetail.MergeParallel(materialise=True, guard=None))
ONNX = _missing("onnx", "onnxruntime")
WAYS = [
    pytest.param(by("onnxruntime"), id="onnxruntime", marks=ONNX),
    pytest.param(by("openvino"), id="openvino", marks=_missing("onnx", "openvino")),
    pytest.param(by("xla"), id="xla", marks=_missing("torch_mlir", "jaxlib")),
    pytest.param(by("tvm"), id="tvm", marks=_missing("tvm")),
    pytest.param(by(lambda: Int8(calibrate=2, bound=0.5)), id="int8", marks=needs_int8),
    pytest.param(by("eager", *FOLDS), id="folded"),
    pytest.param(by("onnxruntime", *FOLDS), id="folded-onnxruntime", marks=ONNX),
    pytest.param(by("inductor", *FOLDS), id="folded-inductor", marks=pytest.mark.long),
    pytest.param(lowered, id="lower", marks=ONNX),
]


def allowed(fast: Any) -> float:
    """How far results may be off, relative to the largest: in integers the layers before a changed one still are."""
    in_integers = isinstance(fast, CompiledModule) and any(
        r.backend == "int8" for r in dovetail.regions(fast.graphs[0])
    )
    return 0.02 if in_integers else 1e-5


@torch.no_grad()
@pytest.mark.parametrize("compiled", WAYS)
def test_what_version_counters_show_is_noticed_at_once(compiled: Callable[..., Any]) -> None:
    for write in COUNTED:
        model = net()
        fast = compiled(model, weight_check_interval=None)
        before = [fast(X) for _ in range(5)][-1]
        write(model)
        assert same(fast(X), model(X), allowed(fast)), write
        assert not same(model(X), before, 2 * allowed(fast)), write


@torch.no_grad()
@pytest.mark.parametrize("compiled", WAYS)
def test_contents_compared_in_every_call_leave_no_stale_one(compiled: Callable[..., Any]) -> None:
    for write in UNCOUNTED:
        model = net(write)
        fast = compiled(model, weight_check_interval=1)
        before = [fast(X) for _ in range(5)][-1]
        write(model)
        assert same(fast(X), model(X), allowed(fast)), write
        assert not same(model(X), before, 2 * allowed(fast)), write


@torch.no_grad()
@pytest.mark.parametrize("write", UNCOUNTED)
@ONNX
def test_no_more_calls_are_stale_than_stated(write: Callable[[Any], None]) -> None:
    interval, model = 6, net(write)
    fast = dovetail.compile(model, (X,), backends="onnxruntime", cache=False, weight_check_interval=interval)
    before = [fast(X) for _ in range(5)][-1]
    write(model)
    expected = model(X)
    results = [fast(X) for _ in range(interval + 3)]
    fresh = [same(result, expected) for result in results]
    assert all(fresh[interval - 1 :])
    # Weights that were written together are used together.
    assert all(new or torch.equal(result, before) for new, result in zip(fresh, results, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("compiled", WAYS)
def test_refresh_leaves_no_stale_call(compiled: Callable[..., Any]) -> None:
    for write in (data, array_of_a_buffer, one_vector):
        model = net(write)
        fast = compiled(model)
        for _ in range(5):
            fast(X)
        assert dovetail.refresh(fast) == 0
        write(model)
        number = dovetail.refresh(fast)
        assert same(fast(X), model(X), allowed(fast)), write
        assert dovetail.refresh(fast) == 0
        # Each once, however many hold it; code that reads weights where they are has none that is stale.
        assert number <= len([*model.parameters(), *model.buffers()])


@torch.no_grad()
@ONNX
def test_refresh_counts_weights() -> None:
    model = net()
    fast = dovetail.compile(model, (X,), backends="onnxruntime", cache=False)
    fast(X)
    model.left.weight.data.mul_(2)
    model.norm.running_mean.numpy()[:] += 1
    assert dovetail.refresh(nn.Sequential(fast)) == 2
    assert same(fast(X), model(X))


def test_refresh_of_what_holds_no_copies() -> None:
    model = net()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    fast(X)
    model.left.weight.data.mul_(2)
    assert dovetail.refresh(fast) == 0
    assert dovetail.refresh(dovetail.capture(model, (X,))) == 0
    assert dovetail.refresh(dovetail.compile(model, backends="eager")) == 0


@pytest.mark.parametrize("given", [Net(), None, "fast", torch.ones(2), torch.relu])
def test_refresh_of_something_else(given: Any) -> None:
    with pytest.raises(dovetail.InvalidArgument, match=r"refresh takes|neither compiled nor lowered"):
        dovetail.refresh(given)


class Copies(Counting):
    """Goes by copies of the weights, and counts how often it took them."""

    taken = 0

    def prepare(self, site: Any) -> Callable[..., Any]:
        self.taken += 1
        run, kept = site.compiled, {i: site.operands[i].clone() for i in site.constants}
        return lambda *operands: run(*[kept.get(i, operand) for i, operand in enumerate(operands)])


class Big(nn.Module):
    """A weight of several pieces, one that has gaps in memory, and one with its dimensions in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.randn(300, 300))
        self.gaps = nn.Parameter(torch.empty(0))
        self.gaps.data = torch.randn(300, 600)[:, ::2]
        self.turned = nn.Parameter(torch.randn(300, 300).t())
        self.narrow = nn.Parameter(torch.randn(300, 300).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.big) @ self.gaps + x @ self.turned + x @ self.narrow.float()


@torch.no_grad()
@pytest.mark.parametrize("name", ["big", "gaps", "turned", "narrow"])
@pytest.mark.parametrize("at", [0, 45_000, 89_999])
def test_every_byte_is_compared_within_the_interval(name: str, at: int) -> None:
    model, mine, x = Big().eval(), Copies(), torch.randn(2, 300)
    lowered = dovetail.compile(model, (x,), backends=mine, cache=False, weight_check_interval=4)
    for _ in range(9):
        lowered(x)
    prepared = mine.taken
    weight = model.get_parameter(name).data
    weight[at // 300, at % 300] += 64
    results = [torch.equal(lowered(x), model(x)) for _ in range(5)]
    assert all(results[3:])
    assert prepared < mine.taken <= 2 * prepared


@torch.no_grad()
def test_nothing_is_prepared_again_for_nothing() -> None:
    model, mine = net(), Copies()
    fast = dovetail.compile(model, (X,), backends=mine, cache=False, weight_check_interval=2)
    fast(X)
    before = mine.taken
    for _ in range(6):
        fast(X)
        model(X)
        model.eval()
    dovetail.refresh(fast)
    fast(X)
    assert mine.taken == before > 0


@torch.no_grad()
def test_specialisations_do_not_hide_a_write_from_each_other() -> None:
    """Code for other sizes is prepared after the write; the older copies are stale all the same."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ self.weight) + 1

    model, mine = Rows().eval(), Copies()
    dynamic = {"x": {0: torch.export.Dim.DYNAMIC}}
    small, large = torch.randn(3, 4), torch.randn(5, 4)
    gm = fused(model, small, rules=dovetail.rules.groups(), dynamic_shapes=dynamic)
    lowered = dovetail.lower(gm, [mine], cache=False, weight_check_interval=None)
    lowering = lowered_state_of(lowered)
    assert lowering is not None
    lowered(small)
    lowered(small.t().contiguous().t())
    model.weight.data.mul_(2)
    lowered(large[:, [0, 1, 2, 3]].t().contiguous().t())
    assert torch.equal(lowered(small), model(small)) or dovetail.refresh(lowered) == 1
    assert torch.equal(lowered(small), model(small))


@torch.no_grad()
@pytest.mark.parametrize("backend", ["xla", "tvm"])
def test_memory_is_shared_where_the_compiler_can(backend: str) -> None:
    pytest.importorskip("torch_mlir" if backend == "xla" else "tvm")
    model = net()
    fast = dovetail.compile(model, (X,), backends=backend, cache=False, weight_check_interval=None)
    for write in (data, array, bare_batch_norm):
        fast(X)
        write(model)
        assert same(fast(X), model(X)), write
    assert dovetail.refresh(fast) == 0


@torch.no_grad()
def test_tied_weights_are_compared_wherever_they_are_used() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.b(torch.relu(self.a(x))))

    model, x = Tied().eval(), torch.randn(2, 8)
    fast = dovetail.compile(model, (x,), backends=Copies(), cache=False)
    fast(x)
    model.b.weight.data.mul_(2)
    assert dovetail.refresh(fast) == 1
    assert torch.equal(fast(x), model(x))


def test_torch_compile_gives_weights_as_inputs() -> None:
    torch._dynamo.reset()
    model = net()
    fast = torch.compile(model, backend="dovetail", options={"backends": [Copies()], "cache": False})
    with torch.no_grad():
        for write in (data, train_forward, array, bare_batch_norm):
            fast(X)
            write(model)
            torch.testing.assert_close(fast(X), model(X))


@pytest.mark.parametrize("interval", [0, -1, 2.0, True, "4"])
def test_intervals_that_are_none(interval: Any) -> None:
    with pytest.raises(dovetail.InvalidArgument, match="weight_check_interval"):
        dovetail.compile(net(), backends="eager", weight_check_interval=interval)
    with pytest.raises(dovetail.InvalidArgument, match="weight_check_interval"):
        dovetail.Lower(weight_check_interval=interval)
