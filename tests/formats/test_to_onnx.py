"""Fused graphs as ONNX files: regions are functions, and calls tell which regions they were."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from dovetail import InvalidArgument, zoo
from dovetail.errors import SaveError
from dovetail.formats.onnx.to_onnx import to_onnx

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

QUICK = ("mlp", "llama", "resnet")


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def ran(path: Path, *given: Tensor) -> list[Tensor]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    results = session.run(None, dict(zip(names, (g.numpy() for g in given), strict=True)))
    return [torch.from_numpy(m) for m in results]


def identity(kind: str, version: int, attrs: Any) -> str:
    return json.dumps([kind, version, attrs], sort_keys=True)


def call_identities(model: Any) -> list[str]:
    """The identities in the metadata of all calls of functions, also those inside of functions."""
    functions = {(f.domain, f.name): f for f in model.functions}
    names: list[str] = []
    waiting = list(reversed(model.graph.node))
    while waiting:
        node = waiting.pop()
        function = functions.get((node.domain, node.op_type))
        if function is not None:
            region = json.loads({e.key: e.value for e in node.metadata_props}["dovetail.region"])
            names.append(identity(region["kind"], region["version"], region["attrs"]))
            waiting.extend(reversed(function.node))
    return names


def identities(gm: GraphModule) -> list[str]:
    return [identity(r.kind, r.version, r.attrs) for r in dovetail.regions(gm, nested=True)]


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in zoo.names()]
)
def test_the_zoo(name: str, tmp_path: Path) -> None:
    entry = zoo.get(name)
    model, inputs = entry.build().eval(), entry.example_inputs()
    gm = dovetail.capture(model, inputs.args, inputs.kwargs)
    # Regions in regions: blocks that repeat, made of regions by the rules.
    fused = dovetail.fuse(dovetail.fuse(gm), dovetail.rules.repeats())
    path = to_onnx(fused, tmp_path / "fused.onnx")
    onnx.checker.check_model(onnx.load(path), full_check=True)
    given = [v for v in pytree.tree_leaves((inputs.args, inputs.kwargs)) if isinstance(v, Tensor)]
    expected = pytree.tree_leaves(model(*inputs.args, **inputs.kwargs))
    for result, reference in zip(ran(path, *given), expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-5)

    bodies = {(r.kind, id(r.body)) for r in dovetail.regions(fused, nested=True)}
    assert len(onnx.load(path).functions) == len(bodies), "one function for each distinct body"
    assert Counter(call_identities(onnx.load(path))) == Counter(identities(fused))


def gated(x: Tensor, w: Tensor) -> Tensor:
    y = torch.sigmoid(F.linear(x, w)) * x
    return torch.sigmoid(F.linear(y, w)) * y + 1


def outlined() -> GraphModule:
    gm = dovetail.capture(gated, (torch.randn(3, 4), torch.randn(4, 4)))
    attrs = {"bits": 8, "scale": 0.5, "mode": "fast", "sizes": [1, 2], "flag": True, "none": None}
    for first in ("linear", "linear_1"):
        names = [first, first.replace("linear", "sigmoid"), first.replace("linear", "mul")]
        gm = dovetail.outline(gm, names, kind="npu.gate", attrs=attrs, version=3)
    return gm


def test_a_kind_is_a_domain_and_a_name(tmp_path: Path) -> None:
    model = onnx.load(to_onnx(outlined(), tmp_path / "gate.onnx"))
    (function,) = model.functions
    assert (function.domain, function.name) == ("npu", "gate")
    calls = [n for n in model.graph.node if n.domain == "npu"]
    assert [c.name for c in calls] == [r.name for r in dovetail.regions(outlined())]
    assert len(calls) == 2
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in calls[0].attribute}
    assert attributes == {
        "bits": 8,
        "scale": 0.5,
        "mode": b"fast",
        "sizes": [1, 2],
        "flag": 1,
        "none": b"null",
    }
    assert sorted(function.attribute) == sorted(attributes)
    assert call_identities(model) == identities(outlined())


def test_a_function_declares_what_all_of_its_calls_carry(tmp_path: Path) -> None:
    gm = dovetail.capture(gated, (torch.randn(3, 4), torch.randn(4, 4)))
    for end, attrs in (("", {"bits": 8, "mode": "a"}), ("_1", {"bits": 4, "scale": 0.5})):
        names = [f"{name}{end}" for name in ("linear", "sigmoid", "mul")]
        gm = dovetail.outline(gm, names, kind="npu.gate", attrs=attrs)
    path = to_onnx(gm, tmp_path / "gate.onnx")
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    (function,) = model.functions
    calls = [{a.name for a in n.attribute} for n in model.graph.node if n.domain == "npu"]
    assert calls == [{"bits", "mode"}, {"bits", "scale"}]
    assert sorted(function.attribute) == ["bits", "mode", "scale"]
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    torch.testing.assert_close(ran(path, x, w)[0], gated(x, w))
    assert call_identities(model) == identities(gm)


def test_weights_are_initialisers_and_tied_ones_are_written_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids).relu())

    model, ids = Tied().eval(), torch.tensor([[1, 2, 6]])
    path = to_onnx(dovetail.fuse(dovetail.capture(model, (ids,))), tmp_path / "tied.onnx")
    names = [i.name for i in onnx.load(path).graph.initializer]
    assert len(names) == 1
    assert names[0] in dict(model.named_parameters(remove_duplicate=False))
    torch.testing.assert_close(ran(path, ids)[0], model(ids))


def test_open_sizes_stay_open(tmp_path: Path) -> None:
    dims = {"x": {0: torch.export.Dim("rows", min=2, max=64)}, "w": None}
    gm = dovetail.fuse(dovetail.capture(gated, (torch.randn(3, 4), torch.randn(4, 4)), dynamic_shapes=dims))
    path = to_onnx(gm, tmp_path / "open.onnx")
    w = torch.randn(4, 4)
    for rows in (2, 9):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(ran(path, x, w)[0], gated(x, w), rtol=1e-4, atol=1e-6)


def test_a_picture_grown(tmp_path: Path) -> None:
    x = torch.linspace(-3, 3, 84).sin().reshape(1, 2, 7, 6)
    gm = dovetail.capture(lambda x: F.interpolate(x, scale_factor=2.0), (x,))
    names = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    for number, graph in enumerate((gm, dovetail.outline(gm, names, kind="grow"))):
        (result,) = ran(to_onnx(graph, tmp_path / f"{number}.onnx"), x)
        assert torch.equal(result, gm(x))


def test_what_cannot_be_written_is_reported_and_nothing_is(tmp_path: Path) -> None:
    path = tmp_path / "kept.onnx"
    path.write_bytes(b"before")
    refused = {
        "svd": (lambda x: torch.linalg.svdvals(x), "no ONNX translation of aten.*svd"),
        "random": (lambda x: x + torch.rand_like(x), "no ONNX translation of aten.rand"),
        "write": (lambda x: x.add_(1) * 2, "ONNX has values only"),
        "complex": (lambda x: x.to(torch.complex64), "ONNX has no complex64"),
    }
    for function, reason in refused.values():
        gm = dovetail.capture(function, (torch.randn(3, 3),))
        text = dovetail.text(gm)
        with pytest.raises(SaveError, match=reason):
            to_onnx(gm, path)
        assert dovetail.text(gm) == text
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["kept.onnx"]
    with pytest.raises(SaveError, match="no folder"):
        to_onnx(outlined(), tmp_path / "missing" / "x.onnx")
    with pytest.raises(SaveError, match="is a folder"):
        to_onnx(outlined(), tmp_path)
    with pytest.raises(InvalidArgument, match="path"):
        to_onnx(outlined(), 5)  # type: ignore[arg-type]
