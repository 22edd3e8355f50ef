"""Whether a scheduled model does what the model did, and which step made it do something else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dovetail.errors import InvalidArgument, ScheduleError, VerificationError
from dovetail.lowering.backend_protocol import resolve, setting
from dovetail.numerics.tolerance import Reference, difference, relative_error, rounding, roundings
from dovetail.outlining.region import regions
from dovetail.scheduling.call_recording import ModelInputs
from dovetail.scheduling.edits import AnnotateEdit, Checkpoint, DecomposeEdit, FuseEdit, LowerEdit
from dovetail.scheduling.finders import ByRegion
from dovetail.scheduling.history import like
from dovetail.scheduling.session import Done, ScheduleSession
from dovetail.scheduling.state import ScheduleState
from dovetail.scheduling.trial_runs import Given, Outcome, Trial

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


def demand(state: ScheduleState, grad: bool) -> Demand:
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


def _keeps_numbers(state: ScheduleState) -> bool:
    """Whether all that was done leaves every number as it was."""
    if state.swaps:
        return False
    for edit in state.edits:
        is_inlined = isinstance(edit, DecomposeEdit) and all(
            isinstance(t.finder, ByRegion) for t in edit.targets
        )
        if not is_inlined and not isinstance(edit, (FuseEdit, AnnotateEdit, LowerEdit)):
            return False
    asked = [b for part in state.graphs.values() for value in part.backends.values() for b in resolve(value)]
    return all(isinstance(backend, Checkpoint) for backend in asked)


class RunComparison:
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


@dataclass(frozen=True)
class VerifyResult:
    """What was compared with the model as it was, and found to be the same.

    `error` is how far results were off, relative to their size; 0 is the same numbers. `notes` tell what was not compared.
    """

    runs: int
    results: int
    gradients: int
    buffers: int
    error: float = 0.0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counted = [
            f"{count} {word}{'' if count == 1 else 's'}"
            for count, word in (
                (self.results, "result"),
                (self.gradients, "gradient"),
                (self.buffers, "buffer"),
            )
            if count
        ]
        close = f"off by {self.error:.1g} of their size at most" if self.error else "the same to the last bit"
        lines = [
            f"verified in {self.runs} run{'' if self.runs == 1 else 's'}: {', '.join([*counted, 'random numbers'])}; "
            f"results {close}"
        ]
        return "\n".join([*lines, *(f"  not compared: {note}" for note in self.notes)])


def verify(
    work: ScheduleSession, *, fresh: int = 1, train: bool | None = None, doing: Done | None = None
) -> VerifyResult:
    """Compare the model as it is scheduled with the model as it was; VerificationError names the step at fault.

    `doing` is a step that is being done, and not yet one of those that were.
    """
    if not isinstance(fresh, int) or isinstance(fresh, bool) or fresh < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"fresh {fresh!r}; give the number of further inputs to try, 0 or more.")
    if train is not None and not isinstance(train, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"train {train!r}; give True, False, or None for the mode of the model.")
    with torch.inference_mode(False):
        checker = _Checker(work, train, [*work.done, *([] if doing is None else [doing])])
        with checker.trial.untouched():
            return checker.check(fresh)


class _Checker:
    def __init__(self, work: ScheduleSession, train: bool | None, done: Sequence[Done]) -> None:
        self.work, self.done = work, done
        self.example = work.require_example()
        self.trial = Trial(work.installation, self.example, train)
        # What the model is before each step, and now.
        self.states = [*(d.before for d in done), work.state]
        self.notes: dict[str, None] = {}

    def check(self, fresh: int) -> VerifyResult:
        """Run everything; the verdict is of all the runs together."""
        runs: list[tuple[RunComparison, Outcome]] = []
        for given in self._given(fresh):
            judge = self._judge(given)
            if judge is None:
                continue
            made = self._difference(judge, self.work.state)
            if isinstance(made, Difference):
                raise self._located(judge, made)
            runs.append((judge, made))
            self._note_missing(judge.wanted, made)
        return VerifyResult(
            runs=len(runs),
            results=max(len(made.results) for _, made in runs),
            gradients=max(len(made.gradients.keys() & j.wanted.gradients.keys()) for j, made in runs),
            buffers=max(len(made.buffers.keys() & j.wanted.buffers.keys()) for j, made in runs),
            error=max(judge.largest_error(made) for judge, made in runs),
            notes=tuple(self.notes),
        )

    def _given(self, fresh: int) -> Iterator[Given]:
        """The inputs, each with and without gradients where code may differ for the two."""
        is_lowered = any(part.backends for part in self.work.state.graphs.values())
        for number in range(fresh + 1):
            example, label = self.example, "the example inputs"
            if number:
                args, kwargs = like((example.args, dict(example.kwargs)), number)
                example, label = ModelInputs(args, kwargs), f"fresh inputs (number {number})"
            has_gradients = self.trial.records_gradients(example)
            if has_gradients:
                yield Given(example, label, grad=True)
            else:
                self.notes["gradients: nothing requires them"] = None
            if is_lowered or not has_gradients:
                yield Given(example, f"{label}, without gradients" if has_gradients else label, grad=False)

    def _judge(self, given: Given) -> RunComparison | None:
        """The model's own run; None where fresh inputs are none that it takes."""
        try:
            return RunComparison(self.trial, given)
        except Exception as error:
            told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if given.example is self.example:
                raise ScheduleError(
                    f"the model itself cannot be run on {given.label}, so there is nothing to compare with: {told}"
                ) from error
            self.notes[f"{given.label}: the model itself does not take them ({told})"] = None
            return None

    def _difference(self, judge: RunComparison, state: ScheduleState) -> Difference | Outcome:
        """What came of a run of a state, or how it differs."""
        try:
            made = self.trial.run(state, judge.given)
        except Exception as error:
            told = f"raises {type(error).__name__}: {error}"
            return Difference("the model as scheduled", told, error)
        return judge.difference(made, demand(state, judge.given.grad)) or made

    def _note_missing(self, wanted: Outcome, made: Outcome) -> None:
        for needs, has in ((wanted.gradients, made.gradients), (wanted.buffers, made.buffers)):
            for label in needs:
                if label not in has:
                    self.notes[f"{label}: it was replaced"] = None

    def _located(self, judge: RunComparison, found: Difference) -> VerificationError:
        """The error for a difference: found among the steps by halving, so that the step named makes a model that
        was right one that is not."""
        own = judge.nondeterministic()
        if own is not None:
            return VerificationError(
                f"the model is not deterministic, so nothing can be compared with it: run twice on {judge.given.label} "
                f"from the same random state, {own}. Make it so, or compare what is random in it by hand",
                what=own.what,
            )
        good, bad = 0, len(self.states) - 1
        if bad:
            first = self._difference(judge, self.states[0])
            bad, found = (0, first) if isinstance(first, Difference) else (bad, found)
        while bad - good > 1:
            middle = (good + bad) // 2
            made = self._difference(judge, self.states[middle])
            if isinstance(made, Difference):
                bad, found = middle, made
            else:
                good = middle
        return self._error(judge, found, bad)

    def _error(self, judge: RunComparison, found: Difference, bad: int) -> VerificationError:
        where = f"on {judge.given.label}, {found}"
        if not bad:
            error = VerificationError(
                f"{where}. No step is at fault: the model differs before the first one", what=found.what
            )
        else:
            entry = self.done[bad - 1].entry
            traced = self._tracing(judge, bad - 1)
            told = told_step(entry)
            fault = (
                f"by step {bad} ({told})" if traced is None else f"by tracing {traced} in step {bad} ({told})"
            )
            error = VerificationError(
                f"{where}. It is made so {fault}", what=found.what, step=bad, entry=entry
            )
        error.__cause__ = found.error
        return error

    def _tracing(self, judge: RunComparison, step: int) -> str | None:
        """The parts that a step traced, where that alone makes the difference."""
        before, after = self.states[step], self.states[step + 1]
        new = [trace for path, trace in after.traces.items() if before.traces.get(path) is not trace]
        if not new or dict(after.swaps) != dict(before.swaps):
            return None
        try:
            with self.work.installation.instead(before, forwards=False) as model:
                state = before.traced(new, self.work.look, model)
        except ScheduleError:
            return None
        if not isinstance(self._difference(judge, state), Difference):
            return None
        return ", ".join(f"'{trace.path}'" if trace.path else "the model" for trace in new)


def told_step(entry: Mapping[str, Any]) -> str:
    """A step of a history in a few words."""
    what = entry.get("name") or entry.get("kind") or entry.get("primitive")
    if not isinstance(what, str):
        what = getattr(entry.get("class"), "__name__", None)
    at = cast("Sequence[Mapping[str, Any]]", entry.get("at", ()))
    paths = dict.fromkeys([*(t["path"] for t in at), *cast("Sequence[str]", entry.get("paths", ()))])
    listed = [f"'{path}'" if path else "the model" for path in paths]
    shown = ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
    return " ".join([str(entry.get("do")), *([what] if what else []), *([f"in {shown}"] if listed else [])])
