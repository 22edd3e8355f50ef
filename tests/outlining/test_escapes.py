"""What happens to values that are used inside and outside."""

from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail import CyclicRegion, EmptyRegion, EscapingValue, InvalidArgument
from tests.outlining.helpers import drawn, outlined, refused, trace
from tests.texts import assert_text

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


def inner_value():
    """`m` is read inside by `n` and outside by `o`."""

    def draw(g):
        x = g.placeholder("x")
        m = g.call_function(aten.mul.Tensor, (x, 3.0), name="m")
        n = g.call_function(aten.neg.default, (m,), name="n")
        o = g.call_function(aten.exp.default, (m,), name="o")
        return n, o

    return drawn(draw)


def with_values(gm, *inputs):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)
    gm.graph.output_node().meta["val"] = None
    return gm


def test_the_value_before_any_policy():
    assert_text(
        inner_value(),
        """
        graph:
          %x = input
          %m = aten.mul.Tensor(%x, 3.0)
          %n = aten.neg.default(%m)
          %o = aten.exp.default(%m)
          return (%n, %o)
    """,
    )


def test_output_returns_it_too():
    new = outlined(inner_value(), ["m", "n"], X, kind="k", escapes="output")
    assert_text(
        new,
        """
        graph:
          %x = input
          %k_0 = region k @k(%x)
          %m = operator.getitem(%k_0, 0)
          %n = operator.getitem(%k_0, 1)
          %o = aten.exp.default(%m)
          return (%n, %o)

        body @k:
          %x = input
          %m = aten.mul.Tensor(%x, 3.0)
          %n = aten.neg.default(%m)
          return (%m, %n)
    """,
    )
    assert_text(
        dovetail.inline(new),
        """
        graph:
          %x = input
          %m = aten.mul.Tensor(%x, 3.0)
          %n = aten.neg.default(%m)
          %o = aten.exp.default(%m)
          return (%n, %o)
    """,
    )


def test_duplicate_clones_the_producer_and_leaves_the_original():
    new = outlined(inner_value(), ["m", "n"], X, kind="k", escapes="duplicate")
    assert_text(
        new,
        """
        graph:
          %x = input
          %m = aten.mul.Tensor(%x, 3.0)
          %k_0 = region k @k(%x)
          %n = operator.getitem(%k_0, 0)
          %o = aten.exp.default(%m)
          return (%n, %o)

        body @k:
          %x = input
          %m = aten.mul.Tensor(%x, 3.0)
          %n = aten.neg.default(%m)
          return (%n,)
    """,
    )


def test_leave_drops_the_producer_from_the_region():
    new = outlined(inner_value(), ["m", "n"], X, kind="k", escapes="leave")
    assert_text(
        new,
        """
        graph:
          %x = input
          %m = aten.mul.Tensor(%x, 3.0)
          %k_0 = region k @k(%m)
          %n = operator.getitem(%k_0, 0)
          %o = aten.exp.default(%m)
          return (%n, %o)

        body @k:
          %m = input
          %n = aten.neg.default(%m)
          return (%n,)
    """,
    )
    assert dovetail.regions(new)[0].nodes == ("n",)


def test_refuse_names_the_value_and_its_users():
    gm = inner_value()
    message = refused(gm, EscapingValue, ["m", "n"], kind="k", escapes="refuse")
    assert "'m'" in message
    assert "'o'" in message
    assert_text(
        gm,
        """
        graph:
          %x = input
          %m = aten.mul.Tensor(%x, 3.0)
          %n = aten.neg.default(%m)
          %o = aten.exp.default(%m)
          return (%n, %o)
    """,
    )


def test_a_result_that_nothing_inside_reads_is_no_escape():
    outlined(inner_value(), ["n"], X, kind="k", escapes="refuse")


def test_per_node():
    gm = trace(lambda x: ((a := x * 2), (b := a + 1), b.exp() + a))
    new = outlined(
        gm, ["mul", "add", "exp", "add_1"], X, kind="k", escapes={"mul": "output", "add": "duplicate"}
    )
    (region,) = dovetail.regions(new)
    assert region.escapes["mul"].policy == "output"
    assert region.escapes["add"].policy == "duplicate"
    assert "mul" in [n.name for n in region.outputs]


def test_per_node_by_node_object_and_a_bad_one():
    gm = inner_value()
    m = next(n for n in gm.graph.nodes if n.name == "m")
    outlined(gm, ["m", "n"], X, kind="k", escapes={m: "leave"})
    assert "not one of" in refused(gm, InvalidArgument, ["m", "n"], kind="k", escapes={"m": "clone"})
    assert "no such node" in refused(gm, dovetail.UnknownNode, ["m", "n"], kind="k", escapes={"zz": "leave"})
    assert "not one of" in refused(gm, InvalidArgument, ["m", "n"], kind="k", escapes="sometimes")
    assert "give a policy" in refused(gm, InvalidArgument, ["m", "n"], kind="k", escapes=3)


def test_leave_that_makes_a_cycle():
    gm = trace(lambda x: ((b := (x * 2) + 1).exp() + x * 2, b.neg()))
    message = refused(
        gm, CyclicRegion, ["mul", "add", "exp", "add_1", "mul_1"], kind="k", escapes={"add": "leave"}
    )
    assert "mul -> add -> exp" in message


def test_leaving_everything_outside():
    gm = trace(lambda x: (x.exp(), x.sin()))
    assert "left outside" in refused(gm, EmptyRegion, ["exp"], kind="k", escapes={"exp": "leave"})


def test_duplicate_is_the_producer_alone_never_its_chain():
    gm = trace(lambda x: ((b := (x * 2) + 1).exp(), b.neg()))
    assert_text(
        gm,
        """
        graph:
          %x = input
          %mul = operator.mul(%x, 2)
          %add = operator.add(%mul, 1)
          %exp = .exp(%add)
          %neg = .neg(%add)
          return (%exp, %neg)
    """,
    )
    new = outlined(gm, ["mul", "add", "exp"], X, kind="k", escapes={"add": "duplicate", "mul": "output"})
    # The original `add` stays outside and reads `mul`, which the region therefore returns.
    assert_text(
        new,
        """
        graph:
          %x = input
          %k_0 = region k @k(%x)
          %mul = operator.getitem(%k_0, 0)
          %exp = operator.getitem(%k_0, 1)
          %add = operator.add(%mul, 1)
          %neg = .neg(%add)
          return (%exp, %neg)

        body @k:
          %x = input
          %mul = operator.mul(%x, 2)
          %add = operator.add(%mul, 1)
          %exp = .exp(%add)
          return (%mul, %exp)
    """,
    )


@pytest.mark.parametrize(
    ("make", "policy", "why"),
    [
        (lambda x, y: (a := x * 3.0, a.neg()), "duplicate", "costs no more"),
        (lambda x, y: (a := x @ y, a.neg()), "output", "more than reading and writing"),
        (lambda x, y: (a := x.sum(), a.neg()), "output", ""),
        (lambda x, y: (a := (x * 2).exp(), a.neg()), "output", "would need 'mul' there"),
        (lambda x, y: (a := x.t(), a.neg()), "duplicate", "view"),
        (lambda x, y: (a := x * 2, a.t()), "output", "a view of it is taken"),
    ],
)
def test_auto_weighs_redoing_against_storing(make, policy, why):
    gm = with_values(trace(make), torch.randn(4, 4), torch.randn(4, 4))
    inside = [n.name for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    new = outlined(gm, inside, torch.randn(4, 4), torch.randn(4, 4), kind="k")
    escape = dovetail.regions(new)[0].escapes[inside[-2]]
    assert escape.policy == policy
    assert why in escape.reason


def test_auto_without_sizes_returns_the_value():
    new = outlined(trace(lambda x: ((a := x * 3.0), a.neg())), ["mul", "neg"], X, kind="k")
    escape = dovetail.regions(new)[0].escapes["mul"]
    assert escape.policy == "output"
    assert "sizes" in escape.reason


def test_a_value_whose_memory_is_written_is_not_cloned():
    def draw(g):
        x = g.placeholder("x")
        m = g.call_function(aten.mul.Tensor, (x, 3.0), name="m")
        n = g.call_function(aten.neg.default, (m,), name="n")
        g.call_function(aten.add_.Tensor, (m, 1.0), name="w")
        return n, m

    new = outlined(drawn(draw), ["m", "n"], X, kind="k", escapes="duplicate")
    assert_text(
        new,
        """
        graph:
          %x = input
          %k_0 = region k @k(%x)
          %m = operator.getitem(%k_0, 0)
          %n = operator.getitem(%k_0, 1)
          %w = aten.add_.Tensor(%m, 1.0)
          return (%n, %m)

        body @k:
          %x = input
          %m = aten.mul.Tensor(%x, 3.0)
          %n = aten.neg.default(%m)
          return (%m, %n)
    """,
    )
    assert "written" in dovetail.regions(new)[0].escapes["m"].reason
