"""Formulas of composite operators in simpler ones, as they would be written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from dovetail.errors import ScheduleError

Formula = Callable[..., Any]
_aten = torch.ops.aten


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Matrix product with the transposed weight, plus bias."""
    product = torch.matmul(input, weight.t())
    return product if bias is None else product + bias


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """`beta * self + alpha * mat1 @ mat2`."""
    return _sum(self, torch.mm(mat1, mat2), beta, alpha)


def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """`beta * self + alpha * batch1 @ batch2`."""
    return _sum(self, torch.bmm(batch1, batch2), beta, alpha)


def _sum(added: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return scaled
    return (added if beta == 1 else added * beta) + scaled


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scores, mask, softmax, dropout, and the weighted sum."""
    if dropout_p > 0 and query.device.type != "cpu":
        raise ScheduleError(
            f"its kernel drops {dropout_p} of the weights, with random numbers that separate operators on "
            f"{query.device.type} do not draw. Decompose it in eval mode"
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    if is_causal:
        rows, columns = query.shape[-2], key.shape[-2]
        visible = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(torch.logical_not(visible), -math.inf)
    elif attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(torch.logical_not(attn_mask), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # A row that is masked completely is zeros, where softmax would return NaN.
    masked = attn_mask is not None
    weights = _aten._safe_softmax.default(scores, -1) if masked else torch.softmax(scores, -1)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    return torch.matmul(weights, value)


def _widen(x: Tensor) -> Tensor:
    """Return half precision values in float32, in which torch's kernels compute."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Subtract the mean, divide by the standard deviation, apply weight and bias."""
    dims = _trailing_dims(normalized_shape)
    x = _widen(input)
    centred = x - x.mean(dims, keepdim=True)
    normal = centred * torch.rsqrt(centred.pow(2).mean(dims, keepdim=True) + eps)
    return _affine(normal, weight, bias).to(input.dtype)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Divide by the root mean square, apply the weight."""
    x = _widen(input)
    least = torch.finfo(input.dtype).eps if eps is None else eps
    normal = x * torch.rsqrt(x.pow(2).mean(_trailing_dims(normalized_shape), keepdim=True) + least)
    return _affine(normal, weight, None).to(input.dtype)


def _trailing_dims(shape: Sequence[int]) -> list[int]:
    return list(range(-len(shape), 0))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * _widen(weight)
    return scaled if bias is None else scaled + _widen(bias)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalize each group of channels, apply weight and bias by channel."""
    x = _widen(input).reshape(input.shape[0], num_groups, -1)
    centred = x - x.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return _affine(normal.reshape(input.shape), _by_channel(weight, input), _by_channel(bias, input)).to(
        input.dtype
    )


def _by_channel(values: Tensor | None, like: Tensor) -> Tensor | None:
    return None if values is None else _channels(values, like)


def _channels(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape([1, -1] + [1] * (like.dim() - 2))


def batch_norm_in_eval(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Normalize by the running statistics; the saved statistics of the batch are empty."""
    mean, variance = _channels(running_mean, input), _channels(running_var, input)
    normal = (_widen(input) - mean) * torch.rsqrt(variance + eps)
    result = _affine(normal, _by_channel(weight, input), _by_channel(bias, input)).to(input.dtype)
    return result, running_mean.new_empty(0), running_mean.new_empty(0)


def batch_norm_in_training(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Normalize by the statistics of the batch, and update the running statistics."""
    if not training:
        eval_form = batch_norm_in_eval(input, weight, bias, running_mean, running_var, momentum, eps)
        return (*eval_form, running_mean.clone(), running_var.clone())
    dims = [0, *range(2, input.dim())]
    x = _widen(input)
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    variance = centred.pow(2).mean(dims, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    result = _affine(centred * inverse, _by_channel(weight, input), _by_channel(bias, input)).to(input.dtype)
    count = input.numel() // input.shape[1]
    unbiased = variance.detach().reshape(-1) * (count / (count - 1))
    return (
        result,
        mean.reshape(-1),
        inverse.reshape(-1),
        running_mean * (1 - momentum) + mean.detach().reshape(-1).to(running_mean.dtype) * momentum,
        running_var * (1 - momentum) + unbiased.to(running_var.dtype) * momentum,
    )


def softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Exponentials over their sum, the maximum subtracted first."""
    source = self if dtype is None else self.to(dtype)
    x = _widen(source)
    powers = torch.exp(x - x.amax(dim, keepdim=True))
    return (powers / powers.sum(dim, keepdim=True)).to(source.dtype)


def log_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Subtract the logarithm of the sum of exponentials, the maximum subtracted first."""
    source = self if dtype is None else self.to(dtype)
    x = _widen(source)
    shifted = x - x.amax(dim, keepdim=True)
    return (shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))).to(source.dtype)


def gelu(self: Tensor, approximate: str = "none") -> Tensor:
    """x times the normal cumulative distribution function, exact or by its tanh approximation."""
    x = _widen(self)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))
        return (0.5 * x * (1 + torch.tanh(inner))).to(self.dtype)
    return (0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))).to(self.dtype)


def silu(self: Tensor) -> Tensor:
    """`x * sigmoid(x)`."""
    x = _widen(self)
    return (x * torch.sigmoid(x)).to(self.dtype)


def cross_entropy(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Negative log-likelihood of a log-softmax."""
    if target.is_floating_point() or label_smoothing:
        raise ScheduleError(
            "its targets are class probabilities, or smoothed; only class indices can be decomposed"
        )
    logs = log_softmax(self, 1 if self.dim() > 1 else 0)
    return _aten.nll_loss_nd.default(logs, target, weight, reduction, ignore_index)


def mse_loss(self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Squared differences, and their mean or sum."""
    squares = (self - target).pow(2)
    return squares if reduction == 0 else squares.mean() if reduction == 1 else squares.sum()


FORMULAS: dict[OpOverload, Formula] = {
    _aten.linear.default: linear,
    _aten.addmm.default: addmm,
    _aten.baddbmm.default: baddbmm,
    _aten.scaled_dot_product_attention.default: attention,
    _aten.layer_norm.default: layer_norm,
    _aten.rms_norm.default: rms_norm,
    _aten.group_norm.default: group_norm,
    _aten._native_batch_norm_legit_no_training.default: batch_norm_in_eval,
    _aten._native_batch_norm_legit_functional.default: batch_norm_in_training,
    _aten.softmax.int: softmax,
    _aten.log_softmax.int: log_softmax,
    _aten.gelu.default: gelu,
    _aten.silu.default: silu,
    _aten.cross_entropy_loss.default: cross_entropy,
    _aten.mse_loss.default: mse_loss,
}
"""The operators that `decompose` takes by default."""
