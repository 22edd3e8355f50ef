"""Embeddings and the norm that follows them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.rules.library.known import known
from dovetail.rules.library.norms import layer_norm_operator, rms_normalised
from dovetail.rules.matching.choices import Const, either, optional
from dovetail.rules.matching.match import Match
from dovetail.rules.rule import Decline, RuleSet

_IDS = torch.empty(2, 8, dtype=torch.int64, device="meta")
_TABLE, _WEIGHT = torch.empty(32, 16, device="meta"), torch.empty(16, device="meta")
_ADDED = torch.empty(2, 8, 16, device="meta")


def _says(norm: str) -> Any:
    def says(match: Match) -> dict[str, Any]:
        tables = ("table", "second", "third")
        return {
            "norm": norm,
            "eps": match.literals.get("eps"),
            "tables": sum(match.operands.get(name) is not None for name in tables),
            "dropout": match.literals.get("dropout", 0.0),
        }

    return says


@known(
    kind="embedding_norm",
    needs="embedding layer_norm|native_layer_norm",
    says=_says("layer_norm"),
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
    """The layer norm of rows of a table, to which those of two more, one more, or other values may be added.

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
    return layer_norm_operator(total, weight, bias, eps)


@known(
    kind="embedding_norm",
    needs="embedding rms_norm|_fused_rms_norm|rsqrt|sqrt",
    says=_says("rms_norm"),
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
    """The root-mean-square norm of rows of a table; the rows are returned too where they are used again."""
    rows = optional(torch.embedding(table, ids, padding), lambda r: r + added)
    return rms_normalised(optional(rows, lambda r: F.dropout(r, dropout)), weight, eps, offset)


@embedding_layer_norm.guard
@embedding_rms_norm.guard
def added_is_no_residual(match: Match) -> Decline | None:
    added = match["added"]
    if added is None:
        return None
    inside, seen, stack = set(match.nodes), {added.node}, [added.node]
    while stack:
        for used in stack.pop().all_input_nodes:
            if used in inside:
                return Decline(
                    f"'{added.name}' is computed from the embedding: it belongs to a layer", at=added
                )
            if used not in seen:
                seen.add(used)
                stack.append(used)
    return None


EMBEDDINGS = RuleSet(embedding_layer_norm, embedding_rms_norm)
