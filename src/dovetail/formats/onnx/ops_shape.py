"""Operators that move, join or make elements without computing on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.formats.onnx.writer import Form, OnnxWriter, element
from dovetail.ir.nodes import is_number
from dovetail.lowering.failures import UnsupportedOp

_FAR = 2**62


def _getitem(w: OnnxWriter, node: Node, pair: Node, index: int) -> Any:
    found = w.names[pair]
    if not isinstance(found, tuple) or found[index] is None:
        raise UnsupportedOp(f"result {index} of '{pair.name}' has no form")
    return found[index]


def _view(w: OnnxWriter, node: Node, x: Any, size: Any) -> str:
    # Where all but one size is known, what is left over says the last, and no symbol is needed.
    known = list(w.value(node).shape)
    open_sizes = [i for i, n in enumerate(known) if not is_number(n)]
    if len(open_sizes) <= 1 and 0 not in known:
        size = [-1 if i in open_sizes else n for i, n in enumerate(known)]
    return w.op("Reshape", w.of(x), w.integers(size), allowzero=1, label=node.name)


def _flatten(w: OnnxWriter, node: Node, x: Any, *_: Any) -> str:
    return w.op("Reshape", w.of(x), w.constant(w.sizes(node), torch.int64), allowzero=1, label=node.name)


def _transpose(w: OnnxWriter, node: Node, x: Any, a: int, b: int) -> str:
    rank = w.value(x).dim()
    if not rank:
        return w.op("Identity", w.of(x), label=node.name)
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return w.op("Transpose", w.of(x), perm=order, label=node.name)


def _t(w: OnnxWriter, node: Node, x: Any) -> str:
    rank = w.value(x).dim()
    if rank < 2:
        return w.op("Identity", w.of(x), label=node.name)
    return w.op("Transpose", w.of(x), perm=[*range(rank - 2), rank - 1, rank - 2], label=node.name)


def _permute(w: OnnxWriter, node: Node, x: Any, order: Sequence[int]) -> str:
    rank = w.value(x).dim()
    if not rank:
        return w.op("Identity", w.of(x), label=node.name)
    return w.op("Transpose", w.of(x), perm=[d % rank for d in order], label=node.name)


def _unsqueeze(w: OnnxWriter, node: Node, x: Any, dim: int) -> str:
    return w.op("Unsqueeze", w.of(x), w.axes([dim], w.value(x).dim() + 1), label=node.name)


def _squeeze(w: OnnxWriter, node: Node, x: Any, dims: Any = None) -> str:
    shape = w.value(x).shape
    asked = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    if not len(shape):
        return w.op("Identity", w.of(x), label=node.name)
    if any(not is_number(shape[d]) for d in asked):
        raise UnsupportedOp("whether a dimension goes depends on a size that is not known")
    gone = [d % len(shape) for d in asked if shape[d] == 1]
    if not gone:
        return w.op("Identity", w.of(x), label=node.name)
    return w.op("Squeeze", w.of(x), w.axes(gone, len(shape)), label=node.name)


def _expand(w: OnnxWriter, node: Node, x: Any, size: Sequence[Any], *, implicit: bool = False) -> str:
    # ONNX keeps a size where 1 is asked for, as torch does where -1 is.
    sizes = [1 if isinstance(n, int) and n == -1 else n for n in size]
    if not sizes:
        return w.op("Identity", w.of(x), label=node.name)
    return w.op("Expand", w.of(x), w.integers(sizes), label=node.name)


def _expand_as(w: OnnxWriter, node: Node, x: Any, other: Node) -> str:
    if not w.value(node).dim():
        return w.op("Identity", w.of(x), label=node.name)
    return w.op("Expand", w.of(x), w.shape(other), label=node.name)


def _repeat(w: OnnxWriter, node: Node, x: Any, times: Sequence[Any]) -> str:
    extra = len(times) - w.value(x).dim()
    found = w.of(x)
    if not times:
        return w.op("Identity", found, label=node.name)
    if extra:
        found = w.op("Unsqueeze", found, w.constant(list(range(extra)), torch.int64))
    return w.op("Tile", found, w.integers(times), label=node.name)


def _cat(w: OnnxWriter, node: Node, parts: Sequence[Node], dim: int = 0) -> str:
    dtype = w.value(node).dtype
    # An empty vector may stand among tensors of any rank, and counts for nothing.
    real = [p for p in parts if not (w.value(p).dim() == 1 and w.value(p).shape[0] == 0)] or list(parts)
    return w.op("Concat", *(w.read(p, dtype) for p in real), axis=dim, label=node.name)


def _stack(w: OnnxWriter, node: Node, parts: Sequence[Node], dim: int = 0) -> str:
    dtype = w.value(node).dtype
    at = w.axes([dim], w.value(node).dim())
    raised = [w.op("Unsqueeze", w.read(p, dtype), at) for p in parts]
    return w.op("Concat", *raised, axis=dim, label=node.name)


def _apart(w: OnnxWriter, node: Node, x: Any, sizes: Sequence[int], dim: int) -> tuple[str, ...]:
    if len(sizes) == 1:
        return (w.op("Identity", w.of(x), label=node.name),)
    vector = w.constant(list(sizes), torch.int64)
    return w.op("Split", w.of(x), vector, results=len(sizes), axis=dim, label=node.name)


def _split(w: OnnxWriter, node: Node, x: Any, size: Any, dim: int = 0) -> tuple[str, ...]:
    lengths = [w.fixed(v.shape[dim], "the length of a part") for v in node.meta["val"]]
    return _apart(w, node, x, lengths, dim)


def _unbind(w: OnnxWriter, node: Node, x: Any, dim: int = 0) -> tuple[str, ...]:
    shape = w.value(x).shape
    parts = _apart(w, node, x, [1] * w.fixed(shape[dim], "the number of parts"), dim)
    at = w.axes([dim], len(shape))
    return tuple(w.op("Squeeze", part, at, label=node.name) for part in parts)


def _slice(
    w: OnnxWriter, node: Node, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> str:
    first = 0 if start is None else start
    last = _FAR if end is None or (isinstance(end, int) and end > _FAR) else end
    bounds = w.integers([first]), w.integers([last])
    return w.op(
        "Slice", w.of(x), *bounds, w.axes([dim], w.value(x).dim()), w.integers([step]), label=node.name
    )


def _diff(
    w: OnnxWriter,
    node: Node,
    x: Any,
    n: int = 1,
    dim: int = -1,
    prepend: Any = None,
    append: Any = None,
) -> str:
    dtype, value = w.value(node).dtype, w.value(x)
    axis = dim % value.dim()
    parts = [w.read(part, dtype) for part in (prepend, x, append) if part is not None]
    result = w.op("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]
    at, one = w.constant([axis], torch.int64), w.constant([1], torch.int64)
    for _ in range(n):
        later = w.op("Slice", result, one, w.constant([_FAR], torch.int64), at)
        earlier = w.op("Slice", result, w.constant([0], torch.int64), w.constant([-1], torch.int64), at)
        result = w.op("Xor" if dtype is torch.bool else "Sub", later, earlier)
    return w.op("Identity", result, label=node.name)


def _select(w: OnnxWriter, node: Node, x: Any, dim: int, index: Any) -> str:
    at = w.of(index) if isinstance(index, Node) else w.constant(index, torch.int64)
    return w.op("Gather", w.of(x), at, axis=dim, label=node.name)


def _narrow(w: OnnxWriter, node: Node, x: Any, dim: int, start: Any, length: Any) -> str:
    if not isinstance(start, int) or not isinstance(length, int) or start < 0:
        raise UnsupportedOp("a narrowing whose place is not known")
    bounds = w.integers([start]), w.integers([start + length])
    return w.op("Slice", w.of(x), *bounds, w.axes([dim], w.value(x).dim()), label=node.name)


def _constant_pad_nd(w: OnnxWriter, node: Node, x: Any, pad: Sequence[Any], *rest: Any) -> str:
    modes = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}
    padding = "aten.pad." in str(node.target)
    mode, value = rest if padding else ("constant", *rest)
    if mode != "constant" and any(w.fixed(n, "a padding") < 0 for n in pad):
        raise UnsupportedOp("a tensor that is cut off and padded with itself")
    if mode not in modes:
        raise UnsupportedOp(f"padding of mode '{mode}'")
    rank = w.value(x).dim()
    before, after = [0] * rank, [0] * rank
    for i in range(0, len(pad), 2):
        at = rank - 1 - i // 2
        before[at], after[at] = w.fixed(pad[i], "a padding"), w.fixed(pad[i + 1], "a padding")
    amounts = w.constant([*before, *after], torch.int64)
    filler = [w.constant(value or 0, w.value(x).dtype)] if mode == "constant" else []
    return w.op("Pad", w.of(x), amounts, *filler, mode=modes[mode], label=node.name)


def _flip(w: OnnxWriter, node: Node, x: Any, dims: Sequence[int]) -> str:
    count = len(dims)
    starts, ends = w.constant([-1] * count, torch.int64), w.constant([-_FAR] * count, torch.int64)
    at, steps = w.axes(dims, w.value(x).dim()), w.constant([-1] * count, torch.int64)
    return w.op("Slice", w.of(x), starts, ends, at, steps, label=node.name)


def _tril(w: OnnxWriter, node: Node, x: Any, diagonal: int = 0) -> str:
    upper = int("triu" in str(node.target))
    offset = w.constant(diagonal, torch.int64)
    if w.value(x).dtype == torch.bool:
        # Runtimes have it for numbers only.
        kept = w.op("Trilu", w.op("Cast", w.of(x), to=element(torch.int64)), offset, upper=upper)
        return w.op("Cast", kept, to=element(torch.bool), label=node.name)
    return w.op("Trilu", w.of(x), offset, upper=upper, label=node.name)


def _arange(w: OnnxWriter, node: Node, *bounds: Any, **_: Any) -> str:
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1)}.get(len(bounds), bounds)
    value = w.value(node)
    given = [start, end, step]
    if all(isinstance(b, int) for b in given) or value.dtype == torch.int64:
        made = w.op("Range", *(w.read(b, torch.int64) for b in given), label=node.name)
        return w.cast(made, torch.int64, value.dtype)
    if any(isinstance(b, Node) for b in given):
        raise UnsupportedOp("a range of fractions up to a size")
    # Summing steps up, as Range may, is not what torch does.
    counted = w.op("Range", *(w.constant(n, torch.int64) for n in (0, value.shape[0], 1)))
    scaled = w.op("Mul", w.cast(counted, torch.int64, value.dtype), w.constant(step, value.dtype))
    return w.op("Add", scaled, w.constant(start, value.dtype), label=node.name)


def _filled(w: OnnxWriter, node: Node, sizes: str, value: Any) -> str:
    made = w.value(node)
    found = w.read(value, made.dtype)
    return w.op("Expand", found, sizes, label=node.name) if made.dim() else found


def _full(value: Any) -> Form:
    def write(w: OnnxWriter, node: Node, size: Any, *_: Any, **__: Any) -> str:
        return _filled(w, node, w.integers(size), value)

    return write


def _like(value: Any) -> Form:
    def write(w: OnnxWriter, node: Node, x: Node, *_: Any, **__: Any) -> str:
        return _filled(w, node, w.shape(x), value)

    return write


def _full_default(w: OnnxWriter, node: Node, size: Any, value: Any, **_: Any) -> str:
    return _filled(w, node, w.integers(size), value)


def _full_like(w: OnnxWriter, node: Node, x: Node, value: Any, **_: Any) -> str:
    return _filled(w, node, w.shape(x), value)


def _new_zeros(w: OnnxWriter, node: Node, x: Node, size: Any, **_: Any) -> str:
    return _filled(w, node, w.integers(size), int("ones" in str(node.target)))


def _new_full(w: OnnxWriter, node: Node, x: Node, size: Any, value: Any, **_: Any) -> str:
    return _filled(w, node, w.integers(size), value)


def _scalar_tensor(w: OnnxWriter, node: Node, value: Any, **_: Any) -> str:
    return w.read(value, w.value(node).dtype)


def _lift_fresh_copy(w: OnnxWriter, node: Node, x: Any) -> str:
    return w.op("Identity", w.of(x), label=node.name)


def _sym_size(w: OnnxWriter, node: Node, x: Node, dim: int) -> str:
    at = w.constant(dim % w.value(x).dim(), torch.int64)
    return w.op("Gather", w.op("Shape", w.of(x)), at, label=node.name)


def _whole(kind: str) -> Form:
    def write(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
        return w.op(kind, w.read(a, torch.int64), w.read(b, torch.int64), label=node.name)

    return write


def _int_floordiv(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
    # Sizes are not negative, so that cutting off is rounding down.
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        raise UnsupportedOp("a division of tensors")
    return _whole("Div")(w, node, a, b)


SHAPE: Mapping[tuple[str, ...], Form] = {
    ("getitem",): _getitem,
    ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"): _view,
    (
        "aten.flatten.using_ints",
        "aten.unflatten.int",
        "aten.view_as.default",
        "aten.reshape_as.default",
    ): _flatten,
    ("aten.transpose.int",): _transpose,
    ("aten.t.default", "aten.mT.default", "aten.numpy_T.default"): _t,
    ("aten.permute.default",): _permute,
    ("aten.unsqueeze.default",): _unsqueeze,
    ("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default"): _squeeze,
    ("aten.expand.default", "aten.broadcast_to.default"): _expand,
    ("aten.expand_as.default",): _expand_as,
    ("aten.repeat.default",): _repeat,
    ("aten.cat.default",): _cat,
    ("aten.stack.default",): _stack,
    (
        "aten.split.Tensor",
        "aten.split_with_sizes.default",
        "aten.chunk.default",
        "aten.tensor_split.sections",
    ): _split,
    ("aten.unbind.int",): _unbind,
    ("aten.slice.Tensor",): _slice,
    ("aten.diff.default",): _diff,
    ("aten.select.int",): _select,
    ("aten.narrow.default",): _narrow,
    ("aten.constant_pad_nd.default", "aten.pad.default"): _constant_pad_nd,
    ("aten.flip.default",): _flip,
    ("aten.tril.default", "aten.triu.default"): _tril,
    ("aten.arange.default", "aten.arange.start", "aten.arange.start_step"): _arange,
    ("aten.zeros.default",): _full(0),
    ("aten.ones.default",): _full(1),
    ("aten.zeros_like.default",): _like(0),
    ("aten.ones_like.default",): _like(1),
    ("aten.full.default",): _full_default,
    ("aten.full_like.default",): _full_like,
    ("aten.new_zeros.default", "aten.new_ones.default"): _new_zeros,
    ("aten.new_full.default",): _new_full,
    ("aten.scalar_tensor.default",): _scalar_tensor,
    ("aten.lift_fresh_copy.default",): _lift_fresh_copy,
    ("aten.sym_size.int",): _sym_size,
    ("int.add",): _whole("Add"),
    ("int.sub",): _whole("Sub"),
    ("int.mul",): _whole("Mul"),
    ("int.floordiv",): _int_floordiv,
}


def _positions(w: OnnxWriter, indices: Any, source: Any, dim: int, *, wraps: bool = False) -> str:
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


def _in_range(w: OnnxWriter, at: str, value: Tensor, least: str | int, size: str) -> str:
    """Positions that are in range, and a flag that tells whether they were before."""
    if 0 in value.shape:
        return at
    low = least if isinstance(least, str) else w.constant(least, torch.int64)
    lowest, highest = (w.op(kind, at, keepdims=0) for kind in ("ReduceMin", "ReduceMax"))
    w.flags.append(w.op("And", w.op("GreaterOrEqual", lowest, low), w.op("Less", highest, size)))
    last = w.op("Sub", size, w.constant(1, torch.int64))
    return w.op("Min", w.op("Max", at, low), last)


def _picked(w: OnnxWriter, node: Node, x: Any, indices: Sequence[Any]) -> str:
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


def _embedding(w: OnnxWriter, node: Node, weight: Any, indices: Any, *_: Any, **__: Any) -> str:
    return w.op("Gather", w.of(weight), _positions(w, indices, weight, 0), axis=0, label=node.name)


def _index_select(w: OnnxWriter, node: Node, x: Any, dim: int, indices: Any) -> str:
    if not w.value(x).dim():
        raise UnsupportedOp("a selection from a single number")
    return w.op("Gather", w.of(x), _positions(w, indices, x, dim), axis=dim, label=node.name)


def _gather(w: OnnxWriter, node: Node, x: Any, dim: int, indices: Any, *, sparse_grad: bool = False) -> str:
    if not w.value(x).dim() or w.value(x).dim() != w.value(indices).dim():
        raise UnsupportedOp("a gather between tensors of other ranks")
    return w.op("GatherElements", w.of(x), _positions(w, indices, x, dim), axis=dim, label=node.name)


def _scatter(w: OnnxWriter, node: Node, x: Any, dim: int, indices: Any, source: Any) -> str:
    added = "add" if "scatter_add" in str(node.target) else "none"
    dtype = w.value(node).dtype
    at = _positions(w, indices, x, dim)
    if isinstance(source, Node) and w.value(source).dim():
        if list(w.value(source).shape) != list(w.value(indices).shape):
            raise UnsupportedOp("a scatter that takes only part of its source")
        values = w.read(source, dtype)
    else:
        values = w.op("Expand", w.read(source, dtype), w.shape(indices))
    return w.op("ScatterElements", w.of(x), at, values, axis=dim, reduction=added, label=node.name)


def _index(w: OnnxWriter, node: Node, x: Any, indices: Sequence[Any]) -> str:
    given = [(i, v) for i, v in enumerate(indices) if v is not None]
    if any(w.value(v).dtype in (torch.bool, torch.uint8) for _, v in given):
        raise UnsupportedOp("how many elements a mask picks is only known in a call")
    if len(given) == 1:
        (axis, at), rank = given[0], w.value(x).dim()
        found = _positions(w, at, x, axis % rank, wraps=True)
        return w.op("Gather", w.of(x), found, axis=axis % rank, label=node.name)
    if [i for i, _ in given] != list(range(len(given))):
        raise UnsupportedOp("several dimensions are indexed, and not the first ones")
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


def _topk(
    w: OnnxWriter, node: Node, x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
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


def _argmax(w: OnnxWriter, node: Node, x: Any, dim: int | None = None, keepdim: bool = False) -> str:
    kind = "ArgMax" if "argmax" in str(node.target) else "ArgMin"
    if not w.value(x).dim():
        raise UnsupportedOp("the place of a single number")
    if dim is None:
        flat = w.op("Reshape", w.of(x), w.constant([-1], torch.int64))
        if keepdim:
            raise UnsupportedOp("the position in all of a tensor, with its dimensions kept")
        return w.op(kind, flat, axis=0, keepdims=0, label=node.name)
    return w.op(kind, w.of(x), axis=dim, keepdims=int(keepdim), label=node.name)


def _one_hot(w: OnnxWriter, node: Node, x: Any, count: int = -1) -> str:
    if count < 0 or not w.value(x).dim():
        raise UnsupportedOp("a one-hot whose number of classes depends on the data")
    values = w.constant([0, 1], torch.int64)
    at = _in_range(w, w.of(x), w.value(x), 0, w.constant(count, torch.int64)) if w.dialect.runs else w.of(x)
    return w.op("OneHot", at, w.constant([count], torch.int64), values, axis=-1, label=node.name)


INDEXING: Mapping[tuple[str, ...], Form] = {
    ("aten.embedding.default",): _embedding,
    ("aten.index_select.default",): _index_select,
    ("aten.gather.default",): _gather,
    ("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default"): _scatter,
    ("aten.index.Tensor",): _index,
    ("aten.topk.default",): _topk,
    ("aten.argmax.default", "aten.argmin.default"): _argmax,
    ("aten.one_hot.default",): _one_hot,
}


def _through(w: OnnxWriter, node: Node, x: Any, parts: Sequence[int], order: Sequence[int]) -> str:
    """Dimensions taken apart, put into another order, and joined to the sizes of the result."""
    if 0 in parts:
        raise UnsupportedOp("dimensions of a tensor without elements taken apart")
    apart = w.op("Reshape", w.of(x), w.constant(list(parts), torch.int64), allowzero=1)
    moved = w.op("Transpose", apart, perm=list(order))
    return w.op("Reshape", moved, w.constant(w.sizes(node), torch.int64), allowzero=1, label=node.name)


def _pixel_shuffle(w: OnnxWriter, node: Node, x: Any, factor: int) -> str:
    *batch, channels, height, width = w.sizes(x)
    n = len(batch)
    parts = [*batch, channels // factor**2, factor, factor, height, width]
    return _through(w, node, x, parts, [*range(n), n, n + 3, n + 1, n + 4, n + 2])


def _pixel_unshuffle(w: OnnxWriter, node: Node, x: Any, factor: int) -> str:
    *batch, channels, height, width = w.sizes(x)
    n = len(batch)
    parts = [*batch, channels, height // factor, factor, width // factor, factor]
    return _through(w, node, x, parts, [*range(n), n, n + 2, n + 4, n + 1, n + 3])


def _channel_shuffle(w: OnnxWriter, node: Node, x: Any, groups: int) -> str:
    batch, channels, *rest = w.sizes(x)
    parts = [batch, groups, channels // groups, *rest]
    return _through(w, node, x, parts, [0, 2, 1, *range(3, len(parts))])


def _roll(w: OnnxWriter, node: Node, x: Any, shifts: Sequence[Any], dims: Sequence[int] = ()) -> str:
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


REARRANGE: Mapping[tuple[str, ...], Form] = {
    ("aten.pixel_shuffle.default",): _pixel_shuffle,
    ("aten.pixel_unshuffle.default",): _pixel_unshuffle,
    ("aten.channel_shuffle.default", "aten.native_channel_shuffle.default"): _channel_shuffle,
    ("aten.roll.default",): _roll,
}
