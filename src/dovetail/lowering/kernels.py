"""Kernels by kind: a plain function called with what a region's pattern calls its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from dovetail.lowering.backend import Compiled
from dovetail.lowering.faults import Failure
from dovetail.outlining.region import Region


class Unfit(Failure):
    """A kernel cannot be called for a region, or did not give what a region needs; the reason is its text."""


def kernel_call(kernel: Callable[..., Any], region: Region) -> Compiled:
    """A callable with the operands of a region's body that calls `kernel` by the names of the pattern's arguments.

    Without names the operands go in order. Attributes go by keyword. Results are put into the order of the body's.
    Raises Unfit with what `misfit` says.
    """
    reason = misfit(kernel, region)
    if reason is not None:
        raise Unfit(reason)
    named = tuple(region.arguments.items())
    keywords = dict(region.attrs)
    order = cast("tuple[int, ...]", region.results)
    count = max(order) + 1 if order else len(_results(region))

    def call(*operands: Any) -> tuple[Any, ...]:
        if named:
            made = kernel(**{name: operands[number] for name, number in named}, **keywords)
        else:
            made = kernel(*operands, **keywords)
        flat = _flat(made)
        if len(flat) < count or (not order and len(flat) > count):
            raise Unfit(f"the kernel returned {len(flat)} results where the region has {count}")
        return tuple(flat[k] for k in order) if order else tuple(flat)

    return call


def misfit(kernel: Callable[..., Any], region: Region) -> str | None:
    """Why a kernel cannot stand for a region; None if it can be called for it.

    Every operand must have a name or none; the kernel must take all of them and every attribute, for one that it
    overlooks may be what makes the difference; and no inner value may be wanted, which only the body computes.
    """
    operands = [n.name for n in region.body.graph.nodes if n.op == "placeholder"]
    named = region.arguments
    unnamed = [name for i, name in enumerate(operands) if i not in named.values()] if named else []
    if unnamed:
        return f"its operand '{unnamed[0]}' is none of the arguments of the pattern ({', '.join(named)})"
    both = sorted(named.keys() & region.attrs.keys())
    if both:
        return f"'{both[0]}' is an argument and an attribute at once"
    if any(k is None for k in region.results):
        inner = region.results.index(None)
        return f"its result {inner} is a value from inside, which a kernel for the whole does not have"
    try:
        signature = inspect.signature(kernel)
    except (TypeError, ValueError):
        return None  # built in, and without a signature; the trial will tell
    given = () if named else tuple(operands)
    try:
        signature.bind(*given, **dict.fromkeys(named), **region.attrs)
    except TypeError as error:
        has = ", ".join(named or operands) or "nothing"
        attrs = f" and the attributes {', '.join(region.attrs)}" if region.attrs else ""
        return f"the kernel cannot be called with {has}{attrs}: {error}"
    return None


def _results(region: Region) -> Sequence[Any]:
    (made,) = region.body.graph.output_node().args
    return cast("Sequence[Any]", made)


def _flat(made: Any) -> Sequence[Any]:
    if isinstance(made, torch.Tensor):
        return (made,)
    if isinstance(made, (tuple, list)):
        return cast("Sequence[Any]", made)
    raise Unfit(f"the kernel returned a {type(made).__name__}, neither a tensor nor a tuple of them")
