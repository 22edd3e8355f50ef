"""Attention that parts heads from the batch only for a mask, and what looks like attention and is not known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.rules.library import ATTENTION
from dovetail.rules.library.attention_variants import attention_of_batches
from dovetail.rules.rule import Refusal
from tests.rules.library.helpers import candidates, graph_of, match_attrs, proposals, why

B, H, S, D = 2, 4, 6, 8
FLAT = tuple(torch.randn(B * H, S, D) for _ in range(3))
HEADS = tuple(torch.randn(B, H, S, D) for _ in range(3))
MASK, HIDE = torch.randn(B, 1, S, S), torch.rand(B, 1, S, S) > 0.5
OFFSET = torch.randn(B * H, S, S)


def bloom(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = OFFSET.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.3)
    weights = F.softmax(scores.view(B, H, S, S) + MASK, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(B * H, S, S), v)


def bart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(q * 0.3, k.transpose(1, 2))
    scores = (scores.view(B, H, S, S) + MASK).view(B * H, S, S)
    return torch.bmm(F.softmax(scores, dim=-1), v)


def deberta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(q, k.transpose(-1, -2) * 0.3) + OFFSET
    scores = scores.view(-1, H, S, S).masked_fill(HIDE, torch.finfo(q.dtype).min)
    return torch.bmm(F.softmax(scores, dim=-1).view(-1, S, S), v)


@pytest.mark.parametrize(("spelled", "mask"), [(bloom, "additive"), (bart, "additive"), (deberta, "hide")])
def test_heads_parted_for_a_mask(spelled: Callable[..., Tensor], mask: str) -> None:
    attrs = match_attrs(attention_of_batches, spelled, *FLAT)
    assert (attrs["scale"], attrs["mask_type"], attrs["groups"]) == (0.3, mask, 1)


def test_heads_parted_in_another_order_are_not_these_heads() -> None:
    def twisted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2)).view(H, B, S, S).transpose(0, 1) + MASK
        return torch.bmm(F.softmax(scores, -1).transpose(0, 1).reshape(B * H, S, S), v)

    assert not candidates(ATTENTION, graph_of(twisted, FLAT))


def test_scores_that_count_twice_are_another_offset() -> None:
    def halved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.baddbmm(OFFSET, q, k.transpose(1, 2), beta=0.5, alpha=0.3)
        return torch.bmm(torch.softmax(scores, -1), v)

    assert "its beta is 0.5 where the pattern has 1" in why(attention_of_batches, halved, *FLAT)


UNUSUAL: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "attention has no 'nan_to_num' there": lambda q, k, v: (q @ k.mT).softmax(-1).nan_to_num() @ v,
    "attention has no 'max' there": lambda q, k, v: torch.max(q @ k.mT, MASK).softmax(-1) @ v,
    "attention has no 'mul' there": lambda q, k, v: ((q @ k.mT).softmax(-1) * MASK) @ v,
    "attention has no 'add' there": lambda q, k, v: ((q @ k.mT).softmax(-1) + MASK) @ v,
    "its scores are scaled by a tensor": lambda q, k, v: (q @ k.mT * MASK + 1).softmax(-1) @ v,
    "its operations are in an order that no rule": lambda q, k, v: (
        ((q @ k.mT).masked_fill(HIDE, -1e9) * 0.3 * 0.3).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("reason", UNUSUAL)
def test_what_is_not_known_of_attention_is_reported(reason: str) -> None:
    graph = graph_of(UNUSUAL[reason], HEADS)
    proposed = proposals(ATTENTION, graph)
    (refusal,) = proposed
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith(reason)


def test_nothing_is_reported_of_attention_that_was_matched_or_of_a_softmax_alone() -> None:
    known = graph_of(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, HEADS)
    assert not [p for p in proposals(ATTENTION, known) if isinstance(p, Refusal)]
    alone = graph_of(lambda q, k, v: (q @ k.mT).softmax(-1) + v.sum(), HEADS)
    assert not proposals(ATTENTION, alone)
