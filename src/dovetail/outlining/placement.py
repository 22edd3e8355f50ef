"""Placement: the position of each region's call in the new graph.

The problem is a topological sort of the quotient graph in which every region is one vertex (see `ir.dependencies`),
as close as possible to the original order: of the vertices that are ready, the one of lowest rank comes first. Ranks
are kept in the graph's `OutlineState`, so that inlining restores the original order. Only the windows that regions
span are sorted, the rest keeps its place: O(n log n) in the nodes of the windows, linear in their edges. If the sort
gets stuck, a breadth-first search finds a shortest cycle for the error message.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch.fx import Node

from dovetail.errors import CyclicRegion, EffectOrder, RegionError
from dovetail.ir.dependencies import Index
from dovetail.ir.quotient_graph import contract_window, merge_windows, topological_order
from dovetail.outlining.escapes import RegionDraft
from dovetail.outlining.region import OutlineState, call_of

# The distance between the ranks of two operations: clones of the first are ranked in between.
SPACING = 1 << 20


def is_ascending(ranks: Sequence[float]) -> bool:
    return all(a <= b for a, b in pairwise(ranks))


def read_ranks(index: Index, state: OutlineState) -> tuple[int, list[int]]:
    """Return the epoch and the rank of each position.

    A graph that another tool has edited since is ranked anew, in node order, in a new epoch.
    """
    table = state.ranks
    if table is not None and list(table) == [node.name for node in index.nodes]:
        return state.epoch, list(table.values())
    return state.epoch + 1, ranks_from(0, (node.meta for node in index.nodes))


def priority(node: Node, rank: float) -> float:
    """Return a node's sort key: its rank, but the results of a region come right after its call."""
    source = node.args[0] if node.target is operator.getitem else None
    return -1 if isinstance(source, Node) and call_of(source.meta) is not None else rank


def ranks_from(first: int, metas: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return consecutive ranks for operations given by their meta, with room after a call for the region's members."""
    ranks: list[int] = []
    at = first
    for meta in metas:
        ranks.append(at)
        call = call_of(meta)
        at += SPACING * (call.size + 1 if call is not None else 1)
    return ranks


def place_regions(index: Index, drafts: list[RegionDraft], ranks: list[int]) -> list[int]:
    """Return the new order: positions of what stays outside, and `-1 - r` where region `r` is called.

    Raise CyclicRegion or EffectOrder if some region cannot be called at one place.
    """
    owner = {i: r for r, draft in enumerate(drafts) for i in draft.members}
    windows = [(0, len(index) - 1)]
    if is_ascending(ranks):
        windows = merge_windows((min(d.members), max(d.members | d.clones)) for d in drafts)
    order: list[int] = []
    at = 0
    for low, high in windows:
        order.extend(range(at, low))
        order.extend(_sort_window(index, drafts, owner, ranks, low, high))
        at = high + 1
    order.extend(range(at, len(index)))
    return order


def region_needs(index: Index, draft: RegionDraft) -> Iterator[int]:
    """Yield the positions that must come before a region is called."""
    data, effects, clones = index.data, index.dependencies.before, draft.clones
    for i in draft.members:
        yield from (j for j in data[i] if j not in clones)
        yield from effects.get(i, ())
    for i in clones:
        yield from (j for j in data[i] if j not in clones)


def _sort_window(
    index: Index, drafts: list[RegionDraft], owner: dict[int, int], ranks: list[int], low: int, high: int
) -> list[int]:
    first = owner.get(low)
    if first is not None and len(drafts[first].members) == high - low + 1:
        return [-1 - first]
    units, before = contract_window(
        low, high, owner, lambda u: index.before[u] if u >= 0 else region_needs(index, drafts[-1 - u])
    )
    unit_ranks = [
        priority(index.nodes[u], ranks[u]) if u >= 0 else min(ranks[i] for i in drafts[-1 - u].members)
        for u in units
    ]
    order = topological_order(before, unit_ranks)
    if len(order) < len(units):
        placed = set(order)
        unplaced = [-1 - unit for k, unit in enumerate(units) if k not in placed and unit < 0]
        raise _cycle_error(index, drafts, owner, unplaced)
    return [units[k] for k in order]


def _cycle_error(
    index: Index, drafts: list[RegionDraft], owner: dict[int, int], unplaced: list[int]
) -> RegionError:
    """Return the error for regions that would depend on themselves, with a shortest path that shows it."""
    for edges in (index.data, index.before):
        for r in unplaced:
            path = _find_cycle(drafts, owner, r, edges)
            if not path:
                continue
            names = [index.nodes[i].name for i in path]
            edge = index.effect_edge(path)
            if edge is None:
                return CyclicRegion(drafts[r].label, names)
            first, second = (index.nodes[i].name for i in edge)
            return EffectOrder(drafts[r].label, first, second, index.dependencies.why(*edge), names)
    labels = ", ".join(drafts[r].label for r in unplaced)
    return RegionError(f"regions {labels} would depend on each other.")


def _find_cycle(
    drafts: list[RegionDraft], owner: dict[int, int], region: int, edges: Sequence[list[int]]
) -> list[int]:
    """Return a shortest path from a member of `region`, through the outside, to a member; empty if none exists.

    On its way through another region, the path may leave from any member: the region is called as one. The search
    is breadth-first, against the edges.
    """
    members, clones = drafts[region].members, drafts[region].clones
    # By position: the position after it on the path, and the one before that in the search. A clone's position is
    # in several regions at once, so the two may differ.
    came: dict[int, tuple[int, int | None]] = {}
    queue: deque[int] = deque()
    for end in sorted(members | clones):
        for j in edges[end]:
            if j not in members and j not in clones and j not in came:
                came[j] = end, None
                queue.append(j)
    while queue:
        at = queue.popleft()
        other = owner.get(at)
        for hop in drafts[other].inside if other is not None else (at,):
            for j in edges[hop]:
                if j not in came:
                    came[j] = hop, at
                    if j in members:
                        return _path_from(came, j)
                    queue.append(j)
    return []


def _path_from(came: dict[int, tuple[int, int | None]], start: int) -> list[int]:
    path = [start]
    at: int | None = start
    while at is not None:
        hop, at = came[at]
        path.extend([hop] if at is None or at == hop else [hop, at])
    return path
