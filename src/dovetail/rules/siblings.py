"""Horizontal fusion: operations that do the same with one value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dovetail.errors import InvalidArgument, checked_call
from dovetail.rules.growth.accepting import Ops, Predicate, as_accepts, spelled
from dovetail.rules.growth.branching import Branching
from dovetail.rules.growth.common import require_rule
from dovetail.rules.rule import Candidate, Proposal, Rule
from dovetail.rules.scene import Scene


@checked_call()
def siblings(
    of: Predicate | Iterable[Any] | None = None,
    kind: str = "siblings",
    *,
    name: str | None = None,
    priority: int = 0,
    min_branches: int = 2,
    follow: bool = False,
    alike: bool = True,
    nests: bool = False,
) -> Rule:
    """A rule for operations that read one value, side by side: the q, k and v projections of an attention.

    They are alike: the same operator with equal literals, whose other operands agree in dtype and rank; with `alike`
    off, whatever `of` accepts. `of` is a predicate or a set of operators, as for `capability`; without it, whatever
    does work and has no effect. `follow` takes in what comes after each branch for as long as it is the same in all and
    needs nothing else that is computed. No branch depends on another; a value may have several such sets. Members are
    branch by branch in structural order. Sets of different values may overlap, or depend on each other in a circle: the
    choice among candidates settles both.
    """
    if of is None and not alike:
        raise InvalidArgument("siblings that need not be alike must be named: give `of`.")
    checked = None if of is None else as_accepts(of)
    return Siblings(
        checked, kind, kind if name is None else name, priority, min_branches, follow, alike, nests
    )


@dataclass(frozen=True, repr=False)
class Siblings(Rule):
    """The rule that `siblings` makes."""

    of: Ops | Predicate | None
    kind: str
    name: str
    priority: int = 0
    min_branches: int = 2
    follow: bool = False
    alike: bool = True
    nests: bool = False

    def __post_init__(self) -> None:
        require_rule(self.name, self.kind, self.priority, min_branches=(self.min_branches, 2))

    def __repr__(self) -> str:
        of = "" if self.of is None else f"{spelled(self.of)}, "
        return f"siblings({of}kind={self.kind!r}, name={self.name!r})"

    def propose(self, scene: Scene) -> Iterable[Proposal]:
        """One candidate for each set of siblings, and what reads the same value and had to stay apart."""
        plan = scene.fact(self._plan)
        for branches in plan.sets:
            members = tuple(dict.fromkeys(i for branch in branches for i in branch))
            yield Candidate(self.name, self.kind, members, escapes="output", priority=self.priority)
        yield from plan.refused.found

    def why_not(self, scene: Scene, first: int, second: int) -> list[str]:
        """Why two positions are not branches of one set."""
        return scene.fact(self._plan).why_not(first, second)

    def _plan(self, scene: Scene) -> Branching:
        return Branching(
            scene, self.of, self.name, self.kind, self.min_branches, self.follow, self.alike, self.nests
        )
