"""Operators that TVM gets wrong with some arguments, in operations that it gets right."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dovetail.lowering.backends.foreign import NoForm
from dovetail.lowering.stablehlo.mending import lerp, root

ATEN = torch.ops.aten


def _scaled(x: Tensor, y: Any, alpha: float) -> Any:
    return y.to(torch.result_type(x, y)) * alpha if isinstance(y, Tensor) else y * alpha


def _add(x: Tensor, y: Any, alpha: float = 1) -> Any:
    return NotImplemented if alpha == 1 else torch.add(x, _scaled(x, y, alpha))


def _sub(x: Tensor, y: Any, alpha: float = 1) -> Any:
    return NotImplemented if alpha == 1 else torch.sub(x, _scaled(x, y, alpha))


def _rsub(x: Tensor, y: Any, alpha: float = 1) -> Any:
    if alpha == 1:
        return NotImplemented
    # A number less a tensor is not converted.
    return torch.add(x.to(torch.result_type(x, y)) * -alpha, y)


def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    if scale == input_scale == 1:
        return NotImplemented
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


def _celu(x: Tensor, alpha: float = 1) -> Any:
    return NotImplemented if alpha == 1 else _elu(x, alpha, 1, 1 / alpha)


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """From the larger one, so that nothing overflows; equal ones may be infinite, and have no difference."""
    less = torch.exp(-(x - y).abs())
    # log(1 + less), which TVM has not where `less` is small.
    more = torch.asinh(less * (less + 2) / ((less + 1) * 2))
    return torch.where(x == y, x + math.log(2), torch.maximum(x, y) + more)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """What is no number is as large as what is infinite; TVM would leave it anywhere."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    places = torch.topk(torch.where(torch.isnan(x), torch.inf, x), k, dim, largest, sorted)[1]
    return torch.gather(x, dim, places), places


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with a scale that is not TVM's own, or with fewer heads of keys than of queries."""
    if scale is None and not enable_gqa:
        return NotImplemented
    if attn_mask is not None or dropout_p:
        raise NoForm("TVM has its own scale of attention")
    if enable_gqa:
        key, value = (_heads(one, query.shape[-3]) for one in (key, value))
    scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.mT
    if is_causal:
        rows, columns = (torch.arange(n) for n in scores.shape[-2:])
        scores = torch.where(columns <= rows.unsqueeze(1), scores, -torch.inf)
    return torch.softmax(scores, -1) @ value


def _heads(x: Tensor, count: int) -> Tensor:
    *before, heads, rows, width = x.shape
    many = x.unsqueeze(-3).expand(*before, heads, count // heads, rows, width)
    return many.reshape(*before, count, rows, width)


MENDS: Mapping[Any, Callable[..., Any]] = {
    ATEN.add.Tensor: _add,
    ATEN.sub.Tensor: _sub,
    ATEN.rsub.Scalar: _rsub,
    ATEN.rsub.Tensor: _rsub,
    ATEN.elu.default: _elu,
    ATEN.celu.default: _celu,
    ATEN.logaddexp.default: _logaddexp,
    ATEN.topk.default: _topk,
    ATEN.pow.Tensor_Scalar: root,
    ATEN.lerp.Scalar: lerp,
    ATEN.lerp.Tensor: lerp,
    ATEN.scaled_dot_product_attention.default: _attention,
}
