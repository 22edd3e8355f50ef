"""Sampling from distributions."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from torch import Tensor

from dovetail.rules.library.library_rule import kind, library_rule, meta_tensor
from dovetail.rules.patterns.alternatives import Const, optional
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.rule import Decline, RuleSet

_REL_TOL = 1e-7
"""The relative error of a bound that rounding of the interval of the uniform distribution may cause."""
_MAX_EXPONENT = 700.0


@kind("trunc_normal", draws="one uniform number for each element, in memory order of `empty`")
def trunc_normal_kind(
    empty: Annotated[Tensor, "any shape; its values are not read"],
    *,
    mean: float = 0.0,
    std: float,
    low: float,
    high: float,
) -> Tensor:
    """Samples of a normal distribution truncated to [low, high], by the inverse of its cumulative distribution."""
    spread = std * math.sqrt(2.0)
    start, end = (math.erf((bound - mean) / spread) for bound in (low, high))
    drawn = torch.empty_like(empty).uniform_(start, end)
    return (torch.erfinv(drawn) * spread + mean).clamp(low, high)


@library_rule(
    trunc_normal_kind,
    needs="erfinv clamp",
    attrs_of=lambda m: {
        "mean": m.literals.get("mean", 0.0),
        "std": m["spread"] / math.sqrt(2.0),
        "low": m["low"],
        "high": m["high"],
    },
    examples=[(meta_tensor(8, 8),)],
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
    """Samples of a normal distribution truncated at both ends, by the inverse of its cumulative distribution.

    `empty` is the tensor that is filled: its values are not read.
    """
    drawn = torch.ops.aten.uniform.default(empty, start, end)
    scaled = torch.erfinv(drawn) * spread
    return optional(scaled, lambda x: x + mean).clamp(low, high)


@trunc_normal.guard
def interval_matches_bounds(match: Match) -> Decline | None:
    low, high, spread, mean = match["low"], match["high"], match["spread"], match.literals.get("mean", 0.0)
    if low is None or high is None:
        return Decline("it is not truncated at both ends")
    if not low < high:
        return Decline("its bounds are not in order")
    if not spread > 0:
        return Decline(f"its standard deviation is {spread / math.sqrt(2.0):.7g}")
    for name, bound in (("start", low), ("end", high)):
        z = (bound - mean) / spread
        expected = math.erf(z)
        # The inverse of erf is steep near its ends: compare the bounds, not the ends of the interval.
        error = abs(match[name] - expected) * spread * math.exp(min(z * z, _MAX_EXPONENT))
        if error > _REL_TOL * (abs(low) + abs(high)):
            return Decline(
                f"it draws from {match[name]!r} where truncation at {bound!r} needs {expected:.7g}: samples beyond "
                "the bound are clamped, or the bound is never reached"
            )
    return None


SAMPLING = RuleSet(trunc_normal)
