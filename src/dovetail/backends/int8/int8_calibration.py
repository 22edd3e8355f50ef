"""The range of the values that a product is given: watched in float32, then fixed as 256 steps."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dovetail.ir.process_state import released_by_fork

_SAMPLED = 2**16
"""About how many values of all calls are looked at when the range is chosen; its ends are always looked at."""
_CUTS = tuple(2 ** (-k / 8) for k in range(33))
"""Fractions of the largest value that are tried as the end of the range, down to a sixteenth."""


@dataclass(frozen=True)
class Range:
    """Values as bytes: `(byte - zero_point) * scale`, zero itself without error."""

    scale: float
    zero_point: int


@dataclass(frozen=True, eq=False)
class ObservedRange:
    """What is known of the values of a product: their range, the mean of each input, and the sizes they last had."""

    range: Range
    mean: Tensor
    sizes: tuple[int, ...]


def range_of(low: float, high: float) -> Range:
    """The steps that span two values and zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255
    # Below this its inverse is no number.
    if scale < torch.finfo(torch.float32).tiny:
        return Range(1.0, 0)
    return Range(scale, min(255, max(0, round(-low / scale))))


def closest_range(low: float, high: float, values: Tensor) -> Range:
    """The range within two ends that gives values back with the least square error.

    Cutting off a few far ones gives all the others finer steps.
    """
    best, least = range_of(low, high), float("inf")
    largest = max(-low, high)
    for cut in _CUTS:
        tried = range_of(max(low, -cut * largest), min(high, cut * largest))
        steps = (values / tried.scale).round_().clamp_(-tried.zero_point, 255 - tried.zero_point)
        error = float((steps.mul_(tried.scale) - values).square_().sum())
        if error < least:
            best, least = tried, error
    return best


class RangeObserver:
    """Watches the values of one product, in any number of threads.

    Called with them, it keeps some, their ends, and the means over all dimensions but that of the inputs.
    """

    def __init__(self, inputs: int = -1, calls: int = 4) -> None:
        self.inputs, self.most = inputs, max(64, _SAMPLED // calls)
        self.low = self.high = 0.0
        self.values: list[Tensor] = []
        self.means: list[Tensor] = []
        self.sizes: tuple[int, ...] = ()
        self._lock = released_by_fork(threading.Lock())
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, x: Tensor) -> None:
        if not x.numel():
            return
        low, high = (float(v) for v in torch.aminmax(x.detach()))
        # One call that went astray must not stretch the range for all the others.
        if not abs(low) + abs(high) < float("inf"):
            return
        with self._lock:
            flat = x.detach().reshape(-1)
            if flat.numel() > self.most:
                flat = flat[torch.randint(flat.numel(), (self.most,), generator=self._generator)]
            self.values.append(flat.clone())
            self.means.append(mean_of(x, self.inputs))
            self.low, self.high = min(self.low, low), max(self.high, high)
            self.sizes = tuple(x.shape)

    def seen(self) -> ObservedRange | None:
        """What there is to know of what was seen; None if that is nothing."""
        with self._lock:
            if not self.values:
                return None
            found = closest_range(self.low, self.high, torch.cat(self.values))
            return ObservedRange(found, torch.stack(self.means).mean(0), self.sizes)


def mean_of(x: Tensor, inputs: int) -> Tensor:
    """The mean of each input of a product, which are along one dimension of its values."""
    return x.detach().movedim(inputs, 0).reshape(x.shape[inputs], -1).mean(1)


class Calibration:
    """What is known of one call of a region: how often it was watched, and what was seen of each of its products.

    Copied and pickled it keeps what came of it in the end: one that is not done begins again.
    """

    def __init__(self, fingerprint: str, inputs: tuple[int, ...], wanted: int, generation: int) -> None:
        self.fingerprint, self.inputs, self.wanted = fingerprint, inputs, wanted
        self.generation = generation
        self.watches = tuple(RangeObserver(dim, wanted) for dim in inputs)
        self.calls = 0
        self.seen: tuple[ObservedRange, ...] | None = None
        self.refused = ""
        self.lock = released_by_fork(threading.RLock())

    def watched(self) -> bool:
        """Count one more call that was watched; True if it was the last, or one of those before.

        It is the last after as many calls as wanted, if every product has seen something.
        """
        with self.lock:
            self.calls += 1
            if self.seen is None:
                if self.calls < self.wanted:
                    return False
                found = [watch.seen() for watch in self.watches]
                if any(seen is None for seen in found):
                    return False
                self.seen = tuple(seen for seen in found if seen is not None)
                self.watches = tuple(RangeObserver(dim, self.wanted) for dim in self.inputs)
            return True

    def __reduce__(self) -> tuple[Any, ...]:
        told = (self.fingerprint, self.inputs, self.wanted, self.generation)
        return _restored, (told, self.seen, self.refused)


def _restored(told: Any, seen: Any, refused: str) -> Calibration:
    made = Calibration(*told)
    made.seen, made.refused = seen, refused
    return made


class Calibrations:
    """Those of all calls of a graph. New weights in one call change the values that others are given: all begin again."""

    def __init__(self, calls: dict[str, Calibration] | None = None, generation: int = 0) -> None:
        self.calls, self.generation = dict(calls or {}), generation
        self._lock = released_by_fork(threading.Lock())

    def of(self, call: str, fingerprint: str, inputs: tuple[int, ...], wanted: int) -> Calibration:
        """What is known of a call that has these weights now, or one that wants to be watched so many times.

        `inputs` has for each product the dimension of its values along which its inputs are.
        """
        with self._lock:
            found = self.calls.get(call)
            if found is not None and found.fingerprint != fingerprint:
                self.generation += 1
            if found is None or found.generation != self.generation:
                found = self.calls[call] = Calibration(fingerprint, inputs, wanted, self.generation)
            return found

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            return Calibrations, (dict(self.calls), self.generation)


def fingerprint(constants: Iterable[Any]) -> str:
    """What tells the numbers of some weights from any others."""
    digest = hashlib.sha256()
    for value in constants:
        if isinstance(value, Tensor):
            digest.update(repr((tuple(value.shape), value.dtype)).encode())
            digest.update(value.detach().reshape(-1).contiguous().numpy().data)
    return digest.hexdigest()
