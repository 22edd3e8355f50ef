"""What generated programs have found, one small case for each cause, so that it stays found.

Names of nodes are those FX gives: the operation's, numbered from the second on.
"""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import dovetail
from dovetail import Request


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(2, -2, 6).reshape(2, 3)


def _traced(function: Callable[..., Any]) -> GraphModule:
    """The graph as written: Python functions and methods, no values."""
    return symbolic_trace(function)


def _with_values(function: Callable[..., Any]) -> GraphModule:
    """The same, with a fake value on every node, the output's too."""
    gm = symbolic_trace(function)
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*_inputs())
    for node in gm.graph.nodes:
        node.meta.setdefault("val", None)
    return gm


def _same_program(before: GraphModule, after: GraphModule) -> None:
    """The graph with regions runs like the one without, holds together, and can be undone."""
    runs = []
    for gm in (before, after):
        inputs = _inputs()
        torch.manual_seed(0)
        runs.append((gm(*inputs), inputs, torch.rand(1)))
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0, equal_nan=True)
    dovetail.check(after)
    assert dovetail.text(dovetail.inline(after)) == dovetail.text(before)


def test_a_clone_may_need_what_stands_after_the_last_member() -> None:
    def f(x, y):
        first = y + y
        second = torch.tanh(x)
        return first, torch.relu(second)

    gm = _traced(f)
    out = dovetail.outline(gm, ["relu", "add"], kind="fused", escapes={"relu": "duplicate", "add": "output"})
    assert [n.name for n in out.graph.nodes][:3] == ["x", "y", "tanh"]
    _same_program(gm, out)


def test_results_of_a_call_do_not_upset_the_order() -> None:
    def f(x, y):
        first = torch.sin(x)
        written = y.uniform_(0.0, 1.0)
        later = torch.reshape(written, (-1,))
        return first, later, torch.rand_like(x)

    gm = _traced(f)
    out = dovetail.outline(gm, ["sin", "rand_like"], kind="fused")
    out = dovetail.outline(out, ["uniform_"], kind="fused")
    _same_program(gm, out)


def test_symbolic_sizes_that_turned_out_fixed_survive_pickle() -> None:
    offset = torch.linspace(-1, 1, 6).reshape(2, 3)

    def f(x, y):
        first = x - offset  # fixes both sizes of x
        return first[0], y

    gm = make_fx(f, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*_inputs())
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

    gm = make_fx(f)(*_inputs())
    assert "val" not in next(n for n in gm.graph.nodes if n.name == "_foreach_add_").meta
    _same_program(gm, dovetail.outline(gm, ["_foreach_add_"], kind="fused"))


def test_values_on_some_nodes_only_are_no_reason_to_complain() -> None:
    gm = _with_values(lambda x, y: torch.relu(x + y) * y)
    del next(n for n in gm.graph.nodes if n.name == "add").meta["val"]
    _same_program(gm, dovetail.outline(gm, ["relu", "mul"], kind="fused"))


@pytest.mark.parametrize("escapes", ["leave", {"split": "leave"}, {"split": "leave", "getitem": "output"}])
def test_a_tuple_that_is_left_out_takes_its_parts_along(escapes: Any) -> None:
    def f(x, y):
        parts = torch.ops.aten.split.Tensor(x, 1)
        return torch.relu(y) + 1, parts[0], parts

    gm = _traced(f)
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

    gm = _with_values(f)
    out = dovetail.outline(gm, ["sin", "mul_"], kind="fused")
    names = [n.name for n in out.graph.nodes]
    assert names.index("fused_0") < names.index("neg")
    _same_program(gm, out)


def test_a_clone_given_back_is_the_original_again() -> None:
    def f(x, y):
        shared = torch.sin(x)
        return torch.neg(shared), torch.sigmoid(shared), torch.tanh(y)

    gm = _traced(f)
    out = dovetail.outline(gm, ["sin", "sigmoid"], kind="pair", escapes="duplicate")
    out = dovetail.outline(out, ["tanh", "sin"], kind="fused")  # the original moves into another region
    _same_program(gm, out)
    for name in ("pair_0", "fused_0"):
        _same_program(gm, dovetail.inline(dovetail.inline(out, name)))


def test_a_region_that_returns_a_view_shares_memory_with_its_operand() -> None:
    def f(x, y):
        before = -y
        view = y.t()
        torch.ops.aten.add.out(x.t(), 0.5, out=view)
        return y + before

    # The values of such a graph do not tell: none of them shares memory with another.
    gm = make_fx(f)(*_inputs())
    out = dovetail.outline(gm, ["t"], kind="view")
    with pytest.raises(dovetail.EffectOrder):
        dovetail.outline(out, ["neg", "add_1"], kind="fused")
    after = dovetail.outline(out, ["add_1"], kind="fused")
    names = [n.name for n in after.graph.nodes]
    assert names.index("add") < names.index("fused_0")
    _same_program(gm, after)


def test_a_constant_whose_view_is_returned_is_not_cloned() -> None:
    def f(x, y):
        constant = torch.ones(2, 2)
        return constant[:1], constant

    gm = make_fx(f)(*_inputs())
    out = dovetail.outline(gm, ["ones", "slice_1"], kind="fused")
    _same_program(gm, out)
    view, constant = out(*_inputs())
    assert view.untyped_storage().data_ptr() == constant.untyped_storage().data_ptr()


def test_a_nested_clone_whose_original_is_further_out() -> None:
    def f(x, y):
        shared = torch.sub(torch.abs(x), 2)
        return torch.sigmoid(shared), torch.neg(shared), torch.tanh(y)

    gm = _traced(f)
    out = dovetail.outline(gm, ["sub", "sigmoid"], kind="pair", escapes={"sub": "duplicate"})
    out = dovetail.outline(out, [Request(["abs_1"], kind="pair"), Request(["tanh", "pair_0"], kind="fused")])
    _same_program(gm, out)
    for part in (dovetail.inline(out, kind="pair"), dovetail.inline(out, "fused_0/pair_0")):
        _same_program(gm, part)


def _call(graph: Graph, name: str, target: Any, *args: Any, **kwargs: Any) -> Node:
    return graph.create_node("call_function", target, args, kwargs, name=name)


@pytest.mark.parametrize("split", [torch.ops.aten.split.Tensor, torch.split, torch.unsafe_split])
def test_a_write_to_a_part_is_a_write_to_the_whole(split: Any) -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    parts = _call(graph, "parts", split, x, 1)
    part = _call(graph, "part", operator.getitem, parts, 1)
    look = _call(graph, "look", torch.ops.aten.add.Tensor, x, y)
    _call(graph, "write", torch.ops.aten.fill_.Scalar, part, -1.0)
    graph.output((look, x))
    gm = GraphModule(nn.Module(), graph)

    out = dovetail.outline(gm, ["parts", "part", "write"], kind="fused")
    assert [n.name for n in out.graph.nodes] == ["x", "y", "look", "fused_0", "output"]
    _same_program(gm, out)


def test_parts_of_a_traced_split_share_its_memory() -> None:
    def f(x, y):
        parts = torch.ops.aten.split.Tensor(x, 1)
        look = x + y
        parts[1].fill_(-1.0)
        return look, x

    gm = make_fx(f)(*_inputs())  # whose values share no memory with one another
    whole = dovetail.outline(gm, ["split", "add", "fill_"], kind="fused")
    _same_program(gm, whole)
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

    gm = dovetail.declare(_traced(f), {"torch.maximum": "ordered"})  # it may share memory with all it reads
    out = dovetail.outline(gm, ["clone", "neg"], kind="fused")
    _same_program(gm, out)


def test_a_value_that_is_indexed_inside_is_not_cloned() -> None:
    gm = _with_values(lambda x, y: ((total := torch.abs(x) + torch.abs(x))[0], total))
    out = dovetail.outline(gm, ["add", "getitem"], kind="fused")
    _same_program(gm, out)
    part, whole = out(*_inputs())
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_what_is_written_by_out_is_the_result() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = _call(graph, "total", torch.add, y, y, out=x)
    look = _call(graph, "look", torch.sin, x)
    _call(graph, "wipe", torch.ops.aten.zero_.default, total)
    graph.output((look, x))
    gm = GraphModule(nn.Module(), graph)

    with pytest.raises(dovetail.EffectOrder, match="look"):
        dovetail.outline(gm, ["total", "wipe"], kind="fused")
    _same_program(gm, dovetail.outline(gm, ["look", "wipe"], kind="fused"))


@pytest.mark.parametrize("escapes", ["leave", {"part_0": "refuse", "part_1": "leave"}])
def test_what_becomes_of_a_tuple_does_not_depend_on_the_listing(escapes: Any) -> None:
    def told(order: tuple[int, int]) -> Any:
        graph = Graph()
        parts = _call(graph, "parts", torch.ops.aten.split.Tensor, graph.placeholder("x"), 1)
        part = {i: _call(graph, f"part_{i}", operator.getitem, parts, i) for i in order}
        product = _call(graph, "product", torch.ops.aten.mul.Tensor, part[0], part[1])
        graph.output((part[0], product, _call(graph, "other", torch.ops.aten.neg.default, part[1])))
        gm = GraphModule(nn.Module(), graph)
        try:
            out = dovetail.outline(gm, ["parts", "product"], kind="fused", escapes=escapes)
        except dovetail.DovetailError as error:
            return type(error)
        return dovetail.regions(out)[0].escapes

    assert told((0, 1)) == told((1, 0))


def test_a_decision_does_not_depend_on_where_something_left_out_is_listed() -> None:
    def told(*order: str) -> Any:
        graph = Graph()
        shared = _call(graph, "shared", torch.tanh, graph.placeholder("x"))
        made: dict[str, Node] = {}
        for name in order:
            made[name] = _call(graph, name, torch.add, shared, made["total"] if name == "inner" else shared)
        graph.output((made["left"], made["total"]))
        gm = GraphModule(nn.Module(), graph)
        out = dovetail.outline(gm, ["shared", *order], kind="fused", escapes={"left": "leave"})
        return dovetail.regions(out)[0].escapes

    assert told("left", "total", "inner") == told("total", "inner", "left")


def test_results_of_one_region_are_not_one_memory() -> None:
    def f(x, y):
        first = torch.abs(y)
        second = torch.sum(first)
        flag = torch.ge(second, 0.0)
        later = torch.sigmoid(second)
        return flag, later, first.zero_()

    gm = _traced(f)
    out = dovetail.outline(gm, ["zero_", "ge"], kind="fused")
    out = dovetail.outline(out, ["sum_1", "abs_1"], kind="pool")
    _same_program(gm, out)
    for kind in ("fused", "pool"):
        _same_program(gm, dovetail.inline(out, kind=kind))


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
        again(*_inputs())
        assert int(again.state_dict()["child.0.num_batches_tracked"]) == 2


def test_a_borrowed_graph_adds_nothing_to_the_state_dict() -> None:
    gm = _calls_twice(_counting())
    out = dovetail.outline(gm, ["first"], kind="fused")
    assert list(out.state_dict()) == list(gm.state_dict())


def test_the_order_comes_back_from_regions_opened_one_by_one() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    _call(graph, "read", torch.nn.functional.silu, x)
    written = _call(graph, "written", torch.relu_, y)
    _call(graph, "copied", torch.ops.aten.exp.out, written, out=x)
    _call(
        graph, "joined", torch.nn.functional.linear, written, x
    )  # for all that is known it may share with both
    graph.output(x)
    gm = GraphModule(nn.Module(), graph)

    out = dovetail.outline(gm, [Request(["copied"], kind="pool"), Request(["joined"], kind="fused")])
    out = dovetail.outline(out, ["pool_0", "read"], kind="fused")
    _same_program(gm, out)
    for part in (
        dovetail.inline(out, kind="fused"),
        dovetail.inline(out, kind="pool"),
        dovetail.inline(out, depth=1),
    ):
        _same_program(gm, part)
