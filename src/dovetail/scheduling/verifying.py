"""Whether a scheduled model does what the model did, and which step made it do something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from dovetail.errors import InvalidArgument, ScheduleError, VerificationError
from dovetail.scheduling.history import like
from dovetail.scheduling.judging import Difference, Judge, demand
from dovetail.scheduling.recording import Example
from dovetail.scheduling.state import State
from dovetail.scheduling.trials import Given, Outcome, Trial
from dovetail.scheduling.workspace import Done, Workspace


@dataclass(frozen=True)
class Verdict:
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
    work: Workspace, *, fresh: int = 1, train: bool | None = None, doing: Done | None = None
) -> Verdict:
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
    def __init__(self, work: Workspace, train: bool | None, done: Sequence[Done]) -> None:
        self.work, self.done = work, done
        self.example = work.require_example()
        self.trial = Trial(work.installation, self.example, train)
        # What the model is before each step, and now.
        self.states = [*(d.before for d in done), work.state]
        self.notes: dict[str, None] = {}

    def check(self, fresh: int) -> Verdict:
        """Run everything; the verdict is of all the runs together."""
        runs: list[tuple[Judge, Outcome]] = []
        for given in self._given(fresh):
            judge = self._judge(given)
            if judge is None:
                continue
            made = self._difference(judge, self.work.state)
            if isinstance(made, Difference):
                raise self._located(judge, made)
            runs.append((judge, made))
            self._note_missing(judge.wanted, made)
        return Verdict(
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
                example, label = Example(args, kwargs), f"fresh inputs (number {number})"
            has_gradients = self.trial.records_gradients(example)
            if has_gradients:
                yield Given(example, label, grad=True)
            else:
                self.notes["gradients: nothing requires them"] = None
            if is_lowered or not has_gradients:
                yield Given(example, f"{label}, without gradients" if has_gradients else label, grad=False)

    def _judge(self, given: Given) -> Judge | None:
        """The model's own run; None where fresh inputs are none that it takes."""
        try:
            return Judge(self.trial, given)
        except Exception as error:
            told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if given.example is self.example:
                raise ScheduleError(
                    f"the model itself cannot be run on {given.label}, so there is nothing to compare with: {told}"
                ) from error
            self.notes[f"{given.label}: the model itself does not take them ({told})"] = None
            return None

    def _difference(self, judge: Judge, state: State) -> Difference | Outcome:
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

    def _located(self, judge: Judge, found: Difference) -> VerificationError:
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

    def _error(self, judge: Judge, found: Difference, bad: int) -> VerificationError:
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

    def _tracing(self, judge: Judge, step: int) -> str | None:
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
