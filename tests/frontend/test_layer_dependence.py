"""Layers that differ in anything that their code reads, or that change it, are traced: never replayed from one another."""

import argparse
import collections
import contextlib
import contextvars
import enum
import functools
import inspect
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

import dovetail
from dovetail import config
from dovetail.errors import CaptureMismatch
from dovetail.frontend import capture as frontend

from .replayed import DEPTH, SHARED, Layer, Namespace, Replays, Scaled, Stack, check

COUNT = 0
STATE: dict[str, Any] = {}
NUMBERS: list[float] = []
TABLE = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 4.0}
CURRENT: contextvars.ContextVar[float] = contextvars.ContextVar("CURRENT", default=1.0)
LOCAL = threading.local()
COUNTER: Any = itertools.count()
QUEUE: collections.deque[float] = collections.deque()


def reset() -> None:
    global COUNT, COUNTER
    COUNT, COUNTER = 0, itertools.count()
    STATE.clear()
    STATE["count"] = 0
    NUMBERS[:] = [5.0, 4.0, 1.0, 1.0, 1.0]
    QUEUE.clear()
    QUEUE.extend(NUMBERS)
    Namespace.scale = 1.0
    SHARED.__dict__.clear()
    Counted.calls = 0
    LOCAL.scale = 1.0
    random.seed(0)


class GlobalCount(Scaled):
    def scale(self) -> Any:
        global COUNT
        COUNT += 1
        return COUNT


class CountInDict(Scaled):
    def scale(self) -> Any:
        STATE["count"] += 1
        return STATE["count"]


class PopsList(Scaled):
    def scale(self) -> Any:
        return NUMBERS.pop()


class PopsQueue(Scaled):
    def scale(self) -> Any:
        return QUEUE.pop()


class Counted(Scaled):
    calls: ClassVar[int] = 0

    def scale(self) -> Any:
        Counted.calls += 1
        return Counted.calls


class WritesObject(Scaled):
    """Only writes what the model reads afterwards."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        y = super().forward(x)
        SHARED.last = torch.sin(y)
        return y


class Iterates(Scaled):
    def scale(self) -> Any:
        return next(COUNTER)


class DefaultArgument(Scaled):
    def scale(self, calls: list[int] = []) -> Any:  # noqa: B006
        calls.append(1)
        return 1.0 + (len(calls) % DEPTH)


def nonlocal_count() -> Callable[[], float]:
    count = 0

    def scale() -> float:
        nonlocal count
        count += 1
        return 1.0 + count % DEPTH

    return scale


NEXT = nonlocal_count()


class Nonlocal(Scaled):
    def scale(self) -> Any:
        return NEXT()


class ByIndex(Scaled):
    def scale(self) -> Any:
        return TABLE[self.layer_idx]


class DrawsNumber(Scaled):
    def scale(self) -> Any:
        return random.random()


@functools.lru_cache
def cached_scale(index: int) -> float:
    return 2.0 * index


class CachedByIndex(Scaled):
    def scale(self) -> Any:
        return cached_scale(self.layer_idx)


class Address(Scaled):
    def scale(self) -> Any:
        return 1.0 if id(self) else 2.0


class CallerFrame(Scaled):
    def scale(self) -> Any:
        frame: Any = inspect.currentframe()
        while "number" not in frame.f_locals:
            frame = frame.f_back
        return float(frame.f_locals["number"])


class NamesNumber(Stack):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x) + number
        return x


class NumpyScale(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.array = np.array([1.0, float(index // 3)])

    def scale(self) -> Any:
        return float(self.array[1])


class ConstantScale(Scaled):
    """The scale is a tensor that is neither a parameter nor a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.constant = torch.tensor(float(index // 3))

    def scale(self) -> Any:
        return self.constant


class PartialScale(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.function = functools.partial(torch.mul, other=float(index))

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return self.function(super().forward(x))


class ClosureScale(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.function = lambda x: x * index

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return self.function(super().forward(x))


@torch.library.custom_op("dovetail_tests::sine_of_layer", mutates_args=())
def sine_of_layer(x: Tensor) -> Tensor:
    return torch.sin(x)


@sine_of_layer.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class FormatsAttribute(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.number = index // 3

    def scale(self) -> Any:
        return float("{0.number}".format(self))  # noqa: UP030, UP032


class Renaming:
    """Gives an attribute under another name."""

    def __init__(self, number: float) -> None:
        self._number = number

    def __getattribute__(self, name: str) -> Any:
        if name == "number":
            name = "_" + name
        return object.__getattribute__(self, name)


class ReadsRenamed(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.table = [Renaming(index // 3)]

    def scale(self) -> Any:
        return self.table[0].number


class ContextDefault(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.variables = [contextvars.ContextVar("variable", default=index // 3)]

    def scale(self) -> Any:
        return self.variables[0].get()


class ReadsAnnotation(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.function = lambda: None
        self.function.__annotations__ = {"number": index // 3}

    def scale(self) -> Any:
        return self.function.__annotations__["number"]


class CustomOperator(Scaled):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return sine_of_layer(super().forward(x))


class Parametrized(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        parametrize.register_parametrization(self.linear, "weight", nn.Sequential(nn.Tanh(), nn.Identity()))


@pytest.mark.parametrize(
    "make",
    [
        GlobalCount,
        CountInDict,
        PopsList,
        PopsQueue,
        Counted,
        Iterates,
        DefaultArgument,
        Nonlocal,
        ByIndex,
        DrawsNumber,
        CachedByIndex,
        Address,
        ConstantScale,
        PartialScale,
        ClosureScale,
        CustomOperator,
        Parametrized,
        ReadsRenamed,
    ],
)
def test_layers_that_are_never_replayed(make: Any, replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    reset()
    model = Stack(make).eval()
    assert check(model, (torch.randn(3, 8),), replays, monkeypatch, reset) == 0


class Settings(collections.UserDict[str, int]):
    """A class whose methods are those of the standard library."""


class ReadsSettings(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.settings = Settings(number=index // 3)

    def scale(self) -> Any:
        return self.settings["number"]


class Arguments(argparse.Namespace):
    """Another one, whose methods read all attributes."""


class SearchesArguments(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.arguments = Arguments(**{"is_last": True} if index > 2 else {})

    def scale(self) -> Any:
        return 2.0 if "_".join(["is", "last"]) in self.arguments else 3.0


class Resource:
    """An object whose attribute is only read by code of the standard library."""

    close: Any = int


class Closes(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.resource = Resource()
        self.resource.close = int if index < 3 else float

    def scale(self) -> Any:
        with contextlib.closing(self.resource):
            return 2.0


class Keys:
    """A mapping whose keys only Python itself reads."""

    def __init__(self, keys: dict[str, int]) -> None:
        self.keys = keys.keys

    def __getitem__(self, key: str) -> int:
        return 1


class CopiesMapping(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.mapping: Any = Keys(dict.fromkeys("abc" if index < 3 else "ab", 1))

    def scale(self) -> Any:
        return len({**self.mapping})


class ReadsLock(Scaled):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.lock = threading.Lock()
        if index > 2:
            self.lock.acquire()

    def scale(self) -> Any:
        return 2.0 if self.lock.locked() else 3.0


@pytest.mark.parametrize(
    "make",
    [
        NumpyScale,
        FormatsAttribute,
        ContextDefault,
        ReadsAnnotation,
        ReadsSettings,
        SearchesArguments,
        Closes,
        CopiesMapping,
        ReadsLock,
    ],
)
def test_the_third_of_three_equal_layers(
    make: Any, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fourth and the fifth have another value.
    assert check(Stack(make).eval(), (torch.randn(3, 8),), replays, monkeypatch, reset) == 1


class Passing(Stack):
    """Calls each layer with a value."""

    def __init__(self, value_of: Callable[[int], Any]) -> None:
        super().__init__(ReadsArgument)
        self.value_of = value_of

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            x = layer(x, self.value_of(i))
        return x


class ReadsArgument(Layer):
    def forward(self, x: Tensor, scale: Any = 1.0) -> Any:
        return super().forward(x) * getattr(scale, "number", 1.0)


class Tag(str):
    """A string with an attribute."""

    number: float


class Quiet(float):
    """A number whose text does not say which."""

    number = property(float)

    def __repr__(self) -> str:
        return "Quiet"


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2


def tagged(index: int) -> Tag:
    tag = Tag("a")
    tag.number = float(index // 3)
    return tag


def quiet(index: int) -> Quiet:
    return Quiet(index // 3)


@pytest.mark.parametrize(
    ("value_of", "count"),
    [
        (tagged, 0),
        (quiet, 0),
        (lambda _: Kind.FIRST, DEPTH - 2),
        (lambda index: Kind.FIRST if index < 3 else Kind.SECOND, 1),
    ],
)
def test_arguments_of_other_classes(
    value_of: Any, count: int, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(Passing(value_of).eval(), (torch.randn(3, 8),), replays, monkeypatch) == count


def numbers() -> Iterator[float]:
    yield from (1.0, 1.0, 1.0, 4.0, 5.0)


class Generates(Scaled):
    def scale(self) -> Any:
        return next(STATE["numbers"])


def test_the_iterator_of_a_generator(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    class Generating(Stack):
        def forward(self, x: Tensor) -> Any:
            STATE["numbers"] = numbers()
            return super().forward(x)

    assert check(Generating(Generates).eval(), (torch.randn(3, 8),), replays, monkeypatch, reset) == 0


class Marking(Stack):
    """Sets a flag before each layer, and reads it afterwards."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            SHARED.is_called = False
            x = layer(x)
            x = x * 2 if SHARED.is_called else x
        return x


class SetsAttribute(Scaled):
    def scale(self) -> Any:
        name = "_".join(["is", "called"])
        setattr(SHARED, name, True)
        return 1.0


class SetsByObject(Scaled):
    def scale(self) -> Any:
        name = "_".join(["is", "called"])
        object.__setattr__(SHARED, name, True)
        return 1.0


@pytest.mark.parametrize("make", [SetsAttribute, SetsByObject])
def test_attributes_that_layers_set_by_computed_names(
    make: Any, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(Marking(make).eval(), (torch.randn(3, 8),), replays, monkeypatch, reset) == 0


def test_callers_that_a_layer_reads(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(NamesNumber(CallerFrame), (torch.randn(3, 8),), replays, monkeypatch, reset) == 0


def test_a_value_that_layers_leave_in_an_object(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading(Stack):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), SHARED.last

    assert check(Reading(WritesObject), (torch.randn(3, 8),), replays, monkeypatch, reset) == 0


def test_random_draws(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    class Draws(Layer):
        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return functional.dropout(super().forward(x) * torch.rand(3, 8), 0.5, training=True)

    assert check(Stack(Draws).train(), (torch.randn(3, 8),), replays, monkeypatch) == DEPTH - 2


def test_conditions_on_data(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    class Chooses(Scaled):
        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            y = super().forward(x)
            return torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y - 1, (y,))

    # Eager `cond` reads gradients of values that are not leaves, of which torch warns.
    with torch.no_grad():
        assert check(Stack(Chooses).eval(), (torch.randn(3, 8),), replays, monkeypatch) == 0


def test_a_debugger_lets_every_layer_be_traced(replays: Replays) -> None:
    def tracer(*_: Any) -> None:
        return None

    model, x = Stack().eval(), torch.randn(3, 8)
    sys.settrace(tracer)
    try:
        dovetail.capture(model, (x,))
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)
    assert replays.count == 0
    dovetail.capture(model, (x,))
    assert replays.count == DEPTH - 2


def test_a_graph_that_differs_is_captured_again_in_full(
    replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, graphs = frontend.compare_with_model, list[Any]()

    def compared(model: Any, graph: Any, *given: Any) -> None:
        graphs.append(graph)
        if len(graphs) == 1:
            raise CaptureMismatch("result 0 is off")
        compare(model, graph, *given)

    monkeypatch.setattr(frontend, "compare_with_model", compared)
    model, x = Stack().eval(), torch.randn(3, 8)
    assert dovetail.capture(model, (x,), check_capture=True) is graphs[1]
    assert len(replays.instances) == 1
    graphs.clear()
    monkeypatch.setattr(config, "replay_layers", False)
    with pytest.raises(CaptureMismatch):
        dovetail.capture(model, (x,), check_capture=True)
