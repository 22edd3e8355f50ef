"""The store of measurements in one process: round trips, leases, waiting."""

import json
import math
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.errors import StoreError
from dovetail.tuning.store import Measurement, Store, Subject
from tests.tuning.helpers import BODY, DONE, FAILED, HERE, THERE, FakeClock, body, measured, new_environment

# Round trips


def bits(measurement: Measurement) -> list[bytes]:
    values = [*measurement.samples, measurement.compile_seconds]
    if measurement.numeric_error is not None:
        values.append(measurement.numeric_error)
    return [struct.pack("<d", value) for value in values]


SECONDS = st.floats(min_value=0.0, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
REST: dict[str, Any] = {
    "numeric_error": st.none() | st.floats(allow_nan=False),
    "peak_bytes": st.none() | st.integers(0, 2**63 - 1),
    "compile_seconds": SECONDS,
    "details": st.dictionaries(st.text(), VALUES, max_size=4),
}
RESULTS = st.builds(Measurement, st.lists(SECONDS, min_size=1).map(tuple), **REST) | st.builds(
    Measurement, st.just(()), failure=st.text(min_size=1), **REST
)


@given(results=st.lists(RESULTS, min_size=1, max_size=4))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_measurements_come_back_bit_for_bit(store: Store, results: list[Measurement]) -> None:
    environment = new_environment()
    for number, result in enumerate(results):
        measured(store, body(number), result, environment)
        again = store.get(body(number), environment)
        assert again == result
        assert bits(again) == bits(result)
        assert json.dumps(again.details, sort_keys=True) == json.dumps(result.details, sort_keys=True)


@pytest.mark.parametrize("error", [math.inf, -0.0, 5e-324])
def test_unusual_numeric_errors_come_back(store: Store, error: float) -> None:
    measured(store, BODY, Measurement((0.1,), numeric_error=error))
    again = store.get(BODY, HERE)
    assert again is not None
    assert str(again.numeric_error) == str(error)


def test_a_numeric_error_of_nan_comes_back(store: Store) -> None:
    measured(store, BODY, Measurement((0.1,), numeric_error=math.nan))
    again = store.get(BODY, HERE)
    assert again is not None
    assert again.numeric_error is not None
    assert math.isnan(again.numeric_error)


def test_a_failure_is_a_result_with_its_reason(store: Store) -> None:
    measured(store, BODY, FAILED)
    assert store.get(BODY, HERE) == FAILED
    assert store.acquire(BODY, HERE, seconds=10) is None


def test_text_that_no_database_holds_is_escaped(store: Store) -> None:
    failed = Measurement((), failure="a\0b\udc80", details={"a\0b": "\0\udc80"})
    assert failed.failure == "a\\x00b\\udc80"
    measured(store, BODY, failed)
    again = store.get(BODY, HERE)
    assert again == failed
    assert again.details == {"a\0b": "\0\udc80"}


def test_long_text_and_large_numbers_come_back(store: Store) -> None:
    subject = Subject(
        "body", "k" * 10_000, "f32[2]" * 10_000, "'\\%s %(x)s :name \x7f ü \U0001f600", "training"
    )
    lasting = Measurement(
        (1e-308, 1.7976931348623157e308),
        peak_bytes=2**63 - 1,
        details={"log": "x\n" * 1_000_000, "huge": 2**200, "least": -(2**63)},
    )
    measured(store, subject, lasting)
    assert list(store.results(HERE)) == [(subject, lasting)]


def test_results_are_kept_apart_by_environment(store: Store) -> None:
    measured(store, BODY, DONE)
    assert store.get(BODY, THERE) is None
    lease = store.acquire(BODY, THERE, seconds=10)
    assert lease is not None
    assert list(store.results(THERE)) == []
    assert store.environments() == tuple(sorted((HERE, THERE), key=lambda e: e.key))


def test_results_have_the_same_order_in_every_store(
    store: Store, new_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.tuning.store._PAGE", 4)
    subjects = [body(n) for n in range(12)]
    with Store(new_url()) as other:
        for one, two in zip(subjects, reversed(subjects), strict=True):
            measured(store, one, DONE)
            measured(other, two, DONE)
        ordered = sorted(subjects, key=lambda subject: subject.digest)
        assert [s for s, _ in other.results(HERE)] == [s for s, _ in store.results(HERE)] == ordered


def test_results_are_filtered_by_kind(store: Store) -> None:
    program = Subject("program", "p", "", "eager", "training")
    measured(store, BODY, DONE)
    measured(store, program, FAILED)
    assert list(store.results(HERE, kind="program")) == [(program, FAILED)]
    assert list(store.results(HERE, kind="pair")) == []


def test_digests_are_the_same_in_every_release() -> None:
    assert BODY.digest == "706485fffcdd8ca19de82ac95885a38d"
    assert (
        len({BODY.digest, Subject("body", "a1b2", "", "f32[2, 8]inductor 2.13.0 {}", "inference").digest})
        == 2
    )


def test_rows_are_readable_on_the_command_line(store: Store) -> None:
    measured(store, BODY, Measurement((0.1, 2.5e-05), numeric_error=1e-07))
    query = "SELECT kind, backend, status, samples, numeric_error FROM tuning_measurements"
    average = {
        "sqlite": "SELECT avg(value) FROM tuning_measurements, json_each(samples)",
        "postgresql": "SELECT avg(value::float) FROM tuning_measurements, json_array_elements_text(samples::json) value",
    }

    def read(connection: sa.Connection) -> tuple[tuple[Any, ...], float]:
        row = connection.exec_driver_sql(query).one()
        return tuple(row), connection.exec_driver_sql(average[connection.dialect.name]).scalar_one()

    row, mean = store.transact(read)
    assert row == ("body", "inductor 2.13.0 {}", "measured", "[0.1,2.5e-05]", "1e-07")
    assert mean == pytest.approx(0.0500125)


# Leases


def test_one_worker_gets_the_lease(store: Store) -> None:
    lease = store.acquire(BODY, HERE, seconds=10)
    assert lease is not None
    assert store.acquire(BODY, HERE, seconds=10) is None
    assert store.get(BODY, HERE) is None
    assert lease.complete(DONE)
    assert store.acquire(BODY, HERE, seconds=10) is None
    assert store.get(BODY, HERE) == DONE


def test_a_lease_expires(store: Store, clock: FakeClock) -> None:
    assert store.acquire(BODY, HERE, seconds=10) is not None
    clock.now += 9.5
    assert store.acquire(BODY, HERE, seconds=10) is None
    clock.now += 0.5
    lease = store.acquire(BODY, HERE, seconds=10)
    assert lease is not None
    assert lease.attempt == 2


def test_a_renewed_lease_lasts_longer(store: Store, clock: FakeClock) -> None:
    lease = store.acquire(BODY, HERE, seconds=10)
    assert lease is not None
    clock.now += 9
    assert lease.renew(10)
    clock.now += 9
    assert store.acquire(BODY, HERE, seconds=10) is None
    clock.now += 2  # expired, but nobody has taken it
    assert lease.renew(10)
    assert store.acquire(BODY, HERE, seconds=10) is None


def test_a_lease_is_released_unless_it_was_completed(store: Store) -> None:
    first = store.acquire(BODY, HERE, seconds=10)
    assert first is not None
    with pytest.raises(KeyboardInterrupt), first:
        raise KeyboardInterrupt
    second = store.acquire(BODY, HERE, seconds=10)
    assert second is not None
    assert second.attempt == 1
    with second:
        second.complete(DONE)
    assert store.get(BODY, HERE) == DONE


def test_the_first_of_two_measurements_is_kept(store: Store, clock: FakeClock) -> None:
    stale = store.acquire(BODY, HERE, seconds=10)
    clock.now += 11
    fresh = store.acquire(BODY, HERE, seconds=10)
    assert stale is not None
    assert fresh is not None
    assert not stale.renew(10)
    assert fresh.complete(DONE)
    assert not stale.complete(FAILED)
    assert store.get(BODY, HERE) == DONE


def test_a_measurement_after_expiry_is_not_lost(store: Store, clock: FakeClock) -> None:
    slow = store.acquire(BODY, HERE, seconds=10)
    clock.now += 11
    other = store.acquire(BODY, HERE, seconds=10)
    assert slow is not None
    assert other is not None
    assert slow.complete(DONE)
    assert not other.renew(10)
    assert not other.complete(FAILED)
    assert store.get(BODY, HERE) == DONE


def test_releasing_a_stale_lease_leaves_the_new_one(store: Store, clock: FakeClock) -> None:
    stale = store.acquire(BODY, HERE, seconds=10)
    clock.now += 11
    assert stale is not None
    assert store.acquire(BODY, HERE, seconds=10) is not None
    stale.release()
    assert store.acquire(BODY, HERE, seconds=10) is None


def test_a_lease_is_used_once(store: Store) -> None:
    lease = store.acquire(BODY, HERE, seconds=10)
    assert lease is not None
    lease.complete(DONE)
    lease.release()
    for again in (lambda: lease.complete(DONE), lambda: lease.renew(1)):
        with pytest.raises(StoreError, match="it was completed or released"):
            again()


def test_an_error_of_the_store_does_not_hide_the_error_of_the_measurement(new_url: Callable[[], str]) -> None:
    store = Store(new_url())
    lease = store.acquire(BODY, HERE, seconds=10)
    assert lease is not None
    with pytest.raises(ZeroDivisionError), lease:
        raise ZeroDivisionError(store.close())
    other = Store(new_url())
    lease = other.acquire(BODY, HERE, seconds=10)
    assert lease is not None
    with pytest.raises(StoreError, match="is closed"), lease:
        other.close()


def test_waiting_ends_with_the_measurement(url: str) -> None:
    with Store(url) as store:
        lease = store.acquire(BODY, HERE, seconds=60)
        assert lease is not None
        timer = threading.Timer(0.1, lease.complete, [DONE])
        timer.start()
        assert store.wait(BODY, HERE, timeout=30) == DONE
        timer.join()


def test_waiting_ends_when_nobody_measures(url: str) -> None:
    with Store(url) as store:
        assert store.wait(BODY, HERE, timeout=30) is None
        assert store.acquire(BODY, HERE, seconds=0.1) is not None
        start = time.monotonic()
        assert store.wait(BODY, HERE, timeout=30) is None
        assert time.monotonic() - start < 20
        assert store.acquire(BODY, HERE, seconds=60) is not None
        assert store.wait(BODY, HERE, timeout=0.05) is None


def test_waiting_reads_seldom(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(url) as store:
        assert store.acquire(BODY, HERE, seconds=100) is not None
        pauses: list[float] = []
        elapsed = [0.0]

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            elapsed[0] += seconds

        monkeypatch.setattr(time, "sleep", sleep)
        monkeypatch.setattr(time, "monotonic", lambda: elapsed[0])
        assert store.wait(BODY, HERE, timeout=60) is None
    assert len(pauses) < 140
    assert max(pauses) <= 1.0


def in_threads(store: Store) -> None:
    counts: list[int] = []

    def work() -> None:
        leases = [store.acquire(body(n), HERE, seconds=60) for n in range(20)]
        counts.append(sum(lease is not None and lease.complete(DONE) for lease in leases))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == 20


def test_threads_share_a_store(store: Store) -> None:
    in_threads(store)


def test_threads_share_a_store_in_memory() -> None:
    with Store("sqlite://") as store:
        in_threads(store)


# Transactions that are run again


def repeated(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each transaction be run twice, as after a commit whose acknowledgement was lost."""
    transact = store.transact

    def twice(work: Any, **options: Any) -> Any:
        transact(work, **options)
        return transact(work, **options)

    monkeypatch.setattr(store, "transact", twice)


def test_a_transaction_that_was_committed_can_be_run_again(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = store.acquire(BODY, HERE, seconds=10)
    clock.now += 11
    repeated(store, monkeypatch)
    fresh = store.acquire(BODY, HERE, seconds=10)
    assert stale is not None
    assert fresh is not None
    assert fresh.attempt == 2
    assert fresh.renew(10)
    assert not stale.renew(10)
    fresh.release()
    first = store.acquire(BODY, HERE, seconds=10)
    assert first is not None
    assert first.attempt == 2
    assert first.complete(DONE)
    assert not stale.complete(FAILED)
    assert store.get(BODY, HERE) == DONE
    assert store.acquire(BODY, HERE, seconds=10) is None


def test_a_lease_that_expired_before_the_transaction_is_run_again_is_extended(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    transact = store.transact

    def twice(work: Any, **options: Any) -> Any:
        transact(work, **options)
        clock.now += 20
        return transact(work, **options)

    with monkeypatch.context() as patch:
        patch.setattr(store, "transact", twice)
        lease = store.acquire(BODY, HERE, seconds=10)
    assert lease is not None
    assert lease.attempt == 1
    assert store.acquire(BODY, HERE, seconds=10) is None


def test_a_transaction_that_raises_changes_nothing(store: Store) -> None:
    def fail(connection: Any) -> None:
        connection.exec_driver_sql("DELETE FROM tuning_measurements")
        raise ZeroDivisionError

    measured(store, BODY, DONE)
    with pytest.raises(ZeroDivisionError):
        store.transact(fail, write=True)
    assert store.get(BODY, HERE) == DONE
