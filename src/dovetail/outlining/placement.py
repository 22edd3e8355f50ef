"""Where each region's call goes: one topological sort of the graph with every region drawn together."""

from __future__ import annotations

import heapq
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch.fx import Node

from dovetail.errors import CyclicRegion, EffectOrder, RegionError
from dovetail.ir.dependencies import Index
from dovetail.outlining.region_call import OutlineState, call_of
from dovetail.outlining.request import RegionDraft

# How far apart two operations are ranked: clones of the first that stand beside it come in between.
SPACING = 1 << 20


def ascending(ranks: Sequence[float]) -> bool:
    return all(a <= b for a, b in pairwise(ranks))


def read_ranks(index: Index, state: OutlineState) -> tuple[int, list[int]]:
    """The epoch and the rank of each position.

    A graph that was edited by others since the last step is ranked anew, by its listing, in a new epoch.
    """
    table = state.ranks
    if table is not None and list(table) == [node.name for node in index.nodes]:
        return state.epoch, list(table.values())
    return state.epoch + 1, _fresh(index.nodes)


def priority(node: Node, rank: float) -> float:
    """What to list a node by: its rank, but a region's results come right after its call."""
    source = node.args[0] if node.target is operator.getitem else None
    return -1 if isinstance(source, Node) and call_of(source.meta) is not None else rank


def _fresh(nodes: list[Node]) -> list[int]:
    """Ranks by the listing, with room after each region's call for the operations it holds."""
    return ranks_from(0, (node.meta for node in nodes))


def ranks_from(first: int, metas: Iterable[Mapping[str, Any]]) -> list[int]:
    """Ranks for operations in a row, given by their meta."""
    ranks: list[int] = []
    at = first
    for meta in metas:
        ranks.append(at)
        call = call_of(meta)
        at += SPACING * (call.size + 1 if call is not None else 1)
    return ranks


def list_by_rank(before: Sequence[Iterable[int]], ranks: Sequence[float]) -> list[int]:
    """A topological order that takes, of what is ready, the lowest rank; what is on a cycle is missing from it."""
    waiting = [0] * len(ranks)
    after: list[list[int]] = [[] for _ in ranks]
    for i, earlier in enumerate(before):
        for j in earlier:
            after[j].append(i)
            waiting[i] += 1
    ready = [(ranks[i], i) for i, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    listed: list[int] = []
    while ready:
        _, i = heapq.heappop(ready)
        listed.append(i)
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, (ranks[j], j))
    return listed


def place(index: Index, made: list[RegionDraft], ranks: list[int]) -> list[int]:
    """The new listing: positions of what stays outside, and `-1 - r` where region `r` is called.

    Only the stretches of the graph that a region spans are sorted; everything else keeps its place.
    Raises CyclicRegion or EffectOrder if some region cannot be called at one place.
    """
    owner: dict[int, int] = {}
    for r, draft in enumerate(made):
        for i in draft.members:
            owner[i] = r
    listing: list[int] = []
    at = 0
    for low, high in _windows(index, made, ranks):
        listing.extend(range(at, low))
        listing.extend(_sort_window(index, made, owner, ranks, low, high))
        at = high + 1
    listing.extend(range(at, len(index)))
    return listing


def _windows(index: Index, made: list[RegionDraft], ranks: list[int]) -> list[tuple[int, int]]:
    """The stretches to be sorted, disjoint and in order."""
    if not ascending(ranks):
        return [(0, len(index) - 1)]
    merged: list[tuple[int, int]] = []
    for low, high in sorted((min(d.members), max(d.members | d.clones)) for d in made):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _sort_window(
    index: Index, made: list[RegionDraft], owner: dict[int, int], ranks: list[int], low: int, high: int
) -> list[int]:
    first = owner.get(low)
    if first is not None and len(made[first].members) == high - low + 1:
        return [-1 - first]
    # Units: positions from low to high, then the regions that begin here.
    unit: dict[int, int] = {}
    units: list[int] = []
    for i in range(low, high + 1):
        r = owner.get(i)
        key = i if r is None else -1 - r
        if key not in unit:
            unit[key] = len(units)
            units.append(key)

    def of(i: int) -> int | None:
        r = owner.get(i)
        return unit.get(i if r is None else -1 - r)

    before: list[set[int]] = [set() for _ in units]
    data, effects = index.data, index.dependencies.before
    for u, key in enumerate(units):
        if key >= 0:
            needs = [*data[key], *effects.get(key, ())]
        else:
            draft = made[-1 - key]
            needs = [j for i in draft.inside for j in data[i] if j not in draft.clones]
            needs += [j for i in draft.members for j in effects.get(i, ())]
        before[u] = {v for j in needs if (v := of(j)) is not None and v != u}
    unit_ranks = [
        priority(index.nodes[k], ranks[k]) if k >= 0 else min(ranks[i] for i in made[-1 - k].members)
        for k in units
    ]
    order = list_by_rank(before, unit_ranks)
    if len(order) < len(units):
        listed = set(order)
        stuck = [k for u, k in enumerate(units) if u not in listed]
        raise _explain(index, made, owner, [-1 - k for k in stuck if k < 0])
    return [units[u] for u in order]


def _explain(index: Index, made: list[RegionDraft], owner: dict[int, int], stuck: list[int]) -> RegionError:
    """The error for regions that would depend on themselves, with a shortest path that shows it."""
    effects = index.dependencies.before

    def by_data(i: int) -> list[int]:
        return index.data[i]

    def by_all(i: int) -> list[int]:
        return index.before[i]

    for edges in (by_data, by_all):
        for r in stuck:
            path = _way_back(index, made, owner, r, edges)
            if not path:
                continue
            names = [index.nodes[i].name for i in path]
            for a, b in pairwise(path):
                if a not in index.data[b] and a in effects.get(b, ()):
                    why = index.dependencies.why(a, b)
                    return EffectOrder(made[r].label, index.nodes[a].name, index.nodes[b].name, why, names)
            return CyclicRegion(made[r].label, names)
    return RegionError(f"regions {', '.join(made[r].label for r in stuck)} would depend on each other.")


def _way_back(
    index: Index,
    made: list[RegionDraft],
    owner: dict[int, int],
    region: int,
    edges: Callable[[int], list[int]],
) -> list[int]:
    """A shortest chain from a member of `region`, through the outside, to a member; empty if there is none.

    Passing through another region, the chain may leave it from any member: its call comes as one.
    """
    members = made[region].members
    # By what, and from which end of the search so far: a clone has its position in several regions at once.
    came: dict[int, tuple[int, int | None]] = {}
    queue: deque[int] = deque()
    for end in sorted(members | made[region].clones):
        for j in edges(end):
            if j not in members and j not in made[region].clones and j not in came:
                came[j] = end, None
                queue.append(j)
    while queue:
        at = queue.popleft()
        other = owner.get(at)
        for hop in made[other].inside if other is not None else (at,):
            for j in edges(hop):
                if j not in came:
                    came[j] = hop, at
                    if j in members:
                        return _chain_from(came, j)
                    queue.append(j)
    return []


def _chain_from(came: dict[int, tuple[int, int | None]], start: int) -> list[int]:
    chain = [start]
    at: int | None = start
    while at is not None:
        hop, at = came[at]
        chain.extend([hop] if at is None or at == hop else [hop, at])
    return chain
