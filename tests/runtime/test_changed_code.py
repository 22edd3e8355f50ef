"""Code of a model that is replaced after compiling: on a module, on the model itself, or on a class."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail

X = torch.randn(3, 8)


class Gate(nn.Module):
    """A module with a method, a function among its attributes, and a number that its class has."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.act = torch.sigmoid

    def helper(self, x: Tensor) -> Tensor:
        return x + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.helper(x)) * self.factor


class NarrowGate(Gate):
    """Has the forward of its base."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate, self.relu = nn.Linear(8, 8), NarrowGate(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.gate(self.linear(x)) - 0.9)


class Other(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 5


def tripled(x: Tensor) -> Tensor:
    return x * 3


def on_instance(model: Model) -> None:
    model.relu.forward = tripled


def as_method(model: Model) -> None:
    model.gate.forward = types.MethodType(lambda self, x: self.helper(x) * 4, model.gate)


def as_partial(model: Model) -> None:
    model.gate.forward = functools.partial(torch.add, torch.ones(8))


def as_object(model: Model) -> None:
    class Called:
        def __call__(self, x: Tensor) -> Tensor:
            return x * 7

    model.relu.forward = Called()


def like_accelerate(model: Any) -> None:
    """Keeps the old forward on the module, and puts a wrapper in its place."""
    module = model.linear
    old = module._old_forward = module.forward

    def wrapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*args, **kwargs) * 2

    module.forward = functools.update_wrapper(functools.partial(wrapped, module), old)


def like_accelerate_on_top(model: Any) -> None:
    model._old_forward = model.forward
    model.forward = functools.partial(lambda module, x: module._old_forward(x) * 2, model)


def on_top(model: Model) -> None:
    model.forward = lambda x: model.linear(x) * 2


def on_top_as_method(model: Model) -> None:
    model.forward = types.MethodType(lambda self, x: self.gate(x), model)


def another_class(model: Model) -> None:
    model.relu.__class__ = Other


def another_class_on_top(model: Model) -> None:
    class Wrapped(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model.__class__ = Wrapped


def a_method_on_the_instance(model: Model) -> None:
    model.gate.helper = lambda x: x * 9


def a_function_attribute(model: Model) -> None:
    model.gate.act = torch.tanh


def a_number_of_the_class(model: Model) -> None:
    model.gate.factor = 4.0


@pytest.mark.parametrize(
    "change",
    [
        on_instance,
        as_method,
        as_partial,
        as_object,
        like_accelerate,
        like_accelerate_on_top,
        on_top,
        on_top_as_method,
        another_class,
        another_class_on_top,
        a_method_on_the_instance,
        a_function_attribute,
        a_number_of_the_class,
    ],
)
@pytest.mark.parametrize("through", [False, True])
def test_changes_of_modules_are_noticed(change: Callable[[Any], None], through: bool) -> None:
    torch.manual_seed(0)
    model = Model().eval()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    before = fast(X)
    assert torch.equal(before, model(X))
    change(fast if through and "top" not in change.__name__ else model)
    for _ in range(3):
        assert torch.equal(fast(X), model(X))
    assert not torch.equal(fast(X), before)
    assert len(fast.graphs) == 2


def doubled(old: Callable[..., Tensor], x: Tensor) -> Tensor:
    return old(x) * 2


def test_a_forward_of_the_compiled_module_is_its_own() -> None:
    """As accelerate wraps the forward of what it is given, compiled or not."""
    model = Model().eval()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    fast.forward = functools.partial(doubled, fast.forward)
    assert torch.equal(fast(X), model(X) * 2)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(twin(X), model(X) * 2)
    del fast.forward
    assert torch.equal(fast(X), model(X))
    assert len(fast.graphs) == 1


@pytest.fixture
def patched() -> Iterator[Callable[[type, str, Any], None]]:
    """Replace an attribute of a class, and put it back at the end."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch.setattr


@pytest.mark.parametrize(
    ("owner", "name", "function"),
    [
        (nn.ReLU, "forward", lambda self, x: F.relu(x) * 3),
        (NarrowGate, "forward", lambda self, x: self.helper(x) * 3),
        (Gate, "forward", lambda self, x: self.helper(x) * 3),
        (Gate, "helper", lambda self, x: x * 3),
        (Gate, "helper", staticmethod(lambda x: x * 3)),
        (nn.Linear, "forward", lambda self, x: F.linear(x, self.weight)),
        (Model, "forward", lambda self, x: self.linear(x)),
    ],
)
def test_functions_of_classes_are_noticed_and_so_is_their_return(
    owner: type, name: str, function: Any, patched: Callable[..., None]
) -> None:
    model = Model().eval()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    before, first = fast(X), getattr(owner, name)
    for _ in range(3):
        patched(owner, name, function, raising=False)
        for _ in range(2):
            assert torch.equal(fast(X), model(X))
        assert not torch.equal(fast(X), before)
        patched(owner, name, first)
        for _ in range(2):
            assert torch.equal(fast(X), before)
    # The first capture was kept, and that of the patched code too.
    assert len(fast.graphs) == 2


def test_what_no_call_runs_is_no_new_capture(patched: Callable[..., None]) -> None:
    model = Model().eval()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    fast(X)
    patched(nn.Linear, "__init__", lambda self: None)
    patched(nn.Linear, "extra_repr", lambda self: "")
    patched(Gate, "created", 5, raising=False)
    model.gate.notes = ["something"]
    model.relu.forward = model.relu.forward  # accelerate puts it back like this
    assert torch.equal(fast(X), model(X))
    assert len(fast.graphs) == 1


def test_what_is_put_back_runs_the_first_capture() -> None:
    model = Model().eval()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    before = fast(X)
    first = fast.graphs[0]
    model.relu.forward = tripled
    fast(X)
    del model.relu.forward
    assert torch.equal(fast(X), before)
    model.relu.__class__ = Other
    fast(X)
    model.relu.__class__ = nn.ReLU
    assert torch.equal(fast(X), before)
    assert fast.graphs[0] is first
    assert len(fast.graphs) == 3


def test_copies_and_pickles_do_not_confuse_code() -> None:
    model = Model().eval()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    before = fast(X)
    model.relu.__class__ = Other
    after = fast(X)
    for twin in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        assert torch.equal(twin(X), after)
        twin.relu.__class__ = nn.ReLU
        assert torch.equal(twin(X), before)
    model.relu.__class__ = nn.ReLU
    twin = pickle.loads(pickle.dumps(fast))
    assert len(twin.graphs) == 1
    assert torch.equal(twin(X), before)
    twin.relu.__class__ = Other
    assert torch.equal(twin(X), after)


def test_code_that_is_new_in_every_call_ends_in_the_models_own_forward() -> None:
    model = Model().eval()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False, recompile_limit=2)
    fast(X)
    model.relu.forward = tripled
    fast(X)
    model.relu.forward = lambda x: x * 5
    with pytest.warns(UserWarning, match="recompile limit of 2"):
        fast(X)
    for i in range(3):
        model.relu.forward = lambda x, i=i: x * (i + 7)
        assert torch.equal(fast(X), model(X))
    del model.relu.forward
    assert torch.equal(fast(X), model(X))
    assert len(fast.graphs) == 2


def test_an_attribute_that_compares_oddly() -> None:
    model = Model().eval()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    fast(X)
    model.gate.act = torch.ones(2)  # type: ignore[assignment]
    with pytest.raises(TypeError, match="not callable"):
        fast(X)
    model.gate.act = torch.sigmoid
    assert torch.equal(fast(X), model(X))
