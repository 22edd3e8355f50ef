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
    checked: set[int] = set()
    worklist: list[tuple[str, GraphModule]] = [("", gm)]
    while worklist:
        path, graph = worklist.pop()
        if id(graph) not in checked:
            checked.add(id(graph))
            worklist.extend(_Verifier(path, graph).check(captured))


class _Verifier:
    """Checks one graph, which is called at `path` of the outermost one."""

    def __init__(self, path: str, gm: GraphModule) -> None:
        self.path, self.gm = path, gm
        self.nodes: list[Node] = list(gm.graph.nodes)

    def error(self, node: Node, what: str) -> InvalidGraph:
        return InvalidGraph(f"{what} (in {self.path})" if self.path else what, node.name)

    def check(self, needs_values: bool) -> list[tuple[str, GraphModule]]:
        """Return the graphs that this one calls, with their paths."""
        if not self.nodes or self.nodes[-1].op != "output":
            raise InvalidGraph(f"the graph {self.path or 'itself'} has no output at its end")
        called: list[tuple[str, GraphModule]] = []
        names: set[str] = set()
        placed: set[Node] = set()
        for i, node in enumerate(self.nodes):
            if node.name in names:
                raise self.error(node, "its name is used twice")
            names.add(node.name)
            self._check_arguments(node, placed)
            placed.add(node)
            if (node.op == "output") != (i == len(self.nodes) - 1):
                raise self.error(node, "the output must be the one last node")
            if needs_values and "val" not in node.meta and node.op != "output":
                raise self.error(node, "it has no meta['val']")
            if node.op in ("get_attr", "call_module"):
                target = cast("str", node.target)
                value = attribute(self.gm, target)
                if value is None and not _is_empty_buffer(self.gm, target):
                    raise self.error(node, f"nothing is at '{target}'")
                if isinstance(value, GraphModule):
                    called.append((f"{self.path}/{target}" if self.path else target, value))
                    if node.op == "call_module":
                        self._check_call(i, node, value)
        self._check_effects()
        return called

    def _check_arguments(self, node: Node, placed: set[Node]) -> None:
        for used in node.all_input_nodes:
            if used.graph is not self.gm.graph:
                raise self.error(node, f"it reads '{used.name}' of another graph")
            if used not in placed:
                raise self.error(node, f"it reads '{used.name}', which comes later or was erased")
            if node not in used.users:
                raise self.error(node, f"'{used.name}' does not list it among its users")

    def _check_call(self, i: int, node: Node, body: GraphModule) -> None:
        """Check a call's operands and results against the placeholders and results of its body."""
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        is_region = REGION in node.meta
        if is_region and (node.kwargs or len(node.args) != len(inputs)):
            raise self.error(node, f"it passes {len(node.args)} operands, its body takes {len(inputs)}")
        for operand, parameter in zip(node.args, inputs, strict=False):
            if isinstance(operand, Node):
                have, want = operand.meta.get("val"), parameter.meta.get("val")
                if not compatible_values(have, want):
                    before = self.nodes[:i]  # what comes after is not checked yet
                    now = dependencies(self.gm, before).value_read(operand, i)
                    if not compatible_values(now, want):
                        takes = f"its body takes {format_type(want)} as '{parameter.name}'"
                        raise self.error(node, f"operand '{operand.name}' is {format_type(have)}, {takes}")
        if is_region:
            self._check_results(node, body, len(inputs))

    def _check_results(self, node: Node, body: GraphModule, inputs: int) -> None:
        returned: Any = body.graph.output_node().args[0]
        if not isinstance(returned, tuple):
            raise self.error(node, "its body does not return a flat tuple")
        results = cast("tuple[Any, ...]", returned)
        have = node.meta.get("val")
        want = tuple(n.meta.get("val") if isinstance(n, Node) else n for n in results)
        if have is not None and not compatible_values(have, want):
            raise self.error(node, f"its value is {format_type(have)}, its body returns {format_type(want)}")
        members = getattr(node.meta[REGION], "members", None)
        inside = len(body.graph.nodes) - inputs - 1
        if members is not None and len(members) != inside:
            raise self.error(node, f"its region call lists {len(members)} operations, its body has {inside}")
        for user in node.users:
            position = user.args[1] if len(user.args) == 2 else None
            if not isinstance(position, int):
                if user.target is operator.getitem and not isinstance(position, slice):
                    raise self.error(user, f"it takes a result from '{node.name}' that is not a number")
                continue
            if not 0 <= position < len(results):
                raise self.error(user, f"it takes result {position} of {len(results)} from '{node.name}'")
            have = user.meta.get("val")
            if not compatible_values(have, want[position]):
                returns = f"the body returns {format_type(want[position])}"
                raise self.error(user, f"its value is {format_type(have)}, {returns}")

    def _check_effects(self) -> None:
        nodes, graph = self.nodes, dependencies(self.gm, self.nodes)
        for i, effects in graph.effects.items():
            node = nodes[i]
            if REGION in node.meta and not effects.pure and not node.users and not node.is_impure():
                raise self.error(node, "dead-code elimination would drop its effects")
        ranks = getattr(self.gm.meta.get(OUTLINING), "ranks", None)
        if ranks is None:
            return
        # Where the original order is known, effects that depend on each other must still be in it.
        for i, earlier in graph.before.items():
            for j in earlier:
                first, second = ranks.get(nodes[j].name), ranks.get(nodes[i].name)
                if first is None or second is None or REGION in nodes[i].meta or REGION in nodes[j].meta:
                    continue
                if first > second and _certainly_ordered(graph, j, i):
                    why = f"'{nodes[j].name}' now ({graph.why(j, i)})"
                    raise self.error(nodes[i], f"its effect comes after that of {why}")


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
