"""Facts about values, by path: modules, tensors, classes, containers and objects, followed through what they refer to.

`ValueFacts` is the part of `TraceDependencies` that does not read code.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import contextvars
import enum
import functools
import inspect
import logging
import re
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from dovetail.frontend.bytecode_reads import ReadNames, code_digest, names_in
from dovetail.frontend.release_code import (
    inherits_from_release,
    is_expanded,
    is_release,
    is_release_module,
    is_release_value,
    name_of,
    reads_of_state,
)
from dovetail.frontend.value_state import (
    BUILTINS,
    CODE_WRAPPERS,
    CONTAINERS,
    SCALARS,
    TORCH_SCALARS,
    Undescribable,
    annotations_text,
    attributes,
    cell_contents,
    content_digest,
    function_of,
    is_settable,
    order_text,
    process_state,
    registered_classes,
    reported_state,
    require_pure,
    scalar_text,
    set_text,
    state_in_c,
)
from dovetail.ir.nodes import storage_key

# Attributes that do not reach the graph: state of torch.compile, and numbers of classes in their order of definition.
UNREAD = frozenset(
    [
        "_compiled_call_impl",
        "_is_torch_compile",
        "_autograd_function_id",
        "_torchdynamo_wrapper_id",
        "___needs_generation_tag_patch",
    ]
)
# Attributes that name where a configuration comes from, or keep what follows from others.
_ORIGIN = frozenset(
    [
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "transformers_version",
        "_original_object_hash",
        "_can_set_experts_implementation_cached_value",
    ]
)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
READS_DOC = frozenset(["__doc__", "getdoc"])
"""The names by which code reads the documentation of a class or function."""
_HOOKS = frozenset(n for n, v in vars(nn.Module()).items() if type(v) is collections.OrderedDict)
_EXTENDED = (nn.Module, Tensor)
"""Classes of torch that users extend."""
_OF_EVERY_LOGGER = frozenset([*vars(logging.getLogger("dovetail")), "_cache"])
_LRU_CACHE = type(functools.lru_cache(bool))
READERS: tuple[Any, ...] = (getattr, hasattr, vars, dir, object.__getattribute__)
_CLASS_INTERNALS = frozenset(
    [
        "__pydantic_core_schema__",
        "__pydantic_validator__",
        "__pydantic_serializer__",
        "__pydantic_complete__",
        "__dict__",
        "__weakref__",
        "__module__",
        "__annotations__",
        "__abstractmethods__",
        "_abc_impl",
        "__orig_bases__",
        "__parameters__",
        "__static_attributes__",
        "__slotnames__",
        "__firstlineno__",
        "__annotations_cache__",
        "__required_keys__",
        "__optional_keys__",
        "__readonly_keys__",
        "__mutable_keys__",
        "_member_names_",
        "_value2member_map_",
        "_hashable_values_",
        "_unhashable_values_",
        "_unhashable_values_map_",
    ]
)
"""Attributes of classes that are described otherwise, follow from others, or have another order in every process."""
_MODULE_INTERNALS = frozenset(
    ["__file__", "__cached__", "__spec__", "__loader__", "__path__", "__builtins__"]
)
_MAX_FACTS = 200_000


class ValueFacts(abc.ABC):
    """Facts about the values that are queued, and about all that these refer to."""

    def __init__(
        self,
        model: nn.Module,
        names: ReadNames,
        entered: frozenset[str],
        describe_traced: Callable[[Any], str | None] | None,
        is_traced: bool,
    ) -> None:
        self.facts: dict[str, str] = {}
        self.reached: set[str] = set()
        """Digests of the code that was reached."""
        self._entered = entered
        self._describe_traced = describe_traced
        self._is_traced = is_traced
        self._paths: dict[int, str] = {}
        self._storages: dict[Any, str] = {}
        # Objects are compared by identity, so they must not be released meanwhile.
        self._alive: list[Any] = []
        self._waiting: collections.deque[tuple[str, Any]] = collections.deque()
        self._names = set(names.names)
        self._reads_everything = names.everything
        # Attributes that no code names.
        self._unread: dict[str, list[tuple[str, Any]]] = {}
        self._orders: list[tuple[str, list[str]]] = []
        self._filtered: dict[type, bool] = {}
        self._own = {id(module) for module in model.modules()}
        self._weights = {
            id(t) for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values())
        }

    @abc.abstractmethod
    def _function(self, path: str, function: types.FunctionType) -> str:
        """Describe a function, and queue what it reads."""

    @abc.abstractmethod
    def _cached(self, path: str, cache: Any) -> None:
        """Queue the function behind a cache."""

    def _describe_waiting(self) -> None:
        """Describe the values that are queued."""
        while self._waiting:
            path, value = self._waiting.popleft()
            if len(self.facts) > _MAX_FACTS:
                raise Undescribable(f"more than {_MAX_FACTS} values can be reached, {path} among them")
            while path in self.facts:
                path += "'"
            try:
                self.facts[path] = self._token(path, value)
            except Undescribable:
                raise
            except Exception as error:  # of code of the user, as a `__getattr__` that raises something else
                raise Undescribable(f"{path} raises {type(error).__name__}: {error}") from error

    def _token(self, path: str, value: Any) -> str:
        """Return what describes a value, and queue what it refers to."""
        kind = type(value)
        if kind in SCALARS:
            if kind is str and len(value) < 100:
                self._add_names((value, *names_in(value)))
            return scalar_text(value)
        if isinstance(value, TORCH_SCALARS) or kind is range:
            return f"{kind.__name__} {value}"
        if self._describe_traced is not None and (traced := self._describe_traced(value)) is not None:
            return traced
        known = self._paths.get(id(value))
        if known is not None:
            return f"is {known}"
        self._paths[id(value)] = path
        self._alive.append(value)
        if isinstance(value, Tensor):
            return self._tensor(path, value, is_state=id(value) in self._weights)
        if isinstance(value, nn.Module):
            return self._module(path, value)
        if isinstance(value, type):
            return self._class(path, value)
        if isinstance(value, types.ModuleType):
            return self._python_module(path, value)
        return self._callable(path, value) or self._container(path, value) or self._instance(path, value)

    def _add(self, path: str, value: Any) -> None:
        self._waiting.append((path, value))

    def _add_parts(self, path: str, value: Any, *names: str) -> None:
        for name in names:
            self._add(f"{path}.{name}", getattr(value, name))

    def _add_attribute(self, path: str, name: str, value: Any, owner: type) -> None:
        """Queue an attribute of an object or class, if code that was entered may read it."""
        place = f"{path}.{name}"
        if name in self._names or name.startswith("__") or not self._is_filtered(owner):
            if name == "_non_persistent_buffers_set":
                self._add_unnamed(place, name, value)
            else:
                self._waiting.append((place, value))
        elif self._reads_everything or (
            name not in _OF_EVERY_MODULE and owner.__module__.startswith("torch.")
        ):
            self._add_unnamed(place, name, value)
        else:
            self._unread.setdefault(name, []).append((place, value))

    def _add_unnamed(self, place: str, name: str, value: Any) -> None:
        """Queue an attribute whose name no code has; such a set is not iterated."""
        if isinstance(value, (set, frozenset)):
            self.facts[place] = set_text(place, value, is_ordered=False)
        elif name not in _ORIGIN:
            self._waiting.append((place, value))

    def _is_filtered(self, kind: type) -> bool:
        """Return whether attributes of a class, and of its instances, count only if code has their names."""
        result = self._filtered.get(kind)
        if result is None:
            # While layers are compared, what was executed is known by instruction.
            result = self._describe_traced is not None and not is_release_module(kind.__module__)
            result |= any(base is nn.Module or _is_configuration(base) for base in kind.__mro__)
            self._filtered[kind] = result = result and not inherits_from_release(kind)
        return result

    def _add_names(self, names: Iterable[str]) -> None:
        """Queue attributes with a name that is a value, and so may be an argument of `getattr`."""
        for name in names:
            if name not in self._names:
                self._names.add(name)
                self._waiting.extend(self._unread.pop(name, ()))

    def _read_everything(self) -> None:
        """Queue all attributes, and describe their order."""
        if not self._reads_everything:
            self._reads_everything = True
            for name, waiting in self._unread.items():
                for place, value in waiting:
                    self._add_unnamed(place, name, value)
            self._unread.clear()
            for path, names in self._orders:
                self._order(path, names)

    def _order(self, path: str, names: list[str]) -> None:
        if self._reads_everything:
            self.facts[f"{path}.__dict__"] = order_text(names)
        else:
            self._orders.append((path, names))

    def _tensor(self, path: str, tensor: Tensor, *, is_state: bool) -> str:
        """Describe a tensor: of parameters and buffers of the model not the contents, which a graph does not hold."""
        kind = type(tensor)
        spec = [
            f"{kind.__module__}.{kind.__qualname__}",
            tensor.dtype,
            tuple(tensor.shape),
            tensor.device,
            tensor.requires_grad,
        ]
        self._add(f"{path}.__class__", kind)
        if kind not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
            if not is_state:
                raise Undescribable(f"{path} is a {kind.__name__} with the layout {tensor.layout}")
            return f"tensor {spec} {tensor.layout}"
        storage = storage_key(tensor)
        shared = self._storages.setdefault(storage, path) if tensor.numel() else path
        spec += [tensor.stride(), tensor.storage_offset(), "" if shared == path else f"shares {shared}"]
        for name, attribute in vars(tensor).items():
            # Marks of dynamic sizes, which the tracer reads, among them.
            self._add(f"{path}.{name}", attribute)
        if not is_state and not path.startswith("inputs"):
            spec.append(content_digest(path, tensor))
        return f"tensor {spec}"

    def _module(self, path: str, module: nn.Module) -> str:
        self._add(f"{path}.__class__", type(module))
        tables = {name: getattr(module, name) for name in _HOOKS if name in vars(module)}
        keys = sorted({key for table in tables.values() for key in table if isinstance(key, int)})
        orders: list[str] = []
        own_names: list[str] = []
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                orders += value
                for key, tensor in value.items():
                    place = f"{path}.{key}"
                    traced = None if self._describe_traced is None else self._describe_traced(tensor)
                    if traced is not None:
                        self.facts[place] = traced
                    elif tensor is None or id(tensor) in self._paths:
                        self.facts[place] = "None" if tensor is None else f"is {self._paths[id(tensor)]}"
                    else:
                        self._paths[id(tensor)] = place
                        is_state = id(module) in self._own or id(tensor) in self._weights
                        self.facts[place] = name + self._tensor(place, tensor, is_state=is_state)
            elif name == "_modules":
                orders += value
                for key, child in value.items():
                    self._add(f"{path}.{key}", child)
            elif name in tables and not value:
                continue
            elif name in tables:
                # Keys of hooks are numbers that count through the process.
                described = None if self._describe_traced is None else self._describe_traced(value)
                if described is None:
                    value = {keys.index(k) if k in keys else k: hook for k, hook in value.items()}
                self._add_attribute(path, name, value, type(module))
                self._alive.append(value)
            elif name not in UNREAD:
                own_names.append(name)
                self._add_attribute(path, name, value, type(module))
        self._order(path, own_names)
        return f"module {order_text(orders)}"

    def _class(self, path: str, kind: type) -> str:
        name = f"class {kind.__module__}.{kind.__qualname__}"
        if kind.__name__ != kind.__qualname__.rpartition(".")[2]:
            name += f" {kind.__name__}"
        self._add_names([str(kind)])
        if is_release_value(kind):
            self._require_pure(path, kind.__module__, kind.__qualname__)
            if kind.__module__ in ("operator", "_operator"):
                self._read_everything()
            if issubclass(kind, nn.Module):
                self._bases(path, kind)
            constants = self._replacements(kind, path)
            return f"{name} {constants}"
        if type(kind) is not type:
            self._add(f"{path}.__class__", type(kind))
        self._bases(path, kind)
        for attribute, value in list(vars(kind).items()):
            is_own = isinstance(value, types.GetSetDescriptorType | types.MemberDescriptorType)
            if attribute == "__doc__" and not READS_DOC & self._names:
                continue  # that of a data class has addresses of its defaults
            if attribute not in _CLASS_INTERNALS and attribute not in UNREAD and not is_own:
                self._add_attribute(path, attribute, value, kind)
        annotations = annotations_text(path, vars(kind).get("__annotations__", {}))
        registered = registered_classes(kind)
        return f"{name} {annotations} {registered or ''}"

    def _bases(self, path: str, kind: type) -> None:
        for i, base in enumerate(kind.__mro__[1:-1]):
            self._add(f"{path}.__mro__[{i}]", base)

    def _replacements(self, kind: type, path: str = "") -> str:
        """Queue what may have been added to a class of a release, or replace its own; return its constants."""
        path = path or f"torch {kind.__qualname__}"
        constants: list[str] = []
        for name, value in list(vars(kind).items()):
            function = function_of(value)
            if isinstance(function, types.FunctionType):
                # Names that code of `torch.nn` reads are followed.
                filename = function.__code__.co_filename
                if not is_release(filename) or (is_expanded(filename) and kind is not nn.Module):
                    self._add(f"{path}.{name}", function)
                elif function.__name__ != name:
                    constants.append(f"{name}: {name_of(function)}")
            elif isinstance(function, BUILTINS):
                owner = getattr(function, "__objclass__", None)
                if function.__name__ != name or owner not in kind.__mro__:
                    constants.append(f"{name}: {name_of(function)}")
            elif type(value) in SCALARS:
                if name not in UNREAD and name not in (
                    "__doc__",
                    "__firstlineno__",
                    "__module__",
                    "__hash__",
                ):
                    constants.append(f"{name}: {scalar_text(value)}")
            elif type(value) in CONTAINERS and name.startswith("_") and not issubclass(kind, _EXTENDED):
                continue  # caches and tables of the release
            elif name not in _CLASS_INTERNALS and is_settable(value):
                self._add(f"{path}.{name}", value)
        return order_text(constants) if constants else ""

    def _additions(self, path: str, function: types.FunctionType) -> str:
        """Queue what was set on a function of a release; return the constants among its defaults."""
        for name, value in vars(function).items():
            if not name.startswith("__") and name not in UNREAD and is_settable(value):
                self._add(f"{path}.{name}", value)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        constants = [scalar_text(value) for value in defaults if type(value) in SCALARS]
        return f" {order_text(constants)}" if constants else ""

    def _require_pure(self, path: str, module: str, name: str) -> None:
        """Raise Undescribable if what a release has under a name depends on unknown state; describe the state that is known."""
        require_pure(path, module, name)
        for attribute in reads_of_state(module, name):
            if attribute in self._names:
                raise Undescribable(f"{path} ({module}.{name}) may be read by {attribute}")
        self._process_state(module)

    def _process_state(self, module: str) -> None:
        if state := process_state(module, self._names):
            self.facts[f"state of {module}"] = state

    def _python_module(self, path: str, module: types.ModuleType) -> str:
        """Describe a module that is a value."""
        name = module.__name__
        is_of_release = is_release_module(name)
        if is_of_release:
            self._require_pure(path, name, "")
        for key, value in list(vars(module).items()):
            if not is_of_release:
                if key not in _MODULE_INTERNALS:
                    self._add(f"{path}.{key}", value)
            elif isinstance(value, types.FunctionType):
                if not is_release(value.__code__.co_filename):
                    self._add(f"{path}.{key}", value)
            elif type(value) is functools.partial:
                self._add(f"{path}.{key}", value)
        return f"module {name}"

    def _callable(self, path: str, value: Any) -> str | None:
        if isinstance(value, types.FunctionType):
            return self._function(path, value)
        if isinstance(value, types.CodeType):
            self.reached.add(code_digest(value))
            return f"code {code_digest(value)}"
        if isinstance(value, types.MethodType):
            self._add_parts(path, value, "__func__", "__self__")
            return "method"
        if isinstance(value, CODE_WRAPPERS):
            self._add(f"{path}.__func__", cast("Any", value).__func__)
            self._subclass(path, value, *CODE_WRAPPERS)
            return type(value).__name__
        if isinstance(value, property):
            self._add_parts(path, value, "fget", "fset", "fdel")
            self._subclass(path, value, property)
            return "property"
        if isinstance(value, functools.cached_property):
            self._add_parts(path, value, "func", "attrname")
            self._subclass(path, value, functools.cached_property)
            return "cached_property"
        if isinstance(value, (functools.partial, functools.partialmethod)):
            self._add_parts(path, value, "func", "args", "keywords", "__dict__")
            self._subclass(path, value, functools.partial, functools.partialmethod)
            return type(value).__name__
        if isinstance(value, _LRU_CACHE):
            self._cached(path, value)
            return "lru_cache"
        if isinstance(value, BUILTINS):
            return self._builtin(path, value)
        operators = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
        return f"operator {value}" if isinstance(value, operators) else None

    def _builtin(self, path: str, value: Any) -> str:
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            self._add(f"{path}.__self__", owner)
        of_class: Any = owner if isinstance(owner, type) else getattr(value, "__objclass__", None)
        module = getattr(value, "__module__", None) or getattr(of_class, "__module__", None) or ""
        name = str(getattr(value, "__qualname__", value))
        self._require_pure(path, module, name)
        if any(value is reader for reader in READERS):
            self._read_everything()
        state = reported_state(value) if isinstance(value, types.BuiltinFunctionType) else ""
        return f"builtin {module}.{name}{state}"

    def _container(self, path: str, value: Any) -> str | None:
        """Describe the elements of a container; None for anything else."""
        kind = type(value)
        if isinstance(value, (dict, types.MappingProxyType)):
            labels: list[str] = []
            entries: Any = dict.items(value) if isinstance(value, dict) else value.items()
            for i, (key, element) in enumerate(cast("Iterable[tuple[Any, Any]]", entries)):
                is_constant = type(key) in SCALARS
                labels.append(repr(key) if is_constant else f"#{i}")
                if type(key) is str:
                    self._add_names([key])
                if not is_constant:
                    self._add(f"{path}[#{i}].key", key)
                self._add(f"{path}[{labels[-1]}]", element)
            if isinstance(value, collections.defaultdict):
                self._add(f"{path}.default_factory", cast("Any", value).default_factory)
            token = order_text(labels)
        elif isinstance(value, (list, tuple, collections.deque)):
            elements = cast("list[Any]", value)
            for i, element in enumerate(elements):
                self._add(f"{path}[{i}]", element)
            token = f"{len(elements)} {value.maxlen if isinstance(value, collections.deque) else ''}"
        elif isinstance(value, (set, frozenset)):
            token = set_text(path, value)
        elif kind is slice:
            self._add_parts(path, value, "start", "stop", "step")
            token = ""
        else:
            return None
        if kind not in (*CONTAINERS, slice, types.MappingProxyType):
            token += self._state(path, value)
        return f"{kind.__name__} {token}"

    def _instance(self, path: str, value: Any) -> str:
        """Describe an object by its class and its attributes."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, enum.Enum):
            if not is_release_value(kind):
                self._state(path, value)
            return f"{name}.{value.name}"
        if isinstance(value, logging.Logger):
            for attribute, part in attributes(value).items():
                if attribute not in _OF_EVERY_LOGGER:
                    self._add(f"{path}.{attribute}", part)
            if kind not in (logging.Logger, logging.RootLogger):
                self._add(f"{path}.__class__", kind)
            level, disabled = value.getEffectiveLevel(), (value.disabled, value.manager.disable)
            return f"logger {value.name} {value.level} {level} {disabled} {len(value.handlers)}"
        if isinstance(value, contextvars.ContextVar):
            unset = object()
            is_set = value.get(unset) is not unset
            with contextlib.suppress(LookupError):  # no default either
                self._add(f"{path}.get()", value.get())
            return f"{name} {value.name} {is_set}"
        if isinstance(value, weakref.ref):
            self._add(f"{path}()", cast("Any", value)())
            self._subclass(path, value, weakref.ref)
            return name
        if isinstance(value, re.Pattern):
            return f"{name} {cast('Any', value).pattern!r} {value.flags}"
        if isinstance(value, types.CellType):
            self._add(f"{path}.contents", cell_contents(value))
            return name
        return f"{name} {self._state(path, value)}"

    def _subclass(self, path: str, value: Any, *described: type) -> None:
        """Queue the class of an object and its attributes, if it is none of the classes that are described by their kind."""
        if type(value) not in described:
            self._add(f"{path}.__class__", type(value))
            for name, part in attributes(value).items():
                if not hasattr(described[0], name):
                    self._add(f"{path}.{name}", part)

    def _state(self, path: str, value: Any) -> str:
        """Queue the class of an object and its attributes; return the rest of its state."""
        kind = type(value)
        text, parts = state_in_c(path, value)
        if not (is_release_value(kind) and (parts or kind.__module__ in _STATE_IS_KNOWN)):
            self._add(f"{path}.__class__", kind)
        else:
            self._process_state(kind.__module__)
        for name, part in parts:
            self._add(f"{path}.({name})", part)
        own = attributes(value)
        if isinstance(value, torch.autocast):
            own = {n: v for n, v in own.items() if not n.startswith("prev")}
        if self._is_traced:
            own = {n: v for n, v in own.items() if not self._is_computed(kind, n)}
        for name, attribute in own.items():
            self._add_attribute(path, name, attribute, kind)
        if self._is_filtered(kind):
            self._order(path, list(own))
            return text
        return f"{text} {order_text(list(own))}" if own else text

    def _is_computed(self, kind: type, name: str) -> bool:
        """Return whether the trace may have computed an attribute that a class computes once."""
        computed = inspect.getattr_static(kind, name, None)
        code = (
            getattr(computed.func, "__code__", None)
            if isinstance(computed, functools.cached_property)
            else None
        )
        return code is not None and code_digest(code) in self._entered


_STATE_IS_KNOWN = frozenset(["_thread", "threading", "datetime", "torch.jit", "builtins"])
"""Modules whose classes have methods that depend on the process, and instances with state that does not."""


def _is_configuration(kind: type) -> bool:
    names = ("PreTrainedConfig", "PretrainedConfig", "GenerationConfig")
    return kind.__name__ in names and kind.__module__.startswith("transformers.")
