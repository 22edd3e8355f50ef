"""Rules for what runs in int8: products and convolutions with what follows them, and alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dovetail.rules.library.convolution import (
    CONVOLUTION,
    Channels,
    Images,
    Kernel,
    conv_bn_act_kind,
    convolved,
    groups_of,
)
from dovetail.rules.library.known import Known, kind, known
from dovetail.rules.library.linear import (
    GATES,
    LINEAR,
    Bias,
    Rows,
    Weight,
    operands_are_weights,
    product,
    projected,
    weight_layout,
)
from dovetail.rules.matching.choices import Const
from dovetail.rules.matching.match import Match
from dovetail.rules.rule import RuleSet

_X, _WEIGHT, _BIAS = (torch.empty(s, device="meta") for s in ((2, 8, 16), (16, 16), (16,)))
# What is found with something behind it is not wanted alone.
_LAST = -5


@kind("linear", version=2)
def linear_kind(x: Rows, weight: Weight, bias: Bias = None, *, weight_layout: str = "out_in") -> Tensor:
    """A product and its bias."""
    return product(x, weight, bias, weight_layout)


@kind("conv", version=2)
def conv_kind(
    x: Images,
    weight: Kernel,
    bias: Channels = None,
    *,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int = 1,
) -> Tensor:
    """A convolution and its bias."""
    return conv_bn_act_kind(x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)


@known(
    linear_kind,
    needs="linear|addmm|mm|matmul",
    attrs_of=lambda m: {"weight_layout": weight_layout(m)},
    examples=[(_X, _WEIGHT, _BIAS), (_X[0], _WEIGHT, _BIAS)],
    priority=_LAST,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A product with a weight, and its bias."""
    return projected(x, weight, bias)


linear.guard(operands_are_weights)


def _conv(rank: int) -> Known:
    ones: list[int] = [1] * rank
    image, kernel = (torch.empty(*s, *[n] * rank, device="meta") for s, n in (((2, 8), 8), ((8, 8), 3)))

    def attrs_of(match: Match) -> dict[str, Any]:
        named = {name: match[name] for name in ("stride", "padding", "dilation")}
        return {**named, "groups": groups_of(match["x"], match["weight"], rank)}

    @known(
        conv_kind,
        name=f"conv{rank}d",
        needs=f"conv{rank}d|convolution",
        attrs_of=attrs_of,
        examples=[(image, kernel, torch.empty(8, device="meta"))],
        priority=_LAST,
    )
    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        stride: Any = Const(ones),
        padding: Any = Const([0] * rank),
        dilation: Any = Const(ones),
    ) -> Tensor:
        return convolved(rank, x, weight, bias, stride, padding, dilation)

    return conv


# A gate whose two sides come from elsewhere has no product.
_GATED = [rule for rule in GATES if not rule.name.endswith("_gate")]
RULES = RuleSet(*_GATED, *LINEAR, *CONVOLUTION, linear, *(_conv(rank) for rank in (1, 2, 3)))
"""The kinds of the library that have a product with weights, and `linear` and `conv` for those that stand alone."""
