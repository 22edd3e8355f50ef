"""Translations of matrix products, convolutions, pooling and attention."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from dovetail.formats.onnx.ops_elementwise import require_floating
from dovetail.formats.onnx.ops_reduce import reduced
from dovetail.formats.onnx.writer import MICROSOFT, OnnxWriter, OpTranslation, tensor_proto
from dovetail.ir.nodes import is_static_size
from dovetail.lowering.failures import UnsupportedOp


def _mm(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
    require_floating(w, node)
    return w.op("MatMul", w.of(a), w.of(b), label=node.name)


def _linear(w: OnnxWriter, node: Node, x: Any, weight: Any, bias: Any = None) -> str:
    require_floating(w, node)
    rank = w.rank(weight)
    if w.rank(x) == 2 and rank == 2:
        rest = [] if bias is None else [w.of(bias)]
        return w.op("Gemm", w.of(x), w.of(weight), *rest, transB=1, label=node.name)
    transposed = w.op("Transpose", w.of(weight), perm=[1, 0]) if rank == 2 else w.of(weight)
    product = w.op("MatMul", w.of(x), transposed, label=node.name)
    return product if bias is None else w.op("Add", product, w.of(bias), label=node.name)


def _addmm(w: OnnxWriter, node: Node, added: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> str:
    require_floating(w, node)
    dtype = w.dtype(node)
    product = w.op("MatMul", w.of(a), w.of(b))
    if alpha != 1:
        product = w.op("Mul", product, w.constant(alpha, dtype))
    if beta == 0:
        return product
    more = w.of(added) if beta == 1 else w.op("Mul", w.of(added), w.constant(beta, dtype))
    return w.op("Add", product, more, label=node.name)


def _outer(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
    require_floating(w, node)
    dtype = w.dtype(node)
    column = w.op("Unsqueeze", w.read(a, dtype), w.integers([1]))
    return w.op("Mul", column, w.read(b, dtype), label=node.name)


def _einsum(w: OnnxWriter, node: Node, equation: str, operands: Sequence[Any], **named: Any) -> str:
    require_floating(w, node)
    if named.get("path") is not None:
        raise UnsupportedOp("an einsum with a path")
    compact = equation.replace(" ", "")
    if not set(compact) <= {*string.ascii_letters, ",", "-", ">", "."}:
        raise UnsupportedOp(f"the equation '{equation}'")
    return w.op("Einsum", *map(w.of, operands), equation=compact, label=node.name)


PRODUCTS: Mapping[tuple[str, ...], OpTranslation] = {
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


def _per_dim(value: Any, rank: int) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * rank if len(numbers) == 1 else numbers


class _Batched:
    """An image with a batch dimension, which ONNX requires, and the way back."""

    def __init__(self, w: OnnxWriter, x: Any, rank: int) -> None:
        require_floating(w, x)
        self.w, self.alone = w, w.rank(x) == rank + 1
        self.name = w.op("Unsqueeze", w.of(x), w.integers([0])) if self.alone else w.of(x)

    def unbatched(self, result: str, label: str) -> str:
        """Return a result without the batch dimension if the image had none."""
        return self.w.op("Squeeze", result, self.w.integers([0]), label=label) if self.alone else result


def _convolution(rank: int) -> OpTranslation:
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
        image = _Batched(w, x, rank)
        rest = [] if bias is None else [w.of(bias)]
        if padding == "same" and any(s != 1 for s in _per_dim(stride, rank)):
            raise UnsupportedOp("padding 'same' with strides")
        dilations = _per_dim(dilation, rank)
        if isinstance(padding, str):
            kernel = w.sizes(weight)[2:]
            totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, kernel, strict=True)]
            # The odd element goes to the end, as in torch.
            pads = [t // 2 for t in totals] + [t - t // 2 for t in totals]
        else:
            pads = _per_dim(padding, rank) * 2
        result = w.op(
            "Conv",
            image.name,
            w.of(weight),
            *rest,
            strides=_per_dim(stride, rank),
            pads=pads,
            dilations=dilations,
            group=groups,
            kernel_shape=w.sizes(weight)[2:],
            label=node.name,
        )
        return image.unbatched(result, node.name)

    return write


def _transposed(rank: int) -> OpTranslation:
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
        image = _Batched(w, x, rank)
        rest = [] if bias is None else [w.of(bias)]
        extra, strides = _per_dim(output_padding, rank), _per_dim(stride, rank)
        if any(a >= b for a, b in zip(extra, strides, strict=True)):
            raise UnsupportedOp("a transposed convolution whose output padding is a stride or more")
        result = w.op(
            "ConvTranspose",
            image.name,
            w.of(weight),
            *rest,
            strides=strides,
            pads=_per_dim(padding, rank) * 2,
            output_padding=extra,
            dilations=_per_dim(dilation, rank),
            group=groups,
            kernel_shape=w.sizes(weight)[2:],
            label=node.name,
        )
        return image.unbatched(result, node.name)

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
    rank = w.rank(weight) - 2
    if transposed:
        return _transposed(rank)(w, node, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return _convolution(rank)(w, node, x, weight, bias, stride, padding, dilation, groups)


def _max_pool(rank: int, *, positions: bool) -> OpTranslation:
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
        image = _Batched(w, x, rank)
        result = w.op(
            "MaxPool",
            image.name,
            kernel_shape=_per_dim(kernel, rank),
            strides=_per_dim(stride if stride else kernel, rank),
            pads=_per_dim(padding, rank) * 2,
            dilations=_per_dim(dilation, rank),
            ceil_mode=int(ceil_mode),
            label=node.name,
        )
        result = image.unbatched(result, node.name)
        # ONNX counts positions differently.
        return (result, None) if positions else result

    return write


def _average_pool(rank: int) -> OpTranslation:
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
        image = _Batched(w, x, rank)
        if divisor_override is not None:
            raise UnsupportedOp("an average pool with divisor_override")
        if ceil_mode:
            raise UnsupportedOp("an average pool with ceil_mode")
        result = w.op(
            "AveragePool",
            image.name,
            kernel_shape=_per_dim(kernel, rank),
            strides=_per_dim(stride if stride else kernel, rank),
            pads=_per_dim(padding, rank) * 2,
            count_include_pad=int(count_include_pad),
            label=node.name,
        )
        return image.unbatched(result, node.name)

    return write


def _adaptive(rank: int, kind: str) -> OpTranslation:
    def write(w: OnnxWriter, node: Node, x: Any, size: Sequence[Any]) -> Any:
        image = _Batched(w, x, rank)
        target = _per_dim(size, rank)
        if all(n == 1 for n in target):
            result = w.op(f"Global{kind}Pool", image.name, label=node.name)
        else:
            source = w.sizes(x)[-rank:]
            if any(a % b for a, b in zip(source, target, strict=True)):
                raise UnsupportedOp("an adaptive pool with windows of different sizes")
            step = [a // b for a, b in zip(source, target, strict=True)]
            result = w.op(f"{kind}Pool", image.name, kernel_shape=step, strides=step, label=node.name)
        result = image.unbatched(result, node.name)
        return result if kind == "Average" else (result, None)

    return write


def _upsample_nearest2d(w: OnnxWriter, node: Node, x: Any, *_: Any) -> str:
    source, target = w.sizes(x), w.sizes(node)
    if any(b % a for a, b in zip(source, target, strict=True)):
        raise UnsupportedOp("an image upsampled by a fraction")
    scales = w.constant([b / a for a, b in zip(source, target, strict=True)])
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


CONVOLUTIONS: Mapping[tuple[str, ...], OpTranslation] = {
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
        keys, values = _repeat_heads(w, q, k, keys), _repeat_heads(w, q, v, values)
    if w.dialect.attention and _can_fuse(w, q, k, v, mask):
        return _fused(w, node, q, keys, values, mask, causal, factor)
    return _decomposed(w, node, q, k, keys, values, mask, causal, factor)


def _repeat_heads(w: OnnxWriter, q: Node, k: Node, name: str) -> str:
    """Repeat the heads of keys or values for grouped-query attention."""
    heads = w.fixed(w.value(q).shape[1], "the number of heads")
    batch, own, length, width = w.sizes(k)
    if heads == own:
        return name
    five = w.op("Unsqueeze", name, w.integers([2]))
    wide = w.op("Expand", five, w.integers([batch, own, heads // own, length, width]))
    return w.op("Reshape", wide, w.integers([batch, heads, length, width]))


def _mask(w: OnnxWriter, q: Node, k: Node, mask: Any, causal: bool) -> tuple[str | None, str | None]:
    """Return what is added to the scores, and which rows are masked entirely, if any can be."""
    dtype = w.dtype(q)
    if causal:
        rows, columns = (w.fixed(w.value(n).shape[-2], "the length of a sequence") for n in (q, k))
        allowed = torch.ones(rows, columns, dtype=torch.bool).tril()
        hidden = torch.zeros(rows, columns, dtype=dtype).masked_fill_(~allowed, -math.inf)
        return w.op("Constant", value=tensor_proto(hidden), label="causal"), None
    if mask is None:
        return None, None
    last = w.integers([-1])
    if w.dtype(mask) == torch.bool:
        counted = w.cast(w.of(mask), torch.bool, torch.int32)
        visible = reduced(w, "ReduceMax", counted, [last], keepdim=True)
        zero, never = w.constant(0.0, dtype), w.constant(-math.inf, dtype)
        return w.op("Where", w.of(mask), zero, never), w.op("Equal", visible, w.constant(0, torch.int32))
    # Not the maximum of each row: in OpenVINO it is finite where all are infinite.
    hidden = w.op("IsInf", w.read(mask, dtype), detect_positive=0)
    every = reduced(w, "ReduceMin", w.cast(hidden, torch.bool, torch.int32), [last], keepdim=True)
    return w.read(mask, dtype), w.op("Equal", every, w.constant(1, torch.int32))


def _decomposed(
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
    dtype = w.dtype(q)
    rank = w.rank(k)
    transposed = w.op("Transpose", keys, perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = w.op("Mul", w.op("MatMul", w.of(q), transposed), w.constant(factor, dtype))
    added, masked = _mask(w, q, k, mask, causal)
    if added is not None:
        scores = w.op("Add", scores, added)
    result = w.op("MatMul", w.op("Softmax", scores, axis=-1), values, label=node.name)
    # A row that is masked entirely is zero in torch, and NaN after a plain softmax.
    return (
        result if masked is None else w.op("Where", masked, w.constant(0.0, dtype), result, label=node.name)
    )


def _can_fuse(w: OnnxWriter, q: Node, k: Node, v: Node, mask: Any) -> bool:
    """Whether ONNX Runtime's operator supports it: four dimensions of known sizes in float32."""
    known = [w.value(n) for n in (q, k, v)]
    fixed = all(is_static_size(n) for value in known for n in value.shape)
    if not fixed or any(value.dim() != 4 or value.dtype != torch.float32 for value in known):
        return False
    return mask is None


def _fused(
    w: OnnxWriter, node: Node, q: Node, keys: str, values: str, mask: Any, causal: bool, factor: float
) -> str:
    batch, heads, length, width = w.sizes(q)
    result_width = w.sizes(node)[-1]

    def joined(name: str) -> str:
        transposed = w.op("Transpose", name, perm=[0, 2, 1, 3])
        return w.op("Reshape", transposed, w.integers([batch, -1, heads * width]))

    result = w.op(
        "MultiHeadAttention",
        joined(w.of(q)),
        keys,
        values,
        domain=MICROSOFT,
        num_heads=heads,
        scale=factor,
        unidirectional=int(causal),
    )
    by_head = w.op("Reshape", result, w.integers([batch, length, heads, result_width]))
    return w.op("Transpose", by_head, perm=[0, 2, 1, 3], label=node.name)


ATTENTION: Mapping[tuple[str, ...], OpTranslation] = {
    ("aten.scaled_dot_product_attention.default",): _scaled_dot_product_attention
}
