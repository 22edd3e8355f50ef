"""What generated programs have found in fusing, one small case for each cause."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule

import dovetail

from .fusing import RULES
from .small_graphs import call


def test_a_tuple_that_is_joined_whole_is_no_list() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    both = call(graph, "both", torch.ops.aten.topk.default, x, 2)
    graph.output(call(graph, "joined", torch.ops.aten.cat.default, both))
    gm = GraphModule(nn.Module(), graph)
    assert dovetail.regions(dovetail.fuse(gm, RULES["scaled"], on_error="raise")) == []


def test_a_view_that_may_be_handed_on_as_it_is_stays_one_object() -> None:
    def f(x):
        part = torch.diagonal(x)
        return F.dropout(part, 0.5, False), part

    gm = torch.fx.symbolic_trace(f)
    for new in (
        dovetail.outline(gm, ["diagonal", "dropout"], kind="k"),
        dovetail.fuse(gm, dovetail.rules.groups(), on_error="raise"),
    ):
        first, second = new(torch.randn(3, 3))
        assert first is second


def test_a_sub_graph_that_is_requested_without_its_operator_stays_where_it_is() -> None:
    def double(x):
        return (x * 2,)

    root = nn.Module()
    root.arm = torch.fx.symbolic_trace(double)
    graph = Graph()
    x = graph.placeholder("x")
    arm = graph.get_attr("arm")
    positive = call(
        graph, "positive", torch.ops.aten.gt.Scalar, call(graph, "total", torch.ops.aten.sum.default, x), 0
    )
    chosen = call(graph, "chosen", torch.ops.higher_order.cond, positive, arm, arm, (x,))
    other = call(graph, "other", torch.ops.aten.full_like.default, x, 0.25)
    graph.output((call(graph, "value", operator.getitem, chosen, 0), other))
    gm = GraphModule(root, graph)
    new = dovetail.outline(gm, [arm, other], kind="fused")
    dovetail.check(new)
    (region,) = dovetail.regions(new)
    assert region.nodes == ("other",)
    assert dovetail.text(dovetail.inline(new)) == dovetail.text(gm)


def test_repeats_look_at_tuples_whose_parts_nobody_reads() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    norm = call(graph, "norm", torch.ops.aten.native_layer_norm.default, x, [3], None, None, 1e-5)
    call(graph, "mode", torch._C._set_grad_enabled, True)
    call(graph, "part", operator.getitem, norm, 2)
    graph.output(x)
    gm = GraphModule(nn.Module(), graph)
    assert dovetail.regions(dovetail.fuse(gm, dovetail.rules.repeats(min_size=2), on_error="raise")) == []
