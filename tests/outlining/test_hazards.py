"""Effects, sharing and state in places where they are easily overlooked."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import dovetail
from dovetail import EffectOrder, InvalidArgument
from tests.outlining.helpers import drawn, equal, names, node, refused, run, trace

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def ping():
    with torch.library._scoped_library("dovetail_hazards", "FRAGMENT") as library:
        library.define("ping(Tensor x) -> Tensor")
        yield torch.ops.dovetail_hazards.ping


def three_pings(op):
    def draw(g):
        x = g.placeholder("x")
        a, _, c = (g.call_function(op.default, (x,), name=n) for n in "abc")
        return a, c

    return drawn(draw)


def test_a_declaration_holds_inside_regions(ping):
    gm = dovetail.declare(three_pings(ping), {ping: "ordered"})
    refused(gm, EffectOrder, ["a", "c"], kind="k")
    new = dovetail.outline(gm, ["b"], kind="k")
    assert dovetail.regions(new)[0].effects == ("declared as ordered",)
    refused(new, EffectOrder, ["a", "c"], kind="m")
    new.graph.eliminate_dead_code()
    assert "k_0" in names(new)


def test_a_declaration_after_outlining_reaches_the_bodies(ping):
    undeclared = dovetail.outline(three_pings(ping), ["b"], kind="k")
    declared = dovetail.declare(undeclared, {ping: "ordered"})
    declared.graph.eliminate_dead_code()
    assert "k_0" in names(declared)
    undeclared.graph.eliminate_dead_code()
    assert "k_0" not in names(undeclared)


def test_a_declaration_adds_to_what_is_known_and_must_name_something():
    def draw(g):
        x = g.placeholder("x")
        r = g.call_function(aten.neg.default, (x,), name="r")
        g.call_function(aten.add_.Tensor, (x, 1.0), name="w")
        return r, g.call_function(aten.exp.default, (x,), name="s")

    for word in ("ordered", "pure"):
        refused(dovetail.declare(drawn(draw), {aten.add_: word}), EffectOrder, ["r", "s"], kind="k")
    for bad in ({"no.such.op": "pure"}, {3: "pure"}, {None: "pure"}, ["x"]):
        with pytest.raises(InvalidArgument):
            dovetail.declare(drawn(draw), bad)
    with pytest.raises(InvalidArgument):
        dovetail.declare(nn.Linear(2, 2), {})


def test_pure_frees_a_python_function():
    def mine(x):
        return x * 2

    def draw(g):
        x = g.placeholder("x")
        a = g.call_function(mine, (x,), name="a")
        g.call_function(mine, (x,), name="b")
        return a, g.call_function(mine, (x,), name="c")

    gm = drawn(draw)
    refused(gm, EffectOrder, ["a", "c"], kind="k")
    assert dovetail.regions(dovetail.outline(dovetail.declare(gm, {mine: "pure"}), ["a", "c"], kind="k"))


class EvalDropout(nn.Module):
    """Dropout in eval returns its very argument, whatever the values of its trace say."""

    def forward(self, x):
        y = x.clone()
        d = F.dropout(y, 0.5, False)
        a = d.neg()
        y.add_(1)
        return a, d.exp()


@pytest.mark.parametrize("how", ["export", "real", "fake", "symbolic"])
def test_results_that_are_their_arguments(how):
    if how == "export":
        gm = torch.export.export(EvalDropout(), (X,)).module()
    else:
        gm = make_fx(EvalDropout(), tracing_mode=how, pre_dispatch=True)(X)
    refused(gm, EffectOrder, ["neg", "exp"], kind="k")


def between(make):
    """`a` reads `v`, then `x` is written, then `b` reads `v`: {a, b} is legal only if v is not x."""

    def draw(g):
        x = g.placeholder("x")
        v = make(g, x)
        a = g.call_function(torch.neg, (v,), name="a")
        g.create_node("call_method", "add_", (x, 1.0), name="w")
        return a, g.call_function(torch.exp, (v,), name="b")

    return drawn(draw)


@pytest.mark.parametrize(
    "make",
    [
        lambda g, x: g.call_function(operator.pos, (x,)),
        lambda g, x: g.call_function(operator.getitem, (g.call_function(tuple, ([x],)), 0)),
        lambda g, x: g.call_function(operator.getitem, (g.call_function(operator.add, ([x], [x])), 1)),
        lambda g, x: g.call_function(max, (x, x)),
        lambda g, x: g.call_function(torch.einsum, ("ij->ji", x)),
        lambda g, x: g.call_function(operator.getitem, (g.call_function(torch.split, (x, 1)), 0)),
        lambda g, x: g.call_method("set_", (g.call_function(torch.empty, (0,)), x)),
        lambda g, x: g.call_method("float", (x,)),
        lambda g, x: g.call_function(F.dropout, (x, 0.5, False)),
    ],
)
def test_spellings_that_return_their_argument(make):
    refused(between(make), EffectOrder, ["a", "b"], kind="k")


def test_backward_is_an_effect():
    def draw(g):
        x = g.placeholder("x")
        a = g.call_function(getattr, (x, "grad"), name="a")
        g.create_node("call_method", "backward", (g.call_method("sum", (x,)),), name="back")
        return a, g.call_function(getattr, (x, "grad"), name="b")

    refused(drawn(draw), EffectOrder, ["a", "b"], kind="k")


def test_readers_stay_behind_the_wait_for_a_collective():
    def draw(g):
        x = g.placeholder("x")
        r = g.call_function(torch.ops._c10d_functional.all_reduce_.default, (x, "sum", "0"), name="r")
        g.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,), name="w")
        return r, g.call_function(aten.exp.default, (x,), name="z")

    refused(drawn(draw), EffectOrder, ["r", "z"], kind="k")


class Inner(nn.Module):
    def forward(self, x):
        return x.add_(1)


def test_a_graph_module_within_a_leaf_module_may_do_anything():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.seq = nn.Sequential(symbolic_trace(Inner()))

        def forward(self, x):
            a = x.neg()
            self.seq(x)
            return a, x.exp()

    class Leafy(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, nn.Sequential)

    model = M()
    refused(GraphModule(model, Leafy().trace(model)), EffectOrder, ["neg", "exp"], kind="k")


def test_hooks_of_a_called_graph_are_effects():
    def draw(g):
        x = g.placeholder("x")
        a = g.call_function(torch.rand_like, (x,), name="a")
        g.create_node("call_module", "inner", (x,), name="m")
        return a, g.call_function(torch.rand_like, (x,), name="b")

    inner = symbolic_trace(lambda x: x.exp())
    inner.register_forward_hook(lambda *_: None)
    gm = drawn(draw, inner=inner)
    assert dovetail.regions(dovetail.outline(gm, ["m"], kind="k"))
    from dovetail.ir.effects import effects_of

    assert effects_of(node(gm, "m"), gm).host_effect


def test_modes_may_change_after_outlining():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)

        def forward(self, x):
            y = self.norm(x)
            return self.drop(y).neg(), y.exp()

    gm = trace(None, M().eval())
    for escapes in ("auto", "duplicate"):
        new = dovetail.outline(gm, ["norm", "exp"], kind="k", escapes=escapes)
        one, other = copy.deepcopy(new).train(), copy.deepcopy(gm).train()
        assert equal(run(one, X), run(other, X))
