"""Backends that fail or lie: another one or the body runs, the values are right, nothing is touched, and it is told."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import dovetail
from dovetail import LoweringError
from dovetail.lowering import verify_region
from dovetail.lowering.backend_protocol import Compiled
from dovetail.lowering.lower import lower
from dovetail.outlining.region import Region
from tests.lowering import faulty
from tests.lowering.helpers import Counting, events

# What goes wrong, where it shows, and what is said of it.
FAULTS = [
    (faulty.RaisesInSupports, "supports", "ValueError: no idea"),
    (faulty.AnswersNonsense, "supports", "it returned 'perhaps', neither True nor a Decline"),
    (faulty.RaisesInCompile, "compile", "ValueError: cannot make it"),
    (faulty.ReturnsNoCallable, "compile", "it returned a int, not a callable"),
    (faulty.WrongShape, "trial", "result 0 has shape (1, 2, 3), not (2, 3)"),
    (faulty.WrongDtype, "trial", "result 0 has dtype torch.float64, not torch.float32"),
    (faulty.WrongCount, "trial", "it returned 2 results; the body returns 1"),
    (faulty.NoTuple, "trial", "it returned a Tensor; the body returns a tuple of 1"),
    (faulty.ReturnsItsInput, "trial", "result 0 shares memory with operand 0, which the body's does not"),
    (faulty.WritesItsInput, "trial", "it wrote operand 0, which the body leaves as it is"),
    (faulty.ReusesItsResult, "trial", "result 0 is in the same memory in every call"),
    (faulty.RaisesWhenCalled, "trial", "RuntimeError: out of order"),
]
WRONG_NUMBERS = [faulty.ReturnsNaN, faulty.SlightlyWrong]


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y) * 2


def event_rows(gm: GraphModule) -> list[tuple[str, str, str, str]]:
    return [(e.region, e.backend, e.outcome, e.reason) for e in events(gm)]


@pytest.fixture(scope="module")
def program() -> GraphModule:
    gm = dovetail.capture(scaled, (torch.ones(2, 3), torch.ones(2, 3)))
    return dovetail.outline(gm, ["add", "relu", "mul"], kind="scaled")


def check_values(lowered: GraphModule) -> None:
    for _ in range(3):
        x, y = torch.randn(2, 3), torch.randn(2, 3)
        copies = x.clone(), y.clone()
        assert torch.equal(lowered(x, y), scaled(*copies))
        assert torch.equal(x, copies[0])
        assert torch.equal(y, copies[1])


@pytest.mark.parametrize(("kind", "stage", "reason"), FAULTS, ids=lambda v: getattr(v, "name", ""))
def test_a_fault_moves_the_region_to_the_next_backend(
    program: GraphModule, kind: Any, stage: str, reason: str
) -> None:
    lowered = lower(program, [kind(), faulty.Sound()], cache=False)
    check_values(lowered)
    assert event_rows(lowered) == [
        ("scaled_0", kind.name, stage, reason),
        ("scaled_0", "sound", "compiled", ""),
    ]
    assert dovetail.regions(lowered)[0].backend == "sound"


@pytest.mark.parametrize(("kind", "stage", "reason"), FAULTS, ids=lambda v: getattr(v, "name", ""))
def test_without_another_backend_the_body_runs(
    program: GraphModule, kind: Any, stage: str, reason: str
) -> None:
    lowered = lower(program, kind(), cache=False)
    check_values(lowered)
    assert event_rows(lowered) == [("scaled_0", kind.name, stage, reason)]
    assert dovetail.regions(lowered)[0].backend is None


@pytest.mark.parametrize(("kind", "stage", "reason"), FAULTS, ids=lambda v: getattr(v, "name", ""))
def test_on_request_a_fault_is_raised(program: GraphModule, kind: Any, stage: str, reason: str) -> None:
    before = dovetail.text(program)
    with pytest.raises(LoweringError) as caught:
        lower(program, [kind(), faulty.Sound()], cache=False, on_error="raise")
    assert (caught.value.region, caught.value.backend) == ("scaled_0", kind.name)
    assert str(caught.value) == f"region 'scaled_0', backend '{kind.name}': {stage}: {reason}."
    if ": " in reason:
        assert f"{type(caught.value.__cause__).__name__}: {caught.value.__cause__}" == reason
    assert dovetail.text(program) == before


@pytest.mark.parametrize("kind", WRONG_NUMBERS, ids=lambda v: v.name)
def test_wrong_numbers_are_detected_when_verifying(program: GraphModule, kind: Any) -> None:
    lowered = lower(program, [kind(), faulty.Sound()], cache=False, verify=True)
    check_values(lowered)
    first, second = events(lowered)
    assert (first.region, first.backend, first.outcome) == ("scaled_0", kind.name, "verify")
    assert first.reason
    assert (second.backend, second.outcome) == ("sound", "compiled")
    with pytest.raises(LoweringError, match=f"'scaled_0', backend '{kind.name}': verify"):
        lower(program, kind(), cache=False, verify=True, on_error="raise")


@pytest.mark.parametrize("kind", WRONG_NUMBERS, ids=lambda v: v.name)
def test_and_only_then(program: GraphModule, kind: Any) -> None:
    lowered = lower(program, kind(), cache=False)
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    assert not torch.equal(lowered(x, y), scaled(x, y))


def test_code_that_raises_in_a_call_is_replaced_by_the_next(program: GraphModule) -> None:
    lowered = lower(program, [faulty.RaisesLater(), faulty.Sound()], cache=False)
    assert dovetail.regions(lowered)[0].backend == "raises_later"
    check_values(lowered)
    assert event_rows(lowered)[1:] == [
        ("scaled_0", "raises_later", "call", "RuntimeError: worn out"),
        ("scaled_0", "sound", "compiled", ""),
    ]
    assert dovetail.regions(lowered)[0].backend == "sound"


def test_and_by_the_body_where_there_is_no_other(program: GraphModule) -> None:
    lowered = lower(program, faulty.RaisesLater(), cache=False)
    x = torch.randn(2, 3)
    assert torch.equal(lowered(x, x), scaled(x, x))
    assert dovetail.regions(lowered)[0].backend is None
    assert event_rows(lowered)[1:] == [("scaled_0", "raises_later", "call", "RuntimeError: worn out")]


def test_copies_taken_after_a_fault_show_who_runs_them(program: GraphModule) -> None:
    lowered = lower(program, [faulty.RaisesLater(), faulty.Sound()], cache=False)
    check_values(lowered)
    for copied in (copy.deepcopy(lowered), dovetail.Cleanup()(lowered)):
        assert dovetail.regions(copied)[0].backend == "sound"
        check_values(copied)
    # What is pickled has its code made anew, and the first backend has its chance again.
    again = pickle.loads(pickle.dumps(lowered))
    assert dovetail.regions(again)[0].backend == "raises_later"


def test_the_backend_is_that_of_calls_like_the_last(program: GraphModule) -> None:
    class Infers(faulty.Sound):
        name = "infers"
        trains = False

    lowered = lower(program, [Infers(), faulty.Sound()], cache=False, grad=False)
    x = torch.randn(2, 3)
    seen: list[str | None] = []
    for needs in (False, True, False):
        assert torch.equal(lowered(x.clone().requires_grad_(needs), x), scaled(x, x))
        seen.append(dovetail.regions(lowered)[0].backend)
    assert seen == ["infers", "sound", "infers"]


def test_code_that_fails_in_one_call_of_a_body_is_dropped_in_all() -> None:
    ran: list[str] = []

    class RaisesForLarge(faulty.Sound):
        name = "raises_for_large"

        def wrap(self, body: Callable[..., Any], operands: Sequence[Any]) -> Any:
            if max(float(o.max()) for o in operands) > 100:
                raise OverflowError("too large")
            ran.append(self.name)
            return body(*operands)

    def twice(x: Tensor) -> Tensor:
        return torch.relu(torch.relu(x) * 20) * 20

    gm = dovetail.capture(twice, (torch.ones(3),))
    gm = dovetail.outline(gm, ["relu", "mul"], kind="scale")
    gm = dovetail.outline(gm, ["relu_1", "mul_1"], kind="scale")
    lowered = lower(gm, [RaisesForLarge(), faulty.Sound()], cache=False)
    small, large = torch.ones(3), torch.full((3,), 6.0)
    assert torch.equal(lowered(small), twice(small))
    assert [r.backend for r in dovetail.regions(lowered)] == ["raises_for_large"] * 2
    assert torch.equal(lowered(large), twice(large))  # in the second region alone
    assert [r.backend for r in dovetail.regions(lowered)] == ["sound"] * 2
    ran.clear()
    assert torch.equal(lowered(small), twice(small))
    assert not ran


def test_code_that_raises_in_a_call_is_reported_on_request(program: GraphModule) -> None:
    lowered = lower(program, [faulty.RaisesLater(), faulty.Sound()], cache=False, on_error="raise")
    with pytest.raises(LoweringError, match="'scaled_0', backend 'raises_later': call") as caught:
        lowered(torch.ones(2, 3), torch.ones(2, 3))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert str(caught.value.__cause__) == "worn out"


def test_a_call_that_the_body_does_not_take_either_costs_no_backend() -> None:
    def picked(x: Tensor, i: Tensor) -> Tensor:
        return torch.index_select(x, 0, i) * 2

    x, good, bad = torch.arange(3.0), torch.tensor([1]), torch.tensor([7])
    gm = dovetail.capture(picked, (x, good))
    gm = dovetail.outline(gm, ["index_select", "mul"], kind="picked")
    backend = Counting()
    lowered = lower(gm, backend, cache=False, smallest=1)
    with pytest.raises(IndexError):
        lowered(x, bad)
    before = backend.calls
    assert torch.equal(lowered(x, good), torch.tensor([2.0]))
    assert backend.calls == before + 1
    assert [e.outcome for e in events(lowered)] == ["compiled"]


def picked_from_the_end(x: Tensor, i: Tensor) -> Tensor:
    return torch.index_select(x, 0, 3 - i) * 2


def test_code_that_cannot_be_tried_is_used_and_that_is_reported() -> None:
    x, i = torch.arange(3.0), torch.tensor([1, 3])
    gm = dovetail.capture(picked_from_the_end, (x, i))
    gm = dovetail.outline(gm, ["rsub", "index_select", "mul"], kind="picked")
    lowered = lower(gm, [faulty.WrongDtype(), faulty.Sound()], cache=False)
    reason = "the body itself rejects sample inputs: IndexError: index out of range in self"
    assert event_rows(lowered) == [
        ("picked_0", "wrong_dtype", "compiled", ""),
        ("picked_0", "wrong_dtype", "untried", reason),
    ]
    assert lowered(x, i).dtype is torch.float64, "what a trial would have shown"
    ledger = dovetail.explain(lowered)
    assert [(entry.outcome, entry.reason) for entry in ledger.lowered] == [
        ("compiled", ""),
        ("untried", reason),
    ]
    assert "  wrong_dtype: 'picked_0', untried: the body itself" in str(ledger)


def test_nor_what_is_too_large(program: GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit itself is two gigabytes.
    monkeypatch.setattr(verify_region, "_MAX_BYTES", 2 * 2 * 3 * 4)
    assert [outcome for _, _, outcome, _ in event_rows(lower(program, faulty.Sound(), cache=False))] == [
        "compiled"
    ]
    monkeypatch.setattr(verify_region, "_MAX_BYTES", 2 * 2 * 3 * 4 - 1)
    assert event_rows(lower(program, faulty.Sound(), cache=False)) == [
        ("scaled_0", "sound", "compiled", ""),
        ("scaled_0", "sound", "untried", "its operands are too large for sample inputs (0.0 GiB)"),
    ]


def test_two_results_in_one_memory() -> None:
    class Joins(faulty.Sound):
        name = "joins"

        def wrap(self, body: Callable[..., Any], operands: Sequence[Any]) -> Any:
            result = body(*operands)
            return (result[0], result[0])

    def twins(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 1

    def views(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y.unsqueeze(1)

    x = torch.ones(3)
    gm = dovetail.outline(dovetail.capture(twins, (x,)), ["add", "add_1"], kind="twins")
    lowered = lower(gm, Joins(), cache=False)
    assert event_rows(lowered) == [
        ("twins_0", "joins", "trial", "result 1 shares memory with result 0, which the body's does not")
    ]
    one, other = lowered(x)
    one.zero_()
    assert torch.equal(other, x + 1)
    gm = dovetail.outline(dovetail.capture(views, (x,)), ["add", "unsqueeze"], kind="views")
    assert dovetail.regions(lower(gm, faulty.Sound(), cache=False))[0].backend == "sound"


class Unsettled(faulty.Sound):
    """Looks at the graph that was made with its code, and does not like it."""

    name = "unsettled"

    def settle(self, lowered: GraphModule) -> None:
        assert dovetail.regions(lowered)[0].backend == self.name
        raise ValueError("not this one")


def test_a_backend_that_raises_when_it_is_shown_the_graph(program: GraphModule) -> None:
    lowered = lower(program, Unsettled(), cache=False)
    check_values(lowered)
    assert event_rows(lowered) == [
        ("scaled_0", "unsettled", "compiled", ""),
        ("", "unsettled", "settle", "ValueError: not this one"),
    ]
    assert "  unsettled: settle: ValueError" in str(dovetail.explain(lowered))
    with pytest.raises(
        LoweringError, match=r"^backend 'unsettled': settle: ValueError: not this one"
    ) as caught:
        lower(program, Unsettled(), cache=False, on_error="raise")
    assert isinstance(caught.value.__cause__, ValueError)


class WritesHalf(faulty.Sound):
    """Fails in the first call after the trial, once it has written an operand."""

    name = "writes_half"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        calls: list[int] = []

        def run(*operands: Any) -> Any:
            calls.append(1)
            result = region.body(*operands)
            if len(calls) > faulty.TRIAL_CALLS:
                raise RuntimeError("half done")
            return result

        return run


def test_what_writes_is_never_run_twice() -> None:
    def counted(x: Tensor) -> Tensor:
        x.add_(1)
        return torch.relu(x) * 2

    gm = dovetail.outline(
        dovetail.capture(counted, (torch.zeros(3),)), ["add", "relu", "mul", "copy_"], kind="counted"
    )
    assert "writes" in dovetail.regions(gm)[0].effects
    lowered = lower(gm, [WritesHalf(), faulty.Sound()], cache=False)
    x = torch.zeros(3)
    with pytest.raises(LoweringError, match="'writes_half': call: RuntimeError: half done"):
        lowered(x)
    assert torch.equal(x, torch.ones(3)), "once, and not again by the body"
    assert torch.equal(lowered(x), torch.full((3,), 4.0))
    assert [e.backend for e in events(lowered)] == ["writes_half", "writes_half", "sound"]


def two(x: Tensor) -> Tensor:
    return torch.tanh(torch.relu(x + 1) * 2) - 3


def two_regions() -> GraphModule:
    gm = dovetail.capture(two, (torch.ones(4),))
    gm = dovetail.outline(gm, ["add", "relu"], kind="first")
    return dovetail.outline(gm, ["tanh", "sub"], kind="second")


def test_one_region_that_fails_costs_the_others_nothing() -> None:
    gm = two_regions()
    sound = faulty.Sound()
    lowered = lower(gm, {"first": [faulty.WrongShape(), sound], "second": sound}, cache=False)
    x = torch.randn(4)
    assert torch.equal(lowered(x), two(x))
    assert [(e.region, e.backend, e.outcome) for e in events(lowered)] == [
        ("first_0", "wrong_shape", "trial"),
        ("first_0", "sound", "compiled"),
        ("second_0", "sound", "compiled"),
    ]


def test_a_backend_that_others_prefer_too_comes_no_earlier_for_it() -> None:
    gm = two_regions()
    common, own = faulty.Sound(), Counting()
    lowered = lower(gm, {"first": common, "second": [own, common]}, cache=False)
    assert [r.backend for r in dovetail.regions(lowered)] == ["sound", "counting"]


def test_equal_bodies_that_are_declared_to_be_different_things_are_compiled_as_such() -> None:
    class Scales(faulty.Sound):
        name = "scales"

        def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
            compiled.append((region.kind, region.attrs))
            return region.body

    compiled: list[Any] = []

    def twice(x: Tensor) -> Tensor:
        return torch.relu(torch.relu(x) * 2) * 2

    gm = dovetail.capture(twice, (torch.ones(3),))
    gm = dovetail.outline(gm, ["relu", "mul"], kind="scale", attrs={"by": "first"})
    gm = dovetail.outline(gm, ["relu_1", "mul_1"], kind="scale", attrs={"by": "second"})
    lower(gm, Scales(), cache=False)
    assert compiled == [("scale", {"by": "first"}), ("scale", {"by": "second"})]
