"""Trials spread over processes: the same trials, whatever the number of processes, and one report of what failed."""

from __future__ import annotations

import faulthandler
import multiprocessing
import queue
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Failure(Protocol):
    """What a trial that fails returns; equal signatures are of one cause."""

    times: int

    @property
    def signature(self) -> str: ...

    @property
    def slug(self) -> str: ...

    @property
    def script(self) -> str: ...


Trial = Callable[[int, Counter[str], dict[str, Any]], Failure | None]
"""Does the trial of a number, with the failures known so far by their signatures."""

MAXIMA = ("slowest ms", "most MiB")
"""Counts that are the largest of all trials, not their sum."""

HUNG = 300.0
"""Seconds after which a process that does not come back to Python is ended."""


@dataclass
class Finding:
    """A failure as it is reported."""

    signature: str
    slug: str
    label: str
    script: str
    data: bytes | None = None
    times: int = 1


@dataclass
class Tally:
    """All that the processes have reported."""

    done: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)

    def add(self, done: int, counts: Counter[str]) -> None:
        self.done += done
        for name, count in counts.items():
            self.counts[name] = max(self.counts[name], count) if name in MAXIMA else self.counts[name] + count


@dataclass(frozen=True)
class Work:
    """The trials of one process: every `step`-th number from `first` up to `end`."""

    start: Callable[[Any], Trial]
    options: Any
    first: int
    end: int
    step: int


Report = tuple[int, int, Counter[str], list[Finding], list[str]]
"""The number of a process, how many trials it did, their counts, failures that are new, and signatures of others."""


def spread(
    start: Callable[[Any], Trial], options: Any, count: int, jobs: int
) -> Iterator[tuple[Tally, list[Finding]]]:
    """Do the trials 0 to `count`, in `jobs` processes; yields what is known after each report, and what is new in it."""
    tally = Tally()
    until = time.monotonic() + options.seconds if options.seconds else None
    if jobs <= 1:
        for report in _reports(0, Work(start, options, 0, count, 1), [0]):
            yield tally, _merged(tally, report)
            if until is not None and time.monotonic() > until:
                return
        return
    context = multiprocessing.get_context("spawn")
    reports: Any = context.Queue()
    current: Any = context.Array("q", [-1] * jobs, lock=False)

    def begin(number: int, first: int) -> Any:
        work = Work(start, options, first, count, jobs)
        process = context.Process(target=_run, args=(number, work, reports, current), daemon=True)
        process.start()
        return process

    processes = {number: begin(number, number) for number in range(min(jobs, count))}
    while processes and (until is None or time.monotonic() < until):
        try:
            yield tally, _merged(tally, reports.get(timeout=1.0))
            continue
        except queue.Empty:
            pass
        for number, process in list(processes.items()):
            if process.is_alive():
                continue
            del processes[number]
            if process.exitcode == 0:
                continue
            if current[number] < 0:
                raise RuntimeError(f"a process ended with {process.exitcode} before its first trial")
            # It died in a trial: that is a failure of this one, and the rest is for another process.
            label, after = current[number], current[number] + jobs
            current[number] = -1
            death = Finding(
                f"process died ({process.exitcode})", "died", f"{options.seed}/{label}", f"# trial {label}"
            )
            yield tally, _merged(tally, (number, 1, Counter({"died": 1}), [death], []))
            if after < count:
                processes[number] = begin(number, after)
    while True:
        try:
            yield tally, _merged(tally, reports.get(timeout=0.1))
        except queue.Empty:
            break
    for process in processes.values():
        process.terminate()


def _merged(tally: Tally, report: Report) -> list[Finding]:
    _, done, counts, findings, again = report
    tally.add(done, counts)
    for signature in again:
        tally.findings[signature].times += 1
    new: list[Finding] = []
    for finding in findings:
        if finding.signature in tally.findings:
            tally.findings[finding.signature].times += 1
        else:
            tally.findings[finding.signature] = finding
            new.append(finding)
    return new


def _run(number: int, work: Work, reports: Any, current: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for report in _reports(number, work, current):
        reports.put(report)
    reports.close()
    reports.join_thread()


def _reports(number: int, work: Work, current: Any) -> Iterator[Report]:
    """A report every few seconds, and at once where a trial has failed; `current` has the trial that is being done."""
    trial = work.start(work.options)
    known: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    findings: list[Finding] = []
    again: list[str] = []
    done, last = 0, time.monotonic()
    for i in range(work.first, work.end, work.step):
        current[number] = i
        faulthandler.dump_traceback_later(HUNG, exit=True)
        failure = trial(i, counts, known)
        done += 1
        if failure is not None and failure.signature in known:
            again.append(failure.signature)
        elif failure is not None:
            known[failure.signature] = failure
            label, data = f"{work.options.seed}/{i}", getattr(failure, "data", None)
            findings.append(Finding(failure.signature, failure.slug, label, failure.script, data))
        if findings or time.monotonic() - last > 2:
            yield number, done, counts, findings, again
            counts, findings, again, done, last = Counter(), [], [], 0, time.monotonic()
    faulthandler.cancel_dump_traceback_later()
    yield number, done, counts, findings, again
