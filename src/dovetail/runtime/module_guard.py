"""What captures of a model hold to: its tensors and modules, their code, and the numbers and hooks that are baked in."""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from dovetail.ir.weight_guard import dict_version

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


# What every module has is torch's own business; of that only the mode is baked into a capture.
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_BAKED = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_DTYPE, _DEVICE = operator.attrgetter("dtype"), operator.attrgetter("device")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_ALL = [getattr(torch_modules, f"_global{kind}") for kind in _HOOKS]
_METHODS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
    functools.partialmethod,
    staticmethod,
    classmethod,
    property,
)
_MOST_VARIANTS = 64
Settings = tuple[Any, ...]


class Makeup:
    """A model as it is now: which parameters, buffers and modules it has, and what may change without a new one.

    Attributes of modules that are neither numbers, strings, tensors nor functions (a list, a configuration object) are
    not looked at, and of their classes only functions are.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        # A compiled submodule has the mode of the module that it was compiled from.
        modules += [m.overridden for m in modules if isinstance(m, ForwardOverride)]
        self._tables = [t for m in modules for t in (m._parameters, m._buffers, m._modules)]
        self._parts = _values(self._tables)
        self._parameters = [m._parameters for m in modules]
        self._tensors = [v for v in self._parts if isinstance(v, Tensor)]
        self._dtypes = list(map(_DTYPE, self._tensors))
        # A model is moved module by module.
        heads = [next((v for v in m._parameters.values() if v is not None), None) for m in modules]
        self._heads = [v for v in heads if v is not None]
        self._devices = list(map(_DEVICE, self._heads))
        self._loose = [
            (m.__dict__, name, value)
            for m in modules
            for name, value in m.__dict__.items()
            if isinstance(value, Tensor)
        ]
        self._baked = [(operator.itemgetter(*_baked(m.__dict__)), m.__dict__) for m in modules]
        self._modules = modules
        self._names = [(m, m.__dict__, tuple(m.__dict__)) for m in modules]
        self._functions = [
            (i, name, m.__dict__)
            for i, m in enumerate(modules)
            for name, value in m.__dict__.items()
            if name != "forward" and name not in _OWN and isinstance(value, _METHODS)
        ]
        # Classes and functions, as they were one time or another; the first is how they are now.
        self._variants: list[Any] = []
        self._methods: dict[type, tuple[list[int] | None, Any]] = {}
        self._dicts = [*(m.__dict__ for m in modules), *self._tables]
        # Those of the model itself run around each call.
        self._hooks = [*(m.__dict__[kind] for m in modules[1:] for kind in _HOOKS), *_HOOKS_OF_ALL]
        # One value, for threads: the classes, the dicts, how often they had been written, and the settings.
        self._last: tuple[list[type], list[Any], list[int], Settings] = ([], [], [], ())
        self._variants.append(self._code(list(map(type, modules)), self._added()))

    def settings(self) -> Settings | None:
        """Modes, numbers, strings, code and hooks as they are now; None if the model has other parts than it had.

        Parts are modules and tensors, the dtypes and devices of these, and attributes that were removed.
        """
        kinds, dicts, seen, settings = self._last
        classes = list(map(type, self._modules))
        versions = [] if dict_version is None else list(map(dict_version, dicts))
        if dict_version is None or versions != seen or classes != kinds:
            if dict_version is not None:
                dicts = [*self._dicts, *map(_namespace, _lineage(classes))]
                versions = list(map(dict_version, dicts))
            current = self._current(classes)
            if current is None:
                return None
            settings = current
            self._last = (classes, dicts, versions, settings)
        # Neither of these needs a write to any dict.
        if (
            list(map(_DTYPE, self._tensors)) != self._dtypes
            or list(map(_DEVICE, self._heads)) != self._devices
        ):
            return None
        return (
            (settings, tuple(tuple(hooks.items()) for hooks in self._hooks)) if any(self._hooks) else settings
        )

    def is_original(self, settings: Settings) -> bool:
        """Whether the code of the model was, with these settings, what it was at first."""
        variant = settings[0]
        return self.is_original(variant) if isinstance(variant, tuple) else variant == 0

    def _current(self, classes: list[type]) -> Settings | None:
        parts = _values(self._tables)
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            return None
        if not all(attributes.get(name) is value for attributes, name, value in self._loose):
            return None
        try:
            now = chain.from_iterable([get(attributes) for get, attributes in self._baked])
            baked = tuple(map(_key, now))
        except KeyError:
            return None
        added = self._added()
        numbers = tuple((i, name, _key(value)) for i, name, value in added if _is_baked(value))
        code = self._code(classes, added)
        if code not in self._variants:
            if len(self._variants) >= _MOST_VARIANTS:
                return None
            self._variants.append(code)
        return (self._variants.index(code), numbers, *baked)

    def _added(self) -> list[tuple[int, str, Any]]:
        """Attributes that modules were given since, or that stand in the place of a function of their class."""
        added: list[tuple[int, str, Any]] = []
        for i, (module, attributes, names) in enumerate(self._names):
            if "forward" in attributes:
                forward = instance_forward(module)
                if forward is not None and not _is_own(module, forward):
                    added.append((i, "forward", forward))
            if tuple(attributes) != names:
                known = frozenset(names)
                added += [
                    (i, n, v)
                    for n, v in attributes.items()
                    if n not in known and n not in _OWN and n != "forward"
                ]
        return added

    def _code(self, classes: list[type], added: list[tuple[int, str, Any]]) -> Any:
        """The classes of the modules, and the functions that these and the modules themselves have."""
        given = [(i, n, v) for i, n, v in added if n == "forward" or isinstance(v, (*_METHODS, Tensor))]
        given += [(i, name, attributes.get(name)) for i, name, attributes in self._functions]
        same = [(i, name, v if isinstance(v, _METHODS) else _Identity(v)) for i, name, v in given]
        return classes, [self._methods_of(kind) for kind in _lineage(classes)], same

    def _methods_of(self, kind: type) -> Any:
        """The functions of a class that it does not inherit just so."""
        version = None if dict_version is None else [dict_version(_namespace(k)) for k in kind.__mro__[:-1]]
        known = self._methods.get(kind)
        if known is None or version is None or known[0] != version:
            bases = [vars(base) for base in kind.__mro__[1:]]
            inherited = {name: value for base in reversed(bases) for name, value in base.items()}
            own = [(n, v) for n, v in vars(kind).items() if _is_run(n, v) and inherited.get(n) is not v]
            known = self._methods[kind] = (version, own)
        return known[1]

    def has_stand_ins(self) -> bool:
        """Whether parameters are replaced by tensors for a while, as `torch.func.functional_call` does."""
        found = _values(self._parameters)
        return any(v is not None and not isinstance(v, nn.Parameter) for v in found)


def has_hooks_on_all_modules() -> bool:
    """Whether hooks are registered for every module there is: those that trace a model among them."""
    return any(_HOOKS_OF_ALL)


class _Identity:
    """An object that equals only itself, whatever it says."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _values(tables: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable([table.values() for table in tables]))


def _key(value: Any) -> tuple[str, Any]:
    # 1, 1.0 and True are equal, and a graph with one of them in it is not one with another.
    return type(value).__name__, value if _is_baked(value) else id(value)


def _lineage(classes: Iterable[type]) -> list[type]:
    """The classes and their bases, each once, without what all modules have."""
    found = dict.fromkeys(base for kind in dict.fromkeys(classes) for base in kind.__mro__)
    return [kind for kind in found if kind not in nn.Module.__mro__]


def _namespace(kind: type) -> Any:
    """The dict behind the read-only view that a class gives of its attributes."""
    return gc.get_referents(vars(kind))[0]


def _is_run(name: str, value: Any) -> bool:
    """Whether a class attribute is a function that forward may run: not one for building, printing or loading."""
    if name in ("forward", "__call__"):
        return True
    return isinstance(value, _METHODS) and not (name.startswith("__") or hasattr(nn.Module, name))


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Whether an attribute `forward` of an instance makes no difference to what calls run."""
    of_class = getattr(type(module), "forward", None)
    # A data descriptor comes before what an instance has.
    if isinstance(of_class, property):
        return True
    is_bound = isinstance(forward, types.MethodType) and forward.__self__ is module
    return is_bound and forward.__func__ is of_class


def _baked(attributes: dict[str, Any]) -> list[str]:
    names = sorted(n for n, v in attributes.items() if n not in _OWN and _is_baked(v))
    # `itemgetter` gives a tuple for two names or more. The mode of some wrappers is a property.
    always = "training" if "training" in attributes else "_parameters"
    return [*names, always, always]


def _is_baked(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_baked(v) for v in cast("tuple[Any, ...]", value))
    return isinstance(value, _BAKED)
