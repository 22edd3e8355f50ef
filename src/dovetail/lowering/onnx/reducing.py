"""Operators that make one number of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from dovetail.lowering.onnx.types import NoForm
from dovetail.lowering.onnx.writer import Form, Writer, form


def _axes(w: Writer, x: Any, dims: Any) -> list[str]:
    """The operand that says over which dimensions; none for all of them."""
    if dims is None or dims == [] or not w.value(x).dim():
        return []
    if isinstance(dims, Node):
        raise NoForm("a dimension that is computed")
    return [w.axes([dims] if isinstance(dims, int) else list(dims), w.value(x).dim())]


def reduced(w: Writer, kind: str, x: str, axes: Sequence[str], keepdim: bool = False, label: str = "") -> str:
    """A reduction over some dimensions, or over all."""
    return w.op(kind, x, *axes, keepdims=int(keepdim), label=label)


def _over(kind: str) -> Form:
    def write(
        w: Writer, node: Node, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> str:
        given = w.read(x, w.value(node).dtype)
        return reduced(w, kind, given, _axes(w, x, dims), keepdim, node.name)

    return write


@form("aten.sum.dim_IntList", "aten.sum.default")
def _(w: Writer, node: Node, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> str:
    if w.dialect.runs and w.value(x).dtype == torch.int64:
        raise NoForm("a sum of whole numbers of 64 bits, which runtimes of ONNX compute as fractions")
    return _over("ReduceSum")(w, node, x, dims, keepdim)


form("aten.mean.dim", "aten.mean.default")(_over("ReduceMean"))
form("aten.amax.default", "aten.max.default")(_over("ReduceMax"))
form("aten.amin.default", "aten.min.default")(_over("ReduceMin"))
form("aten.logsumexp.default")(_over("ReduceLogSumExp"))


@form("aten.prod.dim_int", "aten.prod.default")
def _(w: Writer, node: Node, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> str:
    if w.dialect.runs and not w.value(node).dtype.is_floating_point:
        raise NoForm("a product of whole numbers, which runtimes of ONNX compute as fractions")
    return _over("ReduceProd")(w, node, x, dim, keepdim)


@form("aten.max.dim", "aten.min.dim")
def _(w: Writer, node: Node, x: Any, dim: int, keepdim: bool = False) -> tuple[str, ...]:
    if not w.value(x).dim() or w.value(x).dtype == torch.bool:
        raise NoForm("the place of a single number or of a truth value")
    most = "aten.max" in str(node.target)
    values = reduced(w, "ReduceMax" if most else "ReduceMin", w.of(x), _axes(w, x, dim), keepdim)
    at = w.op("ArgMax" if most else "ArgMin", w.of(x), axis=dim, keepdims=int(keepdim), label=node.name)
    return values, at


@form(
    "aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim", "aten.all.dims"
)
def _(w: Writer, node: Node, x: Any, dims: Any = None, keepdim: bool = False) -> str:
    kind = "ReduceMax" if "aten.any" in str(node.target) else "ReduceMin"
    counted = w.cast(w.read(x, torch.bool), torch.bool, torch.int32)
    return w.cast(reduced(w, kind, counted, _axes(w, x, dims), keepdim), torch.int32, torch.bool)


@form("aten.var.correction", "aten.std.correction", "aten.var.dim", "aten.std.dim")
def _(w: Writer, node: Node, x: Any, dims: Any = None, *rest: Any, **named: Any) -> str:
    if rest:
        correction, keepdim = int(rest[0]), bool(rest[1])
    else:
        given, keepdim = named.get("correction"), bool(named.get("keepdim", False))
        correction = 1 if given is None else given
    value = w.value(x)
    if isinstance(dims, int):
        raise NoForm("a variance with the number of a dimension where a list is wanted")
    over = range(value.dim()) if not dims or not value.dim() else dims
    count = 1
    for d in over:
        count *= w.fixed(value.shape[d], "the number of elements of a variance")
    if count <= correction:
        raise NoForm("the variance of too few elements")
    axes = _axes(w, x, dims)
    away = w.op("Sub", w.of(x), reduced(w, "ReduceMean", w.of(x), axes, keepdim=True))
    total = reduced(w, "ReduceSum", w.op("Mul", away, away), axes, keepdim)
    made = w.op("Div", total, w.constant(count - correction, value.dtype), label=node.name)
    return w.op("Sqrt", made, label=node.name) if "aten.std" in str(node.target) else made


@form("aten.linalg_vector_norm.default")
def _(
    w: Writer, node: Node, x: Any, order: Any = 2, dims: Any = None, keepdim: bool = False, **_: Any
) -> str:
    kinds = {1: "ReduceL1", 2: "ReduceL2"}
    if order not in kinds:
        raise NoForm(f"a norm of order {order}")
    return reduced(w, kinds[order], w.read(x, w.value(node).dtype), _axes(w, x, dims), keepdim, node.name)


@form("aten.cumsum.default")
def _(w: Writer, node: Node, x: Any, dim: int, *, dtype: Any = None) -> str:
    given = w.read(x, w.value(node).dtype)
    if not w.value(x).dim():
        return w.op("Identity", given, label=node.name)
    return w.op("CumSum", given, w.constant(dim % max(w.value(x).dim(), 1), torch.int64), label=node.name)


def _softmax(kind: str) -> Form:
    def write(w: Writer, node: Node, x: Any, dim: int, dtype: Any = None) -> str:
        if not w.value(x).dim():
            raise NoForm("the softmax of a single number")
        # The third operand of `_softmax` says whether half precision becomes single; the result's dtype tells.
        return w.op(kind, w.read(x, w.value(node).dtype), axis=dim, label=node.name)

    return write


form("aten.softmax.int", "aten._softmax.default")(_softmax("Softmax"))
form("aten.log_softmax.int", "aten._log_softmax.default")(_softmax("LogSoftmax"))
