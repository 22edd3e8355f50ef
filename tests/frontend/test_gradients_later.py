"""Graphs captured from inputs without gradients and called with inputs that require them: the gradients are the model's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail import CallMismatch

Forward = Callable[[Tensor], Tensor]
X = torch.linspace(-1, 1, 12).reshape(4, 3)


def normal(x: Tensor) -> Tensor:
    return (x * 2).normal_() + x * x


def bernoulli(x: Tensor) -> Tensor:
    return (x * 2).bernoulli_(0.5) * x


def exponential_then_product(x: Tensor) -> Tensor:
    return x.clone().exponential_().mul_(x) * x


def part_of_a_value(x: Tensor) -> Tensor:
    y = x * 2
    y[1:3].uniform_()
    return y * x


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x.clone(), 0.5, True, inplace=True) * x


def comparison(x: Tensor) -> Tensor:
    return (x * 2).gt_(0) + x * x


def detached_in_place(x: Tensor) -> Tensor:
    return (x * 2).detach_() * x


def written_after_detach(x: Tensor) -> Tensor:
    y = x * 2
    before = y.detach()
    y.mul_(3)
    return before * x + y


@pytest.mark.parametrize(
    "forward",
    [
        normal,
        bernoulli,
        exponential_then_product,
        part_of_a_value,
        dropout,
        comparison,
        detached_in_place,
        written_after_detach,
    ],
)
def test_gradients_are_exact(forward: Forward) -> None:
    graph = dovetail.capture(forward, (X,))
    assert torch.equal(gradient(graph), gradient(forward))


def gradient(function: Callable[..., Any]) -> Tensor:
    x = X.clone().requires_grad_()
    torch.manual_seed(0)
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad


def through_detach(x: Tensor) -> Tensor:
    y = x * 2
    y.detach().mul_(3)
    return y * y


def without_grad(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.mul_(3)
    return y * y


def gradients_into_a_detached_alias(x: Tensor) -> Tensor:
    y = x * 2
    z = y.detach()
    z.add_(x)
    return y * z


def as_strided(x: Tensor) -> Tensor:
    y = x * 2
    torch.as_strided(y, (3,), (1,)).mul_(x[0])
    return y * y


def copied_then_zeroed(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.copy_(x)
    y.detach().zero_()
    return y * x


OTHERS = [through_detach, without_grad, gradients_into_a_detached_alias, as_strided, copied_then_zeroed]


@pytest.mark.parametrize("forward", OTHERS)
def test_where_they_would_be_others_the_call_is_refused(forward: Forward) -> None:
    graph = dovetail.capture(forward, (X,))
    with pytest.raises(CallMismatch, match="'x' requires gradients, and did not when the graph was captured"):
        gradient(graph)
    with torch.no_grad():
        assert torch.equal(graph(X.clone().requires_grad_()), forward(X))
    assert torch.equal(graph(X), forward(X))


@pytest.mark.parametrize("forward", OTHERS)
def test_compile_runs_the_model_for_such_calls(forward: Forward) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    compiled = dovetail.compile(Model(), (X,), backends=["torchscript"])
    assert torch.equal(compiled(X), forward(X))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a call runs the model as it is", UserWarning)
        assert torch.equal(gradient(compiled), gradient(forward))


class Cache(nn.Module):
    """Keeps what was computed, as decoders and moving averages do."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("kept", torch.zeros(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.kept[1:] = y[1:]
            self.kept.mul_(0.9).add_(x.detach(), alpha=0.1)
        return y * self.kept


def test_state_that_is_written_without_gradients_is_no_reason() -> None:
    model = Cache()
    graph = dovetail.capture(model, (X,))
    actual = gradient(graph)
    model.kept.zero_()
    assert torch.equal(actual, gradient(model))
