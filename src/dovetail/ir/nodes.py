"""What is known of a node's value from `meta["val"]` or its operator's schema."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Node

from dovetail.ir.meta_keys import REGION
from dovetail.ir.op_traits import traits

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


def makes_tuple(node: Node) -> bool:
    """Whether a node returns several values, to be taken apart with getitem. Unknown counts as one value."""
    value = node.meta.get("val")
    if value is not None:
        return isinstance(value, (tuple, list))
    if REGION in node.meta or isinstance(node.target, HigherOrderOperator):
        return True
    return node.op in ("call_function", "call_method") and traits(node).several


Description = tuple[Any, ...]


def describe(value: Any, symbols: dict[str, str] | None = None) -> Description | None:
    """What two values must agree on to be interchangeable: dtype, sizes, strides, device. None: unknown.

    With `symbols`, symbolic sizes are numbered by first appearance, and the numbering is kept there.
    """
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return (
            "tensor",
            value.dtype,
            tuple([s if type(s) is int else _named(s, symbols) for s in value.shape]),
            tuple([s if type(s) is int else _named(s, symbols) for s in strides]),
            str(value.device),
            str(value.layout),
        )
    if isinstance(value, (tuple, list)):
        return ("several", *(describe(v, symbols) for v in cast("Sequence[Any]", value)))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ("symbol", type(value).__name__, _named(value, symbols))
    if value is None:
        return None
    return ("plain", type(value).__name__, repr(value))


def symbol_ranges(value: Any) -> dict[str, str]:
    """The bounds of every symbol in a value's sizes, by torch's own name for it."""
    found: dict[str, str] = {}
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            stack.extend(s for s in item.shape if type(s) is not int)
        elif isinstance(item, (tuple, list)):
            stack.extend(cast("Sequence[Any]", item))
        elif isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            env = item.node.shape_env
            for symbol in item.node.expr.free_symbols:
                found[str(symbol)] = str(env.var_to_range.get(symbol))
    return found


def same_kind(a: Any, b: Any) -> bool:
    """Whether two values agree in structure, dtype, rank and every size that is known in both."""
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
        return len(left) == len(right) and all(same_kind(x, y) for x, y in zip(left, right, strict=True))
    symbols = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor) and isinstance(
        a, symbols
    ) == isinstance(b, symbols)


def nbytes(value: Any) -> int | None:
    """Bytes a value takes, symbolic sizes by their hint; None if not known."""
    if isinstance(value, torch.Tensor):
        count = 1
        for size in value.shape:
            known = size if type(size) is int else _hint(size)
            if known is None:
                return None
            count *= known
        return count * value.dtype.itemsize
    if isinstance(value, (tuple, list)):
        each = [nbytes(v) for v in cast("Sequence[Any]", value)]
        return None if None in each else sum(cast("list[int]", each))
    if isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return 0
    return None


def _hint(size: Any) -> int | None:
    node = size.node
    hint = node.hint if node.has_hint() else None
    return None if hint is None else int(hint)


def short(value: Any, symbols: dict[str, str] | None = None) -> str:
    """A value's type in a few characters: `f32[2, 8]`, `(f32[2], i64[2])`, `sym`; empty if not known."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(_named(size, symbols) for size in value.shape)
        device = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]{device}"
    if isinstance(value, (tuple, list)):
        parts = [short(v, symbols) or "?" for v in cast("Sequence[Any]", value)]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        # A symbol that was settled while tracing is a plain number.
        return _named(value, symbols) if value.node.expr.free_symbols else type(value).__name__.lower()[3:]
    if isinstance(value, (bool, int, float)):
        return type(value).__name__
    return ""


def _named(size: Any, symbols: dict[str, str] | None) -> str:
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
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
    """Whether a node takes one value out of what a tuple-making operation returned."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, Node) and makes_tuple(source)


def is_number(size: Any) -> bool:
    """Whether a size is known, and no symbol."""
    return isinstance(size, int)
