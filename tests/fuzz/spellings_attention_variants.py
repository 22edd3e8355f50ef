"""Spellings of less usual attention: with a causal mask of its own, by einsum, and with sinks."""

from __future__ import annotations

import math
from random import Random

import torch
from torch import Tensor

from .references import Family, Spelling
from .spelling_drawing import Drawing
from .spellings_attention import (
    COMMON,
    MASKS,
    draw_columns,
    draw_mask,
    draw_masking,
    draw_repeating,
    draw_scaled,
    draw_sizes,
    draw_weights,
)


def _causal(rng: Random) -> Spelling:
    d = Drawing(rng)
    dtype = d.precision()
    s = draw_sizes(d)
    q, k, v = d.tensor(*s.q), d.tensor(*s.k), d.tensor(*s.v)
    n, m = s.queries, s.keys
    low = d.any([-math.inf, -1e9, -1e3, torch.finfo(dtype).min])
    d.tags.add("mask_inf" if math.isinf(low) else "mask_finite")
    ones = torch.ones
    later = d.mostly(
        {
            "triu": lambda: ones(n, m, dtype=torch.bool).triu(1),
            "logical_not": lambda: ones(n, m, dtype=torch.bool).tril().logical_not(),
            "invert": lambda: ~torch.tril(ones(n, m, dtype=torch.bool)),
            "tril_zero": lambda: torch.tril(ones(n, m)) == 0,
            "triu_one": lambda: ones(n, m).triu(1) == 1,
            "triu_bool": lambda: torch.triu(ones(n, m), diagonal=1).bool(),
            "added": lambda: torch.full((n, m), low, dtype=dtype).triu(1),
            "added_default": lambda: torch.full((n, m), low).triu(1).to(dtype),
        },
        {
            "diagonal_0": lambda: ones(n, m, dtype=torch.bool).triu(0),
            "diagonal_2": lambda: ones(n, m, dtype=torch.bool).triu(2),
            "tril_minus_1": lambda: ~ones(n, m, dtype=torch.bool).tril(-1),
            "tril_plus_1": lambda: torch.tril(ones(n, m), diagonal=1) == 0,
            "earlier": lambda: ones(n, m, dtype=torch.bool).tril(-1),
            "added_tril": lambda: torch.full((n, m), low, dtype=dtype).tril(-1),
            "bottom_right": lambda: ones(n, m, dtype=torch.bool).triu(m - n + 1),
            "one_row": lambda: ones(1, m, dtype=torch.bool).triu(1),
            "added_low": lambda: torch.full((n, m), -2.0, dtype=dtype).triu(1),
        },
        0.2,
    )
    added = any(tag.startswith("added") for tag in d.tags)
    repeat, weights = draw_repeating(d, s.groups), draw_weights(d, dtype)
    scaled = draw_scaled(d, q, draw_columns(d, len(s.q)))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = d.inner(scaled(q, repeat(k)))
        x = x + later() if added else x.masked_fill(later(), low)
        return weights(x) @ repeat(v)

    return d.spelling(attend, (q, k, v), symbolic=d.batches((q, k, v)))


def _by_einsum(rng: Random) -> Spelling:
    d = Drawing(rng)
    dtype = d.precision()
    batch = d.any(["bh", "bh", "bh", "b", "", "abh"])
    square = d.chance(0.4, "square")
    sizes = dict(zip("abhijde", [2, 4, 4, 4, 4, 4, 4] if square else [2, 1, 2, 3, 5, 4, 6], strict=True))

    def term(tail: str, usual: float = 0.4) -> str:
        letters = list(batch + tail)
        if not d.chance(usual):
            d.rng.shuffle(letters)
            d.tags.add("layout")
        return "".join(letters)

    q, k, v, result = term("id"), term("jd"), term("je"), term("ie")
    scores = term("i", 0.8) + "j"
    if d.chance(0.12, "hostile"):
        scores = d.any([scores[::-1], scores[-1] + scores[:-1]])
    if d.chance(0.06, "hostile_result"):
        result = d.any([result.replace("i", "j"), result.replace("e", ""), "e" + result.replace("e", "")])
    letters = list("mnopqrs")
    d.rng.shuffle(letters)
    renamed = dict(zip("abhijde", letters, strict=True)) if d.chance(0.5, "renamed") else {}
    second = ["".join(renamed.get(c, c) for c in t) for t in (scores, v, result)]
    inward, outward = f"{q},{k}->{scores}", f"{second[0]},{second[1]}->{second[2]}"
    if d.chance(0.1, "ellipsis") and batch:
        inward, outward = "...id,...jd->...ij", "...ij,...je->...ie"
        q, k, v, scores = f"{batch}id", f"{batch}jd", f"{batch}je", f"{batch}ij"
    if d.chance(0.2, "blanks"):
        inward = inward.replace(",", " , ").replace("->", " -> ")
    tensors = [d.tensor(*(sizes[c] for c in t)) for t in (q, k, v)]
    scaled = draw_scaled(d, tensors[0], lambda k: k, lambda a, b: torch.einsum(inward, a, b))
    weights = draw_weights(d, dtype)
    masked = d.chance(0.4, "masked")
    lay, boolean = draw_masking(d, dtype)
    whole = tuple(sizes[c] for c in scores)
    operands = [draw_mask(d, boolean, whole)] if masked else []
    biases = d.any([0, 0, 1, 2])
    d.tags.add(f"biases_{biases}")
    late = d.float() if biases and d.chance(0.5, "late") else None
    if late is not None:
        scaled = lambda q, k: torch.einsum(inward, q, k)  # noqa: E731

    def attend(q: Tensor, k: Tensor, v: Tensor, *over: Tensor) -> Tensor:
        x = d.inner(scaled(q, k))
        for bias in over[:biases]:
            x = x + bias
        x = x if late is None else x * late
        return torch.einsum(outward, weights(lay(x, *over[biases:]) if masked else x), v)

    operands = [*(d.tensor(*whole) for _ in range(biases)), *operands]

    return d.spelling(attend, (*tensors, *operands), graphs=0.0)


def _with_sinks(rng: Random) -> Spelling:
    d = Drawing(rng)
    dtype = d.precision()
    s = draw_sizes(d, ranks=(4, 4, 4, 3))
    q, k, v = d.tensor(*s.q), d.tensor(*s.k), d.tensor(*s.v)
    repeat, scaled = draw_repeating(d, s.groups), draw_scaled(d, q, draw_columns(d, len(s.q)))
    lay, boolean = draw_masking(d, dtype)
    operands = [draw_mask(d, boolean, s.scores)] if d.chance(0.5, "masked") else []
    whole = (*s.scores[:-1], 1)
    if len(s.q) == 4 and d.chance(0.7, "of_heads"):
        sinks = d.tensor(s.lead[-1])
        column = d.one(
            {
                "reshaped": lambda x: x.reshape(1, -1, 1, 1).expand(whole),
                "indexed": lambda x: x[None, :, None, None].expand(whole),
            }
        )
    else:
        sinks, column = d.tensor(*whole), lambda x: x
    joined = d.mostly(
        {
            "last": lambda x, c, f: f(torch.cat([x, c], -1))[..., :-1],
            "first": lambda x, c, f: f(torch.cat([c, x], dim=-1))[..., 1:],
        },
        {
            "wrong_end": lambda x, c, f: f(torch.cat([x, c], -1))[..., 1:],
            "dropped_early": lambda x, c, f: f(torch.cat([x, c], -1)[..., :-1]),
        },
    )
    softmax = d.mostly(
        {
            "softmax": lambda x: x.softmax(-1),
            "softmax_wide": lambda x: torch.softmax(x, -1, dtype=torch.float32).to(dtype),
            "softmax_shifted": lambda x: torch.softmax(x - x.max(-1, keepdim=True).values, -1),
        },
        {"softmax_queries": lambda x: x.softmax(-2)},
    )
    rate = d.float(0.1, 0.6) if d.chance(0.15, "dropout") else 0.0

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *over: Tensor) -> Tensor:
        x = d.inner(scaled(q, repeat(k)))
        x = lay(x, *over) if over else x
        return torch.dropout(joined(x, column(sinks), softmax), rate, rate > 0) @ repeat(v)

    inputs = (q, k, v, sinks, *operands)
    return d.spelling(attend, inputs)


FAMILIES = (
    Family(
        "attention_with_sinks",
        _with_sinks,
        frozenset({"reshaped", "indexed", "last", "first", "softmax", "softmax_wide", "softmax_shifted"})
        | {"masked", "expanded", "interleaved", "dropout", "bf16", "f64", "rank3", "rank4", "square"},
    ),
    Family(
        "attention_causal",
        _causal,
        COMMON
        | {
            "triu",
            "logical_not",
            "invert",
            "tril_zero",
            "triu_one",
            "triu_bool",
            "added",
            "expanded",
            "interleaved",
        }
        | {"mask_inf", "mask_finite", "symbolic", "rank2", "rank3"},
    ),
    Family(
        "attention_einsum",
        _by_einsum,
        COMMON
        | MASKS
        | {"layout", "renamed", "blanks", "masked", "broadcast", "biases_1", "biases_2", "late"},
    ),
)
