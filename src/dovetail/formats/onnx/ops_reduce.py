"""Operators that make one number of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from dovetail.formats.onnx.writer import Form, OnnxWriter
from dovetail.lowering.failures import UnsupportedOp


def _axes(w: OnnxWriter, x: Any, dims: Any) -> list[str]:
    """The operand that says over which dimensions; none for all of them."""
    if dims is None or dims == [] or not w.value(x).dim():
        return []
    if isinstance(dims, Node):
        raise UnsupportedOp("a dimension that is computed")
    return [w.axes([dims] if isinstance(dims, int) else list(dims), w.value(x).dim())]


def reduced(
    w: OnnxWriter, kind: str, x: str, axes: Sequence[str], keepdim: bool = False, label: str = ""
) -> str:
    """A reduction over some dimensions, or over all."""
    return w.op(kind, x, *axes, keepdims=int(keepdim), label=label)


def _over(kind: str) -> Form:
    def write(
        w: OnnxWriter, node: Node, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> str:
        given = w.read(x, w.value(node).dtype)
        return reduced(w, kind, given, _axes(w, x, dims), keepdim, node.name)

    return write


def _sum(
    w: OnnxWriter, node: Node, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> str:
    if w.dialect.runs and w.value(x).dtype == torch.int64:
        raise UnsupportedOp("a sum of whole numbers of 64 bits, which runtimes of ONNX compute as fractions")
    return _over("ReduceSum")(w, node, x, dims, keepdim)


def _prod(
    w: OnnxWriter, node: Node, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> str:
    if w.dialect.runs and not w.value(node).dtype.is_floating_point:
        raise UnsupportedOp("a product of whole numbers, which runtimes of ONNX compute as fractions")
    return _over("ReduceProd")(w, node, x, dim, keepdim)


def _max(w: OnnxWriter, node: Node, x: Any, dim: int, keepdim: bool = False) -> tuple[str, ...]:
    if not w.value(x).dim() or w.value(x).dtype == torch.bool:
        raise UnsupportedOp("the place of a single number or of a truth value")
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
        given, keepdim = named.get("correction"), bool(named.get("keepdim", False))
        correction = 1 if given is None else given
    value = w.value(x)
    if isinstance(dims, int):
        raise UnsupportedOp("a variance with the number of a dimension where a list is wanted")
    over = range(value.dim()) if not dims or not value.dim() else dims
    count = 1
    for d in over:
        count *= w.fixed(value.shape[d], "the number of elements of a variance")
    if count <= correction:
        raise UnsupportedOp("the variance of too few elements")
    axes = _axes(w, x, dims)
    away = w.op("Sub", w.of(x), reduced(w, "ReduceMean", w.of(x), axes, keepdim=True))
    total = reduced(w, "ReduceSum", w.op("Mul", away, away), axes, keepdim)
    made = w.op("Div", total, w.constant(count - correction, value.dtype), label=node.name)
    return w.op("Sqrt", made, label=node.name) if "aten.std" in str(node.target) else made


def _linalg_vector_norm(
    w: OnnxWriter, node: Node, x: Any, order: Any = 2, dims: Any = None, keepdim: bool = False, **_: Any
) -> str:
    kinds = {1: "ReduceL1", 2: "ReduceL2"}
    if order not in kinds:
        raise UnsupportedOp(f"a norm of order {order}")
    return reduced(w, kinds[order], w.read(x, w.value(node).dtype), _axes(w, x, dims), keepdim, node.name)


def _cumsum(w: OnnxWriter, node: Node, x: Any, dim: int, *, dtype: Any = None) -> str:
    given = w.read(x, w.value(node).dtype)
    if not w.value(x).dim():
        return w.op("Identity", given, label=node.name)
    return w.op("CumSum", given, w.constant(dim % max(w.value(x).dim(), 1), torch.int64), label=node.name)


def _softmax(kind: str) -> Form:
    def write(w: OnnxWriter, node: Node, x: Any, dim: int, dtype: Any = None) -> str:
        if not w.value(x).dim():
            raise UnsupportedOp("the softmax of a single number")
        # The third operand of `_softmax` says whether half precision becomes single; the result's dtype tells.
        return w.op(kind, w.read(x, w.value(node).dtype), axis=dim, label=node.name)

    return write


REDUCTIONS: Mapping[tuple[str, ...], Form] = {
    ("aten.sum.dim_IntList", "aten.sum.default"): _sum,
    ("aten.mean.dim", "aten.mean.default"): _over("ReduceMean"),
    ("aten.amax.default", "aten.max.default"): _over("ReduceMax"),
    ("aten.amin.default", "aten.min.default"): _over("ReduceMin"),
    ("aten.logsumexp.default",): _over("ReduceLogSumExp"),
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


def _weight(w: OnnxWriter, given: Any, sizes: Sequence[int], value: float, dtype: torch.dtype) -> str:
    """A weight, or what stands for one that is not there."""
    if given is not None:
        return w.read(given, dtype)
    return w.op("Expand", w.constant(value, dtype), w.constant(list(sizes), torch.int64))


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
    dtype = w.value(x).dtype
    rest = [] if bias is None else [w.read(bias, dtype)]
    made = w.op(
        "LayerNormalization",
        w.of(x),
        _weight(w, weight, [w.fixed(n, "a size of a norm") for n in sizes], 1.0, dtype),
        *rest,
        axis=-len(sizes),
        epsilon=float(eps),
        label=node.name,
    )
    return (made, None, None) if "native" in str(node.target) else made


def _rms_norm(
    w: OnnxWriter, node: Node, x: Any, sizes: Sequence[Any], weight: Any = None, eps: float | None = None
) -> str:
    dtype = w.value(x).dtype
    added = torch.finfo(dtype).eps if eps is None else eps
    axes = w.constant(list(range(-len(sizes), 0)), torch.int64)
    mean = w.op("ReduceMean", w.op("Mul", w.of(x), w.of(x)), axes, keepdims=1)
    root = w.op("Sqrt", w.op("Add", mean, w.constant(added, dtype)))
    made = w.op("Mul", w.of(x), w.op("Reciprocal", root), label=node.name)
    return made if weight is None else w.op("Mul", made, w.read(weight, dtype), label=node.name)


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
        raise UnsupportedOp("a batch norm that learns its statistics")
    return _batch_norm(w, node, x, weight, bias, mean, variance, eps)


def _batch_norm(
    w: OnnxWriter, node: Node, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, eps: float
) -> str:
    dtype = w.value(x).dtype
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
    rank = w.value(v).dim()
    others = [d for d in range(rank) if d != dim % rank] if dim != -1 else list(range(rank))
    length = w.op("ReduceL2", w.of(v), w.constant(others, torch.int64), keepdims=1)
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
    apart = w.op("Reshape", w.of(x), w.constant([0, groups, -1], torch.int64))
    ones, zeros = (_weight(w, None, [groups], v, dtype) for v in (1.0, 0.0))
    normed = w.op("InstanceNormalization", apart, ones, zeros, epsilon=float(eps))
    made = w.op("Reshape", normed, w.shape(x), label=node.name)
    column = w.constant([channels] + [1] * (value.dim() - 2), torch.int64)
    if weight is not None:
        made = w.op("Mul", made, w.op("Reshape", w.read(weight, dtype), column), label=node.name)
    if bias is not None:
        made = w.op("Add", made, w.op("Reshape", w.read(bias, dtype), column), label=node.name)
    return made


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
        raise UnsupportedOp("an instance norm with kept statistics")
    dtype = w.value(x).dtype
    sizes = [w.fixed(w.value(x).shape[1], "the number of channels")]
    scale, shift = _weight(w, weight, sizes, 1.0, dtype), _weight(w, bias, sizes, 0.0, dtype)
    return w.op("InstanceNormalization", w.of(x), scale, shift, epsilon=float(eps), label=node.name)


NORMS: Mapping[tuple[str, ...], Form] = {
    ("aten.layer_norm.default", "aten.native_layer_norm.default"): _layer_norm,
    ("aten.rms_norm.default",): _rms_norm,
    ("aten._native_batch_norm_legit_no_training.default",): _native_batch_norm_legit_no_training,
    ("aten.batch_norm.default",): _batch_norm_default,
    ("aten._weight_norm.default",): _weight_norm,
    ("aten.group_norm.default",): _group_norm,
    ("aten.instance_norm.default",): _instance_norm,
}
