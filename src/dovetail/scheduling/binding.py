"""Which operands of matches a replacement is called with, by position, by name, or as parameters of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.rules.matching.match import Value
from dovetail.rules.pattern import PatternRule
from dovetail.scheduling.finders import ByRegion, ByRule
from dovetail.scheduling.found import Found
from dovetail.scheduling.replacing import ABSENT, Operand, Probe, Replacement, signature_of

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def bound(
    new: Callable[..., Any],
    label: str,
    found: Sequence[Found],
    params: Mapping[str, Any] | None,
    fixed: Mapping[str, Any],
    results: tuple[int, ...],
) -> Replacement:
    """A replacement for matches. Parameters called as a pattern's arguments are theirs; else order counts."""
    taken = {name: operand_of(found, value) for name, value in (params or {}).items()}
    _require_parameters(new, taken)
    arguments = _arguments(found, set(taken.values()))
    names = _parameter_names(new)
    is_pattern = len(found) == 1 and _pattern_names(found[0]) is not None
    given: list[Operand] = []
    named: dict[str, Operand] = {}
    present = [name for name, operand in arguments.items() if operand != ABSENT]
    if is_pattern and present and all(name in names for name in present):
        named = {name: arguments[name] for name in arguments if name in names}
    else:
        only = {name for name, kind in names.items() if kind is inspect.Parameter.KEYWORD_ONLY}
        named = {name: operand for name, operand in arguments.items() if name in only}
        given = [operand for name, operand in arguments.items() if name not in only]
        while given and given[-1] == ABSENT:
            given.pop()
    free = names.keys() - named.keys() - fixed.keys() - set(list(names)[: len(given)])
    literals = tuple(name for name in found[0].literals if name in free) if is_pattern else ()
    arity = tuple(len(match.operands) for match in found)
    outputs = tuple(len(match.outputs) for match in found)
    return Replacement(new, label, tuple(given), results, arity, outputs, named, literals, taken, dict(fixed))


def _parameter_names(new: Any) -> dict[str, Any]:
    signature = signature_of(new)
    parameters = signature.parameters.values() if signature is not None else ()
    return {p.name: p.kind for p in parameters if p.kind in _NAMED}


def _require_parameters(new: Any, taken: Mapping[str, Operand]) -> None:
    if not taken:
        return
    if not isinstance(new, torch.nn.Module):
        raise InvalidArgument(
            "params are parameters of a new module; a function is called with the values themselves."
        )
    known = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    for name in taken:
        if name not in known:
            raise ScheduleError(
                f"the new module has no parameter '{name}'; there are {', '.join(known) or 'none'}"
            )


def _pattern_names(match: Found) -> list[str] | None:
    """The arguments of the pattern that a match is of, in order; None if it is of none."""
    if isinstance(match.finder, ByRule) and match.request is not None:
        for rule in match.finder.rules:
            if isinstance(rule, PatternRule) and rule.name == match.request.rule:
                return list(rule.parameters.operands)
    if match.request is not None and match.request.arguments:
        return list(match.request.arguments)
    if isinstance(match.finder, ByRegion) and not match.operands.keys() <= {
        value.name for value in match.operands.values() if value is not None
    }:
        return list(match.operands)
    return None


def _arguments(found: Sequence[Found], taken: set[Operand]) -> dict[str, Operand]:
    """The operands to call with: a pattern's in its order, otherwise each value that is no weight, once."""
    if len(found) == 1 and (pattern := _pattern_names(found[0])) is not None:
        numbers = {name: i for i, name in enumerate(found[0].operands)}
        wanted = [name for name in pattern if name not in found[0].literals]
        named = {name: (0, numbers[name]) if name in numbers else ABSENT for name in wanted}
        return {name: operand for name, operand in named.items() if operand not in taken}
    known: dict[str, Operand] = {}
    for i, match in enumerate(found):
        for j, value in enumerate(match.operands.values()):
            is_weight = value is None or (value.node.op == "get_attr" and isinstance(value.value, Tensor))
            if value is not None and not is_weight and (i, j) not in taken:
                known.setdefault(value.name, (i, j))
    return known


def operand_of(found: Sequence[Found], value: Any) -> Operand:
    """An operand of matches: as a value of one of them, or by name; `1.w` is `w` of the second."""
    if isinstance(value, Value):
        for i, match in enumerate(found):
            for j, known in enumerate(match.operands.values()):
                if known is not None and known.name == value.name:
                    return i, j
    elif isinstance(value, str):
        first, _, rest = value.partition(".")
        places = [int(first)] if rest and first.isdigit() and int(first) < len(found) else range(len(found))
        name = rest if isinstance(places, list) else value
        for i in places:
            for j, (key, known) in enumerate(found[i].operands.items()):
                if name == key or (known is not None and known.name == name):
                    return i, j
        there = dict.fromkeys(key for match in found for key in match.operands)
        raise ScheduleError(
            f"'{value}' is no operand of what is replaced; there are {', '.join(there) or 'none'}"
        )
    raise InvalidArgument(f"params takes values of the match, such as match['w'], not {value!r}.")


def spelled_operand(found: Sequence[Found], operand: Operand) -> str:
    """An operand as history keeps it."""
    match, which = operand
    name = list(found[match].operands)[which]
    return name if len(found) == 1 else f"{match}.{name}"


def order_of_results(
    found: Sequence[Found], probe: Probe, values: Sequence[Any], region_results: Sequence[int]
) -> tuple[int, ...]:
    """Which value that a module returned each result of its operations is, told by their numbers.

    Operations are listed as they are computed, and a module may return what they make in any order.
    """
    _, made, _ = probe.calls[0]
    outputs = [value for _, value in sorted(zip(region_results, made, strict=True), key=lambda pair: pair[0])]
    order: list[int] = []
    for value in outputs:
        same = [i for i, leaf in enumerate(values) if i not in order and _equal(leaf, value)]
        if not same:
            names = ", ".join(node.name for match in found for node in match.outputs)
            raise ScheduleError(
                f"not all of {names} are returned by '{found[0].module_path}', so that something that stands for it "
                f"would not make them"
            )
        order.append(same[0])
    return tuple(order)


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or (type(a) is type(b) and a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True))
        if a.is_floating_point()
        else torch.equal(a, b)
    )
