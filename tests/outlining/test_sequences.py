"""Any sequence of outlining and inlining is undone by inlining, clones of clones and nested regions included."""

from __future__ import annotations

import copy
import operator
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

import dovetail
from dovetail import Region, Request
from dovetail.outlining.region import clone_of

from .helpers import drawn, equal, names, node, refused, run, same_meta

# Names that regions and clones would get as well.
NAMES = (
    "fused_0",
    "fused",
    "v",
    "v_1",
    "v_1_1",
    "v_2",
    "fused_1",
    "fused_0_1",
    "pair_0",
    "fused_2",
    "w",
    "w_1",
)
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
    root._tensor_constant0 = torch.ones(2, 3)
    for name in names[: rng.randint(4, 10)]:
        given = [rng.choice(values[-3:]), rng.choice(values)]
        form = rng.random()
        if form < 0.1:
            node = graph.create_node("get_attr", "_tensor_constant0", name=name)
        elif form < 0.5:
            function = rng.choice((torch.sin, torch.neg))
            node = graph.create_node("call_function", function, (given[0],), name=name)
        elif form < 0.6:
            parts = graph.create_node("call_function", torch.ops.aten.split.Tensor, (given[0], 1), name=name)
            part = graph.call_function(operator.getitem, (parts, 0))
            node = graph.call_function(torch.cat, ([part, part],))
        else:
            options = {"alpha": rng.choice((1, 2))}
            node = graph.create_node("call_function", torch.add, tuple(given), options, name)
        values.append(node)
    graph.output(tuple(rng.choice(values[2:]) for _ in range(rng.randint(1, 3))))
    return GraphModule(root, graph)


def cloned_into(region: Region) -> list[str]:
    return [name for name, escape in region.escapes.items() if escape.policy == "duplicate"]


def some(rng: random.Random, gm: GraphModule) -> Request:
    """A few operations, most often around one that has clones, is one, or is read inside and outside."""
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    cloned = {name for region in dovetail.regions(gm, nested=True) for name in cloned_into(region)}
    starts = [n for n in nodes if n.name in cloned or clone_of(n)] if rng.random() < 0.6 else []
    starts = starts or [n for n in nodes if len(n.users) > 1]
    if starts and rng.random() < 0.8:
        chosen = [rng.choice(starts)]
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            near = {*chosen[-1].users, *chosen[-1].all_input_nodes, *chosen[0].users} & set(nodes)
            chosen += rng.sample(sorted(near), min(len(near), 1))
    else:
        chosen = rng.sample(nodes, min(len(nodes), rng.choice((1, 1, 2, 3))))
    return Request([n.name for n in chosen], kind=rng.choice(KINDS), escapes=rng.choice(ESCAPES))


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
    regions = dovetail.regions(gm, nested=True)
    with_clones = [r for r in regions if cloned_into(r)] if rng.random() < 0.7 else []
    region = rng.choice(with_clones or regions)
    if rng.random() < 0.2:
        return dovetail.inline(gm, kind=region.kind, depth=rng.choice((None, 1, 2)))
    return dovetail.inline(gm, region.name, depth=rng.choice((None, 1)))


def step(rng: random.Random, gm: GraphModule) -> GraphModule:
    form = rng.random()
    if form < 0.1:
        return copy.deepcopy(gm)
    if form < 0.15:
        return pickle.loads(pickle.dumps(gm))
    if form < 0.4 and len(dovetail.regions(gm, nested=True)) > 1:
        return inline_some(rng, gm)
    try:
        return outline_some(rng, gm)
    except dovetail.RegionError:
        return gm


def follow(seed: Any, steps: int) -> None:
    rng = random.Random(f"sequence {seed}")
    gm = first = dovetail.inline(small_graph(rng))  # torch would trace its own graph anew to pickle it
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


def shared_value() -> GraphModule:
    """A value that two operations read, one of them a result that a third one reads as well; named as regions are."""

    def draw(graph: Graph) -> Node:
        x0, x1 = graph.placeholder("x0"), graph.placeholder("x1")
        other = graph.create_node("call_function", torch.cat, ([x0, x0, x0],), name="other")
        value = graph.create_node("call_function", torch.cat, ([x0, x1, x1],), name="fused_0")
        read = graph.create_node("call_function", torch.sin, (value,), name="read")
        graph.create_node("call_function", torch.stack, ([read, other, value], -1), name="dead")
        return read

    return drawn(draw)


@pytest.mark.parametrize("saved", [copy.copy, copy.deepcopy, lambda gm: pickle.loads(pickle.dumps(gm))])
@pytest.mark.parametrize(
    "again", [[], ["fused_0_1"], ["read_1"], ["read_1", "fused_0_1"], ["dead", "read_1"]]
)
def test_a_clone_of_a_clone_does_not_displace_the_original(again: list[str], saved: Any) -> None:
    gm = shared_value()
    new = dovetail.outline(gm, ["fused_0", "dead", "read", "other"], kind="fused", escapes="duplicate")
    new = saved(dovetail.outline(new, ["fused_0"], kind="fused"))
    new = saved(dovetail.inline(new, "fused_1"))
    assert {"fused_0", "fused_0_1", "read", "read_1"} <= set(names(new))
    for name in again:
        before = new
        new = saved(dovetail.outline(new, [name], kind="again", escapes="duplicate"))
        expected = f"again_{again.index(name)}"
        assert dovetail.text(dovetail.inline(new, expected)) == dovetail.text(before)
    for region in dovetail.regions(new):
        part = saved(dovetail.inline(new, region.name))
        assert equal(run(part, *INPUTS), run(gm, *INPUTS))
        assert dovetail.text(dovetail.inline(part)) == dovetail.text(gm)
    assert same_meta(gm, dovetail.inline(new))


def test_an_original_finds_its_name_though_a_clone_could_have_taken_it() -> None:
    def draw(graph: Graph) -> Any:
        value = graph.create_node("call_function", torch.sin, (graph.placeholder("x"),), name="v")
        first = graph.create_node("call_function", torch.neg, (value,), name="v_1")
        return value, first, graph.create_node("call_function", torch.cos, (value,), name="read")

    gm = drawn(draw)
    new = dovetail.outline(gm, ["v", "read"], kind="first", escapes="duplicate")
    new = dovetail.outline(new, ["v", "v_1"], kind="second", escapes="output")
    new = dovetail.inline(new, "first_0")
    assert "v_2" in names(new)
    assert dovetail.text(dovetail.inline(new, "second_0")) == dovetail.text(gm)


def test_a_node_of_another_tool_with_the_name_of_a_hidden_one_stays() -> None:
    gm = shared_value()
    new = dovetail.outline(gm, ["fused_0", "read"], kind="fused", escapes="output")
    call = node(new, "fused_1")
    with new.graph.inserting_before(call):
        added = new.graph.create_node("call_function", torch.neg, (node(new, "x0"),), name="fused_0")
    new.recompile()
    back = dovetail.inline(new)
    dovetail.check(back)
    assert len(set(names(back))) == len(names(back))
    assert [n.target for n in back.graph.nodes].count(torch.neg) == 1
    assert added.name not in {"x0", "x1"}


def test_a_clone_is_the_operation_itself_once_its_original_is_dropped() -> None:
    gm = shared_value()
    new = dovetail.outline(gm, ["fused_0", "dead", "read", "other"], kind="fused", escapes="duplicate")
    new = dovetail.inline(dovetail.outline(new, ["fused_0", "read"], kind="pair"), "fused_1")
    returned = new.graph.output_node()
    returned.args = (node(new, "read_1"),)
    new.graph.erase_node(node(new, "read"))
    new.graph.erase_node(node(new, "pair_0"))
    new.recompile()
    back = dovetail.inline(new)
    assert dovetail.text(back) == dovetail.text(gm)
    assert same_meta(gm, back)


def test_regions_that_wait_for_each_other_through_clones_are_refused() -> None:
    def draw(graph: Graph) -> Any:
        x = graph.placeholder("x")
        a = graph.create_node("call_function", torch.add, (x, x), name="a")
        b = graph.create_node("call_function", torch.neg, (x,), name="b")
        c = graph.create_node("call_function", torch.sin, (b,), name="c")
        d = graph.create_node("call_function", torch.stack, ([c, x],), name="d")
        return a, graph.create_node("call_function", torch.add, (c, a), name="e"), d

    requests = [Request(["a", "c", "d"], kind="one", escapes="duplicate"), Request(["b", "e"], kind="two")]
    refused(drawn(draw), dovetail.CyclicRegion, requests)


def test_clones_keep_their_originals_through_files(tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.abs()
        z = y.sin()
        return y * 2, torch.stack([y, z]), z + 1

    def saved(gm: GraphModule) -> GraphModule:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pt2"
        dovetail.save(gm, path)
        return dovetail.load(path)

    gm = dovetail.capture(model, (torch.randn(2, 3),))
    new = saved(dovetail.outline(gm, ["abs_1", "sin", "stack"], kind="first", escapes="duplicate"))
    new = saved(dovetail.inline(dovetail.outline(new, ["abs_1"], kind="second"), "first_0"))
    assert {"abs_1_1", "sin_1"} <= set(names(new))
    new = saved(dovetail.outline(new, ["abs_1_1"], kind="third"))
    for name in ("second_0", "third_0"):
        assert dovetail.text(dovetail.inline(saved(dovetail.inline(new, name)))) == dovetail.text(gm)
