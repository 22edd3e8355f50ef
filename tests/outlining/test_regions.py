"""Identity, operands, sharing, names, and what survives copying."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dovetail
from dovetail import InvalidArgument, Request, UnknownRegion
from dovetail.frontend.capture import capture
from tests.outlining.helpers import drawn, equal, names, outlined, refused, run, trace

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


class Blocks(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x)) + x
        return x


def blocks(count: int = 3):
    gm = capture(Blocks(count), (torch.randn(2, 4),))
    linears = [n for n in gm.graph.nodes if n.target is aten.linear.default]
    requests = [
        Request([n, *n.users, *next(iter(n.users)).users], "block", attrs={"layer": i})
        for i, n in enumerate(linears)
    ]
    return gm, requests


def test_equal_bodies_are_one_object_with_other_weights():
    gm, requests = blocks(16)
    new = dovetail.outline(gm, requests)
    outlined = dovetail.regions(new)
    assert [r.name for r in outlined] == [f"block_{i}" for i in range(16)]
    assert len({id(r.body) for r in outlined}) == len({r.key for r in outlined}) == 1
    assert [r.attrs["layer"] for r in outlined] == list(range(16))
    assert len({r.node.target for r in outlined}) == 1
    assert "×16" in dovetail.text(new)
    assert dovetail.text(new).count("body @") == 1


def test_weights_are_operands_even_when_requested():
    gm, requests = blocks(1)
    weights = [n for n in gm.graph.nodes if n.op == "get_attr"]
    new = outlined(gm, [*requests[0].nodes, *weights], torch.randn(2, 4), kind="block")
    (region,) = dovetail.regions(new)
    assert {n.op for n in region.inputs} == {"placeholder", "get_attr"}
    assert not any(n.op == "get_attr" for n in region.body.graph.nodes)
    assert list(new.state_dict()) == list(gm.state_dict())
    assert dict(new.named_parameters()).keys() == dict(gm.named_parameters()).keys()
    assert all(a is b for a, b in zip(new.parameters(), gm.parameters(), strict=True))
    assert new._non_persistent_buffers_set == gm._non_persistent_buffers_set


def test_a_second_outlining_joins_the_bodies_of_the_first():
    gm, requests = blocks(2)
    one = dovetail.outline(gm, [requests[0]])
    names_of = {n.name: n for n in one.graph.nodes}
    second = Request([names_of[n.name] for n in requests[1].nodes], "block")
    two = dovetail.outline(one, [second])
    first, other = dovetail.regions(two)
    assert first.body is other.body
    assert (first.name, other.name) == ("block_0", "block_1")


def test_names_skip_what_is_taken_and_are_never_used_again():
    def draw(g):
        x = g.placeholder("k_0")
        return g.call_function(
            aten.neg.default, (g.call_function(aten.exp.default, (x,), name="k_1"),), name="n"
        )

    gm = drawn(draw)
    new = outlined(gm, ["k_1"], X, kind="k")
    assert dovetail.regions(new)[0].name == "k_2"
    again = dovetail.outline(dovetail.inline(new), ["n"], kind="k")
    assert dovetail.regions(again)[0].name == "k_3"


@pytest.mark.parametrize("kind", ["", "two words", "1st", "a..b", ".a", "a-b", None, 3, "späß"])
def test_a_bad_kind(kind):
    gm = trace(lambda x: x.exp())
    with pytest.raises(InvalidArgument):
        dovetail.outline(gm, [Request(["exp"], kind)])


@pytest.mark.parametrize(
    ("attrs", "word"),
    [
        ({"a": {1, 2}}, "set"),
        ({"a": float("nan")}, "JSON"),
        ({1: "a"}, "key"),
        ({"a": torch.ones(1)}, "Tensor"),
        ([1], "mapping"),
        ({"a": {"b": [object()]}}, "['b'][0]"),
    ],
)
def test_bad_attrs(attrs, word):
    assert word in refused(trace(lambda x: x.exp()), InvalidArgument, ["exp"], kind="k", attrs=attrs)


def test_attrs_are_canonical_json_and_version_an_int():
    new = outlined(
        trace(lambda x: x.exp()), ["exp"], X, kind="npu.exp", attrs={"b": (1, 2), "a": None}, version=3
    )
    (region,) = dovetail.regions(new)
    assert region.attrs == {"a": None, "b": [1, 2]}
    assert (region.kind, region.version, region.name) == ("npu.exp", 3, "npu_exp_0")
    assert 'region npu.exp v3 {"a": null, "b": [1, 2]}' in dovetail.text(new)
    for bad in (1.0, "1", True):
        refused(trace(lambda x: x.exp()), InvalidArgument, ["exp"], kind="k", version=bad)


@pytest.mark.parametrize("through", [copy.deepcopy, copy.copy, lambda g: pickle.loads(pickle.dumps(g))])
def test_regions_survive_copies(through):
    gm, requests = blocks(3)
    new = dovetail.outline(gm, requests)
    other = through(new)
    assert dovetail.text(other) == dovetail.text(new)
    assert [(r.kind, r.version, r.attrs, r.nodes) for r in dovetail.regions(other)] == [
        (r.kind, r.version, r.attrs, r.nodes) for r in dovetail.regions(new)
    ]
    assert len({id(r.body) for r in dovetail.regions(other)}) == 1
    assert dovetail.regions(other)[0].key == dovetail.regions(new)[0].key
    x = torch.randn(2, 4)
    assert torch.equal(other(x), new(x))
    assert dovetail.text(dovetail.inline(other)) == dovetail.text(gm)
    assert list(other.state_dict()) == list(new.state_dict())


def test_a_key_is_the_same_in_another_process(tmp_path):
    gm, requests = blocks(1)
    new = dovetail.outline(gm, requests)
    path = tmp_path / "graph.pickle"
    path.write_bytes(pickle.dumps(new))
    script = (
        "import pickle, sys, dovetail; print(dovetail.regions(pickle.load(open(sys.argv[1], 'rb')))[0].key)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == dovetail.regions(new)[0].key


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.exp() * 3,
        lambda x: x.exp() * 2.0,
        lambda x: x.exp() * True,
        lambda x: (x.exp() * 2).neg(),
        lambda x: 2 * x.exp(),
        lambda x: x.sin() * 2,
    ],
)
def test_bodies_that_differ_are_two(other):
    def key(function):
        gm = trace(function)
        inside = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
        return dovetail.regions(dovetail.outline(gm, inside, kind="k"))[0].key

    assert key(lambda x: x.exp() * 2) == key(lambda other_name: other_name.exp() * 2)
    assert key(other) != key(lambda x: x.exp() * 2)


def test_multi_output_operations_move_with_their_parts():
    def draw(g):
        x = g.placeholder("x")
        s = g.call_function(aten.split.Tensor, (x, 1), name="s")
        a = g.call_function(
            torch._C._VariableFunctions.neg, (g.call_function(_getitem(), (s, 0), name="p"),), name="a"
        )
        return a, g.call_function(_getitem(), (s, 1), name="q")

    gm = drawn(draw)
    new = outlined(gm, ["s", "a"], X, kind="k")
    (region,) = dovetail.regions(new)
    assert region.nodes == ("s", "p", "a", "q")
    assert [n.name for n in region.outputs] == ["a", "q"]
    # A part of a tuple that is listed without what makes the tuple stays outside.
    alone = outlined(gm, ["p", "a"], X, kind="k")
    assert dovetail.regions(alone)[0].nodes == ("a",)


def _getitem():
    import operator

    return operator.getitem


def test_list_dict_and_keyword_arguments():
    def draw(g):
        x, y = g.placeholder("x"), g.placeholder("y")
        c = g.call_function(aten.cat.default, ([x, y, x],), {"dim": 0}, name="c")
        return {"a": g.call_function(aten.clamp.default, (c,), {"min": 1.0}, name="m"), "b": [c]}

    new = outlined(drawn(draw), ["c", "m"], X, X.clone(), kind="k")
    assert [n.name for n in dovetail.regions(new)[0].inputs] == ["x", "y"]


def test_leaf_modules_are_borrowed_and_state_stays_where_it_was():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))

        def forward(self, x):
            return self.inner(x).relu()

    gm = trace(None, M())
    new = outlined(gm, ["inner_0", "inner_1", "inner_2", "relu"], X, kind="k")
    assert list(new.state_dict()) == list(gm.state_dict())
    assert len(list(new.parameters())) == len(list(gm.parameters()))
    (region,) = dovetail.regions(new)
    assert set(region.effects) == {"writes", "random"}
    other = copy.deepcopy(new)
    other.load_state_dict(gm.state_dict())
    assert equal(run(other, X), run(gm, X))
    assert dovetail.regions(other)[0].body.inner_0 is other.get_submodule("inner.0")


def test_constants_move_in_when_requested():
    def draw(g):
        x = g.placeholder("x")
        return g.call_function(aten.add.Tensor, (x, g.get_attr("_tensor_constant0")), name="a")

    # torch makes a buffer of every tensor attribute; a tracer's own names tell constants from buffers.
    gm = drawn(draw, _tensor_constant0=torch.arange(3.0))
    inside = dovetail.regions(outlined(gm, ["_tensor_constant0", "a"], X, kind="k"))[0]
    assert [n.name for n in inside.inputs] == ["x"]
    outside = dovetail.regions(outlined(gm, ["a"], X, kind="k"))[0]
    assert [n.name for n in outside.inputs] == ["x", "_tensor_constant0"]


def test_a_constant_that_moved_in_follows_the_graph_to_another_dtype():
    def draw(g):
        x = g.placeholder("x")
        return g.call_function(aten.add.Tensor, (x, g.get_attr("_tensor_constant0")), name="a")

    gm = drawn(draw, _tensor_constant0=torch.full((3,), 0.1))
    new = dovetail.outline(dovetail.outline(gm, ["_tensor_constant0", "a"], kind="k"), ["k_0"], kind="outer")
    half = copy.deepcopy(new).to(torch.float64)
    assert torch.equal(half(X.double()), copy.deepcopy(gm).to(torch.float64)(X.double()))
    assert torch.equal(new(X), gm(X))


def test_sub_graphs_of_higher_order_operators_move_in():
    class M(nn.Module):
        def forward(self, x):
            y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
            return y * 2

    gm = capture(M(), (X,))
    inside = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    for request in (inside, [n for n in inside if "cond" in n]):
        new = outlined(gm, request, X, kind="k")
        assert not any(n.op == "get_attr" for n in dovetail.regions(new)[0].inputs)
        assert torch.equal(new(-X), gm(-X))


def test_symbolic_sizes_are_operands():
    class M(nn.Module):
        def forward(self, x):
            return x.reshape(x.shape[0], 2, 3).relu() * x.shape[0]

    gm = capture(M(), (torch.randn(4, 6),), dynamic_shapes=({0: torch.export.Dim("b", min=2, max=64)},))
    inside = [n.name for n in gm.graph.nodes if n.op == "call_function" and "sym_size" not in n.name]
    new = dovetail.outline(gm, inside, kind="k")
    assert any(isinstance(n.meta["val"], torch.SymInt) for n in dovetail.regions(new)[0].inputs)
    for size in (2, 5):
        x = torch.randn(size, 6)
        assert torch.equal(new(x), gm(x))
    again = pickle.loads(pickle.dumps(new))
    assert dovetail.text(again) == dovetail.text(new)
    assert dovetail.regions(again)[0].key == dovetail.regions(new)[0].key
    assert dovetail.text(dovetail.inline(new)) == dovetail.text(gm)


def test_inline_by_name_kind_and_depth():
    gm = trace(lambda x: x.exp().neg().sin().cos())
    new = dovetail.outline(gm, [Request(["exp", "neg"], "a"), Request(["sin", "cos"], "b")])
    assert [r.name for r in dovetail.regions(dovetail.inline(new, "a_0"))] == ["b_0"]
    assert [r.name for r in dovetail.regions(dovetail.inline(new, kind="b"))] == ["a_0"]
    nested = dovetail.outline(new, ["a_0", "b_0"], kind="outer")
    opened = dovetail.inline(nested, kind="a")
    assert [r.name for r in dovetail.regions(opened, nested=True)] == ["outer_0", "outer_0/b_0"]
    opened = dovetail.inline(nested, "outer_0/b_0")
    assert [r.name for r in dovetail.regions(opened, nested=True)] == ["outer_0", "outer_0/a_0"]
    assert equal(run(opened, X), run(gm, X))
    assert dovetail.text(dovetail.inline(opened)) == dovetail.text(gm)
    with pytest.raises(UnknownRegion, match="kind is given as kind"):
        dovetail.inline(new, "a")
    with pytest.raises(UnknownRegion, match="'a', 'b'"):
        dovetail.inline(new, kind="zz")
    with pytest.raises(InvalidArgument):
        dovetail.inline(new, depth=0)
    with pytest.raises(InvalidArgument):
        dovetail.inline("gm")


def test_inline_without_regions_is_a_copy():
    gm = trace(lambda x: x.exp())
    assert dovetail.text(dovetail.inline(gm)) == dovetail.text(gm)
    assert dovetail.regions(gm) == []


def test_meta_of_new_nodes():
    gm, requests = blocks(1)
    new = dovetail.outline(gm, requests)
    (region,) = dovetail.regions(new)
    assert [v.shape for v in region.node.meta["val"]] == [torch.Size([2, 4])]
    assert "in forward" in region.node.meta["stack_trace"]
    assert "nn_module_stack" in region.node.meta
    assert all(n.meta["val"].shape == (2, 4) for n in region.outputs)
    assert region.nodes == ("linear", "relu", "add")


def test_it_works_after_another_tool_has_edited_the_graph():
    gm = trace(lambda a, b, c: (a + b) + (c * 2).exp())
    new = dovetail.outline(gm, ["add", "add_1"], kind="k")
    with new.graph.inserting_before(new.graph.output_node()):
        extra = new.graph.call_function(torch.neg, (new.graph.output_node().args[0],))
    new.graph.output_node().args = (extra,)
    new.recompile()
    more = dovetail.outline(new, ["k_0", "neg"], kind="m")
    back = dovetail.inline(more)
    dovetail.check(back)
    assert torch.equal(back(X, X, X), -gm(X, X, X))
    assert names(dovetail.inline(more, depth=1)) == names(new)


def test_outline_takes_requests_or_nodes_but_not_a_muddle():
    gm = trace(lambda x: x.exp().neg())
    for args, options in [
        ((["exp"],), {}),
        (([Request(["exp"], "k")],), {"kind": "k"}),
        (([Request(["exp"], "k")],), {"version": 2}),
        ((3,), {}),
        ((3,), {"kind": "k"}),
        (([3],), {"kind": "k"}),
    ]:
        with pytest.raises(InvalidArgument):
            dovetail.outline(gm, *args, **options)
    with pytest.raises(InvalidArgument):
        dovetail.outline(nn.Linear(2, 2), ["a"], kind="k")
    assert len(dovetail.regions(dovetail.outline(gm, Request(["exp"], "k")))) == 1


def test_arguments_and_results_of_a_request_may_be_names():
    gm = dovetail.capture(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (torch.ones(2, 3),))
    named = {"x": "input_1", "weight": "_0_weight"}
    by_name = dovetail.Request(["linear", "relu"], "pair", arguments=named, results=["relu"])
    nodes = {node.name: node for node in gm.graph.nodes}
    by_node = dovetail.Request(
        ["linear", "relu"],
        "pair",
        arguments={k: nodes[v] for k, v in named.items()},
        results=(nodes["relu"],),
    )
    (region,), (same,) = (dovetail.regions(dovetail.outline(gm, [r])) for r in (by_name, by_node))
    assert region.arguments == same.arguments
    assert dict(region.arguments).keys() == {"x", "weight"}
    for wrong in ({"arguments": {"x": "inputs"}}, {"results": ["relus"]}):
        with pytest.raises(dovetail.UnknownNode, match="Did you mean"):
            dovetail.outline(gm, [dovetail.Request(["linear", "relu"], "pair", **wrong)])
    for wrong in ({"arguments": ["x"]}, {"results": "relu"}):
        with pytest.raises(dovetail.InvalidArgument, match="give a"):
            dovetail.outline(gm, [dovetail.Request(["linear", "relu"], "pair", **wrong)])
