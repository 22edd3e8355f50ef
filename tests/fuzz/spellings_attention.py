"""Spellings of attention: the operator, and softmax(QKᵀ)V from its steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .references import Family, Spelling
from .spelling_drawing import Drawing

Step = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Sizes:
    """Sizes of one attention, all of them equal at times so that a wrong layout is no error."""

    lead: tuple[int, ...]
    queries: int
    keys: int
    width: int
    value: int
    groups: int = 1

    @property
    def q(self) -> tuple[int, ...]:
        return (*self.lead, self.queries, self.width)

    @property
    def k(self) -> tuple[int, ...]:
        return (*self._shared, self.keys, self.width)

    @property
    def v(self) -> tuple[int, ...]:
        return (*self._shared, self.keys, self.value)

    @property
    def scores(self) -> tuple[int, ...]:
        return (*self.lead, self.queries, self.keys)

    @property
    def _shared(self) -> tuple[int, ...]:
        return (*self.lead[:-1], self.lead[-1] // self.groups) if self.groups > 1 else self.lead


def draw_sizes(d: Drawing, ranks: tuple[int, ...] = (4, 4, 4, 4, 3, 2, 5), grouped: float = 0.45) -> _Sizes:
    rank = d.any(ranks)
    d.tags.add(f"rank{rank}")
    lead = tuple(d.any([1, 2, 4]) for _ in range(rank - 2))
    if d.chance(0.4, "square"):
        if rank < 4 and d.chance(0.5, "all_equal"):
            lead = (4,) * len(lead)
        return _Sizes(lead, 4, 4, 4, 4)
    queries, keys = d.any([1, 3, 4]), d.any([2, 3, 5])
    groups = 1
    if rank == 4 and d.chance(grouped, "grouped"):
        lead, groups = (lead[0], 4), d.any([2, 4])
    return _Sizes(lead, queries, keys, d.any([2, 4]), d.any([2, 4, 6]), groups)


def _spread(x: Tensor, groups: int) -> Tensor:
    batch, heads, length, width = x.shape
    wide = x[:, :, None].expand(batch, heads, groups, length, width)
    return wide.reshape(batch, heads * groups, length, width)


def draw_repeating(d: Drawing, groups: int) -> Step:
    """How heads of keys and values become those of the queries."""
    if groups == 1:
        return lambda x: x
    return d.mostly(
        {
            "expanded": lambda x: _spread(x, groups),
            "interleaved": lambda x: x.repeat_interleave(groups, dim=1),
        },
        {"tiled": lambda x: x.repeat(1, groups, 1, 1)},
    )


def _operator(rng: Random) -> Spelling:
    d = Drawing(rng)
    dtype = d.precision()
    s = draw_sizes(d)
    q, k, v = d.tensor(*s.q), d.tensor(*s.k), d.tensor(*s.v)
    settings: dict[str, Any] = {}
    if d.chance(0.3, "scale"):
        settings["scale"] = d.float()
    if d.chance(0.15, "dropout"):
        settings["dropout_p"] = d.float(0.1, 0.6)
    repeat = draw_repeating(d, s.groups)
    if s.groups > 1 and d.chance(0.35, "enable_gqa"):
        settings["enable_gqa"], repeat = True, lambda x: x
    if len(s.lead) == 2 and d.chance(0.05, "broadcast_keys"):
        k, v = k[:1], v[:1]
    mask: list[Tensor] = []
    how = d.any(["none", "none", "causal", "boolean", "additive", "wide"])
    d.tags.add(f"mask_{how}")
    if how == "causal":
        settings["is_causal"] = True
    elif how != "none":
        sizes = d.broadcast(*s.scores)
        mask = [d.flags(*sizes) if how == "boolean" else d.tensor(*sizes)]
        if how == "wide":
            # One that is kept in float32, whatever the rest is in.
            mask = [d.tensor(*s.scores[-2:], dtype=torch.promote_types(dtype, torch.float32))]
    same = s.k == s.v and d.chance(0.1, "shared_operand")

    def attend(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        keys, values = repeat(k), repeat(k if same else v)
        return F.scaled_dot_product_attention(q, keys, values, *mask, **settings)

    inputs = (q, k, v, *mask)
    return d.spelling(attend, inputs, symbolic=d.batches(inputs))


def draw_scaled(d: Drawing, q: Tensor, columns: Step, multiply: Product = torch.matmul) -> Product:
    """The scores of queries and keys, `columns` making columns of the keys."""
    c = d.float()
    root = math.sqrt(q.shape[-1])
    return d.mostly(
        {
            "scale": lambda q, k: multiply(q, columns(k)) * c,
            "scale_large": lambda q, k: multiply(q, columns(k)) * 300.0,
            "scale_left": lambda q, k: c * multiply(q, columns(k)),
            "divisor": lambda q, k: multiply(q, columns(k)) / root,
            "scale_query": lambda q, k: multiply(q * c, columns(k)),
            "divide_query": lambda q, k: multiply(q / root, columns(k)),
            "scale_key": lambda q, k: multiply(q, columns(k) * c),
            "no_scale": lambda q, k: multiply(q, columns(k)),
            "scale_both": lambda q, k: multiply(q * c, columns(k * c)),
            "tensor_scale": lambda q, k: multiply(q, columns(k)) * torch.full([], c),
            "tensor_divisor": lambda q, k: multiply(q, columns(k)) / torch.sqrt(torch.tensor(root)),
            "tensor_query": lambda q, k: multiply(q / torch.sqrt(torch.tensor(root)), columns(k)),
            "tensor_key": lambda q, k: multiply(q, columns(k) / torch.sqrt(torch.tensor(root))),
            "plus_zero": lambda q, k: multiply(q, columns(k)) * c + 0,
        },
        {
            "negative_scale": lambda q, k: multiply(q, columns(k)) * -c,
            "divide_inverse": lambda q, k: c / multiply(q, columns(k)),
            "scale_twice": lambda q, k: multiply(q * c, columns(k)) / root,
            "tensor_inverse": lambda q, k: torch.full([], c) / multiply(q, columns(k)),
            "tensor_rows": lambda q, k: multiply(q, columns(k)) * torch.full([q.shape[-2], 1], c),
            "plus_one": lambda q, k: multiply(q, columns(k)) * c + 1,
        },
    )


def draw_columns(d: Drawing, rank: int) -> Step:
    """Keys turned into columns."""
    return d.mostly(
        {
            "mT": lambda k: k.mT,
            "transpose": lambda k: k.transpose(-1, -2),
            "swapaxes": lambda k: k.swapaxes(rank - 1, rank - 2),
            "permute": lambda k: k.permute(*range(rank - 2), rank - 1, rank - 2),
        },
        {"not_turned": lambda k: k.clone(), "turned": lambda k: k.transpose(0, -1)},
        0.1 if "all_equal" in d.tags else 0.0,
    )


def draw_weights(d: Drawing, dtype: torch.dtype) -> Step:
    """The softmax of scores, with dropout or without."""

    def by_hand(x: Tensor) -> Tensor:
        powers = torch.exp(x - x.amax(-1, keepdim=True))
        return powers / powers.sum(-1, keepdim=True)

    def by_max(x: Tensor) -> Tensor:
        powers = (x - x.max(dim=-1, keepdim=True)[0]).exp()
        return powers / powers.sum(-1, keepdim=True)

    alpha = d.any([32, 8.0, 24])

    def relaxed(x: Tensor, back: float = alpha) -> Tensor:
        small = x / alpha
        return torch.softmax((small - small.amax(dim=-1).unsqueeze(-1)) * back, -1)

    softmax = d.mostly(
        {
            "softmax_relaxed": relaxed,
            "softmax_shifted": lambda x: torch.softmax(x - x.max(-1, keepdim=True).values, -1),
            "softmax": lambda x: torch.softmax(x, -1),
            "softmax_method": lambda x: x.softmax(x.dim() - 1),
            "softmax_wide": lambda x: F.softmax(x, dim=-1, dtype=torch.float32).to(dtype),
            "softmax_float": lambda x: F.softmax(x.float(), dim=-1).to(dtype),
            "softmax_by_hand": by_hand,
            "softmax_by_max": by_max,
        },
        {
            "softmax_sharpened": lambda x: relaxed(x, alpha * 2),
            "softmax_queries": lambda x: torch.softmax(x, -2),
            "softmax_unshifted": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
            "softmax_plus_one": lambda x: x.exp() / (1 + x.exp().sum(-1, keepdim=True)),
            "log_softmax": lambda x: torch.log_softmax(x, -1),
            "scaled_weights": lambda x: torch.softmax(x, -1) * 0.5,
        },
    )
    rate = d.float(0.1, 0.6)
    if d.chance(0.15, "dropout"):
        return lambda x: F.dropout(d.inner(softmax(x)), rate)
    if d.chance(0.1, "dropout_eval"):
        return lambda x: F.dropout(softmax(x), rate, training=False)
    return lambda x: d.inner(softmax(x))


Masking = Callable[[Tensor, Tensor], Tensor]


def draw_masking(d: Drawing, dtype: torch.dtype) -> tuple[Masking, bool]:
    """How a mask is laid over scores, and whether the mask is boolean."""
    low = d.any([-math.inf, -1e9, -1e4, torch.finfo(dtype).min])
    d.tags.add("mask_inf" if math.isinf(low) else "mask_finite")
    added: dict[str, Masking] = {
        "mask_added": lambda x, m: x + m,
        "mask_added_left": lambda x, m: m + x,
        "mask_alpha_one": lambda x, m: torch.add(x, m, alpha=1),
        "mask_subtracted": lambda x, m: x - m,
    }
    boolean: dict[str, Masking] = {
        "mask_filled": lambda x, m: x.masked_fill(m, low),
        "mask_not_filled": lambda x, m: x.masked_fill(~m, low),
        "mask_kept": lambda x, m: torch.where(m, x, low),
        "mask_hidden": lambda x, m: torch.where(m, low, x),
        "mask_full": lambda x, m: torch.where(m, x, torch.full([], low, dtype=x.dtype)),
        "mask_constant": lambda x, m: torch.where(m, x, torch.tensor(low, dtype=x.dtype)),
        "mask_boolean_added": lambda x, m: x + m,
    }
    hostile: dict[str, Masking] = {
        "mask_alpha": lambda x, m: torch.add(x, m, alpha=2),
        "mask_negative": lambda x, m: m - x,
        "mask_multiplied": lambda x, m: x * m,
    }
    hostile_boolean: dict[str, Masking] = {
        "mask_too_high": lambda x, m: x.masked_fill(m, -1.0),
        "mask_positive": lambda x, m: x.masked_fill(m, 1e9),
        "mask_vector": lambda x, m: torch.where(m, x, torch.full_like(x[..., :1], low)),
        "mask_hidden_full": lambda x, m: torch.where(m, torch.full([], low, dtype=x.dtype), x),
    }
    if d.chance(0.5):
        return d.mostly(added, hostile), False
    return d.mostly(boolean, hostile_boolean), True


def draw_mask(d: Drawing, boolean: bool, scores: tuple[int, ...]) -> Tensor:
    sizes = d.broadcast(*scores)
    if boolean:
        return d.flags(*sizes)
    if d.dtype != torch.float32 and d.chance(0.5, "mask_float32"):
        return d.tensor(*sizes, dtype=torch.float32)
    return d.tensor(*sizes)


def _by_hand(rng: Random) -> Spelling:
    d = Drawing(rng)
    dtype = d.precision()
    s = draw_sizes(d)
    q, k, v = d.tensor(*s.q), d.tensor(*s.k), d.tensor(*s.v)
    repeat, turn = draw_repeating(d, s.groups), draw_columns(d, len(s.q))
    scaled, weights = draw_scaled(d, q, turn), draw_weights(d, dtype)
    cap = d.float(5, 30)
    capped = (
        d.mostly(
            {"softcap": lambda x: torch.tanh(x / cap) * cap},
            {
                "softcap_uneven": lambda x: torch.tanh(x / cap) * (cap + 1),
                "softcap_inverse": lambda x: torch.tanh(x * (1 / cap)) * cap,
            },
            0.2,
        )
        if d.chance(0.15)
        else lambda x: x
    )
    order = d.any(["none", "none", "mask", "mask", "mask_bias", "bias_mask", "bias", "bias_bias_mask"])
    d.tags.add(f"order_{order}")
    lay, boolean = draw_masking(d, dtype)
    extra = {
        "mask": lambda: draw_mask(d, boolean, s.scores),
        "bias": lambda: d.tensor(*d.broadcast(*s.scores)),
    }
    laid = [word for word in order.split("_") if word != "none"]
    operands = [extra[word]() for word in laid]
    same = s.k == s.v and d.chance(0.1, "shared_operand")
    swapped = d.chance(0.04, "weights_turned")
    late = d.float() if d.chance(0.15, "late") else None
    if late is not None and order != "none":
        # The scale of a product that something was added to or filled into.
        scaled, capped = (lambda q, k: q @ turn(k)), (lambda x: x)
    scaling = d.rng.randrange(len(laid) + 1)
    in_place = d.chance(0.2, "in_place") and all(o.shape == s.scores for o in operands)
    plus = torch.Tensor.add_ if in_place else torch.add

    def attend(q: Tensor, k: Tensor, v: Tensor, *over: Tensor) -> Tensor:
        keys, values = repeat(k), repeat(k if same else v)
        x = d.inner(capped(d.inner(scaled(q, keys))))
        for i, (word, operand) in enumerate(zip(laid, over, strict=True)):
            x = lay(x, operand) if word == "mask" else plus(x, operand)
            if late is not None and scaling == i:
                x = x / late
        w = weights(x)
        return values.mT @ w.mT if swapped else w @ values

    inputs = (q, k, v, *operands)
    # make_fx keeps writes in place, and an operand behind a view that changes nothing has no name there.
    return d.spelling(attend, inputs, symbolic=d.batches(inputs), graphs=0.0 if in_place else 0.15)


def _of_columns(rng: Random) -> Spelling:
    d = Drawing(rng)
    dtype = d.precision()
    s = draw_sizes(d, grouped=0.0)
    q, v = d.tensor(*s.q), d.tensor(*s.v)
    rank = len(s.q)
    arrive: dict[str, tuple[tuple[int, ...], Step]] = {
        "columns": ((*s.lead, s.width, s.keys), lambda k: k),
        "cut": ((*s.lead, s.width, s.keys + 1), lambda k: k[..., 1:]),
    }
    if rank == 4:
        arrive["permuted"] = (
            (s.lead[0], s.keys, s.lead[1], s.width),
            lambda k: k.permute(0, 2, 3, 1),
        )
        arrive["broadcast_columns"] = ((1, s.lead[1], s.width, s.keys), lambda k: k)
    sizes, turn = d.mostly(arrive, {"turned": ((*s.lead, s.keys, s.width), lambda k: k.mT)}, 0.05)
    scaled, weights = draw_scaled(d, q, turn), draw_weights(d, dtype)
    masked = d.chance(0.5, "masked")
    lay, boolean = draw_masking(d, dtype)
    operands = [draw_mask(d, boolean, s.scores)] if masked else []

    def attend(q: Tensor, k: Tensor, v: Tensor, *over: Tensor) -> Tensor:
        x = d.inner(scaled(q, k))
        return weights(lay(x, *over) if over else x) @ v

    inputs = (q, d.tensor(*sizes), v, *operands)
    return d.spelling(attend, inputs, symbolic=d.batches(inputs))


def _of_batches(rng: Random) -> Spelling:
    d = Drawing(rng)
    dtype = d.precision()
    square = d.chance(0.4, "square")
    batch, heads = (2, 2) if square else (d.any([1, 2]), d.any([2, 3]))
    n, m, width, wide = (4, 4, 4, 4) if square else (d.any([1, 3]), d.any([2, 5]), 4, d.any([2, 6]))
    q, k, v = (d.tensor(batch * heads, *sizes) for sizes in ((n, width), (m, width), (m, wide)))
    scores = (batch * heads, n, m)
    offset, c = d.tensor(*d.broadcast(*scores)), d.float()
    offset = offset if d.chance(0.2) else d.tensor(*scores)
    scaled = draw_scaled(d, q, lambda k: k.transpose(1, 2), torch.bmm)
    products: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "bmm": lambda q, k, o: scaled(q, k),
        "baddbmm": lambda q, k, o: torch.baddbmm(o, q * c, k.transpose(1, 2)),
        "baddbmm_alpha": lambda q, k, o: o.baddbmm(q, k.transpose(-1, -2), beta=1.0, alpha=c),
        "offset_added": lambda q, k, o: scaled(q, k) + o,
        "turned_before": lambda q, k, o: torch.bmm(q, k.transpose(1, 2).contiguous()),
    }
    hostile = {
        "beta": lambda q, k, o: torch.baddbmm(o, q, k.transpose(1, 2), beta=0.5, alpha=c),
        "beta_zero": lambda q, k, o: torch.baddbmm(o, q, k.transpose(1, 2), beta=0.0, alpha=c),
    }
    product = d.mostly(products, hostile)
    lay, boolean = draw_masking(d, dtype)
    weights = draw_weights(d, dtype)
    way = d.any(["plain", "flat_mask", "over_heads", "parted", "twisted"])
    d.tags.add(way)
    four = (
        d.broadcast(batch, 1 if d.chance(0.6) else heads, n, m) if way != "twisted" else (heads, batch, n, m)
    )
    sizes = scores if way == "flat_mask" else four
    mask = d.flags(*sizes) if boolean else d.tensor(*sizes)

    def attend(q: Tensor, k: Tensor, v: Tensor, offset: Tensor, mask: Tensor) -> Tensor:
        x = d.inner(product(q, k, offset))
        if way == "flat_mask":
            x = lay(x, mask)
        elif way == "twisted":
            x = lay(x.view(heads, batch, n, m), mask).view(scores)
        elif way != "plain":
            x = lay(x.view(batch, heads, n, m), mask)
        if way == "over_heads":
            x = x.view(scores)
        w = weights(x)
        return torch.bmm(w.view(scores) if way == "parted" else w, v)

    return d.spelling(attend, (q, k, v, offset, mask))


MASKS = frozenset(
    {"mask_added", "mask_added_left", "mask_filled", "mask_not_filled", "mask_kept", "mask_hidden"}
)
_SCALES = frozenset({"scale", "divisor", "scale_query", "divide_query", "scale_key", "no_scale"}) | {
    "tensor_scale",
    "tensor_divisor",
    "tensor_query",
    "tensor_key",
}
_SOFTMAX = frozenset(
    {"softmax", "softmax_wide", "softmax_float", "softmax_by_hand", "softmax_by_max", "dropout"}
) | {"softmax_relaxed", "softmax_shifted"}
COMMON = _SCALES | _SOFTMAX | {"bf16", "f64", "square", "escape"}

FAMILIES = (
    Family(
        "attention",
        _operator,
        frozenset({"scale", "dropout", "enable_gqa", "expanded", "interleaved", "mask_none", "mask_causal"})
        | {
            "mask_boolean",
            "mask_additive",
            "mask_wide",
            "broadcast",
            "symbolic",
            "bf16",
            "f64",
            "shared_operand",
        }
        | {"rank3", "rank4"},
    ),
    Family(
        "attention_by_hand",
        _by_hand,
        COMMON
        | MASKS
        | {
            "softcap",
            "late",
            "plus_zero",
            "mask_subtracted",
            "order_bias_bias_mask",
            "order_mask_bias",
            "order_bias_mask",
            "order_bias",
            "rank2",
            "rank3",
            "rank5",
            "expanded",
        }
        | {"interleaved", "symbolic", "make_fx", "decomposed", "broadcast", "lower_rank", "shared_operand"}
        | {"mask_inf", "mask_finite", "mask_boolean_added", "mask_full", "mask_constant", "mask_float32"},
    ),
    Family(
        "attention_of_columns",
        _of_columns,
        COMMON
        | MASKS
        | {"mask_float32", "columns", "cut", "permuted", "masked", "broadcast", "rank2", "rank3", "symbolic"},
    ),
    Family(
        "attention_of_batches",
        _of_batches,
        COMMON
        | MASKS
        | {"bmm", "baddbmm", "baddbmm_alpha", "offset_added", "flat_mask", "over_heads", "parted", "plain"},
    ),
)
