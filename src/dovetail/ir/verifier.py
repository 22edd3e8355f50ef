"""The verifier: checks every invariant of a graph that later steps rely on."""

from __future__ import annotations

import operator
from typing import Any, cast

from torch import nn
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidGraph, checked_call
from dovetail.ir.dependencies import Dependencies, dependencies
from dovetail.ir.effects import PURE
from dovetail.ir.graph_module import GraphOwner, attribute, graphs_of
from dovetail.ir.meta_keys import CANONICAL, OUTLINING, REGION
from dovetail.ir.nodes import compatible_values, format_type


@checked_call()
def check(gm: GraphModule | GraphOwner) -> None:
    """Raise InvalidGraph, naming the first node that breaks an invariant.

    Topological order, arguments that resolve, unique names, one output at the end, attributes that exist, bodies
    that fit their calls in count, dtype and shape, effects that dead-code elimination would keep, and, on captured
    graphs, `meta["val"]` on every node. Bodies are checked once each, nested ones included.
    """
    for graph in graphs_of(gm):
        _check(graph)


def _check(gm: GraphModule) -> None:
    # A graph that was never captured need not have values.
    captured = CANONICAL in gm.meta
    seen: set[int] = set()
    queue: list[tuple[str, GraphModule]] = [("", gm)]
    while queue:
        path, graph = queue.pop()
        if id(graph) in seen:
            continue
        seen.add(id(graph))
        queue.extend(_check_one(path, graph, captured))


def _check_one(path: str, gm: GraphModule, needs_values: bool) -> list[tuple[str, GraphModule]]:
    nodes: list[Node] = list(gm.graph.nodes)
    if not nodes or nodes[-1].op != "output":
        raise InvalidGraph(f"the graph {path or 'itself'} has no output at its end")
    place = f" (in {path})" if path else ""
    called: list[tuple[str, GraphModule]] = []
    names: set[str] = set()
    placed: set[Node] = set()
    for i, node in enumerate(nodes):
        if node.name in names:
            raise InvalidGraph(f"its name is used twice{place}", node.name)
        names.add(node.name)
        _check_arguments(node, placed, gm, place)
        placed.add(node)
        if (node.op == "output") != (i == len(nodes) - 1):
            raise InvalidGraph(f"the output must be the one last node{place}", node.name)
        if needs_values and "val" not in node.meta and node.op != "output":
            raise InvalidGraph(f"it has no meta['val']{place}", node.name)
        if node.op in ("get_attr", "call_module"):
            value = attribute(gm, cast("str", node.target))
            if value is None and not _is_empty_buffer(gm, cast("str", node.target)):
                raise InvalidGraph(f"nothing is at '{node.target}'{place}", node.name)
            if isinstance(value, GraphModule):
                called.append((f"{path}/{node.target}" if path else str(node.target), value))
                if node.op == "call_module":
                    _check_call(node, value, gm, place)
    _check_effects(gm, nodes, place)
    return called


def _check_arguments(node: Node, placed: set[Node], gm: GraphModule, place: str) -> None:
    for used in node.all_input_nodes:
        if used.graph is not gm.graph:
            raise InvalidGraph(f"it reads '{used.name}' of another graph{place}", node.name)
        if used not in placed:
            raise InvalidGraph(f"it reads '{used.name}', which comes later or was erased{place}", node.name)
        if node not in used.users:
            raise InvalidGraph(f"'{used.name}' does not list it among its users{place}", node.name)


def _value_read(gm: GraphModule, operand: Node, call: Node) -> Any:
    """Return the value of an operand where a call reads it."""
    nodes = list(gm.graph.nodes)
    before = nodes[: nodes.index(call)]  # what comes after is not checked yet
    return dependencies(gm, before).value_read(operand, len(before))


def _check_call(node: Node, body: GraphModule, gm: GraphModule, place: str) -> None:
    """Check a call's operands and results against the placeholders and results of its body."""
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    is_region = REGION in node.meta
    if is_region and (node.kwargs or len(node.args) != len(inputs)):
        raise InvalidGraph(
            f"it passes {len(node.args)} operands, its body takes {len(inputs)}{place}", node.name
        )
    for operand, parameter in zip(node.args, inputs, strict=False):
        if isinstance(operand, Node):
            have, want = operand.meta.get("val"), parameter.meta.get("val")
            if not compatible_values(have, want) and not compatible_values(
                _value_read(gm, operand, node), want
            ):
                raise InvalidGraph(
                    f"operand '{operand.name}' is {format_type(have)}, its body takes {format_type(want)} as '{parameter.name}'{place}",
                    node.name,
                )
    if not is_region:
        return
    returned: Any = body.graph.output_node().args[0]
    if not isinstance(returned, tuple):
        raise InvalidGraph(f"its body does not return a flat tuple{place}", node.name)
    results = cast("tuple[Any, ...]", returned)
    have = node.meta.get("val")
    want = tuple(n.meta.get("val") if isinstance(n, Node) else n for n in results)
    if have is not None and not compatible_values(have, want):
        raise InvalidGraph(
            f"its value is {format_type(have)}, its body returns {format_type(want)}{place}",
            node.name,
        )
    members = getattr(node.meta[REGION], "members", None)
    inside = len(body.graph.nodes) - len(inputs) - 1
    if members is not None and len(members) != inside:
        raise InvalidGraph(
            f"its region call lists {len(members)} operations, its body has {inside}{place}", node.name
        )
    for user in node.users:
        position = user.args[1] if len(user.args) == 2 else None
        if not isinstance(position, int):
            if user.target is operator.getitem and not isinstance(position, slice):
                raise InvalidGraph(
                    f"it takes a result from '{node.name}' that is not a number{place}", user.name
                )
            continue
        if not 0 <= position < len(results):
            raise InvalidGraph(
                f"it takes result {position} of {len(results)} from '{node.name}'{place}", user.name
            )
        if not compatible_values(user.meta.get("val"), want[position]):
            value = f"its value is {format_type(user.meta.get('val'))}"
            raise InvalidGraph(f"{value}, the body returns {format_type(want[position])}{place}", user.name)


def _is_empty_buffer(gm: GraphModule, target: str) -> bool:
    """Whether a target names a parameter or buffer that is None, as modules may register them."""
    path, _, name = target.rpartition(".")
    owner = attribute(gm, path) if path else gm
    return isinstance(owner, nn.Module) and (name in owner._buffers or name in owner._parameters)


def _certainly_ordered(graph: Dependencies, first: int, second: int) -> bool:
    """Whether two effects depend on each other for certain, not only by the approximation of alias classes."""
    a, b = graph.effects.get(first, PURE), graph.effects.get(second, PURE)
    if (a.random and b.random) or (a.host_effect and b.host_effect):
        return True
    wrote_first = set(a.writes).intersection(graph.nodes[second].all_input_nodes)
    return bool(wrote_first or set(b.writes).intersection(graph.nodes[first].all_input_nodes))


def _check_effects(gm: GraphModule, nodes: list[Node], place: str) -> None:
    graph = dependencies(gm, nodes)
    for i, effects in graph.effects.items():
        node = nodes[i]
        if REGION in node.meta and not effects.pure and not node.users and not node.is_impure():
            raise InvalidGraph(f"dead-code elimination would drop its effects{place}", node.name)
    ranks = getattr(gm.meta.get(OUTLINING), "ranks", None)
    if ranks is None:
        return
    # Where the original order is known, effects that depend on each other must still be in it.
    for i, earlier in graph.before.items():
        for j in earlier:
            first, second = ranks.get(nodes[j].name), ranks.get(nodes[i].name)
            if first is None or second is None or REGION in nodes[i].meta or REGION in nodes[j].meta:
                continue
            if first > second and _certainly_ordered(graph, j, i):
                why = graph.why(j, i)
                raise InvalidGraph(
                    f"its effect comes after that of '{nodes[j].name}' now ({why}){place}", nodes[i].name
                )
