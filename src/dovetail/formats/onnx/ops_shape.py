"""Translations of views, indexing, concatenation and factories: operators that move elements or fill tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.formats.onnx.writer import OnnxWriter, OpTranslation, element_type
from dovetail.ir.nodes import is_static_size
from dovetail.lowering.failures import UnsupportedOp

_FAR = 2**62


def _getitem(w: OnnxWriter, node: Node, pair: Node, index: int) -> Any:
    names = w.names[pair]
    if not isinstance(names, tuple) or names[index] is None:
        raise UnsupportedOp(f"result {index} of '{pair.name}' has no ONNX translation")
    return names[index]


def _view(w: OnnxWriter, node: Node, x: Any, size: Any) -> str:
    # With all but one size known, -1 stands for the last, and no symbol is needed.
    known = list(w.value(node).shape)
    symbolic_dims = [i for i, n in enumerate(known) if not is_static_size(n)]
    if len(symbolic_dims) <= 1 and 0 not in known:
        size = [-1 if i in symbolic_dims else n for i, n in enumerate(known)]
    return w.op("Reshape", w.of(x), w.integers(size), allowzero=1, label=node.name)


def _flatten(w: OnnxWriter, node: Node, x: Any, *_: Any) -> str:
    return w.op("Reshape", w.of(x), w.integers(w.sizes(node)), allowzero=1, label=node.name)


def _transpose(w: OnnxWriter, node: Node, x: Any, a: int, b: int) -> str:
    rank = w.rank(x)
    if not rank:
        return w.identity(node, x)
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return w.op("Transpose", w.of(x), perm=order, label=node.name)


def _t(w: OnnxWriter, node: Node, x: Any) -> str:
    rank = w.rank(x)
    if rank < 2:
        return w.identity(node, x)
    return w.op("Transpose", w.of(x), perm=[*range(rank - 2), rank - 1, rank - 2], label=node.name)


def _permute(w: OnnxWriter, node: Node, x: Any, order: Sequence[int]) -> str:
    rank = w.rank(x)
    if not rank:
        return w.identity(node, x)
    return w.op("Transpose", w.of(x), perm=[d % rank for d in order], label=node.name)


def _unsqueeze(w: OnnxWriter, node: Node, x: Any, dim: int) -> str:
    return w.op("Unsqueeze", w.of(x), w.axes([dim], w.rank(x) + 1), label=node.name)


def _squeeze(w: OnnxWriter, node: Node, x: Any, dims: Any = None) -> str:
    shape = w.value(x).shape
    dims = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    if not len(shape):
        return w.identity(node, x)
    if any(not is_static_size(shape[d]) for d in dims):
        raise UnsupportedOp("whether a dimension is removed depends on a symbolic size")
    removed = [d % len(shape) for d in dims if shape[d] == 1]
    if not removed:
        return w.identity(node, x)
    return w.op("Squeeze", w.of(x), w.axes(removed, len(shape)), label=node.name)


def _expand(w: OnnxWriter, node: Node, x: Any, size: Sequence[Any], *, implicit: bool = False) -> str:
    # ONNX keeps a size where 1 is asked for, as torch does where -1 is.
    sizes = [1 if isinstance(n, int) and n == -1 else n for n in size]
    if not sizes:
        return w.identity(node, x)
    return w.op("Expand", w.of(x), w.integers(sizes), label=node.name)


def _expand_as(w: OnnxWriter, node: Node, x: Any, other: Node) -> str:
    if not w.rank(node):
        return w.identity(node, x)
    return w.op("Expand", w.of(x), w.shape(other), label=node.name)


def _repeat(w: OnnxWriter, node: Node, x: Any, times: Sequence[Any]) -> str:
    extra = len(times) - w.rank(x)
    source = w.of(x)
    if not times:
        return w.identity(node, source)
    if extra:
        source = w.op("Unsqueeze", source, w.integers(list(range(extra))))
    return w.op("Tile", source, w.integers(times), label=node.name)


def _cat(w: OnnxWriter, node: Node, parts: Sequence[Node], dim: int = 0) -> str:
    dtype = w.dtype(node)
    # torch ignores an empty vector among tensors of any rank.
    real = [p for p in parts if not (w.rank(p) == 1 and w.value(p).shape[0] == 0)] or list(parts)
    return w.op("Concat", *(w.read(p, dtype) for p in real), axis=dim, label=node.name)


def _stack(w: OnnxWriter, node: Node, parts: Sequence[Node], dim: int = 0) -> str:
    dtype = w.dtype(node)
    at = w.axes([dim], w.rank(node))
    raised = [w.op("Unsqueeze", w.read(p, dtype), at) for p in parts]
    return w.op("Concat", *raised, axis=dim, label=node.name)


def _split_sizes(w: OnnxWriter, node: Node, x: Any, sizes: Sequence[int], dim: int) -> tuple[str, ...]:
    if len(sizes) == 1:
        return (w.identity(node, x),)
    vector = w.integers(list(sizes))
    return w.op("Split", w.of(x), vector, results=len(sizes), axis=dim, label=node.name)


def _split(w: OnnxWriter, node: Node, x: Any, size: Any, dim: int = 0) -> tuple[str, ...]:
    lengths = [w.fixed(v.shape[dim], "the length of a part") for v in node.meta["val"]]
    return _split_sizes(w, node, x, lengths, dim)


def _unbind(w: OnnxWriter, node: Node, x: Any, dim: int = 0) -> tuple[str, ...]:
    shape = w.value(x).shape
    parts = _split_sizes(w, node, x, [1] * w.fixed(shape[dim], "the number of parts"), dim)
    at = w.axes([dim], len(shape))
    return tuple(w.op("Squeeze", part, at, label=node.name) for part in parts)


def _slice(
    w: OnnxWriter, node: Node, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> str:
    first = 0 if start is None else start
    last = _FAR if end is None or (isinstance(end, int) and end > _FAR) else end
    bounds = w.integers([first]), w.integers([last])
    return w.op("Slice", w.of(x), *bounds, w.axes([dim], w.rank(x)), w.integers([step]), label=node.name)


def _diff(
    w: OnnxWriter, node: Node, x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> str:
    dtype, value = w.dtype(node), w.value(x)
    axis = dim % value.dim()
    parts = [w.read(part, dtype) for part in (prepend, x, append) if part is not None]
    result = w.op("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]
    at, one = w.integers([axis]), w.integers([1])
    for _ in range(n):
        later = w.op("Slice", result, one, w.integers([_FAR]), at)
        earlier = w.op("Slice", result, w.integers([0]), w.integers([-1]), at)
        result = w.op("Xor" if dtype is torch.bool else "Sub", later, earlier)
    return w.identity(node, result)


def _select(w: OnnxWriter, node: Node, x: Any, dim: int, index: Any) -> str:
    at = w.of(index) if isinstance(index, Node) else w.integer(index)
    return w.op("Gather", w.of(x), at, axis=dim, label=node.name)


def _narrow(w: OnnxWriter, node: Node, x: Any, dim: int, start: Any, length: Any) -> str:
    if not isinstance(start, int) or not isinstance(length, int) or start < 0:
        raise UnsupportedOp("a narrow whose bounds are not known")
    bounds = w.integers([start]), w.integers([start + length])
    return w.op("Slice", w.of(x), *bounds, w.axes([dim], w.rank(x)), label=node.name)


def _constant_pad_nd(w: OnnxWriter, node: Node, x: Any, pad: Sequence[Any], *rest: Any) -> str:
    modes = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}
    padding = "aten.pad." in str(node.target)
    mode, value = rest if padding else ("constant", *rest)
    if mode != "constant" and any(w.fixed(n, "a padding") < 0 for n in pad):
        raise UnsupportedOp("negative padding with the elements of the tensor")
    if mode not in modes:
        raise UnsupportedOp(f"padding of mode '{mode}'")
    rank = w.rank(x)
    before, after = [0] * rank, [0] * rank
    for i in range(0, len(pad), 2):
        at = rank - 1 - i // 2
        before[at], after[at] = w.fixed(pad[i], "a padding"), w.fixed(pad[i + 1], "a padding")
    amounts = w.integers([*before, *after])
    filler = [w.constant(value or 0, w.dtype(x))] if mode == "constant" else []
    return w.op("Pad", w.of(x), amounts, *filler, mode=modes[mode], label=node.name)


def _flip(w: OnnxWriter, node: Node, x: Any, dims: Sequence[int]) -> str:
    count = len(dims)
    starts, ends = w.integers([-1] * count), w.integers([-_FAR] * count)
    at, steps = w.axes(dims, w.rank(x)), w.integers([-1] * count)
    return w.op("Slice", w.of(x), starts, ends, at, steps, label=node.name)


def _tril(w: OnnxWriter, node: Node, x: Any, diagonal: int = 0) -> str:
    upper = int("triu" in str(node.target))
    offset = w.integer(diagonal)
    if w.dtype(x) == torch.bool:
        # Runtimes have Trilu for numbers only.
        triangle = w.op("Trilu", w.op("Cast", w.of(x), to=element_type(torch.int64)), offset, upper=upper)
        return w.op("Cast", triangle, to=element_type(torch.bool), label=node.name)
    return w.op("Trilu", w.of(x), offset, upper=upper, label=node.name)


def _arange(w: OnnxWriter, node: Node, *bounds: Any, **_: Any) -> str:
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1)}.get(len(bounds), bounds)
    value = w.value(node)
    limits = [start, end, step]
    if all(isinstance(b, int) for b in limits) or value.dtype == torch.int64:
        numbers = w.op("Range", *(w.read(b, torch.int64) for b in limits), label=node.name)
        return w.cast(numbers, torch.int64, value.dtype)
    if any(isinstance(b, Node) for b in limits):
        raise UnsupportedOp("a floating-point range up to a symbolic size")
    # Range may accumulate the steps, and torch multiplies.
    counted = w.op("Range", *(w.integer(n) for n in (0, value.shape[0], 1)))
    scaled = w.op("Mul", w.cast(counted, torch.int64, value.dtype), w.constant(step, value.dtype))
    return w.op("Add", scaled, w.constant(start, value.dtype), label=node.name)


def _filled(w: OnnxWriter, node: Node, sizes: str, value: Any) -> str:
    scalar = w.read(value, w.dtype(node))
    return w.op("Expand", scalar, sizes, label=node.name) if w.rank(node) else scalar


def _full(value: Any) -> OpTranslation:
    def write(w: OnnxWriter, node: Node, size: Any, *_: Any, **__: Any) -> str:
        return _filled(w, node, w.integers(size), value)

    return write


def _like(value: Any) -> OpTranslation:
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
    return w.read(value, w.dtype(node))


def _sym_size(w: OnnxWriter, node: Node, x: Node, dim: int) -> str:
    at = w.integer(dim % w.rank(x))
    return w.op("Gather", w.op("Shape", w.of(x)), at, label=node.name)


def _integer_op(kind: str) -> OpTranslation:
    def write(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
        return w.op(kind, w.read(a, torch.int64), w.read(b, torch.int64), label=node.name)

    return write


def _int_floordiv(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
    # Sizes are not negative, so that truncating is rounding down.
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        raise UnsupportedOp("a division of tensors")
    return _integer_op("Div")(w, node, a, b)


SHAPE: Mapping[tuple[str, ...], OpTranslation] = {
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
    ("aten.sym_size.int",): _sym_size,
    ("int.add",): _integer_op("Add"),
    ("int.sub",): _integer_op("Sub"),
    ("int.mul",): _integer_op("Mul"),
    ("int.floordiv",): _int_floordiv,
}


def _positions(w: OnnxWriter, indices: Any, source: Any, dim: int, *, wraps: bool = False) -> str:
    """Return positions along a dimension of a tensor; with `wraps` negative ones count from its end."""
    at, size = w.read(indices, torch.int64), w.value(source).shape[dim]
    if not w.dialect.runs:
        return at
    if is_static_size(size):
        most = w.integer(int(size))
    else:
        most = w.op("Gather", w.shape(source), w.integer(dim % w.rank(source)))
    clamped = _in_range(w, at, w.value(indices), w.op("Neg", most) if wraps else 0, most)
    if not wraps:
        return clamped
    negative = w.op("Less", clamped, w.integer(0))
    return w.op("Where", negative, w.op("Add", clamped, most), clamped)


def _in_range(w: OnnxWriter, at: str, value: Tensor, least: str | int, size: str) -> str:
    """Return positions clamped to their range, and record a flag whether they were in range before."""
    if 0 in value.shape:
        return at
    low = least if isinstance(least, str) else w.integer(least)
    lowest, highest = (w.op(kind, at, keepdims=0) for kind in ("ReduceMin", "ReduceMax"))
    w.flags.append(w.op("And", w.op("GreaterOrEqual", lowest, low), w.op("Less", highest, size)))
    last = w.op("Sub", size, w.integer(1))
    return w.op("Min", w.op("Max", at, low), last)


def _flat_gather(w: OnnxWriter, node: Node, x: Any, indices: Sequence[Any]) -> str:
    """Gather along the first dimensions as one flat dimension: some runtimes crash on GatherND."""
    sizes, count = w.sizes(x), len(indices)
    at = ""
    for dim, one in enumerate(indices):
        position = _positions(w, one, x, dim, wraps=True)
        size = w.integer(sizes[dim])
        at = w.op("Add", w.op("Mul", at, size), position) if at else position
    rows = [math.prod(sizes[:count]), *sizes[count:]]
    flat = w.op("Reshape", w.of(x), w.integers(rows), allowzero=1)
    return w.op("Gather", flat, at, axis=0, label=node.name)


def _embedding(w: OnnxWriter, node: Node, weight: Any, indices: Any, *_: Any, **__: Any) -> str:
    return w.op("Gather", w.of(weight), _positions(w, indices, weight, 0), axis=0, label=node.name)


def _index_select(w: OnnxWriter, node: Node, x: Any, dim: int, indices: Any) -> str:
    if not w.rank(x):
        raise UnsupportedOp("index_select from a scalar")
    return w.op("Gather", w.of(x), _positions(w, indices, x, dim), axis=dim, label=node.name)


def _gather(w: OnnxWriter, node: Node, x: Any, dim: int, indices: Any, *, sparse_grad: bool = False) -> str:
    if not w.rank(x) or w.rank(x) != w.rank(indices):
        raise UnsupportedOp("a gather between tensors of different ranks")
    return w.op("GatherElements", w.of(x), _positions(w, indices, x, dim), axis=dim, label=node.name)


def _scatter(w: OnnxWriter, node: Node, x: Any, dim: int, indices: Any, source: Any) -> str:
    added = "add" if "scatter_add" in str(node.target) else "none"
    dtype = w.dtype(node)
    at = _positions(w, indices, x, dim)
    if isinstance(source, Node) and w.rank(source):
        if list(w.value(source).shape) != list(w.value(indices).shape):
            raise UnsupportedOp("a scatter that takes only part of its source")
        values = w.read(source, dtype)
    else:
        values = w.op("Expand", w.read(source, dtype), w.shape(indices))
    return w.op("ScatterElements", w.of(x), at, values, axis=dim, reduction=added, label=node.name)


def _index(w: OnnxWriter, node: Node, x: Any, indices: Sequence[Any]) -> str:
    indexed = [(i, v) for i, v in enumerate(indices) if v is not None]
    if any(w.dtype(v) in (torch.bool, torch.uint8) for _, v in indexed):
        raise UnsupportedOp("the number of elements that a mask selects depends on data")
    if len(indexed) == 1:
        (axis, at), rank = indexed[0], w.rank(x)
        position = _positions(w, at, x, axis % rank, wraps=True)
        return w.op("Gather", w.of(x), position, axis=axis % rank, label=node.name)
    if [i for i, _ in indexed] != list(range(len(indexed))):
        raise UnsupportedOp("indices of more than one dimension, other than the first ones")
    if w.dialect.runs:
        return _flat_gather(w, node, x, [v for _, v in indexed])
    positions = [w.read(v, torch.int64) for _, v in indexed]
    if all(is_static_size(n) for _, v in indexed for n in w.value(v).shape):
        shape = w.integers(list(torch.broadcast_shapes(*(tuple(w.sizes(v)) for _, v in indexed))))
    else:
        # The sum of positions has the sizes that they broadcast to.
        shape = w.op("Shape", functools.reduce(lambda a, b: w.op("Add", a, b), positions))
    last = w.integers([-1])
    parts = [w.op("Unsqueeze", w.op("Expand", at, shape), last) for at in positions]
    return w.op("GatherND", w.of(x), w.op("Concat", *parts, axis=-1), label=node.name)


def _topk(
    w: OnnxWriter, node: Node, x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[str, ...]:
    count, first, ordered = w.integers([k]), int(largest), int(sorted)
    return w.op("TopK", w.of(x), count, results=2, axis=dim, largest=first, sorted=ordered, label=node.name)


def _argmax(w: OnnxWriter, node: Node, x: Any, dim: int | None = None, keepdim: bool = False) -> str:
    kind = "ArgMax" if "argmax" in str(node.target) else "ArgMin"
    if not w.rank(x):
        raise UnsupportedOp("the position of the extremum of a scalar")
    if dim is None:
        flat = w.op("Reshape", w.of(x), w.integers([-1]))
        if keepdim:
            raise UnsupportedOp("the position in the whole tensor with keepdim")
        return w.op(kind, flat, axis=0, keepdims=0, label=node.name)
    return w.op(kind, w.of(x), axis=dim, keepdims=int(keepdim), label=node.name)


def _one_hot(w: OnnxWriter, node: Node, x: Any, count: int = -1) -> str:
    if count < 0 or not w.rank(x):
        raise UnsupportedOp("a one-hot whose number of classes depends on the data")
    values = w.integers([0, 1])
    at = _in_range(w, w.of(x), w.value(x), 0, w.integer(count)) if w.dialect.runs else w.of(x)
    return w.op("OneHot", at, w.integers([count]), values, axis=-1, label=node.name)


INDEXING: Mapping[tuple[str, ...], OpTranslation] = {
    ("aten.embedding.default",): _embedding,
    ("aten.index_select.default",): _index_select,
    ("aten.gather.default",): _gather,
    ("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default"): _scatter,
    ("aten.index.Tensor",): _index,
    ("aten.topk.default",): _topk,
    ("aten.argmax.default", "aten.argmin.default"): _argmax,
    ("aten.one_hot.default",): _one_hot,
}


def _regrouped(w: OnnxWriter, node: Node, x: Any, parts: Sequence[int], order: Sequence[int]) -> str:
    """Split dimensions, permute them, and merge them to the sizes of the result."""
    if 0 in parts:
        raise UnsupportedOp("dimensions of an empty tensor are split")
    apart = w.op("Reshape", w.of(x), w.integers(list(parts)), allowzero=1)
    moved = w.op("Transpose", apart, perm=list(order))
    return w.op("Reshape", moved, w.integers(w.sizes(node)), allowzero=1, label=node.name)


def _pixel_shuffle(w: OnnxWriter, node: Node, x: Any, factor: int) -> str:
    *batch, channels, height, width = w.sizes(x)
    n = len(batch)
    parts = [*batch, channels // factor**2, factor, factor, height, width]
    return _regrouped(w, node, x, parts, [*range(n), n, n + 3, n + 1, n + 4, n + 2])


def _pixel_unshuffle(w: OnnxWriter, node: Node, x: Any, factor: int) -> str:
    *batch, channels, height, width = w.sizes(x)
    n = len(batch)
    parts = [*batch, channels, height // factor, factor, width // factor, factor]
    return _regrouped(w, node, x, parts, [*range(n), n, n + 2, n + 4, n + 1, n + 3])


def _channel_shuffle(w: OnnxWriter, node: Node, x: Any, groups: int) -> str:
    batch, channels, *rest = w.sizes(x)
    parts = [batch, groups, channels // groups, *rest]
    return _regrouped(w, node, x, parts, [0, 2, 1, *range(3, len(parts))])


def _roll(w: OnnxWriter, node: Node, x: Any, shifts: Sequence[Any], dims: Sequence[int] = ()) -> str:
    sizes = w.sizes(x)
    rolled = w.of(x)
    if not dims:
        rolled = w.op("Reshape", rolled, w.integers([-1]))
        sizes, dims = [w.value(x).numel()], [0]
    for shift, dim in zip(shifts, dims, strict=True):
        size = sizes[dim]
        by = w.fixed(shift, "a shift") % size if size else 0
        if by:
            at = w.axes([dim], len(sizes))
            start, middle, end = (w.integers([n]) for n in (0, size - by, _FAR))
            parts = [w.op("Slice", rolled, *bounds, at) for bounds in ((middle, end), (start, middle))]
            rolled = w.op("Concat", *parts, axis=dim)
    return w.op("Reshape", rolled, w.integers(w.sizes(node)), allowzero=1, label=node.name)


REARRANGE: Mapping[tuple[str, ...], OpTranslation] = {
    ("aten.pixel_shuffle.default",): _pixel_shuffle,
    ("aten.pixel_unshuffle.default",): _pixel_unshuffle,
    ("aten.channel_shuffle.default", "aten.native_channel_shuffle.default"): _channel_shuffle,
    ("aten.roll.default",): _roll,
}
