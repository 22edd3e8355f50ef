"""What nodes read, write, draw and do, and the edges that follow from it."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule

import dovetail
from dovetail.ir.dependencies import dependencies
from dovetail.ir.effects import Effects, effects_of
from tests.outlining.helpers import drawn, trace

aten = torch.ops.aten


def of(target, *args, op="call_function", **kwargs) -> Effects:
    """The effects of one call; letters stand for inputs."""
    graph = Graph()
    inputs = {c: graph.placeholder(c) for c in "xyz"}
    resolve = lambda v: inputs.get(v, v) if isinstance(v, str) and len(v) == 1 else v  # noqa: E731
    node = graph.create_node(
        op, target, tuple(map(resolve, args)), {k: resolve(v) for k, v in kwargs.items()}
    )
    graph.output(node)
    return effects_of(node, GraphModule(nn.Module(), graph))


def writes(effects: Effects) -> list[str]:
    return [n.name for n in effects.writes]


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ((aten.add_.Tensor, "x", "y"), ["x"]),
        ((aten.copy_.default, "x", "y"), ["x"]),
        ((aten.add.Tensor, "x", "y"), []),
        ((torch.add, "x", "y"), []),
        ((torch.relu_, "x"), ["x"]),
        ((operator.iadd, "x", "y"), ["x"]),
        ((operator.add, "x", "y"), []),
        ((operator.setitem, "x", 0, "y"), ["x"]),
        ((F.relu, "x", True), ["x"]),
        ((F.relu, "x"), []),
        ((aten.native_batch_norm.default, "x", None, None, "y", "z", True, 0.1, 1e-5), ["y", "z"]),
        ((aten.native_batch_norm.default, "x", None, None, "y", "z", False, 0.1, 1e-5), []),
        ((F.batch_norm, "x", "y", "z", None, None, True), ["y", "z"]),
        ((F.batch_norm, "x", "y", "z"), []),
    ],
)
def test_writes(call, written):
    assert writes(of(*call)) == written


def test_out_arguments_and_methods_write():
    assert writes(of(aten.add.out, "x", "y", out="z")) == ["z"]
    assert writes(of(torch.add, "x", "y", out="z")) == ["z"]
    assert writes(of("add_", "x", "y", op="call_method")) == ["x"]
    assert writes(of("add", "x", "y", op="call_method")) == []
    assert writes(of("__setitem__", "x", 0, "y", op="call_method")) == ["x"]


@pytest.mark.parametrize(
    ("call", "random"),
    [
        ((aten.rand.default, [2]), True),
        ((aten.bernoulli.p, "x", 0.5), True),
        ((aten.native_dropout.default, "x", 0.5, True), True),
        ((aten.native_dropout.default, "x", 0.5, False), False),
        ((aten.dropout.default, "x", 0.5, False), False),
        ((aten.scaled_dot_product_attention.default, "x", "y", "z"), False),
        ((aten.scaled_dot_product_attention.default, "x", "y", "z", None, 0.1), True),
        ((F.scaled_dot_product_attention, "x", "y", "z"), False),
        ((F.dropout, "x"), True),
        ((F.dropout, "x", 0.5, False), False),
        ((torch.rand_like, "x"), True),
        ((aten.lstm.input, "x", ["y"], ["z"], True, 1, 0.0, True, False, False), False),
        ((aten.lstm.input, "x", ["y"], ["z"], True, 2, 0.5, True, False, False), True),
        ((aten.add.Tensor, "x", "y"), False),
    ],
)
def test_randomness(call, random):
    assert of(*call).random is random


@pytest.mark.parametrize(
    "call",
    [
        (aten._assert_async.msg, "x", "no"),
        (torch._assert, "x", "no"),
        (print, "x"),
        (torch.ops.higher_order.print, "hello"),
        (torch.ops._c10d_functional.all_reduce.default, "x", "sum", "0"),
    ],
)
def test_host_effects(call):
    assert of(*call).host_effect


def test_a_python_function_we_do_not_know_may_do_anything():
    effects = of(lambda x: x, "x")
    assert effects.host_effect
    assert effects.random
    assert writes(effects) == ["x"]


@pytest.fixture
def log_ops() -> Iterator[tuple[object, object]]:
    with torch.library._scoped_library("dovetail_tests", "FRAGMENT") as library:
        library.define("log(Tensor x) -> ()")
        library.define("pure(Tensor x) -> Tensor")
        library.define("bump(Tensor(a!) x) -> ()")
        yield torch.ops.dovetail_tests.log.default, torch.ops.dovetail_tests.pure.default


def test_custom_operators(log_ops):
    log, pure = log_ops
    assert of(log, "x").host_effect
    assert of(pure, "x").pure
    assert writes(of(torch.ops.dovetail_tests.bump.default, "x")) == ["x"]


def test_users_can_declare_otherwise(log_ops):
    _, pure = log_ops

    def draw(g):
        x = g.placeholder("x")
        a = g.call_function(pure, (x,), name="a")
        b = g.call_function(pure, (a,), name="b")
        c = g.call_function(pure, (x,), name="c")
        return b, c

    gm = drawn(draw)
    assert dependencies(gm, list(gm.graph.nodes)).before == {}
    declared = dovetail.declare(gm, {pure: "ordered"})
    assert dependencies(declared, list(declared.graph.nodes)).before == {2: [1], 3: [2]}
    assert dependencies(gm, list(gm.graph.nodes)).before == {}
    new = dovetail.outline(declared, ["a"], kind="k")
    assert new.meta["dovetail.effects"] == {"dovetail_tests.pure.default": "ordered"}
    with pytest.raises(dovetail.InvalidArgument, match="ordered"):
        dovetail.declare(gm, {pure: "strange"})


def edges(gm) -> dict[str, list[str]]:
    nodes = list(gm.graph.nodes)
    order = dependencies(gm, nodes)
    return {nodes[i].name: sorted({nodes[j].name for j in before}) for i, before in order.before.items()}


def test_reads_and_writes_of_one_storage_keep_their_order():
    def draw(g):
        x, y = g.placeholder("x"), g.placeholder("y")
        v = g.call_function(aten.transpose.int, (x, 0, 1), name="v")
        w = g.call_function(aten.select.int, (v, 0, 0), name="w")
        r = g.call_function(aten.exp.default, (w,), name="r")
        g.call_function(aten.mul_.Tensor, (x, 2.0), name="m")
        s = g.call_function(aten.exp.default, (w,), name="s")
        g.call_function(aten.add_.Tensor, (y, 1.0), name="other")
        return r, s

    order = edges(drawn(draw))
    assert order["m"] == ["r"]
    assert order["s"] == ["m"]
    assert "other" not in order
    assert "v" not in order


def test_a_view_may_cross_a_write_but_not_a_change_of_shape():
    def draw(op, *args):
        def inner(g):
            x = g.placeholder("x")
            g.call_function(op, (x, *args), name="change")
            return g.call_function(aten.t.default, (x,), name="v")

        return inner

    assert "v" not in edges(drawn(draw(aten.add_.Tensor, 1.0)))
    assert edges(drawn(draw(aten.transpose_.default, 0, 1)))["v"] == ["change"]


def test_buffers_named_twice_and_tied_are_one_storage():
    def draw(g):
        x = g.placeholder("x")
        a = g.call_function(aten.add.Tensor, (x, g.get_attr("buffer_a")), name="a")
        g.call_function(aten.copy_.default, (g.get_attr("buffer_b"), x), name="c")
        return a

    shared = torch.ones(2)
    assert edges(drawn(draw, buffer_a=shared, buffer_b=shared.view(2)))["c"] == ["a"]
    assert edges(drawn(draw, buffer_a=shared, buffer_b=torch.ones(2))) == {}


def test_leaf_modules_by_what_they_are():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop, self.linear = nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3)
            self.act = nn.ReLU(inplace=True)
            self.mine = Mine()

        def forward(self, x):
            return self.mine(self.act(self.linear(self.drop(self.norm(x)))))

    class Mine(nn.Module):
        def forward(self, x):
            return x

    from torch.fx import Tracer

    class Leafy(Tracer):
        def is_leaf_module(self, m, name):
            return not isinstance(m, M)

    def effects_by_name(model):
        gm = GraphModule(model, Leafy().trace(model))
        return {n.name: effects_of(n, gm) for n in gm.graph.nodes}

    model = M().train()
    effects = effects_by_name(model)
    assert len(effects["norm"].state_written) == 3
    assert effects["drop"].random
    assert effects["linear"].pure
    assert writes(effects["act"]) == ["linear"]
    assert effects["mine"].host_effect == "an unknown module"
    # The mode may change after a region was made.
    effects = effects_by_name(model.eval())
    assert len(effects["norm"].state_written) == 3
    assert effects["drop"].random


def test_a_switch_of_grad_mode_is_a_border_for_everything():
    def draw(g):
        x = g.placeholder("x")
        a = g.call_function(aten.exp.default, (x,), name="a")
        g.call_function(torch._C._set_grad_enabled, (False,), name="off")
        b = g.call_function(aten.exp.default, (x,), name="b")
        g.call_function(torch._C._set_grad_enabled, (True,), name="on")
        c = g.call_function(aten.exp.default, (x,), name="c")
        return a, b, c

    gm = drawn(draw)
    with pytest.raises(dovetail.EffectOrder):
        dovetail.outline(gm, ["a", "b"], kind="k")
    with pytest.raises(dovetail.EffectOrder):
        dovetail.outline(gm, ["b", "c"], kind="k")
    assert len(dovetail.regions(dovetail.outline(gm, ["off", "b", "on"], kind="k"))) == 1


def test_values_rule_out_what_a_composite_might_share():
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(x, y):
        z = torch.matmul(x, y.t())
        x.add_(1)
        return z + 1

    inputs = torch.ones(2, 2), torch.ones(2, 2)
    assert "add" not in edges(make_fx(f, pre_dispatch=True, tracing_mode="fake")(*inputs))
    # Without values nothing rules it out, nor with values that do not even share where views are taken.
    assert edges(trace(f))["add"] == ["add_"]
    assert edges(make_fx(f, pre_dispatch=True)(*inputs))["add"] == ["add_"]
