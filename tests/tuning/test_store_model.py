"""Sequences of acquire, complete, renew, release and expiry against a model: a dict with a clock."""

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.tuning.store import Lease, Measurement, Store
from tests.tuning.helpers import FakeClock, body, new_environment

SUBJECTS = [body(n) for n in range(2)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "acquire", "complete", "renew", "release", "wait", "advance"]),
        st.integers(0, 5),
        st.integers(1, 4),
    ),
    max_size=24,
)


@dataclass
class Row:
    """What is known of a subject: its result, or who holds its lease until when, and how many leases were lost."""

    result: Measurement | None = None
    holder: Lease | None = None
    expires: float = 0.0
    attempts: int = 0


@given(steps=STEPS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_store_behaves_like_a_dict_with_a_clock(
    store: Store, clock: FakeClock, steps: list[tuple[str, int, int]]
) -> None:
    here = new_environment()
    model = {subject: Row() for subject in SUBJECTS}
    leases: list[Lease] = []
    for number, (action, which, seconds) in enumerate(steps):
        if action == "advance":
            clock.now += seconds
        elif action in ("acquire", "wait"):
            subject = SUBJECTS[which % len(SUBJECTS)]
            row = model[subject]
            is_free = row.result is None and row.expires <= clock.now
            if action == "wait":
                assert store.wait(subject, here, timeout=0) == row.result
                continue
            lease = store.acquire(subject, here, seconds=seconds)
            assert (lease is not None) == is_free
            if lease is not None:
                row.attempts += 1
                row.holder, row.expires = lease, clock.now + seconds
                assert lease.attempt == row.attempts
                leases.append(lease)
        elif leases:
            lease = leases[which % len(leases)]
            row = model[lease.subject]
            if action == "complete":
                result = Measurement((float(number),))
                assert lease.complete(result) == (row.result is None)
                row.result = row.result or result
            elif action == "renew":
                is_held = row.result is None and row.holder is lease
                assert lease.renew(seconds) == is_held
                row.expires = clock.now + seconds if is_held else row.expires
            else:
                lease.release()
                if row.result is None and row.holder is lease:
                    row.holder, row.expires, row.attempts = None, clock.now, row.attempts - 1
            if action != "renew":
                leases.remove(lease)
        for subject, row in model.items():
            assert store.get(subject, here) == row.result
    completed = {subject: row.result for subject, row in model.items() if row.result is not None}
    assert dict(store.results(here)) == completed
