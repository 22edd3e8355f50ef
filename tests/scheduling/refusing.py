"""A refused step, and what it must leave behind."""

from collections.abc import Callable
from typing import Any

import pytest

from dovetail.errors import ScheduleError
from dovetail.scheduling.schedule import Schedule


def refused(
    s: Schedule, reason: str, step: Callable[[], Any], error: type[Exception] = ScheduleError
) -> None:
    """A step that raises, and a schedule that is as it was."""
    before, steps = s.text(), len(s.history)
    with pytest.raises(error, match=reason):
        step()
    assert s.text() == before
    assert len(s.history) == steps
