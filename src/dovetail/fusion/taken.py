"""What was chosen so far: who has which operation, and what that means for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.fusion.cost import NOTHING, CostModel, Gain
from dovetail.fusion.figures import Figures
from dovetail.fusion.plan import Plan
from dovetail.outlining.requests import unread


class Taken:
    """The plans that were accepted, by the operations they have and those they have clones of."""

    def __init__(self, cost: CostModel, figures: Figures) -> None:
        self._cost, self._figures, self._index = cost, figures, figures.index
        self.plans: dict[Plan, None] = {}
        self._owner: dict[int, Plan] = {}
        self._cloned: dict[int, dict[Plan, None]] = {}

    def __contains__(self, plan: object) -> bool:
        return plan in self.plans

    def accept(self, plan: Plan) -> None:
        self.plans[plan] = None
        self._owner.update(dict.fromkeys(plan.members, plan))
        for c in plan.draft.clones:
            self._cloned.setdefault(c, {})[plan] = None

    def take_back(self, plan: Plan) -> None:
        del self.plans[plan]
        for i in plan.members:
            del self._owner[i]
        for c in plan.draft.clones:
            del self._cloned[c][plan]
            if not self._cloned[c]:
                del self._cloned[c]

    def winners(self, plan: Plan) -> list[Plan]:
        """What was taken before and excludes a plan."""
        found: dict[Plan, None] = {}
        for i in plan.members:
            if i in self._owner:
                found[self._owner[i]] = None
            if i in self._cloned:
                found.update(self._cloned[i])
        for i in plan.draft.clones:
            if i in self._owner:
                found[self._owner[i]] = None
        return list(found)

    def recost(self, plan: Plan) -> bool:
        """Count in what a plan saves now that others have clones of what it clones; whether that changed it."""
        bonus = NOTHING
        for c in plan.draft.clones:
            if c in unread(self._index, [p.draft for p in (*self._cloned.get(c, ()), plan)]):
                bonus = _sum(bonus, self._cost.freed(self._figures, c))
        changed = plan.bonus != bonus
        if changed:
            plan.bonus = bonus
        return changed

    def listed(self) -> list[Plan]:
        """The plans in an order that no listing can change, what must be first, each with all that it saves."""
        plans = sorted(self.plans, key=lambda p: (not p.wished, p.places))
        credited: dict[int, Plan] = {}
        for plan in plans:
            plan.bonus = NOTHING
            credited.update(dict.fromkeys(plan.draft.clones, plan))
        for c in unread(self._index, [plan.draft for plan in plans]):
            plan = credited[c]
            plan.bonus = _sum(plan.bonus, self._cost.freed(self._figures, c))
        return plans


def clusters(plans: Sequence[Plan]) -> list[list[Plan]]:
    """Plans that exclude one another, directly or by way of others, together."""
    parent = list(range(len(plans)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    claimed: dict[int, int] = {}
    for n, plan in enumerate(plans):
        for i in plan.members:
            other = claimed.setdefault(i, n)
            if other != n:
                parent[find(n)] = find(other)
    for n, plan in enumerate(plans):
        for c in plan.draft.clones:
            if c in claimed:
                parent[find(n)] = find(claimed[c])
    found: dict[int, list[Plan]] = {}
    for n, plan in enumerate(plans):
        found.setdefault(find(n), []).append(plan)
    return list(found.values())


def _sum(a: Gain, b: Gain) -> Gain:
    return replace(
        a,
        bytes_saved=a.bytes_saved + b.bytes_saved,
        launches_saved=a.launches_saved + b.launches_saved,
        score=a.score + b.score,
    )
