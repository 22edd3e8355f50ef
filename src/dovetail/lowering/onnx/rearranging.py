"""Operators that move elements between dimensions or around one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from dovetail.lowering.onnx.types import NoForm
from dovetail.lowering.onnx.writer import Writer, form

_FAR = 2**62


def _through(w: Writer, node: Node, x: Any, parts: Sequence[int], order: Sequence[int]) -> str:
    """Dimensions taken apart, put into another order, and joined to the sizes of the result."""
    if 0 in parts:
        raise NoForm("dimensions of a tensor without elements taken apart")
    apart = w.op("Reshape", w.of(x), w.constant(list(parts), torch.int64), allowzero=1)
    moved = w.op("Transpose", apart, perm=list(order))
    return w.op("Reshape", moved, w.constant(w.sizes(node), torch.int64), allowzero=1, label=node.name)


@form("aten.pixel_shuffle.default")
def _(w: Writer, node: Node, x: Any, factor: int) -> str:
    *batch, channels, height, width = w.sizes(x)
    n = len(batch)
    parts = [*batch, channels // factor**2, factor, factor, height, width]
    return _through(w, node, x, parts, [*range(n), n, n + 3, n + 1, n + 4, n + 2])


@form("aten.pixel_unshuffle.default")
def _(w: Writer, node: Node, x: Any, factor: int) -> str:
    *batch, channels, height, width = w.sizes(x)
    n = len(batch)
    parts = [*batch, channels, height // factor, factor, width // factor, factor]
    return _through(w, node, x, parts, [*range(n), n, n + 2, n + 4, n + 1, n + 3])


@form("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def _(w: Writer, node: Node, x: Any, groups: int) -> str:
    batch, channels, *rest = w.sizes(x)
    parts = [batch, groups, channels // groups, *rest]
    return _through(w, node, x, parts, [0, 2, 1, *range(3, len(parts))])


@form("aten.roll.default")
def _(w: Writer, node: Node, x: Any, shifts: Sequence[Any], dims: Sequence[int] = ()) -> str:
    sizes = w.sizes(x)
    found = w.of(x)
    if not dims:
        found = w.op("Reshape", found, w.constant([-1], torch.int64))
        sizes, dims = [w.value(x).numel()], [0]
    for shift, dim in zip(shifts, dims, strict=True):
        size = sizes[dim]
        by = w.fixed(shift, "a shift") % size if size else 0
        if by:
            at = w.axes([dim], len(sizes))
            start, middle, end = (w.constant([n], torch.int64) for n in (0, size - by, _FAR))
            parts = [w.op("Slice", found, *bounds, at) for bounds in ((middle, end), (start, middle))]
            found = w.op("Concat", *parts, axis=dim)
    return w.op("Reshape", found, w.constant(w.sizes(node), torch.int64), allowzero=1, label=node.name)
