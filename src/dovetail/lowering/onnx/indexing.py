"""Operators that pick elements by positions which are themselves computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from dovetail.lowering.onnx.types import NoForm
from dovetail.lowering.onnx.writer import Writer, form


@form("aten.embedding.default")
def _(w: Writer, node: Node, weight: Any, indices: Any, *_: Any, **__: Any) -> str:
    return w.op("Gather", w.of(weight), w.read(indices, torch.int64), axis=0, label=node.name)


@form("aten.index_select.default")
def _(w: Writer, node: Node, x: Any, dim: int, indices: Any) -> str:
    if not w.value(x).dim():
        raise NoForm("a selection from a single number")
    return w.op("Gather", w.of(x), w.read(indices, torch.int64), axis=dim, label=node.name)


@form("aten.gather.default")
def _(w: Writer, node: Node, x: Any, dim: int, indices: Any, *, sparse_grad: bool = False) -> str:
    if not w.value(x).dim() or w.value(x).dim() != w.value(indices).dim():
        raise NoForm("a gather between tensors of other ranks")
    return w.op("GatherElements", w.of(x), w.read(indices, torch.int64), axis=dim, label=node.name)


@form("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default")
def _(w: Writer, node: Node, x: Any, dim: int, indices: Any, source: Any) -> str:
    added = "add" if "scatter_add" in str(node.target) else "none"
    dtype = w.value(node).dtype
    at = w.read(indices, torch.int64)
    if isinstance(source, Node) and w.value(source).dim():
        if list(w.value(source).shape) != list(w.value(indices).shape):
            raise NoForm("a scatter that takes only part of its source")
        values = w.read(source, dtype)
    else:
        values = w.op("Expand", w.read(source, dtype), w.shape(indices))
    return w.op("ScatterElements", w.of(x), at, values, axis=dim, reduction=added, label=node.name)


@form("aten.index.Tensor")
def _(w: Writer, node: Node, x: Any, indices: Sequence[Any]) -> str:
    given = [(i, v) for i, v in enumerate(indices) if v is not None]
    if any(w.value(v).dtype in (torch.bool, torch.uint8) for _, v in given):
        raise NoForm("how many elements a mask picks is only known in a call")
    if len(given) == 1:
        (axis, at), rank = given[0], w.value(x).dim()
        return w.op("Gather", w.of(x), w.read(at, torch.int64), axis=axis % rank, label=node.name)
    if [i for i, _ in given] != list(range(len(given))):
        raise NoForm("several dimensions are indexed, and not the first ones")
    shape = w.constant(list(torch.broadcast_shapes(*(tuple(w.sizes(v)) for _, v in given))), torch.int64)
    last = w.constant([-1], torch.int64)
    parts = [w.op("Unsqueeze", w.op("Expand", w.read(v, torch.int64), shape), last) for _, v in given]
    return w.op("GatherND", w.of(x), w.op("Concat", *parts, axis=-1), label=node.name)


@form("aten.topk.default")
def _(
    w: Writer, node: Node, x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[str, ...]:
    count = w.integers([k])
    return w.op(
        "TopK",
        w.of(x),
        count,
        results=2,
        axis=dim,
        largest=int(largest),
        sorted=int(sorted),
        label=node.name,
    )


@form("aten.argmax.default", "aten.argmin.default")
def _(w: Writer, node: Node, x: Any, dim: int | None = None, keepdim: bool = False) -> str:
    kind = "ArgMax" if "argmax" in str(node.target) else "ArgMin"
    if not w.value(x).dim():
        raise NoForm("the place of a single number")
    if dim is None:
        flat = w.op("Reshape", w.of(x), w.constant([-1], torch.int64))
        if keepdim:
            raise NoForm("the position in all of a tensor, with its dimensions kept")
        return w.op(kind, flat, axis=0, keepdims=0, label=node.name)
    return w.op(kind, w.of(x), axis=dim, keepdims=int(keepdim), label=node.name)


@form("aten.one_hot.default")
def _(w: Writer, node: Node, x: Any, count: int = -1) -> str:
    if count < 0 or not w.value(x).dim():
        raise NoForm("a one-hot whose number of classes depends on the data")
    values = w.constant([0, 1], torch.int64)
    return w.op("OneHot", w.of(x), w.constant([count], torch.int64), values, axis=-1, label=node.name)
