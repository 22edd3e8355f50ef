"""Operator schemas: arguments by name, their normalized form, and views.

In normalized arguments defaults are filled in, dims count from the front, and sizes are explicit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import Node

from dovetail.ir.nodes import size_hint

Arguments = dict[str, Any]
SLICE_END = sys.maxsize
_DIMS = frozenset({"dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "dimension"})
_ADDS_DIM = frozenset({"unsqueeze", "stack", "diag_embed"})
_RANK_OF_RESULT = frozenset({"cat", "concat", "linalg_cross"})

# A negative dim has a meaning of its own there.
_SIGNED_DIMS = frozenset({"_weight_norm", "_weight_norm_interface", "norm_except_dim"})
_FLOAT_DTYPE_IS_DEFAULT = frozenset({"softmax", "log_softmax", "sum", "mean", "cumsum", "cumprod", "prod"})
_ENCODED = ("MemoryFormat", "ScalarType", "Layout", "Device")


def op_name(target: object) -> str:
    """Return the name of an operator without namespace and overload, "" for anything else."""
    return target._schema.name.split("::")[1] if isinstance(target, OpOverload) else ""


def has_no_value(node: Node) -> bool:
    """Whether an operator of ATen returns nothing of use: it is called for a write or an assertion."""
    names = ("copy_", "_assert_scalar", "_assert_async", "sym_constrain_range")
    return is_aten(node.target) and op_name(node.target) in names


def is_aten(target: object) -> bool:
    """Whether the target is an overload of an operator in the aten namespace."""
    return isinstance(target, OpOverload) and target.namespace == "aten"


def named_arguments(node: Node) -> Arguments:
    """Return the arguments of an operator call by their names in the schema, without defaults."""
    target = node.target
    if not isinstance(target, OpOverload):
        return {}
    names = [argument.name for argument in target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def written_operands(node: Node) -> list[Node]:
    """Return the operands that an operator writes, according to its schema."""
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:
        return []
    given = named_arguments(node)
    operands: list[Node] = []
    for argument in target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            parts = value if isinstance(value, (list, tuple)) else (value,)
            operands += [part for part in parts if isinstance(part, Node)]
    return operands


def argument_of(node: Node, name: str) -> Any:
    """Return an argument of an operator call by its name in the schema, its default where it is not given."""
    for i, argument in enumerate(cast("OpOverload", node.target)._schema.arguments):
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def viewed_operand(node: Node) -> Node | None:
    """Return the operand that a view operator's result is a view of."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    if len(schema.returns) != 1 or schema.returns[0].alias_info is None or schema.is_mutable:
        return None
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            return value if isinstance(value, Node) else None
    return None


def normalized_arguments(node: Node, given: Arguments | None = None) -> Arguments:
    """Return the arguments of a call, or others for it, in normalized form. The meaning of the call never changes."""
    target = node.target
    given = named_arguments(node) if given is None else given
    if not isinstance(target, OpOverload):
        return given
    new = _with_defaults(target, given)
    if target.namespace == "aten":
        _normalize_dims(node, target, new)
        _normalize_placement(node, target, new)
        special = _SPECIAL.get(op_name(target))
        if special is not None:
            special(node, new)
    return new


def to_args_kwargs(
    target: OpOverload, arguments: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments by name as positional and keyword ones, the latter only where the schema requires it."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    positional = True
    for argument in target._schema.arguments:
        if argument.name not in arguments:
            positional = False
        elif positional and not argument.kwarg_only:
            args.append(arguments[argument.name])
        else:
            kwargs[argument.name] = arguments[argument.name]
    return tuple(args), kwargs


def _with_defaults(target: OpOverload, given: Arguments) -> Arguments:
    new: Arguments = {}
    for argument in target._schema.arguments:
        if argument.name in given:
            new[argument.name] = given[argument.name]
        elif argument.has_default_value():
            default = argument.default_value
            encoded = isinstance(default, int) and any(name in str(argument.real_type) for name in _ENCODED)
            if not encoded:  # enums appear in schemas as numbers that only the dispatcher understands
                new[argument.name] = list(default) if isinstance(default, (list, tuple)) else default
    return new


def _normalize_dims(node: Node, target: OpOverload, arguments: Arguments) -> None:
    name = op_name(target)
    named = [a.name for a in target._schema.arguments if a.name in _DIMS and a.name in arguments]
    if not named or name in _SIGNED_DIMS:
        return
    rank = _rank(node, name, arguments, target)
    if rank is None:
        return
    for dim in named:
        arguments[dim] = _nonnegative_dim(arguments[dim], max(rank, 1))


def _rank(node: Node, name: str, arguments: Arguments, target: OpOverload) -> int | None:
    if name in _RANK_OF_RESULT:
        value = node.meta.get("val")
    else:
        value = value_of(arguments.get(target._schema.arguments[0].name))
        if isinstance(value, (list, tuple)):
            value = value_of(value[0]) if value else None
    if not isinstance(value, Tensor):
        return None
    return value.dim() + (1 if name in _ADDS_DIM else 0)


def _nonnegative_dim(dim: Any, rank: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_nonnegative_dim(d, rank) for d in dim]
    return dim + rank if type(dim) is int and -rank <= dim < 0 else dim


def value_of(argument: Any) -> Any:
    """Return the fake value of an argument that is a node; any other argument itself."""
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def _normalize_placement(node: Node, target: OpOverload, arguments: Arguments) -> None:
    """Omit a dtype, layout or device that is the operand's own; make those of a factory explicit."""
    if arguments.get("pin_memory") is False:
        arguments["pin_memory"] = None
    if arguments.get("memory_format") is torch.preserve_format:
        arguments["memory_format"] = None
    if "layout" not in arguments and op_name(target) not in _FLOAT_DTYPE_IS_DEFAULT:
        return
    result = node.meta.get("val")
    operands = [value_of(v) for a, v in arguments.items() if a in ("self", "input")]
    like = next((v for v in operands if isinstance(v, Tensor)), None)
    if like is not None:
        floating = like.is_floating_point() or "layout" in arguments
        for key in ("dtype", "layout", "device"):
            if floating and key in arguments and arguments[key] == getattr(like, key):
                arguments[key] = None
    elif isinstance(result, Tensor) and "layout" in arguments:
        for key in ("dtype", "layout", "device"):
            if key in arguments and arguments[key] is None:
                arguments[key] = getattr(result, key)


def _transpose(node: Node, arguments: Arguments) -> None:
    """Put the lower dim first: a transpose is symmetric."""
    first, second = arguments.get("dim0"), arguments.get("dim1")
    if type(first) is int and type(second) is int and 0 <= second < first:
        arguments["dim0"], arguments["dim1"] = second, first


def _slice(node: Node, arguments: Arguments) -> None:
    size = _size_along(arguments)
    start, end = arguments.get("start"), arguments.get("end")
    arguments["start"] = _clamped(0 if start is None else start, size)
    if end is None or (type(end) is int and end >= SLICE_END):
        arguments["end"] = SLICE_END if size is None else size
    else:
        arguments["end"] = _clamped(end, size)


def _clamped(index: Any, size: int | None) -> Any:
    if type(index) is not int or size is None:
        return index
    return max(0, min(index + size if index < 0 else index, size))


def _select(node: Node, arguments: Arguments) -> None:
    size, index = _size_along(arguments), arguments.get("index")
    if size is not None and type(index) is int and index < 0:
        arguments["index"] = index + size


def _size_along(arguments: Arguments) -> int | None:
    value, dim = value_of(arguments.get("self")), arguments.get("dim")
    if not isinstance(value, Tensor) or type(dim) is not int or not 0 <= dim < value.dim():
        return None
    return static_size(value.shape[dim])


def _reshape(node: Node, arguments: Arguments) -> None:
    key = "shape" if "shape" in arguments else "size"
    arguments[key] = explicit_sizes(arguments[key], node.meta.get("val"))


def explicit_sizes(sizes: Any, result: Any) -> list[Any]:
    """Return sizes with -1 resolved where the result's size is static; symbolic ones stay as they are."""
    if not isinstance(result, Tensor) or result.dim() != len(sizes):
        return list(sizes)
    numbers = [static_size(size) for size in result.shape]
    return [
        number if type(size) is int and number is not None else size
        for size, number in zip(sizes, numbers, strict=True)
    ]


def _cat(node: Node, arguments: Arguments) -> None:
    """Drop operands of shape (0,), which `cat` skips for compatibility."""
    result = node.meta.get("val")
    if isinstance(arguments["tensors"], Node):
        return  # a list that another operator returned
    tensors = list(arguments["tensors"])
    kept = [t for t in tensors if not _is_legacy_empty(value_of(t), result)]
    if kept:
        arguments["tensors"] = kept


def _is_legacy_empty(value: Any, result: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(result, Tensor) or value.dtype != result.dtype:
        return False
    return value.dim() == 1 and type(value.shape[0]) is int and value.shape[0] == 0


_SPECIAL: dict[str, Callable[[Node, Arguments], None]] = {
    "slice": _slice,
    "slice_scatter": _slice,
    "transpose": _transpose,
    "cat": _cat,
    "select": _select,
    "select_scatter": _select,
    "reshape": _reshape,
    "expand": _reshape,
}


def same_geometry(a: Tensor, b: Tensor) -> bool:
    """Whether two fake tensors have the same dtype, device, shape, strides and offset, without adding guards."""
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and a.layout == b.layout == torch.strided
        and a.dim() == b.dim()
        and all(same_size(x, y) for x, y in zip(a.shape, b.shape, strict=True))
        and all(same_size(x, y) for x, y in zip(a.stride(), b.stride(), strict=True))
        and same_size(a.storage_offset(), b.storage_offset())
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes have the same expression; comparing symbolic ones directly would add a guard."""
    symbolic_a, symbolic_b = isinstance(a, SymInt), isinstance(b, SymInt)
    if symbolic_a and symbolic_b:
        return bool(a.node.expr == b.node.expr)
    return not symbolic_a and not symbolic_b and a == b


def static_size(size: Any) -> int | None:
    """Return a size as an int if it is one or a symbol that was specialized to one; else None."""
    if isinstance(size, SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_number else None
    return int(size)


def is_viewable(value: Tensor, sizes: Any) -> bool | None:
    """Whether `value` can be viewed with these sizes without a copy; None if its hints are not known."""
    hints = [[size_hint(n) for n in numbers] for numbers in (value.shape, value.stride(), sizes)]
    if any(None in numbers for numbers in hints):
        return None
    shape, strides, new = cast("list[list[int]]", hints)
    try:
        torch.empty_strided(shape, strides, device="meta").view(new)
    except RuntimeError:
        return False
    return True
