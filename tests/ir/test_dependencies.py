"""The integer view: neighbours, reachability, convexity."""

from __future__ import annotations

import sys
import time

import torch
from torch.fx import Graph, GraphModule

from dovetail.ir.dependencies import Index
from tests.outlining.helpers import trace


def names(index: Index, positions) -> list[str]:
    return [index.nodes[i].name for i in positions]


def test_paths_and_what_is_in_between():
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
            start = time.thread_time()
            index = Index(gm)
            assert index.reaches(1, n)
            assert len(index.between([0, len(index) - 1])) == len(index) - 2
            best = min(best, time.thread_time() - start)
        return best

    assert sys.getrecursionlimit() <= 3000
    small, large = seconds(2_000), seconds(20_000)
    assert large < 30 * small
