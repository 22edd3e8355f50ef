"""Graphs without calls of regions: operations written out where the calls stood."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.graph.module import Body, attribute
from dovetail.outlining.bodies import results
from dovetail.outlining.record import Call, call_of
from dovetail.outlining.requests import is_projection

Keep = Callable[[str], Any]
"""What is called for the region of a name in place of its operations; None to write those out."""
Held = Callable[[Node, str], Node]
"""The node for an object that a body holds and that the outermost graph has at a target."""


class Flattener:
    """Writes operations into a graph, the bodies of regions in place of their calls.

    Objects that bodies hold are asked for as the outermost graph names them, so what that owns when it runs is what
    counts, and not what a body was made with.
    """

    def __init__(self, graph: Graph, keep: Keep, held: Held) -> None:
        self.graph, self.keep, self.held = graph, keep, held

    def write(self, owner: nn.Module, nodes: Iterable[Node], env: dict[Node, Any]) -> None:
        """Append operations of the outermost graph. `env` has what stands for each node."""
        for node in nodes:
            self._node(owner, node, env, "", call_of(node.meta), node.name, None)

    def write_body(
        self, body: Body, given: Sequence[Any], prefix: str = "", call: Call | None = None
    ) -> tuple[Any, ...]:
        """Append the operations of a body, called with what stands for its operands; its results.

        With the record of the call, nested regions are named and known as that call has them.
        """
        listed = list(body.graph.nodes)
        env: dict[Node, Any] = dict(zip((n for n in listed if n.op == "placeholder"), given, strict=True))
        rest = [n for n in listed if n.op not in ("placeholder", "output")]
        for i, node in enumerate(rest):
            # One body serves many calls: what a nested call is named and was made of is told by the outer call.
            meta, name = (
                (node.meta, node.name) if call is None else (call.members[i].meta, call.members[i].name)
            )
            self._node(body, node, env, prefix, call_of(meta), name, body.borrowed)
        return tuple(env[n] for n in results(body))

    def _node(
        self,
        owner: nn.Module,
        node: Node,
        env: dict[Node, Any],
        prefix: str,
        call: Call | None,
        name: str,
        borrowed: Mapping[str, str] | None,
    ) -> None:
        if call is not None:
            env[node] = self._call(owner, node, env, f"{prefix}{name}", call)
        elif borrowed is not None and node.op == "get_attr":
            env[node] = self.held(node, borrowed[cast("str", node.target)])
        elif is_projection(node) and isinstance(env.get(cast("Node", node.args[0])), tuple):
            env[node] = env[cast("Node", node.args[0])][cast("int", node.args[1])]
        else:
            target: Any = node.target
            if borrowed is not None and node.op == "call_module":
                target = borrowed[target]
            args, kwargs = (cast("Any", map_arg(v, env.__getitem__)) for v in (node.args, node.kwargs))
            label = f"{prefix}{name}".replace("/", "__")
            made = env[node] = self.graph.create_node(node.op, target, args, kwargs, label, node.type)
            made.meta = dict(node.meta)

    def _call(self, owner: nn.Module, node: Node, env: dict[Node, Any], name: str, call: Call) -> Any:
        body = cast("Body", attribute(owner, cast("str", node.target)))
        given = [env[a] for a in cast("tuple[Node, ...]", node.args)]
        kept = self.keep(name)
        if kept is None:
            return self.write_body(body, given, f"{name}/", call)
        lifted = [self.held(node, target) for target in kept.lifted]
        label = name.replace("/", "__")
        made = self.graph.create_node("call_function", kept, (*given, *lifted), name=label)
        made.meta = dict(node.meta)
        return made


def flat(body: Body) -> GraphModule:
    """A plain graph module with a body's operations, those of regions inside written out; it returns a tuple."""
    graph = Graph()
    operands: list[Node] = []
    objects: dict[str, Any] = {}
    named: dict[str, str] = {}
    for node in body.graph.nodes:
        if node.op == "placeholder":
            operand = graph.create_node("placeholder", node.name, name=node.name)
            operand.meta = dict(node.meta)
            operands.append(operand)

    def held(node: Node, target: str) -> Node:
        name = named.setdefault(target, f"held_{len(named)}")
        objects[name] = held_value(body, target)
        return graph.create_node("get_attr", name)

    graph.output(Flattener(graph, lambda _: None, held).write_body(body, operands))
    return GraphModule(objects, graph)


def held_value(body: Body, target: str) -> Any:
    """What a body, or one nested in it, holds of what the outermost graph has at `target`."""
    stack = [body]
    while stack:
        at = stack.pop()
        for name, held in at.borrowed.items():
            if held == target:
                return at.__dict__[name]
        stack.extend(m for m in at._modules.values() if isinstance(m, Body))
    return None
