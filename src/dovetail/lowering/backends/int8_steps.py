"""Products in integers: weights in steps of their own for each output, packed for oneDNN, and the call."""

from __future__ import annotations

import functools
import platform
from typing import Any

import torch
from torch import Tensor

from dovetail import torch_compat
from dovetail.lowering.backends.int8_products import Product
from dovetail.lowering.backends.int8_ranges import Range, Seen, mean_of, range_of
from dovetail.lowering.faults import Failure
from dovetail.passes.fold_conv_batch_norm import folded_weights

_LARGEST = 127
# Added to a number, it leaves the nearest whole one in the last bits of the sum: float32 has 23 behind the first.
_SHIFT = 1.5 * 2**23
_NEEDED = ("qlinear_prepack", "qlinear_pointwise", "qconv_prepack", "qconv_pointwise")


@functools.cache
def why_not_here() -> str | None:
    """Why nothing runs in int8 on this machine; None if it does."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"int8 needs an x86 processor, and this one is {platform.machine()}"
    missing = [name for name in _NEEDED if not hasattr(torch.ops.onednn, name)]
    if missing or not torch.backends.mkldnn.is_available():
        return f"this build of torch has no onednn::{(missing or list(_NEEDED))[0]}"
    told = torch_compat.VNNI.value
    if told is None or not told():
        # Without it oneDNN adds pairs of products in 16 bits, which overflow.
        return "this processor has no AVX512-VNNI, without which sums of bytes overflow"
    return None


def quantised_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight as int8 and the step of each output, its first dimension."""
    flat = weight.flatten(1)
    steps = flat.abs().amax(1) / _LARGEST
    steps = torch.where(steps > 0, steps, torch.ones_like(steps))
    whole = (flat / steps[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return whole.reshape(weight.shape), steps


class Bytes:
    """Turns values into bytes of a range, laid out as the operator reads them."""

    def __init__(self, steps: Range, layout: torch.memory_format) -> None:
        self.shift = torch.tensor(_SHIFT + steps.zero_point)
        self.factor, self.layout = 1.0 / steps.scale, layout

    def __call__(self, x: Tensor) -> Tensor:
        # Three passes; scaling, shifting, rounding, cutting off and converting one after the other are five.
        placed = torch.add(self.shift, x, alpha=self.factor).clamp_(_SHIFT, _SHIFT + 255)
        return placed.view(torch.int32).to(torch.uint8, memory_format=self.layout)


class Step:
    """One product with its weights packed, for values like those that were seen.

    What the weights are off by, times the means of the inputs, goes into the bias: on average nothing is off. Called with the value, the residual if there is one, and the weights, which it does not look at any more.
    """

    def __init__(self, product: Product, seen: Seen, layout: torch.memory_format, weights: Any) -> None:
        weight, bias = _folded(product, weights)
        whole, scales = quantised_weight(weight)
        missing = _on_average(weight - whole * scales.reshape(-1, *[1] * (weight.dim() - 1)), seen.mean)
        bias = missing if bias is None else bias + missing
        steps, self.layout = seen.range, layout
        zeros = torch.zeros(len(scales), dtype=torch.int32)
        window = product.window
        if window is None:
            packed = torch.ops.onednn.qlinear_prepack(whole.contiguous(), None)
            self.bytes = Bytes(steps, torch.contiguous_format)
            geometry: tuple[Any, ...] = ()
        else:
            geometry = tuple(map(list, (window.stride, window.padding, window.dilation)))
            geometry = (*geometry, window.groups)
            packed = torch.ops.onednn.qconv_prepack(
                whole.contiguous(), scales, steps.scale, steps.zero_point, *geometry, list(seen.sizes)
            )
            self.bytes = Bytes(steps, channels_last(len(window.stride)))
        self.run = _binary if product.residual is not None else _linear if window is None else _conv
        self.given = (steps.scale, steps.zero_point, packed, scales, zeros)
        self.rest = (bias, *geometry, 1.0, 0, torch.float32)
        self.post = (product.post, [], product.algorithm)

    def __call__(self, x: Tensor, residual: Tensor | None, *_: Any) -> Tensor:
        return self.run(self, self.bytes(x), residual)


def _linear(step: Step, x: Tensor, _: Any) -> Tensor:
    return torch.ops.onednn.qlinear_pointwise.default(x, *step.given, *step.rest, *step.post)


def _binary(step: Step, x: Tensor, residual: Any) -> Tensor:
    # It reads the memory of the residual from end to end, whatever the strides say.
    return torch.ops.onednn.qlinear_pointwise.binary(
        x, *step.given, residual.contiguous(), *step.rest, 1.0, 0, "add", 1.0, *step.post
    )


def _conv(step: Step, x: Tensor, _: Any) -> Tensor:
    made = torch.ops.onednn.qconv_pointwise.default(x, *step.given, *step.rest, *step.post)
    return made.contiguous(memory_format=step.layout)


class Ranging:
    """A product that takes its range from the values of each call and packs its weights anew.

    Slow: what code is tried and verified with, before there is any call to calibrate on.
    """

    def __init__(self, product: Product, layout: torch.memory_format) -> None:
        self.product, self.layout = product, layout

    def __call__(self, x: Tensor, residual: Tensor | None, *weights: Any) -> Tensor:
        low, high = (float(v) for v in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
        if not abs(low) + abs(high) < float("inf"):
            raise Failure("values that are not finite have no range")
        seen = Seen(range_of(low, high), mean_of(x, self.product.inputs), tuple(x.shape))
        return Step(self.product, seen, self.layout, weights)(x, residual)


def channels_last(rank: int) -> torch.memory_format:
    """The layout in which the operator goes over images of so many dimensions."""
    return {2: torch.channels_last, 3: torch.channels_last_3d}.get(rank, torch.contiguous_format)


def _on_average(weight: Tensor, mean: Tensor) -> Tensor:
    """What a weight gives for inputs that are their means, at the borders of images too."""
    inputs = weight.shape[1]
    groups = len(mean) // inputs
    each = weight.reshape(groups, -1, inputs, weight[0, 0].numel()).sum(3)
    return torch.bmm(each, mean.reshape(groups, inputs, 1)).reshape(-1)


def _folded(product: Product, weights: Any) -> tuple[Tensor, Tensor | None]:
    """The weight with outputs first and the bias, a batch norm folded into both."""
    given: list[Any] = [None if w is None else w.detach() for w in weights]
    weight, bias, *norm = given
    if product.turned:
        weight = weight.t()
    if not norm:
        return weight, bias
    scale, shift, mean, variance = norm
    return folded_weights(weight, bias, scale, shift, mean, variance, product.eps)
