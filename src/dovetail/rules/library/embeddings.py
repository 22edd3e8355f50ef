"""Embeddings with the norm that follows them."""

from __future__ import annotations

from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dovetail.ir.nodes import is_projection
from dovetail.ir.schema import named_arguments, op_name
from dovetail.rules.library.library_rule import is_floating_point, kind, library_rule, meta_tensor
from dovetail.rules.library.norms import (
    affine_has_normalized_shape,
    layer_norm_kind,
    layer_norm_op_pattern,
    norm_attrs,
    rms_norm_kind,
    rms_norm_pattern,
)
from dovetail.rules.patterns.alternatives import Const, either, optional
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.rule import Decline, RuleSet

_IDS, _TABLE = meta_tensor(2, 8, dtype=torch.int64), meta_tensor(32, 16)
_WEIGHT, _ADDED = meta_tensor(16), meta_tensor(2, 8, 16)
Ids = Annotated[Tensor | None, "of integers; rows are broadcast with those of the others"]
Table = Annotated[Tensor | None, "[rows, width]"]


@kind("embedding_norm", version=3, draws="one dropout mask of the shape of the sum")
def embedding_norm_kind(
    ids: Annotated[Tensor, "any shape, of integers"],
    table: Annotated[Tensor, "[rows, width]"],
    second_ids: Ids = None,
    second: Table = None,
    third_ids: Ids = None,
    third: Table = None,
    added: Annotated[Tensor | None, "[..., width], broadcast with the rows"] = None,
    weight: Annotated[Tensor | None, "[width]"] = None,
    bias: Annotated[Tensor | None, "[width]"] = None,
    *,
    norm: str,
    tables: int = 1,
    eps: float | None = 1e-5,
    offset: float = 0.0,
    dropout: float = 0.0,
    padding_idx: int = -1,
    dims: int = 1,
    out_dtype: str = "promoted",
) -> tuple[Tensor, Tensor]:
    """The norm, "layer_norm" or "rms_norm", of the sum of rows of `tables` tables and of `added`, and that sum.

    Dropout is applied to the sum, whose terms broadcast. The row `padding_idx` of `table` gets no gradient; -1 for none.
    """
    total = torch.embedding(table, ids, padding_idx)
    for other, positions in ((second, second_ids), (third, third_ids)):
        total = total if other is None else total + torch.embedding(other, cast("Tensor", positions))
    total = F.dropout(total if added is None else total + added, dropout)
    if norm == "rms_norm":
        result = rms_norm_kind(total, weight, eps=eps, offset=offset, dims=dims, out_dtype=out_dtype)
    else:
        result = layer_norm_kind(total, weight, bias, eps=cast("float", eps), dims=dims, out_dtype=out_dtype)
    return result, total


def _attrs_of(norm: str) -> Any:
    def attrs_of(match: Match) -> dict[str, Any]:
        tables = sum(match.operands.get(name) is not None for name in ("table", "second", "third"))
        return {"norm": norm, "tables": tables, "padding_idx": match["padding"], **norm_attrs(match)}

    return attrs_of


def _norm_and_sum(match: Match) -> list[Node | None]:
    """Return the norm and its operand: the sum of rows and added values, after dropout."""
    added = match["added"]
    summed = {n for n in match.aten if op_name(n.target) == "embedding"}
    total = next(n for n in summed if named_arguments(n)["weight"] is match["table"].aten)
    if added is not None:
        summed.add(cast("Node", added.aten))
    while True:
        users = [n for n in total.users if n in match.aten]
        sums = [n for n in users if op_name(n.target) == "add" and summed.issuperset(n.all_input_nodes)]
        drops = [n for n in users if "dropout" in op_name(n.target) or is_projection(n)]
        if not (sums or drops):
            return [match.outputs[0], match.aten[total]]
        total = (sums or drops)[0]
        summed.add(total)


@library_rule(
    embedding_norm_kind,
    needs="embedding layer_norm|native_layer_norm",
    attrs_of=_attrs_of("layer_norm"),
    results_of=_norm_and_sum,
    escapes="output",
    examples=[(_IDS, _TABLE, _IDS, _TABLE, _IDS, _TABLE, _ADDED, _WEIGHT, _WEIGHT)],
)
def embedding_layer_norm(
    ids: Tensor,
    table: Tensor,
    second_ids: Tensor,
    second: Tensor,
    third_ids: Tensor,
    third: Tensor,
    added: Tensor,
    weight: Tensor,
    bias: Tensor,
    padding: Any = Const(1),
    dropout: Any = Const(0.1202),
    eps: Any = Const(0.0303),
) -> Tensor:
    """The layer norm of rows of a table, plus rows of one or two more tables, or plus other values.

    The rows are returned too where they are used again.
    """
    rows = torch.embedding(table, ids, padding)
    total = either(
        lambda: rows + torch.embedding(second, second_ids) + torch.embedding(third, third_ids),
        lambda: rows + torch.embedding(second, second_ids),
        lambda: rows + added,
        lambda: rows,
    )
    total = optional(total, lambda r: F.dropout(r, dropout))
    return layer_norm_op_pattern(total, weight, bias, eps)


@library_rule(
    embedding_norm_kind,
    needs="embedding rms_norm|_fused_rms_norm|rsqrt|sqrt|pow",
    attrs_of=_attrs_of("rms_norm"),
    results_of=_norm_and_sum,
    escapes="output",
    examples=[(_IDS, _TABLE, _ADDED, _WEIGHT)],
)
def embedding_rms_norm(
    ids: Tensor,
    table: Tensor,
    added: Tensor,
    weight: Tensor,
    padding: Any = Const(1),
    dropout: Any = Const(0.1202),
    eps: Any = Const(0.0303),
    offset: Any = Const(1.0404),
) -> Tensor:
    """The RMS norm of rows of a table; the rows are returned too where they are used again."""
    rows = optional(torch.embedding(table, ids, padding), lambda r: r + added)
    return rms_norm_pattern(optional(rows, lambda r: F.dropout(r, dropout)), weight, eps, offset)


@embedding_layer_norm.guard
@embedding_rms_norm.guard
def added_is_independent(match: Match) -> Decline | None:
    added = match["added"]
    if added is None:
        return None
    inside, visited, stack = set(match.nodes), {added.node}, [added.node]
    while stack:
        for used in stack.pop().all_input_nodes:
            if used in inside:
                return Decline(f"'{added.name}' is computed from the embedding: it is a residual", at=added)
            if used not in visited:
                visited.add(used)
                stack.append(used)
    return None


for _rule in (embedding_layer_norm, embedding_rms_norm):
    _rule.guard(affine_has_normalized_shape)
    _rule.guard(is_floating_point)
EMBEDDINGS = RuleSet(embedding_layer_norm, embedding_rms_norm)
