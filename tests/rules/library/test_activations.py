"""Softmax, GELU, sigmoid and hard sigmoid, as operators and as people write them out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.rules.library.activations import gelu, hard_sigmoid, sigmoid, softmax
from tests.rules.library.helpers import candidates, graph_of, match_attrs, match_attrs_each, refused_each, why

X = torch.randn(2, 3, 8)
Step = Callable[[Tensor], Tensor]


def by_maximum(x: Tensor) -> Tensor:
    top = torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(x - top)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def by_amax(x: Tensor) -> Tensor:
    powers = (x - x.amax(dim=2, keepdim=True)).exp()
    return powers / powers.sum(2, keepdim=True)


def bare_once(x: Tensor) -> Tensor:
    powers = x.exp()
    return powers.div(powers.sum(-1, True))


SOFTMAX: list[Step] = [
    by_maximum,
    by_amax,
    bare_once,
    nn.Softmax(dim=-1),
    lambda x: F.softmax(x, dim=-1),
    lambda x: x.softmax(2),
    lambda x: torch.softmax(x, 2),
]


def test_softmax() -> None:
    assert match_attrs_each(softmax, SOFTMAX, X) == [{"dim": 2}] * len(SOFTMAX)


def test_softmax_over_another_dimension() -> None:
    assert match_attrs(softmax, lambda x: x.softmax(0), X) == {"dim": 0}
    assert match_attrs(softmax, lambda x: by_part(x, 1, 1), X) == {"dim": 1}


def test_softmax_in_float32() -> None:
    low = X.bfloat16()
    assert match_attrs(softmax, lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype), low) == {
        "dim": 2
    }
    assert match_attrs(softmax, lambda x: F.softmax(x.float(), -1).to(x.dtype), low) == {"dim": 2}


def by_part(x: Tensor, top: int, total: int) -> Tensor:
    powers = (x - x.amax(top, True)).exp()
    return powers / powers.sum(total, True)


def test_what_was_taken_off_along_another_dimension_stays_outside() -> None:
    assert match_attrs(softmax, lambda x: by_part(x, 1, 2), X, leaving=["amax", "sub"]) == {"dim": 2}


SOFTMAX_REFUSED: dict[str, Step] = {
    "a sum of something else": lambda x: x.exp() / x.sum(-1, True),
    "a sum of everything": lambda x: x.exp() / x.exp().sum(),
    "a sum over two dimensions": lambda x: over(x.exp(), [1, 2]),
    "the largest": lambda x: x.exp() / x.exp().amax(-1, True),
}


def over(powers: Tensor, dims: list[int]) -> Tensor:
    return powers / powers.sum(dims, True)


def test_what_is_no_softmax() -> None:
    refused = dict(
        zip(SOFTMAX_REFUSED, refused_each(softmax, list(SOFTMAX_REFUSED.values()), X), strict=True)
    )
    assert "it sums over [1, 2]" in refused["a sum over two dimensions"]


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def fast_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def cubed_gelu(x: Tensor) -> Tensor:
    return x * (0.5 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))))


def erf_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def cdf_gelu(x: Tensor) -> Tensor:
    return x * (0.5 * (1 + torch.erf(0.70710678 * x)))


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


GELU: list[tuple[Step, str]] = [
    (new_gelu, "tanh"),
    (fast_gelu, "tanh"),
    (cubed_gelu, "tanh"),
    (nn.GELU(approximate="tanh"), "tanh"),
    (erf_gelu, "none"),
    (cdf_gelu, "none"),
    (lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2.0))), "none"),
    (lambda x: x * (1 + torch.erf(x / math.sqrt(2.0))) / 2, "none"),
    (nn.GELU(), "none"),
    (F.gelu, "none"),
    (quick_gelu, "sigmoid"),
]


def test_gelu() -> None:
    matches = match_attrs_each(gelu, [spelled for spelled, _ in GELU], X)
    assert [attrs["approximate"] for attrs in matches] == [approximate for _, approximate in GELU]


def test_gelu_of_transformers() -> None:
    activations = pytest.importorskip("transformers.activations")
    names = {"gelu_new": "tanh", "gelu_fast": "tanh", "gelu_python": "none", "quick_gelu": "sigmoid"}
    matches = match_attrs_each(gelu, [activations.ACT2FN[name] for name in names], X)
    assert [attrs["approximate"] for attrs in matches] == list(names.values())


GELU_REFUSED: dict[str, tuple[Step, str]] = {
    "another factor": (
        lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
        "the constant is 0.8, not 0.7978846",
    ),
    "another cubic": (
        lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.04 * x**3))),
        "the constant is 0.04, not 0.044715",
    ),
    "a silu": (lambda x: x * torch.sigmoid(x * 1.0), "the constant is 1.0, not 1.702"),
    "not halved": (lambda x: x * 0.7 * (1 + torch.erf(x / math.sqrt(2))), "0.7 where the pattern has 0.5"),
    "of two values": (lambda x: 0.5 * x * (1 + torch.erf((x + 1) / math.sqrt(2))), ""),
}


def test_what_is_no_gelu() -> None:
    refused = refused_each(gelu, [spelled for spelled, _ in GELU_REFUSED.values()], X)
    for name, reasons in zip(GELU_REFUSED, refused, strict=True):
        assert GELU_REFUSED[name][1] in reasons, name


SIGMOID: list[Step] = [
    lambda x: 1 / (1 + torch.exp(-x)),
    lambda x: 1.0 / (torch.exp(-x) + 1.0),
    lambda x: (1 + (-x).exp()).reciprocal(),
    lambda x: x.exp() / (1 + x.exp()),
    lambda x: 0.5 * (torch.tanh(0.5 * x) + 1),
    lambda x: (torch.tanh(x / 2) + 1) / 2,
    lambda x: 0.5 * (1 + torch.tanh(x / 2)),
    lambda x: torch.tanh(x / 2) * 0.5 + 0.5,
]


def test_sigmoid() -> None:
    assert match_attrs_each(sigmoid, SIGMOID, X) == [{}] * len(SIGMOID)


def test_what_is_no_sigmoid() -> None:
    wrong: list[Step] = [
        lambda x: 1 / (1 + torch.exp(x)),
        lambda x: 1 / (2 + torch.exp(-x)),
        lambda x: torch.tanh(x) * 0.5 + 0.5,
    ]
    assert "2 where the pattern has 1" in refused_each(sigmoid, wrong, X)[1]


HARD: list[Step] = [
    lambda x: F.relu6(x + 3) / 6,
    lambda x: (x + 3).clamp(0, 6) / 6,
    lambda x: torch.clamp(x + 3.0, min=0.0, max=6.0) * (1 / 6),
    lambda x: F.hardtanh(x + 3, 0.0, 6.0) / 6.0,
    lambda x: (x + 3).clamp(min=0).clamp(max=6) / 6,
    lambda x: torch.relu(x + 3).clamp(max=6) / 6,
    lambda x: (x / 6 + 0.5).clamp(0, 1),
    lambda x: (0.1666667 * x + 0.5).clamp(0, 1),
    nn.Hardsigmoid(),
    F.hardsigmoid,
]


def test_hard_sigmoid() -> None:
    assert match_attrs_each(hard_sigmoid, HARD, X) == [{}] * len(HARD)


def test_what_is_no_hard_sigmoid() -> None:
    assert "the constant is 0.2, not 0.1666667" in why(hard_sigmoid, lambda x: (0.2 * x + 0.5).clamp(0, 1), X)
    assert "where the pattern has" in why(hard_sigmoid, lambda x: (x + 3).clamp(0, 5) / 6, X)
    assert not candidates(hard_sigmoid, graph_of(lambda x: F.relu6(x) / 6, (X,)))


def test_integers_are_left_to_the_steps_by_hand() -> None:
    spelled = {
        softmax: bare_once,
        gelu: lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2.0))),
        sigmoid: lambda x: 1 / (1 + torch.exp(-x)),
        hard_sigmoid: lambda x: (x / 6 + 0.5).clamp(0, 1),
    }
    for rule, step in spelled.items():
        assert "torch.int64, not a real floating-point value" in why(rule, step, torch.arange(6).view(2, 3))
        match_attrs(rule, step, torch.arange(6.0).view(2, 3))
