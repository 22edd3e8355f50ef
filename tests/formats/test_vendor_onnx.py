"""A vendor's compiler reads a fused graph as ONNX: the functions of its domain are its own, all others are written out."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from examples.vendor_backend import RULES, compiled_from
from tests.formats.vendor import CLOSE, KINDS, UNKNOWN, known, unguarded
from tests.formats.vendor_fixtures import captured, network, picture, without_gradients  # noqa: F401

onnx = pytest.importorskip("onnx")


@pytest.fixture
def file(gm: GraphModule, tmp_path: Path) -> Path:
    # Regions of other kinds, which the vendor knows nothing of, are in the file too.
    return dovetail.to_onnx(dovetail.fuse(dovetail.fuse(gm, RULES)), tmp_path / "fused.onnx")


def test_a_file_has_its_functions_by_domain(file: Path, gm: GraphModule) -> None:
    model = onnx.load(file)
    onnx.checker.check_model(model)
    names = Counter((f.domain, f.name) for f in model.functions)
    assert set(names.values()) == {1}
    assert {domain for domain, _ in names} == {"npu", "dovetail"}
    # Two layers call one function of attention and one of the gate.
    assert sorted(f"{domain}.{name}" for domain, name in names if domain == "npu") == KINDS
    calls = Counter(f"{n.domain}.{n.op_type}" for n in model.graph.node if n.domain == "npu")
    assert calls == Counter(kind for kind, _ in known(gm))


def test_its_functions_are_its_own_and_all_others_are_written_out(
    file: Path, gm: GraphModule, model: nn.Module, x: Tensor
) -> None:
    calls: Counter[str] = Counter()
    torch.testing.assert_close(compiled_from(file, calls)(x), model(x), **CLOSE)
    assert calls == Counter(kind for kind, _ in known(gm))


def test_who_knows_none_of_the_functions_runs_the_file_all_the_same(
    file: Path, model: nn.Module, x: Tensor
) -> None:
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), model(x), **CLOSE)


def test_a_function_it_does_not_know_is_written_out(tmp_path: Path) -> None:
    function, _, _ = UNKNOWN["padding that does not count"]

    def pools(x: Tensor) -> Tensor:
        return F.avg_pool2d(function(x), 2)

    x, calls = torch.randn(2, 4, 9, 9), Counter[str]()
    fused = dovetail.fuse(dovetail.capture(pools, (x,)), unguarded)
    assert len(dovetail.regions(fused)) == 2
    result = compiled_from(dovetail.to_onnx(fused, tmp_path / "pools.onnx"), calls)(x)
    torch.testing.assert_close(result, pools(x), **CLOSE)
    assert calls == {"npu.avg_pool": 1}


def test_calls_tell_the_regions_that_they_were(file: Path, gm: GraphModule) -> None:
    names = [
        json.loads(entry.value)
        for node in onnx.load(file).graph.node
        for entry in node.metadata_props
        if node.domain == "npu" and entry.key == "dovetail.region"
    ]
    before = dovetail.regions(dovetail.fuse(gm, RULES))
    assert [(t["kind"], t["version"], t["attrs"]) for t in names] == [
        (r.kind, r.version, r.attrs) for r in before
    ]
