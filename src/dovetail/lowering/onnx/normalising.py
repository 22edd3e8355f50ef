"""Normalisations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from dovetail.lowering.onnx.types import NoForm
from dovetail.lowering.onnx.writer import Writer, form


def _weight(w: Writer, given: Any, sizes: Sequence[int], value: float, dtype: torch.dtype) -> str:
    """A weight, or what stands for one that is not there."""
    if given is not None:
        return w.read(given, dtype)
    return w.op("Expand", w.constant(value, dtype), w.constant(list(sizes), torch.int64))


@form("aten.layer_norm.default", "aten.native_layer_norm.default")
def _(
    w: Writer,
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


@form("aten.rms_norm.default")
def _(
    w: Writer, node: Node, x: Any, sizes: Sequence[Any], weight: Any = None, eps: float | None = None
) -> str:
    dtype = w.value(x).dtype
    added = torch.finfo(dtype).eps if eps is None else eps
    axes = w.constant(list(range(-len(sizes), 0)), torch.int64)
    mean = w.op("ReduceMean", w.op("Mul", w.of(x), w.of(x)), axes, keepdims=1)
    root = w.op("Sqrt", w.op("Add", mean, w.constant(added, dtype)))
    made = w.op("Mul", w.of(x), w.op("Reciprocal", root), label=node.name)
    return made if weight is None else w.op("Mul", made, w.read(weight, dtype), label=node.name)


@form("aten._native_batch_norm_legit_no_training.default")
def _(
    w: Writer,
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


@form("aten.batch_norm.default")
def _(
    w: Writer,
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
        raise NoForm("a batch norm that learns its statistics")
    return _batch_norm(w, node, x, weight, bias, mean, variance, eps)


def _batch_norm(
    w: Writer, node: Node, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, eps: float
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


@form("aten._weight_norm.default")
def _(w: Writer, node: Node, v: Any, g: Any, dim: int = 0) -> str:
    rank = w.value(v).dim()
    others = [d for d in range(rank) if d != dim % rank] if dim != -1 else list(range(rank))
    length = w.op("ReduceL2", w.of(v), w.constant(others, torch.int64), keepdims=1)
    return w.op("Mul", w.of(v), w.op("Div", w.of(g), length), label=node.name)


@form("aten.group_norm.default")
def _(
    w: Writer,
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


@form("aten.instance_norm.default")
def _(
    w: Writer,
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
        raise NoForm("an instance norm with kept statistics")
    dtype = w.value(x).dtype
    sizes = [w.fixed(w.value(x).shape[1], "the number of channels")]
    scale, shift = _weight(w, weight, sizes, 1.0, dtype), _weight(w, bias, sizes, 0.0, dtype)
    return w.op("InstanceNormalization", w.of(x), scale, shift, epsilon=float(eps), label=node.name)
