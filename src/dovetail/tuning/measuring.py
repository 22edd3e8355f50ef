"""Measuring within a budget: results come from the store, or are leased, measured and stored.

Any number of processes may tune with one store: what one of them has leased, another waits for after it has done all the
rest. A measurement that the budget cuts short is not stored, so that it can be taken another time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, cast

from dovetail.errors import TuningError
from dovetail.tuning.environment import Environment
from dovetail.tuning.executor import Executor
from dovetail.tuning.measurement import Measurement, Subject
from dovetail.tuning.queue_executor import QueueExecutor
from dovetail.tuning.store import Lease, Store
from dovetail.tuning.trial import Trial

TRIAL_SECONDS = 180.0
"""What a trial may take; beyond it hangs."""
_LEASE_MARGIN = 30.0
_LOG = logging.getLogger("dovetail")
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5


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
        executor: Executor | QueueExecutor,
        *,
        budget: float,
        progress: Progress | None = None,
        trial_seconds: float = TRIAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        start: float | None = None,
    ) -> None:
        self.store, self.environment = store, environment
        self.executor: Executor | QueueExecutor = executor
        self.progress: Progress = progress or Silent()
        self.budget, self.clock = budget, clock
        self.start = clock() if start is None else start
        self.measured = self.reused = self.failures = self.compilations = 0
        self.interrupted = False
        self._trial_seconds = trial_seconds
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
        self._measure_all(waiting, share)

    def _measure_all(self, trials: Sequence[Trial], share: float) -> None:
        if isinstance(self.executor, QueueExecutor):
            self._await_all(trials, share, self.executor)
            return
        leased = [trial for trial in trials if not self._take(trial, share)]
        for trial in leased:
            self._wait(trial, share)

    def _await_all(self, trials: Sequence[Trial], share: float, executor: QueueExecutor) -> None:
        """Have trials measured by workers; after the share, wait for those only that are being measured."""
        timeout = self._timeout()
        waiting = {
            trial.subject.digest: trial
            for trial in trials
            if not self._is_known(trial) and not self._has_hung(trial, timeout)
        }
        if not waiting or self.interrupted or self.left(share) <= 0:
            return
        executor.publish(list(waiting.values()), timeout, self._trial_seconds)
        since, is_late = time.monotonic(), False
        try:
            while waiting:
                try:
                    executor.supervise()
                except TuningError as error:
                    if not self.measured:
                        raise
                    _LOG.warning("the search ends with the best so far: %s", str(error).removesuffix("."))
                    self.interrupted = True
                    return
                remaining = executor.remaining()
                subjects = [trial.subject for trial in waiting.values()]
                results = self.store.get_all(subjects, self.environment)
                for digest in list(waiting):
                    if digest in results:
                        self._count(waiting.pop(digest), results[digest])
                    elif remaining.get(digest, True):
                        trial = waiting.pop(digest)
                        hung = self._hung(trial, timeout)
                        if hung is not None:
                            self._count(trial, hung)
                if self.left(1.05) <= 0:
                    return
                if self.left(share) <= 0 and not is_late:
                    is_late = True
                    executor.withdraw(only_free=True)
                since = time.monotonic() if results else since
                time.sleep(pause_after(time.monotonic() - since))
        finally:
            executor.withdraw()

    def _take(self, trial: Trial, share: float) -> bool:
        """Measure a trial unless that is done; return False if another process is at it."""
        if self._is_known(trial):
            return True
        if self.interrupted or self.left(share) <= 0:
            return True
        timeout = self._timeout()
        if self._has_hung(trial, timeout):
            return True
        lease = self.store.acquire(trial.subject, self.environment, seconds=timeout + _LEASE_MARGIN)
        if lease is None:
            return self.get(trial) is not None
        with lease:
            result = cast("Executor", self.executor).measure(trial, timeout)
            stored = store_result(lease, trial, result, timeout, self._trial_seconds)
        if stored is not None:
            self._count(trial, stored)
        return True

    def _timeout(self) -> float:
        return min(self._trial_seconds, max(1.0, self.left(1.05)))

    def _is_known(self, trial: Trial) -> bool:
        """Return whether a trial is measured; then that is counted."""
        known = self.get(trial)
        if known is None:
            return False
        self.reused += 1
        self.progress.done(trial, known, is_stored=True)
        return True

    def _has_hung(self, trial: Trial, timeout: float) -> bool:
        """Return whether a trial took at least this long before; then that is its result."""
        hung = self._hung(trial, timeout)
        if hung is None:
            return False
        self.reused += 1
        self.failures += 1
        self._results[trial.subject.digest] = hung
        self.progress.done(trial, hung, is_stored=True)
        return True

    def _count(self, trial: Trial, result: Measurement) -> None:
        """Count a result that was measured for this search."""
        self.measured += 1
        self.compilations += trial.compilations
        self.failures += bool(result.failure)
        self._results[trial.subject.digest] = result
        self.progress.done(trial, result, is_stored=False)

    def _hung(self, trial: Trial, timeout: float) -> Measurement | None:
        """Return the stored failure of a trial that took at least this long; a search with more time tries it again."""
        first, last = _power_of_two(timeout), _power_of_two(TRIAL_SECONDS)
        subjects = (_hang_subject(trial, power) for power in range(first, last + 1))
        return next(filter(None, (self.store.get(s, self.environment) for s in subjects)), None)

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


def pause_after(waited: float) -> float:
    """Return how long to pause after so many seconds of waiting: a tenth of them, within limits.

    What is waited for is then seen soon in comparison with the wait, at a number of looks that grows with its logarithm.
    """
    return min(max(_SHORTEST_PAUSE, 0.1 * waited), _LONGEST_PAUSE)


def store_result(
    lease: Lease, trial: Trial, result: Measurement | None, timeout: float, trial_seconds: float
) -> Measurement | None:
    """Store what came of a trial, None for one that was stopped after `timeout`; return what counts as its result.

    A trial that the budget stopped, earlier than after `trial_seconds`, has no result. One that took longer than these is
    stored as hung, so that only a search with more time takes it again.
    """
    if result is None:
        if timeout < trial_seconds:
            return None
        reason = f"it took longer than {timeout:.0f} s and was stopped"
        result = Measurement((), failure=reason, compile_seconds=timeout)
        if timeout < TRIAL_SECONDS:
            subject = _hang_subject(trial, _power_of_two(timeout))
            hang = lease.store.acquire(subject, lease.environment, seconds=_LEASE_MARGIN)
            if hang is not None:
                with hang:
                    hang.complete(result)
            return result
    if lease.complete(result):
        return result
    return lease.store.get(lease.subject, lease.environment) or result


def _power_of_two(seconds: float) -> int:
    return math.floor(math.log2(seconds))


def _hang_subject(trial: Trial, power: int) -> Subject:
    """Return what a trial that was stopped after 2**power seconds or more is stored as."""
    subject = trial.subject
    return replace(subject, kind="hang", key=f"{subject.digest} {2**power} s")
