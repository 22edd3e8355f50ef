"""What a trace of a model depends on besides its inputs: the code that ran, and the values that this code can read.

A capture can be used in another process if the model there would be traced to the same graph. `CodeRecorder` collects
the code objects that were entered while forward was traced. `TraceDependencies` then describes, as one fact per path, the
state of all modules, the classes and functions behind them, and every global, closure and default value that entered
code names, followed through containers and attributes. The facts are a superset of what was read: another value of an
attribute that was not read leads to a trace that was not needed.

- Attributes of modules and of configurations of transformers count if entered code has their name as a name or constant;
  all of them do if it reads attributes by names that it computes. Of all other objects every attribute counts, and of those
  that inherit methods of the standard library or of torch outside of `torch.nn`, whose code is not followed.
- Functions that were reached, and not entered, are described by their code and defaults. Where code may have run without
  being entered (results of caches, code that Dynamo interprets), functions that are called by a name in it count as entered.
- Weights and buffers of the model are described without their contents, which a graph does not hold; contents of others count.
- Code of releases (torch, the standard library, sympy) is described by its name, except that names which code of `torch.nn`
  reads are followed, for users replace them. What is added to classes and functions of releases counts where it is a
  constant, a container or code; so do the decimal context, filters of warnings and levels of loggers where they are read.

What cannot be described raises `Undescribable`, and such a capture is not stored: objects with state in C, modules of the
standard library that depend on the environment, code that is reached through neither a class nor a name. Not noticed are
state of packages in C behind functions, and environment variables that `transformers.utils.import_utils` reads.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import gc
import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from dovetail.frontend.bytecode_reads import (
    Executed,
    ReadNames,
    code_digest,
    module_name,
    names_read,
    reads,
    reads_by_value,
)
from dovetail.frontend.release_code import (
    installed_packages,
    is_dynamo,
    is_expanded,
    is_generated,
    is_query_of_packages,
    is_release,
    is_release_module,
    is_release_value,
    name_of,
    queries_packages,
)
from dovetail.frontend.value_facts import (
    READERS,
    READS_DOC,
    UNREAD,
    ValueFacts,
)
from dovetail.frontend.value_state import (
    BUILTINS,
    Undescribable,
    annotations_text,
    cell_contents,
    reported_state,
)

_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
_REFUSED = frozenset(["__subclasses__", "__globals__", "__builtins__", "f_back", "f_globals", "_getframe"])
_PACKAGES = "installed packages"
_READ_PARTS = {
    "__doc__": READS_DOC,
    "__closure__": frozenset(["__closure__", "getclosurevars"]),
}
"""Parts of functions that few models read, and the names by which code reads them."""
_READS_ANNOTATIONS = frozenset(["__annotations__", "annotation", "get_type_hints", "get_annotations"])


class TraceDependencies(ValueFacts):
    """The facts that a trace of a model depends on, by path."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        entered: Iterable[str],
        names: ReadNames,
        *,
        executed: Executed | None = None,
        describe_traced: Callable[[Any], str | None] | None = None,
        interpreted: Iterable[str] = (),
        is_traced: bool = False,
    ) -> None:
        """Describe a model and its inputs.

        Of code in `executed` only these instructions count; `describe_traced` describes values of a trace that is going on, and
        returns None for others. Functions with a name in `interpreted` may have run without being entered. With `is_traced`
        the model has been traced, which may have filled properties that are computed once.
        """
        super().__init__(model, names, frozenset(entered), describe_traced, is_traced)
        self.imported: set[str] = set()
        """Modules that entered code imports, as far as they are imported now."""
        self._executed: Executed = executed or {}
        # Names of functions that may have run without being entered, and functions that were not entered.
        self._assumed: set[str] = set()
        self._unentered: dict[str, list[tuple[str, types.FunctionType]]] = {}
        self._resolved: set[str] = set()
        self._namespaces: dict[int, str] = {}
        self._labels: set[str] = set()
        self._assume(interpreted)
        for kind in (torch.Tensor, nn.Parameter, nn.Module):
            if constants := self._replacements(kind):
                self.facts[f"torch {kind.__qualname__}"] = constants
        self._add("model", model)
        self._add("inputs", inputs)
        self._describe_waiting()

    def _cached(self, path: str, cache: Any) -> None:
        """Queue the function behind a cache, which need not have been entered for its results to be read."""
        function = cache.__wrapped__
        code = getattr(function, "__code__", None)
        if code is not None and not is_release(code.co_filename):
            has_arguments = code.co_argcount or code.co_kwonlyargcount or code.co_flags & inspect.CO_VARARGS
            if self._describe_traced is not None and has_arguments:
                raise Undescribable(f"{path} returns what it computed in an earlier call")
            if not is_query_of_packages(code.co_filename):
                self._assume([code.co_name])
        self._add_parts(path, cache, "__wrapped__", "__dict__")

    def _assume(self, names: Iterable[str]) -> None:
        """Let functions with these names, reached already or later, count as entered."""
        for name in names:
            if name not in self._assumed:
                self._assumed.add(name)
                for path, function in self._unentered.pop(name, ()):
                    self._expand(path, function)

    def _is_assumed(self, code: types.CodeType) -> bool:
        owner, _, name = code.co_qualname.rpartition(".")
        if name in _CONSTRUCTORS:
            return owner.rpartition(".")[2] in self._assumed
        is_special = name.startswith("__") and name.endswith("__") and bool(self._assumed)
        return is_special or code.co_name in self._assumed

    def _function(self, path: str, function: types.FunctionType) -> str:
        code = function.__code__
        name = name_of(function)
        if function.__name__ != code.co_name:
            name += f" {function.__name__}"
        if is_release(code.co_filename) and not is_expanded(code.co_filename):
            self._require_pure(path, str(function.__globals__.get("__name__")), function.__qualname__)
            token = f"function {name}{reported_state(function)}"
            if is_release_value(function):
                token += self._additions(path, function)
            else:
                # A decorator, as that of `torch.no_grad`, around code of the user.
                self._cells(path, function)
                self._add_parts(path, function, "__defaults__", "__kwdefaults__")
                for attribute, value in vars(function).items():
                    if attribute not in UNREAD and not (
                        attribute == "_clear_cache" and _is_dispatcher(function)
                    ):
                        self._add(f"{path}.{attribute}", value)
            return token
        self.reached.add(code_digest(code))
        if is_query_of_packages(code.co_filename):
            self.facts[_PACKAGES] = installed_packages()
        elif code_digest(code) in self._entered or self._is_assumed(code):
            self._expand(path, function)
        else:
            # Constructors are called by the names of their classes.
            owner, _, key = code.co_qualname.rpartition(".")
            key = owner.rpartition(".")[2] if key in _CONSTRUCTORS else code.co_name
            self._unentered.setdefault(key, []).append((path, function))
        if not is_release(code.co_filename):
            read = [part for part, names in _READ_PARTS.items() if names & self._names]
            for part in ("__defaults__", "__kwdefaults__", *read):
                if (value := getattr(function, part)) is not None:
                    self._add(f"{path}.{part}", value)
            if _READS_ANNOTATIONS & self._names:
                self.facts[f"{path}.__annotations__"] = annotations_text(path, function.__annotations__)
            # Decorators keep what they decorate in the attributes of the function.
            for attribute, value in vars(function).items():
                if attribute not in UNREAD:
                    self._add(f"{path}.{attribute}", value)
            return f"function {name} {code_digest(code)}"
        return f"function {name} {code_digest(code)}{self._additions(path, function)}"

    def _expand(self, path: str, function: types.FunctionType) -> None:
        """Queue what a function reads that was entered, or may have been."""
        code = function.__code__
        is_assumed = code_digest(code) not in self._entered
        if is_assumed or self._is_assumed(code):
            nested = [code]
            while nested:
                current = nested.pop()
                nested += [c for c in current.co_consts if isinstance(c, types.CodeType)]
                strings = [c for c in current.co_consts if isinstance(c, str)]
                self._add_names((*current.co_names, *strings))
                self._assume((*current.co_names, *current.co_freevars))
                if reads_by_value(current):
                    self._read_everything()
        if is_release(code.co_filename):
            for part in ("__defaults__", "__kwdefaults__"):
                self._add(f"{path}.{part}", getattr(function, part))
        self._cells(path, function)
        self._add_globals(path, code, function.__globals__, is_assumed=is_assumed)

    def _cells(self, path: str, function: types.FunctionType) -> None:
        is_dispatcher = _is_dispatcher(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if not (is_dispatcher and name in ("dispatch_cache", "cache_token")):
                self._add(f"{path}.<{name}>", cell_contents(cell))

    def _add_globals(
        self, path: str, code: types.CodeType, namespace: dict[str, Any], *, is_assumed: bool
    ) -> None:
        """Queue the values of the names that entered code, and code nested in it, reads."""
        label = self._label(namespace)
        nested = [code]
        while nested:
            current = nested.pop()
            self.reached.add(code_digest(current))
            nested += [c for c in current.co_consts if isinstance(c, types.CodeType)]
            if code_digest(current) not in self._entered and not is_assumed:
                continue
            of_release = is_release(current.co_filename)
            if not of_release and (refused := _REFUSED.intersection(current.co_names)):
                raise Undescribable(f"{path} reads {min(refused)}")
            for name, chain, is_stored in reads(current, self._executed.get(current)):
                if is_stored:
                    raise Undescribable(f"{path} writes the global {name}")
                place = f"global {label}.{name}"
                if name.startswith("import "):
                    module = module_name(name.removeprefix("import "), namespace)
                    value: Any = sys.modules.get(module)
                    if value is None:
                        continue
                    self.imported.add(module)
                    place = f"import {module}"
                elif name in namespace:
                    value = namespace[name]
                elif hasattr(builtins, name):
                    value = getattr(builtins, name)
                    if value in READERS:
                        # How it is called decides what it reads.
                        continue
                    if not of_release:
                        self._require_pure(f"{path} calls {name}(), which", "builtins", name)
                else:
                    value = "undefined"
                self._resolve(place, value, chain, of_release)

    def _label(self, namespace: dict[str, Any]) -> str:
        """Return a name of a namespace that no other one has."""
        label = self._namespaces.get(id(namespace))
        if label is None:
            label = str(namespace.get("__name__", ""))
            while label in self._labels:
                label += "'"
            self._labels.add(label)
            self._namespaces[id(namespace)] = label
            self._alive.append(namespace)
        return label

    def _resolve(self, place: str, value: Any, chain: tuple[str, ...], of_release: bool) -> None:
        """Queue the value of a name; of a module only the attributes that are read."""
        rest = list(chain)
        owner, attribute = "", ""
        while isinstance(value, types.ModuleType):
            owner = value.__name__
            if not rest:
                if not is_release_module(owner):
                    raise Undescribable(f"{place} is the module {owner} itself")
                break
            attribute = rest.pop(0)
            place = f"{place}.{attribute}"
            value = getattr(value, attribute, "undefined")
        if place in self._resolved:
            return
        self._resolved.add(place)
        is_module = isinstance(value, types.ModuleType)
        if owner and not of_release:
            if queries_packages(owner) and not is_module:
                self.facts[_PACKAGES] = installed_packages()
                self.facts[place] = f"query {owner}.{attribute}"
                return
            if not is_module or not queries_packages(owner):
                self._require_pure(place, owner, "" if is_module else attribute)
        if not of_release:
            self._add_registry(place, value)
        elif (
            (isinstance(value, types.FunctionType) and is_expanded(value.__code__.co_filename))
            or (isinstance(value, (types.FunctionType, type)) and not is_release_value(value))
            or not is_release_module(type(value).__module__)
            or isinstance(value, functools.partial)
        ):
            self._add(place, value)
        else:
            # Names of torch that are not callable are state of its own.
            name = name_of(value) if isinstance(value, (types.FunctionType, type, *BUILTINS)) else ""
            self.facts[place] = f"{type(value).__qualname__} {name}"

    def _add_registry(self, place: str, value: Any) -> None:
        """Queue the value of a global; of a registry of transformers only the entries of classes that are reached."""
        entries: dict[str, Any] = {}
        if place.startswith("global transformers.") and type(value) is dict:
            entries = {
                key: entry for key, entry in value.items() if type(key) is str and key.startswith("<class '")
            }
        elif place.startswith("global transformers.") and type(value) is set:
            entries = {str(kind): "a member" for kind in value if isinstance(kind, type)}
        if not entries or len(entries) < len(value):
            self._add(place, value)
            return
        self.facts[place] = "entries by class"
        for key, entry in entries.items():
            if key in self._names:
                self._add(f"{place}[{key}]", entry)
            else:
                self._unread.setdefault(key, []).append((f"{place}[{key}]", entry))


def _is_dispatcher(function: types.FunctionType) -> bool:
    """Return whether a function calls others by the class of its argument, and so keeps which it has called."""
    return function.__code__.co_qualname.startswith("singledispatch.<locals>.")


def _generated_by_release(codes: list[types.CodeType]) -> set[types.CodeType]:
    """Return the generated code that is gone by now, or all functions of which are a release's, as those of data classes."""
    modules: dict[types.CodeType, set[str]] = {code: set() for code in codes}
    for referrer in gc.get_referrers(*codes):
        if isinstance(referrer, types.FunctionType) and referrer.__code__ in modules:
            modules[referrer.__code__].add(str(referrer.__globals__.get("__name__")))
    return {
        code
        for code, names in modules.items()
        if code.co_filename != "<string>"  # of FX, whose modules are reached by their classes
        or code.co_qualname.startswith("___make_guard_fn.")
        or all(is_release_module(name) or name.startswith("namedtuple_") for name in names)
    }


def _files_of_finders() -> set[str]:
    """Return the files with code that any import runs."""
    functions: list[Any] = []
    for finder in sys.meta_path:
        functions += [getattr(finder, "find_spec", None), *getattr(finder, "__dict__", {}).values()]
    codes = [getattr(function, "__code__", None) for function in functions]
    return {code.co_filename for code in codes if code is not None}


def _accessors_of_modules() -> set[types.CodeType]:
    """Return the code by which modules of other classes give attributes: it runs where torch looks through all modules."""
    kinds = {type(module) for module in list(sys.modules.values())} - {types.ModuleType}
    methods = [getattr(kind, name, None) for kind in kinds for name in ("__getattribute__", "__getattr__")]
    return {method.__code__ for method in methods if isinstance(method, types.FunctionType)}


def _code_of_logging() -> set[types.CodeType]:
    """Return the code of handlers, formatters and filters of logging, and of what they hold: it runs where anything logs."""
    known = [logging.root, *logging.root.manager.loggerDict.values()]
    loggers = [logger for logger in known if isinstance(logger, logging.Logger)]
    values: list[Any] = [handler for logger in loggers for handler in logger.handlers]
    values += [handler.formatter for handler in values]
    values += [one for owner in (*loggers, *values) for one in getattr(owner, "filters", ())]
    values += [part for value in values for part in getattr(value, "__dict__", {}).values()]
    kinds = {kind for value in values for kind in type(value).__mro__}
    functions = [*values, *(function for kind in kinds for function in vars(kind).values())]
    return {function.__code__ for function in functions if isinstance(function, types.FunctionType)}


@dataclasses.dataclass(frozen=True)
class TraceRecord:
    """The facts that a trace depends on, with what is needed to collect them again: code entered, modules imported."""

    facts: dict[str, str]
    entered: tuple[str, ...]
    names: ReadNames
    imported: tuple[str, ...]
    interpreted: tuple[str, ...]

    def current(self, model: nn.Module, inputs: Any, *, is_traced: bool = False) -> dict[str, str]:
        """Return the same facts of a model in this process; raise Undescribable where one cannot be described.

        `is_traced` is whether the model was traced, or called, in this process since the facts were asked for.
        """
        for name in self.imported:
            try:
                importlib.import_module(name)
            except Exception as error:
                raise Undescribable(f"the module {name} cannot be imported: {error}") from error
        return TraceDependencies(
            model, inputs, self.entered, self.names, interpreted=self.interpreted, is_traced=is_traced
        ).facts


def describe(model: nn.Module, inputs: Any, entered: Iterable[types.CodeType]) -> TraceRecord:
    """Return what a trace of a model depends on; raise Undescribable if something that it may have read is unknown."""
    entered = list(entered)
    codes = [code for code in entered if is_expanded(code.co_filename)]
    digests = sorted({code_digest(code) for code in codes})
    names = names_read(codes)
    interpreted: set[str] = set()
    if any(is_dynamo(code.co_filename) for code in entered):
        for code in codes:
            if not is_release(code.co_filename):
                interpreted.update(code.co_names, code.co_freevars)
    calls = tuple(sorted(interpreted))
    dependencies = TraceDependencies(model, inputs, digests, names, interpreted=calls, is_traced=True)
    require_reached(codes, dependencies)
    return TraceRecord(dependencies.facts, tuple(digests), names, tuple(sorted(dependencies.imported)), calls)


def require_reached(codes: Iterable[types.CodeType], dependencies: TraceDependencies) -> None:
    """Raise Undescribable if code that was entered, and that is not a release's, is reached by no name."""
    unreached = [
        c
        for c in codes
        if not is_release(c.co_filename)
        and not is_query_of_packages(c.co_filename)
        and code_digest(c) not in dependencies.reached
    ]
    if unreached:
        files, others = _files_of_finders(), _accessors_of_modules() | _code_of_logging()
        unreached = [c for c in unreached if c.co_filename not in files and c not in others]
    generated = [code for code in unreached if is_generated(code)]
    of_release = _generated_by_release(generated) if generated else ()
    for code in unreached:
        if code not in of_release:
            line = f"{code.co_filename}:{code.co_firstlineno}"
            raise Undescribable(f"{code.co_qualname} ({line}) was run, and is reached by no name")


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what differs between two sets of facts, one line each."""
    changed = [f"{p} is {now[p]}, was {before[p]}" for p in before if p in now and now[p] != before[p]]
    changed += [f"{path} is new" for path in now if path not in before]
    return changed + [f"{path} is missing" for path in before if path not in now]
