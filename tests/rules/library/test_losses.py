"""Cross entropy, and drawing from a truncated normal distribution."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.rules.library.training import cross_entropy, cross_entropy_by_hand, trunc_normal
from tests.rules.library.helpers import candidates, graph_of, match_attrs, match_attrs_each, refused_each, why

N, C = 6, 8
LOGITS, TARGET = torch.randn(N, C), torch.randint(0, C, (N,))
Loss = Callable[[Tensor, Tensor], Tensor]


def attributes(reduction: str = "mean", ignored: int = -100, smoothing: float = 0.0) -> dict[str, object]:
    return {"reduction": reduction, "ignore_index": ignored, "label_smoothing": smoothing}


OPERATORS: list[tuple[Loss, dict[str, object]]] = [
    (F.cross_entropy, attributes()),
    (nn.CrossEntropyLoss(), attributes()),
    (lambda x, y: F.cross_entropy(x, y, reduction="sum"), attributes("sum")),
    (lambda x, y: F.cross_entropy(x, y, reduction="none"), attributes("none")),
    (
        lambda x, y: F.cross_entropy(x, y, ignore_index=3, label_smoothing=0.1),
        attributes(ignored=3, smoothing=0.1),
    ),
    (lambda x, y: F.nll_loss(F.log_softmax(x, dim=-1), y), attributes()),
    (lambda x, y: nn.NLLLoss(reduction="sum")(nn.LogSoftmax(1)(x), y), attributes("sum")),
]


def test_the_operator() -> None:
    attrs = match_attrs_each(cross_entropy, [spelled for spelled, _ in OPERATORS], LOGITS, TARGET)
    defaults = {"class_dim": 1, "target_kind": "indices", "upcast": False}
    assert attrs == [{**defaults, **expected} for _, expected in OPERATORS]
    match_attrs(cross_entropy, lambda x, y, w: F.cross_entropy(x, y, weight=w), LOGITS, TARGET, torch.rand(C))


def test_in_float32_and_over_images() -> None:
    low = LOGITS.bfloat16()
    assert (
        match_attrs(cross_entropy, lambda x, y: F.cross_entropy(x.float(), y), low, TARGET)["upcast"] is True
    )
    assert match_attrs(
        cross_entropy, F.cross_entropy, torch.randn(2, C, 3, 4), torch.randint(0, C, (2, 3, 4))
    )


BY_HAND: list[Loss] = [
    lambda x, y: -F.log_softmax(x, -1).gather(1, y.unsqueeze(1)).squeeze(1).mean(),
    lambda x, y: -x.log_softmax(1).gather(1, y.view(-1, 1)).view(-1).mean(),
    lambda x, y: -F.log_softmax(x, -1)[torch.arange(N), y].mean(),
    lambda x, y: F.log_softmax(x, -1)[torch.arange(N), y].neg().mean(),
    lambda x, y: (torch.logsumexp(x, -1) - x.gather(1, y[:, None]).squeeze(1)).mean(),
    lambda x, y: -torch.log(torch.softmax(x, -1)).gather(1, y[:, None]).squeeze(1).mean(),
]


def picked(x: Tensor, y: Tensor) -> Tensor:
    return F.log_softmax(x, -1).gather(1, y[:, None])


REDUCED: list[tuple[Loss, str]] = [
    (lambda x, y: -picked(x, y).mean(), "mean"),
    (lambda x, y: -picked(x, y).squeeze(1).sum(), "sum"),
    (lambda x, y: -picked(x, y).sum(), "sum"),
    (lambda x, y: -picked(x, y).squeeze(1), "none"),
    (lambda x, y: torch.logsumexp(x, -1) - x.gather(1, y[:, None]).squeeze(1), "none"),
]


def test_by_hand_with_other_reductions() -> None:
    matches = match_attrs_each(cross_entropy_by_hand, [spelled for spelled, _ in REDUCED], LOGITS, TARGET)
    assert [attrs["reduction"] for attrs in matches] == [reduction for _, reduction in REDUCED]


def test_by_hand_of_sequences() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return -F.log_softmax(x, dim=-1).gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()

    assert match_attrs(cross_entropy_by_hand, loss, torch.randn(2, 3, C), torch.randint(0, C, (2, 3)))


def test_many_classes_for_each_row_are_no_target() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return -F.log_softmax(x, -1).gather(1, y).mean()

    refused_each(cross_entropy_by_hand, [loss], LOGITS, torch.randint(0, C, (N, 2)))


def test_by_hand() -> None:
    matches = match_attrs_each(cross_entropy_by_hand, BY_HAND, LOGITS, TARGET)
    assert {attrs["reduction"] for attrs in matches} == {"mean"}


def test_what_is_no_cross_entropy() -> None:
    wrong: list[Loss] = [
        lambda x, y: F.nll_loss(F.log_softmax(x, 0), y),
        lambda x, y: F.nll_loss(torch.sigmoid(x), y),
    ]
    assert "0 where the pattern has 1" in refused_each(cross_entropy, wrong, LOGITS, TARGET)[0]
    square = torch.randn(C, C)
    reason = why(
        cross_entropy_by_hand,
        lambda x, y: -F.log_softmax(x, -1).gather(0, y[None]).squeeze(0).mean(),
        square,
        torch.randint(0, C, (C,)),
    )
    assert "its dtype or shape is not what the pattern would compute" in reason


def test_a_loss_without_its_sign() -> None:
    def unsigned(x: Tensor, y: Tensor) -> Tensor:
        return F.log_softmax(x, -1).gather(1, y[:, None]).squeeze(1).mean()

    refused_each(cross_entropy_by_hand, [unsigned], LOGITS, TARGET)


MEAN, STD, LOW, HIGH = 0.5, 1.5, -2.0, 2.0


def end(bound: float, mean: float = 0.0) -> float:
    return math.erf((bound - mean) / (STD * math.sqrt(2.0)))


def drawn_in_place(x: Tensor) -> Tensor:
    t = torch.empty(x.shape)
    t.uniform_(end(LOW, MEAN), end(HIGH, MEAN))
    t.erfinv_()
    t.mul_(STD * math.sqrt(2.0))
    t.add_(MEAN)
    t.clamp_(min=LOW, max=HIGH)
    return t


def between(start: float, stop: float, low: float | None, high: float | None) -> Callable[[Tensor], Tensor]:
    def drawn(x: Tensor) -> Tensor:
        uniform = torch.empty_like(x).uniform_(start, stop)
        return torch.clamp(torch.erfinv(uniform) * (STD * math.sqrt(2.0)), low, high)

    return drawn


def test_truncated_normal() -> None:
    expected = {"mean": MEAN, "std": pytest.approx(STD), "low": LOW, "high": HIGH}
    assert match_attrs(trunc_normal, drawn_in_place, torch.randn(4, 5), leaving=["empty"]) == expected
    match_attrs(
        trunc_normal,
        between(end(4 * STD), end(5 * STD), 4 * STD, 5 * STD),
        torch.randn(4),
        leaving=["empty_like"],
    )
    drawn = between(end(LOW), end(HIGH), LOW, HIGH)
    assert match_attrs(trunc_normal, drawn, torch.randn(4, 5), leaving=["empty_like"]) == {
        **expected,
        "mean": 0.0,
    }


def test_what_is_no_truncated_normal() -> None:
    def given(x: Tensor) -> Tensor:
        return torch.clamp(torch.erfinv(x) * 0.1, LOW, HIGH)

    assert not candidates(trunc_normal, graph_of(given, (torch.rand(4),)))
    refused = {
        "its bounds are not in order": between(end(LOW), end(HIGH), HIGH, LOW),
        "it is not truncated at both ends": between(end(LOW), end(HIGH), LOW, None),
        "are clamped, or the bound is never reached": between(end(LOW), end(HIGH), LOW / 2, HIGH / 2),
        "never reached": between(end(LOW), end(HIGH), LOW, 2 * HIGH),
        "where truncation at": between(end(4 * STD) + 5e-10, end(5 * STD), 4 * STD, 5 * STD),
    }
    refused_reasons = refused_each(trunc_normal, list(refused.values()), torch.randn(4))
    for name, reasons in zip(refused, refused_reasons, strict=True):
        assert name in reasons


def test_one_row_and_targets_of_other_integers() -> None:
    one = match_attrs(cross_entropy, F.cross_entropy, LOGITS[0], TARGET[0])
    assert one["class_dim"] == 0
    assert match_attrs(cross_entropy_by_hand, BY_HAND[2], LOGITS, TARGET.int())


def test_the_logarithm_of_the_sum_taken_off() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return -(x.gather(1, y[:, None]).squeeze(1) - torch.logsumexp(x, -1))

    assert match_attrs(cross_entropy_by_hand, loss, LOGITS, TARGET)["reduction"] == "none"


def test_scores_that_are_rounded_are_not_upcast() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), y)

    assert not match_attrs(cross_entropy, loss, LOGITS.double(), TARGET, leaving=["_to_copy"])["upcast"]
