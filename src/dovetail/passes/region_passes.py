"""Fusion by rules, as a pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, checked_init
from dovetail.fusion.cost import CostModel
from dovetail.fusion.fuse import (
    fuse,
    require_cost,
    require_count,
    require_limits,
    require_on_error,
    require_priorities,
)
from dovetail.outlining.inline import inline
from dovetail.outlining.outline import outline
from dovetail.outlining.region import regions
from dovetail.outlining.request import Request
from dovetail.passes.pass_manager import Pass
from dovetail.rules.rule import Limits, Rule, RuleSet, as_rules


@checked_init(strict="on_error='raise'")
@dataclass(frozen=True, repr=False)
class Fuse(Pass):
    """Make regions of what the rules ask for, as `dovetail.fuse` does; its options are the same.

    Needs: nothing. Leaves: regions, values equal bit for bit, and the ledger in the graph, which `dovetail.explain`
    reads. Bad options are refused when the pass is made, as far as that can be told without a graph.
    """

    rules: Rule | RuleSet | Iterable[Any] | None = None
    rounds: int | None = None
    must: Any = ()
    never: Any = ()
    limits: Limits | None = None
    priorities: Mapping[str, int] | None = field(default=None, hash=False)
    fuel: int | None = None
    cost: CostModel | None = None
    on_error: Literal["fallback", "raise"] = "fallback"

    def __post_init__(self) -> None:
        if self.rules is not None:
            object.__setattr__(self, "rules", as_rules(self.rules))
            require_priorities(self.priorities, as_rules(self.rules))
        elif self.priorities is not None and not isinstance(self.priorities, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(
                f"priorities is a {type(self.priorities).__name__}; give a mapping from rule or kind."
            )
        require_count("rounds", self.rounds, 0)
        require_count("fuel", self.fuel, 0)
        require_limits(self.limits)
        require_cost(self.cost)
        require_on_error(self.on_error)
        for name in ("must", "never"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    def run(self, gm: GraphModule) -> GraphModule:
        """The graph with what the rules asked for as regions."""
        return fuse(
            gm,
            self.rules,
            rounds=self.rounds,
            must=self.must,
            never=self.never,
            limits=self.limits,
            priorities=self.priorities,
            fuel=self.fuel,
            cost=self.cost,
            on_error=self.on_error,
        )


def _frozen(given: Any) -> Any:
    """Lists as tuples, also those inside, so that a pass can be hashed."""
    if not isinstance(given, (list, tuple, set, frozenset)):
        return given
    return tuple(_frozen(one) for one in cast("list[Any]", given))


@checked_init()
@dataclass(frozen=True, repr=False)
class Inline(Pass):
    """Open regions: all, the one called `region`, or all of a `kind`, as `dovetail.inline` does.

    Needs: nothing; a graph without regions, or with none of the kind, stays as it is, so that it can be repeated. A
    `region` that is not there is an error. Leaves: the operations where they stood, under their names.
    """

    region: str | None = None
    kind: str | None = None
    depth: int | None = None

    def run(self, gm: GraphModule) -> GraphModule:
        """The graph with the regions opened; the very graph it was given if there are none."""
        if self.region is None and not regions(gm, kind=self.kind, nested=self.kind is not None):
            return gm
        return inline(gm, self.region, kind=self.kind, depth=self.depth)


@checked_init()
@dataclass(frozen=True, repr=False, init=False)
class Outline(Pass):
    """Make the regions that are asked for, all in one sweep, as `dovetail.outline` does.

    Needs: operations by name, for a node belongs to one graph only. Leaves: a call of each region where its
    operations stood. A request that cannot be met raises, and nothing has changed.
    """

    requests: tuple[Request, ...] = ()

    def __init__(self, *requests: Request | Iterable[Request]) -> None:
        flat = [r for given in requests for r in ([given] if isinstance(given, Request) else _listed(given))]
        for request in flat:
            if not isinstance(request, Request):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgument(f"Outline takes requests, not {type(request).__name__}.")
            if any(isinstance(node, Node) for node in request.nodes):
                raise InvalidArgument(
                    f"Outline: the request for '{request.kind}' lists nodes of one graph; give their names."
                )
        if not flat:
            raise InvalidArgument("Outline needs at least one Request.")
        object.__setattr__(self, "requests", tuple(flat))

    def run(self, gm: GraphModule) -> GraphModule:
        """The graph with the regions made."""
        return outline(gm, list(self.requests))


def _listed(requests: object) -> list[Request]:
    if not isinstance(requests, Iterable):
        raise InvalidArgument(f"Outline takes requests, not {type(requests).__name__}.")
    return list(requests)
