"""Trials in worker processes: results, crashes, hangs and wrong values."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dovetail.errors import InvalidArgument
from dovetail.tuning.executor import Executor, InProcess, LocalExecutor
from dovetail.tuning.store import Store
from dovetail.tuning.trial import (
    BlockDivision,
    DivisionsTrial,
    OperationsTrial,
    ProgramSpec,
    ProgramTrial,
    RegionTrial,
)
from dovetail.tuning.tune import Prepared, prepare, run_search
from tests.tuning.failing_backends import Crashes, ExhaustsMemory, Hangs, IsWrong, Raises, Works
from tests.tuning.synthetic import Chain

BACKENDS = [Works(), Raises(), Crashes(), Hangs(), IsWrong(), ExhaustsMemory()]


@pytest.fixture(scope="module")
def ready() -> Prepared:
    torch.manual_seed(0)
    return prepare(Chain().eval(), (torch.randn(4, 8),), None, BACKENDS)


@pytest.fixture(scope="module")
def executor(ready: Prepared) -> Iterator[LocalExecutor]:
    running = LocalExecutor(ready.tuned, ready.backends)
    for space in ready.space.blocks.values():
        running.add_block(space.block)
    yield running
    running.close()


def region_trial(ready: Prepared, backend: str) -> RegionTrial:
    key = next(iter(ready.space.states[0].blocks))
    space = ready.space.blocks[key]
    number = next(i for i, c in enumerate(space.candidates) if len(c.units) > 1)
    candidate = space.candidates[number]
    choice = next(c for c in space.backends[number] if c.name == backend)
    return RegionTrial("inference", key, candidate.choice, candidate.key, "", choice, backend)


def test_operations_and_a_region_are_measured(ready: Prepared, executor: LocalExecutor) -> None:
    key = next(iter(ready.space.states[0].blocks))
    operations = executor.measure(OperationsTrial("inference", key, ""), 60)
    assert operations is not None
    assert not operations.failure
    rows = operations.details["operations"]
    assert isinstance(rows, list)
    assert len(rows) == len(ready.space.blocks[key].block.units)
    region = executor.measure(region_trial(ready, "works"), 60)
    assert region is not None
    assert not region.failure
    assert region.numeric_error == 0.0
    assert len(region.samples) >= 3


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("raises", "no kernel for this"),
        ("crashes", "SIGABRT"),
        ("is_wrong", "is_wrong"),
        ("exhausts_memory", "exhausts_memory"),
    ],
)
def test_a_failure_has_its_reason_and_the_next_trial_runs(
    ready: Prepared, executor: LocalExecutor, backend: str, reason: str
) -> None:
    failed = executor.measure(region_trial(ready, backend), 60)
    assert failed is not None
    assert not failed.samples
    assert reason in failed.failure
    worked = executor.measure(region_trial(ready, "works"), 60)
    assert worked is not None
    assert worked.samples


def test_a_trial_that_hangs_is_stopped(ready: Prepared, executor: LocalExecutor) -> None:
    assert executor.measure(region_trial(ready, "hangs"), 2.0) is None
    worked = executor.measure(region_trial(ready, "works"), 60)
    assert worked is not None
    assert worked.samples


def test_a_division_that_fails_leaves_the_others(ready: Prepared, executor: LocalExecutor) -> None:
    good, bad = region_trial(ready, "works"), region_trial(ready, "raises")
    divisions = tuple(BlockDivision(((t.region, t.backend),)) for t in (good, bad))
    measured = executor.measure(DivisionsTrial("inference", good.block, "", divisions, ""), 60)
    assert measured is not None
    assert measured.samples
    assert set(measured.details["divisions"]) == {"0"}  # type: ignore[arg-type]
    assert "no kernel" in measured.details["failures"]["1"]  # type: ignore[index, call-overload, operator]


def test_the_model_itself_is_a_program(ready: Prepared, executor: LocalExecutor) -> None:
    measured = executor.measure(ProgramTrial("inference", "m", "", ProgramSpec("eager", "eager"), ""), 60)
    assert measured is not None
    assert measured.samples
    assert measured.numeric_error == 0.0


class Local(nn.Module):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.act = lambda x: torch.relu(x)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


def test_a_model_that_cannot_be_sent_is_an_error_of_the_executor() -> None:
    ready = prepare(Local().eval(), (torch.randn(4, 8),), None, [Works()])
    with pytest.raises(InvalidArgument, match="the model cannot be sent to another process"):
        LocalExecutor(ready.tuned, ready.backends)
    inline: Executor = InProcess(ready.tuned, ready.backends)
    for space in ready.space.blocks.values():
        inline.add_block(space.block)
    measured = inline.measure(region_trial(ready, "works"), 60)
    assert measured is not None
    assert measured.samples


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_search_with_backends_that_fail_ends_with_one_that_works(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ready = prepare(Chain().eval(), (torch.randn(4, 8),), None, [Works(), Raises(), Crashes(), IsWrong()])
    with Store(tmp_path / "store.db") as store:
        searched = run_search(ready, store, budget=150, progress=False)
        failures = [m.failure for _, m in store.results(ready.environment) if m.failure]
    assert any("SIGABRT" in f for f in failures)
    assert searched.outcome is not None
    text = searched.plan.to_json()
    for name in ("raises", "crashes", "is_wrong"):
        assert f'"name": "{name}"' not in text
    assert searched.outcome.is_confirmed
