"""The history of a schedule: its steps as dicts, saved as JSON and replayed on another model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from dovetail import backends
from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.lowering.backend_protocol import Backend
from dovetail.rules.library import ALL
from dovetail.rules.patterns.pattern_rule import PatternRule
from dovetail.rules.rule import Rule
from dovetail.scheduling.finders import ByModule, ByNode, ByRegion, ByRule, Finder, finder_of

VERSION = 1


class History(list[dict[str, Any]]):
    """The steps of a schedule in order, each a dict.

    `save` writes it as JSON. Functions, classes and rules are written as import paths; saving a step with one that
    cannot be imported is an error.
    """

    def json(self) -> str:
        """Return the history as JSON."""
        return json.dumps(
            {"dovetail schedule": VERSION, "steps": [_to_json(e, i) for i, e in enumerate(self)]}, indent=1
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
        """Load a history from a file or from its text."""
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


def _to_json(value: Any, number: int) -> Any:
    """Return a value of a step as JSON."""
    if isinstance(value, Mapping):
        if isinstance(cast("Mapping[Any, Any]", value).get("escapes"), Mapping):
            raise ScheduleError(
                f"step {number} cannot be saved: its escapes are given by node, and nodes have other names in another model. "
                f"Give one word for all of them"
            )
        return {str(k): _to_json(v, number) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(v, number) for v in cast("list[Any]", value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, nn.Module):
        raise ScheduleError(
            f"step {number} cannot be saved: it has a module that only this process has "
            f"({type(value).__name__}). Give a function or class that creates it to `replace_all`, or a function"
        )
    return {"import": import_path(value, number)}


def import_path(value: Any, number: int = 0) -> str:
    """Return the import path of an object; raise ScheduleError if it has none."""
    target = value.function if isinstance(value, PatternRule) else value
    module = getattr(value, "__module__", None) or getattr(target, "__module__", None)
    names = [
        getattr(target, "__qualname__", None),
        getattr(target, "__name__", None),
        getattr(value, "name", None),
    ]
    for name in dict.fromkeys(n for n in names if isinstance(n, str)):
        location = f"{module}:{name}"
        try:
            imported = import_object(location)
        except ScheduleError:
            continue
        if imported is value or imported is target:
            return location
    if isinstance(value, Rule):
        location = _library_rule(value)
        if location is not None:
            return location
    raise ScheduleError(
        f"step {number} cannot be saved: {getattr(target, '__qualname__', repr(value))} cannot be imported. "
        f"Define it at the top of a module"
    )


def _library_rule(rule: Rule) -> str | None:
    from dovetail import rules as library

    for name in dir(library):
        if getattr(library, name) is rule:
            return f"dovetail.rules:{name}"
    for member in library.DEFAULT:
        if member is rule:
            return f"dovetail.rules:DEFAULT/{rule.name}"
    return None


def import_object(location: str) -> Any:
    """Return the object at an import path."""
    module, _, name = location.partition(":")
    if module.startswith("dovetail.rules.library."):
        # By the name of the rule, so that a saved history does not depend on the file that defines it.
        library_rule = next((rule for rule in ALL if rule.name == name), None)
        if library_rule is not None:
            return library_rule
    if module.startswith("dovetail.backends.") and name in backends.__all__:
        return getattr(backends, name)
    name, _, item = name.partition("/")
    try:
        value: Any = attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ScheduleError(f"'{location}' cannot be imported: {error}") from error
    if item:
        value = next((rule for rule in value if rule.name == item), None)
        if value is None:
            raise ScheduleError(f"'{location}' cannot be imported: there is no rule '{item}'")
    return value


def from_json(value: Any) -> Any:
    """Return a value of a step that was read from JSON."""
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        if set(mapping) == {"import"}:
            return import_object(mapping["import"])
        return {k: from_json(v) for k, v in mapping.items()}
    if isinstance(value, list):
        return [from_json(v) for v in cast("list[Any]", value)]
    return value


def finder_from_entry(entry: Mapping[str, Any]) -> Finder:
    """Return the finder of an entry."""
    if not isinstance(entry, Mapping) or len(entry) != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(f"a step has one finder, and this one has {entry!r}")
    how, what = next(iter(entry.items()))
    finders: dict[str, Callable[[Any], Finder]] = {
        "operator": lambda name: ByNode(_operator(name)),
        "predicate": ByNode,
        "module": ByModule,
        "path": lambda text: finder_of(str(text)),
        "region": ByRegion,
        "rule": finder_of,
        "rules": lambda rules: ByRule(tuple(rules)),
    }
    if how in finders:
        return finders[how](what)
    raise ScheduleError(f"a step has a finder by '{how}', which is unknown here")


def _operator(name: Any) -> OpOverload | OpOverloadPacket:
    try:
        return attrgetter(name)(torch.ops)
    except (AttributeError, TypeError) as error:
        raise ScheduleError(f"a step finds the operator '{name}', which does not exist here") from error


def describe_inputs(example: Any) -> Any:
    """Return shapes, dtypes and ranges of example inputs; None where they have values that a step cannot store."""
    try:
        return _describe_value(example)
    except InvalidArgument:
        return None


def _describe_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        description: dict[str, Any] = {
            "tensor": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
        }
        if not value.dtype.is_floating_point and not value.dtype.is_complex and value.numel():
            description["range"] = [int(value.min()), int(value.max())]
        return description
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_describe_value(v) for v in cast("list[Any]", value)]}
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value)
        if all(isinstance(k, str) for k in items):
            return {"dict": {k: _describe_value(v) for k, v in items.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise InvalidArgument(f"a {type(value).__name__} cannot be described.")


def inputs_from_description(descriptions: Any, device: torch.device) -> Any:
    """Return random inputs with the described shapes, dtypes and ranges."""
    generator = torch.Generator().manual_seed(0)

    def make(description: Mapping[str, Any]) -> Any:
        if "value" in description:
            return description["value"]
        if "dict" in description:
            return {k: make(v) for k, v in description["dict"].items()}
        if "list" in description:
            return [make(v) for v in description["list"]]
        if "tuple" in description:
            return tuple(make(v) for v in description["tuple"])
        dtype = getattr(torch, description["dtype"])
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(description["tensor"], generator=generator).to(device, dtype)
        low, high = description.get("range", [0, 1])
        return torch.randint(low, high + 1, description["tensor"], generator=generator).to(device, dtype)

    return make(descriptions)


def backend_entry(backend: Any) -> Any:
    """Return a backend as a step stores it: its name where it was requested by name."""
    if backend is None or isinstance(backend, str):
        return backend
    if isinstance(backend, Backend) or hasattr(backend, "compile"):
        return type(backend)
    return backend
