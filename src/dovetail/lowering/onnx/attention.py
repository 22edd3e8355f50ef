"""Attention: written out for every reader, or as the one operator that ONNX Runtime has for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from dovetail.lowering.onnx.reducing import reduced
from dovetail.lowering.onnx.types import NoForm, is_number
from dovetail.lowering.onnx.writer import MICROSOFT, Writer, form, packed


@form("aten.scaled_dot_product_attention.default")
def _(
    w: Writer,
    node: Node,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    if dropout:
        raise NoForm("an attention with dropout draws random numbers")
    width = w.fixed(w.value(q).shape[-1], "the width of a head")
    factor = 1 / math.sqrt(width) if scale is None else float(scale)
    keys, values = w.of(k), w.of(v)
    if enable_gqa:
        keys, values = _repeated(w, q, k, keys), _repeated(w, q, v, values)
    if w.dialect.attention and _fits(w, q, k, v, mask):
        return _fused(w, node, q, keys, values, mask, causal, factor)
    return _written(w, node, q, k, keys, values, mask, causal, factor)


def _repeated(w: Writer, q: Node, k: Node, name: str) -> str:
    """Heads of keys or values as often as there are heads of queries for each."""
    heads, *_ = (w.fixed(w.value(n).shape[1], "the number of heads") for n in (q,))
    batch, own, length, width = w.sizes(k)
    if heads == own:
        return name
    five = w.op("Unsqueeze", name, w.constant([2], torch.int64))
    wide = w.op("Expand", five, w.constant([batch, own, heads // own, length, width], torch.int64))
    return w.op("Reshape", wide, w.constant([batch, heads, length, width], torch.int64))


def _mask(w: Writer, q: Node, k: Node, mask: Any, causal: bool) -> tuple[str | None, str | None]:
    """What is added to the scores, and which rows may look at nothing, if that can be."""
    dtype = w.value(q).dtype
    if causal:
        rows, columns = (w.fixed(w.value(n).shape[-2], "the length of a sequence") for n in (q, k))
        allowed = torch.ones(rows, columns, dtype=torch.bool).tril()
        hidden = torch.zeros(rows, columns, dtype=dtype).masked_fill_(~allowed, -math.inf)
        return w.op("Constant", value=packed(hidden), label="causal"), None
    if mask is None:
        return None, None
    last = w.constant([-1], torch.int64)
    if w.value(mask).dtype == torch.bool:
        counted = w.cast(w.of(mask), torch.bool, torch.int32)
        seen = reduced(w, "ReduceMax", counted, [last], keepdim=True)
        zero, never = w.constant(0.0, dtype), w.constant(-math.inf, dtype)
        return w.op("Where", w.of(mask), zero, never), w.op("Equal", seen, w.constant(0, torch.int32))
    # Not the largest of each row: OpenVINO has a finite one where all are infinite.
    hidden = w.op("IsInf", w.read(mask, dtype), detect_positive=0)
    every = reduced(w, "ReduceMin", w.cast(hidden, torch.bool, torch.int32), [last], keepdim=True)
    return w.read(mask, dtype), w.op("Equal", every, w.constant(1, torch.int32))


def _written(
    w: Writer,
    node: Node,
    q: Node,
    k: Node,
    keys: str,
    values: str,
    mask: Any,
    causal: bool,
    factor: float,
) -> str:
    dtype = w.value(q).dtype
    rank = w.value(k).dim()
    turned = w.op("Transpose", keys, perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = w.op("Mul", w.op("MatMul", w.of(q), turned), w.constant(factor, dtype))
    added, blind = _mask(w, q, k, mask, causal)
    if added is not None:
        scores = w.op("Add", scores, added)
    made = w.op("MatMul", w.op("Softmax", scores, axis=-1), values, label=node.name)
    # A row that may look at nothing is zero in torch, and no number where scores are just added up.
    return made if blind is None else w.op("Where", blind, w.constant(0.0, dtype), made, label=node.name)


def _fits(w: Writer, q: Node, k: Node, v: Node, mask: Any) -> bool:
    """Whether ONNX Runtime's operator takes it: four dimensions, of known sizes, in single precision."""
    known = [w.value(n) for n in (q, k, v)]
    fixed = all(is_number(n) for value in known for n in value.shape)
    if not fixed or any(value.dim() != 4 or value.dtype != torch.float32 for value in known):
        return False
    return mask is None


def _fused(
    w: Writer, node: Node, q: Node, keys: str, values: str, mask: Any, causal: bool, factor: float
) -> str:
    batch, heads, length, width = w.sizes(q)
    made_width = w.sizes(node)[-1]

    def joined(name: str) -> str:
        turned = w.op("Transpose", name, perm=[0, 2, 1, 3])
        return w.op("Reshape", turned, w.constant([batch, -1, heads * width], torch.int64))

    made = w.op(
        "MultiHeadAttention",
        joined(w.of(q)),
        keys,
        values,
        domain=MICROSOFT,
        num_heads=heads,
        scale=factor,
        unidirectional=int(causal),
    )
    apart = w.op("Reshape", made, w.constant([batch, length, heads, made_width], torch.int64))
    return w.op("Transpose", apart, perm=[0, 2, 1, 3], label=node.name)
