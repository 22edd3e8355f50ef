"""A model's `forward` overridden by compiled code: while one of its methods runs, or for good by its user."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from torch import nn

_ACTIVE: ContextVar[tuple[MethodOverride, ...]] = ContextVar("_ACTIVE", default=())


class ForwardOverride:
    """Has a `forward` that runs compiled code of the module `overridden` in place of the module's own."""

    _model: nn.Module

    @property
    def overridden(self) -> nn.Module:
        """The module whose `forward` is replaced."""
        return self._model

    @property
    def instance_forward(self) -> Any:
        """What the module has as an attribute `forward` of its own beneath this one; None without any."""
        return None


def instance_forward(module: nn.Module) -> Any:
    """The attribute `forward` of a module itself, if it has one that does not run compiled code of that module."""
    forward = module.__dict__.get("forward")
    while _overrides(forward, module):
        forward = cast("ForwardOverride", forward.__self__).instance_forward
    return forward


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module, not one that runs compiled code of it."""
    if not is_overridden(module):
        return module.forward
    of_instance = instance_forward(module)
    return types.MethodType(type(module).forward, module) if of_instance is None else of_instance


def with_signature(method: types.FunctionType, forward: Callable[..., Any]) -> types.FunctionType:
    """A copy of a method with the signature of a module's `forward`.

    Callers inspect it: `generate` passes an attention mask only to a model whose `forward` has a parameter of that name.
    """
    copied = types.FunctionType(
        method.__code__, method.__globals__, method.__name__, method.__defaults__, method.__closure__
    )
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return copied
    owner = inspect.Parameter("__self", inspect.Parameter.POSITIONAL_ONLY)
    cast("Any", copied).__signature__ = signature.replace(parameters=[owner, *signature.parameters.values()])
    return copied


def is_overridden(module: nn.Module) -> bool:
    """Whether calls of a module may run compiled code of it."""
    return _overrides(module.__dict__.get("forward"), module)


def _overrides(forward: Any, module: nn.Module) -> bool:
    owner = getattr(forward, "__self__", None)
    return isinstance(owner, ForwardOverride) and owner.overridden is module


class MethodOverride(ForwardOverride):
    """Lets calls that a model's own methods make of it run compiled code, on the thread that runs the method.

    Its forward is an attribute of the model while any such method runs; for others it is the model's own.
    """

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        self._model, self._run = model, run
        self._beneath: Any = None
        self._methods = 0
        self._lock = threading.Lock()

    @property
    def instance_forward(self) -> Any:
        return self._beneath

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodOverride:
        # A copy of the model that a method makes is no compiled model.
        return MethodOverride(memo.get(id(self._model), self._model), self._run)

    def __reduce__(self) -> tuple[Any, ...]:
        return MethodOverride, (self._model, own_forward(self._model))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run compiled code in a method that `bound` returned, and the model's own forward elsewhere."""
        run = self._run if self in _ACTIVE.get() else own_forward(self._model)
        return run(*args, **kwargs)

    @contextmanager
    def active(self) -> Generator[None]:
        """Let calls of the model on this thread run compiled code."""
        token = _ACTIVE.set((*_ACTIVE.get(), self))
        with self._lock:
            self._methods += 1
            if self._methods == 1:
                self._beneath = self._model.__dict__.get("forward")
                function = with_signature(MethodOverride.forward, own_forward(self._model))
                self._model.__dict__["forward"] = types.MethodType(function, self)
        try:
            yield
        finally:
            with self._lock:
                self._methods -= 1
                if self._methods == 0:
                    self._remove()
            _ACTIVE.reset(token)

    def _remove(self) -> None:
        # The method may have set another one.
        if _overrides(self._model.__dict__.get("forward"), self._model):
            if self._beneath is None:
                del self._model.__dict__["forward"]
            else:
                self._model.__dict__["forward"] = self._beneath
        self._beneath = None

    def bound(self, method: types.MethodType) -> Callable[..., Any]:
        """A method of the model whose calls of the model run compiled code."""

        @functools.wraps(method)
        def overriding(*args: Any, **kwargs: Any) -> Any:
            with self.active():
                result = method(*args, **kwargs)
            if isinstance(result, types.GeneratorType):
                return self._steps(cast("Generator[Any, Any, Any]", result))
            if isinstance(result, types.CoroutineType):
                return self._awaited(cast("Coroutine[Any, Any, Any]", result))
            return result

        return overriding

    def _steps(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The same generator, with compiled code in each of its steps and not between them."""
        try:
            given: Any = None
            while True:
                with self.active():
                    try:
                        value = generator.send(given)
                    except StopIteration as end:
                        return end.value
                given = yield value
        finally:
            generator.close()

    async def _awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with self.active():
            return await coroutine
