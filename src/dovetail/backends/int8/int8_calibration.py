"""Calibration: observes the inputs of a product in float32, and fixes their quantization range of 256 steps."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dovetail.ir.process_state import reset_at_fork

_SAMPLED = 2**16
"""About how many values of all calls are sampled to choose the range; minimum and maximum are always included."""
_CUTS = tuple(2 ** (-k / 8) for k in range(33))
"""Fractions of the largest absolute value that are candidate as the end of the range, down to a sixteenth."""


@dataclass(frozen=True)
class QuantRange:
    """An affine quantization to bytes: `(byte - zero_point) * scale`, exact for zero."""

    scale: float
    zero_point: int


@dataclass(frozen=True, eq=False)
class ObservedRange:
    """Statistics of the inputs of a product: range, mean of each feature, and the last sizes."""

    range: QuantRange
    mean: Tensor
    sizes: tuple[int, ...]


def range_of(low: float, high: float) -> QuantRange:
    """Return the range that spans two values and zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255
    # Below this its inverse is infinite.
    if scale < torch.finfo(torch.float32).tiny:
        return QuantRange(1.0, 0)
    return QuantRange(scale, min(255, max(0, round(-low / scale))))


def closest_range(low: float, high: float, values: Tensor) -> QuantRange:
    """Return the range within two ends with the least square error of quantization.

    Clipping a few outliers gives all other values finer steps.
    """
    best, least = range_of(low, high), float("inf")
    largest = max(-low, high)
    for cut in _CUTS:
        candidate = range_of(max(low, -cut * largest), min(high, cut * largest))
        steps = (values / candidate.scale).round_().clamp_(-candidate.zero_point, 255 - candidate.zero_point)
        error = float((steps.mul_(candidate.scale) - values).square_().sum())
        if error < least:
            best, least = candidate, error
    return best


class RangeObserver:
    """Observes the inputs of one product, in any number of threads.

    It records a sample of the values, their extrema, and the means over all dimensions but that of the features.
    """

    def __init__(self, inputs: int = -1, calls: int = 4) -> None:
        self.inputs, self.most = inputs, max(64, _SAMPLED // calls)
        self.low = self.high = 0.0
        self.values: list[Tensor] = []
        self.means: list[Tensor] = []
        self.sizes: tuple[int, ...] = ()
        self._lock = reset_at_fork(threading.Lock())
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, x: Tensor) -> None:
        if not x.numel():
            return
        low, high = (float(v) for v in torch.aminmax(x.detach()))
        # One call with infinite values must not widen the range for all others.
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

    def observed(self) -> ObservedRange | None:
        """Return the statistics of the observed values, or None before the first call."""
        with self._lock:
            if not self.values:
                return None
            best = closest_range(self.low, self.high, torch.cat(self.values))
            return ObservedRange(best, torch.stack(self.means).mean(0), self.sizes)


def mean_of(x: Tensor, inputs: int) -> Tensor:
    """Return the mean of each feature along a dimension of the inputs."""
    return x.detach().movedim(inputs, 0).reshape(x.shape[inputs], -1).mean(1)


class Calibration:
    """The calibration of one call of a region: the number of observed calls, and the ranges of its products.

    Copies and pickles keep the final ranges; an unfinished calibration starts again.
    """

    def __init__(self, fingerprint: str, inputs: tuple[int, ...], required: int, generation: int) -> None:
        self.fingerprint, self.inputs, self.required = fingerprint, inputs, required
        self.generation = generation
        self.observers = tuple(RangeObserver(dim, required) for dim in inputs)
        self.calls = 0
        self.ranges: tuple[ObservedRange, ...] | None = None
        self.refused = ""
        self.lock = reset_at_fork(threading.RLock())

    def observe_call(self) -> bool:
        """Count one more observed call; return whether the calibration is complete.

        It is complete after as many calls as required, once every product has observed values.
        """
        with self.lock:
            self.calls += 1
            if self.ranges is None:
                if self.calls < self.required:
                    return False
                observed = [observer.observed() for observer in self.observers]
                if any(one is None for one in observed):
                    return False
                self.ranges = tuple(one for one in observed if one is not None)
                self.observers = tuple(RangeObserver(dim, self.required) for dim in self.inputs)
            return True

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.fingerprint, self.inputs, self.required, self.generation)
        return _restored, (arguments, self.ranges, self.refused)


def _restored(arguments: Any, ranges: Any, refused: str) -> Calibration:
    calibration = Calibration(*arguments)
    calibration.ranges, calibration.refused = ranges, refused
    return calibration


class Calibrations:
    """The calibrations of all calls of a graph. New weights in one call change the inputs of others: all start again."""

    def __init__(self, calls: dict[str, Calibration] | None = None, generation: int = 0) -> None:
        self.calls, self.generation = dict(calls or {}), generation
        self._lock = reset_at_fork(threading.Lock())

    def of(self, call: str, fingerprint: str, inputs: tuple[int, ...], required: int) -> Calibration:
        """Return the calibration of a call with its current weights, new if they changed.

        `inputs` has for each product the dimension of the features of its inputs.
        """
        with self._lock:
            calibration = self.calls.get(call)
            if calibration is not None and calibration.fingerprint != fingerprint:
                self.generation += 1
            if calibration is None or calibration.generation != self.generation:
                calibration = self.calls[call] = Calibration(fingerprint, inputs, required, self.generation)
            return calibration

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            return Calibrations, (dict(self.calls), self.generation)


def fingerprint(constants: Iterable[Any]) -> str:
    """Return a digest of the values of weights."""
    digest = hashlib.sha256()
    for value in constants:
        if isinstance(value, Tensor):
            digest.update(repr((tuple(value.shape), value.dtype)).encode())
            digest.update(value.detach().reshape(-1).contiguous().numpy().data)
    return digest.hexdigest()
