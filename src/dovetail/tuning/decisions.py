"""The decisions of a plan as values, and their form in JSON.

A decision names what was chosen, what came second, both times with their spread, and why the alternatives were rejected.
Everything is text and numbers, so that a plan is read and reviewed like source code.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Self, TypeAlias, TypeVar, Union, cast

from dovetail.errors import InvalidArgument
from dovetail.ir.text_tables import counted, format_seconds
from dovetail.runtime.presets import Execution

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
Decided = TypeVar("Decided")


@dataclass(frozen=True)
class Spread:
    """Times of repeated runs, in seconds: the median, the interval that holds it with 95 % confidence, the count."""

    median: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        return f"{format_seconds(self.median)} [{format_seconds(self.low)}, {format_seconds(self.high)}]"


@dataclass(frozen=True)
class Alternative:
    """A choice that was measured or rejected, with its time if it has one, and why it was not chosen."""

    choice: str
    seconds: Spread | None = None
    reason: str = ""


@dataclass(frozen=True)
class PassChoice:
    """A pass of a pipeline by its name, with the options that differ from their defaults."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        options = ", ".join(f"{name}={json.dumps(value)}" for name, value in self.options.items())
        return f"{self.name}({options})"


@dataclass(frozen=True)
class BackendChoice:
    """A backend by its name, with the options it is constructed with."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        options = ", ".join(f"{name}={json.dumps(value)}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name


@dataclass(frozen=True)
class RegionChoice:
    """One region inside a block.

    Positions are indices of the nodes of the block's body, operands first, without its output. `arguments` and
    `results` are those of the pattern, by position, for backends with kernels by kind. `escapes` are the policies for
    values that are also used outside, by position as text, with "*" for all others.
    """

    kind: str
    members: tuple[int, ...]
    version: int = 1
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    arguments: Mapping[str, int] = field(default_factory=dict[str, int])
    results: tuple[int | None, ...] = ()
    rule: str | None = None
    escapes: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def taken(self) -> tuple[int, ...]:
        """The members that the region takes out of the block; what it clones may stay, and be in other regions too."""
        default = self.escapes.get("*")
        return tuple(i for i in self.members if self.escapes.get(str(i), default) != "duplicate")


@dataclass(frozen=True)
class Decision:
    """What all decisions have: a readable label, times, the runner-up, and why the others were rejected."""

    label: str
    seconds: Spread | None = None
    runner_up: Alternative | None = None
    rejected: tuple[Alternative, ...] = ()

    @property
    def choice(self) -> str:
        """The decision in one line."""
        return ""

    @property
    def evidence(self) -> str:
        """How certain the decision is, in one line; "" where nothing is recorded."""
        return ""

    def without_times(self) -> Self:
        """Return what is decided, without what was measured."""
        return replace(self, label="", seconds=None, runner_up=None, rejected=())


_EXECUTIONS: Mapping[str, str] = {
    "graph": "the graph as it is",
    "model": "the model as it is",
    "torch.compile": "the model by torch.compile",
}


@dataclass(frozen=True)
class GraphDecision(Decision):
    """How a whole graph runs: what executes it, which passes come first, and whether it is one region.

    With `whole` it is one region by that backend, or the largest regions that its rules find if it does not take all.
    `is_confirmed` is whether the decision held in a fresh process, `noise` the A/A interval of the last comparison,
    relative to a time, and `undecided` how many programs it could not tell apart from this one.
    """

    execution: Execution = "regions"
    pipeline: tuple[PassChoice, ...] = ()
    whole: BackendChoice | None = None
    cuda_graphs: bool | None = None
    is_confirmed: bool = False
    noise: float | None = None
    undecided: int = 0

    @property
    def evidence(self) -> str:
        if self.seconds is None:
            return ""
        if self.noise is None:
            return "not compared with other programs, for lack of time"
        confirmed = (
            "confirmed in a fresh process" if self.is_confirmed else "not confirmed in a fresh process"
        )
        return f"{confirmed}; noise {self.noise:.1%}; {counted(self.undecided, 'program')} undecided"

    def without_times(self) -> Self:
        return replace(super().without_times(), is_confirmed=False, noise=None, undecided=0)

    @property
    def choice(self) -> str:
        if self.execution != "regions":
            return _EXECUTIONS[self.execution]
        passes = " -> ".join(map(str, self.pipeline))
        boundaries = "regions of its blocks" if self.whole is None else f"one region by {self.whole}"
        return f"{passes} -> {boundaries}" if passes else boundaries


@dataclass(frozen=True)
class BlockDecision(Decision):
    """The regions that a block is divided into; what is in none runs as it is.

    `gap` bounds how much faster another division could be by the measured costs, relative to this one; 0 if it is
    optimal, None if no bound is known.
    """

    regions: tuple[RegionChoice, ...] = ()
    gap: float | None = None

    @property
    def choice(self) -> str:
        return ", ".join(f"{r.kind} ({len(r.members)})" for r in self.regions) or "no regions"

    @property
    def evidence(self) -> str:
        if self.gap is None or not self.seconds:
            return ""
        distance = f"at most {self.gap:.1%} from optimal" if self.gap else "optimal"
        return f"{distance} by the measured costs"

    def without_times(self) -> Self:
        return replace(super().without_times(), gap=None)


@dataclass(frozen=True)
class BodyDecision(Decision):
    """The backend of a body for operands of one description; None for the body as it is."""

    operands: str = ""
    backend: BackendChoice | None = None

    @property
    def choice(self) -> str:
        return "as it is" if self.backend is None else str(self.backend)


class Malformed(InvalidArgument):
    """A value of a plan is not of the form of a decision; the message has the place and what is expected there."""


def encode(value: Any) -> JSON:
    """Return a decision as JSON, without fields that have their defaults."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return {f.name: encode(v) for f, v in fields if f.name == "label" or not _is_default(f, v)}
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        # In order, so that equal decisions are equal text.
        items = cast("Mapping[Any, Any]", value).items()
        return {str(k): encode(v) for k, v in sorted(items, key=lambda item: str(item[0]))}
    return cast("JSON", value)


def _is_default(spec: dataclasses.Field[Any], value: Any) -> bool:
    if spec.default_factory is not dataclasses.MISSING:
        return bool(value == spec.default_factory())
    return spec.default is not dataclasses.MISSING and bool(value == spec.default)


def decode(kind: type[Decided], value: Any, where: str) -> Decided:
    """Return the decision that `encode` wrote; raise Malformed with the place of what does not fit its type."""
    return cast("Decided", _decode(kind, value, where))


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        options = [a for a in arguments if a is not type(None)]
        return None if value is None else _decode(options[0], value, where)
    if origin is Literal:
        if value not in arguments:
            raise Malformed(f"{where}: {value!r} is not one of {', '.join(map(repr, arguments))}.")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise Malformed(f"{where}: {short(value)} is not a list.")
        return tuple(
            _decode(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(cast("list[Any]", value))
        )
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise Malformed(f"{where}: {short(value)} is not an object.")
        items = cast("dict[str, Any]", value).items()
        return {k: _decode(arguments[1], v, f"{where}.{k}") for k, v in items}
    if dataclasses.is_dataclass(kind):
        return _decode_fields(cast("type[Any]", kind), value, where)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise Malformed(f"{where}: {short(value)} is not {_TYPES[kind]}.")
    if kind is float and not _is_finite(value):
        raise Malformed(f"{where}: {short(value)} is not a finite number.")
    return kind(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _decode_fields(kind: type[Any], value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise Malformed(f"{where}: {short(value)} is not an object.")
    given, hints = cast("dict[str, Any]", value), _hints(kind)
    unknown = sorted(set(given) - set(hints))
    if unknown:
        raise Malformed(f"{where}: unknown field {unknown[0]!r}; there are {', '.join(hints)}.")
    required = [f.name for f in dataclasses.fields(kind) if _is_required(f)]
    missing = [name for name in required if name not in given]
    if missing:
        raise Malformed(f"{where}: the field {missing[0]!r} is missing.")
    return kind(**{name: _decode(hints[name], v, f"{where}.{name}") for name, v in given.items()})


def _is_required(spec: dataclasses.Field[Any]) -> bool:
    return spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING


_TYPES: Mapping[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


@cache
def _hints(kind: type[Any]) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def short(value: Any) -> str:
    """Return the representation of a value for a message, the beginning of a long one."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
