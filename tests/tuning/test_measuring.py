"""Measuring within a budget: what is stored, what is tried again, and whose result counts."""

from collections.abc import Iterator

import pytest

from dovetail.tuning.block import Block
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.measuring import TRIAL_SECONDS, Measurer
from dovetail.tuning.store import Store
from dovetail.tuning.trial import OperationsTrial, Trial
from tests.tuning.helpers import HERE

TRIAL = OperationsTrial("inference", "key", "float32[2]")


class Scripted:
    """Gives one result after the other; None for a trial that was stopped."""

    def __init__(self, *results: Measurement | None) -> None:
        self.results = list(results)
        self.restarts = 0

    def add_block(self, block: Block) -> None: ...

    def measure(self, trial: Trial, timeout: float) -> Measurement | None:
        return self.results.pop(0)

    def restart(self) -> None:
        self.restarts += 1

    def close(self) -> None: ...


@pytest.fixture
def memory() -> Iterator[Store]:
    with Store("sqlite://") as opened:
        yield opened


def test_a_trial_that_a_small_budget_stopped_is_tried_again_with_a_larger_one(memory: Store) -> None:
    small = Measurer(memory, HERE, Scripted(None), budget=40.0, trial_seconds=12.0)
    small.measure("phase", [TRIAL])
    stopped = small.get(TRIAL)
    assert stopped is not None
    assert "longer than 12 s" in stopped.failure
    assert memory.get(TRIAL.subject, HERE) is None
    large = Measurer(memory, HERE, Scripted(Measurement((0.5,))), budget=4000.0)
    large.measure("phase", [TRIAL])
    assert large.get(TRIAL) == Measurement((0.5,))


def test_a_trial_that_hung_is_not_waited_for_again_within_the_same_time(memory: Store) -> None:
    Measurer(memory, HERE, Scripted(None), budget=40.0, trial_seconds=12.0).measure("phase", [TRIAL])
    again = Measurer(memory, HERE, Scripted(), budget=40.0, trial_seconds=12.0)
    again.measure("phase", [TRIAL])
    stopped = again.get(TRIAL)
    assert stopped is not None
    assert "longer than 12 s" in stopped.failure
    assert (again.measured, again.reused, again.failures) == (0, 1, 1)
    shorter = Measurer(memory, HERE, Scripted(), budget=40.0, trial_seconds=5.0)
    shorter.measure("phase", [TRIAL])
    assert shorter.get(TRIAL) == stopped


def test_a_trial_that_takes_longer_than_any_may_is_a_failure_for_good(memory: Store) -> None:
    measurer = Measurer(memory, HERE, Scripted(None), budget=40.0 * TRIAL_SECONDS)
    measurer.measure("phase", [TRIAL])
    stored = memory.get(TRIAL.subject, HERE)
    assert stored is not None
    assert "was stopped" in stored.failure


def test_the_result_that_another_worker_stored_first_counts(memory: Store) -> None:
    class Slow(Scripted):
        def measure(self, trial: Trial, timeout: float) -> Measurement | None:
            # Its lease expires meanwhile, and another worker completes the same trial.
            memory._clock = lambda: 1e12  # type: ignore[assignment]
            lease = memory.acquire(trial.subject, HERE, seconds=10)
            assert lease is not None
            assert lease.complete(Measurement((2.0,)))
            return super().measure(trial, timeout)

    measurer = Measurer(memory, HERE, Slow(Measurement((1.0,))), budget=100.0)
    measurer.measure("phase", [TRIAL])
    assert measurer.get(TRIAL) == Measurement((2.0,))


def test_an_interrupt_ends_the_part_it_is_in_and_gives_the_lease_back(memory: Store) -> None:
    class Interrupted(Scripted):
        def measure(self, trial: Trial, timeout: float) -> Measurement | None:
            raise KeyboardInterrupt

    executor = Interrupted()
    measurer = Measurer(memory, HERE, executor, budget=100.0)
    with measurer.until_interrupted():
        measurer.measure("phase", [TRIAL])
    assert measurer.interrupted
    assert executor.restarts == 1
    assert memory.acquire(TRIAL.subject, HERE, seconds=10) is not None
