"""What depends on nothing but numbers, computed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from dovetail.errors import InvalidArgument, checked_init
from dovetail.graph.effects import PURE
from dovetail.graph.index import Index
from dovetail.graph.module import Program, copy_node, rebuild, require_graph, without_collector
from dovetail.graph.normalform import op_name
from dovetail.graph.storages import storages
from dovetail.graph.weight_guard import is_dense
from dovetail.passes.base import Finding, Pass, require_fuel
from dovetail.passes.constants import Constants, Names
from dovetail.passes.inferring import run_on

# What these give is whatever lay in memory before.
_UNSET = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)


@checked_init()
@dataclass(frozen=True, repr=False)
class FoldConstants(Pass):
    """Compute masks, positions and the like once, where they depend on nothing but numbers in the graph.

    Needs: values, as `capture` gives them. Leaves: each as a buffer that no `state_dict` has, bit for bit what was
    computed in every call. Not folded are parameters and buffers and what comes of them, for they may be loaded or
    trained; what is returned or written, for every call has its own; single operations that make a tensor of numbers;
    and results of more than `limit` bytes. `fuel` stops after so many.
    """

    limit: int = 2**24
    fuel: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.limit, int) or isinstance(self.limit, bool) or self.limit < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"limit {self.limit!r}: give a number of bytes, 0 and more.")
        require_fuel(self.fuel)

    def run(self, gm: GraphModule) -> GraphModule:
        """The graph with constants in it; the very graph it was given if nothing is constant."""
        with without_collector():
            index = Index(require_graph(gm))
            index.require_order()
            found = [node for node, reason in self._find(index) if not reason][: self.fuel]
            return _written(index, found) if found else gm

    def explain(self, gm: GraphModule) -> tuple[Finding, ...]:
        """What would be computed once, and what could be but is not."""
        findings: list[Finding] = []
        folded = 0
        for node, reason in self._find(Index(require_graph(gm))):
            if not reason and self.fuel is not None and folded >= self.fuel:
                reason = f"the fuel of {self.fuel} is spent"
            findings.append(Finding((node.name,), "" if reason else "it is computed once", reason))
            folded += not reason
        return tuple(findings)

    def _find(self, index: Index) -> Iterator[tuple[Node, str]]:
        """Values that others need and that depend on numbers alone, in order, each with why it is not folded."""
        known = _computable(index)
        wanted: set[Node] = set()
        found: list[tuple[Node, str]] = []
        for node in reversed(index.nodes):
            if node not in known:
                wanted.update(given for given in node.all_input_nodes if given in known)
            elif node in wanted and node.all_input_nodes:
                reason = self._why_not(node)
                found.append((node, reason))
                if reason:
                    wanted.update(node.all_input_nodes)
        yield from reversed(found)

    def _why_not(self, node: Node) -> str:
        value = cast("Tensor", node.meta["val"])
        size = value.numel() * value.element_size()
        if size > self.limit:
            return f"it has {size} bytes, more than {self.limit}"
        if not is_dense(value):
            return "its elements do not lie next to each other"
        return ""


def _computable(index: Index) -> set[Node]:
    """The nodes that could be computed now, and that nobody writes or is handed."""
    effects, written = index.dependencies.effects, index.dependencies.written
    if index.dependencies.switches_modes:
        return set()
    nodes = index.nodes
    classes = storages(index.gm, nodes, [effects.get(i, PURE) for i in range(len(nodes))])
    outgoing = {classes.of(node) for node in nodes[-1].all_input_nodes}
    known: set[Node] = set()
    for i, node in enumerate(nodes):
        if (
            node.op == "call_function"
            and isinstance(node.target, OpOverload)
            and op_name(node.target) not in _UNSET
            and all(given in known for given in node.all_input_nodes)
            and effects.get(i, PURE).pure
            and i not in written
            and classes.of(node) not in outgoing
            and _is_plain(node.meta.get("val"))
        ):
            known.add(node)
    return known


def _is_plain(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
        return False
    fixed = all(isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset()))
    return fixed and not value.is_complex() and value.device.type != "meta"


def _written(index: Index, found: list[Node]) -> Program:
    gm, folded = index.gm, set(found)
    needed = set(found)
    for node in reversed(index.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    made: dict[Node, Tensor] = {}

    def compute() -> list[Tensor]:
        for node in index.nodes:
            if node in needed:
                made[node] = run_on(node, made.__getitem__)
        return [made[node] for node in found]

    constants = Constants(gm, Names(gm))
    stems = [f"folded_{op_name(cast('OpOverload', node.target))}" for node in found]
    names = dict(zip(found, constants.add_all(stems, compute), strict=True))
    gone: set[Node] = set()
    for node in reversed(index.nodes):
        if (
            node in needed
            and node not in folded
            and all(user in gone or user in folded for user in node.users)
        ):
            gone.add(node)
    graph = Graph(tracer_cls=gm.graph._tracer_cls)
    env: dict[Node, Node] = {}
    for node in index.nodes:
        if node in folded:
            new = env[node] = graph.create_node("get_attr", names[node], name=node.name)
            new.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
        elif node not in gone:
            env[node] = copy_node(graph, node, env.__getitem__)
    graph.set_codegen(gm.graph._codegen)
    return constants.installed(rebuild(gm, graph))
