"""Which candidates become regions when they cannot all be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.fusion.ledger import explain
from dovetail.rules.rule import Candidate, Proposal, Rule, RuleContext
from tests.fusion.helpers import Fixed, fused, held, reasons, sets
from tests.fusion.test_cost import Call
from tests.outlining.helpers import drawn, trace

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def chain(x: Tensor) -> Tensor:
    return x.relu().exp().tanh().sigmoid()


def test_a_candidate_becomes_a_region_that_has_the_rule_it_came_from() -> None:
    gm = fused(trace(chain), Fixed("pair", "relu exp"), X)
    region = dovetail.regions(gm)[0]
    assert (region.name, region.kind, region.rule, region.round) == ("pair_0", "pair", "pair", 1)
    assert region.nodes == ("relu", "exp")


def test_disjoint_candidates_of_many_rules_are_outlined_in_one_round() -> None:
    gm = fused(trace(chain), [Fixed("a", "relu exp"), Fixed("b", "tanh sigmoid")], X)
    assert held(gm) == {"a_0": {"relu", "exp"}, "b_0": {"tanh", "sigmoid"}}
    assert explain(gm).rounds == 1


@pytest.mark.parametrize("turned", [False, True])
def test_the_wider_candidate_wins_whatever_the_order_of_rules(turned: bool) -> None:
    def convs(x: Tensor) -> Tensor:
        return x.tanh().relu().tanh().relu()

    rules = [Fixed("wide", "tanh relu", "tanh_1 relu_1"), Fixed("one", "tanh", "tanh_1")]
    gm = fused(trace(convs), rules[::-1] if turned else rules, X)
    assert held(gm) == {"wide_0": {"tanh", "relu"}, "wide_1": {"tanh_1", "relu_1"}}
    assert reasons(gm, "one") == [
        "'tanh' went to region 'wide_0' (rule 'wide')",
        "'tanh_1' went to region 'wide_1' (rule 'wide')",
    ]


@pytest.mark.parametrize("turned", [False, True])
def test_unless_priorities_say_otherwise(turned: bool) -> None:
    rules = [Fixed("wide", "relu exp"), Fixed("one", "relu", priority=1)]
    gm = fused(trace(chain), rules[::-1] if turned else rules, X)
    assert held(gm) == {"one_0": {"relu"}}
    users = fused(trace(chain), rules, X, priorities={"wide": 5})
    assert held(users) == {"wide_0": {"relu", "exp"}}


def test_users_priorities_go_by_kind_too_and_a_rule_goes_before_its_kind() -> None:
    rules = [Fixed("wide", "relu exp", kind="w"), Fixed("one", "relu", kind="o")]
    assert held(fused(trace(chain), rules, X, priorities={"o": 1})) == {"o_0": {"relu"}}
    both = fused(trace(chain), rules, X, priorities={"o": 2, "one": -1})
    assert held(both) == {"w_0": {"relu", "exp"}}


class Ranked(Rule):
    """Proposes two pairs, the second with a priority of its own."""

    name = kind = "ranked"
    priority = 2

    def __init__(self, own: int | None) -> None:
        self.own = own

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        at = {n.name: i for i, n in enumerate(context.nodes)}
        if {"relu", "exp", "tanh"} <= at.keys():
            yield Candidate(self.name, self.kind, (at["exp"], at["tanh"]), priority=self.own)


@pytest.mark.parametrize(("own", "wins"), [(None, "ranked"), (0, "wide"), (2, "ranked"), (-1, "wide")])
def test_a_candidates_own_priority_counts_also_if_it_is_zero(own: int | None, wins: str) -> None:
    gm = fused(trace(chain), [Ranked(own), Fixed("wide", "relu exp", priority=1)], X)
    assert [r.kind for r in dovetail.regions(gm)] == [wins]
    # What the user gives for a rule shifts its candidates along.
    turned = {None: "ranked", 0: "ranked", 2: "ranked", -1: "wide"}[own]
    shifted = fused(
        trace(chain), [Ranked(own), Fixed("wide", "relu exp", priority=1)], X, priorities={"ranked": 4}
    )
    assert [r.kind for r in dovetail.regions(shifted)] == [turned]


def test_the_best_of_a_cluster_is_taken_not_the_first_best() -> None:
    # The middle pair alone saves as much as each outer one; both outer ones together save more.
    gm = fused(trace(chain), Fixed("pair", "exp tanh", "relu exp", "tanh sigmoid"), X)
    assert sets(gm) == [("exp", "relu"), ("sigmoid", "tanh")]


def test_a_candidate_that_saves_nothing_is_still_what_was_asked_for() -> None:
    gm = fused(trace(chain), Fixed("label", "exp"), X)
    assert held(gm) == {"label_0": {"exp"}}
    assert explain(gm).accepted[0].launches_saved == 0


def test_what_costs_more_than_it_saves_is_declined_unless_it_must_be() -> None:
    def draw(graph: Any) -> Any:
        a, b = graph.placeholder("a"), graph.placeholder("b")
        total = graph.call_function(torch.add, (a, b), name="total")
        return graph.call_function(torch.exp, (total,), name="exp"), total

    gm = drawn(draw)
    for node in gm.graph.nodes:
        node.meta["val"] = X
    twice = Fixed("twice", "total exp", escapes="duplicate")
    assert reasons(fused(gm, twice, X, X)) == ["costs more than it saves"]
    assert held(fused(gm, twice, X, X, must="twice")) == {"twice_0": {"total", "exp"}}
    # Left to itself, the sum is returned instead of being done a second time.
    auto = fused(gm, Fixed("once", "total exp"), X, X)
    assert [node.name for node in dovetail.regions(auto)[0].outputs] == ["total", "exp"]


def test_ties_go_to_what_depends_on_less() -> None:
    for names in (["exp tanh", "relu exp"], ["relu exp", "exp tanh"]):
        gm = fused(trace(chain), Fixed("pair", *names), X)
        assert sets(gm) == [("exp", "relu")]


def test_a_divisible_candidate_is_cut_to_what_is_left() -> None:
    rules = [Fixed("op", "exp"), Fixed("rest", "relu exp tanh sigmoid", priority=-1, divisible=True)]
    gm = fused(trace(chain), rules, X)
    # `relu` alone is too little; the other side of `exp` is connected.
    assert held(gm) == {"op_0": {"exp"}, "rest_0": {"tanh", "sigmoid"}}


def test_a_divisible_candidate_is_not_cut_below_the_least_size_of_its_rule() -> None:
    rules = [
        Fixed("op", "exp"),
        Fixed("rest", "relu exp tanh sigmoid", priority=-1, divisible=True, min_size=3),
    ]
    gm = fused(trace(chain), rules, X)
    assert held(gm) == {"op_0": {"exp"}}
    assert reasons(gm, "rest")[0] == "'exp' went to region 'op_0' (rule 'op')"


def test_what_was_in_many_pieces_may_stay_so_when_it_is_cut() -> None:
    def siblings(x: Tensor) -> Any:
        return x.exp().neg(), x.tanh(), x.sin()

    rules = [Fixed("op", "tanh"), Fixed("all", "exp neg tanh sin", priority=-1, divisible=True)]
    assert sets(fused(trace(siblings), rules, X)) == [("exp", "neg", "sin"), ("tanh",)]


def test_a_large_cluster_is_chosen_by_gain_and_what_loses_is_cut_and_weighed_again() -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(60):
            x = x.sin()
        return x

    gm = trace(long)
    names = [n.name for n in gm.graph.nodes if n.op == "call_method"]
    pairs = [names[k : k + 2] for k in range(59)]
    whole = fused(gm, Fixed("pair", *pairs), X)
    assert [len(r.nodes) for r in dovetail.regions(whole)] == [2] * 30
    wide = Fixed("wide", names[20:40], divisible=False)
    cut = Fixed("cut", *[names[k : k + 10] for k in range(0, 51, 5)], divisible=True)
    both = fused(gm, [Fixed("pair", *pairs), wide, cut], X)
    sizes = sorted((r.kind, len(r.nodes)) for r in dovetail.regions(both))
    assert sizes == [("cut", 10), ("cut", 10), ("cut", 10), ("cut", 10), ("wide", 20)]


@pytest.mark.parametrize("count", [3, 40])
def test_the_last_reader_of_a_shared_producer_is_credited_with_its_end(count: int) -> None:
    def shared(x: Tensor) -> Any:
        a = x.relu()
        return tuple(a.exp().neg() for _ in range(count))

    gm = trace(shared)
    for n in gm.graph.nodes:
        n.meta["val"] = X if n.op != "output" else None
    ends = ["", *(f"_{k}" for k in range(1, count))]
    overlapping = [f"relu exp{e} neg{e}" for e in ends] + [f"exp{e} neg{e}" for e in ends]
    new = fused(gm, Fixed("p", *overlapping), X)
    assert len(dovetail.regions(new)) == count
    assert "relu" not in [n.name for n in new.graph.nodes]
    # Before, the producer and two for each reader; after, one for each.
    assert explain(new).launches_saved == 1 + 2 * count - count


def test_what_is_left_of_a_divisible_candidate_never_closes_around_what_was_taken() -> None:
    def diamond(x: Tensor) -> Tensor:
        a = x.relu()
        b, c = a.exp(), a.tanh()
        return (b + c.sin()).sigmoid()

    rules = [Fixed("op", "exp"), Fixed("rest", "relu exp tanh sin add sigmoid", priority=-1, divisible=True)]
    gm = fused(trace(diamond), rules, X)
    # `add` reads `exp`, which reads `relu`: they cannot be in one region without it.
    assert sets(gm) == [("add", "sigmoid"), ("exp",), ("relu", "sin", "tanh")]


class Around(Rule):
    """Takes the region of a kind together with what reads its result."""

    name = kind = "outer"

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        for i, call in context.calls.items():
            results = [j for j in context.index.after[i] if call.identity.kind == "inner"]
            readers = [k for j in results for k in context.index.after[j] if context.nodes[k].op != "output"]
            if readers:
                yield Candidate(self.name, self.kind, (i, *readers))


def test_many_rounds_nest_regions_of_other_kinds() -> None:
    gm = fused(trace(chain), [Fixed("inner", "relu exp"), Around()], X)
    assert held(gm) == {"outer_0": {"relu", "exp", "tanh"}}
    assert [r.name for r in dovetail.regions(gm, nested=True)] == ["outer_0", "outer_0/inner_0"]
    assert [(a.kind, a.round) for a in explain(gm).accepted] == [("inner", 1), ("outer", 2)]
    once = fused(trace(chain), [Fixed("inner", "relu exp"), Around()], X, rounds=1)
    assert held(once) == {"inner_0": {"relu", "exp"}}


def test_what_is_left_of_a_group_is_not_outlined_if_it_saves_nothing() -> None:
    @dovetail.rule(kind="pair")
    def pair(x: Tensor) -> Tensor:
        return (x * 3).relu()

    def viewed(x: Tensor) -> Tensor:
        return (x.reshape(3, 2).transpose(0, 1) * 3).relu()

    gm = dovetail.fuse(
        dovetail.capture(viewed, (X,)), [pair, dovetail.rules.groups(priority=-10, grows=False)]
    )
    assert sets(gm) == [("mul", "relu")]
    assert "it saves neither bytes nor launches" in reasons(gm)


def test_a_group_saves_bytes_or_launches() -> None:
    gm = dovetail.capture(Call(lambda x: x[:1].expand(2, 3).relu()), (X,))
    kept = dovetail.fuse(gm, dovetail.rules.groups())
    assert sets(kept) == []
    assert reasons(kept, "groups") == ["it saves neither bytes nor launches"]
    assert sets(dovetail.fuse(gm, dovetail.rules.groups(min_size=1))) != []
    assert sets(dovetail.fuse(gm, dovetail.rules.groups(), must="relu")) != []


def test_what_is_left_of_a_group_is_refused_in_later_rounds_too() -> None:
    def function(x: Tensor) -> Tensor:
        return x.t().relu().unsqueeze(0).exp()

    gm = dovetail.capture(Call(function), (X,))
    once = dovetail.fuse(gm, [Fixed("k", "exp"), dovetail.rules.groups(grows=False)])
    assert sets(once) == [("exp",)]
