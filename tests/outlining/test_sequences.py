"""Any sequence of outlining and inlining is undone by inlining, clones of clones and nested regions included."""

from __future__ import annotations

import copy
import operator
import pickle
import random
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

import dovetail
from dovetail import Request

from .helpers import equal, run, same_meta

# Names that regions and clones would get as well.
NAMES = ("fused_0", "fused", "v", "v_1", "v_1_1", "v_2", "fused_1", "fused_0_1", "pair_0", "fused_2", "w", "w_1")
KINDS = ("fused", "pair", "v", "w")
ESCAPES = ("duplicate", "duplicate", "duplicate", "output", "auto", "leave")
INPUTS = (torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(2, -2, 6).reshape(2, 3))


def small_graph(rng: random.Random) -> GraphModule:
    """A graph of a few pure operations, some of which nobody reads."""
    graph = Graph()
    values: list[Node] = [graph.placeholder("x0"), graph.placeholder("x1")]
    names = list(NAMES)
    rng.shuffle(names)
    root = torch.nn.Module()
    root.constant = torch.ones(2, 3)
    for i in range(rng.randint(3, 9)):
        recent = values[-4:] if rng.random() < 0.7 else values
        given = [rng.choice(recent), rng.choice(values)]
        name = names[i] if rng.random() < 0.6 else None
        form = rng.random()
        if form < 0.1:
            values.append(graph.create_node("get_attr", "constant", name=name))
        elif form < 0.5:
            values.append(
                graph.create_node("call_function", rng.choice((torch.sin, torch.neg)), (given[0],), name=name)
            )
        elif form < 0.6:
            graph.create_node("call_function", torch.stack, (given, -1), name=name)
        elif form < 0.7:
            parts = graph.create_node("call_function", torch.ops.aten.split.Tensor, (given[0], 1), name=name)
            values.append(graph.call_function(torch.cat, ([graph.call_function(operator.getitem, (parts, 0))] * 2,)))
        else:
            values.append(
                graph.create_node("call_function", torch.add, (given[0], given[1]), {"alpha": rng.choice((1, 2))}, name)
            )
    graph.output(tuple(rng.choice(values[2:]) for _ in range(rng.randint(1, 2))))
    return GraphModule(root, graph)


def some(rng: random.Random, gm: GraphModule) -> Request:
    nodes = [n.name for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    chosen = rng.sample(nodes, min(len(nodes), rng.choice((1, 1, 2, 3, 4, 6))))
    return Request(chosen, kind=rng.choice(KINDS), escapes=rng.choice(ESCAPES))


def outline_some(rng: random.Random, gm: GraphModule) -> GraphModule:
    requests = [some(rng, gm) for _ in range(rng.choice((1, 1, 1, 2)))]
    before = {n.name for n in gm.graph.nodes}
    new = dovetail.outline(gm, requests)
    back = new
    names = [r.name for r in dovetail.regions(new) if r.name not in before]
    rng.shuffle(names)
    for name in names:
        back = dovetail.inline(back, name, depth=1)
    assert dovetail.text(back) == dovetail.text(gm)
    return new


def inline_some(rng: random.Random, gm: GraphModule) -> GraphModule:
    region = rng.choice(dovetail.regions(gm, nested=True))
    if rng.random() < 0.2:
        return dovetail.inline(gm, kind=region.kind, depth=rng.choice((None, 1, 2)))
    return dovetail.inline(gm, region.name, depth=rng.choice((None, 1)))


def step(rng: random.Random, gm: GraphModule) -> GraphModule:
    form = rng.random()
    if form < 0.1:
        return copy.deepcopy(gm)
    if form < 0.15:
        return pickle.loads(pickle.dumps(gm))
    if form < 0.5 and dovetail.regions(gm):
        return inline_some(rng, gm)
    try:
        return outline_some(rng, gm)
    except dovetail.RegionError:
        return gm


def follow(seed: Any, steps: int) -> None:
    rng = random.Random(f"sequence {seed}")
    gm = first = small_graph(rng)
    text, values = dovetail.text(first), run(first, *INPUTS)
    for _ in range(steps):
        before = dovetail.text(gm)
        new = step(rng, gm)
        assert dovetail.text(gm) == before
        gm = new
        dovetail.check(gm)
        assert equal(run(gm, *INPUTS), values)
        back = dovetail.inline(gm)
        assert dovetail.text(back) == text
    assert same_meta(first, dovetail.inline(gm))


@pytest.mark.parametrize("seed", range(60))
def test_inlining_undoes_any_sequence(seed: int) -> None:
    follow(seed, 8)
