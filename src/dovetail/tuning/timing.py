"""Timing: interleaved samples, their spread, the noise of the machine, and comparisons that may be undecided.

Runs that are compared alternate within one process, in an order that is shuffled in every round, so that a machine that
slows down or speeds up meanwhile does so for all of them. A comparison is made of the ratios within each round: their
median, with the interval of order statistics that holds it with 95 % confidence whatever the distribution. How large a
ratio means nothing is measured by comparing a run with itself in the same rounds (A/A): differences within that
interval are never decided.

Reference: Hoefler and Belli, "Scientific Benchmarking of Parallel Computing Systems", SC 2015.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dovetail.tuning.decisions import Spread

Run = Callable[[], object]
Verdict = Literal["faster", "slower", "tie", "undecided"]
MIN_TIMED_SECONDS = 2e-5
"""Shorter calls are timed several at once: the clock and its call cost 0.1 µs."""
PAUSE_SECONDS = 0.03
"""How long a run waits for the threads of the run before it: those of other runtimes spin for a while."""
LEAST_NOISE = 0.002
"""Ratios of less than this are ties however quiet the machine is."""
MAX_TIE = 0.02
"""A simpler program that takes more than this longer is not preferred, however noisy the machine is."""
_CONFIDENCE = 0.95
_MAX_CALLS = 1000
_WARM_CALLS, _WARM_SECONDS = 10, 0.02
_MIN_TIMES, _MAX_TIMES, _TIMED_SECONDS = 3, 15, 0.01
_FLUSH_BYTES = 256 * 2**20
"""More than the L2 cache of any GPU, written between two runs so that neither finds its operands there."""


@dataclass(frozen=True)
class Comparison:
    """The time of a run relative to another's: the median ratio and its 95 % interval, and what follows from it."""

    ratio: float
    low: float
    high: float
    noise: float
    verdict: Verdict


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the order statistics between which the median is with 95 % confidence; the extremes of few values."""
    ordered, beyond = sorted(values), _values_beyond(len(values))
    return ordered[beyond], ordered[-1 - beyond]


@functools.cache
def _values_beyond(count: int) -> int:
    """Return how many of the least values, and of the largest, are outside of the interval of their median.

    How many of `count` values are below the median has a binomial distribution.
    """
    beyond, below = 0, 1
    while 2 * (below := below + math.comb(count, beyond + 1)) / 2**count <= 1 - _CONFIDENCE:
        beyond += 1
    return beyond


def spread_of(samples: Sequence[float]) -> Spread:
    """Return the median of some samples and its confidence interval."""
    low, high = median_interval(samples)
    return Spread(statistics.median(samples), low, high, len(samples))


def noise_of(first: Sequence[float], again: Sequence[float]) -> float:
    """Return how far the ratio of a run to itself is from one, at the far end of its interval."""
    low, high = median_interval(_log_ratios(first, again))
    return max(LEAST_NOISE, math.expm1(max(abs(low), abs(high))))


def compare(run: Sequence[float], other: Sequence[float], noise: float) -> Comparison:
    """Return how a run's times relate to another's of the same rounds.

    It is faster or slower if the whole interval of the ratio is beyond the noise, a tie if the interval is within it,
    and undecided otherwise: more samples may decide it.
    """
    ratios = _log_ratios(run, other)
    low, high = (math.exp(v) for v in median_interval(ratios))
    ratio = math.exp(statistics.median(ratios))
    verdict: Verdict = "undecided"
    if high < 1 / (1 + noise):
        verdict = "faster"
    elif low > 1 + noise:
        verdict = "slower"
    elif low >= 1 / (1 + noise) and high <= 1 + noise:
        verdict = "tie"
    return Comparison(ratio, low, high, noise, verdict)


def _log_ratios(run: Sequence[float], other: Sequence[float]) -> list[float]:
    return [math.log(a / b) for a, b in zip(run, other, strict=True)]


@dataclass(frozen=True, eq=False)
class RestoredRun:
    """A run whose calls change what they read; `restore`, which is not timed, brings that back before each of them."""

    run: Run
    restore: Callable[[], object]

    def __call__(self) -> object:
        self.restore()
        return self.run()


def _restore_and_run(run: Run) -> tuple[Callable[[], object], Run]:
    """Return what comes before each timed call, and the call itself."""
    return (run.restore, run.run) if isinstance(run, RestoredRun) else (lambda: None, run)


class Timer:
    """Times calls on a device: by the clock on a CPU, by events on a GPU, whose L2 cache is flushed before.

    A sample on a CPU is taken in the steady state of the run: after a pause in which the threads of the run before stop
    spinning, and untimed calls that bring its own threads and operands back. It is the median of several calls.
    """

    def __init__(self, device: torch.device, *, pause: float = PAUSE_SECONDS) -> None:
        self.device, self.pause = device, pause
        self._is_cuda = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if self._is_cuda else None

    def calls_per_time(self, run: Run) -> int:
        """Return how many calls are timed as one, so that the clock does not count."""
        if self._is_cuda or isinstance(run, RestoredRun):
            return 1
        start = time.perf_counter()
        run()
        seconds = max(time.perf_counter() - start, 1e-9)
        return max(1, min(_MAX_CALLS, math.ceil(MIN_TIMED_SECONDS / seconds)))

    def sample(self, run: Run, calls: int = 1, *, pause: bool = True) -> float:
        """Return the seconds that a call takes."""
        if self._is_cuda:
            return self._sample_cuda(run)
        if pause and self.pause:
            time.sleep(self.pause)
        self._repeat(run, _WARM_CALLS, _WARM_SECONDS)
        times: list[float] = []
        restore, call = _restore_and_run(run)
        until = time.perf_counter() + _TIMED_SECONDS
        while len(times) < _MIN_TIMES or (len(times) < _MAX_TIMES and time.perf_counter() < until):
            restore()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) / calls)
        return statistics.median(times)

    @staticmethod
    def _repeat(run: Run, most: int, seconds: float) -> None:
        until = time.perf_counter() + seconds
        for done in range(most):
            if done and time.perf_counter() >= until:
                return
            run()

    def _sample_cuda(self, run: Run) -> float:
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        restore, call = _restore_and_run(run)
        restore()
        if self._flush is not None:
            self._flush.zero_()
        start_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        return start_event.elapsed_time(end_event) / 1e3


def recorded(run: Run, device: torch.device) -> Run:
    """Return the replay of a run as a CUDA graph, which takes what its kernels take; the run itself where that fails.

    Whole programs are recorded in production wherever they can be, so that the time to launch a part does not count.
    """
    if device.type != "cuda":
        return run
    try:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream(device).wait_stream(side)
        restore, call = _restore_and_run(run)
        restore()
        with torch.cuda.graph(graph):
            call()
        torch.cuda.synchronize(device)
    except Exception:
        torch.cuda.synchronize(device)
        return run
    return RestoredRun(graph.replay, run.restore) if isinstance(run, RestoredRun) else graph.replay


class Interleaved:
    """Samples of some runs, taken in rounds; each run has as many as there were rounds.

    Without `pause` runs follow one another at once, for those that share one thread pool.
    """

    def __init__(
        self, runs: Sequence[Run], timer: Timer, *, seed: int = 0, warm_up: int = 3, pause: bool = True
    ) -> None:
        self.samples: list[list[float]] = [[] for _ in runs]
        self._runs, self._timer, self._random = list(runs), timer, random.Random(seed)
        self._pause = pause
        self._calls: list[int] = []
        for run in self._runs:
            for _ in range(warm_up):
                run()
            self._calls.append(timer.calls_per_time(run))

    def sample(self, rounds: int, until: float = math.inf) -> int:
        """Take rounds of samples while the clock is before `until`; return how many were taken."""
        order = list(range(len(self._runs)))
        for taken in range(rounds):
            if time.monotonic() >= until:
                return taken
            self._random.shuffle(order)
            for i in order:
                sample = self._timer.sample(self._runs[i], self._calls[i], pause=self._pause)
                self.samples[i].append(sample)
        return rounds


def peak_bytes(run: Run, device: torch.device) -> int | None:
    """Return the memory that one call needs at most beyond what is allocated before it; None where it is not known.

    On a GPU it is that of torch's allocator. On a CPU it is the peak resident size of the process, which Linux resets
    on request; other systems report the peak of the whole process only. An arena that a runtime keeps is allocated
    before the call.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        # Pages that the allocator keeps from earlier calls would hide what this one needs.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        run()
        return max(0, _resident("VmHWM") - before)
    except (OSError, AttributeError):
        return None


def _resident(name: str) -> int:
    with contextlib.closing(open("/proc/self/status")) as status:
        for line in status:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")
