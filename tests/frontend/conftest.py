"""Fixtures of the tests of capture."""

import pytest

from dovetail import config
from dovetail.frontend import export

from .replayed import Replays


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    """Replay layers, and count those that were replayed."""
    recorded = Replays()
    monkeypatch.setattr(config, "replay_layers", True)
    monkeypatch.setattr(export, "LayerReplay", recorded)
    return recorded
