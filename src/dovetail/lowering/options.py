"""The options of a lowering, checked where they are first given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from dovetail import config
from dovetail.errors import InvalidArgument
from dovetail.ir.weight_guard import CHECK_INTERVAL
from dovetail.lowering.assign import Granularity


@dataclass(frozen=True)
class Options:
    """How regions are given to backends and how their code is made; `dovetail.lower` says what each option does."""

    plan: Mapping[str, Any] | None = field(default=None, hash=False)
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
        given = vars(self)
        for name, (fits, wanted) in _WANTED.items():
            if not fits(given[name]):
                raise InvalidArgument(f"{name} {given[name]!r}; give {wanted}.")

    @property
    def strict(self) -> bool:
        """Whether what goes wrong with a backend is raised."""
        return self.on_error == "raise"

    def assigned(self) -> Self:
        """These options once the regions have their backends: the plan, which may hold any object, has been used."""
        return replace(self, plan=None)


def compilation_limit(given: int | None) -> int:
    """The recompile limit that was given, or that of the process."""
    limit = config.recompile_limit if given is None else given
    if not _is_count(limit):
        raise InvalidArgument(f"dovetail.config.recompile_limit {limit!r}; set 1 or more.")
    return limit


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_duration(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0)


_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "plan": (
        lambda v: v is None or isinstance(v, Mapping),
        "a mapping from the keys of bodies to backends",
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
