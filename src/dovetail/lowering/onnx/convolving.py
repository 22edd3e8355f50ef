"""Convolutions and poolings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from dovetail.lowering.onnx.elementwise import floating
from dovetail.lowering.onnx.types import NoForm
from dovetail.lowering.onnx.writer import Form, Writer, form


def _each(value: Any, rank: int) -> list[int]:
    listed = [value] if isinstance(value, int) else list(value)
    return listed * rank if len(listed) == 1 else listed


class _Image:
    """An image for ONNX, which wants a batch of them, and the way back."""

    def __init__(self, w: Writer, x: Any, rank: int) -> None:
        floating(w, x)
        self.w, self.alone = w, w.value(x).dim() == rank + 1
        self.name = w.op("Unsqueeze", w.of(x), self._front()) if self.alone else w.of(x)

    def _front(self) -> str:
        return self.w.constant([0], torch.int64)

    def back(self, made: str, label: str) -> str:
        """A result without a batch if there was none."""
        return self.w.op("Squeeze", made, self._front(), label=label) if self.alone else made


def _convolution(rank: int) -> Form:
    def write(
        w: Writer,
        node: Node,
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> str:
        image = _Image(w, x, rank)
        rest = [] if bias is None else [w.of(bias)]
        if padding == "same" and any(s != 1 for s in _each(stride, rank)):
            raise NoForm("padding 'same' with strides")
        wide = _each(dilation, rank)
        if isinstance(padding, str):
            kernel = w.sizes(weight)[2:]
            totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(wide, kernel, strict=True)]
            # An odd rest goes behind, as torch has it.
            pads = [t // 2 for t in totals] + [t - t // 2 for t in totals]
        else:
            pads = _each(padding, rank) * 2
        made = w.op(
            "Conv",
            image.name,
            w.of(weight),
            *rest,
            strides=_each(stride, rank),
            pads=pads,
            dilations=wide,
            group=groups,
            kernel_shape=w.sizes(weight)[2:],
            label=node.name,
        )
        return image.back(made, node.name)

    return write


def _transposed(rank: int) -> Form:
    def write(
        w: Writer,
        node: Node,
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> str:
        image = _Image(w, x, rank)
        rest = [] if bias is None else [w.of(bias)]
        more, steps = _each(output_padding, rank), _each(stride, rank)
        if any(a >= b for a, b in zip(more, steps, strict=True)):
            raise NoForm("a transposed convolution padded by a stride or more")
        made = w.op(
            "ConvTranspose",
            image.name,
            w.of(weight),
            *rest,
            strides=_each(stride, rank),
            pads=_each(padding, rank) * 2,
            output_padding=_each(output_padding, rank),
            dilations=_each(dilation, rank),
            group=groups,
            kernel_shape=w.sizes(weight)[2:],
            label=node.name,
        )
        return image.back(made, node.name)

    return write


for _rank in (1, 2, 3):
    form(f"aten.conv{_rank}d.default", f"aten.conv{_rank}d.padding")(_convolution(_rank))
    form(f"aten.conv_transpose{_rank}d.default", f"aten.conv_transpose{_rank}d.input")(_transposed(_rank))


@form("aten.convolution.default")
def _(
    w: Writer,
    node: Node,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> str:
    rank = w.value(weight).dim() - 2
    if transposed:
        return _transposed(rank)(w, node, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return _convolution(rank)(w, node, x, weight, bias, stride, padding, dilation, groups)


def _max_pool(rank: int, *, positions: bool) -> Form:
    def write(
        w: Writer,
        node: Node,
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        image = _Image(w, x, rank)
        made = w.op(
            "MaxPool",
            image.name,
            kernel_shape=_each(kernel, rank),
            strides=_each(stride if stride else kernel, rank),
            pads=_each(padding, rank) * 2,
            dilations=_each(dilation, rank),
            ceil_mode=int(ceil_mode),
            label=node.name,
        )
        made = image.back(made, node.name)
        # Positions are counted otherwise in ONNX.
        return (made, None) if positions else made

    return write


def _average_pool(rank: int) -> Form:
    def write(
        w: Writer,
        node: Node,
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> str:
        image = _Image(w, x, rank)
        if divisor_override is not None:
            raise NoForm("an average with a divisor of its own")
        if ceil_mode:
            raise NoForm("an average whose last windows reach over the edge")
        made = w.op(
            "AveragePool",
            image.name,
            kernel_shape=_each(kernel, rank),
            strides=_each(stride if stride else kernel, rank),
            pads=_each(padding, rank) * 2,
            count_include_pad=int(count_include_pad),
            label=node.name,
        )
        return image.back(made, node.name)

    return write


def _adaptive(rank: int, kind: str) -> Form:
    def write(w: Writer, node: Node, x: Any, size: Sequence[Any]) -> Any:
        image = _Image(w, x, rank)
        wanted = _each(size, rank)
        if all(n == 1 for n in wanted):
            made = w.op(f"Global{kind}Pool", image.name, label=node.name)
        else:
            given = w.sizes(x)[-rank:]
            if any(a % b for a, b in zip(given, wanted, strict=True)):
                raise NoForm("windows of several sizes")
            step = [a // b for a, b in zip(given, wanted, strict=True)]
            made = w.op(f"{kind}Pool", image.name, kernel_shape=step, strides=step, label=node.name)
        made = image.back(made, node.name)
        return made if kind == "Average" else (made, None)

    return write


for _rank in (1, 2, 3):
    form(f"aten.max_pool{_rank}d.default")(_max_pool(_rank, positions=False))
    form(f"aten.max_pool{_rank}d_with_indices.default")(_max_pool(_rank, positions=True))
    form(f"aten.avg_pool{_rank}d.default")(_average_pool(_rank))
    form(f"aten.adaptive_avg_pool{_rank}d.default")(_adaptive(_rank, "Average"))
    form(f"aten.adaptive_max_pool{_rank}d.default")(_adaptive(_rank, "Max"))
form("aten._adaptive_avg_pool2d.default")(_adaptive(2, "Average"))


@form("aten.upsample_nearest2d.vec", "aten.upsample_nearest2d.default")
def _(w: Writer, node: Node, x: Any, *_: Any) -> str:
    given, wanted = w.sizes(x), w.sizes(node)
    if any(b % a for a, b in zip(given, wanted, strict=True)):
        raise NoForm("an image grown by a fraction")
    scales = w.constant([b / a for a, b in zip(given, wanted, strict=True)])
    return w.op(
        "Resize",
        w.of(x),
        "",
        scales,
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
        label=node.name,
    )
