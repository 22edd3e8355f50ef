"""What Cleanup takes away, and what it must leave: each case beside its refused twin."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

import dovetail
from dovetail.passes.cleanup import Cleanup
from dovetail.passes.pass_manager import Pipeline
from dovetail.zoo import MODELS
from tests.outlining.helpers import equal, run
from tests.texts import assert_text
from tests.zoo_graphs import zoo_graph, zoo_inputs

from .helpers import aten, called, captured, drawn


def cleaned(gm: GraphModule, *inputs: Any) -> GraphModule:
    """Clean up, and prove that nothing can be seen of it: bits, state, inputs, the random stream, aliasing."""
    before, nodes = dovetail.text(gm), list(gm.graph.nodes)
    new = Cleanup()(gm)
    assert dovetail.text(gm) == before
    assert list(gm.graph.nodes) == nodes
    dovetail.check(new)
    want, got = run(gm, *inputs), run(new, *inputs)
    assert equal(got, want)
    assert _aliasing(got[0]) == _aliasing(want[0])
    assert list(new.state_dict()) == list(gm.state_dict())
    assert Cleanup()(new) is new
    return new


def _aliasing(out: Any) -> list[tuple[int, int]]:
    results = out if isinstance(out, (tuple, list)) else [out]
    storages: dict[int, int] = {}
    objects: dict[int, int] = {}
    return [
        (
            storages.setdefault(t.untyped_storage()._cdata, len(storages)),
            objects.setdefault(id(t), len(objects)),
        )
        for t in results
    ]


X = torch.linspace(-1, 1, 6).reshape(2, 3)


def unchanged(gm: GraphModule, *inputs: Any) -> None:
    assert cleaned(gm, *inputs) is gm


# Dead code


def test_what_nobody_reads_goes() -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        g.call_function(aten.sin.default, (g.call_function(aten.cos.default, (x,)),))
        g.get_attr("buffer")
        return g.call_function(aten.relu.default, (x,))

    gm = drawn(draw, X, buffer=torch.ones(2))
    assert_text(
        gm,
        """
        graph:
          %x: f32[2, 3] = input
          %cos_default: f32[2, 3] = aten.cos.default(%x)
          %sin_default: f32[2, 3] = aten.sin.default(%cos_default)
          %buffer: f32[2] = buffer buffer
          %relu_default: f32[2, 3] = aten.relu.default(%x)
          return %relu_default
    """,
    )
    new = cleaned(gm, X)
    assert_text(
        new,
        """
        graph:
          %x: f32[2, 3] = input
          %relu_default: f32[2, 3] = aten.relu.default(%x)
          return %relu_default
    """,
    )
    assert list(new.state_dict()) == ["buffer"]


def test_what_acts_or_draws_stays_though_nobody_reads_it() -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        g.call_function(aten.rand.default, ([2],))
        g.call_function(aten.add_.Tensor, (x, 1.0))
        g.call_function(torch._assert, (True, "fine"))
        return g.call_function(aten.rand.default, ([2],))

    gm = drawn(draw, X)
    unchanged(gm, X)
    assert_text(
        gm,
        """
        graph:
          %x: f32[2, 3] = input
          %rand_default: f32[2] = aten.rand.default([2])
          %add__tensor: f32[2, 3] = aten.add_.Tensor(%x, 1.0)
          %_assert = torch._assert(True, 'fine')
          %rand_default_1: f32[2] = aten.rand.default([2])
          return %rand_default_1
    """,
    )


def test_a_dead_region_goes_and_one_that_acts_stays() -> None:
    def body(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = torch.sin(x), torch.rand_like(x)
        return (x * 2, a.cos(), b * 3)

    gm = captured(body, X)
    gm = dovetail.outline(
        gm, [dovetail.Request(["sin", "cos"], "dead"), dovetail.Request(["rand_like"], "acts")]
    )
    out = gm.graph.output_node()
    out.args = ((out.args[0][0],),)  # type: ignore[index]
    gm.graph.set_codegen(torch.fx.graph.CodeGen())
    assert_text(
        gm,
        """
        graph:
          %x: f32[2, 3] = input
          %dead_0: (f32[2, 3],) = region dead @dead(%x)
          %cos: f32[2, 3] = operator.getitem(%dead_0, 0)
          %acts_0: (f32[2, 3],) = region acts @acts(%x)
          %rand_like: f32[2, 3] = operator.getitem(%acts_0, 0)
          %mul: f32[2, 3] = aten.mul.Tensor(%x, 2)
          %mul_1: f32[2, 3] = aten.mul.Tensor(%rand_like, 3)
          return (%mul,)

        body @dead:
          %x: f32[2, 3] = input
          %sin: f32[2, 3] = aten.sin.default(%x)
          %cos: f32[2, 3] = aten.cos.default(%sin)
          return (%cos,)

        body @acts:
          %x: f32[2, 3] = input
          %rand_like: f32[2, 3] = aten.rand_like.default(%x, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None)
          return (%rand_like,)
    """,
    )
    assert_text(
        cleaned(gm, X),
        """
        graph:
          %x: f32[2, 3] = input
          %acts_0: (f32[2, 3],) = region acts @acts(%x)
          %mul: f32[2, 3] = aten.mul.Tensor(%x, 2)
          return (%mul,)

        body @acts:
          %x: f32[2, 3] = input
          %rand_like: f32[2, 3] = aten.rand_like.default(%x, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None)
          return (%rand_like,)
    """,
    )


# Common sub-expressions


def test_equal_things_are_computed_once() -> None:
    gm = captured(lambda x: (x.sin() + 1.0) * (x.sin() + 1.0), X)
    assert_text(
        gm,
        """
        graph:
          %x: f32[2, 3] = input
          %sin: f32[2, 3] = aten.sin.default(%x)
          %add: f32[2, 3] = aten.add.Tensor(%sin, 1.0, alpha=1)
          %sin_1: f32[2, 3] = aten.sin.default(%x)
          %add_1: f32[2, 3] = aten.add.Tensor(%sin_1, 1.0, alpha=1)
          %mul: f32[2, 3] = aten.mul.Tensor(%add, %add_1)
          return (%mul,)
    """,
    )
    assert_text(
        cleaned(gm, X),
        """
        graph:
          %x: f32[2, 3] = input
          %sin: f32[2, 3] = aten.sin.default(%x)
          %add: f32[2, 3] = aten.add.Tensor(%sin, 1.0, alpha=1)
          %mul: f32[2, 3] = aten.mul.Tensor(%add, %add)
          return (%mul,)
    """,
    )


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (0.0, -0.0), (1.0, 2.0), (True, 1)])
def test_literals_that_differ_in_type_or_sign_are_not_equal(one: Any, other: Any) -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        a, b = (g.call_function(aten.mul.Scalar, (x, v)) for v in (one, other))
        return g.call_function(aten.add.Tensor, (a, b))

    unchanged(drawn(draw, X), X)
    assert len(cleaned(captured(lambda x: x * 2.0 + x * 2.0, X), X).graph.nodes) == 4


def test_random_draws_are_never_merged() -> None:
    unchanged(captured(lambda x: torch.rand_like(x) + torch.rand_like(x), X), X)


def test_of_two_equal_results_one_may_be_returned() -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        a, b = (g.call_function(aten.sin.default, (x,)) for _ in range(2))
        return (a, g.call_function(aten.cos.default, (b,)))

    gm = drawn(draw, X)
    assert_text(
        gm,
        """
        graph:
          %x: f32[2, 3] = input
          %sin_default: f32[2, 3] = aten.sin.default(%x)
          %sin_default_1: f32[2, 3] = aten.sin.default(%x)
          %cos_default: f32[2, 3] = aten.cos.default(%sin_default_1)
          return (%sin_default, %cos_default)
    """,
    )
    assert_text(
        cleaned(gm, X),
        """
        graph:
          %x: f32[2, 3] = input
          %sin_default: f32[2, 3] = aten.sin.default(%x)
          %cos_default: f32[2, 3] = aten.cos.default(%sin_default)
          return (%sin_default, %cos_default)
    """,
    )


def test_results_that_were_two_tensors_stay_two() -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        a, b = (g.call_function(aten.sin.default, (x,)) for _ in range(2))
        return (a, g.call_function(aten.view.default, (b, [6])))

    gm = drawn(draw, X)
    unchanged(gm, X)
    assert_text(
        gm,
        """
        graph:
          %x: f32[2, 3] = input
          %sin_default: f32[2, 3] = aten.sin.default(%x)
          %sin_default_1: f32[2, 3] = aten.sin.default(%x)
          %view_default: f32[6] = aten.view.default(%sin_default_1, [6])
          return (%sin_default, %view_default)
    """,
    )


def test_views_of_one_memory_are_not_returned_as_one_tensor() -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        parts = [g.call_function(aten.unbind.int, (x,)) for _ in range(2)]
        return tuple(g.call_function(operator.getitem, (p, 0)) for p in parts)

    unchanged(drawn(draw, X), X)


def test_nothing_is_merged_across_a_write() -> None:
    def draw(g: Graph, between: bool) -> Any:
        x = g.placeholder("x")
        a = g.call_function(aten.sin.default, (x,))
        if between:
            g.call_function(aten.add_.Tensor, (x, 1.0))
        b = g.call_function(aten.sin.default, (x,))
        total = g.call_function(aten.add.Tensor, (a, b))
        if not between:
            g.call_function(aten.add_.Tensor, (x, 1.0))
        return total

    written_between = drawn(lambda g: draw(g, True), X)
    unchanged(written_between, X)
    assert_text(
        written_between,
        """
        graph:
          %x: f32[2, 3] = input
          %sin_default: f32[2, 3] = aten.sin.default(%x)
          %add__tensor: f32[2, 3] = aten.add_.Tensor(%x, 1.0)
          %sin_default_1: f32[2, 3] = aten.sin.default(%x)
          %add_tensor: f32[2, 3] = aten.add.Tensor(%sin_default, %sin_default_1)
          return %add_tensor
    """,
    )
    assert_text(
        cleaned(drawn(lambda g: draw(g, False), X), X),
        """
        graph:
          %x: f32[2, 3] = input
          %sin_default: f32[2, 3] = aten.sin.default(%x)
          %add_tensor: f32[2, 3] = aten.add.Tensor(%sin_default, %sin_default)
          %add__tensor: f32[2, 3] = aten.add_.Tensor(%x, 1.0)
          return %add_tensor
    """,
    )


def test_nothing_that_is_written_is_merged() -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        a, b = (g.call_function(aten.sin.default, (x,)) for _ in range(2))
        g.call_function(aten.add_.Tensor, (a, 1.0))
        return g.call_function(aten.sub.Tensor, (a, b))

    unchanged(drawn(draw, X), X)


def test_nothing_is_merged_across_a_switch_of_modes() -> None:
    def draw(g: Graph, between: bool) -> Any:
        x = g.placeholder("x")
        a = g.call_function(aten.sin.default, (x,))
        if between:
            g.call_function(torch._C._set_grad_enabled, (False,))
        b = g.call_function(aten.sin.default, (x,))
        g.call_function(torch._C._set_grad_enabled, (True,))
        return g.call_function(aten.sub.Tensor, (a, b))

    unchanged(drawn(lambda g: draw(g, True), X), X)
    assert called(cleaned(drawn(lambda g: draw(g, False), X), X)).count("sin") == 1


def test_an_unknown_function_may_do_anything() -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        return g.call_function(operator.add, tuple(g.call_function(_unknown, (x,)) for _ in range(2)))

    unchanged(drawn(draw, X), X)


def _unknown(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def test_an_attribute_fetched_twice_is_fetched_once() -> None:
    def draw(g: Graph) -> Any:
        return g.call_function(aten.mul.Tensor, (g.get_attr("weight"), g.get_attr("weight")))

    gm = drawn(draw, weight=nn.Parameter(torch.ones(3)))
    assert_text(
        gm,
        """
        graph:
          %weight = param weight
          %weight_1 = param weight
          %mul_tensor = aten.mul.Tensor(%weight, %weight_1)
          return %mul_tensor
    """,
    )
    assert_text(
        cleaned(gm),
        """
        graph:
          %weight = param weight
          %mul_tensor = aten.mul.Tensor(%weight, %weight)
          return %mul_tensor
    """,
    )


def test_equal_regions_become_one_call() -> None:
    gm = captured(lambda x: x.sin().cos() + x.sin().cos(), X)
    pairs = [dovetail.Request(["sin", "cos"], "pair"), dovetail.Request(["sin_1", "cos_1"], "pair")]
    both = dovetail.outline(gm, pairs)
    assert_text(
        both,
        """
        graph:
          %x: f32[2, 3] = input
          %pair_0: (f32[2, 3],) = region pair @pair(%x)
          %cos: f32[2, 3] = operator.getitem(%pair_0, 0)
          %pair_1: (f32[2, 3],) = region pair @pair(%x)
          %cos_1: f32[2, 3] = operator.getitem(%pair_1, 0)
          %add: f32[2, 3] = aten.add.Tensor(%cos, %cos_1, alpha=1)
          return (%add,)

        body @pair ×2:
          %x: f32[2, 3] = input
          %sin: f32[2, 3] = aten.sin.default(%x)
          %cos: f32[2, 3] = aten.cos.default(%sin)
          return (%cos,)
    """,
    )
    assert_text(
        cleaned(both, X),
        """
        graph:
          %x: f32[2, 3] = input
          %pair_0: (f32[2, 3],) = region pair @pair(%x)
          %cos: f32[2, 3] = operator.getitem(%pair_0, 0)
          %add: f32[2, 3] = aten.add.Tensor(%cos, %cos, alpha=1)
          return (%add,)

        body @pair:
          %x: f32[2, 3] = input
          %sin: f32[2, 3] = aten.sin.default(%x)
          %cos: f32[2, 3] = aten.cos.default(%sin)
          return (%cos,)
    """,
    )


def test_regions_with_other_attributes_stay_two() -> None:
    gm = captured(lambda x: x.sin().cos() + x.sin().cos(), X)
    pairs = [dovetail.Request([f"sin{i}", f"cos{i}"], "pair", attrs={"n": i}) for i in ("", "_1")]
    other = dovetail.outline(gm, pairs)
    unchanged(other, X)
    assert_text(
        other,
        """
        graph:
          %x: f32[2, 3] = input
          %pair_0: (f32[2, 3],) = region pair {"n": ""} @pair(%x)
          %cos: f32[2, 3] = operator.getitem(%pair_0, 0)
          %pair_1: (f32[2, 3],) = region pair {"n": "_1"} @pair(%x)
          %cos_1: f32[2, 3] = operator.getitem(%pair_1, 0)
          %add: f32[2, 3] = aten.add.Tensor(%cos, %cos_1, alpha=1)
          return (%add,)

        body @pair ×2:
          %x: f32[2, 3] = input
          %sin: f32[2, 3] = aten.sin.default(%x)
          %cos: f32[2, 3] = aten.cos.default(%sin)
          return (%cos,)
    """,
    )


def test_views_of_what_was_merged_lie_where_their_values_claim() -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        a, b = (g.call_function(aten.sin.default, (x,)) for _ in range(2))
        views = [g.call_function(aten.reshape.default, (v, [6])) for v in (a, b)]
        part = g.call_function(aten.slice.Tensor, (views[1], 0, 0, 3))
        return g.call_function(aten.mul.Tensor, (part, g.call_function(aten.sum.default, (views[0],))))

    new = cleaned(drawn(draw, X), X)
    assert called(new) == ["sin", "reshape", "slice", "sum", "mul"]
    storages = {
        n.name: n.meta["val"].untyped_storage()._cdata for n in new.graph.nodes if n.op == "call_function"
    }
    assert storages["sin_default"] == storages["reshape_default"] == storages["slice_tensor"]
    assert storages["sin_default"] != storages["mul_tensor"]


# Views that change nothing


def test_views_that_change_nothing_go() -> None:
    def draw(g: Graph, *, last: bool) -> Any:
        x = g.placeholder("x")
        same = g.call_function(aten.view.default, (x, [2, 3]))
        same = g.call_function(aten.expand.default, (same, [2, 3]))
        same = g.call_method("contiguous", (same,))
        return same if last else g.call_function(aten.sin.default, (same,))

    gm = drawn(lambda g: draw(g, last=False), X)
    assert_text(
        gm,
        """
        graph:
          %x: f32[2, 3] = input
          %view_default: f32[2, 3] = aten.view.default(%x, [2, 3])
          %expand_default: f32[2, 3] = aten.expand.default(%view_default, [2, 3])
          %contiguous: f32[2, 3] = .contiguous(%expand_default)
          %sin_default: f32[2, 3] = aten.sin.default(%contiguous)
          return %sin_default
    """,
    )
    assert_text(
        cleaned(gm, X),
        """
        graph:
          %x: f32[2, 3] = input
          %sin_default: f32[2, 3] = aten.sin.default(%x)
          return %sin_default
    """,
    )
    # A caller could tell the returned view from the input.
    returned = drawn(lambda g: draw(g, last=True), X)
    unchanged(returned, X)
    assert_text(
        returned,
        """
        graph:
          %x: f32[2, 3] = input
          %view_default: f32[2, 3] = aten.view.default(%x, [2, 3])
          %expand_default: f32[2, 3] = aten.expand.default(%view_default, [2, 3])
          %contiguous: f32[2, 3] = .contiguous(%expand_default)
          return %contiguous
    """,
    )


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.view.default, ([3, 2],)),
        (aten.detach.default, ()),
        (aten.clone.default, ()),
        (aten.t.default, ()),
    ],
)
def test_what_a_reader_could_tell_from_its_operand_stays(target: Any, arguments: tuple[Any, ...]) -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        return g.call_function(aten.sin.default, (g.call_function(target, (x, *arguments)),))

    unchanged(drawn(draw, X), X)


def test_a_view_that_is_written_through_stays() -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        same = g.call_function(aten.view.default, (x, [2, 3]))
        return g.call_function(aten.sin.default, (g.call_function(aten.add_.Tensor, (same, 1.0)),))

    unchanged(drawn(draw, X), X)


def test_without_values_no_view_is_known_to_change_nothing() -> None:
    def draw(g: Graph) -> Node:
        x = g.placeholder("x")
        return g.call_function(aten.sin.default, (g.call_function(aten.view.default, (x, [2, 3])),))

    unchanged(drawn(draw), X)


# Whole graphs


@pytest.mark.parametrize(
    ("name", "training"),
    [*((name, False) for name in sorted(MODELS)), *((name, True) for name in ("bert", "moe", "resnet"))],
)
def test_zoo(name: str, training: bool) -> None:
    gm, inputs = zoo_graph(name, training=training), zoo_inputs(name)
    new = Pipeline([Cleanup()])(gm, check=True)
    assert equal(
        run(new, *inputs.args, *inputs.kwargs.values()), run(gm, *inputs.args, *inputs.kwargs.values())
    )
    assert Cleanup()(new) is new


def test_after_inlining_the_operations_stand_where_they_stood() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        b = x.exp() * 2 + x.exp() * 2
        return a.cos() + b

    gm = captured(model, X)
    outlined = dovetail.outline(gm, ["sin", "cos"], kind="pair")
    new = cleaned(outlined, X)
    assert len(new.graph.nodes) < len(outlined.graph.nodes)
    assert dovetail.text(dovetail.inline(new)) == dovetail.text(Cleanup()(gm))
