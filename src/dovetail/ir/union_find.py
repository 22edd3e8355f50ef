"""Disjoint sets of positions: union-find with path halving, nearly linear in the number of operations.

R. E. Tarjan, J. van Leeuwen, "Worst-case analysis of set union algorithms", J. ACM 31 (1984).
"""

from __future__ import annotations


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
