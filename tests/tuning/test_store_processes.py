"""The store between processes: each subject measured once, workers killed at any moment, stores across a fork."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the workers are forked")


def run(case: str, tmp_path: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "error", "-m", "tests.tuning.workers", case, str(tmp_path / "store.db")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_of_many_processes_one_measures_each_subject(tmp_path: Path) -> None:
    result = run("contend", tmp_path)
    assert result["codes"] == [0] * 8
    assert Counter(event for event, *_ in result["events"]) == {"begin": 50, "complete": 50}
    assert {key: samples[0] for key, samples in result["stored"].items()} == {
        key: value for event, key, value in result["events"] if event == "begin"
    }
    assert result["integrity"] == "ok"


def test_killed_workers_lose_what_they_were_measuring_and_nothing_else(tmp_path: Path) -> None:
    result = run("kill", tmp_path)
    # A worker that comes late may end before it is killed.
    assert set(result["codes"]) <= {-signal.SIGKILL, 0}
    assert result["codes"].count(-signal.SIGKILL) > 5
    assert len(result["stored"]) == 50
    assert result["integrity"] == "ok"
    completed: dict[str, float] = {}
    begun: Counter[str] = Counter()
    for event, key, value in result["events"]:
        if event == "begin":
            assert key not in completed, "a subject was measured again"
            begun[key] += 1
        else:
            completed[key] = value
    assert {key: result["stored"][key][0] for key in completed} == completed
    # Each worker held one lease when it died: beyond that, every subject was measured once.
    assert sum(begun.values()) <= 50 + 20


def test_a_store_can_be_used_after_a_fork(tmp_path: Path) -> None:
    result = run("fork", tmp_path)
    assert result["codes"] == [0, 0]
    assert result["stored"] == {"key0": [2.0], "key1": [1.0], "key2": [3.0]}
    assert result["integrity"] == "ok"
