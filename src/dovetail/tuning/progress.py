"""Progress of a search: a live display on a terminal, plain lines when piped."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from dovetail.ir.text_tables import format_seconds
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.measuring import Progress
from dovetail.tuning.trial import Trial

_LINE_SECONDS = 10.0
_LOG = logging.getLogger("dovetail")


class _Counts:
    """What both displays show."""

    def __init__(self, budget: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget, self.clock, self.start = budget, clock, clock()
        self.phase, self.total, self.finished = "", 0, 0
        self.trials = self.failures = self.stored = 0
        self.best_label, self.best_seconds = "", 0.0

    def begin(self, phase: str, trials: int) -> None:
        self.phase, self.total, self.finished = phase, trials, 0

    def done(self, trial: Trial, measurement: Measurement, *, is_stored: bool) -> None:
        self.finished += 1
        self.trials += not is_stored
        self.stored += is_stored
        self.failures += bool(measurement.failure) and not is_stored
        if measurement.failure and not is_stored:
            _LOG.info("trial %s failed: %s", trial.subject.kind, measurement.failure)

    def best(self, label: str, seconds: float) -> None:
        self.best_label, self.best_seconds = label, seconds

    def __str__(self) -> str:
        best = (
            f"best {format_seconds(self.best_seconds)} ({self.best_label})"
            if self.best_label
            else "no program yet"
        )
        left = max(0.0, self.budget - (self.clock() - self.start))
        stored = f", {self.stored} from the store" if self.stored else ""
        return (
            f"{self.phase} {self.finished}/{self.total} | {best} | {self.trials} trials{stored}, "
            f"{self.failures} failures | {left:.0f} s left"
        )


class Lines(_Counts):
    """Writes a line when a phase begins, when the best program changes, and now and then."""

    def __init__(self, budget: float, stream: TextIO | None = None) -> None:
        super().__init__(budget)
        self._stream, self._written = stream or sys.stderr, 0.0

    def begin(self, phase: str, trials: int) -> None:
        super().begin(phase, trials)
        if trials:
            self._write()

    def done(self, trial: Trial, measurement: Measurement, *, is_stored: bool) -> None:
        super().done(trial, measurement, is_stored=is_stored)
        if self.clock() - self._written > _LINE_SECONDS:
            self._write()

    def best(self, label: str, seconds: float) -> None:
        changed = label != self.best_label
        super().best(label, seconds)
        if changed:
            self._write()

    def end(self) -> None:
        self._write()

    def _write(self) -> None:
        self._written = self.clock()
        print(f"dovetail.tune: {self}", file=self._stream, flush=True)


class Terminal(_Counts):
    """A line of Rich that is updated in place."""

    def __init__(self, budget: float) -> None:
        super().__init__(budget)
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._text: Any = Text  # labels are not markup
        self._live: Any = Live("", console=Console(stderr=True), refresh_per_second=4, transient=False)
        self._live.start()

    def begin(self, phase: str, trials: int) -> None:
        super().begin(phase, trials)
        self._live.update(self._text(str(self)))

    def done(self, trial: Trial, measurement: Measurement, *, is_stored: bool) -> None:
        super().done(trial, measurement, is_stored=is_stored)
        self._live.update(self._text(str(self)))

    def best(self, label: str, seconds: float) -> None:
        super().best(label, seconds)
        self._live.update(self._text(str(self)))

    def end(self) -> None:
        self._live.update(self._text(str(self)))
        self._live.stop()


def make_progress(left: float) -> Progress:
    """Return the display for this process, of so many seconds that are left: live on a terminal, else lines."""
    return Terminal(left) if sys.stderr.isatty() else Lines(left)
