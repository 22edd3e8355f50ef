"""The small graphs of the design, from grouping to capabilities: before, after, values; beside each its twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule, Node

import dovetail
from dovetail import rules
from tests.outlining.helpers import equal, run

X, Y = torch.randn(4, 4), torch.randn(4, 4)
W = torch.randn(4, 4)


def fused(function: Any, inputs: tuple[Any, ...], by: Any, **options: Any) -> GraphModule:
    """Capture and fuse, and prove that values, the input graph and the way back are as they should be."""
    gm = function if isinstance(function, GraphModule) else dovetail.capture(function, inputs)
    before = dovetail.text(gm)
    new = dovetail.fuse(gm, by, **options)
    assert dovetail.text(gm) == before
    dovetail.check(new)
    assert equal(run(new, *inputs), run(gm, *inputs))
    assert dovetail.text(dovetail.inline(new)) == before
    again = dovetail.fuse(new, by, **options)
    assert dovetail.text(again) == dovetail.text(new)
    return new


def groups_of(gm: GraphModule, kind: str | None = None) -> list[str]:
    """The operations of each region, by name without numbers."""
    return sorted(", ".join(_without_number(n) for n in r.nodes) for r in dovetail.regions(gm, kind=kind))


def _without_number(name: str) -> str:
    return name.rstrip("0123456789").rstrip("_") if name.rpartition("_")[2].isdigit() else name


def grouped(function: Callable[..., Any], *inputs: Any) -> list[str]:
    return groups_of(fused(function, inputs, rules.groups()))


# 13


def test_elementwise_and_injective_operations_are_one_group() -> None:
    assert grouped(lambda x, y: torch.exp(x + y).unsqueeze(0).squeeze(0).t(), X, Y) != []
    assert grouped(lambda x, y: torch.squeeze(torch.exp(x + y), 0), X[:1], Y[:1]) == ["add, exp, squeeze"]


def test_nothing_joins_an_anchor_from_above() -> None:
    gm = fused(lambda x, w: torch.mm(torch.relu(x), w), (X, W), rules.groups())
    assert groups_of(gm) == []
    assert any("is a matrix product: what it reads" in d.reason for d in dovetail.explain(gm).declined)


def test_a_transpose_is_no_epilogue_of_a_product() -> None:
    groups = grouped(lambda x, w: torch.relu(torch.mm(x, w).transpose(0, 1)).exp(), X, W)
    assert groups == ["transpose, relu, exp"]


def test_a_reduction_takes_its_producers_and_nothing_after_it() -> None:
    assert grouped(lambda x: -torch.log(torch.exp(x).sum(-1)), X) == ["exp, sum", "log, neg"]


# 14


def test_convolutions_take_what_follows_them() -> None:
    image, kernel = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)

    def model(x, a, b, c):
        y = F.conv2d(x + 1, a, padding=1)
        y = y + (1 + y)
        return F.conv2d(y, b, padding=1) + F.conv2d(y, c, padding=1)

    groups = grouped(model, image, kernel, kernel * 2, kernel * 3)
    assert groups == ["conv2d, add", "conv2d, add, add"]


# 15


def test_a_diamond_is_one_group_also_when_nested() -> None:
    def diamond(x, w):
        y = torch.mm(x, w)
        return torch.relu(y) + torch.tanh(y)

    assert grouped(diamond, X, W) == ["mm, relu, tanh, add"]

    def nested(x, w):
        y = torch.mm(x, w)
        z = torch.relu(y)
        return (torch.exp(z) + torch.neg(z)) + torch.tanh(y)

    assert len(grouped(nested, X, W)) == 1


def test_what_two_products_share_stays_alone() -> None:
    def shared(x, a, b):
        y = torch.relu(x)
        return torch.mm(y, a), torch.mm(y, b)

    assert grouped(shared, X, W, Y) == []


# 16


def by_hand(x):
    powers = torch.exp(x - x.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True)


def test_a_softmax_by_hand_is_pieces_by_groups_and_one_by_pattern() -> None:
    assert grouped(by_hand, X) == ["sub, exp"]
    whole = fused(by_hand, (X,), rules.library.ALL["softmax"])
    assert groups_of(whole, "softmax") == ["amax, sub, exp, sum, div"]
    both = fused(by_hand, (X,), rules.DEFAULT)
    assert groups_of(both, "softmax") == ["amax, sub, exp, sum, div"]


def test_what_is_divided_by_another_sum_is_no_softmax() -> None:
    def wrong(x):
        powers = torch.exp(x - x.amax(-1, keepdim=True))
        return powers / x.sum(-1, keepdim=True)

    gm = fused(wrong, (X,), rules.library.ALL["softmax"])
    assert groups_of(gm) == []
    (declined,) = dovetail.explain(gm).declined
    assert 0 < declined.matched <= declined.wanted


# 17


def test_three_residual_blocks_share_one_body() -> None:
    def blocks(x, a, b, c, bias):
        for weight in (a, b, c):
            x = torch.relu(torch.mm(x, weight) + bias) + x
        return x

    gm = fused(blocks, (X, W, W * 2, W * 3, torch.randn(4)), rules.groups())
    assert groups_of(gm) == ["mm, add, relu, add"] * 3
    assert len({id(r.body) for r in dovetail.regions(gm)}) == 1


# 18


def arithmetic(kind: str = "npu.arithmetic") -> Any:
    return rules.capability(["add", "sub", "mul"], kind=kind)


def test_a_capability_region_goes_around_what_is_not_taken() -> None:
    def apart(a, b):
        c = a + b
        d = a @ b
        e = a - c
        f = b @ a
        return d * e, f

    assert groups_of(fused(apart, (X, Y), arithmetic())) == ["add, sub, mul"]


def test_a_capability_region_never_depends_on_itself() -> None:
    def around(a, b):
        c = a + b
        d = c @ b
        e = a - c
        return d * e

    gm = fused(around, (X, Y), rules.capability(["add", "sub", "mul"], kind="npu.arithmetic", min_size=1))
    assert len(dovetail.regions(gm)) == 2


# 19


def relisted(gm: GraphModule) -> GraphModule:
    """The same graph, listed last-ready-first, the operands of sums swapped, every node renamed."""
    graph, copies = Graph(), {}
    left = [n for n in gm.graph.nodes if n.op != "output"]
    while left:
        ready = [n for n in left if all(i in copies for i in n.all_input_nodes)]
        node = ready[0] if ready[0].op == "placeholder" else ready[-1]
        args = node.args
        if node.target is torch.ops.aten.add.Tensor and all(isinstance(a, Node) for a in args[:2]):
            args = (args[1], args[0], *args[2:])
        new = graph.create_node(
            node.op,
            node.target,
            torch.fx.node.map_arg(args, copies.__getitem__),
            torch.fx.node.map_arg(node.kwargs, copies.__getitem__),
            name=f"renamed_{len(copies)}" if node.op != "placeholder" else node.name,
        )
        new.meta = {**node.meta, "was": node.name}
        copies[node] = new
        left.remove(node)
    graph.node_copy(gm.graph.output_node(), copies.__getitem__)
    return GraphModule(gm, graph)


def members(gm: GraphModule, by: Any) -> list[tuple[str, tuple[str, ...]]]:
    new = dovetail.fuse(gm, by)
    was = {n.name: n.meta.get("was", n.name) for n in gm.graph.nodes}
    return sorted((r.kind, tuple(sorted(was[n] for n in r.nodes))) for r in dovetail.regions(new))


@pytest.mark.parametrize("by", ["groups", "arithmetic", "siblings", "pattern"])
def test_listing_names_and_operand_order_do_not_matter(by: str) -> None:
    @dovetail.rule(kind="sum_relu")
    def sum_relu(x, y):
        return torch.relu(x + y)

    chosen: dict[str, Any] = {
        "groups": rules.groups(),
        "arithmetic": arithmetic(),
        "siblings": rules.siblings(),
        "pattern": sum_relu,
    }

    def model(x, a, b):
        left, right = torch.mm(x, a), torch.mm(x, b)
        total = torch.relu(left + right)
        other = torch.relu(right + left * 2)
        return torch.tanh(total + other) + left, (total - other).sum(-1)

    gm = dovetail.capture(model, (X, W, Y))
    assert members(gm, chosen[by]) == members(relisted(gm), chosen[by])
    assert members(gm, chosen[by])


# 20


def test_a_cheap_producer_is_cloned_and_a_dear_one_is_not() -> None:
    def cheap(x, w):
        y = torch.relu(x)
        return torch.mm(y, w), torch.exp(y + 1)

    (region,) = dovetail.regions(fused(cheap, (X, W), rules.groups()))
    assert set(region.nodes) == {"relu", "add", "exp"}
    assert region.escapes["relu"].policy == "duplicate"

    def dear(x, y, z, w):
        value = torch.addcmul(x, y, z)
        return torch.mm(value, w), torch.exp(value + 1)

    (region,) = dovetail.regions(fused(dear, (X, Y, X * 2, W), rules.groups()))
    assert set(region.nodes) == {"add", "exp"}


# 22


def test_the_wider_match_wins_whatever_the_order_of_rules() -> None:
    @dovetail.rule(kind="conv_relu")
    def conv_relu(x, weight):
        return F.relu(F.conv2d(x, weight))

    @dovetail.rule(kind="conv")
    def conv(x, weight):
        return F.conv2d(x, weight)

    def model(x, a, b):
        return F.relu(F.conv2d(F.relu(F.conv2d(x, a)), b))

    inputs = (torch.randn(1, 2, 7, 7), torch.randn(2, 2, 3, 3), torch.randn(2, 2, 3, 3))
    for by in ([conv_relu, conv], [conv, conv_relu]):
        assert [r.kind for r in dovetail.regions(fused(model, inputs, by))] == ["conv_relu"] * 2
        first = fused(model, inputs, by, priorities={"conv": 1})
        assert [r.kind for r in dovetail.regions(first)] == ["conv"] * 2


# 23


@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_a_match_that_depends_on_itself_is_refused_with_the_path(length: int) -> None:
    @dovetail.rule(kind="mm_relu_add")
    def mm_relu_add(x, w, y):
        return torch.relu(torch.mm(x, w)) + y

    def model(x, w):
        product = other = torch.mm(x, w)
        for _ in range(length):
            other = F.gelu(other)
        return torch.relu(product) + other

    gm = fused(model, (X, W), mm_relu_add)
    assert dovetail.regions(gm) == []
    (declined,) = [d for d in dovetail.explain(gm).declined if d.rule == "mm_relu_add"]
    assert "mm -> gelu" in declined.reason
    assert declined.reason.rstrip(".").endswith("add") or "-> add" in declined.reason


# 25


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_norm_of_dropout_and_residual_is_one_match(training: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.norm, self.dropout = (
                nn.Parameter(torch.randn(4)),
                nn.LayerNorm(4),
                nn.Dropout(0.3),
            )

        def forward(self, x, residual):
            return self.norm(self.dropout(x + self.bias) + residual)

    gm = dovetail.capture(Block().train(training), (X, Y))
    new = fused(gm, (X, Y), rules.library.ALL)
    (region,) = dovetail.regions(new)
    assert region.kind == "dropout_add_layer_norm"


# 27 and 28


def test_projections_each_with_a_permute_are_three_siblings_in_order() -> None:
    def qkv(x, q, k, v):
        return tuple(F.linear(x, w).reshape(2, 4, 2, 2).permute(0, 2, 1, 3) for w in (q, k, v))

    inputs = (torch.randn(2, 4, 4), *(torch.randn(4, 4) for _ in range(3)))
    new = fused(qkv, inputs, rules.siblings(["linear"], kind="qkv", follow=True))
    (region,) = dovetail.regions(new)
    assert [n for n in region.nodes if n.startswith("permute")] == ["permute", "permute_1", "permute_2"]
    merged = dovetail.MergeParallel()(dovetail.capture(qkv, inputs))
    targets = [str(n.target) for n in merged.graph.nodes if n.op == "call_function"]
    assert sum("linear" in t for t in targets) == 1
    for a, b in zip(merged(*inputs), qkv(*inputs), strict=True):
        torch.testing.assert_close(a, b)


# 29


def test_two_capabilities_do_not_touch_each_others_operations() -> None:
    def model(x, y):
        a = torch.relu(x + y)
        b = F.gelu(F.gelu(a))
        return torch.relu(b - y) + F.gelu(y)

    one = rules.capability(["add", "sub", "relu"], kind="one.arithmetic")
    two = rules.capability(["gelu"], kind="two.gelu", min_size=1)
    for by in ([one, two], [two, one]):
        new = fused(model, (X, Y), by)
        assert groups_of(new, "one.arithmetic") == ["add, relu", "sub, relu, add"]
        assert groups_of(new, "two.gelu") == ["gelu", "gelu, gelu"]
