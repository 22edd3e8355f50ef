"""The small graphs of the design that are about spellings, literals and branches, from the model to the regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

import dovetail
from dovetail import Const, rules
from tests.outlining.helpers import equal, run

X, Y, Z = (torch.randn(4, 4) for _ in range(3))
IMAGE = torch.randn(1, 2, 7, 7)


def fused(model: Any, inputs: tuple[Any, ...], by: Any) -> GraphModule:
    """Capture and fuse, and prove that values, the input graph and the way back are as they should be."""
    gm = dovetail.capture(model, inputs)
    before = dovetail.text(gm)
    new = dovetail.fuse(gm, by, on_error="raise")
    assert dovetail.text(gm) == before
    assert equal(run(new, *inputs), run(gm, *inputs))
    assert dovetail.text(dovetail.inline(new)) == before
    assert dovetail.text(dovetail.fuse(new, by)) == dovetail.text(new)
    return new


# 21


@dovetail.rule(kind="conv_relu_one")
def conv_relu_one(x, weight, bias):
    return F.relu(F.conv2d(x, weight, bias)) + 1


class ByModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(2, 3, 3), nn.ReLU()

    def forward(self, x):
        return self.act(self.conv(x)) + 1


class ByFunctions(ByModules):
    def forward(self, x):
        return torch.add(1, F.relu(F.conv2d(x, self.conv.weight, self.conv.bias)))


class ByMethods(ByModules):
    def forward(self, x):
        return torch.conv2d(x, self.conv.weight, self.conv.bias).relu().add(1)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("spelling", [ByModules, ByFunctions, ByMethods])
def test_one_match_however_it_is_spelled_and_wherever_it_stands(spelling: Any, depth: int) -> None:
    model: nn.Module = spelling()
    for _ in range(depth):
        model = Around(model)
    (region,) = dovetail.regions(fused(model, (IMAGE,), conv_relu_one))
    assert region.kind == "conv_relu_one"
    assert region.nodes == ("conv2d", "relu", "add")


def test_another_literal_is_no_match_and_the_reason_is_reported() -> None:
    class Two(ByModules):
        def forward(self, x):
            return self.act(self.conv(x)) + 2

    new = fused(Two(), (IMAGE,), conv_relu_one)
    assert not dovetail.regions(new)
    (near,) = dovetail.explain(new).declined
    assert (near.place, near.matched, near.wanted) == ("add", 3, 3)
    assert "2 where the pattern has 1" in near.reason


# 24


@dovetail.rule(kind="twice_softmax")
def twice_softmax(x):
    return torch.softmax(x, 0) * 2


@dovetail.rule(kind="scaled_softmax")
def scaled_softmax(x, dim=Const(), factor=Const()):
    return torch.softmax(x, dim) * factor


def test_literals_are_compared_and_captured_ones_are_in_the_attributes() -> None:
    (region,) = dovetail.regions(fused(lambda x: torch.softmax(x, 0) * 2, (X,), twice_softmax))
    assert region.attrs == {}
    for model, attrs in (
        (lambda x: torch.softmax(x, 1) * 2, {"dim": 1, "factor": 2}),
        (lambda x: torch.softmax(x, -2) * 5, {"dim": 0, "factor": 5}),
    ):
        new = fused(model, (X,), twice_softmax)
        assert not dovetail.regions(new)
        assert dovetail.explain(new).declined
        (region,) = dovetail.regions(fused(model, (X,), [twice_softmax, scaled_softmax]))
        assert (region.kind, region.attrs) == ("scaled_softmax", attrs)


# 26


@dovetail.rule(kind="cross")
def cross(x, y, z):
    return (x + y) * (y - z)


def subtraction_first(x, y, z):
    difference = y - z
    return (x + y) * difference


@pytest.mark.parametrize(
    "model",
    [lambda x, y, z: (x + y) * (y - z), subtraction_first, lambda x, y, z: (y - z) * (y + x)],
    ids=["as written", "the subtraction first", "operands swapped"],
)
def test_neither_listing_nor_operand_order_keeps_a_match_away(model: Any) -> None:
    (region,) = dovetail.regions(fused(model, (X, Y, Z), cross))
    assert set(region.nodes) == {"add", "sub", "mul"}


@pytest.mark.parametrize(
    "model",
    [lambda x, y, z: (x + y) * (z - y), lambda x, y, z: (x + z) * (y - z), lambda x, y, z: (x + y) + (y - z)],
    ids=["the difference turned", "another value shared", "another operator"],
)
def test_what_computes_something_else_does_not_match(model: Any) -> None:
    assert not dovetail.regions(fused(model, (X, Y, Z), cross))


# 28


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 5, 1)
        self.three = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x):
        return torch.cat([F.relu(self.one(x)), F.relu(self.two(x)), F.relu(self.three(x))], 1)


def test_small_convolutions_merge_and_are_fused_as_one() -> None:
    model = Branches().eval()
    pipe = dovetail.Pipeline([dovetail.MergeParallel(guard=None), dovetail.Fuse(rules.groups())])
    gm = dovetail.capture(model, (IMAGE,))
    new = pipe(gm, check=True)
    torch.testing.assert_close(new(IMAGE), model(IMAGE))
    members = [r.nodes for r in dovetail.regions(new)]
    assert ("merged_conv2d_0", "merged_relu_0") in members
    assert ("conv2d_2", "relu_2") in members


def test_as_siblings_they_are_one_region_beside_the_larger_one() -> None:
    by = rules.siblings(["conv2d"], kind="parallel", follow=True)
    new = fused(Branches().eval(), (IMAGE,), by)
    (region,) = dovetail.regions(new)
    assert set(region.nodes) == {"conv2d", "relu", "conv2d_1", "relu_1"}
    assert any("conv2d_2" in d.nodes for d in dovetail.explain(new).declined)
