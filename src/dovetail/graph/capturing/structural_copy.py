"""A structural copy of a model: modules of its own over the same parameters and buffers.

While a model is exported its parameters are replaced by fake ones and it has hooks of ours. Done to a copy, that is not
seen by another thread that calls the model meanwhile.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any, cast

import torch
from torch import Tensor, nn

from dovetail.graph.capturing.callables import rebound

_OWN_DICTS = ("_parameters", "_buffers", "_modules")
_BOOKKEEPING = frozenset(k for k, v in nn.Module().__dict__.items() if isinstance(v, (dict, set))) - {
    *_OWN_DICTS
}
"""What every module keeps of its hooks and buffers: what is registered with the copy is not with the model."""
_OPAQUE = (
    Tensor,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    type,
    types.ModuleType,
)
_DEPTH = 3
"""How far containers, functions and helper objects are followed for references to modules of the model."""


class _Uncopied(Exception):
    """Something refers to a module of the model in a way that cannot be redirected."""


def structural_copy(model: nn.Module) -> nn.Module:
    """A model with modules of its own that share parameters, buffers and all else with `model`.

    References between the modules (attributes, lists, bound methods, closures, hooks) lead to the copies. Where one is
    held by an object of another kind, or a module is implemented in C++, it is the model itself.
    """
    modules = list(model.modules())
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):  # pyright: ignore
        return model
    # A module that shares its children with another one, as without its hooks, is the same to those that refer to it.
    copies = {id(module._modules): object.__new__(type(module)) for module in modules}
    if len(copies) != len(modules):
        return model
    redirect = _Redirect(copies)
    try:
        for module in modules:
            redirect.fill(module, copies[id(module._modules)])
    except _Uncopied:
        return model
    return copies[id(model._modules)]


class _Redirect:
    def __init__(self, copies: dict[int, Any]) -> None:
        self.copies = copies
        self.tables: dict[int, Any] = {}

    def fill(self, module: nn.Module, copy: Any) -> None:
        for name, value in module.__dict__.items():
            if name in _OWN_DICTS:
                # Modules may share one of these; what one registers the other then has.
                value = self.tables.setdefault(id(value), type(value)(value))
                if name == "_modules":
                    value.update({k: self.copy_of(v, v) for k, v in value.items()})
                copy.__dict__[name] = value
            else:
                value = value.copy() if name in _BOOKKEEPING else value
                copy.__dict__[name] = self.redirected(value)

    def copy_of(self, value: Any, otherwise: Any = None) -> Any:
        """The copy of a module of the model; `otherwise` for anything else."""
        own = value.__dict__.get("_modules") if isinstance(value, nn.Module) else None
        copy = None if own is None else self.copies.get(id(own))
        if copy is None:
            return otherwise
        if not (isinstance(copy, type(value)) or isinstance(value, type(copy))):
            # A wrapper with the children of what it wraps.
            raise _Uncopied
        return copy

    def redirected(self, value: Any, depth: int = 0) -> Any:
        """A value with references to modules of the model replaced; itself where it has none."""
        if isinstance(value, _OPAQUE):
            return value
        if isinstance(value, nn.Module):
            return self.copy_of(value, value)
        if isinstance(value, weakref.ReferenceType):
            copy = self.copy_of(cast("Any", value)())
            return cast("Any", value) if copy is None else weakref.ref(copy)
        if depth > _DEPTH:
            return value
        if isinstance(value, types.MethodType):
            owner = self.redirected(value.__self__, depth + 1)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            parts = self._parts((value.func, value.args, value.keywords), depth)
            return value if parts is None else _partial(value, *parts)
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, (list, tuple, set, frozenset, dict, deque)):
            return self._container(cast("Any", value), depth)
        if depth < _DEPTH and hasattr(value, "__dict__") and not isinstance(value, types.BuiltinFunctionType):
            held = list(vars(value).values())
            if any(self.redirected(one, depth + 1) is not one for one in held):
                raise _Uncopied
        return value

    def _parts(self, values: tuple[Any, ...], depth: int) -> list[Any] | None:
        found = [self.redirected(one, depth + 1) for one in values]
        return None if all(a is b for a, b in zip(found, values, strict=True)) else found

    def _function(self, value: types.FunctionType, depth: int) -> Any:
        cells: dict[str, Any] = {}
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                held = cell.cell_contents
            except ValueError:  # a cell that is not filled yet holds nothing
                continue
            new = self.redirected(held, depth + 1)
            if new is not held:
                cells[name] = new
        if not cells:
            return value
        made: Any = rebound(value, cells)
        made.__dict__.update(value.__dict__)
        return made

    def _container(self, value: Any, depth: int) -> Any:
        """Containers of tensors are copied too: some layers keep their weights in one, which is written with them."""
        items = list(value.values()) if isinstance(value, dict) else list(value)
        new = [self.redirected(one, depth + 1) for one in items]
        same = all(a is b for a, b in zip(items, new, strict=True))
        if same and not any(isinstance(one, nn.Parameter) for one in items):
            return value
        if type(value) in (list, tuple, set, frozenset, deque):
            return type(value)(new)
        if type(value) in (dict, OrderedDict, defaultdict):
            copy = value.copy()
            copy.update(zip(value, new, strict=True))
            return copy
        if same:
            return value
        raise _Uncopied


def _partial(value: Any, function: Any, args: Any, keywords: Any) -> Any:
    made = functools.partial(function, *args, **keywords)
    made.__dict__.update(value.__dict__)
    return made
