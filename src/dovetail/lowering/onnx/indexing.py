"""Operators that pick elements by positions which are themselves computed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.lowering.onnx.types import NoForm, is_number
from dovetail.lowering.onnx.writer import Writer, form


def _positions(w: Writer, indices: Any, source: Any, dim: int, *, wraps: bool = False) -> str:
    """Positions along a dimension of a tensor; with `wraps` those below zero count from its end."""
    at, size = w.read(indices, torch.int64), w.value(source).shape[dim]
    if not w.dialect.runs:
        return at
    if is_number(size):
        most = w.constant(int(size), torch.int64)
    else:
        most = w.op("Gather", w.shape(source), w.constant(dim % w.value(source).dim(), torch.int64))
    found = _in_range(w, at, w.value(indices), w.op("Neg", most) if wraps else 0, most)
    if not wraps:
        return found
    behind = w.op("Less", found, w.constant(0, torch.int64))
    return w.op("Where", behind, w.op("Add", found, most), found)


def _in_range(w: Writer, at: str, value: Tensor, least: str | int, size: str) -> str:
    """Positions that are in range, and a flag that tells whether they were before."""
    if 0 in value.shape:
        return at
    low = least if isinstance(least, str) else w.constant(least, torch.int64)
    lowest, highest = (w.op(kind, at, keepdims=0) for kind in ("ReduceMin", "ReduceMax"))
    w.flags.append(w.op("And", w.op("GreaterOrEqual", lowest, low), w.op("Less", highest, size)))
    last = w.op("Sub", size, w.constant(1, torch.int64))
    return w.op("Min", w.op("Max", at, low), last)


def _picked(w: Writer, node: Node, x: Any, indices: Sequence[Any]) -> str:
    """Elements by positions in the first dimensions, which are counted as one: some readers die of several."""
    sizes, count = w.sizes(x), len(indices)
    at = ""
    for dim, one in enumerate(indices):
        found = _positions(w, one, x, dim, wraps=True)
        size = w.constant(sizes[dim], torch.int64)
        at = w.op("Add", w.op("Mul", at, size), found) if at else found
    rows = [math.prod(sizes[:count]), *sizes[count:]]
    flat = w.op("Reshape", w.of(x), w.constant(rows, torch.int64), allowzero=1)
    return w.op("Gather", flat, at, axis=0, label=node.name)


@form("aten.embedding.default")
def _(w: Writer, node: Node, weight: Any, indices: Any, *_: Any, **__: Any) -> str:
    return w.op("Gather", w.of(weight), _positions(w, indices, weight, 0), axis=0, label=node.name)


@form("aten.index_select.default")
def _(w: Writer, node: Node, x: Any, dim: int, indices: Any) -> str:
    if not w.value(x).dim():
        raise NoForm("a selection from a single number")
    return w.op("Gather", w.of(x), _positions(w, indices, x, dim), axis=dim, label=node.name)


@form("aten.gather.default")
def _(w: Writer, node: Node, x: Any, dim: int, indices: Any, *, sparse_grad: bool = False) -> str:
    if not w.value(x).dim() or w.value(x).dim() != w.value(indices).dim():
        raise NoForm("a gather between tensors of other ranks")
    return w.op("GatherElements", w.of(x), _positions(w, indices, x, dim), axis=dim, label=node.name)


@form("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default")
def _(w: Writer, node: Node, x: Any, dim: int, indices: Any, source: Any) -> str:
    added = "add" if "scatter_add" in str(node.target) else "none"
    dtype = w.value(node).dtype
    at = _positions(w, indices, x, dim)
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
        found = _positions(w, at, x, axis % rank, wraps=True)
        return w.op("Gather", w.of(x), found, axis=axis % rank, label=node.name)
    if [i for i, _ in given] != list(range(len(given))):
        raise NoForm("several dimensions are indexed, and not the first ones")
    if w.dialect.runs:
        return _picked(w, node, x, [v for _, v in given])
    positions = [w.read(v, torch.int64) for _, v in given]
    if all(is_number(n) for _, v in given for n in w.value(v).shape):
        shape = w.constant(list(torch.broadcast_shapes(*(tuple(w.sizes(v)) for _, v in given))), torch.int64)
    else:
        # The sum of positions has the sizes that they broadcast to.
        shape = w.op("Shape", functools.reduce(lambda a, b: w.op("Add", a, b), positions))
    last = w.constant([-1], torch.int64)
    parts = [w.op("Unsqueeze", w.op("Expand", at, shape), last) for at in positions]
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
    at = _in_range(w, w.of(x), w.value(x), 0, w.constant(count, torch.int64)) if w.dialect.runs else w.of(x)
    return w.op("OneHot", at, w.constant([count], torch.int64), values, axis=-1, label=node.name)
