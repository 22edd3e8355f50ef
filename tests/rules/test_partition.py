"""What a backend takes: regions as large as they can be, and why they are not larger."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node, symbolic_trace

import dovetail
from dovetail.errors import RuleError
from dovetail.rules.partition import capability
from dovetail.rules.rule import Decline, Limits, RuleContext, RuleSet
from tests.outlining.helpers import drawn, trace
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

aten = torch.ops.aten
SQUARE = (4, 4)
ARITHMETIC = capability({"add", "sub", "mul"}, "npu.arithmetic")


def test_a_detour_that_does_not_come_back_is_no_obstacle() -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        c = a + b
        d = a @ b
        e = a - c
        return d * e, b @ a

    gm, inputs = captured(function, SQUARE, SQUARE)
    assert proposed(gm, ARITHMETIC) == [["add", "sub", "mul"]]
    fused(gm, ARITHMETIC, *inputs)


def test_a_detour_that_comes_back_makes_two_regions() -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        c = a + b
        d = c @ b
        e = a - c
        return d * e, b @ a

    gm, inputs = captured(function, SQUARE, SQUARE)
    every = capability({"add", "sub", "mul"}, "npu.arithmetic", min_size=1)
    assert proposed(gm, every) == [["mul"], ["add", "sub"]]
    fused(gm, every, *inputs)
    assert proposed(gm, ARITHMETIC) == [["add", "sub"]]
    reasons = refusals(gm, ARITHMETIC)
    assert reasons["sub", "mul"] == "one region would depend on itself: 'matmul' is between them"
    assert reasons["mul",] == "a region has at least 2 operations"
    assert "between them is 'matmul', which is not accepted" in why_not(gm, ARITHMETIC, "add", "mul")


def test_two_backends_claim_nothing_of_each_other() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        a = torch.relu(x + y) - y
        b = F.gelu(F.gelu(a))
        return torch.relu(b + a) - a

    gm, inputs = captured(function, SQUARE, SQUARE)
    one = capability({"add", "sub", "relu"}, "npu.one")
    two = capability(lambda node: node.target is aten.gelu.default, "npu.two")
    assert proposed(gm, one) == [["add", "relu", "sub"], ["add_1", "relu_1", "sub_1"]]
    assert proposed(gm, two) == [["gelu", "gelu_1"]]
    first = fused(gm, one, *inputs)
    assert bodies(first) == 1
    assert proposed(first, one) == []
    assert proposed(first, two) == [["gelu", "gelu_1"]]
    both = fused(first, two, *inputs)
    assert sorted(r.kind for r in dovetail.regions(both)) == ["npu.one", "npu.one", "npu.two"]


def test_siblings_are_joined_only_on_request() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.mm(torch.sin(x) + 1, w) + 1, torch.mm(torch.exp(x) + 2, w) + 2

    gm, inputs = captured(function, SQUARE, SQUARE)
    names = {"sin", "exp", "add"}
    apart = capability(names, "npu")
    assert proposed(gm, apart) == [["exp", "add_2"], ["sin", "add"]]
    assert "are not connected" in why_not(gm, apart, "exp", "sin")[-1]
    together = capability(names, "npu", join_siblings=True)
    assert proposed(gm, together) == [["add_1", "add_3"], ["sin", "add", "exp", "add_2"]]
    assert why_not(gm, together, "exp", "sin") == []
    fused(gm, together, *inputs)


def test_effects_keep_their_order() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        a = torch.sin(x)
        b = torch.cos(a)
        a.add_(y)
        return a * b

    gm = trace(function)
    inputs = (torch.randn(4, 4), torch.randn(4, 4))
    rest = capability({"sin", "cos", "mul"}, "npu")
    assert proposed(gm, rest) == [["sin", "cos"]]
    assert refusals(gm, rest)["sin", "mul"] == "one region would depend on itself: 'add_' is between them"
    fused(gm, rest, *inputs)
    with_write = capability({"sin", "cos", "mul", "add_"}, "npu")
    assert proposed(gm, with_write) == [["sin", "cos", "add_", "mul"]]
    fused(gm, with_write, *inputs)


def test_a_tuple_takes_its_parts_along() -> None:
    def function(x: Tensor) -> Tensor:
        values, places = x.max(1)
        return values * 2 + places

    gm, inputs = captured(function, SQUARE)
    rule = capability({"max", "mul"}, "npu")
    (names,) = proposed(gm, rule)
    assert len(names) == 4
    fused(gm, rule, *inputs)


def test_limits_hold_while_growing() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.sin(x)
        return x

    gm, inputs = captured(chain, SQUARE)
    for joined in (False, True):
        rule = capability({"sin"}, "npu", join_siblings=joined)
        assert [len(names) for names in proposed(gm, rule, limits=Limits(nodes=4))] == [2, 4, 4]
        fused(gm, rule, *inputs, limits=Limits(nodes=4))


def test_excluded_operations_stay_out() -> None:
    gm, _ = captured(lambda x: torch.sin(torch.sin(torch.sin(x))), SQUARE)
    at = [n.name for n in gm.graph.nodes].index("sin_1")
    rule = capability({"sin"}, "npu", min_size=1)
    assert proposed(gm, rule, barred={at: "never"}) == [["sin"], ["sin_2"]]
    assert why_not(gm, rule, "sin", "sin_1", barred={at: "never"}) == ["'sin_1' may not be taken: never"]


@pytest.mark.parametrize(
    "ops",
    [
        {aten.add.Tensor},
        {aten.add},
        {torch.add},
        {operator.add},
        {"add"},
        {"aten.add.Tensor"},
        {"aten.add"},
        ["add", "add"],
        "add",
        aten.add.Tensor,
        torch.add,
    ],
)
def test_operators_in_every_spelling(ops: Any) -> None:
    gm, _ = captured(lambda x: torch.sin(x + 1 + 2), SQUARE)
    assert proposed(gm, capability(ops, "npu")) == [["add", "add_1"]]


def test_modules_methods_and_functions_by_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(torch.relu(self.act(x).relu())) * 2

    gm = symbolic_trace(Net())
    assert [len(names) for names in proposed(gm, capability({"relu"}, "npu"))] == [4]
    assert proposed(gm, capability({nn.ReLU}, "npu", min_size=1)) == [["act"]]
    assert proposed(gm, capability({nn.GELU}, "npu", min_size=1)) == []


def test_another_overload_is_another_operator() -> None:
    gm = drawn(
        lambda g: g.call_function(
            aten.add.Scalar, (g.call_function(aten.neg.default, (g.placeholder("x"),)), 1)
        )
    )
    assert proposed(gm, capability({aten.add.Tensor, aten.neg.default}, "npu")) == []
    assert len(proposed(gm, capability({aten.add, aten.neg}, "npu"))) == 1


def test_regions_of_other_kinds_are_accepted_by_kind_and_its_own_are_not() -> None:
    gm, inputs = captured(lambda x: torch.sin(torch.exp(torch.neg(x))) + 1, SQUARE)
    inner = dovetail.outline(gm, ["exp", "neg"], kind="soft")
    rule = capability({"soft", "sin", "add"}, "npu")
    (names,) = proposed(inner, rule)
    assert {"soft_0", "sin", "add"} < set(names)
    fused(inner, rule, *inputs)
    own = dovetail.outline(gm, ["exp", "neg"], kind="npu")
    assert proposed(own, capability({"npu", "sin", "add"}, "npu")) == [["sin", "add"]]
    assert len(proposed(own, capability({"npu", "sin", "add"}, "npu", nests=True))[0]) == 4


def test_a_predicate_declines_with_a_reason() -> None:
    def narrow(node: Node) -> bool | Decline:
        value = node.meta["val"]
        return True if value.shape[-1] == 4 else Decline("only rows of 4", at=node)

    gm, _ = captured(lambda x, y: (torch.sin(torch.sin(x)), torch.exp(y)), SQUARE, (4, 5))
    rule = capability(narrow, "npu")
    assert proposed(gm, rule) == [["sin", "sin_1"]]
    assert refusals(gm, rule) == {("exp",): "only rows of 4"}
    assert "'exp' is declined: only rows of 4" in why_not(gm, rule, "sin", "exp")


def test_a_predicate_that_answers_neither_yes_nor_no_is_an_error() -> None:
    gm, _ = captured(torch.sin, SQUARE)

    def vague(node: Node) -> Any:
        return 1

    with pytest.raises(RuleError, match="rule 'vague': the predicate returned int for 'sin'"):
        proposed(gm, capability(vague, "npu", name="vague"))

    def broken(node: Node) -> bool:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        proposed(gm, capability(broken, "npu"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: capability(set(), "npu"), "the set of operators is empty"),
        (lambda: capability({3}, "npu"), "3 is not an operator"),
        (lambda: capability(3, "npu"), "a predicate on nodes or a set of operators, got int"),  # pyright: ignore
        (lambda: capability({"aten.ad.Tensor"}, "npu"), "ATen has no operator 'aten.ad.Tensor'"),
        (lambda: capability({"aten.add.Tenser"}, "npu"), "ATen has no operator 'aten.add.Tenser'"),
        (lambda: capability({"add"}, "my npu"), "not a dotted name"),
        (lambda: capability({"add"}, "npu", min_size=0), "min_size=0 of rule 'capability:npu'"),
        (lambda: capability({"add"}, "npu", priority="high"), "priority 'high'"),  # pyright: ignore
        (lambda: capability({"add"}, "npu", name=""), "name ''"),
    ],
)
def test_bad_arguments_are_refused_when_the_rule_is_created(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(dovetail.InvalidArgument) as caught:
        make()
    assert message in str(caught.value)


def test_rules_are_values() -> None:
    assert capability({"add", "sub"}, "npu") == capability(["sub", "add"], "npu")
    assert capability({"add"}, "npu") != capability({"sub"}, "npu")
    assert hash(capability({"add"}, "npu")) == hash(capability({"add"}, "npu"))
    assert (
        repr(capability({"sub", "add"}, "npu")) == "capability({add, sub}, kind='npu', name='capability:npu')"
    )
    assert len(RuleSet(capability({"add"}, "npu"), capability({"add"}, "cpu"))) == 2


@pytest.mark.parametrize("seed", range(4))
def test_neither_listing_nor_names_nor_operand_order_matter(seed: int) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        c = a + b
        for k in range(4):
            d = c @ b
            e = torch.sin(a - c)
            c = d * e + c * k
        return c

    gm, _ = captured(function, SQUARE, SQUARE)
    assert structure(relisted(gm, seed), ARITHMETIC) == structure(gm, ARITHMETIC) != []


def test_the_predicate_is_asked_once_for_each_operation() -> None:
    gm, _ = captured(lambda x: x.max(1).values + 1, SQUARE)
    asked: list[str] = []

    def yes(node: Node) -> bool:
        asked.append(node.name)
        return True

    rule, context = capability(yes, "npu"), RuleContext(gm)
    for _ in range(2):
        list(rule.propose(context))
    assert sorted(asked) == ["add", "max_1"]
