"""What the ONNX operators that move, pick and join elements are in torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.interop.onnx_operators import OPERATORS, NoCounterpart, Reading, known, listed, operator, tensor
from dovetail.lowering.onnx.types import is_number


@operator("Reshape")
def _(x: Any, sizes: Any, *, allowzero: int = 0) -> Any:
    if isinstance(x, list) or not isinstance(x, Tensor):
        return cast("Any", x) if isinstance(x, list) else [x]
    wanted = listed(sizes, "the shape of a reshape")
    if not allowzero:
        wanted = [x.shape[i] if is_number(n) and n == 0 else n for i, n in enumerate(wanted)]
    return torch.reshape(x, wanted)


@operator("Flatten")
def _(x: Any, *, axis: int = 1) -> Any:
    rows = math.prod(x.shape[: axis if axis >= 0 else axis + x.dim()])
    return torch.reshape(x, [rows, -1] if rows else [0, math.prod(x.shape[axis:])])


@operator("Transpose")
def _(x: Any, *, perm: Sequence[int] | None = None) -> Any:
    order = list(range(x.dim()))[::-1] if perm is None else list(perm)
    moved = [i for i, d in enumerate(order) if i != d]
    return torch.transpose(x, *moved) if len(moved) == 2 else torch.permute(x, order)


@operator("Unsqueeze")
def _(x: Any, axes: Any) -> Any:
    if not isinstance(x, Tensor):
        return cast("Any", x) if isinstance(x, list) else [x]
    found, places = x, listed(axes, "the place of a dimension")
    for axis in sorted(a % (x.dim() + len(places)) for a in places):
        found = torch.unsqueeze(found, axis)
    return found


@operator("Squeeze")
def _(x: Any, axes: Any = None) -> Any:
    if not isinstance(x, Tensor):
        return x[0] if isinstance(x, list) and len(cast("list[Any]", x)) == 1 else x
    if axes is None:
        return torch.squeeze(x)
    places = listed(axes, "the place of a dimension")
    return torch.squeeze(x, places[0]) if len(places) == 1 else torch.squeeze(x, tuple(places))


@operator("Expand")
def _(x: Any, sizes: Any) -> Any:
    wanted = listed(sizes, "the size of an expansion")
    if not isinstance(x, Tensor):
        if isinstance(x, list):
            x = tensor(x)
        else:
            return torch.full(wanted, x)
    wanted = [1] * (x.dim() - len(wanted)) + wanted
    skipped = len(wanted) - x.dim()
    # Where a size is 1 the tensor keeps its own.
    final = [
        x.shape[i - skipped] if is_number(n) and n == 1 and i >= skipped else n for i, n in enumerate(wanted)
    ]
    return x.expand(final)


@operator("Tile")
def _(x: Any, times: Any) -> Any:
    return x.repeat(listed(times, "how often a tensor is repeated"))


@operator("Concat")
def _(*parts: Any, axis: int) -> Any:
    if not any(isinstance(p, Tensor) for p in parts):
        return [n for p in parts for n in (cast("list[Any]", p) if isinstance(p, list) else [p])]
    return torch.cat([tensor(p) for p in parts], axis)


@operator("Split")
def _(x: Any, sizes: Any = None, *, axis: int = 0, num_outputs: int | None = None) -> Any:
    if sizes is None:
        return torch.chunk(x, num_outputs or 1, axis)
    lengths = listed(sizes, "the length of a part")
    if len(set(lengths)) == 1:
        return torch.split(x, lengths[0], axis)
    return torch.split(x, lengths, axis)


@operator("Slice")
def _(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    first, last = listed(starts, "where a slice begins"), listed(ends, "where a slice ends")
    places = list(range(len(first))) if axes is None else listed(axes, "the dimension of a slice")
    strides = [1] * len(first) if steps is None else listed(steps, "the step of a slice")
    if isinstance(x, list):
        return cast("list[Any]", x)[first[0] : last[0] : strides[0]]
    turned: list[int] = []
    for place, a, b, step in zip(places, first, last, strides, strict=True):
        if is_number(step) and step < 0:
            turned.append(place % x.dim())
            x = _forwards(x, place, slice(a, b, step))
            continue
        end = None if is_number(b) and b >= 2**31 - 1 else b
        x = torch.ops.aten.slice.Tensor(x, place, a, end, step)
    return torch.flip(x, turned) if turned else x


def _forwards(x: Tensor, place: int, backwards: slice) -> Tensor:
    """What a slice that goes backwards picks in a dimension, from its first element to its last."""
    size: Any = x.shape[place]
    if not all(is_number(n) for n in (size, backwards.start, backwards.stop)):
        raise NoCounterpart("a slice that goes backwards from where only a call tells")
    picked = range(*backwards.indices(size))
    if len(picked) == size:
        return x
    low, high = (picked[-1], picked[0] + 1) if picked else (0, 0)
    return torch.ops.aten.slice.Tensor(x, place, low, high, -picked.step)


@operator("Gather")
def _(x: Any, indices: Any, *, axis: int = 0) -> Any:
    if isinstance(x, list):
        return cast("Any", x)[known(indices, "a position among sizes")]
    if not isinstance(indices, Tensor):
        if isinstance(indices, list):
            return torch.index_select(x, axis, tensor(indices))
        return torch.select(x, axis, indices)
    if x.dim() == 2 and axis == 0:
        return F.embedding(indices, x)
    return x[(slice(None),) * (axis % x.dim()) + (indices,)]


@operator("GatherElements")
def _(x: Any, indices: Any, *, axis: int = 0) -> Any:
    return torch.gather(x, axis, tensor(indices))


@operator("GatherND")
def _(x: Any, indices: Any, *, batch_dims: int = 0) -> Any:
    if batch_dims:
        raise NoCounterpart("a gather within a batch")
    return x[tuple(torch.unbind(tensor(indices), -1))]


@operator("ScatterElements")
def _(x: Any, indices: Any, updates: Any, *, axis: int = 0, reduction: str = "none") -> Any:
    if reduction not in ("none", "add"):
        raise NoCounterpart(f"a scatter with reduction '{reduction}'")
    function = torch.scatter if reduction == "none" else torch.scatter_add
    return function(x, axis, tensor(indices), tensor(updates))


@operator("TopK")
def _(x: Any, k: Any, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> Any:
    count = listed(k, "how many are taken")[0]
    return torch.topk(x, count, axis, bool(largest), bool(sorted))


def _position(function: Reading) -> Reading:
    def read(x: Any, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Any:
        if select_last_index:
            raise NoCounterpart("the last of several largest elements")
        return function(x, axis, bool(keepdims))

    return read


OPERATORS["ArgMax"], OPERATORS["ArgMin"] = _position(torch.argmax), _position(torch.argmin)


@operator("OneHot")
def _(x: Any, depth: Any, values: Any, *, axis: int = -1) -> Any:
    if listed(values, "the values of a one-hot") != [0, 1] or axis != -1:
        raise NoCounterpart("a one-hot with values of its own")
    return F.one_hot(x, listed(depth, "the number of classes")[0])


_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@operator("Pad")
def _(x: Any, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> Any:
    amounts = listed(pads, "a padding")
    half = len(amounts) // 2
    places = range(half) if axes is None else listed(axes, "the dimension of a padding")
    around = {p % x.dim(): (amounts[i], amounts[half + i]) for i, p in enumerate(places)}
    first = min((p for p, (a, b) in around.items() if a or b), default=x.dim() - 1)
    turned = [n for p in reversed(range(first, x.dim())) for n in around.get(p, (0, 0))]
    # torch pads the last dimensions of pictures and the like only, unless with a constant.
    if mode != "constant" and (x.dim() - first > 3 or first not in (1, 2)):
        for place, (before, after) in around.items():
            x = _continued(x, place, before, after, mode)
        return x
    return F.pad(x, turned, _MODES[mode], known(value, "what is padded with"))


def _continued(x: Tensor, place: int, before: int, after: int, mode: str) -> Tensor:
    """A tensor with more of itself around it in one dimension."""
    size = x.shape[place]
    at = torch.arange(-before, size + after)
    if mode == "edge":
        at = at.clamp(0, size - 1)
    elif mode == "wrap":
        at = at % size
    else:
        at = (size - 1) - ((at % max(2 * size - 2, 1)) - (size - 1)).abs()
    return torch.index_select(x, place, at) if before or after else x


@operator("Range")
def _(start: Any, end: Any, step: Any) -> Any:
    bounds = [known(v, "the end of a range") for v in (start, end, step)]
    return torch.arange(*bounds)


@operator("Shape")
def _(x: Any, *, start: int = 0, end: int | None = None) -> Any:
    return list(tensor(x).shape)[start:end]


@operator("Trilu")
def _(x: Any, k: Any = 0, *, upper: int = 1) -> Any:
    return (torch.triu if upper else torch.tril)(x, known(k, "a diagonal"))


@operator("CumSum")
def _(x: Any, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Any:
    if exclusive or reverse:
        raise NoCounterpart("a running sum from the other end")
    return torch.cumsum(x, known(axis, "the dimension of a running sum"))


@operator("ConstantOfShape")
def _(sizes: Any, *, value: Any = None) -> Any:
    wanted = listed(sizes, "the size of a constant")
    return torch.zeros(wanted) if value is None else torch.full(wanted, value.item(), dtype=value.dtype)
