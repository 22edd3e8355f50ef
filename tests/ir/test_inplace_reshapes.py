"""Regions in graphs that change sizes or strides in place: operands have the values that arrive when the region runs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import dovetail
from dovetail import Request
from dovetail.ir.dependencies import Index
from tests.fuzz.small_graphs import call, inputs, same_program

aten = torch.ops.aten


def graph_of(write: Callable[[Graph, Node, Node], Any]) -> GraphModule:
    """A graph of two inputs of shape [2, 3], with a fake value on every node."""
    graph = Graph()
    write(graph, graph.placeholder("x"), graph.placeholder("y"))
    gm = GraphModule(nn.Module(), graph)
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs())
    for node in gm.graph.nodes:
        node.meta.setdefault("val", None)
    return gm


class OperandShapes(Interpreter):
    """Compares the operands of regions, at any depth, with the values of their bodies' placeholders."""

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        body = self.fetch_attr(target)
        for operand, parameter in zip(args, body.graph.find_nodes(op="placeholder"), strict=True):
            expected = parameter.meta["val"]
            if expected is not None:
                assert list(operand.shape) == list(expected.shape), parameter
        return OperandShapes(body).run(*args)


def check_regions(gm: GraphModule, *stages: list[Request]) -> GraphModule:
    new = gm
    for requests in stages:
        new = dovetail.outline(new, requests)
        OperandShapes(new).run(*inputs())
        same_program(gm, new)
    return new


def returned_by_a_region(graph: Graph, x: Node, y: Node) -> None:
    a = call(graph, "a", aten.mul.Tensor, x, 2.0)
    b = call(graph, "b", aten.add_.Tensor, a, 1.0)
    c = call(graph, "c", aten.unsqueeze_.default, a, 0)
    graph.output((c, call(graph, "d", aten.relu.default, b)))


def read_after_the_change_in_the_region(graph: Graph, x: Node, y: Node) -> None:
    a = call(graph, "a", operator.isub, x, x)
    b = call(graph, "b", aten.t_.default, a)
    c = call(graph, "c", torch.le, b, 0.25)
    graph.output(call(graph, "d", aten.where.self, c, b, x))


def changed_where_it_is_computed(graph: Graph, x: Node, y: Node) -> None:
    a = call(graph, "a", operator.mul, x, y)
    b = call(graph, "b", aten.t_.default, a)
    c = call(graph, "c", aten.tanh.default, a)
    graph.output((b, call(graph, "d", aten.exp.default, c)))


def both_operands_are_the_object(graph: Graph, x: Node, y: Node) -> None:
    a = call(graph, "a", aten.tanh.default, x)
    b = call(graph, "b", aten.t_.default, a)
    c = call(graph, "c", aten.unsqueeze_.default, b, 0)
    graph.output(call(graph, "d", aten.addcmul_.default, a, c, c))


def an_operator_returns_its_operand(graph: Graph, x: Node, y: Node) -> None:
    a = call(graph, "a", aten.to.dtype, x, torch.float32)
    b = call(graph, "b", aten.t_.default, a)
    c = call(graph, "c", aten.clamp.default, x, -2.0, 2.0)
    graph.output((b, call(graph, "d", aten.neg.default, c)))


def views_keep_their_shape(graph: Graph, x: Node, y: Node) -> None:
    a = call(graph, "a", aten.view.default, x, [3, 2])
    b = call(graph, "b", aten.t_.default, x)
    c = call(graph, "c", aten.relu.default, a)
    graph.output((b, call(graph, "d", aten.exp.default, c)))


PROGRAMS = [
    returned_by_a_region,
    read_after_the_change_in_the_region,
    changed_where_it_is_computed,
    both_operands_are_the_object,
    an_operator_returns_its_operand,
    views_keep_their_shape,
]
SPLITS = [
    [[Request(["a"], "p"), Request(["b"], "q"), Request(["c"], "r"), Request(["d"], "s")]],
    [[Request(["a", "b"], "p"), Request(["c", "d"], "q")]],
    [[Request(["a", "b"], "p")], [Request(["c", "d"], "q")]],
    [[Request(["b", "c", "d"], "p")], [Request(["a", "p_0"], "q")]],
    [[Request(["a", "b", "c"], "p")], [Request(["d"], "q")], [Request(["p_0", "q_0"], "r")]],
    [[Request(["b", "c"], "p"), Request(["d"], "q")], [Request(["p_0", "q_0"], "r")]],
    [[Request(["d"], "p")], [Request(["c", "p_0"], "q")], [Request(["b", "q_0"], "r")]],
]


@pytest.mark.parametrize("write", PROGRAMS)
@pytest.mark.parametrize("stages", SPLITS)
def test_operands_are_as_the_bodies_expect(write: Any, stages: list[list[Request]]) -> None:
    new = check_regions(graph_of(write), *stages)
    lowered = dovetail.lower(new, ["eager"], cache=False, smallest=1, on_error="raise")
    torch.testing.assert_close(lowered(*inputs()), graph_of(write)(*inputs()), rtol=0, atol=0)


def value_of(gm: GraphModule, name: str, reader: str) -> Any:
    index = Index(gm)
    names = {node.name: node for node in index.nodes}
    value = index.dependencies.value_read(names[name], index.position[names[reader]])
    return None if value is None else list(value.shape)


def test_values_of_one_object_follow_its_changes() -> None:
    gm = graph_of(returned_by_a_region)
    assert value_of(gm, "a", "b") == [2, 3]
    assert value_of(gm, "a", "d") == value_of(gm, "b", "d") == [1, 2, 3]
    nested = dovetail.outline(gm, ["a", "b", "c"], kind="fused")
    assert value_of(nested, "b", "d") == [1, 2, 3]


def test_what_may_be_the_object_has_no_known_value() -> None:
    gm = graph_of(an_operator_returns_its_operand)
    assert value_of(gm, "x", "b") == [2, 3]
    assert value_of(gm, "x", "c") is None
    assert value_of(graph_of(views_keep_their_shape), "a", "c") == [3, 2]


def test_operands_of_a_body_may_be_one_object() -> None:
    """A region that is nested in a body sees another operand of it change, if the caller passes one tensor twice."""

    def write(graph: Graph, x: Node, y: Node) -> None:
        a = call(graph, "a", operator.imul, x, x)
        b = call(graph, "b", aten.unsqueeze_.default, x, 0)
        graph.output((b, graph.create_node("call_method", "float", (a,), name="c")))

    check_regions(graph_of(write), [Request(["c"], "p")], [Request(["b", "p_0"], "q")])


def test_a_region_that_reshapes_an_operand_is_not_compiled() -> None:
    gm = dovetail.outline(graph_of(both_operands_are_the_object), ["c", "d"], kind="fused")
    lowered = dovetail.lower(gm, ["eager"], cache=False, smallest=1)
    reason = "it changes the sizes or strides of its operand 'b' in place"
    assert reason in dovetail.explain(lowered).to_json()


def test_a_region_that_reads_the_data_of_a_parameter_is_run_without_gradients() -> None:
    """`x.data` is detached, so that writing it is not refused while the region is compiled."""
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(2, 3))
    graph = Graph()
    x = graph.placeholder("x")
    data = call(graph, "data", getattr, graph.get_attr("weight"), "data")
    written = call(graph, "written", aten.exp.out, data, out=data)
    graph.output(call(graph, "total", aten.add.Tensor, x, written))
    gm = GraphModule(root, graph)
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(inputs()[0])
    new = dovetail.outline(gm, ["written", "total"], kind="fused")
    lowered = dovetail.lower(new, ["eager"], cache=False, smallest=1, on_error="raise")
    torch.testing.assert_close(lowered(inputs()[0]), inputs()[0] + torch.e)
