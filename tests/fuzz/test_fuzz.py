"""Thousands of random programs, the same ones each time, and proof that what is broken would be caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from dovetail.ir import dependencies
from dovetail.ir.dependencies import Dependencies
from dovetail.outlining import escapes, outline
from dovetail.scheduling import call_recording
from dovetail.scheduling.session import ScheduleSession

from .hunt import FailedCase, draw, hunt

PROGRAMS = {
    "pure": 250,
    "memory": 350,
    "reshapes": 150,
    "world": 300,
    "modules": 250,
    "sizes": 180,
    "everything": 250,
    "nested": 150,
    "traced": 40,
    "fused": 180,
    "captured": 50,
    "scheduled": 12,
}
SCHEDULED = 400  # each of them is captured several times, which takes most of a second


@pytest.mark.parametrize("flavour", PROGRAMS)
def test_random_programs(flavour: str) -> None:
    counts = _counted(flavour, PROGRAMS[flavour])
    # A run in which little was outlined would prove little.
    assert counts["with regions"] > PROGRAMS[flavour] // 3


@pytest.mark.long
def test_many_schedules() -> None:
    counts = _counted("scheduled", SCHEDULED)
    assert counts["with regions"] > SCHEDULED // 4
    assert counts["refused"] < counts["stages"] // 2


def _counted(flavour: str, programs: int) -> Counter[str]:
    """Hunt through as many programs, and fail at the first failure."""
    counts: Counter[str] = Counter()
    for i in range(programs):
        failure = hunt(lambda i=i: draw(Random(f"{flavour}/{i}"), flavour), counts)
        if failure is not None:
            pytest.fail(f"{failure.which}: {failure.words}\n\n{failure.script}", pytrace=False)
    return counts


def test_there_are_two_thousand_programs() -> None:
    assert sum(PROGRAMS.values()) >= 2000


# The properties must be able to fail: each of these mistakes is one that an outliner could make.


# Mistakes planted into the outliner, each into the function that would have it.


def _no_effect_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Callable[..., Dependencies] = dependencies.dependencies

    def blind(*args: Any) -> Dependencies:
        return replace(honest(*args), before={})

    monkeypatch.setattr(dependencies, "dependencies", blind)


def _clones_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(escapes, "_clone_obstacle", lambda *_: "")


def _loses_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    member = outline._Builder._member

    def forgetful(self: Any, *args: Any) -> Any:
        return member(self, *args)._replace(meta={})

    monkeypatch.setattr(outline._Builder, "_member", forgetful)


def _returns_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_escapes = escapes.resolve_escapes

    def stingy(at: Any, draft: Any) -> None:
        resolve_escapes(at, draft)
        del draft.outputs[1:]

    monkeypatch.setattr(outline, "resolve_escapes", stingy)


@pytest.mark.parametrize(
    ("mistake", "flavour", "caught_by"),
    [
        (_no_effect_edges, "memory", "values"),
        (_no_effect_edges, "world", "values"),
        (_clones_anything, "world", "values"),
        (_loses_meta, "pure", "inline"),
        (_returns_too_little, "pure", "crash"),
    ],
)
def test_a_broken_outliner_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[pytest.MonkeyPatch], None],
    flavour: str,
    caught_by: str,
) -> None:
    mistake(monkeypatch)
    failure = _first_failure(flavour, programs=400, seconds=0)
    assert failure is not None
    assert failure.which.startswith(caught_by)


def _undoes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ScheduleSession, "undo", lambda self, count: [self.completed.pop().entry for _ in range(count)]
    )


def _keeps_buffers_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_recording, "isolated_run", lambda model: nullcontext())


@pytest.mark.parametrize(
    ("mistake", "caught_by"),
    [(_undoes_nothing, ("undo", "after undo")), (_keeps_buffers_changed, ("after", "released", "replay"))],
)
def test_a_broken_schedule_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[pytest.MonkeyPatch], None],
    caught_by: tuple[str, ...],
) -> None:
    mistake(monkeypatch)
    failure = _first_failure("scheduled", programs=40, seconds=5)
    assert failure is not None
    assert failure.which.startswith(caught_by)
    assert "verify_schedule(" in failure.script


def test_a_failure_is_a_script_that_shows_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    _clones_anything(monkeypatch)
    failure = _first_failure("world", programs=400, seconds=10)
    assert failure is not None
    assert len(failure.case.program.steps) <= 8
    # With the mistake undone the script runs, and finds nothing different.
    monkeypatch.undo()
    path = tmp_path / "reproducer.py"
    path.write_text(failure.script)
    finished = _run(path)
    assert "DIFFERENT" not in finished
    assert finished.count("same") >= 5


def _first_failure(flavour: str, programs: int, seconds: float) -> FailedCase | None:
    failures = (
        hunt(lambda i=i: draw(Random(i), flavour), Counter(), seconds=seconds) for i in range(programs)
    )
    return next((failure for failure in failures if failure is not None), None)


def _run(path: Any) -> str:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout
