"""`torch.no_grad()` blocks of an exported graph, laid flat so that decomposition cannot lose them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.graph.capturing.aliasing import know_readers, storage_of, written_by
from dovetail.graph.module import copy_node

_WRAP = "wrap_with_set_grad_enabled"


def flatten_no_grad(module: GraphModule) -> int:
    """Inline every gradient-mode block and detach what leaves a `no_grad` one; returns how many there were.

    Edits `module` and the graphs inside it. Values that leave a block get other names.
    """
    count = 0
    for owner in [module, *_inner_graphs(module)]:
        blocks = [n for n in owner.graph.nodes if _is_block(n)]
        if blocks:
            know_readers(owner.graph)
        for block in blocks:
            _inline_block(owner, block)
        if blocks:
            owner.recompile()
        count += len(blocks)
    return count


def _inner_graphs(module: GraphModule) -> list[GraphModule]:
    return [m for m in module.modules() if isinstance(m, GraphModule) and m is not module]


def _is_block(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == _WRAP


def _inline_block(owner: GraphModule, block: Node) -> None:
    enabled, body_node, *operands = cast(Any, block.args)
    body = cast(GraphModule, owner.get_submodule(body_node.target))
    graph = owner.graph
    mutates = any(_is_mutating(n) for n in body.graph.nodes)
    hold_back = not enabled
    given = list(operands)
    with graph.inserting_before(block):
        if hold_back and mutates:
            operands = [_detached(graph, n) if _holds_tensor(n) else n for n in operands]
        results = _splice(owner, body, operands, block)
        for user in list(block.users):
            index = cast(int, user.args[1])
            value = results[index]
            if hold_back and mutates:
                value = _own_tensor(value, dict(zip(operands, given, strict=True)))
            if hold_back and not mutates and isinstance(value, Node) and _holds_tensor(value):
                value = _fresh(graph, _detached(graph, value), operands, block)
            _take_over(user, value)
    graph.erase_node(block)
    if not body_node.users:
        graph.erase_node(body_node)


def _own_tensor(value: Any, given: dict[Any, Any]) -> Any:
    """The operand of a block itself where its result is that tensor after writes, with the history it had before."""
    at = value
    while isinstance(at, Node) and at not in given and _is_mutating(at):
        at = _returned_operand(at)
    return given[at] if isinstance(at, Node) and at in given else value


def _returned_operand(node: Node) -> Any:
    """The operand that an operation writes and returns, be it the first or `out`; None if it is not a single one."""
    schema = cast(OpOverload, node.target)._schema
    written = [
        i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    if len(schema.returns) != 1 or schema.returns[0].alias_info is None or len(written) != 1:
        return None
    at = written[0]
    return node.args[at] if at < len(node.args) else node.kwargs.get(schema.arguments[at].name)


def _splice(owner: GraphModule, body: GraphModule, operands: list[Any], block: Node) -> list[Any]:
    """Copy the nodes of `body` before `block`; returns what its output names."""
    made: dict[Node, Any] = {}
    free = iter(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            made[node] = next(free)
        elif node.op == "output":
            results = map_arg(node.args[0], made.__getitem__)
            return list(results) if isinstance(results, (list, tuple)) else [results]
        else:
            new = copy_node(owner.graph, node, made.__getitem__)
            if node.op == "get_attr":
                new.target = _moved(owner, body, cast(str, node.target))
            if "nn_module_stack" not in new.meta and "nn_module_stack" in block.meta:
                new.meta["nn_module_stack"] = block.meta["nn_module_stack"]
            made[node] = new
    return []


def _moved(owner: GraphModule, body: GraphModule, target: str) -> str:
    """Make the attribute of `body` one of `owner` too, under a free name."""
    name = base = target.replace(".", "_")
    count = 0
    while hasattr(owner, name):
        count += 1
        name = f"{base}_{count}"
    setattr(owner, name, operator.attrgetter(target)(body))
    return name


def _take_over(user: Node, value: Any) -> None:
    """Let `value` stand for the getitem `user`."""

    def swap(node: Node) -> Any:
        return value if node is user else node

    for other in list(user.users):
        other.args = map_arg(other.args, swap)
        other.kwargs = map_arg(other.kwargs, swap)
    user.graph.erase_node(user)


def _detached(graph: Graph, node: Node) -> Node:
    new = graph.call_function(torch.ops.aten.detach.default, (node,))
    new.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace", "nn_module_stack")}
    if new.meta["val"].requires_grad:
        new.meta["val"] = new.meta["val"].detach()
    return new


def _fresh(graph: Graph, node: Node, operands: list[Any], block: Node) -> Node:
    """A result of a block in memory of its own if something is written into it after the block, with gradients.

    A write goes through to what a value is a view of, and what is seen of that through `detach` has none.
    """
    place = storage_of(node.meta["val"])
    read = {storage_of(n.meta["val"]) for n in operands if _holds_tensor(n)}
    if place in read or not any(place in written_by(n) for n in _after(block)):
        return node
    new = graph.call_function(torch.ops.aten.clone.default, (node,))
    new.meta = dict(node.meta)
    return new


def _after(node: Node) -> Iterator[Node]:
    while (node := node.next).op != "root":
        yield node


def _holds_tensor(value: object) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor)


def _is_mutating(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
