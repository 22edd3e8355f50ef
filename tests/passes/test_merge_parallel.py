"""MergeParallel: sibling products before and after, and the twins that must be left alone, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

import dovetail
from dovetail.passes.merge_parallel.merge_parallel import MergeParallel
from tests.texts import assert_text

from .helpers import applied, aten, called, captured, drawn, gradients, node
from .models import IMAGE, QKV, Branches, X


def test_q_k_and_v_become_one_product_and_three_slices() -> None:
    gm = captured(QKV(bias=False), X)
    assert_text(
        gm,
        """
        graph:
          %x: f32[2, 3, 4] = input
          %q_weight: f32[8, 4] = param q.weight
          %k_weight: f32[4, 4] = param k.weight
          %v_weight: f32[4, 4] = param v.weight
          %linear: f32[2, 3, 8] = aten.linear.default(%x, %q_weight, None)
          %permute: f32[3, 2, 8] = aten.permute.default(%linear, [1, 0, 2])
          %linear_1: f32[2, 3, 4] = aten.linear.default(%x, %k_weight, None)
          %permute_1: f32[3, 2, 4] = aten.permute.default(%linear_1, [1, 0, 2])
          %linear_2: f32[2, 3, 4] = aten.linear.default(%x, %v_weight, None)
          %permute_2: f32[3, 2, 4] = aten.permute.default(%linear_2, [1, 0, 2])
          %sin: f32[3, 2, 8] = aten.sin.default(%permute)
          %mul: f32[3, 2, 4] = aten.mul.Tensor(%permute_1, %permute_2)
          %cos: f32[3, 2, 4] = aten.cos.default(%mul)
          %cat: f32[3, 2, 12] = aten.cat.default([%sin, %cos], 2)
          return (%cat,)
    """,
    )
    assert_text(
        applied(MergeParallel(), gm, X),
        """
        graph:
          %x: f32[2, 3, 4] = input
          %q_weight: f32[8, 4] = param q.weight
          %k_weight: f32[4, 4] = param k.weight
          %v_weight: f32[4, 4] = param v.weight
          %merged_linear_weight_0: f32[16, 4] = aten.cat.default([%q_weight, %k_weight, %v_weight], 0)
          %merged_linear_0: f32[2, 3, 16] = aten.linear.default(%x, %merged_linear_weight_0, None)
          %merged_split_0: (f32[2, 3, 8], f32[2, 3, 4], f32[2, 3, 4]) = aten.split_with_sizes.default(%merged_linear_0, [8, 4, 4], 2)
          %linear: f32[2, 3, 8] = operator.getitem(%merged_split_0, 0)
          %linear_1: f32[2, 3, 4] = operator.getitem(%merged_split_0, 1)
          %linear_2: f32[2, 3, 4] = operator.getitem(%merged_split_0, 2)
          %permute: f32[3, 2, 8] = aten.permute.default(%linear, [1, 0, 2])
          %permute_1: f32[3, 2, 4] = aten.permute.default(%linear_1, [1, 0, 2])
          %permute_2: f32[3, 2, 4] = aten.permute.default(%linear_2, [1, 0, 2])
          %sin: f32[3, 2, 8] = aten.sin.default(%permute)
          %mul: f32[3, 2, 4] = aten.mul.Tensor(%permute_1, %permute_2)
          %cos: f32[3, 2, 4] = aten.cos.default(%mul)
          %cat: f32[3, 2, 12] = aten.cat.default([%sin, %cos], 2)
          return (%cat,)
    """,
    )
    assert [str(f) for f in MergeParallel().explain(gm)] == [
        "linear, linear_1, linear_2: 3 products become one"
    ]


def test_new_nodes_tell_where_they_come_from() -> None:
    new = MergeParallel()(captured(QKV(), X))
    joint = node(new, "merged_linear_0")
    assert "in forward" in joint.meta["stack_trace"]
    assert [path for path, _ in joint.meta["nn_module_stack"].values()] == [""]
    assert [path for path, _ in node(new, "linear_1").meta["nn_module_stack"].values()] == ["", "k"]
    assert node(new, "linear_1").meta["val"].stride() == (48, 16, 1)


def test_training_reaches_the_parameters_of_the_model() -> None:
    model = QKV()
    gm = captured(model, X)
    new = MergeParallel()(gm)
    assert dict(new.named_parameters()).keys() == dict(model.named_parameters()).keys()
    torch.testing.assert_close(gradients(new, [X]), gradients(gm, [X]))
    assert all(g is not None for g in gradients(new, [X]).values())
    with torch.no_grad():
        model.q.weight.zero_()
    torch.testing.assert_close(new(X), model(X))


def test_materialised_weights_are_joined_once() -> None:
    model = QKV()
    gm = captured(model, X)
    new = applied(MergeParallel(materialise=True), gm, X)
    assert "cat.default([%q_weight" not in dovetail.text(new)
    assert not any(n.op == "get_attr" and n.target == "q.weight" for n in new.graph.nodes)
    assert set(dict(new.named_buffers())) == {"merged_linear_weight_0", "merged_linear_bias_0"}
    assert list(new.state_dict()) == list(model.state_dict())
    assert new.to(torch.float64).get_buffer("merged_linear_weight_0").dtype is torch.float64
    new.to(torch.float32)
    # That moved the parameters, which are the model's own, there and back: they have other memory now.
    before = new(X)
    with torch.no_grad():
        model.q.weight.zero_()
    torch.testing.assert_close(new(X), model(X))
    assert not torch.equal(new(X), before)


def test_a_missing_bias_is_zero() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat((self.a(x).sin(), self.b(x).cos()), -1)

    gm = captured(Mixed(), X)
    new = applied(MergeParallel(), gm, X)
    assert called(new).count("zeros") == 1
    torch.testing.assert_close(gradients(new, [X]), gradients(gm, [X]))
    assert "zeros" not in called(applied(MergeParallel(materialise=True), gm, X))


# What follows the branches


def test_one_by_one_convolutions_merge_and_what_follows_them_does_too() -> None:
    gm = captured(Branches(), IMAGE)
    step = MergeParallel()
    new = applied(step, gm, IMAGE)
    assert called(gm).count("conv2d") == 4
    norm = "_native_batch_norm_legit_no_training"
    merged, alone = ["conv2d", norm, "relu", "split_with_sizes"], ["conv2d", norm, "relu"]
    assert [c for c in called(new) if c not in ("cat", "getitem")] == [*merged, *alone]
    assert node(new, "merged_relu_0").meta["val"].shape == (2, 2 + 3 + 5, 5, 5)
    taken, left = step.explain(gm)
    assert taken.nodes == ("conv2d", "conv2d_1", "conv2d_3")
    assert left.nodes == ("conv2d_2",)
    assert "sizes of the weight: it differs from 'conv2d': ('3', '3', '3') and ('3', '1', '1')" in left.reason
    torch.testing.assert_close(gradients(new, [IMAGE]), gradients(gm, [IMAGE]), rtol=1e-4, atol=1e-5)


def test_a_diamond_of_columnwise_operations_is_lifted_whole() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 3)
            self.scale = nn.ParameterList([torch.rand(2), torch.rand(3)])

        def forward(self, x: Tensor) -> Tensor:
            values = [self.a(x), self.b(x)]
            gated = [v * torch.sigmoid(v) for v in values]
            return torch.cat([(g * s + 1.0).sum(1) for g, s in zip(gated, self.scale, strict=True)], -1)

    gm = captured(Gated(), X)
    new = applied(MergeParallel(), gm, X)
    lifted = ["linear", "sigmoid", "mul", "mul", "add", "split_with_sizes"]
    assert [c for c in called(new) if c not in ("cat", "getitem")] == [*lifted, "sum", "sum"]
    torch.testing.assert_close(gradients(new, [X]), gradients(gm, [X]))


@pytest.mark.parametrize(
    ("first", "second", "lifted"),
    [
        (lambda y: y.relu(), lambda y: y.relu(), ["relu"]),
        (lambda y: y.relu(), lambda y: y.tanh(), []),
        (lambda y: y * 2.0, lambda y: y * 3.0, []),
        (lambda y: F.gelu(y), lambda y: F.gelu(y, approximate="tanh"), []),
        (lambda y: y.relu().sin(), lambda y: y.relu().cos(), ["relu"]),
        (lambda y: y.softmax(-1), lambda y: y.softmax(-1), []),
        (lambda y: y.softmax(1), lambda y: y.softmax(1), []),
    ],
)
def test_what_follows_is_lifted_while_it_is_the_same(first: Any, second: Any, lifted: list[str]) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat((first(self.a(x)).sum(1), second(self.b(x)).sum(1)), -1)

    new = applied(MergeParallel(), captured(Pair(), X), X)
    names = called(new)
    assert names[names.index("linear") + 1 : names.index("split_with_sizes")] == lifted


def test_a_shared_operand_that_spans_the_columns_is_used_once() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.cat(((self.a(x) * mask).sum(1), (self.b(x) * mask).sum(1)), -1)

    wide, narrow = torch.rand(2, 3, 1), torch.rand(1)
    for mask in (wide, narrow):
        new = applied(MergeParallel(), captured(Masked(), X, mask), X, mask)
        assert called(new).count("mul") == 1


# Where a slice must be memory of its own


def test_results_keep_their_strides_and_their_memory() -> None:
    class Returned(QKV):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return self.q(x), self.k(x).transpose(0, 1), self.v(x).relu()

    gm = captured(Returned(), X)
    new = applied(MergeParallel(), gm, X)
    want, got = gm(X), new(X)
    assert [t.stride() for t in got] == [t.stride() for t in want]
    assert len({t.untyped_storage()._cdata for t in got}) == 3
    assert called(new).count("clone") == 2  # relu makes memory of its own


def two_products(follow: Callable[[Graph, Node, Node], Any]) -> GraphModule:
    """Two products of one value, and what is done with them."""

    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        a, b = (g.call_function(aten.mm.default, (x, g.get_attr(w))) for w in ("w0", "w1"))
        return follow(g, a, b)

    return drawn(draw, ROWS, w0=torch.randn(4, 5), w1=torch.randn(4, 5))


ROWS = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_what_is_written_in_place_is_copied_first() -> None:
    def follow(g: Graph, a: Node, b: Node) -> Any:
        g.call_function(aten.relu_.default, (a,))
        return g.call_function(aten.sub.Tensor, (a, b))

    gm = two_products(follow)
    assert_text(
        gm,
        """
        graph:
          %x: f32[3, 4] = input
          %w0: f32[4, 5] = buffer w0
          %mm_default: f32[3, 5] = aten.mm.default(%x, %w0)
          %w1: f32[4, 5] = buffer w1
          %mm_default_1: f32[3, 5] = aten.mm.default(%x, %w1)
          %relu__default: f32[3, 5] = aten.relu_.default(%mm_default)
          %sub_tensor: f32[3, 5] = aten.sub.Tensor(%mm_default, %mm_default_1)
          return %sub_tensor
    """,
    )
    # What is only read needs no memory of its own.
    assert_text(
        applied(MergeParallel(), gm, ROWS),
        """
        graph:
          %x: f32[3, 4] = input
          %w0: f32[4, 5] = buffer w0
          %w1: f32[4, 5] = buffer w1
          %merged_mm_weight_0: f32[4, 10] = aten.cat.default([%w0, %w1], 1)
          %merged_mm_0: f32[3, 10] = aten.mm.default(%x, %merged_mm_weight_0)
          %merged_split_0: (f32[3, 5], f32[3, 5]) = aten.split_with_sizes.default(%merged_mm_0, [5, 5], 1)
          %merged_part_0: f32[3, 5] = operator.getitem(%merged_split_0, 0)
          %mm_default: f32[3, 5] = aten.clone.default(%merged_part_0, memory_format=contiguous_format)
          %mm_default_1: f32[3, 5] = operator.getitem(%merged_split_0, 1)
          %relu__default: f32[3, 5] = aten.relu_.default(%mm_default)
          %sub_tensor: f32[3, 5] = aten.sub.Tensor(%mm_default, %mm_default_1)
          return %sub_tensor
    """,
    )


def test_a_view_that_the_strides_do_not_allow_gets_a_copy() -> None:
    def follow(g: Graph, a: Node, b: Node) -> Any:
        flat = g.call_function(aten.view.default, (a, [15]))
        return (g.call_function(aten.sin.default, (flat,)), g.call_function(aten.cos.default, (b,)))

    gm = two_products(follow)
    assert_text(
        gm,
        """
        graph:
          %x: f32[3, 4] = input
          %w0: f32[4, 5] = buffer w0
          %mm_default: f32[3, 5] = aten.mm.default(%x, %w0)
          %w1: f32[4, 5] = buffer w1
          %mm_default_1: f32[3, 5] = aten.mm.default(%x, %w1)
          %view_default: f32[15] = aten.view.default(%mm_default, [15])
          %sin_default: f32[15] = aten.sin.default(%view_default)
          %cos_default: f32[3, 5] = aten.cos.default(%mm_default_1)
          return (%sin_default, %cos_default)
    """,
    )
    assert_text(
        applied(MergeParallel(), gm, ROWS),
        """
        graph:
          %x: f32[3, 4] = input
          %w0: f32[4, 5] = buffer w0
          %w1: f32[4, 5] = buffer w1
          %merged_mm_weight_0: f32[4, 10] = aten.cat.default([%w0, %w1], 1)
          %merged_mm_0: f32[3, 10] = aten.mm.default(%x, %merged_mm_weight_0)
          %merged_split_0: (f32[3, 5], f32[3, 5]) = aten.split_with_sizes.default(%merged_mm_0, [5, 5], 1)
          %merged_part_0: f32[3, 5] = operator.getitem(%merged_split_0, 0)
          %mm_default: f32[3, 5] = aten.clone.default(%merged_part_0, memory_format=contiguous_format)
          %mm_default_1: f32[3, 5] = operator.getitem(%merged_split_0, 1)
          %view_default: f32[15] = aten.view.default(%mm_default, [15])
          %sin_default: f32[15] = aten.sin.default(%view_default)
          %cos_default: f32[3, 5] = aten.cos.default(%mm_default_1)
          return (%sin_default, %cos_default)
    """,
    )


def test_regions_read_copies_and_keep_their_products() -> None:
    gm = captured(QKV(), X)
    inside = dovetail.outline(gm, ["linear", "permute"], kind="projection")
    new = applied(MergeParallel(), inside, X)
    assert [f.nodes for f in MergeParallel().explain(inside)] == [("linear_1", "linear_2")]
    after = dovetail.outline(gm, ["permute", "sin"], kind="tail")
    new = applied(MergeParallel(), after, X)
    assert node(new, "linear").target is aten.clone.default
    dovetail.check(dovetail.inline(new))
    torch.testing.assert_close(dovetail.inline(new)(X), gm(X))


# Other products


def test_products_by_matmul_and_addmm_and_through_a_transpose() -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        turned = [g.call_function(aten.t.default, (g.get_attr(w),)) for w in ("w0", "w1")]
        products = [
            g.call_function(aten.addmm.default, (g.get_attr(b), x, t))
            for b, t in zip(("b0", "b1"), turned, strict=True)
        ]
        products += [g.call_function(aten.matmul.default, (x, g.get_attr(m))) for m in ("m0", "m1")]
        return tuple(g.call_function(aten.sin.default, (y,)) for y in products)

    weights = {"w0": torch.randn(5, 4), "w1": torch.randn(6, 4), "b0": torch.randn(5), "b1": torch.randn(6)}
    weights |= {"m0": torch.randn(4, 2), "m1": torch.randn(4, 3)}
    gm = drawn(draw, ROWS, **{k: nn.Parameter(v) for k, v in weights.items()})
    assert_text(
        gm,
        """
        graph:
          %x: f32[3, 4] = input
          %w0: f32[5, 4] = param w0
          %t_default: f32[4, 5] = aten.t.default(%w0)
          %w1: f32[6, 4] = param w1
          %t_default_1: f32[4, 6] = aten.t.default(%w1)
          %b0: f32[5] = param b0
          %addmm_default: f32[3, 5] = aten.addmm.default(%b0, %x, %t_default)
          %b1: f32[6] = param b1
          %addmm_default_1: f32[3, 6] = aten.addmm.default(%b1, %x, %t_default_1)
          %m0: f32[4, 2] = param m0
          %matmul_default: f32[3, 2] = aten.matmul.default(%x, %m0)
          %m1: f32[4, 3] = param m1
          %matmul_default_1: f32[3, 3] = aten.matmul.default(%x, %m1)
          %sin_default: f32[3, 5] = aten.sin.default(%addmm_default)
          %sin_default_1: f32[3, 6] = aten.sin.default(%addmm_default_1)
          %sin_default_2: f32[3, 2] = aten.sin.default(%matmul_default)
          %sin_default_3: f32[3, 3] = aten.sin.default(%matmul_default_1)
          return (%sin_default, %sin_default_1, %sin_default_2, %sin_default_3)
    """,
    )
    # The weights are joined as they lie, and turned once.
    assert_text(
        applied(MergeParallel(), gm, ROWS),
        """
        graph:
          %x: f32[3, 4] = input
          %w0: f32[5, 4] = param w0
          %w1: f32[6, 4] = param w1
          %b0: f32[5] = param b0
          %merged_addmm_weight_0: f32[11, 4] = aten.cat.default([%w0, %w1], 0)
          %merged_addmm_turned_0: f32[4, 11] = aten.t.default(%merged_addmm_weight_0)
          %b1: f32[6] = param b1
          %merged_addmm_bias_0: f32[11] = aten.cat.default([%b0, %b1], 0)
          %merged_addmm_0: f32[3, 11] = aten.addmm.default(%merged_addmm_bias_0, %x, %merged_addmm_turned_0, beta=1, alpha=1)
          %merged_split_0: (f32[3, 5], f32[3, 6]) = aten.split_with_sizes.default(%merged_addmm_0, [5, 6], 1)
          %addmm_default: f32[3, 5] = operator.getitem(%merged_split_0, 0)
          %addmm_default_1: f32[3, 6] = operator.getitem(%merged_split_0, 1)
          %m0: f32[4, 2] = param m0
          %m1: f32[4, 3] = param m1
          %merged_matmul_weight_0: f32[4, 5] = aten.cat.default([%m0, %m1], 1)
          %merged_matmul_0: f32[3, 5] = aten.matmul.default(%x, %merged_matmul_weight_0)
          %merged_split_1: (f32[3, 2], f32[3, 3]) = aten.split_with_sizes.default(%merged_matmul_0, [2, 3], 1)
          %matmul_default: f32[3, 2] = operator.getitem(%merged_split_1, 0)
          %matmul_default_1: f32[3, 3] = operator.getitem(%merged_split_1, 1)
          %sin_default: f32[3, 5] = aten.sin.default(%addmm_default)
          %sin_default_1: f32[3, 6] = aten.sin.default(%addmm_default_1)
          %sin_default_2: f32[3, 2] = aten.sin.default(%matmul_default)
          %sin_default_3: f32[3, 3] = aten.sin.default(%matmul_default_1)
          return (%sin_default, %sin_default_1, %sin_default_2, %sin_default_3)
    """,
    )


def test_weights_that_are_inputs() -> None:
    gm = captured(
        lambda x, a, b: (x @ a).sin().sum() + (x @ b).cos().sum(), X, torch.ones(4, 2), torch.ones(4, 3)
    )
    new = applied(MergeParallel(materialise=True), gm, X, torch.ones(4, 2), torch.ones(4, 3))
    assert called(new)[:2] == ["cat", "matmul"]


@pytest.mark.parametrize("dims", [1, 3])
def test_convolutions_of_other_ranks(dims: int) -> None:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv(2, 3, 2, padding="same"), conv(2, 4, 2, padding="same")

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat((self.a(x).sin(), self.b(x).cos()), 1)

    x = torch.randn(2, 2, *[4] * dims)
    assert called(applied(MergeParallel(), captured(Pair(), x), x)).count(f"conv{dims}d") == 1
