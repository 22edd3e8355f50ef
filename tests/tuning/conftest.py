"""Stores on each database, with a clock that stands still."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from dovetail.tuning.store import Store
from tests.tuning.helpers import FakeClock
from tests.tuning.postgresql_server import Server, binaries, running_server


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """A server for the tests of this process."""
    folder = binaries()
    if folder is None:
        pytest.skip("PostgreSQL is not installed")
    with running_server(folder) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Return URLs of databases without tables: files, and schemas of a server."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgresql").url
    numbers = count(1)
    return lambda: f"sqlite:///{tmp_path}/store{next(numbers)}.db"


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    return new_url()


@pytest.fixture
def store(url: str, clock: FakeClock) -> Iterator[Store]:
    with Store(url, clock=clock) as opened:
        yield opened
