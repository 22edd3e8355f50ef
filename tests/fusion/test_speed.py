"""Fusing grows with the graph, and no faster."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from dovetail.fusion.fuse import fuse
from dovetail.fusion.ledger import explain
from dovetail.rules.rule import Candidate, Proposal, Rule, RuleContext

aten = torch.ops.aten
Case = tuple[GraphModule, list[tuple[str, ...]]]


class Named(Rule):
    name = kind = "named"

    def __init__(self, sets: list[tuple[str, ...]], *, divisible: bool = False) -> None:
        self.sets, self.divisible = sets, divisible

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        if context.round == 1:
            at = context.index.names
            for names in self.sets:
                yield Candidate(self.name, self.kind, tuple(at[n] for n in names), divisible=self.divisible)


class Sketch:
    def __init__(self) -> None:
        self.graph = Graph()
        with FakeTensorMode():
            self.value = torch.empty(8, 16)

    def op(self, *inputs: Node) -> Node:
        target = aten.add.Tensor if len(inputs) > 1 else aten.relu.default
        node = self.graph.call_function(target, inputs) if inputs else self.graph.placeholder("x")
        node.meta["val"] = self.value
        return node

    def done(self, *results: Node) -> GraphModule:
        self.graph.output(results)
        return GraphModule(torch.nn.Module(), self.graph)


def chain(count: int) -> Case:
    """Five candidates for every four operations: each four, and each four shifted by one."""
    s = Sketch()
    at, names = s.op(), []
    for _ in range(count):
        at = s.op(at)
        names.append(at.name)
    whole = [tuple(names[i : i + 4]) for i in range(0, count - 4, 4)]
    return s.done(at), [*whole, *(tuple(names[i + 1 : i + 5]) for i in range(0, count - 8, 16))]


def sliding(count: int) -> Case:
    """One cluster of everything."""
    s = Sketch()
    at, names = s.op(), []
    for _ in range(count):
        at = s.op(at)
        names.append(at.name)
    return s.done(at), [tuple(names[i : i + 4]) for i in range(0, count - 4, 2)]


def crossing(count: int) -> Case:
    """Each candidate alone is legal, and no two of them together."""
    s = Sketch()
    x = s.op()
    left, right = [s.op(x)], [s.op(x)]
    for _ in range(count // 2 - 1):
        left.append(s.op(left[-1]))
        right.append(s.op(right[-1]))
    pairs = [(a.name, b.name) for a, b in zip(left, reversed(right), strict=True)]
    return s.done(left[-1], right[-1]), pairs


def long_skips(count: int) -> Case:
    """Candidates that span half the graph each, none of them legal."""
    s = Sketch()
    at = s.op()
    nodes: list[Node] = []
    for _ in range(count // 2):
        at = s.op(at)
        nodes.append(at)
    pairs: list[tuple[str, ...]] = []
    for source in reversed(nodes):
        at = s.op(at, source)
        pairs.append((source.name, at.name))
    return s.done(at), pairs


def one_producer(count: int) -> Case:
    """An operation that half of the graph reads, cloned into every candidate."""
    s = Sketch()
    shared = s.op(s.op())
    results: list[Node] = []
    sets: list[tuple[str, ...]] = []
    for _ in range(count // 2):
        first = s.op(shared)
        results.append(s.op(first))
        sets.append((shared.name, first.name, results[-1].name))
    return s.done(*results), sets


def seconds(make: Callable[[int], Case], count: int) -> float:
    gm, sets = make(count)
    rule = Named(sets)
    gc.collect()
    # The time this thread had: others may be busy, on the machine and in this process.
    start = time.thread_time()
    new = fuse(gm, rule)
    spent = time.thread_time() - start
    assert explain(new).accepted or make is long_skips
    return spent


@pytest.mark.parametrize("make", [chain, sliding, crossing, long_skips, one_producer])
def test_time_grows_with_the_graph(make: Callable[[int], Case]) -> None:
    seconds(make, 500)
    small = min(seconds(make, 1000) for _ in range(2))
    large = seconds(make, 8000)
    # Eight times the nodes; squared it would be sixty-four times the time.
    assert large < 24 * small
