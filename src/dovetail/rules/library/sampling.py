"""Drawing from distributions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dovetail.rules.library.known import known
from dovetail.rules.matching.choices import Const, optional
from dovetail.rules.matching.match import Match
from dovetail.rules.rule import Decline, RuleSet

_EMPTY = torch.empty(8, 8, device="meta")


@known(
    kind="trunc_normal",
    needs="erfinv clamp",
    says=lambda m: {
        "mean": m.literals.get("mean", 0.0),
        "std": m["spread"] / math.sqrt(2.0),
        "low": m["low"],
        "high": m["high"],
    },
    examples=[(_EMPTY,)],
)
def trunc_normal(
    empty: Tensor,
    start: Any = Const(-0.9101),
    end: Any = Const(0.9202),
    spread: Any = Const(1.4303),
    mean: Any = Const(0.2504),
    low: Any = Const(-2.1505),
    high: Any = Const(2.1606),
) -> Tensor:
    """Samples of a normal distribution cut off at both ends, by the inverse of its cumulative distribution.

    `empty` is the tensor that is filled: its values are not read.
    """
    drawn = torch.ops.aten.uniform.default(empty, start, end)
    wide = torch.erfinv(drawn) * spread
    return optional(wide, lambda x: x + mean).clamp(low, high)


@trunc_normal.guard
def bounds_are_ordered(match: Match) -> Decline | None:
    if match["start"] < match["end"] and match["low"] < match["high"]:
        return None
    return Decline("its bounds are not in order")


SAMPLING = RuleSet(trunc_normal)
