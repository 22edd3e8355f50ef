"""Operands that are not of the shapes and dtypes a kind is documented with are declined, and it is said why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.rules.library import ALL, KINDS
from dovetail.rules.rule import Candidate, Refusal
from tests.rules.library.helpers import candidates, graph_of, proposals
from tests.rules.library.helpers import match_attrs as whole_match

Function = Callable[..., Any]


def r(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes).to(dtype)


def matched(rule: str, function: Function, *inputs: Any, leaving: tuple[str, ...] = ()) -> dict[str, Any]:
    return whole_match(ALL[rule], function, *inputs, leaving=leaving)


def declined(rule: str, function: Function, *inputs: Any, whole: bool = True) -> str:
    """The reasons why a rule declines; where not the `whole` is, a part may still be found."""
    answers = proposals(ALL[rule], graph_of(function, inputs))
    assert not whole or not any(isinstance(p, Candidate) for p in answers)
    return "; ".join(p.reason for p in answers if isinstance(p, Refusal))


def attend(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    return torch.softmax(scores + mask[0] if mask else scores, -1) @ v


ATTENTION = "attention_by_hand"
Q = r(2, 4, 8, 16)


def test_attention_of_one_shape_and_of_shared_heads() -> None:
    assert matched(ATTENTION, attend, Q, Q, Q, r(8, 8))["mask_type"] == "additive"
    assert matched(ATTENTION, attend, Q, r(2, 1, 8, 16), r(2, 1, 8, 16))["groups"] == 4
    assert matched(ATTENTION, attend, r(8, 16), r(5, 16), r(5, 3))["groups"] == 1


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (((2, 4, 8, 16), (8, 16), (8, 16)), "has 2 dimensions, not 4"),
        (((16,), (8, 16), (8, 16)), "has 1 dimensions, not 2"),
        (((8, 16), (8, 16), (8,)), "has 1 dimensions, not 2"),
        (((2, 4, 8, 16), (1, 4, 8, 16), (1, 4, 8, 16)), "are not those of the other operands"),
        (((4, 8, 16), (1, 8, 16), (1, 8, 16)), "are not those of the other operands"),
        (((2, 4, 8, 16), (2, 4, 1, 16), (2, 4, 8, 16), (8, 8)), "are not those of the other operands"),
        (((1, 4, 8, 16), (1, 4, 8, 16), (1, 4, 8, 16), (3, 1, 8, 8)), "a mask enlarges the scores"),
        (((2, 4, 1, 16), (2, 4, 8, 16), (2, 4, 8, 16), (8, 8)), "a mask enlarges the scores"),
        (((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16), (3, 1, 1, 8, 8)), "a mask enlarges the scores"),
    ],
)
def test_attention_that_broadcasts(shapes: tuple[tuple[int, ...], ...], reason: str) -> None:
    assert reason in declined(ATTENTION, attend, *(r(*sizes) for sizes in shapes))


def test_einsums_that_broadcast() -> None:
    def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k), -1)
        return torch.einsum("bhij,bhjd->bhid", weights, v)

    assert matched("attention_einsum", by_einsum, Q, Q, Q)["groups"] == 1
    shared = r(2, 1, 8, 16)
    assert "are not those of the other operands" in declined("attention_einsum", by_einsum, Q, shared, shared)


HALF = Q.half()


@pytest.mark.parametrize("mask", [r(8, 8), r(2, 1, 8, 8)])
def test_attention_with_a_mask_of_another_dtype(mask: Tensor) -> None:
    def by_hand(q: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(q @ q.transpose(-1, -2) * 0.25 + mask, -1).to(q.dtype) @ q

    def of_columns(q: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(q @ q.reshape(2, 4, 16, 8) + mask, -1).to(q.dtype) @ q

    def operator(q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, mask)

    def bias_and_mask(q: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ q.transpose(-1, -2) + mask).masked_fill(mask > 0, -1e4)
        return torch.softmax(scores, -1).to(q.dtype) @ q

    matched(ATTENTION, by_hand, HALF, mask)
    matched(ATTENTION, bias_and_mask, HALF, mask, leaving=("gt",))
    matched("attention_of_columns", of_columns, HALF, mask, leaving=("reshape",))
    matched("attention", operator, HALF, mask)


def test_attention_under_autocast() -> None:
    def cast(q: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.softmax(q @ q.transpose(-1, -2) * 0.25 + mask, -1) @ q

    assert matched(
        "attention_of_columns", cast, Q, r(8, 8), leaving=("_to_copy", "_to_copy", "_to_copy", "transpose")
    )


@pytest.mark.parametrize(
    ("value", "mask_type"),
    [(-1e3, "additive"), (-1e9, "additive"), (-torch.inf, "none"), (torch.finfo(torch.float32).min, "none")],
)
def test_a_causal_mask_that_is_added_and_one_that_is_filled_in(value: float, mask_type: str) -> None:
    def added(q: Tensor) -> Tensor:
        return torch.softmax(q @ q.transpose(-1, -2) + torch.full((8, 8), value).triu(1), -1) @ q

    def filled(q: Tensor) -> Tensor:
        later = torch.ones(8, 8, dtype=torch.bool).triu(1)
        return torch.softmax((q @ q.transpose(-1, -2)).masked_fill(later, value), -1) @ q

    attrs = matched("attention_causal", added, Q)
    assert (attrs["causal"], attrs["mask_type"]) == (True, mask_type)
    assert matched("attention_causal", filled, Q)["mask_type"] == "none"
    large = 50 * torch.randn(2, 4, 8, 16)
    reference = KINDS["attention"].reference
    torch.testing.assert_close(reference(large, large, large, **attrs), added(large))


def test_values_that_attributes_cannot_hold() -> None:
    def masked(q: Tensor) -> Tensor:
        return torch.softmax((q @ q.transpose(-1, -2)).masked_fill(q[..., :8] > 0, torch.nan), -1) @ q

    assert "masked scores become nan" in declined(ATTENTION, masked, Q)

    def normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.inf)

    assert "its 'eps' would be inf, and attributes cannot hold that" in declined("rms_norm", normed, Q)


def rms(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def layer(x: Tensor) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    return (centred * torch.rsqrt(wide.var(-1, correction=0, keepdim=True) + 1e-6)).to(x.dtype)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1, dtype=torch.float32).to(x.dtype)


def wide_attention(x: Tensor) -> Tensor:
    return softmax(x @ x.transpose(-1, -2)) @ x


def complex_rotary(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turns = torch.polar(torch.ones(8, 8), torch.ones(8, 8))
    return torch.view_as_real(pairs * turns).flatten(3).to(x.dtype)


@pytest.mark.parametrize(
    ("rule", "function"),
    [
        ("rms_norm", rms),
        ("layer_norm", layer),
        ("softmax", softmax),
        ("attention_by_hand", wide_attention),
        ("rotary_complex", complex_rotary),
    ],
)
def test_steps_that_round(rule: str, function: Function) -> None:
    wide = Q.double()
    assert "is rounded to torch." in declined(rule, function, wide, whole=False)
    graph = graph_of(function, (wide,))
    # What is left is computed from what was rounded.
    rounded = [n for n in graph.graph.nodes if n.op == "placeholder"]
    places = {i for i, n in enumerate(graph.graph.nodes) if n in rounded}
    assert not any(places & set((c.arguments or {}).values()) for c in candidates(ALL[rule], graph))
    assert candidates(ALL[rule], graph_of(function, (Q.bfloat16(),)))


def test_a_weight_that_is_rounded() -> None:
    def gemma(x: Tensor, weight: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (1.0 + weight.to(scaled.dtype)) * scaled

    assert "'weight' is rounded to torch.float32" in declined(
        "rms_norm", gemma, r(2, 16), r(16, dtype=torch.float64), whole=False
    )
    assert matched("rms_norm", gemma, r(2, 16), r(16, dtype=torch.bfloat16))["offset"] == 1.0


def slices(x: Tensor) -> Tensor:
    return (x[:, :, ::2, ::2] + x[:, :, ::2, 1::2] + x[:, :, 1::2, ::2] + x[:, :, 1::2, 1::2]) / 4


def windows(x: Tensor) -> Tensor:
    return x.unfold(2, 2, 1).unfold(3, 2, 1).mean((-2, -1))


def blocks(x: Tensor) -> Tensor:
    return x.reshape(2, 3, 4, 2, 4, 2).sum((3, 5)) / 4


IMAGES = r(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("rule", "function", "images", "reason"),
    [
        ("avg_pool_slices", slices, IMAGES.long(), "is torch.int64"),
        ("avg_pool_slices", slices, IMAGES.to(torch.uint8), "is torch.uint8"),
        ("avg_pool_slices", slices, IMAGES.to(torch.complex64), "is torch.complex64"),
        ("avg_pool_slices", slices, r(2, 3, 0, 8), "is empty"),
        ("avg_pool_windows", windows, IMAGES.to(torch.complex64), "is torch.complex64"),
        ("avg_pool_blocks", blocks, IMAGES.long(), "is torch.int64"),
        ("avg_pool_blocks", blocks, IMAGES.to(torch.complex64), "is torch.complex64"),
    ],
)
def test_pooling_of_what_are_no_images(rule: str, function: Function, images: Tensor, reason: str) -> None:
    assert reason in declined(rule, function, images)
    assert matched(rule, function, IMAGES)["kernel"] == [2, 2]


def gathered(x: Tensor, target: Tensor) -> Tensor:
    return -F.log_softmax(x, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1).mean()


def indexed(x: Tensor, target: Tensor) -> Tensor:
    return -F.log_softmax(x, -1)[torch.arange(x.shape[0]), target].mean()


def test_targets_that_do_not_fit_the_rows() -> None:
    rule, x = "cross_entropy_by_hand", r(6, 10)
    for function, count in ((gathered, 4), (indexed, 1)):
        target = torch.randint(0, 10, (count,))
        assert "does not name one class for each row" in declined(rule, function, x, target)
        assert matched(rule, function, x, torch.randint(0, 10, (6,)))["ignore_index"] is None


def test_targets_that_count_from_the_last_class_are_not_ignored() -> None:
    x, target = r(4, 120), torch.tensor([3, -1, -100, 0])
    attrs = matched("cross_entropy_by_hand", indexed, x, target)
    torch.testing.assert_close(KINDS["cross_entropy"].reference(x, target, **attrs), indexed(x, target))


def add_norm(x: Tensor, residual: Tensor) -> Tensor:
    return F.layer_norm(x + residual, (16,))


def drop_add_norm(x: Tensor, residual: Tensor) -> Tensor:
    return F.layer_norm(F.dropout(x, 0.1) + residual, (16,))


def add_rms(x: Tensor, residual: Tensor) -> Tensor:
    return F.rms_norm(x + residual, (16,), None, 1e-6)


ADDED = {"add_layer_norm": add_norm, "dropout_add_layer_norm": drop_add_norm, "add_rms_norm": add_rms}


@pytest.mark.parametrize("rule", ADDED)
def test_residuals_that_broadcast(rule: str) -> None:
    for x, residual in (((2, 8, 1), (2, 8, 16)), ((2, 8, 16), (2, 8, 1)), ((2, 1, 16), (1, 8, 16))):
        assert "broadcast over each other" in declined(rule, ADDED[rule], r(*x), r(*residual))
    # Positions are the same for the whole batch.
    for residual in ((2, 8, 16), (1, 8, 16)):
        assert matched(rule, ADDED[rule], r(2, 8, 16), r(*residual))["dims"] == 1


def plus(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, weight) + residual


def test_residuals_of_products_that_broadcast() -> None:
    rule, reason = "linear_residual", "does not have the shape of the product"
    matched(rule, plus, r(4, 3, 16), r(16, 16), r(4, 3, 16))
    assert reason in declined(rule, plus, r(1, 3, 16), r(16, 16), r(4, 3, 16))
    assert reason in declined(rule, plus, r(4, 3, 16), r(1, 16), r(4, 3, 16))
    assert reason in declined(rule, plus, r(4, 3, 16), r(16, 16), r(1, 3, 16))


def test_residuals_of_convolutions_that_broadcast() -> None:
    def block(x: Tensor, weight: Tensor, statistic: Tensor, residual: Tensor) -> Tensor:
        return torch.relu(F.batch_norm(F.conv2d(x, weight), statistic, statistic) + residual)

    given = r(2, 4, 8, 8), r(6, 4, 3, 3), r(6).abs()
    assert matched("conv2d_bn_act", block, *given, r(2, 6, 6, 6))["activation"] == "relu"
    reason = declined("conv2d_bn_act", block, *given, r(2, 6, 1, 1), whole=False)
    assert "does not have the shape of the value it is added to" in reason


def test_gates_that_broadcast() -> None:
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def of_two(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    def packed(x: Tensor, weight: Tensor) -> Tensor:
        both = F.linear(x, weight)
        return F.silu(both[..., :1]) * both[..., 1:]

    reason = "its gate and the value it multiplies differ in shape"
    assert reason in declined("swiglu_gate", gated, r(2, 1), r(8))
    matched("swiglu_gate", gated, r(2, 8), r(8))
    assert reason in declined("swiglu", of_two, r(2, 8), r(1, 8), r(8, 8))
    matched("swiglu", of_two, r(2, 8), r(8, 8), r(8, 8))
    # Slices cut an odd width otherwise than a chunk does.
    assert reason in declined("swiglu_packed", packed, r(2, 8), r(3, 8))
    matched("swiglu_packed", packed, r(2, 8), r(2, 8))


def test_angles_of_an_odd_width_or_for_more_than_there_is() -> None:
    def split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x[..., :1], x[..., 1:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    rule = "rotary_split"
    assert "is not known to be even" in declined(rule, split, r(2, 8, 3), r(8, 1), r(8, 1))
    assert "the angles enlarge 'x'" in declined(rule, split, r(2, 8, 2), r(3, 1, 8, 1), r(3, 1, 8, 1))
    assert matched(rule, split, r(2, 8, 2), r(8, 1), r(8, 1))["half_angles"]


def test_what_stands_between_two_products_is_named_without_the_parts_of_results() -> None:
    def unusual(q: Tensor) -> Tensor:
        return F.dropout(torch.softmax(q @ q.transpose(-1, -2), -1).exp(), 0.1) @ q

    assert declined("attention_unusual", unusual, Q) == (
        "attention has no 'exp' there: matmul, softmax, exp, native_dropout, matmul"
    )
