"""Verification of a schedule: trial runs of the model under some state, compared with the original, and the step that broke it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, ScheduleError, VerificationError
from dovetail.ir.graph_module import attribute
from dovetail.ir.module_paths import is_within
from dovetail.ir.process_state import get_rng_state, set_rng_state
from dovetail.lowering.backend_protocol import resolve
from dovetail.numerics.compare import Difference, ModelOutcome, ReferenceRuns, RunComparison, output_gradients
from dovetail.numerics.tolerance import Tolerance, epsilon_range, float64_operands, machine_epsilon
from dovetail.outlining.region import regions
from dovetail.passes.bisect_passes import first_bad
from dovetail.scheduling.call_recording import ModelInputs, expand_objects, isolated_run, training_mode
from dovetail.scheduling.edits import (
    AnnotateEdit,
    Checkpoint,
    DecomposeEdit,
    FuseEdit,
    LowerEdit,
    ReplaceEdit,
)
from dovetail.scheduling.finders import ByRegion
from dovetail.scheduling.install import Installation
from dovetail.scheduling.replacement_checks import Adapter
from dovetail.scheduling.session import CompletedStep, ScheduleSession
from dovetail.scheduling.state import ScheduleState

_MAX_COPIED_BYTES = 2**32
"""Size up to which a model is copied for perturbed and float64 runs."""


@dataclass(frozen=True, eq=False)
class RunInputs:
    """Inputs of a run, their name in messages, and whether gradients are recorded."""

    example: ModelInputs
    label: str
    grad: bool


class TrialRuns:
    """Runs of one model that leave it as it was; `train` is their mode, None that of the model."""

    def __init__(self, installation: Installation, example: ModelInputs, train: bool | None) -> None:
        self.installation, self.train = installation, train
        with installation.temporarily(None) as model:
            state = [*model.parameters(), *model.buffers()]
            self.parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        tensors = [*state, *_tensors(example)]
        self.size = sum(t.numel() * t.element_size() for t in state)
        self.epsilons = {machine_epsilon(t.dtype) for t in tensors} - {0.0}
        self.devices = sorted({t.device for t in tensors if t.device.type not in ("cpu", "meta")}, key=str)
        self.start = get_rng_state(self.devices)

    def run(self, state: ScheduleState | None, inputs: RunInputs) -> ModelOutcome:
        """Run the model in a state of its schedule; None is the original model."""
        with (
            self.installation.temporarily(state) as model,
            training_mode(model, self.train),
            isolated_run(model),
        ):
            unused = set[int]() if state is None else _unused_parameters(state)
            return self._outcome(
                model, copy_inputs(inputs.example), inputs.grad, self._targets(model), frozenset(unused)
            )

    def run_module(self, module: nn.Module, inputs: RunInputs) -> ModelOutcome:
        """Run a module that shares the state of the original model, such as a compiled one."""
        with (
            self.installation.temporarily(None) as model,
            training_mode(model, self.train),
            isolated_run(model),
        ):
            return self._outcome(module, copy_inputs(inputs.example), inputs.grad, self._targets(model))

    def run_perturbed(self, inputs: RunInputs, by: float, *, float64: bool) -> ModelOutcome | None:
        """Run a copy of the original model with each number moved by so much of itself, on request in float64.

        None where the model is too large to be copied, or has an operator without a float64 kernel.
        """
        if self.size > _MAX_COPIED_BYTES:
            return None
        try:
            with self.installation.temporarily(None) as model:
                twin = copy.deepcopy(model)
            twin = twin.double() if float64 else twin
            if by:
                with torch.no_grad():
                    for value in (*twin.parameters(), *twin.buffers()):
                        value.copy_(float64_operands([value], by)[0])
            with training_mode(twin, self.train):
                example = copy_inputs(inputs.example)
                if float64:
                    example = example.map(lambda value: float64_operands([value], by)[0])
                parameters = dict(twin.named_parameters())
                targets = {name: parameters[name] for name, _ in self.parameters}
                return self._outcome(twin, example, inputs.grad, targets)
        except Exception:  # the original model alone is the reference then
            return None

    def _targets(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the parameter that a name of the original model stands for now, where there is a comparable one."""
        current = dict(model.named_parameters(remove_duplicate=False))
        present = {id(p) for p in current.values()}
        targets: dict[str, Tensor] = {}
        for name, parameter in self.parameters:
            now = parameter if id(parameter) in present else current.get(name)
            if now is not None and now.requires_grad and now.shape == parameter.shape:
                targets[name] = now
        return targets

    def _outcome(
        self,
        model: nn.Module,
        example: ModelInputs,
        grad: bool,
        targets: Mapping[str, Tensor],
        unused: frozenset[int] = frozenset(),
    ) -> ModelOutcome:
        set_rng_state(self.start)
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            leaves, spec = pytree.tree_flatten_with_path(expand_objects(example.call(model)))
            gradients = _gradients([v for _, v in leaves], targets, example, unused) if grad else {}
        return ModelOutcome(
            structure=str(spec),
            results={_label(i, path): _snapshot(value) for i, (path, value) in enumerate(leaves)},
            inputs={f"input {i} afterwards": _snapshot(t) for i, t in enumerate(_tensors(example))},
            buffers={f"buffer '{name}'": _snapshot(value) for name, value in model.named_buffers()},
            gradients=gradients,
            random={f"the random state of {name}": s for name, s in get_rng_state(self.devices).items()},
        )


@dataclass(frozen=True, eq=False)
class OriginalRuns(ReferenceRuns):
    """Runs of the original model on certain inputs."""

    trial: TrialRuns
    inputs: RunInputs

    @property
    def epsilons(self) -> set[float]:
        return self.trial.epsilons

    def run(self) -> ModelOutcome:
        return self.trial.run(None, self.inputs)

    def run_perturbed(self, by: float, *, float64: bool = False) -> ModelOutcome | None:
        return self.trial.run_perturbed(self.inputs, by, float64=float64)


def copy_inputs(example: ModelInputs) -> ModelInputs:
    """Return inputs that a run may change; a value that is passed twice is one copy passed twice."""
    copies: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = _copy_value(value)
        return copies[id(value)]

    return example.copied().map(copied)


def _copy_value(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # what cannot be copied is not state of the run, such as a process group
        return value


def fresh_inputs(example: ModelInputs, seed: int) -> ModelInputs:
    """Return inputs like others: random numbers for floating-point ones, integers of the same tensor permuted."""
    generator = torch.Generator().manual_seed(seed)

    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype.is_floating_point or value.dtype.is_complex:
            numbers = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
            return numbers.requires_grad_() if value.requires_grad else numbers
        order = torch.randperm(value.numel(), generator=generator).to(value.device)
        return value.reshape(-1)[order].reshape(value.shape)

    return example.map(fresh)


def _tensors(example: ModelInputs) -> list[Tensor]:
    leaves = pytree.tree_leaves((example.args, dict(example.kwargs)))
    return list({id(v): v for v in leaves if isinstance(v, Tensor)}.values())


def _unused_parameters(state: ScheduleState) -> set[int]:
    """Return the ids of parameters of traced parts that nothing reads since modules with their own replaced something."""
    replacements = [e for e in state.edits if isinstance(e, ReplaceEdit) and e.new]
    replaced = [e.root for e in replacements if isinstance(e.new and e.new.new, nn.Module)]
    unused: set[int] = set()
    for root, trace in state.traces.items():
        if not any(is_within(path, root) for path in replaced):
            continue
        read: set[int] = set()
        for _, gm in state.programs(root):
            for node in gm.graph.nodes:
                if node.op == "get_attr" and any(_reads(gm, user, node) for user in node.users):
                    read.add(id(attribute(gm, str(node.target))))
        unused |= {id(p) for p in trace.module.parameters()} - read
    return unused


def _reads(gm: GraphModule, user: Node, node: Node) -> bool:
    """Return whether an operation uses a value: a replacement is passed all operands, and may ignore some."""
    called = attribute(gm, str(user.target)) if user.op == "call_module" else None
    if not isinstance(called, Adapter):
        return True
    used = {*called.order, *called.params.values(), *called.named.values()}
    return any(a is node and i in used for i, a in enumerate(user.args))


def _label(number: int, path: tuple[Any, ...]) -> str:
    is_flat = len(path) <= 1 and all(isinstance(key, pytree.SequenceKey) for key in path)
    return f"result {number}" if is_flat else f"result {number} ({pytree.keystr(path)})"


def _snapshot(value: Any) -> Any:
    if isinstance(value, float):  # read from a tensor, and as close as that
        return torch.tensor(value, dtype=torch.float64)
    if not isinstance(value, Tensor):
        return value
    dense = value if value.layout is torch.strided else value.to_dense()
    return dense.detach().clone().requires_grad_(value.requires_grad)


def _gradients(
    results: Sequence[Any], targets: Mapping[str, Tensor], example: ModelInputs, unused: frozenset[int]
) -> dict[str, Any]:
    leaves = {f"the gradient of '{name}'": value for name, value in targets.items()}
    leaves |= {f"the gradient of input {i}": t for i, t in enumerate(_tensors(example)) if t.requires_grad}
    gradients = output_gradients(results, list(leaves.values())) if leaves else None
    return {
        label: torch.zeros_like(leaf) if gradient is None else _snapshot(gradient)
        for (label, leaf), gradient in zip(leaves.items(), gradients or (), strict=False)
        if gradient is not None or id(leaf) not in unused
    }


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
        try:
            return verifier.verify(fresh)
        finally:
            set_rng_state(verifier.trial.start)


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
            has_gradients = self.trial.parameters or any(t.requires_grad for t in _tensors(example))
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
