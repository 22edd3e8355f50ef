"""Bodies of regions: building them, and sharing one object among equal ones (hash consing by signature)."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn
from torch.fx import Graph, GraphModule, Node

from dovetail.errors import InvalidGraph
from dovetail.ir.effects import declared_targets, summarize_body
from dovetail.ir.graph_module import (
    Body,
    Program,
    as_program,
    attribute,
    copy_graph,
    copy_node,
    make_body,
    rebuild,
    set_attribute,
)
from dovetail.ir.meta_keys import CANONICAL
from dovetail.ir.module_paths import prefixed_stack
from dovetail.ir.nodes import value_signature
from dovetail.outlining.region import Refs, call_of, literal, results, write_call

Signature = tuple[Any, ...]


def signature(
    root: nn.Module,
    operands: Sequence[Node],
    inside: Sequence[Node],
    outputs: Sequence[Node],
    values: Sequence[Any] | None = None,
) -> Signature:
    """Return a value that is equal for exactly equal bodies, argument order included, within this process.

    `values` are the operands' values when the body is called, if they differ from those in their meta.
    """
    refs = Refs()
    rows: list[Any] = []
    for node in operands:
        refs.add(node)
    for value in values if values is not None else [n.meta.get("val") for n in operands]:
        rows.append(value_signature(value))
    for node in inside:
        target: Any = node.target
        if node.op == "get_attr" or node.op == "call_module":
            target = id(attribute(root, target))
        call = call_of(node.meta)
        rows.append(
            (
                node.op,
                target,
                tuple([literal(a, refs) for a in node.args]),
                literal(node.kwargs, refs) if node.kwargs else None,
                call.identity if call is not None else None,
            )
        )
        refs.add(node)
    return (len(operands), tuple(rows), tuple(refs[n] for n in outputs))


_SIGNATURES: WeakKeyDictionary[Body, Signature] = WeakKeyDictionary()


def signature_of(body: Body) -> Signature:
    known = _SIGNATURES.get(body)
    if known is None:
        nodes = list(body.graph.nodes)
        operands = [n for n in nodes if n.op == "placeholder"]
        known = _SIGNATURES[body] = signature(body, operands, nodes[len(operands) : -1], results(body))
    return known


class Bodies:
    """The distinct bodies of one graph and the names of the attributes that hold them."""

    def __init__(self, root: GraphModule, used_names: set[str]) -> None:
        self._root = root
        self._used_names = used_names
        self.added: dict[str, Body] = {}
        self.converted: dict[str, Program] = {}
        self._numbers: dict[str, int] = {}
        self._known: dict[Signature, tuple[Body, str]] = {}
        for name, module in root._modules.items():
            if isinstance(module, Body):
                self._known.setdefault(signature_of(module), (module, name))

    def share(
        self,
        kind: str,
        operands: Sequence[Node],
        inside: Sequence[Node],
        outputs: Sequence[Node],
        owner: GraphModule | None = None,
        values: Sequence[Any] | None = None,
    ) -> tuple[Body, str]:
        """Return the body that computes `outputs`, a new one only if no equal one exists, and its attribute's name.

        `owner` has the attributes that the nodes name, if not the graph itself; `values` are as for `signature`.
        """
        owner = owner or self._root
        key = signature(owner, operands, inside, outputs, values)
        shared = self._known.get(key)
        if shared is None:
            body = _build(self._lent(owner, inside), kind, operands, inside, outputs, values)
            _SIGNATURES[body] = key
            name = self._free_name(kind.replace(".", "_"))
            self.added[name] = body
            shared = self._known[key] = (body, name)
        return shared

    def _lent(self, owner: GraphModule, inside: Sequence[Node]) -> GraphModule:
        """Return the owner with sub-graphs that a body borrows as programs, so that both hold one object in every copy."""
        for node in inside:
            if node.op in ("get_attr", "call_module"):
                value = attribute(owner, cast("str", node.target))
                if isinstance(value, GraphModule) and not isinstance(value, Program):
                    self.converted[cast("str", node.target)] = as_program(value)
        if not self.converted:
            return owner
        lender = rebuild(owner, Graph())  # only what it owns is used, not what it runs
        for target, program in self.converted.items():
            set_attribute(lender, target, program)
        return lender

    def _free_name(self, stem: str) -> str:
        if keyword.iskeyword(stem):
            stem = f"{stem}_"
        number = self._numbers.get(stem, 1)
        name = stem if number == 1 else f"{stem}__{number}"
        while name in self._used_names or hasattr(self._root, name):
            number += 1
            name = f"{stem}__{number}"
        self._numbers[stem] = number + 1
        self._used_names.add(name)
        return name


def _build(
    root: nn.Module,
    kind: str,
    operands: Sequence[Node],
    inside: Sequence[Node],
    outputs: Sequence[Node],
    values: Sequence[Any] | None,
) -> Body:
    graph = Graph()
    env: dict[Node, Node] = {}
    for i, node in enumerate(operands):
        operand = env[node] = graph.create_node("placeholder", node.name, name=node.name)
        operand.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
        if values is not None and values[i] is not node.meta.get("val"):
            operand.meta = {"val": values[i]}
    borrowed: dict[str, tuple[Any, str]] = {}
    for node in inside:
        target = None
        if node.op == "get_attr" or node.op == "call_module":
            value = attribute(root, cast("str", node.target))
            if value is None and node.op == "call_module":
                raise InvalidGraph(f"nothing is at '{node.target}'", node.name)
            target = _lend(borrowed, cast("str", node.target), value)
        env[node] = copy_node(graph, node, env.__getitem__, target)
    graph.output(tuple(env[n] for n in outputs)).meta["val"] = None
    body = make_body(graph, re.sub(r"\W", "_", kind))
    body.training = root.training
    if CANONICAL in getattr(root, "meta", {}):
        body.meta[CANONICAL] = None
    for name, (value, target) in borrowed.items():
        body.borrow(name, value, target)
    body.mark_impure(summarize_body(body, declared_targets(root)).has_effects)
    return body


def _lend(borrowed: dict[str, tuple[Any, str]], target: str, value: Any) -> str:
    stem = name = re.sub(r"\W", "_", target)
    number = 1
    while (name in borrowed and borrowed[name][0] is not value) or hasattr(GraphModule, name):
        number += 1
        name = f"{stem}__{number}"
    borrowed[name] = (value, target)
    return name


def common_module_stack(metas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the modules that all operations come from, outermost first."""
    levels = zip(*(meta.get("nn_module_stack", {}).items() for meta in metas), strict=False)
    common = takewhile(lambda level: all(key == level[0][0] for key, _ in level), levels)
    return dict(level[0] for level in common)


def with_module_prefix(gm: GraphModule, prefix: str) -> GraphModule:
    """Return the graph of a part of a model with the paths of its modules as they are in the model."""

    def moved(meta: dict[str, Any]) -> dict[str, Any]:
        return {**meta, "nn_module_stack": prefixed_stack(meta, prefix)}

    graph = copy_graph(gm.graph)
    for node in graph.nodes:
        call = call_of(node.meta)
        node.meta = moved(node.meta)
        if call is not None:
            write_call(node, call.map_meta(moved))
    return rebuild(gm, graph)
