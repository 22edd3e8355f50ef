"""Norms in the spellings of the libraries that people take them from, alone and after a sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.lowering.compile_unit import unit_of
from dovetail.lowering.verify_region import reference_mismatch
from dovetail.rules.library.norms import (
    add_layer_norm,
    add_rms_norm,
    dropout_add_layer_norm,
    group_norm,
    layer_norm,
    rms_norm,
)
from dovetail.rules.rule import Candidate, Refusal
from tests.rules.library.helpers import (
    candidates,
    graph_of,
    match_attrs,
    match_attrs_each,
    member_names,
    proposals,
    refused_each,
    request_for,
    why,
)

W = 16
X, R = torch.randn(2, 3, W), torch.randn(2, 3, W)
WEIGHT, BIAS = torch.randn(W), torch.randn(W)
EPS = 1e-6
SAME = {"dims": 1, "out_dtype": "promoted"}
Norm = Callable[..., Tensor]


def llama(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


def meta(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x) * weight


def t5(x: Tensor, weight: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + EPS)).to(weight.dtype)


def olmo(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
    return (weight * wide).to(x.dtype)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * (1.0 + weight.float())).to(x.dtype)


def direct(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + EPS) * weight


def by_power(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.pow(x.pow(2).mean(-1, keepdim=True) + EPS, -0.5) * weight


def by_reciprocal(x: Tensor, weight: Tensor) -> Tensor:
    return x * (1 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS)) * weight


def operator(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (W,), weight, EPS)


RMS = [llama, meta, t5, olmo, gemma, direct, by_power, by_reciprocal, operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm(dtype: torch.dtype) -> None:
    matches = match_attrs_each(rms_norm, RMS, X.to(dtype), WEIGHT.to(dtype))
    assert matches == [{**SAME, "eps": EPS, "offset": 1.0 if spelled is gemma else 0.0} for spelled in RMS]


def test_rms_norm_of_a_sum() -> None:
    def summed(spelled: Norm) -> Norm:
        return lambda x, residual, weight: spelled(residual + x, weight)

    matches = match_attrs_each(add_rms_norm, [summed(spelled) for spelled in RMS], X, R, WEIGHT)
    assert all(attrs["eps"] == EPS for attrs in matches)


def test_rms_norm_as_a_module_and_without_a_weight() -> None:
    spelled: list[Norm] = [
        nn.RMSNorm(W, eps=1e-3),
        nn.RMSNorm(W),
        lambda x: F.rms_norm(x, (W,), eps=0.1),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.5),
    ]
    assert [matches["eps"] for matches in match_attrs_each(rms_norm, spelled, X)] == [1e-3, None, 0.1, 0.5]


def test_rms_norm_at_any_rank() -> None:
    for x in (torch.randn(W), torch.randn(3, W), torch.randn(2, 3, 4, W)):
        match_attrs(rms_norm, llama, x, WEIGHT)


def test_the_sum_comes_out_too() -> None:
    def layer(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return llama(total, weight), total * 2

    graph = graph_of(layer, (X, R, WEIGHT))
    match = candidates(add_rms_norm, graph)[0]
    fused = dovetail.outline(graph, member_names(graph, match), kind=match.kind, escapes=match.escapes)
    (region,) = dovetail.regions(fused)
    assert len(region.outputs) == 2
    assert all(torch.equal(a, b) for a, b in zip(fused(X, R, WEIGHT), layer(X, R, WEIGHT), strict=True))


RMS_REFUSED: dict[str, tuple[Norm, str]] = {
    "mean over rows": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS)),
        "where the pattern has",
    ),
    "a sum, not a mean": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)), ""),
    "cubed": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + EPS)),
        "3 where the pattern has 2",
    ),
    "another value is scaled": (
        lambda x, w: w * ((x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)),
        "",
    ),
    "eps inside the square": (
        lambda x, w: w * (x * torch.rsqrt((x + EPS).pow(2).mean(-1, keepdim=True))),
        "",
    ),
}


def test_what_is_no_rms_norm() -> None:
    refused = refused_each(rms_norm, [spelled for spelled, _ in RMS_REFUSED.values()], X, WEIGHT)
    for name, reasons in zip(RMS_REFUSED, refused, strict=True):
        assert RMS_REFUSED[name][1] in reasons, name


def test_a_norm_that_is_rounded_elsewhere_is_another() -> None:
    def rounded(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).to(x.dtype) + EPS)).to(x.dtype)

    refused_each(rms_norm, [rounded], X.bfloat16(), WEIGHT.bfloat16())
    match_attrs(rms_norm, rounded, X, WEIGHT)


def test_a_bias_is_no_residual() -> None:
    reason = why(add_rms_norm, lambda x, b, w: llama(x + b, w), X, BIAS, WEIGHT)
    assert "differ in rank" in reason


def bert(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    spread = (x - mean).pow(2).mean(-1, keepdim=True)
    return weight * ((x - mean) / torch.sqrt(spread + EPS)) + bias


def by_variance(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    spread = x.var(dim=-1, keepdim=True, unbiased=False)
    return (x - x.mean(dim=-1, keepdim=True)) * torch.rsqrt(spread + EPS) * weight + bias


def by_correction(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    spread = torch.var(x, dim=-1, correction=0, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / (spread + EPS).sqrt() * weight + bias


def by_moments(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    spread = (x**2).mean(-1, keepdim=True) - mean**2
    return (x - mean) * torch.rsqrt(spread + EPS) * weight + bias


def wide(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = x.float()
    y = y - y.mean(-1, keepdim=True)
    y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + EPS)
    return weight * y.to(x.dtype) + bias


def layer_operator(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (W,), weight, bias, EPS)


LAYER = [bert, by_variance, by_correction, by_moments, wide, layer_operator]


def test_layer_norm() -> None:
    assert match_attrs_each(layer_norm, LAYER, X, WEIGHT, BIAS) == [{**SAME, "eps": EPS}] * len(LAYER)


def test_layer_norm_in_low_precision() -> None:
    match_attrs_each(layer_norm, [wide, layer_operator], X.bfloat16(), WEIGHT.bfloat16(), BIAS.bfloat16())


def test_layer_norm_with_a_bias_alone() -> None:
    assert match_attrs(layer_norm, lambda x, b: F.layer_norm(x, (W,), None, b, EPS), X, BIAS)["eps"] == EPS


def test_layer_norm_of_a_sum() -> None:
    def summed(spelled: Norm) -> Norm:
        return lambda x, residual, weight, bias: spelled(x + residual, weight, bias)

    match_attrs_each(add_layer_norm, [summed(spelled) for spelled in LAYER], X, R, WEIGHT, BIAS)


def test_layer_norm_as_a_module() -> None:
    modules = [
        nn.LayerNorm(W),
        nn.LayerNorm(W, bias=False),
        nn.LayerNorm(W, elementwise_affine=False),
        nn.LayerNorm([3, W]),
    ]
    assert match_attrs_each(layer_norm, modules, X) == [
        {**SAME, "eps": 1e-5, "dims": dims} for dims in (1, 1, 1, 2)
    ]


LAYER_REFUSED: dict[str, tuple[Norm, str]] = {
    "unbiased": (
        lambda x, w, b: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + EPS) * w + b,
        "True where the pattern has False",
    ),
    "unbiased by its correction": (
        lambda x, w, b: (
            (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, correction=1, keepdim=True) + EPS) * w + b
        ),
        "1 where the pattern has 0",
    ),
    "eps outside the root": (
        lambda x, w, b: (
            w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, unbiased=False, keepdim=True) + EPS) + b
        ),
        "",
    ),
    "another mean": (
        lambda x, w, b: (
            (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(-1, False, keepdim=True) + EPS) * w + b
        ),
        "",
    ),
}


def test_what_is_no_layer_norm() -> None:
    refused = refused_each(layer_norm, [spelled for spelled, _ in LAYER_REFUSED.values()], X, WEIGHT, BIAS)
    for name, reasons in zip(LAYER_REFUSED, refused, strict=True):
        assert LAYER_REFUSED[name][1] in reasons, name


class Block(nn.Module):
    """The end of a BERT layer; the bias of its product may be added apart."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(W, eps=EPS), nn.Dropout(0.25)
        self.bias = nn.Parameter(torch.randn(W)) if bias else None

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y = x if self.bias is None else x + self.bias
        return self.norm(self.drop(y) + residual)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_dropout_add_layer_norm(mode: str) -> None:
    dropout = 0.25 if mode == "train" else 0.0
    match = match_attrs(dropout_add_layer_norm, Block(bias=True).train(mode == "train"), X, R)
    assert match == {**SAME, "eps": EPS, "dropout": dropout}


def test_dropout_add_layer_norm_without_a_bias() -> None:
    assert match_attrs(dropout_add_layer_norm, Block(bias=False).train(), X, R)["dropout"] == 0.25
    graph = graph_of(Block(bias=False).eval(), (X, R))
    assert not candidates(dropout_add_layer_norm, graph)
    assert candidates(add_layer_norm, graph)


def test_three_streams_are_no_bias() -> None:
    def summed(x: Tensor, y: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x + y + residual, (W,), weight, bias)

    assert "has shape [2, 3, 16], not [16]" in why(dropout_add_layer_norm, summed, X, R, X, WEIGHT, BIAS)


def test_dropout_after_the_sum_is_another_thing() -> None:
    def after(x: Tensor, b: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(F.dropout(x + b + r, 0.25), (W,), w)

    refused_each(dropout_add_layer_norm, [after], X, BIAS, R, WEIGHT)


@pytest.mark.parametrize("rule", [rms_norm, add_rms_norm, layer_norm, add_layer_norm], ids=lambda r: r.name)
def test_with_sizes_that_are_not_known(rule: Any) -> None:
    summed = rule.name.startswith("add")
    layer = rule.name.endswith("layer_norm")

    def normed(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = x + r if summed else x
        return bert(y, w, b) if layer else llama(y, w)

    size = torch.export.Dim("size", min=2)
    shapes = ({0: size}, {0: size}, None, None)
    graph = dovetail.capture(normed, (X, R, WEIGHT, BIAS), dynamic_shapes=shapes)
    assert candidates(rule, graph)


def test_a_weight_of_another_precision() -> None:
    low = X.bfloat16()
    spelled = {llama: "promoted", direct: "promoted", olmo: "input", gemma: "input", operator: "input"}
    matches = match_attrs_each(rms_norm, list(spelled), low, WEIGHT)
    assert [attrs["out_dtype"] for attrs in matches] == list(spelled.values())

    def centred(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide - wide.mean(-1, keepdim=True)) * torch.rsqrt(
            wide.var(-1, correction=0, keepdim=True) + EPS
        )

    layers: dict[Norm, str] = {
        lambda x, w: centred(x).to(x.dtype) * w: "promoted",
        lambda x, w: (centred(x) * w).to(x.dtype): "input",
    }
    matches = match_attrs_each(layer_norm, list(layers), low, WEIGHT)
    assert [attrs["out_dtype"] for attrs in matches] == list(layers.values())


def test_an_affine_wider_than_what_is_normalized() -> None:
    def centred(x: Tensor, w: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, correction=0, keepdim=True) + EPS) * w

    proposed = proposals(layer_norm, graph_of(centred, (torch.randn(2, 3, 1), WEIGHT)))
    assert all("weight" not in (p.arguments or {}) for p in proposed if isinstance(p, Candidate))
    assert any(f"has shape [{W}], not [1]" in p.reason for p in proposed if isinstance(p, Refusal))


def test_a_result_of_another_dtype_is_not_of_the_kind() -> None:
    graph = graph_of(operator, (X.bfloat16(), WEIGHT))
    match = candidates(rms_norm, graph)[0]

    def mismatch(match: Candidate) -> str | None:
        unit = unit_of(dovetail.regions(dovetail.outline(graph, [request_for(graph, match)]))[0])
        return reference_mismatch(unit, unit.values)

    assert mismatch(match) is None
    wrong = replace(match, attrs={**(match.attrs or {}), "out_dtype": "promoted"})
    assert "is torch.bfloat16, the reference torch.float32" in str(mismatch(wrong))


IMAGE, CHANNELS = torch.randn(2, 8, 3, 5), torch.randn(8)


def test_a_group_norm_with_its_activation() -> None:
    def of(step: Any, **settings: Any) -> Any:
        return lambda x: step(F.group_norm(x, 4, **{"weight": CHANNELS, "bias": CHANNELS, **settings}))

    steps = [torch.relu, F.silu, lambda x: x * torch.sigmoid(x), F.gelu]
    attrs = match_attrs_each(group_norm, [of(step) for step in steps], IMAGE)
    assert [a["activation"] for a in attrs] == ["relu", "silu", "silu", "gelu"]
    assert {(a["groups"], a["eps"]) for a in attrs} == {(4, 1e-5)}
    unfused = match_attrs(
        group_norm, of(lambda x: x.sin(), weight=None, bias=None, eps=1e-3), IMAGE, leaving=["sin"]
    )
    assert unfused == {"groups": 4, "eps": 1e-3, "activation": None}
    channelwise = match_attrs(group_norm, nn.Sequential(nn.GroupNorm(8, 8), nn.GELU()), torch.randn(2, 8, 7))
    assert (channelwise["groups"], channelwise["activation"]) == (8, "gelu")


def test_an_activation_with_other_constants_is_not_that_of_a_group_norm() -> None:
    def sharp(x: Tensor) -> Tensor:
        y = F.group_norm(x, 4, CHANNELS, CHANNELS)
        return y * torch.sigmoid(1.5 * y)

    match_attrs(group_norm, sharp, IMAGE, leaving=["mul", "mul", "sigmoid"])
