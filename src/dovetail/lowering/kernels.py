"""Kernels by kind: a plain function called with what a region's pattern calls its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from dovetail.lowering.backend import Compiled
from dovetail.outlining.region import Region


class Unfit(Exception):
    """A kernel cannot be called for a region; the reason is its text."""


def kernel_call(kernel: Callable[..., Any], region: Region) -> Compiled:
    """A callable with the operands of a region's body that calls `kernel` by the names of the pattern's arguments.

    Without names the operands go in order. Attributes are passed by keyword as far as the kernel has a parameter for
    them. Results are put into the order of the body's.
    """
    keywords = _accepted(kernel, region)
    order = _order(region)
    named = sorted(region.arguments.items())
    count = sum(n.op == "placeholder" for n in region.body.graph.nodes)
    if named and len({number for _, number in named}) != count:
        raise Unfit(f"{count} operands, of which the pattern's arguments name {len(named)}")

    def call(*operands: Any) -> tuple[Any, ...]:
        if named:
            made = kernel(**{name: operands[number] for name, number in named}, **keywords)
        else:
            made = kernel(*operands, **keywords)
        flat: Sequence[Any] = (made,) if isinstance(made, torch.Tensor) else tuple(made)
        return tuple(flat) if order is None else tuple(flat[k] for k in order)

    return call


def _accepted(kernel: Callable[..., Any], region: Region) -> dict[str, Any]:
    """The attributes that a kernel has parameters for."""
    try:
        parameters = inspect.signature(kernel).parameters.values()
    except (TypeError, ValueError):
        return dict(region.attrs)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(region.attrs)
    names = {p.name for p in parameters}
    return {k: v for k, v in region.attrs.items() if k in names}


def _order(region: Region) -> tuple[int, ...] | None:
    if not region.results:
        return None
    if any(k is None for k in region.results):
        raise Unfit("it also returns a value from inside, which a kernel for the whole does not have")
    return cast("tuple[int, ...]", region.results)
