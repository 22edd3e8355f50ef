"""Fused graphs as StableHLO: composites with what the regions are, and the same values when XLA runs them."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import dovetail
from dovetail import zoo
from dovetail.backends.external import xla
from dovetail.errors import SaveError
from dovetail.formats.stablehlo import StableHlo, to_stablehlo
from dovetail.ir.graph_module import attribute
from tests.lowering.helpers import Blocks, fused

pytest.importorskip("torch_mlir")
pytest.importorskip("jaxlib")

COMPOSITE = re.compile(r'stablehlo\.composite "([^"]+)"')
FUNCTION = re.compile(r"func\.func private @(\w+)")


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def run(module: str | bytes, values: list[Tensor]) -> list[Tensor]:
    """What XLA, which inlines composites that it does not know, makes of a module."""
    # A whole module is no region, so no public function of the backend takes it.
    runtime, client = xla._runtime(), xla._client(1)
    device = client.devices()[0]
    code = client.compile_and_load(module, client.devices(), runtime.options())
    given = [runtime.from_dlpack(v.detach().contiguous().__dlpack__(), device, None) for v in values]
    return [torch.from_dlpack(runtime.to_dlpack(buffer)) for buffer in code.execute(given)]


def arguments(gm: GraphModule, text: StableHlo, inputs: Any) -> list[Tensor]:
    named = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    given = dict(zip(named, pytree.tree_leaves(inputs), strict=True))
    return [given[n].clone() for n in text.inputs] + [attribute(gm, n).clone() for n in text.weights]


def check_values(gm: GraphModule, text: StableHlo, *args: Any, module: Any = None, **kwargs: Any) -> None:
    results = run(module or str(text), arguments(gm, text, (args, kwargs)))
    expected = pytree.tree_leaves(gm(*args, **kwargs))
    news = [attribute(gm, name) for name in text.updates]
    for got, value in zip(results, [*expected, *news], strict=True):
        assert got.dtype == value.dtype
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))


def pooled(x: Tensor) -> Tensor:
    return torch.sigmoid(F.avg_pool2d(x, 2)) * 2


def test_a_region_is_a_composite_with_all_that_it_is() -> None:
    x = torch.randn(1, 2, 4, 4)
    attrs = {"size": [2, 2], "exact": True, "scale": 0.5, "mode": "avg", "none": None, "deep": {"a": 1}}
    gm = dovetail.capture(pooled, (x,))
    gm = dovetail.outline(gm, ["avg_pool2d", "sigmoid"], kind="npu.pool", attrs=attrs, version=3)
    text = to_stablehlo(gm)
    (line,) = (line for line in text.splitlines() if "composite" in line)
    assert '"npu.pool" %arg0 {' in line
    assert "decomposition = @npu_pool_body, version = 3 : i32" in line
    assert 'deep = {a = 1 : i64}, exact = true, mode = "avg", none, scale = 5.000000e-01 : f64' in line
    assert "size = [2, 2]" in line
    assert FUNCTION.findall(text) == ["npu_pool_body"]
    assert (text.inputs, text.weights, text.updates) == (("x",), (), ())
    check_values(gm, text, x)


def test_equal_bodies_are_one_function_and_weights_are_arguments() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    gm = fused(model, x)
    text = to_stablehlo(gm)
    assert len(COMPOSITE.findall(text)) == len(dovetail.regions(gm)) == 4
    assert len(FUNCTION.findall(text)) == 1
    assert text.weights == tuple(f"layers.{i}.{n}" for i in range(4) for n in ("weight", "bias"))
    for name in (*text.inputs, *text.weights):
        assert f'dovetail.name = "{name}"' in text
    assert 'dense<"' not in text, "no weight is in the text"
    check_values(gm, text, x)


def test_a_region_inside_another_is_a_composite_inside_its_function() -> None:
    def deep(x: Tensor) -> Tensor:
        return torch.tanh(torch.relu(x + 1) * 2) - 3

    x = torch.randn(4)
    gm = dovetail.outline(dovetail.capture(deep, (x,)), ["relu", "mul"], kind="inner", attrs={"k": 1})
    gm = dovetail.outline(gm, ["add", "inner_0", "tanh"], kind="outer")
    text = to_stablehlo(gm)
    assert FUNCTION.findall(text) == ["outer_body", "inner_body"]
    main, outer, inner = text.split("func.func")[1:]
    assert [COMPOSITE.findall(part) for part in (main, outer, inner)] == [
        ["dovetail.outer"],
        ["dovetail.inner"],
        [],
    ]
    check_values(gm, text, x)


def test_results_of_regions_go_anywhere() -> None:
    """Regions that feed each other, give several results, and whose operands and results are those of the graph."""

    def crossed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = torch.relu(x), torch.tanh(y)
        c, d = a + b, a * b
        return torch.exp(c) - d, d, b

    x, y = torch.randn(3), torch.randn(3)
    gm = dovetail.outline(dovetail.capture(crossed, (x, y)), ["relu", "tanh"], kind="first")
    gm = dovetail.outline(gm, ["add", "mul"], kind="second")
    gm = dovetail.outline(gm, ["exp", "sub"], kind="third")
    text = to_stablehlo(gm)
    assert COMPOSITE.findall(text) == ["dovetail.first", "dovetail.second", "dovetail.third"]
    check_values(gm, text, x, y)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return torch.relu(self.norm(x)) * self.calls


def test_what_is_written_is_returned() -> None:
    x = torch.randn(5, 4)
    gm = dovetail.fuse(dovetail.capture(Counts().train(), (x,)))
    text = to_stablehlo(gm)
    assert set(text.updates) == {"calls", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    check_values(gm, text, x)


def test_indices_count_from_the_end_too() -> None:
    table, at = torch.randn(5, 3), torch.tensor([-1, 2, -5])
    gm = dovetail.capture(lambda table, at: table[at] * 2, (table, at))
    check_values(gm, to_stablehlo(gm), table, at)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), torch.randn(1, 2, 6, 6)),
        (lambda x: F.rms_norm(x, (8,)), torch.randn(2, 8) * 1e-3),
        (lambda x: x < 7, torch.tensor([3, 200, 7], dtype=torch.uint8)),
    ],
    ids=["window", "eps", "bytes"],
)
def test_values_that_torch_mlir_alone_gets_wrong(function: Any, x: Tensor) -> None:
    gm = dovetail.capture(function, (x,))
    (result,) = run(str(to_stablehlo(gm)), [x])
    torch.testing.assert_close(result, function(x))


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(n, marks=pytest.mark.long) for n in zoo.names()[1:])])
def test_values_on_the_zoo(name: str) -> None:
    entry = zoo.get(name)
    inputs = entry.example_inputs()
    gm = dovetail.fuse(dovetail.capture(entry.build().eval(), inputs.args, inputs.kwargs))
    gm = dovetail.fuse(gm, dovetail.rules.repeats())
    text = to_stablehlo(gm)
    every = dovetail.regions(gm, nested=True)
    assert every
    assert len(FUNCTION.findall(text)) == len({id(r.body) for r in every})
    assert len(COMPOSITE.findall(text)) >= len(dovetail.regions(gm))
    check_values(gm, text, *inputs.args, **inputs.kwargs)


def test_products_are_as_exact_as_torch_has_them() -> None:
    gm = dovetail.capture(lambda x: x @ x, (torch.randn(4, 4),))
    assert "precision = [HIGHEST, HIGHEST]" in to_stablehlo(gm)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert "HIGHEST" not in to_stablehlo(gm)
    finally:
        torch.set_float32_matmul_precision(before)


def test_it_is_written_to_a_file(tmp_path: Path) -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    gm = fused(model, x)
    text = to_stablehlo(gm, path=tmp_path / "fused.mlir")
    assert (tmp_path / "fused.mlir").read_text() == text
    to_stablehlo(gm, path=tmp_path / "fused.mlirbc")
    portable = (tmp_path / "fused.mlirbc").read_bytes()
    assert portable[:4] == b"ML\xefR"
    check_values(gm, text, x, module=portable)
    assert sorted(os.listdir(tmp_path)) == ["fused.mlir", "fused.mlirbc"]
    with pytest.raises(SaveError, match="there is no folder"):
        to_stablehlo(gm, path=tmp_path / "missing" / "fused.mlir")
    with pytest.raises(dovetail.InvalidArgument, match="neither a str nor a path"):
        to_stablehlo(gm, path=3)  # type: ignore[arg-type]


def test_bytecode_leaves_out_attributes_that_are_none(tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    gm = dovetail.outline(
        dovetail.capture(nn.ReLU(), (x,)),
        ["relu"],
        kind="npu.relu",
        attrs={"gain": None, "n": [1], "in": {"a": None, "b": 2}},
    )
    text = to_stablehlo(gm, path=tmp_path / "relu.mlirbc")
    assert "gain" in text
    check_values(gm, text, x, module=(tmp_path / "relu.mlirbc").read_bytes())
    gm = dovetail.outline(
        dovetail.capture(nn.ReLU(), (x,)), ["relu"], kind="npu.relu", attrs={"n": [1, None]}
    )
    with pytest.raises(SaveError, match="a list with null in it"):
        to_stablehlo(gm, path=tmp_path / "list.mlirbc")


def test_the_text_has_nothing_of_this_machine() -> None:
    gm = fused(Blocks().eval(), torch.randn(3, 8))
    assert __file__ not in to_stablehlo(gm)
    assert to_stablehlo(gm) == to_stablehlo(gm)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: F.dropout(x, 0.5, training=True) * 2, "draws random numbers"),
        (lambda x: torch.fft.rfft(x).abs(), "complex64"),
        (lambda x: torch.linalg.svdvals(x) * 2, "svd"),
    ],
    ids=["random", "complex", "unknown"],
)
def test_what_has_no_form_is_reported(function: Any, reason: str) -> None:
    gm = dovetail.capture(function, (torch.randn(4, 4),))
    before = dovetail.text(gm)
    with pytest.raises(SaveError, match=reason) as caught:
        to_stablehlo(gm)
    assert caught.value.node is not None
    assert dovetail.text(gm) == before


def test_operands_that_torch_would_not_take_are_reported() -> None:
    gm = dovetail.capture(nn.Linear(4, 3), (torch.randn(2, 4, dtype=torch.float64),))
    with pytest.raises(SaveError, match="different dtypes"):
        to_stablehlo(gm)


def test_sizes_that_vary_are_reported() -> None:
    dims = {"x": {0: torch.export.Dim("rows", min=2, max=64)}}
    gm = dovetail.capture(lambda x: x.relu() + 1, (torch.randn(4, 8),), dynamic_shapes=dims)
    with pytest.raises(SaveError, match="its sizes are symbolic"):
        to_stablehlo(gm)


def test_a_region_that_writes_is_reported() -> None:
    def counted(x: Tensor) -> Tensor:
        x.add_(1)
        return torch.relu(x) * 2

    gm = dovetail.capture(counted, (torch.zeros(3),))
    assert to_stablehlo(gm).updates == ("x",)
    gm = dovetail.outline(gm, ["add", "relu", "mul", "copy_"], kind="counted")
    with pytest.raises(SaveError, match="writes"):
        to_stablehlo(gm)


def test_without_torch_mlir_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = dovetail.capture(lambda x: x.relu() + 1, (torch.ones(3),))
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(SaveError, match=r"pip install 'dovetail\[stablehlo\]'"):
        to_stablehlo(gm)
