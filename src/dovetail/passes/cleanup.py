"""Cleanup: dead code elimination, common subexpression elimination by value numbering, and removal of no-op views.

One backward sweep marks live nodes, one forward sweep numbers values by operator, arguments and effect edges (Alpern,
Wegman and Zadeck, "Detecting equality of variables in programs", POPL 1988, in the local hash-based form). Linear in
the nodes and edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node

from dovetail.errors import checked_init
from dovetail.ir.alias_analysis import alias_classes
from dovetail.ir.dependencies import Index
from dovetail.ir.effects import PURE, is_subgraph
from dovetail.ir.graph_module import attribute, copy_node, pause_gc, rebuild, require_graph
from dovetail.ir.nodes import storage_key, storage_keys
from dovetail.ir.op_traits import MAY_RETURN_OPERAND, base_name
from dovetail.ir.schema import same_geometry
from dovetail.ir.shape_prop import fake_inference, fake_mode, rebase_storages
from dovetail.outlining.region import call_of, literal, state_of, with_state
from dovetail.passes.pass_manager import Pass


@checked_init()
@dataclass(frozen=True, repr=False)
class Cleanup(Pass):
    """Remove dead code, compute equal expressions once, and remove views that change nothing.

    Needs: nothing; where memory or values are not known it changes less. Leaves: every value, effect, random draw,
    write and result as it was, bit for bit; results that were separate tensors still are. An operation that draws at
    random or has an effect stays even if nothing reads it. The pass is idempotent.
    """

    def run(self, gm: GraphModule) -> GraphModule:
        """Return the cleaned-up graph; the input graph itself if there is nothing to remove."""
        with pause_gc():
            index = Index(require_graph(gm))
            index.require_order()
            gm = _without_dead(index)
            sweep = _ValueNumbering(index if gm is index.gm else Index(gm))
            sweep.run()
            if not sweep.merged:
                return gm
            return _without_dead(Index(rebuild(gm, sweep.graph, meta=_meta_with_ranks(gm, sweep.graph))))


def _live(index: Index) -> list[bool]:
    """Return for each position whether something depends on it, or it has an effect."""
    effects = index.dependencies.effects
    live = [False] * len(index)
    for i in range(len(index) - 1, -1, -1):
        if live[i] or index.nodes[i].op in ("placeholder", "output") or not effects.get(i, PURE).pure:
            live[i] = True
            for j in index.data[i]:
                live[j] = True
    return live


def _without_dead(index: Index) -> GraphModule:
    """Return the graph without dead code; the input graph itself if it has none."""
    gm, live = index.gm, _live(index)
    if all(live):
        return gm
    graph = Graph(tracer_cls=gm.graph._tracer_cls)
    env: dict[Node, Node] = {}
    for node, keep in zip(index.nodes, live, strict=True):
        if keep:
            env[node] = copy_node(graph, node, env.__getitem__)
    graph.set_codegen(gm.graph._codegen)
    return rebuild(gm, graph, meta=_meta_with_ranks(gm, graph))


def _meta_with_ranks(gm: GraphModule, graph: Graph) -> dict[str, Any]:
    """Return the graph's meta with the original ranks of the remaining nodes, which removing nodes does not invalidate."""
    state = state_of(gm)
    if state.ranks is None or list(state.ranks) != [node.name for node in gm.graph.nodes]:
        return gm.meta
    ranks = {node.name: state.ranks[node.name] for node in graph.nodes}
    return with_state(gm.meta, replace(state, ranks=ranks))


class _ValueNumbering:
    """One forward sweep that copies the graph with one node for equal computations."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.effects = index.dependencies.effects
        self.written = index.dependencies.written
        nodes = index.nodes
        self.classes = alias_classes(index.gm, nodes, [self.effects.get(i, PURE) for i in range(len(nodes))])
        self.outgoing = {self.classes.of(node) for node in nodes[-1].all_input_nodes}
        self.returned = self._returned()
        # A sub-graph whose results alias its operands has its own values for both.
        sharing = [nodes[i] for i, e in self.effects.items() if e.aliases]
        self.held = {self.classes.of(node) for node in sharing if _calls_graph(index.gm, node)}
        self.graph = Graph(tracer_cls=index.gm.graph._tracer_cls)
        self.env: dict[Node, Node] = {}
        self.known: dict[Any, Node] = {}
        self.onto: dict[int, Tensor] = {}
        self.merged = 0

    def run(self) -> None:
        with fake_inference(fake_mode(self.index.nodes)):
            for i, node in enumerate(self.index.nodes):
                same = self._unchanged(i, node) or self._equal(i, node)
                if same is None:
                    self._copy(node)
                else:
                    self.env[node] = same
                    self.merged += 1
        self.graph.set_codegen(self.index.gm.graph._codegen)

    def _returned(self) -> set[Node]:
        """Return the graph's results and what they may alias: some operations return their operand itself."""
        returned = set(self.index.nodes[-1].all_input_nodes)
        for i in range(len(self.index) - 1, -1, -1):
            if self.index.nodes[i] in returned:
                returned.update(self.effects.get(i, PURE).aliases)
        return returned

    def _copy(self, node: Node) -> None:
        new = self.env[node] = copy_node(self.graph, node, self.env.__getitem__)
        if self.onto and node.op != "output":
            value = node.meta.get("val")
            if not self.onto.keys().isdisjoint(storage_keys(value)):
                new.meta["val"] = rebase_storages(value, self.onto)

    def _unchanged(self, i: int, node: Node) -> Node | None:
        """Return the operand, if the node is a view that changes nothing and the two are indistinguishable."""
        if node.op not in ("call_function", "call_method") or base_name(node) not in MAY_RETURN_OPERAND:
            return None
        operand = node.args[0] if node.args else None
        if not isinstance(operand, Node) or node in self.returned or i in self.written:
            return None
        if not self.effects.get(i, PURE).pure or self.index.dependencies.switches_modes:
            return None
        old, new = operand.meta.get("val"), node.meta.get("val")
        if not isinstance(old, Tensor) or not isinstance(new, Tensor) or not _is_strided(old):
            return None
        if storage_key(old) != storage_key(new) or not same_geometry(old, new):
            return None
        return self.env[operand]

    def _equal(self, i: int, node: Node) -> Node | None:
        """Return the node that computes the same value, if the two may be merged."""
        key = self._key(i, node)
        if key is None:
            return None
        first = self.known.setdefault(key, node)
        if first is node:
            return None
        # An attribute is one object under one name, however often it is fetched.
        share = self._rebase if node.op == "get_attr" else self._may_share
        return self.env[first] if share(first, node) else None

    def _key(self, i: int, node: Node) -> Any:
        """Return the value number of a node; None for a node that is never merged.

        Effect edges are part of it: two reads of one memory are equal only if no write and no mode switch comes between
        them.
        """
        if node.op in ("placeholder", "output"):
            return None
        if node.op == "get_attr":
            return None if is_subgraph(self.index.gm, node) else ("get_attr", node.target)
        if i in self.written or "unbacked_bindings" in node.meta or not self.effects.get(i, PURE).pure:
            return None
        before = frozenset(self.index.dependencies.before.get(i, ()))
        call = call_of(node.meta)
        region = None if call is None else (call.identity, call.backend)
        ordered = dict(sorted(node.kwargs.items()))
        arguments = (literal(value, self.env.__getitem__, _by_identity) for value in (node.args, ordered))
        return (node.op, node.target, region, *arguments, before)

    def _may_share(self, first: Node, second: Node) -> bool:
        """Whether two equal results may be one tensor: no caller can observe it, and all values stay consistent."""
        classes = self.classes
        a, b = classes.of(first), classes.of(second)
        if a == b:
            if first in self.returned and second in self.returned:
                return False  # a caller would get one tensor twice instead of two that share memory
        elif (a in self.outgoing and b in self.outgoing) or b in self.held:
            return False
        if not self._rebase(first, second):
            return False
        classes.join(a, b)
        joint = classes.of(first)
        if a in self.outgoing or b in self.outgoing:
            self.outgoing.add(joint)
        if a in self.held:
            self.held.add(joint)
        if second in self.returned:
            self.returned.add(first)
        return True

    def _rebase(self, first: Node, second: Node) -> bool:
        """Map the storages of the second to those of the first, so that views of it are views of the first."""
        ours, theirs = self.env[first].meta.get("val"), second.meta.get("val")
        if isinstance(ours, (tuple, list)) and isinstance(theirs, (tuple, list)):
            pairs = list(zip(cast("Sequence[Any]", ours), cast("Sequence[Any]", theirs), strict=False))
        else:
            pairs = [(ours, theirs)]
        tensors = [(x, y) for x, y in pairs if isinstance(x, Tensor) and isinstance(y, Tensor)]
        if not all(_is_strided(x) and same_geometry(x, y) for x, y in tensors):
            return False
        for x, y in tensors:
            if storage_key(x) != storage_key(y):
                self.onto[storage_key(y)] = x
        return True


def _is_strided(value: Tensor) -> bool:
    return value.layout is torch.strided


def _calls_graph(gm: GraphModule, node: Node) -> bool:
    if isinstance(node.target, HigherOrderOperator):
        return True
    return node.op == "call_module" and isinstance(attribute(gm, cast("str", node.target)), GraphModule)


def _by_identity(value: Any) -> Any:
    """Return what an argument of any other type is compared by: torch's constants by value, objects by identity."""
    known = isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format))
    return value if known else id(value)
