"""Small graphs for readable tests, and what every outlining of one must keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import dovetail


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(2, -2, 6).reshape(2, 3)


def traced(function: Callable[..., Any]) -> GraphModule:
    """The graph as written: Python functions and methods, no values."""
    return symbolic_trace(function)


def with_values(function: Callable[..., Any]) -> GraphModule:
    """The same, with a fake value on every node, the output's too."""
    gm = symbolic_trace(function)
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs())
    for node in gm.graph.nodes:
        node.meta.setdefault("val", None)
    return gm


def same_program(before: GraphModule, after: GraphModule) -> None:
    """The graph with regions runs like the one without, holds together, and can be undone."""
    runs = []
    for gm in (before, after):
        given = inputs()
        torch.manual_seed(0)
        runs.append((gm(*given), given, torch.rand(1)))
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0, equal_nan=True)
    dovetail.check(after)
    assert dovetail.text(dovetail.inline(after)) == dovetail.text(before)


def call(graph: Graph, name: str, target: Any, *args: Any, **kwargs: Any) -> Node:
    return graph.create_node("call_function", target, args, kwargs, name=name)
