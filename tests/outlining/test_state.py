"""State, copies, edits by others and growth: what must hold of a graph with regions over time."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

import dovetail
from dovetail import InvalidArgument, InvalidGraph, Request
from dovetail.outlining.region import body_key, graph_key
from tests.outlining.helpers import drawn, names, node, outlined, refused, trace

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


def constant_inside():
    def draw(g):
        x = g.placeholder("x")
        return g.call_function(aten.add.Tensor, (x, g.get_attr("_tensor_constant0")), name="a")

    gm = drawn(draw, _tensor_constant0=torch.full((3,), 0.5))
    return gm, dovetail.outline(gm, ["_tensor_constant0", "a"], kind="k")


def test_state_that_is_replaced_is_seen_in_regions():
    _, new = constant_inside()
    new(X)
    new.load_state_dict({"_tensor_constant0": torch.full((3,), 2.0)}, assign=True)
    assert torch.equal(new(X), X + 2)
    leaf = trace(None, nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    new = dovetail.outline(leaf, ["_0", "_1"], kind="k")
    new(X)
    other = nn.Linear(3, 3)
    setattr(new, "0", other)
    assert torch.equal(new(X), other(X).relu())


def test_what_another_tool_dropped_comes_back():
    leaf = trace(None, nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    new = dovetail.outline(dovetail.outline(leaf, ["_0"], kind="k"), ["k_0", "_1"], kind="outer")
    for stripped in (GraphModule(new, new.graph), copy.copy(new)):
        stripped.delete_all_unused_submodules()
        assert torch.equal(stripped(X), leaf(X))
        for back in (dovetail.inline(stripped), dovetail.inline(dovetail.inline(stripped, depth=1))):
            dovetail.check(back)
            assert torch.equal(back(X), leaf(X))
            assert list(back.state_dict()) == list(leaf.state_dict())


def test_each_call_keeps_its_own_type_annotation():
    gm = trace(lambda x, y: (x.exp(), y.exp()))
    node(gm, "exp").type = torch.Tensor
    new = dovetail.outline(gm, [Request(["exp"], "k"), Request(["exp_1"], "k")])
    assert len({id(r.body) for r in dovetail.regions(new)}) == 1
    assert [n.type for n in dovetail.inline(new).graph.nodes] == [n.type for n in gm.graph.nodes]


def test_pickle_leaves_out_what_it_cannot_take_and_nothing_else():
    gm = trace(lambda x: x.exp().neg())
    node(gm, "exp").meta["odd"] = lambda: 1
    node(gm, "neg").meta["odd"] = lambda: 1
    new = dovetail.outline(gm, ["exp"], kind="k", attrs={"a": 1})
    with pytest.warns(UserWarning, match="odd"):
        data = pickle.dumps(new)
    again = pickle.loads(data)
    assert [r.attrs for r in dovetail.regions(again)] == [{"a": 1}]
    assert dovetail.text(dovetail.inline(again)) == dovetail.text(gm)


def test_pickle_keeps_sub_graphs_as_they_were():
    class M(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                y = x.sin() + 1
            return y * x

    gm = torch.export.export(M(), (X,)).graph_module
    new = dovetail.outline(gm, ["mul"], kind="k")
    assert dovetail.text(pickle.loads(pickle.dumps(new))) == dovetail.text(new)


def test_keys_tell_weights_inside_apart():
    def key(model):
        return dovetail.regions(dovetail.outline(trace(None, model), ["_0"], kind="k"))[0].key

    one, two = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    assert key(one) == key(copy.deepcopy(one)) != key(two)


def test_keys_of_graphs_do_not_depend_on_weights_and_names_or_on_who_holds_them():
    class M(nn.Module):
        def __init__(self, width=3, scale=2.0):
            super().__init__()
            self.linear = nn.Linear(3, width)
            self.register_buffer("offset", torch.randn(width))
            self.scale, self.constant = scale, torch.randn(width)

        def forward(self, x):
            return torch.relu(self.linear(x) + self.offset) * self.scale + self.constant

    def captured(model):
        return dovetail.capture(model, (X,))

    def functional(x, weight, bias, offset, constant):
        return torch.relu(torch.nn.functional.linear(x, weight, bias) + offset) * 2.0 + constant

    one, two = captured(M()), captured(M())
    assert body_key(one) != body_key(two)
    assert graph_key(one) == graph_key(two)
    # As in graphs of torch.compile, all of whose weights are inputs, in another order.
    inputs = (X, torch.randn(3, 3), torch.randn(3), torch.randn(3), torch.randn(3))
    assert graph_key(one) == graph_key(dovetail.capture(functional, inputs))
    reordered = dovetail.capture(
        lambda c, o, b, w, x, unused: functional(x, w, b, o, c), (*reversed(inputs), torch.ones(1))
    )
    assert graph_key(one) == graph_key(reordered)
    for other in (M(scale=3.0), M(width=4), M().double(), nn.Sequential(nn.Linear(3, 3))):
        example = X.to(next(other.parameters()).dtype)
        assert graph_key(one) != graph_key(dovetail.capture(other, (example,)))
    regions = [dovetail.outline(gm, ["relu", "mul", "add_1"], kind="k") for gm in (one, two)]
    assert graph_key(regions[0]) == graph_key(regions[1]) != graph_key(one)


@pytest.mark.parametrize("device", ["meta", "sparse"])
def test_a_key_of_constants_without_bytes(device):
    value = torch.ones(3, device="meta") if device == "meta" else torch.eye(3).to_sparse()

    def draw(g):
        x = g.placeholder("x")
        return g.call_function(aten.add.Tensor, (x, g.get_attr("_tensor_constant0")), name="a")

    new = dovetail.outline(drawn(draw, _tensor_constant0=value), ["_tensor_constant0", "a"], kind="k")
    assert len(dovetail.regions(new)[0].key) == 64


@pytest.mark.parametrize(
    "kind", ["class", "lambda", "None", "output", "forward", "training", "graph", "meta", "k" * 300]
)
def test_any_name_will_do_as_a_kind(kind):
    outlined(trace(lambda x: x.exp().neg()), ["exp"], X, kind=kind)


def test_a_graph_that_does_not_hold_together_is_reported_as_such():
    gm = trace(lambda x: x.exp().neg().sin())
    node(gm, "exp").prepend(node(gm, "neg"))
    for step in (lambda: dovetail.outline(gm, ["sin"], kind="k"), lambda: dovetail.inline(gm)):
        with pytest.raises(InvalidGraph, match="'neg'"):
            step()
    graph = Graph()
    graph.output(graph.call_module("nowhere", (graph.placeholder("x"),)))
    missing = GraphModule(nn.Module(), Graph())
    missing._graph = graph
    with pytest.raises(InvalidGraph, match="nowhere"):
        dovetail.outline(missing, ["nowhere"], kind="k")


def test_after_an_edit_by_hand():
    new = dovetail.outline(trace(lambda x, y: (x + y).exp()), ["add"], kind="k")
    call = dovetail.regions(new)[0].node
    call.args = (call.args[0], 3.0)
    new.recompile()
    assert torch.equal(dovetail.inline(new)(X, X), (X + 3).exp())
    body = dovetail.regions(new)[0].body
    with body.graph.inserting_before(body.graph.output_node()):
        body.graph.call_function(torch.neg, (next(iter(body.graph.nodes)),))
    for step in (
        lambda: dovetail.regions(new, nested=True),
        lambda: dovetail.inline(new),
        lambda: dovetail.check(new),
    ):
        with pytest.raises(InvalidGraph):
            step()


def test_attrs_that_no_json_holds():
    loop: dict[str, object] = {}
    loop["self"] = loop
    for attrs in (loop, {"a": 10**6000}):
        refused(trace(lambda x: x.exp()), InvalidArgument, ["exp"], kind="k", attrs=attrs)
    odd = {"a": "\ud800 \u2028 \x85"}
    new = outlined(trace(lambda x: x.exp()), ["exp"], X, kind="k", attrs=odd)
    assert dovetail.regions(new)[0].attrs == odd
    assert len(dovetail.text(new).splitlines()) == len(dovetail.text(new).split("\n")) - 1


def test_nesting_ends_before_pythons_stack_does():
    gm = trace(lambda x: x.exp())
    new, inside = gm, "exp"
    for i in range(64):
        new = dovetail.outline(new, [inside], kind=f"k{i}")
        inside = dovetail.regions(new)[0].name
    assert "64 is the most" in refused(new, dovetail.RegionError, [inside], kind="k")
    assert torch.equal(new(X), gm(X))
    assert dovetail.text(pickle.loads(pickle.dumps(new))) == dovetail.text(new)
    assert dovetail.text(dovetail.inline(new)) == dovetail.text(gm)
    assert len(dovetail.regions(new)[0].key) == 64


def test_parts_of_a_tuple_come_along_without_values_too():
    gm = trace(lambda x: (p := torch.split(x, 1))[0] + p[1])
    new = outlined(gm, ["split", "add"], X, kind="k")
    assert [n.name for n in dovetail.regions(new)[0].outputs] == ["add"]


def test_two_regions_may_share_a_sub_graph():
    class M(nn.Module):
        def forward(self, x):
            def true(x):
                return x.sin()

            def false(x):
                return x.cos()

            return torch.cond(x.sum() > 0, true, false, (x,)), torch.cond(x.sum() > 1, true, false, (x,))

    gm = dovetail.capture(M(), (X,))
    conds = [n for n in gm.graph.nodes if "cond" in str(n.target)]
    first = conds[0]
    conds[1].args = (conds[1].args[0], *first.args[1:])
    gm.recompile()
    outlined(gm, [Request([n], "branch", escapes="output") for n in conds], X)


def test_a_constant_of_many_regions_takes_no_square_of_their_number():
    def seconds(n):
        def draw(g):
            x = g.placeholder("x")
            c = g.call_function(aten.full.default, ([3], 2.0), name="c")
            return [g.call_function(aten.add.Tensor, (x, c), name=f"a{i}") for i in range(n)]

        gm = drawn(draw)
        requests = [Request(["c", f"a{i}"], "k") for i in range(n)]
        start = time.thread_time()
        new = dovetail.outline(gm, requests)
        assert "c" not in names(new)
        return time.thread_time() - start

    seconds(100)
    small, large = min(seconds(500) for _ in range(3)), min(seconds(4000) for _ in range(2))
    assert large < 24 * small


def test_nested_graphs_called_twice_are_looked_at_once():
    inner = symbolic_trace(lambda x: x.exp())
    for _ in range(18):

        class Twice(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return self.inner(self.inner(x))

        class Leafy(torch.fx.Tracer):
            def is_leaf_module(self, m, name):
                return isinstance(m, GraphModule)

        model = Twice(inner)
        inner = GraphModule(model, Leafy().trace(model))
    start = time.thread_time()
    dovetail.check(inner)
    assert time.thread_time() - start < 5


def test_inline_wants_names():
    new = dovetail.outline(trace(lambda x: x.exp()), ["exp"], kind="k")
    for wrong in (dovetail.regions(new)[0], dovetail.regions(new)[0].node):
        with pytest.raises(InvalidArgument, match="name"):
            dovetail.inline(new, wrong)
    request = Request((n for n in ["exp"]), "k")
    for _ in range(2):
        dovetail.outline(trace(lambda x: x.exp()), [request])
    for wrong in ({"rule": 3}, {"round": "x"}):
        with pytest.raises(InvalidArgument):
            Request(["exp"], "k", **wrong)
