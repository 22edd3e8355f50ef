"""A body in float64, whatever precision it was written for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_map

from dovetail.graph.module import Body
from dovetail.lowering.closeness import rounding
from dovetail.lowering.examples import memory
from dovetail.lowering.flattening import flat


class Precise(Interpreter):
    """Runs a body with its floating numbers in double precision, casts to other ones included.

    Operators that have no double precision, or that look at bits, raise, or give shapes that are not the body's.
    """

    def __init__(self, body: Body) -> None:
        super().__init__(flat(body))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.view.dtype:
            raise TypeError("a view of bits has no double precision")
        return super().call_function(target, *tree_map(_wider, (tuple(args), dict(kwargs))))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = "double" if target in ("float", "half", "bfloat16") else target
        return super().call_method(target, *tree_map(_wider, (tuple(args), dict(kwargs))))


def _wider(value: Any) -> Any:
    return widened(value) if isinstance(value, torch.dtype) else value


def widened(dtype: torch.dtype) -> torch.dtype:
    """The double-precision dtype for a floating or complex one; others as they are."""
    if dtype.is_floating_point:
        return torch.float64
    return torch.complex128 if dtype.is_complex else dtype


def precise_operands(args: Sequence[Any], moved_by: float = 0.0) -> list[Any]:
    """Operands in double precision; on request each number moved up or down by so much of itself."""
    generator = torch.Generator().manual_seed(0)
    made: list[Any] = []
    for a in args:
        if not isinstance(a, Tensor) or not rounding(a.dtype):
            made.append(a)
            continue
        wide = memory(a).to(widened(a.dtype))
        if moved_by:
            signs = torch.randint(0, 2, wide.shape, generator=generator).mul_(2).sub_(1)
            wide = wide * (1 + moved_by * signs.to(wide.device, torch.float64))
        made.append(wide.as_strided(a.shape, a.stride()).requires_grad_(a.requires_grad))
    return made


def roundings(body: GraphModule) -> tuple[float, float]:
    """The smallest and the largest rounding of the dtypes in a body; zeros where it has no floating numbers."""
    found: set[float] = set()
    stack = [body]
    while stack:
        at = stack.pop()
        for node in at.graph.nodes:
            value = node.meta.get("val")
            for v in cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else (value,):
                if isinstance(v, Tensor) and rounding(v.dtype):
                    found.add(rounding(v.dtype))
        stack.extend(m for m in at._modules.values() if isinstance(m, Body))
    return (min(found), max(found)) if found else (0.0, 0.0)
