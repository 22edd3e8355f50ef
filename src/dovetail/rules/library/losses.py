"""Losses: cross entropy as an operator, and from its steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.graph.normalform import by_name
from dovetail.rules.library.known import known
from dovetail.rules.matching.choices import Const, either
from dovetail.rules.matching.match import Match
from dovetail.rules.rule import RuleSet

_REDUCTIONS = ("none", "mean", "sum")
_LOGITS, _TARGET = torch.empty(8, 16, device="meta"), torch.empty(8, dtype=torch.int64, device="meta")
_WEIGHT = torch.empty(16, device="meta")


def _says(match: Match) -> dict[str, Any]:
    reduction = "mean"
    for node in match.nodes:
        number = by_name(node).get("reduction")
        if isinstance(number, int):
            reduction = _REDUCTIONS[number]
    return {
        "reduction": reduction,
        "ignore_index": match.literals.get("ignored"),
        "label_smoothing": match.literals.get("smoothing", 0.0),
    }


@known(
    kind="cross_entropy",
    needs="cross_entropy_loss|nll_loss|nll_loss_nd|nll_loss_forward",
    says=_says,
    examples=[(_LOGITS, _TARGET, _WEIGHT)],
)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor,
    reduction: Any = Const(1),
    ignored: Any = Const(-100),
    smoothing: Any = Const(0.0202),
) -> Tensor:
    """The cross entropy of class scores: the operator, or a log softmax and the loss of log probabilities."""
    aten = torch.ops.aten
    scores = either(lambda: logits, lambda: logits.float())

    def weighed(by: Tensor | None) -> Tensor:
        logs = torch.log_softmax(scores, 1)
        return either(
            lambda: aten.cross_entropy_loss.default(scores, target, by, reduction, ignored, smoothing),
            lambda: aten.nll_loss_nd.default(logs, target, by, reduction, ignored),
        )

    return either(lambda: weighed(weight), lambda: weighed(None))


@known(
    kind="cross_entropy",
    needs="gather|index log_softmax|_log_softmax|logsumexp|log",
    says=_says,
    examples=[(_LOGITS, _TARGET)],
)
def cross_entropy_by_hand(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of class scores, whose targets are picked out by hand."""

    def picked(x: Tensor) -> Tensor:
        column = either(lambda: target.unsqueeze(1), lambda: target.reshape(-1, 1))
        chosen = x.gather(1, column)
        return either(
            lambda: chosen.squeeze(1),
            lambda: chosen.reshape(-1),
            lambda: x[torch.arange(x.shape[0], device=x.device), target],
        )

    def logs() -> Tensor:
        spread = either(lambda: F.log_softmax(logits, -1), lambda: torch.log(torch.softmax(logits, -1)))
        chosen = picked(spread)
        return either(lambda: -chosen.mean(), lambda: (-chosen).mean())

    def sums() -> Tensor:
        total = torch.logsumexp(logits, -1)
        return either(
            lambda: (total - picked(logits)).mean(),
            lambda: -(picked(logits) - total).mean(),
        )

    return either(logs, sums)


LOSSES = RuleSet(cross_entropy, cross_entropy_by_hand)
