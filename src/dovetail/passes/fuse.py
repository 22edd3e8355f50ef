"""Fusion by rules, as a pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, checked_init
from dovetail.fusion.arguments import (
    require_cost,
    require_count,
    require_limits,
    require_on_error,
    require_priorities,
)
from dovetail.fusion.cost import CostModel
from dovetail.fusion.fuse import fuse
from dovetail.passes.base import Pass
from dovetail.rules.limits import Limits
from dovetail.rules.rule import Rule, RuleSet, as_rules


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
