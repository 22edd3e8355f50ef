"""Losses: cross entropy as an operator, and from its steps."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.ir.schema import named_arguments
from dovetail.rules.library.library_rule import has_op, kind, library_rule, meta_tensor, same_sizes
from dovetail.rules.patterns.alternatives import Const, either
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.rule import Decline, RuleSet

_REDUCTIONS = ("none", "mean", "sum")
_LOGITS, _TARGET, _WEIGHT = meta_tensor(8, 16), meta_tensor(8, dtype=torch.int64), meta_tensor(16)


@kind("cross_entropy", version=3)
def cross_entropy_kind(
    logits: Annotated[Tensor, "[..., classes, ...], classes at class_dim; [classes] alone"],
    target: Annotated[
        Tensor, "indices: the shape of logits without class_dim; probabilities: the shape of logits"
    ],
    weight: Annotated[Tensor | None, "[classes]"] = None,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    class_dim: int = 1,
    target_kind: str = "indices",
    upcast: bool = False,
) -> Tensor:
    """The cross entropy of class scores, in at least float32 with `upcast`.

    Without `ignore_index` no target is ignored, and negative ones count from the last class.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) if upcast else logits
    scores = scores.movedim(class_dim, 1) if scores.dim() > 1 else scores
    target = target.long() if target_kind == "indices" else target
    ignored = -100 if ignore_index is None else ignore_index
    if ignore_index is None and target_kind == "indices":
        target = torch.where(target < 0, target + logits.shape[class_dim], target)
        ignored = torch.iinfo(torch.int64).min
    return F.cross_entropy(
        scores, target, weight, reduction=reduction, ignore_index=ignored, label_smoothing=label_smoothing
    )


def _cross_entropy_attrs(match: Match) -> dict[str, Any]:
    reduction = "mean" if has_op(match, "mean") else "sum" if has_op(match, "sum") else "none"
    for node in match.nodes:
        number = named_arguments(node).get("reduction")
        if isinstance(number, int):
            reduction = _REDUCTIONS[number]
    return {
        "reduction": reduction,
        "ignore_index": match.literals.get("ignored"),
        "label_smoothing": match.literals.get("smoothing", 0.0),
        "class_dim": _class_dim(match),
        "target_kind": "probabilities" if match["target"].dtype.is_floating_point else "indices",
        "upcast": match.rule == "cross_entropy" and has_op(match, "_to_copy"),
    }


def _class_dim(match: Match) -> int:
    last = match["logits"].ndim - 1
    return last if match.rule == "cross_entropy_by_hand" else min(1, last)


@library_rule(
    cross_entropy_kind,
    needs="cross_entropy_loss|nll_loss|nll_loss_nd|nll_loss_forward",
    attrs_of=_cross_entropy_attrs,
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

    def loss(class_weight: Tensor | None) -> Tensor:
        classes = min(1, scores.dim() - 1)
        return either(
            lambda: aten.cross_entropy_loss.default(
                scores, target, class_weight, reduction, ignored, smoothing
            ),
            lambda: aten.nll_loss_nd.default(
                torch.log_softmax(scores, classes), target, class_weight, reduction, ignored
            ),
        )

    return either(lambda: loss(weight), lambda: loss(None))


@library_rule(
    cross_entropy_kind,
    needs="gather|index log_softmax|_log_softmax|logsumexp|log",
    attrs_of=_cross_entropy_attrs,
    examples=[(_LOGITS, _TARGET)],
)
def cross_entropy_by_hand(logits: Tensor, target: Tensor) -> Tensor:
    """The cross entropy of class scores along the last dimension, with the targets gathered by hand."""
    last = logits.dim() - 1

    def gathered(x: Tensor) -> Tensor:
        column = either(lambda: target.unsqueeze(last), lambda: target.reshape(*target.shape, 1))
        chosen = x.gather(last, column)
        return either(
            lambda: chosen.squeeze(last),
            lambda: chosen.reshape(target.shape),
            lambda: x[torch.arange(x.shape[0], device=x.device), target],
        )

    def log_probabilities() -> Tensor:
        return either(lambda: F.log_softmax(logits, -1), lambda: torch.log(torch.softmax(logits, -1)))

    def loss() -> Tensor:
        total = torch.logsumexp(logits, -1)
        return either(
            lambda: -gathered(log_probabilities()),
            lambda: total - gathered(logits),
            lambda: -(gathered(logits) - total),
        )

    def log_likelihood() -> Tensor:
        total = torch.logsumexp(logits, -1)
        return either(lambda: gathered(log_probabilities()), lambda: gathered(logits) - total)

    def column() -> Tensor:
        return log_probabilities().gather(last, target.unsqueeze(last))

    return either(
        lambda: -log_likelihood().mean(),
        lambda: loss().mean(),
        lambda: -column().mean(),
        lambda: -log_likelihood().sum(),
        lambda: loss().sum(),
        lambda: -column().sum(),
        loss,
    )


@cross_entropy_by_hand.guard
def target_is_class_index(match: Match) -> Decline | None:
    target, logits = match["target"], match["logits"]
    if has_op(match, "index") and logits.ndim != 2:
        return Decline(f"'{target.name}' indexes '{logits.name}' along its first two dimensions", at=target)
    if target.dtype not in (torch.int32, torch.int64):
        return Decline(f"'{target.name}' is {target.dtype}, not an index of a class", at=target)
    if same_sizes(target.shape, logits.shape[:-1]):
        return None
    return Decline(f"'{target.name}' does not name one class for each row of scores", at=target)


LOSSES = RuleSet(cross_entropy, cross_entropy_by_hand)
