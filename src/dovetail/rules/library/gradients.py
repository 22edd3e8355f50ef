"""Gradients of layer norm and softmax in training graphs; those of convolutions are in `convolution`."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from dovetail.rules.library.library_rule import (
    kind,
    library_rule,
    meta_tensor,
    required_result,
    results_by_position,
)
from dovetail.rules.patterns.alternatives import Const, either
from dovetail.rules.rule import RuleSet

aten = torch.ops.aten


_GRAD, _MEAN, _WEIGHT = meta_tensor(4, 8), meta_tensor(4, 1), meta_tensor(8)
NormInput = Annotated[Tensor, "[..., *normalized]"]
Statistic = Annotated[Tensor, "as the forward operator returns it: [..., 1 for each normalized dimension]"]
Affine = Annotated[Tensor | None, "[*normalized]"]


@kind("layer_norm_grad", version=2)
def layer_norm_grad_kind(
    grad: NormInput,
    x: NormInput,
    mean: Statistic,
    rstd: Statistic,
    weight: Affine = None,
    bias: Affine = None,
    *,
    shape: list[int],
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias of a layer norm over sizes `shape`; None where `output_mask` is False."""
    return aten.native_layer_norm_backward.default(grad, x, shape, mean, rstd, weight, bias, output_mask)


@kind("softmax_grad")
def softmax_grad_kind(
    grad: Annotated[Tensor, "any shape"], output: Annotated[Tensor, "the shape of grad"], *, dim: int
) -> Tensor:
    """The gradient of a softmax over `dim`, counted from the front, from its result."""
    return (grad - (grad * output).sum(dim, keepdim=True)) * output


@kind("log_softmax_grad")
def log_softmax_grad_kind(
    grad: Annotated[Tensor, "any shape"], output: Annotated[Tensor, "the shape of grad"], *, dim: int
) -> Tensor:
    """The gradient of the logarithm of a softmax over `dim`, counted from the front, from its result."""
    return grad - output.exp() * grad.sum(dim, keepdim=True)


@library_rule(
    layer_norm_grad_kind,
    results_of=results_by_position,
    needs="native_layer_norm_backward",
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
    output_mask: Any = Const([True, True, True]),
) -> Tensor:
    """The gradients of a layer norm, of those operands that its output mask selects."""
    scale, offset = either(lambda: (weight, bias), lambda: (weight, None), lambda: (None, None))
    gradients = aten.native_layer_norm_backward.default(
        grad, x, shape, mean, rstd, scale, offset, output_mask
    )
    return either(lambda: required_result(gradients, 0), lambda: required_result(gradients, 1))


@library_rule(softmax_grad_kind, needs="_softmax_backward_data", examples=[(_GRAD, _GRAD)])
def softmax_grad(grad: Tensor, output: Tensor, dim: Any = Const(1)) -> Tensor:
    """The gradient of a softmax, from its result."""
    return aten._softmax_backward_data.default(grad, output, dim, output.dtype)


@library_rule(log_softmax_grad_kind, needs="_log_softmax_backward_data", examples=[(_GRAD, _GRAD)])
def log_softmax_grad(grad: Tensor, output: Tensor, dim: Any = Const(1)) -> Tensor:
    """The gradient of the logarithm of a softmax, from its result."""
    return aten._log_softmax_backward_data.default(grad, output, dim, output.dtype)


GRADIENTS = RuleSet(layer_norm_grad, softmax_grad, log_softmax_grad)
