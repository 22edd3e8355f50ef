"""The options of a lowering, checked where they are first passed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from dovetail import config
from dovetail.errors import InvalidArgument
from dovetail.ir.weight_guard import CHECK_INTERVAL
from dovetail.lowering.backend_protocol import BackendChain

Granularity = Literal["outer", "inner"]
"""Whether a region is offered to backends before or after those inside it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How regions are assigned to backends and compiled; `dovetail.lower` documents each option."""

    plan: Mapping[str, BackendChain] | None = field(default=None, hash=False)
    on_error: Literal["fallback", "raise"] = "fallback"
    verify: bool = False
    granularity: Granularity = "outer"
    smallest: int = 2
    recompile_limit: int | None = None
    timeout: float | None = None
    cache: bool | str | Path = True
    grad: bool | None = None
    weight_check_interval: int | None = CHECK_INTERVAL

    def __post_init__(self) -> None:
        for name, (is_valid, expected) in _CHECKS.items():
            value = getattr(self, name)
            if not is_valid(value):
                raise InvalidArgument(f"{name} {value!r}; give {expected}.")

    @classmethod
    def pick(cls, values: Mapping[str, Any]) -> Self:
        """Return the options among values by name, such as the locals of a function that has them as keywords."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    @property
    def strict(self) -> bool:
        """Whether faults of a backend are raised."""
        return self.on_error == "raise"

    def assigned(self) -> Self:
        """Return the options without the plan, which may hold any object and is not needed after the assignment."""
        return replace(self, plan=None)


def recompile_limit_of(option: int | None) -> int:
    """Return the recompile limit of an option, or that of the process."""
    limit = config.recompile_limit if option is None else option
    if not _is_count(limit):
        raise InvalidArgument(f"dovetail.config.recompile_limit {limit!r}; set 1 or more.")
    return limit


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_duration(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "plan": (
        lambda v: v is None or isinstance(v, Mapping),
        "a mapping from the keys of bodies to backends; a dovetail.Plan goes to `compile`",
    ),
    "on_error": (lambda v: v in ("fallback", "raise"), "'fallback' or 'raise'"),
    "verify": (lambda v: isinstance(v, bool), "True or False"),
    "granularity": (lambda v: v in ("outer", "inner"), "'outer' or 'inner'"),
    "smallest": (_is_count, "1 or more"),
    "recompile_limit": (
        lambda v: v is None or _is_count(v),
        "1 or more, or None for dovetail.config.recompile_limit",
    ),
    "timeout": (_is_duration, "seconds, or None for the backend's own"),
    "cache": (lambda v: isinstance(v, (bool, str, Path)), "True, False or a folder"),
    "weight_check_interval": (
        lambda v: v is None or _is_count(v),
        "a number of calls, 1 or more, or None to go by version counters alone",
    ),
    "grad": (
        lambda v: v is None or isinstance(v, bool),
        "True, False, or None to go by the mode of the graph",
    ),
}
