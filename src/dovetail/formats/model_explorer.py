"""A graph as the JSON file of Google's Model Explorer: modules and regions as layers, shared bodies as subgraphs.

The format is that of `model_explorer.graph_builder`, a label and a list of graphs: "regions" is the graph as it is, its region calls
leading to the graphs of their bodies; "operations" has all operations, in layers by module and region; each distinct body is a
graph of its own. The file is written without that package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, checked_call
from dovetail.formats.atomic_write import atomic_replace, resolve_target
from dovetail.fusion.coverage import GraphCosts, is_operation
from dovetail.fusion.outside import operator_name
from dovetail.ir.graph_module import Body, GraphOwner, called_body, only_graph
from dovetail.ir.module_paths import path_of
from dovetail.ir.nodes import format_type, is_projection
from dovetail.ir.source_location import of_node
from dovetail.ir.text_tables import amount, magnitude
from dovetail.outlining.inline import inline
from dovetail.outlining.region import RegionCall, body_key, call_of, lowering_view

_Row = dict[str, Any]

# Light enough for dark text, by the order in which kinds appear.
_COLORS = ("#cfe2ff", "#d1e7dd", "#fff3cd", "#f8d7da", "#e2d9f3", "#cff4fc", "#ffe5d0", "#e9ecef")
_EDGE_COLOR = "#d9480f"


@checked_call()
def to_model_explorer(gm: GraphModule | GraphOwner, path: str | os.PathLike[str]) -> Path:
    """Write a graph as a JSON file that Google's Model Explorer opens, and return the path.

    Nodes have types, costs, source lines, and for regions kind, rule and backend. An overlay shows the values that pass from
    one region directly to another.
    """
    if not isinstance(path, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a str nor a Path.")
    graph = only_graph(gm)
    target = resolve_target(path)
    collection = {"label": target.stem, "graphs": _ExplorerFile(graph).graphs()}
    with atomic_replace(target) as written:
        written.write_text(json.dumps(collection), encoding="utf-8")
    return target


class _ExplorerFile:
    """The graphs of one file: ids of bodies and colors of kinds are the same in all of them."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.lowering = lowering_view(gm)
        self.bodies: dict[Body, str] = {}
        self.colors: dict[str, str] = {}

    def graphs(self) -> list[_Row]:
        """Return the graph with its regions, all its operations, and its bodies."""
        main = self._graph("regions", self.gm, None)
        main["tasksData"] = {
            "edgeOverlaysDataListLeftPane": [_overlay(main["nodes"], self._regions(self.gm))]
        }
        written = [main, self._operations()]
        # Bodies call other bodies, which are found while they are written.
        done = 0
        while done < len(self.bodies):
            body, name = list(self.bodies.items())[done]
            written.append(self._graph(name, body, {}))
            done += 1
        return written

    def _regions(self, gm: GraphModule) -> set[str]:
        return {node.name for node in gm.graph.nodes if call_of(node.meta) is not None}

    def _graph(self, name: str, gm: GraphModule, places: Mapping[str, str] | None) -> _Row:
        """Return a graph. `places` are the layers of operations by name; None for those by module."""
        costs = GraphCosts(gm)
        nodes = [self._node(gm, node, costs, places) for node in gm.graph.nodes if not is_projection(node)]
        return {"id": name, "nodes": nodes}

    def _operations(self) -> _Row:
        """Return the graph of all operations, in layers by module and region."""
        places: dict[str, str] = {}
        attributes: dict[str, dict[str, str]] = {}
        for node in self.gm.graph.nodes:
            call = call_of(node.meta)
            if call is not None:
                self._place(call, node.name, _layers(path_of(node.meta)), places, attributes)
        flat = inline(self.gm)
        graph = self._graph("operations", flat, {**_module_layers(flat), **places})
        graph["groupNodeAttributes"] = attributes
        return graph

    def _place(
        self,
        call: RegionCall,
        name: str,
        around: str,
        places: dict[str, str],
        attributes: dict[str, dict[str, str]],
    ) -> None:
        layer = "/".join(filter(None, (around, name)))
        attributes[layer] = {row["key"]: row["value"] for row in self._identity(call, name)}
        for member in call.members:
            inner = call_of(member.meta)
            if inner is not None:
                self._place(inner, member.name, layer, places, attributes)
            else:
                places.setdefault(member.original, layer)

    def _node(self, gm: GraphModule, node: Node, costs: GraphCosts, places: Mapping[str, str] | None) -> _Row:
        call, body = call_of(node.meta), called_body(gm, node)
        row: _Row = {
            "id": node.name,
            "label": _label(node) if call is None else call.identity.kind,
            "namespace": _layers(path_of(node.meta)) if places is None else places.get(node.name, ""),
            "attrs": [_attr("name", node.name), *self._attrs(node, costs)],
            "incomingEdges": _edges(node),
            "outputsMetadata": _outputs(node),
        }
        if node.op == "placeholder":
            row["namespace"] = "inputs"
        elif node.op == "get_attr":
            row["namespace"] = _layers(cast("str", node.target).rpartition(".")[0]) or "weights"
        if call is not None:
            row["attrs"] += self._identity(call, node.name)
            row["style"] = {"backgroundColor": self._color(call.identity.kind)}
        if body is not None:
            row["subgraphIds"] = [self._body_id(body, call)]
        return row

    def _attrs(self, node: Node, costs: GraphCosts) -> Iterable[_Row]:
        if node.op == "get_attr":
            yield _attr("target", str(node.target))
        if not is_operation(node):
            return
        yield _attr("operator", str(node.target))
        cost = costs.cost(node)
        if cost.bytes:
            yield _attr("bytes", amount(cost.bytes))
        if cost.flops:
            yield _attr("flops", magnitude(cost.flops))
        line = of_node(node)
        if line is not None:
            yield _attr("source", line.inline)

    def _identity(self, call: RegionCall, name: str) -> list[_Row]:
        identity = call.identity
        backend = self.lowering.backend_of(name, call.backend) if self.lowering is not None else call.backend
        rows = {
            "kind": identity.kind,
            "version": str(identity.version) if identity.version != 1 else "",
            "attributes": identity.attrs if identity.attrs != "{}" else "",
            "rule": "" if call.rule is None else f"{call.rule}, round {call.round}",
            "backend": backend or "",
        }
        return [_attr(key, value) for key, value in rows.items() if value]

    def _color(self, kind: str) -> str:
        return self.colors.setdefault(kind, _COLORS[len(self.colors) % len(_COLORS)])

    def _body_id(self, body: Body, call: RegionCall | None) -> str:
        known = self.bodies.get(body)
        if known is None:
            kind = "body" if call is None else call.identity.kind
            name = stem = f"{kind} {body_key(body)[:12]}"
            taken, number = set(self.bodies.values()), 1
            while name in taken:
                number += 1
                name = f"{stem} {number}"
            known = self.bodies[body] = name
        return known


def _label(node: Node) -> str:
    if node.op in ("placeholder", "output"):
        return "input" if node.op == "placeholder" else "output"
    return cast("str", node.target).rpartition(".")[2] if node.op == "get_attr" else operator_name(node)


def _layers(path: str) -> str:
    return path.replace(".", "/")


def _module_layers(gm: GraphModule) -> dict[str, str]:
    return {node.name: _layers(path_of(node.meta)) for node in gm.graph.nodes}


def _attr(key: str, value: str) -> _Row:
    return {"key": key, "value": value}


def _edges(node: Node) -> list[_Row]:
    """Return an edge from each value that a node reads; elements of a tuple are outputs of what returned it."""
    edges: list[_Row] = []
    for k, source in enumerate(node.all_input_nodes):
        output = "0"
        while is_projection(source):
            output, source = str(source.args[1]), cast("Node", source.args[0])
        edges.append({"sourceNodeId": source.name, "sourceNodeOutputId": output, "targetNodeInputId": str(k)})
    return edges


def _outputs(node: Node) -> list[_Row]:
    value = node.meta.get("val")
    values: list[Any] = list(cast("Iterable[Any]", value)) if isinstance(value, (tuple, list)) else [value]
    types = [format_type(v) for v in values]
    return [{"id": str(k), "attrs": [_attr("tensor_shape", text)]} for k, text in enumerate(types) if text]


def _overlay(nodes: list[_Row], regions: set[str]) -> _Row:
    """Return the overlay of the values that one region computes and another reads."""
    edges = [
        {"sourceNodeId": edge["sourceNodeId"], "targetNodeId": row["id"]}
        for row in nodes
        for edge in row["incomingEdges"]
        if row["id"] in regions and edge["sourceNodeId"] in regions
    ]
    overlay = {"name": "values between regions", "edgeColor": _EDGE_COLOR, "edges": edges}
    return {"name": "regions", "type": "edge_overlays", "overlays": [overlay]}
