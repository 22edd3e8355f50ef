"""Spellings of activations that are kinds of their own, and of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from .composing import COMMON, Keep, Sketch
from .references import Family, Spelling
from .spellings_products import GELUS

Step = Callable[[Tensor], Tensor]
_UNARY = COMMON - {"parameter", "constant"}


def _value(sketch: Sketch) -> None:
    """One operand of any rank, rarely of whole numbers; sometimes a transposed or an expanded one."""
    rank = sketch.rng.choice((0, 1, 2, 2, 3, 4))
    sketch.tags.add(f"rank={rank}")
    sizes = tuple(sketch.rng.choice((1, 3, 3)) for _ in range(rank))
    if sketch.chance(0.05, "!integer"):
        sketch.given(torch.randint(-2, 3, sizes))
        return
    if rank > 1 and sketch.chance(0.15, "strided"):
        sketch.given(torch.randn(sizes[::-1]).to(sketch.dtype).permute(*reversed(range(rank))))
        return
    sketch.stream(*sizes)


def _unary(steps: Mapping[str, Step]) -> Callable[[Random], Spelling]:
    def draw(rng: Random) -> Spelling:
        sketch = Sketch(rng)
        _value(sketch)
        step = sketch.pick(steps)
        return sketch.spelling(lambda keep, x: step(x), escape=0.0)

    return draw


SIGMOIDS: Mapping[str, Step] = {
    "exp": lambda x: 1 / (1 + torch.exp(-x)),
    "reciprocal": lambda x: torch.reciprocal(torch.exp(-x) + 1),
    "!pow": lambda x: (1 + torch.exp(-x)).pow(-1),
    "exp_over": lambda x: torch.exp(x) / (1 + torch.exp(x)),
    "power_over": lambda x: (y := x.exp()) / (y + 1),
    "tanh": lambda x: 0.5 * (torch.tanh(0.5 * x) + 1),
    "tanh_halved": lambda x: (1 + torch.tanh(x / 2)) / 2,
    "tanh_shifted": lambda x: torch.tanh(x * 0.5) * 0.5 + 0.5,
    "!tanh_whole": lambda x: 0.5 * (torch.tanh(x) + 1),
    "!two": lambda x: 1 / (2 + torch.exp(-x)),
    "!twice": lambda x: 2 / (1 + torch.exp(-x)),
    "!positive": lambda x: 1 / (1 + torch.exp(x)),
    "!alpha": lambda x: 1 / torch.add(torch.exp(-x), 1, alpha=2),
    "!exp2": lambda x: 1 / (1 + torch.exp2(-x)),
    "!shifted": lambda x: torch.tanh(x * 0.5) * 0.5 + 0.25,
}
HARD: Mapping[str, Step] = {
    "hardsigmoid": F.hardsigmoid,
    "relu6": lambda x: F.relu6(x + 3) / 6,
    "relu6_sixth": lambda x: F.relu6(3 + x) * (1 / 6),
    "rounded_sixth": lambda x: F.relu6(x + 3.0) * 0.16666667,
    "hardtanh": lambda x: F.hardtanh(x + 3, 0.0, 6.0) / 6,
    "clamp": lambda x: (x + 3).clamp(0, 6) / 6,
    "clamp_twice": lambda x: (x + 3).clamp(min=0).clamp(max=6) / 6.0,
    "relu_clamp": lambda x: torch.relu(x + 3).clamp(max=6) / 6,
    "scaled": lambda x: (x / 6 + 0.5).clamp(0, 1),
    "scaled_sixth": lambda x: (x * (1 / 6) + 0.5).clamp(0, 1),
    "shifted": lambda x: ((x + 3) / 6).clamp(0, 1),
    "!keras": lambda x: (0.2 * x + 0.5).clamp(0, 1),
    "!five": lambda x: F.relu6(x + 3) / 5,
    "!two": lambda x: F.relu6(x + 2) / 6,
    "!bounds": lambda x: (x + 3).clamp(0, 5) / 6,
    "!below": lambda x: (x / 6 + 0.5).clamp(-1, 1),
    "!half": lambda x: (x / 6 + 0.25).clamp(0, 1),
    "!inexact": lambda x: F.relu6(x + 3) * 0.1667,
    "!alpha": lambda x: F.relu6(torch.add(x, 3, alpha=2)) / 6,
}


def _softmax(rng: Random) -> Spelling:
    sketch = Sketch(rng)
    _value(sketch)
    rank = sketch.operands[0].dim()
    dim = sketch.rng.randrange(-max(rank, 1), max(rank, 1))
    sketch.tags.add("negative_dim" if dim < 0 else "front_dim")
    if rank and dim not in (-1, rank - 1):
        sketch.tags.add("inner_dim")
    other = 0 if rank and dim % rank else rank - 1

    def exp(x: Tensor, top: Tensor | None = None) -> Tensor:
        powers = torch.exp(x if top is None else x - top)
        return powers / powers.sum(dim, keepdim=True)

    forms: dict[str, Step] = {
        "softmax": lambda x: torch.softmax(x, dim),
        "F.softmax": lambda x: F.softmax(x, dim=dim),
        "in_float32": lambda x: F.softmax(x, dim=dim, dtype=torch.float32).to(x.dtype),
        "of_float32": lambda x: F.softmax(x.float(), dim=dim).type_as(x),
        "exp": exp,
        "amax": lambda x: exp(x, x.amax(dim, keepdim=True)),
        "max": lambda x: exp(x, x.max(dim, keepdim=True).values),
        "amax_detached": lambda x: exp(x, x.amax(dim, keepdim=True).detach()),
        "!kept_float32": lambda x: F.softmax(x, dim=dim, dtype=torch.float32),
        "!log": lambda x: F.log_softmax(x, dim),
        "!softmin": lambda x: F.softmin(x, dim),
        "!no_keepdim": lambda x: (y := torch.exp(x)) / y.sum(0),
        "!other_sum": lambda x: (y := torch.exp(x)) / y.sum(other, keepdim=True),
        "!other_max": lambda x: exp(x, x.amax(other, keepdim=True)),
        "!all": lambda x: (y := torch.exp(x)) / y.sum(),
        "!mean": lambda x: (y := torch.exp(x)) / y.mean(dim, keepdim=True),
        "!temperature": lambda x: torch.softmax(x / 2, dim),
        "!exp2": lambda x: (y := torch.exp2(x)) / y.sum(dim, keepdim=True),
        "!min": lambda x: exp(x, x.amin(dim, keepdim=True)),
    }
    if rank > 1:
        forms["!two_dims"] = lambda x: (y := torch.exp(x)) / y.sum((0, rank - 1), keepdim=True)
    # Only one that the operand can be computed with.
    if "!integer" in sketch.tags:
        forms = {name: form for name, form in forms.items() if "exp" in name or name in ("amax", "max")}
    step = sketch.pick(forms)
    return sketch.spelling(lambda keep, x: step(x), escape=0.0)


_SPREAD = math.sqrt(2.0)


def _sample(rng: Random) -> Spelling:
    sketch = Sketch(rng)
    rank = rng.choice((1, 2, 3))
    sizes = tuple(rng.choice((1, 3, 8)) for _ in range(rank))
    std: float = sketch.pick({"std=1": 1.0, "std=0.02": 0.02, "std=3": 3.0})
    mean: float = sketch.pick({"mean=0": 0.0, "mean": 0.5 * std}, (2, 1))
    bounds = {
        "two_sides": (-2.0 * std, 2.0 * std),
        "one_side": (mean, mean + 3.0 * std),
        "narrow": (-0.01 * std, 0.02 * std),
        "tail": (mean + 4.0 * std, mean + 5.0 * std),
        "far_tail": (mean + 7.5 * std, mean + 9.0 * std),
        "whole": (-2, 2),
    }
    low, high = sketch.pick(bounds)
    ends = [math.erf((bound - mean) / (std * _SPREAD)) for bound in (low, high)]
    form = sketch.pick(
        dict.fromkeys(("init", "uniform", "!moved", "!one_bound", "!rounded"), ""), (6, 4, 1, 1, 1)
    )
    del form
    if "!moved" in sketch.tags:
        ends[0] -= 0.01
    if "!rounded" in sketch.tags:
        ends = [e * (1 - 5e-10) for e in ends]
    transposed = rank == 2 and sketch.chance(0.3, "transposed")
    value = torch.empty(sizes).to(sketch.dtype)
    sketch.given(value.t() if transposed else value)
    leave_mean = mean == 0.0 and sketch.chance(0.5, "no_mean")

    def cumulative(x: float) -> float:
        return (1.0 + math.erf(x / math.sqrt(2.0))) / 2.0

    def init(tensor: Tensor) -> Tensor:
        """As torch and timm have it."""
        start, end = (2 * cumulative((bound - mean) / std) - 1 for bound in (low, high))
        return tensor.uniform_(start, end).erfinv_().mul_(std * _SPREAD).add_(mean).clamp_(low, high)

    def program(keep: Keep, empty: Tensor) -> Tensor:
        if "init" in sketch.tags:
            return init(torch.empty_like(empty))
        drawn = torch.empty_like(empty).uniform_(*ends)
        wide = torch.erfinv(drawn) * (std * _SPREAD)
        wide = wide if leave_mean else wide + mean
        return wide.clamp(min=low) if "!one_bound" in sketch.tags else wide.clamp(low, high)

    return sketch.spelling(program, escape=0.0)


def _tags(steps: Mapping[str, Step]) -> frozenset[str]:
    return frozenset(n for n in steps if n[0] != "!")


_RANKS = frozenset(f"rank={n}" for n in range(5))
FAMILIES: tuple[Family, ...] = (
    Family(
        "softmax",
        _softmax,
        _UNARY
        | _RANKS
        | {
            "softmax",
            "in_float32",
            "of_float32",
            "exp",
            "amax",
            "max",
            "negative_dim",
            "front_dim",
            "inner_dim",
        },
    ),
    Family("gelu", _unary(GELUS), _UNARY | _RANKS | _tags(GELUS)),
    Family("sigmoid", _unary(SIGMOIDS), _UNARY | _RANKS | _tags(SIGMOIDS)),
    Family("hard_sigmoid", _unary(HARD), _UNARY | _RANKS | _tags(HARD)),
    Family(
        "trunc_normal",
        _sample,
        (_UNARY - {"symbolic", "fx"})
        | {"init", "uniform", "mean=0", "mean", "two_sides", "one_side", "narrow", "tail", "whole"},
    ),
)
