"""Steps that put something else where a match, a region or a module stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.rules.matching.match import Value
from dovetail.scheduling.edits import Replace, isolated
from dovetail.scheduling.finders import ByModule, ByRegion
from dovetail.scheduling.found import Found
from dovetail.scheduling.paths import below, is_within
from dovetail.scheduling.recording import copied, undisturbed
from dovetail.scheduling.replacing import Replacement, check_fits, check_signature, compare
from dovetail.scheduling.targets import (
    Group,
    grouped,
    is_path,
    keys_of,
    listed,
    resolved_paths,
    spelled_targets,
)
from dovetail.scheduling.workspace import Workspace


def replace_target(
    work: Workspace,
    new: Any,
    target: Any,
    *,
    params: Mapping[str, Any] | None,
    concrete_args: Mapping[str, Any] | None,
    check: bool,
    name: str | None,
) -> None:
    """Put a module or function in the place of a match, a region, siblings, or the modules at some paths."""
    if not callable(new):
        raise InvalidArgument(f"replace takes a module or a function, not a {type(new).__name__}.")
    label = name or getattr(new, "__name__", type(new).__name__)
    fixed = dict(concrete_args or {})
    if is_path(target):
        paths = resolved_paths(work, target)
        inside = [work.state.root_of(path) for path in paths]
        if any(root is not None and root != path for root, path in zip(inside, paths, strict=True)):
            _replace_in_graphs(work, new, [_whole(work, path) for path in paths], params, fixed, check, label)
            return
        _swap(work, dict.fromkeys(paths, new), params, fixed, check, label)
        return
    items, _ = listed(target, "replace")
    _replace_in_graphs(work, new, [items], params, fixed, check, label)


def _whole(work: Workspace, path: str) -> list[Found]:
    """The operations of a module within a traced part."""
    root = work.state.root_of(path) or ""
    found = work.find([root], ByModule(re.compile(f"^{re.escape(below(path, root))}$")))
    if not found:
        raise ScheduleError(f"no operation of '{path}' is left in the traced part '{root}': {found.why}")
    return [found[0]]


def _replace_in_graphs(
    work: Workspace,
    new: Any,
    targets: list[list[Any]],
    params: Mapping[str, Any] | None,
    fixed: dict[str, Any],
    check: bool,
    label: str,
) -> None:
    def run() -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        for items in targets:
            groups = grouped(work, items, "replace")
            if len(groups) > 1:
                raise ScheduleError("siblings that are replaced by one call must be in one graph")
            group = groups[0]
            replacement = Replacement(
                new,
                _identifier(label),
                _given(group, params),
                {name: _operand(group, value) for name, value in (params or {}).items()},
                fixed,
            )
            part = work.state.graphs[group.root, group.form]
            gm, region = isolated(part.gm, list(group.found))
            trace = work.state.traces[group.root]
            call = trace.calls[group.form]
            check_fits(gm, region, replacement, call.example, trace.module, values=check)
            told.extend(spelled_targets([group], keys_of(work, [group])))
            work.edit(Replace(group.root, group.form, group.addresses, new=replacement))
        return told

    def entry(told: list[dict[str, Any]]) -> dict[str, Any]:
        spelled = {
            name: value.name if isinstance(value, Value) else value for name, value in (params or {}).items()
        }
        more = {"params": spelled} if spelled else {}
        more |= {"concrete_args": fixed} if fixed else {}
        return {"do": "replace", "at": told, "siblings": len(targets[0]), "new": new, "name": label, **more}

    work.step(entry, run)


def _given(group: Group, params: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """The operands of a pattern that a replacement is called with, in the pattern's order."""
    match = group.found[0]
    if len(group.found) > 1:
        return _common_operands(group)
    is_pattern = bool(match.request is not None and match.request.arguments) or isinstance(
        match.finder, ByRegion
    )
    if not is_pattern:
        return None
    taken = {_operand(group, value) for value in (params or {}).values()}
    named = [name for name, value in match.operands.items() if isinstance(value, Value)]
    return tuple(name for name in named if name not in taken) or None


def _common_operands(group: Group) -> tuple[str, ...]:
    """What siblings all read, each value once; weights of theirs are not among it."""
    seen: dict[str, None] = {}
    for match in group.found:
        for value in match.operands.values():
            if isinstance(value, Value) and not value.is_constant:
                seen[value.name] = None
    return tuple(seen)


def _operand(group: Group, value: Any) -> str:
    """The name by which an operand of a match is known."""
    if isinstance(value, str):
        return value
    for match in group.found:
        for name, known in match.operands.items():
            if isinstance(known, Value) and isinstance(value, Value) and known.name == value.name:
                return name
    raise InvalidArgument(f"params takes values of the match, such as match['w'], not {value!r}.")


def _identifier(label: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in label).strip("_")
    return text if text and not text[0].isdigit() else f"new_{text}"


def _swap(
    work: Workspace,
    news: Mapping[str, Any],
    params: Mapping[str, Any] | None,
    fixed: dict[str, Any],
    check: bool,
    label: str,
    entry: dict[str, Any] | None = None,
) -> None:
    """Other modules at some paths, each tried on what the module there is called with."""
    if "" in news:
        raise InvalidArgument("the model itself cannot be replaced; schedule the other model.")

    def run() -> None:
        inner = [root for root in work.state.traces if any(is_within(root, path) for path in news)]
        if inner:
            raise ScheduleError(
                f"'{inner[0]}' was traced, and would be lost with what it is in. Undo its steps first"
            )
        calls = work.record(news)
        made: dict[str, nn.Module] = {}
        for path, new in news.items():
            module = as_module(new, fixed)
            _take_over(work, module, params)
            for call in calls[path]:
                count = len(call.example.args)
                check_signature(module, count, {**call.example.kwargs}, label)
                with undisturbed(module), torch.no_grad():
                    try:
                        result = module(*copied(call.example.args), **copied(dict(call.example.kwargs)))
                    except Exception as error:
                        raise ScheduleError(
                            f"'{label}' does not take what '{path}' is called with: {type(error).__name__}: {error}"
                        ) from error
                compare(_leaves(result), _leaves(call.result), label, values=check)
            module.train(work.module_at(path).training)
            made[path] = module
        work.state = replace(work.state, swaps={**work.state.swaps, **made})

    told = entry or {"do": "replace", "paths": list(news), "new": next(iter(news.values())), "name": label}
    told |= {"params": dict(params)} if params else {}
    told |= {"concrete_args": fixed} if fixed else {}
    work.step(lambda _: told, run)


def _leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(value)


class Called(nn.Module):
    """A function, or something with further arguments fixed, as a module."""

    def __init__(self, function: Callable[..., Any], fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.fixed = dict(fixed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **self.fixed, **kwargs)


def as_module(new: Any, fixed: Mapping[str, Any]) -> nn.Module:
    return new if isinstance(new, nn.Module) and not fixed else Called(new, fixed)


def _take_over(work: Workspace, module: nn.Module, params: Mapping[str, Any] | None) -> None:
    """Let parameters of a new module be parameters of the model, the very same objects."""
    for name, source in (params or {}).items():
        if not isinstance(source, str):
            raise InvalidArgument(
                f"params of a module that is replaced are names of parameters, not {source!r}."
            )
        with work.exchanged() as model:
            try:
                value = model.get_parameter(source)
            except AttributeError as error:
                raise ScheduleError(f"the model has no parameter '{source}'") from error
        owner, _, own = name.rpartition(".")
        holder = module.get_submodule(owner)
        if own not in holder._parameters:
            raise ScheduleError(f"the new module has no parameter '{name}'")
        holder._parameters[own] = value


def replace_all(
    work: Workspace,
    paths: tuple[str, ...],
    cls: type[nn.Module],
    factory: Callable[[nn.Module], nn.Module],
    check: bool,
) -> list[str]:
    """Replace every module of a class; what is inside of one that is replaced is not looked at."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"replace_all takes a class of modules, not {cls!r}.")
    found: list[str] = []
    with work.exchanged() as model:
        modules = {path: module for path, module in model.named_modules() if path}
        for path, module in modules.items():
            is_inside = any(is_within(path, outer) for outer in paths)
            if type(module) is cls and is_inside and not any(is_within(path, outer) for outer in found):
                found.append(path)
        news = {path: factory(modules[path]) for path in found}
    if not found:
        raise ScheduleError(
            f"no module of class {cls.__name__} is in {', '.join(p or 'the model' for p in paths)}"
        )
    told = {"do": "replace_all", "paths": list(paths), "class": cls, "factory": factory}
    _swap(work, news, None, {}, check, getattr(factory, "__name__", "factory"), told)
    return found
