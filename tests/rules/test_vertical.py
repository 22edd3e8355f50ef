"""Vertical fusion: which operations are in a group, which are not, and why."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dovetail
from dovetail.rules.rule import Limits
from dovetail.rules.vertical import groups
from tests.outlining.helpers import trace
from tests.rules.proposal_helpers import (
    bodies,
    captured,
    fused,
    proposed,
    refusals,
    relisted,
    structure,
    why_not,
)

SQUARE = (4, 4)


def test_elementwise_and_injective_operations_are_one_group() -> None:
    gm, inputs = captured(lambda x: torch.exp(x + 1).squeeze(0), (1, 4))
    assert proposed(gm, groups()) == [["add", "exp", "squeeze"]]
    fused(gm, groups(), *inputs)


def test_an_anchor_takes_no_producer_in() -> None:
    gm, _ = captured(lambda x, w: torch.mm(torch.relu(x), w), SQUARE, SQUARE)
    assert proposed(gm, groups()) == []
    assert refusals(gm, groups()) == {
        ("relu", "mm"): "'mm' is a matrix product: what it reads is not fused into it"
    }


def test_behind_an_anchor_only_elementwise_work_of_its_shape_fuses() -> None:
    gm, inputs = captured(lambda x, w: torch.relu(torch.mm(x, w).transpose(0, 1)), SQUARE, SQUARE)
    assert proposed(gm, groups()) == [["transpose", "relu"]]
    assert (
        "'transpose' after it is not elementwise work of its shape"
        in refusals(gm, groups())["mm", "transpose"]
    )
    fused(gm, groups(), *inputs)

    gm, inputs = captured(lambda x, w, b: torch.relu(torch.mm(x, w) + b), SQUARE, SQUARE, (4,))
    assert proposed(gm, groups()) == [["mm", "add", "relu"]]
    fused(gm, groups(), *inputs)

    gm, _ = captured(lambda x, w, b: torch.mm(x, w) + b, SQUARE, (4, 1), SQUARE)
    assert proposed(gm, groups()) == []


def test_nothing_fuses_behind_a_reduction() -> None:
    gm, inputs = captured(lambda x: torch.exp(x).sum(1).log().neg(), SQUARE)
    assert proposed(gm, groups()) == [["exp", "sum_1"], ["log", "neg"]]
    assert refusals(gm, groups())["sum_1", "log"] == "'sum_1' is a reduction: nothing is fused after it"
    fused(gm, groups(), *inputs)


def two_convolutions(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    c = F.conv2d(x + 1, u)
    c = c + (1 + c)
    return F.conv2d(c, v) + F.conv2d(c, w)


def test_of_two_anchors_one_takes_what_follows_both() -> None:
    gm, inputs = captured(two_convolutions, (1, 3, 8, 8), *[(3, 3, 1, 1)] * 3)
    pair, first = proposed(gm, groups())
    assert first == ["conv2d", "add_1", "add_2"]
    assert pair in (["conv2d_1", "add_3"], ["conv2d_2", "add_3"])
    loser = "conv2d_2" if pair[0] == "conv2d_1" else "conv2d_1"
    assert (
        "cannot join what is fused after 'conv2d_1', a convolution" in refusals(gm, groups())[loser, "add_3"]
    )
    fused(gm, groups(), *inputs)


def test_an_anchor_that_loses_keeps_what_is_its_own() -> None:
    def function(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.relu(torch.mm(x, v)) + torch.sigmoid(torch.mm(x, w)))

    gm, inputs = captured(function, SQUARE, SQUARE, SQUARE)
    sizes = [len(group) for group in proposed(gm, groups())]
    assert sizes == [2, 4]
    fused(gm, groups(), *inputs)


def test_diamonds_are_one_group_and_nested_ones_too() -> None:
    def diamond(x: Tensor, w: Tensor) -> Tensor:
        m = torch.mm(x, w)
        return torch.relu(m) + torch.tanh(m)

    def nested(x: Tensor, w: Tensor) -> Tensor:
        m = torch.mm(x, w)
        a = torch.relu(m)
        return (torch.exp(a) + torch.tanh(a)) * torch.sin(m) + m

    for function in (diamond, nested):
        gm, inputs = captured(function, SQUARE, SQUARE)
        assert [len(group) for group in proposed(gm, groups())] == [4 if function is diamond else 8]
        fused(gm, groups(), *inputs)


def test_a_diamond_with_an_anchor_in_it_is_not() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        a = torch.relu(x + 1)
        return torch.mm(a, w) + a

    gm, _ = captured(function, SQUARE, SQUARE)
    assert proposed(gm, groups()) == [["add", "relu"], ["mm", "add_1"]]
    assert why_not(gm, groups(), "relu", "mm") == [
        "'mm' is a matrix product: what it reads is not fused into it"
    ]
    assert why_not(gm, groups(), "add", "add_1") == ["between them is 'mm', a matrix product"]


def test_a_producer_of_two_anchors_stays_alone() -> None:
    def function(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        a = torch.relu(x)
        return torch.cat([torch.mm(a, v), torch.mm(a, w)])

    gm, _ = captured(function, SQUARE, SQUARE, SQUARE)
    assert proposed(gm, groups()) == []


def test_softmax_by_hand() -> None:
    def softmax(x: Tensor) -> Tensor:
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)

    gm, inputs = captured(softmax, SQUARE)
    assert proposed(gm, groups()) == [["sub", "exp"]]
    reasons = refusals(gm, groups())
    assert reasons["amax", "sub"] == "'amax' is a reduction: nothing is fused after it"
    assert reasons["exp", "sum_1"] == "'exp' is also read by 'div', outside the group of 'sum_1'"
    fused(gm, groups(), *inputs)


def residual_blocks(x: Tensor, *weights: Tensor) -> Tensor:
    for w, b in zip(weights[::2], weights[1::2], strict=True):
        x = x + torch.relu(torch.mm(x, w) + b)
    return x


def test_three_residual_blocks_share_one_body() -> None:
    gm, inputs = captured(residual_blocks, SQUARE, *[SQUARE, (4,)] * 3)
    assert [len(group) for group in proposed(gm, groups())] == [4, 4, 4]
    assert bodies(fused(gm, groups(), *inputs)) == 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (two_convolutions, [(1, 3, 8, 8), *[(3, 3, 1, 1)] * 3]),
        (residual_blocks, [SQUARE, *[SQUARE, (4,)] * 3]),
        (lambda x, v, w: torch.tanh(torch.relu(torch.mm(x, v)) + torch.mm(x, w)), [SQUARE] * 3),
        (lambda x, w: (torch.mm(-x, w), torch.exp(-x) + torch.sin(x)), [SQUARE] * 2),
    ],
)
def test_neither_listing_nor_names_nor_operand_order_matter(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], seed: int
) -> None:
    gm, _ = captured(function, *shapes)
    other = relisted(gm, seed)
    assert [n.name for n in other.graph.nodes] != [n.name for n in gm.graph.nodes]
    assert structure(other, groups()) == structure(gm, groups()) != []


def test_a_cheap_producer_is_cloned_for_the_reader_that_fuses() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        n = torch.neg(x)
        return torch.mm(n, w), torch.exp(n)

    gm, inputs = captured(function, SQUARE, SQUARE)
    assert proposed(gm, groups()) == [["neg", "exp"]]
    new = fused(gm, groups(), *inputs)
    (region,) = dovetail.regions(new)
    assert region.escapes["neg"].policy == "duplicate"
    assert "neg" in {n.name for n in new.graph.nodes}


def test_a_producer_that_costs_more_to_redo_than_to_store_stays_out() -> None:
    def function(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        n = torch.addcmul(x, y, z)
        return torch.mm(n, w), torch.exp(n)

    gm, _ = captured(function, *[SQUARE] * 4)
    assert proposed(gm, groups()) == []
    assert "costs more" in refusals(gm, groups())["addcmul", "exp"]


def test_a_producer_with_two_readers_that_fuse_is_not_cloned() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        n = torch.neg(x)
        return torch.mm(n, w), torch.exp(n), torch.sin(n)

    gm, _ = captured(function, SQUARE, SQUARE)
    assert proposed(gm, groups()) == []


def test_only_elementwise_work_is_cloned_into_what_follows_an_anchor() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        t = x.transpose(0, 1)
        return torch.mm(x, w) + torch.exp(t), torch.mm(t, w)

    gm, inputs = captured(function, SQUARE, SQUARE)
    (group,) = proposed(gm, groups())
    assert "exp" in group
    assert "transpose" not in group
    fused(gm, groups(), *inputs)


def test_what_draws_at_random_is_grouped_but_never_cloned() -> None:
    gm, inputs = captured(lambda x: F.dropout(x + 1, 0.5, True) * 2, SQUARE)
    (group,) = proposed(gm, groups())
    assert {"add", "mul"} < set(group)
    fused(gm, groups(), *inputs)

    def shared(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        d = torch.bernoulli(x.sigmoid())
        return torch.mm(d, w), torch.exp(d)

    gm, _ = captured(shared, SQUARE, SQUARE)
    assert proposed(gm, groups()) == [["sigmoid", "bernoulli"]]


def test_a_tuple_and_its_parts_are_one() -> None:
    def gates(x: Tensor, w: Tensor) -> Tensor:
        a, b = torch.mm(x, w).split(2, 1)
        return torch.sigmoid(a) * torch.tanh(b)

    gm, inputs = captured(gates, SQUARE, SQUARE)
    (group,) = proposed(gm, groups())
    assert len(group) == 6
    assert "mm" not in group
    fused(gm, groups(), *inputs)


def test_nothing_but_views_is_no_group() -> None:
    gm, _ = captured(lambda x, w: torch.mm(x.diagonal().unsqueeze(0).expand(x.shape), w), SQUARE, SQUARE)
    assert proposed(gm, groups()) == []
    assert "only views and reshapes: no value is computed" in refusals(gm, groups()).values()


def test_effects_are_not_crossed() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        a = F.dropout(x, 0.5, True)
        b = F.dropout(y, 0.5, True)
        c = F.dropout(b * 2, 0.5, True)
        return torch.mm(F.dropout(a * 3, 0.5, True), c)

    gm = trace(function)
    inputs = (torch.randn(4, 4), torch.randn(4, 4))
    assert proposed(gm, groups()) == [["dropout", "mul_1"], ["dropout_1", "mul", "dropout_2"]]
    assert refusals(gm, groups())["mul_1", "dropout_3"] == "effects would be reordered"
    fused(gm, groups(), *inputs)


def test_a_write_in_between_keeps_apart() -> None:
    def function(x: Tensor) -> Tensor:
        a = x * 2
        b = a.view(-1)
        c = operator.add(a, 1)
        b.add_(1)
        return c * a

    gm = trace(function)
    members = proposed(gm, groups())
    assert not [g for g in members if "add_" in g]
    fused(gm, groups(), torch.randn(4, 4))


def test_limits_hold_while_growing() -> None:
    def chain(x: Tensor, w: Tensor) -> Tensor:
        x = torch.mm(x, w)
        for _ in range(9):
            x = torch.sin(x)
        return x

    gm, inputs = captured(chain, SQUARE, SQUARE)
    members = proposed(gm, groups(), limits=Limits(nodes=4))
    assert max(len(group) for group in members) == 4
    assert ["mm", "sin", "sin_1", "sin_2"] in members
    assert "larger than 4 operations" in " ".join(refusals(gm, groups(), limits=Limits(nodes=4)).values())
    fused(gm, groups(), *inputs, limits=Limits(nodes=4))


def test_excluded_operations_and_regions_of_its_own_kind_stay_out() -> None:
    gm, _ = captured(lambda x: torch.sin(torch.exp(torch.exp(x + 1) * 2)) + 3, SQUARE)
    at = [n.name for n in gm.graph.nodes].index("mul")
    excluded = {at: "the user said so"}
    assert proposed(gm, groups(), barred=excluded) == [["add", "exp"], ["exp_1", "sin", "add_1"]]
    assert why_not(gm, groups(), "exp", "mul", barred=excluded) == [
        "'mul' may not be taken: the user said so"
    ]

    once = dovetail.outline(gm, ["exp", "mul"], kind="group")
    assert proposed(once, groups()) == [["exp_1", "sin", "add_1"]]
    assert "a region of kind 'group' already" in why_not(once, groups(), "add", "group_0")[0]
    other = groups("other", name="other")
    assert len(proposed(once, other)[0]) == 6
    assert proposed(once, groups(nests=True)) == proposed(once, other)


def test_a_region_is_taken_in_by_what_it_computes() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(torch.mm(x, w) + 1)

    gm, inputs = captured(function, SQUARE, SQUARE)
    anchored = dovetail.outline(gm, ["mm", "add"], kind="linear_add")
    (group,) = proposed(anchored, groups())
    assert set(group) == {"linear_add_0", "add", "relu"}
    fused(anchored, groups(), *inputs)
    softened = dovetail.outline(
        captured(lambda x: torch.softmax(x, -1) * 2, SQUARE)[0], ["softmax"], kind="softmax"
    )
    assert proposed(softened, groups()) == []


def test_size_one_if_asked_for() -> None:
    gm, _ = captured(lambda x, w: torch.mm(torch.relu(x), w), SQUARE, SQUARE)
    assert proposed(gm, groups(min_size=1)) == [["mm"], ["relu"]]


def test_opaque_regions_are_described_by_their_kind() -> None:
    gm, _ = captured(lambda x: torch.relu(x.topk(2).values).exp(), SQUARE)
    inner = dovetail.outline(gm, ["topk", "relu"], kind="best")
    assert why_not(inner, groups(), "best_0", "exp") == [
        "'best_0' is a region of kind 'best' already: nothing is fused after it"
    ]


def test_rules_are_values() -> None:
    assert groups() == groups()
    assert groups(min_size=3) != groups()
    assert hash(groups()) == hash(groups())
    assert "min_size=2" in repr(groups())
    with pytest.raises(dovetail.InvalidArgument, match="min_size=0 of rule 'groups'"):
        groups(min_size=0)
    with pytest.raises(dovetail.InvalidArgument, match="not a dotted name"):
        groups("no kind")


def test_reasons_for_any_two_operations() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.exp(x).sum(0) + 1
        return a * 2, torch.mm(x, w).topk(2).values + 1

    gm, _ = captured(function, SQUARE, SQUARE)
    assert why_not(gm, groups(), "add", "mul") == []
    assert why_not(gm, groups(), "exp", "mul") == ["between them is 'sum_1', a reduction"]
    assert "'topk' is of no kind that is fused" in why_not(gm, groups(), "topk", "exp")
    assert "no value of" in why_not(gm, groups(), "mul", "topk")[-1]
