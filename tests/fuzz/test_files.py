"""Hundreds of mutated files, the same ones each time, and proof that a file which does harm would be caught."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from random import Random
from typing import Any

import pytest

from dovetail.formats.archive import container, load

from . import files, jobs
from .archives import mutant, originals
from .files import BadFile, hunt_file

FILES = 400


def test_mutated_files_are_opened_or_refused() -> None:
    counts: Counter[str] = Counter()
    for number in range(FILES):
        failure = hunt_file(Random(f"0/files/{number}"), counts)
        assert failure is None, f"file {number}: {failure.signature}"
    # Mutations that are all refused for one reason, or change nothing, would prove little.
    assert counts["refused"] > FILES // 2
    assert counts["opened"] > FILES // 20
    assert all(
        counts[level] > FILES // 50 for level in ("bytes", "zip", "header", "graph", "config", "tensors")
    )


def test_what_is_not_mutated_is_opened() -> None:
    for data in originals():
        assert files._failure("none", data, counts := Counter()) is None
        assert counts["opened"] == 1


def test_mutations_follow_from_the_seed() -> None:
    assert mutant(Random("7")) == mutant(Random("7"))
    assert len({mutant(Random(f"{n}"))[1] for n in range(20)}) == 20


# Mistakes planted into the loader.


def _raises(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(load, "InvalidFile", KeyError)
    return "KeyError"


def _hangs(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(files, "SECONDS", 0.1)
    monkeypatch.setattr(container.Archive, "_parsed", lambda *_: [None for _ in iter(int, 1)])
    return "too long"


def _waits(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(files, "WAITING", 0.1)
    monkeypatch.setattr(container.Archive, "_parsed", lambda *_: time.sleep(60))
    return "too long"


def _grows(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(files, "BYTES", 2**25)
    held: list[bytes] = []
    honest = json.loads
    monkeypatch.setattr(json, "loads", lambda *a, **k: (held.append(b"x" * 2**27), honest(*a, **k))[1])
    return "too much memory"


@pytest.mark.parametrize("mistake", [_raises, _hangs, _waits, _grows])
def test_a_loader_that_does_harm_is_caught(monkeypatch: pytest.MonkeyPatch, mistake: Any) -> None:
    originals()
    which = mistake(monkeypatch)
    findings = (hunt_file(Random(f"0/files/{n}"), Counter()) for n in range(60))
    failure = next((f for f in findings if f is not None), None)
    assert isinstance(failure, BadFile)
    assert failure.which == which


# Trials in several processes. They are functions of a module, for a process to find them.


def _start(options: argparse.Namespace) -> jobs.Trial:
    def trial(i: int, counts: Counter[str], known: dict[str, Any]) -> Any:
        counts["odd"] += i % 2
        counts["most MiB"] = max(counts["most MiB"], i)
        if i == options.dies:
            os._exit(9)
        if i % 10 == 3:
            return BadFile("none", b"", "bad", "")
        return None

    return trial


def _tally(count: int, number: int, dies: int = -1) -> jobs.Tally:
    options = argparse.Namespace(seed="0", seconds=0, dies=dies)
    reports = list(jobs.spread(_start, options, count, number))
    tally = reports[-1][0]
    assert sorted(finding.signature for _, new in reports for finding in new) == sorted(tally.findings)
    return tally


def test_trials_are_the_same_in_any_number_of_processes() -> None:
    alone, shared = _tally(40, 1), _tally(40, 2)
    assert (
        (alone.done, dict(alone.counts))
        == (shared.done, dict(shared.counts))
        == (40, {"odd": 20, "most MiB": 39})
    )
    assert alone.findings["bad"].times == shared.findings["bad"].times == 4


@pytest.mark.long
def test_a_process_that_dies_is_a_failure_of_its_trial() -> None:
    tally = _tally(12, 2, dies=5)
    assert [f.label for f in tally.findings.values() if "died" in f.signature] == ["0/5"]
    # The trials after it are done by another process.
    assert tally.counts["most MiB"] == 11
