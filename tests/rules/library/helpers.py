"""What a rule makes of a function: the widest match, moved into a region and run; or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

import dovetail
from dovetail.rules.rule import Candidate, Refusal, Rule
from dovetail.rules.scene import Scene
from tests.outlining.helpers import equal

Model = Callable[..., Any]


def graph_of(model: Model, inputs: tuple[Any, ...]) -> GraphModule:
    return model if isinstance(model, GraphModule) else dovetail.capture(model, inputs)


def proposals(rules: Rule | Iterable[Rule], graph: GraphModule) -> list[Candidate | Refusal]:
    scene = Scene(graph)
    return [p for rule in ([rules] if isinstance(rules, Rule) else rules) for p in rule.propose(scene)]


def candidates(rules: Rule | Iterable[Rule], graph: GraphModule) -> list[Candidate]:
    """What is proposed, the widest first."""
    found = [p for p in proposals(rules, graph) if isinstance(p, Candidate)]
    return sorted(found, key=lambda c: -len(c.members))


def member_names(graph: GraphModule, found: Candidate) -> list[str]:
    nodes = list(graph.graph.nodes)
    return [nodes[i].name for i in found.members]


def left_over(graph: GraphModule, found: Candidate) -> list[str]:
    """The operators that are not part of a match."""
    nodes = list(graph.graph.nodes)
    rest = [n for i, n in enumerate(nodes) if i not in found.members and n.op == "call_function"]
    return [getattr(n.target, "_opname", getattr(n.target, "__name__", "")) for n in rest]


def found(rule: Rule, model: Model, *inputs: Any, leaving: Iterable[str] = ()) -> dict[str, Any]:
    """The attributes of the widest match, which must take in every operation but those named `leaving`.

    The match is outlined and run: same values, same random numbers; the graph it was found in stays as it was.
    """
    graph = graph_of(model, inputs)
    before = dovetail.text(graph)
    every = candidates(rule, graph)
    assert every, [p.reason for p in proposals(rule, graph) if isinstance(p, Refusal)]
    widest = every[0]
    assert sorted(left_over(graph, widest)) == sorted(leaving)
    fused = dovetail.outline(
        graph,
        member_names(graph, widest),
        kind=widest.kind,
        attrs=widest.attrs,
        version=widest.version,
        escapes=widest.escapes,
    )
    assert [r.kind for r in dovetail.regions(fused)] == [widest.kind]
    assert equal(_run(fused, inputs), _run(graph, inputs))
    if not isinstance(model, GraphModule):
        assert equal(_run(fused, inputs), _run(model, inputs))
    assert dovetail.text(graph) == before
    assert widest.rule == rule.name
    assert widest.kind == rule.kind
    return dict(widest.attrs or {})


def refused(rule: Rule, model: Model, *inputs: Any) -> list[Refusal]:
    """The near-misses of a rule that must not match anything."""
    told = proposals(rule, graph_of(model, inputs))
    assert not [p for p in told if isinstance(p, Candidate)]
    return [p for p in told if isinstance(p, Refusal)]


def why(rule: Rule, model: Model, *inputs: Any) -> str:
    """The reason of the nearest miss."""
    missed = refused(rule, model, *inputs)
    assert missed, "nothing was said of it"
    return max(missed, key=lambda r: r.matched).reason


def _run(model: Model, inputs: tuple[Any, ...]) -> list[Any]:
    torch.manual_seed(3)
    training = model.training if isinstance(model, nn.Module) else False
    with torch.no_grad():
        made = model(*inputs)
    if isinstance(model, nn.Module):
        assert model.training == training
    return [made] if isinstance(made, torch.Tensor) else list(made)
