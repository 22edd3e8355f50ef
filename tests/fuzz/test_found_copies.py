"""What generated programs have found in values, copies and pickles of graphs, one small case for each cause."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import dovetail

from .small_graphs import inputs, same_program, with_values


def test_symbolic_sizes_that_turned_out_fixed_survive_pickle() -> None:
    offset = torch.linspace(-1, 1, 6).reshape(2, 3)

    def f(x, y):
        first = x - offset  # fixes both sizes of x
        return first[0], y

    gm = make_fx(f, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs())
    out = dovetail.outline(gm, ["select"], kind="fused")
    assert dovetail.text(pickle.loads(pickle.dumps(out))) == dovetail.text(out)


def test_a_fixed_symbolic_size_reads_the_same_after_pickle() -> None:
    gm = make_fx(lambda x: torch.chunk(x, 2), tracing_mode="symbolic")(torch.ones(2, 3))
    out = dovetail.outline(gm, ["floordiv"], kind="fused")
    for again in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out)):
        assert dovetail.text(again) == dovetail.text(out)


def test_operations_that_return_nothing_need_no_value() -> None:
    def f(x, y):
        torch.ops.aten._foreach_add_.Scalar([x, y], 0.5)
        return x * y

    gm = make_fx(f)(*inputs())
    assert "val" not in next(n for n in gm.graph.nodes if n.name == "_foreach_add_").meta
    same_program(gm, dovetail.outline(gm, ["_foreach_add_"], kind="fused"))


def test_values_on_some_nodes_only_are_no_reason_to_complain() -> None:
    gm = with_values(lambda x, y: torch.relu(x + y) * y)
    del next(n for n in gm.graph.nodes if n.name == "add").meta["val"]
    same_program(gm, dovetail.outline(gm, ["relu", "mul"], kind="fused"))


def _counting() -> GraphModule:
    """A graph with a buffer of its own."""
    return symbolic_trace(nn.Sequential(nn.BatchNorm1d(3)))


def _calls_twice(child: GraphModule) -> GraphModule:
    root = nn.Module()
    root.child = child
    graph = Graph()
    first = graph.create_node("call_module", "child", (graph.placeholder("x"),), name="first")
    graph.placeholder("y")
    graph.output(graph.create_node("call_module", "child", (first,), name="second"))
    return GraphModule(root, graph)


def test_a_graph_called_inside_and_outside_stays_one_in_every_copy() -> None:
    out = dovetail.outline(_calls_twice(_counting()), ["first"], kind="fused")
    for again in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out)):
        assert dovetail.text(again) == dovetail.text(out)
        again(*inputs())
        assert int(again.state_dict()["child.0.num_batches_tracked"]) == 2


def test_a_borrowed_graph_adds_nothing_to_the_state_dict() -> None:
    gm = _calls_twice(_counting())
    out = dovetail.outline(gm, ["first"], kind="fused")
    assert list(out.state_dict()) == list(gm.state_dict())


def test_symbolic_sizes_that_share_a_storage_stay_symbolic_in_pickle() -> None:
    def f(x, y):
        return torch.chunk(x, 2), torch.sin(y)

    gm = symbolic_trace(f)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    sources = [ConstantSource(name) for name in "xy"]
    fakes = [
        mode.from_tensor(x, symbolic_context=context, source=source)
        for x, source in zip(inputs(), sources, strict=True)
    ]
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fakes)
    out = dovetail.outline(gm, ["sin"], kind="fused")
    assert "f32[s0, 3]" in dovetail.text(out)
    assert dovetail.text(pickle.loads(pickle.dumps(out))) == dovetail.text(out)


def test_a_view_that_a_region_hands_on_stays_one_tensor() -> None:
    root, graph = nn.Module(), Graph()
    root.same = nn.Identity()
    x = graph.placeholder("x")
    view = graph.create_node("call_function", torch.ops.aten.detach.default, (x,), name="view")
    handed = graph.create_node("call_module", "same", (view,), name="handed")
    graph.output((view, handed))
    gm = GraphModule(root, graph)
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(torch.ones(2, 3))
    gm = dovetail.outline(gm, ["handed"], kind="inner", escapes="output")
    gm = dovetail.outline(gm, ["inner_0", "view"], kind="outer")
    first, second = gm(torch.ones(2, 3))
    assert first is second
