"""Measuring within a budget: results come from the store, or are leased, measured and stored.

Any number of processes may tune with one store: what one of them has leased, another waits for after it has done all the
rest. A measurement that the budget cuts short is not stored, so that it can be taken another time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable
from typing import Protocol

from dovetail.tuning.environment import Environment
from dovetail.tuning.executor import Executor
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.store import Store
from dovetail.tuning.trial import Trial

TRIAL_SECONDS = 180.0
"""What a trial may take; beyond it hangs."""
_LEASE_MARGIN = 30.0


class Progress(Protocol):
    """What is reported while a search runs."""

    def begin(self, phase: str, trials: int) -> None: ...

    def done(self, trial: Trial, measurement: Measurement, *, is_stored: bool) -> None: ...

    def best(self, label: str, seconds: float) -> None: ...

    def end(self) -> None: ...


class Silent:
    """Reports nothing."""

    def begin(self, phase: str, trials: int) -> None: ...

    def done(self, trial: Trial, measurement: Measurement, *, is_stored: bool) -> None: ...

    def best(self, label: str, seconds: float) -> None: ...

    def end(self) -> None: ...


class Measurer:
    """Takes measurements until a deadline, by the store and an executor."""

    def __init__(
        self,
        store: Store,
        environment: Environment,
        executor: Executor,
        *,
        budget: float,
        progress: Progress | None = None,
        trial_seconds: float = TRIAL_SECONDS,
        lease_margin: float = _LEASE_MARGIN,
        clock: Callable[[], float] = time.monotonic,
        start: float | None = None,
    ) -> None:
        self.store, self.environment, self.executor = store, environment, executor
        self.progress: Progress = progress or Silent()
        self.budget, self.clock = budget, clock
        self.start = clock() if start is None else start
        self.measured = self.reused = self.failures = self.compilations = 0
        self.interrupted = False
        self._trial_seconds, self._lease_margin = trial_seconds, lease_margin
        self._results: dict[str, Measurement] = {}

    @property
    def elapsed(self) -> float:
        return self.clock() - self.start

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until a share of the budget is used."""
        return share * self.budget - self.elapsed

    @contextlib.contextmanager
    def until_interrupted(self) -> Generator[None]:
        """End a part of the search at an interrupt of the user; what was measured before is used."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True
            self.executor.restart()

    def get(self, trial: Trial) -> Measurement | None:
        """Return the result of a trial if there is one."""
        key = trial.subject.digest
        if key not in self._results:
            stored = self.store.get(trial.subject, self.environment)
            if stored is None:
                return None
            self._results[key] = stored
        return self._results[key]

    def measure(self, phase: str, trials: Iterable[Trial], *, share: float = 1.0) -> None:
        """Take the measurements of trials that have none, in order, while there is time."""
        waiting = list({trial.subject.digest: trial for trial in trials}.values())
        self.progress.begin(phase, len(waiting))
        leased: list[Trial] = []
        for trial in waiting:
            if not self._take(trial, share):
                leased.append(trial)
        for trial in leased:
            self._wait(trial, share)

    def _take(self, trial: Trial, share: float) -> bool:
        """Measure a trial unless that is done; return False if another process is at it."""
        known = self.get(trial)
        if known is not None:
            self.reused += 1
            self.progress.done(trial, known, is_stored=True)
            return True
        if self.interrupted or self.left(share) <= 0:
            return True
        timeout = min(self._trial_seconds, max(1.0, self.left(1.05)))
        lease = self.store.acquire(trial.subject, self.environment, seconds=timeout + self._lease_margin)
        if lease is None:
            return self.get(trial) is not None
        with lease:
            result = self.executor.measure(trial, timeout)
            if result is None and timeout < self._trial_seconds:
                return True
            is_final = result is not None or timeout >= TRIAL_SECONDS
            if result is None:
                reason = f"it took longer than {timeout:.0f} s and was stopped"
                result = Measurement((), failure=reason, compile_seconds=timeout)
            # One that a search with a larger budget would give more time is not stored.
            if is_final and not lease.complete(result):
                result = self.store.get(trial.subject, self.environment) or result
        self.measured += 1
        self.compilations += trial.compilations
        self.failures += bool(result.failure)
        self._results[trial.subject.digest] = result
        self.progress.done(trial, result, is_stored=False)
        return True

    def _wait(self, trial: Trial, share: float) -> None:
        """Wait for a measurement of another process; take it if that process has died."""
        while self.left(share) > 0 and not self.interrupted:
            stored = self.store.wait(trial.subject, self.environment, timeout=max(0.0, self.left(share)))
            if stored is not None:
                self._results[trial.subject.digest] = stored
                self.progress.done(trial, stored, is_stored=True)
                return
            if self._take(trial, share):
                return
