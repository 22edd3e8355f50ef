"""The quotient graph: a dependency graph in which groups of positions are contracted to one vertex each.

Groups can all be called, each at one place, if and only if the quotient graph is acyclic. Positions are in topological
order, so a cycle through a group visits nothing before its first or after its last member: only windows, the intervals
that groups span with overlapping ones merged, need to be examined. A unit of a window is a position, or `-1 - g` for
group `g`. Kahn's algorithm sorts the units of a window; those it cannot reach are on a cycle or behind one. Everything
is linear in the nodes and edges of the windows, apart from the heap of a sort by rank.

Reference: Kahn, "Topological sorting of large networks", CACM 5(11), 1962.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence


def merge_windows(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of closed intervals as disjoint intervals in ascending order."""
    windows: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if windows and low <= windows[-1][1]:
            windows[-1] = (windows[-1][0], max(high, windows[-1][1]))
        else:
            windows.append((low, high))
    return windows


def contract_window(
    low: int, high: int, owner: Mapping[int, int], needs: Callable[[int], Iterable[int]]
) -> tuple[list[int], list[set[int]]]:
    """Return the units of a window, and for each the numbers of the units that must come before it.

    `owner` has the group of each grouped position; `needs(unit)` yields the positions that must come before a unit.
    """
    number: dict[int, int] = {}
    for i in range(low, high + 1):
        group = owner.get(i)
        number.setdefault(i if group is None else -1 - group, len(number))
    before: list[set[int]] = []
    for u, unit in enumerate(number):
        earlier: set[int] = set()
        for j in needs(unit):
            group = owner.get(j)
            v = number.get(j if group is None else -1 - group, u)
            if v != u:
                earlier.add(v)
        before.append(earlier)
    return list(number), before


def topological_order(before: Sequence[Iterable[int]], ranks: Sequence[float] | None = None) -> list[int]:
    """Return vertices in topological order, of those that are ready the one of lowest rank first.

    `before[v]` has what must come before `v`. Vertices on a cycle or behind one are missing from the result.
    """
    waiting = [0] * len(before)
    after: list[list[int]] = [[] for _ in before]
    for i, earlier in enumerate(before):
        for j in earlier:
            after[j].append(i)
            waiting[i] += 1
    order: list[int] = []
    if ranks is None:
        order = [i for i, count in enumerate(waiting) if not count]
        for i in order:
            for j in after[i]:
                waiting[j] -= 1
                if not waiting[j]:
                    order.append(j)
        return order
    ready = [(ranks[i], i) for i, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, (ranks[j], j))
    return order


class UnionFind:
    """Disjoint sets of the numbers below `count`; the representative of a set is its smallest member.

    `parent` may be linked by hand where another member must represent the set.
    """

    __slots__ = ("parent",)

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def add(self) -> int:
        """Add a number in a set of its own."""
        self.parent.append(len(self.parent))
        return len(self.parent) - 1

    def find(self, i: int) -> int:
        """Return the representative of the set that `i` is in."""
        parent = self.parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def union(self, a: int, b: int) -> None:
        """Merge the sets of two numbers."""
        a, b = self.find(a), self.find(b)
        self.parent[max(a, b)] = min(a, b)
