"""What the trace of a layer depends on, besides the operations in it: compared to decide whether layers are traced alike.

Layers of equal structure (`repeated_layers`) that are called with arguments alike (`describe_argument`), in the same state
of torch (`torch_state`), are traced to the same operations if nothing differs that their code reads. `LayerReads` is what the
instructions that one trace has executed can read, as facts by path (`trace_dependencies`): attributes of the layer, globals,
closures and defaults, followed through containers and objects. Tensors of the trace count by their place among the operands
of the layer, others by their node. If the facts are equal for another layer, it executes the same ones.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import proxy_tensor
from torch.overrides import _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dovetail.frontend.bytecode_reads import code_digest, names_read
from dovetail.frontend.release_code import is_expanded, is_own, is_release, is_release_module
from dovetail.frontend.trace_dependencies import TraceDependencies, require_reached
from dovetail.frontend.value_state import Undescribable
from dovetail.ir.graph_module import HOOK_KINDS
from dovetail.ir.process_state import tracing_switches

_SYMBOLS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
LITERALS = (int, float, complex, bool, str, bytes, type(None), *_SYMBOLS)
_HOOKS = (
    *HOOK_KINDS,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
_HISTORY = frozenset(["grad_fn", "_version", "_base", "_is_view"])
"""Names by which code reads how a tensor was computed, of which a copied layer leaves nothing."""
_FEWEST = 3
"""So many equal layers are worth it: two of them are traced."""


class Unrepeatable(Exception):
    """A call of a layer cannot be compared with others; the message is the reason."""


class ReplayedForward(functools.partial[Any]):
    """The `forward` of a repeated layer while its model is traced."""


class LayerReads:
    """What the code that was executed in the trace of a layer can read."""

    def __init__(self, executed: Mapping[types.CodeType, Iterable[int]]) -> None:
        self.executed = {
            code: frozenset(at) for code, at in executed.items() if is_expanded(code.co_filename)
        }
        self._own = {code: at for code, at in self.executed.items() if not is_release(code.co_filename)}
        self._digests = frozenset(map(code_digest, self.executed))
        # Code of releases is not followed, but reads attributes of what it is called with.
        self._names = names_read((code for code in executed if not is_own(code.co_filename)), self._own)
        own_names = names_read(self._own, self._own)
        self._history = min(_HISTORY & own_names.names, default="")
        self._unread_hooks = () if own_names.everything else [k for k in _HOOKS if k not in own_names.names]

    def facts(self, layer: nn.Module, describe_traced: Callable[[Any], str | None]) -> dict[str, str]:
        """Return what the code can read if it runs for a layer now; raise Undescribable if that is not known."""

        if self._history:
            raise Undescribable(f"it reads {self._history} of tensors")
        # Its own hooks run around it.
        hooks = {id(layer.__dict__.get(kind)) for kind in self._unread_hooks}

        def described(value: Any) -> str | None:
            if isinstance(value, ReplayedForward):
                return "of the class"
            return "hooks" if isinstance(value, dict) and id(value) in hooks else describe_traced(value)

        # Contents of constants are read, which is not part of the trace.
        with torch._C.DisableTorchFunction(), proxy_tensor.disable_proxy_modes_tracing(), no_dispatch():
            dependencies = TraceDependencies(
                layer, None, self._digests, self._names, executed=self._own, describe_traced=described
            )
        require_reached(self.executed, dependencies)
        return dependencies.facts


def describe_symbol(value: Any) -> str | None:
    """Return what describes a symbolic number; None for anything else."""
    return f"symbol {value.node.expr}" if isinstance(value, (SymInt, SymFloat, SymBool)) else None


def describe_argument(leaf: Any) -> Any:
    """Return what two arguments must have in common."""
    if isinstance(leaf, Tensor):
        if getattr(leaf, "constant", None) is not None:
            raise Unrepeatable("an argument is a constant, whose value may be read")
        if has_attributes(leaf):
            raise Unrepeatable("an argument has attributes of its own")
        return (
            type(leaf),
            tuple(map(size_key, leaf.shape)),
            tuple(map(size_key, leaf.stride())) if leaf.layout is torch.strided else leaf.layout,
            size_key(leaf.storage_offset()),
            leaf.dtype,
            leaf.device,
            leaf.requires_grad,
            leaf.is_leaf,
            leaf.is_conj(),
            leaf.is_neg(),
        )
    if isinstance(leaf, SymInt):
        return size_key(leaf)
    if type(leaf) in LITERALS:
        return type(leaf), repr(leaf)
    if isinstance(leaf, enum.Enum) and all(name.startswith("_") for name in vars(leaf)):
        return type(leaf), id(leaf)
    raise Unrepeatable(f"an argument is a {type(leaf).__name__}")


@functools.cache
def _fake_attributes() -> frozenset[str]:
    with no_dispatch(), no_python_dispatcher():
        fake = FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), torch.device("cpu"))
        return frozenset([*vars(fake), "_is_param"])


def has_attributes(tensor: Tensor) -> bool:
    """Return whether a tensor of a trace has attributes that the model has set, which results of copied layers lack."""
    return any(n not in _fake_attributes() and not n.startswith("_dynamo_") for n in vars(tensor))


def size_key(size: Any) -> Any:
    """Return a size, or the expression of a symbolic one, which can be compared without a guard."""
    return ("symbol", size.node.expr) if isinstance(size, SymInt) else size


def torch_state() -> Any:
    """Return the state of torch that decides which operators are recorded; raise Unrepeatable if it is not known."""
    for mode in _get_current_dispatch_mode_stack():
        if type(mode).__module__.partition(".")[0] != "torch":
            raise Unrepeatable(f"the dispatch mode {type(mode).__name__} is active")
    function_modes = _get_current_function_mode_stack()
    for mode in function_modes:
        if not is_release_module(type(mode).__module__):
            raise Unrepeatable(f"the function mode {type(mode).__name__} is active")
    return (
        tuple(torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) for k in ("cpu", "cuda")),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        repr(tracing_switches()),
        repr(getattr(fx_traceback, "current_meta", {}).get("custom")),
        tuple(map(id, function_modes)),
    )


def weights_of(layer: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a layer, in an order that layers of equal structure share."""
    tables = [table for module in layer.modules() for table in (module._parameters, module._buffers)]
    return [tensor for table in tables for tensor in table.values() if tensor is not None]


def has_hooks(layer: nn.Module) -> bool:
    """Return whether code that is not the modules' own is called inside a layer; hooks of itself are called around it."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in layer.modules()):
        return True
    if nn.modules.module._has_any_global_hook():
        return True
    inner = [module for module in layer.modules() if module is not layer]
    if any(module.__dict__.get(kind) for module in inner for kind in _HOOKS):
        return True
    return any(_has_other_forward(module) for module in inner)


def _has_other_forward(module: nn.Module) -> bool:
    """Return whether a module has a forward that is not its class's."""
    return "forward" in module.__dict__ and not isinstance(module.__dict__["forward"], ReplayedForward)


def repeated_layers(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the layers of equal structure among the children of each module."""
    for parent in model.modules():
        by_structure: dict[Any, list[nn.Module]] = {}
        for layer in parent.children():
            is_single = next(layer.children(), None) is None
            if is_single or isinstance(layer, (nn.ModuleList, nn.ModuleDict)) or _has_other_forward(layer):
                continue
            by_structure.setdefault(_structure(layer), []).append(layer)
        yield from (layers for layers in by_structure.values() if len(layers) >= _FEWEST)


def _structure(layer: nn.Module) -> Any:
    """Return what layers must have in common to be compared."""
    return tuple(
        (
            path,
            type(module),
            module.training,
            tuple((name, _tensor_structure(p)) for name, p in module._parameters.items()),
            tuple((name, _tensor_structure(b)) for name, b in module._buffers.items()),
        )
        for path, module in layer.named_modules()
    )


def _tensor_structure(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tuple(tensor.shape), strides, tensor.dtype, tensor.device, tensor.requires_grad
