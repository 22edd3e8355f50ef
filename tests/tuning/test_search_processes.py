"""Searches that are killed or share a store, in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def outcome(case: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.tuning.synthetic_processes", case, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
def test_a_search_that_is_killed_again_and_again_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    happened = outcome("kills", tmp_path)
    assert happened["kills"] == 20
    assert happened["repeated"] <= happened["kills"]
    assert happened["stores are equal"]
    assert happened["plans are equal"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_and_four_processes_reach_the_same_plan_and_measure_nothing_twice(tmp_path: Path) -> None:
    happened = outcome("workers", tmp_path)
    assert happened["plans"] == 1
    distinct = happened["by1"][0]
    for name in ("by1", "by2", "by4"):
        assert happened[name] == [distinct, distinct]
