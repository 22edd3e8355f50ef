"""Exporting works on a structural copy, so that other threads may call the model meanwhile."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.frontend.model_copy import structural_copy


class Tangled(nn.Module):
    """Refers to its parts in every way that a copy has to follow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.tied = self.inner
        self.empty = nn.ModuleList()
        self.norm = nn.BatchNorm1d(4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.table = {"inner": [self.inner], "norm": (self.norm,)}
        self.method = self.scaled
        self.bound = functools.partial(type(self).scaled, self)
        inner = self.inner
        self.closure = lambda x: inner(x) + 1
        self.back = weakref.ref(self.inner)
        self.inner.forward = functools.partial(nn.Linear.forward, self.inner)

    def scaled(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.method(x) + self.bound(x) + self.closure(x) + self.table["inner"][0](x) + self.back()(x)
        return self.rnn(self.table["norm"][0](y)[:, None])[0] + self.tied(x)[:, None]


def test_references_lead_to_the_copies() -> None:
    model = Tangled()
    copy: Any = structural_copy(model)
    assert copy is not model
    assert [n for n, _ in copy.named_modules()] == [n for n, _ in model.named_modules()]
    mine, theirs = set(map(id, model.modules())), set(map(id, copy.modules()))
    assert mine.isdisjoint(theirs)
    for a, b in zip(model.parameters(), copy.parameters(), strict=True):
        assert a is b
    assert copy.tied is copy.inner
    assert copy.table["inner"][0] is copy.inner
    assert copy.back() is copy.inner
    assert copy.method.__self__ is copy
    assert copy.bound.args[0] is copy
    assert copy.closure.__closure__[0].cell_contents is copy.inner
    assert copy.rnn._flat_weights is not model.rnn._flat_weights
    assert model.table["inner"][0] is model.inner


@pytest.mark.parametrize("train", [False, True])
def test_a_tangled_model_is_captured(train: bool) -> None:
    model, x = Tangled().train(train), torch.randn(3, 4)
    graph = dovetail.capture(model, (x,))
    names = {n.target for n in graph.graph.nodes if n.op == "get_attr"}
    assert {"norm.weight", "rnn.weight_ih_l0"} <= names
    assert names & {"inner.weight", "tied.weight"}
    state = {k: v.clone() for k, v in model.state_dict().items()}
    expected = model(x)
    model.load_state_dict(state)
    torch.testing.assert_close(graph(x), expected)


class Helper:
    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.helper = Helper(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.helper.module(x)


def test_what_cannot_be_redirected_is_captured_as_it_is() -> None:
    model, x = Helped(), torch.randn(3, 4)
    assert structural_copy(model) is model
    graph = dovetail.capture(model, (x,))
    torch.testing.assert_close(graph(x), model(x))


def test_side_effects_are_still_noticed() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.log.append(1)
            return x + 1

    model = Counts()
    with pytest.raises(dovetail.CaptureError, match=r"forward sets self\.log"):
        dovetail.capture(model, (torch.ones(2),))
    assert model.log == []


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.norm(x)


def called_meanwhile(model: nn.Module, x: Tensor, act: Callable[[], Any]) -> tuple[int, list[Any]]:
    """Call a model in two threads as long as something is done; how often, and what went wrong."""
    expected, wrong, calls = model(x).detach(), [], [0, 0]
    stop = threading.Event()

    def work(number: int) -> None:
        while not stop.is_set():
            try:
                with torch.set_grad_enabled(bool(number)):
                    result = model(x)
                if type(result) is not Tensor or not torch.equal(result, expected):
                    wrong.append(result)
            except Exception as error:
                wrong.append(error)
            calls[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        act()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return min(calls), wrong


def test_threads_may_call_the_model_while_it_is_captured() -> None:
    model, x = Deep().eval(), torch.randn(3, 8)
    fast = dovetail.compile(model, backends=["eager"], cache=False)

    def captures() -> None:
        for rows in range(2, 6):
            fast(torch.randn(rows, 8))
        dovetail.capture(model, (x,))

    calls, wrong = called_meanwhile(model, x, captures)
    assert calls
    assert wrong == []


def test_two_models_may_be_captured_at_once() -> None:
    models = [Deep().eval() for _ in range(2)]
    x = torch.randn(3, 8)
    wrong: list[Any] = []

    def work(model: nn.Module) -> None:
        try:
            fast = dovetail.compile(model, (x,), backends=["eager"], cache=False)
            if not torch.equal(fast(x), model(x)):
                wrong.append("other values")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
