"""Calls with `out=`, in a form that functionalisation keeps the shape and strides of.

Functionalisation puts the result of the functional operator where `out` was, whatever its shape and strides. Eager mode
writes into `out` as it is, and resizes it where the shape is another, which for a view means another part of its memory.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from dovetail.graph.capturing.alias_groups import refused
from dovetail.graph.capturing.aliasing import rename_results, storage_of

_KEPT = ("stack_trace", "nn_module_stack", "custom")


def refuse_resizing(program: ExportedProgram) -> None:
    """Raise for a call that resizes `out`, unless that is a new tensor without elements and without other views."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, GraphModule)]
    for node in [n for graph in graphs for n in graph.nodes]:
        for name, result in _results(node).items():
            given: Any = cast(Node, node.kwargs[name]).meta.get("val")
            if _has_other_shape(given, result) and not _is_new_and_empty(given, graphs):
                raise refused(
                    f"forward gives {node.target} an `{name}` of shape {tuple(given.shape)} for a result of shape "
                    f"{tuple(result.shape)}, and a graph cannot resize a tensor",
                    node,
                    f"Give a tensor of the right shape, or leave `{name}` out.",
                )


def _results(node: Node) -> dict[str, Any]:
    """The result of a call for each of the tensors that it is given as `out`."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return {}
    names = [a.name for a in node.target._schema.arguments if a.is_out]
    value = node.meta.get("val")
    parts: Any = value if isinstance(value, (list, tuple)) else (value,)
    pairs = zip(names, parts, strict=False)
    return {name: part for name, part in pairs if isinstance(node.kwargs.get(name), Node)}


def _has_other_shape(given: Any, result: Any) -> bool:
    if not isinstance(given, Tensor) or not isinstance(result, Tensor):
        return False
    # As text, since comparing symbols would add guards.
    return [str(size) for size in given.shape] != [str(size) for size in result.shape]


def _is_new_and_empty(value: Tensor, graphs: list[Graph]) -> bool:
    place = storage_of(value)
    nodes = [n for graph in graphs for n in graph.nodes if _place(n) == place]
    nodes = [n for n in nodes if n.op != "placeholder" or n.graph is graphs[0]]
    is_new = nodes[0].op == "call_function" and _is_empty(nodes[0].meta["val"])
    return is_new and not any(_is_empty(n.meta["val"]) for n in nodes[1:])


def _is_empty(value: Tensor) -> bool:
    return any(type(size) is int and size == 0 for size in value.shape)


def _place(node: Node) -> int | None:
    value = node.meta.get("val")
    return storage_of(value) if isinstance(value, Tensor) else None


def keep_strides(program: ExportedProgram) -> None:
    """Let calls write into contiguous memory that is copied to `out` if the result of the functional operator might have
    other strides than that, or if random numbers were drawn there, which nothing would keep; edits the program's graph."""
    drawn = {_place(n) for n in program.graph.nodes if _is_random(n)} - {None}
    calls = [n for n in program.graph.nodes if _may_differ_in_strides(n) or _writes_any(n, drawn)]
    for node in calls:
        _write_into_fresh_memory(program.graph, node)
    if calls:
        program.graph_module.recompile()
        rename_results(program)


def _is_random(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _writes_any(node: Node, places: set[int | None]) -> bool:
    operands = [cast(Node, node.kwargs[name]) for name in _results(node)]
    return not _is_random(node) and any(_place(operand) in places for operand in operands)


def _may_differ_in_strides(node: Node) -> bool:
    results = _results(node)
    if not results or _is_random(node):
        return False
    values = [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [v for v in values if isinstance(v, Tensor) and v.layout is torch.strided]
    if any(isinstance(size, SymInt) for v in tensors for size in (*v.shape, *v.stride())):
        return False
    if any(
        _has_other_shape(cast(Node, node.kwargs[name]).meta.get("val"), results[name]) for name in results
    ):
        return False
    return not all(v.is_contiguous() for v in tensors)


def _write_into_fresh_memory(graph: Graph, node: Node) -> None:
    meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    results = _results(node)
    for position, name in enumerate(results):
        operand = cast(Node, node.kwargs[name])
        given = operand.meta["val"]
        form: dict[str, Any] = {"memory_format": torch.contiguous_format}
        with graph.inserting_before(node):
            fresh = graph.call_function(torch.ops.aten.empty_like.default, (operand,), form)
        with given.fake_mode:
            value = torch.empty_like(given, **form)
        fresh.meta = {**meta, "val": value}
        node.update_kwarg(name, fresh)
        items = [node]
        if isinstance(node.meta["val"], (list, tuple)):
            items = [user for user in node.users if user.args[1] == position] or [
                _item(graph, node, position)
            ]
        for item in items:
            item.meta["val"] = value
            with graph.inserting_after(item):
                copy = graph.call_function(torch.ops.aten.copy_.default, (operand, item))
            copy.meta = {**meta, "val": given}
            item.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _item(graph: Graph, node: Node, position: int) -> Node:
    with graph.inserting_after(node):
        item = graph.call_function(operator.getitem, (node, position))
    item.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    return item
