"""Python functions that a saved graph may call, by name: arithmetic, and torch's functions of tensors. No others."""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import autocast_mode

ATTRIBUTES = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "T",
        "mT",
        "H",
        "mH",
        "real",
        "imag",
        "requires_grad",
        "is_cuda",
    )
)
"""What `getattr` may ask a value for: traced code asks tensors for these, and nothing else may be reached with it."""

_OPERATORS = """
    getitem setitem add sub mul truediv floordiv mod pow matmul neg pos abs invert not_ and_ or_ xor lshift rshift
    eq ne lt le gt ge iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor is_ is_not truth index contains
"""
_BUILTINS = "abs bool float getattr int len max min pow round sum"
_SPACES = ("torch", "torch.nn.functional", "torch.functional", "torch.linalg", "torch.special", "torch.fft")


@functools.cache
def _plain() -> dict[str, Any]:
    """What every graph may have: arithmetic, and what exporters write of symbolic sizes and modes."""
    found: dict[str, Any] = {f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()}
    found |= {f"builtins.{name}": getattr(builtins, name) for name in _BUILTINS.split()}
    found |= {
        f"math.{name}": value for name, value in vars(math).items() if callable(value) and name[0] != "_"
    }
    found |= {
        f"torch.{name}": value
        for name, value in vars(torch).items()
        if name.startswith(("sym_", "_sym_")) and callable(value)
    }
    found["torch._C._set_grad_enabled"] = torch._C._set_grad_enabled
    for name in ("_enter_autocast", "_exit_autocast"):
        found[f"torch.amp.autocast_mode.{name}"] = getattr(autocast_mode, name)
    return found


@functools.cache
def _of_tensors() -> dict[str, Any]:
    """torch's own functions of tensors and those that make them: what a tracer writes that keeps them as they are."""
    # All that torch generates from its operators; one of them reads any file that it is told to.
    found: dict[str, Any] = {
        f"torch.{name}": getattr(torch, name)
        for name in dir(vars(torch._C)["_VariableFunctions"])
        if not name.startswith("_") and name != "from_file" and hasattr(torch, name)
    }
    listed = torch.overrides.get_overridable_functions()
    known = {id(function) for functions in listed.values() for function in functions}
    for space in _SPACES:
        module = functools.reduce(getattr, space.split(".")[1:], torch)
        for name, value in vars(module).items():
            if id(value) in known and callable(value):
                found[f"{space}.{name}"] = value
    found["torch._assert"] = torch._assert
    return found


@functools.cache
def _names() -> dict[int, str]:
    named: dict[int, str] = {}
    for name, function in (*_plain().items(), *_of_tensors().items()):
        named.setdefault(id(function), name)
    return named


def name_of(function: Any) -> str | None:
    """The name a function goes by in a file; None if a graph that calls it cannot be saved."""
    return _names().get(id(function))


def function_named(name: str) -> Callable[..., Any] | None:
    """The function of a name; None if no graph in a file may call it."""
    return _plain().get(name) or _of_tensors().get(name)


def is_method(name: str) -> bool:
    """Whether tensors have a method of this name that a graph in a file may call."""
    return name.isidentifier() and not name.startswith("_") and callable(getattr(torch.Tensor, name, None))
