"""Cross entropy, and drawing from a truncated normal distribution."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.rules.library.losses import cross_entropy, cross_entropy_by_hand
from dovetail.rules.library.sampling import trunc_normal
from tests.rules.library.helpers import candidates, found, found_each, graph_of, refused_each, why

N, C = 6, 8
LOGITS, TARGET = torch.randn(N, C), torch.randint(0, C, (N,))
Loss = Callable[[Tensor, Tensor], Tensor]


def told(reduction: str = "mean", ignored: int = -100, smoothing: float = 0.0) -> dict[str, object]:
    return {"reduction": reduction, "ignore_index": ignored, "label_smoothing": smoothing}


OPERATORS: list[tuple[Loss, dict[str, object]]] = [
    (F.cross_entropy, told()),
    (nn.CrossEntropyLoss(), told()),
    (lambda x, y: F.cross_entropy(x, y, reduction="sum"), told("sum")),
    (lambda x, y: F.cross_entropy(x, y, reduction="none"), told("none")),
    (lambda x, y: F.cross_entropy(x, y, ignore_index=3, label_smoothing=0.1), told(ignored=3, smoothing=0.1)),
    (lambda x, y: F.nll_loss(F.log_softmax(x, dim=-1), y), told()),
    (lambda x, y: nn.NLLLoss(reduction="sum")(nn.LogSoftmax(1)(x), y), told("sum")),
]


def test_the_operator() -> None:
    attrs = found_each(cross_entropy, [spelled for spelled, _ in OPERATORS], LOGITS, TARGET)
    assert attrs == [expected for _, expected in OPERATORS]
    found(cross_entropy, lambda x, y, w: F.cross_entropy(x, y, weight=w), LOGITS, TARGET, torch.rand(C))


def test_in_float32_and_over_images() -> None:
    assert found(cross_entropy, lambda x, y: F.cross_entropy(x.float(), y), LOGITS.bfloat16(), TARGET)
    assert found(cross_entropy, F.cross_entropy, torch.randn(2, C, 3, 4), torch.randint(0, C, (2, 3, 4)))


BY_HAND: list[Loss] = [
    lambda x, y: -F.log_softmax(x, -1).gather(1, y.unsqueeze(1)).squeeze(1).mean(),
    lambda x, y: -x.log_softmax(1).gather(1, y.view(-1, 1)).view(-1).mean(),
    lambda x, y: -F.log_softmax(x, -1)[torch.arange(N), y].mean(),
    lambda x, y: F.log_softmax(x, -1)[torch.arange(N), y].neg().mean(),
    lambda x, y: (torch.logsumexp(x, -1) - x.gather(1, y[:, None]).squeeze(1)).mean(),
    lambda x, y: -torch.log(torch.softmax(x, -1)).gather(1, y[:, None]).squeeze(1).mean(),
]


def test_by_hand() -> None:
    told = found_each(cross_entropy_by_hand, BY_HAND, LOGITS, TARGET)
    assert {attrs["reduction"] for attrs in told} == {"mean"}


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


LOW, HIGH, STD = -2.0, 2.0, 0.02


def drawn_in_place(x: Tensor) -> Tensor:
    t = torch.empty(x.shape)
    t.uniform_(-0.95, 0.95)
    t.erfinv_()
    t.mul_(STD * math.sqrt(2.0))
    t.add_(0.5)
    t.clamp_(min=LOW, max=HIGH)
    return t


def drawn(x: Tensor) -> Tensor:
    uniform = torch.empty_like(x).uniform_(-0.95, 0.95)
    return torch.clamp(torch.erfinv(uniform) * (STD * math.sqrt(2.0)), LOW, HIGH)


@pytest.mark.parametrize(("spelled", "mean"), [(drawn_in_place, 0.5), (drawn, 0.0)])
def test_truncated_normal(spelled: Callable[[Tensor], Tensor], mean: float) -> None:
    empty = "empty" if spelled is drawn_in_place else "empty_like"
    attrs = found(trunc_normal, spelled, torch.randn(4, 5), leaving=[empty])
    assert attrs == {"mean": mean, "std": pytest.approx(STD), "low": LOW, "high": HIGH}


def test_what_is_no_truncated_normal() -> None:
    def given(x: Tensor) -> Tensor:
        return torch.clamp(torch.erfinv(x) * 0.1, LOW, HIGH)

    assert not candidates(trunc_normal, graph_of(given, (torch.rand(4),)))

    def backwards(x: Tensor) -> Tensor:
        return torch.clamp(torch.erfinv(torch.empty_like(x).uniform_(-0.5, 0.5)) * 0.1, 2.0, -2.0)

    assert "its bounds are not in order" in why(trunc_normal, backwards, torch.randn(4))
