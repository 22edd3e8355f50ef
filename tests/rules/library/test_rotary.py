"""Rotary embeddings: halves, interleaved, half by half, and as complex numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.rules.library.rotary import rotary, rotary_cached, rotary_complex, rotary_pair, rotary_split
from tests.rules.library.helpers import (
    candidates,
    graph_of,
    match_attrs,
    match_attrs_each,
    member_names,
    refused_each,
    why,
)

B, H, S, D = 2, 4, 6, 8
Q, K, V = (torch.randn(B, h, S, D) for h in (H, 2, 2))
COS, SIN = torch.randn(S, D), torch.randn(S, D)


def rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_chunks(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([b.neg(), a], -1)


def rotate_every_two(x: Tensor) -> Tensor:
    x1, x2 = x[:, :, :, ::2], x[:, :, :, 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def rotate_unbound(x: Tensor) -> Tensor:
    x1, x2 = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (rotate_half(x) * sin)


def test_rotary() -> None:
    def turning(turn: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda x, cos, sin: x * cos + turn(x) * sin

    turns = {rotate_half: "halves", rotate_chunks: "halves", rotate_every_two: "interleaved"}
    turns[rotate_unbound] = "interleaved"
    matches = match_attrs_each(rotary, [turning(turn) for turn in turns], Q, COS, SIN)
    assert [attrs["layout"] for attrs in matches] == list(turns.values())


def test_rotary_in_float32() -> None:
    def wide(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = x.float()
        return (y * cos + rotate_half(y) * sin).to(x.dtype)

    match_attrs(rotary, wide, Q.bfloat16(), COS, SIN)
    match_attrs(rotary, apply, Q.bfloat16(), COS.bfloat16(), SIN.bfloat16())


def test_queries_and_keys_of_one_attention() -> None:
    def two_layers(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for _ in range(2):
            k = apply(k, cos, sin)
            q = F.scaled_dot_product_attention(apply(q, cos, sin), k, v, enable_gqa=True)
        return q

    graph = graph_of(two_layers, (Q, K, V, COS, SIN))
    pairs = candidates(rotary_pair, graph)
    assert len(candidates(rotary, graph)) == 4
    assert [len(c.members) for c in pairs] == [14, 14]
    first, second = (set(member_names(graph, c)) for c in pairs)
    assert not first & second


def test_what_two_attentions_read_is_no_pair() -> None:
    def crossed(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(apply(q, cos, sin), k, v, enable_gqa=True)
        return first + F.scaled_dot_product_attention(q, apply(k, cos, sin), v, enable_gqa=True)

    assert not candidates(rotary_pair, graph_of(crossed, (Q, K, V, COS, SIN)))


def test_pairs_by_other_angles_are_not_joined() -> None:
    def other(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(apply(q, cos, sin), apply(k, sin, cos * 2), v, enable_gqa=True)

    assert not candidates(rotary_pair, graph_of(other, (Q, K, V, COS, SIN)))


def test_half_by_half() -> None:
    def split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = torch.chunk(x, 2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    match_attrs(rotary_split, split, Q, COS[:, : D // 2], SIN[:, : D // 2])


def test_complex_numbers() -> None:
    def turned(x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3).to(x.dtype)

    turns = torch.polar(torch.ones(S, D // 2), torch.randn(S, D // 2))
    assert match_attrs(rotary_complex, turned, Q, turns) == {"layout": "interleaved", "half_angles": True}


def test_turned_the_other_way() -> None:
    def wrong(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + torch.cat((x[..., D // 2 :], -x[..., : D // 2]), -1) * sin

    refused_each(rotary, [wrong], Q, COS, SIN)


def test_cut_elsewhere() -> None:
    def wrong(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., 3:], x[..., :3]), -1) * sin

    assert "its dtype or shape is not what the pattern would compute" in why(rotary, wrong, Q, COS, SIN)


def test_half_of_another_value() -> None:
    refused_each(rotary, [lambda x, y, c, s: x * c + rotate_half(y) * s], Q, Q + 1, COS, SIN)


def woven(sign: int) -> Callable[..., Tensor]:
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().reshape(B, H, S, D // 2, 2).unbind(-1)
        first = a * cos - b * sin if sign > 0 else a * cos + b * sin
        second = b * cos + a * sin if sign > 0 else b * cos - a * sin
        return torch.stack((first, second), -1).flatten(3).to(x.dtype)

    return turned


def test_even_and_odd_places_apart() -> None:
    angles = (COS[:, : D // 2], SIN[:, : D // 2])
    assert match_attrs(rotary_split, woven(1), Q, *angles) == {"layout": "interleaved", "half_angles": True}
    assert not candidates(rotary_split, graph_of(woven(-1), (Q, *angles)))


def test_angles_in_one_tensor() -> None:
    def apply_cached(x: Tensor, cache: Tensor) -> Tensor:
        y = x.float().reshape(*x.shape[:-1], -1, 2)
        first = y[..., 0] * cache[..., 0] - y[..., 1] * cache[..., 1]
        second = y[..., 1] * cache[..., 0] + y[..., 0] * cache[..., 1]
        return torch.stack([first, second], -1).flatten(3).to(x.dtype)

    cache = torch.randn(S, D // 2, 2)
    assert match_attrs(rotary_cached, apply_cached, Q, cache) == {
        "layout": "interleaved",
        "half_angles": True,
    }
    assert match_attrs(rotary_cached, apply_cached, Q.bfloat16(), cache) == {
        "layout": "interleaved",
        "half_angles": True,
    }


def test_an_odd_width_has_no_halves() -> None:
    def sliced(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin

    def chunked(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + rotate_chunks(x) * sin

    angles = (torch.randn(S, 5), torch.randn(S, 5))
    for reasons in refused_each(rotary, [sliced, chunked], torch.randn(B, H, S, 5), *angles):
        assert "is not known to be even" in reasons


def test_a_real_factor_turns_nothing() -> None:
    def scaled(x: Tensor, factor: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * factor).flatten(3)

    assert "is real" in why(rotary_complex, scaled, Q, torch.randn(S, D // 2))
