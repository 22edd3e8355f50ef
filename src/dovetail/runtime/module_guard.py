"""The guard on a model's state: its modules and tensors, their code, and the numbers and hooks baked into captures.

Also `forward` overrides: attributes of a module that run compiled code in place of its own forward.
"""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules import module as torch_modules

from dovetail.ir.graph_module import HOOK_KINDS, HOOK_TABLES
from dovetail.ir.weight_fetch import DictSnapshot, TensorGuard

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
        """The attribute `forward` of the module that this one replaced; None without any."""
        return None


def instance_forward(module: nn.Module) -> Any:
    """Return the attribute `forward` of a module, if it has one that does not run compiled code of that module."""
    forward = module.__dict__.get("forward")
    while _overrides(forward, module):
        forward = cast("ForwardOverride", forward.__self__).instance_forward
    return forward


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module that does not run compiled code of it."""
    if not is_overridden(module):
        return module.forward
    of_instance = instance_forward(module)
    return types.MethodType(type(module).forward, module) if of_instance is None else of_instance


def without_hooks(model: nn.Module) -> nn.Module:
    """Return a shallow copy of a model without its own forward hooks, which run around each call, not in the graph."""
    # Classes that FSDP creates build a new module in their `__new__`.
    allocate: Any = GraphModule.__new__ if isinstance(model, GraphModule) else object.__new__
    copied: nn.Module = allocate(type(model))
    copied.__dict__.update(model.__dict__)
    copied.__dict__.update({name: OrderedDict() for name in HOOK_TABLES if name in model.__dict__})
    if is_overridden(model):
        del copied.__dict__["forward"]
        if (forward := instance_forward(model)) is not None:
            copied.__dict__["forward"] = forward
    return copied


def with_signature(method: types.FunctionType, forward: Callable[..., Any]) -> types.FunctionType:
    """Return a copy of a method with the signature of a module's `forward`.

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
    """Return whether calls of a module may run compiled code of it."""
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
        self._replaced: Any = None
        self._methods = 0
        self._lock = threading.Lock()

    @property
    def instance_forward(self) -> Any:
        return self._replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodOverride:
        # A copy of the model that a method makes is not a compiled model.
        return MethodOverride(memo.get(id(self._model), self._model), self._run)

    def __reduce__(self) -> tuple[Any, ...]:
        return MethodOverride, (self._model, own_forward(self._model))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run compiled code in a method that `bind` returned, and the model's own forward elsewhere."""
        run = self._run if self in _ACTIVE.get() else own_forward(self._model)
        return run(*args, **kwargs)

    @contextmanager
    def active(self) -> Generator[None]:
        """Let calls of the model on this thread run compiled code."""
        token = _ACTIVE.set((*_ACTIVE.get(), self))
        with self._lock:
            self._methods += 1
            if self._methods == 1:
                self._replaced = self._model.__dict__.get("forward")
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
            if self._replaced is None:
                del self._model.__dict__["forward"]
            else:
                self._model.__dict__["forward"] = self._replaced
        self._replaced = None

    def bind(self, method: types.MethodType) -> Callable[..., Any]:
        """Return a method of the model whose calls of the model run compiled code."""

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
        """Run a generator with compiled code in each of its steps and not between them."""
        try:
            sent: Any = None
            while True:
                with self.active():
                    try:
                        value = generator.send(sent)
                    except StopIteration as end:
                        return end.value
                sent = yield value
        finally:
            generator.close()

    async def _awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with self.active():
            return await coroutine


# Of the attributes that every module has only the mode is baked into a capture. The others are set by torch.compile.
_MODULE_ATTRIBUTES = (frozenset(nn.Module().__dict__) - {"training"}) | {
    "_compiled_call_impl",
    "_is_torch_compile",
}
_BAKED = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_DTYPE, _DEVICE = operator.attrgetter("dtype"), operator.attrgetter("device")
_GLOBAL_HOOKS = [getattr(torch_modules, f"_global{kind}") for kind in HOOK_KINDS]
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
_MAX_VARIANTS = 64
StateKey = tuple[Any, ...]


class ModuleGuard:
    """The state of a model that captures depend on: its modules, tensors, code, hooks and baked-in numbers.

    Attributes of modules other than numbers, strings, tensors and functions (a list, a configuration object) are not
    guarded, and of their classes only functions are.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        # A compiled submodule has the mode of the module that it was compiled from.
        modules += [m.overridden for m in modules if isinstance(m, ForwardOverride)]
        self._tables = [t for m in modules for t in (m._parameters, m._buffers, m._modules)]
        self._parts = _values(self._tables)
        self._parameters = [m._parameters for m in modules]
        self._tensors = list({id(v): v for v in self._parts if isinstance(v, Tensor)}.values())
        self._dtypes = list(map(_DTYPE, self._tensors))
        # A model is moved to a device module by module.
        heads = [next((v for v in m._parameters.values() if v is not None), None) for m in modules]
        self._heads = [v for v in heads if v is not None]
        self._devices = list(map(_DEVICE, self._heads))
        self.tensor_guard = TensorGuard(self._tensors)
        self._attribute_tensors = [
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
            if name != "forward" and name not in _MODULE_ATTRIBUTES and isinstance(value, _METHODS)
        ]
        # Classes and functions at different times; the first is their original state.
        self._variants: list[Any] = []
        self._methods: dict[type, tuple[DictSnapshot, Any]] = {}
        self._guarded_dicts = [*(m.__dict__ for m in modules), *self._tables]
        # Those of the model itself run around each call.
        self._hooks = [*(m.__dict__[kind] for m in modules[1:] for kind in HOOK_KINDS), *_GLOBAL_HOOKS]
        # One value, so that threads see it whole.
        self._last: tuple[list[type], DictSnapshot | None, StateKey] = ([], None, ())
        self._variants.append(self._code(list(map(type, modules)), self._added()))

    def key(self) -> StateKey | None:
        """Return the key of modes, numbers, strings, code and hooks; None if the model has other parts than it had.

        Parts are modules and tensors, the dtypes and devices of these, and attributes that were removed.
        """
        known_classes, snapshot, key = self._last
        classes = list(map(type, self._modules))
        if snapshot is None or classes != known_classes or not snapshot.is_current():
            # Read before the state, so that the next call notices what is written meanwhile.
            snapshot = DictSnapshot([*self._guarded_dicts, *map(_namespace, _lineage(classes))])
            current = self._state_key(classes)
            if current is None:
                return None
            key = current
            self._last = (classes, snapshot, key)
        # Assigning to `data` writes no dict.
        if not self.tensor_guard.is_current():
            if (
                list(map(_DTYPE, self._tensors)) != self._dtypes
                or list(map(_DEVICE, self._heads)) != self._devices
            ):
                return None
            # What else differs, such as the gradient flags or inference mode, captures do not depend on.
            self.tensor_guard = TensorGuard(self._tensors)
        return (key, tuple(tuple(hooks.items()) for hooks in self._hooks)) if any(self._hooks) else key

    def is_original(self, key: StateKey) -> bool:
        """Return whether the code of the model with this key is the original one."""
        variant = key[0]
        return self.is_original(variant) if isinstance(variant, tuple) else variant == 0

    def _state_key(self, classes: list[type]) -> StateKey | None:
        parts = _values(self._tables)
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            return None
        if not all(attributes.get(name) is value for attributes, name, value in self._attribute_tensors):
            return None
        try:
            now = chain.from_iterable([get(attributes) for get, attributes in self._baked])
            baked = tuple(map(_value_key, now))
        except KeyError:
            return None
        added = self._added()
        numbers = tuple((i, name, _value_key(value)) for i, name, value in added if _is_baked(value))
        code = self._code(classes, added)
        if code not in self._variants:
            if len(self._variants) >= _MAX_VARIANTS:
                return None
            self._variants.append(code)
        return (self._variants.index(code), numbers, *baked)

    def _added(self) -> list[tuple[int, str, Any]]:
        """Return attributes that were added to modules since, or that replace a function of their class."""
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
                    if n not in known and n not in _MODULE_ATTRIBUTES and n != "forward"
                ]
        return added

    def _code(self, classes: list[type], added: list[tuple[int, str, Any]]) -> Any:
        """Return the classes of the modules, and the functions of these and of the modules themselves."""
        attributes = [(i, n, v) for i, n, v in added if n == "forward" or isinstance(v, (*_METHODS, Tensor))]
        attributes += [(i, name, table.get(name)) for i, name, table in self._functions]
        by_identity = [(i, name, v if isinstance(v, _METHODS) else _Identity(v)) for i, name, v in attributes]
        return classes, [self._methods_of(kind) for kind in _lineage(classes)], by_identity

    def _methods_of(self, kind: type) -> Any:
        """Return the functions of a class that it does not inherit unchanged."""
        known = self._methods.get(kind)
        if known is None or not known[0].is_current():
            snapshot = DictSnapshot([_namespace(k) for k in kind.__mro__[:-1]])
            bases = [vars(base) for base in kind.__mro__[1:]]
            inherited = {name: value for base in reversed(bases) for name, value in base.items()}
            own = [(n, v) for n, v in vars(kind).items() if _is_run(n, v) and inherited.get(n) is not v]
            known = self._methods[kind] = (snapshot, own)
        return known[1]

    def has_swapped_parameters(self) -> bool:
        """Return whether parameters are replaced by tensors temporarily, as by `torch.func.functional_call`."""
        return any(v is not None and not isinstance(v, nn.Parameter) for v in _values(self._parameters))


def has_global_hooks() -> bool:
    """Return whether global module hooks are registered, as by tools that trace a model."""
    return any(_GLOBAL_HOOKS)


class _Identity:
    """Compares an object by identity, whatever its `__eq__`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _values(tables: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable([table.values() for table in tables]))


def _value_key(value: Any) -> tuple[str, Any]:
    # 1, 1.0 and True are equal, but a graph with one of them is not a graph with another.
    return type(value).__name__, value if _is_baked(value) else id(value)


def _lineage(classes: Iterable[type]) -> list[type]:
    """Return the classes and their bases, each once, without those of all modules."""
    bases = dict.fromkeys(base for kind in dict.fromkeys(classes) for base in kind.__mro__)
    return [kind for kind in bases if kind not in nn.Module.__mro__]


def _namespace(kind: type) -> Any:
    """Return the dict behind the read-only view of a class's attributes."""
    return gc.get_referents(vars(kind))[0]


def _is_run(name: str, value: Any) -> bool:
    """Return whether a class attribute is a function that forward may call, not one for building or loading."""
    if name in ("forward", "__call__"):
        return True
    return isinstance(value, _METHODS) and not (name.startswith("__") or hasattr(nn.Module, name))


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Return whether an attribute `forward` of an instance is what calls would run without it."""
    of_class = getattr(type(module), "forward", None)
    # A data descriptor takes precedence over attributes of an instance.
    if isinstance(of_class, property):
        return True
    is_bound = isinstance(forward, types.MethodType) and forward.__self__ is module
    return is_bound and forward.__func__ is of_class


def _baked(attributes: dict[str, Any]) -> list[str]:
    names = sorted(n for n, v in attributes.items() if n not in _MODULE_ATTRIBUTES and _is_baked(v))
    # `itemgetter` gives a tuple for two names or more. The mode of some wrappers is a property.
    always = "training" if "training" in attributes else "_parameters"
    return [*names, always, always]


def _is_baked(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_baked(v) for v in cast("tuple[Any, ...]", value))
    return isinstance(value, _BAKED)
