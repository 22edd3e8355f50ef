"""What every pass must keep, and small graphs to try it on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

import dovetail
from dovetail.ir.graph_module import Program, copy_graph, rebuild
from dovetail.ir.op_traits import base_name
from dovetail.passes.graph_equality import same_graph
from dovetail.passes.pass_manager import Finding, Pass

aten = torch.ops.aten


def captured(model: Callable[..., Any], *inputs: Any, **options: Any) -> GraphModule:
    if isinstance(model, nn.Module):
        model.eval()
    return dovetail.capture(model, inputs, **options)


def called(gm: GraphModule) -> list[str]:
    """The operations of a graph by name, in order, without what only fetches or returns."""
    return [base_name(n) for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def node(gm: GraphModule, name: str) -> Node:
    return next(n for n in gm.graph.nodes if n.name == name)


def applied(step: Pass, gm: GraphModule, *inputs: Any, tolerance: float = 1e-5) -> GraphModule:
    """Apply a pass and prove what every pass promises: the input untouched, values, state and its names kept."""
    before, nodes = dovetail.text(gm), list(gm.graph.nodes)
    new = step(gm)
    assert dovetail.text(gm) == before
    assert list(gm.graph.nodes) == nodes
    dovetail.check(new)
    assert list(new.state_dict()) == list(gm.state_dict())
    want, got = run(gm, *inputs), run(new, *inputs)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert same_graph(step(new), new), "applied again it changes something more"
    return new


def left_alone(step: Pass, gm: GraphModule) -> str:
    """Apply a pass in vain: the reasons, after proving that it returned the very graph."""
    assert step(gm) is gm
    findings = step.explain(gm)
    assert not any(finding.taken for finding in findings)
    return "; ".join(finding.reason for finding in findings)


def run(gm: GraphModule, *inputs: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """Outputs, inputs after the run and state after the run, on copies."""
    fresh, mine = copy.deepcopy(gm), [copy.deepcopy(x) for x in inputs]
    torch.manual_seed(7)
    return fresh(*mine), list(mine), dict(fresh.state_dict())


def gradients(gm: GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    """The gradients of every parameter, for a loss that weighs each result differently."""
    gm.zero_grad()
    torch.manual_seed(3)
    out = gm(*inputs)
    results = [out] if isinstance(out, torch.Tensor) else list(out)
    sum((r * torch.linspace(-1, 1, r.numel()).reshape(r.shape)).sum() for r in results).backward()
    gradients_by_name = {name: p.grad for name, p in gm.named_parameters()}
    gm.zero_grad()
    return gradients_by_name


def drawn(draw: Callable[[Graph], Any], *inputs: Any, **attributes: Any) -> GraphModule:
    """A graph of ATen operations written by hand, with values from the inputs."""
    graph = Graph()
    graph.output(draw(graph))
    root = nn.Module()
    for name, value in attributes.items():
        if isinstance(value, (nn.Parameter, nn.Module)):
            setattr(root, name, value)
        else:
            root.register_buffer(name, value)
    gm = GraphModule(root, graph)
    return dovetail.capture(gm, inputs) if inputs else gm


@dataclass(frozen=True, repr=False)
class Rename(Pass):
    """Give a function another one's place: a change that shows in the text."""

    old: Any
    new: Any

    def run(self, gm: GraphModule) -> GraphModule:
        new = copied(gm)
        for n in new.graph.nodes:
            if n.target is self.old:
                n.target = self.new
        return new

    def explain(self, gm: GraphModule) -> tuple[Finding, ...]:
        return tuple(Finding((n.name,), "renamed") for n in gm.graph.nodes if n.target is self.old)


@dataclass(frozen=True, repr=False)
class Nothing(Pass):
    """A copy of the graph."""

    def run(self, gm: GraphModule) -> GraphModule:
        return copied(gm)


def copied(gm: GraphModule) -> Program:
    return rebuild(gm, copy_graph(gm.graph))
