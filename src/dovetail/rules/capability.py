"""What a backend takes, as regions: maximal convex sets of accepted operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.errors import checked_call
from dovetail.rules.growth.accepting import Ops, Predicate, as_accepts, spelled, verdicts
from dovetail.rules.growth.common import Refusals, closed, ground, require_rule, weight, why_closed
from dovetail.rules.growth.contraction import GIVEN_UP, Contraction
from dovetail.rules.rule import Candidate, Decline, Proposal, Rule
from dovetail.rules.scene import Scene


@checked_call()
def capability(
    accepts: Predicate | Iterable[Any],
    kind: str,
    *,
    name: str | None = None,
    priority: int = 0,
    min_size: int = 2,
    join_siblings: bool = False,
    nests: bool = False,
) -> Rule:
    """A rule for "my backend takes these operations": regions of what is accepted, as large as they can be.

    `accepts` is a predicate that says True, False or a `Decline` of each operation (parts of tuples go with what made
    them), or a set of operators: overloads, packets, torch functions, module classes, or names such as
    "aten.add.Tensor" and "add", or kinds of regions. Regions are connected unless
    `join_siblings` is set. None depends on itself through what lies outside, by data or by effects. No two neighbours
    could be one region; on very large graphs the search for that is bounded (see `Contraction`).
    """
    checked = as_accepts(accepts)
    return Capability(
        checked,
        kind,
        f"capability:{kind}" if name is None else name,
        priority,
        min_size,
        join_siblings,
        nests,
    )


@dataclass(frozen=True, repr=False)
class Capability(Rule):
    """The rule that `capability` makes."""

    accepts: Ops | Predicate
    kind: str
    name: str
    priority: int = 0
    min_size: int = 2
    join_siblings: bool = False
    nests: bool = False

    def __post_init__(self) -> None:
        require_rule(self.name, self.kind, self.priority, min_size=(self.min_size, 1))

    def __repr__(self) -> str:
        return f"capability({spelled(self.accepts)}, kind={self.kind!r}, name={self.name!r})"

    def propose(self, scene: Scene) -> Iterable[Proposal]:
        """Regions that are legal each and all together, and what was declined or had to stay apart."""
        plan = scene.fact(self._plan)
        on = ground(scene)
        for units in plan.regions:
            yield Candidate(
                self.name,
                self.kind,
                on.positions(units),
                escapes="output",
                priority=self.priority,
                divisible=True,
            )
        yield from plan.refused.found

    def why_not(self, scene: Scene, first: int, second: int) -> list[str]:
        """Why two positions are not in one region: what is not accepted, or what lies between them."""
        home = ground(scene).home
        early, late = sorted((home[first], home[second]), key=scene.order.__getitem__)
        return scene.fact(self._plan).why_not(early, late)

    def _plan(self, scene: Scene) -> _Plan:
        return _Plan(scene, self)


class _Plan:
    """The regions of one scene. `number` has for each position that is accepted the number of its region."""

    def __init__(self, scene: Scene, rule: Capability) -> None:
        self.scene, self.rule = scene, rule
        self.on = ground(scene)
        self.refused = Refusals(rule.name)
        shut = closed(scene, rule.kind, rule.nests)
        self.said = verdicts(rule.accepts, scene, [u for u in self.on.listed if not shut[u]], rule.name)
        accepted = [False] * len(scene.nodes)
        for unit, said in self.said.items():
            if isinstance(said, Decline):
                self.refused.add((unit,), said.reason, unit)
            elif said:
                accepted[unit] = True
        for unit, parts in self.on.parts.items():
            for part in parts:
                accepted[part] = accepted[unit]
        weights = [1] * len(accepted)
        for i in scene.calls:
            weights[i] = weight(scene, i)
        self.accepted, self.weights = accepted, weights
        self.most = scene.limits.nodes or sum(weights)
        self.blocked: dict[tuple[int, int], int] = {}
        self.number = self._levels() if rule.join_siblings else self._connected()
        self.regions = self._listed(rule.min_size)

    def _connected(self) -> Sequence[int]:
        made = Contraction(self.scene, self.accepted, self.weights, self.most)
        self.blocked = made.blocked
        for (early, late), between in made.blocked.items():
            self.refused.add((early, late), self._why_blocked(between), None if between < 0 else between)
        return [made.find(i) for i in range(len(self.accepted))]

    def _why_blocked(self, between: int) -> str:
        if between == GIVEN_UP:
            return "whether something lies between them was not found out: the search is bounded"
        name = self.scene.nodes[between].name
        return f"one region would depend on itself: '{name}' lies between them"

    def _levels(self) -> Sequence[int]:
        """One region for all that comes after as many alternations: two of them always have something between."""
        before, accepted, home = self.scene.index.before, self.accepted, self.on.home
        level = [-1] * len(accepted)
        for i, earlier in enumerate(before):
            if accepted[i]:
                level[i] = max([level[j] + (not accepted[j]) for j in earlier], default=0)
                level[i] = max(level[i], level[home[i]], 0)
            else:
                level[i] = max([level[j] for j in earlier], default=-1)
        filled: dict[int, tuple[int, int]] = {}
        number, fresh = list(range(len(accepted))), len(accepted)
        for unit in self.on.listed:
            if not accepted[unit]:
                continue
            current, size = filled.get(level[unit], (-1, 0))
            if current < 0 or size + self.weights[unit] > self.most:
                current, size, fresh = fresh, 0, fresh + 1
            filled[level[unit]] = (current, size + self.weights[unit])
            number[unit] = current
        return [number[unit] for unit in home]

    def _listed(self, min_size: int) -> list[list[int]]:
        members: dict[int, list[int]] = {}
        for unit in self.on.listed:
            if self.accepted[unit]:
                members.setdefault(self.number[unit], []).append(unit)
        for units in members.values():
            if len(units) < min_size:
                self.refused.add(tuple(units), f"a region has at least {min_size} operations", units[0])
        return [units for units in members.values() if len(units) >= min_size]

    def why_not(self, early: int, late: int) -> list[str]:
        """Why two units are not in one region, empty if they are."""
        if early == late or (self.accepted[early] and self.number[early] == self.number[late]):
            return []
        scene, nodes, rule = self.scene, self.scene.nodes, self.rule
        found: list[str] = []
        for unit in (early, late):
            shut = why_closed(scene, rule.kind, rule.nests, unit)
            said = self.said.get(unit)
            if shut:
                found.append(shut)
            elif isinstance(said, Decline):
                found.append(f"'{nodes[unit].name}' is declined: {said.reason}")
            elif not said:
                found.append(f"'{nodes[unit].name}' is not accepted by {spelled(rule.accepts)}")
        path = scene.index.path(early, late)
        outside = [i for i in path[1:-1] if not self.accepted[i]]
        if outside:
            found.append(f"between them lies '{nodes[outside[0]].name}', which is not accepted")
        if not path and not rule.join_siblings:
            found.append(f"'{nodes[early].name}' and '{nodes[late].name}' are not connected")
        if found:
            return found
        between = [
            x
            for (a, b), x in self.blocked.items()
            if {self.number[a], self.number[b]} == {self.number[early], self.number[late]}
        ]
        if between:
            return [self._why_blocked(between[0])]
        return [f"the region would be larger than {self.most} operations, or depend on itself through others"]
