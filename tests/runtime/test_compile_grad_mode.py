"""`compile` captures for inference and for training as they come, where a model does not differentiate as its graph does."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.lowering.guards import has_saved_tensor_hooks, suspend_saved_tensor_hooks
from dovetail.runtime import stored_captures


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


@pytest.mark.filterwarnings("ignore:a call runs the model as it is")
def test_inference_is_captured_after_training_was_refused() -> None:
    model, x = Quantised(), torch.ones(2, 4)
    fast = dovetail.compile(model, backends="eager")
    fast(x).sum().backward()
    assert not fast.graphs
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert len(fast.graphs) == 1
    fast(x).sum().backward()
    assert len(fast.graphs) == 1


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


@pytest.mark.filterwarnings("ignore:a call runs the model as it is")
def test_a_failure_that_no_input_cures_is_not_tried_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[Any] = []
    original = stored_captures.frontend.trace

    def counted(*args: Any, **kwargs: Any) -> Any:
        attempts.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(stored_captures.frontend, "trace", counted)
    fast = dovetail.compile(Branching(), backends="eager")
    for n in range(2, 12):
        assert torch.equal(fast(torch.ones(n)), torch.ones(n) + 1)
    # A static one, and one with a dynamic size that is repeated without.
    assert len(attempts) == 3
    assert [d.kind for d in fast.diagnostics] == ["fallback"]


@pytest.mark.parametrize("trains", [False, True])
def test_nothing_is_held_after_the_compiled_model_is_dropped(trains: bool) -> None:
    x = torch.randn(3, 8)

    def weights() -> list[Any]:
        # A relu saves its own result for the backward.
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
        with torch.set_grad_enabled(trains):
            fast = dovetail.compile(model, (x,), backends="eager", cache=False)
            fast(x)
        graph = weakref.ref(fast.graphs[0])
        return [graph, *map(weakref.ref, model.parameters())]

    held = weights()
    gc.collect()
    assert [reference() for reference in held] == [None] * 7


def test_hooks_on_saved_tensors_are_suspended_and_put_back() -> None:
    packed: list[str] = []

    def hooks(name: str) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(name), t)[1], lambda t: t)

    x = torch.randn(3, requires_grad=True)
    with hooks("outer"), hooks("inner"):
        with suspend_saved_tensor_hooks():
            assert not has_saved_tensor_hooks()
            x.exp()
            with hooks("own"):
                x.exp()
        assert has_saved_tensor_hooks()
        x.sin()
    assert packed == ["own", "inner"]
    assert not has_saved_tensor_hooks()
