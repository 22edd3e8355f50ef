"""What holds for every rule that grows regions, on graphs of any shape."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

import dovetail
from dovetail import zoo
from dovetail.rules.horizontal import siblings
from dovetail.rules.partition import capability
from dovetail.rules.rule import Limits, Refusal, Rule, RuleContext
from dovetail.rules.vertical import groups
from tests.outlining.helpers import equal, run
from tests.rules.proposal_helpers import (
    candidates,
    fused,
    is_connected,
    is_legal,
    moved,
    relisted,
    requests,
    structure,
)
from tests.rules.random_graphs import Step, built, inputs, steps
from tests.zoo_graphs import zoo_graph, zoo_inputs

BUSY = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
SOME = {"sin", "add", "mul", "t", "max", "bernoulli", "add_", "cat"}
RULES = [
    groups(),
    groups(min_size=1),
    capability(SOME, "some"),
    capability(SOME, "some", join_siblings=True),
    capability(lambda node: True, "all", min_size=1),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@BUSY
@given(program=steps(effects=True), values=st.booleans(), nodes=st.sampled_from([None, None, 2, 5]))
def test_all_that_is_proposed_is_legal_together_and_changes_nothing(
    rule: Rule, program: list[Step], values: bool, nodes: int | None
) -> None:
    gm = built(program, values=values)
    limits = Limits(nodes=nodes)
    context = RuleContext(gm, limits=limits)
    proposals = candidates(context, rule)
    members = [i for c in proposals for i in c.members]
    assert len(members) == len(set(members))
    if rule.kind != "group" and not getattr(rule, "join_siblings", False):
        assert all(is_connected(context, c.members) for c in proposals)
    assert is_legal(context, {i: k for k, c in enumerate(proposals) for i in moved(c)})
    fused(gm, rule, *inputs(), limits=limits)


@BUSY
@given(program=steps(effects=True))
def test_each_set_of_siblings_is_legal_and_changes_nothing(program: list[Step]) -> None:
    gm = built(program)
    for rule in (siblings(), siblings(follow=True), siblings({"sin", "add", "mul"}, alike=False)):
        context = RuleContext(gm)
        for request in requests(context, rule):
            new = dovetail.outline(gm, [request])
            assert equal(run(new, *inputs()), run(gm, *inputs()))


@pytest.mark.parametrize("rule", [*RULES, siblings(), siblings(follow=True)], ids=repr)
@BUSY
@given(program=steps(), seed=st.integers(0, 99))
def test_listing_and_names_and_operand_order_do_not_matter(
    rule: Rule, program: list[Step], seed: int
) -> None:
    gm = built(program)
    other = relisted(gm, seed)
    assert structure(other, rule) == structure(gm, rule)


@BUSY
@given(program=steps(effects=True, most=16), picks=st.lists(st.integers(0, 3), min_size=40, max_size=40))
def test_no_two_neighbouring_regions_could_be_one(program: list[Step], picks: list[int]) -> None:
    gm = built(program, values=False)
    context = RuleContext(gm)
    picked = {node for node, pick in zip(context.nodes, picks * 3, strict=False) if pick}
    rule = capability(lambda node: node in picked, "picked", min_size=1)
    number = {i: k for k, c in enumerate(candidates(context, rule)) for i in c.members}
    for late, reads in enumerate(context.index.data):
        for early in reads:
            if early in number and late in number and number[early] != number[late]:
                one = {i: number[early] if k == number[late] else k for i, k in number.items()}
                assert not is_legal(context, one)
    joined = capability(lambda node: node in picked, "picked", min_size=1, join_siblings=True)
    number = {i: k for k, c in enumerate(candidates(context, joined)) for i in c.members}
    for a, b in permutations(set(number.values()), 2):
        assert not is_legal(context, {i: a if k == b else k for i, k in number.items()})


@BUSY
@given(program=steps(effects=True), rule=st.sampled_from(RULES))
def test_fusing_what_is_fused_changes_nothing(program: list[Step], rule: Rule) -> None:
    gm = built(program)
    for _ in range(6):
        asked = requests(RuleContext(gm), rule)
        if not asked:
            break
        gm = dovetail.outline(gm, asked)
    assert not requests(RuleContext(gm), rule)


def every_fourth_is_not(gm: GraphModule) -> Rule:
    odd = {node for i, node in enumerate(gm.graph.nodes) if i % 4 == 3}
    return capability(lambda node: node not in odd, "most")


def chain(n: int) -> list[Step]:
    return [("sin", 0, 0)] * n


def residual(n: int) -> list[Step]:
    return [step for _ in range(n // 8) for step in [*[("sin", 0, 0)] * 6, ("mm", 0, 1), ("add", 0, 7)]]


def nested_skips(n: int) -> list[Step]:
    return [("sin", 0, 0)] * (n // 2) + [("add", 0, 2 * i + 1) for i in range(n // 2)]


def star(n: int) -> list[Step]:
    return [step for i in range(n // 3) for step in [("sin", 3 * i, 0), ("mm", 0, 0), ("add", 0, 1)]]


@pytest.mark.parametrize("shape", [chain, residual, nested_skips, star])
@pytest.mark.parametrize("make", [lambda gm: groups(), every_fourth_is_not, lambda gm: siblings()])
def test_time_grows_with_the_graph(
    shape: Callable[[int], list[Step]], make: Callable[[GraphModule], Rule]
) -> None:
    seconds: list[float] = []
    for n in (1_500, 6_000):
        gm = built(shape(n), values=False)
        best = 1e9
        for _ in range(2):
            context, rule = RuleContext(gm), make(gm)
            _ = context.order
            start = time.thread_time()
            refused = [p for p in rule.propose(context) if isinstance(p, Refusal)]
            best = min(best, time.thread_time() - start)
            assert len(refused) <= 2_000
        seconds.append(best)
    assert seconds[1] < 12 * seconds[0] + 0.1


@pytest.mark.parametrize("name", zoo.names())
def test_models_of_the_zoo(name: str) -> None:
    gm, given = zoo_graph(name), zoo_inputs(name)
    anchors = {"linear", "matmul", "conv2d", "einsum"}
    for rule in (groups(), capability(lambda node: not _calls(node, anchors), "rest")):
        asked = requests(RuleContext(gm), rule)
        assert asked
        new = dovetail.outline(gm, asked)
        torch.manual_seed(0)
        expected: Any = gm(*given.args, **given.kwargs)
        torch.manual_seed(0)
        result: Any = new(*given.args, **given.kwargs)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        dovetail.check(new)


def _calls(node: Node, names: set[str]) -> bool:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in names
