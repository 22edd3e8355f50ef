"""State outside of layers that changes from one call to the next: what reads it is traced, or copied from its like."""

import contextlib
import contextvars
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from .replayed import SHARED, Layer, Namespace, Replays, Scaled, Stack, check

COUNT = 0
CURRENT: contextvars.ContextVar[float] = contextvars.ContextVar("CURRENT", default=1.0)
LOCAL = threading.local()


def reset() -> None:
    global COUNT
    COUNT = 0
    Namespace.scale = 1.0
    SHARED.__dict__.clear()
    LOCAL.scale = 1.0


@functools.lru_cache
def cached_count(kind: str) -> float:
    return COUNT + 1.0


class CachedBefore(Scaled):
    def scale(self) -> Any:
        return cached_count("a")


class Weak(Scaled):
    """Reads an attribute of the model, which the model sets for a while."""

    def scale(self) -> Any:
        return self.owner().current

    owner: Any


class Setting(Stack):
    """Lets something be in another state for the third layer and those after the fourth."""

    def __init__(self, make: Callable[[int], nn.Module], entered: Callable[..., Any]) -> None:
        super().__init__(make, depth=8)
        self.entered = entered

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            state = self.entered(self, layer) if i == 2 or i > 4 else contextlib.nullcontext()
            with state:
                x = layer(x)
        return x


class ReadsGlobal(Scaled):
    def scale(self) -> Any:
        return COUNT + 1


class ScalesByGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (COUNT + 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class ReadsInFunction(Scaled):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return ScalesByGlobal.apply(super().forward(x))


def scaled_by_global(x: Tensor) -> Tensor:
    return x * (COUNT + 1)


class ReadsInMap(Scaled):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return torch.vmap(scaled_by_global)(super().forward(x))


class ReadsInCheckpoint(Scaled):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        y = super().forward(x)
        return checkpoint(scaled_by_global, y, use_reentrant=False)


class ReadsInComprehension(Scaled):
    def scale(self) -> Any:
        return sum(factor * (lambda: COUNT + 1)() for factor in (1, 2))


class ReadsInGenerator(Scaled):
    def scales(self) -> Iterator[int]:
        yield 1
        yield COUNT + 1

    def scale(self) -> Any:
        return max(self.scales())


class ReadsContext(Scaled):
    def scale(self) -> Any:
        return CURRENT.get()


class ReadsLocal(Scaled):
    def scale(self) -> Any:
        return LOCAL.scale


class ReadsOwn(Scaled):
    def scale(self) -> Any:
        return self.value


class ReadsOwnDict(Scaled):
    def scale(self) -> Any:
        return self.__dict__.get("value", 1.0)


class ReadsVars(Scaled):
    def scale(self) -> Any:
        return vars(self).get("value", 1.0)


class ReadsComposedName(Scaled):
    value_of_a = 1.0

    def scale(self) -> Any:
        kind = "a"
        return getattr(self, f"value_of_{kind}") * getattr(self, "val" + "ue")


class ReadsUnknownName(Scaled):
    def __getattr__(self, name: str) -> Any:
        return SHARED.__dict__.get(name, 1.0) if name == "missing" else super().__getattr__(name)

    def scale(self) -> Any:
        return self.missing


class ReadsSibling(Scaled):
    siblings: Any = ()

    def scale(self) -> Any:
        return SHARED.sibling.value


class ReadsEnvironment(Scaled):
    def scale(self) -> Any:
        return 2.0 if os.environ.get("DOVETAIL_TEST_SCALE") else 1.0


class ReadsClass(Scaled):
    def scale(self) -> Any:
        return 2.0 if type(self) is getattr(SHARED, "kind", None) else 1.0


class ReadsMembership(Scaled):
    def scale(self) -> Any:
        return 2.0 if self in SHARED.__dict__.get("layers", ()) else 1.0


class CreatesTensor(Scaled):
    def scale(self) -> Any:
        return torch.ones(8).to(torch.float32) + torch.ones(8, dtype=torch.float32)


class ReadsMode(Scaled):
    def scale(self) -> Any:
        return 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0


class ReadsReport(Scaled):
    def scale(self) -> Any:
        return torch.get_num_threads()


class ReadsArgument(Scaled):
    """Reads an attribute of its argument, and leaves one on its result."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x) * getattr(x, "factor", 1.0)


class LeavesAttribute(Scaled):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        y: Any = super().forward(x)
        y.factor = 2.0
        return y


class ReadsShared(Scaled):
    def scale(self) -> Any:
        return getattr(SHARED.tensor, "factor", 1.0)


class ReadsVersion(Scaled):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x) * (2.0 if x._version else 1.0)


class ReadsFormula(Scaled):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x) * (2.0 if "Mul" in type(x.grad_fn).__name__ else 1.0)


@contextlib.contextmanager
def changed(setter: Callable[[Any], Any], value: Any, old: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(old)


def set_global(value: int) -> None:
    global COUNT
    COUNT = value


def in_global(*_: Any) -> Any:
    return changed(set_global, 4, 0)


def in_cleared_cache(*_: Any) -> Any:
    def set_and_clear(value: int) -> None:
        set_global(value)
        cached_count.cache_clear()

    return changed(set_and_clear, 4, 0)


def in_context(*_: Any) -> Any:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        token = CURRENT.set(3.0)
        yield
        CURRENT.reset(token)

    return entered()


def in_local(*_: Any) -> Any:
    return changed(lambda v: setattr(LOCAL, "scale", v), 2.0, 1.0)


def in_attribute(_: Any, layer: Any) -> Any:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        layer.value = 3.0
        yield
        del layer.value

    return entered()


def in_class(*_: Any) -> Any:
    return changed(lambda v: setattr(Scaled, "value", v), 3.0, 1.0)


def in_shared(name: str, value: Callable[[Any, Any], Any]) -> Any:
    @contextlib.contextmanager
    def entered(model: Any, layer: Any) -> Iterator[None]:
        setattr(SHARED, name, value(model, layer))
        yield
        delattr(SHARED, name)

    return entered


def in_environment(*_: Any) -> Any:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        os.environ["DOVETAIL_TEST_SCALE"] = "1"
        yield
        del os.environ["DOVETAIL_TEST_SCALE"]

    return entered()


def in_dtype(*_: Any) -> Any:
    return changed(torch.set_default_dtype, torch.float64, torch.float32)


def in_deterministic(*_: Any) -> Any:
    return changed(torch.use_deterministic_algorithms, True, False)


def in_replaced_function(*_: Any) -> Any:
    return changed(lambda f: setattr(functional, "layer_norm", f), scaled_norm, functional.layer_norm)


def scaled_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.layer_norm(x, *args, **kwargs) * 2


class Doubles(TorchFunctionMode):
    factor = 2

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is torch.tanh else result


def in_threads(*_: Any) -> Any:
    return changed(torch.set_num_threads, 3, torch.get_num_threads())


class NamesMode(Scaled):
    """Names the class of the mode, so that the code that it runs is known."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return x if isinstance(x, Doubles) else super().forward(x)


@pytest.mark.parametrize(
    ("make", "entered", "count"),
    [
        (ReadsGlobal, in_global, 4),
        (ReadsInMap, in_global, None),
        (ReadsInCheckpoint, in_global, None),
        (ReadsInComprehension, in_global, 4),
        (ReadsInGenerator, in_global, 4),
        (CachedBefore, in_cleared_cache, 0),
        (ReadsContext, in_context, 4),
        (ReadsLocal, in_local, 4),
        (ReadsOwn, in_attribute, 4),
        (ReadsOwn, in_class, 4),
        (ReadsOwnDict, in_attribute, None),
        (ReadsVars, in_attribute, None),
        (ReadsComposedName, in_attribute, None),
        (ReadsUnknownName, in_shared("missing", lambda *_: 2.0), None),
        (ReadsEnvironment, in_environment, 0),
        (ReadsClass, in_shared("kind", lambda _, layer: type(layer)), 4),
        (ReadsClass, in_shared("kind", lambda *_: Layer), 4),
        (ReadsMembership, in_shared("layers", lambda model, _: [model.layers[2], model.layers[6]]), None),
        (CreatesTensor, in_dtype, 4),
        (ReadsMode, in_deterministic, 4),
        (ReadsReport, in_threads, 4),
        (Scaled, in_replaced_function, None),
        (Scaled, lambda *_: Doubles(), None),
        (Scaled, lambda *_: torch.no_grad(), 1),
        (Scaled, lambda *_: torch.autocast("cpu", torch.bfloat16), None),
        (Scaled, lambda *_: contextlib.nullcontext(), 6),
    ],
)
def test_state_that_changes_between_layers(
    make: Any, entered: Any, count: int | None, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset()
    replayed = check(Setting(make, entered).eval(), (torch.randn(3, 8),), replays, monkeypatch, reset)
    # Four layers are in one state, and four in the other.
    assert count is None or replayed == count


def test_a_mode_with_another_attribute(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = Doubles()

    class InMode(Stack):
        def forward(self, x: Tensor) -> Any:
            for i, layer in enumerate(self.layers):
                mode.factor = 2 + i // 3
                with mode:
                    x = layer(x)
            return x

    assert check(InMode(NamesMode).eval(), (torch.randn(3, 8),), replays, monkeypatch) == 0


class Attributes(Stack):
    """Lets arguments of the first three layers have another attribute than those of the others."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            x.factor = SHARED.tensor.factor = 1.0 + i // 3  # type: ignore[attr-defined]
            x = layer(x)
        return x


class Results(Stack):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) * getattr(x, "factor", 1.0)
        return x


class Histories(Stack):
    """Lets the arguments of the first three layers be computed otherwise than those of the others."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            x = x + 1
            x = x.mul_(2) if i < 3 else x.add(2)
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("outer", "make"),
    [
        (Attributes, ReadsArgument),
        (Attributes, ReadsShared),
        (Results, LeavesAttribute),
        (Histories, ReadsVersion),
        (Histories, ReadsFormula),
    ],
)
def test_state_of_tensors_that_no_operation_has(
    outer: Any, make: Any, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sharing(outer):
        def forward(self, x: Tensor) -> Any:
            SHARED.tensor = torch.sin(x)
            return super().forward(x)

    model = Sharing(make, depth=6).eval()
    assert check(model, (torch.randn(3, 8),), replays, monkeypatch, reset) == 0


def test_functions_with_a_formula_of_their_own(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Setting(ReadsInFunction, in_global).eval()
    with torch.no_grad():
        check(model, (torch.randn(3, 8),), replays, monkeypatch, reset)


def test_attributes_of_other_layers(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadsNext(Scaled):
        following: Any

        def scale(self) -> Any:
            return self.following[0].value

    model: Any = Stack(ReadsNext, depth=7).eval()
    for layer, following in zip(model.layers, (*model.layers[1:], Scaled(0)), strict=True):
        layer.following = [following]
    model.layers[4].value = 3.0
    check(model, (torch.randn(3, 8),), replays, monkeypatch)


def test_attributes_of_the_model_that_change(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner(Stack):
        current = 1.0

        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            for i, layer in enumerate(self.layers):
                self.current = 1.0 + i // 3
                x = layer(x)
            del self.current
            return x

    model: Any = Owner(Weak, depth=6).eval()
    for layer in model.layers:
        layer.owner = weakref.ref(model)
    check(model, (torch.randn(3, 8),), replays, monkeypatch)


def test_weights_that_layers_share_in_pairs(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    class Borrows(Layer):
        borrowed: Any

        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return self.borrowed[0](super().forward(x))

    model: Any = Stack(Borrows, depth=7).eval()
    model.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    for i, layer in enumerate(model.layers):
        layer.borrowed = [model.others[i // 3]]
    assert check(model, (torch.randn(3, 8),), replays, monkeypatch) == 0


def test_weights_of_others_that_layers_read(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    class Borrows(Layer):
        borrowed: Any

        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return functional.linear(super().forward(x), self.borrowed[0].weight)

    model: Any = Stack(Borrows, depth=7).eval()
    model.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    for i, layer in enumerate(model.layers):
        layer.borrowed = [model.others[i // 3]]
    assert check(model, (torch.randn(3, 8),), replays, monkeypatch) == 2


def test_tensors_of_the_model_that_layers_read(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    class Masked(Scaled):
        def scale(self) -> Any:
            return SHARED.mask

    class Masking(Stack):
        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            SHARED.mask = torch.sigmoid(x)
            for i, layer in enumerate(self.layers):
                if i == 4:
                    SHARED.mask = torch.tanh(x)
                x = layer(x)
            return x

    assert check(Masking(Masked, depth=8).eval(), (torch.randn(3, 8),), replays, monkeypatch, reset) == 4


def test_layers_that_are_in_other_groups_of_configurations(
    replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Configured(Scaled):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.config = Namespace()
            self.config.scale = 2.0 if index % 3 == 0 else 1.0
            self.config.unread = index

        def scale(self) -> Any:
            return self.config.scale

    model = Stack(Configured, depth=9).eval()
    assert check(model, (torch.randn(3, 8),), replays, monkeypatch, reset) == 5
