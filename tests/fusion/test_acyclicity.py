"""What can be called at one place, alone and beside the other regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.fusion import select
from dovetail.fusion.acyclicity import RegionContraction
from dovetail.fusion.ledger import explain
from tests.fusion.helpers import Fixed, fused, held, reasons, sets
from tests.outlining.helpers import drawn, trace

X = torch.linspace(-1, 1, 9).reshape(3, 3)


def around(length: int) -> Any:
    """mm, relu and add, while mm also reaches add through a chain of gelus."""

    def draw(graph: Any) -> Any:
        x = graph.placeholder("x")
        mm = graph.call_function(torch.mm, (x, x), name="mm")
        relu = graph.call_function(torch.relu, (mm,), name="relu")
        at = mm
        for k in range(length):
            at = graph.call_function(torch.nn.functional.gelu, (at,), name=f"gelu_{k}")
        return graph.call_function(torch.add, (relu, at), name="add")

    return drawn(draw)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_way_around_is_refused_with_the_path(length: int) -> None:
    gm = fused(around(length), Fixed("p", "mm relu add"), X)
    path = " -> ".join(["mm", *(f"gelu_{k}" for k in range(length)), "add"])
    assert reasons(gm) == [f"it would depend on itself: {path}"]
    assert explain(gm).declined[0].place == "gelu_0"
    assert not dovetail.regions(gm)


def test_a_very_long_way_around_is_detected_too_and_its_path_cut_short() -> None:
    gm = fused(around(1000), Fixed("p", "mm relu add"), X)
    assert reasons(gm) == [
        "it would depend on itself: "
        + " -> ".join(["mm", *(f"gelu_{k}" for k in range(7))])
        + " -> (992 more) -> gelu_999 -> add"
    ]


def test_without_a_way_around_it_is_outlined() -> None:
    gm = fused(around(0), Fixed("p", "mm relu add"), X)
    assert held(gm) == {"p_0": {"mm", "relu", "add"}}


def test_a_divisible_candidate_gives_way_in_parts() -> None:
    gm = fused(around(1), Fixed("p", "mm relu add", divisible=True), X)
    assert sets(gm) == [("mm", "relu")]


def twins(x: Tensor) -> Tensor:
    a, b = x.relu(), x.tanh()
    return a.exp() + b.sin()


def test_two_regions_that_wait_for_each_other_are_not_both_outlined() -> None:
    # `relu sin` needs `tanh`, and `tanh exp` needs `relu`.
    rules = [Fixed("one", "relu sin"), Fixed("two", "tanh exp")]
    gm = fused(trace(twins), rules, X)
    assert len(dovetail.regions(gm)) == 1
    winner = dovetail.regions(gm)[0].rule
    loser = ({"one", "two"} - {winner}).pop()
    reason = reasons(gm, loser)[0]
    assert reason.startswith("they would depend on each other, ")
    assert f"region '{winner}_0' (rule '{winner}')" in reason


@pytest.mark.parametrize("favoured", ["one", "two"])
def test_the_weaker_of_two_that_exclude_each_other_goes(favoured: str) -> None:
    rules = [Fixed("one", "relu sin"), Fixed("two", "tanh exp")]
    gm = fused(trace(twins), rules, X, priorities={favoured: 1})
    assert [r.rule for r in dovetail.regions(gm)] == [favoured]


def test_what_lost_to_an_impossible_candidate_gets_another_chance() -> None:
    def draw(graph: Any) -> Any:
        x = graph.placeholder("x")
        first = graph.call_function(torch.relu, (x,), name="first")
        at = first
        for k in range(600):
            at = graph.call_function(torch.sin, (at,), name=f"sin_{k}")
        second = graph.call_function(torch.exp, (first,), name="second")
        third = graph.call_function(torch.tanh, (second,), name="third")
        return graph.call_function(torch.add, (third, at), name="last")

    # The widest one is not legal, which shows only far away; then the pair that it overlaps may be made.
    rules = [Fixed("wide", "first second third last"), Fixed("pair", "second third")]
    gm = fused(drawn(draw), rules, X)
    assert held(gm) == {"pair_0": {"second", "third"}}
    assert reasons(gm, "wide")[0].startswith("it would depend on itself: first -> sin_0")
    assert explain(gm).rounds == 1


def test_a_search_that_is_given_up_refuses_and_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def short_of_breath(*args: Any, budget: int) -> RegionContraction:
        return RegionContraction(*args, budget=0)

    monkeypatch.setattr(select, "RegionContraction", short_of_breath)
    gm = fused(trace(twins), [Fixed("one", "relu sin"), Fixed("two", "tanh exp")], X)
    assert not dovetail.regions(gm)
    words = "it is entangled with so many other candidates that no place was found for it"
    assert reasons(gm) == [words, words]


def test_effects_keep_their_order() -> None:
    def draw(graph: Any) -> Any:
        x = graph.placeholder("x")
        a = graph.call_function(torch.bernoulli, (x,), name="a")
        b = graph.call_function(torch.bernoulli, (x,), name="b")
        c = graph.call_function(torch.bernoulli, (x,), name="c")
        return a, b, c

    gm = drawn(draw)
    new = fused(gm, Fixed("ends", "a c"), X.abs())
    assert not dovetail.regions(new)
    assert "'a' must stay before 'b': both draw from the random stream" in reasons(new)[0]
    assert sets(fused(gm, Fixed("first", "a b"), X.abs())) == [("a", "b")]


def test_a_refused_escape_is_a_refusal_with_the_outliners_words() -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        a = x.relu()
        return a.exp(), a

    gm = fused(trace(two), Fixed("p", "relu exp", escapes="refuse"), X)
    assert "'relu' is also used outside, by 'output'" in reasons(gm)[0]
    assert held(fused(trace(two), Fixed("p", "relu exp", escapes="output"), X)) == {"p_0": {"relu", "exp"}}


def test_a_producer_that_all_readers_clone_is_gone_and_counted() -> None:
    def shared(x: Tensor) -> tuple[Tensor, Tensor]:
        a = x.relu()
        return a.exp(), a.tanh()

    gm = dovetail.capture(_Module(shared), (X,))
    new = fused(gm, Fixed("p", "relu exp", "relu tanh"), X)
    assert sets(new) == [("exp", "relu"), ("relu", "tanh")]
    assert "relu" not in [n.name for n in new.graph.nodes]
    # Three launches became two; what one clone reads again, the store and a load of the original make up for.
    ledger = explain(new)
    assert ledger.launches_saved == 1
    assert ledger.bytes_saved == X.nbytes * 2


class _Module(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)
