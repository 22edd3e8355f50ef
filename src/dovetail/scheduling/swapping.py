"""Modules of the model exchanged for others, after they have shown that they fit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.scheduling.paths import is_within
from dovetail.scheduling.recording import Call, copied, undisturbed
from dovetail.scheduling.replacing import (
    check_signature,
    compare,
    in_mode,
    leaves,
    random_state,
    set_random_state,
)
from dovetail.scheduling.workspace import Workspace

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def swapped(
    work: Workspace,
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


def _try(module: nn.Module, old: nn.Module, call: Call, path: str, label: str, check: bool) -> None:
    args, kwargs = call.example.args, dict(call.example.kwargs)
    with undisturbed(nn.ModuleList([old, module])), torch.no_grad():
        drawn = random_state()
        try:
            result = module(*copied(args), **copied(kwargs))
        except Exception as error:
            raise ScheduleError(
                f"'{label}' does not take what '{path}' is called with: {type(error).__name__}: {error}"
            ) from error
        wanted = call.result
        if check:
            # What it draws at random is to be drawn from the same numbers.
            set_random_state(drawn)
            wanted = old(*copied(args), **copied(kwargs))
    compare(leaves(result), leaves(wanted), label, values=check)


def _refuse_hooks(path: str, module: nn.Module) -> None:
    for kind in _HOOKS:
        if module.__dict__.get(kind):
            what = kind.strip("_").removesuffix("s").replace("_", " ")
            raise ScheduleError(
                f"'{path}' has a {what}, which would be lost. Remove it, or replace what is within the module"
            )


class Called(nn.Module):
    """A function, or something with further arguments fixed, as a module."""

    def __init__(self, function: Callable[..., Any], fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.fixed = dict(fixed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **self.fixed, **kwargs)


def as_module(new: Any, fixed: Mapping[str, Any]) -> nn.Module:
    if not callable(new):
        raise InvalidArgument(f"replace takes a module or a function, not a {type(new).__name__}.")
    return new if isinstance(new, nn.Module) and not fixed else Called(new, fixed)


@contextmanager
def _taken_over(
    work: Workspace, old: nn.Module, module: nn.Module, params: Mapping[str, Any] | None
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


def _parameter(work: Workspace, old: nn.Module, source: Any) -> nn.Parameter:
    """A parameter of the module that is replaced, or of the model: by name, or itself."""
    with work.exchanged() as model:
        known = {**dict(model.named_parameters()), **dict(old.named_parameters())}
    if isinstance(source, str):
        if source not in known:
            there = ", ".join(n for n, _ in old.named_parameters()) or "none"
            raise ScheduleError(f"there is no parameter '{source}'; the module that is replaced has {there}")
        return known[source]
    if isinstance(source, Tensor) and any(source is p for p in known.values()):
        return source  # pyright: ignore[reportReturnType]
    raise InvalidArgument(
        f"params of a module that is replaced are its parameters, or names of them, not a {type(source).__name__}."
    )
