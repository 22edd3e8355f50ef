"""What generated programs have found in outlining and inlining, one small case for each cause.

Names of nodes are those FX gives: the operation's, numbered from the second on.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import dovetail
from dovetail import Request

from .small_graphs import call, inputs, same_program, traced, with_values


def test_a_clone_may_need_what_stands_after_the_last_member() -> None:
    def f(x, y):
        first = y + y
        second = torch.tanh(x)
        return first, torch.relu(second)

    gm = traced(f)
    out = dovetail.outline(gm, ["relu", "add"], kind="fused", escapes={"relu": "duplicate", "add": "output"})
    assert [n.name for n in out.graph.nodes][:3] == ["x", "y", "tanh"]
    same_program(gm, out)


def test_results_of_a_call_do_not_upset_the_order() -> None:
    def f(x, y):
        first = torch.sin(x)
        written = y.uniform_(0.0, 1.0)
        later = torch.reshape(written, (-1,))
        return first, later, torch.rand_like(x)

    gm = traced(f)
    out = dovetail.outline(gm, ["sin", "rand_like"], kind="fused")
    out = dovetail.outline(out, ["uniform_"], kind="fused")
    same_program(gm, out)


@pytest.mark.parametrize("escapes", ["leave", {"split": "leave"}, {"split": "leave", "getitem": "output"}])
def test_a_tuple_that_is_left_out_takes_its_parts_along(escapes: Any) -> None:
    def f(x, y):
        parts = torch.ops.aten.split.Tensor(x, 1)
        return torch.relu(y) + 1, parts[0], parts

    gm = traced(f)
    parts = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.split.Tensor)
    parts.name = "split"
    out = dovetail.outline(gm, ["split", "relu", "add"], kind="fused", escapes=escapes)
    kept = {n.name for n in out.graph.nodes}
    assert {"split", "getitem"} <= kept
    (region,) = dovetail.regions(out)
    assert not {"split", "getitem"} & set(region.nodes)


def test_what_is_returned_together_does_not_share_memory() -> None:
    def f(x, y):
        first = torch.sin(x)
        other = torch.neg(x)
        first.mul_(2)
        return first, other, x

    gm = with_values(f)
    out = dovetail.outline(gm, ["sin", "mul_"], kind="fused")
    names = [n.name for n in out.graph.nodes]
    assert names.index("fused_0") < names.index("neg")
    same_program(gm, out)


def test_a_clone_given_back_is_the_original_again() -> None:
    def f(x, y):
        shared = torch.sin(x)
        return torch.neg(shared), torch.sigmoid(shared), torch.tanh(y)

    gm = traced(f)
    out = dovetail.outline(gm, ["sin", "sigmoid"], kind="pair", escapes="duplicate")
    out = dovetail.outline(out, ["tanh", "sin"], kind="fused")  # the original moves into another region
    same_program(gm, out)
    for name in ("pair_0", "fused_0"):
        same_program(gm, dovetail.inline(dovetail.inline(out, name)))


def test_a_region_that_returns_a_view_shares_memory_with_its_operand() -> None:
    def f(x, y):
        before = -y
        view = y.t()
        torch.ops.aten.add.out(x.t(), 0.5, out=view)
        return y + before

    # The values of such a graph do not tell: none of them shares memory with another.
    gm = make_fx(f)(*inputs())
    out = dovetail.outline(gm, ["t"], kind="view")
    with pytest.raises(dovetail.EffectOrder):
        dovetail.outline(out, ["neg", "add_1"], kind="fused")
    after = dovetail.outline(out, ["add_1"], kind="fused")
    names = [n.name for n in after.graph.nodes]
    assert names.index("add") < names.index("fused_0")
    same_program(gm, after)


def test_a_constant_whose_view_is_returned_is_not_cloned() -> None:
    def f(x, y):
        constant = torch.ones(2, 2)
        return constant[:1], constant

    gm = make_fx(f)(*inputs())
    out = dovetail.outline(gm, ["ones", "slice_1"], kind="fused")
    same_program(gm, out)
    view, constant = out(*inputs())
    assert view.untyped_storage().data_ptr() == constant.untyped_storage().data_ptr()


def test_a_nested_clone_whose_original_is_further_out() -> None:
    def f(x, y):
        shared = torch.sub(torch.abs(x), 2)
        return torch.sigmoid(shared), torch.neg(shared), torch.tanh(y)

    gm = traced(f)
    out = dovetail.outline(gm, ["sub", "sigmoid"], kind="pair", escapes={"sub": "duplicate"})
    out = dovetail.outline(out, [Request(["abs_1"], kind="pair"), Request(["tanh", "pair_0"], kind="fused")])
    same_program(gm, out)
    for part in (dovetail.inline(out, kind="pair"), dovetail.inline(out, "fused_0/pair_0")):
        same_program(gm, part)


@pytest.mark.parametrize("split", [torch.ops.aten.split.Tensor, torch.split, torch.unsafe_split])
def test_a_write_to_a_part_is_a_write_to_the_whole(split: Any) -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    parts = call(graph, "parts", split, x, 1)
    part = call(graph, "part", operator.getitem, parts, 1)
    look = call(graph, "look", torch.ops.aten.add.Tensor, x, y)
    call(graph, "write", torch.ops.aten.fill_.Scalar, part, -1.0)
    graph.output((look, x))
    gm = GraphModule(nn.Module(), graph)

    out = dovetail.outline(gm, ["parts", "part", "write"], kind="fused")
    assert [n.name for n in out.graph.nodes] == ["x", "y", "look", "fused_0", "output"]
    same_program(gm, out)


def test_parts_of_a_traced_split_share_its_memory() -> None:
    def f(x, y):
        parts = torch.ops.aten.split.Tensor(x, 1)
        look = x + y
        parts[1].fill_(-1.0)
        return look, x

    gm = make_fx(f)(*inputs())  # whose values share no memory with one another
    whole = dovetail.outline(gm, ["split", "add", "fill_"], kind="fused")
    same_program(gm, whole)
    whole.graph.eliminate_dead_code()
    whole.recompile()
    assert "writes" in dovetail.regions(whole)[0].effects


def test_the_order_comes_back_though_regions_hide_what_they_read() -> None:
    def f(x, y):
        first = torch.sin(x)
        second = torch.clone(first)
        written = y.relu_()
        third = torch.neg(second)
        return third, torch.maximum(second, written)

    gm = dovetail.declare(traced(f), {"torch.maximum": "ordered"})  # it may share memory with all it reads
    out = dovetail.outline(gm, ["clone", "neg"], kind="fused")
    same_program(gm, out)


def test_a_value_that_is_indexed_inside_is_not_cloned() -> None:
    gm = with_values(lambda x, y: ((total := torch.abs(x) + torch.abs(x))[0], total))
    out = dovetail.outline(gm, ["add", "getitem"], kind="fused")
    same_program(gm, out)
    part, whole = out(*inputs())
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_what_is_written_by_out_is_the_result() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = call(graph, "total", torch.add, y, y, out=x)
    look = call(graph, "look", torch.sin, x)
    call(graph, "wipe", torch.ops.aten.zero_.default, total)
    graph.output((look, x))
    gm = GraphModule(nn.Module(), graph)

    with pytest.raises(dovetail.EffectOrder, match="look"):
        dovetail.outline(gm, ["total", "wipe"], kind="fused")
    same_program(gm, dovetail.outline(gm, ["look", "wipe"], kind="fused"))


@pytest.mark.parametrize("escapes", ["leave", {"part_0": "refuse", "part_1": "leave"}])
def test_what_becomes_of_a_tuple_does_not_depend_on_the_listing(escapes: Any) -> None:
    def decision(order: tuple[int, int]) -> Any:
        graph = Graph()
        parts = call(graph, "parts", torch.ops.aten.split.Tensor, graph.placeholder("x"), 1)
        part = {i: call(graph, f"part_{i}", operator.getitem, parts, i) for i in order}
        product = call(graph, "product", torch.ops.aten.mul.Tensor, part[0], part[1])
        graph.output((part[0], product, call(graph, "other", torch.ops.aten.neg.default, part[1])))
        gm = GraphModule(nn.Module(), graph)
        try:
            out = dovetail.outline(gm, ["parts", "product"], kind="fused", escapes=escapes)
        except dovetail.DovetailError as error:
            return type(error)
        return dovetail.regions(out)[0].escapes

    assert decision((0, 1)) == decision((1, 0))


def test_a_decision_does_not_depend_on_where_something_left_out_is_placed() -> None:
    def decision(*order: str) -> Any:
        graph = Graph()
        shared = call(graph, "shared", torch.tanh, graph.placeholder("x"))
        nodes: dict[str, Node] = {}
        for name in order:
            nodes[name] = call(graph, name, torch.add, shared, nodes["total"] if name == "inner" else shared)
        graph.output((nodes["left"], nodes["total"]))
        gm = GraphModule(nn.Module(), graph)
        out = dovetail.outline(gm, ["shared", *order], kind="fused", escapes={"left": "leave"})
        return dovetail.regions(out)[0].escapes

    assert decision("left", "total", "inner") == decision("total", "inner", "left")


def test_results_of_one_region_are_not_one_memory() -> None:
    def f(x, y):
        first = torch.abs(y)
        second = torch.sum(first)
        flag = torch.ge(second, 0.0)
        later = torch.sigmoid(second)
        return flag, later, first.zero_()

    gm = traced(f)
    out = dovetail.outline(gm, ["zero_", "ge"], kind="fused")
    out = dovetail.outline(out, ["sum_1", "abs_1"], kind="pool")
    same_program(gm, out)
    for kind in ("fused", "pool"):
        same_program(gm, dovetail.inline(out, kind=kind))


def test_the_order_comes_back_from_regions_opened_one_by_one() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    call(graph, "read", torch.nn.functional.silu, x)
    written = call(graph, "written", torch.relu_, y)
    call(graph, "copied", torch.ops.aten.exp.out, written, out=x)
    call(
        graph, "joined", torch.nn.functional.linear, written, x
    )  # for all that is known it may share with both
    graph.output(x)
    gm = GraphModule(nn.Module(), graph)

    out = dovetail.outline(gm, [Request(["copied"], kind="pool"), Request(["joined"], kind="fused")])
    out = dovetail.outline(out, ["pool_0", "read"], kind="fused")
    same_program(gm, out)
    for part in (
        dovetail.inline(out, kind="fused"),
        dovetail.inline(out, kind="pool"),
        dovetail.inline(out, depth=1),
    ):
        same_program(gm, part)


def test_views_that_come_in_a_list_do_not_move_across_a_write() -> None:
    def f(x, y):
        total = x - y
        total.mul_(0.5)
        return torch.unbind(total)[0] * 2

    gm = traced(f)
    with pytest.raises(dovetail.EffectOrder, match="mul_"):
        # autograd forbids the use of such views once their base is written
        dovetail.outline(gm, ["sub", "unbind"], kind="fused")


def test_a_view_of_a_view_from_a_list_does_not_move_across_a_write() -> None:
    def f(x, y):
        base = x - y
        part = torch.unbind(base)[0]
        flat = base.view(-1)
        turned = torch.permute(part, (0,))
        base.mul_(0.5)
        return flat, turned

    gm = traced(f)
    out = dovetail.outline(gm, ["mul_"], kind="fused")
    for attempt in (["fused_0", "view"], ["fused_0", "sub"]):
        # autograd forbids any use of `part` after the write, so `permute` may not come after the call
        try:
            outlined = dovetail.outline(out, attempt, kind="fused")
        except dovetail.RegionError:
            continue
        x, y = inputs()
        outlined(x.requires_grad_(), y)


def test_the_order_comes_back_around_a_reshape_in_place() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    parts = call(graph, "parts", torch.ops.aten.split.Tensor, y, 1)
    part = call(graph, "part", operator.getitem, parts, 1)
    turned = call(graph, "turned", torch.ops.aten.t_.default, y)
    call(graph, "wider", operator.getitem, part, (slice(None), None))
    gelu = call(graph, "gelu", torch.nn.functional.gelu, x)
    call(graph, "product", torch.matmul, gelu, turned)
    graph.output(x)
    gm = GraphModule(nn.Module(), graph)

    out = dovetail.outline(gm, ["turned"], kind="fused")
    out = dovetail.outline(out, ["product", "fused_0"], kind="fused")
    same_program(gm, out)


def test_a_view_does_not_move_across_a_region_that_reshapes_in_place() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    turned = call(graph, "turned", torch.ops.aten.t_.default, y)
    row = call(graph, "row", operator.getitem, y, 0)
    gelu = call(graph, "gelu", torch.nn.functional.gelu, x)
    product = call(graph, "product", torch.matmul, gelu, turned)
    graph.output((row, product))
    gm = GraphModule(nn.Module(), graph)

    out = dovetail.outline(gm, ["turned"], kind="fused")
    out = dovetail.outline(out, ["product", "fused_0"], kind="fused")
    same_program(gm, out)


def test_a_sub_graph_is_left_with_the_operation_it_belongs_to() -> None:
    def arm(by: float) -> GraphModule:
        graph = Graph()
        x = graph.placeholder("x")
        graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, by)),))
        return GraphModule(nn.Module(), graph)

    root = nn.Module()
    root.yes, root.no = arm(2.0), arm(-1.0)
    graph = Graph()
    x = graph.placeholder("x")
    above = graph.call_function(torch.ops.aten.gt.Scalar, (x, 0.0))
    arms = (graph.get_attr("yes"), graph.get_attr("no"))
    either = graph.call_function(torch.ops.higher_order.cond, (above, *arms, (x,)))
    taken = graph.call_function(operator.getitem, (either, 0))
    total = graph.call_function(torch.ops.aten.sum.default, (x,))
    below = graph.call_function(torch.ops.aten.lt.Scalar, (total, 0.0))
    graph.output((taken, below))
    gm = GraphModule(root, graph)
    out = dovetail.outline(gm, [either, below], kind="fused", escapes={taken: "leave"})
    assert dovetail.regions(out)[0].nodes == (below.name,)
    assert {"yes", "no"} <= {n.target for n in out.graph.nodes if n.op == "get_attr"}
    dovetail.check(out)
    assert dovetail.text(dovetail.inline(out)) == dovetail.text(gm)
