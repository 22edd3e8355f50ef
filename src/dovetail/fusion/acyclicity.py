"""Acyclicity: which regions can be called together, each at one place.

The problem is cycle detection in the quotient graph in which every chosen region is one vertex (`ir.dependencies`).
It is solved in two steps. `cyclic_core` removes sources and sinks of the windows that new regions span, as Kahn's
algorithm does from both ends, in linear time; nearly always nothing remains. What remains is contracted region by
region, the best first, by `RegionContraction`, which maintains a topological order incrementally: contracting a region
searches only the vertices between its first and last member and reorders those, as in Pearce and Kelly, "A Dynamic
Topological Sort Algorithm for Directed Acyclic Graphs", JEA 11, 2006. The searches share a budget linear in the core,
beyond which a region is refused without a path. A path that leaves a region and returns to it also shows that the
region is not convex.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dovetail.fusion.candidates import PlannedRegion
from dovetail.ir.dependencies import Index, shortest_path
from dovetail.ir.quotient_graph import contract_window, merge_windows, topological_order
from dovetail.outlining.placement import region_needs
from dovetail.rules.rule import RuleContext


@dataclass(frozen=True)
class Loop:
    """Why a region cannot be called at one place: a path that leaves it and comes back, and the regions on it.

    `reached` are the members that depend on other members through the outside. The chain is empty if the search
    exceeded its budget.
    """

    chain: tuple[int, ...]
    through: tuple[PlannedRegion, ...] = ()
    reached: frozenset[int] = frozenset()


def describe_loop(index: Index, loop: Loop) -> str:
    """Return the reason in words, with the names on the path."""
    if not loop.chain:
        return "it is entangled with so many other candidates that no place was found for it"
    shown = path_text(index, loop.chain)
    why = ""
    edge = index.effect_edge(loop.chain)
    if edge is not None:
        first, second = (index.nodes[i].name for i in edge)
        why = f" ('{first}' must stay before '{second}': {index.dependencies.why(*edge)})"
    if loop.through:
        return f"they would depend on each other, {shown}{why}: it and"
    return f"it would depend on itself: {shown}{why}"


def path_text(index: Index, path: Sequence[int]) -> str:
    """Return the names on a path, some in the middle left out if there are many."""
    names = [index.nodes[i].name for i in path]
    return " -> ".join(names if len(names) <= 12 else [*names[:8], f"({len(names) - 10} more)", *names[-2:]])


def cyclic_core(
    index: Index, plans: Sequence[PlannedRegion], new: Collection[PlannedRegion]
) -> tuple[list[PlannedRegion], set[int]]:
    """Return the regions that may be on a cycle, with all the positions that may be; empty if there is no cycle.

    The regions that are not new are acyclic together, so only the windows that a new region spans are examined.
    """
    owner: dict[int, int] = {}
    for r, plan in enumerate(plans):
        owner.update(dict.fromkeys(plan.members, r))
    spans = {plan: (min(plan.members), max(plan.members)) for plan in plans}
    starts = sorted(spans[plan][0] for plan in plans if plan in new)
    suspects: list[PlannedRegion] = []
    positions: set[int] = set()
    for low, high in merge_windows(spans.values()):
        at = bisect_left(starts, low)
        first = owner.get(low)
        covered = first is not None and len(plans[first].members) == high - low + 1
        if covered or at == len(starts) or starts[at] > high:
            continue
        core = _window_core(index, plans, owner, low, high)
        regions = {-1 - unit for unit in core if unit < 0}
        suspects.extend(plans[r] for r in sorted(regions))
        positions.update(unit for unit in core if unit >= 0)
        for r in regions:
            # Until a region is contracted, paths to it lead through the originals of its clones too.
            positions |= plans[r].members | plans[r].draft.clones
    return suspects, positions


def _window_core(
    index: Index, plans: Sequence[PlannedRegion], owner: dict[int, int], low: int, high: int
) -> set[int]:
    """Return the units of a window that remain when sources and sinks are removed repeatedly."""
    units, before = contract_window(
        low, high, owner, lambda u: index.before[u] if u >= 0 else region_needs(index, plans[-1 - u].draft)
    )
    core = set(range(len(units))).difference(topological_order(before))
    if not core:
        return core
    after: list[list[int]] = [[] for _ in units]
    for u in core:
        for v in before[u] & core:
            after[v].append(u)
    return {units[u] for u in core.difference(topological_order(after))}


def find_cycle(context: RuleContext, plan: PlannedRegion, most_steps: int) -> Loop | None:
    """Return a path that leaves a region and comes back to it, if one is found within so many steps."""
    index, order = context.index, context.order
    members, clones = plan.members, plan.draft.clones
    high = plan.places[-1]

    def is_back(i: int, j: int) -> bool:
        return i not in members and i not in clones and (j in members or j in clones)

    def edges(i: int) -> Iterable[int]:
        # In structural order, or what is found within the limit would depend on the order of the nodes.
        after = sorted(index.after[i], key=order.__getitem__)
        return (j for j in after if is_back(i, j) or (order[j] < high and j not in members))

    path = shortest_path(sorted(members, key=order.__getitem__), edges, is_back, most_steps)
    return Loop(tuple(path), reached=frozenset(path[-1:]) & members) if path else None


@dataclass
class RegionContraction:
    """A part of a graph in which regions are contracted one after the other.

    It maintains a topological order of its units, so that a contraction is checked by searching only between the
    first and the last member. `budget` is the number of steps that all searches may take together.
    """

    context: RuleContext
    positions: set[int]
    budget: int
    accepted: list[PlannedRegion] = field(default_factory=list[PlannedRegion])
    _owner: dict[int, int] = field(default_factory=dict[int, int])
    _slot: dict[int, int] = field(default_factory=dict[int, int])
    _cloning: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def __post_init__(self) -> None:
        order = self.context.order
        self._slot = {i: k for k, i in enumerate(sorted(self.positions, key=order.__getitem__))}

    def unit(self, position: int) -> int:
        """Return `-1 - k` for a position in the region contracted as number `k`, else the position itself."""
        k = self._owner.get(position)
        return position if k is None else -1 - k

    def contract(self, plan: PlannedRegion, *, whole: bool = False) -> Loop | None:
        """Contract a plan's members, or return the cycle that would close; `whole` finds all members that are reached."""
        members = plan.members
        slots = [self._slot[i] for i in members]
        low, high = min(slots), max(slots)
        after, previous, hits = self._search(plan, high, whole)
        if self.budget < 0:
            return Loop(())
        if hits:
            return self._loop(plan, previous, hits)
        earlier = self._reached_from(plan, low)
        if self.budget < 0:
            return Loop(())
        slot = self._slot
        pool = sorted([*slots, *(slot[u] for u in after), *(slot[u] for u in earlier)])
        mine = -1 - len(self.accepted)
        ordered = [*sorted(earlier, key=slot.__getitem__), mine]
        for place, u in zip(pool, ordered, strict=False):
            slot[u] = place
        last = sorted(after, key=slot.__getitem__)
        for place, u in zip(pool[len(pool) - len(last) :], last, strict=True):
            slot[u] = place
        for i in members:
            self._owner[i] = len(self.accepted)
        for c in plan.draft.clones:
            for j in self.context.index.data[c]:
                if j not in plan.draft.clones:
                    self._cloning.setdefault(j, []).append(mine)
        self.accepted.append(plan)
        return None

    def _inside(self, unit: int) -> Iterable[int]:
        return (unit,) if unit >= 0 else self.accepted[-1 - unit].members

    def _later(self, unit: int) -> Iterator[tuple[int, int, int]]:
        """Yield the edges to what depends on a unit: their source, their target, and the unit of the target."""
        index = self.context.index
        for i in self._inside(unit):
            for j in index.after[i]:
                if j in self.positions and self._counts(i, j):
                    yield i, j, self.unit(j)
            for other in self._cloning.get(i, ()):
                yield i, i, other

    def _counts(self, first: int, second: int) -> bool:
        """Whether an edge orders units: a region with a clone does not depend on the original by data."""
        k = self._owner.get(second)
        if k is None or first not in self.accepted[k].draft.clones:
            return True
        return first in self.context.index.dependencies.before.get(second, ())

    def _search(
        self, plan: PlannedRegion, high: int, whole: bool
    ) -> tuple[set[int], dict[int, tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Return what depends on the members and comes before the last of them, and the edges back to a member."""
        members, clones = plan.members, plan.draft.clones
        index = self.context.index
        # A clone reads its operands where the region is called.
        cloning = {j: c for c in clones for j in index.data[c] if j not in clones}
        effects = index.dependencies.before
        previous: dict[int, tuple[int, int, int]] = {}
        visited: set[int] = set()
        hits: list[tuple[int, int, int]] = []
        queue: deque[int] = deque()

        def visit(origin: int, i: int, j: int, unit: int) -> None:
            if self._slot[unit] < high and unit not in visited:
                visited.add(unit)
                previous[unit] = (origin, i, j)
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
        return visited, previous, hits

    def _reached_from(self, plan: PlannedRegion, low: int) -> set[int]:
        """Return what the members depend on that comes after the first of them."""
        visited: set[int] = set()
        index = self.context.index
        stack = [
            self.unit(j)
            for j in region_needs(index, plan.draft)
            if j in self.positions and j not in plan.members
        ]
        while stack and self.budget >= 0:
            unit = stack.pop()
            if unit in visited or self._slot[unit] <= low:
                continue
            visited.add(unit)
            for j in index.before[unit] if unit >= 0 else region_needs(index, self.accepted[-1 - unit].draft):
                self.budget -= 1
                if j in self.positions and j not in plan.members:
                    stack.append(self.unit(j))
        return visited

    def _loop(
        self, plan: PlannedRegion, previous: dict[int, tuple[int, int, int]], hits: list[tuple[int, int, int]]
    ) -> Loop:
        unit, leaves, back = hits[0]
        chain = [back, leaves]
        through: list[PlannedRegion] = []
        while True:
            if unit < 0:
                through.append(self.accepted[-1 - unit])
            origin, i, j = previous[unit]
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
