"""The integer view: neighbours, reachability, convexity, post-dominators."""

from __future__ import annotations

import random
import sys
import time

import pytest
import torch
from torch.fx import Graph, GraphModule

from dovetail.graph.index import Index
from tests.outlining.helpers import trace


def names(index: Index, positions) -> list[str]:
    return [index.nodes[i].name for i in positions]


def test_paths_and_what_lies_between():
    index = Index(trace(lambda a: (b := a.exp()) + b.neg().sin()))
    at = index.names
    assert names(index, index.path(at["exp"], at["add"])) == ["exp", "add"]
    assert index.reaches(at["neg"], at["add"])
    assert not index.reaches(at["add"], at["exp"])
    assert names(index, sorted(index.between([at["exp"], at["add"]]))) == ["neg", "sin"]
    assert index.between([at["neg"], at["sin"]]) == set()
    assert index.between([]) == set()


def test_effects_count_as_edges():
    index = Index(trace(lambda x: (torch.rand_like(x), torch.rand_like(x))))
    first, second = (i for i, n in enumerate(index.nodes) if "rand" in n.name)
    assert index.reaches(first, second)


def slow_post_dominators(index: Index) -> list[int]:
    """By definition: the nearest position that is on every way to the end."""
    end = len(index)
    all_of: list[set[int]] = [set()] * (end + 1)
    all_of[end] = {end}
    for i in range(end - 1, -1, -1):
        later = index.after[i] or [end]
        all_of[i] = {i} | set.intersection(*(all_of[j] for j in later))
    return [min(all_of[i] - {i}) for i in range(end)]


@pytest.mark.parametrize("seed", range(30))
def test_post_dominators_against_their_definition(seed):
    rng = random.Random(seed)
    graph = Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(rng.randrange(2, 30)):
        args = tuple(rng.choice(nodes[-6:]) for _ in range(rng.randrange(1, 3)))
        nodes.append(graph.call_function(torch.add if len(args) == 2 else torch.neg, args))
    graph.output(nodes[-1])
    index = Index(GraphModule(torch.nn.Module(), graph))
    assert index.post_dominators == slow_post_dominators(index)


def test_long_graphs_need_neither_recursion_nor_quadratic_time():
    def build(n):
        graph = Graph()
        at = graph.placeholder("x")
        saved = []
        for _ in range(n):
            at = graph.call_function(torch.neg, (at,))
            saved.append(at)
        while saved:
            at = graph.call_function(torch.add, (at, saved.pop()))
        graph.output(at)
        # A graph is enough here: generating its code would take longer than what is measured.
        gm = GraphModule(torch.nn.Module(), Graph())
        gm._graph = graph
        return gm

    def seconds(n):
        gm = build(n)
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            index = Index(gm)
            assert len(index.post_dominators) == len(index)
            assert index.reaches(1, n)
            best = min(best, time.perf_counter() - start)
        return best

    assert sys.getrecursionlimit() <= 3000
    small, large = seconds(2_000), seconds(20_000)
    assert large < 30 * small
