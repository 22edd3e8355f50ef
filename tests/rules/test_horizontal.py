"""Operations side by side that read one value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node, symbolic_trace

import dovetail
from dovetail.rules.horizontal import siblings
from dovetail.rules.rule import Decline, Limits, RuleContext
from tests.outlining.helpers import equal, run
from tests.rules.proposal_helpers import (
    candidates,
    captured,
    proposed,
    refusals,
    relisted,
    requests,
    structure,
    why_not,
)

SQUARE = (4, 4)


def projections(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    q, k, v = (F.linear(x, w).permute(0, 2, 1) for w in (wq, wk, wv))
    return F.scaled_dot_product_attention(q, k, v)


SHAPES = [(2, 3, 4), SQUARE, SQUARE, SQUARE]


def outlined_each(gm: Any, rule: Any, *inputs: Any) -> None:
    for request in requests(RuleContext(gm), rule):
        new = dovetail.outline(gm, [request])
        dovetail.check(new)
        assert equal(run(new, *inputs), run(gm, *inputs))


def test_three_projections_of_one_value() -> None:
    gm, inputs = captured(projections, *SHAPES)
    assert proposed(gm, siblings()) == [["linear", "linear_1", "linear_2"]]
    assert proposed(gm, siblings({"linear"})) == [["linear", "linear_1", "linear_2"]]
    outlined_each(gm, siblings(), *inputs)


def test_what_follows_each_branch_comes_along_if_asked_for() -> None:
    gm, inputs = captured(projections, *SHAPES)
    rule = siblings(follow=True)
    (candidate,) = candidates(RuleContext(gm), rule)
    names = [RuleContext(gm).nodes[i].name for i in candidate.members]
    assert len(names) == 6
    heads, tails = names[::2], names[1::2]
    assert {h.replace("linear", "permute") for h in heads} == set(tails)
    assert [h.replace("linear", "permute") for h in heads] == tails
    outlined_each(gm, rule, *inputs)


def test_branches_that_go_on_otherwise_are_followed_no_further() -> None:
    def function(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.linear(x, v)) + torch.tanh(F.linear(x, w))

    gm, _ = captured(function, SQUARE, SQUARE, SQUARE)
    assert proposed(gm, siblings(follow=True)) == [["linear", "linear_1"]]

    def crossing(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        a, b = F.linear(x, v), F.linear(x, w)
        return (a + b.sum()) @ b

    gm, _ = captured(crossing, SQUARE, SQUARE, SQUARE)
    assert proposed(gm, siblings(follow=True)) == [["linear", "linear_1"]]


def test_branches_are_in_an_order_that_no_listing_changes() -> None:
    gm, _ = captured(projections, *SHAPES)
    rule = siblings(follow=True)

    def weights(gm: Any) -> list[str]:
        context = RuleContext(gm)
        (candidate,) = candidates(context, rule)
        heads = [context.nodes[i] for i in candidate.members[::2]]
        return [head.args[1].name for head in heads]  # type: ignore[union-attr]

    for seed in range(4):
        other = relisted(gm, seed)
        assert weights(other) == weights(gm)
        assert structure(other, rule) == structure(gm, rule)


def test_one_that_depends_on_another_is_no_sibling() -> None:
    def function(x: Tensor, v: Tensor) -> Tensor:
        a = F.linear(x, v)
        return F.linear(x, torch.relu(a))

    gm, _ = captured(function, SQUARE, SQUARE)
    assert proposed(gm, siblings()) == []
    expected = "one depends on the other: linear -> relu -> linear_1"
    assert refusals(gm, siblings())["linear", "linear_1"] == expected
    assert why_not(gm, siblings(), "linear_1", "linear") == [expected]


def test_dependent_readers_make_sets_of_their_own() -> None:
    def function(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        a, b = F.linear(x, u), F.linear(x, v)
        w = torch.relu(a + b)
        return F.linear(x, w) + F.linear(x, torch.tanh(w))

    gm, inputs = captured(function, SQUARE, SQUARE, SQUARE)
    assert proposed(gm, siblings({"linear"})) == [["linear", "linear_1"], ["linear_2", "linear_3"]]
    outlined_each(gm, siblings({"linear"}), *inputs)


def test_unlike_operations_are_no_siblings() -> None:
    def function(x: Tensor, v: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, v), F.linear(x, w, b), torch.mm(v, x)

    gm, _ = captured(function, SQUARE, SQUARE, SQUARE, (4,))
    assert proposed(gm, siblings()) == []
    assert "not alike" in refusals(gm, siblings())["linear", "linear_1"]
    assert "not alike: other operators" in why_not(gm, siblings(), "linear", "mm")[0]
    both = siblings({"linear"}, alike=False)
    assert proposed(gm, both) == [["linear", "linear_1"]]


def test_two_precisions_are_refused() -> None:
    def function(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x * v, x * w.to(torch.bfloat16)

    gm, _ = captured(function, SQUARE, SQUARE, SQUARE)
    reason = refusals(gm, siblings())["mul", "mul_1"]
    assert "float32 of rank 2" in reason
    assert "bfloat16 of rank 2" in reason


def test_effects_and_views_are_no_siblings() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return torch.bernoulli(x), torch.bernoulli(x), x.t(), x.t(), torch.sin(x), torch.sin(x)

    gm, _ = captured(lambda x: function(x.sigmoid()), SQUARE)
    assert proposed(gm, siblings()) == [["sin", "sin_1"]]
    assert refusals(gm, siblings())["bernoulli",] == "'bernoulli' has an effect: it draws at random"


def test_readers_of_one_weight_are_no_siblings() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.linear(x, self.weight) + F.linear(y, self.weight)

    gm = dovetail.capture(Tied(), (torch.randn(4, 4), torch.randn(4, 4)))
    assert proposed(gm, siblings()) == []


def test_leaf_modules_are_alike_by_what_they_are() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.wide = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.q(x), self.k(x), self.wide(x)

    assert proposed(symbolic_trace(Net()), siblings()) == [["q", "k"]]


def test_parts_of_a_tuple_are_values_of_their_own() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        a, b = x.split(2)
        return torch.exp(a), torch.exp(b), torch.sin(a), torch.sin(a * 1)

    gm, _ = captured(function, SQUARE)
    assert proposed(gm, siblings()) == []


def test_limits_and_the_least_number_of_branches() -> None:
    gm, _ = captured(lambda x: [torch.sin(x) for _ in range(5)], SQUARE)
    assert [len(names) for names in proposed(gm, siblings())] == [5]
    assert [len(names) for names in proposed(gm, siblings(), limits=Limits(nodes=2))] == [2, 2]
    assert proposed(gm, siblings(min_branches=6)) == []
    assert "fewer than 6 branches" in why_not(gm, siblings(min_branches=6), "sin", "sin_1")[0]


def test_a_predicate_selects() -> None:
    def small(node: Node) -> bool | Decline:
        return True if node.args[1] != 3.0 else Decline("three is too many", at=node)

    gm, _ = captured(lambda x: (x * 1.0, x * 2.0, x * 3.0), SQUARE)
    rule = siblings(small, "products", alike=False)
    assert proposed(gm, rule) == [["mul", "mul_1"]]
    assert refusals(gm, rule)["mul_2",] == "three is too many"
    assert why_not(gm, rule, "mul", "mul_1") == []


def test_rules_are_values() -> None:
    assert siblings() == siblings()
    assert siblings({"linear"}) == siblings(["linear"]) != siblings()
    assert repr(siblings({"linear"}, "qkv")) == "siblings({linear}, kind='qkv', name='qkv')"
    with pytest.raises(dovetail.InvalidArgument, match="min_branches=1"):
        siblings(min_branches=1)
    with pytest.raises(dovetail.InvalidArgument, match="give `of`"):
        siblings(alike=False)
    with pytest.raises(dovetail.InvalidArgument, match="is empty"):
        siblings([])
