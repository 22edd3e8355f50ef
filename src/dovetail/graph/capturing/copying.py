"""Writes of whole tensors in a form that has a gradient: the one that functionalisation leaves has none."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node

_COPY = torch.ops.aten.copy.default
_KEPT = ("stack_trace", "nn_module_stack", "custom")


def make_differentiable(graph: Graph) -> None:
    """Replace `copy` of floating numbers by operators that compute the same, with gradients and strides as in place.

    Where sizes that are not numbers would have to be spread it stays.
    """
    for node in graph.find_nodes(op="call_function", target=_COPY):
        target, source = cast("tuple[Node, Node]", node.args[:2])
        has, reads = target.meta.get("val"), source.meta.get("val")
        if not isinstance(has, Tensor) or not isinstance(reads, Tensor) or not has.dtype.is_floating_point:
            continue
        is_spread = tuple(reads.shape) != tuple(has.shape)
        if is_spread and any(isinstance(size, SymInt) for size in has.shape):
            continue
        with graph.inserting_before(node):
            if reads.dtype != has.dtype or reads.device != has.device:
                form = {"dtype": has.dtype, "device": has.device}
                source = _call(graph, node, torch.ops.aten._to_copy.default, (source,), form)
            if is_spread:
                source = _call(graph, node, torch.ops.aten.expand.default, (source, list(has.shape)), {})
            if has.dim():
                new = _call(graph, node, torch.ops.aten.slice_scatter.default, (target, source), {})
            else:
                new = _call(graph, node, torch.ops.aten.clone.default, (source,), {})
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _call(graph: Graph, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    new = graph.call_function(target, args, kwargs)
    new.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
    with node.meta["val"].fake_mode:
        new.meta["val"] = target(*values, **kwargs)
    return new
