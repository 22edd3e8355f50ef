"""Whether a graph has changed is derived: what counts, and what does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import dovetail
from dovetail.ir.graph_module import Program
from dovetail.passes.graph_equality import same_graph

from .helpers import aten, captured, copied, node


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.first(x)) * 2.0 + torch.relu(self.second(x)).sum(0)


@functools.cache
def graph() -> GraphModule:
    return captured(Model(), torch.randn(2, 3))


def test_a_copy_is_the_same() -> None:
    gm = graph()
    assert same_graph(gm, gm)
    assert same_graph(gm, copied(gm))
    assert same_graph(gm, dovetail.inline(dovetail.outline(gm, ["relu", "mul"], kind="pair")))


def test_names_of_nodes_and_what_the_graph_remembers_do_not_count() -> None:
    gm, new = graph(), copied(graph())
    node(new, "relu")._rename("another")
    new.meta["note"] = "mine"
    assert same_graph(gm, new)


def test_regions_are_compared_by_what_they_are_and_compute() -> None:
    gm = graph()
    once = dovetail.outline(gm, ["relu", "mul"], kind="pair")
    again = dovetail.outline(dovetail.inline(once), ["relu", "mul"], kind="pair")
    assert [r.name for r in dovetail.regions(once)] != [r.name for r in dovetail.regions(again)]
    assert same_graph(once, again)
    assert not same_graph(once, gm)
    assert not same_graph(once, dovetail.outline(gm, ["relu", "mul"], kind="twins"))
    assert not same_graph(once, dovetail.outline(gm, ["relu", "mul"], kind="pair", attrs={"n": 1}))
    assert not same_graph(once, dovetail.outline(gm, ["relu", "mul", "add"], kind="pair"))


def _retarget(gm: Program) -> None:
    node(gm, "relu").target = aten.tanh.default


def _literal(gm: Program) -> None:
    node(gm, "mul").update_arg(1, 2)  # an int where a float was


def _sign(gm: Program) -> None:
    node(gm, "mul").update_arg(1, -2.0)


def _operand(gm: Program) -> None:
    node(gm, "add").update_arg(0, node(gm, "relu"))


def _order(gm: Program) -> None:
    node(gm, "linear").prepend(node(gm, "linear_1"))


def _meta(gm: Program) -> None:
    node(gm, "relu").meta["mark"] = 1


def _value(gm: Program) -> None:
    value = node(gm, "relu").meta["val"]
    with value.fake_mode:
        node(gm, "relu").meta["val"] = torch.empty(2, 3, dtype=torch.float64)


def _attribute(gm: Program) -> None:
    node(gm, "first_weight").target = "second.weight"


def _state(gm: Program) -> None:
    gm.register_buffer("more", torch.zeros(1))


def _extra(gm: Program) -> None:
    with gm.graph.inserting_after(node(gm, "relu")):
        gm.graph.call_function(aten.sin.default, (node(gm, "relu"),))


@pytest.mark.parametrize(
    "edit",
    [_retarget, _literal, _sign, _operand, _order, _meta, _value, _attribute, _state, _extra],
)
def test_what_counts_as_a_change(edit: Callable[[Any], None]) -> None:
    gm, new = graph(), copied(graph())
    edit(new)
    assert not same_graph(gm, new)
    assert not same_graph(new, gm)
    assert same_graph(new, copied(new))


def test_what_is_declared_counts() -> None:
    gm = graph()
    assert not same_graph(gm, dovetail.declare(gm, {aten.relu.default: "ordered"}))
