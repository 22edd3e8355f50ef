"""`check_capture`: a graph that does not do what its model does is told from one that does, and nothing is left behind."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dovetail


class Deceives(nn.Module):
    """Runs other code while it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 if torch.compiler.is_compiling() else x * 3.0


class Counts(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1 if torch.compiler.is_compiling() else 2)
        return x


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            torch.rand(3)
        return x * 1


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            x.add_(1)
        return x.detach().clone().mul(0)


class Model(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.Dropout(0.5), inner)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.norm(self.first(x))))


class Rebinds(nn.Module):
    """Gives a buffer another tensor, in one of several ways."""

    ema: Tensor
    cache: Tensor | None

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("cache", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        new = 0.9 * self.ema + 0.1 * x.mean(0)
        if self.how == "eager_only":
            if not torch.compiler.is_compiling():
                self.ema = self.ema + 1
        elif self.how == "drops_eagerly":
            self.cache = self.cache if torch.compiler.is_compiling() else None
        elif self.how == "register":
            self.register_buffer("ema", new.detach())
        elif self.how == "adds_eagerly":
            if not torch.compiler.is_compiling():
                self.register_buffer("other", torch.ones(2))
        else:
            self.ema = new if self.how == "with_history" else new.detach()
        return x - new.detach()


def example() -> Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def test_the_first_module_that_differs_is_named() -> None:
    model = Model(Deceives())
    with pytest.raises(dovetail.CaptureMismatch, match=r"'inner\.1': its result is off by up to") as raised:
        dovetail.capture(model, (example(),), check_capture=True)
    assert raised.value.module == "inner.1"
    assert raised.value.what.startswith("result 0 is off by")
    assert dovetail.capture(model, (example(),)) is not None


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Model(Counts()), "buffer 'inner.1.count' afterwards differs"),
        (Draws(), "the random stream differs"),
        (Writes(), "input 0 afterwards is off by"),
        (Model(Rebinds("eager_only")), "buffer 'inner.1.ema' afterwards is off by"),
        (Model(Rebinds("drops_eagerly")), "buffer 'inner.1.cache' afterwards is a Tensor"),
        (Rebinds("adds_eagerly"), "buffer 'other' afterwards is a NoneType"),
        (Rebinds("eager_only").forward, "buffer 'ema' afterwards is off by"),
    ],
    ids=["buffer", "stream", "input", "rebound", "dropped", "added", "method"],
)
def test_buffers_streams_and_inputs_are_compared(model: Any, what: str) -> None:
    with pytest.raises(dovetail.CaptureMismatch, match="differs from the model") as raised:
        dovetail.capture(model, (example(),), check_capture=True)
    assert raised.value.what.startswith(what)


@pytest.mark.parametrize("inner", [nn.ReLU(), Deceives()], ids=["alike", "different"])
def test_everything_is_restored(inner: nn.Module) -> None:
    model, x = Model(inner), example()
    model(x).sum().backward()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [(p, p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    attributes = {path: set(vars(m)) for path, m in model.named_modules()}
    before, stream = x.clone(), torch.get_rng_state()
    try:
        dovetail.capture(model, (x,), check_capture=True)
    except dovetail.CaptureMismatch:
        assert isinstance(inner, Deceives)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
    assert all(p.grad is gradient and torch.equal(gradient, copy) for p, gradient, copy in gradients)
    assert {path: set(vars(m)) for path, m in model.named_modules()} == attributes
    assert not any(m._forward_hooks for m in model.modules())
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_model_that_differs_from_itself_shows_nothing() -> None:
    calls: list[int] = []

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return x * 0
            calls.append(1)
            return x * len(calls)

    assert dovetail.capture(Counting(), (example(),), check_capture=True) is not None
    # Twice for each of two captures: what cannot be compared is traced without replayed layers.
    assert len(calls) == 4


def test_keyword_arguments_tuples_and_functions_are_checked() -> None:
    def both(x: Tensor, *, parts: Any) -> Any:
        return {"sum": x + parts[0], "rest": (parts[1],)}

    parts = (example(), example() * 2)
    graph = dovetail.capture(both, (example(),), {"parts": parts}, check_capture=True)
    assert torch.equal(graph(example(), parts=parts)["sum"], example() * 2)


def test_an_exported_program_has_no_model_to_compare_with() -> None:
    program = torch.export.export(nn.Linear(4, 4), (example(),))
    with pytest.raises(dovetail.InvalidArgument, match="check_capture"):
        dovetail.capture(program, check_capture=True)


def test_compile_runs_the_model_where_its_capture_differs() -> None:
    model, x = Model(Deceives()).eval(), example()
    with pytest.warns(UserWarning, match=r"calls run the model as it is: .*'inner\.1'"):
        fast = dovetail.compile(model, (x,), backends="torchscript")
    assert fast.graphs == ()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert torch.equal(fast(x), model(x))
    with pytest.raises(dovetail.CaptureMismatch):
        dovetail.compile(model, (x,), backends="torchscript", on_error="raise")


@pytest.mark.parametrize("how", ["detached", "register", "with_history"])
@pytest.mark.parametrize("is_inner", [False, True], ids=["own", "inner"])
def test_a_buffer_that_forward_rebinds_is_no_difference(how: str, is_inner: bool) -> None:
    model, x = Model(Rebinds(how)) if is_inner else Rebinds(how), example()
    buffers = list(model.buffers())
    with torch.no_grad():
        fast = dovetail.compile(model, (x,), backends="torchscript")
        fast(x)
    assert len(fast.graphs) == 1
    values = [buffer.clone() for buffer in buffers]
    if not is_inner:
        assert dovetail.capture(model.forward, (x,), check_capture=True) is not None
    dovetail.capture(model, (x,), check_capture=True)
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert all(torch.equal(buffer, value) for buffer, value in zip(buffers, values, strict=True))


def test_compile_checks_every_backend_unless_asked_otherwise() -> None:
    model, x = Model(Deceives()).eval(), example()
    with pytest.warns(UserWarning, match="differs from the model"):
        fast = dovetail.compile(model, (x,), backends="eager")
    assert not fast.graphs
    assert torch.equal(fast(x), model(x))
    assert dovetail.compile(model, (x,), backends="eager", check_capture=False).graphs
    with pytest.raises(dovetail.InvalidArgument, match="check_capture"):
        dovetail.compile(model, (x,), check_capture="yes")  # pyright: ignore[reportArgumentType]


def test_check_capture_is_true_or_false() -> None:
    with pytest.raises(dovetail.errors.InvalidArgument, match="check_capture 3; give True or False"):
        dovetail.capture(nn.ReLU(), (torch.ones(2),), check_capture=3)  # type: ignore[arg-type]


class Undefined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan") if torch.compiler.is_compiling() else x * 1


def test_numbers_that_are_not_defined_are_a_difference() -> None:
    with pytest.raises(dovetail.CaptureMismatch, match=r"is NaN where the model's is not.*12 of 12 numbers"):
        dovetail.capture(Undefined(), (example(),), check_capture=True)


class DrawsOnTheHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1 if random.random() + np.random.rand() < 3 else x * 2


@pytest.mark.parametrize("training", [False, True], ids=["captured", "refused"])
def test_the_streams_of_python_and_numpy_are_restored(training: bool) -> None:
    model = DrawsOnTheHost().train(training)
    before, numpy_before = random.getstate(), np.random.get_state()
    if training:
        with pytest.raises(dovetail.CaptureError, match="random module"):
            dovetail.capture(model, (example(),))
    else:
        dovetail.capture(model, (example(),), check_capture=True)
    assert random.getstate() == before
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_before, strict=True))
