"""The state of single Python objects: what of it attributes have, what only code in C can read, and what cannot be known.

`TraceDependencies` follows the parts that are returned here. What has no complete description raises `Undescribable`.
"""

from __future__ import annotations

import collections
import contextlib
import decimal
import enum
import functools
import hashlib
import importlib
import inspect
import re
import threading
import types
import warnings
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any, cast

import torch
from torch import Tensor

from dovetail.frontend.release_code import is_pure, is_release, is_release_module, is_stateful

SCALARS = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented))
TORCH_SCALARS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
CONTAINERS = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    collections.OrderedDict,
    collections.defaultdict,
    collections.deque,
)
CODE_WRAPPERS = (staticmethod, classmethod)
_SETTABLE = (*SCALARS, *CONTAINERS, Tensor, types.SimpleNamespace, functools.partial, functools.partialmethod)
_NUMBERS = (int, float, complex, str, bytes)
_MAX_CONSTANT_BYTES = 1 << 20
_OPAQUE = frozenset({"torch._C.Generator", "builtins.object"})
_LOCKS = frozenset({"_thread.lock", "_thread.RLock"})
_TEXT_ONLY = frozenset(
    {
        "torch.finfo",
        "torch.iinfo",
        "types.GenericAlias",
        "types.UnionType",
        "inspect.Signature",
        "inspect.Parameter",
    }
)
_WITH_REDUCE = ("datetime", "decimal", "operator", "collections", "pydantic_core")
"""Modules in C whose objects are built again from what `__reduce_ex__` returns."""
_LAYOUTS = (*CONTAINERS, *_NUMBERS, BaseException, type)
_LOCAL = "_thread._local"
_REPORTING = ("is_", "are_", "get_", "current_", "device_count", "initial_seed")
"""How the names of functions of torch begin that report state of the process."""
_WITHOUT_CUDA = frozenset(["is_available", "is_initialized", "device_count"])
"""Functions of `torch.cuda` that do not initialize it."""


class Undescribable(Exception):
    """Something that a trace may have read cannot be compared with what another process has."""


def scalar_text(value: Any) -> str:
    """Return the type and value of a constant."""
    text = repr(value)
    return f"{type(value).__name__} {digest(text) if len(text) > 200 else text}"


def digest(text: str) -> str:
    """Return a hash of a text."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def order_text(labels: list[str]) -> str:
    """Return a text that differs for other labels and for another order of them."""
    text = ", ".join(labels)
    return f"{len(labels)} {text if len(text) <= 80 else digest(text)}"


def set_text(path: str, value: Any, *, is_ordered: bool = True) -> str:
    """Return the members of a set, in their order where it is another one in every process."""
    members: list[str] = []
    is_random = False
    for member in value:
        if isinstance(member, type):
            members.append(f"{member.__module__}.{member.__qualname__}")
        elif type(member) in SCALARS or isinstance(member, (enum.Enum, *TORCH_SCALARS)):
            members.append(repr(member))
        else:
            raise Undescribable(f"{path} is a set of objects, which has no order")
        is_random |= not isinstance(member, (bool, int, float, complex))
    return order_text(members if is_random and is_ordered else sorted(members))


def content_digest(path: str, tensor: Tensor) -> str:
    """Return a hash of a tensor that may be a constant of the graph."""
    if tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() > _MAX_CONSTANT_BYTES:
        raise Undescribable(f"{path} is a large tensor that is neither a parameter nor a buffer")
    with torch.no_grad():
        values = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
        data = values.view(torch.uint8) if values.numel() else values
        return hashlib.sha256(bytes(data.untyped_storage())).hexdigest()[:32]


_OFFSETS = frozenset(["__vectorcalloffset__", "__dictoffset__", "__weaklistoffset__"])
"""Members by which classes in C state where their fields are; what they give for an object is an address."""


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are its own, in their order, those in slots last."""
    result: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):
        is_local = isinstance(value, threading.local)
        result.update(value.__dict__ if is_local else object.__getattribute__(value, "__dict__"))
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            is_member = isinstance(slot, types.MemberDescriptorType) and name not in _OFFSETS
            if is_member and slot.__objclass__ is base:
                try:
                    result.setdefault(name, slot.__get__(value, type(value)))
                except AttributeError:  # not set
                    continue
    return result


def layout_in_c(kind: type) -> type | None:
    """Return the class in C that gives instances fields that are no attributes; None if there is none."""
    for base in kind.__mro__:
        above = base.__base__
        if above is None:
            continue
        own = [v for v in vars(base).values() if isinstance(v, types.MemberDescriptorType)]
        explained = len(own) + ("__dict__" in vars(base)) + ("__weakref__" in vars(base))
        is_variable = base.__itemsize__ and not above.__itemsize__
        if base.__basicsize__ - above.__basicsize__ > 8 * explained or is_variable:
            return base
    return None


def state_in_c(path: str, value: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return what of an object is no attribute: a text, and values by name; raise Undescribable if that is not known."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    layout = layout_in_c(kind)
    if layout is None or name in _OPAQUE:
        return "", []
    if name in _LOCKS:
        is_owned = name == "_thread.RLock" and value._is_owned()
        return f"{repr(value).partition(' ')[0]}{' by this thread' if is_owned else ''}>", []
    if layout in _NUMBERS:
        return cast("Any", layout).__repr__(value), []
    if name in _TEXT_ONLY:
        return repr(value), []
    if issubclass(layout, BaseException):
        if layout is not BaseException and kind not in (layout, Exception):
            raise Undescribable(f"{path} is a {name}, whose state is not known")
        return "", [("args", cast("Any", BaseException).args.__get__(value))]
    owner = f"{layout.__module__}.{layout.__qualname__}"
    if layout in _LAYOUTS or owner == _LOCAL:
        return "", []
    if layout.__module__ == "numpy" or layout.__module__.startswith("numpy."):
        return _array_text(path, value), []
    if isinstance(value, torch.jit.ScriptFunction):
        return _script(path, value)
    if isinstance(value, types.GeneratorType):
        frame = cast("Any", value).gi_frame
        if frame is None:
            return "ended", []
        if inspect.getgeneratorstate(value) != inspect.GEN_CREATED:
            raise Undescribable(f"{path} is a suspended generator, whose iterators are not known")
        return "created", [("code", value.gi_code), *frame.f_locals.items()]
    if layout.__module__.partition(".")[0].lstrip("_") in _WITH_REDUCE and _is_reduced_in_c(kind):
        try:
            return "", [("__reduce__", value.__reduce_ex__(4))]
        except TypeError:
            pass
    raise Undescribable(f"{path} is a {name}, whose state is not known")


def _array_text(path: str, value: Any) -> str:
    """Return the contents of an array or scalar of NumPy."""
    if not hasattr(value, "tobytes"):
        return repr(value)
    if value.dtype.hasobject or value.nbytes > _MAX_CONSTANT_BYTES:
        raise Undescribable(f"{path} is an array that is large or holds objects")
    data = hashlib.sha256(value.tobytes()).hexdigest()[:32]
    return f"{value.dtype!r} {value.shape} {getattr(value, 'strides', ())} {data}"


def _script(path: str, value: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return the graph of a function that torch.jit compiled, without places in files, and the function it was."""
    text = re.sub(r" # \S*:\d+:\d+", "", str(value.inlined_graph))
    if "<Tensor>" in text:
        raise Undescribable(f"{path} is a compiled function with a tensor as constant")
    return digest(text), [("original", getattr(value, "_torchdynamo_inline", None))]


def _is_reduced_in_c(kind: type) -> bool:
    """Return whether nothing in Python decides what `__reduce_ex__` returns."""
    for name in ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs__", "__getnewargs_ex__"):
        method = inspect.getattr_static(kind, name, None)
        if method is not None and not isinstance(method, BUILTINS):
            return False
    return True


def registered_classes(kind: type) -> list[str]:
    """Return the classes that were registered with an abstract base class."""
    implementation = vars(kind).get("_abc_impl")
    if implementation is None:
        return []
    registry: Any = importlib.import_module("_abc")._get_dump(kind)[0]
    classes: Iterator[Any] = (reference() for reference in registry)
    return sorted(f"{c.__module__}.{c.__qualname__}" for c in classes if c is not None)


def reported_state(function: Any) -> str:
    """Return what a function of torch that reports state of the process returns now; "" for any other function."""
    name: str = function.__name__
    is_global = isinstance(function, types.FunctionType) or getattr(function, "__self__", None) is not None
    owner = str(function.__module__ or getattr(getattr(function, "__self__", None), "__name__", ""))
    if not name.startswith(_REPORTING) or not is_global or function.__qualname__ != name:
        return ""
    if owner.partition(".")[0] != "torch" and getattr(torch._C, name, None) is not function:
        return ""
    if owner.startswith("torch.cuda") and name not in _WITHOUT_CUDA and not torch.cuda.is_initialized():
        return " of CUDA that is not initialized"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = function()
    except TypeError:  # it takes arguments
        return ""
    except Exception as error:
        return f" {type(error).__name__}"
    return f" {state}" if isinstance(state, (*SCALARS, *TORCH_SCALARS)) else ""


def require_pure(path: str, module: str, name: str) -> None:
    """Raise Undescribable if what a module of a release has under a name may differ in every process."""
    if (is_release_module(module) or is_stateful(module, name)) and not is_pure(module, name):
        raise Undescribable(f"{path} ({module}.{name}) may have another value in every process")


def process_state(module: str, names: AbstractSet[str]) -> str:
    """Return the state of the process on which code of a pure module depends, for code that has names; "" for most modules."""
    top = module.lstrip("_")
    if top in ("decimal", "pydecimal"):
        # Its flags are results, which only `getcontext` gives.
        context = decimal.getcontext()
        traps = sorted(signal.__name__ for signal, is_set in context.traps.items() if is_set)
        return f"{context.prec} {context.rounding} {context.Emin} {context.Emax} {context.capitals} {context.clamp} {traps}"
    if top != "warnings":
        return ""
    # Who does not record warnings notices only those that are raised.
    filters: list[str] = []
    end = 0
    for action, message, category, source, line in cast("list[tuple[Any, ...]]", warnings.filters):
        patterns = [getattr(pattern, "pattern", pattern) for pattern in (message, source)]
        filters.append(f"{action} {patterns} {category.__module__}.{category.__qualname__} {line}")
        if action == "error" or "catch_warnings" in names:
            end = len(filters)
        if (message, category, source, line) == (None, Warning, None, 0):
            break  # no other filter is asked
    return order_text(filters[:end])


def annotations_text(path: str, annotations: Any) -> str:
    """Return what describes annotations, "" without any."""
    text = repr(annotations)
    if " at 0x" in text:
        raise Undescribable(f"{path} has annotations whose text is another one in every process")
    return digest(text) if annotations else ""


def is_settable(value: Any) -> bool:
    """Return whether a value of a class or function of a release may be one that users have set."""
    function = function_of(value)
    if isinstance(function, types.FunctionType):
        return not is_release(function.__code__.co_filename)
    if isinstance(value, type):
        return not is_release_module(value.__module__)
    return isinstance(value, _SETTABLE) or not is_release_module(type(value).__module__)


def function_of(value: Any) -> Any:
    """Return the function behind a decorator of Python's own."""
    if isinstance(value, property):
        return value.fget
    return cast("Any", value).__func__ if isinstance(value, CODE_WRAPPERS) else value


def cell_contents(cell: Any) -> Any:
    """Return the value of a variable of a closure."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return "undefined"
