"""The one order in which a graph with regions is listed: as the operations first stood, as far as regions allow."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch.fx import Node

from dovetail.graph.index import Index
from dovetail.outlining.record import State, call_of, clone_of


Priority = tuple[float, str]


def ascending(ranks: Sequence[float] | Sequence[Priority]) -> bool:
    return all(a <= b for a, b in pairwise(ranks))


def read_ranks(index: Index, state: State) -> tuple[int, list[int]]:
    """The epoch and the rank of each position.

    A graph that was edited by others since the last step is ranked anew, by its listing, in a new epoch.
    """
    table = state.ranks
    if table is not None and list(table) == [node.name for node in index.nodes]:
        return state.epoch, list(table.values())
    return state.epoch + 1, _fresh(index.nodes)


def priority(node: Node, rank: float) -> Priority:
    """What to list a node by: its rank, but a region's results come right after its call.

    A clone has the rank of its original, and comes after it or after the region that has it.
    """
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, Node) and call_of(source.meta) is not None:
        return -1, ""
    return rank, node.name if clone_of(node) else ""


def _fresh(nodes: list[Node]) -> list[int]:
    """Ranks by the listing, with room after each region's call for the operations it holds."""
    ranks: list[int] = []
    at = 0
    for node in nodes:
        ranks.append(at)
        call = call_of(node.meta)
        at += call.size + 1 if call is not None else 1
    return ranks


def list_by_rank(before: Sequence[Iterable[int]], ranks: Sequence[Priority]) -> list[int]:
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
