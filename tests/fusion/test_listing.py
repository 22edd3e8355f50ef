"""The same graph listed otherwise, renamed, its operands swapped: the same regions, whatever the rules and effects."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

import dovetail
from dovetail import rules
from dovetail.ir.dependencies import Index
from dovetail.ir.op_traits import is_commutative
from dovetail.ir.structural_hash import structural_order
from tests.fuzz.generate import FLAVOURS, draw_program
from tests.fuzz.program import NotAProgram, build

aten = torch.ops.aten
X = torch.linspace(-1, 1, 6).reshape(2, 3)


@dovetail.rule(kind="relu_sum", escapes="output")
def relu_sum(x, y):
    return torch.relu(x + y)


EVERY = {
    "groups": rules.groups(),
    "siblings": rules.siblings({"add", "sub", "relu", "neg", "mul"}),
    "following": rules.siblings({"relu", "neg"}, kind="lanes", name="lanes", follow=True),
    "some": rules.capability({"add", "relu", "neg", "rand_like", "add_", "mul_"}, kind="npu.some"),
    "anything": rules.capability(lambda n: True, kind="all", priority=-5),
    "repeats": rules.repeats(min_size=2),
    "pattern": relu_sum,
}
LIMITS = [None, None, dovetail.Limits(nodes=2), dovetail.Limits(nodes=3), dovetail.Limits(operands=2)]


def draw_copies(rng: Random) -> GraphModule:
    """A few operations again and again, so that many compute the same, with draws, writes and prints among them."""
    graph = Graph()
    pool = [graph.placeholder("x")]
    fresh: list[Node] = []
    for _ in range(rng.randrange(4, 24)):
        source, way = rng.choice([pool[-1], rng.choice(pool)]), rng.random()
        if way < 0.35:
            pool.append(graph.call_function(rng.choice([aten.relu.default, aten.neg.default]), (source,)))
        elif way < 0.7:
            target = rng.choice([aten.add.Tensor, aten.sub.Tensor])
            pool.append(graph.call_function(target, (source, rng.choice(pool))))
        elif way < 0.8 or not fresh:
            fresh.append(graph.call_function(aten.clone.default, (source,)))
            pool.append(fresh[-1])
        elif way < 0.87:
            pool.append(graph.call_function(aten.rand_like.default, (source,)))
        elif way < 0.96:
            target = rng.choice([aten.add_.Tensor, aten.mul_.Tensor])
            pool.append(graph.call_function(target, (rng.choice(fresh), source)))
        else:
            graph.call_function(print, (source,))
    graph.output((pool[-1], *(rng.choice(pool) for _ in range(rng.randrange(3)))))
    for node in graph.nodes:
        node.meta["val"] = None if node.target is print else X.clone()
    return GraphModule(torch.nn.Module(), graph)


def relisted(gm: GraphModule, rng: Random, *, swap: bool) -> GraphModule:
    """The same graph in another order that dependencies allow, every node renamed, and operands swapped at random."""
    index, graph, copies = Index(gm), Graph(), dict[Node, Node]()
    left = list(range(len(index)))
    numbers = rng.sample(range(10**6), len(index))
    while left:
        ready = [i for i in left if not set(index.before[i]).intersection(left)]
        inputs = [i for i in ready if index.nodes[i].op == "placeholder"]
        i = inputs[0] if inputs else rng.choice([i for i in ready if i < len(index) - 1] or ready)
        left.remove(i)
        new = copies[index.nodes[i]] = graph.node_copy(index.nodes[i], copies.__getitem__)
        if new.op not in ("placeholder", "output"):
            new._rename(f"n{numbers[i]}")
        if (
            swap
            and is_commutative(new)
            and all(isinstance(a, Node) for a in new.args[:2])
            and rng.random() < 0.5
        ):
            new.args = (new.args[1], new.args[0], *new.args[2:])
    graph.set_codegen(gm.graph._codegen)
    return GraphModule(gm, graph)


def table(gm: GraphModule, by: list[Any], limits: dovetail.Limits | None) -> list[Any]:
    """The regions by the structural places of their operations: what can be exchanged for one another is one."""
    place = {node.name: p for node, p in zip(gm.graph.nodes, structural_order(Index(gm)), strict=True)}
    # The results of a region count as one memory: where it is written, later rounds see more order than there is.
    rounds = 1 if Index(gm).dependencies.written else None
    new = dovetail.fuse(gm, by, limits=limits, rounds=rounds, on_error="raise")
    return sorted(
        (r.kind, tuple(sorted(place[n] for n in r.nodes))) for r in dovetail.regions(new, nested=True)
    )


def prove(seed: int, draw: Callable[[Random], GraphModule]) -> int:
    rng = Random(seed)
    try:
        gm = draw(rng)
    except NotAProgram:
        return 0
    by = rng.sample(list(EVERY.values()), rng.randrange(1, 5))
    limits = rng.choice(LIMITS)
    want = table(gm, by, limits)
    # Blocks that repeat are exactly equal, operands in turn.
    other = relisted(gm, rng, swap=EVERY["repeats"] not in by)
    assert table(other, rng.sample(by, len(by)), limits) == want, f"seed {seed}"
    return len(want)


def test_what_is_computed_many_times_over() -> None:
    assert sum(prove(seed, draw_copies) for seed in range(150)) > 300


@pytest.mark.parametrize("flavour", ["pure", "memory", "world", "everything"])
def test_random_programs(flavour: str) -> None:
    def draw(rng: Random) -> GraphModule:
        return build(draw_program(rng, FLAVOURS[flavour]))

    assert sum(prove(seed, draw) for seed in range(40)) > 30


def order_of(gm: GraphModule) -> list[str]:
    places = structural_order(Index(gm))
    return [node.name for _, node in sorted(zip(places, gm.graph.nodes, strict=True), key=lambda p: p[0])]


def two(first: tuple[Any, ...], second: tuple[Any, ...], turned: bool, swapped: bool = False) -> GraphModule:
    """Two operations on an input that nothing orders, listed either way, and their difference."""
    graph = Graph()
    x = graph.placeholder("x")
    nodes: dict[str, Node] = {}
    for name, (target, *args) in sorted({"a": first, "b": second}.items(), reverse=turned):
        nodes[name] = graph.create_node("call_function", target, (x, *args), name=name)
    ends = ("b", "a") if swapped else ("a", "b")
    graph.output(graph.call_function(aten.sub.Tensor, tuple(nodes[e] for e in ends)))
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((aten.sum.dim_IntList, [-1]), (aten.sum.dim_IntList, [-2])),
        ((aten.rand_like.default,), (print,)),
        ((aten.relu.default,), (aten.relu.default,)),
    ],
    ids=["literals", "effects of two sorts", "equals that are used in different places"],
)
def test_what_could_be_taken_for_one_another_is_not(first: Any, second: Any) -> None:
    assert order_of(two(first, second, False)) == order_of(two(first, second, True))


def test_places_follow_what_becomes_of_equals() -> None:
    relu = (aten.relu.default,)
    assert order_of(two(relu, relu, False)) != order_of(two(relu, relu, False, swapped=True))
