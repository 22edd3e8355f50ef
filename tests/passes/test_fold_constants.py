"""What depends on numbers alone is computed once, and what only seems to is not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import dovetail
from dovetail import FoldConstants, zoo
from dovetail.ir.graph_module import as_program
from dovetail.passes import fold_constants
from tests.fuzz.generate import FLAVOURS, draw_program
from tests.fuzz.observe import Snapshot, difference, observe
from tests.fuzz.program import NotAProgram, build, make_inputs
from tests.texts import assert_text

from .helpers import applied, aten, called, captured, drawn, left_alone

X = torch.randn(2, 4)
N = torch.export.Dim("n", min=2, max=64)


def causal(x: Tensor) -> Tensor:
    steps = torch.arange(x.shape[-1])
    return x.masked_fill(steps[None, :] > steps[:, None], -1.0)


def test_a_mask_is_computed_once() -> None:
    x = torch.randn(4, 4)
    gm = captured(causal, x)
    assert_text(
        gm,
        """
        graph:
          %x: f32[4, 4] = input
          %arange: i64[4] = aten.arange.default(4, dtype=int64, layout=strided, device=cpu, pin_memory=None)
          %unsqueeze: i64[1, 4] = aten.unsqueeze.default(%arange, 0)
          %unsqueeze_1: i64[4, 1] = aten.unsqueeze.default(%arange, 1)
          %gt: bool[4, 4] = aten.gt.Tensor(%unsqueeze, %unsqueeze_1)
          %masked_fill: f32[4, 4] = aten.masked_fill.Scalar(%x, %gt, -1.0)
          return (%masked_fill,)
    """,
    )
    new = applied(FoldConstants(), gm, x)
    assert_text(
        new,
        """
        graph:
          %x: f32[4, 4] = input
          %gt: bool[4, 4] = buffer folded_gt_0
          %masked_fill: f32[4, 4] = aten.masked_fill.Scalar(%x, %gt, -1.0)
          return (%masked_fill,)
    """,
    )
    assert torch.equal(new(x), causal(x))
    assert new.state_dict() == {}
    (held,) = new.buffers()
    assert held.sum() == 6
    assert [str(f) for f in FoldConstants().explain(gm)] == ["gt: it is computed once"]


def test_what_one_operation_makes_is_left_where_it_is() -> None:
    gm = captured(lambda x: x + torch.arange(4), X)
    assert left_alone(FoldConstants(), gm) == ""


def test_a_view_whose_elements_lie_over_each_other_is_taken_of_a_constant() -> None:
    gm = captured(lambda x: x + (torch.arange(4) * 2).expand(2, 4), X)
    assert_text(
        gm,
        """
        graph:
          %x: f32[2, 4] = input
          %arange: i64[4] = aten.arange.default(4, dtype=int64, layout=strided, device=cpu, pin_memory=None)
          %mul: i64[4] = aten.mul.Tensor(%arange, 2)
          %expand: i64[2, 4] = aten.expand.default(%mul, [2, 4], implicit=False)
          %add: f32[2, 4] = aten.add.Tensor(%x, %expand, alpha=1)
          return (%add,)
    """,
    )
    assert_text(
        applied(FoldConstants(), gm, X),
        """
        graph:
          %x: f32[2, 4] = input
          %mul: i64[4] = buffer folded_mul_0
          %expand: i64[2, 4] = aten.expand.default(%mul, [2, 4], implicit=False)
          %add: f32[2, 4] = aten.add.Tensor(%x, %expand, alpha=1)
          return (%add,)
    """,
    )
    reasons = [str(f) for f in FoldConstants().explain(gm)]
    assert reasons == [
        "mul: it is computed once",
        "expand: left alone: its elements are not dense in memory",
    ]


def test_parameters_and_buffers_are_live() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.weight * 2) + (self.shift + torch.arange(4))

    assert left_alone(FoldConstants(), captured(Scaled(), X)) == ""


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x, torch.arange(4) + 1),  # every caller has one of its own
        lambda x: (x, (torch.arange(4) + 1).view(2, 2)),
        lambda x: x + torch.rand(4).mul(2),
        lambda x: x + torch.bernoulli(torch.full((4,), 0.5)) * 2,
        lambda x: x + torch.empty(4).mul(0.0).nan_to_num(0.0),
    ],
)
def test_results_and_draws_are_computed_in_every_call(function: Any) -> None:
    assert left_alone(FoldConstants(), captured(function, X)) == ""


def test_what_is_written_is_computed_in_every_call() -> None:
    def draw(graph: Any) -> Any:
        x = graph.placeholder("x")
        ones = graph.call_function(aten.full.default, ([2, 4], 1.0))
        count = graph.call_function(aten.mul.Tensor, (ones, 2.0))
        part = graph.call_function(aten.view.default, (count, [8]))
        graph.call_function(aten.add_.Tensor, (part, 1.0))
        return graph.call_function(aten.add.Tensor, (count, x))

    gm = drawn(draw)
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(X)
    assert left_alone(FoldConstants(), gm) == ""
    assert_text(
        gm,
        """
        graph:
          %x: f32[2, 4] = input
          %full_default: f32[2, 4] = aten.full.default([2, 4], 1.0)
          %mul_tensor: f32[2, 4] = aten.mul.Tensor(%full_default, 2.0)
          %view_default: f32[8] = aten.view.default(%mul_tensor, [8])
          %add__tensor: f32[8] = aten.add_.Tensor(%view_default, 1.0)
          %add_tensor: f32[2, 4] = aten.add.Tensor(%mul_tensor, %x)
          return %add_tensor
    """,
    )


def test_sizes_that_vary_are_no_numbers() -> None:
    gm = captured(causal, torch.randn(4, 4), dynamic_shapes=({0: N, 1: N},))
    assert not any(f.taken for f in FoldConstants().explain(gm))


def test_large_ones_and_spent_fuel() -> None:
    x = torch.randn(4, 4)

    def twice(x: Tensor) -> Tensor:
        return causal(x) + (torch.arange(4) * 3).sin()

    gm = captured(twice, x)
    assert_text(
        applied(FoldConstants(), gm, x),
        """
        graph:
          %x: f32[4, 4] = input
          %gt: bool[4, 4] = buffer folded_gt_0
          %masked_fill: f32[4, 4] = aten.masked_fill.Scalar(%x, %gt, -1.0)
          %sin: f32[4] = buffer folded_sin_0
          %add: f32[4, 4] = aten.add.Tensor(%masked_fill, %sin, alpha=1)
          return (%add,)
    """,
    )
    assert "it has 16 bytes, more than 15" in [f.reason for f in FoldConstants(limit=15).explain(gm)]
    assert "gt" in called(applied(FoldConstants(limit=15), gm, x))
    one = FoldConstants(fuel=1)
    assert [f.reason for f in one.explain(gm)] == ["", "the fuel of 1 is spent"]
    assert_text(
        one(gm),
        """
        graph:
          %x: f32[4, 4] = input
          %gt: bool[4, 4] = buffer folded_gt_0
          %masked_fill: f32[4, 4] = aten.masked_fill.Scalar(%x, %gt, -1.0)
          %arange_1: i64[4] = aten.arange.default(4, dtype=int64, layout=strided, device=cpu, pin_memory=None)
          %mul: i64[4] = aten.mul.Tensor(%arange_1, 3)
          %sin: f32[4] = aten.sin.default(%mul)
          %add: f32[4, 4] = aten.add.Tensor(%masked_fill, %sin, alpha=1)
          return (%add,)
    """,
    )
    assert left_alone(FoldConstants(fuel=0), gm) == "the fuel of 0 is spent; the fuel of 0 is spent"
    for wrong in (-1, 1.5, True, "1"):
        with pytest.raises(dovetail.InvalidArgument, match="limit"):
            FoldConstants(limit=wrong)  # type: ignore[arg-type]
        with pytest.raises(dovetail.InvalidArgument, match="fuel"):
            FoldConstants(fuel=wrong)  # type: ignore[arg-type]


def test_a_value_that_more_than_a_constant_needs_is_still_computed() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(4) * 2
        return x + steps.sin(), x + steps.expand(2, 4)

    new = applied(FoldConstants(), captured(both, X), X)
    assert sorted(called(new)) == ["add", "add", "expand"]
    assert len(list(new.buffers())) == 2


def test_gradients_flow_past_it_also_after_inference_mode() -> None:
    linear = nn.Linear(4, 4)
    gm = captured(lambda x: linear(x) * (torch.arange(4) * 0.5), X)
    with torch.inference_mode():
        new = FoldConstants()(gm)
    for graph in (gm, new):
        graph(X).sum().backward()
    assert not any(b.is_inference() for b in new.buffers())


def test_copies_moves_and_pickles_keep_it() -> None:
    x = torch.randn(4, 4)
    new = FoldConstants()(captured(causal, x))
    assert torch.equal(copy.deepcopy(new)(x), causal(x))
    (held,) = copy.deepcopy(new).to(torch.float64).buffers()
    assert held.dtype is torch.bool


def test_models_of_the_zoo_compute_the_same() -> None:
    folded = 0
    for name in zoo.names():
        entry = zoo.get(name)
        model, inputs = entry.build("tiny").eval(), entry.example_inputs("tiny")
        gm = dovetail.capture(model, inputs.args, inputs.kwargs)
        new = FoldConstants()(gm)
        dovetail.check(new)
        folded += new is not gm
        expected, got = (g(*inputs.args, **inputs.kwargs) for g in (gm, new))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert folded


def numbered(gm: GraphModule, inputs: list[Any]) -> GraphModule | None:
    """The program with numbers in place of its inputs, so that much of it is constant; None where that cannot be."""
    new = as_program(copy.deepcopy(gm))
    for node, value in zip(new.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if not isinstance(value, Tensor) or value.dtype is not torch.float32 or not value.is_contiguous():
            continue
        users = list(node.users)
        with new.graph.inserting_after(node):
            steps = new.graph.call_function(
                aten.arange.default, (value.numel(),), {"dtype": torch.float32, "pin_memory": False}
            )
        with new.graph.inserting_after(steps):
            shaped = new.graph.call_function(aten.reshape.default, (steps, list(value.shape)))
        with new.graph.inserting_after(shaped):
            scaled = new.graph.call_function(aten.mul.Tensor, (shaped, 0.1))
        for user in users:
            user.replace_input_with(node, scaled)
    new.recompile()
    try:
        FakeTensorProp(new, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)
    except Exception:
        return None
    return new


def programs(flavour: str, count: int) -> Iterator[tuple[GraphModule, list[Any]]]:
    for seed in range(count):
        try:
            program = draw_program(Random(seed), FLAVOURS[flavour])
            inputs = make_inputs(program)
            graph = numbered(build(program), make_inputs(program))
        except NotAProgram:
            continue
        if graph is not None:
            yield graph, inputs


def unlike(gm: GraphModule, inputs: list[Any]) -> tuple[str, bool]:
    """What can be seen of folding, and whether anything was folded."""
    state = Snapshot(gm)
    expected = observe(gm, state, inputs, runs=2)
    if expected[-1].error:
        return "", False
    new = FoldConstants()(gm)
    which, words = difference(expected, observe(new, state, inputs, runs=2))
    return (f"{which}: {words}\n{dovetail.text(gm)}\n{dovetail.text(new)}" if which else ""), new is not gm


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flavour", ["pure", "memory", "world", "everything"])
def test_nothing_can_be_seen_of_it_in_random_programs(flavour: str) -> None:
    folded = 0
    for gm, inputs in programs(flavour, 80):
        mismatch, changed = unlike(gm, inputs)
        assert not mismatch, mismatch
        folded += changed
    assert folded > 10


@pytest.mark.filterwarnings("ignore")
def test_a_careless_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(index: Any) -> set[Any]:
        calls = [n for n in index.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)]
        known: set[Any] = set()
        for node in calls:
            if isinstance(node.target, torch._ops.OpOverload) and known.issuperset(node.all_input_nodes):
                known.add(node)
        return known

    # A mistake planted into the function that would have it.
    monkeypatch.setattr(fold_constants, "_constant_nodes", careless)
    assert any(unlike(gm, inputs)[0] for gm, inputs in programs("memory", 150))
