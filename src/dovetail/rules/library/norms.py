"""Norms: root-mean-square and layer norm, alone and after a residual sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.rules.library.known import known
from dovetail.rules.library.steps import square
from dovetail.rules.matching.choices import Const, either, optional
from dovetail.rules.matching.match import Match
from dovetail.rules.rule import Decline, RuleSet

_RMS = "rms_norm|_fused_rms_norm|rsqrt|sqrt|pow"
_LAYER = "layer_norm|native_layer_norm|rsqrt|sqrt|pow layer_norm|native_layer_norm|sub"
_X, _WEIGHT = torch.empty(2, 8, 16, device="meta"), torch.empty(16, device="meta")


def _eps(match: Match) -> dict[str, Any]:
    return {"eps": match.literals.get("eps")}


def eps_and_offset(match: Match) -> dict[str, Any]:
    """What is said of an RMS norm: `offset` is what is added to its weight."""
    return {"eps": match.literals.get("eps"), "offset": match.literals.get("offset", 0.0)}


def _eps_and_dropout(match: Match) -> dict[str, Any]:
    return {"eps": match.literals.get("eps"), "dropout": match.literals.get("dropout", 0.0)}


def _inverse_root(x: Tensor) -> Tensor:
    return either(lambda: torch.rsqrt(x), lambda: x.pow(-0.5), lambda: 1 / torch.sqrt(x))


def rms_normalised(x: Tensor, weight: Tensor, eps: Any, offset: Any) -> Tensor:
    """x / rms(x), perhaps times a weight: the operator, or its steps with float32 or without on the way."""

    def by_hand() -> Tensor:
        wide = either(lambda: x.float(), lambda: x)
        spread = square(wide).mean(-1, keepdim=True) + eps
        scaled = either(
            lambda: wide * _inverse_root(spread),
            lambda: wide / torch.sqrt(spread),
            # The statistics alone are wide, as T5 does it.
            lambda: x * torch.rsqrt(spread),
        )
        return either(
            # Gemma's weights are kept as the difference from one.
            lambda: ((weight.to(scaled.dtype) + offset) * scaled).to(x.dtype),
            lambda: weight * scaled.to(x.dtype),
            lambda: (weight * scaled).to(x.dtype),
            lambda: scaled.to(x.dtype),
        )

    return either(
        by_hand,
        lambda: F.rms_norm(x, weight.shape, weight, eps),
        lambda: F.rms_norm(x, x.shape[-1:], None, eps),
    )


def layer_normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: Any) -> Tensor:
    """(x - mean) / sqrt(variance + eps), perhaps with weight and bias: the operator, or its steps."""

    def by_hand() -> Tensor:
        wide = either(lambda: x.float(), lambda: x)
        mean = wide.mean(-1, keepdim=True)
        centred = wide - mean
        variance = either(
            lambda: square(centred).mean(-1, keepdim=True),
            lambda: square(wide - mean).mean(-1, keepdim=True),
            lambda: wide.var(-1, unbiased=False, keepdim=True),
            lambda: wide.var(-1, correction=0, keepdim=True),
            lambda: square(wide).mean(-1, keepdim=True) - square(mean),
        )
        scaled = either(
            lambda: centred / torch.sqrt(variance + eps), lambda: centred * _inverse_root(variance + eps)
        )
        return either(lambda: affine(scaled.to(x.dtype)), lambda: affine(scaled).to(x.dtype))

    def affine(y: Tensor) -> Tensor:
        return either(lambda: weight * y + bias, lambda: weight * y, lambda: y)

    return either(lambda: layer_norm_operator(x, weight, bias, eps), by_hand)


def layer_norm_operator(x: Tensor, weight: Tensor, bias: Tensor, eps: Any) -> Tensor:
    """The operator with weight and bias, with one of them, or with neither."""
    return either(
        lambda: F.layer_norm(x, weight.shape, weight, bias, eps),
        lambda: F.layer_norm(x, weight.shape, weight, None, eps),
        lambda: F.layer_norm(x, bias.shape, None, bias, eps),
        lambda: F.layer_norm(x, x.shape[-1:], None, None, eps),
    )


@known(kind="rms_norm", needs=_RMS, says=eps_and_offset, examples=[(_X, _WEIGHT)])
def rms_norm(x: Tensor, weight: Tensor, eps: Any = Const(0.0303), offset: Any = Const(1.0404)) -> Tensor:
    """A root-mean-square norm over the last dimension, or over those of its weight."""
    return rms_normalised(x, weight, eps, offset)


@known(
    kind="add_rms_norm",
    needs=f"add {_RMS}",
    says=eps_and_offset,
    escapes="output",
    examples=[(_X, _X, _WEIGHT)],
)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: Any = Const(0.0303),
    offset: Any = Const(1.0404),
) -> Tensor:
    """A sum of two streams and its root-mean-square norm; the sum is returned too where it is used again."""
    return rms_normalised(x + residual, weight, eps, offset)


@known(kind="layer_norm", needs=_LAYER, says=_eps, examples=[(_X, _WEIGHT, _WEIGHT)])
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: Any = Const(0.0303)) -> Tensor:
    """A layer norm over the last dimension, or over those of its weight."""
    return layer_normalised(x, weight, bias, eps)


@known(
    kind="add_layer_norm",
    needs=f"add {_LAYER}",
    says=_eps,
    escapes="output",
    examples=[(_X, _X, _WEIGHT, _WEIGHT)],
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: Any = Const(0.0303)
) -> Tensor:
    """A sum of two streams and its layer norm; the sum is returned too where it is used again."""
    return layer_normalised(x + residual, weight, bias, eps)


@known(
    kind="dropout_add_layer_norm",
    needs="add layer_norm|native_layer_norm",
    says=_eps_and_dropout,
    escapes="output",
    examples=[(_X, _X, _WEIGHT, _WEIGHT, _WEIGHT)],
)
def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    bias: Tensor,
    weight: Tensor,
    shift: Tensor,
    dropout: Any = Const(0.1202),
    eps: Any = Const(0.0303),
) -> Tensor:
    """The layer norm of dropout(x + bias) + residual.

    In inference no dropout is left, in training no bias need be: it may be part of what made x.
    """
    dropped = either(
        lambda: optional(x + bias, lambda y: F.dropout(y, dropout)), lambda: F.dropout(x, dropout)
    )
    return layer_norm_operator(dropped + residual, weight, shift, eps)


@dropout_add_layer_norm.guard
def bias_is_a_vector(match: Match) -> Decline | None:
    bias = match["bias"]
    if bias is None or bias.ndim <= 1:
        return None
    return Decline(f"'{bias.name}' has {bias.ndim} dimensions: it is no bias", at=bias)


@dropout_add_layer_norm.guard
@add_rms_norm.guard
@add_layer_norm.guard
def streams_have_one_rank(match: Match) -> Decline | None:
    x, residual = match["x"], match["residual"]
    if x.ndim == residual.ndim:
        return None
    return Decline(
        f"'{residual.name}' and '{x.name}' differ in rank: what is added is no residual", at=residual
    )


NORMS = RuleSet(rms_norm, add_rms_norm, layer_norm, add_layer_norm, dropout_add_layer_norm)
