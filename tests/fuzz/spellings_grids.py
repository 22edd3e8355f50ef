"""Spellings of layers over grids of pixels or tokens: group norms, and feed-forward layers with a convolution."""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from .references import Family, Spelling
from .spelling_drawing import Drawing

_ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_by_hand": lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5)),
}
_HOSTILE = {"sharp": lambda x: x * torch.sigmoid(1.5 * x), "erf": lambda x: x * torch.erf(x)}


def _group_norm(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    groups, channels = d.any([(1, 4), (2, 4), (4, 4), (2, 6)])
    x = d.tensor(d.any([1, 2]), channels, *(d.any([2, 3]) for _ in range(d.any([1, 2, 3]))))
    affine = d.chance(0.7, "affine")
    more = [d.tensor(channels), d.tensor(channels)] if affine else []
    eps = d.any([1e-5, 1e-3])
    silu = {"silu": F.silu, "silu_by_hand": lambda x: x * torch.sigmoid(x), "none": lambda x: x}
    step = d.mostly({**_ACTIVATIONS, **silu}, _HOSTILE)

    def norm(x: Tensor, *more: Tensor) -> Tensor:
        return step(d.inner(F.group_norm(x, groups, *more, eps=eps)))

    return d.spelling(norm, (x, *more), weights=len(more), symbolic=d.batches((x,)))


def _mix_ffn(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    batch, height, width, size, hidden = d.any([1, 2]), d.any([1, 2, 4]), d.any([3, 4]), 4, d.any([4, 6])
    kernel = d.any([(3, 3), (1, 1), (3, 5)])
    biased = d.chance(0.6, "biased")
    weights = [d.tensor(hidden, size), d.tensor(hidden, 1, *kernel), d.tensor(size, hidden)]
    biases = [d.tensor(hidden), d.tensor(hidden), d.tensor(size)] if biased else []
    turn = d.one(
        {"transposed": lambda x: x.transpose(1, 2), "permuted": lambda x: x.permute(0, 2, 1)},
    )
    cut = d.mostly(
        {"cut": lambda x: turn(x).reshape(batch, hidden, height, width)},
        {"not_turned": lambda x: x.reshape(batch, hidden, height, width)},
    )
    padding = tuple(n // 2 for n in kernel)
    step = d.mostly(_ACTIVATIONS, _HOSTILE)

    def mix(x: Tensor, first: Tensor, conv: Tensor, last: Tensor, *biases: Tensor) -> Tensor:
        one, two, three = biases or (None, None, None)
        image = F.conv2d(cut(d.inner(F.linear(x, first, one))), conv, two, 1, padding, 1, hidden)
        return F.linear(step(turn(image.flatten(2))), last, three)

    inputs = (d.tensor(batch, height * width, size), *weights, *biases)
    return d.spelling(mix, inputs, weights=len(inputs) - 1, graphs=0.0)


GROUP_NORM = Family(
    "group_norm",
    _group_norm,
    frozenset(
        {*_ACTIVATIONS, "silu", "silu_by_hand", "none", "affine", "bf16", "f64", "make_fx", "symbolic"}
    ),
)
MIX_FFN = Family(
    "mix_ffn",
    _mix_ffn,
    frozenset({*_ACTIVATIONS, "biased", "transposed", "permuted", "parameters", "bf16", "f64"}),
)
