"""Which modules an operation came from, and paths of repeated modules in a short form: `layers.0–31.mlp`."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

_GETATTR = re.compile(r"getattr\(([^(),]+), ['\"]([^'\"]+)['\"]\)")
_ROOT = re.compile(r"^[LG]\[[^\]]*\]")
_CELL = re.compile(r"^.*\.cell_contents")
_ITEM = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
_REPEATED = re.compile(r"@\d+$")


@dataclass(frozen=True, slots=True)
class ModuleFrame:
    """One call of a module: `key` is unique to the call, `path` is the module's path and `owner` its class."""

    key: str
    path: str
    owner: str

    @property
    def class_name(self) -> str:
        """The name of the class without its Python module."""
        return self.owner.rpartition(".")[2]


def module_stack(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the module stack in the meta of an operation, outermost call first; empty if the tracer recorded none."""
    return cast("Mapping[str, Any]", meta.get("nn_module_stack") or {})


def make_frame(key: str, entry: Any) -> ModuleFrame:
    """Return an entry of a module stack in one form: graphs of capture, export, Dynamo and symbolic tracing differ."""
    path, owner = cast("tuple[Any, Any]", entry)[:2] if isinstance(entry, (tuple, list)) else ("", entry)
    return ModuleFrame(str(key), normalize_path(str(path)), class_name(owner))


def frames_of(meta: Mapping[str, Any]) -> list[ModuleFrame]:
    """Return the module calls in the meta of an operation, outermost first."""
    return [make_frame(key, entry) for key, entry in module_stack(meta).items()]


def path_of(meta: Mapping[str, Any]) -> str:
    """Return the path of the innermost module in the meta of an operation, "" for the root or if unknown."""
    stack = module_stack(meta)
    return make_frame(*list(stack.items())[-1]).path if stack else ""


def prefixed_stack(meta: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the module stack of an operation with each path below `prefix`."""
    frames = frames_of(meta) or [ModuleFrame(prefix, "", "")]
    return {f.key: (".".join(filter(None, (prefix, f.path))), f.owner) for f in frames}


def class_name(owner: Any) -> str:
    """Return the qualified name of a class, which exporters record as text."""
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner)


@functools.lru_cache(maxsize=65536)
def normalize_path(text: str) -> str:
    """Return a module's path in the form of `named_modules`: `layers.0.mlp`.

    Dynamo records the expression it was reached by: `L['self'].layers.0`, `getattr(L['self'].layers, '0')`.
    """
    while (shorter := _GETATTR.sub(r"\1.\2", text)) != text:
        text = shorter
    text = _CELL.sub("", _ROOT.sub("", text))
    text = _ITEM.sub(r".\1", text)
    parts = [_REPEATED.sub("", part) for part in text.split(".")]
    return ".".join(part for part in parts if part and part != "_modules")


def is_within(path: str, scope: str) -> bool:
    """Return whether a module is the one at `scope` or below it."""
    return scope == "" or path == scope or path.startswith(f"{scope}.")


def matches_path(pattern: str, path: str) -> bool:
    """Whether a dotted path matches a pattern of parts, in which `**` is any number of parts."""
    parts = path.split(".")
    # The lengths of the prefixes of the path that match the pattern so far.
    reached = {0}
    for piece in pattern.split("."):
        if piece == "**":
            reached = set(range(min(reached), len(parts) + 1))
        else:
            reached = {n + 1 for n in reached if n < len(parts) and fnmatchcase(parts[n], piece)}
        if not reached:
            return False
    return len(parts) in reached


# More ranges of indexes than this are cut, and more names in braces are the path of their parent.
_MOST_RANGES = 6
_MOST_NAMES = 4


def fold_paths(paths: Iterable[str]) -> list[str]:
    """Return paths with those that differ only in indexes as one, `layers.0–31.mlp`, in order of first appearance.

    Indexes that are not consecutive are ranges, `layers.0–3,7.mlp`. Where paths have indexes at more than one place,
    only those are one path whose indexes are all combinations: `stages.0,3.layers.0–2`. Paths that differ in their last
    name alone are one path as well, `attention.{key,query,value}`, or for many names `attention.*`.
    """
    order: dict[str, int] = {path: k for k, path in reversed(list(enumerate(paths)))}
    families: dict[tuple[str | None, ...], list[tuple[tuple[int, ...], int]]] = {}
    for path, first in order.items():
        parts = path.split(".")
        indexes = tuple(int(part) for part in parts if part.isdecimal())
        family = tuple(None if part.isdecimal() else part for part in parts)
        families.setdefault(family, []).append((indexes, first))
    siblings: dict[tuple[str, ...], dict[str, int]] = {}
    for family, entries in families.items():
        for indexes, first in _products(entries):
            numbers = iter(indexes)
            *parent, name = [format_ranges(next(numbers)) if part is None else part for part in family]
            # An index is no name, and the path of the root is none either.
            is_name = family[-1] is not None and family != ("",)
            names = siblings.setdefault((*parent, "" if is_name else f"{name}."), {})
            names[name] = min(first, names.get(name, first))
    folded = [(min(names.values()), _join(parent, names)) for parent, names in siblings.items()]
    return [text for _, text in sorted(folded)]


def _join(parent: Sequence[str], names: Mapping[str, int]) -> str:
    ranked = sorted(names, key=names.__getitem__)
    last = "*" if len(ranked) > _MOST_NAMES else ranked[0] if len(ranked) == 1 else f"{{{','.join(ranked)}}}"
    return ".".join([*parent[:-1], last])


def _products(entries: Sequence[tuple[tuple[int, ...], int]]) -> list[tuple[tuple[frozenset[int], ...], int]]:
    """Return sets of indexes as products of sets, each with its first appearance: one pass per place, last to first."""
    boxes = {tuple(frozenset([i]) for i in indexes): first for indexes, first in entries}
    for place in reversed(range(len(entries[0][0]))):
        merged: dict[tuple[frozenset[int], ...], tuple[set[int], int]] = {}
        for box, first in boxes.items():
            union, earliest = merged.get((*box[:place], *box[place + 1 :]), (set[int](), first))
            union |= box[place]
            merged[(*box[:place], *box[place + 1 :])] = (union, min(first, earliest))
        boxes = {
            (*rest[:place], frozenset(union), *rest[place:]): first for rest, (union, first) in merged.items()
        }
    return list(boxes.items())


def format_ranges(numbers: Collection[int]) -> str:
    """Return numbers as ranges, `0–3,7`; the middle ones of many are left out."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(a) if a == b else f"{a}–{b}" if b > a + 1 else f"{a},{b}" for a, b in ranges]
    if len(texts) > _MOST_RANGES:
        texts = [*texts[: _MOST_RANGES - 1], "…", texts[-1]]
    return ",".join(texts)


def join_path_list(paths: Iterable[str], *, most: int = 3, width: int = 0, root: str = "(top level)") -> str:
    """Return folded paths as one line, the first of many and so many as fit into `width`, if that is given.

    `root` is the name of the module without a path.
    """
    folded = [path or root for path in fold_paths(paths)]
    shown = min(most, len(folded))
    while True:
        more = f" and {len(folded) - shown} more" if len(folded) > shown else ""
        line = f"{', '.join(folded[:shown])}{more}"
        if not width or len(line) <= width or shown <= 1:
            return line
        shown -= 1
