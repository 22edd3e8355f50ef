"""Facts about a node's value, from `meta["val"]` or from its operator's schema: type, size, storage, tuple or not."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Node

from dovetail.ir.meta_keys import REGION
from dovetail.ir.op_traits import traits_of

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
SCALARS = (int, float, bool, *SYMBOLIC)
"""The types of numbers in `meta["val"]`."""


def returns_tuple(node: Node) -> bool:
    """Whether a node returns a tuple or list, to be unpacked with getitem. Unknown counts as a single value."""
    value = node.meta.get("val")
    if value is not None:
        return isinstance(value, (tuple, list))
    if REGION in node.meta or isinstance(node.target, HigherOrderOperator):
        return True
    return node.op in ("call_function", "call_method") and traits_of(node).returns_tuple


ValueSignature = tuple[Any, ...]


def value_signature(value: Any, symbols: dict[str, str] | None = None) -> ValueSignature | None:
    """Return what two values must agree on to be interchangeable: dtype, sizes, strides, device; None if unknown.

    With `symbols`, symbolic sizes are numbered by first appearance, and the numbering is stored there.
    """
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return (
            "tensor",
            value.dtype,
            tuple([s if type(s) is int else _format_size(s, symbols) for s in value.shape]),
            tuple([s if type(s) is int else _format_size(s, symbols) for s in strides]),
            str(value.device),
            str(value.layout),
        )
    if isinstance(value, (tuple, list)):
        return ("several", *(value_signature(v, symbols) for v in cast("Sequence[Any]", value)))
    if isinstance(value, SYMBOLIC):
        return ("symbol", type(value).__name__, _format_size(value, symbols))
    if value is None:
        return None
    return ("plain", type(value).__name__, repr(value))


def symbol_ranges(value: Any) -> dict[str, str]:
    """Return the bounds of every symbol in a value's sizes, by torch's own name for it."""
    ranges: dict[str, str] = {}
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            stack.extend(s for s in item.shape if type(s) is not int)
        elif isinstance(item, (tuple, list)):
            stack.extend(cast("Sequence[Any]", item))
        elif isinstance(item, SYMBOLIC):
            env = item.node.shape_env
            for symbol in item.node.expr.free_symbols:
                ranges[str(symbol)] = str(env.var_to_range.get(symbol))
    return ranges


def compatible_values(a: Any, b: Any) -> bool:
    """Whether two values agree in structure, dtype, rank, device and every size that is static in both."""
    if a is None or b is None:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.dim() != b.dim() or a.device != b.device:
            return False
        return all(
            type(m) is not int or type(n) is not int or m == n for m, n in zip(a.shape, b.shape, strict=True)
        )
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        left, right = cast("Sequence[Any]", a), cast("Sequence[Any]", b)
        return len(left) == len(right) and all(
            compatible_values(x, y) for x, y in zip(left, right, strict=True)
        )
    same_tensor = isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor)
    return same_tensor and isinstance(a, SCALARS) == isinstance(b, SCALARS)


def nbytes(value: Any) -> int | None:
    """Return the bytes a value takes, symbolic sizes by their hint; None if not known."""
    if isinstance(value, torch.Tensor):
        sizes = size_hints(value)
        return None if sizes is None else math.prod(sizes) * value.dtype.itemsize
    if isinstance(value, (tuple, list)):
        each = [nbytes(v) for v in cast("Sequence[Any]", value)]
        return None if None in each else sum(cast("list[int]", each))
    if isinstance(value, SCALARS):
        return 0
    return None


def size_hint(size: Any) -> int | None:
    """Return a size as it was in the example, without adding a guard; None for one that depends on data."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = size.node.hint if size.node.has_hint() else None
    return None if hint is None else int(hint)


def size_hints(value: torch.Tensor) -> list[int] | None:
    """Return the hints of a tensor's sizes; None if one depends on data."""
    hints = [size if type(size) is int else size_hint(size) for size in value.shape]
    return None if None in hints else cast("list[int]", hints)


def storage_key(tensor: torch.Tensor) -> int:
    """Return the same number for tensors that share storage; a tensor without strides has storage of its own."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def storage_keys(value: Any) -> set[int]:
    """Return the storage keys of a tensor, or of all tensors in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        return {storage_key(value)}
    if isinstance(value, (tuple, list)):
        return {key for item in cast("Sequence[Any]", value) for key in storage_keys(item)}
    return set()


def format_type(value: Any, symbols: dict[str, str] | None = None) -> str:
    """Return a value's type in a few characters: `f32[2, 8]`, `(f32[2], i64[2])`, `sym`; empty if not known."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(_format_size(size, symbols) for size in value.shape)
        device = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]{device}"
    if isinstance(value, (tuple, list)):
        parts = [format_type(v, symbols) or "?" for v in cast("Sequence[Any]", value)]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if isinstance(value, SYMBOLIC):
        # A symbol that was specialized while tracing is a number.
        return (
            _format_size(value, symbols) if value.node.expr.free_symbols else type(value).__name__.lower()[3:]
        )
    if isinstance(value, (bool, int, float)):
        return type(value).__name__
    return ""


def _format_size(size: Any, symbols: dict[str, str] | None) -> str:
    if not isinstance(size, SYMBOLIC):
        return str(size)
    expr = size.node.expr
    if symbols is None:
        return str(expr)
    # Numbered by first appearance: torch numbers symbols by what else the process has traced.
    for symbol in sorted(expr.free_symbols, key=str):
        symbols.setdefault(str(symbol), f"s{len(symbols)}")
    renamed = {symbol: type(symbol)(symbols[str(symbol)]) for symbol in expr.free_symbols}
    return str(expr.subs(renamed, simultaneous=True)).replace(" ", "")


def is_projection(node: Node) -> bool:
    """Whether a node takes one value out of the tuple that an operation returned."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, Node) and returns_tuple(source)


def is_static_size(size: Any) -> bool:
    """Whether a size is a number and not a symbol."""
    return isinstance(size, int)


def example_size(value: Any) -> Any:
    """Return the hint of a symbolic size, 2 for one that depends on data; other values as they are."""
    if not isinstance(value, torch.SymInt):
        return value
    hint = size_hint(value)
    return 2 if hint is None else hint
