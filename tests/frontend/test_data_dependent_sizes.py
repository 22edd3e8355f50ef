"""Writes and random draws over tensors whose size is known only when the model runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.errors import CaptureError

Step = Callable[[Tensor], Tensor]


class Selects(nn.Module):
    """Works on the rows whose first element is positive."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x[x[:, 0] > 0] * self.weight)


def _assigned(y: Tensor) -> Tensor:
    y = y * 2
    y[:, 0] = 1.0
    return y


def _halves(y: Tensor) -> Tensor:
    y = y * 2
    return y[:, :2].add_(1) * y[:, 2:].mul_(2)


def _turned(y: Tensor) -> Tensor:
    """Another name of a tensor that is turned in place."""
    y = y * 2
    same = y.add_(1)
    y.t_()
    return same.mul_(3)


STEPS: dict[str, Step] = {
    "add_ of a transpose": lambda y: y.t().add_(1),
    "transpose_": lambda y: (y * 2).transpose_(0, 1).add_(1),
    "t_": _turned,
    "squeeze_ and unsqueeze_": lambda y: (y * 2).t_().unsqueeze_(0).squeeze_(0).mul_(2),
    "swapaxes_": lambda y: (y * 2).swapaxes_(0, 1).mul_(y.t()),
    "masked_fill_ of a transpose": lambda y: (y * 2).t().masked_fill_(y.t() > 1, 0.0),
    "cumsum_ of a transpose": lambda y: (y * 2).t().cumsum_(0),
    "assignment to a column": _assigned,
    "both halves": _halves,
    "normal_": lambda y: (y * 2).normal_() * y,
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_writes_are_exact_for_every_number_of_rows(step: Step) -> None:
    model = Selects(step)
    graph = dovetail.capture(model, (torch.randn(6, 4),))
    parameters = list(model.parameters())
    for positive in (0, 1, 4):
        x = torch.randn(6, 4)
        x[:, 0] = -1.0
        x[:positive, 0] = 1.0
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        result = graph(x)
        assert torch.equal(result, expected)
        gradients = (torch.autograd.grad(r.square().sum(), parameters)[0] for r in (result, expected))
        torch.testing.assert_close(*gradients)


def test_draws_whose_order_depends_on_unknown_strides_are_refused() -> None:
    with pytest.raises(CaptureError, match="strides vary with dynamic sizes"):
        dovetail.capture(Selects(lambda y: (y * 2).t().normal_() * y.t()), (torch.randn(6, 4),))
