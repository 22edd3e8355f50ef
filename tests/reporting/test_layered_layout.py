"""Layouts of levels: ranks follow the edges, orders avoid crossings, long edges have a bend in each rank they pass."""

import random
import time
from itertools import pairwise

from dovetail.reporting.layered_layout import LevelLayout, lay_out


def rank_of(layout: LevelLayout) -> dict[int, int]:
    return {vertex: r for r, rank in enumerate(layout.ranks) for vertex in rank}


def test_each_box_is_below_what_it_reads() -> None:
    draw = random.Random(1)
    edges = [(a, b) for b in range(40) for a in range(b) if draw.random() < 0.08]
    rank = rank_of(lay_out(40, edges))
    assert all(rank[a] < rank[b] for a, b in edges)
    assert set(range(40)) <= rank.keys()


def test_a_long_edge_has_a_bend_in_each_rank_that_it_passes() -> None:
    layout = lay_out(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    rank = rank_of(layout)
    [(start, end, bends)] = layout.bends
    assert (start, end, [rank[b] for b in bends]) == (0, 3, [1, 2])


def test_a_box_that_reads_nothing_is_just_above_its_reader() -> None:
    rank = rank_of(lay_out(5, [(0, 1), (1, 2), (2, 4), (3, 4)]))
    assert rank[3] == rank[4] - 1


def crossings(layout: LevelLayout, edges: list[tuple[int, int]]) -> int:
    place = {vertex: i for rank in layout.ranks for i, vertex in enumerate(rank)}
    rank = rank_of(layout)
    total = 0
    for k, (a, b) in enumerate(edges):
        for c, d in edges[:k]:
            if rank[a] == rank[c] and rank[b] == rank[d]:
                total += (place[a] - place[c]) * (place[b] - place[d]) < 0
    return total


def test_crossings_that_can_be_avoided_are() -> None:
    # Three chains whose boxes are numbered so that keeping the order of numbers would cross them.
    edges = [(0, 5), (1, 4), (2, 3), (3, 6), (4, 7), (5, 8)]
    assert crossings(lay_out(9, edges), edges) == 0


def test_many_long_edges_do_not_outnumber_the_boxes_by_far() -> None:
    count = 100
    chain = list(pairwise(range(count)))
    layout = lay_out(count, [*chain, *((0, b) for b in range(2, count))])
    assert sum(map(len, layout.ranks)) <= 1000


def test_a_level_of_a_hundred_boxes_takes_milliseconds() -> None:
    draw = random.Random(2)
    edges = [(a, b) for b in range(100) for a in range(max(0, b - 12), b) if draw.random() < 0.2]
    start = time.thread_time()
    lay_out(100, edges)
    assert time.thread_time() - start < 1


def test_an_empty_level_has_no_ranks() -> None:
    assert lay_out(0, []).ranks == ()
