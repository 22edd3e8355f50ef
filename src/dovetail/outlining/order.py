"""The one order in which a graph with regions is listed: as the operations first stood, as far as regions allow."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch.fx import Node

from dovetail.graph.index import Index
from dovetail.outlining.record import State, call_of

# How far apart two operations are ranked: clones of the first that stand beside it come in between.
SPACING = 1 << 20


def ascending(ranks: Sequence[float]) -> bool:
    return all(a <= b for a, b in pairwise(ranks))


def read_ranks(index: Index, state: State) -> tuple[int, list[int]]:
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
