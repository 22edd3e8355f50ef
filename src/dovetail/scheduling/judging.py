"""Whether two runs of a model came to the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dovetail.lowering.backend import resolve, setting
from dovetail.lowering.closeness import Reference, difference, relative_error, rounding
from dovetail.lowering.precise import roundings
from dovetail.outlining.region import regions
from dovetail.scheduling.checkpointing import Checkpoint
from dovetail.scheduling.edits import Annotate, Decompose, Fuse, Lower
from dovetail.scheduling.finders import ByRegion
from dovetail.scheduling.state import State
from dovetail.scheduling.trials import Given, Outcome, Trial

_NOISIEST = 0.1
"""The largest error of a model's own numbers, relative to their size, that is taken for rounding."""


@dataclass(frozen=True, eq=False)
class Difference:
    """What is not as it was, and how."""

    what: str
    how: str
    error: Exception | None = None

    def __str__(self) -> str:
        return f"{self.what} {self.how}"


@dataclass(frozen=True)
class Demand:
    """How close numbers must be: the same, within rounding, or within what backends say they keep to."""

    is_exact: bool = False
    bound: float | None = None
    coarsest: float = 0.0


def demand(state: State, grad: bool) -> Demand:
    """What is asked of a state after a run of it.

    The same numbers while no other code than the model's own computes them. Errors of regions that have a bound of
    their own are independent of each other: those of several add up as their squares do.
    """
    squares = 0.0
    for part in state.graphs.values():
        here = {region.name: region.backend for region in regions(part.gm)} if part.backends else {}
        for name, asked in part.backends.items():
            for backend in resolve(asked):
                bound = setting(backend, "bound")
                runs = here.get(name) == backend.name and (setting(backend, "trains") or not grad)
                squares += bound**2 if bound is not None and runs else 0.0
    coarsest = max((roundings(part.gm)[1] for part in state.graphs.values()), default=0.0)
    return Demand(_keeps_numbers(state), math.sqrt(squares) or None, coarsest)


def _keeps_numbers(state: State) -> bool:
    """Whether all that was done leaves every number as it was."""
    if state.swaps:
        return False
    for edit in state.edits:
        is_inlined = isinstance(edit, Decompose) and all(isinstance(t.finder, ByRegion) for t in edit.targets)
        if not is_inlined and not isinstance(edit, (Fuse, Annotate, Lower)):
            return False
    asked = [b for part in state.graphs.values() for value in part.backends.values() for b in resolve(value)]
    return all(isinstance(backend, Checkpoint) for backend in asked)


class Judge:
    """Compares runs on some inputs with the model's own one; more runs of the model are made when they are needed."""

    def __init__(self, trial: Trial, given: Given) -> None:
        self.trial, self.given = trial, given
        self.wanted = trial.run(None, given)
        self._again: Outcome | None = None
        self._shaken: list[Outcome] | None = None
        self._far_moved: dict[float, list[Outcome]] = {}
        self._precise: tuple[Outcome | None, Outcome | None] | None = None

    def again(self) -> Outcome:
        """A second run of the model itself."""
        if self._again is None:
            self._again = self.trial.run(None, self.given)
        return self._again

    def difference(self, made: Outcome, wanted: Demand) -> Difference | None:
        """The first thing that is not as in the model: random numbers, results, inputs, buffers, gradients."""
        needs = self.wanted
        for label, state in needs.random.items():
            if not torch.equal(made.random[label], state):
                return Difference(label, "is another one: more, fewer or other random numbers were drawn")
        if made.structure != needs.structure:
            return Difference("the results", f"have the structure {made.structure}, not {needs.structure}")
        parts = (
            (made.results, needs.results, wanted),
            (made.inputs, needs.inputs, wanted),
            (made.buffers, needs.buffers, wanted),
            (made.gradients, needs.gradients, Demand(False, wanted.bound, wanted.coarsest)),
        )
        for has, values, asked in parts:
            for label, value in values.items():
                how = self._wrong(has[label], value, label, asked) if label in has else None
                if how is not None:
                    return Difference(label, how)
        return None

    def nondeterministic(self) -> Difference | None:
        """How the model differs from itself, beyond rounding."""
        return self.difference(self.again(), Demand())

    def largest_error(self, made: Outcome) -> float:
        """The largest relative error among results of floating numbers."""
        errors = [
            relative_error(has, needs)
            for label, needs in self.wanted.results.items()
            if isinstance(needs, Tensor)
            and rounding(needs.dtype)
            and not _same(has := made.results[label], needs)
        ]
        return max(errors, default=0.0)

    def _wrong(self, has: Any, needs: Any, label: str, asked: Demand) -> str | None:
        if not isinstance(needs, Tensor):
            return _otherwise(has, needs)
        if not isinstance(has, Tensor):
            return f"is a {type(has).__name__}, not a tensor"
        if has.device != needs.device:
            return f"is on {has.device}, not on {needs.device}"
        if has.requires_grad != needs.requires_grad:
            return "requires gradients" if has.requires_grad else "has no gradients"
        if _same(has, needs):
            return None
        if asked.bound is not None:
            is_like = has.shape == needs.shape and has.dtype == needs.dtype
            if is_like and not rounding(needs.dtype):
                return self._other_numbers(has, needs, label, asked.bound)
            return self._far(has, Reference(needs, bound=asked.bound))
        return self._beyond_rounding(has, needs, label, asked)

    def _other_numbers(self, has: Tensor, needs: Tensor, label: str, bound: float) -> str | None:
        """How whole numbers differ: more than a share of `bound` of those that hold when the model is moved as far."""
        other = has != needs
        for moved in self._moved(bound):
            found = _found(moved, label, needs)
            other = other if found is None else other & (found == needs)
        wrong = int(other.sum())
        if wrong <= bound * other.numel():
            return None
        return (
            f"has other whole numbers, {wrong} of {other.numel()}, where the model keeps its own if all of it is off "
            f"by {bound:.1%}"
        )

    def _moved(self, bound: float) -> list[Outcome]:
        """The model's own runs with its numbers moved by as much as a bound allows."""
        if bound not in self._far_moved:
            found = [self.trial.shaken(self.given, by) for by in (bound, -bound)]
            self._far_moved[bound] = [o for o in found if o is not None]
        return self._far_moved[bound]

    def _beyond_rounding(self, has: Tensor, needs: Tensor, label: str, asked: Demand) -> str | None:
        precise, moved = (_found(outcome, label, needs) for outcome in self._references())
        coarsest = max((asked.coarsest, rounding(needs.dtype), *self.trial.roundings))
        far = self._far(has, Reference(needs, precise, moved, coarsest))
        if far is not None and precise is not None and self._is_as_good(has, needs, precise, label):
            far = None
        if far is not None or not asked.is_exact or not _same(self._known(self.again(), label), needs):
            return far
        most = float((has.detach().double() - needs.detach().double()).abs().nan_to_num(0.0).max())
        return f"is off by {most:.2g} at most, and nothing was done that may change a number"

    def _is_as_good(self, has: Tensor, needs: Tensor, precise: Tensor, label: str) -> bool:
        """Whether a value is no further from that in double precision than a few times what the model's own is.

        Gradients that nearly cancel, as before a batch norm, have few digits in any order of summation; how few, the
        model tells when its numbers are moved by a rounding.
        """
        if has.shape != needs.shape or has.dtype != needs.dtype or not rounding(needs.dtype):
            return False
        own = [needs, *(_found(outcome, label, needs) for outcome in self._noise())]
        made, *samples = (
            (v.detach().to(precise.dtype) - precise).abs() for v in (has, *own) if v is not None
        )
        if not all(bool(off.isfinite().all()) for off in (made, *samples)):
            return False
        mean, most = max(_mean(s) for s in samples), max(float(s.max()) for s in samples)
        is_noise = mean <= _NOISIEST * _mean(precise) or mean <= self._smallest(label)
        return is_noise and _mean(made) <= 4 * mean and float(made.max()) <= 8 * most

    def _smallest(self, label: str) -> float:
        """What is nothing but rounding beside the largest of the values that a value is one of."""
        all_alike = (self.wanted.results, self.wanted.buffers, self.wanted.gradients)
        alike = next((values for values in all_alike if label in values), {})
        sizes = [
            _mean(v.detach())
            for v in alike.values()
            if isinstance(v, Tensor) and v.is_floating_point() and v.numel()
        ]
        return min(_NOISIEST, 100 * max(self.trial.roundings, default=0.0)) * max(sizes, default=0.0)

    def _noise(self) -> list[Outcome]:
        """The model's own run with its numbers moved by a rounding, in a few ways."""
        if self._shaken is None:
            by = max(self.trial.roundings, default=0.0)
            found = [self.trial.shaken(self.given, step * by) for step in (1, -1, 2)]
            self._shaken = [o for o in found if o is not None and _same_numbers_drawn(o, self.wanted)]
        return self._shaken

    @staticmethod
    def _known(outcome: Outcome, label: str) -> Any:
        return {**outcome.results, **outcome.inputs, **outcome.buffers}.get(label)

    @staticmethod
    def _far(has: Tensor, reference: Reference) -> str | None:
        told = difference(has.detach(), reference)
        return None if told is None else told.replace("the body has", "the model has")

    def _references(self) -> tuple[Outcome | None, Outcome | None]:
        """The model in double precision, as it is and with its numbers moved by a few roundings."""
        if self._precise is None:
            finest = min(self.trial.roundings, default=0.0)
            moved_by = (64 if finest < 1e-6 else 2) * finest
            precise = self.trial.precise(self.given)
            if precise is not None and not _same_numbers_drawn(precise, self.wanted):
                precise = None
            self._precise = (
                precise,
                self.trial.precise(self.given, moved_by) if precise is not None else None,
            )
        return self._precise


def _same_numbers_drawn(a: Outcome, b: Outcome) -> bool:
    return all(torch.equal(state, b.random[label]) for label, state in a.random.items())


def _found(outcome: Outcome | None, label: str, like: Tensor) -> Tensor | None:
    if outcome is None:
        return None
    values: Mapping[str, Any] = {
        **outcome.results,
        **outcome.inputs,
        **outcome.buffers,
        **outcome.gradients,
    }
    value = values.get(label)
    if not isinstance(value, Tensor) or value.shape != like.shape:
        return None
    return value.detach() if bool(rounding(value.dtype)) == bool(rounding(like.dtype)) else None


def _mean(value: Tensor) -> float:
    """The root of the mean square."""
    return float(value.abs().square().mean().sqrt())


def _same(a: Any, b: Tensor) -> bool:
    """Whether two tensors have the same numbers, NaN where there was NaN."""
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    x, y = a.detach(), b.detach()
    return bool(((x == y) | ((x != x) & (y != y))).all())


def _otherwise(has: Any, needs: Any) -> str | None:
    """How a value that is no tensor differs; what cannot be compared is of the same class at least."""
    if type(has) is not type(needs):
        return f"is a {type(has).__name__}, not a {type(needs).__name__}"
    try:
        is_equal = bool(has == needs)
    except Exception:  # a class of the user's that cannot be compared
        return None
    is_plain = type(needs).__eq__ is not object.__eq__
    return f"is {has!r}, not {needs!r}" if is_plain and not is_equal else None
