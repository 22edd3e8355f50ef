"""The steps of an attention that is written out, in their usual spellings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.graph.module import attribute
from dovetail.rules.library.known import has
from dovetail.rules.matching.choices import either, optional
from dovetail.rules.matching.match import Match
from dovetail.rules.rule import Decline


def example(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without data, to show a pattern's operands."""
    return torch.empty(sizes, dtype=dtype, device="meta")


Q, KV, SHARED = example(2, 4, 8, 16), example(2, 4, 8, 16), example(2, 2, 8, 16)
MASK = example(2, 1, 8, 8, dtype=torch.bool)


def shared(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as they are, or each head of them repeated for its group of query heads."""

    def count() -> int:
        groups = q.shape[1] // k.shape[1] if q.dim() == k.dim() == 4 else 1
        if groups < 2:
            raise ValueError("heads come in no groups")
        return groups

    def spread(x: Tensor) -> Tensor:
        groups = count()
        batch, heads, length, width = x.shape
        wide = x[:, :, None].expand(batch, heads, groups, length, width)
        return wide.reshape(batch, heads * groups, length, width)

    return either(
        lambda: (k, v),
        lambda: (spread(k), spread(v)),
        lambda: (k.repeat_interleave(count(), dim=1), v.repeat_interleave(count(), dim=1)),
    )


def scores(
    q: Tensor,
    k: Tensor,
    scale: Any,
    divisor: Any,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """QKᵀ with its scale."""
    return scaled(q, columns_of(k), scale, divisor, multiply)


def columns_of(k: Tensor) -> Tensor:
    """Kᵀ."""
    rank = k.dim()
    return either(lambda: k.transpose(-1, -2), lambda: k.permute(*range(rank - 2), rank - 1, rank - 2))


def scaled(
    q: Tensor,
    columns: Tensor,
    scale: Any,
    divisor: Any,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """A product with its scale: on itself, on one of its factors, or nowhere near."""
    return either(
        lambda: multiply(q, columns) * scale,
        lambda: multiply(q, columns) / divisor,
        lambda: multiply(q * scale, columns),
        lambda: multiply(q / divisor, columns),
        lambda: multiply(q, columns * scale),
        lambda: multiply(q, columns),
    )


def masked(x: Tensor, mask: Tensor, hidden: Any) -> Tensor:
    """Scores with a mask added, or filled in where it says so."""
    return either(
        lambda: x + mask,
        lambda: x.masked_fill(mask, hidden),
        lambda: torch.where(mask, x, hidden),
        lambda: torch.where(mask, x, torch.full([], hidden, dtype=x.dtype, device=x.device)),
    )


def weights(x: Tensor, dropout: Any, dtype: torch.dtype) -> Tensor:
    """The softmax of scores, in float32 or not, with dropout or without."""

    def by_hand() -> Tensor:
        top = either(lambda: x.amax(-1, keepdim=True), lambda: x.max(-1, keepdim=True).values)
        powers = torch.exp(x - top)
        return powers / powers.sum(-1, keepdim=True)

    spread = either(
        lambda: torch.softmax(x, -1),
        lambda: torch.softmax(x, -1, dtype=torch.float32).to(dtype),
        lambda: torch.softmax(x.float(), -1).to(dtype),
        by_hand,
    )
    return optional(spread, lambda w: F.dropout(w, dropout))


def _groups(match: Match) -> int:
    if "inward" in match:
        return 1  # an einsum may have its heads anywhere, and cannot share them
    q, k = match["q"], match["k" if "k" in match else "columns"]
    heads, kept = (q.shape[1], k.shape[1]) if q.ndim == k.ndim == 4 else (1, 1)
    return heads // kept if isinstance(heads, int) and isinstance(kept, int) else 1


def _mask(match: Match) -> str:
    mask = match.operands.get("mask") or match.operands.get("offset")
    if mask is None:
        return "none"
    if has(match, "masked_fill"):
        return "hide"
    return "keep" if mask.dtype == torch.bool else "additive"


def says(match: Match) -> Mapping[str, Any]:
    """What is said of any attention.

    `scale` is the factor on the product, None for one over the root of the width. `mask` tells an additive one from
    one that says which scores to keep, or which to hide.
    """
    literals = match.literals
    scale = literals.get("scale")
    if "divisor" in literals:
        scale = 1.0 / float(literals["divisor"])
    elif "scale" not in literals:
        scale = 1.0
    return {
        "scale": scale,
        "causal": bool(literals.get("causal", match.rule == "attention_causal")),
        "dropout": literals.get("dropout", 0.0),
        "mask": _mask(match),
        "bias": match.operands.get("bias") is not None,
        "softcap": literals.get("cap"),
        "groups": _groups(match),
    }


def can_be_said(match: Match) -> Decline | None:
    """Refuse a scale that is no number, and a mask that hides nothing."""
    if match.literals.get("divisor") == 0:
        return Decline("its scores are divided by zero")
    hidden, filler = match.literals.get("hidden"), match.operands.get("filler")
    if filler is not None:
        if filler.ndim or not filler.is_constant:
            return Decline("what masked scores become is not known", at=filler)
        hidden = float(attribute(filler.owner, str(filler.node.target)))
    if hidden is None or hidden <= -1e3:
        return None
    return Decline(f"masked scores become {hidden!r}: they still count")
