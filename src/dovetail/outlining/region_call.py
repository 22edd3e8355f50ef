"""Who a region is and what it was: the record on its call, and the graph's record of names and order."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument
from dovetail.ir.meta_keys import CLONE, OUTLINING, REGION

_KIND = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


class Escape(NamedTuple):
    """What became of a value that is also used outside, and why."""

    policy: str
    reason: str


class Member(NamedTuple):
    """An operation as it was before it moved into a region; a clone has the name of what it was cloned from."""

    name: str
    meta: dict[str, Any]
    rank: int
    target: str | None  # where the graph around has what a get_attr or call_module names
    clone: bool
    type: Any = None

    @property
    def original(self) -> str:
        """The name of the operation that this is a clone of, over any number of clones, or else its own."""
        return self.meta.get(CLONE, self.name)

    @property
    def standing(self) -> tuple[bool, bool]:
        """Lowest for an original, then for a clone that has a name of its own."""
        return self.clone, CLONE in self.meta

    @property
    def is_original(self) -> bool:
        return not any(self.standing)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a region is. `attrs` is canonical JSON, so that equal attributes are equal text."""

    kind: str
    version: int
    attrs: str

    @property
    def headline(self) -> str:
        version = f" v{self.version}" if self.version != 1 else ""
        attrs = f" {self.attrs}" if self.attrs != "{}" else ""
        return f"{self.kind}{version}{attrs}"


@dataclass(frozen=True, slots=True)
class RegionCall:
    """The record on a region's call: identity, and what `inline` needs to give the very operations back.

    `members` are in the order of the body's operations. Ranks are comparable within one `epoch`. `arguments` says
    which operand each argument of a pattern is, `results` which result of the pattern each result of the body is.
    """

    identity: Identity
    members: tuple[Member, ...]
    rank: int
    epoch: int
    escapes: tuple[tuple[str, Escape], ...] = ()
    rule: str | None = None
    round: int | None = None
    backend: str | None = None
    depth: int = 1
    arguments: tuple[tuple[str, int], ...] = ()
    results: tuple[int | None, ...] = ()

    def lowered(self, backends: Mapping[str, str | None]) -> RegionCall:
        """This record with the backends of regions nested in it as given by their names."""
        members = tuple(
            m._replace(
                meta={**m.meta, REGION: replace(inner, backend=backends.get(m.name)).lowered(backends)}
            )
            if (inner := call_of(m.meta)) is not None
            else m
            for m in self.members
        )
        return replace(self, members=members)

    def keeping(self, wanted: Callable[[Any], bool]) -> RegionCall:
        """This record with only those meta entries of its members that are wanted, at every depth."""
        members: list[Member] = []
        for member in self.members:
            inner = call_of(member.meta)
            meta = {k: v for k, v in member.meta.items() if k != REGION and wanted(v)}
            if inner is not None:
                meta[REGION] = inner.keeping(wanted)
            members.append(member._replace(meta=meta))
        return replace(self, members=tuple(members))

    @property
    def headline(self) -> str:
        return self.identity.headline

    @property
    def size(self) -> int:
        """How many original operations it holds, nested ones included."""
        return sum(inner.size if (inner := call_of(m.meta)) else 1 for m in self.members)


def walk(call: RegionCall) -> Iterator[Member]:
    """The members of a call and of every region nested in it."""
    stack = [call]
    while stack:
        for member in stack.pop().members:
            yield member
            inner = call_of(member.meta)
            if inner is not None:
                stack.append(inner)


def call_of(meta: Mapping[str, Any]) -> RegionCall | None:
    """The record in a node's meta, if the node calls a region."""
    found = meta.get(REGION)
    return found if isinstance(found, RegionCall) else None


def write_call(node: Node, call: RegionCall) -> None:
    node.meta[REGION] = call


def clone_of(node: Node) -> str | None:
    """The name of the original, if a node was given back by a region while the original could not be merged with it."""
    return node.meta.get(CLONE)


def mark_clone(node: Node, original: str | None) -> None:
    if original is not None:
        node.meta[CLONE] = original
    else:
        node.meta.pop(CLONE, None)


@dataclass(frozen=True, slots=True)
class OutlineState:
    """What a graph remembers of outlining: the next number per kind, and each node's place in the original order.

    `ranks` is in the order of the listing, so that an edit by others can be told.
    """

    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    ranks: Mapping[str, int] | None = None
    epoch: int = 0


def state_of(gm: GraphModule) -> OutlineState:
    found = gm.meta.get(OUTLINING)
    return found if isinstance(found, OutlineState) else OutlineState()


def with_state(meta: Mapping[str, Any], state: OutlineState) -> dict[str, Any]:
    return {**meta, OUTLINING: state}


def make_identity(kind: object, version: object, attrs: object) -> Identity:
    """A checked identity, or InvalidArgument saying which part is wrong."""
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise InvalidArgument(
            f"kind {kind!r} is not a dotted name such as 'rms_norm' or 'npu.avg_pool': letters, digits and '_'."
        )
    if not isinstance(version, int) or isinstance(version, bool):
        raise InvalidArgument(f"version {version!r} of '{kind}' is not an int.")
    if attrs is not None and not isinstance(attrs, Mapping):
        raise InvalidArgument(f"attrs of '{kind}' are a {type(attrs).__name__}; give a mapping from str.")
    try:
        plain = _plain(cast("Mapping[Any, Any]", attrs or {}), f"attrs of '{kind}'")
    except RecursionError:
        raise InvalidArgument(f"attrs of '{kind}' contain themselves, or nest too deep for JSON.") from None
    return Identity(kind, version, json.dumps(plain, sort_keys=True))


def _plain(value: Any, where: str) -> Any:
    """The value with tuples as lists, refused if JSON cannot hold it exactly."""
    if isinstance(value, int) and abs(value) >= 2**64:
        raise InvalidArgument(f"{where}: an int of {value.bit_length()} bits is too large.")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidArgument(f"{where}: {value!r} has no JSON form.")
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(cast("list[Any]", value))]
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        for key, _ in items:
            if not isinstance(key, str):
                raise InvalidArgument(f"{where}: key {key!r} is not a str.")
        return {k: _plain(v, f"{where}[{k!r}]") for k, v in items}
    raise InvalidArgument(
        f"{where}: a {type(value).__name__} has no JSON form; give numbers, text, lists or mappings."
    )
