"""Layered drawing of one level: the rank and the order of each box, and the bends of long edges.

The problem is drawing a directed acyclic graph in layers with few crossings, which is NP-hard already for two layers. The
method is that of Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures", IEEE
Transactions on Systems, Man and Cybernetics 11(2), 1981: ranks by longest paths, after which boxes are moved towards what
reads them; a dummy vertex for each rank that an edge passes; then sweeps that order each rank by the barycenters of its
neighbors, of which the order with the fewest crossings is kept. Coordinates follow from the sizes of the boxes, which
change when one is opened, and are assigned by the page. A level has at most about a hundred boxes, so that the sweeps,
of which there is a fixed number, take time linear in its edges and dummies but for sorting.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 6

# An edge that passes many ranks is drawn as one curve where bends would outnumber the boxes by far.
_MOST_DUMMIES = 800


@dataclass(frozen=True)
class LevelLayout:
    """The boxes of each rank in order; numbers from `count` on are dummies. `bends` has the dummies of long edges."""

    ranks: tuple[tuple[int, ...], ...]
    bends: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


def lay_out(count: int, edges: Iterable[tuple[int, int]]) -> LevelLayout:
    """Return the layout of `count` boxes, numbered in a topological order, with `edges` from lower to higher numbers."""
    distinct = sorted(set(edges))
    ranks = _ranks(count, distinct)
    bends, segments, rank_of = _with_dummies(count, distinct, ranks)
    layers: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for vertex, rank in enumerate(rank_of):
        layers[rank].append(vertex)
    order = _ordered(layers, segments, len(rank_of))
    return LevelLayout(tuple(map(tuple, order)), tuple((a, b, tuple(d)) for (a, b), d in bends.items()))


def _ranks(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return longest-path ranks, boxes with fewer operands than readers moved down to just above the first reader."""
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        before[b].append(a)
        after[a].append(b)
    ranks = [0] * count
    for box in range(count):
        ranks[box] = max((ranks[a] + 1 for a in before[box]), default=0)
    for box in reversed(range(count)):
        if after[box] and len(after[box]) > len(before[box]):
            ranks[box] = max(ranks[box], min(ranks[b] for b in after[box]) - 1)
    return ranks


def _with_dummies(
    count: int, edges: Sequence[tuple[int, int]], ranks: Sequence[int]
) -> tuple[dict[tuple[int, int], list[int]], list[tuple[int, int]], list[int]]:
    """Return the dummies of each long edge, the edges between neighboring ranks, and the rank of each vertex."""
    rank_of = list(ranks)
    bends: dict[tuple[int, int], list[int]] = {}
    segments: list[tuple[int, int]] = []
    spare = _MOST_DUMMIES
    for a, b in sorted(edges, key=lambda e: ranks[e[1]] - ranks[e[0]]):
        passed = ranks[b] - ranks[a] - 1
        if passed > spare:
            continue
        spare -= passed
        chain = [a]
        for rank in range(ranks[a] + 1, ranks[b]):
            chain.append(len(rank_of))
            rank_of.append(rank)
        chain.append(b)
        segments += pairwise(chain)
        if passed:
            bends[a, b] = chain[1:-1]
    return bends, segments, rank_of


def _ordered(layers: list[list[int]], segments: Sequence[tuple[int, int]], count: int) -> list[list[int]]:
    """Return the vertices of each rank in the best order that the sweeps come across."""
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for a, b in segments:
        above[b].append(a)
        below[a].append(b)
    order = _by_components(layers, above, below)
    best, fewest = order, _crossings(order, below)
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        downwards = sweep % 2 == 0
        order = _swept(order, above if downwards else below, downwards)
        crossings = _crossings(order, below)
        if crossings < fewest:
            best, fewest = order, crossings
    return best


def _by_components(
    layers: list[list[int]], above: Sequence[Sequence[int]], below: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the ranks in the order of a depth-first walk, which draws chains and trees without a crossing."""
    place: dict[int, int] = {}
    for start in (vertex for layer in layers for vertex in layer):
        stack = [start]
        while stack:
            vertex = stack.pop()
            if vertex in place:
                continue
            place[vertex] = len(place)
            stack += [v for v in reversed(above[vertex]) if v not in place]
            stack += [v for v in reversed(below[vertex]) if v not in place]
    return [sorted(layer, key=place.__getitem__) for layer in layers]


def _swept(order: list[list[int]], neighbors: Sequence[Sequence[int]], downwards: bool) -> list[list[int]]:
    """Return the ranks ordered by the barycenters of their neighbors in the rank before, one rank after the other."""
    result = [list(layer) for layer in order]
    sequence = range(1, len(result)) if downwards else range(len(result) - 2, -1, -1)
    for rank in sequence:
        fixed = result[rank - 1 if downwards else rank + 1]
        place = {vertex: i for i, vertex in enumerate(fixed)}
        # One without neighbors keeps its relative place.
        scale = len(fixed) / max(1, len(result[rank]))
        centers: dict[int, float] = {}
        for i, vertex in enumerate(result[rank]):
            places = [place[v] for v in neighbors[vertex] if v in place]
            centers[vertex] = sum(places) / len(places) if places else i * scale
        result[rank].sort(key=centers.__getitem__)
    return result


def _crossings(order: Sequence[Sequence[int]], below: Sequence[Sequence[int]]) -> int:
    """Return the number of crossings between neighboring ranks: the inversions among the ends of their edges."""
    total = 0
    for upper, lower in pairwise(order):
        place = {vertex: i for i, vertex in enumerate(lower)}
        passed: list[int] = []
        for vertex in upper:
            ends = sorted(place[v] for v in below[vertex])
            for end in ends:
                total += len(passed) - bisect_right(passed, end)
            for end in ends:
                insort(passed, end)
    return total
