"""Parts of the decomposition of a program in one walk (`decompose_program`), each the same as torch's own on retracing.

`Operators` decides which operators torch keeps and which it decomposes, and `recorded` runs one of the latter alone and
records the operators that it calls. `dispatched_arguments` returns arguments as the dispatcher passes them to a tracer.
`FunctionalMemory` has the functional tensors of values on memory that the program writes; the functions after it call
torch's functionalization. Whatever is not known to be the same raises Unsure.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail import torch_compat
from dovetail.frontend.export_aliases import storage_of
from dovetail.ir.nodes import storage_key
from dovetail.ir.schema import named_arguments, op_name, written_operands

_DECOMPOSED = """
    adjoint atleast_1d atleast_2d atleast_3d batch_norm broadcast_to chunk contiguous dropout dsplit expand_as flatten hsplit
    linalg_diagonal mH mT matrix_H moveaxis movedim narrow numpy_T ravel reshape reshape_as split swapaxes swapdims
    tensor_split to unflatten unsafe_chunk view_as vsplit
"""
_DECOMPOSABLE = frozenset(_DECOMPOSED.split())
_DECOMPOSED_WRITES = (
    "absolute_ arctan_ clip_ divide_ dropout_ feature_dropout_ multiply_ negative_ relu6_ square_ subtract_"
)
_DECOMPOSED_IN_PLACE = frozenset(_DECOMPOSED_WRITES.split())
_FUNCTIONALIZE = torch._C.DispatchKey.Functionalize

# Queries of a tensor, which no tracer records.
_QUERIES = frozenset({torch.ops.prim.device.default})

# Lifting marks a constant as fresh, which depends on what else is done with it.
_DELICATE = frozenset({"lift", "lift_fresh", "lift_fresh_copy", "set_", "_batch_norm_impl_index", "item"})


class Unsure(Exception):
    """The reason why a program cannot be decomposed node by node; caught in this package."""


@dataclass(frozen=True)
class OpCall:
    """One operator that ran, with its arguments and its result."""

    target: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any


class Operators:
    """Which operators decomposition keeps and which it decomposes, cached; raises Unsure if that is not certain."""

    def __init__(self) -> None:
        self.is_kept = functools.cache(_is_kept)
        self.is_functionalized = functools.cache(_is_functionalized)


def _is_kept(op: OpOverload) -> bool:
    is_composite = torch_compat.COMPOSITE_OPERATOR.value
    is_preserved = torch_compat.PRESERVED_OPERATOR.value
    if is_composite is None or is_preserved is None:
        raise Unsure("this torch has no function for which operators it keeps")
    name = op_name(op)
    if op.namespace != "aten" or op._schema.is_mutable or name in _DELICATE:
        raise Unsure(f"{op} is not an operator that is certain to be kept")
    if torch.Tag.data_dependent_output in op.tags:
        raise Unsure(f"{op} reads values")
    if not is_composite(op):
        # With Python kernels for other keys than this one, the tracer dispatches differently.
        if any(key != torch._C.DispatchKey.Meta for key in op.py_kernels):
            raise Unsure(f"{op} has a decomposition of its own")
        return True
    if is_preserved(op):
        return True
    if name not in _DECOMPOSABLE:
        raise Unsure(f"{op} is taken apart in a way that is not known here")
    return False


def _is_functionalized(op: OpOverload) -> bool:
    """Return whether functionalization replaces an in-place operator as a whole; otherwise its parts, one by one."""
    name = op_name(op)
    is_composite = torch_compat.COMPOSITE_OPERATOR.value
    if is_composite is None or op.namespace != "aten" or name in _DELICATE:
        raise Unsure(f"{op} is not an in-place operator with a functional form that is known here")
    if torch.Tag.inplace_view in op.tags or torch.Tag.data_dependent_output in op.tags:
        raise Unsure(f"{op} changes the shape or strides of a tensor")
    if any(key != torch._C.DispatchKey.Meta for key in op.py_kernels):
        raise Unsure(f"{op} has a decomposition of its own")
    if is_composite(op):
        if name not in _DECOMPOSED_IN_PLACE:
            raise Unsure(f"{op} is taken apart in a way that is not known here")
        return False
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _FUNCTIONALIZE):
        raise Unsure(f"{op} has no functional form")
    return True


class _DispatchRecorder(TorchDispatchMode):
    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self.operators = operators
        self.calls: list[OpCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUERIES:
            return func(*args, **kwargs)
        if not self.operators.is_kept(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        self.calls.append(OpCall(func, args, kwargs, result))
        return result


def recorded(
    operators: Operators, mode: FakeTensorMode, label: object, function: Callable[[], Any]
) -> tuple[list[OpCall], Any]:
    """Return the operators that `function` runs on fake tensors, in order, and its result."""
    recorder = _DispatchRecorder(operators)
    with enable_python_dispatcher(), mode, recorder:
        try:
            result = function()
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            raise Unsure(f"{label} cannot be decomposed alone: {error}") from error
    return recorder.calls, result


def same_form(value: Any, other: Any, *, strides: bool = True) -> bool:
    """Return whether two fake values, or two sequences of them, differ only in storage; or, without `strides`, in strides."""
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        pairs = zip(value, other, strict=False)
        return len(value) == len(other) and all(same_form(a, b, strides=strides) for a, b in pairs)
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return value is None and other is None
    if strides and (value.stride() != other.stride() or value.storage_offset() != other.storage_offset()):
        return False
    same = value.shape == other.shape and value.dtype == other.dtype and value.device == other.device
    return same and value.is_conj() == other.is_conj() and value.is_neg() == other.is_neg()


_NUMBERS = (bool, int, float)


class _Argument(NamedTuple):
    name: str
    keyword: bool
    optional: bool
    default: Any
    is_float: bool
    is_list: bool


def dispatched_arguments(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments as the dispatcher passes them: positional where possible, without those equal to a default."""
    arguments = _arguments(op)
    given = {**dict(zip(arguments, args, strict=False)), **kwargs}
    positional: list[Any] = []
    count = 0
    by_name: dict[str, Any] = {}
    for name, argument in arguments.items():
        is_given = name in given
        value = given.pop(name) if is_given else argument.default
        if not argument.keyword:
            positional.append(value)
        if not is_given:
            continue
        _check(op, argument, value)
        if _is_default(argument, value):
            continue
        if argument.keyword:
            by_name[name] = value
        else:
            count = len(positional)
    if given:
        raise Unsure(f"{op} is called with arguments that its schema does not have")
    return tuple(positional[:count]), by_name


@functools.cache
def _arguments(op: OpOverload) -> dict[str, _Argument]:
    arguments: dict[str, _Argument] = {}
    for argument in op._schema.arguments:
        kind = argument.type
        while isinstance(kind, torch._C.OptionalType):
            kind = kind.getElementType()
        arguments[argument.name] = _Argument(
            argument.name,
            argument.kwarg_only,
            argument.has_default_value(),
            argument.default_value,
            isinstance(kind, torch._C.FloatType),
            isinstance(kind, torch._C.ListType),
        )
    return arguments


def _check(op: OpOverload, argument: _Argument, value: Any) -> None:
    """Raise Unsure if the dispatcher would have converted a value."""
    if argument.is_float and isinstance(value, int):
        raise Unsure(f"{op} is called with an integer for the number '{argument.name}'")
    if argument.is_list and isinstance(value, (*_NUMBERS, Node)):
        raise Unsure(f"{op} is called with a single value for the list '{argument.name}'")
    if argument.optional and isinstance(argument.default, int) and not isinstance(value, (*_NUMBERS, Node)):
        raise Unsure(f"{op} has a default for '{argument.name}' that cannot be read")


def _is_default(argument: _Argument, value: Any) -> bool:
    if not argument.optional or isinstance(value, Node):
        return False
    default = argument.default
    if isinstance(value, (list, tuple)):
        if not isinstance(default, (list, tuple)) or len(value) != len(default):
            return False
        return all(type(a) is type(b) and a == b for a, b in zip(value, default, strict=True))
    return type(value) is type(default) and value == default


# Functions of torch that its stubs do not have.
_torch = cast(Any, torch)
_BATCH_NORM = torch.ops.aten.batch_norm.default


class FunctionalMemory:
    """The functional tensors for values on `storages`, which the program writes.

    `tensors` has that of each node of the program whose value is on one of them, or those of its parts.
    """

    def __init__(self, storages: set[int]) -> None:
        self.storages = storages
        self.tensors: dict[Node, Any] = {}
        # For each storage of the program: that of its functional tensors, and how often it was written.
        self._functional: dict[int, int] = {}
        self._writes: dict[int, int] = dict.fromkeys(storages, 0)
        self._synced: dict[int, int] = {}

    def holds(self, value: Any) -> bool:
        """Return whether a value, or a part of it, is on memory that is written."""
        return bool(self.storages) and any(storage_of(part) in self.storages for part in _tensors(value))

    def reads(self, node: Node) -> bool:
        """Return whether an operand of a node is on memory that is written."""
        return bool(self.tensors) and any(old in self.tensors for old in node.all_input_nodes)

    def enter(self, node: Node, tensor: Tensor) -> None:
        """Register the functional tensor of a value that is the first on its storage, or an alias of that."""
        storage = storage_of(node.meta["val"])
        if self._functional.setdefault(storage, storage_key(tensor)) != storage_key(tensor):
            raise Unsure(f"'{node.name}' is in memory of another value")
        self.tensors[node] = tensor

    def alias(self, node: Node, result: Any) -> bool:
        """Register the functional tensors of a result for a node if they are aliases of values in this memory.

        Raise Unsure if the exported values, which other passes may have edited, share other storages than these.
        """
        if not isinstance(result, (list, tuple, Tensor)):
            return False
        values, tensors = list(_tensors(node.meta.get("val"))), list(_tensors(result))
        known = set(self._functional.values())
        for value, tensor in zip(values, tensors, strict=True):
            is_alias = is_functional(tensor) and storage_key(tensor) in known
            expected = self._functional.get(storage_of(value))
            if is_alias != (expected is not None) or (is_alias and storage_key(tensor) != expected):
                raise Unsure(f"'{node.name}' shares other memory than its exported value")
        if not self.holds(node.meta.get("val")):
            return False
        self.tensors[node] = result
        return True

    def note_writes(self, node: Node) -> None:
        """Count the writes of a node; the functional tensors that it writes are up to date, their aliases are not."""
        nodes = _written_nodes(node)
        storages = {storage_of(old.meta["val"]) for old in nodes}
        for storage in storages:
            self._writes[storage] += 1
        if len(nodes) == len(storages):
            for old in nodes:
                self._synced[id(self.tensors[old])] = self._writes[storage_of(old.meta["val"])]

    def is_stale(self, old: Node) -> bool:
        """Return whether the functional tensor of a node may miss updates; it counts as synchronized afterwards."""
        writes = self._writes[storage_of(old.meta["val"])]
        tensor = self.tensors[old]
        is_stale = self._synced.get(id(tensor), 0) != writes
        self._synced[id(tensor)] = writes
        return is_stale


def written_storages(graph: Graph, exempt: Callable[[Node], bool]) -> set[int]:
    """Return the storages that the nodes of a graph write, by their exported values; `exempt` nodes do not count."""
    writers = [node for node in graph.nodes if node.op == "call_function" and not exempt(node)]
    return {storage_of(n.meta["val"]) for node in writers for n in _written_nodes(node)}


def _written_nodes(node: Node) -> list[Node]:
    if node.target is not _BATCH_NORM:
        return [n for n in written_operands(node) if isinstance(n.meta.get("val"), Tensor)]
    # Its schema does not declare that it updates the running statistics.
    arguments = named_arguments(node)
    statistics = [arguments.get(name) for name in ("running_mean", "running_var")]
    return [n for n in statistics if isinstance(n, Node)] if arguments.get("training") is True else []


def _tensors(value: Any) -> Iterator[Tensor]:
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(part, Tensor):
            yield part


def returns_alias(op: OpOverload) -> bool:
    return any(result.alias_info is not None for result in op._schema.returns)


@contextlib.contextmanager
def functionalization() -> Generator[None]:
    """Dispatch to functionalization kernels, which replay views and write nothing in place."""
    include = torch._C._dispatch_tls_local_include_set() | torch._C.DispatchKeySet(_FUNCTIONALIZE)
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(_FUNCTIONALIZE)
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        replays = _torch._functionalize_enable_reapply_views(True)
        try:
            yield
        finally:
            _torch._functionalize_enable_reapply_views(replays)


def functional_kernel(op: OpOverload) -> Callable[..., Any]:
    """Return the functionalization kernel of an operator."""
    return functools.partial(op._op_dk, _FUNCTIONALIZE)


def functional_tensor(value: Tensor) -> Tensor:
    return _torch._to_functional_tensor(value)


def is_functional(value: Tensor) -> bool:
    return _torch._is_functional_tensor(value)


def inner_value(tensor: Tensor) -> Tensor:
    """Return the value of a functional tensor as of its last synchronization."""
    return _torch._from_functional_tensor(tensor)


def synchronize(tensor: Tensor) -> None:
    """Replay the pending updates of a functional tensor's storage, and its views of that."""
    with functionalization():
        _torch._sync(tensor)
