"""Which modules of a model a path names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from dovetail.errors import UnknownPart, nearest
from dovetail.rules.modules import matches_path

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_LISTED = 5


def matching(model: nn.Module, pattern: str) -> tuple[str, ...]:
    """The paths that a glob names, as `named_modules` lists them; UnknownPart if there are none.

    `*` stands for one part of a path or a piece of it, `**` for any number of parts, `""` for the model itself.
    """
    known = [path for path, _ in model.named_modules(remove_duplicate=False)]
    if pattern == "":
        return ("",)
    found = tuple(path for path in known if path and matches_path(pattern, path))
    if not found:
        raise UnknownPart(pattern, _near(pattern, known))
    return found


def require_path(model: nn.Module, path: str) -> None:
    """UnknownPart if a model has no module at a path."""
    try:
        model.get_submodule(path)
    except AttributeError:
        known = [name for name, _ in model.named_modules(remove_duplicate=False)]
        raise UnknownPart(path, _near(path, known)) from None


def _near(pattern: str, known: list[str]) -> list[str]:
    """Paths that may have been meant, layers folded into one."""
    folded = sorted({_NUMBER.sub("*", path) for path in known if path})
    wanted = _NUMBER.sub("*", pattern)
    last = pattern.rpartition(".")[2]
    near = dict.fromkeys(nearest(wanted, folded, most=_LISTED))
    near.update(dict.fromkeys(path for path in folded if path.rpartition(".")[2] == last))
    return list(near)[:_LISTED] or folded[:_LISTED]


def joined(*parts: str) -> str:
    """Paths one below the other as one."""
    return ".".join(part for part in parts if part)


def around(path: str) -> list[str]:
    """The paths that a path lies in, itself first and the model last."""
    found = [path] if path else []
    while "." in path:
        path = path.rpartition(".")[0]
        found.append(path)
    return [*found, ""]


def outermost(paths: Iterable[str]) -> list[str]:
    """Some paths without those that lie in others of them, each once."""
    known = dict.fromkeys(paths)
    return [path for path in known if not any(outer in known for outer in around(path) if outer != path)]


def is_within(path: str, outer: str) -> bool:
    """Whether a path is `outer` or lies below it."""
    return outer == "" or path == outer or path.startswith(f"{outer}.")


def below(path: str, outer: str) -> str:
    """A path as seen from one it lies in."""
    return path if outer == "" else path[len(outer) + 1 :]
