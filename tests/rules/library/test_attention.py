"""Attention: the operator in all its settings, and the usual ways to write it out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dovetail.rules.library.attention_variants import (
    attention,
    attention_by_hand,
    attention_causal,
    attention_einsum,
    attention_of_batches,
    attention_of_columns,
)
from tests.rules.library.helpers import candidates, graph_of, match_attrs, match_attrs_each, refused_each, why

B, H, G, S, D = 2, 4, 2, 6, 8
Attend = Callable[..., Tensor]


def heads(count: int = H, length: int = S) -> Tensor:
    return torch.randn(B, count, length, D)


def boolean() -> Tensor:
    return torch.rand(B, 1, S, S) > 0.3


def spread(x: Tensor, groups: int) -> Tensor:
    batch, kept, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, kept, groups, length, width).reshape(batch, -1, length, width)


QKV = (heads(), heads(), heads())
GROUPED = (heads(), heads(G), heads(G))


def test_the_operator() -> None:
    def attend(**settings: Any) -> Attend:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **settings)

    defaults = {
        "causal": False,
        "scale": None,
        "dropout": 0.0,
        "mask_type": "none",
        "mask_value": None,
        "bias_after_mask": False,
        "bias_before_scale": False,
        "softcap": None,
        "groups": 1,
        "equations": None,
        "safe_softmax": False,
    }
    settings = [{}, {"is_causal": True}, {"scale": 0.5}, {"dropout_p": 0.2}]
    match = match_attrs_each(attention, [attend(**each) for each in settings], *QKV)
    assert match == [
        defaults,
        {**defaults, "causal": True},
        {**defaults, "scale": 0.5},
        {**defaults, "dropout": 0.2},
    ]


@pytest.mark.parametrize(("mask", "kind"), [(boolean(), "keep"), (torch.randn(S, S), "additive")])
def test_the_operator_with_a_mask(mask: Tensor, kind: str) -> None:
    match = match_attrs(attention, lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), *QKV, mask)
    assert match["mask_type"] == kind


def test_the_operator_with_grouped_heads() -> None:
    def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, spread(k, H // G), spread(v, H // G), is_causal=True)

    def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(H // G, dim=1), v.repeat_interleave(H // G, dim=1)
        return F.scaled_dot_product_attention(q, k, v)

    matches = match_attrs_each(attention, [native, repeated, interleaved], *GROUPED)
    assert [attrs["groups"] for attrs in matches] == [H // G] * 3


def test_heads_repeated_a_wrong_way_stay_outside() -> None:
    def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))

    match = match_attrs(attention, tiled, *GROUPED, leaving=["repeat", "repeat"])
    assert match["groups"] == 1


def multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * D**-0.5, dim=-1) @ v


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(D)).softmax(-1).matmul(v)


def scaled_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * D**-0.5
    return F.softmax(q @ k.permute(0, 1, 3, 2), dim=3) @ v


def divided_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.Softmax(dim=-1)((q / D**0.5) @ k.transpose(2, 3)) @ v


def softmax_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * D**-0.5
    powers = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return powers / powers.sum(dim=-1, keepdim=True) @ v


def test_by_hand() -> None:
    spelled = [multiplied, divided, scaled_first, divided_first, softmax_by_hand]
    for match in match_attrs_each(attention_by_hand, spelled, *QKV):
        assert match["scale"] == pytest.approx(D**-0.5)
        assert (match["mask_type"], match["groups"]) == ("none", 1)


def test_by_hand_without_a_scale() -> None:
    assert match_attrs(attention_by_hand, lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *QKV)["scale"] == 1.0


MASKS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "added": (lambda x, m: x + m, "additive"),
    "added the other way round": (lambda x, m: m + x, "additive"),
    "filled": (lambda x, m: x.masked_fill(m, float("-inf")), "hide"),
    "chosen": (lambda x, m: torch.where(m, x, -1e9), "keep"),
    "hidden first": (lambda x, m: torch.where(m, -1e9, x), "hide"),
    "chosen from a tensor": (lambda x, m: torch.where(m, x, torch.full([], -1e4)), "keep"),
    "chosen from a constant": (lambda x, m: torch.where(m, x, torch.tensor(-1e4)), "keep"),
}


@pytest.mark.parametrize("kind", ["additive", "hide", "keep"])
def test_by_hand_with_a_mask(kind: str) -> None:
    def attend(lay: Callable[[Tensor, Tensor], Tensor]) -> Attend:
        return lambda q, k, v, m: torch.softmax(lay(q @ k.mT / D**0.5, m), -1) @ v

    mask = torch.randn(S, S) if kind == "additive" else boolean()
    ways = [attend(lay) for lay, each in MASKS.values() if each == kind]
    assert {match["mask_type"] for match in match_attrs_each(attention_by_hand, ways, *QKV, mask)} == {kind}


def test_by_hand_with_a_bias_and_a_mask() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.transpose(3, 2)
        scores += bias
        return F.softmax(scores + mask, dim=-1) @ v

    match = match_attrs(attention_by_hand, attend, *QKV, torch.randn(1, H, S, S), torch.randn(B, 1, S, S))
    assert (match["scale"], match["mask_type"]) == (1.0, "additive")


def test_by_hand_with_capped_scores() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3
        scores = scores / 50.0
        scores = torch.tanh(scores)
        return torch.softmax(scores * 50.0, -1) @ v

    assert match_attrs(attention_by_hand, attend, *QKV)["softcap"] == 50.0

    def uneven(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(q @ k.mT / 50.0) * 40.0, -1) @ v

    refused_each(attention_by_hand, [uneven], *QKV)


def test_by_hand_in_training() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.25)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.drop(torch.softmax(q @ k.mT * 0.3, -1)) @ v

    assert match_attrs(attention_by_hand, Attention().train(), *QKV)["dropout"] == 0.25
    assert match_attrs(attention_by_hand, Attention().eval(), *QKV)["dropout"] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_by_hand_with_a_wide_softmax_and_grouped_heads(dtype: torch.dtype) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, spread(k, H // G).transpose(2, 3)) * 0.25 + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, spread(v, H // G))

    def cast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ spread(k, H // G).mT / 4 + mask
        return F.softmax(scores.float(), dim=-1).type_as(scores) @ spread(v, H // G)

    inputs = [x.to(dtype) for x in (*GROUPED, torch.randn(S, S))]
    for match in match_attrs_each(attention_by_hand, [attend, cast], *inputs):
        assert (match["scale"], match["mask_type"], match["groups"]) == (0.25, "additive", 2)


def test_weights_that_are_used_again_come_out_too() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(q @ k.mT * 0.3, -1)
        return weights @ v, weights

    match_attrs(attention_by_hand, attend, *QKV)


def test_any_rank() -> None:
    for shape in ((S, D), (B, S, D), (B, 3, H, S, D)):
        match_attrs(attention_by_hand, multiplied, *(torch.randn(shape) for _ in range(3)))


def test_keys_that_come_as_columns() -> None:
    def attend(x: Tensor, q: Tensor, v: Tensor) -> Tensor:
        columns = x.reshape(B, S, H, D).permute(0, 2, 3, 1)
        return torch.softmax(q @ columns * 0.3, -1) @ v

    inputs = (torch.randn(B, S, H * D), heads(), heads())
    match = match_attrs(attention_of_columns, attend, *inputs, leaving=["reshape", "permute"])
    assert match["scale"] == 0.3
    assert not candidates(attention_of_columns, graph_of(multiplied, QKV))


def test_heads_among_the_batch() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.bmm(torch.softmax(torch.baddbmm(mask, q * 0.3, k.transpose(1, 2)), -1), v)

    q, k, v = (torch.randn(B * H, S, D) for _ in range(3))
    assert match_attrs(attention_of_batches, attend, q, k, v, torch.randn(B * H, S, S))["mask_type"] == "none"


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_torch_own_module(mode: str) -> None:
    module = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True).train(mode == "train")
    graph = graph_of(module, (torch.randn(B, S, 16),) * 3)
    (match,) = candidates(attention_of_batches, graph)
    assert dict(match.attrs or {})["dropout"] == (0.1 if mode == "train" else 0.0)


CAUSAL: dict[str, Callable[[Tensor], Tensor]] = {
    "filled above": lambda x: x.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf")),
    "filled where not below": lambda x: x.masked_fill(torch.tril(torch.ones(S, S)) == 0, float("-inf")),
    "not below": lambda x: x.masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), -1e9),
    "added": lambda x: x + torch.triu(torch.full((S, S), float("-inf")), diagonal=1),
}


def test_a_causal_mask_of_its_own() -> None:
    def attend(hide: Callable[[Tensor], Tensor]) -> Attend:
        return lambda q, k, v: torch.softmax(hide(q @ k.mT * 0.3), -1) @ v

    matches = match_attrs_each(attention_causal, [attend(hide) for hide in CAUSAL.values()], *QKV)
    assert all((attrs["causal"], attrs["mask_type"]) == (True, "none") for attrs in matches)


def test_a_causal_mask_that_others_use_stays_outside() -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(S, S, dtype=torch.bool).triu(1)
        for _ in range(2):
            q = torch.softmax((q @ k.mT).masked_fill(mask, float("-inf")), -1) @ v
        return q

    assert "its mask is also used by" in why(attention_causal, twice, *QKV)
    assert len(candidates(attention_by_hand, graph_of(twice, QKV))) == 2


def test_a_mask_one_place_off_is_not_causal() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(S, S, dtype=torch.bool).triu(2)
        return torch.softmax((q @ k.mT).masked_fill(mask, float("-inf")), -1) @ v

    assert "2 where the pattern has 1" in why(attention_causal, attend, *QKV)


REFUSED: dict[str, tuple[Attend, str]] = {
    "softmax over the queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, "2 where the pattern has 3"),
    "keys not turned but swapped with heads": (
        lambda q, k, v: (q @ k.transpose(1, 2).transpose(-1, -2).transpose(1, 3)).softmax(-1) @ v,
        "where the pattern has",
    ),
    "a sigmoid": (lambda q, k, v: (q @ k.mT).sigmoid() @ v, ""),
    "values turned": (lambda q, k, v: v @ (q @ k.mT).softmax(-1), ""),
    "masked scores still count": (
        lambda q, k, v: (q @ k.mT).masked_fill(torch.eye(S).bool(), -1.0).softmax(-1) @ v,
        "masked scores become -1.0",
    ),
}


def test_what_is_no_attention() -> None:
    square = tuple(torch.randn(B, S, S, S) for _ in range(3))
    refused = refused_each(attention_by_hand, [spelled for spelled, _ in REFUSED.values()], *square)
    for name, reasons in zip(REFUSED, refused, strict=True):
        assert REFUSED[name][1] in reasons, name


def by_einsum(inward: str, outward: str) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum(outward, torch.softmax(torch.einsum(inward, q, k) * 0.3, dim=-1), v)

    return attend


def test_by_einsum() -> None:
    equations = [
        ("bhid,bhjd->bhij", "bhij,bhjd->bhid"),
        ("b h q c, b h k c -> b h q k", "bhqk,bhkc->bhqc"),
        ("blhe,bshe->bhls", "bhls,bshd->blhd"),
    ]
    for match in match_attrs_each(attention_einsum, [by_einsum(*each) for each in equations], *QKV):
        assert (match["scale"], match["groups"]) == (0.3, 1)


def test_equations_that_are_no_attention() -> None:
    equations = [
        ("bhid,bhjd->bhji", "bhji,bhjd->bhid"),
        ("bhid,bhjd->bhij", "bhij,bhid->bhjd"),
        ("bhid,bhjd->bhij", "bhij,bhjd->bhd"),
    ]
    square = tuple(torch.randn(S, S, S, S) for _ in range(3))
    for reasons in refused_each(attention_einsum, [by_einsum(*each) for each in equations], *square):
        assert "are not an attention over the last dimension of the scores" in reasons


def test_in_the_graph_of_a_compiler() -> None:
    graph = make_fx(multiplied)(*QKV)
    assert "bmm" in graph.code
    match = match_attrs(attention_by_hand, graph_of(graph, QKV), *QKV, leaving=["expand", "expand"])
    assert match["scale"] == pytest.approx(D**-0.5)


def traced(attend: Attend, inputs: tuple[Tensor, ...]) -> GraphModule:
    return graph_of(make_fx(attend)(*inputs), inputs)


def test_what_a_mask_hides_in_the_graph_of_a_compiler() -> None:
    # There the number that masked scores become is a tensor.
    def hidden(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return torch.softmax(torch.where(m, -1e9, q @ k.mT), -1) @ v

    def kept(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return torch.softmax(torch.where(m, q @ k.mT, -1e9), -1) @ v

    inputs = (*QKV, boolean())
    for attend, kind in ((hidden, "hide"), (kept, "keep")):
        match = match_attrs(attention_by_hand, traced(attend, inputs), *inputs, leaving=["expand", "expand"])
        assert match["mask_type"] == kind


def test_heads_that_a_compiler_copies_for_their_groups() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(H // G, dim=1), v.repeat_interleave(H // G, dim=1)
        return torch.softmax(q @ k.mT * 0.3, -1) @ v

    graph = traced(attend, GROUPED)
    assert "clone" in str(graph.graph)
    assert match_attrs(attention_by_hand, graph, *GROUPED, leaving=["expand"])["groups"] == H // G


def test_dropout_of_weights_in_another_order_of_memory() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("idhb,jhbd->ihbj", q, k)
        powers = torch.exp(scores - scores.amax(-1, keepdim=True))
        weights = F.dropout(powers / powers.sum(-1, keepdim=True), 0.2)
        return torch.einsum("ihbj,jhbe->bhie", weights, v)

    inputs = tuple(torch.randn(S, S, S, S) for _ in range(3))
    assert "weights that are not contiguous" in why(attention_einsum, attend, *inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(S, D), (B, H, S, D)])
def test_a_causal_mask_at_any_rank_and_precision(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(torch.ones(S, S).triu(1).bool(), float("-inf"))
        return F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v

    def added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT + torch.full((S, S), -1e9, dtype=q.dtype).triu(1)
        powers = torch.exp(scores - scores.amax(-1, keepdim=True))
        return powers / powers.sum(-1, keepdim=True) @ v

    inputs = tuple(torch.randn(shape).to(dtype) for _ in range(3))
    assert all(match["causal"] for match in match_attrs_each(attention_causal, [filled, added], *inputs))


def test_keys_as_columns_with_a_softmax_by_hand() -> None:
    def attend(q: Tensor, columns: Tensor, v: Tensor) -> Tensor:
        scores = q @ columns
        powers = torch.exp(scores - scores.amax(-1, keepdim=True))
        return powers / powers.sum(-1, keepdim=True) @ v

    match_attrs(attention_of_columns, attend, heads(), torch.randn(B, H, D, S), heads())
