"""What MergeParallel leaves alone, and the reason it gives; each beside what it would have merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import dovetail
from dovetail.errors import PassError
from dovetail.passes.merge_parallel.merge_parallel import MergeParallel
from dovetail.passes.merge_parallel.merge_plan import Branch, pays
from dovetail.rules.rule import Decline
from tests.texts import assert_text

from .helpers import applied, aten, called, captured, drawn, gradients, left_alone
from .models import IMAGE, QKV, Branches, X


class Two(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers])


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (
            nn.Conv2d(4, 2, 1),
            nn.Conv2d(4, 2, 1, stride=2),
            "stride: it differs from 'conv2d_1': (1, 1) and (2, 2)",
        ),
        (nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1, padding=1), "padding: it differs"),
        (nn.Conv2d(4, 2, 3), nn.Conv2d(4, 2, 3, dilation=2), "dilation: it differs"),
        (nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1, groups=2), "it has 2 groups"),
    ],
)
def test_convolutions_that_differ(first: nn.Module, second: nn.Module, reason: str) -> None:
    x = torch.randn(2, 4, 6, 6)
    assert reason in left_alone(MergeParallel(), captured(Two(first, second), x))


def test_products_of_different_values_are_no_siblings() -> None:
    class Apart(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x).sum() + self.layers[1](x.sin()).sum()

    gm = captured(Apart(nn.Linear(4, 2), nn.Linear(4, 2)), X)
    assert MergeParallel()(gm) is gm
    assert MergeParallel().explain(gm) == ()


def test_frozen_weights_are_not_joined_with_trained_ones() -> None:
    model = Two(nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2))
    model.layers[1].requires_grad_(False)
    gm = captured(model, X)
    taken, left = MergeParallel().explain(gm)
    assert taken.nodes == ("linear", "linear_2")
    assert "training of the weight: it differs from 'linear'" in left.reason
    new = applied(MergeParallel(), gm, X)
    torch.testing.assert_close(gradients(new, [X]), gradients(gm, [X]))
    assert MergeParallel(materialise=True).explain(gm)[0].nodes == ("linear", "linear_1", "linear_2")


def test_weights_used_elsewhere_and_products_that_are_equal() -> None:
    class Tied(nn.Module):
        def __init__(self, tie: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            if tie:
                self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sin() + self.b(x).cos() + self.a.weight.sum()

    gm = captured(Tied(tie=False), X)
    new = applied(MergeParallel(), gm, X)
    torch.testing.assert_close(gradients(new, [X]), gradients(gm, [X]))
    reasons = left_alone(MergeParallel(), captured(Tied(tie=True), X))
    assert "it computes the same as 'linear', and Cleanup makes them one" in reasons


def test_a_computed_weight_is_no_weight() -> None:
    reasons = left_alone(
        MergeParallel(), captured(lambda x: (x @ x.sin()).sum() + (x @ x.cos()).sum(), torch.randn(3, 3))
    )
    assert reasons == "its weight is computed, not a parameter; its weight is computed, not a parameter"


def test_without_values_nothing_is_merged() -> None:
    def draw(g: Graph) -> Any:
        x = g.placeholder("x")
        a, b = (g.call_function(aten.mm.default, (x, g.get_attr(w))) for w in ("w0", "w1"))
        return (a, b)

    gm = drawn(draw, w0=torch.randn(4, 5), w1=torch.randn(4, 5))
    assert "the shapes are not known" in left_alone(MergeParallel(), gm)


def test_a_write_or_a_switch_between_the_products_keeps_them_apart() -> None:
    def draw(g: Graph, way: str) -> Any:
        x = g.placeholder("x")
        weights = [g.get_attr(w) for w in ("w0", "w1")]
        a = g.call_function(aten.mm.default, (x, weights[0]))
        if way == "value":
            g.call_function(aten.add_.Tensor, (x, 1.0))
        elif way == "weight":
            g.call_function(aten.add_.Tensor, (weights[1], 1.0))
        elif way == "mode":
            g.call_function(torch._C._set_grad_enabled, (False,))
        b = g.call_function(aten.mm.default, (x, weights[1]))
        if way == "mode":
            g.call_function(torch._C._set_grad_enabled, (True,))
        if way == "later":
            g.call_function(aten.add_.Tensor, (x, 1.0))
        return (g.call_function(aten.sin.default, (a,)), g.call_function(aten.cos.default, (b,)))

    x, weights = torch.randn(3, 4), {"w0": torch.randn(4, 5), "w1": torch.randn(4, 5)}
    for way in ("value", "weight", "mode"):
        gm = drawn(lambda g, way=way: draw(g, way), x, **weights)
        reasons = left_alone(MergeParallel(), gm)
        assert "memory is written or a mode is switched between it and 'mm_default'" in reasons
        if way == "value":
            assert_text(
                gm,
                """
                graph:
                  %x: f32[3, 4] = input
                  %w0: f32[4, 5] = buffer w0
                  %w1: f32[4, 5] = buffer w1
                  %mm_default: f32[3, 5] = aten.mm.default(%x, %w0)
                  %add__tensor: f32[3, 4] = aten.add_.Tensor(%x, 1.0)
                  %mm_default_1: f32[3, 5] = aten.mm.default(%x, %w1)
                  %sin_default: f32[3, 5] = aten.sin.default(%mm_default)
                  %cos_default: f32[3, 5] = aten.cos.default(%mm_default_1)
                  return (%sin_default, %cos_default)
            """,
            )
    later = drawn(lambda g: draw(g, "later"), x, **weights)
    assert_text(
        applied(MergeParallel(), later, x),
        """
        graph:
          %x: f32[3, 4] = input
          %w0: f32[4, 5] = buffer w0
          %w1: f32[4, 5] = buffer w1
          %merged_mm_weight_0: f32[4, 10] = aten.cat.default([%w0, %w1], 1)
          %merged_mm_0: f32[3, 10] = aten.mm.default(%x, %merged_mm_weight_0)
          %merged_split_0: (f32[3, 5], f32[3, 5]) = aten.split_with_sizes.default(%merged_mm_0, [5, 5], 1)
          %mm_default: f32[3, 5] = operator.getitem(%merged_split_0, 0)
          %mm_default_1: f32[3, 5] = operator.getitem(%merged_split_0, 1)
          %add__tensor: f32[3, 4] = aten.add_.Tensor(%x, 1.0)
          %sin_default: f32[3, 5] = aten.sin.default(%mm_default)
          %cos_default: f32[3, 5] = aten.cos.default(%mm_default_1)
          return (%sin_default, %cos_default)
    """,
    )


def test_min_branches() -> None:
    gm = captured(QKV(), X)
    assert MergeParallel(min_branches=3)(gm) is not gm
    assert "3 such products read this value, and the minimum is 4" in left_alone(
        MergeParallel(min_branches=4), gm
    )


def test_a_guard_sees_the_sizes_and_declines_with_a_reason() -> None:
    seen: list[Sequence[Branch]] = []

    def wide(branches: Sequence[Branch]) -> Decline | None:
        seen.append(branches)
        return Decline("too wide") if sum(b.width for b in branches) > 15 else None

    gm = captured(QKV(), X)
    assert left_alone(MergeParallel(guard=wide), gm) == "too wide"
    assert [(b.name, b.rows, b.depth, b.width) for b in seen[0]] == [
        ("linear", 6, 4, 8),
        ("linear_1", 6, 4, 4),
        ("linear_2", 6, 4, 4),
    ]
    image = captured(Branches(), IMAGE)
    MergeParallel(guard=wide)(image)
    assert [(b.rows, b.depth, b.width) for b in seen[-1]] == [(50, 3, 2), (50, 3, 3), (50, 3, 5)]


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        (lambda b: b.nothing, "has a guard that raised on linear, linear_1"),
        (lambda b: False, "returned False"),
    ],
)
def test_a_guard_that_fails_is_an_error(guard: Any, words: str) -> None:
    gm = captured(QKV(), X)
    before = dovetail.text(gm)
    with pytest.raises(PassError, match=words):
        MergeParallel(guard=guard)(gm)
    assert dovetail.text(gm) == before


def branch(rows: int | None, depth: int | None, width: int, *, joined: int = 0) -> Branch:
    sizes = (rows, depth, width, torch.float32, torch.device("cpu"))
    return Branch("a", "aten.linear.default", *sizes, weight_bytes=joined, each_call=bool(joined))


def test_the_default_guard_declines_what_is_large_by_itself() -> None:
    assert pays([branch(512, 2048, 2048), branch(512, 2048, 512)]) is None
    assert pays([branch(1 << 20, 64, 64), branch(1 << 20, 64, 64)]) is None
    assert pays([branch(None, 4096, 4096), branch(1 << 20, 4096, 4096)]) is None
    assert pays([branch(16384, 4096, 4096), branch(16384, 4096, 64)]) is None
    declined = pays([branch(16384, 4096, 4096), branch(16384, 4096, 1024)])
    assert declined is not None
    assert "large enough by itself" in declined.reason


def test_the_default_guard_declines_what_costs_more_to_join_than_it_saves() -> None:
    assert pays([branch(16, 2048, 2048, joined=8 << 20), branch(16, 2048, 2048, joined=8 << 20)]) is None
    declined = pays([branch(16, 2048, 5632, joined=23 << 20), branch(16, 2048, 5632, joined=23 << 20)])
    assert declined is not None
    assert "joining 46 MiB of weights at each call" in declined.reason
    large = captured(Two(nn.Linear(2048, 1024), nn.Linear(2048, 1536)), torch.randn(1, 2048))
    assert "materialise=True joins them once" in left_alone(MergeParallel(), large)
    assert MergeParallel(materialise=True)(large) is not large
    assert MergeParallel(guard=None)(large) is not large


def test_fuel_stops_after_so_many() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(QKV() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([block(x * (i + 1.0)) for i, block in enumerate(self.blocks)])

    gm = captured(Deep(), X)
    for fuel in (0, 1, 2, 3):
        new = MergeParallel(fuel=fuel)(gm)
        assert called(new).count("split_with_sizes") == fuel
        torch.testing.assert_close(new(X), gm(X))
    reasons = [f.reason for f in MergeParallel(fuel=2).explain(gm)]
    assert reasons == ["", "", "the fuel of 2 is spent"]
