"""Kinds of training programs: cross entropy, gradients of layer norm and softmax, and truncated normal samples.

The gradients of convolutions are in `convolution`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.ir.schema import named_arguments
from dovetail.rules.library.library_rule import (
    has_op,
    kind,
    library_rule,
    meta_tensor,
    required_result,
    results_by_position,
    same_sizes,
)
from dovetail.rules.patterns.alternatives import Const, either, optional
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.rule import Decline, RuleSet

aten = torch.ops.aten
_REDUCTIONS = ("none", "mean", "sum")
_LOGITS, _TARGET, _CLASS_WEIGHT = meta_tensor(8, 16), meta_tensor(8, dtype=torch.int64), meta_tensor(16)


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
    last = match["logits"].ndim - 1
    return {
        "reduction": reduction,
        "ignore_index": match.literals.get("ignored"),
        "label_smoothing": match.literals.get("smoothing", 0.0),
        "class_dim": last if match.rule == "cross_entropy_by_hand" else min(1, last),
        "target_kind": "probabilities" if match["target"].dtype.is_floating_point else "indices",
        "upcast": match.rule == "cross_entropy" and has_op(match, "_to_copy"),
    }


@library_rule(
    cross_entropy_kind,
    needs="cross_entropy_loss|nll_loss|nll_loss_nd|nll_loss_forward",
    attrs_of=_cross_entropy_attrs,
    examples=[(_LOGITS, _TARGET, _CLASS_WEIGHT)],
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


_GRAD, _MEAN, _WEIGHT = meta_tensor(4, 8), meta_tensor(4, 1), meta_tensor(8)
NormInput = Annotated[Tensor, "[..., *normalized]"]
Statistic = Annotated[Tensor, "as the forward operator returns it: [..., 1 for each normalized dimension]"]
Affine = Annotated[Tensor | None, "[*normalized]"]


@kind("layer_norm_grad", version=2)
def layer_norm_grad_kind(
    grad: NormInput,
    x: NormInput,
    mean: Statistic,
    rstd: Statistic,
    weight: Affine = None,
    bias: Affine = None,
    *,
    shape: list[int],
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias of a layer norm over sizes `shape`; None where `output_mask` is False."""
    return aten.native_layer_norm_backward.default(grad, x, shape, mean, rstd, weight, bias, output_mask)


@kind("softmax_grad")
def softmax_grad_kind(
    grad: Annotated[Tensor, "any shape"], output: Annotated[Tensor, "the shape of grad"], *, dim: int
) -> Tensor:
    """The gradient of a softmax over `dim`, counted from the front, from its result."""
    return (grad - (grad * output).sum(dim, keepdim=True)) * output


@kind("log_softmax_grad")
def log_softmax_grad_kind(
    grad: Annotated[Tensor, "any shape"], output: Annotated[Tensor, "the shape of grad"], *, dim: int
) -> Tensor:
    """The gradient of the logarithm of a softmax over `dim`, counted from the front, from its result."""
    return grad - output.exp() * grad.sum(dim, keepdim=True)


@library_rule(
    layer_norm_grad_kind,
    results_of=results_by_position,
    needs="native_layer_norm_backward",
    examples=[(_GRAD, _GRAD, _MEAN, _MEAN, _WEIGHT, _WEIGHT)],
)
def layer_norm_grad(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    shape: Any = Const([8]),
    output_mask: Any = Const([True, True, True]),
) -> Tensor:
    """The gradients of a layer norm, of those operands that its output mask selects."""
    scale, offset = either(lambda: (weight, bias), lambda: (weight, None), lambda: (None, None))
    gradients = aten.native_layer_norm_backward.default(
        grad, x, shape, mean, rstd, scale, offset, output_mask
    )
    return either(lambda: required_result(gradients, 0), lambda: required_result(gradients, 1))


@library_rule(softmax_grad_kind, needs="_softmax_backward_data", examples=[(_GRAD, _GRAD)])
def softmax_grad(grad: Tensor, output: Tensor, dim: Any = Const(1)) -> Tensor:
    """The gradient of a softmax, from its result."""
    return aten._softmax_backward_data.default(grad, output, dim, output.dtype)


@library_rule(log_softmax_grad_kind, needs="_log_softmax_backward_data", examples=[(_GRAD, _GRAD)])
def log_softmax_grad(grad: Tensor, output: Tensor, dim: Any = Const(1)) -> Tensor:
    """The gradient of the logarithm of a softmax, from its result."""
    return aten._log_softmax_backward_data.default(grad, output, dim, output.dtype)


GRADIENTS = RuleSet(layer_norm_grad, softmax_grad, log_softmax_grad)


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
