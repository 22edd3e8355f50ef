"""What the larger ONNX operators are in torch: products, convolutions, norms, reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.interop.onnx_operators import OPERATORS, NoCounterpart, Reading, listed, operator, tensor


@operator("MatMul")
def _(a: Any, b: Any) -> Any:
    return torch.matmul(a, b)


@operator("Gemm")
def _(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Any:
    left = torch.transpose(a, 0, 1) if transA else a
    if transB and alpha == 1 and (c is None or (beta == 1 and isinstance(c, Tensor) and c.dim() == 1)):
        return F.linear(left, b, c)
    product = torch.matmul(left, torch.transpose(b, 0, 1) if transB else b)
    if alpha != 1:
        product = product * alpha
    return product if c is None else product + (c if beta == 1 else c * beta)


@operator("Einsum")
def _(*operands: Any, equation: str) -> Any:
    return torch.einsum(equation, *operands)


def _pads(
    x: Any, window: Sequence[int], pads: Any, auto_pad: str, strides: Any, dilations: Any
) -> tuple[list[int], list[int]]:
    """Paddings on both sides of what windows go over, and what one side has more, as `F.pad` wants it."""
    rank = len(window)
    given = [0] * 2 * rank if pads is None or auto_pad == "VALID" else list(pads)
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        steps, spread = strides or [1] * rank, dilations or [1] * rank
        sums = [
            max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            for n, k, s, d in zip(x.shape[-rank:], window, steps, spread, strict=True)
        ]
        less, more = [n // 2 for n in sums], [n - n // 2 for n in sums]
        given = less + more if auto_pad == "SAME_UPPER" else more + less
    elif auto_pad not in ("NOTSET", "VALID"):
        raise NoCounterpart(f"auto_pad '{auto_pad}'")
    before, after = given[:rank], given[rank:]
    both = [min(a, b) for a, b in zip(before, after, strict=True)]
    extra = [n for i in reversed(range(rank)) for n in (before[i] - both[i], after[i] - both[i])]
    return both, extra if any(extra) else []


@operator("Conv")
def _(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    strides: Any = None,
    pads: Any = None,
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    auto_pad: str = "NOTSET",
) -> Any:
    rank = weight.dim() - 2
    both, extra = _pads(x, weight.shape[2:], pads, auto_pad, strides, dilations)
    function: Any = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    given = F.pad(x, extra) if extra else x
    return function(given, weight, bias, strides or 1, both, dilations or 1, group)


@operator("ConvTranspose")
def _(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    strides: Any = None,
    pads: Any = None,
    output_padding: Any = None,
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    auto_pad: str = "NOTSET",
) -> Any:
    if auto_pad not in ("NOTSET", "VALID"):
        raise NoCounterpart(f"a transposed convolution with auto_pad '{auto_pad}'")
    rank = weight.dim() - 2
    both, extra = _pads(x, weight.shape[2:], pads, auto_pad, strides, dilations)
    if extra:
        raise NoCounterpart("a transposed convolution with uneven padding")
    function: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    return function(x, weight, bias, strides or 1, both, output_padding or 0, group, dilations or 1)


@operator("MaxPool")
def _(
    x: Any,
    *,
    kernel_shape: Any,
    strides: Any = None,
    pads: Any = None,
    dilations: Any = None,
    ceil_mode: int = 0,
    storage_order: int = 0,
    auto_pad: str = "NOTSET",
) -> Any:
    rank = len(kernel_shape)
    both, extra = _pads(x, kernel_shape, pads, auto_pad, strides, dilations)
    if extra:
        x = F.pad(x, extra, value=float("-inf"))
    function: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    return function(x, kernel_shape, strides or [1] * rank, both, dilations or 1, bool(ceil_mode))


@operator("AveragePool")
def _(
    x: Any,
    *,
    kernel_shape: Any,
    strides: Any = None,
    pads: Any = None,
    dilations: Any = None,
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    auto_pad: str = "NOTSET",
) -> Any:
    rank = len(kernel_shape)
    both, extra = _pads(x, kernel_shape, pads, auto_pad, strides, dilations)
    if extra or any(d != 1 for d in dilations or ()):
        raise NoCounterpart("an average pooling with uneven padding or dilation")
    function: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    steps = strides or [1] * rank
    return function(x, kernel_shape, steps, both, bool(ceil_mode), bool(count_include_pad))


def _global(functions: Sequence[Reading]) -> Reading:
    def read(x: Any) -> Any:
        return functions[x.dim() - 3](x, [1] * (x.dim() - 2))

    return read


OPERATORS["GlobalAveragePool"] = _global(
    [F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d]
)
OPERATORS["GlobalMaxPool"] = _global([F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d])


@operator("LayerNormalization")
def _(
    x: Any, scale: Any, bias: Any = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    sizes = list(x.shape)[axis % x.dim() :]
    return F.layer_norm(x, sizes, scale, bias, epsilon)


@operator("BatchNormalization")
def _(
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Any:
    if training_mode:
        raise NoCounterpart("a batch norm that learns its statistics")
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)


@operator("InstanceNormalization")
def _(x: Any, scale: Any, bias: Any, *, epsilon: float = 1e-5) -> Any:
    return F.instance_norm(x, None, None, scale, bias, True, 0.0, epsilon)


@operator("Resize")
def _(x: Any, region: Any = None, scales: Any = None, sizes: Any = None, **options: Any) -> Any:
    plain = options.get("mode", "nearest") == "nearest" and options.get("nearest_mode") == "floor"
    if not plain or options.get("coordinate_transformation_mode") != "asymmetric" or scales is None:
        raise NoCounterpart("a resize other than by the nearest neighbour to the front")
    factors = listed(scales, "a scale")
    if not factors:
        raise NoCounterpart("a resize to sizes")
    if options.get("axes") is not None:
        given = dict(zip((a % x.dim() for a in options["axes"]), factors, strict=True))
        factors = [given.get(i, 1.0) for i in range(x.dim())]
    if any(f != 1 for f in factors[:2]):
        raise NoCounterpart("a resize of the batch or of channels")
    return F.interpolate(x, scale_factor=factors[2:], mode="nearest")


def _reduced(function: Reading, whole: Reading) -> Reading:
    """A reduction; `whole` is what it does to elements where it reduces over nothing."""

    def read(x: Any, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        given = tensor(x)
        places = [] if axes is None else listed(axes, "what is reduced over")
        if not places and noop_with_empty_axes:
            return whole(given)
        return function(given, places or list(range(given.dim())), bool(keepdims))

    return read


def _product(x: Tensor, places: list[int], keep: bool) -> Tensor:
    found = x
    for place in sorted((p % x.dim() for p in places), reverse=True):
        found = torch.prod(found, place, keep)
    return found


def _norm(order: int) -> Reading:
    def read(x: Tensor, places: list[int], keep: bool) -> Tensor:
        return torch.linalg.vector_norm(x, order, places, keep)

    return read


for _name, _function in {
    "ReduceSum": torch.sum,
    "ReduceMean": torch.mean,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceProd": _product,
    "ReduceL1": _norm(1),
    "ReduceL2": _norm(2),
}.items():
    _whole = torch.abs if _name in ("ReduceL1", "ReduceL2") else tensor
    OPERATORS[_name] = _reduced(cast("Reading", _function), _whole)


@operator("Softmax")
def _(x: Any, *, axis: int = -1) -> Any:
    return torch.softmax(x, axis)


@operator("LogSoftmax")
def _(x: Any, *, axis: int = -1) -> Any:
    return torch.log_softmax(x, axis)
