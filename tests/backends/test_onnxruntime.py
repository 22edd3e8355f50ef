"""ONNX Runtime: what every such backend must do, and what is its own."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.backends.external.onnxruntime import OnnxRuntime
from dovetail.lowering.backend_protocol import Compiled, by_name
from dovetail.lowering.lower import lower
from dovetail.outlining.region import Region
from dovetail.runtime.presets import whole_graph
from tests.backends.external import ExternalBackendTests
from tests.backends.external_models import whole

pytest.importorskip("onnxruntime")


class Isolated(OnnxRuntime):
    isolation = "process"


class Dies(Isolated):
    name = "dies"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        os.abort()


class TestOnnxRuntime(ExternalBackendTests):
    name = "onnxruntime"
    isolated = Isolated
    dies = Dies
    fixed_sizes = False


def lowered(function: Any, *args: Any, **options: Any) -> Any:
    gm = whole(function, *args, **options)
    return lower(gm, by_name("onnxruntime"), cache=False, verify=True, on_error="raise")


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


BLIND = torch.ones(4, 6, dtype=torch.bool)
BLIND[1] = False
MASKS = {
    "none": None,
    "bool": torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) > 0.4,
    "a row that sees nothing": BLIND,
    "added": torch.randn(1, 1, 4, 6, generator=torch.Generator().manual_seed(0)),
    "added, a row that sees nothing": torch.zeros(4, 6).masked_fill(~BLIND, -torch.inf),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_attention_masks(name: str, mask: Tensor | None) -> None:
    pytest.importorskip(name)
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) * 2

    gm = whole(attend, q, k, v)
    fast = lower(gm, by_name(name), cache=False, on_error="raise")
    torch.testing.assert_close(fast(q, k, v), attend(q, k, v), rtol=1e-4, atol=1e-5)
    assert [r.backend for r in dovetail.regions(fast)] == [name]


@pytest.mark.parametrize(("causal", "scale"), [(True, None), (False, 0.3), (True, 0.7)])
def test_attention_with_fewer_heads_of_keys(causal: bool, scale: float | None) -> None:
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)

    fast = lowered(lambda q, k, v: attend(q, k, v) + 1, q, k, v)
    torch.testing.assert_close(fast(q, k, v), attend(q, k, v) + 1, rtol=1e-4, atol=1e-5)


def test_sizes_that_vary_through_reshapes_and_attention() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        b, s, d = x.shape
        q = F.linear(x, w).view(b, s, 2, d // 2).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(b, s, d)
        return torch.cat([y, x], 1).mean(1)

    batch, length = torch.export.Dim("batch", min=2, max=16), torch.export.Dim("length", min=2, max=64)
    w = torch.randn(8, 8)
    fast = lowered(block, torch.randn(3, 5, 8), w, dynamic_shapes={"x": {0: batch, 1: length}, "w": None})
    for sizes in ((3, 5), (2, 9), (16, 64)):
        x = torch.randn(*sizes, 8)
        torch.testing.assert_close(fast(x, w), block(x, w), rtol=1e-4, atol=1e-5)
    assert [r.backend for r in dovetail.regions(fast)] == ["onnxruntime"]


def test_what_is_not_taken_stays_outside() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(x @ x) + 1
            z = torch.linalg.inv(y + 10 * torch.eye(4))
            return torch.tanh(z) * 2

    mixed, x = Mixed(), torch.randn(4, 4)
    fast = dovetail.compile(mixed, (x,), backends=["onnxruntime"], cache=False)
    torch.testing.assert_close(fast(x), mixed(x), rtol=1e-4, atol=1e-4)
    taken = {r.backend: r.nodes for r in dovetail.regions(fast.graphs[0]) if r.backend}
    assert not any("inv" in name for name in taken["onnxruntime"])


def test_whole_numbers_are_exact() -> None:
    big = torch.tensor([2**40, -(2**41), 7])

    def count(x: Tensor) -> Tensor:
        return (x * 3 + 1).abs()

    assert torch.equal(lowered(count, big)(big), count(big))


def test_session_options_are_passed_on() -> None:
    backend = OnnxRuntime({"session.intra_op.allow_spinning": "0"})
    x = torch.randn(4, 4)
    fast = lower(whole(lambda x: torch.relu(x @ x), x), backend, cache=False, on_error="raise")
    torch.testing.assert_close(fast(x), torch.relu(x @ x))
    assert backend.options == {"session.intra_op.allow_spinning": "0"}


@pytest.mark.parametrize("rows", [4, 4096])
def test_small_and_large_results_have_memory_and_strides_of_their_own(rows: int) -> None:
    x = torch.randn(8, rows)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x).t(), x * 2

    fast = lowered(both, x)
    first, kept = fast(x), [value.clone() for value in both(x)]
    fast(-x)
    for value, expected, original in zip(first, kept, both(x), strict=True):
        assert torch.equal(value, expected)
        assert value.stride() == original.stride()


WILD = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.5, 0.0, 3.0, 6.0, 7.5])


@pytest.mark.parametrize(
    "clamp",
    [
        F.relu6,
        F.hardtanh,
        lambda x: x.clamp(-1, 2.5),
        lambda x: x.clamp(min=1.0),
        lambda x: x.clamp(max=1.0),
        lambda x: x.clamp(3, -3),
        lambda x: x.clamp(torch.nan, 1.0),
        lambda x: x.clamp(torch.zeros(8), torch.ones(8)),
        lambda x: x.nan_to_num(posinf=9, neginf=-9).long().clamp(-2, 5),
        lambda x: x.double().clamp(0.1, 2**40),
    ],
)
def test_values_are_clamped_as_eager_code_does(clamp: Any) -> None:
    assert torch.equal(lowered(clamp, WILD)(WILD).nan_to_num(nan=77.0), clamp(WILD).nan_to_num(nan=77.0))


@pytest.mark.parametrize("channels", [3, 16])
def test_a_convolution_and_the_clamp_after_it_are_one_kernel(tmp_path: Path, channels: int) -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu6(self.norm(self.convolution(x)))

    import onnx
    import onnxruntime

    model, x = Clamped().eval(), torch.randn(1, channels, 8, 8)
    x[0, 0, 3, 3] = torch.nan
    path = tmp_path / "optimized.onnx"
    settings = onnxruntime.SessionOptions

    def writing_what_runs() -> Any:
        options = settings()
        options.optimized_model_filepath = str(path)
        return options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "SessionOptions", writing_what_runs)
        fast = dovetail.compile(
            model, (x,), backends=["onnxruntime"], pipeline=whole_graph(), cache=False, on_error="raise"
        )
        result = fast(x)
    torch.testing.assert_close(result, model(x), equal_nan=True, rtol=1e-4, atol=1e-5)
    optimized = onnx.load(str(path), load_external_data=False)
    kinds = {node.op_type for node in optimized.graph.node}
    assert "Conv" in kinds or "FusedConv" in kinds
    assert not kinds & {"Clip", "Max", "Min", "Relu", "BatchNormalization"}
