"""Regions as definitions and workloads of FlashInfer-Trace: the fields of the format, and references that compute the body."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail import zoo
from dovetail.formats.flashinfer_trace import DTYPES, define_region
from dovetail.lowering.compile_unit import unit_of
from dovetail.numerics.sample_inputs import random_inputs


def fused(name: str) -> Any:
    entry = zoo.get(name)
    inputs = entry.example_inputs()
    return dovetail.fuse(dovetail.capture(entry.build().eval(), inputs.args, inputs.kwargs))


def read(folder: Path, part: str) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((folder / part).glob("*/*"))}


def check_definition(document: dict[str, Any]) -> None:
    """Check what the data model of flashinfer-bench 0.1.2 requires of a definition."""
    required = {"name", "op_type", "axes", "inputs", "outputs", "reference"}
    assert required <= document.keys() <= required | {"tags", "description", "constraints"}
    for axis in document["axes"].values():
        assert axis == {"type": "var"} or (axis["type"] == "const" and axis["value"] >= 0 and len(axis) == 2)
    for spec in [*document["inputs"].values(), *document["outputs"].values()]:
        assert spec.keys() == {"shape", "dtype"}
        assert spec["dtype"] in DTYPES
        assert set(spec["shape"] or ()) <= document["axes"].keys()
    assert not document["inputs"].keys() & document["outputs"].keys()
    functions = [n for n in ast.parse(document["reference"]).body if isinstance(n, ast.FunctionDef)]
    (run,) = [f for f in functions if f.name == "run"]
    assert [a.arg for a in run.args.args] == list(document["inputs"])
    for constraint in document.get("constraints", ()):
        ast.parse(constraint, mode="eval")


@pytest.mark.parametrize("name", ["llama", "bert", "mamba", "resnet"])
def test_definitions_of_models_have_references_that_compute_the_body(name: str, tmp_path: Path) -> None:
    gm = fused(name)
    dataset = dovetail.to_flashinfer_trace(gm, tmp_path)
    documents, workloads = read(tmp_path, "definitions"), read(tmp_path, "workloads")
    assert set(documents) == set(dataset.definitions)
    assert set(documents) - set(workloads) == set(dataset.left_out)
    for region in dovetail.regions(gm):
        unit = unit_of(region)
        document = documents[f"{region.kind}_{unit.key[:16]}"]
        check_definition(document)
        assert document["op_type"] == region.kind
        assert f"dovetail_key:{unit.key}" in document["tags"]
        operands = random_inputs(unit.values, 0, unit.domains)
        assert [list(v.shape) for v in operands] == [
            [document["axes"][axis]["value"] for axis in spec["shape"]]
            for spec in document["inputs"].values()
        ]
        scope: dict[str, Any] = {}
        exec(document["reference"], scope)
        with torch.no_grad():
            results = scope["run"](*(value.contiguous() for value in operands))
            expected = unit.region.body(*operands)
        results = results if len(expected) > 1 else (results,)
        assert [str(r.dtype).removeprefix("torch.") for r in results] == [
            spec["dtype"] for spec in document["outputs"].values()
        ]
        for result, other in zip(results, expected, strict=True):
            torch.testing.assert_close(result, other, equal_nan=True)
    for definition, record in workloads.items():
        assert record.keys() == {"definition", "workload"}
        assert record["definition"] == definition
        assert record["workload"].keys() == {"uuid", "axes", "inputs"}
        assert record["workload"]["inputs"].keys() == documents[definition]["inputs"].keys()
        assert not record["workload"]["axes"]
    for definition, reason in dataset.left_out.items():
        assert definition in documents
        assert "random integers may be out of range" in reason


def test_files_are_the_same_each_time_and_others_are_kept(tmp_path: Path) -> None:
    gm = fused("mlp")
    kept = tmp_path / "definitions" / "rmsnorm" / "rmsnorm_h128.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}

    dovetail.to_flashinfer_trace(gm, tmp_path)
    before = contents()
    dovetail.to_flashinfer_trace(fused("mlp"), tmp_path)
    assert contents() == before
    assert before[kept] == b"{}"


def test_sizes_that_vary_are_variables(tmp_path: Path) -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(torch.cat([x, y]) * 2) + 1

    n, m = torch.export.Dim("n"), torch.export.Dim("m")
    gm = dovetail.capture(model, (torch.randn(3, 8), torch.randn(5, 8)), dynamic_shapes=({0: n}, {0: m}))
    operations = [node for node in gm.graph.nodes if node.op == "call_function"]
    gm = dovetail.outline(gm, operations, kind="npu.joined")
    definition = define_region(dovetail.regions(gm)[0])
    document = definition.document
    check_definition(dict(document))
    assert document["op_type"] == "npu_joined"
    variables = [name for name, axis in document["axes"].items() if axis["type"] == "var"]
    assert variables == ["size_0", "size_1", "size_2"]
    assert document["constraints"] == ["size_2 == size_0 + size_1"]
    assert definition.workload is not None
    assert definition.workload["axes"] == {"size_0": 3, "size_1": 5, "size_2": 8}
    scope: dict[str, Any] = {}
    exec(document["reference"], scope)
    x, y = torch.randn(2, 8), torch.randn(9, 8)
    operands = {"x": x, "y": y}
    assert torch.equal(scope["run"](*(operands[name] for name in document["inputs"])), model(x, y))


def outlined(model: Any, args: tuple[Any, ...], names: list[str]) -> Any:
    return dovetail.outline(dovetail.capture(model, args), names, kind="part")


@torch.library.custom_op("dovetail_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


class Large(nn.Module):
    """A table that no script can have as a literal, which is an operand of the region."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.table)


def test_constants_are_operands(tmp_path: Path) -> None:
    gm = outlined(Large().eval(), (torch.randn(2, 64),), ["matmul", "relu"])
    dovetail.to_flashinfer_trace(gm, tmp_path)
    (document,) = read(tmp_path, "definitions").values()
    assert [spec["shape"] for spec in document["inputs"].values()] == [["n2", "n64"], ["n64", "n64"]]


@pytest.mark.parametrize(
    ("model", "args", "names", "reason"),
    [
        (lambda x: torch.relu(x) * 2, (torch.randn(2).double(),), ["relu", "mul"], "operand 'x' is float64"),
        (lambda x: F.dropout(x) * 2, (torch.randn(2),), ["native_dropout"], "it draws random numbers"),
        (lambda x: doubled(x) * 2, (torch.randn(2),), ["doubled", "mul"], "operator of another library"),
        (lambda x: torch.fft.rfft(x).real * 2, (torch.randn(4),), ["fft_rfft"], "result 0 is complex64"),
    ],
)
def test_what_the_format_cannot_express_is_left_out(
    tmp_path: Path, model: Any, args: tuple[Any, ...], names: list[str], reason: str
) -> None:
    dataset = dovetail.to_flashinfer_trace(outlined(model, args, names), tmp_path)
    assert not dataset.definitions
    assert reason in dataset.left_out["part_0"]
    assert not list(tmp_path.rglob("*.json"))


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(dovetail.InvalidArgument, match="is a file; give the name of a folder"):
        dovetail.to_flashinfer_trace(fused("mlp"), path)
