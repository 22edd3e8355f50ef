"""Batch norm in train mode by the kernel that the model itself runs on a GPU."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from dovetail.graph.normalform import by_name

_NATIVE = torch.ops.aten._native_batch_norm_legit_functional.default
_CHOOSING = torch.ops.aten._batch_norm_with_update_functional.default
# Results of the first operator and where the second has them: output, mean, inverse deviation, new statistics.
_MOVED = {0: 0, 1: 1, 2: 2, 3: 4, 4: 5}


def choose_kernel_as_eager(graph: Graph) -> None:
    """Replace the decomposed batch norm on CUDA by the one that picks cuDNN where eager mode does.

    The decomposition always takes the native kernel, which rounds differently. On a CPU there is but one.
    """
    for node in graph.find_nodes(op="call_function", target=_NATIVE):
        values = cast("tuple[Any, ...]", node.meta.get("val") or ())
        arguments = by_name(node)
        on_gpu = bool(values) and isinstance(values[0], Tensor) and values[0].device.type == "cuda"
        only_items = all(user.target is operator.getitem for user in node.users)
        if on_gpu and only_items and arguments["training"] is True:
            _replace(graph, node, arguments, values)


def _replace(graph: Graph, node: Node, arguments: dict[str, Any], values: tuple[Any, ...]) -> None:
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    with graph.inserting_before(node):
        new = graph.create_node("call_function", _CHOOSING, tuple(arguments[name] for name in names))
    with values[0].fake_mode:
        reserve = torch.empty(0, dtype=torch.uint8, device=values[0].device)
    new.meta = {**node.meta, "val": (*values[:3], reserve, *values[3:])}
    for user in list(node.users):
        user.args = (new, _MOVED[cast(int, user.args[1])])
    graph.erase_node(node)
