"""Which class an operation has, whatever its spelling."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

import dovetail
from dovetail.rules.op_classes import OpClass, classify, classify_body
from dovetail.rules.rule import RuleContext
from tests.outlining.helpers import trace
from tests.rules.proposal_helpers import captured
from tests.zoo_graphs import zoo_graph

aten = torch.ops.aten
ELEMENTWISE, BROADCAST, INJECTIVE = OpClass.ELEMENTWISE, OpClass.BROADCAST, OpClass.INJECTIVE
REDUCTION, ANCHOR, OPAQUE = OpClass.REDUCTION, OpClass.ANCHOR, OpClass.OPAQUE


def last(gm: GraphModule) -> OpClass:
    """The class of the last operation."""
    return classify(RuleContext(gm))[-2]


def called(target: Any, *args: Any, **kwargs: Any) -> OpClass:
    """The class of one call on an input `x`, a method if the target is a name."""
    graph = Graph()
    x = graph.placeholder("x")
    given = [x if a == "x" else a for a in args or ("x",)]
    op = "call_method" if isinstance(target, str) else "call_function"
    graph.output(graph.create_node(op, target, tuple(given), kwargs))
    return last(GraphModule(nn.Module(), graph))


@pytest.mark.parametrize("target", [aten.relu.default, aten.relu, torch.relu, F.relu, "relu"])
def test_one_operation_in_every_spelling(target: Any) -> None:
    assert called(target) is ELEMENTWISE


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.rsub.Tensor, ELEMENTWISE),
        (operator.truediv, ELEMENTWISE),
        (operator.gt, ELEMENTWISE),
        ("__radd__", ELEMENTWISE),
        ("float", ELEMENTWISE),
        (F.logsigmoid, ELEMENTWISE),
        (aten._native_batch_norm_legit_no_training.default, ELEMENTWISE),
        (torch.ops.prims.add.default, ELEMENTWISE),
        ("expand", BROADCAST),
        (torch.outer, BROADCAST),
        (aten.view.default, INJECTIVE),
        (torch.cat, INJECTIVE),
        (F.embedding, INJECTIVE),
        (aten.split.Tensor, INJECTIVE),
        (operator.getitem, INJECTIVE),
        (aten.sum.dim_IntList, REDUCTION),
        ("mean", REDUCTION),
        (F.softmax, REDUCTION),
        (aten.native_layer_norm.default, REDUCTION),
        (F.max_pool2d, REDUCTION),
        (aten.addmm.default, ANCHOR),
        (operator.matmul, ANCHOR),
        (F.linear, ANCHOR),
        (aten.conv2d.default, ANCHOR),
        (torch.einsum, ANCHOR),
        (F.scaled_dot_product_attention, ANCHOR),
        (aten._scaled_dot_product_flash_attention.default, ANCHOR),
        (aten.topk.default, OPAQUE),
        (aten.cumsum.default, OPAQUE),
        (aten.add_.Tensor, OPAQUE),
        ("size", OPAQUE),
        (print, OPAQUE),
        (len, OPAQUE),
    ],
)
def test_targets(target: Any, expected: OpClass) -> None:
    two = target in (
        operator.truediv,
        operator.gt,
        operator.matmul,
        operator.getitem,
        torch.outer,
        "__radd__",
    )
    assert called(target, "x", *([2] if target is operator.getitem else ["x"] if two else [])) is expected


def test_max_is_a_reduction_of_one_and_elementwise_of_two() -> None:
    assert called(torch.max, "x") is REDUCTION
    assert called(torch.max, "x", 1) is REDUCTION
    assert called(torch.max, "x", "x") is ELEMENTWISE
    assert called(aten.max.other, "x", "x") is ELEMENTWISE
    assert called(aten.max.dim, "x", 1) is REDUCTION


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(4, 4), ANCHOR),
        (nn.Conv2d(4, 4, 1), ANCHOR),
        (nn.LeakyReLU(), ELEMENTWISE),
        (nn.GELU(), ELEMENTWISE),
        (nn.Identity(), ELEMENTWISE),
        (nn.Dropout(), ELEMENTWISE),
        (nn.Flatten(), INJECTIVE),
        (nn.LayerNorm(4), REDUCTION),
        (nn.RMSNorm(4), REDUCTION),
        (nn.AdaptiveAvgPool2d(1), REDUCTION),
        (nn.Softmax(-1), REDUCTION),
        (nn.BatchNorm2d(4), OPAQUE),
        (nn.ReLU(inplace=True), OPAQUE),
        (nn.Dropout2d(), OPAQUE),
        (nn.LSTM(4, 4), OPAQUE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_leaf_modules(module: nn.Module, expected: OpClass) -> None:
    assert last(symbolic_trace(nn.Sequential(module))) is expected


def test_a_module_of_the_users_is_opaque() -> None:
    class Leaf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    graph = Graph()
    graph.output(graph.call_module("leaf", (graph.placeholder("x"),)))
    root = nn.Module()
    root.leaf = Leaf()
    assert last(GraphModule(root, graph)) is OPAQUE


def test_shapes_tell_elementwise_from_broadcast() -> None:
    assert last(captured(lambda x, y: x * y, (4, 4), (4, 4))[0]) is ELEMENTWISE
    assert last(captured(lambda x, y: x * y, (4, 4), (4,))[0]) is BROADCAST
    assert last(captured(lambda x: x * 2, (4, 4))[0]) is ELEMENTWISE
    assert last(trace(lambda x, y: x * y)) is ELEMENTWISE


def test_symbolic_sizes_are_compared_and_not_settled() -> None:
    batch = torch.export.Dim("batch")
    shapes = {"x": {0: batch}, "y": {0: batch}}

    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.relu(x + y)

    gm = dovetail.capture(Sum(), (torch.randn(4, 3), torch.randn(4, 3)), dynamic_shapes=shapes)
    before = dovetail.text(gm)
    assert last(gm) is ELEMENTWISE
    assert dovetail.text(gm) == before
    assert gm(torch.randn(7, 3), torch.randn(7, 3)).shape == (7, 3)


def test_what_draws_is_opaque_unless_it_draws_for_each_element() -> None:
    assert called(aten.dropout.default, "x", 0.5, True) is ELEMENTWISE
    assert called(aten.native_dropout.default, "x", 0.5, True) is ELEMENTWISE
    assert called(aten.bernoulli.p, "x", 0.5) is ELEMENTWISE
    assert called(aten.multinomial.default, "x", 2) is OPAQUE
    assert called(aten.rand_like.default, "x") is OPAQUE
    assert called(F.scaled_dot_product_attention, "x", "x", "x", dropout_p=0.5) is OPAQUE
    assert called(F.scaled_dot_product_attention, "x", "x", "x", dropout_p=0.0) is ANCHOR


def test_a_custom_operator_by_its_own_tags() -> None:
    library = torch.library.Library("dovetail_test_classes", "DEF")
    library.define("twice(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    library.define("sum(Tensor x) -> Tensor")
    ops = torch.ops.dovetail_test_classes
    assert called(ops.twice.default) is ELEMENTWISE
    assert called(ops.sum.default) is OPAQUE
    library._destroy()


def test_sizes_and_what_is_no_operation_are_opaque() -> None:
    gm = trace(lambda x: x.view(x.shape[0] * 2, -1))
    assert [c.name for c in classify(RuleContext(gm))] == [
        "OPAQUE",
        "OPAQUE",
        "OPAQUE",
        "ELEMENTWISE",
        "INJECTIVE",
        "OPAQUE",
    ]


def test_what_picks_by_a_mask_is_opaque() -> None:
    gm, _ = captured(lambda x: x[torch.tensor([1, 0])], (4, 4))
    assert last(gm) is INJECTIVE
    graph = Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    mask.meta["val"] = torch.ones(4, dtype=torch.bool)
    graph.output(graph.call_function(aten.index.Tensor, (x, [mask])))
    assert last(GraphModule(nn.Module(), graph)) is OPAQUE
    assert called(aten.nonzero.default) is OPAQUE
    assert called(aten.repeat_interleave.Tensor) is OPAQUE


def test_parts_of_a_tuple_have_the_class_of_what_produced_it() -> None:
    gm, _ = captured(lambda x: x.max(1).values, (4, 4))
    assert classify(RuleContext(gm))[1:3] == [REDUCTION, REDUCTION]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: torch.relu(x) * w, ELEMENTWISE),
        (lambda x, w: torch.relu(x) * w[0], INJECTIVE),
        (lambda x, w: torch.exp(x).sum(0, keepdim=True) + w, REDUCTION),
        (lambda x, w: torch.relu(x @ w.t()) + w, ANCHOR),
        (lambda x, w: (x @ w).t(), OPAQUE),
        (lambda x, w: (x @ w) @ w, OPAQUE),
        (lambda x, w: torch.softmax(x @ w, -1), OPAQUE),
        (lambda x, w: (x @ w, torch.relu(x)), OPAQUE),
        (lambda x, w: x.cumsum(0) + w, OPAQUE),
    ],
)
def test_a_region_has_the_class_of_its_body(function: Callable[..., Any], expected: OpClass) -> None:
    gm, _ = captured(function, (4, 4), (4, 4))
    inside = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    new = dovetail.outline(gm, inside, kind="all", escapes="output")
    (region,) = dovetail.regions(new)
    assert classify_body(region.body) is expected
    context = RuleContext(new)
    assert classify(context)[context.index.names["all_0"]] is expected


def test_a_region_that_writes_is_opaque() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        return y

    gm = trace(function)
    new = dovetail.outline(gm, ["mul", "add_"], kind="writes", escapes="output")
    context = RuleContext(new)
    assert classify(context)[context.index.names["writes_0"]] is OPAQUE


def test_classes_are_ordered_and_spoken() -> None:
    assert sorted(OpClass) == [ELEMENTWISE, BROADCAST, INJECTIVE, REDUCTION, ANCHOR, OPAQUE]
    assert [c.description for c in OpClass] == [
        "elementwise",
        "a broadcast",
        "a rearrangement of elements",
        "a reduction",
        "a matrix product, convolution or attention",
        "of no kind that is fused",
    ]


def test_models_leave_little_opaque() -> None:
    expected = {"aten.topk.default", "aten.scatter.value", "aten.copy_.default"}
    for name in ("llama", "bert", "moe"):
        context = RuleContext(zoo_graph(name))
        opaque = {
            str(node.target)
            for node, op_class in zip(context.nodes, classify(context), strict=True)
            if node.op == "call_function" and node.target is not operator.getitem and op_class is OPAQUE
        }
        assert opaque <= expected
