"""Which code and values belong to releases: torch, the standard library, this package, and what torch computes sizes with.

The versions of releases are compared, so what belongs to them is described by its name. That holds for values that depend
on nothing else: of the standard library only those of modules whose functions depend on their arguments alone (`is_pure`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import os
import sys
import sysconfig
import types
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_ZOO = os.path.join(_OWN, "zoo") + os.sep
_ALGEBRA = ("sympy", "mpmath")
_PARTS = ("sympy" + os.sep, "mpmath" + os.sep, "functorch" + os.sep, "typing_extensions.py")
_LIBRARIES = (*_ALGEBRA, "typing_extensions", "functorch")
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8

_PURE_STDLIB = frozenset(
    [
        "abc",
        "argparse",
        "array",
        "bisect",
        "builtins",
        "cmath",
        "collections",
        "collections_abc",
        "configparser",
        "contextlib",
        "contextvars",
        "copy",
        "copyreg",
        "dataclasses",
        "decimal",
        "enum",
        "fractions",
        "functools",
        "heapq",
        "inspect",
        "itertools",
        "json",
        "keyword",
        "logging",
        "math",
        "numbers",
        "operator",
        "pydecimal",
        "re",
        "sre",
        "string",
        "struct",
        "textwrap",
        "types",
        "typing",
        "warnings",
        "weakref",
        "weakrefset",
    ]
)
_STATEFUL = frozenset(
    [
        "builtins.open",
        "builtins.input",
        "builtins.eval",
        "builtins.exec",
        "builtins.globals",
        "builtins.locals",
        "builtins.__import__",
        "builtins.compile",
        "builtins.id",
        "builtins.hash",
        "io.open",
        "inspect.currentframe",
        "inspect.stack",
        "inspect.trace",
        "inspect.getouterframes",
        "inspect.getsource",
        "inspect.getsourcelines",
        "inspect.findsource",
        "inspect.getcomments",
        "typing.get_type_hints",
        "decimal.getcontext",
        "decimal.localcontext",
        "decimal.setcontext",
        "torch.load",
        "torch.serialization.load",
        "torch.jit.load",
        "torch.jit._serialization.load",
        "torch.export.load",
        "torch.hub",
        "numpy.fromfile",
    ]
)
"""Functions and modules whose results depend on more than their arguments, though those of the modules around do not."""
_STATEFUL_BY_NAME = {
    "argparse.ArgumentParser": ("parse_args", "parse_known_args", "parse_intermixed_args"),
    "configparser.RawConfigParser": ("read", "read_file"),
    "configparser.ConfigParser": ("read", "read_file"),
    "logging.getLogger": ("isEnabledFor", "getEffectiveLevel", "hasHandlers", "level", "handlers", "parent"),
}
"""The names by which code reads state of the process through classes and functions that else have none."""
_WITHOUT_ATTRIBUTES = frozenset(["builtins.object", "abc.ABC", "typing.Generic", "typing.Protocol"])
_QUERIES_OF_PACKAGES = ("importlib.util", "importlib.metadata")


@functools.lru_cache(maxsize=16384)
def is_release(filename: str) -> bool:
    """Return whether a file belongs to a release.

    The models of this package are not part of that: they are models like others.
    """
    if filename.startswith(("<frozen", _TORCH, _OWN)):
        return not filename.startswith(_ZOO)
    if any(name in filename for name in _INSTALLED):
        return any(f"{os.sep}{folder}{os.sep}{name}" in filename for folder in _INSTALLED for name in _PARTS)
    return filename.startswith(_STDLIB)


@functools.lru_cache(maxsize=16384)
def is_own(filename: str) -> bool:
    """Return whether a file belongs to this package, without its models."""
    return filename.startswith(_OWN) and not filename.startswith(_ZOO)


@functools.lru_cache(maxsize=16384)
def is_algebra(filename: str) -> bool:
    """Return whether a file belongs to the libraries with which torch computes symbolic sizes."""
    return any(
        f"{os.sep}{folder}{os.sep}{name}{os.sep}" in filename for folder in _INSTALLED for name in _ALGEBRA
    )


def is_expanded(filename: str) -> bool:
    """Return whether names that entered code of a file reads are followed."""
    return not is_release(filename) or filename.startswith(_TORCH + "nn" + os.sep)


def is_dynamo(filename: str) -> bool:
    """Return whether a file interprets bytecode, which then runs without being entered."""
    return filename == _TORCH + os.path.join("_dynamo", "symbolic_convert.py")


def is_query_of_packages(filename: str) -> bool:
    """Return whether the functions of a file answer which packages are installed, and keep the answers."""
    return filename.endswith(os.path.join("transformers", "utils", "import_utils.py"))


def is_release_module(name: str) -> bool:
    """Return whether a module belongs to a release."""
    if name.split(".")[:2] == ["dovetail", "zoo"]:
        return False
    top = name.partition(".")[0]
    return top in ("torch", "dovetail", "builtins", *_LIBRARIES) or top in sys.stdlib_module_names


def is_stateful(module: str, name: str) -> bool:
    """Return whether what a module has under a name is known to depend on state of the process."""
    return module in _STATEFUL or f"{module.removeprefix('_')}.{name}" in _STATEFUL


def reads_of_state(module: str, name: str) -> tuple[str, ...]:
    """Return the names by which code reads state of the process through a class or function of a pure module."""
    return _STATEFUL_BY_NAME.get(f"{module}.{name}", ())


def inherits_from_release(kind: type) -> bool:
    """Return whether methods of a release that are not followed may read attributes of the instances of a class."""
    return any(
        is_release_module(base.__module__)
        and f"{base.__module__}.{base.__qualname__}" not in _WITHOUT_ATTRIBUTES
        and not base.__module__.startswith("torch.nn.")
        for base in kind.__mro__
    )


def is_pure(module: str, name: str = "") -> bool:
    """Return whether what a module of a release has under a name depends on nothing but arguments and the release."""
    if is_stateful(module, name):
        return False
    top = module.partition(".")[0]
    return top in ("torch", "dovetail", *_LIBRARIES) or top.lstrip("_") in _PURE_STDLIB


def queries_packages(module: str) -> bool:
    """Return whether the functions of a module of the standard library answer which packages are installed."""
    return module in _QUERIES_OF_PACKAGES


def is_release_value(value: Any) -> bool:
    """Return whether a function or class is what a module of a release has under its name, or is defined in C there."""
    module = str(getattr(value, "__module__", None) or "")
    if isinstance(value, type) and (not value.__flags__ & _HEAP_TYPE or value.__flags__ & _IMMUTABLE_TYPE):
        return True
    if not is_release_module(module):
        return False
    held: Any = sys.modules.get(module)
    for part in str(value.__qualname__).split("."):
        if part == "<locals>":
            return isinstance(value, type)
        held = getattr(held, part, None)
    held = getattr(held, "__func__", held)
    return held is value


@functools.lru_cache(maxsize=1)
def _installed(paths: tuple[str, ...]) -> str:
    names: list[str] = []
    for path in paths:
        try:
            entries = list(os.scandir(path or "."))
        except OSError:
            continue
        suffixes = (*importlib.machinery.all_suffixes(), ".dist-info", ".egg-info")
        names += [e.name for e in entries if e.name.endswith(suffixes) or _is_package(e)]
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:32]


def _is_package(entry: os.DirEntry[str]) -> bool:
    return os.path.isfile(os.path.join(entry.path, "__init__.py"))


def installed_packages() -> str:
    """Return a hash of the names of the modules and distributions that can be imported, without the standard library."""
    return _installed(tuple(path for path in sys.path if not _is_stdlib(path)))


def _is_stdlib(path: str) -> bool:
    is_installed = any(name in path for name in _INSTALLED)
    return not is_installed and ((path + os.sep).startswith(_STDLIB) or path.endswith(".zip"))


def name_of(value: Any) -> str:
    """Return the module and the qualified name of a class or function."""
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', value)}"


def is_generated(code: types.CodeType) -> bool:
    """Return whether code has no file, but text that libraries execute, as FX, Dynamo and data classes do."""
    return code.co_filename == "<string>" or code.co_filename.startswith("<eval_with_key>")
