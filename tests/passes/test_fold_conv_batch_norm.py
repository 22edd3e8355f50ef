"""Batch norm folded into the convolution before it, and the twins that must be left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import dovetail
from dovetail.passes.fold_conv_batch_norm import FoldConvBatchNorm, folded_weights
from dovetail.passes.merge_parallel.merge_parallel import MergeParallel
from dovetail.passes.pass_manager import Pipeline
from dovetail.zoo import MODELS
from tests.texts import assert_text

from .helpers import applied, aten, called, captured, drawn, left_alone, node, run
from .models import IMAGE, Branches

NORM = "_native_batch_norm_legit_no_training"


def settled(norm: Any) -> Any:
    """A norm whose numbers all matter."""
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


def test_the_norm_goes_and_the_convolution_stays() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), settled(nn.BatchNorm2d(4)), nn.ReLU())
    gm = captured(model, IMAGE)
    assert_text(
        gm,
        """
        graph:
          %input_1: f32[2, 3, 5, 5] = input
          %_0_weight: f32[4, 3, 3, 3] = param 0.weight
          %_1_weight: f32[4] = param 1.weight
          %_1_bias: f32[4] = param 1.bias
          %_1_running_mean: f32[4] = buffer 1.running_mean
          %_1_running_var: f32[4] = buffer 1.running_var
          %conv2d: f32[2, 4, 3, 3] = aten.conv2d.default(%input_1, %_0_weight, None, [1, 1], [0, 0], [1, 1], 1)
          %_native_batch_norm_legit_no_training: (f32[2, 4, 3, 3], f32[0], f32[0]) = aten._native_batch_norm_legit_no_training.default(%conv2d, %_1_weight, %_1_bias, %_1_running_mean, %_1_running_var, 0.1, 1e-05)
          %getitem: f32[2, 4, 3, 3] = operator.getitem(%_native_batch_norm_legit_no_training, 0)
          %relu: f32[2, 4, 3, 3] = aten.relu.default(%getitem)
          return (%relu,)
    """,
    )
    new = applied(FoldConvBatchNorm(), gm, IMAGE)
    assert_text(
        new,
        """
        graph:
          %input_1: f32[2, 3, 5, 5] = input
          %folded_conv2d_weight_0: f32[4, 3, 3, 3] = buffer folded_conv2d_weight_0
          %folded_conv2d_bias_0: f32[4] = buffer folded_conv2d_bias_0
          %conv2d: f32[2, 4, 3, 3] = aten.conv2d.default(%input_1, %folded_conv2d_weight_0, %folded_conv2d_bias_0, [1, 1], [0, 0], [1, 1], 1)
          %relu: f32[2, 4, 3, 3] = aten.relu.default(%conv2d)
          return (%relu,)
    """,
    )
    assert list(new.state_dict()) == list(model.state_dict())
    assert [str(f) for f in FoldConvBatchNorm().explain(gm)] == [
        f"conv2d, {NORM}: the norm is folded into the convolution"
    ]


def test_a_convolution_that_is_read_elsewhere_keeps_its_norm() -> None:
    gm = captured(Conv("used"), IMAGE)
    assert left_alone(FoldConvBatchNorm(), gm) == "the convolution's result is also used by 'add'"
    assert_text(
        gm,
        """
        graph:
          %x: f32[2, 3, 5, 5] = input
          %conv_weight: f32[4, 3, 1, 1] = param conv.weight
          %conv_bias: f32[4] = param conv.bias
          %norm_weight: f32[4] = param norm.weight
          %norm_bias: f32[4] = param norm.bias
          %norm_running_mean: f32[4] = buffer norm.running_mean
          %norm_running_var: f32[4] = buffer norm.running_var
          %conv2d: f32[2, 4, 5, 5] = aten.conv2d.default(%x, %conv_weight, %conv_bias, [1, 1], [0, 0], [1, 1], 1)
          %_native_batch_norm_legit_no_training: (f32[2, 4, 5, 5], f32[0], f32[0]) = aten._native_batch_norm_legit_no_training.default(%conv2d, %norm_weight, %norm_bias, %norm_running_mean, %norm_running_var, 0.1, 1e-05)
          %getitem: f32[2, 4, 5, 5] = operator.getitem(%_native_batch_norm_legit_no_training, 0)
          %add: f32[2, 4, 5, 5] = aten.add.Tensor(%getitem, %conv2d, alpha=1)
          return (%add,)
    """,
    )


def test_a_computed_weight_keeps_its_norm() -> None:
    gm = captured(Conv("computed"), IMAGE)
    assert left_alone(FoldConvBatchNorm(), gm) == "'mul' is computed, not an attribute of the graph"
    assert_text(
        gm,
        """
        graph:
          %x: f32[2, 3, 5, 5] = input
          %conv_weight: f32[4, 3, 1, 1] = param conv.weight
          %conv_bias: f32[4] = param conv.bias
          %norm_weight: f32[4] = param norm.weight
          %norm_bias: f32[4] = param norm.bias
          %norm_running_mean: f32[4] = buffer norm.running_mean
          %norm_running_var: f32[4] = buffer norm.running_var
          %mul: f32[4, 3, 1, 1] = aten.mul.Tensor(%conv_weight, 2)
          %conv2d: f32[2, 4, 5, 5] = aten.conv2d.default(%x, %mul, %conv_bias, [1, 1], [0, 0], [1, 1], 1)
          %_native_batch_norm_legit_no_training: (f32[2, 4, 5, 5], f32[0], f32[0]) = aten._native_batch_norm_legit_no_training.default(%conv2d, %norm_weight, %norm_bias, %norm_running_mean, %norm_running_var, 0.1, 1e-05)
          %getitem: f32[2, 4, 5, 5] = operator.getitem(%_native_batch_norm_legit_no_training, 0)
          return (%getitem,)
    """,
    )


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: [nn.Conv1d(3, 4, 2), settled(nn.BatchNorm1d(4))], (2, 3, 5)),
        (lambda: [nn.Conv3d(3, 4, 2), settled(nn.BatchNorm3d(4, affine=False))], (2, 3, 4, 4, 4)),
        (lambda: [nn.Conv2d(4, 6, 3, groups=2, stride=2), settled(nn.BatchNorm2d(6, eps=0.1))], (2, 4, 7, 7)),
        (lambda: [nn.Conv2d(3, 4, 3, padding="same"), settled(nn.BatchNorm2d(4))], (2, 3, 5, 5)),
    ],
)
def test_kinds_of_convolution(model: Callable[[], list[nn.Module]], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    new = applied(FoldConvBatchNorm(), captured(nn.Sequential(*model()), x), x)
    assert not any("norm" in name for name in called(new))


def test_half_precision_is_folded_in_full() -> None:
    weight, bias = torch.randn(4, 3, 1, 1, dtype=torch.bfloat16), torch.randn(4, dtype=torch.bfloat16)
    scale, shift, mean, variance = torch.randn(4), torch.randn(4), torch.randn(4), torch.rand(4) + 0.5
    new_weight, new_bias = folded_weights(weight, bias, scale, shift, mean, variance, 1e-5)
    assert new_weight.dtype is new_bias.dtype is torch.bfloat16
    factor = scale / (variance + 1e-5).sqrt()
    torch.testing.assert_close(new_weight, (weight.float() * factor.view(-1, 1, 1, 1)).bfloat16())
    torch.testing.assert_close(new_bias, ((bias.float() - mean) * factor + shift).bfloat16())


def test_a_shared_weight_is_folded_for_each_and_kept_for_the_rest() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.norms = nn.ModuleList(settled(nn.BatchNorm2d(4)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            a, b = (norm(self.conv(x * (i + 1.0))) for i, norm in enumerate(self.norms))
            return a + b + self.conv(x).sin()

    new = applied(FoldConvBatchNorm(), captured(Shared(), IMAGE), IMAGE)
    assert sorted(str(n.target) for n in new.graph.nodes if n.op == "get_attr") == [
        "conv.bias",
        "conv.weight",
        "folded_conv2d_bias_0",
        "folded_conv2d_bias_1",
        "folded_conv2d_weight_0",
        "folded_conv2d_weight_1",
    ]


def by_hand(target: Any, *, training: bool = False, written: bool = False) -> GraphModule:
    """A convolution and a norm in the spelling of an older dialect."""

    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        rest = (None, [1], [0], [1], False, [0], 1)
        conv = g.call_function(aten.convolution.default, (x, g.get_attr("w"), *rest))
        numbers = [g.get_attr(name) for name in ("scale", "shift", "mean", "var")]
        whole = target is aten.batch_norm.default
        norm = g.call_function(target, (conv, *numbers, training, 0.1, 1e-5, *([True] if whole else [])))
        if written:
            g.call_function(aten.add_.Tensor, (numbers[2], 1.0))
        return g.call_function(aten.relu.default, (norm if whole else g.call_function(getitem, (norm, 0)),))

    numbers = {
        "scale": torch.randn(4),
        "shift": torch.randn(4),
        "mean": torch.randn(4),
        "var": torch.rand(4) + 1,
    }
    return drawn(draw, LINE, w=torch.randn(4, 3, 2), **numbers)


LINE = torch.linspace(-1, 1, 30).reshape(2, 3, 5)


@pytest.mark.parametrize("target", [aten.batch_norm.default, aten.native_batch_norm.default])
def test_other_spellings_of_the_norm(target: Any) -> None:
    assert_text(
        applied(FoldConvBatchNorm(), by_hand(target), LINE),
        """
        graph:
          %x: f32[2, 3, 5] = input
          %folded_convolution_weight_0: f32[4, 3, 2] = buffer folded_convolution_weight_0
          %folded_convolution_bias_0: f32[4] = buffer folded_convolution_bias_0
          %convolution_default: f32[2, 4, 4] = aten.convolution.default(%x, %folded_convolution_weight_0, %folded_convolution_bias_0, [1], [0], [1], False, [0], 1)
          %relu_default: f32[2, 4, 4] = aten.relu.default(%convolution_default)
          return %relu_default
    """,
    )
    assert "the statistics of the batch" in left_alone(FoldConvBatchNorm(), by_hand(target, training=True))
    assert "is written in this graph" in left_alone(FoldConvBatchNorm(), by_hand(target, written=True))


# Refusals


class Conv(nn.Module):
    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.conv, self.norm, self.way = nn.Conv2d(3, 4, 1), settled(nn.BatchNorm2d(4)), way

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight * 2 if self.way == "computed" else self.conv.weight
        y = F.conv2d(x, weight, self.conv.bias)
        z = self.norm(y)
        return z + y if self.way == "used" else z


def test_training_mode_is_left_alone() -> None:
    gm = dovetail.capture(Conv().train(), (IMAGE,))
    assert "capture the model in eval mode" in left_alone(FoldConvBatchNorm(), gm)


def test_a_norm_without_statistics_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
    words = left_alone(FoldConvBatchNorm(), captured(model, IMAGE))
    assert "the norm keeps no running statistics" in words
    assert "eval" not in words


def test_a_transposed_convolution_is_left_alone_and_named() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2), settled(nn.BatchNorm2d(4)))
    assert "it is a transposed convolution" in left_alone(FoldConvBatchNorm(), captured(model, IMAGE))


def test_a_norm_after_something_else_is_not_looked_at() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), settled(nn.BatchNorm2d(4)))
    gm = captured(model, IMAGE)
    assert FoldConvBatchNorm()(gm) is gm
    assert FoldConvBatchNorm().explain(gm) == ()


# Whole graphs


@pytest.mark.parametrize("name", ["resnet", "inception"])
def test_zoo(name: str) -> None:
    inputs = MODELS[name].example_inputs()
    gm = dovetail.capture(MODELS[name].build().eval(), inputs.args, inputs.kwargs)
    new = applied(FoldConvBatchNorm(), gm, *inputs.args, tolerance=1e-4)
    assert NORM in called(gm)
    assert NORM not in called(new)
    parts = [copy.deepcopy(new), new.to(torch.float64)]
    assert {b.dtype for n, b in parts[1].named_buffers() if n.startswith("folded")} == {torch.float64}
    assert {b.dtype for n, b in parts[0].named_buffers() if n.startswith("folded")} == {torch.float32}


def test_folded_convolutions_merge() -> None:
    gm = captured(Branches(), IMAGE)
    pipe = Pipeline([FoldConvBatchNorm(), MergeParallel(materialise=True)])
    new = pipe(gm, check=True)
    assert [c for c in called(new) if c not in ("getitem", "cat")] == [
        "conv2d",
        "relu",
        "split_with_sizes",
        "conv2d",
        "relu",
    ]
    torch.testing.assert_close(run(new, IMAGE), run(gm, IMAGE), rtol=1e-4, atol=1e-5)


def test_symbolic_sizes() -> None:
    auto = torch.export.Dim.AUTO
    gm = captured(Conv(), IMAGE, dynamic_shapes={"x": {0: auto, 2: auto}})
    new = applied(FoldConvBatchNorm(), gm, IMAGE)
    x = torch.randn(5, 3, 9, 5)
    torch.testing.assert_close(new(x), gm(x), rtol=1e-4, atol=1e-5)
    assert node(new, "conv2d").meta["val"].shape[0] == node(gm, "x").meta["val"].shape[0]


def test_fuel() -> None:
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Conv2d(3, 3, 1), settled(nn.BatchNorm2d(3)))))
    gm = captured(model, IMAGE)
    for fuel in (0, 1, 3):
        assert called(FoldConvBatchNorm(fuel=fuel)(gm)).count(NORM) == 3 - fuel
    reasons = [f.reason for f in FoldConvBatchNorm(fuel=1).explain(gm)]
    assert reasons == ["", "the fuel of 1 is spent", "the fuel of 1 is spent"]
