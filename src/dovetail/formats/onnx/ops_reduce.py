"""Translations of reductions and normalization layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from dovetail.formats.onnx.writer import OnnxWriter, OpTranslation
from dovetail.lowering.failures import UnsupportedOp


def _axes(w: OnnxWriter, x: Any, dims: Any) -> list[str]:
    """Return the operand with the dimensions to reduce over, in a list that is empty for all dimensions."""
    if dims is None or dims == [] or not w.rank(x):
        return []
    if isinstance(dims, Node):
        raise UnsupportedOp("a computed dimension")
    return [w.axes([dims] if isinstance(dims, int) else list(dims), w.rank(x))]


def reduced(
    w: OnnxWriter, kind: str, x: str, axes: Sequence[str], keepdim: bool = False, label: str = ""
) -> str:
    """Append a reduction over some dimensions, or over all."""
    return w.op(kind, x, *axes, keepdims=int(keepdim), label=label)


def _reduction(kind: str) -> OpTranslation:
    def write(
        w: OnnxWriter, node: Node, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> str:
        return reduced(w, kind, w.read(x, w.dtype(node)), _axes(w, x, dims), keepdim, node.name)

    return write


def _sum(
    w: OnnxWriter, node: Node, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> str:
    if w.dialect.runs and w.dtype(x) == torch.int64:
        raise UnsupportedOp("a sum of int64, which ONNX runtimes compute in floating point")
    return _reduction("ReduceSum")(w, node, x, dims, keepdim)


def _prod(
    w: OnnxWriter, node: Node, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> str:
    if w.dialect.runs and not w.dtype(node).is_floating_point:
        raise UnsupportedOp("a product of integers, which ONNX runtimes compute in floating point")
    return _reduction("ReduceProd")(w, node, x, dim, keepdim)


def _max(w: OnnxWriter, node: Node, x: Any, dim: int, keepdim: bool = False) -> tuple[str, ...]:
    if not w.rank(x) or w.dtype(x) == torch.bool:
        raise UnsupportedOp("the position of the extremum of a scalar or of booleans")
    most = "aten.max" in str(node.target)
    values = reduced(w, "ReduceMax" if most else "ReduceMin", w.of(x), _axes(w, x, dim), keepdim)
    at = w.op("ArgMax" if most else "ArgMin", w.of(x), axis=dim, keepdims=int(keepdim), label=node.name)
    return values, at


def _any(w: OnnxWriter, node: Node, x: Any, dims: Any = None, keepdim: bool = False) -> str:
    kind = "ReduceMax" if "aten.any" in str(node.target) else "ReduceMin"
    counted = w.cast(w.read(x, torch.bool), torch.bool, torch.int32)
    return w.cast(reduced(w, kind, counted, _axes(w, x, dims), keepdim), torch.int32, torch.bool)


def _var(w: OnnxWriter, node: Node, x: Any, dims: Any = None, *rest: Any, **named: Any) -> str:
    if rest:
        correction, keepdim = int(rest[0]), bool(rest[1])
    else:
        correction, keepdim = named.get("correction"), bool(named.get("keepdim", False))
        correction = 1 if correction is None else correction
    value = w.value(x)
    if isinstance(dims, int):
        raise UnsupportedOp("a variance over one dimension that is not in a list")
    over = range(value.dim()) if not dims or not value.dim() else dims
    count = 1
    for d in over:
        count *= w.fixed(value.shape[d], "the number of elements of a variance")
    if count <= correction:
        raise UnsupportedOp("the variance of too few elements")
    axes = _axes(w, x, dims)
    away = w.op("Sub", w.of(x), reduced(w, "ReduceMean", w.of(x), axes, keepdim=True))
    total = reduced(w, "ReduceSum", w.op("Mul", away, away), axes, keepdim)
    variance = w.op("Div", total, w.constant(count - correction, value.dtype), label=node.name)
    return w.op("Sqrt", variance, label=node.name) if "aten.std" in str(node.target) else variance


def _linalg_vector_norm(
    w: OnnxWriter, node: Node, x: Any, order: Any = 2, dims: Any = None, keepdim: bool = False, **_: Any
) -> str:
    kinds = {1: "ReduceL1", 2: "ReduceL2"}
    if order not in kinds:
        raise UnsupportedOp(f"a norm of order {order}")
    return reduced(w, kinds[order], w.read(x, w.dtype(node)), _axes(w, x, dims), keepdim, node.name)


def _cumsum(w: OnnxWriter, node: Node, x: Any, dim: int, *, dtype: Any = None) -> str:
    source = w.read(x, w.dtype(node))
    if not w.rank(x):
        return w.identity(node, source)
    return w.op("CumSum", source, w.integer(dim % w.rank(x)), label=node.name)


def _softmax(kind: str) -> OpTranslation:
    def write(w: OnnxWriter, node: Node, x: Any, dim: int, dtype: Any = None) -> str:
        if not w.rank(x):
            raise UnsupportedOp("the softmax of a scalar")
        # The third operand of `_softmax` asks for float32; the dtype of the result shows it.
        return w.op(kind, w.read(x, w.dtype(node)), axis=dim, label=node.name)

    return write


REDUCTIONS: Mapping[tuple[str, ...], OpTranslation] = {
    ("aten.sum.dim_IntList", "aten.sum.default"): _sum,
    ("aten.mean.dim", "aten.mean.default"): _reduction("ReduceMean"),
    ("aten.amax.default", "aten.max.default"): _reduction("ReduceMax"),
    ("aten.amin.default", "aten.min.default"): _reduction("ReduceMin"),
    ("aten.logsumexp.default",): _reduction("ReduceLogSumExp"),
    ("aten.prod.dim_int", "aten.prod.default"): _prod,
    ("aten.max.dim", "aten.min.dim"): _max,
    (
        "aten.any.default",
        "aten.any.dim",
        "aten.any.dims",
        "aten.all.default",
        "aten.all.dim",
        "aten.all.dims",
    ): _any,
    ("aten.var.correction", "aten.std.correction", "aten.var.dim", "aten.std.dim"): _var,
    ("aten.linalg_vector_norm.default",): _linalg_vector_norm,
    ("aten.cumsum.default",): _cumsum,
    ("aten.softmax.int", "aten._softmax.default"): _softmax("Softmax"),
    ("aten.log_softmax.int", "aten._log_softmax.default"): _softmax("LogSoftmax"),
}


def _weight(w: OnnxWriter, weight: Any, sizes: Sequence[int], default: float, dtype: torch.dtype) -> str:
    """Return a weight, or a constant in place of one that is absent."""
    if weight is not None:
        return w.read(weight, dtype)
    return w.op("Expand", w.constant(default, dtype), w.integers(list(sizes)))


def _layer_norm(
    w: OnnxWriter,
    node: Node,
    x: Any,
    sizes: Sequence[Any],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    dtype = w.dtype(x)
    rest = [] if bias is None else [w.read(bias, dtype)]
    result = w.op(
        "LayerNormalization",
        w.of(x),
        _weight(w, weight, [w.fixed(n, "a size of a norm") for n in sizes], 1.0, dtype),
        *rest,
        axis=-len(sizes),
        epsilon=float(eps),
        label=node.name,
    )
    return (result, None, None) if "native" in str(node.target) else result


def _rms_norm(
    w: OnnxWriter, node: Node, x: Any, sizes: Sequence[Any], weight: Any = None, eps: float | None = None
) -> str:
    dtype = w.dtype(x)
    added = torch.finfo(dtype).eps if eps is None else eps
    axes = w.integers(list(range(-len(sizes), 0)))
    mean = w.op("ReduceMean", w.op("Mul", w.of(x), w.of(x)), axes, keepdims=1)
    root = w.op("Sqrt", w.op("Add", mean, w.constant(added, dtype)))
    normed = w.op("Mul", w.of(x), w.op("Reciprocal", root), label=node.name)
    return normed if weight is None else w.op("Mul", normed, w.read(weight, dtype), label=node.name)


def _native_batch_norm_legit_no_training(
    w: OnnxWriter,
    node: Node,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    momentum: float,
    eps: float,
) -> Any:
    return _batch_norm(w, node, x, weight, bias, mean, variance, eps), None, None


def _batch_norm_default(
    w: OnnxWriter,
    node: Node,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool = True,
) -> str:
    if training or mean is None:
        raise UnsupportedOp("a batch norm in training mode")
    return _batch_norm(w, node, x, weight, bias, mean, variance, eps)


def _batch_norm(
    w: OnnxWriter, node: Node, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, eps: float
) -> str:
    dtype = w.dtype(x)
    sizes = w.sizes(mean)
    return w.op(
        "BatchNormalization",
        w.of(x),
        _weight(w, weight, sizes, 1.0, dtype),
        _weight(w, bias, sizes, 0.0, dtype),
        w.read(mean, dtype),
        w.read(variance, dtype),
        epsilon=float(eps),
        label=node.name,
    )


def _weight_norm(w: OnnxWriter, node: Node, v: Any, g: Any, dim: int = 0) -> str:
    rank = w.rank(v)
    others = [d for d in range(rank) if d != dim % rank] if dim != -1 else list(range(rank))
    length = w.op("ReduceL2", w.of(v), w.integers(others), keepdims=1)
    return w.op("Mul", w.of(v), w.op("Div", w.of(g), length), label=node.name)


def _group_norm(
    w: OnnxWriter,
    node: Node,
    x: Any,
    groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> str:
    value = w.value(x)
    dtype, channels = value.dtype, w.fixed(value.shape[1], "the number of channels")
    grouped = w.op("Reshape", w.of(x), w.integers([0, groups, -1]))
    ones, zeros = (_weight(w, None, [groups], v, dtype) for v in (1.0, 0.0))
    normed = w.op("InstanceNormalization", grouped, ones, zeros, epsilon=float(eps))
    result = w.op("Reshape", normed, w.shape(x), label=node.name)
    column = w.integers([channels] + [1] * (value.dim() - 2))
    if weight is not None:
        result = w.op("Mul", result, w.op("Reshape", w.read(weight, dtype), column), label=node.name)
    if bias is not None:
        result = w.op("Add", result, w.op("Reshape", w.read(bias, dtype), column), label=node.name)
    return result


def _instance_norm(
    w: OnnxWriter,
    node: Node,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> str:
    if not use_input_stats:
        raise UnsupportedOp("an instance norm with running statistics")
    dtype = w.dtype(x)
    sizes = [w.fixed(w.value(x).shape[1], "the number of channels")]
    scale, shift = _weight(w, weight, sizes, 1.0, dtype), _weight(w, bias, sizes, 0.0, dtype)
    return w.op("InstanceNormalization", w.of(x), scale, shift, epsilon=float(eps), label=node.name)


NORMS: Mapping[tuple[str, ...], OpTranslation] = {
    ("aten.layer_norm.default", "aten.native_layer_norm.default"): _layer_norm,
    ("aten.rms_norm.default",): _rms_norm,
    ("aten._native_batch_norm_legit_no_training.default",): _native_batch_norm_legit_no_training,
    ("aten.batch_norm.default",): _batch_norm_default,
    ("aten._weight_norm.default",): _weight_norm,
    ("aten.group_norm.default",): _group_norm,
    ("aten.instance_norm.default",): _instance_norm,
}
