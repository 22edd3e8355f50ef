"""Trials measured by workers elsewhere: published in the queue of the store, awaited there.

The search itself measures nothing. All trials of a phase are published at once, so that as many run side by side as there
are workers. An engine (Ray) starts workers near the right devices; without one they are started by hand.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from dovetail.errors import StoreError, TuningError
from dovetail.lowering.backend_protocol import Backend
from dovetail.tuning.block import Block
from dovetail.tuning.environment import Environment
from dovetail.tuning.executor import TrialFiles, TunedModel
from dovetail.tuning.store import Store
from dovetail.tuning.trial import Trial
from dovetail.tuning.trial_queue import OPEN_SECONDS, TrialQueue
from dovetail.tuning.trial_runner import TrialRunner

_LOG = logging.getLogger("dovetail")
_ALONE_SECONDS = 15.0
"""How long a search waits for a worker before it says so."""


class WorkerEngine(Protocol):
    """Starts workers of a store and looks after them."""

    def supervise(self) -> str:
        """Start workers where there are slots, and those anew that were lost; return why none can run, or nothing."""
        ...

    def why_waiting(self) -> str:
        """Return what workers wait for that were started and take no trials yet."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class QueueExecutor:
    """The search's side of a queue of trials; `engine` starts the workers, None if they are started by hand."""

    def __init__(
        self,
        store: Store,
        environment: Environment,
        tuned: TunedModel,
        backends: Sequence[Backend],
        *,
        label: str,
        engine: WorkerEngine | None = None,
        runner: type[TrialRunner] = TrialRunner,
    ) -> None:
        self.queue, self.engine = TrialQueue(store), engine
        self._is_fresh = False
        self._refusals: dict[str, str] = {}
        self._alone_since: float | None = time.monotonic()
        self._is_alone_reported = False
        self._folder = tempfile.TemporaryDirectory(prefix="dovetail-tune-")
        self._files = TrialFiles(Path(self._folder.name))
        self._closed = threading.Event()
        try:
            self._files.write(tuned, backends, runner)
            self.search = self.queue.open(environment, label)
            for path in (self._files.setup, self._files.model):
                self.queue.add_file(self.search, path)
        except BaseException:
            self._folder.cleanup()
            raise
        self._renewal = threading.Thread(target=self._renew, daemon=True)
        self._renewal.start()

    def add_block(self, block: Block) -> None:
        if not self._files.block(block.key).exists():
            self._files.write_block(block)
            self.queue.add_file(self.search, self._files.block(block.key))

    def restart(self) -> None:
        self._is_fresh = True

    def publish(self, trials: Sequence[Trial], timeout: float, trial_seconds: float) -> None:
        """Add trials to the queue."""
        self.queue.publish(
            self.search, trials, timeout=timeout, trial_seconds=trial_seconds, is_fresh=self._is_fresh
        )
        self._is_fresh = False

    def withdraw(self, *, only_free: bool = False) -> None:
        """Remove all trials, or those that no worker measures."""
        self.queue.withdraw(self.search, only_free=only_free)

    def remaining(self) -> dict[str, bool]:
        """Return the subjects of the trials that have no result, with whether each was stopped without one."""
        return self.queue.remaining(self.search)

    def supervise(self) -> None:
        """Look after the workers; raise TuningError if no trial can be measured by any."""
        blocked = self.engine.supervise() if self.engine is not None else ""
        workers = self.queue.workers(self.search)
        for worker in workers:
            if worker.refusal and worker.worker not in self._refusals:
                self._refusals[worker.worker] = worker.refusal
                _LOG.warning("worker %s takes no trials: %s", worker.worker, worker.refusal)
        if any(not worker.refusal for worker in workers):
            self._alone_since = None
            return
        if blocked:
            raise TuningError(f"no worker can run: {blocked}")
        if self._alone_since is None:
            self._alone_since = time.monotonic()
        elif time.monotonic() - self._alone_since > _ALONE_SECONDS and not self._is_alone_reported:
            self._is_alone_reported = True
            _LOG.warning("no worker takes trials of this search: %s", self._advice())

    def why_alone(self) -> str:
        """Return why no worker takes trials; empty if one does."""
        if self._alone_since is None:
            return ""
        refused = "".join(f"; {name} refused: {reason}" for name, reason in self._refusals.items())
        return f"no worker takes trials of this search{refused}; {self._advice()}"

    def _advice(self) -> str:
        if self.engine is not None:
            return self.engine.why_waiting()
        return f"start 'dovetail worker' with the store {self.queue.store.name}"

    def close(self) -> None:
        """End the search in the queue, and the workers of the engine."""
        self._closed.set()
        self._renewal.join()
        try:
            if self.engine is not None:
                self.engine.close()
        finally:
            # What is left in a store that cannot be written expires there.
            with suppress(StoreError):
                self.queue.close(self.search)
            with suppress(OSError):
                self._folder.cleanup()

    def _renew(self) -> None:
        while not self._closed.wait(OPEN_SECONDS / 4):
            # The search meets an error of the store when it uses it next.
            with suppress(StoreError):
                self.queue.renew(self.search)
