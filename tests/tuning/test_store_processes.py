"""The store between processes: each subject measured once, workers killed at any moment, stores across a fork."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.postgresql_server import Server

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the workers are forked")


def start(case: str, folder: Path, url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-m", "tests.tuning.workers", case, str(folder), url]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out)


def run(case: str, folder: Path, url: str) -> dict[str, Any]:
    return result_of(start(case, folder, url))


def test_of_many_processes_one_measures_each_subject(tmp_path: Path, url: str) -> None:
    result = run("contend", tmp_path, url)
    assert result["codes"] == [0] * (8 if url.startswith("sqlite:") else 32)
    assert Counter(event for event, *_ in result["events"]) == {"begin": 25, "complete": 25}
    assert {key: samples[0] for key, samples in result["stored"].items()} == {
        key: value for event, key, value in result["events"] if event == "begin"
    }
    assert result["integrity"] == "ok"


def test_a_server_that_fails_loses_no_measurement_and_doubles_none(
    tmp_path: Path, postgresql: Server
) -> None:
    process = start("outage", tmp_path, postgresql.url())
    try:
        wait_for_events(process, tmp_path, 10)
        others = "pid <> pg_backend_pid() AND application_name = 'dovetail'"
        (ended,) = postgresql.execute(
            f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {others}"
        )
        assert ended[0] == 8
        wait_for_events(process, tmp_path, 30)
        postgresql.stop()
        events = (tmp_path / "log").read_text().count("\n")
        postgresql.start()
        result = result_of(process)
    finally:
        process.kill()
    assert events < 100
    assert result["codes"] == [0] * 8
    assert Counter(event for event, *_ in result["events"]) == {"begin": 50, "complete": 50}
    assert {key: samples[0] for key, samples in result["stored"].items()} == {
        key: value for event, key, value in result["events"] if event == "begin"
    }


def wait_for_events(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    log = folder / "log"
    while not log.exists() or log.read_text().count("\n") < count:
        assert process.poll() is None, result_of(process)
        time.sleep(0.01)


def test_killed_workers_lose_what_they_were_measuring_and_nothing_else(tmp_path: Path, url: str) -> None:
    result = run("kill", tmp_path, url)
    assert result["codes"] == [-signal.SIGKILL] * 20
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


def test_a_store_can_be_used_after_a_fork(tmp_path: Path, url: str) -> None:
    result = run("fork", tmp_path, url)
    assert result["codes"] == [0, 0]
    assert result["stored"] == {"key0": [2.0], "key1": [1.0], "key2": [3.0]}
    assert result["integrity"] == "ok"


def test_the_lease_of_a_process_that_has_ended_is_free_at_once(tmp_path: Path, url: str) -> None:
    result = run("ended", tmp_path, url)
    assert result["codes"] == [-signal.SIGKILL]
    assert result["while it ran"] == [False, True]
    assert result["after"] == {"waited": None, "attempt": 2}
    # Not at the end of its time, nor of the lease.
    assert result["seconds"] < 60
