"""What generated programs have found in lowering, one small case for each cause."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx import Graph, GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import dovetail


def lowered(gm: GraphModule, nodes: list[Any]) -> GraphModule:
    return dovetail.lower(dovetail.outline(gm, nodes, kind="piece"), "eager", smallest=1, cache=False)


def test_a_module_in_a_region_keeps_it_as_it_is() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, device="meta")
    called = graph.call_module("inner", (x,))
    graph.output(called)
    root = nn.Module()
    root.inner = nn.Tanh()
    gm = lowered(GraphModule(root, graph), [called])
    given = torch.randn(3)
    assert torch.equal(gm(given), torch.tanh(given))
    assert "is not a graph" in dovetail.explain(gm).lowered[0].reason


def test_a_region_of_constants_alone() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor([1.0, 2.0]).exp()

    gm = dovetail.capture(Model(), (torch.zeros(2),))
    picked = [n for n in gm.graph.nodes if n.op == "get_attr" or "exp" in n.name]
    assert torch.equal(lowered(gm, picked)(torch.zeros(2)), Model()(torch.zeros(2)))


def test_a_graph_that_returns_no_tuple_has_a_key() -> None:
    inner = Graph()
    y = inner.placeholder("y")
    inner.output(inner.call_function(torch.neg, (y,)))
    graph = Graph()
    x = graph.placeholder("x")
    called = graph.call_module("inner", (x,))
    graph.output(called)
    root = nn.Module()
    root.inner = GraphModule(nn.Module(), inner)
    gm = dovetail.outline(GraphModule(root, graph), [called], kind="piece")
    assert len(dovetail.regions(gm)[0].key) == 64
    assert torch.equal(dovetail.lower(gm, "eager", smallest=1)(torch.ones(2)), -torch.ones(2))


PRINTED: list[str] = []


def say(x: torch.Tensor) -> torch.Tensor:
    PRINTED.append(type(x).__name__)
    return x * 2


def test_host_effects_do_not_run_while_lowering() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    printed = graph.call_function(say, (x,))
    graph.output(printed)
    x.meta["val"] = torch.empty(3, device="meta")
    gm = lowered(GraphModule(nn.Module(), graph), [printed])
    assert PRINTED == []
    assert torch.equal(gm(torch.ones(3)), torch.full((3,), 2.0))
    assert PRINTED == ["Tensor"]


def test_a_number_computed_from_sizes_that_no_operand_shows() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_full((x.shape[0] + x.shape[1], 3), 0.5)

    gm = dovetail.capture(Model(), (torch.zeros(4, 5),), dynamic_shapes=({0: Dim("a"), 1: Dim("b")},))
    filled = [n for n in gm.graph.nodes if n.op == "call_function" and "full" in n.name]
    run = lowered(gm, filled)
    for sizes in ((4, 5), (2, 7), (3, 3)):
        assert run(torch.zeros(sizes)).shape == (sum(sizes), 3)


def test_host_effects_do_not_run_when_verifying_though_they_may_draw_random_numbers() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, device="meta")
    called = graph.call_function(say, (x,))  # of what is not known everything is supposed
    called.meta["val"] = torch.empty(3, device="meta")
    graph.output(called)
    gm = dovetail.outline(GraphModule(nn.Module(), graph), [called], kind="piece")
    assert "random" in dovetail.regions(gm)[0].effects
    PRINTED.clear()
    fast = dovetail.lower(gm, "eager", smallest=1, cache=False, verify=True)
    assert not PRINTED
    assert torch.equal(fast(torch.ones(3)), torch.ones(3) + 1)
    assert len(PRINTED) == 1


def test_results_that_are_lists_are_compared_by_what_is_in_them() -> None:
    class Wrong(dovetail.Backend):
        name = "wrong"
        trains = True

        def supports(self, region: dovetail.Region) -> Any:
            return True

        def compile(self, region: dovetail.Region, examples: Any) -> Any:
            def run(x: torch.Tensor) -> Any:
                return ([x + 0.5, x + 0.6],)

            return run

    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = FakeTensorMode().from_tensor(torch.zeros(2, 3))
    added = graph.call_function(torch.ops.aten._foreach_add.Scalar, ([x, x], 0.5))
    graph.output(added)
    gm = dovetail.outline(GraphModule(nn.Module(), graph), [added], kind="piece")
    fast = dovetail.lower(gm, [Wrong(), "eager"], smallest=1, cache=False, verify=True)
    given = torch.randn(2, 3)
    for value in fast(given):
        assert torch.equal(value, given + 0.5)
    wrong, right = dovetail.explain(fast).lowered
    assert wrong.reason.startswith("result 0[1] is off by")
    assert (right.outcome, right.reason) == ("compiled", "")


def test_a_result_that_depends_on_nothing_is_computed_anew_in_every_call() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, torch.zeros(3).clamp(-2.0, 2.0)

    flat = dovetail.capture(model, (torch.ones(3),))
    flat = dovetail.outline(flat, ["add", "zeros", "clamp"], kind="piece")
    nested = dovetail.outline(flat, ["piece_0"], kind="outer")
    for gm, name in ((flat, "clamp"), (nested, "piece_0__clamp")):
        fast = dovetail.lower(gm, "torchscript", smallest=1, cache=False)
        assert dovetail.explain(fast).lowered[0].reason == f"its result '{name}' depends on no operand"
        for _ in range(4):
            value = fast(torch.ones(3))[1]
            assert torch.equal(value, torch.zeros(3))
            value.add_(1)


def test_a_size_that_varies_is_a_number_when_it_is_a_result() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.relu().reshape(x.shape[0] * 4)

    gm = dovetail.capture(model, (torch.zeros(3, 4),), dynamic_shapes=({0: Dim("n", min=2, max=9)},))
    sizes = [n for n in gm.graph.nodes if "sym_size" in n.name or "relu" in n.name]
    fast = dovetail.lower(
        dovetail.outline(gm, sizes, kind="piece"), "eager", cache=False, verify=True, on_error="raise"
    )
    assert dovetail.regions(fast)[0].backend == "eager"
    for n in (3, 5):
        given = torch.randn(n, 4)
        assert torch.equal(fast(given), model(given))


def test_a_number_of_which_nothing_is_known() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        n = x.sum().to(torch.int64).item()
        return y * n + n

    gm = dovetail.capture(model, (torch.ones(3), torch.ones(3)))
    fast = dovetail.lower(dovetail.outline(gm, ["mul", "add"], kind="piece"), "eager", cache=False)
    assert dovetail.regions(fast)[0].backend == "eager"
    for value in (-5.0, 7.0):  # also below zero
        given = torch.full((3,), value), torch.ones(3)
        assert torch.equal(fast(*given), model(*given))
    assert [e.outcome for e in dovetail.explain(fast).lowered] == ["compiled"]


def test_dropout_that_is_off_returns_its_operand_in_trials_too() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    chunks = graph.create_node("call_function", torch.chunk, (x, 2), name="chunks")
    off = graph.create_node("call_function", F.dropout, (x, 0.5, False), name="off")
    graph.output((chunks, off))
    gm = GraphModule(nn.Module(), graph)
    value = torch.linspace(-1, 1, 6).reshape(2, 3)
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(value)
    piece = dovetail.outline(gm, ["chunks", "off"], kind="piece")
    fast = dovetail.lower(piece, "eager", smallest=1, cache=False, on_error="raise")
    assert fast(value)[1].data_ptr() == value.data_ptr()


def test_an_operand_of_one_element_with_a_stride() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    picked = graph.call_function(operator.getitem, (x, (slice(0, 1), 0)))
    graph.output(graph.call_function(torch.neg, (picked,)))
    gm = GraphModule(nn.Module(), graph)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        FakeTensorProp(gm, mode).propagate(torch.empty(2, 3))
    fast = dovetail.lower(
        dovetail.outline(gm, ["neg"], kind="piece"), "eager", smallest=1, cache=False, on_error="raise"
    )
    given = torch.randn(2, 3)
    assert torch.equal(fast(given), gm(given))


def test_the_tracer_is_not_given_what_it_takes_for_constants() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    data = graph.call_function(getattr, (x, "data"))
    graph.output(graph.call_function(torch.add, (x, data)))
    gm = GraphModule(nn.Module(), graph)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        FakeTensorProp(gm, mode).propagate(torch.empty(2, 3))
    fast = dovetail.lower(
        dovetail.outline(gm, ["getattr_1", "add"], kind="piece"), "torchscript", smallest=1, cache=False
    )
    given = torch.randn(2, 3)
    assert torch.equal(fast(given), gm(given))
    assert "treats as a constant" in dovetail.explain(fast).lowered[0].reason


def with_values(function: Any, *args: torch.Tensor) -> GraphModule:
    gm = torch.fx.symbolic_trace(function)
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*args)
    return gm


def _turned(x: torch.Tensor) -> torch.Tensor:
    v = x * 2
    v.t_()
    return x @ v


def _turned_by_its_result(x: torch.Tensor) -> torch.Tensor:
    v = x * 2
    v.unsqueeze_(0).squeeze_(0).t_()
    return x @ v


def _turned_after_a_write(x: torch.Tensor) -> torch.Tensor:
    v = x * 2
    v.t_()
    v.add_(1)
    return x @ v


def _turned_twice(x: torch.Tensor) -> torch.Tensor:
    v = x * 2
    w = v.t_()
    v.t_()
    return x @ w.t()


def _view_stays(x: torch.Tensor) -> torch.Tensor:
    v = x * 2
    w = v[:, :]
    v.t_()
    return x @ w.t()


def _input_turned(x: torch.Tensor) -> torch.Tensor:
    v = x * 2
    x.t_()
    return v @ x


@pytest.mark.parametrize(
    "function",
    [_turned, _turned_by_its_result, _turned_after_a_write, _turned_twice, _view_stays, _input_turned],
)
def test_examples_have_the_form_that_operands_have_at_the_call(function: Any) -> None:
    gm = with_values(function, torch.ones(2, 3))
    product = next(n for n in gm.graph.nodes if n.target is operator.matmul)
    members = [product, *(n for n in product.all_input_nodes if n.target == "t")]
    outlined = dovetail.outline(gm, members, kind="piece")
    dovetail.check(outlined)
    (region,) = dovetail.regions(outlined)
    shapes = [tuple(n.meta["val"].shape) for n in region.body.graph.find_nodes(op="placeholder")]
    expected = {_view_stays: [(2, 3), (2, 3)], _turned_twice: [(2, 3), (2, 3)]}
    assert shapes == expected.get(function, [(2, 3), (3, 2)])
    low = dovetail.lower(outlined, "eager", smallest=1, cache=False, on_error="raise")
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    assert torch.equal(low(x.clone()), function(x.clone()))
    assert dovetail.explain(low).lowered[0].outcome == "compiled"
    assert dovetail.text(dovetail.inline(outlined)) == dovetail.text(gm)


def test_an_operand_that_a_region_turned_has_the_form_it_was_given() -> None:
    gm = with_values(_turned, torch.ones(2, 3))
    turn, product = (next(n for n in gm.graph.nodes if n.target == t) for t in ("t_", operator.matmul))
    outlined = dovetail.outline(dovetail.outline(gm, [turn], kind="turn"), [product.name], kind="piece")
    dovetail.check(outlined)
    low = dovetail.lower(outlined, "eager", smallest=1, cache=False, on_error="raise")
    assert torch.equal(low(torch.ones(2, 3)), _turned(torch.ones(2, 3)))
    backends = {entry.region: entry.backend for entry in dovetail.explain(low).lowered if not entry.reason}
    reasons = {entry.region: entry.reason for entry in dovetail.explain(low).lowered if entry.reason}
    assert list(backends) == ["piece_0"]
    assert reasons == {"turn_0": "it changes the sizes or strides of its operand 'mul' in place"}
