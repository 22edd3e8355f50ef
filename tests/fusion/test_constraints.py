"""The user's last word: must, never, limits and fuel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import dovetail
from dovetail.errors import InvalidArgument, RegionError, UnknownNode
from dovetail.fusion.fuse import fuse
from dovetail.fusion.ledger import explain
from dovetail.rules.rule import Limits
from tests.fusion.helpers import Fixed, fused, held, reasons, refused, sets
from tests.outlining.helpers import node, trace

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def chain(x: Tensor) -> Tensor:
    return x.relu().exp().tanh().sigmoid()


WIDE = Fixed("wide", "relu exp tanh")
PAIR = Fixed("pair", "tanh sigmoid")


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp().tanh()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.fixture(scope="module")
def blocks() -> GraphModule:
    return dovetail.capture(Blocks(), (X,))


# must


@pytest.mark.parametrize("must", ["sigmoid", "pair", lambda n: n.name == "sigmoid", ["sigmoid", "pair"]])
def test_what_must_be_wins_over_what_saves_more(must: Any) -> None:
    assert held(fused(trace(chain), [WIDE, PAIR], X)) == {"wide_0": {"relu", "exp", "tanh"}}
    gm = fused(trace(chain), [WIDE, PAIR], X, must=must)
    assert held(gm) == {"pair_0": {"tanh", "sigmoid"}}
    assert reasons(gm, "wide")[0] == "'tanh' went to region 'pair_0' (rule 'pair')"


def test_a_list_in_the_list_is_one_region_although_two_regions_take_its_operations_and_save_more() -> None:
    rules = [Fixed("head", "relu exp"), Fixed("tail", "tanh sigmoid"), Fixed("middle", "exp tanh")]
    assert set(held(fused(trace(chain), rules, X))) == {"head_0", "tail_0"}
    assert held(fused(trace(chain), rules, X, must=[["exp", "tanh"]])) == {"middle_0": {"exp", "tanh"}}
    both = fused(trace(chain), rules, X, must=["exp", "tanh"])
    assert set(held(both)) == {"head_0", "tail_0"}


def test_a_list_in_the_list_names_operations_also_where_a_kind_has_the_same_name() -> None:
    rules = [Fixed("pair", "relu exp"), Fixed("tanh", "tanh")]
    gm = fused(trace(lambda x: x.relu().exp().sin().tanh()), rules[:1], X, must=[["relu", "exp"]])
    assert held(gm) == {"pair_0": {"relu", "exp"}}
    wider = [*rules, Fixed("three", "exp sin tanh")]
    gm = fused(trace(lambda x: x.relu().exp().sin().tanh()), wider, X, must=[["exp", "tanh"]])
    assert held(gm) == {"three_0": {"exp", "sin", "tanh"}}


def test_a_node_itself_may_be_given() -> None:
    gm = trace(chain)
    assert held(fuse(gm, [WIDE, PAIR], must=node(gm, "sigmoid"))) == {"pair_0": {"tanh", "sigmoid"}}


def test_must_by_module_path(blocks: GraphModule) -> None:
    rules = [
        Fixed("block", "exp tanh", "exp_1 tanh_1"),
        Fixed("tail", "tanh relu", "tanh_1 relu_1", priority=1),
    ]
    assert {r.kind for r in dovetail.regions(fused(blocks, rules, X))} == {"tail"}
    one = fused(blocks, rules, X, must="layers.0")
    assert held(one) == {"tail_0": {"tanh", "relu"}, "tail_1": {"tanh_1", "relu_1"}}
    both = fused(blocks, rules, X, must=["exp", "exp_1"])
    assert {r.kind for r in dovetail.regions(both)} == {"block"}
    assert "Did you mean" in refused(blocks, UnknownNode, rules, must="layers.0.mlp")


def test_a_choice_that_meets_more_constraints_goes_before_one_that_saves_more() -> None:
    # The widest candidate has `exp`; only the pair has `sigmoid`; both must be.
    rules = [WIDE, PAIR, Fixed("label", "exp")]
    gm = fused(trace(chain), rules, X, must=["exp", "sigmoid"])
    assert held(gm) == {"label_0": {"exp"}, "pair_0": {"tanh", "sigmoid"}}


def test_among_those_that_must_be_priorities_still_count() -> None:
    rules = [WIDE, Fixed("label", "exp", priority=1)]
    assert held(fused(trace(chain), rules, X, must="exp")) == {"label_0": {"exp"}}
    assert held(fused(trace(chain), rules, X, must=["exp", "wide"])) == {"wide_0": {"relu", "exp", "tanh"}}


def test_what_must_be_and_cannot_is_an_error_with_every_reason() -> None:
    words = refused(trace(chain), RegionError, [WIDE, PAIR], must=["relu", "sigmoid"])
    assert "must='relu': 'relu' in no region" in words or "must='sigmoid': 'sigmoid' in no region" in words
    assert "went to" in words
    nobody = refused(trace(chain), RegionError, PAIR, must="relu")
    assert "must='relu': 'relu' in no region. No rule proposed it." in nobody
    limited = refused(trace(chain), RegionError, WIDE, must="wide", limits=Limits(nodes=2))
    assert "it computes 3 operations, and the limit is 2" in limited


def test_a_near_miss_is_named_where_a_kind_must_be() -> None:
    rule = Fixed("norm", refusals=[("relu exp", "two precisions")])
    words = refused(trace(chain), RegionError, rule, must="norm")
    assert "must='norm': no region of this kind was made" in words
    assert "rule 'norm' on 'relu', 'exp': two precisions (2 of 3 matched)" in words


def test_every_candidate_of_a_kind_that_must_be_is_outlined_or_it_is_an_error() -> None:
    def draw(x: Tensor) -> Tensor:
        a = x.relu()
        return a.exp() + a.sin().exp()

    rule = Fixed("p", "relu exp", "sin exp_1 add relu", escapes="output")
    words = refused(trace(draw), RegionError, Fixed("p", "sin exp_1", "relu add"), must="p")
    assert "must='p': rule 'p' on 'relu', 'add': it would depend on itself: relu -> exp -> add" in words
    # What loses to another that must be is no error.
    assert len(dovetail.regions(fuse(trace(draw), rule, must="p"))) == 1


def test_what_is_in_a_region_already_is_as_it_must_be() -> None:
    gm = fuse(trace(chain), PAIR)
    assert dovetail.text(fuse(gm, PAIR, must=["tanh", "pair"])) == dovetail.text(gm)


def test_out_of_fuel_breaks_no_constraint() -> None:
    gm = fuse(trace(chain), [WIDE, PAIR], must="sigmoid", fuel=0)
    assert not dovetail.regions(gm)


# never


@pytest.mark.parametrize("never", ["tanh", lambda n: n.target == "tanh", ["tanh"]])
def test_what_never_may_be_is_taken_by_no_region(never: Any) -> None:
    class Heedless(Fixed):
        """Does not look at what is barred."""

        def propose(self, context: Any) -> Any:
            excluded, context.barred = context.barred, {}
            proposed = list(super().propose(context))
            context.barred = excluded
            return proposed

    gm = fused(trace(chain), [Heedless("wide", "relu exp tanh"), Fixed("other", "relu exp")], X, never=never)
    assert held(gm) == {"other_0": {"relu", "exp"}}
    assert reasons(gm, "wide")[0].startswith("excluded by never=")
    parts = fused(trace(chain), Heedless("all", "relu exp tanh sigmoid", divisible=True), X, never=never)
    assert sets(parts) == [("exp", "relu")]


def test_never_by_kind_and_by_module_path(blocks: GraphModule) -> None:
    rules = [Fixed("block", "exp tanh", "exp_1 tanh_1"), Fixed("one", "exp", "exp_1")]
    gm = fused(blocks, rules, X, never="block")
    assert sets(gm) == [("exp",), ("exp_1",)]
    assert reasons(gm, "block") == ["excluded by never='block'"] * 2
    path = fused(blocks, rules, X, never="layers.1")
    assert sets(path) == [("exp", "tanh")]
    assert sets(fused(blocks, rules, X, never="layers.*")) == []


def test_never_holds_in_later_rounds_and_for_regions_that_have_it() -> None:
    gm = fuse(trace(chain), PAIR)

    class Around(Fixed):
        def propose(self, context: Any) -> Any:
            from dovetail.rules.rule import Candidate

            calls = [i for i, call in context.calls.items() if call.identity.kind == "pair"]
            yield from (Candidate("around", "around", (i,)) for i in calls)

    assert held(fuse(gm, Around("around"))) == {"around_0": {"tanh", "sigmoid"}}
    kept = fuse(gm, Around("around"), never="tanh")
    assert held(kept) == {"pair_0": {"tanh", "sigmoid"}}


# Both, and what is not there


@pytest.mark.parametrize(
    ("must", "never", "both"),
    [
        ("tanh", "tanh", ("must='tanh'", "never='tanh'", "'tanh'")),
        ("pair", "pair", ("must='pair'", "never='pair'", "kind 'pair'")),
        ("tanh", lambda n: True, ("must='tanh'", "never=<lambda>", "'tanh'")),
    ],
)
def test_a_contradiction_names_both_sides(must: Any, never: Any, both: tuple[str, ...]) -> None:
    words = refused(trace(chain), InvalidArgument, [WIDE, PAIR], must=must, never=never)
    assert "contradict" in words
    assert all(part in words for part in both)


@pytest.mark.parametrize("which", ["must", "never"])
def test_names_that_are_not_there_and_other_nonsense(which: str) -> None:
    gm = trace(chain)
    assert "Did you mean 'tanh'?" in refused(gm, UnknownNode, PAIR, **{which: "tnah"})
    assert "no module path" in refused(gm, UnknownNode, PAIR, **{which: "layers.*"})
    assert "a graph's placeholder is not an operation" in refused(gm, UnknownNode, PAIR, **{which: "x"})
    foreign = node(trace(chain), "tanh")
    assert "not a node of this graph" in refused(gm, UnknownNode, PAIR, **{which: foreign})
    assert "is neither a node" in refused(gm, InvalidArgument, PAIR, **{which: 3})

    def broken(n: Node) -> bool:
        raise KeyError("sizes")

    words = refused(gm, InvalidArgument, PAIR, **{which: broken})
    assert f"{which}: the predicate broken raised KeyError on 'relu'" in words


def test_a_predicate_that_must_hold_somewhere() -> None:
    assert "holds for no operation" in refused(trace(chain), InvalidArgument, PAIR, must=lambda n: False)
    assert held(fuse(trace(chain), PAIR, never=lambda n: False)) == {"pair_0": {"tanh", "sigmoid"}}


# limits and fuel


def test_limits_refuse_with_numbers_and_divide_what_can_be_divided() -> None:
    gm = trace(chain)
    cases = [
        (Limits(nodes=2), "it computes 3 operations, and the limit is 2"),
        (Limits(bytes=1), "the size of 'x' is not known, so the limit on bytes could not be kept"),
    ]
    for limits, reason in cases:
        assert reasons(fused(gm, WIDE, X, limits=limits)) == [reason]
    whole = Fixed("all", "relu exp tanh sigmoid", divisible=True)
    assert sets(fused(gm, whole, X, limits=Limits(nodes=2))) == [("exp", "relu"), ("sigmoid", "tanh")]
    assert sets(fused(gm, whole, X, limits=Limits(nodes=4))) == [("exp", "relu", "sigmoid", "tanh")]
    assert reasons(fused(gm, whole, X, limits=Limits(nodes=1)))[0].startswith("it computes 4 operations")


def test_limits_on_operands_outputs_and_bytes() -> None:
    def draw(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = x + y
        return a.exp(), a.tanh()

    gm = dovetail.capture(_Two(draw), (X, X + 1))
    rule = Fixed("p", "add exp tanh")
    assert reasons(fused(gm, rule, X, X, limits=Limits(operands=1))) == [
        "it reads 2 values, and the limit is 1"
    ]
    assert reasons(fused(gm, rule, X, X, limits=Limits(outputs=1))) == [
        "it returns 2 values, and the limit is 1"
    ]
    need = 4 * X.nbytes
    too_many = f"it reads and returns {need} bytes, and the limit is {need - 1}"
    assert reasons(fused(gm, rule, X, X, limits=Limits(bytes=need - 1))) == [too_many]
    assert len(dovetail.regions(fused(gm, rule, X, X, limits=Limits(bytes=need, operands=2, outputs=2)))) == 1


class _Two(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def test_fuel_stops_after_so_many_regions() -> None:
    rules = [Fixed("a", "relu exp"), Fixed("b", "tanh sigmoid")]
    for fuel in range(3):
        gm = fused(trace(chain), rules, X, fuel=fuel)
        assert len(dovetail.regions(gm)) == fuel
    one = fused(trace(chain), rules, X, fuel=1)
    assert held(one) == {"a_0": {"relu", "exp"}}
    assert reasons(one, "b") == ["the fuel was used up"]
    assert explain(one).rounds == 1
