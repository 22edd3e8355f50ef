"""Which regions can be together: each called at one place, and no two waiting for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dovetail.fusion.candidates import PlannedRegion
from dovetail.ir.dependencies import Index
from dovetail.rules.rule import RuleContext


@dataclass(frozen=True)
class Loop:
    """Why a region cannot be called at one place: a chain that leaves it and comes back, and who is on it.

    `reached` are the members that depend on other members through the outside. An empty chain: the search was given
    up before it came to an end.
    """

    chain: tuple[int, ...]
    through: tuple[PlannedRegion, ...] = ()
    reached: frozenset[int] = frozenset()


def describe_loop(index: Index, loop: Loop) -> str:
    """The reason in words, with the names on the chain."""
    if not loop.chain:
        return "it is entangled with so many other candidates that no place was found for it"
    names = [index.nodes[i].name for i in loop.chain]
    shown = " -> ".join(names if len(names) <= 12 else [*names[:8], f"({len(names) - 10} more)", *names[-2:]])
    effects = index.dependencies.before
    why = ""
    for a, b in pairwise(loop.chain):
        if a not in index.data[b] and a in effects.get(b, ()):
            first, second = index.nodes[a].name, index.nodes[b].name
            why = f" ('{first}' must stay before '{second}': {index.dependencies.why(a, b)})"
            break
    if loop.through:
        return f"they would depend on each other, {shown}{why}: it and"
    return f"it would depend on itself: {shown}{why}"


def tangled(
    index: Index, plans: Sequence[PlannedRegion], new: Collection[PlannedRegion]
) -> tuple[list[PlannedRegion], set[int]]:
    """The regions that may be on a cycle, with all the positions that may be, in linear time.

    Those that are not new can be together. Only the stretches that a new region spans are looked at. Empty: all
    of them can be together.
    """
    owner: dict[int, int] = {}
    for r, plan in enumerate(plans):
        owner.update(dict.fromkeys(plan.members, r))
    suspects: list[PlannedRegion] = []
    positions: set[int] = set()
    for low, high in _windows(plans, new):
        first = owner.get(low)
        if first is not None and len(plans[first].members) == high - low + 1:
            continue
        left = _core(index, plans, owner, low, high)
        regions = {-1 - unit for unit in left if unit < 0}
        suspects.extend(plans[r] for r in sorted(regions))
        positions.update(unit for unit in left if unit >= 0)
        for r in regions:
            # Originals of clones too: until a region is drawn together, ways to it lead through them.
            positions |= plans[r].members | plans[r].draft.clones
    return suspects, positions


def _windows(plans: Sequence[PlannedRegion], new: Collection[PlannedRegion]) -> list[tuple[int, int]]:
    """The stretches that regions span, disjoint and in order, those without a new region left out."""
    merged: list[tuple[int, int, bool]] = []
    for low, high, fresh in sorted((min(p.members), max(p.members), p in new) for p in plans):
        if merged and low <= merged[-1][1]:
            start, end, known = merged[-1]
            merged[-1] = (start, max(high, end), known or fresh)
        else:
            merged.append((low, high, fresh))
    return [(low, high) for low, high, fresh in merged if fresh]


def _core(
    index: Index, plans: Sequence[PlannedRegion], owner: dict[int, int], low: int, high: int
) -> set[int]:
    """The units of a stretch that are left when what is first or last is taken away again and again."""
    units: dict[int, None] = {}
    for i in range(low, high + 1):
        r = owner.get(i)
        units[i if r is None else -1 - r] = None
    wants: dict[int, set[int]] = {}
    for unit in units:
        found: set[int] = set()
        for j in needs(index, plans[-1 - unit]) if unit < 0 else index.before[unit]:
            r = owner.get(j)
            other = j if r is None else -1 - r
            if other != unit and other in units:
                found.add(other)
        wants[unit] = found
    left = _peeled(wants, set(units))
    if not left:
        return left
    wanted_by: dict[int, set[int]] = {unit: set() for unit in left}
    for unit in left:
        for other in wants[unit] & left:
            wanted_by[other].add(unit)
    return _peeled(wanted_by, left)


def needs(index: Index, plan: PlannedRegion) -> Iterator[int]:
    """What must come before a region is called."""
    draft, effects = plan.draft, index.dependencies.before
    for i in draft.members:
        for j in index.data[i]:
            if j not in draft.clones:
                yield j
        yield from effects.get(i, ())
    for i in draft.clones:
        for j in index.data[i]:
            if j not in draft.clones:
                yield j


def _peeled(wants: dict[int, set[int]], units: set[int]) -> set[int]:
    waiting = {unit: len(wants[unit] & units) for unit in units}
    after: dict[int, list[int]] = {unit: [] for unit in units}
    for unit in units:
        for other in wants[unit]:
            if other in units:
                after[other].append(unit)
    ready = [unit for unit, count in waiting.items() if not count]
    for unit in ready:
        for other in after[unit]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return units.difference(ready)


def finds_way_back(context: RuleContext, plan: PlannedRegion, most: int) -> Loop | None:
    """A chain that leaves a set and comes back, if one is found within so many steps."""
    index, order = context.index, context.order
    members, clones = plan.members, plan.draft.clones
    high = plan.places[-1]
    came: dict[int, int] = {}
    queue = deque(sorted(members, key=order.__getitem__))
    steps = -len(queue)
    while queue and steps < most:
        steps += 1
        i = queue.popleft()
        # In an order that no listing can change, or what is found in time would depend on it.
        for j in sorted(index.after[i], key=order.__getitem__):
            back = j in members and i not in clones
            if i not in members and (back or (j in clones and i not in clones)):
                chain = [j, i]
                while chain[-1] in came:
                    chain.append(came[chain[-1]])
                return Loop(tuple(reversed(chain)), reached=frozenset({j} & members))
            if order[j] < high and j not in members and j not in came:
                came[j] = i
                queue.append(j)
    return None


@dataclass
class RegionContraction:
    """A part of a graph in which sets of operations are drawn together one after the other.

    Keeps a topological order of what is there, so that a set is refused by looking only at what lies between its
    members. `budget` is how many steps all searches may take together.
    """

    context: RuleContext
    positions: set[int]
    budget: int
    taken: list[PlannedRegion] = field(default_factory=list[PlannedRegion])
    _owner: dict[int, int] = field(default_factory=dict[int, int])
    _slot: dict[int, int] = field(default_factory=dict[int, int])
    _cloning: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def __post_init__(self) -> None:
        order = self.context.order
        self._slot = {i: k for k, i in enumerate(sorted(self.positions, key=order.__getitem__))}

    def unit(self, position: int) -> int:
        """The set that a position was drawn into, as `-1 - k`, or the position itself."""
        k = self._owner.get(position)
        return position if k is None else -1 - k

    def draw_together(self, plan: PlannedRegion, *, whole: bool = False) -> Loop | None:
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
            for j in self.context.index.data[c]:
                if j not in plan.draft.clones:
                    self._cloning.setdefault(j, []).append(mine)
        self.taken.append(plan)
        return None

    def _inside(self, unit: int) -> Iterable[int]:
        return (unit,) if unit >= 0 else self.taken[-1 - unit].members

    def _later(self, unit: int) -> Iterator[tuple[int, int, int]]:
        """What depends on a unit: the position it leaves from, the one it comes to, and the unit of that."""
        index = self.context.index
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
        return first in self.context.index.dependencies.before.get(second, ())

    def _search(
        self, plan: PlannedRegion, high: int, whole: bool
    ) -> tuple[set[int], dict[int, tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Everything that depends on the members and comes before the last of them; and ways back to a member."""
        members, clones = plan.members, plan.draft.clones
        index = self.context.index
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

        order = self.context.order
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

    def _reached_from(self, plan: PlannedRegion, low: int) -> set[int]:
        """Everything that the members depend on and that comes after the first of them."""
        seen: set[int] = set()
        index = self.context.index
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
        self, plan: PlannedRegion, came: dict[int, tuple[int, int, int]], hits: list[tuple[int, int, int]]
    ) -> Loop:
        unit, leaves, back = hits[0]
        chain = [back, leaves]
        through: list[PlannedRegion] = []
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
        index, clones = self.context.index, plan.draft.clones
        ends = {j for _, _, j in hits}
        reached = ends & plan.members
        if not ends <= plan.members:
            reached |= {i for i in plan.members if not clones.isdisjoint(index.data[i])}
        reached = frozenset(reached)
        return Loop(tuple(reversed(chain)), tuple(dict.fromkeys(through)), reached)
