"""What generated programs have found in lowering, one small case for each cause."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.fx import Graph, GraphModule

import dovetail


def lowered(gm: GraphModule, nodes: list[Any]) -> GraphModule:
    return dovetail.lower(dovetail.outline(gm, nodes, kind="piece"), "eager", smallest=1, cache=False)


def test_a_module_in_a_region_keeps_it_as_it_is() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, device="meta")
    called = graph.call_module("inner", (x,))
    graph.output(called)
    root = nn.Module()
    root.inner = nn.Tanh()
    gm = lowered(GraphModule(root, graph), [called])
    given = torch.randn(3)
    assert torch.equal(gm(given), torch.tanh(given))
    assert "is not a graph" in dovetail.explain(gm).lowered[0].reason


def test_a_region_of_constants_alone() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor([1.0, 2.0]).exp()

    gm = dovetail.capture(Model(), (torch.zeros(2),))
    picked = [n for n in gm.graph.nodes if n.op == "get_attr" or "exp" in n.name]
    assert torch.equal(lowered(gm, picked)(torch.zeros(2)), Model()(torch.zeros(2)))


def test_a_graph_that_returns_no_tuple_has_a_key() -> None:
    inner = Graph()
    y = inner.placeholder("y")
    inner.output(inner.call_function(torch.neg, (y,)))
    graph = Graph()
    x = graph.placeholder("x")
    called = graph.call_module("inner", (x,))
    graph.output(called)
    root = nn.Module()
    root.inner = GraphModule(nn.Module(), inner)
    gm = dovetail.outline(GraphModule(root, graph), [called], kind="piece")
    assert len(dovetail.regions(gm)[0].key) == 64
    assert torch.equal(dovetail.lower(gm, "eager", smallest=1)(torch.ones(2)), -torch.ones(2))


SAID: list[str] = []


def say(x: torch.Tensor) -> torch.Tensor:
    SAID.append(type(x).__name__)
    return x * 2


def test_what_acts_on_the_world_is_not_run_while_lowering() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    said = graph.call_function(say, (x,))
    graph.output(said)
    x.meta["val"] = torch.empty(3, device="meta")
    gm = lowered(GraphModule(nn.Module(), graph), [said])
    assert SAID == []
    assert torch.equal(gm(torch.ones(3)), torch.full((3,), 2.0))
    assert SAID == ["Tensor"]


def test_a_number_made_of_sizes_that_no_operand_shows() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_full((x.shape[0] + x.shape[1], 3), 0.5)

    gm = dovetail.capture(Model(), (torch.zeros(4, 5),), dynamic_shapes=({0: Dim("a"), 1: Dim("b")},))
    made = [n for n in gm.graph.nodes if n.op == "call_function" and "full" in n.name]
    run = lowered(gm, made)
    for sizes in ((4, 5), (2, 7), (3, 3)):
        assert run(torch.zeros(sizes)).shape == (sum(sizes), 3)
