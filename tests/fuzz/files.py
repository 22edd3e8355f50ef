"""One file at a time: whatever is done to an archive, `load` opens it or raises InvalidFile, at once and in little memory."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import dovetail
from dovetail.errors import DovetailError, InvalidFile
from dovetail.formats.archive.load import load

from .archives import mutant, originals

SECONDS = 2.0
"""Of the processor: on a busy machine the clock says nothing of a file."""

WAITING = 60.0
"""By the clock, for what waits without computing."""

BYTES = 2**30


class TooLong(BaseException):
    """A file took longer than it may. Not an Exception: what raises InvalidFile for any of those must not hide it."""


@dataclass
class BadFile:
    """A file that was not refused as it must be."""

    level: str
    data: bytes
    which: str
    words: str
    times: int = 1

    @property
    def signature(self) -> str:
        pattern = re.sub(r"'[^']*'|\d+", "_", self.words)
        return f"{self.which} {pattern[:120]}".strip()

    @property
    def slug(self) -> str:
        return re.sub(r"\W+", "_", f"file_{self.level}_{self.which}").strip("_")[:60]

    @property
    def script(self) -> str:
        return f"# dovetail.load of this file: {self.which}: {self.words}"


def hunt_file(
    rng: Random, counts: Counter[str], known: Mapping[str, BadFile] | None = None
) -> BadFile | None:
    """Mutate an archive and load it."""
    originals()
    level, data = mutant(rng)
    began = time.process_time()
    failure = _failure(level, data, counts)
    counts["slowest ms"] = max(counts["slowest ms"], int(1000 * (time.process_time() - began)))
    if failure is None:
        return None
    counts["violated"] += 1
    seen = (known or {}).get(failure.signature)
    if seen is not None:
        seen.times += 1
        return seen
    return failure


def _failure(level: str, data: bytes, counts: Counter[str]) -> BadFile | None:
    before = peak_memory(reset=True)
    try:
        with _time_limit():
            outcome = _outcome(data)
    except TooLong as late:
        return BadFile(level, data, "too long", str(late))
    except Exception as error:
        return BadFile(level, data, type(error).__name__, str(error))
    used = peak_memory() - before
    if used > BYTES:
        return BadFile(level, data, "too much memory", f"{used} bytes")
    counts[outcome] += 1
    counts[level] += 1
    counts["most MiB"] = max(counts["most MiB"], used >> 20)
    return None


def _outcome(data: bytes) -> str:
    try:
        loaded = load(io.BytesIO(data))
    except InvalidFile:
        return "refused"
    # What is opened can be looked at and written as code, which must be code, however odd.
    dovetail.text(loaded)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            compile(loaded.code, "<generated>", "exec")
        dovetail.inline(loaded)
    except DovetailError:
        return "opened, and refused later"
    return "opened"


@contextlib.contextmanager
def _time_limit() -> Generator[None]:
    def stop(*_: Any) -> None:
        raise TooLong(f"not done after {SECONDS} seconds of the processor, or {WAITING} by the clock")

    limits = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WAITING))
    former = [signal.signal(number, stop) for number, _, _ in limits]
    for _, timer, seconds in limits:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for _, timer, _ in limits:
            signal.setitimer(timer, 0)
        for (number, _, _), handler in zip(limits, former, strict=True):
            signal.signal(number, handler)


def peak_memory(*, reset: bool = False) -> int:
    """The most memory this process had since it was last reset, in bytes; 0 where the system does not tell."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10
    except (OSError, StopIteration):
        return 0
