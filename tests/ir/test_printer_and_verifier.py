"""The text that golden tests compare, differences between graphs, and what `check` finds."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch
from torch import nn

import dovetail
from dovetail import InvalidArgument, InvalidGraph, Request
from dovetail.frontend.capture import capture
from tests.outlining.helpers import drawn, node, trace

GOLDEN = Path(__file__).parent.parent / "golden"


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return torch.softmax(self.two(torch.relu(self.one(x))), -1)


def twice():
    gm = capture(Twice(), (torch.randn(3, 4),), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=9)},))
    requests = [Request(["linear"], "dense", attrs={"n": 1}), Request(["linear_1"], "dense", attrs={"n": 2})]
    return gm, dovetail.outline(gm, requests)


@pytest.mark.parametrize(("which", "file"), [(0, "twice.txt"), (1, "twice_outlined.txt")])
def test_text_is_what_it_was(which, file):
    assert dovetail.text(twice()[which]) == (GOLDEN / file).read_text()


def test_text_does_not_depend_on_what_was_traced_before():
    assert dovetail.text(twice()[1]) == dovetail.text(twice()[1])


def test_diff_shows_what_moved_and_is_empty_for_equals():
    gm, new = twice()
    assert dovetail.diff(gm, gm) == ""
    lines = dovetail.diff(gm, new).splitlines()
    assert any(line.startswith("+ ") and "region dense" in line for line in lines)
    assert any(line.startswith("- ") and "aten.linear" in line for line in lines)


def test_diff_sees_what_is_returned():
    one, other = trace(lambda x: (x.exp(), x.neg())), trace(lambda x: (x.exp(), x.neg()))
    output = other.graph.output_node()
    output.args = (output.args[0][::-1],)
    assert "return (%neg, %exp)" in dovetail.diff(one, other)
    with pytest.raises(InvalidArgument):
        dovetail.diff(one, other, context=-1)


def test_diff_of_long_graphs_takes_no_square_of_their_length():
    def chain(n, factor):
        def draw(g):
            at = g.placeholder("x")
            for i in range(n):
                at = g.call_function(torch.ops.aten.mul.Tensor, (at, factor if i == n // 2 else 2.0))
            return at

        return drawn(draw)

    lines = dovetail.diff(chain(20_000, 2.0), chain(20_000, 3.0)).splitlines()
    assert [line[0] for line in lines if line[0] in "+-"] == ["-", "+"]


def test_diff_lines_up_renamed_values():
    one, two = trace(lambda x: (x.exp() + 1).neg()), trace(lambda zz: (zz.exp() + 2).neg())
    lines = dovetail.diff(one, two).splitlines()
    assert [line for line in lines if line[0] in "+-" and ".exp(" in line] == []
    assert [line.split(" = ")[1] for line in lines if line[0] in "+-"] == [
        "operator.add(%exp, 1)",
        "operator.add(%exp, 2)",
    ]
    same = trace(lambda other: (other.exp() + 1).neg())
    assert dovetail.diff(one, same) == ""


def broken(gm, how):
    how(gm)
    with pytest.raises(InvalidGraph) as caught:
        dovetail.check(gm)
    return caught.value


def test_check_finds_a_use_before_the_value():
    gm = trace(lambda x: x.exp().neg())
    error = broken(gm, lambda g: node(g, "exp").prepend(node(g, "neg")))
    assert error.node == "neg"


def test_check_finds_a_name_used_twice():
    gm = trace(lambda x: x.exp().neg())
    object.__setattr__(node(gm, "neg"), "name", "exp")
    assert [n.name for n in gm.graph.nodes].count("exp") == 2
    with pytest.raises(InvalidGraph, match="twice"):
        dovetail.check(gm)


def test_check_finds_effects_out_of_order():
    def draw(g):
        x = g.placeholder("x")
        g.call_function(torch.ops.aten.add_.Tensor, (x, 1.0), name="first")
        g.call_function(torch.ops.aten.mul_.Tensor, (x, 2.0), name="second")
        return g.call_function(torch.ops.aten.exp.default, (x,), name="e")

    new = dovetail.outline(drawn(draw), ["e"], kind="k")
    dovetail.check(new)
    error = broken(new, lambda g: node(g, "second").append(node(g, "first")))
    assert error.node == "first"
    assert "second" in str(error)


def test_check_finds_a_result_of_another_type_and_an_edited_body():
    _, new = twice()

    def retype(g):
        result = dovetail.regions(g)[0].outputs[0]
        result.meta["val"] = result.meta["val"].to(torch.float64)

    assert "the body returns" in str(broken(new, retype))
    _, new = twice()

    def insert(g):
        graph = dovetail.regions(g)[0].body.graph
        with graph.inserting_before(graph.output_node()):
            graph.call_function(torch.neg, (next(iter(graph.nodes)),)).meta["val"] = None

    assert "operations" in str(broken(new, insert))


def test_a_buffer_that_is_none_is_no_mistake():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("maybe", None)

        def forward(self, x):
            return torch.nn.functional.linear(x, x, self.maybe)

    gm = trace(None, M())
    graph = gm.graph
    if not any(n.op == "get_attr" for n in graph.nodes):
        call = next(n for n in graph.nodes if n.op == "call_function")
        with graph.inserting_before(call):
            empty = graph.create_node("get_attr", "maybe")
        call.args = (*call.args[:2], empty)
        gm.register_buffer("maybe", None)
        gm.recompile()
    dovetail.check(gm)
    assert torch.equal(gm(torch.eye(2)), torch.eye(2))


def test_check_finds_missing_attributes_and_values():
    _, new = twice()
    error = broken(new, lambda g: g._modules.pop("dense"))
    assert "dense" in str(error)
    _, new = twice()
    error = broken(new, lambda g: node(g, "relu").meta.pop("val"))
    assert error.node == "relu"


def test_check_finds_a_body_that_does_not_fit():
    _, new = twice()

    def drop_operand(g):
        call = dovetail.regions(g)[0].node
        call.args = call.args[:-1]

    assert "operands" in str(broken(new, drop_operand))
    _, new = twice()

    def swap(g):
        call = dovetail.regions(g)[0].node
        call.args = (call.args[0], call.args[2], call.args[1])

    assert "takes" in str(broken(new, swap))
    _, new = twice()

    def wrong_part(g):
        user = dovetail.regions(g)[0].outputs[0]
        user.args = (user.args[0], 5)

    assert "result 5" in str(broken(new, wrong_part))


def test_check_finds_effects_that_would_be_dropped():
    def draw(g):
        x = g.placeholder("x")
        g.call_function(torch.ops.aten.add_.Tensor, (x, 1.0), name="bump")
        return x

    new = dovetail.outline(drawn(draw), ["bump"], kind="k")
    dovetail.check(new)
    error = broken(new, lambda g: dovetail.regions(g)[0].body.mark_impure(False))
    assert "dead-code" in str(error)


def test_check_wants_the_output_last():
    gm = trace(lambda x: x.exp())
    gm.graph.create_node("call_function", operator.neg, (node(gm, "exp"),))
    with pytest.raises(InvalidGraph, match="no output at its end"):
        dovetail.check(gm)


@pytest.mark.parametrize("function", [dovetail.text, dovetail.check, dovetail.regions])
def test_not_a_graph(function):
    with pytest.raises(InvalidArgument, match="GraphModule"):
        function(nn.Linear(2, 2))
