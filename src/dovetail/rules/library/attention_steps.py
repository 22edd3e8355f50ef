"""The steps of an attention that is written out, in their usual spellings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dovetail.graph.module import attribute
from dovetail.graph.normalform import as_number, by_name, op_name
from dovetail.rules.library.known import has, taking
from dovetail.rules.matching.choices import either, optional
from dovetail.rules.matching.match import Match, Value
from dovetail.rules.rule import Decline

Product = Callable[[Tensor, Tensor], Tensor]


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


def columns_of(k: Tensor) -> Tensor:
    """Kᵀ."""
    rank = k.dim()
    return either(lambda: k.transpose(-1, -2), lambda: k.permute(*range(rank - 2), rank - 1, rank - 2))


@dataclass(frozen=True)
class Steps:
    """What is done to scores on their way from one product to the next, with the literals in it."""

    scale: Any
    divisor: Any
    hidden: Any
    dropout: Any

    def scaled(self, q: Tensor, columns: Tensor, multiply: Product = torch.matmul) -> Tensor:
        """A product with its scale: on itself, on one of its factors, or nowhere near."""
        return either(
            lambda: multiply(q, columns) * self.scale,
            lambda: multiply(q, columns) / self.divisor,
            lambda: multiply(q * self.scale, columns),
            lambda: multiply(q / self.divisor, columns),
            lambda: multiply(q, columns * self.scale),
            lambda: multiply(q, columns),
        )

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """Scores with a mask added, or filled in where it says so."""
        return either(
            lambda: x + mask,
            lambda: x.masked_fill(mask, self.hidden),
            lambda: torch.where(mask, x, self.hidden),
            lambda: torch.where(mask, self.hidden, x),
            lambda: torch.where(mask, x, torch.full([], self.hidden, dtype=x.dtype, device=x.device)),
        )

    def weights(self, x: Tensor, dtype: torch.dtype) -> Tensor:
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
        return optional(spread, lambda w: F.dropout(w, self.dropout))


with_steps = taking("steps", {"scale": 0.2503, "divisor": 4.2, "hidden": -1e9, "dropout": 0.1202}, Steps)
"""Hands a pattern the `Steps`, whose literals `says` and `can_be_said` read."""


def _operand(match: Match, *names: str) -> Value | None:
    return next((found for name in names if (found := match.operands.get(name)) is not None), None)


def _groups(match: Match) -> int:
    if "inward" in match:
        return 1  # an einsum may have its heads anywhere, and cannot share them
    q, k = match["q"], _operand(match, "k", "columns")
    if k is None or not q.ndim == k.ndim == 4:
        return 1
    heads, kept = as_number(q.shape[1]), as_number(k.shape[1])
    return heads // kept if heads and kept else 1


def _mask(match: Match) -> str:
    mask = _operand(match, "mask", "over", "offset")
    if mask is None:
        return "none"
    hides = has(match, "masked_fill") or any(
        op_name(node.target) == "where" and not isinstance(by_name(node).get("self"), Node)
        for node in match.nodes
    )
    return "hide" if hides else "keep" if mask.dtype == torch.bool else "additive"


def _has_bias(match: Match) -> bool:
    """Whether something is added to the scores besides the mask."""
    masked = _operand(match, "mask", "over") is not None
    return _operand(match, "bias") is not None or (masked and _operand(match, "offset") is not None)


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
        "bias": _has_bias(match),
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
