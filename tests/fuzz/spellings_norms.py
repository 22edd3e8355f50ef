"""Spellings of norms, alone, after a sum and after embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .composing import COMMON, Keep, Sketch
from .references import Family, Spelling
from .spellings_grids import GROUP_NORM

WIDTH = 4
Norm = Callable[[Keep, Tensor, Tensor | None, Any], Tensor]


def _llama(keep: Keep, x: Tensor, w: Tensor | None, eps: Any) -> Tensor:
    wide = x.to(torch.float32)
    scaled = (wide * torch.rsqrt(keep(wide.pow(2).mean(-1, keepdim=True)) + eps)).to(x.dtype)
    return scaled if w is None else w * keep(scaled)


def _meta(keep: Keep, x: Tensor, w: Tensor | None, eps: Any) -> Tensor:
    wide = x.float()
    scaled = keep(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).type_as(x)
    return scaled if w is None else scaled * w


def _t5(keep: Keep, x: Tensor, w: Tensor | None, eps: Any) -> Tensor:
    scaled = x * torch.rsqrt(keep(x.to(torch.float32).pow(2).mean(-1, keepdim=True)) + eps)
    return scaled.to(x.dtype) if w is None else w * scaled.to(w.dtype)


def _olmo(keep: Keep, x: Tensor, w: Tensor | None, eps: Any) -> Tensor:
    wide = x.float()
    wide = keep(wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps))
    return (wide if w is None else w * wide).to(x.dtype)


def _gemma(keep: Keep, x: Tensor, w: Tensor | None, eps: Any, offset: float = 1.0) -> Tensor:
    wide = x.float()
    wide = keep(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))
    return (wide if w is None else wide * (offset + w.float())).to(x.dtype)


def _by_hand(
    mean: Callable[[Tensor], Tensor], scale: Callable[[Tensor, Tensor], Tensor], *, turned: bool = False
) -> Norm:
    def norm(keep: Keep, x: Tensor, w: Tensor | None, eps: Any) -> Tensor:
        scaled = keep(scale(x, keep(mean(x)) + eps))
        return scaled if w is None else (w * scaled if turned else scaled * w)

    return norm


def _mean(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def _sum(x: Tensor) -> Tensor:
    return x.pow(2).sum(-1, keepdim=True)


def _over_root(x: Tensor, spread: Tensor) -> Tensor:
    return x / torch.sqrt(spread)


def _first_dim(keep: Keep, x: Tensor, w: Tensor | None, eps: Any) -> Tensor:
    scaled = x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + eps)
    return scaled if w is None else scaled * w


def _all_dims(keep: Keep, x: Tensor, w: Tensor | None, eps: Any) -> Tensor:
    scaled = x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + eps)
    return scaled if w is None else scaled * w


def _eps_outside(keep: Keep, x: Tensor, w: Tensor | None, eps: Any) -> Tensor:
    scaled = x / (torch.sqrt(_mean(x)) + eps)
    return scaled if w is None else scaled * w


def _eps_scaled(keep: Keep, x: Tensor, w: Tensor | None, eps: Any) -> Tensor:
    scaled = x * torch.rsqrt(torch.add(_mean(x), eps, alpha=2))
    return scaled if w is None else scaled * w


RMS: Mapping[str, Norm] = {
    "rms_norm": lambda keep, x, w, eps: F.rms_norm(x, x.shape[-1:], w, eps),
    "llama": _llama,
    "meta": _meta,
    "t5": _t5,
    "olmo": _olmo,
    "gemma": _gemma,
    "offset": lambda keep, x, w, eps: _gemma(keep, x, w, eps, 0.5),
    "rsqrt": _by_hand(_mean, lambda x, s: x * torch.rsqrt(s)),
    "sqrt": _by_hand(lambda x: torch.mean(x * x, dim=-1, keepdim=True), _over_root),
    "pow": _by_hand(_mean, lambda x, s: x * torch.pow(s, -0.5), turned=True),
    "reciprocal": _by_hand(lambda x: x.square().mean(-1, keepdim=True), lambda x, s: x * (1 / torch.sqrt(s))),
    "last_dim": _by_hand(lambda x: x.pow(2).mean(x.dim() - 1, keepdim=True), lambda x, s: x * torch.rsqrt(s)),
    "!sum": _by_hand(_sum, _over_root),
    "!square": _by_hand(lambda x: x.pow(4).mean(-1, keepdim=True), _over_root),
    "!abs": _by_hand(lambda x: x.abs().mean(-1, keepdim=True), _over_root),
    "!no_root": _by_hand(_mean, lambda x, s: x / s),
    "!first_dim": _first_dim,
    "!all_dims": _all_dims,
    "!eps_outside": _eps_outside,
    "!eps_alpha": _eps_scaled,
}


def _centred(
    variance: Callable[[Tensor, Tensor], Tensor], *, scaled_by: str = "sqrt", wide: bool = False
) -> Callable[..., Tensor]:
    def norm(keep: Keep, x: Tensor, w: Tensor | None, b: Tensor | None, eps: Any) -> Tensor:
        y = x.float() if wide else x
        mean = keep(y.mean(-1, keepdim=True))
        centred = keep(y - mean)
        spread = keep(variance(y, mean)) + eps
        scaled = centred / torch.sqrt(spread) if scaled_by == "sqrt" else centred * torch.rsqrt(spread)
        scaled = scaled.to(x.dtype)
        scaled = scaled if w is None else w * keep(scaled)
        return scaled if b is None else scaled + b

    return norm


def _wide_affine(keep: Keep, x: Tensor, w: Tensor | None, b: Tensor | None, eps: Any) -> Tensor:
    y = x.float()
    scaled = (y - y.mean(-1, keepdim=True)) / torch.sqrt(y.var(-1, unbiased=False, keepdim=True) + eps)
    scaled = scaled if w is None else w * keep(scaled)
    return (scaled if b is None else scaled + b).to(x.dtype)


def _operator(keep: Keep, x: Tensor, w: Tensor | None, b: Tensor | None, eps: Any) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def _squares(y: Tensor, mean: Tensor) -> Tensor:
    return (y - mean).pow(2).mean(-1, keepdim=True)


LAYER: Mapping[str, Callable[..., Tensor]] = {
    "layer_norm": _operator,
    "squares": _centred(_squares),
    "squares_rsqrt": _centred(_squares, scaled_by="rsqrt", wide=True),
    "var": _centred(lambda y, mean: y.var(-1, unbiased=False, keepdim=True)),
    "correction": _centred(lambda y, mean: y.var(-1, correction=0, keepdim=True), scaled_by="rsqrt"),
    "moments": _centred(lambda y, mean: y.pow(2).mean(-1, keepdim=True) - mean.pow(2), wide=True),
    "wide_affine": _wide_affine,
    "!mean_twice": _centred(lambda y, mean: _squares(y, y.mean(-1, keepdim=True))),
    "!mean_of_squares": _centred(lambda y, mean: (y - mean.pow(2)).pow(2).mean(-1, keepdim=True)),
    "!unbiased": _centred(lambda y, mean: y.var(-1, keepdim=True)),
    "!std": _centred(lambda y, mean: y.std(-1, unbiased=False, keepdim=True)),
    "!not_centred": _centred(lambda y, mean: y.pow(2).mean(-1, keepdim=True)),
    "!sum": _centred(lambda y, mean: (y - mean).pow(2).sum(-1, keepdim=True)),
    "!global": _centred(lambda y, mean: y.var(unbiased=False)),
    "!first_dim": _centred(lambda y, mean: y.var(0, unbiased=False, keepdim=True)),
}
_OPERATOR_ODDS = {"rms_norm": 3.0, "layer_norm": 6.0}


def _odds(norms: Mapping[str, Any], **more: float) -> list[float]:
    known = {**_OPERATOR_ODDS, **more}
    return [known.get(n, 0.12 if n[0] == "!" else 1.0) for n in norms]


def _eps(sketch: Sketch) -> Any:
    return sketch.pick({"eps=1e-6": 1e-6, "eps=1e-5": 1e-5, "eps=0.1": 0.1, "eps=1": 1}, (3, 3, 3, 1))


def _over_dims(sketch: Sketch, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The normalized sizes of an operator: the last one, or more."""
    dims = 2 if len(shape) > 1 and sketch.chance(0.25) else 1
    sketch.tags.add(f"dims={dims}")
    return shape[len(shape) - dims :]


def _affine_sizes(sketch: Sketch, sizes: tuple[int, ...], by_hand: bool) -> tuple[int, ...]:
    """The shape of a weight: the normalized sizes, or by hand something that broadcasts."""
    if not by_hand or not sketch.chance(0.12):
        return sizes
    broad = {"!broad": (7,)} if sizes == (1,) else {}
    return sketch.pick({"!one": (1,), "!scalar": (), "!matrix": (1, *sizes), **broad})


def _stream(sketch: Sketch, by_hand: bool) -> tuple[int, ...]:
    one = by_hand and sketch.chance(0.06, "!one_wide")
    shape = (*sketch.rows, 1 if one else WIDTH)
    sketch.stream(*shape)
    return shape


def _summand(sketch: Sketch, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What is added to the stream; returns the shape of the sum."""
    shapes = {
        "same": shape,
        "one_row": (*(1 for _ in shape[:-1]), shape[-1]),
        "!one_column": (*shape[:-1], 1),
        "wider": (*(3 if n == 1 else n for n in shape[:-1]), shape[-1] if shape[-1] > 1 else 4),
        "!vector": shape[-1:],
        "!scalar": (),
    }
    added = sketch.pick(shapes, (12, 1, 1, 1, 0.5, 0.5))
    sketch.stream(*added, dtype=torch.float32 if sketch.chance(0.06, "mixed_dtypes") else None)
    return tuple(torch.broadcast_shapes(shape, added))


def _weight_dtype(sketch: Sketch) -> torch.dtype | None:
    return torch.float32 if sketch.chance(0.15, "mixed_weight") else None


def _operator_dtype(sketch: Sketch) -> torch.dtype:
    """A dtype of weight and bias that the operator takes: that of the sum, or float32 for a narrow one."""
    total = (
        torch.promote_types(sketch.dtype, torch.float32) if "mixed_dtypes" in sketch.tags else sketch.dtype
    )
    return torch.float32 if total is torch.bfloat16 and sketch.chance(0.4, "mixed_weight") else total


def _rms(summed: bool) -> Callable[[Random], Spelling]:
    def draw(rng: Random) -> Spelling:
        sketch = Sketch(rng)
        norm: Norm = sketch.pick(RMS, _odds(RMS))
        operator = "rms_norm" in sketch.tags
        shape = _stream(sketch, not operator)
        if summed:
            shape = _summand(sketch, shape)
        eps = None if operator and sketch.chance(0.2, "eps=None") else _eps(sketch)
        if operator:
            sizes = _over_dims(sketch, shape)
            norm = lambda keep, x, w, eps: F.rms_norm(x, sizes, w, eps)  # noqa: E731
        else:
            sizes = shape[-1:]
        weighted = not sketch.chance(0.25, "no_weight")
        if weighted:
            sketch.tags.add("weight")
            sketch.weight(*_affine_sizes(sketch, sizes, not operator), dtype=_weight_dtype(sketch))
        swapped = sketch.chance(0.4, "swapped")
        alpha = 2 if summed and sketch.chance(0.04, "!alpha") else 1

        def program(keep: Keep, x: Tensor, *rest: Tensor) -> Tensor:
            if summed:
                residual = rest[0]
                x = keep(
                    torch.add(residual, x, alpha=alpha) if swapped else torch.add(x, residual, alpha=alpha)
                )
            return norm(keep, x, rest[-1] if weighted else None, eps)

        return sketch.spelling(program, escape=0.25)

    return draw


def _layer(summed: bool) -> Callable[[Random], Spelling]:
    def draw(rng: Random) -> Spelling:
        sketch = Sketch(rng)
        norm = sketch.pick(LAYER, _odds(LAYER))
        operator = "layer_norm" in sketch.tags
        shape = _stream(sketch, not operator)
        if summed:
            shape = _summand(sketch, shape)
        eps = _eps(sketch)
        sizes = _over_dims(sketch, shape) if operator else shape[-1:]
        if operator:
            norm = lambda keep, x, w, b, eps: F.layer_norm(x, sizes, w, b, eps)  # noqa: E731
        has_weight = not sketch.chance(0.25, "no_weight")
        has_bias = not sketch.chance(0.25, "no_bias")
        dtype = _operator_dtype(sketch) if operator else _weight_dtype(sketch)
        for given, tag in ((has_weight, "weight"), (has_bias, "bias")):
            if given:
                sketch.tags.add(tag)
                sketch.weight(*_affine_sizes(sketch, sizes, not operator), dtype=dtype)
        swapped = sketch.chance(0.4, "swapped")

        def program(keep: Keep, x: Tensor, *rest: Tensor) -> Tensor:
            if summed:
                x = keep(rest[0] + x if swapped else x + rest[0])
            w = rest[1 if summed else 0] if has_weight else None
            return norm(keep, x, w, rest[-1] if has_bias else None, eps)

        return sketch.spelling(program, escape=0.25)

    return draw


def _dropout(sketch: Sketch) -> float:
    return sketch.pick({"no_dropout": 0.0, "dropout": 0.25, "dropout=0.5": 0.5}, (4, 4, 1))


def _dropout_add(rng: Random) -> Spelling:
    sketch = Sketch(rng)
    shape = _stream(sketch, True)
    dropout = _dropout(sketch)
    has_first = sketch.chance(0.6, "first_bias") if dropout else True
    if has_first:
        sketch.tags.add("first_bias")
        sizes = {"whole": shape[-1:], "!one": (1,), "!matrix": (1, *shape[-1:]), "!broad": (4,)}
        first = sketch.pick(sizes, (12, 1, 1, 1))
        sketch.weight(*first)
        shape = tuple(torch.broadcast_shapes(shape, first))
    else:
        sketch.tags.add("no_first_bias")
    shape = _summand(sketch, shape)
    eps, sizes = _eps(sketch), _over_dims(sketch, shape)
    has_weight, has_shift = not sketch.chance(0.2, "no_weight"), not sketch.chance(0.2, "no_shift")
    dtype = _operator_dtype(sketch)
    for given, tag in ((has_weight, "weight"), (has_shift, "shift")):
        if given:
            sketch.tags.add(tag)
            sketch.weight(*sizes, dtype=dtype)
    swapped, after = sketch.chance(0.4, "swapped"), sketch.chance(0.05, "!dropout_after")

    def program(keep: Keep, x: Tensor, *rest: Tensor) -> Tensor:
        given = list(rest)
        y = keep(x + given.pop(0)) if has_first else x
        if dropout and not after:
            y = keep(F.dropout(y, dropout))
        residual = given.pop(0)
        y = keep(residual + y if swapped else y + residual)
        if dropout and after:
            y = F.dropout(y, dropout)
        w = given.pop(0) if has_weight else None
        return F.layer_norm(y, sizes, w, given.pop(0) if has_shift else None, eps)

    return sketch.spelling(program, escape=0.25)


def _ids(sketch: Sketch, sizes: tuple[int, ...]) -> None:
    dtype = sketch.pick({"int64": torch.int64, "int32": torch.int32}, (5, 1))
    sketch.given(torch.randint(0, 2, sizes).to(dtype))


def _embedded(norms: Mapping[str, Any], rms: bool) -> Callable[[Random], Spelling]:
    def draw(rng: Random) -> Spelling:
        sketch = Sketch(rng)
        rows = sketch.rows[:2]
        norm = sketch.pick(norms, _odds(norms, layer_norm=20.0))
        operator = bool({"rms_norm", "layer_norm"} & sketch.tags)
        width = 1 if not operator and sketch.chance(0.05, "!one_wide") else WIDTH
        _ids(sketch, rows)
        sketch.weight(3, width)
        forms = {"tables=1": 1, "tables=2": 2, "tables=3": 3, "added": 0}
        form = sketch.pick(forms, (3, 0.3, 0.2, 3) if rms else (3, 3, 3, 2))
        padding = sketch.pick(
            {"no_padding": None, "padding": 1, "padding=0": 0, "padding=-1": -1}, (4, 2, 1, 1)
        )
        second_padding = 1 if sketch.chance(0.04, "!second_padding") else None
        shape = (*rows, width)
        for _ in range(form - 1):
            _ids(sketch, sketch.pick({"same_ids": rows, "one_id": rows[-1:]}, (4, 1)))
            sketch.weight(2, width)
        if not form:
            shape = _summand(sketch, shape)
        dropout, eps = _dropout(sketch), _eps(sketch)
        sizes = _over_dims(sketch, shape) if operator else shape[-1:]
        if operator:
            call = F.rms_norm if rms else F.layer_norm
            norm = lambda keep, x, *rest: call(x, sizes, *rest)  # noqa: E731
        count = (0 if sketch.chance(0.2, "no_weight") else 1) if rms else 2
        dtype = _operator_dtype(sketch) if operator else None
        for _ in range(count):
            sketch.tags.add("weight")
            sketch.weight(*_affine_sizes(sketch, sizes, not operator), dtype=dtype)
        scaled = 2.0 if sketch.chance(0.05, "!scaled") else None
        swapped = sketch.chance(0.3, "swapped")

        def program(keep: Keep, ids: Tensor, table: Tensor, *rest: Tensor) -> Tensor:
            given = list(rest)
            total = keep(F.embedding(ids, table, padding))
            total = total * scaled if scaled else total
            for _ in range(form - 1):
                positions = given.pop(0)
                more = F.embedding(positions, given.pop(0), second_padding)
                total = keep(more + total if swapped else total + more)
            if not form:
                added = given.pop(0)
                total = keep(added + total if swapped else total + added)
            total = keep(F.dropout(total, dropout)) if dropout else total
            affine = [given.pop(0) for _ in range(count)]
            return norm(keep, total, *affine, *([None] * ((1 if rms else 2) - count)), eps)

        return sketch.spelling(program, escape=0.25, alias=0.15)

    return draw


_LAYER_OPERATOR = {n: f for n, f in LAYER.items() if n in ("layer_norm", "squares", "var")}
_EPS = frozenset({"eps=1e-6", "eps=1e-5", "eps=0.1", "eps=1"})
_ALL = COMMON | _EPS | {"dims=1", "dims=2", "weight", "no_weight", "escape"}
_SUMS = frozenset({"same", "one_row", "swapped"})


def _named(norms: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(n for n in norms if n[0] != "!")


_NO_ESCAPE = frozenset({"escape"})
FAMILIES: tuple[Family, ...] = (
    GROUP_NORM,
    Family("rms_norm", _rms(False), (_ALL | _named(RMS) | {"eps=None"}) - _NO_ESCAPE),
    Family("add_rms_norm", _rms(True), _ALL | _named(RMS) | _SUMS | {"eps=None"}),
    Family("layer_norm", _layer(False), (_ALL | _named(LAYER) | {"bias", "no_bias"}) - _NO_ESCAPE),
    Family("add_layer_norm", _layer(True), _ALL | _named(LAYER) | _SUMS | {"bias", "no_bias"}),
    Family(
        "dropout_add_layer_norm",
        _dropout_add,
        _ALL | _SUMS | {"dropout", "no_dropout", "first_bias", "no_first_bias", "shift", "no_shift"},
    ),
    Family(
        "embedding_layer_norm",
        _embedded(_LAYER_OPERATOR, rms=False),
        (_ALL - {"no_weight"})
        | {"tables=1", "tables=2", "tables=3", "added", "padding", "no_padding", "dropout", "no_dropout"},
    ),
    Family(
        "embedding_rms_norm",
        _embedded(RMS, rms=True),
        _ALL | _named(RMS) | {"tables=1", "added", "padding", "no_padding", "dropout", "no_dropout"},
    ),
)
