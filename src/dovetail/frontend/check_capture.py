"""Comparison of a captured graph with its model on the example inputs, from the same state, which is restored."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Interpreter, Node

from dovetail.errors import CaptureMismatch
from dovetail.frontend import model_copy, side_effects
from dovetail.frontend.calling_convention import convention_of
from dovetail.frontend.operator_recorder import OperatorRecorder
from dovetail.frontend.tensor_effects import generators_of
from dovetail.ir.meta_keys import OPERATORS
from dovetail.ir.process_state import preserve_rng_state

_log = logging.getLogger(__name__)
_MOST_COPIED = 2**31
"""Bytes up to which every parameter is copied before the runs; of a larger model only buffers are."""
_ROUNDINGS = 64


@dataclass(frozen=True)
class _Run:
    """The results of one forward and the state after it, by label."""

    values: dict[str, Any]
    structure: str


def check_against_model(
    model: Callable[..., Any],
    graph: GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    replayed: Mapping[str, str],
) -> bool:
    """Raise CaptureMismatch unless the graph does what the model does on these inputs; return whether that was compared.

    Results, inputs and buffers afterwards, and the random streams are compared, and the operators of `replayed` layers with
    those of the layers that they were copied from; gradients are not. The operators of the model are compared with those of
    the first comparison, in another process, of a graph that was stored. Two forwards are run from the same state, and
    two more to find the module where they differ. Nothing is compared on inputs without data, or if the model itself
    cannot be run or is not deterministic.
    """
    if not has_data((args, dict(kwargs)), graph):
        return False
    trial = _ModelTrial(model, graph, args, dict(kwargs))
    recorder = OperatorRecorder(
        trial.state, list(dict.fromkeys([*replayed, *replayed.values()])), static=_has_static_sizes(graph)
    )
    try:
        with recorder.active():
            expected = trial.run(model)
    except Exception as error:
        _log.debug("the model cannot be run on its example inputs: %s", error)
        return False
    if (difference := recorder.difference(replayed)) is not None:
        raise CaptureMismatch(difference)
    digests: dict[bool, str] = graph.meta.setdefault(OPERATORS, {})
    # In inference some modules and functions of torch run other operators.
    if digests.setdefault(torch.is_grad_enabled(), recorder.digest) != recorder.digest:
        raise CaptureMismatch("the model runs other operators than when it was traced")
    try:
        actual = trial.run(graph, is_graph=True)
    except Exception as error:
        raise CaptureMismatch(f"the captured graph raises {type(error).__name__}: {error}") from error
    what = _first_difference(expected, actual)
    if what is None:
        return True
    if _first_difference(expected, trial.run(model)) is not None:
        return False  # the model is not deterministic
    module, how = trial.first_module()
    raise CaptureMismatch(what, module=module, how=how)


def has_data(inputs: Any, *modules: Any) -> bool:
    """Return whether all tensors of a call and of some modules have data, so that it can be run."""
    held = [t for m in modules if isinstance(m, nn.Module) for t in (*m.parameters(), *m.buffers())]
    tensors = [leaf for leaf in (*pytree.tree_leaves(inputs), *held) if isinstance(leaf, Tensor)]
    return not any(isinstance(t, FakeTensor) or t.is_meta for t in tensors)


def _has_static_sizes(graph: GraphModule) -> bool:
    values = (node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder"))
    tensors = (value for value in values if isinstance(value, Tensor))
    return not any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape)


class _ModelTrial:
    def __init__(
        self, model: Callable[..., Any], graph: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.model, self.graph = model, graph
        self.args, self.kwargs = args, kwargs
        self.state = _state_of(model, args, kwargs)
        self.buffers = [name for name, _ in self.state.named_buffers(remove_duplicate=False)]

    def run(self, target: Callable[..., Any], *, is_graph: bool = False) -> _Run:
        args, kwargs = self._inputs()
        with self._restored(), _autocast_off() if is_graph else contextlib.nullcontext():
            result = target(*args, **kwargs)
            leaves, spec = pytree.tree_flatten(result)
            values: dict[str, Any] = {f"result {i}": _kept(leaf) for i, leaf in enumerate(leaves)}
            given = pytree.tree_leaves((args, kwargs))
            values |= {
                f"input {i} afterwards": _kept(x) for i, x in enumerate(given) if isinstance(x, Tensor)
            }
            # Forward may give a buffer another tensor; a graph writes into the one that it shares with the model.
            held = dict((self.graph if is_graph else self.state).named_buffers(remove_duplicate=False))
            names = dict.fromkeys([*self.buffers, *(() if is_graph else held)])
            values |= {f"buffer '{name}' afterwards": _kept(held.get(name)) for name in names}
            values["the random stream"] = torch.get_rng_state()
            if torch.cuda.is_initialized():
                for i, state in enumerate(torch.cuda.get_rng_state_all()):
                    values[f"the random stream of cuda:{i}"] = state
            for i, generator in enumerate(generators_of(self.state)):
                values[f"the stream of generator {i}"] = generator.get_state()
        return _Run(values, str(spec))

    def first_module(self) -> tuple[str, str]:
        """Return the first module whose result no value of the graph equals, and the least difference."""
        outputs = self._module_outputs()
        values = self._node_values()
        for path, expected in outputs:
            inside = [v for node, v in values if path in _module_paths(node) and _is_like(v, expected)]
            candidates = inside or [v for _, v in values if _is_like(v, expected)]
            reasons = [_difference(value, expected) for value in candidates]
            if candidates and None not in reasons:
                return path, f"its result {reasons[-1]}"
        return "", ""

    def _module_outputs(self) -> list[tuple[str, Tensor]]:
        outputs: list[tuple[str, Tensor]] = []

        def recorder(path: str) -> Callable[..., None]:
            def record(module: nn.Module, args: Any, result: Any) -> None:
                first = next((x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)), None)
                if first is not None:
                    outputs.append((path, _kept(first)))

            return record

        hooks = [m.register_forward_hook(recorder(path)) for path, m in self.state.named_modules() if path]
        args, kwargs = self._inputs()
        try:
            with self._restored():
                self.model(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        return outputs

    def _node_values(self) -> list[tuple[Node, Tensor]]:
        values: list[tuple[Node, Tensor]] = []

        class Recorder(Interpreter):
            def run_node(self, n: Node) -> Any:
                value = super().run_node(n)
                if n.op == "call_function" and isinstance(value, Tensor):
                    values.append((n, _kept(value)))
                return value

        args, kwargs = self._inputs()
        convention = convention_of(self.graph)
        if convention is not None:
            with self._restored(), _autocast_off():
                flat = convention.bind(self.graph, convention.spread(args, kwargs))
                Recorder(self.graph).run(*flat, enable_io_processing=False)
        return values

    def _inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return copy_inputs(self.args, self.kwargs)

    def _restored(self) -> contextlib.AbstractContextManager[None]:
        return preserve_module_state(self.state, self.graph)


def copy_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a call with their tensors copied, so that a trial run may write them."""
    copies: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = _copy(value)
        return copies[id(value)]

    return pytree.tree_map(copied, (args, dict(kwargs)))


@contextlib.contextmanager
def preserve_module_state(*roots: nn.Module) -> Generator[None]:
    """Restore parameters, buffers, gradients and random streams of modules at the end, and attributes except of graphs.

    Parameters of more than 2 GiB in all are not copied, so that writes to them remain.
    """
    attributes = [side_effects.snapshot(root) for root in roots if not isinstance(root, GraphModule)]
    modules = [m for root in roots for m in root.modules()]
    holders: list[tuple[Any, dict[str, Any]]] = [
        (holder, dict(holder.items())) for m in modules for holder in (m._buffers, m._parameters)
    ]
    state: dict[int, Any] = {id(t): t for _, held in holders for t in held.values() if t is not None}
    size = sum(t.numel() * t.element_size() for t in state.values())
    copied: dict[int, Any] = dict(state)
    if size > _MOST_COPIED:
        copied = {id(t): t for m in modules for t in m._buffers.values()}
    copied |= {id(t): t for m in modules for t in vars(m).values()}
    copies = [(t, t.detach().clone()) for t in copied.values() if _is_dense_tensor(t)]
    gradients = [(t, t.grad, None if t.grad is None else t.grad.clone()) for t in state.values() if t.is_leaf]
    streams = [(generator, generator.get_state()) for root in roots for generator in generators_of(root)]
    try:
        with preserve_rng_state():
            yield
    finally:
        for generator, stream in streams:
            generator.set_state(stream)
        for each in attributes:
            side_effects.restore(each)
        for holder, held in holders:
            if isinstance(holder, dict):  # those of TorchScript cannot be refilled
                holder.clear()
                holder.update(held)
        with torch.no_grad():
            for tensor, copy in copies:
                # A write of something with a gradient gave it a history.
                if not tensor.is_leaf and not tensor._is_view():
                    tensor.detach_()
                # Version counters miss what batch norm writes.
                if not torch.equal(tensor, copy):
                    tensor.copy_(copy)
            for tensor, gradient, copy in gradients:
                tensor.grad = gradient
                if gradient is not None and copy is not None and not torch.equal(gradient, copy):
                    gradient.copy_(copy)


def _is_dense_tensor(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta


def _state_of(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """Return the module that has the state of a callable, under the names that it has in the graph."""
    owner = getattr(model, "__self__", model)
    if isinstance(owner, nn.Module):
        return owner
    return model_copy.as_module(model, model_copy.signature_of(model, len(args), list(kwargs)))


def _first_difference(expected: _Run, actual: _Run) -> str | None:
    if expected.structure != actual.structure:
        return f"the results are nested as {actual.structure}, in the model as {expected.structure}"
    for label, value in expected.values.items():
        other = actual.values.get(label)
        if isinstance(value, Tensor):
            reason = _difference(other, value)
        else:
            reason = None if type(other) is type(value) else f"is a {type(other).__name__}"
        if reason is not None:
            return f"{label} {reason}"
    return None


def _difference(actual: Any, expected: Tensor) -> str | None:
    """Return how a tensor differs from the model's by more than a few roundings, or None."""
    if not isinstance(actual, Tensor):
        return f"is a {type(actual).__name__}, in the model a tensor"
    for what in ("shape", "dtype", "device", "requires_grad"):
        has, needs = getattr(actual, what), getattr(expected, what)
        if has != needs:
            return f"has {what} {has}, in the model {needs}"
    if expected.layout is not torch.strided:
        return None
    a, b = actual.detach(), expected.detach()
    same = (a == b) | ((a != a) & (b != b))
    if bool(same.all()):
        return None
    if a.dtype.is_floating_point or a.dtype.is_complex:
        off = (a - b).abs().double()
        size = b.abs().double()
        finite = size[size.isfinite()]
        typical = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
        allowed = _ROUNDINGS * torch.finfo(a.dtype).eps * (size + typical)
        wrong = ~same & ~(off <= allowed)
        if not bool(wrong.any()):
            return None
        count = f"({int(wrong.sum())} of {wrong.numel()} numbers)"
        undefined = int((wrong & (a.isnan() != b.isnan())).sum())
        if undefined == int(wrong.sum()):
            return f"is NaN where the model's is not, or the reverse {count}"
        most = float(off.masked_fill(~wrong | off.isnan(), 0.0).max())
        return f"is off by up to {most:.3g} {count}"
    return f"differs in {int((~same).sum())} of {same.numel()} numbers"


def _is_like(value: Tensor, expected: Tensor) -> bool:
    return value.shape == expected.shape and value.dtype == expected.dtype and value.device == expected.device


def _module_paths(node: Node) -> set[str]:
    stack = node.meta.get("nn_module_stack") or {}
    return {str(entry[0]).split("@")[0] for entry in stack.values()}


def _copy(value: Tensor) -> Tensor:
    if value.layout is not torch.strided:
        return value.detach().clone().requires_grad_(value.requires_grad)
    storage = value.untyped_storage().clone()
    new = torch.empty(0, dtype=value.dtype, device=value.device)
    new = new.set_(storage, value.storage_offset(), value.shape, value.stride())
    return new.requires_grad_(value.requires_grad)


def _kept(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


@contextlib.contextmanager
def _autocast_off() -> Generator[None]:
    """Run without autocast: its casts are in the graph already."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
