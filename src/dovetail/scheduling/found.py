"""What `find` returns: matches that know where they were found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from dovetail.outlining.region import Region
from dovetail.outlining.requests import Request
from dovetail.rules.matching.match import Match

if TYPE_CHECKING:
    from dovetail.scheduling.finders import Finder


@dataclass(frozen=True, eq=False)
class Found(Match):
    """A match in a part of a schedule; `path` is the part, `module_path` the module within the model.

    It stays good while its operations are where they were: later steps elsewhere do not matter.
    """

    path: str = ""
    root: str = ""
    form: int = 0
    kind: str = ""
    finder: Finder | None = field(default=None, repr=False)
    request: Request | None = field(default=None, repr=False)
    together: tuple[Found, ...] = field(default=(), repr=False)
    origin: object = field(default=None, repr=False)

    @property
    def names(self) -> frozenset[str]:
        """The names of its operations."""
        return frozenset(node.name for node in self.nodes)

    def __repr__(self) -> str:
        where = self.module_path or self.path or "the model"
        listed = ", ".join(node.name for node in self.nodes)
        return f"Match({self.rule} in {where}: {listed})"


class Matches(list[Found]):
    """Matches in execution order, none overlapping another; `why` tells what came near if there are none."""

    def __init__(self, found: list[Found], why: str = "") -> None:
        super().__init__(found)
        self.why = why

    def __repr__(self) -> str:
        return super().__repr__() if self or not self.why else f"[]  # {self.why}"


@dataclass(frozen=True, eq=False)
class PartRegion(Region):
    """A region of a part of a schedule."""

    path: str = ""
    root: str = ""
    form: int = 0
    origin: object = field(default=None, repr=False)


def in_order(found: list[Found], position: dict[Node, int]) -> list[Found]:
    """Those that can be had together, by where they end; of two that overlap the larger, else the first."""
    taken: set[Node] = set()
    kept: list[Found] = []
    for match in sorted(found, key=lambda m: (-len(m.nodes), _span(m, position))):
        if taken.isdisjoint(match.nodes):
            taken.update(match.nodes)
            kept.append(match)
    return sorted(kept, key=lambda m: _span(m, position))


def _span(match: Found, position: dict[Node, int]) -> tuple[int, int]:
    places = [position[node] for node in match.nodes]
    return max(places), min(places)


def why_none(refusals: list[Any]) -> str:
    """What came nearest, of the refusals of a rule."""
    if not refusals:
        return "nothing came near"
    best = sorted(refusals, key=lambda r: -(r.matched / r.wanted if r.wanted else 0.5))[:3]
    told = [
        f"{r.reason} ({r.matched} of {r.wanted} operations matched)" if r.wanted else r.reason for r in best
    ]
    return "; ".join(dict.fromkeys(told))
