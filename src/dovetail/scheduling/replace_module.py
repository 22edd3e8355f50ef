"""Modules of the model exchanged for others, after they have been shown to fit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.scheduling.call_recording import RecordedCall, copied, opened, undisturbed
from dovetail.scheduling.finders import is_within
from dovetail.scheduling.installed_forward import hook_on
from dovetail.scheduling.replacement_checks import check_signature, compare, in_mode, label_of, leaves
from dovetail.scheduling.session import ScheduleSession


def swapped(
    work: ScheduleSession,
    news: Mapping[str, Any],
    params: Mapping[str, Any] | None,
    fixed: Mapping[str, Any],
    check: bool,
    label: str,
) -> None:
    """Other modules at some paths, each tried on what the module there is called with."""
    inner = [root for root in work.state.traces if any(is_within(root, path) for path in news)]
    if inner:
        raise ScheduleError(
            f"'{inner[0]}' was traced, and would be lost with what it is in. Undo its steps first"
        )
    calls = work.record(news)
    made: dict[str, nn.Module] = {}
    for path, new in news.items():
        old = work.module_at(path)
        _refuse_hooks(path, old)
        module = as_module(new, fixed)
        with in_mode(module, old.training), _taken_over(work, old, module, params):
            for call in calls[path]:
                check_signature(new, len(call.example.args), {**call.example.kwargs, **fixed}, label)
                _try(module, old, call, path, label, check)
        made[path] = module
    work.state = replace(work.state, swaps={**work.state.swaps, **made})


def _try(module: nn.Module, old: nn.Module, call: RecordedCall, path: str, label: str, check: bool) -> None:
    both = nn.ModuleList([old, module])
    with undisturbed(both), torch.no_grad():
        try:
            result = copied(call.example.copied().call(module))
        except Exception as error:
            raise ScheduleError(
                f"'{label}' does not take what '{path}' is called with: {type(error).__name__}: {error}"
            ) from error
    wanted = call.result
    if check:
        # From the same state, which the two may share, and the same random numbers.
        with undisturbed(both), torch.no_grad():
            wanted = call.example.copied().call(old)
    compare(leaves(opened(result)), leaves(opened(wanted)), label, values=check)


def _refuse_hooks(path: str, module: nn.Module) -> None:
    what = hook_on(module)
    if what is not None:
        raise ScheduleError(
            f"'{path}' has a {what}, which would be lost. Remove it, or replace what is within the module"
        )


class Called(nn.Module):
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
        return Called(new, fixed)
    return with_arguments(new, fixed) if fixed else new


def with_arguments(module: nn.Module, fixed: Mapping[str, Any]) -> nn.Module:
    """A module that is the given one in everything, names of its parameters included, with arguments fixed."""
    made = _fixing(type(module), dict(fixed))
    object.__setattr__(made, "__dict__", module.__dict__)
    return made


def _fixing(cls: type[nn.Module], fixed: dict[str, Any]) -> nn.Module:
    def forward(self: nn.Module) -> Callable[..., Any]:
        own = self.__dict__.get("forward")
        return partial(own if own is not None else cls.forward.__get__(self), **fixed)

    def reduced(self: nn.Module, protocol: Any) -> Any:
        return _fixing, (cls, fixed), self.__dict__

    # A property comes before what an instance has; torch's own classes look their forward up on the class.
    body = {"forward": property(forward), "__module__": cls.__module__, "__reduce_ex__": reduced}
    made = type(cls.__name__, (cls,), body)
    made.__qualname__ = cls.__qualname__
    return cast("nn.Module", object.__new__(made))


@contextmanager
def _taken_over(
    work: ScheduleSession, old: nn.Module, module: nn.Module, params: Mapping[str, Any] | None
) -> Generator[None]:
    """Parameters of a new module as parameters of the model, the very same objects; not if it turns out not to fit."""
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for name, source in (params or {}).items():
            owner, _, own = name.rpartition(".")
            if name not in dict(module.named_parameters()):
                known = ", ".join(n for n, _ in module.named_parameters()) or "none"
                raise ScheduleError(f"the new module has no parameter '{name}'; there are {known}")
            value = _parameter(work, old, source)
            holder = module.get_submodule(owner)
            before.append((holder, own, holder._parameters[own]))
            holder._parameters[own] = value
        yield
    except BaseException:
        for holder, own, value in reversed(before):
            holder._parameters[own] = value
        raise


def _parameter(work: ScheduleSession, old: nn.Module, source: Any) -> nn.Parameter:
    """A parameter of the module that is replaced, or of the model: by name, or itself."""
    own = dict(old.named_parameters())
    if isinstance(source, str):
        found = own[source] if source in own else _at(work, source)
        if found is None:
            there = ", ".join(own) or "none"
            raise ScheduleError(f"there is no parameter '{source}'; the module that is replaced has {there}")
        return found
    if isinstance(source, nn.Parameter):
        with work.exchanged() as model:
            if any(source is p for p in (*own.values(), *model.parameters())):
                return source
    raise InvalidArgument(
        f"params of a module that is replaced are its parameters, or names of them, not a {type(source).__name__}."
    )


def _at(work: ScheduleSession, path: str) -> nn.Parameter | None:
    """A parameter of the model by its whole name."""
    owner, _, name = path.rpartition(".")
    try:
        return work.module_at(owner)._parameters.get(name)
    except AttributeError:
        return None
