"""The small graphs that tripped other tools, and what must come of them (outlining)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail import (
    CyclicRegion,
    EffectOrder,
    EmptyRegion,
    EscapingValue,
    OverlappingRegions,
    Request,
    UnknownNode,
)
from tests.outlining.helpers import drawn, equal, names, node, outlined, refused, run, trace
from tests.texts import assert_text

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


def const_add_sub():
    def draw(g):
        p = g.placeholder("p")
        c = g.call_function(aten.full.default, ([3], 2.0), name="c")
        a = g.call_function(aten.add.Tensor, (c, p), name="a")
        return g.call_function(aten.sub.Tensor, (c, a), name="s")

    return drawn(draw)


def test_a_constant_used_outside_is_cloned_in():
    gm = const_add_sub()
    assert_text(
        gm,
        """
        graph:
          %p = input
          %c = aten.full.default([3], 2.0)
          %a = aten.add.Tensor(%c, %p)
          %s = aten.sub.Tensor(%c, %a)
          return %s
    """,
    )
    new = outlined(gm, ["c", "a"], torch.ones(3), kind="k")
    assert_text(
        new,
        """
        graph:
          %p = input
          %c = aten.full.default([3], 2.0)
          %k_0 = region k @k(%p)
          %a = operator.getitem(%k_0, 0)
          %s = aten.sub.Tensor(%c, %a)
          return %s

        body @k:
          %p = input
          %c = aten.full.default([3], 2.0)
          %a = aten.add.Tensor(%c, %p)
          return (%a,)
    """,
    )
    assert dovetail.regions(new)[0].escapes["c"].policy == "duplicate"


def test_the_same_refused_names_the_constant():
    message = refused(const_add_sub(), EscapingValue, ["c", "a"], kind="k", escapes="refuse")
    assert "'c'" in message
    assert "'s'" in message


def test_a_chain_is_one_call_with_one_operand():
    gm = trace(lambda x: x.exp().exp().exp())
    assert_text(
        gm,
        """
        graph:
          %x = input
          %exp = .exp(%x)
          %exp_1 = .exp(%exp)
          %exp_2 = .exp(%exp_1)
          return %exp_2
    """,
    )
    new = outlined(gm, ["exp", "exp_1", "exp_2"], X, kind="exps")
    assert_text(
        new,
        """
        graph:
          %x = input
          %exps_0 = region exps @exps(%x)
          %exp_2 = operator.getitem(%exps_0, 0)
          return %exp_2

        body @exps:
          %x = input
          %exp = .exp(%x)
          %exp_1 = .exp(%exp)
          %exp_2 = .exp(%exp_1)
          return (%exp_2,)
    """,
    )
    assert_text(
        dovetail.inline(new),
        """
        graph:
          %x = input
          %exp = .exp(%x)
          %exp_1 = .exp(%exp)
          %exp_2 = .exp(%exp_1)
          return %exp_2
    """,
    )
    assert dovetail.regions(new)[0].nodes == ("exp", "exp_1", "exp_2")


def test_a_chain_and_a_sibling_share_their_operand():
    gm = trace(lambda x: (x.exp().neg(), x.sin()))
    new = outlined(gm, ["exp", "neg", "sin"], X, kind="k")
    (region,) = dovetail.regions(new)
    assert [n.name for n in region.inputs] == ["x"]
    assert [n.name for n in region.outputs] == ["neg", "sin"]


def test_an_effect_that_nobody_reads_moves_in_and_survives_dead_code_elimination():
    def draw(g):
        x = g.placeholder("x")
        g.call_function(aten.add_.Tensor, (x, 1.0), name="bump")
        y = g.call_function(aten.exp.default, (x,), name="y")
        return g.call_function(aten.neg.default, (y,), name="z")

    gm = drawn(draw)
    new = outlined(gm, ["bump", "y", "z"], X, kind="k")
    (region,) = dovetail.regions(new)
    assert region.effects == ("writes",)
    alone = outlined(gm, ["bump"], X, kind="k")
    assert dovetail.regions(alone)[0].outputs == ()
    alone.graph.eliminate_dead_code()
    alone.recompile()
    assert equal(run(alone, X), run(gm, X))


def test_values_that_were_not_requested_become_operands_in_order_of_first_use():
    gm = trace(lambda a, b, c: (c * 2 + a) - b * c)
    new = outlined(gm, ["mul", "add", "mul_1", "sub"], X, X, X, kind="k")
    assert [n.name for n in dovetail.regions(new)[0].inputs] == ["c", "a", "b"]


def two_users_of_a_constant():
    def draw(g):
        p = g.placeholder("p")
        c = g.call_function(aten.full.default, ([3], 2.0), name="c")
        a = g.call_function(aten.add.Tensor, (c, p), name="a")
        b = g.call_function(aten.mul.Tensor, (c, p), name="b")
        return a, b

    return drawn(draw)


def test_two_regions_that_list_one_constant_each_get_it():
    gm = two_users_of_a_constant()
    new = outlined(gm, [Request(["c", "a"], "k"), Request(["c", "b"], "m")], torch.ones(3))
    first, second = dovetail.regions(new)
    assert [n.name for n in first.inputs] == [n.name for n in second.inputs] == ["p"]
    assert "c" not in names(new)


def test_one_after_the_other_too_and_back_in_any_order():
    gm = two_users_of_a_constant()
    new = dovetail.outline(dovetail.outline(gm, ["c", "a"], kind="k"), ["c", "b"], kind="m")
    assert "c" not in names(new)
    for first, second in (("k_0", "m_0"), ("m_0", "k_0")):
        half = dovetail.inline(new, first)
        assert equal(run(half, torch.ones(3)), run(gm, torch.ones(3)))
        assert dovetail.text(dovetail.inline(half, second)) == dovetail.text(gm)


def test_nodes_in_any_order_with_repeats_by_node_or_name():
    gm = trace(lambda a, b: (a + b).relu() * b)
    expected = dovetail.text(dovetail.outline(gm, ["add", "relu"], kind="k"))
    for nodes in (["relu", "add"], ["add", "relu", "add"], [node(gm, "relu"), "add"], {"add", "relu"}):
        assert dovetail.text(outlined(gm, nodes, X, X, kind="k")) == expected


@pytest.mark.parametrize(
    ("nodes", "error", "word"),
    [
        (["ad"], UnknownNode, "Did you mean 'add'"),
        ([], EmptyRegion, "no node"),
        (["a"], UnknownNode, "placeholder"),
        (["add", "output"], UnknownNode, "output"),
    ],
)
def test_what_cannot_be_requested(nodes, error, word):
    gm = trace(lambda a, b: (a + b).relu())
    assert word in refused(gm, error, nodes, kind="k")


def test_a_node_of_another_graph():
    gm, other = trace(lambda a: a.relu()), trace(lambda a: a.relu())
    assert "not a node of this graph" in refused(gm, UnknownNode, [node(other, "relu")], kind="k")


def test_overlapping_requests():
    gm = trace(lambda a: a.relu().exp().neg())
    requests = [Request(["relu", "exp"], "k"), Request(["exp", "neg"], "m")]
    message = refused(gm, OverlappingRegions, requests)
    assert "'exp'" in message
    assert "'relu'" not in message


def test_the_call_comes_after_what_it_needs():
    gm = trace(lambda a, b, c: (a + b) + c * 2)
    assert_text(
        gm,
        """
        graph:
          %a = input
          %b = input
          %c = input
          %add = operator.add(%a, %b)
          %mul = operator.mul(%c, 2)
          %add_1 = operator.add(%add, %mul)
          return %add_1
    """,
    )
    assert_text(
        outlined(gm, ["add", "add_1"], X, X, X, kind="k"),
        """
        graph:
          %a = input
          %b = input
          %c = input
          %mul = operator.mul(%c, 2)
          %k_0 = region k @k(%a, %b, %mul)
          %add_1 = operator.getitem(%k_0, 0)
          return %add_1

        body @k:
          %a = input
          %b = input
          %mul = input
          %add = operator.add(%a, %b)
          %add_1 = operator.add(%add, %mul)
          return (%add_1,)
    """,
    )


def test_a_cycle_is_shown_as_a_path():
    gm = trace(lambda a, b: (x := a + b) + x.relu())
    with pytest.raises(CyclicRegion) as caught:
        dovetail.outline(gm, ["add", "add_1"], kind="k")
    assert caught.value.path == ("add", "relu", "add_1")
    assert "add -> relu -> add_1" in str(caught.value)
    assert_text(
        gm,
        """
        graph:
          %a = input
          %b = input
          %add = operator.add(%a, %b)
          %relu = .relu(%add)
          %add_1 = operator.add(%add, %relu)
          return %add_1
    """,
    )


def test_two_regions_that_need_each_other():
    gm = trace(lambda a: (a.exp().sin(), a.neg().cos(), a.exp().cos() + a.neg().sin()))
    # exp -> sin | neg -> cos crossed over: each region would need the other's result
    requests = [Request(["exp", "sin_1"], "k"), Request(["neg_1", "cos_1"], "m")]
    outlined(gm, requests, X)

    def draw(g):
        x = g.placeholder("x")
        a = g.call_function(aten.exp.default, (x,), name="a")
        b = g.call_function(aten.sin.default, (x,), name="b")
        c = g.call_function(aten.neg.default, (a,), name="c")
        d = g.call_function(aten.cos.default, (b,), name="d")
        return c, d

    crossed = drawn(draw)
    message = refused(crossed, CyclicRegion, [Request(["a", "d"], "k"), Request(["b", "c"], "m")])
    assert "a -> c -> b -> d" in message


def test_three_deep_and_back():
    gm = trace(lambda a, b: ((a + b).relu() * b).exp() - a)
    one = outlined(gm, ["add", "relu"], X, X, kind="one")
    two = outlined(one, ["one_0", "relu", "mul"], X, X, kind="two")
    three = outlined(two, ["two_0", "mul", "exp"], X, X, kind="three")
    assert [r.name for r in dovetail.regions(three, nested=True)] == [
        "three_0",
        "three_0/two_0",
        "three_0/two_0/one_0",
    ]
    assert dovetail.regions(three)[0].nodes == ("add", "relu", "mul", "exp")
    assert equal(run(three, X, X), run(gm, X, X))
    assert dovetail.text(dovetail.inline(three)) == dovetail.text(gm)
    assert dovetail.text(dovetail.inline(three, depth=1)) == dovetail.text(two)
    assert dovetail.text(dovetail.inline(three, depth=2)) == dovetail.text(one)


@pytest.mark.parametrize("escapes", ["auto", "output", "duplicate"])
def test_a_random_value_is_never_cloned(escapes):
    def draw(g):
        x = g.placeholder("x")
        r = g.call_function(aten.rand_like.default, (x,), name="r")
        a = g.call_function(aten.add.Tensor, (r, x), name="a")
        return a, g.call_function(aten.mul.Tensor, (r, x), name="m")

    gm = drawn(draw)
    new = outlined(gm, ["r", "a"], X, kind="k", escapes=escapes)
    (region,) = dovetail.regions(new)
    assert region.escapes["r"].policy == "output"
    assert [n.name for n in region.outputs] == ["r", "a"]
    if escapes != "output":
        assert "random" in region.escapes["r"].reason


def test_random_operations_keep_their_order():
    gm = trace(lambda x: (F.dropout(x, 0.5), torch.rand_like(x), F.dropout(x * 2, 0.5)))
    with pytest.raises(EffectOrder) as caught:
        dovetail.outline(gm, ["dropout", "dropout_1"], kind="k")
    assert (caught.value.first, caught.value.second) == ("dropout", "rand_like")
    assert "random stream" in str(caught.value)
    outlined(gm, ["dropout", "rand_like", "mul", "dropout_1"], X, kind="k")


def write_through_a_view(other: bool):
    def draw(g):
        x, y = g.placeholder("x"), g.placeholder("y")
        v = g.call_function(aten.view.default, (x, [6]), name="v")
        a = g.call_function(aten.exp.default, (v,), name="a")
        g.call_function(aten.add_.Tensor, (y if other else x, 1.0), name="bump")
        b = g.call_function(aten.neg.default, (v,), name="b")
        return a, b

    return drawn(draw)


def test_a_region_does_not_move_across_a_write_it_reads_through_a_view():
    gm = write_through_a_view(other=False)
    with pytest.raises(EffectOrder) as caught:
        dovetail.outline(gm, ["a", "b"], kind="k")
    assert caught.value.path == ("a", "bump", "b")
    outlined(gm, ["a", "bump", "b"], X, X, kind="k")


def test_a_write_to_another_storage_does_not_matter():
    outlined(write_through_a_view(other=True), ["a", "b"], X, X, kind="k")


def test_a_clone_that_inlining_left_may_be_outlined_again() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.abs()
        return y * 2, torch.stack([y])

    gm = dovetail.capture(model, (torch.randn(2, 3),))
    new = dovetail.outline(gm, ["abs_1", "stack"], kind="first", escapes="duplicate")
    new = dovetail.outline(new, ["mul", "abs_1"], kind="second")
    new = dovetail.inline(new, "first_0")
    (clone,) = (node.name for node in new.graph.nodes if node.name.startswith("abs"))
    new = dovetail.outline(new, [clone], kind="third")
    assert dovetail.text(dovetail.inline(new)) == dovetail.text(gm)
