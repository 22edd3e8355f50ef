"""Workers: processes that take trials from a store, on any machine that reaches it, until they are stopped.

`python -m dovetail.tuning.worker --store URL`, the same as `dovetail worker`, runs one; Ray's executor starts them where it
has slots. A worker measures one trial at a time, in a process of its own that may crash or hang. It takes the trials of
searches whose environment it has: the same device, driver, torch, Python and packages. Threads and settings of precision
are those of the search. Another environment is refused, which the search reports with what differs.

Trials, models and backends in a store are pickles: a worker runs code of anyone who can write to the store.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dovetail.errors import DovetailError, InvalidArgument
from dovetail.tuning.environment import Environment, current_environment
from dovetail.tuning.executor import MODEL, SETUP, ProcessExecutor, TrialFiles, WorkerLost
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.measuring import pause_after, store_result
from dovetail.tuning.store import Lease, Store, worker_name
from dovetail.tuning.trial import Trial
from dovetail.tuning.trial_queue import SEEN_SECONDS, OpenSearch, QueuedTrial, TrialQueue

_LOG = logging.getLogger("dovetail")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ATTEMPTS = 3
"""A trial whose worker ended this many times while it ran is a failure."""


class Worker:
    """Takes trials from a store until `stop` is set, or until there were none for `idle` seconds.

    `report` gets a line for each trial, and for each search that is refused.
    """

    def __init__(
        self,
        store: Store,
        *,
        device: str | torch.device = "cpu",
        idle: float | None = None,
        stop: threading.Event | None = None,
        lease_seconds: float = 30.0,
        report: Callable[[str], None] = _LOG.info,
    ) -> None:
        self._report = report
        self.queue = TrialQueue(store, lease_seconds=lease_seconds)
        self.device = torch.device(device)
        self.idle, self.stop = idle, stop or threading.Event()
        self.name = worker_name()
        self.measured = 0
        self._environment = current_environment(self.device)
        self._refused: dict[str, str] = {}
        self._reported: dict[str, float] = {}
        self._session: _Session | None = None

    def run(self) -> int:
        """Measure until the worker is stopped; return how many trials have a result."""
        since = time.monotonic()
        try:
            while not self.stop.is_set():
                taken = self.queue.take(self._open_searches())
                if taken is not None:
                    self._measure(*taken)
                    since = time.monotonic()
                elif self.idle is not None and time.monotonic() - since > self.idle:
                    break
                else:
                    self.stop.wait(pause_after(time.monotonic() - since))
        finally:
            self._end_session()
        return self.measured

    def _open_searches(self) -> list[OpenSearch]:
        """Return the searches whose trials this worker can measure; report it to all."""
        searches = self.queue.searches()
        names = {each.search for each in searches}
        if self._session is not None and self._session.search.search not in names:
            self._end_session()
        for each in searches:
            if each.search not in self._refused:
                self._refused[each.search] = why_refused(each, self._environment)
                if self._refused[each.search]:
                    self._report(f"'{each.label}' is not measured here: {self._refused[each.search]}")
        able = [each for each in searches if not self._refused[each.search]]
        if able and self._session is None:
            # The model is loaded while the search prepares its trials.
            self._opened(able[0])
        for each in searches:
            if time.monotonic() - self._reported.get(each.search, -SEEN_SECONDS) > SEEN_SECONDS / 4:
                self.queue.report(each.search, self.name, self._refused[each.search])
                self._reported[each.search] = time.monotonic()
        return [each for each in able if not self._refused[each.search]]

    def _measure(self, queued: QueuedTrial, lease: Lease) -> None:
        """Measure a trial and store the result; one that its search withdraws is stopped."""
        with lease:
            if lease.attempt > _ATTEMPTS:
                ended = f"its worker ended {lease.attempt - 1} times while it was measured"
                lease.complete(Measurement((), failure=ended))
                self.queue.finish(queued, has_result=True)
                return
            session = self._opened(queued.search)
            if session is None or not session.has_blocks(queued.trial):
                return
            with self._renewed(queued, lease, session.executor) as is_cancelled:
                if queued.is_fresh:
                    session.executor.restart()
                result = session.executor.measure(queued.trial, queued.timeout)
            if is_cancelled():
                session.executor.restart()
                return
            stored = store_result(lease, queued.trial, result, queued.timeout, queued.trial_seconds)
            self.queue.finish(queued, has_result=stored is not None)
            self.measured += stored is not None
            outcome = "stopped" if stored is None else stored.failure or "measured"
            self._report(f"{queued.trial.subject.kind} of '{queued.search.label}': {outcome}")

    def _opened(self, search: OpenSearch) -> _Session | None:
        """Return the session of a search; None, and the search is refused, if its model cannot be loaded here."""
        if self._session is None or self._session.search != search:
            self._end_session()
            session = _Session(self.queue, search, self.device)
            refusal = session.open()
            if refusal:
                session.close()
                self._report(f"'{search.label}' is not measured here: {refusal}")
                self._refused[search.search] = refusal
                self._reported.pop(search.search, None)
                return None
            self._session = session
        return self._session

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    @contextmanager
    def _renewed(
        self, queued: QueuedTrial, lease: Lease, executor: ProcessExecutor
    ) -> Generator[Callable[[], bool]]:
        """Renew a lease while its trial is measured; stop the trial if the search, the store or this worker ends.

        Yields a function that returns whether the trial was stopped so.
        """
        done, cancelled = threading.Event(), threading.Event()

        def watch() -> None:
            renewed = time.monotonic()
            while not done.wait(min(1.0, self.queue.lease_seconds / 3)):
                is_queued = not self.stop.is_set()
                try:
                    is_queued = is_queued and self.queue.is_queued(queued)
                    if is_queued and time.monotonic() - renewed > self.queue.lease_seconds / 3:
                        is_queued = lease.renew(self.queue.lease_seconds)
                        renewed = time.monotonic()
                        self.queue.report(queued.search.search, self.name)
                except DovetailError:
                    # Without the store nothing can be kept; the worker ends when it uses the store next.
                    is_queued = False
                if not is_queued and not done.is_set():
                    cancelled.set()
                    executor.cancel()
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield cancelled.is_set
        finally:
            done.set()
            thread.join()


class _Session:
    """A search whose model is loaded in a process of this worker."""

    def __init__(self, queue: TrialQueue, search: OpenSearch, device: torch.device) -> None:
        self.queue, self.search = queue, search
        self._folder = tempfile.TemporaryDirectory(prefix="dovetail-worker-")
        self.executor = ProcessExecutor(
            TrialFiles(Path(self._folder.name)), only_visible(device), has_spare=True
        )

    def open(self) -> str:
        """Read the files and start the process; return why that is not possible, empty if it is."""
        if not self._read(SETUP) or not self._read(MODEL):
            return "the search has ended"
        try:
            self.executor.check()
        except (WorkerLost, InvalidArgument) as error:
            return str(error)
        except TimeoutError:
            return "its model took too long to load"
        return ""

    def has_blocks(self, trial: Trial) -> bool:
        """Read the blocks that a trial needs; return False if the search does not have them any longer."""
        return all(self._read(self.executor.files.block(key).name) for key in trial.blocks)

    def close(self) -> None:
        self.executor.close()
        with suppress(OSError):
            self._folder.cleanup()

    def _read(self, name: str) -> bool:
        path = Path(self._folder.name) / name
        return path.exists() or self.queue.read_file(self.search.search, name, path)


def only_visible(device: torch.device) -> dict[str, str]:
    """Return the variables of a process that has one GPU as its "cuda:0", where searches have theirs."""
    if device.type != "cuda":
        return {}
    index, visible = device.index or 0, os.environ.get(_VISIBLE)
    return {_VISIBLE: visible.split(",")[index].strip() if visible else str(index)}


def why_refused(search: OpenSearch, own: Environment) -> str:
    """Return why the trials of a search cannot be measured in this environment; empty if they can.

    Threads and settings are set for each trial, so that they differ only where there are too few cores.
    """
    expected, release = search.environment, version("dovetail")
    differences = list(
        replace(own, threads=expected.threads, settings=expected.settings).differences(expected)
    )
    cores = os.cpu_count() or 1
    if expected.threads > cores:
        differences.append(f"{cores} cores, for {expected.threads} threads")
    if release != search.release:
        differences.append(f"dovetail {release}, was {search.release}")
    return f"another environment than that of the search: {'; '.join(differences)}" if differences else ""


def run_worker(
    store: str, *, device: str = "cpu", idle: float | None = None, report: Callable[[str], None] = _LOG.info
) -> int:
    """Run a worker until SIGINT or SIGTERM, or until there was no trial for `idle` seconds; return how many it measured."""
    stop = threading.Event()

    def end(number: int, frame: Any) -> None:
        stop.set()

    handlers = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        return serve(store, device=device, idle=idle, stop=stop, report=report)
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def serve(
    store: str,
    *,
    stop: threading.Event,
    device: str = "cpu",
    idle: float | None = None,
    report: Callable[[str], None] = _LOG.info,
) -> int:
    """Run a worker until `stop` is set, or until there was no trial for `idle` seconds; return how many it measured."""
    if idle is not None and not 0.0 <= idle < math.inf:
        raise InvalidArgument(f"idle {idle!r}; give a number of seconds.")
    with Store(store) as opened:
        if opened.is_in_memory:
            raise InvalidArgument("a store in memory has no workers; give the URL of a database, or a file.")
        worker = Worker(opened, device=_usable(device), idle=idle, stop=stop, report=report)
        report(f"worker {worker.name} takes trials from {opened.name} on {worker.device}")
        return worker.run()


def _usable(device: str) -> torch.device:
    try:
        usable = torch.device(device)
        torch.empty(0, device=usable)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidArgument(f"device '{device}' cannot be used: {reason}") from None
    return usable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m dovetail.tuning.worker`, for where the command line is not installed."""
    parser = argparse.ArgumentParser(
        "python -m dovetail.tuning.worker", description="Measure trials of searches."
    )
    parser.add_argument("--store", required=True, help="file or database of the searches")
    parser.add_argument("--device", default="cpu", help="where trials run, such as cuda:0")
    parser.add_argument("--idle", type=float, help="end when there was no trial for so many seconds")
    options = vars(parser.parse_args(arguments))
    try:
        run_worker(options.pop("store"), **options, report=lambda line: print(line, flush=True))
    except (DovetailError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
