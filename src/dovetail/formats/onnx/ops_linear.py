"""Matrix products."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from dovetail.formats.onnx.ops_elementwise import floating
from dovetail.formats.onnx.ops_reduce import reduced
from dovetail.formats.onnx.writer import MICROSOFT, Form, OnnxWriter, packed
from dovetail.ir.nodes import is_number
from dovetail.lowering.failures import UnsupportedOp


def _mm(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
    floating(w, node)
    return w.op("MatMul", w.of(a), w.of(b), label=node.name)


def _linear(w: OnnxWriter, node: Node, x: Any, weight: Any, bias: Any = None) -> str:
    floating(w, node)
    rank = w.value(weight).dim()
    if w.value(x).dim() == 2 and rank == 2:
        rest = [] if bias is None else [w.of(bias)]
        return w.op("Gemm", w.of(x), w.of(weight), *rest, transB=1, label=node.name)
    turned = w.op("Transpose", w.of(weight), perm=[1, 0]) if rank == 2 else w.of(weight)
    product = w.op("MatMul", w.of(x), turned, label=node.name)
    return product if bias is None else w.op("Add", product, w.of(bias), label=node.name)


def _addmm(w: OnnxWriter, node: Node, added: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> str:
    floating(w, node)
    dtype = w.value(node).dtype
    product = w.op("MatMul", w.of(a), w.of(b))
    if alpha != 1:
        product = w.op("Mul", product, w.constant(alpha, dtype))
    if beta == 0:
        return product
    more = w.of(added) if beta == 1 else w.op("Mul", w.of(added), w.constant(beta, dtype))
    return w.op("Add", product, more, label=node.name)


def _outer(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
    floating(w, node)
    dtype = w.value(node).dtype
    column = w.op("Unsqueeze", w.read(a, dtype), w.constant([1], torch.int64))
    return w.op("Mul", column, w.read(b, dtype), label=node.name)


def _einsum(w: OnnxWriter, node: Node, equation: str, operands: Sequence[Any], **named: Any) -> str:
    floating(w, node)
    if named.get("path") is not None:
        raise UnsupportedOp("an einsum with a path")
    plain = equation.replace(" ", "")
    if not set(plain) <= {*string.ascii_letters, ",", "-", ">", "."}:
        raise UnsupportedOp(f"the equation '{equation}'")
    return w.op("Einsum", *map(w.of, operands), equation=plain, label=node.name)


PRODUCTS: Mapping[tuple[str, ...], Form] = {
    (
        "aten.mm.default",
        "aten.bmm.default",
        "aten.matmul.default",
        "aten.mv.default",
        "aten.dot.default",
    ): _mm,
    ("aten.linear.default",): _linear,
    ("aten.addmm.default", "aten.baddbmm.default"): _addmm,
    ("aten.outer.default",): _outer,
    ("aten.einsum.default",): _einsum,
}


def _each(value: Any, rank: int) -> list[int]:
    listed = [value] if isinstance(value, int) else list(value)
    return listed * rank if len(listed) == 1 else listed


class _Image:
    """An image for ONNX, which wants a batch of them, and the way back."""

    def __init__(self, w: OnnxWriter, x: Any, rank: int) -> None:
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
        w: OnnxWriter,
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
            raise UnsupportedOp("padding 'same' with strides")
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
        w: OnnxWriter,
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
            raise UnsupportedOp("a transposed convolution padded by a stride or more")
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


def _convolution_default(
    w: OnnxWriter,
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
        w: OnnxWriter,
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
        w: OnnxWriter,
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
            raise UnsupportedOp("an average with a divisor of its own")
        if ceil_mode:
            raise UnsupportedOp("an average whose last windows reach over the edge")
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
    def write(w: OnnxWriter, node: Node, x: Any, size: Sequence[Any]) -> Any:
        image = _Image(w, x, rank)
        wanted = _each(size, rank)
        if all(n == 1 for n in wanted):
            made = w.op(f"Global{kind}Pool", image.name, label=node.name)
        else:
            given = w.sizes(x)[-rank:]
            if any(a % b for a, b in zip(given, wanted, strict=True)):
                raise UnsupportedOp("windows of several sizes")
            step = [a // b for a, b in zip(given, wanted, strict=True)]
            made = w.op(f"{kind}Pool", image.name, kernel_shape=step, strides=step, label=node.name)
        made = image.back(made, node.name)
        return made if kind == "Average" else (made, None)

    return write


def _upsample_nearest2d(w: OnnxWriter, node: Node, x: Any, *_: Any) -> str:
    given, wanted = w.sizes(x), w.sizes(node)
    if any(b % a for a, b in zip(given, wanted, strict=True)):
        raise UnsupportedOp("an image grown by a fraction")
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


CONVOLUTIONS: Mapping[tuple[str, ...], Form] = {
    **{(f"aten.conv{rank}d.default", f"aten.conv{rank}d.padding"): _convolution(rank) for rank in (1, 2, 3)},
    **{
        (f"aten.conv_transpose{rank}d.default", f"aten.conv_transpose{rank}d.input"): _transposed(rank)
        for rank in (1, 2, 3)
    },
    ("aten.convolution.default",): _convolution_default,
    **{(f"aten.max_pool{rank}d.default",): _max_pool(rank, positions=False) for rank in (1, 2, 3)},
    **{
        (f"aten.max_pool{rank}d_with_indices.default",): _max_pool(rank, positions=True) for rank in (1, 2, 3)
    },
    **{(f"aten.avg_pool{rank}d.default",): _average_pool(rank) for rank in (1, 2, 3)},
    **{(f"aten.adaptive_avg_pool{rank}d.default",): _adaptive(rank, "Average") for rank in (1, 2, 3)},
    **{(f"aten.adaptive_max_pool{rank}d.default",): _adaptive(rank, "Max") for rank in (1, 2, 3)},
    ("aten._adaptive_avg_pool2d.default",): _adaptive(2, "Average"),
    ("aten.upsample_nearest2d.vec", "aten.upsample_nearest2d.default"): _upsample_nearest2d,
}


def _scaled_dot_product_attention(
    w: OnnxWriter,
    node: Node,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    if dropout:
        raise UnsupportedOp("an attention with dropout draws random numbers")
    width = w.fixed(w.value(q).shape[-1], "the width of a head")
    factor = 1 / math.sqrt(width) if scale is None else float(scale)
    keys, values = w.of(k), w.of(v)
    if enable_gqa:
        keys, values = _repeated(w, q, k, keys), _repeated(w, q, v, values)
    if w.dialect.attention and _fits(w, q, k, v, mask):
        return _fused(w, node, q, keys, values, mask, causal, factor)
    return _written(w, node, q, k, keys, values, mask, causal, factor)


def _repeated(w: OnnxWriter, q: Node, k: Node, name: str) -> str:
    """Heads of keys or values as often as there are heads of queries for each."""
    heads, *_ = (w.fixed(w.value(n).shape[1], "the number of heads") for n in (q,))
    batch, own, length, width = w.sizes(k)
    if heads == own:
        return name
    five = w.op("Unsqueeze", name, w.constant([2], torch.int64))
    wide = w.op("Expand", five, w.constant([batch, own, heads // own, length, width], torch.int64))
    return w.op("Reshape", wide, w.constant([batch, heads, length, width], torch.int64))


def _mask(w: OnnxWriter, q: Node, k: Node, mask: Any, causal: bool) -> tuple[str | None, str | None]:
    """What is added to the scores, and which rows may look at nothing, if that can be."""
    dtype = w.value(q).dtype
    if causal:
        rows, columns = (w.fixed(w.value(n).shape[-2], "the length of a sequence") for n in (q, k))
        allowed = torch.ones(rows, columns, dtype=torch.bool).tril()
        hidden = torch.zeros(rows, columns, dtype=dtype).masked_fill_(~allowed, -math.inf)
        return w.op("Constant", value=packed(hidden), label="causal"), None
    if mask is None:
        return None, None
    last = w.constant([-1], torch.int64)
    if w.value(mask).dtype == torch.bool:
        counted = w.cast(w.of(mask), torch.bool, torch.int32)
        seen = reduced(w, "ReduceMax", counted, [last], keepdim=True)
        zero, never = w.constant(0.0, dtype), w.constant(-math.inf, dtype)
        return w.op("Where", w.of(mask), zero, never), w.op("Equal", seen, w.constant(0, torch.int32))
    # Not the largest of each row: OpenVINO has a finite one where all are infinite.
    hidden = w.op("IsInf", w.read(mask, dtype), detect_positive=0)
    every = reduced(w, "ReduceMin", w.cast(hidden, torch.bool, torch.int32), [last], keepdim=True)
    return w.read(mask, dtype), w.op("Equal", every, w.constant(1, torch.int32))


def _written(
    w: OnnxWriter,
    node: Node,
    q: Node,
    k: Node,
    keys: str,
    values: str,
    mask: Any,
    causal: bool,
    factor: float,
) -> str:
    dtype = w.value(q).dtype
    rank = w.value(k).dim()
    turned = w.op("Transpose", keys, perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = w.op("Mul", w.op("MatMul", w.of(q), turned), w.constant(factor, dtype))
    added, blind = _mask(w, q, k, mask, causal)
    if added is not None:
        scores = w.op("Add", scores, added)
    made = w.op("MatMul", w.op("Softmax", scores, axis=-1), values, label=node.name)
    # A row that may look at nothing is zero in torch, and no number where scores are just added up.
    return made if blind is None else w.op("Where", blind, w.constant(0.0, dtype), made, label=node.name)


def _fits(w: OnnxWriter, q: Node, k: Node, v: Node, mask: Any) -> bool:
    """Whether ONNX Runtime's operator takes it: four dimensions, of known sizes, in single precision."""
    known = [w.value(n) for n in (q, k, v)]
    fixed = all(is_number(n) for value in known for n in value.shape)
    if not fixed or any(value.dim() != 4 or value.dtype != torch.float32 for value in known):
        return False
    return mask is None


def _fused(
    w: OnnxWriter, node: Node, q: Node, keys: str, values: str, mask: Any, causal: bool, factor: float
) -> str:
    batch, heads, length, width = w.sizes(q)
    made_width = w.sizes(node)[-1]

    def joined(name: str) -> str:
        turned = w.op("Transpose", name, perm=[0, 2, 1, 3])
        return w.op("Reshape", turned, w.constant([batch, -1, heads * width], torch.int64))

    made = w.op(
        "MultiHeadAttention",
        joined(w.of(q)),
        keys,
        values,
        domain=MICROSOFT,
        num_heads=heads,
        scale=factor,
        unidirectional=int(causal),
    )
    apart = w.op("Reshape", made, w.constant([batch, length, heads, made_width], torch.int64))
    return w.op("Transpose", apart, perm=[0, 2, 1, 3], label=node.name)


ATTENTION: Mapping[tuple[str, ...], Form] = {
    ("aten.scaled_dot_product_attention.default",): _scaled_dot_product_attention,
}
