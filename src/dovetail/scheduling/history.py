"""What was done, as a list that can be saved and done again on another model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.lowering.backend_protocol import Backend
from dovetail.rules.patterns.pattern_rule import PatternRule
from dovetail.rules.rule import Rule
from dovetail.scheduling.finders import ByModule, ByNode, ByRegion, ByRule, Finder, finder_of

VERSION = 1


class History(list[dict[str, Any]]):
    """The steps of a schedule in order, each a dict: what, where, and how.

    `save` writes it as JSON. Functions, classes and rules are written as where they can be imported from; a step
    with one that cannot be is an error there.
    """

    def json(self) -> str:
        """The history as text."""
        return json.dumps(
            {"dovetail schedule": VERSION, "steps": [_spelled(e, i) for i, e in enumerate(self)]}, indent=1
        )

    def save(self, path: str | Path) -> Path:
        """Write the history to a file."""
        text = self.json()
        target = Path(path)
        scratch = target.with_name(f".{target.name}.part")
        scratch.write_text(text)
        scratch.replace(target)
        return target

    @classmethod
    def load(cls, source: str | Path) -> History:
        """A history from a file, or from the text of one."""
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        try:
            text = str(source) if is_text else Path(source).read_text()
        except OSError as error:
            raise ScheduleError(f"the history cannot be read: {error}") from error
        try:
            data: Any = json.loads(text)
            version, steps = data["dovetail schedule"], data["steps"]
        except (ValueError, KeyError, TypeError) as error:
            raise ScheduleError(f"this is not the history of a schedule: {error}") from error
        if not isinstance(steps, list):
            raise ScheduleError(
                f"this is not the history of a schedule: its steps are a {type(steps).__name__}"
            )
        if version != VERSION:
            raise ScheduleError(
                f"the history is of version {version}, and this is dovetail's version {VERSION} of it"
            )
        return cls(cast("list[dict[str, Any]]", steps))


def _spelled(value: Any, number: int) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Mapping):
        if isinstance(cast("Mapping[Any, Any]", value).get("escapes"), Mapping):
            raise ScheduleError(
                f"step {number} cannot be saved: its escapes are told by node, and nodes have other names in another model. "
                f"Give one word for all of them"
            )
        return {str(k): _spelled(v, number) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(v, number) for v in cast("list[Any]", value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, nn.Module) and not callable(getattr(value, "__spelled__", None)):
        raise ScheduleError(
            f"step {number} cannot be saved: it has a module that only this process has "
            f"({type(value).__name__}). Give a function or class that makes it to `replace_all`, or a function"
        )
    return {"import": import_path(value, number)}


def import_path(value: Any, number: int = 0) -> str:
    """Where something can be imported from; ScheduleError if it cannot."""
    target = value.function if isinstance(value, PatternRule) else value
    module = getattr(value, "__module__", None) or getattr(target, "__module__", None)
    names = [
        getattr(target, "__qualname__", None),
        getattr(target, "__name__", None),
        getattr(value, "name", None),
    ]
    for name in dict.fromkeys(n for n in names if isinstance(n, str)):
        spelled = f"{module}:{name}"
        try:
            found = imported(spelled)
        except ScheduleError:
            continue
        if found is value or found is target:
            return spelled
    if isinstance(value, Rule):
        spelled = _library_rule(value)
        if spelled is not None:
            return spelled
    raise ScheduleError(
        f"step {number} cannot be saved: {getattr(target, '__qualname__', repr(value))} cannot be imported. "
        f"Define it at the top of a module"
    )


def _library_rule(rule: Rule) -> str | None:
    from dovetail import rules as library

    for name in dir(library):
        if getattr(library, name) is rule:
            return f"dovetail.rules:{name}"
    for found in library.DEFAULT:
        if found is rule:
            return f"dovetail.rules:DEFAULT/{rule.name}"
    return None


def imported(spelled: str) -> Any:
    """What an import path names."""
    module, _, name = spelled.partition(":")
    name, _, item = name.partition("/")
    try:
        value: Any = importlib.import_module(module)
        for atom in name.split("."):
            value = getattr(value, atom)
    except (ImportError, AttributeError, ValueError) as error:
        raise ScheduleError(f"'{spelled}' cannot be imported: {error}") from error
    if item:
        value = next((rule for rule in value if rule.name == item), None)
        if value is None:
            raise ScheduleError(f"'{spelled}' cannot be imported: there is no rule '{item}'")
    return value


def restored(value: Any) -> Any:
    """A value of a step again, after it was saved."""
    if isinstance(value, Mapping):
        known = cast("Mapping[str, Any]", value)
        if set(known) == {"import"}:
            return imported(known["import"])
        return {k: restored(v) for k, v in known.items()}
    if isinstance(value, list):
        return [restored(v) for v in cast("list[Any]", value)]
    return value


def finder_from(spelled: Mapping[str, Any]) -> Finder:
    """A finder as a step has it."""
    if not isinstance(spelled, Mapping) or len(spelled) != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(f"a step finds in one way, and this one has {spelled!r}")
    how, what = next(iter(spelled.items()))
    if how == "operator":
        return ByNode(_operator(what))
    if how == "predicate":
        return ByNode(what)
    if how == "module":
        return ByModule(what)
    if how == "path":
        return finder_of(str(what))
    if how == "region":
        return ByRegion(what)
    if how == "rule":
        return finder_of(what)
    if how == "rules":
        return ByRule(tuple(what))
    raise ScheduleError(f"a step finds by '{how}', which is unknown here")


def _operator(name: str) -> OpOverload | OpOverloadPacket:
    value: Any = torch.ops
    try:
        for atom in name.split("."):
            value = getattr(value, atom)
    except AttributeError as error:
        raise ScheduleError(f"a step finds the operator '{name}', which there is none of here") from error
    return value


def described(example: Any) -> Any:
    """Example inputs as a step keeps them: shapes, dtypes and ranges; None where something else is among them."""
    try:
        return _described(example)
    except InvalidArgument:
        return None


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        told: dict[str, Any] = {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if not value.dtype.is_floating_point and not value.dtype.is_complex and value.numel():
            told["range"] = [int(value.min()), int(value.max())]
        return told
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_described(v) for v in cast("list[Any]", value)]}
    if isinstance(value, dict):
        known = cast("dict[Any, Any]", value)
        if all(isinstance(k, str) for k in known):
            return {"dict": {k: _described(v) for k, v in known.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise InvalidArgument("no form")


def made_up(described: Any, device: torch.device) -> Any:
    """Inputs of the same form as some that were described, with numbers of their own."""
    generator = torch.Generator().manual_seed(0)

    def make(told: Mapping[str, Any]) -> Any:
        if "value" in told:
            return told["value"]
        if "dict" in told:
            return {k: make(v) for k, v in told["dict"].items()}
        if "list" in told:
            return [make(v) for v in told["list"]]
        if "tuple" in told:
            return tuple(make(v) for v in told["tuple"])
        dtype = getattr(torch, told["dtype"])
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(told["tensor"], generator=generator).to(device, dtype)
        low, high = told.get("range", [0, 1])
        return torch.randint(low, high + 1, told["tensor"], generator=generator).to(device, dtype)

    return make(described)


def like(example: Any, seed: int) -> Any:
    """Fresh inputs of the form of some others: other numbers, whole ones within the range they had."""
    generator = torch.Generator().manual_seed(seed)

    def make(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype.is_floating_point or value.dtype.is_complex:
            made = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
            return made.requires_grad_() if value.requires_grad else made
        order = torch.randperm(value.numel(), generator=generator).to(value.device)
        return value.reshape(-1)[order].reshape(value.shape)

    return pytree.tree_map(make, example)


def backend_spelled(backend: Any) -> Any:
    """A backend as a step keeps it: its name where that is how it was given."""
    if backend is None or isinstance(backend, str):
        return backend
    if isinstance(backend, Backend) or hasattr(backend, "compile"):
        return type(backend)
    return backend
