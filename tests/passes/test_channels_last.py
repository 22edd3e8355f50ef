"""Convolutions in channels last: where conversions stand, what is kept, and the twins that must be left alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

import dovetail
from dovetail.passes.channels_last import ChannelsLast
from dovetail.zoo import MODELS

from .helpers import applied, aten, called, captured, drawn, gradients, left_alone, node, run
from .models import IMAGE, Branches


def settled(model: nn.Module) -> nn.Module:
    """A model whose norms have numbers that all matter."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.get_buffer("running_mean"))
            nn.init.uniform_(module.get_buffer("running_var"), 0.5, 2)
    return model


class _Strides(Interpreter):
    """Runs a graph and compares the strides of each result with those of its value."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        value = n.meta.get("val")
        if n.op == "call_function" and isinstance(value, Tensor):
            assert (tuple(result.shape), result.stride()) == (tuple(value.shape), value.stride()), n
        return result


def converted(gm: GraphModule, *inputs: Any, tolerance: float = 1e-4, **options: Any) -> GraphModule:
    """Apply the pass and prove what it promises: values, and strides of all values and of the results."""
    new = applied(ChannelsLast(**options), gm, *inputs, tolerance=tolerance)
    with torch.no_grad():
        want, got = gm(*inputs), new(*inputs)
        _Strides(new).run(*inputs)
    pairs = [(want, got)] if isinstance(want, Tensor) else list(zip(want, got, strict=True))
    for a, b in pairs:
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    return new


def conversions(gm: GraphModule) -> tuple[int, int]:
    """The number of copies into channels last and back."""
    formats = [n.kwargs.get("memory_format") for n in gm.graph.nodes if n.target is aten.clone.default]
    return formats.count(torch.channels_last), formats.count(torch.contiguous_format)


def test_one_conversion_in_and_one_out() -> None:
    model = settled(
        nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 2, 2),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
    )
    gm = captured(model, IMAGE)
    new = converted(gm, IMAGE)
    norm = "_native_batch_norm_legit_no_training"
    assert dovetail.text(new) == (
        "graph:\n"
        "  %input_1: f32[2, 3, 5, 5] = input\n"
        "  %_1_weight: f32[4] = param 1.weight\n"
        "  %_1_bias: f32[4] = param 1.bias\n"
        "  %_3_bias: f32[2] = param 3.bias\n"
        "  %_5_weight: f32[3, 8] = param 5.weight\n"
        "  %_5_bias: f32[3] = param 5.bias\n"
        "  %_1_running_mean: f32[4] = buffer 1.running_mean\n"
        "  %_1_running_var: f32[4] = buffer 1.running_var\n"
        "  %channels_last_0: f32[2, 3, 5, 5] = aten.clone.default(%input_1, memory_format=channels_last)\n"
        "  %channels_last_weight_0: f32[4, 3, 3, 3] = buffer channels_last_weight_0\n"
        "  %conv2d: f32[2, 4, 3, 3] = aten.conv2d.default(%channels_last_0, %channels_last_weight_0, None, "
        "[1, 1], [0, 0], [1, 1], 1)\n"
        f"  %{norm}: (f32[2, 4, 3, 3], f32[0], f32[0]) = aten.{norm}.default(%conv2d, %_1_weight, %_1_bias, "
        "%_1_running_mean, %_1_running_var, 0.1, 1e-05)\n"
        f"  %getitem: f32[2, 4, 3, 3] = operator.getitem(%{norm}, 0)\n"
        "  %relu: f32[2, 4, 3, 3] = aten.relu.default(%getitem)\n"
        "  %channels_last_weight_1: f32[2, 4, 2, 2] = buffer channels_last_weight_1\n"
        "  %conv2d_1: f32[2, 2, 2, 2] = aten.conv2d.default(%relu, %channels_last_weight_1, %_3_bias, "
        "[1, 1], [0, 0], [1, 1], 1)\n"
        "  %contiguous_0: f32[2, 2, 2, 2] = aten.clone.default(%conv2d_1, memory_format=contiguous_format)\n"
        "  %reshape: f32[2, 8] = aten.reshape.default(%contiguous_0, [2, 8])\n"
        "  %linear: f32[2, 3] = aten.linear.default(%reshape, %_5_weight, %_5_bias)\n"
        "  return (%linear,)\n"
    )
    assert [str(f) for f in ChannelsLast().explain(gm)] == [
        "conv2d: it runs in channels last",
        "conv2d_1: it runs in channels last",
    ]
    assert list(new.state_dict()) == list(model.state_dict())
    assert new.get_buffer("channels_last_weight_0").is_contiguous(memory_format=torch.channels_last)


# Operations between convolutions


class Net(nn.Module):
    """Two convolutions with something between them."""

    def __init__(self, between: Callable[[Tensor], Any], width: int = 4, last: bool = True) -> None:
        super().__init__()
        self.first, self.between = nn.Conv2d(3, 4, 3, padding=1), between
        self.second = nn.Conv2d(width, 3, 2) if last else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(self.first(x)))


BIG = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
KEEP: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "relu": (torch.relu, 4),
    "gelu": (F.gelu, 4),
    "hardswish": (F.hardswish, 4),
    "leaky_relu": (F.leaky_relu, 4),
    "clamp": (lambda x: x.clamp(0, 6), 4),
    "scale": (lambda x: x * 2 + 1, 4),
    "residual": (lambda x: x + x.relu(), 4),
    "max_pool": (lambda x: F.max_pool2d(x, 2), 4),
    "max_pool with indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], 4),
    "avg_pool": (lambda x: F.avg_pool2d(x, 3, 1, 1), 4),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, 3), 4),
    "cat": (lambda x: torch.cat([x, x.relu()], 1), 8),
    "cat of rows": (lambda x: torch.cat([x, x.relu()], 2), 4),
    "pad": (lambda x: F.pad(x, (1, 1, 1, 1)), 4),
    "reflect": (lambda x: F.pad(x, (1, 1, 1, 1), "reflect"), 4),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2.0), 4),
    "bilinear": (lambda x: F.interpolate(x, size=(5, 5), mode="bilinear"), 4),
    "split": (lambda x: torch.split(x, 2, 1)[1], 2),
    "chunk and swap": (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), 4),
    "slice": (lambda x: x[:, 1:, ::2], 3),
    "cast": (lambda x: x.double().float(), 4),
    "squeeze and excite": (lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(), 4),
    "pooled gate": (lambda x: x * F.adaptive_avg_pool2d(x, 1).relu().sigmoid(), 4),
    "norm over channels": (lambda x: x / x.sum(1, keepdim=True).abs().clamp(min=1), 4),
}


@pytest.mark.parametrize("name", KEEP)
def test_the_format_is_kept_between_convolutions(name: str) -> None:
    between, width = KEEP[name]
    new = converted(captured(Net(between, width), BIG), BIG)
    assert conversions(new) == (1, 1)


BREAK: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "flatten and back": (lambda x: x.flatten(1).cos().view(2, 4, 8, 8), 4),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), 1),
    "softmax": (lambda x: x.softmax(1), 4),
    "roll": (lambda x: x.roll(1, 2), 4),
    "cumsum": (lambda x: x.cumsum(3), 4),
    "matmul": (lambda x: x @ x, 4),
    "as_strided": (lambda x: x.as_strided((2, 4, 4, 4), (256, 64, 8, 1)), 4),
    "integer view": (lambda x: x.view(torch.int32).float() * 1e-9, 4),
    "group norm": (lambda x: F.group_norm(x, 2), 4),
}


@pytest.mark.parametrize("name", BREAK)
def test_other_operators_get_their_strides_back(name: str) -> None:
    between, width = BREAK[name]
    new = converted(captured(Net(between, width), BIG), BIG)
    assert conversions(new) == (2, 2)


ENDS: dict[str, Callable[[Tensor], Any]] = {
    "the value and a view of it": lambda x: (x, x.flatten(1)),
    "a view and what follows it": lambda x: (x[:, 1:], x[:, 1:].relu()),
    "parts": lambda x: torch.split(x, 2, 1),
    "permuted": lambda x: (x.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1).relu()),
    "linear on pixels": lambda x: F.linear(x.permute(0, 2, 3, 1), torch.ones(5, 4)),
    "pixels that are normalised": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2) + x,
    "one pixel": lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, 1).flatten(1).relu()),
    "one channel": lambda x: (x[:, :1].relu(), x.amax(1, keepdim=True) * x),
    "broadcast pixel": lambda x: F.adaptive_avg_pool2d(x, 1) + torch.ones(4, 1, 1),
    "transposed": lambda x: x.transpose(2, 3).relu(),
    "twice": lambda x: (x, x, x.relu()),
    "contiguous": lambda x: x.contiguous().relu().contiguous(),
}


@pytest.mark.parametrize("name", ENDS)
def test_results_have_the_strides_they_had(name: str) -> None:
    gm = captured(Net(ENDS[name], last=False), BIG)
    new = converted(gm, BIG)
    want, got = gm(BIG), new(BIG)
    if isinstance(want, tuple):
        shared = [[a.data_ptr() == b.data_ptr() for b in out] for out in (want, got) for a in out]
        assert shared[: len(want)] == shared[len(want) :]


def test_a_value_is_converted_once_for_all_its_readers() -> None:
    new = converted(captured(Branches(), IMAGE), IMAGE)
    assert conversions(new) == (1, 1)


def test_the_larger_side_decides() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor, few: Tensor, many: Tensor) -> Any:
            y = self.conv(x)
            return torch.cat([y, few], 1).relu(), torch.cat([y, many], 1).relu()

    inputs = (torch.randn(2, 3, 6, 6), torch.randn(2, 2, 6, 6), torch.randn(2, 9, 6, 6))
    new = converted(captured(Mixed(), *inputs), *inputs)
    copied = [n.args[0].name for n in new.graph.nodes if n.target is aten.clone.default]
    assert copied == ["x", "few", "conv2d", "relu"]


@pytest.mark.parametrize("name", ["resnet", "inception"])
def test_zoo(name: str) -> None:
    inputs = MODELS[name].example_inputs()
    gm = dovetail.capture(settled(MODELS[name].build()).eval(), inputs.args, inputs.kwargs)
    new = converted(gm, *inputs.args)
    assert all(finding.taken for finding in ChannelsLast().explain(gm))
    assert conversions(new)[0] == 1


class RandomNet(nn.Module):
    """A random graph of convolutions, norms, pooling, residual additions, concatenations and views."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random, self.layers, self.steps = Random(seed), nn.ModuleList(), list[tuple[Any, ...]]()
        shapes = [(4, 8, 8)]
        for _ in range(self.random.randint(4, 12)):
            shapes.append(self._step(shapes))
        self.returned = sorted(self.random.sample(range(1, len(shapes)), min(3, len(shapes) - 1)))

    def _step(self, shapes: list[tuple[int, int, int]]) -> tuple[int, int, int]:
        at = self.random.randrange(max(0, len(shapes) - 3), len(shapes))
        c, h, w = shapes[at]
        kind = self.random.choice(
            ["conv"] * 5 + ["norm", "relu", "pool", "add", "cat", "view", "split", "gate", "mean"]
        )
        if kind == "conv":
            size, groups = (
                self.random.choice([1, 2, 3]),
                self.random.choice([1, 1, c, 2 if c % 2 == 0 else 1]),
            )
            dilation, stride = self.random.choice([1, 1, 2]), self.random.choice([1, 1, 2])
            out = groups * self.random.choice([1, 2, 3])
            layer = nn.Conv2d(c, out, size, stride, size, dilation, groups, bias=self.random.random() < 0.5)
            return self._layer(at, layer, shapes[at])
        if kind in ("norm", "pool", "relu"):
            layers = {"norm": nn.BatchNorm2d(c), "pool": nn.MaxPool2d(2, 1, 1), "relu": nn.SiLU()}
            return self._layer(at, layers[kind], shapes[at])
        same = [i for i, shape in enumerate(shapes) if shape == shapes[at]]
        alike = [i for i, shape in enumerate(shapes) if shape[1:] == shapes[at][1:]]
        other = self.random.choice(same if kind == "add" else alike)
        self.steps.append((kind, at, other))
        return {
            "cat": (c + shapes[other][0], h, w),
            "view": (c, w, h),
            "split": (c - c // 2, h, w),
            "mean": (c, 1, 1),
        }.get(kind, (c, h, w))

    def _layer(self, at: int, layer: nn.Module, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        self.steps.append(("layer", at, len(self.layers)))
        self.layers.append(layer)
        return tuple(layer.eval()(torch.zeros(2, *shape)).shape[1:])

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for kind, at, other in self.steps:
            v = values[at]
            if kind == "layer":
                values.append(self.layers[other](v))
            elif kind == "add":
                values.append(v + values[other])
            elif kind == "cat":
                values.append(torch.cat([v, values[other]], 1))
            elif kind == "view":
                values.append(v.reshape(v.shape[0], v.shape[1], v.shape[3], v.shape[2]))
            elif kind == "split":
                values.append(v.split([v.shape[1] // 2, v.shape[1] - v.shape[1] // 2], 1)[1])
            elif kind == "gate":
                values.append(v * F.adaptive_avg_pool2d(v, 1).sigmoid())
            else:
                values.append(v.mean((2, 3), keepdim=True))
        return tuple(values[i] for i in self.returned)


@pytest.mark.parametrize("seed", range(40))
def test_random_networks(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = settled(RandomNet(seed)), torch.randn(2, 4, 8, 8)
    gm = captured(model, x)
    new = ChannelsLast()(gm)
    if new is not gm:
        converted(gm, x, tolerance=1e-3)
    else:
        assert not any(f.taken for f in ChannelsLast().explain(gm))


# Refusals


class Conv(nn.Module):
    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.conv, self.way = nn.Conv2d(3, 4, 3), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "no batch":
            return self.conv(x[0])
        if self.way == "already":
            return self.conv(x.contiguous(memory_format=torch.channels_last))
        if self.way == "pixels":
            return F.conv2d(x[:, :, :1, :1].contiguous(), self.conv.weight[:, :, :1, :1])
        if self.way == "double":
            return F.conv2d(x.double(), self.conv.weight.double())
        if self.way == "no_grad":
            with torch.no_grad():
                y = self.conv(x)
            return y * self.conv.weight.sum()
        return self.conv(x)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("no batch", "it has no batch dimension"),
        ("already", "it runs in channels last already"),
        ("pixels", "their memory is the same in both formats"),
    ],
)
def test_what_is_left_alone(way: str, reason: str) -> None:
    assert reason in left_alone(ChannelsLast(), captured(Conv(way), IMAGE.clone()))
    assert ChannelsLast().explain(captured(Conv(), IMAGE))[0].taken


@pytest.mark.parametrize("way", ["double", "no_grad"])
def test_what_depends_on_the_kernel_and_the_capture_is_kept(way: str) -> None:
    gm = captured(Conv(way), IMAGE)
    new = ChannelsLast()(gm)
    torch.testing.assert_close(new(IMAGE), gm(IMAGE), rtol=1e-4, atol=1e-5)
    assert (new is gm) is not any(f.taken for f in ChannelsLast().explain(gm))


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (lambda: nn.Conv1d(3, 4, 2), (2, 3, 5), "it is a 1-D convolution"),
        (lambda: nn.Conv3d(3, 4, 2), (2, 3, 4, 4, 4), "it is a 3-D convolution"),
    ],
)
def test_other_dimensions_are_left_alone(model: Any, shape: tuple[int, ...], reason: str) -> None:
    x = torch.randn(shape)
    assert reason in left_alone(ChannelsLast(), captured(model(), x))


def test_train_mode_is_left_alone_unless_weights_are_converted_at_each_call() -> None:
    gm = dovetail.capture(Conv().train(), (IMAGE,))
    assert "capture the model in eval mode, or give materialise=False" in left_alone(ChannelsLast(), gm)
    assert ChannelsLast(materialise=False).explain(gm)[0].taken


@pytest.mark.parametrize("name", ["x", "w", "conv2d_default"])
def test_memory_that_is_written_is_left_alone(name: str) -> None:
    def draw(g: Graph) -> Any:
        x, w = g.placeholder("x"), g.get_attr("w")
        conv = g.call_function(aten.conv2d.default, (x, w))
        written = {"x": x, "w": w, "conv2d_default": conv}[name]
        g.call_function(aten.add_.Tensor, (written, 1.0))
        return g.call_function(aten.relu.default, (conv,))

    gm = drawn(draw, IMAGE, w=torch.randn(4, 3, 2, 2))
    assert f"'{name}' is written in this graph" in left_alone(ChannelsLast(materialise=False), gm)


def test_a_graph_without_values_is_left_alone() -> None:
    def draw(g: Graph) -> Any:
        return g.call_function(aten.conv2d.default, (g.placeholder("x"), g.get_attr("w")))

    gm = drawn(draw, w=torch.randn(4, 3, 1, 1))
    assert "the shapes are not known" in left_alone(ChannelsLast(), gm.eval())


def test_a_graph_without_convolutions_is_not_looked_at() -> None:
    gm = captured(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), IMAGE)
    assert ChannelsLast()(gm) is gm
    assert ChannelsLast().explain(gm) == ()


def test_random_draws_keep_their_stream() -> None:
    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return (y + torch.rand_like(y)).relu()

    converted_values = applied(ChannelsLast(), captured(Drawn(), IMAGE), IMAGE)
    assert conversions(converted_values)[1] >= 1


def test_regions_and_their_operands_are_not_changed() -> None:
    gm = captured(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Sigmoid()), IMAGE)
    gm = dovetail.outline(gm, ["relu", "conv2d_1"], kind="block")
    new = converted(gm, IMAGE)
    assert conversions(new) == (1, 1)
    assert [r.key for r in dovetail.regions(new)] == [r.key for r in dovetail.regions(gm)]


def test_wrong_options() -> None:
    with pytest.raises(dovetail.errors.InvalidArgument, match="materialise 1"):
        ChannelsLast(materialise=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(dovetail.errors.InvalidArgument, match="fuel"):
        ChannelsLast(fuel=-1)


def test_fuel() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1))
    gm = captured(model, IMAGE)
    assert ChannelsLast(fuel=0)(gm) is gm
    assert [f.reason for f in ChannelsLast(fuel=1).explain(gm)] == ["", *["the fuel of 1 is spent"] * 2]
    torch.testing.assert_close(run(ChannelsLast(fuel=1)(gm), IMAGE), run(gm, IMAGE), rtol=1e-4, atol=1e-5)


# Training, weights that change, other passes


@pytest.mark.parametrize("train", [False, True])
def test_gradients(train: bool) -> None:
    model = settled(
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 2, groups=2),
            nn.Flatten(),
            nn.Linear(36, 2),
        )
    ).train(train)
    gm = dovetail.capture(model, (BIG,))
    new = ChannelsLast(materialise=False)(gm)
    assert conversions(new) == (3, 1)  # the image and two weights
    ours, theirs = copy.deepcopy(new), copy.deepcopy(gm)
    torch.testing.assert_close(gradients(ours, [BIG]), gradients(theirs, [BIG]), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)


def two() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.BatchNorm2d(2)]
    return settled(nn.Sequential(*layers)).eval()


def test_weights_that_are_written_are_converted_again() -> None:
    gm = captured(two(), IMAGE)
    new = ChannelsLast()(gm)
    with torch.no_grad():
        before = new(IMAGE)
        gm.get_parameter("0.weight").mul_(2)
        assert not torch.equal(new(IMAGE), before)
        torch.testing.assert_close(new(IMAGE), gm(IMAGE), rtol=1e-4, atol=1e-5)
        state = {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in gm.state_dict().items()}
        state = {k: v.abs() + 0.5 if "var" in k else v for k, v in state.items()}
        new.load_state_dict(state)
        torch.testing.assert_close(new(IMAGE), gm(IMAGE), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_copies_and_files_keep_the_format(tmp_path: Path) -> None:
    gm = captured(two(), IMAGE)
    new = ChannelsLast()(gm)
    dovetail.save(new, tmp_path / "net.pt2")
    copies = [copy.deepcopy(new), pickle.loads(pickle.dumps(new)), dovetail.load(tmp_path / "net.pt2")]
    for other in copies:
        torch.testing.assert_close(other(IMAGE), gm(IMAGE), rtol=1e-4, atol=1e-5)
        other.get_parameter("0.weight").mul_(3)
        assert not torch.equal(other(IMAGE), gm(IMAGE))
        assert other.get_buffer("channels_last_weight_0").is_contiguous(memory_format=torch.channels_last)


def test_folding_norms_before_and_after() -> None:
    gm = captured(two(), IMAGE)
    fold, layout = dovetail.FoldConvBatchNorm(), ChannelsLast()
    for passes in ([fold, layout], [layout, fold]):
        new = dovetail.Pipeline(passes)(gm, check=True)
        assert [name for name in called(new) if name != "clone"] == ["conv2d", "relu", "conv2d"]
        assert conversions(new) == (1, 1)
        fresh = copy.deepcopy(new)
        torch.testing.assert_close(fresh(IMAGE), gm(IMAGE), rtol=1e-4, atol=1e-5)
        _Strides(fresh).run(IMAGE)
        with torch.no_grad():
            changed = copy.deepcopy(gm)
            for module in (fresh, changed):
                module.get_parameter("0.weight").mul_(-2)
                module.get_buffer("1.running_mean").add_(1)
        torch.testing.assert_close(fresh(IMAGE), changed(IMAGE), rtol=1e-4, atol=1e-5)


def test_merging_branches_before_and_after() -> None:
    gm = captured(Branches(), IMAGE)
    merge = dovetail.MergeParallel(materialise=True, guard=None)
    for passes in ([merge, ChannelsLast()], [ChannelsLast(), merge]):
        new = dovetail.Pipeline(passes)(gm, check=True)
        torch.testing.assert_close(run(new, IMAGE), run(gm, IMAGE), rtol=1e-4, atol=1e-5)
        assert conversions(new)[0] == 1


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
@torch.no_grad()
def test_fused_and_lowered(backend: str) -> None:
    gm = captured(two(), IMAGE)
    new = dovetail.fuse(ChannelsLast()(gm), dovetail.rules.groups())
    lowered = dovetail.lower(new, backend, on_error="raise")
    torch.testing.assert_close(lowered(IMAGE), gm(IMAGE), rtol=1e-4, atol=1e-5)
    assert lowered(IMAGE).stride() == gm(IMAGE).stride()


def test_symbolic_sizes() -> None:
    auto = torch.export.Dim.AUTO
    model = settled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Conv2d(4, 2, 2)))
    gm = captured(model, BIG, dynamic_shapes=({0: auto, 2: auto},))
    new = applied(ChannelsLast(), gm, BIG, tolerance=1e-4)
    assert conversions(new) == (1, 1)
    x = torch.randn(5, 3, 11, 8)
    torch.testing.assert_close(new(x), gm(x), rtol=1e-4, atol=1e-5)
    assert new(x).stride() == gm(x).stride()
    assert node(new, "conv2d").meta["val"].shape[0] == node(gm, "input_1").meta["val"].shape[0]
