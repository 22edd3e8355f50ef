"""The operators that layers run in a call of their model, to compare a layer that was replayed with the one it was copied from.

What the code of a layer can read is compared before it is replayed; that comparison cannot see state that C code reads. The
results of the model cannot stand for it either: a branch that differs may be multiplied by a weight that is zero as yet. Two
layers whose calls run the same operators in the same order, on corresponding tensors with equal literals, in the same
gradient mode, have the same graph. Tensors correspond if they are the same argument, weight or earlier result of the layer,
or the same tensor of elsewhere; they are identified by memory and geometry, as views are new objects in autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.frontend.calling_convention import is_cache
from dovetail.frontend.layer_state import weights_of
from dovetail.ir.nodes import storage_key

_LITERALS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass
class _LayerCall:
    """The operators of one call of a layer so far: target, gradient mode, structure and labels of the arguments."""

    labels: dict[Any, Any] = field(default_factory=dict[Any, Any])
    operators: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    # Memory that is released may become that of another tensor.
    alive: list[Tensor] = field(default_factory=list[Tensor])

    def name(self, tensor: Tensor, label: Any) -> None:
        """Give a tensor a label, unless it has one."""
        self.labels.setdefault(_identity(tensor), label)
        self.alive.append(tensor)


class LayerOperators(TorchDispatchMode):
    """Records the operators of the calls of some layers of a model."""

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        super().__init__()
        self._layers = {path: model.get_submodule(path) for path in paths}
        self._calls: dict[str, list[_LayerCall]] = {path: [] for path in paths}
        self._open: list[_LayerCall] = []
        self._outer: list[Tensor] = []

    @contextlib.contextmanager
    def active(self) -> Generator[None]:
        """Record what the model runs inside."""
        with contextlib.ExitStack() as stack:
            for path, layer in self._layers.items():
                enter, leave = self._hooks(path)
                stack.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(self)
            yield

    def difference(self, copies: Mapping[str, str]) -> str | None:
        """Return how the operators of a layer differ from those of the layer that it was copied from, or None."""
        for path, template in copies.items():
            calls, expected = self._calls[path], self._calls[template]
            if len(calls) != 1 or len(expected) != 1:
                return f"'{path}' is called {len(calls)} times, '{template}' {len(expected)} times"
            mine, other = calls[0].operators, expected[0].operators
            if mine != other:
                differing = (a for a, b in zip(mine, other, strict=False) if a != b)
                name = next((str(a[0]) for a in differing), "the number of operators")
                return f"'{path}' runs other operators than '{template}', which it was copied from ({name})"
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._open:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            is_graded = torch.is_grad_enabled()
            for call in self._open:
                call.operators.append((func, is_graded, spec, [self._label(leaf, call) for leaf in leaves]))
        result = func(*args, **kwargs)
        for call in self._open:
            for i, leaf in enumerate(pytree.tree_leaves(result)):
                if isinstance(leaf, Tensor):
                    call.name(leaf, ("result", len(call.operators), i))
        return result

    def _label(self, leaf: Any, call: _LayerCall) -> Any:
        if not isinstance(leaf, Tensor):
            return (type(leaf), repr(leaf)) if isinstance(leaf, _LITERALS) or leaf is None else id(leaf)
        identity = _identity(leaf)
        label = call.labels.get(identity)
        if label is None:
            self._outer.append(leaf)
        return ("outer", identity) if label is None else label

    def _hooks(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
            call = _LayerCall()
            leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_cache)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            for i, tensor in enumerate((*tensors, *weights_of(layer))):
                call.name(tensor, ("operand", i))
            self._calls[path].append(call)
            self._open.append(call)

        def leave(layer: nn.Module, args: Any, result: Any) -> None:
            call = self._open.pop()
            call.alive.clear()
            call.labels.clear()

        return enter, leave


def _identity(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
