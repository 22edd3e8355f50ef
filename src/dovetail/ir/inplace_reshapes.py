"""Which values of a graph are one tensor object, and where sizes or strides of these are changed in place.

After `x.t_()` every value that is the object `x` has other sizes, also those whose nodes come before; views of its memory
keep theirs. Objects are followed through operators that return an operand they write, and through the bodies of calls, which
may return an operand, or one object as two results. Operators that may return their operand or a copy (`to`,
`contiguous`, `reshape`) put both into one cluster, in the manner of a must-alias analysis beside a may-alias one: after a
change of one member the values of the others are not known. So are operands of one shape, unless the caller of the graph is
analyzed too. One pass over the graph and each distinct body.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx import GraphModule, Node

from dovetail.ir.effects import PURE, Effects
from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import compatible_values
from dovetail.ir.op_traits import traits_of
from dovetail.ir.quotient_graph import UnionFind

if TYPE_CHECKING:
    from dovetail.ir.dependencies import Dependencies

Change = tuple[int, int, Any]
"""A position, the object that the node there changes, and its value afterwards: None if that is not known."""


class InplaceReshapes:
    """The tensor objects of a graph and their changes; `analyze` returns the dependencies of a graph that is called.

    `distinct_operands`: placeholders are known to be distinct objects.
    """

    def __init__(
        self,
        graph: Dependencies,
        analyze: Callable[[GraphModule], Dependencies],
        *,
        distinct_operands: bool = False,
    ) -> None:
        self._graph = graph
        self._objects: dict[Node, int] = {}
        self._clusters = UnionFind(0)
        self._results: dict[Node, list[int | None]] = {}
        self._changes: dict[int, list[Change]] = {}
        bodies: dict[int, _Body] = {}
        changes: list[Change] = []
        operands: dict[Any, int] = {}
        for i, node in enumerate(graph.nodes):
            body = self._called_body(node, bodies, analyze)
            if body is not None:
                changes.extend(self._add_call(i, node, body))
                continue
            effects = graph.effects.get(i, PURE)
            new = self._objects[node] = self._object(node, effects)
            if node.op == "placeholder" and not distinct_operands:
                self._clusters.union(new, operands.setdefault(_form(node.meta.get("val")), new))
            if i in graph.reshaping:
                objects = [self._objects[written] for written in effects.writes]
                changes.extend((i, o, node.meta.get("val") if o == new else None) for o in objects)
        for change in changes:
            self._changes.setdefault(self._clusters.find(change[1]), []).append(change)

    def value(self, node: Node, position: int, region: Collection[int] = ()) -> Any:
        """Return the fake value of `node` before the node at `position` runs, None if it is not known.

        Changes by the nodes of a region are left out.
        """
        tensor = self._objects[node]
        changes = self._changes.get(self._clusters.find(tensor), [])
        latest = bisect_left(changes, position, key=operator.itemgetter(0)) - 1
        while latest >= 0 and changes[latest][0] in region:
            latest -= 1
        # What a call returns has been changed by all of its body.
        returned_by = node.args[0] if node.args and node.args[0] in self._results else node
        if latest < 0 or changes[latest][0] < self._graph.position[returned_by]:
            return node.meta.get("val")
        return changes[latest][2] if changes[latest][1] == tensor else None

    def is_changed(self, node: Node) -> bool:
        """Whether some node of the graph may change the sizes or strides of a value."""
        return self._clusters.find(self._objects[node]) in self._changes

    def _object(self, node: Node, effects: Effects) -> int:
        """Return the object that a node returns: an earlier one, or a new one in the cluster of those it may be."""
        if node.target is operator.getitem and node.args[0] in self._results:
            results, index = self._results[node.args[0]], node.args[1]
            known = results[index] if isinstance(index, int) and index < len(results) else None
            return self._clusters.add() if known is None else known
        is_in_place = len(effects.writes) == 1 and effects.writes == effects.aliases
        if is_in_place and node.op in ("call_function", "call_method"):
            return self._objects[effects.writes[0]]
        new = self._clusters.add()
        for source in effects.aliases:
            if _may_return(node, source):
                self._clusters.union(new, self._objects[source])
        return new

    def _add_call(self, i: int, node: Node, body: _Body) -> list[Change]:
        """Add the objects that a call returns, and return the changes by its body."""
        outer: dict[int, int] = {}
        for index, (parameter, inner) in enumerate(body.parameters):
            operand = node.args[index] if index < len(node.args) else node.kwargs.get(str(parameter.target))
            outer[inner] = self._objects[operand] if isinstance(operand, Node) else self._clusters.add()
        for inner in body.results:
            if inner is not None and inner not in outer:
                outer[inner] = self._clusters.add()
        clusters: dict[int, int] = {}
        for inner, tensor in outer.items():
            self._clusters.union(clusters.setdefault(body.cluster(inner), tensor), tensor)
        results = [None if inner is None else outer[inner] for inner in body.results]
        if body.returns_tuple:
            self._results[node] = results
            self._objects[node] = self._clusters.add()
        else:
            self._objects[node] = self._clusters.add() if results[0] is None else results[0]
        return [
            (i, tensor, body.final_values[inner])
            for inner, tensor in outer.items()
            if inner in body.final_values
        ]

    def _called_body(
        self, node: Node, bodies: dict[int, _Body], analyze: Callable[[GraphModule], Dependencies]
    ) -> _Body | None:
        body = attribute(self._graph.root, cast("str", node.target)) if node.op == "call_module" else None
        if not isinstance(body, GraphModule):
            return None
        if id(body) not in bodies:
            # Which operands are one object is seen in this graph.
            bodies[id(body)] = _Body(InplaceReshapes(analyze(body), analyze, distinct_operands=True))
        return bodies[id(body)]


class _Body:
    """What a caller sees of the objects of a graph: its placeholders, its results, and their values when it returns."""

    def __init__(self, reshapes: InplaceReshapes) -> None:
        nodes, objects = reshapes._graph.nodes, reshapes._objects
        returned: Any = nodes[-1].args[0]
        self.cluster = reshapes._clusters.find
        self.parameters = [(n, objects[n]) for n in nodes if n.op == "placeholder"]
        self.returns_tuple = isinstance(returned, (tuple, list))
        results: list[Any] = list(returned) if self.returns_tuple else [returned]
        self.results = [objects[n] if isinstance(n, Node) else None for n in results]
        self.final_values: dict[int, Any] = {
            objects[n]: reshapes.value(n, len(nodes))
            for n in (*(n for n, _ in self.parameters), *results)
            if isinstance(n, Node) and reshapes.is_changed(n)
        }


def _form(value: Any) -> Any:
    """Return what two values agree in if they may be one tensor object; None for what is not a tensor of static form."""
    is_static = isinstance(value, torch.Tensor) and all(type(n) is int for n in value.shape)
    return (tuple(value.shape), value.dtype, value.device) if is_static else None


def _may_return(node: Node, source: Node) -> bool:
    """Whether the result of a node may be its operand itself, not a view of it."""
    traits = traits_of(node)
    value = source.meta.get("val")
    if node.target is operator.getitem and isinstance(value, torch.Tensor):
        return False
    if not (traits.composite or traits.aliases is None or traits.gathers):
        return False
    return not isinstance(value, torch.Tensor) or compatible_values(value, node.meta.get("val"))
