"""Convolutions and poolings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from dovetail.lowering.onnx.elementwise import floating
from dovetail.lowering.onnx.types import NoForm
from dovetail.lowering.onnx.writer import Form, Writer, form


def _each(value: Any, rank: int) -> list[int]:
    listed = [value] if isinstance(value, int) else list(value)
    return listed * rank if len(listed) == 1 else listed


def _batched(w: Writer, node: Node, x: Any, rank: int) -> None:
    floating(w, x)
    if w.value(x).dim() != rank + 2:
        raise NoForm("an image without a batch")


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
        _batched(w, node, x, rank)
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
        return w.op(
            "Conv",
            w.of(x),
            w.of(weight),
            *rest,
            strides=_each(stride, rank),
            pads=pads,
            dilations=wide,
            group=groups,
            kernel_shape=w.sizes(weight)[2:],
            label=node.name,
        )

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
        _batched(w, node, x, rank)
        rest = [] if bias is None else [w.of(bias)]
        more, steps = _each(output_padding, rank), _each(stride, rank)
        if any(a >= b for a, b in zip(more, steps, strict=True)):
            raise NoForm("a transposed convolution padded by a stride or more")
        return w.op(
            "ConvTranspose",
            w.of(x),
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
        _batched(w, node, x, rank)
        made = w.op(
            "MaxPool",
            w.of(x),
            kernel_shape=_each(kernel, rank),
            strides=_each(stride if stride else kernel, rank),
            pads=_each(padding, rank) * 2,
            dilations=_each(dilation, rank),
            ceil_mode=int(ceil_mode),
            label=node.name,
        )
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
        _batched(w, node, x, rank)
        if divisor_override is not None:
            raise NoForm("an average with a divisor of its own")
        if ceil_mode:
            raise NoForm("an average whose last windows reach over the edge")
        return w.op(
            "AveragePool",
            w.of(x),
            kernel_shape=_each(kernel, rank),
            strides=_each(stride if stride else kernel, rank),
            pads=_each(padding, rank) * 2,
            count_include_pad=int(count_include_pad),
            label=node.name,
        )

    return write


def _adaptive(rank: int, kind: str) -> Form:
    def write(w: Writer, node: Node, x: Any, size: Sequence[Any]) -> Any:
        _batched(w, node, x, rank)
        wanted = _each(size, rank)
        if all(n == 1 for n in wanted):
            made = w.op(f"Global{kind}Pool", w.of(x), label=node.name)
        else:
            given = w.sizes(x)[2:]
            if any(a % b for a, b in zip(given, wanted, strict=True)):
                raise NoForm("windows of several sizes")
            step = [a // b for a, b in zip(given, wanted, strict=True)]
            made = w.op(f"{kind}Pool", w.of(x), kernel_shape=step, strides=step, label=node.name)
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
