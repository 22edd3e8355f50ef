"""Operators that move, join or make elements without computing on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.lowering.onnx.types import NoForm, element, is_number
from dovetail.lowering.onnx.writer import Form, Writer, form

_FAR = 2**62


@form("getitem")
def _(w: Writer, node: Node, pair: Node, index: int) -> Any:
    found = w.names[pair]
    if not isinstance(found, tuple) or found[index] is None:
        raise NoForm(f"result {index} of '{pair.name}' has no form")
    return found[index]


@form("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
def _(w: Writer, node: Node, x: Any, size: Any) -> str:
    # Where all but one size is known, what is left over says the last, and no symbol is needed.
    known = list(w.value(node).shape)
    open_sizes = [i for i, n in enumerate(known) if not is_number(n)]
    if len(open_sizes) <= 1 and 0 not in known:
        size = [-1 if i in open_sizes else n for i, n in enumerate(known)]
    return w.op("Reshape", w.of(x), w.integers(size), allowzero=1, label=node.name)


@form("aten.flatten.using_ints", "aten.unflatten.int", "aten.view_as.default", "aten.reshape_as.default")
def _(w: Writer, node: Node, x: Any, *_: Any) -> str:
    return w.op("Reshape", w.of(x), w.constant(w.sizes(node), torch.int64), allowzero=1, label=node.name)


@form("aten.transpose.int")
def _(w: Writer, node: Node, x: Any, a: int, b: int) -> str:
    rank = w.value(x).dim()
    if not rank:
        return w.op("Identity", w.of(x), label=node.name)
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return w.op("Transpose", w.of(x), perm=order, label=node.name)


@form("aten.t.default", "aten.mT.default", "aten.numpy_T.default")
def _(w: Writer, node: Node, x: Any) -> str:
    rank = w.value(x).dim()
    if rank < 2:
        return w.op("Identity", w.of(x), label=node.name)
    return w.op("Transpose", w.of(x), perm=[*range(rank - 2), rank - 1, rank - 2], label=node.name)


@form("aten.permute.default")
def _(w: Writer, node: Node, x: Any, order: Sequence[int]) -> str:
    rank = w.value(x).dim()
    if not rank:
        return w.op("Identity", w.of(x), label=node.name)
    return w.op("Transpose", w.of(x), perm=[d % rank for d in order], label=node.name)


@form("aten.unsqueeze.default")
def _(w: Writer, node: Node, x: Any, dim: int) -> str:
    return w.op("Unsqueeze", w.of(x), w.axes([dim], w.value(x).dim() + 1), label=node.name)


@form("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default")
def _(w: Writer, node: Node, x: Any, dims: Any = None) -> str:
    shape = w.value(x).shape
    asked = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    if not len(shape):
        return w.op("Identity", w.of(x), label=node.name)
    if any(not is_number(shape[d]) for d in asked):
        raise NoForm("whether a dimension goes depends on a size that is not known")
    gone = [d % len(shape) for d in asked if shape[d] == 1]
    if not gone:
        return w.op("Identity", w.of(x), label=node.name)
    return w.op("Squeeze", w.of(x), w.axes(gone, len(shape)), label=node.name)


@form("aten.expand.default", "aten.broadcast_to.default")
def _(w: Writer, node: Node, x: Any, size: Sequence[Any], *, implicit: bool = False) -> str:
    # ONNX keeps a size where 1 is asked for, as torch does where -1 is.
    sizes = [1 if isinstance(n, int) and n == -1 else n for n in size]
    if not sizes:
        return w.op("Identity", w.of(x), label=node.name)
    return w.op("Expand", w.of(x), w.integers(sizes), label=node.name)


@form("aten.expand_as.default")
def _(w: Writer, node: Node, x: Any, other: Node) -> str:
    if not w.value(node).dim():
        return w.op("Identity", w.of(x), label=node.name)
    return w.op("Expand", w.of(x), w.shape(other), label=node.name)


@form("aten.repeat.default")
def _(w: Writer, node: Node, x: Any, times: Sequence[Any]) -> str:
    extra = len(times) - w.value(x).dim()
    found = w.of(x)
    if not times:
        return w.op("Identity", found, label=node.name)
    if extra:
        found = w.op("Unsqueeze", found, w.constant(list(range(extra)), torch.int64))
    return w.op("Tile", found, w.integers(times), label=node.name)


@form("aten.cat.default")
def _(w: Writer, node: Node, parts: Sequence[Node], dim: int = 0) -> str:
    dtype = w.value(node).dtype
    # An empty vector may stand among tensors of any rank, and counts for nothing.
    real = [p for p in parts if not (w.value(p).dim() == 1 and w.value(p).shape[0] == 0)] or list(parts)
    return w.op("Concat", *(w.read(p, dtype) for p in real), axis=dim, label=node.name)


@form("aten.stack.default")
def _(w: Writer, node: Node, parts: Sequence[Node], dim: int = 0) -> str:
    dtype = w.value(node).dtype
    at = w.axes([dim], w.value(node).dim())
    raised = [w.op("Unsqueeze", w.read(p, dtype), at) for p in parts]
    return w.op("Concat", *raised, axis=dim, label=node.name)


def _apart(w: Writer, node: Node, x: Any, sizes: Sequence[int], dim: int) -> tuple[str, ...]:
    if len(sizes) == 1:
        return (w.op("Identity", w.of(x), label=node.name),)
    vector = w.constant(list(sizes), torch.int64)
    return w.op("Split", w.of(x), vector, results=len(sizes), axis=dim, label=node.name)


@form(
    "aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.tensor_split.sections"
)
def _(w: Writer, node: Node, x: Any, size: Any, dim: int = 0) -> tuple[str, ...]:
    lengths = [w.fixed(v.shape[dim], "the length of a part") for v in node.meta["val"]]
    return _apart(w, node, x, lengths, dim)


@form("aten.unbind.int")
def _(w: Writer, node: Node, x: Any, dim: int = 0) -> tuple[str, ...]:
    shape = w.value(x).shape
    parts = _apart(w, node, x, [1] * w.fixed(shape[dim], "the number of parts"), dim)
    at = w.axes([dim], len(shape))
    return tuple(w.op("Squeeze", part, at, label=node.name) for part in parts)


@form("aten.slice.Tensor")
def _(w: Writer, node: Node, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> str:
    first = 0 if start is None else start
    last = _FAR if end is None or (isinstance(end, int) and end > _FAR) else end
    bounds = w.integers([first]), w.integers([last])
    return w.op(
        "Slice", w.of(x), *bounds, w.axes([dim], w.value(x).dim()), w.integers([step]), label=node.name
    )


@form("aten.diff.default")
def _(
    w: Writer,
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


@form("aten.select.int")
def _(w: Writer, node: Node, x: Any, dim: int, index: Any) -> str:
    at = w.of(index) if isinstance(index, Node) else w.constant(index, torch.int64)
    return w.op("Gather", w.of(x), at, axis=dim, label=node.name)


@form("aten.narrow.default")
def _(w: Writer, node: Node, x: Any, dim: int, start: Any, length: Any) -> str:
    if not isinstance(start, int) or not isinstance(length, int) or start < 0:
        raise NoForm("a narrowing whose place is not known")
    bounds = w.integers([start]), w.integers([start + length])
    return w.op("Slice", w.of(x), *bounds, w.axes([dim], w.value(x).dim()), label=node.name)


@form("aten.constant_pad_nd.default", "aten.pad.default")
def _(w: Writer, node: Node, x: Any, pad: Sequence[Any], *rest: Any) -> str:
    modes = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}
    padding = "aten.pad." in str(node.target)
    mode, value = rest if padding else ("constant", *rest)
    if mode != "constant" and any(w.fixed(n, "a padding") < 0 for n in pad):
        raise NoForm("a tensor that is cut off and padded with itself")
    if mode not in modes:
        raise NoForm(f"padding of mode '{mode}'")
    rank = w.value(x).dim()
    before, after = [0] * rank, [0] * rank
    for i in range(0, len(pad), 2):
        at = rank - 1 - i // 2
        before[at], after[at] = w.fixed(pad[i], "a padding"), w.fixed(pad[i + 1], "a padding")
    amounts = w.constant([*before, *after], torch.int64)
    filler = [w.constant(value or 0, w.value(x).dtype)] if mode == "constant" else []
    return w.op("Pad", w.of(x), amounts, *filler, mode=modes[mode], label=node.name)


@form("aten.flip.default")
def _(w: Writer, node: Node, x: Any, dims: Sequence[int]) -> str:
    count = len(dims)
    starts, ends = w.constant([-1] * count, torch.int64), w.constant([-_FAR] * count, torch.int64)
    at, steps = w.axes(dims, w.value(x).dim()), w.constant([-1] * count, torch.int64)
    return w.op("Slice", w.of(x), starts, ends, at, steps, label=node.name)


@form("aten.tril.default", "aten.triu.default")
def _(w: Writer, node: Node, x: Any, diagonal: int = 0) -> str:
    upper = int("triu" in str(node.target))
    offset = w.constant(diagonal, torch.int64)
    if w.value(x).dtype == torch.bool:
        # Runtimes have it for numbers only.
        kept = w.op("Trilu", w.op("Cast", w.of(x), to=element(torch.int64)), offset, upper=upper)
        return w.op("Cast", kept, to=element(torch.bool), label=node.name)
    return w.op("Trilu", w.of(x), offset, upper=upper, label=node.name)


@form("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def _(w: Writer, node: Node, *bounds: Any, **_: Any) -> str:
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1)}.get(len(bounds), bounds)
    value = w.value(node)
    given = [start, end, step]
    if all(isinstance(b, int) for b in given) or value.dtype == torch.int64:
        made = w.op("Range", *(w.read(b, torch.int64) for b in given), label=node.name)
        return w.cast(made, torch.int64, value.dtype)
    if any(isinstance(b, Node) for b in given):
        raise NoForm("a range of fractions up to a size")
    # Summing steps up, as Range may, is not what torch does.
    counted = w.op("Range", *(w.constant(n, torch.int64) for n in (0, value.shape[0], 1)))
    scaled = w.op("Mul", w.cast(counted, torch.int64, value.dtype), w.constant(step, value.dtype))
    return w.op("Add", scaled, w.constant(start, value.dtype), label=node.name)


def _filled(w: Writer, node: Node, sizes: str, value: Any) -> str:
    made = w.value(node)
    found = w.read(value, made.dtype)
    return w.op("Expand", found, sizes, label=node.name) if made.dim() else found


def _full(value: Any) -> Form:
    def write(w: Writer, node: Node, size: Any, *_: Any, **__: Any) -> str:
        return _filled(w, node, w.integers(size), value)

    return write


def _like(value: Any) -> Form:
    def write(w: Writer, node: Node, x: Node, *_: Any, **__: Any) -> str:
        return _filled(w, node, w.shape(x), value)

    return write


form("aten.zeros.default")(_full(0))
form("aten.ones.default")(_full(1))
form("aten.zeros_like.default")(_like(0))
form("aten.ones_like.default")(_like(1))


@form("aten.full.default")
def _(w: Writer, node: Node, size: Any, value: Any, **_: Any) -> str:
    return _filled(w, node, w.integers(size), value)


@form("aten.full_like.default")
def _(w: Writer, node: Node, x: Node, value: Any, **_: Any) -> str:
    return _filled(w, node, w.shape(x), value)


@form("aten.new_zeros.default", "aten.new_ones.default")
def _(w: Writer, node: Node, x: Node, size: Any, **_: Any) -> str:
    return _filled(w, node, w.integers(size), int("ones" in str(node.target)))


@form("aten.new_full.default")
def _(w: Writer, node: Node, x: Node, size: Any, value: Any, **_: Any) -> str:
    return _filled(w, node, w.integers(size), value)


@form("aten.scalar_tensor.default")
def _(w: Writer, node: Node, value: Any, **_: Any) -> str:
    return w.read(value, w.value(node).dtype)


@form("aten.lift_fresh_copy.default")
def _(w: Writer, node: Node, x: Any) -> str:
    return w.op("Identity", w.of(x), label=node.name)


@form("aten.sym_size.int")
def _(w: Writer, node: Node, x: Node, dim: int) -> str:
    at = w.constant(dim % w.value(x).dim(), torch.int64)
    return w.op("Gather", w.op("Shape", w.of(x)), at, label=node.name)


def _whole(kind: str) -> Form:
    def write(w: Writer, node: Node, a: Any, b: Any) -> str:
        return w.op(kind, w.read(a, torch.int64), w.read(b, torch.int64), label=node.name)

    return write


form("int.add")(_whole("Add"))
form("int.sub")(_whole("Sub"))
form("int.mul")(_whole("Mul"))


@form("int.floordiv")
def _(w: Writer, node: Node, a: Any, b: Any) -> str:
    # Sizes are not negative, so that cutting off is rounding down.
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        raise NoForm("a division of tensors")
    return _whole("Div")(w, node, a, b)
