"""One spelling for an operator's arguments: defaults filled in, dims from the front, sizes explicit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import Node

from dovetail.ir.nodes import size_hint

Arguments = dict[str, Any]
SLICE_END = sys.maxsize
_DIMS = frozenset({"dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "dimension"})
_ONE_MORE = frozenset({"unsqueeze", "stack", "diag_embed"})
_AS_RESULT = frozenset({"cat", "concat", "linalg_cross"})

# A negative dim has a meaning of its own there.
_KEEP_DIMS = frozenset({"_weight_norm", "_weight_norm_interface", "norm_except_dim"})
_FLOAT_DTYPE_IS_DEFAULT = frozenset({"softmax", "log_softmax", "sum", "mean", "cumsum", "cumprod", "prod"})
_ENCODED = ("MemoryFormat", "ScalarType", "Layout", "Device")


def op_name(target: object) -> str:
    """The base name of an operator without namespace and overload, or "" for anything else."""
    return target._schema.name.split("::")[1] if isinstance(target, OpOverload) else ""


def is_aten(target: object) -> bool:
    """Whether the target is an overload of an operator in the aten namespace."""
    return isinstance(target, OpOverload) and target.namespace == "aten"


def named_arguments(node: Node) -> Arguments:
    """The arguments of an operator call by the names in its schema, as far as they were given."""
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


def viewed_operand(node: Node) -> Node | None:
    """The operand that a view operator's result is a view of."""
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


def normalized_arguments(node: Node, given: Arguments) -> Arguments:
    """The same arguments in one spelling. Values never change, only how they are written."""
    target = node.target
    if not isinstance(target, OpOverload):
        return given
    new = _with_defaults(target, given)
    if target.namespace == "aten":
        _count_dims_from_front(node, target, new)
        _say_placement_once(node, target, new)
        special = _SPECIAL.get(op_name(target))
        if special is not None:
            special(node, new)
    return new


def to_args_kwargs(
    target: OpOverload, arguments: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments as the schema has them: keywords only where it demands them."""
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
            if not encoded:  # written as a bare number that only the dispatcher understands
                new[argument.name] = list(default) if isinstance(default, (list, tuple)) else default
    return new


def _count_dims_from_front(node: Node, target: OpOverload, arguments: Arguments) -> None:
    name = op_name(target)
    named = [a.name for a in target._schema.arguments if a.name in _DIMS and a.name in arguments]
    if not named or name in _KEEP_DIMS:
        return
    rank = _rank(node, name, arguments, target)
    if rank is None:
        return
    for dim in named:
        arguments[dim] = _from_front(arguments[dim], max(rank, 1))


def _rank(node: Node, name: str, arguments: Arguments, target: OpOverload) -> int | None:
    if name in _AS_RESULT:
        value = node.meta.get("val")
    else:
        value = value_of(arguments.get(target._schema.arguments[0].name))
        if isinstance(value, (list, tuple)):
            value = value_of(value[0]) if value else None
    if not isinstance(value, Tensor):
        return None
    return value.dim() + (1 if name in _ONE_MORE else 0)


def _from_front(dim: Any, rank: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_from_front(d, rank) for d in dim]
    return dim + rank if type(dim) is int and -rank <= dim < 0 else dim


def value_of(argument: Any) -> Any:
    """The fake value of an argument: of the node it is, or itself."""
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def _say_placement_once(node: Node, target: OpOverload, arguments: Arguments) -> None:
    """Leave out a dtype, layout or device that is the operand's own; spell out those of a factory."""
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
    """Swapping is symmetric: the lower dim first."""
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
    """Sizes with -1 resolved where the result's size is a number; symbolic ones stay as they were."""
    if not isinstance(result, Tensor) or result.dim() != len(sizes):
        return list(sizes)
    numbers = [static_size(size) for size in result.shape]
    return [
        number if type(size) is int and number is not None else size
        for size, number in zip(sizes, numbers, strict=True)
    ]


def _cat(node: Node, arguments: Arguments) -> None:
    """Leave out what concatenating has skipped since the days of one kind of empty tensor: shape (0,)."""
    result = node.meta.get("val")
    if isinstance(arguments["tensors"], Node):
        return  # a list that another operator returned
    tensors = list(arguments["tensors"])
    kept = [t for t in tensors if not _is_nothing(value_of(t), result)]
    if kept:
        arguments["tensors"] = kept


def _is_nothing(value: Any, result: Any) -> bool:
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
    """Whether two fake tensors have one dtype, device, shape, strides and offset, without adding guards."""
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
    """Whether two sizes are written alike; comparing symbolic ones outright would add a guard."""
    symbolic_a, symbolic_b = isinstance(a, SymInt), isinstance(b, SymInt)
    if symbolic_a and symbolic_b:
        return bool(a.node.expr == b.node.expr)
    return not symbolic_a and not symbolic_b and a == b


def static_size(size: Any) -> int | None:
    """A size as an int, if it is one or a symbol that turned out to be one."""
    if isinstance(size, SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_number else None
    return int(size)


def is_viewable(value: Tensor, sizes: Any) -> bool | None:
    """Whether `value` could be viewed with these sizes without a copy; None if that cannot be told."""
    old = [(size_hint(n), size_hint(s)) for n, s in zip(value.shape, value.stride(), strict=True)]
    new = [size_hint(n) for n in sizes]
    if any(n is None or s is None for n, s in old) or any(n is None for n in new):
        return None
    try:
        probe = torch.empty_strided(
            [n for n, _ in old if n is not None], [s for _, s in old if s is not None], device="meta"
        )
        probe.view([n for n in new if n is not None])
    except RuntimeError:
        return False
    return True
