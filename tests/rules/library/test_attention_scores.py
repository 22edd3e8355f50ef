"""Attention by the way of its scores: scales as tensors, biases scaled along, masks subtracted, sinks, shifted softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.rules.library import ATTENTION
from dovetail.rules.library.attention_variants import (
    attention_by_hand,
    attention_causal,
    attention_einsum,
    attention_of_batches,
    attention_of_columns,
    attention_with_sinks,
)
from tests.rules.library.helpers import candidates, graph_of, match_attrs, match_attrs_each, refused_each, why

B, H, G, S, D = 2, 4, 2, 6, 8
HEADS = tuple(torch.randn(B, H, S, D) for _ in range(3))
FLAT = tuple(torch.randn(B * H, S, D) for _ in range(3))
BIAS, SECOND, MASK = torch.randn(1, H, S, S), torch.randn(B, 1, S, S), torch.randn(B, 1, S, S)
HIDE = torch.rand(B, 1, S, S) > 0.6
SINKS = torch.randn(H)
SCALAR = torch.tensor(2.5)

Scores = Callable[..., Tensor]


def attend(
    scores: Scores, weights: Callable[[Tensor], Tensor] = lambda x: x.softmax(-1)
) -> Callable[..., Any]:
    return lambda q, k, v, *more: weights(scores(q, k, *more)) @ v


def arguments(rule: Any, function: Callable[..., Any], *inputs: Any) -> set[str]:
    (match,) = candidates(rule, graph_of(function, inputs))
    return set(match.arguments or {})


SCALED: dict[str, tuple[Scores, str]] = {
    "divided": (lambda q, k, s: q @ k.mT / s, "divisor"),
    "query divided": (lambda q, k, s: (q / s) @ k.mT, "divisor"),
    "keys divided": (lambda q, k, s: q @ (k.mT / s), "divisor"),
    "multiplied": (lambda q, k, s: (q @ k.mT) * s, "factor"),
    "query multiplied": (lambda q, k, s: (s * q) @ k.mT, "factor"),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_scalar_tensor_is_a_scale(name: str) -> None:
    scores, argument = SCALED[name]
    attrs = match_attrs(attention_by_hand, attend(scores), *HEADS, SCALAR)
    assert attrs["scale"] == 1.0
    assert arguments(attention_by_hand, attend(scores), *HEADS, SCALAR) == {"q", "k", "v", argument}


def test_a_root_of_a_constant_is_a_scale_and_stays_outside() -> None:
    def deberta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = torch.sqrt(torch.tensor(D, dtype=torch.float) * 3)
        scores = (q / scale.to(dtype=q.dtype)) @ k.transpose(-1, -2) + 0
        return scores.masked_fill(HIDE, torch.finfo(q.dtype).min).softmax(-1) @ v

    attrs = match_attrs(attention_by_hand, deberta, *HEADS, leaving=["mul", "sqrt"])
    assert attrs["mask_type"] == "hide"

    def of_batches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = torch.sqrt(torch.tensor(float(D)))
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2) / scale), -1), v)

    assert match_attrs(attention_of_batches, of_batches, *FLAT, leaving=["sqrt"])["scale"] == 1.0

    def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / torch.sqrt(torch.tensor(float(D)))
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)

    assert match_attrs(attention_einsum, by_einsum, *HEADS, leaving=["sqrt"])["equations"] is None


def test_a_scale_with_dimensions_is_none() -> None:
    per_head = torch.rand(H, 1, 1)
    assert "scaled by a tensor with dimensions" in why(
        attention_by_hand, attend(lambda q, k: q @ k.mT * per_head), *HEADS
    )
    # On the queries it is part of them, as is the weight of a norm.
    attrs = match_attrs(
        attention_by_hand, attend(lambda q, k: (q * per_head) @ k.mT), *HEADS, leaving=["mul"]
    )
    assert attrs["scale"] == 1.0
    assert arguments(attention_by_hand, attend(lambda q, k: (q * per_head) @ k.mT), *HEADS) == {"q", "k", "v"}


def test_a_bias_may_be_scaled_with_the_product() -> None:
    ways = [
        attend(lambda q, k: (q @ k.mT + BIAS) / 2.5),
        attend(lambda q, k: 0.4 * (BIAS + q @ k.mT)),
        attend(lambda q, k: (q @ k.mT + BIAS + 0) * 0.4),
        attend(lambda q, k: (q @ k.mT + BIAS + SECOND) * 0.4),
        attend(lambda q, k: (q @ k.mT + BIAS + SECOND) * 0.4 + MASK),
        attend(lambda q, k: ((q @ k.mT + BIAS) * 0.4).masked_fill(HIDE, -1e9)),
    ]
    attrs = match_attrs_each(attention_by_hand, ways, *HEADS)
    assert {(each["scale"], each["bias_before_scale"]) for each in attrs} == {(0.4, True)}
    assert [each["mask_type"] for each in attrs] == ["none"] * 4 + ["additive", "hide"]
    # A bias that a choice made is no mask.
    chosen = attend(lambda q, k: (q @ k.mT + torch.where(HIDE, 0.0, -1e9)) / 2.5)
    assert not match_attrs(attention_by_hand, chosen, *HEADS, leaving=["where"])["bias_after_mask"]
    # Scaled before, it is an ordinary one.
    before = match_attrs(attention_by_hand, attend(lambda q, k: q @ k.mT * 0.4 + BIAS + SECOND), *HEADS)
    assert (before["bias_before_scale"], before["scale"]) == (False, 0.4)


def test_a_bias_between_two_scales_is_not_known() -> None:
    refused_each(attention_by_hand, [attend(lambda q, k: ((q @ k.mT) * 0.3 + BIAS) * 0.4)], *HEADS)


def test_what_masked_scores_become_is_scaled_with_them() -> None:
    ways = [
        attend(lambda q, k: (q @ k.mT).masked_fill(HIDE, -1e4) / 4),
        attend(lambda q, k: torch.where(HIDE, -1e4, q @ k.mT) * 0.25),
    ]
    attrs = match_attrs_each(attention_by_hand, ways, *HEADS)
    assert {(a["scale"], a["mask_value"], a["mask_type"]) for a in attrs} == {(0.25, -2500.0, "hide")}
    infinite = attend(lambda q, k: (q @ k.mT).masked_fill(HIDE, -torch.inf) * 4)
    assert match_attrs(attention_by_hand, infinite, *HEADS)["mask_value"] is None
    overflow = attend(lambda q, k: (q @ k.mT).masked_fill(HIDE, torch.finfo(q.dtype).min) * 4)
    assert "overflows torch.float32" in why(attention_by_hand, overflow, *HEADS)
    shown = [
        attend(lambda q, k: (q @ k.mT).masked_fill(HIDE, -1e4) * 0.05),
        attend(lambda q, k: (q @ k.mT).masked_fill(HIDE, -1e4) * -1.0),
    ]
    for reason in refused_each(attention_by_hand, shown, *HEADS):
        assert "they still count" in reason
    divided = attend(lambda q, k: (q @ k.mT).masked_fill(HIDE, -1e4) / 0.0)
    assert "divided by zero" in why(attention_by_hand, divided, *HEADS)


def test_a_mask_may_be_subtracted() -> None:
    def xlnet(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        content = torch.einsum("ibnd,jbnd->bnij", q, k)
        scores = (content + BIAS + 0) * 0.3
        scores = scores - 65500 * MASK
        return torch.einsum("bnij,jbnd->ibnd", scores.softmax(dim=3), v)

    inputs = tuple(torch.randn(S, B, H, D) for _ in range(3))
    attrs = match_attrs(attention_einsum, xlnet, *inputs, leaving=["mul"])
    assert (attrs["mask_type"], attrs["bias_before_scale"]) == ("subtracted", True)
    added = match_attrs(attention_by_hand, attend(lambda q, k: q @ k.mT * 0.3 - MASK), *HEADS)
    assert added["mask_type"] == "subtracted"
    refused_each(
        attention_by_hand,
        [attend(lambda q, k: MASK - q @ k.mT), attend(lambda q, k: torch.sub(q @ k.mT, MASK, alpha=2))],
        *HEADS,
    )


def sunk(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) * 0.3 + MASK
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    combined = torch.cat([scores, column], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    return F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1] @ v


def sunk_first(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) * 0.3 + MASK
    column = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([column, scores], dim=-1).softmax(-1)[..., 1:] @ v


def sunk_dropped(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    column = sinks.view(1, H, 1, 1).expand(B, H, S, 1)
    weights = torch.cat([q @ k.mT * 0.3 + MASK, column], -1).softmax(-1)[..., :-1]
    return F.dropout(weights, 0.2) @ v


def test_sinks_take_weight_and_have_no_value() -> None:
    for attrs in match_attrs_each(attention_with_sinks, [sunk, sunk_first], *HEADS, SINKS):
        assert (attrs["scale"], attrs["mask_type"], attrs["dropout"]) == (0.3, "additive", 0.0)
    assert match_attrs(attention_with_sinks, sunk_dropped, *HEADS, SINKS)["dropout"] == 0.2
    assert arguments(attention_with_sinks, sunk, *HEADS, SINKS) == {"q", "k", "v", "mask", "sinks"}

    def column(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return torch.cat([q @ k.mT, sinks], -1).softmax(-1)[..., :-1] @ v

    per_query = torch.randn(B, H, S, 1)
    match_attrs(attention_with_sinks, column, *HEADS, per_query)
    assert arguments(attention_with_sinks, column, *HEADS, per_query) == {"q", "k", "v", "sink_column"}


def test_sinks_of_grouped_heads_in_lower_precision_and_with_symbols() -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        def spread(x: Tensor) -> Tensor:
            b, h, s, d = x.shape
            return x[:, :, None].expand(b, h, H // G, s, d).reshape(b, H, s, d)

        scores = q @ spread(k).transpose(2, 3) * 0.3
        column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        combined = torch.cat([scores, column], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        return F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1] @ spread(v)

    inputs = (torch.randn(B, H, S, D), torch.randn(B, G, S, D), torch.randn(B, G, S, D), SINKS)
    assert match_attrs(attention_with_sinks, grouped, *inputs)["groups"] == H // G
    assert match_attrs(attention_with_sinks, grouped, *(x.bfloat16() for x in inputs))["groups"] == H // G
    batch = torch.export.Dim("batch", min=2, max=64)
    graph = dovetail.capture(grouped, inputs, dynamic_shapes=(*({0: batch},) * 3, None))
    widest = max(candidates(attention_with_sinks, graph), key=lambda c: len(c.members))
    assert set(widest.arguments or {}) == {"q", "k", "v", "sinks"}
    assert (widest.attrs or {})["groups"] == H // G


def test_a_column_that_stays_or_another_that_goes_is_no_sink() -> None:
    def kept(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        column = sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)
        return torch.cat([q @ k.mT, column], -1).softmax(-1)[..., 1:] @ v

    def two(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        column = sinks.reshape(1, -1, 1, 1).expand(B, -1, S, 2)
        return torch.cat([q @ k.mT, column], -1).softmax(-1)[..., :-2] @ v

    def before(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        column = sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)
        return torch.cat([q @ k.mT, column], -1)[..., :-1].softmax(-1) @ v

    for function in (kept, two):
        assert not candidates(ATTENTION, graph_of(function, (*HEADS, SINKS)))
    for match in candidates(ATTENTION, graph_of(before, (*HEADS, SINKS))):
        assert not {"sinks", "sink_column"} & set(match.arguments or {})


def cogview(x: Tensor, alpha: float = 32) -> Tensor:
    """The softmax of LayoutLMv3."""
    small = x / alpha
    top = small.amax(dim=-1).unsqueeze(-1)
    return nn.Softmax(dim=-1)((small - top) * alpha)


def test_a_softmax_that_cannot_overflow_is_a_softmax() -> None:
    ways = [
        attend(lambda q, k: (q / 2.5) @ k.mT + BIAS + MASK, cogview),
        attend(lambda q, k: q @ k.mT * 0.4 + MASK, lambda x: cogview(x, 24.0)),
        attend(lambda q, k: q @ k.mT * 0.4, lambda x: (x - x.max(-1, keepdim=True).values).softmax(-1)),
        attend(lambda q, k: q @ k.mT * 0.4, lambda x: (x - x.amax(-1, keepdim=True)).softmax(-1)),
    ]
    attrs = match_attrs_each(attention_by_hand, ways, *HEADS)
    assert {each["scale"] for each in attrs} == {0.4}
    assert [each["mask_type"] for each in attrs] == ["additive", "additive", "none", "none"]


def test_a_softmax_that_is_sharpened_or_lost_in_rounding_is_another() -> None:
    def sharpened(x: Tensor) -> Tensor:
        small = x / 32
        return torch.softmax((small - small.amax(-1, keepdim=True)) * 16, -1)

    def of_queries(x: Tensor) -> Tensor:
        small = x / 32
        return torch.softmax((small - small.amax(-2, keepdim=True)) * 32, -1)

    scores: Scores = lambda q, k: q @ k.mT * 0.4  # noqa: E731
    refused_each(attention_by_hand, [attend(scores, sharpened), attend(scores, of_queries)], *HEADS)
    for alpha in (1e-3, 1e6):
        reason = why(attention_by_hand, attend(scores, lambda x, a=alpha: cogview(x, a)), *HEADS)
        assert "lost in rounding" in reason


def test_other_forms_have_these_scores_too() -> None:
    def columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k + BIAS) / 2.5 + MASK).softmax(-1) @ v

    q, k, v = HEADS
    attrs = match_attrs(attention_of_columns, columns, q, k.mT.contiguous(), v)
    assert (attrs["bias_before_scale"], attrs["mask_type"]) == (True, "additive")

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(S, S, dtype=torch.bool).triu(1)
        return (q @ k.mT / SCALAR).masked_fill(later, -1e9).softmax(-1) @ v

    assert match_attrs(attention_causal, causal, *HEADS)["causal"]

    def funnel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bind,bjnd->bnij", q, k) + BIAS + SECOND
        scores = scores.float() - 1e6 * (1 - MASK.float())
        return torch.einsum("bnij,bjnd->bind", torch.softmax(scores, -1, dtype=q.dtype), v)

    inputs = tuple(torch.randn(B, S, H, D) for _ in range(3))
    attrs = match_attrs(attention_einsum, funnel, *inputs, leaving=["mul", "rsub"])
    assert (attrs["mask_type"], attrs["scale"]) == ("subtracted", 1.0)


def test_weights_viewed_by_heads_and_back() -> None:
    def groupvit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
        weights = weights.view(B, H, S, S).view(B * H, S, S)
        return torch.bmm(F.dropout(weights, 0.1), v)

    assert match_attrs(attention_of_batches, groupvit, *FLAT)["dropout"] == 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_rounded_to_the_values_where_queries_are_wider(dtype: torch.dtype) -> None:
    q, k, v = HEADS
    ways = [
        attend(lambda q, k: q @ k.mT / 2.5, lambda x: x.softmax(-1).to(dtype)),
        attend(lambda q, k: (q @ k.mT + BIAS) / 2.5, lambda x: x.softmax(-1).to(dtype)),
    ]
    assert [a["scale"] for a in match_attrs_each(attention_by_hand, ways, q, k, v.to(dtype))] == [0.4, 0.4]
    # Rounded before the softmax, or to another dtype than that of the values.
    early = attend(lambda q, k: (q @ k.mT / 2.5).to(dtype))
    refused_each(attention_by_hand, [early], q, k, v.to(dtype))
    wide = attend(lambda q, k: q @ k.mT / 2.5, lambda x: x.softmax(-1).to(dtype).float())
    refused_each(attention_by_hand, [wide], q, k, v)
    double = attend(lambda q, k: q @ k.mT / 2.5, lambda x: x.softmax(-1).float())
    refused_each(attention_by_hand, [double], q.double(), k.double(), v)
