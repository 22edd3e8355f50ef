"""Whether literals and constants of a pattern and of a graph mean the same, and how a place is called."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.graph.spellings import target_name
from dovetail.graph.weight_guard import packed_bytes
from dovetail.rules.matching.template import Where

SameNumber = Callable[[Any, Any], bool]
"""Whether a number of the pattern's trace is that of the graph."""


def argument_name(where: Where) -> str:
    """The argument that a place in a node's arguments is, by the operator's own name for it."""
    if where is None:
        return ""
    node, path = where
    if path[0] == 1:
        return str(path[1])
    schema = getattr(node.target, "_schema", None)
    return str(schema.arguments[path[1]].name) if schema is not None else f"argument {path[1]}"


def named(where: Where) -> str:
    if where is None:
        return "it has"
    return f"its {argument_name(where)} has" if len(where[1]) > 2 else f"its {argument_name(where)} is"


def same_literal(a: Any, b: Any) -> bool:
    """Whether two literals mean the same number or the same setting; 2 and 2.0 do, 1 and True do not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, complex) and isinstance(b, complex):
        return same_literal(a.real, b.real) and same_literal(a.imag, b.imag)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        left, right = cast("list[Any]", a), cast("list[Any]", b)
        return len(left) == len(right) and all(same_literal(x, y) for x, y in zip(left, right, strict=True))
    return type(a) is type(b) and bool(a == b)


def works_on_integers(node: Node) -> bool:
    """Whether an operation has a tensor without a fraction, so that 2 and 2.0 are not the same to it."""
    values = [n.meta.get("val") for n in node.all_input_nodes or (node,)]
    return any(isinstance(v, Tensor) and not (v.is_floating_point() or v.is_complex()) for v in values)


def instead(ours: Node, theirs: Any) -> str:
    """In words: what stands where the pattern has an operation."""
    has = f"'{target_name(theirs)}'" if isinstance(theirs, Node) else repr(theirs)
    if isinstance(theirs, Node) and theirs.op == "placeholder":
        has = "an input"
    return f"it has {has} where the pattern has '{target_name(ours)}'"


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two constants are the same bit for bit, on one device."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device or a.layout is not b.layout:
        return False
    if a.layout is not torch.strided or a.is_quantized:
        return a is b
    left, right = (packed_bytes(t.detach().resolve_conj().resolve_neg().cpu()) for t in (a, b))
    return bool(torch.equal(left, right))


def same_shape(a: Tensor, b: Tensor, same_number: SameNumber) -> bool:
    return a.dim() == b.dim() and all(same_number(m, n) for m, n in zip(a.shape, b.shape, strict=True))


def same_fact(ours: Any, theirs: Any, same_number: SameNumber) -> bool:
    """Whether what is known of a value is what the pattern would compute; unknown counts as the same."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        if ours.dtype != theirs.dtype or ours.device != theirs.device:
            return False
        return same_shape(ours, theirs, same_number)
    if isinstance(ours, (tuple, list)) and isinstance(theirs, (tuple, list)):
        left, right = cast("list[Any]", ours), cast("list[Any]", theirs)
        return len(left) == len(right) and all(
            same_fact(a, b, same_number) for a, b in zip(left, right, strict=True)
        )
    return theirs is None or isinstance(ours, Tensor) == isinstance(theirs, Tensor)
