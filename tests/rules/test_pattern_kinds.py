"""Patterns that write, draw, return parts of tuples, or have settings that mean nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import dovetail
from dovetail.rules.patterns.alternatives import Const
from dovetail.rules.patterns.pattern_rule import rule
from tests.rules.helpers import declined, matches, outlined, proposals


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.batch, self.layer = nn.BatchNorm2d(3, affine=False), nn.LayerNorm(5)

    def forward(self, x):
        return self.layer(F.relu(self.batch(x))) * 2 + 1


IMAGE = torch.randn(2, 3, 4, 5)


def test_a_pattern_that_updates_statistics_is_matched_in_a_model_that_trains() -> None:
    @rule(kind="batch_relu")
    def batch_relu(x, mean, variance):
        return F.relu(F.batch_norm(x, mean, variance, None, None, True))

    gm = dovetail.capture(Normed().train(), (IMAGE,))
    (members,) = matches(batch_relu, gm)
    assert "_native_batch_norm_legit_functional" in members
    outlined(batch_relu, gm, IMAGE)
    assert matches(batch_relu, dovetail.capture(Normed().eval(), (IMAGE,))) == []


def test_a_pattern_may_write_in_place_what_it_created() -> None:
    @rule(kind="scaled")
    def scaled(x):
        return (x * 2).add_(1)

    gm = dovetail.capture(Normed().eval(), (IMAGE,))
    assert matches(scaled, gm) == [["mul", "add"]]


def test_settings_that_choose_a_library_are_not_compared() -> None:
    @rule(kind="layer_norm")
    def layer_norm(x, weight, bias, eps=Const()):
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    (candidate,), _, _ = proposals(layer_norm, dovetail.capture(Normed().eval(), (IMAGE,)))
    assert candidate.attrs == {"eps": 1e-5}


def test_a_text_can_be_captured() -> None:
    @rule(kind="scores")
    def scores(q, k, equation=Const("bhid,bhjd->bhij")):
        return torch.einsum(equation, q, k) * 2

    inputs = (torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5))
    gm = dovetail.capture(lambda q, k: torch.einsum("abcd,abed->abce", q, k) * 2, inputs)
    (candidate,), _, _ = proposals(scores, gm)
    assert candidate.attrs == {"equation": "abcd,abed->abce"}


def test_parts_of_a_tuple_that_others_use_move_along() -> None:
    @rule(kind="top")
    def top(x):
        return torch.topk(x, 2, -1).values * 2

    def both(x):
        values, places = torch.topk(x, 2, -1)
        return values * 2, places

    x = torch.randn(3, 5)
    gm = dovetail.capture(both, (x,))
    (members,) = matches(top, gm)
    assert members == ["topk", "getitem", "getitem_1", "mul"]
    new = outlined(top, gm, x)
    (region,) = dovetail.regions(new)
    assert {n.name for n in region.outputs} == {"mul", "getitem_1"}


def test_a_random_pattern_draws_the_same_numbers() -> None:
    @rule(kind="dropout_add")
    def dropout_add(x, residual, p=Const()):
        return F.dropout(x, p) + residual

    inputs = (torch.randn(4, 4), torch.randn(4, 4))
    gm = dovetail.capture(lambda x, r: F.dropout(x, 0.3) + r, inputs)
    (candidate,), _, _ = proposals(dropout_add, gm)
    assert candidate.attrs == {"p": 0.3}
    outlined(dropout_add, gm, *inputs)
    assert declined(dropout_add, dovetail.capture(lambda x, r: F.dropout(x, 0.3, False) + r, inputs)) == []
