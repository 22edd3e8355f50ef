"""Gradients of norms and of softmax, as training graphs have them; those of convolutions are with convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dovetail.rules.library.known import known
from dovetail.rules.matching.choices import Const, either
from dovetail.rules.matching.match import Match
from dovetail.rules.rule import RuleSet

aten = torch.ops.aten


def _rows(*sizes: int) -> Tensor:
    return torch.empty(*sizes, device="meta")


_GRAD = _rows(4, 8)
_MEAN = _rows(4, 1)
_WEIGHT = _rows(8)


def _norm_says(match: Match) -> dict[str, Any]:
    return {"shape": match["shape"], "output_mask": match["wanted"]}


@known(
    kind="layer_norm_grad",
    needs="native_layer_norm_backward",
    says=_norm_says,
    examples=[(_GRAD, _GRAD, _MEAN, _MEAN, _WEIGHT, _WEIGHT)],
)
def layer_norm_grad(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    shape: Any = Const([8]),
    wanted: Any = Const([True, True, True]),
) -> Tensor:
    """The gradients of a layer norm, of those of its operands that are asked for."""
    scale, offset = either(lambda: (weight, bias), lambda: (weight, None), lambda: (None, None))
    made = aten.native_layer_norm_backward.default(grad, x, shape, mean, rstd, scale, offset, wanted)

    def one(which: int) -> Tensor:
        if made[which] is None:
            raise ValueError("this gradient is not asked for")
        return made[which]

    return either(lambda: one(0), lambda: one(1))


@known(kind="softmax_grad", needs="_softmax_backward_data", examples=[(_GRAD, _GRAD)])
def softmax_grad(grad: Tensor, output: Tensor, dim: Any = Const(1)) -> Tensor:
    """The gradient of a softmax, from its result."""
    return aten._softmax_backward_data.default(grad, output, dim, output.dtype)


@known(kind="log_softmax_grad", needs="_log_softmax_backward_data", examples=[(_GRAD, _GRAD)])
def log_softmax_grad(grad: Tensor, output: Tensor, dim: Any = Const(1)) -> Tensor:
    """The gradient of the logarithm of a softmax, from its result."""
    return aten._log_softmax_backward_data.default(grad, output, dim, output.dtype)


GRADIENTS = RuleSet(layer_norm_grad, softmax_grad, log_softmax_grad)
