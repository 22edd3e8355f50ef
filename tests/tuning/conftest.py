"""A store on disk whose clock stands still."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.tuning.store import Store
from tests.tuning.helpers import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
    with Store(tmp_path / "store.db", clock=clock) as opened:
        yield opened
