"""`compile` captures for inference and for training as they come, where a model does not differentiate as its graph does."""

import pytest
import torch
from torch import Tensor, nn

import dovetail


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 3


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(Straight.apply(self.linear(x) * 8))


X = torch.randn(3, 4)


def test_inference_is_captured_and_training_is_exact() -> None:
    torch.manual_seed(0)
    model = Quantised()
    fast = dovetail.compile(model, backends="eager")
    with torch.no_grad():
        assert torch.equal(fast(X), model(X))
    assert len(fast.graphs) == 1
    assert not fast.diagnostics
    with pytest.warns(UserWarning, match="Straight"):
        fast(X).sum().backward()
    mine = model.linear.weight.grad
    model.linear.weight.grad = None
    model(X).sum().backward()
    assert mine is not None
    assert mine.abs().sum() > 0
    assert torch.equal(mine, model.linear.weight.grad)  # type: ignore[arg-type]
    with torch.inference_mode():
        assert torch.equal(fast(X), model(X))
    assert len(fast.graphs) == 1


def test_one_capture_where_both_are_alike() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fast = dovetail.compile(model, backends="eager")
    with torch.no_grad():
        fast(X)
    fast(X).sum().backward()
    assert len(fast.graphs) == 1
    assert model[0].weight.grad is not None
