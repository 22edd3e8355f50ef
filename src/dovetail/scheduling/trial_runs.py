"""Runs of a model in some state of its schedule, each from the same parameters, buffers and random numbers."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from dovetail.ir.graph_module import attribute
from dovetail.ir.process_state import get_rng_state, set_rng_state
from dovetail.numerics.compare import ModelOutcome, ReferenceRuns, output_gradients
from dovetail.numerics.tolerance import float64_operands, machine_epsilon
from dovetail.scheduling.call_recording import ModelInputs, expand_objects, isolated_run, training_mode
from dovetail.scheduling.edits import ReplaceEdit
from dovetail.scheduling.finders import is_within
from dovetail.scheduling.install import Installation
from dovetail.scheduling.replacement_checks import Adapter
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

    @contextmanager
    def preserve_generators(self) -> Generator[None]:
        """Restore the random generators at the end."""
        try:
            yield
        finally:
            set_rng_state(self.start)

    def records_gradients(self, example: ModelInputs) -> bool:
        """Return whether a run has gradients at all."""
        return bool(self.parameters) or any(t.requires_grad for t in _tensors(example))

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
                    example = _to_float64(example, by)
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
        if id(value) not in copies:
            copies[id(value)] = _copy_value(value)
        return copies[id(value)]

    return ModelInputs(*pytree.tree_map(copied, (example.args, dict(example.kwargs))))


def _copy_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    try:
        return copy.deepcopy(value)
    except Exception:  # what cannot be copied is not state of the run, such as a process group
        return value


def _to_float64(example: ModelInputs, perturbed_by: float) -> ModelInputs:
    def widen(value: Any) -> Any:
        return float64_operands([value], perturbed_by)[0]

    return ModelInputs(*pytree.tree_map(widen, (example.args, dict(example.kwargs))))


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

    return ModelInputs(*pytree.tree_map(fresh, (example.args, dict(example.kwargs))))


def _tensors(example: ModelInputs) -> list[Tensor]:
    leaves = pytree.tree_leaves((example.args, dict(example.kwargs)))
    return list({id(v): v for v in leaves if isinstance(v, Tensor)}.values())


def _unused_parameters(state: ScheduleState) -> set[int]:
    """Return the ids of parameters of traced parts that nothing reads since modules with their own replaced something."""
    replaced = [e.root for e in state.edits if isinstance(e, ReplaceEdit) and e.new and e.new.is_registered]
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
