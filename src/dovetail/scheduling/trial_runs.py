"""Runs of a model as some state has it, each from the same start, and what they come to."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from dovetail.ir.graph_module import attribute
from dovetail.numerics.tolerance import precise_operands, rounding
from dovetail.scheduling.call_recording import ModelInputs, opened, undisturbed
from dovetail.scheduling.edits import ReplaceEdit
from dovetail.scheduling.finders import is_within
from dovetail.scheduling.install import Installation
from dovetail.scheduling.replacement_checks import Adapter
from dovetail.scheduling.state import ScheduleState

_LARGEST = 2**32
"""Most bytes that a model may have to be copied in double precision."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one run of a model came to, each value under the words that it is told by."""

    structure: str
    results: dict[str, Any]
    inputs: dict[str, Any]
    buffers: dict[str, Any]
    gradients: dict[str, Any]
    random: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Given:
    """Inputs of a run, with the words they are told by, and whether gradients are recorded."""

    example: ModelInputs
    label: str
    grad: bool


class Streams:
    """The generators that a model can draw from: that of the CPU, and those of the devices it is on."""

    def __init__(self, values: Sequence[Any]) -> None:
        found = {v.device for v in values if isinstance(v, Tensor) and v.device.type not in ("cpu", "meta")}
        self.devices = sorted(found, key=str)

    def read(self) -> dict[str, Tensor]:
        own = {str(d): torch.get_device_module(d).get_rng_state(d).clone() for d in self.devices}
        return {"cpu": torch.get_rng_state(), **own}

    def put(self, states: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        for device in self.devices:
            torch.get_device_module(device).set_rng_state(states[str(device)], device)


class Trial:
    """Runs of one model from the same buffers, parameters and random numbers; nothing is left of them.

    `train` is the mode they are in; None is that of the model.
    """

    def __init__(self, installation: Installation, example: ModelInputs, train: bool | None) -> None:
        self.installation, self.train = installation, train
        with installation.instead(None) as model:
            own = [*model.parameters(), *model.buffers()]
            self.parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            self.size = sum(t.numel() * t.element_size() for t in own)
            self.roundings = {rounding(t.dtype) for t in (*own, *_tensors(example)) if rounding(t.dtype)}
        self.streams = Streams([*own, *_tensors(example)])
        self.start = self.streams.read()

    @contextmanager
    def untouched(self) -> Generator[None]:
        """Leave the generators as they were, whatever runs."""
        try:
            yield
        finally:
            self.streams.put(self.start)

    def records_gradients(self, example: ModelInputs) -> bool:
        """Whether a run has gradients at all."""
        return bool(self.parameters) or any(t.requires_grad for t in _tensors(example))

    def run(self, state: ScheduleState | None, given: Given) -> Outcome:
        """One run of the model as a state has it; None is the model as it was given."""
        with self.installation.instead(state) as model, _in_mode(model, self.train), undisturbed(model):
            unread = set[int]() if state is None else _unread(state)
            return self._outcome(
                model, own_copy(given.example), given.grad, self._targets(model), frozenset(unread)
            )

    def precise(self, given: Given, moved_by: float = 0.0) -> Outcome | None:
        """The model in double precision, its numbers moved by so much of themselves; None where that cannot be."""
        return self._of_copy(given, moved_by, is_double=True)

    def shaken(self, given: Given, moved_by: float) -> Outcome | None:
        """The model in its own precision, its numbers moved: whatever is rounded is rounded otherwise."""
        return self._of_copy(given, moved_by, is_double=False)

    def _of_copy(self, given: Given, moved_by: float, *, is_double: bool) -> Outcome | None:
        if self.size > _LARGEST:
            return None
        try:
            with self.installation.instead(None) as model:
                twin = copy.deepcopy(model)
            twin = twin.double() if is_double else twin
            if moved_by:
                with torch.no_grad():
                    for value in (*twin.parameters(), *twin.buffers()):
                        value.copy_(precise_operands([value], moved_by)[0])
            with _in_mode(twin, self.train):
                example = _precise(given.example, moved_by) if is_double else own_copy(given.example)
                targets = dict(twin.named_parameters())
                wanted = {name: targets[name] for name, _ in self.parameters}
                return self._outcome(twin, example, given.grad, wanted)
        except Exception:
            # Not every operator has double precision; the model alone is compared with then.
            return None

    def _targets(self, model: nn.Module) -> dict[str, Tensor]:
        """What stands for each parameter of the model now: itself, or what has its name; some may have nothing."""
        here = dict(model.named_parameters(remove_duplicate=False))
        known = {id(p) for p in here.values()}
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters:
            now = parameter if id(parameter) in known else here.get(name)
            is_like = now is not None and now.requires_grad and now.shape == parameter.shape
            if now is not None and is_like:
                found[name] = now
        return found

    def _outcome(
        self,
        model: nn.Module,
        example: ModelInputs,
        grad: bool,
        targets: Mapping[str, Tensor],
        unread: frozenset[int] = frozenset(),
    ) -> Outcome:
        self.streams.put(self.start)
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            made = opened(example.call(model))
            leaves, spec = pytree.tree_flatten_with_path(made)
            gradients = _gradients([v for _, v in leaves], targets, example, unread) if grad else {}
        return Outcome(
            structure=str(spec),
            results={_label(i, path): _kept(value) for i, (path, value) in enumerate(leaves)},
            inputs={f"input {i} afterwards": _kept(t) for i, t in enumerate(_tensors(example))},
            buffers={f"buffer '{name}'": _kept(value) for name, value in model.named_buffers()},
            gradients=gradients,
            random={f"the random state of {name}": s for name, s in self.streams.read().items()},
        )


def own_copy(example: ModelInputs) -> ModelInputs:
    """Inputs that a run may change: tensors given twice are the same one again."""
    made: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if id(value) not in made:
            made[id(value)] = _copied(value)
        return made[id(value)]

    args, kwargs = pytree.tree_map(copied, (example.args, dict(example.kwargs)))
    return ModelInputs(args, kwargs)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    try:
        return copy.deepcopy(value)
    except Exception:
        # What cannot be copied is no state of the run, such as a process group.
        return value


def _precise(example: ModelInputs, moved_by: float) -> ModelInputs:
    def wide(value: Any) -> Any:
        return precise_operands([value], moved_by)[0]

    given = own_copy(example)
    return ModelInputs(*pytree.tree_map(wide, (given.args, dict(given.kwargs))))


@contextmanager
def _in_mode(model: nn.Module, train: bool | None) -> Generator[None]:
    modes = [(module, module.training) for module in model.modules()]
    if train is not None:
        model.train(train)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _tensors(example: ModelInputs) -> list[Tensor]:
    leaves = pytree.tree_leaves((example.args, dict(example.kwargs)))
    return list({id(v): v for v in leaves if isinstance(v, Tensor)}.values())


def _unread(state: ScheduleState) -> set[int]:
    """Parameters that nothing reads any more in traced parts, where modules with parameters of their own do instead."""
    replaced = [e.root for e in state.edits if isinstance(e, ReplaceEdit) and e.new and e.new.is_registered]
    found: set[int] = set()
    for root, trace in state.traces.items():
        if not any(is_within(path, root) for path in replaced):
            continue
        read: set[int] = set()
        for _, gm in state.programs(root):
            for node in gm.graph.nodes:
                if node.op == "get_attr" and any(_reads(gm, user, node) for user in node.users):
                    read.add(id(attribute(gm, str(node.target))))
        found |= {id(p) for p in trace.module.parameters()} - read
    return found


def _reads(gm: GraphModule, user: Node, node: Node) -> bool:
    """Whether an operation needs a value: what replaces one is given all operands, and may not take some."""
    called = attribute(gm, str(user.target)) if user.op == "call_module" else None
    if not isinstance(called, Adapter):
        return True
    taken = {*called.order, *called.params.values(), *called.named.values()}
    return any(a is node and i in taken for i, a in enumerate(user.args))


def _label(number: int, path: tuple[Any, ...]) -> str:
    is_plain = len(path) <= 1 and all(isinstance(key, pytree.SequenceKey) for key in path)
    return f"result {number}" if is_plain else f"result {number} ({pytree.keystr(path)})"


def _kept(value: Any) -> Any:
    """A value as it is now, whatever is done to its memory later."""
    if isinstance(value, float):
        return torch.tensor(
            value, dtype=torch.float64
        )  # a number that was read from a tensor is as close as that
    if not isinstance(value, Tensor):
        return value
    dense = value if value.layout is torch.strided else value.to_dense()
    return dense.detach().clone().requires_grad_(value.requires_grad)


def _gradients(
    made: Sequence[Any], targets: Mapping[str, Tensor], example: ModelInputs, unread: frozenset[int]
) -> dict[str, Any]:
    """Gradients of parameters and inputs, for a weighted sum of the results with fixed weights."""
    outputs = [(i, v) for i, v in enumerate(made) if isinstance(v, Tensor) and v.requires_grad]
    leaves = {f"the gradient of '{name}'": value for name, value in targets.items()}
    leaves |= {f"the gradient of input {i}": t for i, t in enumerate(_tensors(example)) if t.requires_grad}
    if not outputs or not leaves:
        return {}
    weights: list[Tensor] = []
    for i, value in outputs:
        numbers = torch.randn(value.shape, generator=torch.Generator().manual_seed(7 + i))
        # Numbers that every dtype holds exactly: all runs must get the same ones.
        weights.append((numbers * 4).round().div(4).to(value.device, value.dtype))
    found: Any = torch.autograd.grad(
        [v for _, v in outputs], list(leaves.values()), weights, allow_unused=True
    )
    return {
        label: torch.zeros_like(leaf) if g is None else _kept(cast("Tensor", g))
        for (label, leaf), g in zip(leaves.items(), found, strict=True)
        if g is not None or id(leaf) not in unread
    }
