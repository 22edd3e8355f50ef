"""Vertical fusion by op classes: every operation joins what reads it, where the classes allow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dovetail.errors import checked_call
from dovetail.rules.growth.common import ground, require_rule
from dovetail.rules.growth.grouping import Grouping
from dovetail.rules.rule import Candidate, Proposal, Rule
from dovetail.rules.scene import Scene


@checked_call()
def groups(
    kind: str = "group",
    *,
    name: str = "groups",
    priority: int = -10,
    min_size: int = 2,
    nests: bool = False,
    grows: bool = True,
) -> Rule:
    """A rule for classic vertical fusion by op classes and post-dominators.

    An operation is in a group with the nearest operation that all readers of its value lead to, and with all that
    lies between. Elementwise, broadcast and injective operations fuse with one another and into a reduction, behind
    which nothing fuses. An anchor is followed by elementwise work of its shape, and takes no producer in. Of
    several anchors that one operation could follow, the deepest takes it. A group returns one value; an operation
    that would stay alone, for some of its readers do not fuse with it, is cloned into the one group that does, if
    redoing it is cheap. Groups of nothing but views are not made. Regions of other kinds are taken in by the class of
    what they compute, unless `grows` is off; with `nests`, those of its own kind too.
    """
    return Groups(kind, name, priority, min_size, nests, grows)


@dataclass(frozen=True)
class Groups(Rule):
    """The rule that `groups` makes."""

    kind: str = "group"
    name: str = "groups"
    priority: int = -10
    min_size: int = 2
    nests: bool = False
    grows: bool = True

    def __post_init__(self) -> None:
        require_rule(self.name, self.kind, self.priority, min_size=(self.min_size, 1))

    def propose(self, scene: Scene) -> Iterable[Proposal]:
        """Groups that are legal each and all together, and the pairs that looked fusible and were not."""
        plan = scene.fact(self._plan)
        on = ground(scene)
        for units, clones in plan.groups:
            yield Candidate(
                self.name,
                self.kind,
                on.positions([*units, *clones]),
                escapes=dict.fromkeys(clones, "duplicate") if clones else "output",
                priority=self.priority,
                divisible=True,
            )
        yield from plan.refused.found

    def why_not(self, scene: Scene, first: int, second: int) -> list[str]:
        """Why two positions are not in one group: by their classes, what lies between them, who else reads."""
        home, plan = ground(scene).home, scene.fact(self._plan)
        early, late = sorted((home[first], home[second]), key=scene.order.__getitem__)
        return plan.why_not(early, late)

    def _plan(self, scene: Scene) -> Grouping:
        return Grouping(scene, self.name, self.kind, self.min_size, self.nests, self.grows)
