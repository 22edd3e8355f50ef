"""An integer view of a graph, for analyses that must stay linear."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import cached_property

from torch.fx import GraphModule, Node

from dovetail.errors import InvalidGraph
from dovetail.graph.dependencies import Dependencies, dependencies


class Index:
    """Positions, neighbours and reachability of a graph as it was when the index was made.

    Edges are data edges plus effect edges. A position is a place in the graph's own (topological) order.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.nodes: list[Node] = list(gm.graph.nodes)
        self.position: dict[Node, int] = {node: i for i, node in enumerate(self.nodes)}

    def require_order(self) -> None:
        """Raise InvalidGraph if a node reads one that comes later, or one of another graph."""
        at = self.position
        for i, node in enumerate(self.nodes):
            for used in node.all_input_nodes:
                if at.get(used, i) >= i:
                    where = "comes later or belongs to another graph"
                    raise InvalidGraph(f"it reads '{used.name}', which {where}", node.name)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def names(self) -> dict[str, int]:
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def dependencies(self) -> Dependencies:
        return dependencies(self.gm, self.nodes, self.position)

    @cached_property
    def data(self) -> list[list[int]]:
        """The positions each position reads, each once, in the order of first use."""
        at = self.position
        return [[at[n] for n in node.all_input_nodes] for node in self.nodes]

    @cached_property
    def before(self) -> list[list[int]]:
        """Everything that must come before each position: what it reads, then effect edges."""
        effects = self.dependencies.before
        if not effects:
            return self.data
        return [[*reads, *effects[i]] if i in effects else reads for i, reads in enumerate(self.data)]

    @cached_property
    def after(self) -> list[list[int]]:
        """Everything that must come after each position."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for i, earlier in enumerate(self.before):
            for j in earlier:
                found[j].append(i)
        return found

    def reaches(self, source: int, target: int) -> bool:
        """Whether `target` depends on `source`, directly or through others."""
        return bool(self.path(source, target))

    def path(self, source: int, target: int) -> list[int]:
        """A shortest chain of dependencies from `source` to `target`, empty if there is none.

        Looks only at what lies between the two in the graph's order.
        """
        if source == target:
            return [source]
        came: dict[int, int] = {source: source}
        queue = deque([source])
        while queue:
            at = queue.popleft()
            for later in self.after[at]:
                if later <= target and later not in came:
                    came[later] = at
                    if later == target:
                        return _walk_back(came, target)
                    queue.append(later)
        return []

    def between(self, members: Iterable[int]) -> set[int]:
        """What lies on a path from a member to a member without being one; empty if the set is convex."""
        inside = set(members)
        if not inside:
            return set()
        low, high = min(inside), max(inside)
        below: set[int] = set()
        for i in range(low, high):
            if i not in inside and any(j in inside or j in below for j in self.before[i]):
                below.add(i)
        above: set[int] = set()
        for i in range(high, low, -1):
            if i in inside or i in above:
                above.update(j for j in self.before[i] if j in below)
        return above


def _walk_back(came: dict[int, int], target: int) -> list[int]:
    chain = [target]
    while came[chain[-1]] != chain[-1]:
        chain.append(came[chain[-1]])
    return chain[::-1]
