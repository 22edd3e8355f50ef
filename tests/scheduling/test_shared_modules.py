"""Steps on a module that has several names: none of them is lost when something around it is traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.scheduling.history import History

X = torch.linspace(-1, 1, 6).reshape(2, 3)
RELU, LINEAR = torch.ops.aten.relu.default, torch.ops.aten.linear.default


class Activation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) + 1


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.linear = inner, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))


class Twice(nn.Module):
    """Two layers that share what is in them, or one layer under two names."""

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        inner = Activation()
        self.first = Layer(inner)
        self.second = self.first if whole else Layer(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


def scheduled(**options: Any) -> tuple[Any, Tensor]:
    """A schedule that replaced something in the shared module, and what the model gives then."""
    torch.manual_seed(0)
    s = dovetail.schedule(Twice(**options), (X,))
    s.replace(tanh, s["first.inner"].find(RELU)[0], check=False)
    return s, result(s)


def result(s: Any) -> Tensor:
    built = s.build()
    try:
        return built(X)
    finally:
        s.release()


@pytest.mark.parametrize("path", ["first", "second", "*", ""])
def test_a_part_in_which_they_would_be_lost_is_not_traced(path: str) -> None:
    s, before = scheduled()
    with pytest.raises(dovetail.ScheduleError, match=r"traced as 'first\.inner'.*its steps would be lost"):
        s[path].fuse(s[path].find(LINEAR))
    assert torch.equal(result(s), before)


@pytest.mark.parametrize("path", ["first", "second"])
def test_a_part_that_has_the_same_names_is_traced(path: str) -> None:
    s, before = scheduled(whole=True)
    s[path].fuse(s[path].find(LINEAR))
    assert torch.equal(result(s), before)


@pytest.mark.parametrize("path", ["first", "second", "*", ""])
def test_without_steps_of_its_own_it_is_traced_and_replayed(path: str) -> None:
    torch.manual_seed(0)
    model = Twice()
    expected = model(X)
    s = dovetail.schedule(model, (X,))
    s[path].fuse(s[path].find(LINEAR))
    assert torch.equal(result(s), expected)
    again = dovetail.schedule(Twice(), (X,))
    again.replay(History.load(s.history.json()))
    assert again.history.json() == s.history.json()
