"""Small graphs for tests, and the comparison that every outlining must pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Tracer

import dovetail


def trace(function: Callable[..., Any], root: torch.nn.Module | None = None) -> GraphModule:
    """An FX graph that never went through `capture`."""
    graph = Tracer().trace(root) if root is not None else Tracer().trace(function)
    return GraphModule(root or torch.nn.Module(), graph)


def names(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]


def node(gm: GraphModule, name: str) -> Any:
    return next(n for n in gm.graph.nodes if n.name == name)


def run(gm: GraphModule, *inputs: Any) -> tuple[Any, list[Any], dict[str, Any], torch.Tensor]:
    """Outputs, inputs after the run, state after the run and the random state after the run, on copies."""
    fresh, mine = copy.deepcopy(gm), [copy.deepcopy(x) for x in inputs]
    torch.manual_seed(7)
    out = fresh(*mine)
    return out, list(mine), dict(fresh.state_dict()), torch.get_rng_state()


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(_bits(a), _bits(b))
        )
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


def _bits(value: torch.Tensor) -> torch.Tensor:
    dense = value.detach().contiguous()
    return dense.reshape(-1).view(torch.uint8) if dense.numel() else dense


def same_meta(a: GraphModule, b: GraphModule) -> bool:
    pairs = zip(a.graph.nodes, b.graph.nodes, strict=True)
    return all(
        x.meta.keys() == y.meta.keys()
        and all(x.meta[k] is y.meta[k] or x.meta[k] == y.meta[k] for k in x.meta)
        for x, y in pairs
    )


def outlined(gm: GraphModule, request: Any, *inputs: Any, **options: Any) -> GraphModule:
    """Outline, and prove that nothing changed: values, state, randomness, the input graph, and the way back."""
    before, nodes = dovetail.text(gm), list(gm.graph.nodes)
    new = dovetail.outline(gm, request, **options)
    assert dovetail.text(gm) == before
    assert list(gm.graph.nodes) == nodes
    dovetail.check(new)
    assert equal(run(new, *inputs), run(gm, *inputs))
    back = new
    for region in dovetail.regions(new):
        if region.name not in {n.name for n in nodes}:
            back = dovetail.inline(back, region.name, depth=1)
    dovetail.check(back)
    assert dovetail.text(back) == before
    assert same_meta(gm, back)
    return new


def refused(gm: GraphModule, error: type[Exception], request: Any, **options: Any) -> str:
    """Outline in vain: the message, after proving that the graph is as it was."""
    before, nodes = dovetail.text(gm), list(gm.graph.nodes)
    with pytest.raises(error) as caught:
        dovetail.outline(gm, request, **options)
    assert isinstance(caught.value, dovetail.DovetailError)
    assert dovetail.text(gm) == before
    assert list(gm.graph.nodes) == nodes
    return str(caught.value)


def drawn(draw: Callable[[Graph], Any], **attributes: Any) -> GraphModule:
    """A graph written by hand: `draw` adds the nodes and returns what the graph returns."""
    graph = Graph()
    graph.output(draw(graph))
    root = torch.nn.Module()
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            if name.startswith("buffer"):
                root.register_buffer(name, value)
            else:
                setattr(root, name, value)
        else:
            setattr(root, name, value)
    return GraphModule(root, graph)
