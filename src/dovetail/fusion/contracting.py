"""Drawing regions together one after the other, as long as nothing comes to wait for itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dovetail.fusion.plan import Plan
from dovetail.fusion.tangles import Loop, needs
from dovetail.rules.scene import Scene


@dataclass
class Contraction:
    """A part of a graph in which sets of operations are drawn together one after the other.

    Keeps a topological order of what is there, so that a set is refused by looking only at what lies between its
    members. `budget` is how many steps all searches may take together.
    """

    scene: Scene
    positions: set[int]
    budget: int
    taken: list[Plan] = field(default_factory=list[Plan])
    _owner: dict[int, int] = field(default_factory=dict[int, int])
    _slot: dict[int, int] = field(default_factory=dict[int, int])
    _cloning: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def __post_init__(self) -> None:
        order = self.scene.order
        self._slot = {i: k for k, i in enumerate(sorted(self.positions, key=order.__getitem__))}

    def unit(self, position: int) -> int:
        """The set that a position was drawn into, as `-1 - k`, or the position itself."""
        k = self._owner.get(position)
        return position if k is None else -1 - k

    def draw_together(self, plan: Plan, *, whole: bool = False) -> Loop | None:
        """Make a plan's members one, or say what speaks against it; `whole` finds all members that are reached."""
        members = plan.members
        slots = [self._slot[i] for i in members]
        low, high = min(slots), max(slots)
        after, came, hits = self._search(plan, high, whole)
        if self.budget < 0:
            return Loop(())
        if hits:
            return self._loop(plan, came, hits)
        earlier = self._reached_from(plan, low)
        if self.budget < 0:
            return Loop(())
        slot = self._slot
        pool = sorted([*slots, *(slot[u] for u in after), *(slot[u] for u in earlier)])
        mine = -1 - len(self.taken)
        listed = [*sorted(earlier, key=slot.__getitem__), mine]
        for place, u in zip(pool, listed, strict=False):
            slot[u] = place
        last = sorted(after, key=slot.__getitem__)
        for place, u in zip(pool[len(pool) - len(last) :], last, strict=True):
            slot[u] = place
        for i in members:
            self._owner[i] = len(self.taken)
        for c in plan.draft.clones:
            for j in self.scene.index.data[c]:
                if j not in plan.draft.clones:
                    self._cloning.setdefault(j, []).append(mine)
        self.taken.append(plan)
        return None

    def _inside(self, unit: int) -> Iterable[int]:
        return (unit,) if unit >= 0 else self.taken[-1 - unit].members

    def _later(self, unit: int) -> Iterator[tuple[int, int, int]]:
        """What depends on a unit: the position it leaves from, the one it comes to, and the unit of that."""
        index = self.scene.index
        for i in self._inside(unit):
            for j in index.after[i]:
                if j in self.positions and self._counts(i, j):
                    yield i, j, self.unit(j)
            for other in self._cloning.get(i, ()):
                yield i, i, other

    def _counts(self, first: int, second: int) -> bool:
        """Whether an edge is one between units: a region that has a clone does not wait for the original."""
        k = self._owner.get(second)
        if k is None or first not in self.taken[k].draft.clones:
            return True
        return first in self.scene.index.dependencies.before.get(second, ())

    def _search(
        self, plan: Plan, high: int, whole: bool
    ) -> tuple[set[int], dict[int, tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Everything that depends on the members and comes before the last of them; and ways back to a member."""
        members, clones = plan.members, plan.draft.clones
        index = self.scene.index
        # A clone reads its operands where the region is called.
        cloning = {j: c for c in clones for j in index.data[c] if j not in clones}
        effects = index.dependencies.before
        came: dict[int, tuple[int, int, int]] = {}
        seen: set[int] = set()
        hits: list[tuple[int, int, int]] = []
        queue: deque[int] = deque()

        def visit(origin: int, i: int, j: int, unit: int) -> None:
            if self._slot[unit] < high and unit not in seen:
                seen.add(unit)
                came[unit] = (origin, i, j)
                queue.append(unit)

        order = self.scene.order
        for i in sorted(members, key=order.__getitem__):
            for _, j, unit in self._later(i):
                self.budget -= 1
                if unit not in members:
                    visit(i, i, j, unit)
        while queue and self.budget >= 0:
            unit = queue.popleft()
            for i in self._inside(unit):
                if i in cloning:
                    hits.append((unit, i, cloning[i]))
            for i, j, other in self._later(unit):
                self.budget -= 1
                if other in members:
                    if i not in clones or i in effects.get(j, ()):
                        hits.append((unit, i, j))
                else:
                    visit(unit, i, j, other)
            if hits and not whole:
                break
        return seen, came, hits

    def _reached_from(self, plan: Plan, low: int) -> set[int]:
        """Everything that the members depend on and that comes after the first of them."""
        seen: set[int] = set()
        index = self.scene.index
        stack = [self.unit(j) for j in needs(index, plan) if j in self.positions and j not in plan.members]
        while stack and self.budget >= 0:
            unit = stack.pop()
            if unit in seen or self._slot[unit] <= low:
                continue
            seen.add(unit)
            for j in index.before[unit] if unit >= 0 else needs(index, self.taken[-1 - unit]):
                self.budget -= 1
                if j in self.positions and j not in plan.members:
                    stack.append(self.unit(j))
        return seen

    def _loop(
        self, plan: Plan, came: dict[int, tuple[int, int, int]], hits: list[tuple[int, int, int]]
    ) -> Loop:
        unit, leaves, back = hits[0]
        chain = [back, leaves]
        through: list[Plan] = []
        while True:
            if unit < 0:
                through.append(self.taken[-1 - unit])
            origin, i, j = came[unit]
            if j != chain[-1]:
                chain.append(j)
            if i != chain[-1]:
                chain.append(i)
            if i in plan.members:
                break
            unit = origin
        index, clones = self.scene.index, plan.draft.clones
        ends = {j for _, _, j in hits}
        reached = ends & plan.members
        if not ends <= plan.members:
            reached |= {i for i in plan.members if not clones.isdisjoint(index.data[i])}
        reached = frozenset(reached)
        return Loop(tuple(reversed(chain)), tuple(dict.fromkeys(through)), reached)
