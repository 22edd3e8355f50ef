"""Progress of a search: what is counted, which lines are written when, and the live display of a terminal."""

import io
import logging
import sys
from typing import Any

import pytest
import rich.console

from dovetail.tuning.measurement import Measurement
from dovetail.tuning.progress import Lines, Terminal, make_progress
from dovetail.tuning.trial import OperationsTrial
from tests.tuning.helpers import DONE, FAILED, FakeClock

TRIAL = OperationsTrial("inference", "a1b2", "f32[2, 8]")


class Timed(Lines):
    """Lines of a clock that stands still, and what was written since they were last asked for."""

    def __init__(self, clock: FakeClock, budget: float = 60.0) -> None:
        self.stream = io.StringIO()
        super().__init__(budget, self.stream)
        self.clock, self.start = clock, clock.now

    def finish(self, measurement: Measurement = DONE, *, is_stored: bool = False) -> None:
        self.done(TRIAL, measurement, is_stored=is_stored)

    def written(self) -> list[str]:
        text = self.stream.getvalue()
        self.stream.truncate(0)
        self.stream.seek(0)
        return text.splitlines()


def test_a_phase_begins_with_a_line(clock: FakeClock) -> None:
    lines = Timed(clock)
    lines.begin("baselines", 3)
    assert lines.written() == [
        "dovetail.tune: baselines 0/3 | no program yet | 0 trials, 0 failures | 60 s left"
    ]
    clock.now += 2.4
    lines.finish()
    lines.begin("whole blocks", 7)
    assert lines.written() == [
        "dovetail.tune: whole blocks 0/7 | no program yet | 1 trials, 0 failures | 58 s left"
    ]


def test_a_phase_without_trials_has_no_line(clock: FakeClock) -> None:
    lines = Timed(clock)
    lines.begin("boundaries", 0)
    assert lines.written() == []


def test_trials_have_a_line_at_most_every_ten_seconds(clock: FakeClock) -> None:
    lines = Timed(clock)
    lines.begin("regions", 100)
    lines.written()
    counts: list[int] = []
    for _ in range(25):
        clock.now += 1
        lines.finish()
        counts.append(len(lines.written()))
    # The line of the phase was written at 0 s, and one of a trial is due after more than ten seconds.
    assert [i + 1 for i, count in enumerate(counts) if count] == [11, 22]
    assert set(counts) == {0, 1}


def test_any_line_puts_off_the_next_one(clock: FakeClock) -> None:
    lines = Timed(clock)
    lines.begin("regions", 100)
    clock.now += 9
    lines.best("no passes", 1e-3)
    assert len(lines.written()) == 2
    clock.now += 9
    lines.finish()
    assert lines.written() == []
    clock.now += 2
    lines.finish()
    assert lines.written() == [
        "dovetail.tune: regions 2/100 | best 1 ms (no passes) | 2 trials, 0 failures | 40 s left"
    ]


def test_a_new_best_program_has_a_line_and_the_same_one_again_has_none(clock: FakeClock) -> None:
    lines = Timed(clock)
    lines.begin("programs", 2)
    lines.written()
    lines.best("eager", 2.5e-3)
    assert lines.written() == [
        "dovetail.tune: programs 0/2 | best 2.5 ms (eager) | 0 trials, 0 failures | 60 s left"
    ]
    lines.best("eager", 2.4e-3)
    assert lines.written() == []
    lines.best("torch.compile", 8e-4)
    assert lines.written() == [
        "dovetail.tune: programs 0/2 | best 800 µs (torch.compile) | 0 trials, 0 failures | 60 s left"
    ]


def test_failures_and_stored_results_are_counted(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dovetail")
    lines = Timed(clock)
    lines.begin("regions", 5)
    lines.finish()
    lines.finish(FAILED)
    lines.finish(DONE, is_stored=True)
    # A failure that is in the store is not one of this search.
    lines.finish(FAILED, is_stored=True)
    lines.written()
    lines.end()
    assert lines.written() == [
        "dovetail.tune: regions 4/5 | no program yet | 2 trials, 2 from the store, 1 failures | 60 s left"
    ]
    assert caplog.messages == ["trial operations failed: no kernel for aten::foo"]


def test_time_that_is_over_is_not_negative(clock: FakeClock) -> None:
    lines = Timed(clock, budget=5)
    clock.now += 7
    lines.end()
    assert lines.written()[0].endswith("| 0 s left")


def test_lines_are_written_where_standard_error_is_piped(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make_progress(30.0)
    assert isinstance(progress, Lines)
    progress.begin("baselines", 1)
    progress.done(TRIAL, DONE, is_stored=False)
    progress.end()
    written = capsys.readouterr()
    assert written.out == ""
    assert [line.split(" | ")[0] for line in written.err.splitlines()] == [
        "dovetail.tune: baselines 0/1",
        "dovetail.tune: baselines 1/1",
    ]


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal of Rich shows, which takes the place of standard error."""
    shown, make = io.StringIO(), rich.console.Console

    def fake(**options: Any) -> rich.console.Console:
        assert options == {"stderr": True}
        return make(file=shown, force_terminal=True, width=200, color_system=None)

    monkeypatch.setattr("rich.console.Console", fake)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    return shown


def test_a_terminal_has_one_live_line_that_ends(console: io.StringIO) -> None:
    before = sys.stdout, sys.stderr
    progress = make_progress(30.0)
    assert isinstance(progress, Terminal)
    progress.begin("regions", 2)
    progress.done(TRIAL, DONE, is_stored=False)
    progress.best("no passes", 1e-3)
    progress.done(TRIAL, FAILED, is_stored=False)
    progress.end()
    assert not progress._live.is_started
    assert (sys.stdout, sys.stderr) == before
    last = console.getvalue().splitlines()[-2]
    assert "regions 2/2 | best 1 ms (no passes) | 2 trials, 1 failures | 30 s left" in last
    # Nothing is drawn afterwards by the thread that refreshes it.
    length = len(console.getvalue())
    progress.best("eager", 2e-3)
    assert len(console.getvalue()) == length


@pytest.mark.parametrize("label", ["inductor(fallbacks=[true])", "the graph of [/models/a]"])
def test_brackets_of_a_label_are_displayed_as_they_are(console: io.StringIO, label: str) -> None:
    progress = Terminal(30.0)
    try:
        progress.best(label, 1e-3)
        progress.end()
    finally:
        progress._live._live_render.set_renderable("")
        progress._live.stop()
    assert label in console.getvalue()
