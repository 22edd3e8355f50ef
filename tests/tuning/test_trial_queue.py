"""The queue of trials in a store: what workers take, in which order, and what is left when searches or workers end."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from dovetail.errors import TuningError
from dovetail.tuning import store as store_module
from dovetail.tuning.decisions import BackendChoice
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.store import Store
from dovetail.tuning.store_schema import FILES, SEARCHES, TRIALS, WORKERS
from dovetail.tuning.trial import BoundaryTrial
from dovetail.tuning.trial_queue import OPEN_SECONDS, OpenSearch, QueuedTrial, TrialQueue
from tests.tuning.synthetic import HERE


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


TRIALS_OF = {
    number: BoundaryTrial("inference", (number,), "float32", "cpu", None, BackendChoice("a"), "a")
    for number in range(6)
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(url: str, clock: Clock) -> Iterator[TrialQueue]:
    with Store(url, clock=clock) as store:
        yield TrialQueue(store)


def publish(queue: TrialQueue, search: str, *numbers: int, is_fresh: bool = False) -> None:
    trials = [TRIALS_OF[n] for n in numbers]
    queue.publish(search, trials, timeout=5.0, trial_seconds=60.0, is_fresh=is_fresh)


def taken(queue: TrialQueue) -> QueuedTrial | None:
    """Take a trial, as a worker that never completes it."""
    result = queue.take(queue.searches())
    return None if result is None else result[0]


def shape(queued: QueuedTrial | None) -> int | None:
    return None if queued is None else queued.trial.shape[0]  # type: ignore[attr-defined]


def test_trials_are_taken_in_order_and_each_once(queue: TrialQueue, clock: Clock) -> None:
    first = queue.open(HERE, "first")
    clock.now += 1
    second = queue.open(HERE, "second")
    publish(queue, second, 3)
    publish(queue, first, 0, 1)
    publish(queue, first, 2, is_fresh=True)
    order = [taken(queue) for _ in range(5)]
    assert [shape(each) for each in order] == [0, 1, 2, 3, None]
    assert [each.is_fresh for each in order if each] == [False, False, True, False]
    assert [each.search.label for each in order if each] == ["first"] * 3 + ["second"]


def test_a_trial_that_is_measured_is_not_taken(queue: TrialQueue) -> None:
    lease = queue.store.acquire(TRIALS_OF[0].subject, HERE, seconds=9)
    assert lease is not None
    lease.complete(Measurement((1.0,)))
    search = queue.open(HERE, "search")
    publish(queue, search, 0, 1)
    assert shape(taken(queue)) == 1


def test_the_trial_of_a_worker_that_died_is_taken_again(queue: TrialQueue, clock: Clock) -> None:
    publish(queue, queue.open(HERE, "search"), 0)
    assert taken(queue) is not None
    clock.now += queue.lease_seconds - 1
    assert taken(queue) is None
    clock.now += 2
    again = queue.take(queue.searches())
    assert again is not None
    assert again[1].attempt == 2


def test_the_lease_of_a_process_that_has_ended_does_not_delay_a_trial(
    queue: TrialQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(queue, queue.open(HERE, "search"), 0)
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "worker_name", lambda: "gone")
        assert taken(queue) is not None
    clock.now += 11  # its claim
    assert taken(queue) is None
    monkeypatch.setattr("dovetail.tuning.trial_queue.has_ended", lambda worker: worker == "gone")
    monkeypatch.setattr(store_module, "has_ended", lambda worker: worker == "gone")
    assert shape(taken(queue)) == 0


def test_a_released_trial_is_taken_again_after_its_claim(queue: TrialQueue, clock: Clock) -> None:
    publish(queue, queue.open(HERE, "search"), 0)
    result = queue.take(queue.searches())
    assert result is not None
    result[1].release()
    assert taken(queue) is None
    clock.now += 11
    assert shape(taken(queue)) == 0


def test_withdrawing_what_is_free_leaves_what_is_measured(queue: TrialQueue) -> None:
    search = queue.open(HERE, "search")
    publish(queue, search, 0, 1)
    running = taken(queue)
    assert running is not None
    queue.withdraw(search, only_free=True)
    assert queue.remaining(search) == {TRIALS_OF[0].subject.digest: False}
    assert queue.is_queued(running)
    queue.withdraw(search)
    assert queue.remaining(search) == {}
    assert not queue.is_queued(running)


def test_a_trial_without_result_is_marked_and_not_taken_again(queue: TrialQueue, clock: Clock) -> None:
    search = queue.open(HERE, "search")
    publish(queue, search, 0, 1)
    stopped = taken(queue)
    assert stopped is not None
    queue.finish(stopped, has_result=False)
    assert queue.remaining(search)[TRIALS_OF[0].subject.digest]
    clock.now += 60
    queue.renew(search)
    assert shape(taken(queue)) == 1
    assert taken(queue) is None


def test_a_trial_is_published_once(queue: TrialQueue) -> None:
    search = queue.open(HERE, "search")
    publish(queue, search, 0)
    publish(queue, search, 0, 1)
    assert [shape(taken(queue)) for _ in range(3)] == [0, 1, None]


def test_a_search_that_is_not_renewed_ends_and_is_removed(
    queue: TrialQueue, clock: Clock, tmp_path: Path
) -> None:
    dead = queue.open(HERE, "dead")
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    queue.add_file(dead, file)
    queue.report(dead, "worker")
    publish(queue, dead, 0)
    running = taken(queue)
    assert running is not None
    clock.now += OPEN_SECONDS + 1
    assert queue.searches() == []
    assert not queue.is_queued(running)
    alive = queue.open(HERE, "alive")
    assert [each.label for each in queue.searches()] == ["alive"]
    with pytest.raises(TuningError, match="Start it again"):
        publish(queue, dead, 1)
    queue.close(alive)
    for table in (SEARCHES, FILES, TRIALS, WORKERS):
        count = sa.select(sa.func.count()).select_from(table)
        assert queue.store.transact(lambda c, q=count: c.execute(q).scalar()) == 0


def test_files_come_back_in_parts(queue: TrialQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.tuning.trial_queue._PART_BYTES", 3)
    search = queue.open(HERE, "search")
    for name, data in {"empty": b"", "exact": b"abcdef", "rest": b"abcdefg\0"}.items():
        source, target = tmp_path / name, tmp_path / f"{name}.read"
        source.write_bytes(data)
        queue.add_file(search, source)
        assert queue.read_file(search, name, target)
        assert target.read_bytes() == data
    assert not queue.read_file(search, "absent", tmp_path / "absent")
    assert not list(tmp_path.glob("absent*"))


def test_workers_are_returned_with_their_refusals_while_they_are_seen(
    queue: TrialQueue, clock: Clock
) -> None:
    search = queue.open(HERE, "search")
    queue.report(search, "b", "torch 2.11.0, was 2.13.0")
    queue.report(search, "a")
    assert [(w.worker, w.refusal) for w in queue.workers(search)] == [
        ("a", ""),
        ("b", "torch 2.11.0, was 2.13.0"),
    ]
    clock.now += 50
    queue.report(search, "b")
    clock.now += 50
    assert [(w.worker, w.refusal) for w in queue.workers(search)] == [("b", "")]


def test_searches_have_their_environment(queue: TrialQueue) -> None:
    name = queue.open(HERE, "a label")
    assert queue.searches() == [OpenSearch(name, "a label", HERE)]


def test_a_store_of_the_first_version_gets_the_queue(url: str) -> None:
    with Store(url) as store:

        def downgrade(connection: sa.Connection) -> None:
            for table in (SEARCHES, FILES, TRIALS, WORKERS):
                table.drop(connection)
            connection.exec_driver_sql("UPDATE tuning_schema SET version = 1")

        store.transact(downgrade, write=True)
    with Store(url) as store:
        queue = TrialQueue(store)
        publish(queue, queue.open(HERE, "search"), 0)
        assert shape(taken(queue)) == 0
