"""The file for Model Explorer: modules and regions as layers, bodies as subgraphs, and loaded with that package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import dovetail
from tests.fusion.test_ledger_report import Layers
from tests.zoo_graphs import zoo_graph

X = torch.randn(4, 8)


def fused(count: int = 3) -> GraphModule:
    return dovetail.fuse(dovetail.capture(Layers(count).eval(), (X,)))


def written(gm: Any, folder: Path) -> dict[str, dict[str, Any]]:
    """The graphs of the file by their ids, each node by its id, after checks that hold for every file."""
    collection = json.loads(dovetail.to_model_explorer(gm, folder / "model.json").read_text())
    assert collection["label"] == "model"
    graphs = {graph["id"]: graph for graph in collection["graphs"]}
    assert len(graphs) == len(collection["graphs"])
    for graph in graphs.values():
        nodes = {node["id"]: node for node in graph["nodes"]}
        assert len(nodes) == len(graph["nodes"])
        for node in nodes.values():
            assert all(edge["sourceNodeId"] in nodes for edge in node["incomingEdges"])
            assert all(name in graphs for name in node.get("subgraphIds", ()))
        graph["nodes"] = nodes
    return graphs


def test_region_calls_lead_to_shared_bodies(tmp_path: Path) -> None:
    gm = fused()
    graphs = written(gm, tmp_path)
    calls = [node for node in graphs["regions"]["nodes"].values() if "subgraphIds" in node]
    assert [node["id"] for node in calls] == [region.name for region in dovetail.regions(gm)]
    bodies = {region.key[:12] for region in dovetail.regions(gm)}
    assert len(graphs) == 2 + len(bodies)
    call = graphs["regions"]["nodes"]["linear_activation_1"]
    assert (call["label"], call["namespace"]) == ("linear_activation", "layers/1")
    attrs = {row["key"]: row["value"] for row in call["attrs"]}
    assert attrs["rule"] == "linear_gelu, round 1"
    assert attrs["kind"] == "linear_activation"
    (body,) = call["subgraphIds"]
    assert [n["label"] for n in graphs[body]["nodes"].values() if n["label"] != "input"] == [
        "linear",
        "gelu",
        "output",
    ]


def test_operations_are_in_layers_by_module_and_region(tmp_path: Path) -> None:
    graph = written(fused(), tmp_path)["operations"]
    assert graph["nodes"]["gelu_1"]["namespace"] == "layers/1/linear_activation_1"
    assert graph["nodes"]["linear_3"]["namespace"] == "layers/1/down"
    assert graph["groupNodeAttributes"]["layers/1/linear_activation_1"]["kind"] == "linear_activation"
    assert graph["nodes"]["gelu_1"]["outputsMetadata"][0]["attrs"] == [
        {"key": "tensor_shape", "value": "f32[4, 16]"}
    ]
    attrs = {row["key"]: row["value"] for row in graph["nodes"]["linear_3"]["attrs"]}
    assert attrs["flops"] == "1.02 k"
    assert "test_ledger_report.py" in attrs["source"]


def test_an_overlay_has_the_values_between_regions(tmp_path: Path) -> None:
    graph = written(fused(2), tmp_path)["regions"]
    (data,) = graph["tasksData"]["edgeOverlaysDataListLeftPane"]
    (overlay,) = data["overlays"]
    assert overlay["edges"] == [{"sourceNodeId": "group_0", "targetNodeId": "linear_activation_1"}] + [
        edge
        for edge in overlay["edges"]
        if edge["sourceNodeId"] == "group_0" and edge["targetNodeId"] == "group_1"
    ]


def test_nested_regions_and_backends(tmp_path: Path) -> None:
    gm = dovetail.outline(fused(1), ["linear_activation_0", "linear_1"], kind="outer")
    gm = dovetail.lower(gm, ["eager"])
    gm(X)
    graphs = written(gm, tmp_path)
    assert graphs["operations"]["nodes"]["gelu"]["namespace"] == "layers/0/outer_0/linear_activation_0"
    (body,) = graphs["regions"]["nodes"]["outer_0"]["subgraphIds"]
    inner = [node for node in graphs[body]["nodes"].values() if "subgraphIds" in node]
    assert len(inner) == 1
    attrs = {row["key"]: row["value"] for row in graphs["regions"]["nodes"]["outer_0"]["attrs"]}
    assert attrs["backend"] == "eager"


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(dovetail.SaveError, match="there is no folder"):
        dovetail.to_model_explorer(fused(1), tmp_path / "absent" / "model.json")
    with pytest.raises(dovetail.InvalidArgument, match="neither a str nor a Path"):
        dovetail.to_model_explorer(fused(1), 3)  # type: ignore[arg-type]
    with pytest.raises(dovetail.InvalidArgument, match=r"expected a torch\.fx\.GraphModule"):
        dovetail.to_model_explorer(Layers(1), tmp_path / "model.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bert", "llama", "moe", "lstm"])
def test_model_explorer_loads_the_file(name: str, tmp_path: Path) -> None:
    builder = pytest.importorskip("model_explorer.graph_builder")
    dacite = pytest.importorskip("dacite")
    path = dovetail.to_model_explorer(dovetail.fuse(zoo_graph(name)), tmp_path / "model.json")
    data = json.loads(path.read_text())
    loaded = dacite.from_dict(builder.GraphCollection, data, config=dacite.Config(strict=True))
    assert [graph.id for graph in loaded.graphs][:2] == ["regions", "operations"]
    assert loaded.graphs[0].tasksData.edgeOverlaysDataListLeftPane[0].overlays
