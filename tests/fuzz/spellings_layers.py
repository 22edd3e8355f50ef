"""Spellings of rotary embeddings and pooling, and the families of all layers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from . import spellings_attention, spellings_attention_variants, spellings_convolution, spellings_losses
from .references import Family, Spelling
from .spelling_drawing import Drawing
from .spellings_grids import MIX_FFN

Step = Callable[[Tensor], Tensor]
Halves = tuple[Tensor, Tensor]

WITHOUT_SPELLINGS = {"attention_unusual": "it proposes nothing: it reports attention that no rule knows"}
"""Rules that match nothing, with the reason."""


def _halving(d: Drawing, width: int) -> Callable[[Tensor], Halves]:
    middle = width // 2
    return d.mostly(
        {
            "chunk": lambda x: tuple(x.chunk(2, dim=-1)),
            "split": lambda x: tuple(x.split([middle, width - middle], dim=-1)),
            "slices": lambda x: (x[..., :middle], x[..., middle:]),
            "slices_size": lambda x: (x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]),
        },
        {
            "swapped_halves": lambda x: (x[..., middle:], x[..., :middle]),
            "cut_elsewhere": lambda x: (x[..., : middle - 1], x[..., middle - 1 :]),
        },
        0.08,
    )


def _pairing(d: Drawing) -> Callable[[Tensor], Halves]:
    def selected(x: Tensor) -> Halves:
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        return pairs[..., 0], pairs[..., 1]

    return d.mostly(
        {
            "steps": lambda x: (x[..., ::2], x[..., 1::2]),
            "unbind": lambda x: tuple(x.reshape(*x.shape[:-1], -1, 2).unbind(-1)),
            "unflatten": lambda x: tuple(x.unflatten(-1, (-1, 2)).unbind(-1)),
            "select": selected,
        },
        {
            "swapped_pairs": lambda x: (x[..., 1::2], x[..., ::2]),
            "pairs_of_halves": lambda x: tuple(x.reshape(*x.shape[:-1], 2, -1).unbind(-2)),
        },
        0.08,
    )


def _interleaved(d: Drawing) -> Callable[[Tensor, Tensor], Tensor]:
    return d.mostly(
        {
            "flatten": lambda a, b: torch.stack((a, b), dim=-1).flatten(-2),
            "reshape": lambda a, b: torch.stack([a, b], -1).reshape(*a.shape[:-1], -1),
        },
        {"stacked_before": lambda a, b: torch.stack((a, b), dim=-2).flatten(-2)},
        0.08,
    )


def _angle_sizes(d: Drawing, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of angles for a tensor of these sizes: over the sequence, or the batch too, or less."""
    full = d.any([sizes[-2:], (sizes[0], 1, *sizes[-2:]) if len(sizes) == 4 else sizes, sizes])
    return d.broadcast(*full)


def _rotating(d: Drawing, width: int) -> Step:
    """(a, b) made (-b, a)."""
    halves = width % 2 or d.chance(0.6)
    d.tags.add("halves" if halves else "interleaved")
    part = _halving(d, width) if halves else _pairing(d)
    join = (lambda a, b: torch.cat((a, b), dim=-1)) if halves else _interleaved(d)
    turn = d.mostly(
        {"neg": lambda a, b: join(-b, a), "neg_method": lambda a, b: join(b.neg(), a)},
        {"backwards": lambda a, b: join(b, -a), "unsigned": lambda a, b: join(b, a)},
        0.08,
    )
    return lambda x: turn(*part(x))


def _sizes(d: Drawing, even: float = 0.9) -> tuple[int, ...]:
    width = d.any([4, 8, 2]) if d.chance(even) else 5
    if width == 5:
        d.tags.add("odd")
    lead = d.any([(2, 2), (2, 3), (2,), (1, 2)])
    return (*lead, d.any([3, 4, 1]), width)


def _summing(d: Drawing) -> Callable[..., Tensor]:
    return d.mostly(
        {
            "sum": lambda x, t, c, s: x * c + t * s,
            "sum_left": lambda x, t, c, s: c * x + s * t,
            "sum_swapped": lambda x, t, c, s: t * s + x * c,
        },
        {
            "difference": lambda x, t, c, s: x * c - t * s,
            "alpha": lambda x, t, c, s: torch.add(x * c, t * s, alpha=2),
            "same_angle": lambda x, t, c, s: x * c + t * c,
        },
        0.1,
    )


def _wide(d: Drawing, f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A computation in the precision of its operand, or in float32."""
    return d.one({"as_it_is": f, "upcast": lambda x, *rest: f(x.float(), *rest).to(x.dtype)})


def _rotary(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    sizes = _sizes(d)
    turn, total = _rotating(d, sizes[-1]), _summing(d)
    angles = [d.tensor(*_angle_sizes(d, sizes)) for _ in range(2)]
    if d.chance(0.1, "wide_angles"):
        angles = [a.float() for a in angles]
    apply = _wide(d, lambda x, c, s: total(x, d.inner(turn(x)), c, s))
    inputs = (d.tensor(*sizes), *angles)
    return d.spelling(apply, inputs, symbolic=d.batches(inputs))


def _rotary_pair(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    heads, length, width = d.any([2, 4]), d.any([3, 4]), d.any([4, 8])
    sizes = (2, heads, length, width)
    turn, total = _rotating(d, width), _summing(d)
    other = _rotating(d, width) if d.chance(0.1, "two_ways") else turn
    apply = {t: _wide(d, lambda x, c, s, t=t: total(x, d.inner(t(x)), c, s)) for t in {turn, other}}
    angles = [d.tensor(*_angle_sizes(d, sizes)) for _ in range(2)]
    crossed = d.chance(0.1, "other_angles")
    shared = d.chance(0.1, "shared_operand")
    meet: Callable[..., Tensor] = d.one(
        {
            "operator": F.scaled_dot_product_attention,
            "by_hand": lambda q, k, v: torch.softmax(q @ k.mT * 0.3, -1) @ v,
            "scaled": lambda q, k, v: torch.softmax((q * 0.3) @ k.transpose(2, 3), -1) @ v,
            "einsum": lambda q, k, v: torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1) @ v,
            "product": lambda q, k, v: q @ k.mT,
        }
    )
    first = d.chance(0.4, "keys_first")

    def attend(q: Tensor, k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
        k = q if shared else k
        theirs = (s, c) if crossed else (c, s)
        if first:
            k = apply[other](k, *theirs)
        q = apply[turn](q, c, s)
        return meet(q, k if first else apply[other](k, *theirs), v)

    inputs = (*(d.tensor(*sizes) for _ in range(3)), *angles)
    return d.spelling(attend, inputs, symbolic={} if shared else d.batches(inputs))


def _turning(d: Drawing) -> Callable[..., Halves]:
    return d.mostly(
        {
            "turn": lambda a, b, c, s: (a * c - b * s, b * c + a * s),
            "turn_left": lambda a, b, c, s: (c * a - s * b, s * a + c * b),
        },
        {
            "turn_back": lambda a, b, c, s: (a * c + b * s, b * c - a * s),
            "turn_swapped": lambda a, b, c, s: (a * s - b * c, b * s + a * c),
            "turn_wrong": lambda a, b, c, s: (a * c - b * s, a * c + b * s),
        },
        0.12,
    )


def _rotary_split(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    sizes = _sizes(d, even=1.0)
    half = (*sizes[:-1], sizes[-1] // 2)
    angles = [d.tensor(*_angle_sizes(d, half)) for _ in range(2)]
    if d.chance(0.1, "wide_angles"):
        angles = [a.float() for a in angles]
    halves = d.chance(0.5, "halves")
    if not halves:
        d.tags.add("interleaved")
    part = _halving(d, sizes[-1]) if halves else _pairing(d)
    if "cut_elsewhere" in d.tags:
        angles = [d.tensor(1), d.tensor(1)]
        part = _halving(d, sizes[-1])
    join = (lambda a, b: torch.cat((a, b), dim=-1)) if halves else _interleaved(d)
    turn = _turning(d)
    apply = _wide(d, lambda x, c, s: join(*(d.inner(t) for t in turn(*part(x), c, s))))
    inputs = (d.tensor(*sizes), *angles)
    return d.spelling(apply, inputs, symbolic=d.batches(inputs))


def _rotary_cached(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    sizes = _sizes(d, even=1.0)
    half = (*sizes[:-1], sizes[-1] // 2)
    last = 3 if d.chance(0.1, "more_than_two") else 2
    cache = d.tensor(*_angle_sizes(d, half), last, dtype=torch.float32 if d.chance(0.5) else None)
    order = d.mostly({"cos_sin": (0, 1)}, {"sin_cos": (1, 0)})
    turn = _turning(d)
    flatten: Step = d.one(
        {"flatten": lambda x: x.flatten(-2), "reshape": lambda x: x.reshape(*x.shape[:-2], -1)}
    )

    once = d.chance(0.1, "picked_once")

    def rotate(x: Tensor, cache: Tensor) -> Tensor:
        pairs = x.reshape(*x.shape[:-1], -1, 2)

        def picked() -> list[Tensor]:
            return [pairs[..., 0], pairs[..., 1], *(cache[..., i] for i in order)]

        values = picked()
        both = [turn(*(values if once else picked()))[i] for i in range(2)]
        return flatten(torch.stack([d.inner(t) for t in both], -1))

    dims = {0: (0,)} if sizes[0] > 1 and cache.dim() == 3 else {}
    return d.spelling(_wide(d, rotate), (d.tensor(*sizes), cache), symbolic=dims, weights=d.any([0, 1]))


def _rotary_complex(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    sizes = _sizes(d, even=1.0)
    half = _angle_sizes(d, (*sizes[:-1], sizes[-1] // 2))
    turns = torch.polar(torch.ones(half), torch.randn(half))
    if d.chance(0.08, "real_turns"):
        turns = torch.randn(half)
    times: Callable[[Tensor, Tensor], Tensor] = d.mostly(
        {"times": lambda x, t: x * t, "times_left": lambda x, t: t * x},
        {"conjugate": lambda x, t: x * t.conj(), "divided": lambda x, t: x / t},
    )
    keep = d.chance(0.9, "cast_back")
    double = d.chance(0.05, "double")

    def rotate(x: Tensor, turns: Tensor) -> Tensor:
        wide = x.double() if double else x.float()
        pairs = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2))
        y = torch.view_as_real(d.inner(times(pairs, turns))).flatten(x.dim() - 1)
        return y.to(x.dtype) if keep else y

    inputs = (d.tensor(*sizes), turns)
    return d.spelling(rotate, inputs, symbolic=d.batches(inputs), weights=d.any([0, 1]))


def _images(d: Drawing, *, even: bool = False) -> Tensor:
    rows = d.any([4, 6, 8] if even else [4, 5, 6])
    columns = rows if d.chance(0.4, "square") else d.any([4, 8] if even else [3, 4, 8])
    return d.tensor(*d.any([(2, 3), (1, 2), (2, 2)]), rows, columns)


def _pool_global(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    x = _images(d)
    pool: Step = d.mostly(
        {
            "mean": lambda x: x.mean((2, 3)),
            "mean_keepdim": lambda x: x.mean((-2, -1), keepdim=True),
            "mean_turned": lambda x: x.mean([3, 2]),
            "mean_turned_keepdim": lambda x: x.mean((-1, -2), keepdim=True),
            "rows_then_columns": lambda x: x.mean(3).mean(2),
            "columns_then_rows": lambda x: x.mean(2).mean(-1),
            "twice_keepdim": lambda x: x.mean(-1, keepdim=True).mean(-2, keepdim=True),
            "flatten": lambda x: x.flatten(2).mean(-1),
            "reshape": lambda x: x.reshape(x.shape[0], x.shape[1], -1).mean(2),
        },
        {
            "other_dims": lambda x: x.mean((1, 2)),
            "batch": lambda x: x.mean((0, 3)),
            "total": lambda x: x.sum((2, 3)),
            "flat_keepdim": lambda x: x.flatten(2).mean(-1, keepdim=True),
            "wider": lambda x: x.mean((2, 3), dtype=torch.float64),
            "half_keepdim": lambda x: x.mean(3, keepdim=True).mean(2),
            "everything": lambda x: x.mean((1, 2, 3)),
            "flatten_channels": lambda x: x.flatten(1, 2).mean(-1),
            "three": lambda x: x[0].mean((1, 2)),
            "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
        },
        0.25,
    )
    return d.spelling(pool, (x,), symbolic={0: d.any([(0,), (0, 2), (2, 3)])})


def _pool_slices(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    x = _images(d, even=d.chance(0.85, "even"))
    corners = [(0, 0), (0, 1), (1, 0), (1, 1)]
    if d.chance(0.1, "wrong_corners"):
        corners = d.any([[(0, 0), (0, 1), (1, 0), (1, 0)], [(0, 0), (0, 0), (1, 1), (1, 1)]])
    order = d.any([corners, [corners[i] for i in (0, 2, 1, 3)], d.rng.sample(corners, 4)])
    nested = d.chance(0.4, "nested")
    scale: Step = d.mostly(
        {"divided": lambda x: x / 4, "times": lambda x: x * 0.25, "times_left": lambda x: 0.25 * x},
        {"halved": lambda x: x / 2, "fifth": lambda x: x * 0.2},
    )
    equal = x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0
    pick: Callable[[Tensor, int, int], Tensor] = d.mostly(
        {"full": lambda x, i, j: x[:, :, i::2, j::2], "ellipsis": lambda x, i, j: x[..., i::2, j::2]},
        {"other_dims": lambda x, i, j: x[:, i::2, j::2]}
        if x.shape[1] == 2
        else {"to": lambda x, i, j: x[..., i:3:2, j:3:2]},
    )

    def pool(x: Tensor) -> Tensor:
        a, b, c, e = (pick(x, i, j) for i, j in order)
        return scale(d.inner((a + b) + (c + e) if nested else a + b + c + e))

    if not equal or "to" in d.tags:
        # Every other row of an odd number is one more than the rows between: only a size of one broadcasts.
        x = d.tensor(2, 2, 3, 3)
    return d.spelling(pool, (x,), symbolic={0: (0,)})


def _pool_windows(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    x = _images(d)
    height, width, down, across = (d.any([1, 2, 3]) for _ in range(4))
    if d.chance(0.3, "same_sizes"):
        height = width = down = across = 2
    if (height, width) != (down, across):
        d.tags.add("overlapping")
    dims = d.mostly(
        {"images": (2, 3), "images_negative": (-2, -1)}, {"turned": (3, 2), "channels": (1, 2)}, 0.15
    )
    reduce: Step = d.mostly(
        {
            "mean": lambda w: w.mean((-2, -1)),
            "mean_turned": lambda w: w.mean((5, 4)),
            "one_by_one": lambda w: w.mean(-1).mean(-1),
        },
        {
            "total": lambda w: w.sum((-2, -1)),
            "keepdim": lambda w: w.mean((-2, -1), keepdim=True),
            "other_dims": lambda w: w.mean((2, 3)),
            "largest": lambda w: w.amax((-2, -1)),
        },
    )
    if "channels" in d.tags:
        height = down = 1

    def pool(x: Tensor) -> Tensor:
        # A window has a dimension of its own at the end, so that dims counted from there move.
        first, second = (dim % 4 for dim in dims)
        return reduce(d.inner(x.unfold(first, height, down).unfold(second, width, across)))

    return d.spelling(pool, (x,), symbolic={0: (0,)})


def _pool_blocks(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    height, width = d.any([(2, 2), (2, 3), (3, 1), (4, 2)])
    rows, columns = d.any([1, 2, 3]), d.any([2, 3])
    batch, channels = d.any([(2, 3), (1, 2), (2, 2)])
    x = d.tensor(batch, channels, rows * height, columns * width)
    area = height * width
    cut: Step = d.mostly(
        {
            "reshape": lambda x: x.reshape(x.shape[0], channels, rows, height, columns, width),
            "view": lambda x: x.view(x.shape[0], channels, rows, height, columns, width),
        },
        {
            "cut_other": lambda x: x.reshape(channels, x.shape[0], rows, height, columns, width),
            "unflatten": lambda x: x.unflatten(3, (columns, width)).unflatten(2, (rows, height)),
        },
    )
    reduce: Step = d.mostly(
        {
            "mean": lambda x: x.mean((3, 5)),
            "mean_turned": lambda x: x.mean((-1, 3)),
            "columns_first": lambda x: x.mean(5).mean(3),
            "rows_first": lambda x: x.mean(3).mean(4),
            "sum_divided": lambda x: x.sum((3, 5)) / area,
            "sum_turned": lambda x: x.sum((5, 3)) / area,
            "sum_times": lambda x: x.sum((3, 5)) * (1 / area),
        },
        {
            "strided": lambda x: x.mean((2, 4)),
            "total": lambda x: x.sum((3, 5)),
            "keepdim": lambda x: x.mean((3, 5), keepdim=True),
            "largest": lambda x: x.amax((3, 5)),
            "wrong_area": lambda x: x.sum((3, 5)) / (area + 1),
        },
    )
    return d.spelling(lambda x: reduce(d.inner(cut(x))), (x,), symbolic=d.batches([x]))


_ROTARY = frozenset(
    {"halves", "interleaved", "bf16", "as_it_is", "upcast", "broadcast", "lower_rank", "escape"}
)
_POOLING = frozenset({"mean", "mean_turned", "bf16", "f64", "symbolic", "make_fx"})

FAMILIES: tuple[Family, ...] = (
    *spellings_attention.FAMILIES,
    *spellings_attention_variants.FAMILIES,
    *spellings_convolution.FAMILIES,
    *spellings_losses.FAMILIES,
    MIX_FFN,
    Family(
        "rotary",
        _rotary,
        _ROTARY
        | {"chunk", "split", "slices", "steps", "unbind", "select", "symbolic", "make_fx", "wide_angles"},
    ),
    Family(
        "rotary_pair", _rotary_pair, _ROTARY | {"operator", "by_hand", "einsum", "product", "shared_operand"}
    ),
    Family(
        "rotary_split", _rotary_split, _ROTARY | {"chunk", "split", "slices", "steps", "unbind", "select"}
    ),
    Family("rotary_cached", _rotary_cached, frozenset({"bf16", "as_it_is", "upcast", "flatten", "reshape"})),
    Family(
        "rotary_complex", _rotary_complex, frozenset({"bf16", "times", "times_left", "broadcast", "symbolic"})
    ),
    Family(
        "avg_pool_global",
        _pool_global,
        _POOLING | {"mean_keepdim", "rows_then_columns", "columns_then_rows", "twice_keepdim", "flatten"},
    ),
    Family(
        "avg_pool_slices", _pool_slices, frozenset({"divided", "times", "nested", "bf16", "f64", "symbolic"})
    ),
    Family("avg_pool_windows", _pool_windows, _POOLING | {"one_by_one", "overlapping", "same_sizes"}),
    Family(
        "avg_pool_blocks",
        _pool_blocks,
        _POOLING | {"columns_first", "rows_first", "sum_divided", "sum_turned", "sum_times"},
    ),
)
