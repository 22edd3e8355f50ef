"""Operators that torch-mlir gets wrong, in operations that it gets right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ATEN = torch.ops.aten


def root(x: Tensor, exponent: float) -> Any:
    """Powers that torch takes for roots, which differ from powers for the lowest of all numbers."""
    if exponent == 0.5:
        return torch.sqrt(x)
    return torch.rsqrt(x) if exponent == -0.5 else NotImplemented


def lerp(start: Tensor, end: Tensor, weight: Any) -> Any:
    """Between two values, from the nearer one, so that an infinite one stays what it is."""
    way = end - start
    if isinstance(weight, Tensor):
        return torch.where(weight.abs() < 0.5, start + way * weight, end + way * (weight - 1))
    return start + way * weight if abs(weight) < 0.5 else end + way * (weight - 1)


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Any:
    return NotImplemented if value == 1 else x + a * value * b


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Any:
    return NotImplemented if value == 1 else x + a * value / b


def _log_sigmoid(x: Tensor) -> Tensor:
    return torch.clamp(x, max=0) - torch.log1p(torch.exp(-x.abs()))


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if eps is not None:
        return NotImplemented
    return ATEN.rms_norm.default(x, normalized_shape, weight, torch.finfo(x.dtype).eps)


def _max_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Where a last window is not full: the largest of what is at each place of a window."""
    k, p, d = (_pair(one) for one in (kernel, padding, dilation))
    s = _pair(stride) if stride else k
    counts, missing = [0, 0], [0, 0]
    for i in range(2):
        size, reach = x.shape[i - 2], d[i] * (k[i] - 1) + 1
        counts[i] = -((reach - size - 2 * p[i]) // s[i]) + 1
        # No window begins behind the end.
        counts[i] -= (counts[i] - 1) * s[i] >= size + p[i]
        missing[i] = (counts[i] - 1) * s[i] + reach - size - 2 * p[i]
    if not ceil_mode or max(missing) <= 0:
        return NotImplemented
    down, across = (max(n, 0) for n in missing)
    least = -torch.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    wide = F.pad(x, (p[1], p[1] + across, p[0], p[0] + down), value=least)
    rows, columns = (
        [slice(j * d[i], j * d[i] + (counts[i] - 1) * s[i] + 1, s[i]) for j in range(k[i])] for i in range(2)
    )
    return functools.reduce(torch.maximum, [wide[..., r, c] for r in rows for c in columns])


def _pair(sizes: Sequence[int]) -> list[int]:
    return [sizes[0], sizes[-1]]


def _without(product: Callable[..., Tensor]) -> Callable[..., Any]:
    """A product to which something is added; nothing of what is taken zero times may be left."""

    def run(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        if beta:
            return NotImplemented
        made = product(a, b)
        return made if alpha == 1 else made * alpha

    return run


def _extreme(target: Any) -> Callable[..., Any]:
    """The place of the largest or smallest one; what is no number is both."""

    def run(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if not x.dtype.is_floating_point:
            return NotImplemented
        lost = torch.isnan(x)
        some = lost.any() if dim is None else lost.any(dim, keepdim)
        return torch.where(some, torch.argmax(lost.int(), dim, keepdim), target(x, dim, keepdim))

    return run


def _ordered(target: Any) -> Callable[..., Any]:
    """What is in order; of what is no number the sign is that of the largest."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not x.dtype.is_floating_point:
            return NotImplemented
        return target(torch.where(torch.isnan(x), torch.nan, x), *args, **kwargs)

    return run


def _cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Each side has a least length of its own."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    a, b = (
        one / torch.linalg.vector_norm(one, 2, dim, keepdim=True).clamp(min=eps)
        for one in torch.broadcast_tensors(x.to(dtype), y.to(dtype))
    )
    return (a * b).sum(dim)


MENDS: Mapping[Any, Callable[..., Any]] = {
    ATEN.pow.Tensor_Scalar: root,
    ATEN.lerp.Scalar: lerp,
    ATEN.lerp.Tensor: lerp,
    ATEN.addcmul.default: _addcmul,
    ATEN.addcdiv.default: _addcdiv,
    ATEN.log_sigmoid.default: _log_sigmoid,
    ATEN.rms_norm.default: _rms_norm,
    ATEN.max_pool2d.default: _max_pool2d,
    ATEN.addmm.default: _without(torch.mm),
    ATEN.baddbmm.default: _without(torch.bmm),
    ATEN.argmax.default: _extreme(ATEN.argmax.default),
    ATEN.argmin.default: _extreme(ATEN.argmin.default),
    ATEN.sort.default: _ordered(ATEN.sort.default),
    ATEN.argsort.default: _ordered(ATEN.argsort.default),
    ATEN.topk.default: _ordered(ATEN.topk.default),
    ATEN.cosine_similarity.default: _cosine_similarity,
}
