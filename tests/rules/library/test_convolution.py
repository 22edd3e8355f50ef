"""Convolutions with batch norm and activation, and the gradients of a training graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import dovetail
from dovetail.rules.library import CONVOLUTION
from dovetail.rules.library.convolution import conv_grad
from tests.rules.library.helpers import (
    assert_references,
    candidates,
    graph_of,
    match_attrs,
    member_names,
    refused_each,
    request_for,
)

X = torch.randn(2, 6, 8, 8)
BN, ACT = CONVOLUTION["conv2d_bn_act"], CONVOLUTION["conv2d_act"]


def conv(**settings: Any) -> nn.Conv2d:
    return nn.Conv2d(6, 6, 3, **{"padding": 1, "bias": False, **settings})


class Calls(nn.Module):
    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "relu": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(),
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": F.gelu,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "mish": F.mish,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_convolution_norm_and_activation(name: str) -> None:
    match = match_attrs(BN, nn.Sequential(conv(), nn.BatchNorm2d(6), Calls(ACTIVATIONS[name])).eval(), X)
    assert match == {
        "stride": [1, 1],
        "padding": [1, 1],
        "dilation": [1, 1],
        "groups": 1,
        "activation": name,
        "batch_norm": True,
        "training": False,
        "eps": 1e-5,
        "slope": None,
    }


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_convolution_and_activation(name: str) -> None:
    match = match_attrs(ACT, nn.Sequential(conv(bias=True), Calls(ACTIVATIONS[name])), X)
    assert (match["activation"], match["batch_norm"]) == (name, False)


def test_a_leaky_relu_has_its_slope() -> None:
    match = match_attrs(ACT, nn.Sequential(conv(), nn.LeakyReLU(0.2)), X)
    assert (match["activation"], match["slope"]) == ("leaky_relu", 0.2)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_a_word(padding: str) -> None:
    norm = nn.Sequential(conv(padding=padding, dilation=2), nn.BatchNorm2d(6), nn.ReLU()).eval()
    match = match_attrs(CONVOLUTION["conv2d_padded_bn_act"], norm, X)
    assert (match["padding"], match["dilation"], match["activation"]) == (padding, [2, 2], "relu")
    assert match_attrs(CONVOLUTION["conv2d_padded_act"], nn.Sequential(conv(padding=padding), nn.ReLU()), X)
    assert not candidates(CONVOLUTION["conv2d_padded_act"], graph_of(nn.Sequential(conv(), nn.ReLU()), (X,)))


def test_an_image_by_itself() -> None:
    assert match_attrs(ACT, nn.Sequential(conv(groups=3), nn.ReLU()), X[0])["groups"] == 3


def test_convolution_and_norm() -> None:
    assert match_attrs(BN, nn.Sequential(conv(), nn.BatchNorm2d(6)).eval(), X)["activation"] is None
    assert match_attrs(BN, nn.Sequential(conv(bias=True), nn.BatchNorm2d(6, affine=False)).eval(), X)


SETTINGS: list[dict[str, Any]] = [
    {"stride": 2},
    {"padding": (0, 2)},
    {"stride": (2, 1), "dilation": (1, 2)},
    {"groups": 3},
    {"groups": 6, "bias": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_of_the_convolution(settings: dict[str, Any]) -> None:
    module = conv(**settings)
    match = match_attrs(BN, nn.Sequential(module, nn.BatchNorm2d(6), nn.ReLU()).eval(), X)
    assert match["stride"] == list(module.stride)
    assert match["padding"] == list(module.padding)
    assert match["dilation"] == list(module.dilation)
    assert match["groups"] == module.groups


def test_other_ranks() -> None:
    one = nn.Sequential(nn.Conv1d(6, 4, 3, stride=2), nn.BatchNorm1d(4), nn.ReLU()).eval()
    assert match_attrs(CONVOLUTION["conv1d_bn_act"], one, torch.randn(2, 6, 9))["stride"] == [2]
    three = nn.Sequential(nn.Conv3d(6, 4, 3), nn.BatchNorm3d(4), nn.ReLU()).eval()
    assert match_attrs(CONVOLUTION["conv3d_bn_act"], three, torch.randn(2, 6, 4, 5, 6))["padding"] == [
        0,
        0,
        0,
    ]
    assert not candidates(CONVOLUTION["conv1d_bn_act"], graph_of(three, (torch.randn(2, 6, 4, 5, 6),)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        y += x
        return F.relu(y, inplace=True)


def test_a_shortcut_that_is_added_before_the_activation() -> None:
    match = candidates(BN, graph_of(Block().eval(), (X,)))[0]
    assert "residual" in (match.arguments or {})
    assert match_attrs(BN, Block().eval(), X) == match.attrs


@pytest.mark.parametrize("dims", [(0,), (0, 2, 3)], ids=["batch", "batch and image"])
@pytest.mark.parametrize("stride", [0, 1, 2], ids=["shortcut", "stride 1", "stride 2"])
def test_sizes_that_may_vary(stride: int, dims: tuple[int, ...]) -> None:
    # Which library would take the convolution hangs on them; what it is does not.
    unpadded = nn.Sequential(conv(stride=max(stride, 1)), nn.BatchNorm2d(6), nn.ReLU())
    model = (unpadded if stride else Block()).eval()
    graph = dovetail.capture(model, (X,), dynamic_shapes=(dict.fromkeys(dims, torch.export.Dim.AUTO),))
    match = candidates(BN, graph)[0]
    assert match.attrs is not None
    assert ("residual" in (match.arguments or {}), match.attrs["activation"]) == (not stride, "relu")


def test_in_training() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(6), nn.ReLU()).train()
    graph = dovetail.capture(model, (X,))
    match = candidates(BN, graph)[0]
    assert match.attrs is not None
    assert (match.attrs["training"], match.attrs["activation"]) == (True, "relu")
    fused = dovetail.outline(graph, member_names(graph, match), kind=match.kind, escapes=match.escapes)
    twin = nn.Sequential(conv(), nn.BatchNorm2d(6), nn.ReLU()).train()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(fused(X), twin(X))
    assert all(torch.equal(a, b) for a, b in zip(fused.buffers(), twin.buffers(), strict=True))


def test_a_norm_of_something_else() -> None:
    refused_each(BN, [nn.Sequential(conv(), nn.ReLU(), nn.BatchNorm2d(6)).eval()], X)
    refused_each(BN, [nn.Sequential(nn.ReLU(), nn.BatchNorm2d(6)).eval()], X)
    refused_each(ACT, [nn.Sequential(conv(), nn.MaxPool2d(2), nn.ReLU())], X)


def gradients_of(model: Callable[..., Tensor], *inputs: Tensor) -> GraphModule:
    def loss(*values: Tensor) -> Tensor:
        return model(*values).sin().sum()

    return dovetail.capture(
        make_fx(torch.func.grad(loss, argnums=tuple(range(len(inputs)))))(*inputs), inputs
    )


WEIGHT, BIAS = torch.randn(4, 6, 3, 3), torch.randn(4)


def test_gradients_of_a_convolution() -> None:
    graph = gradients_of(lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), X, WEIGHT, BIAS)
    (match,) = candidates(conv_grad, graph)
    assert match.attrs == {
        "stride": [2, 2],
        "padding": [1, 1],
        "dilation": [1, 1],
        "groups": 1,
        "transposed": False,
        "output_padding": [0, 0],
        "bias_sizes": [4],
        "output_mask": [True, True, True],
        "activation": None,
    }
    assert_outlines(graph, match, X, WEIGHT, BIAS)


def test_gradients_of_a_convolution_and_a_relu() -> None:
    graph = gradients_of(lambda x, w, b: F.conv2d(x, w, b).relu(), X, WEIGHT, BIAS)
    match = candidates(conv_grad, graph)[0]
    assert match.attrs is not None
    assert match.attrs["activation"] == "relu"
    assert any("threshold_backward" in name for name in member_names(graph, match))
    assert_outlines(graph, match, X, WEIGHT, BIAS)


def test_gradients_pass_where_a_relu_returned_nan() -> None:
    graph = gradients_of(lambda x, w, b: F.conv2d(x, w, b).relu(), X, WEIGHT, BIAS)
    match = candidates(conv_grad, graph)[0]
    grad, activated = torch.ones(1, 4, 4, 4), torch.randn(1, 4, 4, 4).relu()
    activated[0, 0, 0, 0] = torch.nan
    passed = torch.ops.aten.threshold_backward.default(grad, activated, 0)
    x, weight = torch.randn(1, 6, 6, 6), torch.randn(4, 6, 3, 3)
    attrs = {**(match.attrs or {}), "activation": None}
    expected = conv_grad.reference(passed, x, weight, **attrs)
    gradients = conv_grad.reference(grad, x, weight, activated, **(match.attrs or {}))
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_of_a_transposed_convolution(groups: int) -> None:
    weight = torch.randn(6, 4, 3, 3)
    graph = gradients_of(lambda x, w: F.conv_transpose2d(x, w, groups=groups), X, weight)
    assert_outlines(graph, candidates(conv_grad, graph)[0], X, weight)


def test_gradients_of_other_ranks_and_groups() -> None:
    for x, weight, convolve in (
        (torch.randn(2, 6, 9), torch.randn(4, 6, 3), F.conv1d),
        (torch.randn(2, 6, 5, 5, 5), torch.randn(4, 6, 3, 3, 3), F.conv3d),
        (X, torch.randn(6, 1, 3, 3), lambda x, w: F.conv2d(x, w, groups=6)),
    ):
        graph = gradients_of(convolve, x, weight)
        assert_outlines(graph, candidates(conv_grad, graph)[0], x, weight)


def test_gradients_as_autograd_compiles_them() -> None:
    from torch._functorch.aot_autograd import aot_module, make_boxed_func

    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Any) -> Any:
        graphs.append(dovetail.capture(graph, tuple(inputs)))
        return make_boxed_func(graph.forward)

    model = nn.Sequential(conv(bias=True), nn.BatchNorm2d(6), nn.ReLU(), conv(bias=True), nn.ReLU())
    compiled: Any = aot_module(model, fw_compiler=keep, bw_compiler=keep)
    compiled(X).sum().backward()
    forward, backward = graphs
    assert len(candidates(BN, forward)) == 2
    assert {len(c.members) for c in candidates(ACT, forward)} == {2}
    masks = sorted(c.attrs["output_mask"] for c in candidates(conv_grad, backward) if c.attrs)
    assert [False, True, True] in masks
    assert [True, True, True] in masks


def test_another_gradient_is_not_taken_for_a_relu() -> None:
    graph = gradients_of(lambda x, w: F.conv2d(x, w).tanh(), X, WEIGHT)
    match = candidates(conv_grad, graph)[0]
    assert match.attrs is not None
    assert match.attrs["activation"] is None


def assert_outlines(graph: GraphModule, match: Any, *inputs: Tensor) -> None:
    fused = dovetail.outline(graph, [request_for(graph, match)])
    assert assert_references(fused) == 1
    assert all(torch.equal(a, b) for a, b in zip(fused(*inputs), graph(*inputs), strict=True))
