"""Verification of a schedule: the scheduled model against the original one, and the step that broke it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from dovetail.errors import InvalidArgument, ScheduleError, VerificationError
from dovetail.lowering.backend_protocol import resolve
from dovetail.numerics.compare import Difference, ModelOutcome, RunComparison
from dovetail.numerics.tolerance import Tolerance, epsilon_range
from dovetail.outlining.region import regions
from dovetail.passes.bisect_passes import first_bad
from dovetail.scheduling.edits import AnnotateEdit, Checkpoint, DecomposeEdit, FuseEdit, LowerEdit
from dovetail.scheduling.finders import ByRegion
from dovetail.scheduling.session import CompletedStep, ScheduleSession
from dovetail.scheduling.state import ScheduleState
from dovetail.scheduling.trial_runs import OriginalRuns, RunInputs, TrialRuns, fresh_inputs


def tolerance_of(state: ScheduleState, grad: bool) -> Tolerance:
    """Return how close a run of a state must be to the original model: equal while only its own code computes.

    Errors of regions whose backends have a bound are independent of each other, so their squares add up.
    """
    squares = 0.0
    for part in state.graphs.values():
        running = {region.name: region.backend for region in regions(part.gm)} if part.backends else {}
        for name, requested in part.backends.items():
            for backend in resolve(requested):
                is_used = running.get(name) == backend.name and (backend.trains or not grad)
                squares += backend.bound**2 if backend.bound is not None and is_used else 0.0
    coarsest = max((epsilon_range(part.gm)[1] for part in state.graphs.values()), default=0.0)
    return Tolerance(_is_exact(state), math.sqrt(squares) or None, coarsest)


def _is_exact(state: ScheduleState) -> bool:
    if state.swaps:
        return False
    for edit in state.edits:
        is_inlined = isinstance(edit, DecomposeEdit) and all(
            isinstance(t.finder, ByRegion) for t in edit.targets
        )
        if not is_inlined and not isinstance(edit, (FuseEdit, AnnotateEdit, LowerEdit)):
            return False
    requested = [value for part in state.graphs.values() for value in part.backends.values()]
    return all(isinstance(backend, Checkpoint) for value in requested for backend in resolve(value))


@dataclass(frozen=True)
class VerifyResult:
    """What was compared with the original model and agreed with it.

    `error` is the largest error of results relative to their size, 0 where they are equal bit for bit. `notes` list
    what was not compared.
    """

    runs: int
    results: int
    gradients: int
    buffers: int
    error: float = 0.0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = ((self.results, "result"), (self.gradients, "gradient"), (self.buffers, "buffer"))
        counted = [f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts if count]
        close = f"off by {self.error:.1g} of their size at most" if self.error else "the same to the last bit"
        first = (
            f"verified in {self.runs} run{'' if self.runs == 1 else 's'}: {', '.join([*counted, 'random numbers'])}; "
            f"results {close}"
        )
        return "\n".join([first, *(f"  not compared: {note}" for note in self.notes)])


def verify(
    session: ScheduleSession,
    *,
    fresh: int = 1,
    train: bool | None = None,
    doing: CompletedStep | None = None,
) -> VerifyResult:
    """Compare the scheduled model with the original one; VerificationError names the step that broke it.

    `doing` is a step that is being done, and not yet among the completed ones.
    """
    if not isinstance(fresh, int) or isinstance(fresh, bool) or fresh < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"fresh {fresh!r}; give the number of further inputs to try, 0 or more.")
    if train is not None and not isinstance(train, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"train {train!r}; give True, False, or None for the mode of the model.")
    with torch.inference_mode(False):
        steps = [*session.completed, *([] if doing is None else [doing])]
        verifier = _ScheduleVerifier(session, train, steps)
        with verifier.trial.preserve_generators():
            return verifier.verify(fresh)


class _ScheduleVerifier:
    def __init__(self, session: ScheduleSession, train: bool | None, steps: Sequence[CompletedStep]) -> None:
        self.session, self.steps = session, steps
        self.example = session.require_example()
        self.trial = TrialRuns(session.installation, self.example, train)
        # Before each step, and now.
        self.states = [*(step.before for step in steps), session.state]
        self.notes: dict[str, None] = {}

    def verify(self, fresh: int) -> VerifyResult:
        runs: list[tuple[ModelOutcome, ModelOutcome, float]] = []
        for inputs in self._inputs(fresh):
            comparison = self._original_run(inputs)
            if comparison is None:
                continue
            outcome = self._compare(comparison, inputs, self.session.state)
            if isinstance(outcome, Difference):
                raise self._located_error(comparison, inputs, outcome)
            expected = comparison.expected
            runs.append((expected, outcome, comparison.largest_error(outcome)))
            for needs, has in ((expected.gradients, outcome.gradients), (expected.buffers, outcome.buffers)):
                self.notes |= {f"{label}: it was replaced": None for label in needs if label not in has}
        return VerifyResult(
            runs=len(runs),
            results=max(len(outcome.results) for _, outcome, _ in runs),
            gradients=max(len(has.gradients.keys() & needs.gradients.keys()) for needs, has, _ in runs),
            buffers=max(len(has.buffers.keys() & needs.buffers.keys()) for needs, has, _ in runs),
            error=max(error for _, _, error in runs),
            notes=tuple(self.notes),
        )

    def _inputs(self, fresh: int) -> Iterator[RunInputs]:
        """Yield the inputs, each with and without gradients where compiled code may differ for the two."""
        is_lowered = any(part.backends for part in self.session.state.graphs.values())
        for number in range(fresh + 1):
            example, label = self.example, "the example inputs"
            if number:
                example, label = fresh_inputs(example, number), f"fresh inputs (number {number})"
            has_gradients = self.trial.records_gradients(example)
            if has_gradients:
                yield RunInputs(example, label, grad=True)
            else:
                self.notes["gradients: nothing requires them"] = None
            if is_lowered or not has_gradients:
                yield RunInputs(
                    example, f"{label}, without gradients" if has_gradients else label, grad=False
                )

    def _original_run(self, inputs: RunInputs) -> RunComparison | None:
        """Run the original model; None where it rejects fresh inputs."""
        try:
            return RunComparison(OriginalRuns(self.trial, inputs))
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if inputs.example is self.example:
                raise ScheduleError(
                    f"the model itself cannot be run on {inputs.label}, so there is nothing to compare with: {reason}"
                ) from error
            self.notes[f"{inputs.label}: the model itself does not take them ({reason})"] = None
            return None

    def _compare(
        self, comparison: RunComparison, inputs: RunInputs, state: ScheduleState
    ) -> Difference | ModelOutcome:
        try:
            outcome = self.trial.run(state, inputs)
        except Exception as error:
            return Difference("the model as scheduled", f"raises {type(error).__name__}: {error}", error)
        return comparison.difference(outcome, tolerance_of(state, inputs.grad)) or outcome

    def _located_error(
        self, comparison: RunComparison, inputs: RunInputs, difference: Difference
    ) -> VerificationError:
        """Return the error for a difference, with a step before which the model was right and after which it is not."""
        own = comparison.nondeterminism()
        if own is not None:
            return VerificationError(
                f"the model is not deterministic, so nothing can be compared with it: run twice on {inputs.label} "
                f"from the same random state, {own}. Make it so, or compare what is random in it by hand",
                what=own.what,
            )
        bad = len(self.states) - 1
        if bad:
            first = self._compare(comparison, inputs, self.states[0])
            bad, difference = (0, first) if isinstance(first, Difference) else (bad, difference)
        differences: dict[int, Difference] = {}

        def is_bad(count: int) -> bool:
            outcome = self._compare(comparison, inputs, self.states[count])
            if isinstance(outcome, Difference):
                differences[count] = outcome
            return count in differences

        bad = first_bad(0, bad, is_bad)
        difference = differences.get(bad, difference)
        message = f"on {inputs.label}, {difference}"
        if not bad:
            error = VerificationError(
                f"{message}. No step is at fault: the model differs before the first one",
                what=difference.what,
            )
        else:
            entry = self.steps[bad - 1].entry
            parts = self._broken_by_tracing(comparison, inputs, bad - 1)
            step = f"step {bad} ({describe_step(entry)})"
            cause = step if parts is None else f"tracing {parts} in {step}"
            error = VerificationError(
                f"{message}. It is made so by {cause}", what=difference.what, step=bad, entry=entry
            )
        error.__cause__ = difference.error
        return error

    def _broken_by_tracing(self, comparison: RunComparison, inputs: RunInputs, step: int) -> str | None:
        """Return the parts that a step traced where tracing alone makes the difference; None otherwise."""
        before, after = self.states[step], self.states[step + 1]
        new = [trace for path, trace in after.traces.items() if before.traces.get(path) is not trace]
        if not new or dict(after.swaps) != dict(before.swaps):
            return None
        try:
            with self.session.installation.temporarily(before, forwards=False) as model:
                state = before.with_traces(new, self.session.contexts, model)
        except ScheduleError:
            return None
        if not isinstance(self._compare(comparison, inputs, state), Difference):
            return None
        return ", ".join(f"'{trace.path}'" if trace.path else "the model" for trace in new)


def describe_step(entry: Mapping[str, Any]) -> str:
    """Describe a step of a history in a few words."""
    what = entry.get("name") or entry.get("kind") or entry.get("primitive")
    if not isinstance(what, str):
        what = getattr(entry.get("class"), "__name__", None)
    at = cast("Sequence[Mapping[str, Any]]", entry.get("at", ()))
    paths = dict.fromkeys([*(t["path"] for t in at), *cast("Sequence[str]", entry.get("paths", ()))])
    names = [f"'{path}'" if path else "the model" for path in paths]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return " ".join([str(entry.get("do")), *([what] if what else []), *([f"in {shown}"] if names else [])])
