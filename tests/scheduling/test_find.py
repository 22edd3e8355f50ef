"""Finding: patterns, rules, classes, paths, predicates and operators; and why nothing was found."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.scheduling.schedule import schedule
from tests.scheduling.models import activation, is_gelu, mlp, net, relu_plus_one


def test_a_pattern_function_binds_inputs():
    model, x = net()
    matches = schedule(model, (x,))["blocks.*"].find(mlp)
    assert [m.module_path for m in matches] == ["blocks.0", "blocks.1", "blocks.2"]
    match = matches[0]
    assert isinstance(match, dovetail.Match)
    assert [n.name for n in match.nodes] == ["linear", "gelu", "linear_1"]
    assert match["w"].shape == (8, 8)
    assert match["w"].is_parameter
    assert not match["x"].is_parameter


def test_a_rule_captures_constants():
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x, 1) * 2

    @dovetail.rule(kind="scaled")
    def scaled(x: Tensor, by: float = dovetail.Const()) -> Tensor:
        return torch.softmax(x, 1) * by

    s = schedule(Scaled(), (torch.randn(2, 3),))
    (match,) = s.find(scaled)
    assert match["by"] == 2
    assert s.fuse(match).attrs == {"by": 2}


def test_literals_and_edges_count():
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x, 0) * 5

    def pattern(x: Tensor) -> Tensor:
        return torch.softmax(x, 1) * 2

    matches = schedule(Other(), (torch.randn(2, 3),)).find(pattern)
    assert matches == []
    assert matches.why


def test_a_class_of_modules():
    model, x = net()
    s = schedule(model, (x,))
    matches = s.find(nn.LayerNorm)
    assert [m.module_path for m in matches] == ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm"]
    assert [n.target for m in matches for n in m.nodes] == [torch.ops.aten.layer_norm.default] * 3


def test_a_regular_expression_on_paths():
    model, x = net()
    s = schedule(model, (x,))
    assert [m.module_path for m in s.find(r"blocks\.[02]\.up$")] == ["blocks.0.up", "blocks.2.up"]
    assert [m.module_path for m in s.find(re.compile("head"))] == ["head"]
    with pytest.raises(dovetail.InvalidArgument, match="not a regular expression"):
        s.find("blocks.(")


def test_a_predicate_and_an_operator():
    model, x = net()
    part = schedule(model, (x,))["blocks.*"]
    for what in (is_gelu, torch.ops.aten.gelu, torch.ops.aten.gelu.default):
        assert [n.name for m in part.find(what) for n in m.nodes] == ["gelu"] * 3
    assert len(part.find(where=lambda n: "linear" in n.name)) == 6


def test_a_predicate_that_raises_is_reported():
    model, x = net()
    with pytest.raises(dovetail.InvalidArgument, match="raised ZeroDivisionError"):
        schedule(model, (x,))["blocks.0"].find(where=lambda n: 1 / 0)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (nn.LSTM, "no operation came from a module of class LSTM"),
        ("lstm", "at a path with lstm"),
        (torch.ops.aten.tanh, "no operation is accepted by"),
    ],
)
def test_no_match_is_an_empty_list_with_the_reasons(what: object, why: str):
    model, x = net()
    matches = schedule(model, (x,))["blocks.0"].find(what)
    assert matches == []
    assert why in matches.why


def test_a_near_miss_is_reported():
    def pattern(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w, b), approximate="tanh"), v, c)

    model, x = net()
    matches = schedule(model, (x,))["blocks.0"].find(pattern)
    assert matches == []
    assert "tanh" in matches.why


def test_matches_do_not_overlap_and_come_in_execution_order():
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu().relu().relu().relu()

    def pair(x: Tensor) -> Tensor:
        return x.relu().relu()

    matches = schedule(Chain(), (torch.randn(2),)).find(pair)
    names = [n.name for m in matches for n in m.nodes]
    assert len(matches) == 2
    assert names == ["relu", "relu_1", "relu_2", "relu_3"]


@pytest.mark.parametrize("spelling", ["module", "function", "method"])
def test_however_it_is_spelled_and_wherever_it_is(spelling: str):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            result = {"module": self.relu, "function": F.relu, "method": Tensor.relu}[spelling](x)
            return result + 1

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.inner = nn.Conv2d(1, 1, 1), Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.conv(x))

    s = schedule(Outer(), (torch.randn(1, 1, 2, 2),))
    assert len(s.find(relu_plus_one)) == 1
    assert len(s["inner"].find(relu_plus_one)) == 1


def test_find_takes_one_description():
    model, x = net()
    part = schedule(model, (x,))["blocks.0"]
    with pytest.raises(dovetail.InvalidArgument, match="one of a description and `where`"):
        part.find(mlp, where=is_gelu)
    with pytest.raises(dovetail.InvalidArgument, match="find takes a pattern function"):
        part.find(3)


def test_a_rule_of_the_library():
    model, x = net()
    s = schedule(model, (x,))
    matches = s.find(dovetail.rules.modules(nn.LayerNorm, kind="norm"))
    assert [m.kind for m in matches] == ["norm"] * 3
    assert len(s.find(activation)) == 3
