"""Arguments of an operator as a tracer writes them after the dispatcher has had them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from dovetail.graph.capturing.parting import Unsure

_NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class _Argument:
    name: str
    keyword: bool
    optional: bool
    default: Any
    is_float: bool
    is_list: bool


class Spelling:
    """Writes arguments in one form: by position as far as the schema allows, those equal to a default left out."""

    def __init__(self) -> None:
        self._schemas: dict[OpOverload, list[_Argument]] = {}

    def __call__(
        self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = self._schemas.get(op)
        if arguments is None:
            arguments = self._schemas[op] = _arguments(op)
        named = dict(kwargs)
        positional = list(args)
        for argument in arguments[len(positional) :]:
            if argument.keyword or not any(a.name in named for a in arguments if not a.keyword):
                break
            positional.append(named.pop(argument.name) if argument.name in named else argument.default)
        for argument, value in zip(arguments, positional, strict=False):
            _check(op, argument, value)
        while positional and _is_default(arguments[len(positional) - 1], positional[-1]):
            positional.pop()
        by_name: dict[str, Any] = {}
        for argument in arguments:
            if argument.name in named:
                value = named.pop(argument.name)
                _check(op, argument, value)
                if not _is_default(argument, value):
                    by_name[argument.name] = value
        if named:
            raise Unsure(f"{op} is given arguments that it does not have")
        return tuple(positional), by_name


def _arguments(op: OpOverload) -> list[_Argument]:
    found: list[_Argument] = []
    for argument in op._schema.arguments:
        kind = argument.type
        while isinstance(kind, torch._C.OptionalType):
            kind = kind.getElementType()
        given = argument.has_default_value()
        found.append(
            _Argument(
                argument.name,
                argument.kwarg_only,
                given,
                argument.default_value if given else None,
                isinstance(kind, torch._C.FloatType),
                isinstance(kind, torch._C.ListType),
            )
        )
    return found


def _check(op: OpOverload, argument: _Argument, value: Any) -> None:
    """Raise where the dispatcher would have made something else of a value than what stands there."""
    if argument.is_float and isinstance(value, int):
        raise Unsure(f"{op} is given an integer for the number '{argument.name}'")
    if argument.is_list and isinstance(value, (*_NUMBERS, Node)):
        raise Unsure(f"{op} is given a single value for the list '{argument.name}'")
    if argument.optional and isinstance(argument.default, int) and not isinstance(value, (*_NUMBERS, Node)):
        raise Unsure(f"{op} has a default for '{argument.name}' that cannot be read")


def _is_default(argument: _Argument, value: Any) -> bool:
    if not argument.optional or isinstance(value, Node):
        return False
    default = argument.default
    if isinstance(value, (list, tuple)):
        if not isinstance(default, (list, tuple)) or len(value) != len(default):
            return False
        return all(type(a) is type(b) and a == b for a, b in zip(value, default, strict=True))
    return type(value) is type(default) and value == default
