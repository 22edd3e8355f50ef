"""Wrong subjects, measurements and times."""

import math
from typing import Any

import pytest

from dovetail.errors import InvalidArgument
from dovetail.tuning.store import Measurement, Store, Subject
from tests.tuning.helpers import BODY, DONE, HERE


@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan, "1", None, True])
def test_leases_last_a_positive_time(store: Store, seconds: Any) -> None:
    with pytest.raises(InvalidArgument, match="how long a lease lasts"):
        store.acquire(BODY, HERE, seconds=seconds)
    lease = store.acquire(BODY, HERE, seconds=1)
    assert lease is not None
    with pytest.raises(InvalidArgument, match="how long a lease lasts"):
        lease.renew(seconds)


@pytest.mark.parametrize("timeout", [-1, math.nan, "1", None])
def test_waiting_has_a_time(store: Store, timeout: Any) -> None:
    with pytest.raises(InvalidArgument, match="timeout is a number of seconds"):
        store.wait(BODY, HERE, timeout=timeout)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"samples": ()}, "has samples or a failure"),
        ({"failure": "failed"}, "has samples or a failure"),
        ({"samples": (math.nan,)}, "samples are seconds"),
        ({"samples": (math.inf,)}, "samples are seconds"),
        ({"samples": (-0.1,)}, "samples are seconds"),
        ({"samples": ("1",)}, "samples are seconds"),
        ({"compile_seconds": -1}, "compile_seconds are seconds"),
        ({"numeric_error": "small"}, "numeric_error is a number"),
        ({"peak_bytes": 1.5}, "peak_bytes is a number of bytes"),
        ({"peak_bytes": 2**63}, "peak_bytes is a number of bytes"),
        ({"details": [1]}, "details is a dict"),
        ({"details": {1: 2}}, "the key 1 is not text"),
        ({"details": {"a": [{True: 2}]}}, "the key True is not text"),
        ({"details": {"a": math.nan}}, "details are JSON values"),
        ({"details": {"a": object()}}, "details are JSON values"),
    ],
)
def test_wrong_measurements_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        Measurement(**{"samples": (0.1,), **values})


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("kind", "", "a kind and a key"),
        ("key", "", "a kind and a key"),
        ("operands", None, "Subject.operands is text"),
        ("backend", "a\0b", "Subject.backend is text"),
        ("key", "\ud800", "Subject.key is text"),
        ("mode", "eval", "'inference' or 'training'"),
    ],
)
def test_wrong_subjects_are_refused(field: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        Subject(**{**vars(BODY), field: value})


def test_a_lease_is_completed_with_a_measurement(store: Store) -> None:
    lease = store.acquire(BODY, HERE, seconds=1)
    assert lease is not None
    with pytest.raises(InvalidArgument, match="with a Measurement, not tuple"):
        lease.complete((0.1,))  # type: ignore[arg-type]
    assert lease.complete(DONE)
