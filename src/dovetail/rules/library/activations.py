"""Activations: softmax, GELU, sigmoid and hard sigmoid, as operators or by hand."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.rules.library.library_rule import (
    GELU_NAMES,
    Activation,
    activate,
    close_to,
    gelu_approximation,
    is_floating_point,
    is_gelu,
    kind,
    library_rule,
    meta_tensor,
    relu6,
    with_gelu,
)
from dovetail.rules.patterns.alternatives import Const, either
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.rule import Decline, RuleSet

AnyShape = Annotated[Tensor, "any shape"]


@kind("softmax")
def softmax_kind(x: AnyShape, *, dim: int) -> Tensor:
    """The softmax over one dimension, counted from the front.

    A decomposition that does not subtract the maximum overflows where this does not.
    """
    return torch.softmax(x, dim)


@kind("gelu")
def gelu_kind(x: AnyShape, *, approximate: str) -> Tensor:
    """A GELU: exact for "none", by "tanh", or x * sigmoid(1.702 * x) for "sigmoid"."""
    return activate(x, GELU_NAMES[approximate])


@kind("sigmoid")
def sigmoid_kind(x: AnyShape) -> Tensor:
    """1 / (1 + exp(-x)); some decompositions overflow where this does not."""
    return torch.sigmoid(x)


@kind("hard_sigmoid")
def hard_sigmoid_kind(x: AnyShape) -> Tensor:
    """min(max(x + 3, 0), 6) / 6."""
    return F.hardsigmoid(x)


def _dim_attrs(match: Match) -> dict[str, Any]:
    literals = match.literals
    return {"dim": literals["dim"] if "dim" in literals else literals["dims"][0]}


# Of one element, so that all alternatives have the same shape for any dimension.
_EXAMPLE = meta_tensor(1, 1, 1)


@library_rule(softmax_kind, needs="softmax|_softmax|exp", attrs_of=_dim_attrs, examples=[(_EXAMPLE,)])
def softmax(x: Tensor, dim: Any = Const(1), dims: Any = Const([1])) -> Tensor:
    """A softmax over one dimension; by hand with or without subtracting the maximum."""

    def by_hand() -> Tensor:
        maximum = either(lambda: x.amax(dims, keepdim=True), lambda: x.max(dim, keepdim=True).values)
        powers = either(lambda: torch.exp(x - maximum), lambda: torch.exp(x))
        return powers / powers.sum(dims, keepdim=True)

    return either(
        lambda: torch.softmax(x, dim),
        lambda: torch.softmax(x, dim, dtype=torch.float32).to(x.dtype),
        lambda: torch.softmax(x.float(), dim).to(x.dtype),
        by_hand,
    )


@softmax.guard
def dims_agree(match: Match) -> Decline | None:
    dims, dim = match.literals.get("dims"), match.literals.get("dim")
    if dims is not None and (len(dims) != 1 or dim not in (None, dims[0])):
        return Decline(f"it sums over {dims}, which is not the one dimension of the other steps")
    return None


@library_rule(
    gelu_kind, needs="gelu|erf|tanh|sigmoid", attrs_of=lambda m: {"approximate": gelu_approximation(m)}
)
@with_gelu
def gelu(x: Tensor, gelu: Activation) -> Tensor:
    """A GELU, as an operator or by hand."""
    return gelu(x)


gelu.guard(is_gelu)


@library_rule(sigmoid_kind, needs="exp|tanh", attrs_of=lambda m: {})
def sigmoid(x: Tensor) -> Tensor:
    """A sigmoid by hand."""

    def by_tanh() -> Tensor:
        half_tanh = either(lambda: torch.tanh(x * 0.5), lambda: torch.tanh(x / 2))
        return either(
            lambda: (half_tanh + 1) * 0.5, lambda: (half_tanh + 1) / 2, lambda: half_tanh * 0.5 + 0.5
        )

    return either(
        lambda: 1 / (1 + torch.exp(-x)),
        lambda: torch.reciprocal(1 + torch.exp(-x)),
        lambda: torch.exp(x) / (1 + torch.exp(x)),
        lambda: _logistic(torch.exp(x)),
        by_tanh,
    )


def _logistic(power: Tensor) -> Tensor:
    return power / (1 + power)


@library_rule(hard_sigmoid_kind, needs="clamp|hardtanh|relu6|hardsigmoid|relu", attrs_of=lambda m: {})
def hard_sigmoid(x: Tensor, sixth: Any = Const(0.1667)) -> Tensor:
    """A hard sigmoid, min(max(x + 3, 0), 6) / 6."""
    shifted = x + 3
    cut = relu6(shifted)
    return either(
        lambda: cut / 6,
        lambda: cut * sixth,
        lambda: (x / 6 + 0.5).clamp(0, 1),
        lambda: (x * sixth + 0.5).clamp(0, 1),
        lambda: (shifted / 6).clamp(0, 1),
        lambda: F.hardsigmoid(x),
    )


@hard_sigmoid.guard
def is_one_sixth(match: Match) -> Decline | None:
    return close_to(match, "sixth", 1 / 6)


ACTIVATIONS = RuleSet(softmax, gelu, sigmoid, hard_sigmoid)
for _rule in (softmax, gelu, sigmoid, hard_sigmoid):
    _rule.guard(is_floating_point)
