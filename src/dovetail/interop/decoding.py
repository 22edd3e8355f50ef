"""The other direction of `encoding`: values from JSON that nobody vouches for. Nothing in it is ever run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.fx import Node

from dovetail.graph.fakes import Symbolic, World
from dovetail.graph.pickling import higher_order_named, overload_named, packet_named
from dovetail.interop import functions
from dovetail.interop.encoding import TYPES

_KINDS = ("SymInt", "SymFloat", "SymBool")


class Unreadable(Exception):
    """What a file says makes no sense; the text says where."""


class Decoder:
    """Reads values with the tables they refer to."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        self.texts: list[str] = [take(str, text) for text in rows(tables["texts"])]
        self.symbols: Mapping[str, Any] = table(tables["symbols"])
        self.world = World()
        self.metas: list[Any] = rows(tables["metas"])
        self.values = [self._made(row) for row in rows(tables["values"])]

    def value(self, written: Any, nodes: Sequence[Node] = ()) -> Any:
        """A value; nodes by their numbers in `nodes`."""
        if written is None or isinstance(written, bool | int | float | str):
            return written
        if isinstance(written, list):
            return [self.value(v, nodes) for v in cast("list[Any]", written)]
        if not isinstance(written, dict) or len(cast("dict[str, Any]", written)) != 1:
            raise Unreadable(f"{str(written)[:60]!r} is no value")
        ((tag, content),) = cast("dict[str, Any]", written).items()
        if tag == "n":
            return nodes[index(content, nodes)]
        if tag == "t":
            return tuple(self.value(v, nodes) for v in rows(content))
        if tag == "d":
            return {self.value(k): self.value(v, nodes) for k, v in rows(content)}
        if tag == "sl":
            return slice(*[self.value(v, nodes) for v in rows(content)])
        return self._object(tag, content)

    def _object(self, tag: str, content: Any) -> Any:
        if tag == "v":
            return self.values[index(content, self.values)]
        if tag == "s":
            return self.texts[index(content, self.texts)]
        if tag == "sz":
            return torch.Size([self.value(v) for v in rows(content)])
        if tag == "f":
            return float(take(str, content))
        if tag == "c":
            return complex(*[float(part) for part in rows(content)])
        if tag == "e":
            return Ellipsis
        if tag == "torch":
            return _torch(content)
        if tag == "dev":
            return torch.device(take(str, content))
        if tag in ("op", "pk", "ho", "fn"):
            return target(tag, content)
        raise Unreadable(f"nothing is known by the tag {tag!r}")

    def _made(self, row: Any) -> Any:
        if isinstance(row, dict):
            return self.world.symbolic(self._symbolic(cast("dict[str, Any]", row)))
        storage, sizes, strides, start, dtype, device, grad, parameter = rows(row)
        return self.world.tensor(
            (
                take(int, storage),
                tuple(self._size(s) for s in rows(sizes)),
                None if strides is None else tuple(self._size(s) for s in rows(strides)),
                self._size(start),
                _torch(dtype),
                torch.device(take(str, device)),
                take(bool, grad),
                take(bool, parameter),
            )
        )

    def _size(self, size: Any) -> Any:
        return self._symbolic(cast("dict[str, Any]", size)) if isinstance(size, dict) else take(int, size)

    def _symbolic(self, row: Mapping[str, Any]) -> Symbolic:
        kind, text, names = rows(row["x"])
        if kind not in _KINDS:
            raise Unreadable(f"{kind!r} is no kind of symbolic number")
        facts: list[tuple[str, int | None, int | None, int | None]] = []
        for name in rows(names):
            known = [None if fact is None else take(int, fact) for fact in rows(self.symbols[name])]
            facts.append((take(str, name), *cast("tuple[int | None, int | None, int | None]", tuple(known))))
        return Symbolic(kind, take(str, text), tuple(facts))

    def type(self, name: Any) -> Any:
        """The type of a node."""
        return None if name is None else TYPES[take(str, name)]

    def meta(self, number: Any, owned: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """A node's meta, and those entries of it that are not values: the `owned` ones, as they are written."""
        row: dict[str, Any] = table(self.metas[index(number, self.metas)])
        # Each node has a dict of its own; the order of the keys is the one they were written in.
        meta = {key: None if key in owned else self.value(value) for key, value in row.items()}
        return meta, {key: row[key] for key in owned & row.keys()}


def target(tag: str, name: Any) -> Any:
    """What a node calls, from one of the few things that it may be."""
    text = take(str, name)
    if tag == "fn":
        function = functions.function_named(text)
        if function is None:
            raise Unreadable(f"a graph may not call '{text}'")
        return function
    find, kind = {
        "op": (overload_named, torch._ops.OpOverload),
        "pk": (packet_named, torch._ops.OpOverloadPacket),
        "ho": (higher_order_named, torch._ops.HigherOrderOperator),
    }[tag]
    try:
        found = find(text)
    except (AttributeError, ValueError, RuntimeError):
        found = None
    if not isinstance(found, kind):
        raise Absent(
            f"calls the operator '{text}', which this torch does not have. Load the library that defines it first."
        )
    return found


class Absent(Exception):
    """A file is sound, and needs something that is not here."""


def _torch(name: Any) -> Any:
    found = getattr(torch, take(str, name), None)
    if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
        raise Unreadable(f"torch has no dtype, layout or memory format '{name}'")
    return found


T = TypeVar("T")


def take(kind: type[T], value: Any) -> T:
    """The value, if it is what it must be."""
    if not isinstance(value, kind):
        raise Unreadable(f"{str(value)[:60]!r} stands where a {kind.__name__} must be")
    return value


def rows(value: Any) -> list[Any]:
    """The value, if it is a list."""
    return cast("list[Any]", take(list, value))


def table(value: Any) -> dict[str, Any]:
    """The value, if it is an object."""
    return cast("dict[str, Any]", take(dict, value))


def index(value: Any, among: Sequence[Any]) -> int:
    """A number of something that is there."""
    number = take(int, value)
    if not 0 <= number < len(among):
        raise Unreadable(f"number {number} of {len(among)}")
    return number
