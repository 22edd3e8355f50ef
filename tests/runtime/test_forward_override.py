"""Methods of a model that call it run compiled code, and so does a model that was given the compiled forward."""

import asyncio
import copy
import functools
import inspect
import pickle
import threading
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail


class Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def predict_step(self, x: Tensor, steps: int = 2) -> Tensor:
        for _ in range(steps):
            x = self(x)
        return x

    def nested(self, x: Tensor) -> Tensor:
        return self.predict_step(x) + self(x)

    def stream(self, x: Tensor) -> Generator[Tensor, None, str]:
        for _ in range(3):
            x = self(x)
            yield x
        return "end"

    async def later(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return self(x)

    def copied(self) -> "Predictor":
        return copy.deepcopy(self)

    def raising(self, x: Tensor) -> None:
        self(x)
        raise RuntimeError("as it should")


X = torch.ones(2, 4)


@pytest.fixture
def model() -> Predictor:
    torch.manual_seed(0)
    return Predictor().eval()


def compiled(model: nn.Module) -> Any:
    return dovetail.compile(model, backends="eager")


def is_clean(model: nn.Module) -> bool:
    return "forward" not in vars(model)


class Inspecting(Predictor):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return torch.tanh(self.linear(x)) * (1.0 if scale is None else scale)

    def generate(self, x: Tensor) -> Tensor:
        takes_scale = "scale" in inspect.signature(self.forward).parameters
        return self(x, scale=torch.full((), 3.0)) if takes_scale else self(x)


def test_callers_see_the_signature_of_the_models_forward() -> None:
    torch.manual_seed(0)
    model = Inspecting().eval()
    own, expected = inspect.signature(model.forward), model.generate(X)
    fast = compiled(model)
    assert inspect.signature(fast.forward) == own
    assert torch.equal(fast.generate(X), expected)
    assert inspect.signature(copy.deepcopy(fast).forward) == own
    assert inspect.signature(pickle.loads(pickle.dumps(fast)).forward) == own
    model.forward = fast.forward
    assert torch.equal(model.generate(X), expected)
    restored = pickle.loads(pickle.dumps(model))
    assert torch.equal(restored.generate(X), expected)
    assert inspect.signature(restored.forward) == own


@pytest.mark.parametrize("name", ["predict_step", "nested"])
def test_methods(model: Predictor, name: str) -> None:
    fast = compiled(model)
    assert torch.equal(getattr(fast, name)(X), getattr(model, name)(X))
    assert len(fast.graphs) == 1
    assert is_clean(model)


def test_the_model_itself_stays_uncompiled(model: Predictor) -> None:
    fast = compiled(model)
    fast.predict_step(X)
    hits: list[int] = []
    fast.forward = lambda *args: hits.append(1)  # a wrapper of the caller's
    model(X)
    assert not hits
    fast.predict_step(X, 1)
    assert hits == [1]


def test_another_thread_runs_the_uncompiled_model_meanwhile(model: Predictor) -> None:
    fast, results = compiled(model), list[Any]()
    hits: list[str] = []
    fast.forward = lambda x: hits.append(threading.current_thread().name) or x
    generator = fast.stream(X)
    next(generator)
    started, go = threading.Event(), threading.Event()

    def waiting(x: Tensor) -> Tensor:
        started.set()
        go.wait(10)
        return x

    fast.forward = waiting
    worker = threading.Thread(target=lambda: results.append(fast.predict_step(X, 1)))
    worker.start()
    started.wait(10)
    expected = torch.tanh(model.linear(X))
    assert torch.equal(model(X), expected)
    go.set()
    worker.join()
    assert torch.equal(results[0], X)
    generator.close()
    assert is_clean(model)


def test_generators(model: Predictor) -> None:
    fast = compiled(model)
    mine, theirs = fast.stream(X), model.stream(X)
    for _ in range(3):
        assert torch.equal(next(mine), next(theirs))
        assert is_clean(model)
    with pytest.raises(StopIteration, match="end"):
        next(mine)
    assert len(fast.graphs) == 1


def test_coroutines(model: Predictor) -> None:
    fast = compiled(model)
    assert torch.equal(asyncio.run(fast.later(X)), model(X))
    assert len(fast.graphs) == 1
    assert is_clean(model)


def test_errors_and_copies(model: Predictor) -> None:
    fast = compiled(model)
    with pytest.raises(RuntimeError, match="as it should"):
        fast.raising(X)
    assert is_clean(model)
    copied = fast.copied()
    assert type(copied) is Predictor
    with torch.no_grad():
        copied.linear.weight.zero_()
    assert torch.equal(copied(X), torch.tanh(copied.linear.bias).expand(2, 4))
    assert not torch.equal(model(X), copied(X))


def test_a_forward_of_the_users_is_what_methods_run(model: Predictor) -> None:
    own = model.forward
    model.forward = lambda x: own(x) * 3  # type: ignore[method-assign]
    fast = compiled(model)
    expected = model.predict_step(X)
    assert torch.equal(fast.predict_step(X), expected)
    assert torch.equal(model.predict_step(X), expected)
    assert torch.equal(fast(X), model(X))


def test_the_compiled_forward_may_be_given_to_the_model(model: Predictor) -> None:
    expected, steps = model(X), model.predict_step(X)
    fast = compiled(model)
    model.forward = fast.forward  # type: ignore[method-assign]
    assert torch.equal(model(X), expected)
    assert torch.equal(model.predict_step(X), steps)
    assert torch.equal(fast(X), expected)
    assert torch.equal(fast.predict_step(X), steps)
    assert len(fast.graphs) == 1
    twin = copy.deepcopy(model)
    assert torch.equal(twin(X), expected)
    again = pickle.loads(pickle.dumps(fast))
    assert torch.equal(again(X), expected)
    del model.forward
    assert torch.equal(model(X), expected)


def test_hooks_of_the_model_run_once_in_methods(model: Predictor) -> None:
    seen: list[int] = []
    model.register_forward_hook(lambda module, args, result: seen.append(1))
    fast = compiled(model)
    fast.predict_step(X, 2)
    assert len(seen) == 2


def test_methods_train(model: Predictor) -> None:
    fast = compiled(model.train())
    fast.predict_step(X).sum().backward()
    mine = model.linear.weight.grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    model.predict_step(X).sum().backward()
    assert torch.equal(mine, model.linear.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["lambda", "partial", "call"])
def test_a_forward_that_only_calls_the_compiled_model_is_refused_at_once(model: Predictor, form: str) -> None:
    fast = compiled(model)
    run = fast.forward
    replacements: dict[str, Any] = {
        "lambda": lambda x: run(x),
        "partial": functools.partial(run),
        "call": lambda x: fast(x),
    }
    model.forward = replacements[form]
    with pytest.raises(dovetail.InvalidArgument, match=r"Assign `compiled\.forward` itself"):
        model(X)
    del model.forward
    assert torch.equal(model(X), fast(X))


def test_a_forward_around_the_models_own_is_no_recursion(model: Predictor) -> None:
    own = model.forward
    model.forward = lambda x: own(x) * 2
    fast = compiled(model)
    assert torch.equal(fast(X), own(X) * 2)
    assert len(fast.graphs) == 1


class Moody(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.training else x * 2


@pytest.mark.parametrize("how", ["submodule", "forward", "torch.compile"])
@torch.no_grad()
def test_a_model_with_compiled_submodules_is_compiled(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Moody()).eval()
    expected = {mode: model.train(mode)(X) for mode in (True, False)}
    for i in range(2):
        if how == "submodule":
            model[i] = compiled(model[i])
        elif how == "forward":
            model[i].forward = compiled(model[i]).forward
        else:
            model[i] = torch.compile(model[i], backend="eager")
    fast = compiled(model)
    for mode in (False, True, False):
        assert torch.equal(fast.train(mode)(X), expected[mode])
    model[1].train()
    assert torch.equal(fast(X), model(X))
    assert not [d for d in fast.diagnostics if d.kind != "recompiled"]
