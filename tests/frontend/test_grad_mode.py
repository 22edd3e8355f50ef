"""Functions with a backward formula of their own are captured where no gradient reaches them, and guarded there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.errors import CallMismatch, CaptureError

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 7 * grads[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class OfWeights(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(Steep.apply(self.linear(x)))


class OfInput(Model):
    """Only the input reaches the function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Steep.apply(x))


class InBlock(Model):
    """No gradient reaches the function, whoever calls."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = Steep.apply(self.linear(x))
        return self.linear(x) * scale


class Without(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def grads(run: Callable[..., Tensor], model: nn.Module, x: Tensor = X) -> list[Tensor]:
    return list(torch.autograd.grad(run(x).sum(), list(model.parameters())))


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_function_is_captured_and_guarded(
    mode: Callable[[], AbstractContextManager[Any]], strict: bool
) -> None:
    model = OfWeights()
    with mode():
        graph = dovetail.capture(model, (X,), strict=strict, check_capture=True)
        assert torch.equal(graph(X), model(X))
        assert torch.equal(dovetail.fuse(graph)(X), model(X))
    with pytest.raises(CallMismatch, match=r"'linear\.weight' requires gradients.*Steep.*no_grad"):
        graph(X)
    model.requires_grad_(False)
    assert torch.equal(graph(X), model(X))
    with pytest.raises(CallMismatch, match="'x' requires gradients"):
        graph(X.clone().requires_grad_())


def test_with_gradients_it_is_refused_with_the_ways_out() -> None:
    with pytest.raises(CaptureError) as caught:
        dovetail.capture(OfWeights(), (X,))
    message = str(caught.value)
    assert "Steep.apply(self.linear(x))" in message
    assert "torch.no_grad()" in message
    assert "register_autograd" in message


def test_weights_that_require_gradients_later_are_noticed() -> None:
    model = OfWeights().requires_grad_(False)
    graph = dovetail.capture(model, (X,))
    assert torch.equal(graph(X), model(X))
    model.requires_grad_(True)
    with torch.no_grad():
        assert torch.equal(graph(X), model(X))
    with pytest.raises(CallMismatch, match="Steep"):
        graph(X)


def test_a_function_that_no_gradient_reaches_does_not_keep_the_model_from_training() -> None:
    model = OfInput()
    graph = dovetail.capture(model, (X,))
    for mine, theirs in zip(grads(graph, model), grads(model, model), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(CallMismatch, match="'x' requires gradients"):
        graph(X.clone().requires_grad_())
    with pytest.raises(CaptureError, match="Steep"):
        dovetail.capture(model, (X.clone().requires_grad_(),))


@pytest.mark.parametrize("kind", [InBlock, Without])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_what_is_exact_with_gradients_has_no_guard(
    kind: type[Model], mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    model = kind()
    with mode():
        graph = dovetail.capture(model, (X,))
    x = X.clone().requires_grad_()
    for mine, theirs in zip(grads(graph, model, x), grads(model, model, x), strict=True):
        assert torch.equal(mine, theirs)


def _saved(graph: Any, folder: Path) -> Any:
    dovetail.save(graph, folder / "graph.pt2")
    return dovetail.load(folder / "graph.pt2")


@pytest.mark.parametrize("way", ["fused", "outlined", "copied", "pickled", "saved"])
def test_the_guard_stays_with_the_graph(way: str, tmp_path: Path) -> None:
    model = OfWeights()
    with torch.no_grad():
        graph = dovetail.capture(model, (X,))
    ways: dict[str, Callable[[Any], Any]] = {
        "fused": lambda g: dovetail.inline(dovetail.fuse(g)),
        "outlined": lambda g: dovetail.outline(g, ["relu"], kind="last"),
        "copied": copy.deepcopy,
        "pickled": lambda g: pickle.loads(pickle.dumps(g)),
        "saved": lambda g: _saved(g, tmp_path),
    }
    other = ways[way](graph)
    with torch.no_grad():
        assert torch.equal(other(X), model(X))
    with pytest.raises(CallMismatch, match="Steep"):
        other(X)


def test_bloom_is_captured_for_inference() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=32, use_cache=False)
    model = transformers.BloomForCausalLM(config).train()
    ids = torch.randint(0, 32, (1, 6))
    with torch.no_grad():
        graph = dovetail.capture(model, (ids,))
        fused = dovetail.fuse(graph)
        expected = model(ids).logits
        assert torch.equal(graph(ids).logits, expected)
        assert torch.equal(fused(ids).logits, expected)
    with pytest.raises(CallMismatch, match="own backward formula"):
        fused(ids)


class Chooses(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: self.linear(y), (self.linear(x),))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_branches_of_values_with_gradients() -> None:
    model = Chooses()
    graph = dovetail.capture(model, (X,))
    for x in (X + 2, X - 2):
        gradients: list[list[Tensor | None]] = []
        for run in (model, graph):
            model.zero_grad()
            run(x).sum().backward()
            gradients.append([p.grad for p in model.parameters()])
        assert all(a is not None and torch.equal(a, b) for a, b in zip(*gradients, strict=True))
