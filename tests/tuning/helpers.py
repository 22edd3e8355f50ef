"""Subjects, results and a clock that tests of the store share."""

import uuid
from typing import Any

from dovetail.tuning.environment import Environment
from dovetail.tuning.store import Measurement, Store, Subject

HERE = Environment("cpu: test", "", "2.13.0", "3.11.7", 1, (("onnxruntime", "1.31.1"),))
THERE = Environment("cpu: test", "", "2.14.0", "3.11.7", 1, ())
BODY = Subject("body", "a1b2", "f32[2, 8]", "inductor 2.13.0 {}", "inference")
DONE = Measurement((0.25, 0.125))
FAILED = Measurement((), failure="no kernel for aten::foo")


def new_environment() -> Environment:
    """Return an environment of its own, as a store without measurements for each example of a test."""
    return Environment(f"cpu: {uuid.uuid4()}", "", "2.13.0", "3.11.7", 1, ())


def body(number: int) -> Subject:
    return Subject("body", f"key{number}", "f32[2]", "eager", "inference")


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def measured(
    store: Store, subject: Subject, measurement: Measurement, environment: Environment = HERE
) -> None:
    lease = store.acquire(subject, environment, seconds=10)
    assert lease is not None
    assert lease.complete(measurement)


def scalar(store: Store, query: str) -> Any:
    return store.transact(lambda connection: connection.exec_driver_sql(query).scalar())
