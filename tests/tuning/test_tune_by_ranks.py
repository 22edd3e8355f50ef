"""Ranks of a process group have one plan: rank 0's, or the same fallback; errors of its search reach all of them."""

import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dovetail
from dovetail.tuning.plan import Plan
from tests.runtime.rank_groups import Net, rank_groups
from tests.tuning.helpers import HERE

pytest.importorskip("sqlalchemy")

tune_module: Any = importlib.import_module("dovetail.tuning.tune")
PLAN = Path(__file__).parents[2] / "examples" / "llama.plan.json"
X = torch.randn(4, 8)


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    with rank_groups(dist.HashStore(), 3) as each:
        yield each


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The searches that are run, each of which has the plan of the examples."""
    begun: list[str] = []

    def search(*_: Any, **__: Any) -> Any:
        begun.append("search")
        return SimpleNamespace(plan=Plan.load(PLAN))

    monkeypatch.setattr(tune_module, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(tune_module, "run_search", search)
    return begun


def tuned(group: Any, **options: Any) -> Any:
    options = {"budget": 0.1, "rank_timeout": 0.1, "progress": False, **options}
    return dovetail.tune(options.pop("model", None) or Net().eval(), (X,), process_group=group, **options)


def test_only_rank_0_searches(groups: list[Any], searches: list[str]) -> None:
    plans = [tuned(group).to_json() for group in groups]
    assert set(plans) == {Plan.load(PLAN).to_json()}
    assert searches == ["search"]
    # The next call is another one.
    tuned(groups[0])
    assert searches == ["search"] * 2


def test_ranks_that_gave_up_and_a_late_rank_0_have_the_empty_plan(
    groups: list[Any], searches: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dovetail"):
        plans = [tuned(groups[rank]) for rank in (2, 0, 1)]
    assert plans == [Plan()] * 3
    assert not searches
    reason = "rank 0 has not decided within 0.2 s"
    assert caplog.messages == [
        f"rank {rank} has no plan of rank 0 but an empty one: {reason}" for rank in (2, 0, 1)
    ]


def test_a_plan_that_comes_too_late_is_that_of_no_rank(
    groups: list[Any], searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []
    in_time: Callable[..., Any] = tune_module.run_search

    def late(*args: Any, **options: Any) -> Any:
        plans.append(tuned(groups[1]))
        return in_time(*args, **options)

    monkeypatch.setattr(tune_module, "run_search", late)
    assert [tuned(groups[0]), *plans] == [Plan()] * 2
    assert searches == ["search"]


@pytest.mark.parametrize(
    "error", [dovetail.TuningError("no program runs"), KeyboardInterrupt(), MemoryError("too large")]
)
def test_what_ends_the_search_reaches_every_rank(
    groups: list[Any], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def prepare(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(tune_module, "prepare", prepare)
    with pytest.raises(type(error)):
        tuned(groups[0])
    for group in groups[1:]:
        with pytest.raises(
            dovetail.TuningError, match=f"there is no plan: rank 0 raised {type(error).__name__}"
        ):
            tuned(group)


def test_ranks_with_other_models_are_refused(groups: list[Any], searches: list[str]) -> None:
    tuned(groups[0])
    with pytest.raises(
        dovetail.TuningError, match=r"different models: rank 0 .*process group of its own"
    ) as refused:
        tuned(groups[1], model=Net(3).eval(), rank_timeout=60.0)
    assert "a Net of 560 weights in eval mode" in str(refused.value)
    assert tuned(groups[2]) == Plan.load(PLAN)


def test_a_rank_that_refuses_a_call_is_in_step_in_the_next_one(
    groups: list[Any], searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(groups[0])
    with pytest.raises(dovetail.InvalidArgument, match="budget -1"):
        tuned(groups[1], budget=-1)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(dovetail.InvalidArgument, match=r"under torch\.autocast"),
    ):
        tuned(groups[2])
    plan = Plan().with_decisions("inference", HERE)
    monkeypatch.setattr(tune_module, "run_search", lambda *_, **__: SimpleNamespace(plan=plan))
    assert [tuned(group) for group in groups] == [plan] * 3


def test_what_rank_0_refuses_reaches_every_rank(groups: list[Any], searches: list[str]) -> None:
    with pytest.raises(dovetail.InvalidArgument, match="seed"):
        tuned(groups[0], seed=-1)
    for group in groups[1:]:
        with pytest.raises(
            dovetail.TuningError, match=r"there is no plan: rank 0 raised InvalidArgument: seed -1"
        ):
            tuned(group)


def test_a_dry_run_is_each_ranks_own(groups: list[Any]) -> None:
    dry = tuned(groups[1], dry_run=True, backends=["torchscript"])
    assert isinstance(dry, tune_module.DryRun)


def test_a_store_that_is_gone_leaves_the_defaults(searches: list[str]) -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False)
    with rank_groups(client, 2) as groups:
        del server
        assert tuned(groups[0]) == tuned(groups[1]) == Plan()


@pytest.mark.long
def test_a_measured_plan_is_applied_by_all(groups: list[Any], tmp_path: Path) -> None:
    plans = [
        tuned(group, budget=20.0, backends=["torchscript"], store=tmp_path / "store.db") for group in groups
    ]
    assert len({plan.to_json() for plan in plans}) == 1
    assert plans[0].graphs
    model = Net().eval()
    with torch.no_grad():
        for group, plan in zip(groups, plans, strict=True):
            fast = dovetail.compile(model, (X,), plan=plan, process_group=group, cache=tmp_path / "cache")
            torch.testing.assert_close(fast(X), model(X))
            assert not [event for event in fast.diagnostics if event.kind == "unplanned"]
