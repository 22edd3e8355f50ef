"""Which module calls an operation came from, in whatever form a tracer wrote it down."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch.fx import Node

_GETATTR = re.compile(r"getattr\(([^(),]+), ['\"]([^'\"]+)['\"]\)")
_ROOT = re.compile(r"^[LG]\[[^\]]*\]")
_CELL = re.compile(r"^.*\.cell_contents")
_ITEM = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
_REPEATED = re.compile(r"@\d+$")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a module: `key` tells calls apart, `path` and `owner` say which module of which class."""

    key: str
    path: str
    owner: str

    @property
    def bare(self) -> str:
        """The name of the class without its module."""
        return self.owner.rpartition(".")[2]


def stack_of(node: Node) -> Mapping[str, Any]:
    """The raw stack of an operation, outermost call first; empty where the tracer left none."""
    return cast("Mapping[str, Any]", node.meta.get("nn_module_stack") or {})


def frame(key: str, entry: Any) -> Frame:
    """An entry of a stack in one form: captured, exported, Dynamo's and symbolically traced graphs differ."""
    path, owner = cast("tuple[Any, Any]", entry)[:2] if isinstance(entry, (tuple, list)) else ("", entry)
    return Frame(str(key), plain_path(str(path)), class_name(owner))


def class_name(owner: Any) -> str:
    """The qualified name of a class, which exporters write as text."""
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner)


@functools.lru_cache(maxsize=65536)
def plain_path(text: str) -> str:
    """A module's path as `named_modules` spells it: `layers.0.mlp`.

    Dynamo writes the expression that reached it: `L['self'].layers.0`, `getattr(L['self'].layers, '0')`.
    """
    while (shorter := _GETATTR.sub(r"\1.\2", text)) != text:
        text = shorter
    text = _CELL.sub("", _ROOT.sub("", text))
    text = _ITEM.sub(r".\1", text)
    parts = [_REPEATED.sub("", part) for part in text.split(".")]
    return ".".join(part for part in parts if part and part != "_modules")
