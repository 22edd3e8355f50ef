"""Kernels by kind: a plain function called with what a region's pattern calls its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from dovetail.errors import nearest
from dovetail.graph.effects import summary
from dovetail.lowering.backend import Compiled
from dovetail.lowering.examples import hint_of
from dovetail.lowering.faults import Failure
from dovetail.lowering.outcomes import expected_of
from dovetail.outlining.region import Region
from dovetail.rules.library import KINDS
from dovetail.rules.library.known import Kind, Required


class Unfit(Failure):
    """A kernel cannot be called for a region, or did not give what a region needs; the reason is its text."""


def kernel_call(
    kernel: Callable[..., Any], region: Region, examples: Sequence[Any] | None = None
) -> Compiled:
    """A callable with the operands of a region's body that calls `kernel` by the names of the pattern's arguments.

    Without names the operands go in order. Attributes go by keyword; one that the kernel does not take is left out
    where it has the default of the kind. Results are put into the order of the body's and, given `examples` of the
    operands, into the memory layout of the body's: copied where the kernel's has another order of dimensions. Raises
    Unfit with the reason that `misfit` gives.
    """
    reason = misfit(kernel, region)
    if reason is not None:
        raise Unfit(reason)
    named = tuple(region.arguments.items())
    keywords = _keywords(kernel, region)
    order = cast("tuple[int, ...]", region.results)
    count = max(order) + 1 if order else len(_results(region))
    layouts = [None] * len(_results(region)) if examples is None else _layouts(region, examples)

    def call(*operands: Any) -> tuple[Any, ...]:
        if named:
            results = kernel(**{name: operands[number] for name, number in named}, **keywords)
        else:
            results = kernel(*operands, **keywords)
        flat = _flat(results)
        if len(flat) < count or (not order and len(flat) > count):
            raise Unfit(f"the kernel returned {len(flat)} results where the region has {count}")
        flat = [flat[k] for k in order] if order else flat
        return tuple(_laid_out(value, layout) for value, layout in zip(flat, layouts, strict=True))

    return call


def _layouts(region: Region, examples: Sequence[Any]) -> list[tuple[int, ...] | None]:
    """The dimensions of each result of a body from the outermost to the innermost in memory; None for no tensor."""
    effects = summary(region.body)
    if effects.world:
        return [None] * len(_results(region))
    expected = expected_of(region.body, effects, examples, grad=False).outputs
    return [_dimension_order(value) if isinstance(value, torch.Tensor) else None for value in expected]


def _dimension_order(value: torch.Tensor) -> tuple[int, ...]:
    strides = [hint_of(stride) for stride in value.stride()]
    return tuple(sorted(range(value.dim()), key=lambda i: -strides[i]))


def _laid_out(value: Any, order: tuple[int, ...] | None) -> Any:
    """A result with its dimensions in this order in memory; itself where it has that already, or is none such."""
    if order is None or not isinstance(value, torch.Tensor) or value.dim() != len(order):
        return value
    if order == tuple(range(len(order))):
        return value.contiguous()
    outer_first = value.permute(order)
    if outer_first.is_contiguous():
        return value
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return outer_first.contiguous().permute(inverse)


def misfit(kernel: Callable[..., Any], region: Region) -> str | None:
    """Why a kernel cannot stand for a region; None if it can be called for it.

    Every operand must have a name or none, sizes aside where the kind is the library's; the kernel must take all of
    them and every attribute that does not have the default of its kind, for one that it overlooks may be what makes
    the difference; where it overlooks one, it may have no parameter that the kind does not have, for that may be the
    same under another name; and no inner value may be used outside, which only the body computes.
    """
    operands = [n.name for n in region.body.graph.nodes if n.op == "placeholder"]
    named, contract = region.arguments, contract_of(region)
    unnamed = [name for i, name in enumerate(operands) if i not in named.values()] if named else []
    if unnamed and contract is None:
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
    foreign = _foreign(kernel, region)
    given, keywords = () if named else tuple(operands), _keywords(kernel, region)
    try:
        signature.bind(*given, **dict.fromkeys(named), **keywords)
    except TypeError as error:
        has = ", ".join(named or operands) or "nothing"
        attrs = f" and the attributes {', '.join(region.attrs)}" if region.attrs else ""
        required = {*named, *keywords} - signature.parameters.keys()
        hint = _near_names(foreign, required)
        return f"the kernel cannot be called with {has}{attrs}: {error}{hint}"
    overlooked = region.attrs.keys() - keywords.keys()
    if overlooked and foreign:
        return (
            f"the kernel's parameter '{foreign[0]}' is none of the kind '{region.kind}' and may stand for an attribute "
            f"that it does not take ({', '.join(sorted(overlooked))}){_near_names(foreign, overlooked)}: use the kind's "
            f"names, take **attributes, or bind it by functools.partial"
        )
    return None


def contract_of(region: Region) -> Kind | None:
    """The library's kind that a region is of; None if it has none, or has operands, sizes aside, that it does not name."""
    contract = KINDS.get(region.kind)
    if contract is None or not contract.describes(region.version, region.arguments, region.attrs):
        return None
    values = [n.meta.get("val") for n in region.body.graph.nodes if n.op == "placeholder"]
    operands = {i for i, value in enumerate(values) if not isinstance(value, (int, torch.SymInt))}
    return contract if region.results and operands <= set(region.arguments.values()) else None


def near_kind(kernels: Collection[str], kind: str) -> str:
    """A hint for a kind without a kernel: the kinds of a table that are written like it and are no kinds themselves."""
    near = nearest(kind, [name for name in kernels if name not in KINDS], most=1)
    return f"; it has one for '{near[0]}': did you mean '{kind}'?" if near else ""


def _foreign(kernel: Callable[..., Any], region: Region) -> list[str]:
    """The parameters of a kernel, unless bound by `partial`, that are no arguments or attributes of region and kind."""
    contract = KINDS.get(region.kind)
    names = {*region.arguments, *region.attrs, *(contract.arguments if contract is not None else ())}
    names.update(kernel.keywords if isinstance(kernel, functools.partial) else ())
    parameters = inspect.signature(kernel).parameters.values()
    return [p.name for p in parameters if p.name not in names and p.kind not in _VARIADIC]


def _near_names(foreign: Iterable[str], required: Collection[str]) -> str:
    """A hint for foreign parameters that are written like a name they leave out."""
    hints: list[str] = []
    for name in foreign:
        abbreviated = [r for r in sorted(required) if name.startswith(r) or r.startswith(name)]
        near = abbreviated or nearest(name, sorted(required), most=1)
        hints += [f"'{name}' may be meant for '{near[0]}'"] if near else []
    return f"; {', '.join(hints)}" if hints else ""


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _keywords(kernel: Callable[..., Any], region: Region) -> Mapping[str, Any]:
    """What a kernel is called with besides its operands.

    That is every attribute, without those it does not take that have the kind's default, and None for each absent
    argument of the kind that it has a default for, whatever that default is.
    """
    contract = contract_of(region)
    if contract is None:
        return region.attrs
    try:
        parameters = inspect.signature(kernel).parameters
    except (TypeError, ValueError):
        return region.attrs
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        attrs = dict(region.attrs)
    else:
        attrs = {
            name: value
            for name, value in region.attrs.items()
            if name in parameters or not contract.is_default(name, value)
        }
    absent = [name for name in contract.arguments if name in parameters and name not in region.arguments]
    return attrs | {name: None for name in absent if parameters[name].default is not Required}


def _results(region: Region) -> Sequence[Any]:
    (made,) = region.body.graph.output_node().args
    return cast("Sequence[Any]", made)


def _flat(made: Any) -> Sequence[Any]:
    if isinstance(made, torch.Tensor):
        return (made,)
    if isinstance(made, (tuple, list)):
        return cast("Sequence[Any]", made)
    raise Unfit(f"the kernel returned a {type(made).__name__}, neither a tensor nor a tuple of them")
