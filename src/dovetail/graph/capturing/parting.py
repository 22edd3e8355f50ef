"""Composite operators taken apart one at a time, as decomposing the whole program would take them apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail import torch_compat

_PARTED = """
    adjoint atleast_1d atleast_2d atleast_3d batch_norm broadcast_to chunk contiguous dropout dsplit expand_as flatten hsplit
    linalg_diagonal mH mT matrix_H moveaxis movedim narrow numpy_T ravel reshape reshape_as split swapaxes swapdims
    tensor_split to unflatten unsafe_chunk view_as vsplit
"""
_KNOWN = frozenset(_PARTED.split())
_PARTED_WRITES = (
    "absolute_ arctan_ clip_ divide_ dropout_ feature_dropout_ multiply_ negative_ relu6_ square_ subtract_"
)
_PARTED_IN_PLACE = frozenset(_PARTED_WRITES.split())
_FUNCTIONALIZE = torch._C.DispatchKey.Functionalize
# Asked of a tensor, not done to it; no tracer writes them down.
_QUESTIONS = frozenset({torch.ops.prim.device.default})
# Lifting marks a constant as fresh, which depends on what else is done with it.
_DELICATE = frozenset({"lift", "lift_fresh", "lift_fresh_copy", "set_", "_batch_norm_impl_index", "item"})


class Unsure(Exception):
    """Why a program cannot be decomposed node by node; it never leaves this package."""


@dataclass(frozen=True)
class Call:
    """One operator that ran, what it was given and what it gave."""

    target: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any


class Operators:
    """Which operators decomposition keeps and which it takes apart; an Unsure for those where this is delicate."""

    def __init__(self) -> None:
        self._known: dict[OpOverload, bool] = {}
        self._writing: dict[OpOverload, bool] = {}

    def is_kept(self, op: OpOverload) -> bool:
        kept = self._known.get(op)
        if kept is None:
            kept = self._known[op] = _is_kept(op)
        return kept

    def is_functionalized(self, op: OpOverload) -> bool:
        """Whether functionalization replaces an in-place operator as a whole; otherwise its parts, one by one."""
        whole = self._writing.get(op)
        if whole is None:
            whole = self._writing[op] = _is_functionalized(op)
        return whole


def _is_kept(op: OpOverload) -> bool:
    is_composite = torch_compat.COMPOSITE_OPERATOR.value
    is_preserved = torch_compat.PRESERVED_OPERATOR.value
    if is_composite is None or is_preserved is None:
        raise Unsure("this torch does not tell which operators it keeps")
    name = op._schema.name.removeprefix("aten::")
    if op.namespace != "aten" or op._schema.is_mutable or name in _DELICATE:
        raise Unsure(f"{op} is not an operator that is certain to be kept")
    if torch.Tag.data_dependent_output in op.tags:
        raise Unsure(f"{op} reads values")
    if not is_composite(op):
        # With Python kernels for other keys than this one, the dispatcher of the tracer goes ways of its own.
        if any(key != torch._C.DispatchKey.Meta for key in op.py_kernels):
            raise Unsure(f"{op} has a decomposition of its own")
        return True
    if is_preserved(op):
        return True
    if name not in _KNOWN:
        raise Unsure(f"{op} is taken apart in a way that is not known here")
    return False


def _is_functionalized(op: OpOverload) -> bool:
    name = op._schema.name.removeprefix("aten::")
    is_composite = torch_compat.COMPOSITE_OPERATOR.value
    if is_composite is None or op.namespace != "aten" or name in _DELICATE:
        raise Unsure(f"{op} is not an in-place operator with a functional form that is known here")
    if torch.Tag.inplace_view in op.tags or torch.Tag.data_dependent_output in op.tags:
        raise Unsure(f"{op} changes the form of a tensor")
    if any(key != torch._C.DispatchKey.Meta for key in op.py_kernels):
        raise Unsure(f"{op} has a decomposition of its own")
    if is_composite(op):
        if name not in _PARTED_IN_PLACE:
            raise Unsure(f"{op} is taken apart in a way that is not known here")
        return False
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _FUNCTIONALIZE):
        raise Unsure(f"{op} has no functional form")
    return True


class _Recorder(TorchDispatchMode):
    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self.operators = operators
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            return func(*args, **kwargs)
        if not self.operators.is_kept(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        self.calls.append(Call(func, args, kwargs, result))
        return result


def recorded(
    operators: Operators, mode: FakeTensorMode, label: object, function: Callable[[], Any]
) -> tuple[list[Call], Any]:
    """The operators that `function` runs on fake tensors, in order, and its result."""
    recorder = _Recorder(operators)
    with enable_python_dispatcher(), mode, recorder:
        try:
            result = function()
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            raise Unsure(f"{label} cannot be taken apart alone: {error}") from error
    return recorder.calls, result


def same_form(value: Any, other: Any) -> bool:
    """Whether two fake values, or two sequences of them, differ in their storages alone."""
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(same_form, value, other))
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return value is None and other is None
    return (
        value.shape == other.shape
        and value.stride() == other.stride()
        and value.storage_offset() == other.storage_offset()
        and value.dtype == other.dtype
        and value.device == other.device
        and value.is_conj() == other.is_conj()
        and value.is_neg() == other.is_neg()
    )


def same_sizes(value: Any, other: Any) -> bool:
    """Whether two fake values, or two sequences of them, differ in their storages and strides alone."""
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(same_sizes, value, other))
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return value is None and other is None
    same = value.shape == other.shape and value.dtype == other.dtype and value.device == other.device
    return same and value.is_conj() == other.is_conj() and value.is_neg() == other.is_neg()
