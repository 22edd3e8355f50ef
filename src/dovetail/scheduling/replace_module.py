"""Replacement of modules of the model by other modules, each checked on the recorded calls first."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.scheduling.call_recording import RecordedCall, copy_tensors, expand_objects, isolated_run
from dovetail.scheduling.finders import is_within
from dovetail.scheduling.installed_forward import hook_kind
from dovetail.scheduling.replacement_checks import (
    check_results,
    check_signature,
    flat_leaves,
    in_mode,
    label_of,
)
from dovetail.scheduling.session import ScheduleSession


def replace_modules(
    session: ScheduleSession,
    new_modules: Mapping[str, Any],
    params: Mapping[str, Any] | None,
    fixed: Mapping[str, Any],
    check: bool,
    label: str,
) -> None:
    """Replace modules at some paths, each checked on the calls of the module there."""
    inner = [root for root in session.state.traces if any(is_within(root, path) for path in new_modules)]
    if inner:
        raise ScheduleError(
            f"'{inner[0]}' was traced, and would be lost with what it is in. Undo its steps first"
        )
    calls = session.record(new_modules)
    replacements: dict[str, nn.Module] = {}
    for path, new in new_modules.items():
        old = session.module_at(path)
        _refuse_hooks(path, old)
        module = as_module(new, fixed)
        with in_mode(module, old.training), _shared_parameters(session, old, module, params):
            for call in calls[path]:
                check_signature(new, len(call.example.args), {**call.example.kwargs, **fixed}, label)
                _check_call(module, old, call, path, label, check)
        replacements[path] = module
    session.state = replace(session.state, swaps={**session.state.swaps, **replacements})


def _check_call(
    module: nn.Module, old: nn.Module, call: RecordedCall, path: str, label: str, check: bool
) -> None:
    both = nn.ModuleList([old, module])
    with isolated_run(both), torch.no_grad():
        try:
            result = copy_tensors(call.example.copied().call(module))
        except Exception as error:
            raise ScheduleError(
                f"'{label}' does not accept the arguments of '{path}': {type(error).__name__}: {error}"
            ) from error
    expected = call.result
    if check:
        # From the same state, which both may share, and the same random numbers.
        with isolated_run(both), torch.no_grad():
            expected = call.example.copied().call(old)
    check_results(
        flat_leaves(expand_objects(result)), flat_leaves(expand_objects(expected)), label, values=check
    )


def _refuse_hooks(path: str, module: nn.Module) -> None:
    what = hook_kind(module)
    if what is not None:
        raise ScheduleError(
            f"'{path}' has a {what}, which would be lost. Remove it, or replace what is within the module"
        )


class FunctionModule(nn.Module):
    """A function as a module, with further arguments fixed."""

    def __init__(self, function: Callable[..., Any], fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.fixed = dict(fixed)

    def _get_name(self) -> str:
        return label_of(self.function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **self.fixed, **kwargs)


def as_module(new: Any, fixed: Mapping[str, Any]) -> nn.Module:
    if not callable(new):
        raise InvalidArgument(f"replace takes a module or a function, not a {type(new).__name__}.")
    if not isinstance(new, nn.Module):
        return FunctionModule(new, fixed)
    return with_arguments(new, fixed) if fixed else new


def with_arguments(module: nn.Module, fixed: Mapping[str, Any]) -> nn.Module:
    """Return a module that shares all attributes of another, with arguments fixed."""
    wrapper = _partial_module(type(module), dict(fixed))
    object.__setattr__(wrapper, "__dict__", module.__dict__)
    return wrapper


def _partial_module(cls: type[nn.Module], fixed: dict[str, Any]) -> nn.Module:
    def forward(self: nn.Module) -> Callable[..., Any]:
        own = self.__dict__.get("forward")
        return partial(own if own is not None else cls.forward.__get__(self), **fixed)

    def reduced(self: nn.Module, protocol: Any) -> Any:
        return _partial_module, (cls, fixed), self.__dict__

    # A property takes precedence over instance attributes; torch's own classes look their forward up on the class.
    body = {"forward": property(forward), "__module__": cls.__module__, "__reduce_ex__": reduced}
    subclass = type(cls.__name__, (cls,), body)
    subclass.__qualname__ = cls.__qualname__
    return cast("nn.Module", object.__new__(subclass))


@contextmanager
def _shared_parameters(
    session: ScheduleSession, old: nn.Module, module: nn.Module, params: Mapping[str, Any] | None
) -> Generator[None]:
    """Make parameters of a new module the same objects as parameters of the model; undone if it does not fit."""
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for name, source in (params or {}).items():
            owner, _, own = name.rpartition(".")
            if name not in dict(module.named_parameters()):
                names = ", ".join(n for n, _ in module.named_parameters()) or "none"
                raise ScheduleError(f"the new module has no parameter '{name}'; there are {names}")
            value = _parameter(session, old, source)
            holder = module.get_submodule(owner)
            before.append((holder, own, holder._parameters[own]))
            holder._parameters[own] = value
        yield
    except BaseException:
        for holder, own, value in reversed(before):
            holder._parameters[own] = value
        raise


def _parameter(session: ScheduleSession, old: nn.Module, source: Any) -> nn.Parameter:
    """Return a parameter of the module that is replaced, or of the model, by name or as an object."""
    own = dict(old.named_parameters())
    if isinstance(source, str):
        parameter = own[source] if source in own else _parameter_at(session, source)
        if parameter is None:
            names = ", ".join(own) or "none"
            raise ScheduleError(f"there is no parameter '{source}'; the module that is replaced has {names}")
        return parameter
    if isinstance(source, nn.Parameter):
        with session.with_replacements() as model:
            if any(source is p for p in (*own.values(), *model.parameters())):
                return source
    raise InvalidArgument(
        f"params of a module that is replaced are its parameters, or names of them, not a {type(source).__name__}."
    )


def _parameter_at(session: ScheduleSession, path: str) -> nn.Parameter | None:
    """Return a parameter of the model by its full name."""
    owner, _, name = path.rpartition(".")
    try:
        return session.module_at(owner)._parameters.get(name)
    except AttributeError:
        return None
