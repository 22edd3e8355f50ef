"""What captures of a model hold to: its tensors and modules, their code, and the numbers and hooks that are baked in."""

from __future__ import annotations

import functools
import gc
import operator
import types
from collections.abc import Iterable
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from dovetail.graph.holding import dict_version
from dovetail.lowering.forward_override import ForwardOverride, instance_forward

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
