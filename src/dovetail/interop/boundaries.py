"""What a call was given and gave, kept in sight while a program that makes calls becomes one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dovetail.graph.module import copy_graph, rebuild

OPERAND, RESULT = "operand", "result"
Boundaries = dict[tuple[str, str, int], str]
"""By the path of a call, what of it, and its number: the name of the node that has the value."""


def marked(path: str, what: str, values: Sequence[Any]) -> list[Any]:
    """Values of a call, each tensor passed through a mark that stands in the graph that is captured."""
    mark = _mark()
    return [mark(v, path, what, i) if isinstance(v, Tensor) else v for i, v in enumerate(values)]


def unmarked(gm: GraphModule) -> tuple[GraphModule, Boundaries]:
    """The graph without marks, and what they marked."""
    mark, graph = _mark(), copy_graph(gm.graph)
    found: Boundaries = {}
    for node in list(graph.nodes):
        if node.target is not mark:
            continue
        # Those before it are gone already, so this is the value itself.
        value, path, what, number = cast("tuple[Node, str, str, int]", node.args)
        found[path, what, number] = value.name
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    return rebuild(gm, graph), found


@functools.cache
def _mark() -> Callable[..., Any]:
    """An operator that is its operand, laid out in memory alike, and never run."""

    @torch.library.custom_op("dovetail::mark", mutates_args=())
    def mark(value: Tensor, path: str, what: str, number: int) -> Tensor:
        return value.clone()

    @mark.register_fake
    def _(value: Tensor, path: str, what: str, number: int) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    return cast("Any", torch.ops.dovetail.mark.default)
