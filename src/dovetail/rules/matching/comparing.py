"""Whether literals and constants of a pattern and of a graph mean the same, and how a place is called."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from dovetail.rules.matching.template import Where


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
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        left, right = cast("list[Any]", a), cast("list[Any]", b)
        return len(left) == len(right) and all(same_literal(x, y) for x, y in zip(left, right, strict=True))
    return bool(a == b)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(torch.equal(a.detach().cpu(), b.detach().cpu()))
