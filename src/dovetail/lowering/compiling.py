"""The code that the first calls will need, made before them: at once where processes of their own compile."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import count

from dovetail.lowering.backend import setting
from dovetail.lowering.dispatch import Dispatcher
from dovetail.lowering.situation import Situation
from dovetail.lowering.workers import stopped_by

Job = tuple[Dispatcher, Situation]

_LOG = logging.getLogger(__name__)


def make_all(jobs: Iterable[Job], progress: bool) -> None:
    """Make each entry, equal ones once. The first error is raised, and what still compiles is killed.

    With `progress` a line is logged for each that is done.
    """
    distinct = list(dict.fromkeys(jobs))
    isolated = [job for job in distinct if _is_isolated(job[0])]
    inline = [job for job in distinct if not _is_isolated(job[0])]
    stop, lock, done = threading.Event(), threading.Lock(), count(1)

    def make(job: Job) -> None:
        dispatcher, situation = job
        with stopped_by(stop):
            dispatcher.entry_for(situation)
        if progress:
            with lock:
                _LOG.info(
                    "lowering: %d of %d bodies, %s", next(done), len(distinct), dispatcher.unit.region.name
                )

    pool = ThreadPoolExecutor(_at_once(len(isolated)), "dovetail-lowering")
    try:
        waiting = [pool.submit(make, job) for job in isolated]
        for job in inline:
            make(job)
        for future in as_completed(waiting):
            future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _is_isolated(dispatcher: Dispatcher) -> bool:
    return any(setting(b, "isolation") == "process" for b in dispatcher.backends)


def _at_once(jobs: int) -> int:
    """How many processes compile at a time: each keeps a core busy and holds a torch of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(jobs, cores))
