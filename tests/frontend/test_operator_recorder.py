"""Replayed layers whose difference nothing that their code reads shows are noticed by the operators that the model runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.frontend.layer_state import LayerReads
from dovetail.frontend.operator_recorder import OperatorRecorder

DEPTH = 5


class Gated(nn.Module):
    """A layer whose branch is multiplied by a weight that is zero at first."""

    def __init__(self, number: int, branch: Callable[[Gated, Tensor], Tensor]) -> None:
        super().__init__()
        self.number, self.branch = number, branch
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.gate = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.branch(self, x)


class Gates(nn.Module):
    def __init__(self, branch: Callable[[Gated, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated(i, branch) for i in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


TABLE = [torch.full((4,), 1.0 + i) for i in range(DEPTH)]


def literal(layer: Gated, x: Tensor) -> Tensor:
    return layer.linear(x) * (3.0 if layer.number == 3 else 2.0)


def sign_of_zero(layer: Gated, x: Tensor) -> Tensor:
    return layer.linear(x) / (-0.0 if layer.number == 3 else 0.0)


def operator(layer: Gated, x: Tensor) -> Tensor:
    return torch.tanh(layer.linear(x)) if layer.number == 3 else torch.sigmoid(layer.linear(x))


def further_operator(layer: Gated, x: Tensor) -> Tensor:
    return layer.linear(x).relu() if layer.number == 3 else layer.linear(x)


def weight(layer: Gated, x: Tensor) -> Tensor:
    return (layer.other if layer.number == 3 else layer.linear)(x)


def order(layer: Gated, x: Tensor) -> Tensor:
    y = layer.linear(x)
    return x - y if layer.number == 3 else y - x


def tensor_of_elsewhere(layer: Gated, x: Tensor) -> Tensor:
    return layer.linear(x) * TABLE[layer.number == 3]


def dtype(layer: Gated, x: Tensor) -> Tensor:
    return layer.linear(x).to(torch.bfloat16 if layer.number == 3 else torch.float16).float()


def detached(layer: Gated, x: Tensor) -> Tensor:
    y = layer.linear(x)
    return y.detach() if layer.number == 3 else y


def without_gradients(layer: Gated, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(layer.number != 3):
        return layer.linear(x)


BRANCHES = [
    literal,
    sign_of_zero,
    operator,
    further_operator,
    weight,
    order,
    tensor_of_elsewhere,
    dtype,
    detached,
    without_gradients,
]


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that code reads is compared, so that all layers of one structure are replayed."""

    def no_facts(*_: Any) -> dict[str, str]:
        return {}

    monkeypatch.setattr(LayerReads, "facts", no_facts)


def train(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator))


def gradients(run: Callable[..., Tensor], model: nn.Module, x: Tensor) -> list[Any]:
    return list(torch.autograd.grad(run(x).sum(), list(model.parameters()), allow_unused=True))


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_layer_with_other_operators_is_traced(branch: Any) -> None:
    model, x = Gates(branch), torch.randn(2, 4)
    graph = dovetail.capture(model, (x,), check_capture=True)
    train(model)
    assert torch.equal(graph(x).nan_to_num(7.0), model(x).nan_to_num(7.0))
    for mine, expected in zip(gradients(graph, model, x), gradients(model, model, x), strict=True):
        assert (mine is None) == (expected is None)
        assert mine is None or torch.allclose(mine, expected, equal_nan=True)


@pytest.mark.usefixtures("blind")
def test_without_the_comparison_the_graph_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results on the example do not show it, since the gates are zero."""

    def no_difference(*_: Any) -> None:
        return None

    monkeypatch.setattr(OperatorRecorder, "difference", no_difference)
    model, x = Gates(literal), torch.randn(2, 4)
    graph = dovetail.capture(model, (x,), check_capture=True)
    train(model)
    assert not torch.equal(graph(x), model(x))


def test_equal_layers_stay_replayed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dovetail.frontend.capture")
    model = Gates(lambda layer, x: torch.tanh(layer.linear(x)).t().contiguous().t() * 2.0)
    graph = dovetail.capture(model, (torch.randn(2, 4),), check_capture=True)
    assert not caplog.records
    assert "dovetail.replayed" not in graph.meta


def test_hooks_are_removed_and_state_is_kept() -> None:
    model, x = Gates(operator), torch.randn(2, 4)
    before = copy.deepcopy(model.state_dict())
    dovetail.capture(model, (x,), check_capture=True)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Memory(nn.Module):
    """A layer that hands on the dict that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gate = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return x + self.gate * torch.tanh(self.linear(x)) * memory["last"], memory


class Memories(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Memory() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        memory = {"last": x}
        for layer in self.layers:
            x, returned = layer(x, memory)
            returned["last"] = x * 2
        return x


class Box(nn.Module):
    """A layer that returns a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.box = nn.Linear(4, 4), [1.0]

    def forward(self, x: Tensor) -> tuple[Tensor, list[float]]:
        return self.linear(x) * self.box[0], self.box


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Box() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, box = layer(x)
            x = x * (2.0 if box is layer.box else 3.0)
        return x


class Marked(nn.Module):
    """A layer whose factor is an attribute of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.linear.weight
        return x + self.gate * self.linear(x) * weight.factor


class Marks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Marked() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        layer: Any
        for i, layer in enumerate(self.layers):
            layer.linear.weight.factor = 2.0 if i == 3 else 1.0
            x = layer(x)
        return x


@pytest.mark.parametrize("model_class", [Memories, Boxes, Marks])
@pytest.mark.parametrize("replays", [True, "checked"])
def test_what_a_layer_shares_with_its_caller(
    model_class: Any, replays: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dovetail.config, "replay_layers", replays)
    model, x = model_class(), torch.randn(2, 4)
    graph = dovetail.capture(model, (x,), check_capture=replays == "checked")
    train(model)
    assert torch.equal(graph(x), model(x))
