"""The operators that a call of a model runs, recorded to compare replayed layers, and models that a stored graph is used for.

What the code of a layer can read is compared before it is replayed; that comparison cannot see state that C code reads. The
results of the model cannot stand for it either: a branch that differs may be multiplied by a weight that is zero as yet. Two
layers whose calls run the same operators in the same order, on corresponding tensors with equal literals, in the same
gradient mode, have the same graph. Tensors correspond if they are the same argument, weight or earlier result of the layer,
or the same tensor of elsewhere; they are identified by memory and geometry, as views are new objects in autograd.

Of the whole model only a digest is kept, in which tensors other than weights are their dtypes and shapes: to tell them apart
they would all have to be kept alive.
"""

from __future__ import annotations

import contextlib
import hashlib
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


class OperatorRecorder(TorchDispatchMode):
    """Records the operators of a call of a model, and those of the calls of some of its layers.

    Integers and shapes do not count for the digest of the model unless sizes are `static`.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], *, static: bool) -> None:
        super().__init__()
        state = (*model.named_parameters(), *model.named_buffers())
        self._weights = {_identity(tensor): name for name, tensor in state}
        self._static = static
        self._digest = hashlib.blake2b(digest_size=16)
        self._layers = {path: model.get_submodule(path) for path in paths}
        self._calls: dict[str, list[_LayerCall]] = {path: [] for path in paths}
        self._open: list[_LayerCall] = []
        self._outer: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not let torch wrap this mode for Dynamo, whose import takes a second: graphs from disk need none of it."""
        return False

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
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self._digest.update(repr((str(func), [self._described(leaf) for leaf in leaves])).encode())
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

    @property
    def digest(self) -> str:
        """A hash of the operators of the model so far, of their literals, and of the dtypes and shapes of operands."""
        return self._digest.hexdigest()

    def _described(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            name = self._weights.get(_identity(leaf))
            return name or (leaf.dtype, tuple(leaf.shape) if self._static else leaf.dim())
        if isinstance(leaf, int) and not isinstance(leaf, bool) and not self._static:
            return int
        return repr(leaf) if isinstance(leaf, _LITERALS) else type(leaf).__name__

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
