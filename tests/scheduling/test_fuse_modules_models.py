"""Whole models fused by name, and what is done with them afterwards."""

import copy
import pickle
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.backends.int8.int8_backend import Int8
from dovetail.errors import ScheduleError
from dovetail.scheduling.fuse_modules import fuse_modules
from dovetail.zoo import resnet
from tests.backends.int8_helpers import integers, needs_int8, off
from tests.scheduling.chained import (
    CONV_BN_RELU,
    Net,
    awaken,
    evaluated,
    fused_graphs,
    image,
    norms,
    regions_of,
)


def resnet_groups(model: nn.Module) -> list[list[str]]:
    """Every convolution, norm and ReLU of the zoo's ResNet, as its users would list them."""
    groups = [["stem.0", "stem.1", "stem.2"]]
    for name, module in model.named_modules():
        if isinstance(module, resnet.Block):
            groups.append([f"{name}.{part}" for part in ("conv1", "bn1", "relu")])
            groups.append([f"{name}.{part}" for part in ("conv2", "bn2")])
        elif name.endswith("shortcut") and isinstance(module, nn.Sequential):
            groups.append([f"{name}.0", f"{name}.1"])
    return groups


def test_a_resnet_as_a_whole():
    model = resnet.build("tiny").eval()
    awaken(model)
    (x,) = resnet.example_inputs("tiny").args
    groups = resnet_groups(model)
    fused = fuse_modules(model, groups, (x,))
    torch.testing.assert_close(evaluated(fused, x), evaluated(model, x))
    assert norms(fused) == 0
    assert [r.kind for r in regions_of(fused)] == ["conv_bn_act"] * len(groups)
    assert list(fused.state_dict()) == list(model.state_dict())
    assert list(fused_graphs(fused)) == ["stem", "stages.0.0", "stages.1.0"]
    # Other sizes need no other graphs.
    larger = torch.randn(3, 3, 20, 24)
    torch.testing.assert_close(evaluated(fused, larger), evaluated(model, larger))
    assert {len(graphs) for graphs in fused_graphs(fused).values()} == {2}
    model.train()(x).square().sum().backward()
    fused.train()(x).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close({name: p.grad for name, p in fused.named_parameters()}, gradients)
    torch.testing.assert_close(dict(fused.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_torch_compile_works_over_it(training: bool):
    model, x = Net().train(training), image()
    fused = fuse_modules(model, CONV_BN_RELU, (x,))
    torch.compiler.reset()
    compiled = torch.compile(fused, backend="eager")
    assert torch.equal(compiled(x), model(x))
    torch.testing.assert_close(dict(fused.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    torch.compiler.reset()


def test_it_can_be_captured_fused_and_exported():
    model, x = Net().eval(), image()
    fused = fuse_modules(model, CONV_BN_RELU, (x,))
    assert torch.equal(dovetail.capture(fused, (x,))(x), model(x))
    assert torch.equal(torch.export.export(fused, (x,)).module()(x), model(x))


def test_copies_and_pickles_are_fused_too_and_have_weights_of_their_own():
    model, x = Net().eval(), image()
    fused = fuse_modules(model, CONV_BN_RELU, (x,))
    for result in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        with torch.no_grad():
            result.get_parameter("bn.bias").add_(1)
        expected = Net().eval()
        expected.load_state_dict(result.state_dict())
        torch.testing.assert_close(evaluated(result, x), evaluated(expected, x))
        assert norms(result) == 0
    torch.testing.assert_close(evaluated(fused, x), evaluated(model, x))


def test_the_model_given_is_untouched_unless_in_place():
    model, x = Net().eval(), image()
    before = dict(vars(model))
    fused = fuse_modules(model, CONV_BN_RELU, (x,))
    assert vars(model) == before
    assert fused.get_parameter("conv.weight") is not model.conv.weight
    assert fuse_modules(model, CONV_BN_RELU, inplace=True) is model
    torch.testing.assert_close(evaluated(model, x), evaluated(fused, x))
    assert norms(model) == 0


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Net(), Net()])
        self.last = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.unused = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        awaken(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x) + self.layers[1](x)
        return self.unused[1](self.unused[0](self.norm(self.last(y))))


def test_one_after_the_other_as_torchvision_does():
    model, x = Nested().eval(), image()
    expected = evaluated(model, x)
    for layer in model.layers:
        fuse_modules(layer, ["conv", "bn", "relu"], inplace=True)
    torch.testing.assert_close(evaluated(model, x), expected)
    assert list(fused_graphs(model)) == ["layers.0", "layers.1"]
    with pytest.raises(
        ScheduleError, match=r"\[layers.0.conv, layers.0.bn, layers.0.relu\] is to be fused twice"
    ):
        fuse_modules(model, ["layers.0.conv", "layers.0.bn", "layers.0.relu"])
    # A module around those takes over what they do.
    fuse_modules(model, ["last", "norm"], inplace=True)
    torch.testing.assert_close(evaluated(model, x), expected)
    assert list(fused_graphs(model)) == [""]
    assert len(regions_of(model)) == 3
    assert norms(model) == 1


def test_a_container_that_is_not_called_itself():
    model, x = Nested().eval(), image()
    fused = fuse_modules(model, ["unused.0", "unused.1"], (x,))
    torch.testing.assert_close(evaluated(fused, x), evaluated(model, x))
    assert list(fused_graphs(fused)) == [""]
    assert norms(fused) == 3


@pytest.mark.parametrize("training", [True, False])
def test_regions_are_those_that_rules_make(training: bool):
    model, x = Net().train(training), image()
    fused = fuse_modules(model, CONV_BN_RELU, (x,))
    (mine,) = dovetail.regions(fused_graphs(fused)[""][-1])
    (theirs,) = dovetail.regions(dovetail.fuse(dovetail.capture(model, (x,))))
    assert (mine.kind, dict(mine.attrs)) == (theirs.kind, dict(theirs.attrs))
    assert mine.arguments == theirs.arguments


def test_a_backend_runs_the_regions():
    class Mine(dovetail.Backend):
        name = "mine"
        version = "1"

        def supports(self, region: dovetail.Region) -> Literal[True]:
            return True

        def compile(self, region: dovetail.Region, examples: Any) -> Any:
            seen.append(region.kind)
            return region.body

    seen: list[str] = []

    model, x = Net().eval(), image()
    fused = fuse_modules(model, CONV_BN_RELU, (x,), backends=Mine())
    torch.testing.assert_close(evaluated(fused, x), evaluated(model, x))
    assert [r.backend for r in regions_of(fused)] == ["mine"]
    assert set(seen) == {"conv_bn_act"}


class Scaled(nn.Module):
    """A part that is given other values than the model, in the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(32, 32), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.part(100 * x)


@needs_int8
@pytest.mark.parametrize("way", ["fuse_modules", "schedule"])
@torch.no_grad()
def test_sample_inputs_are_those_of_the_model_and_not_of_a_part(way: str):
    model, x = Scaled().eval(), torch.randn(8, 32)
    backend, expected = Int8([(x,), (-x,)]), model(x)
    if way == "fuse_modules":
        fast = fuse_modules(model, ["part.0", "part.1"], (x,), backends=backend)
    else:
        s = dovetail.schedule(model, (x,))
        s.fuse(s["part"].find(dovetail.rules.DEFAULT["linear_relu"]), backends=backend)
        fast = s.build()
    assert integers(fast, x) == 1
    assert off(fast(x), expected) < 0.02
