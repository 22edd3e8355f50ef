"""Matrix products."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from dovetail.lowering.onnx.elementwise import floating
from dovetail.lowering.onnx.types import NoForm
from dovetail.lowering.onnx.writer import Writer, form


@form("aten.mm.default", "aten.bmm.default", "aten.matmul.default", "aten.mv.default", "aten.dot.default")
def _(w: Writer, node: Node, a: Any, b: Any) -> str:
    floating(w, node)
    return w.op("MatMul", w.of(a), w.of(b), label=node.name)


@form("aten.linear.default")
def _(w: Writer, node: Node, x: Any, weight: Any, bias: Any = None) -> str:
    floating(w, node)
    rank = w.value(weight).dim()
    if w.value(x).dim() == 2 and rank == 2:
        rest = [] if bias is None else [w.of(bias)]
        return w.op("Gemm", w.of(x), w.of(weight), *rest, transB=1, label=node.name)
    turned = w.op("Transpose", w.of(weight), perm=[1, 0]) if rank == 2 else w.of(weight)
    product = w.op("MatMul", w.of(x), turned, label=node.name)
    return product if bias is None else w.op("Add", product, w.of(bias), label=node.name)


@form("aten.addmm.default", "aten.baddbmm.default")
def _(w: Writer, node: Node, added: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> str:
    floating(w, node)
    dtype = w.value(node).dtype
    product = w.op("MatMul", w.of(a), w.of(b))
    if alpha != 1:
        product = w.op("Mul", product, w.constant(alpha, dtype))
    if beta == 0:
        return product
    more = w.of(added) if beta == 1 else w.op("Mul", w.of(added), w.constant(beta, dtype))
    return w.op("Add", product, more, label=node.name)


@form("aten.outer.default")
def _(w: Writer, node: Node, a: Any, b: Any) -> str:
    floating(w, node)
    dtype = w.value(node).dtype
    column = w.op("Unsqueeze", w.read(a, dtype), w.constant([1], torch.int64))
    return w.op("Mul", column, w.read(b, dtype), label=node.name)


@form("aten.einsum.default")
def _(w: Writer, node: Node, equation: str, operands: Sequence[Any], **named: Any) -> str:
    floating(w, node)
    if named.get("path") is not None:
        raise NoForm("an einsum with a path")
    plain = equation.replace(" ", "")
    if not set(plain) <= {*string.ascii_letters, ",", "-", ">", "."}:
        raise NoForm(f"the equation '{equation}'")
    return w.op("Einsum", *map(w.of, operands), equation=plain, label=node.name)
