"""Compilations of several bodies overlap: all are begun before the first one is waited for."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import dovetail
from dovetail import LoweringError, Region, torch_compat
from dovetail.backends import inductor
from dovetail.lowering.backend_protocol import Compiled
from tests.lowering.helpers import Counting, events


class Overlapping(Counting):
    """Records when compilations begin and end."""

    name = "overlapping"

    def __init__(self, fails: Sequence[str] = ()) -> None:
        super().__init__("overlapping")
        self.fails = fails
        self.steps: list[str] = []

    def compile_async(self, region: Region, examples: Sequence[Any]) -> Callable[[], Compiled]:
        self.steps.append(f"begin {region.name}")
        if f"begin {region.name}" in self.fails:
            raise ValueError("it cannot begin")

        def finish() -> Compiled:
            self.steps.append(f"finish {region.name}")
            if f"finish {region.name}" in self.fails:
                raise ValueError("it cannot finish")
            return self.compile(region, examples)

        return finish


class Saving(Overlapping):
    def save(self, compiled: Any) -> bytes:
        return b"code"

    def load(self, data: bytes, region: Region) -> Compiled:
        return region.body


def three(x: Tensor) -> Tensor:
    return torch.tanh(torch.relu(x + 1)).exp().sin() * x.cos()


def program() -> GraphModule:
    gm = dovetail.capture(three, (torch.randn(3, 4),))
    for nodes, kind in ((["add", "relu"], "a"), (["tanh", "exp"], "b"), (["sin", "cos", "mul"], "c")):
        gm = dovetail.outline(gm, nodes, kind=kind)
    return gm


def check(lowered: GraphModule) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(lowered(x), three(x))


def test_all_are_begun_before_the_first_is_finished() -> None:
    backend = Overlapping()
    lowered = dovetail.lower(program(), backend, cache=False)
    check(lowered)
    names = ["a_0", "b_0", "c_0"]
    assert backend.steps == [*(f"begin {n}" for n in names), *(f"finish {n}" for n in names)]
    assert backend.compiled == names
    assert all(event.outcome == "compiled" and event.seconds > 0 for event in events(lowered))


def test_a_single_body_is_compiled_as_it_is() -> None:
    backend = Overlapping()
    gm = dovetail.outline(dovetail.capture(three, (torch.randn(3, 4),)), ["add", "relu"], kind="a")
    check(dovetail.lower(gm, backend, cache=False))
    assert backend.steps == []
    assert backend.compiled == ["a_0"]


@pytest.mark.parametrize("step", ["begin b_0", "finish b_0"])
def test_a_failure_moves_that_region_alone_to_the_next_backend(step: str) -> None:
    backend, other = Overlapping([step]), Counting("other")
    lowered = dovetail.lower(program(), [backend, other], cache=False)
    check(lowered)
    assert [r.backend for r in dovetail.regions(lowered)] == ["overlapping", "other", "overlapping"]
    reasons = [(e.region, e.outcome, e.reason) for e in events(lowered) if e.reason]
    assert reasons == [("b_0", "compile", f"ValueError: it cannot {step.split()[0]}")]


def test_with_on_error_raise_nothing_is_begun_after_a_failure() -> None:
    backend = Overlapping(["begin b_0"])
    with pytest.raises(LoweringError, match="compile: ValueError: it cannot begin"):
        dovetail.lower(program(), backend, cache=False, on_error="raise")
    assert backend.steps == ["begin a_0", "begin b_0", "finish a_0"]


def test_nothing_is_begun_for_what_is_on_disk(tmp_path: Path) -> None:
    first, second = Saving(), Saving()
    check(dovetail.lower(program(), first, cache=tmp_path))
    lowered = dovetail.lower(program(), second, cache=tmp_path)
    check(lowered)
    assert len(first.compiled) == 3
    assert second.steps == second.compiled == []
    assert {event.outcome for event in events(lowered)} == {"disk"}


def test_nothing_is_begun_for_what_is_in_memory() -> None:
    backend = Overlapping()
    lowered = dovetail.lower(program(), backend, cache=False)
    again = dovetail.lower(program(), backend, cache=False)
    check(lowered)
    check(again)
    assert len(backend.compiled) == 3
    assert len(backend.steps) == 6


def test_a_subclass_that_overrides_compile_alone_is_not_bypassed() -> None:
    class Derived(Overlapping):
        def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
            self.steps.append("compile")
            return region.body

    backend = Derived()
    check(dovetail.lower(program(), backend, cache=False))
    assert backend.steps == ["compile"] * 3


def test_kernels_of_other_threads_and_of_tuning_code_are_waited_for_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[str] = []

    class Compiling:
        def wait(self, scope: dict[str, Any]) -> None:
            waited.append(scope["name"])

    owner, _ = torch_compat.WAIT_FOR_KERNELS.owner()
    monkeypatch.setattr(owner, "wait", Compiling.wait)
    with inductor._deferred_kernels() as pending:
        owner.wait(None, {"name": "module", "__file__": "a.py"})
        owner.wait(None, {"name": "tuning"})
        thread = threading.Thread(target=owner.wait, args=(None, {"name": "thread", "__file__": "b.py"}))
        thread.start()
        thread.join()
        assert waited == ["tuning", "thread"]
    pending.wait()
    pending.wait()
    assert waited == ["tuning", "thread", "module"]
    assert owner.wait is Compiling.wait


@pytest.mark.parametrize("trains", [False, True])
def test_inductor_generates_all_code_before_it_waits_for_kernels(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor as torch_inductor

    steps: list[str] = []
    wait, generate = inductor._PendingKernels.wait, torch_inductor.standalone_compile

    def recorded_wait(self: Any) -> None:
        steps.append(f"wait for {len(self.waits)}")
        wait(self)

    def recorded_generate(*args: Any, **kwargs: Any) -> Any:
        steps.append("generate")
        return generate(*args, **kwargs)

    monkeypatch.setattr(inductor._PendingKernels, "wait", recorded_wait)
    monkeypatch.setattr(torch_inductor, "standalone_compile", recorded_generate)
    x = torch.randn(3, 4, requires_grad=trains)
    gm = dovetail.capture(three, (x,))
    for nodes, kind in ((["add", "relu"], "a"), (["tanh", "exp"], "b")):
        gm = dovetail.outline(gm, nodes, kind=kind)
    lowered = dovetail.lower(gm, "inductor", cache=False, on_error="raise", grad=trains)
    modules = 2 if trains else 1
    assert steps == ["generate", "generate", f"wait for {modules}", f"wait for {modules}"]
    result = lowered(x)
    torch.testing.assert_close(result, three(x))
    if trains:
        (gradient,) = torch.autograd.grad(result.sum(), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(three(x).sum(), x)[0])
