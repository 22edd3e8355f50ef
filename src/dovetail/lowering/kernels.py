"""Kernels by kind: a plain function called with what a region's pattern calls its arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch

from dovetail.lowering.backend import Compiled
from dovetail.lowering.faults import Failure
from dovetail.outlining.region import Region
from dovetail.rules.library import KINDS


class Unfit(Failure):
    """A kernel cannot be called for a region, or did not give what a region needs; the reason is its text."""


def kernel_call(kernel: Callable[..., Any], region: Region) -> Compiled:
    """A callable with the operands of a region's body that calls `kernel` by the names of the pattern's arguments.

    Without names the operands go in order. Attributes go by keyword; one that the kernel does not take is left out
    where it has the default of the kind. Results are put into the order of the body's. Raises Unfit with the reason
    that `misfit` gives.
    """
    reason = misfit(kernel, region)
    if reason is not None:
        raise Unfit(reason)
    named = tuple(region.arguments.items())
    keywords = _keywords(kernel, region)
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

    Every operand must have a name or none; the kernel must take all of them and every attribute that does not have
    the default of its kind, for one that it overlooks may be what makes the difference; and no inner value may be
    used outside, which only the body computes.
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
        signature.bind(*given, **dict.fromkeys(named), **_keywords(kernel, region))
    except TypeError as error:
        has = ", ".join(named or operands) or "nothing"
        attrs = f" and the attributes {', '.join(region.attrs)}" if region.attrs else ""
        return f"the kernel cannot be called with {has}{attrs}: {error}{_near_arguments(signature, region)}"
    return None


def near_kind(kernels: Collection[str], kind: str) -> str:
    """A hint for a kind without a kernel: the kinds of a table that are written like it and are no kinds themselves."""
    unknown = [name for name in kernels if name not in KINDS]
    near = difflib.get_close_matches(kind, unknown, n=1)
    return f"; it has one for '{near[0]}': did you mean '{kind}'?" if near else ""


def _near_arguments(signature: inspect.Signature, region: Region) -> str:
    """A hint for parameters of a kernel that are written like an argument or attribute of the region."""
    contract = KINDS.get(region.kind)
    names = {*region.arguments, *region.attrs, *(contract.arguments if contract is not None else ())}
    hints: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name not in names and parameter.kind not in _VARIADIC:
            near = difflib.get_close_matches(parameter.name, sorted(names), n=1)
            hints += [f"'{parameter.name}' may be meant for '{near[0]}'"] if near else []
    return f"; {', '.join(hints)}" if hints else ""


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _keywords(kernel: Callable[..., Any], region: Region) -> Mapping[str, Any]:
    """The attributes that a kernel is called with: all that it takes, and those that are not the kind's default."""
    contract = KINDS.get(region.kind)
    if contract is None or not contract.describes(region.version, region.arguments, region.attrs):
        return region.attrs
    try:
        parameters = inspect.signature(kernel).parameters
    except (TypeError, ValueError):
        return region.attrs
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return region.attrs
    return {
        name: value
        for name, value in region.attrs.items()
        if name in parameters or not contract.is_default(name, value)
    }


def _results(region: Region) -> Sequence[Any]:
    (made,) = region.body.graph.output_node().args
    return cast("Sequence[Any]", made)


def _flat(made: Any) -> Sequence[Any]:
    if isinstance(made, torch.Tensor):
        return (made,)
    if isinstance(made, (tuple, list)):
        return cast("Sequence[Any]", made)
    raise Unfit(f"the kernel returned a {type(made).__name__}, neither a tensor nor a tuple of them")
