"""Fusing, outlining and inlining as passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, checked_init
from dovetail.fusion.constraints import NodeSelector
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
from dovetail.outlining.outline import Request, outline
from dovetail.outlining.region import regions
from dovetail.passes.pass_manager import Pass
from dovetail.rules.rule import Limits, Rules, as_rules


@checked_init(strict="on_error='raise'")
@dataclass(frozen=True, repr=False)
class Fuse(Pass):
    """Make regions of the candidates of rules, as `dovetail.fuse` does; its options are the same.

    Needs: nothing. Leaves: regions, values equal bit for bit, and the ledger in the graph, which `dovetail.explain`
    reads. Invalid options are refused when the pass is constructed, as far as they can be checked without a graph.
    """

    rules: Rules | None = None
    rounds: int | None = None
    must: NodeSelector | Iterable[NodeSelector | Iterable[NodeSelector]] = ()
    never: NodeSelector | Iterable[NodeSelector] = ()
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
        """Return the fused graph."""
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


def _frozen(value: Any) -> Any:
    """Return nested lists as tuples, so that a pass can be hashed."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        return value
    return tuple(_frozen(one) for one in cast("list[Any]", value))


@checked_init()
@dataclass(frozen=True, repr=False)
class Inline(Pass):
    """Inline regions: all, the one named `region`, or all of a `kind`, as `dovetail.inline` does.

    Needs: nothing; a graph without such regions is not changed, so that the pass can be repeated. A `region` that does
    not exist is an error. Leaves: the operations in their original places, under their names.
    """

    region: str | None = None
    kind: str | None = None
    depth: int | None = None

    def run(self, gm: GraphModule) -> GraphModule:
        """Return the graph with the regions inlined; the input graph itself if it has no such region."""
        if self.region is None and not regions(gm, kind=self.kind, nested=self.kind is not None):
            return gm
        return inline(gm, self.region, kind=self.kind, depth=self.depth)


@checked_init()
@dataclass(frozen=True, repr=False, init=False)
class Outline(Pass):
    """Outline the requested regions, all at once, as `dovetail.outline` does.

    Needs: operations by name, because a node belongs to one graph only. Leaves: a call of each region in place of its
    operations. A request that cannot be met raises, and nothing is changed.
    """

    requests: tuple[Request, ...] = ()

    def __init__(self, *requests: Request | Iterable[Request]) -> None:
        flat: list[Request] = []
        for item in requests:
            if not isinstance(item, (Request, Iterable)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgument(f"Outline takes requests, not {type(item).__name__}.")
            flat += [item] if isinstance(item, Request) else item
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
        """Return the graph with the regions outlined."""
        return outline(gm, list(self.requests))
