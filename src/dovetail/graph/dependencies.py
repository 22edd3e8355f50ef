"""What must come before what: data edges, and effect edges kept per storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Node

from dovetail.graph.effects import PURE, Effects, attribute, effects


class Storages:
    """Which values may share memory, as a union of sets: linear, and never too fine."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self._position: dict[Node, int] = {}
        self._state: dict[int, int] = {}

    def find(self, i: int) -> int:
        parent = self._parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parent[max(a, b)] = min(a, b)

    def of(self, node: Node) -> int:
        return self.find(self._position[node])

    def of_state(self, tensor: torch.Tensor) -> int:
        """The class of a parameter or buffer that no node names."""
        key = storage_key(tensor)
        if key not in self._state:
            self._state[key] = len(self._parent)
            self._parent.append(len(self._parent))
        return self.find(self._state[key])


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for tensors that share storage."""
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return id(tensor)
    return tensor.untyped_storage()._cdata


def storages(root: nn.Module, nodes: Sequence[Node], each: Sequence[Effects]) -> Storages:
    """Which nodes may share memory: by operator schemas, by the fake values' storages, by the real attributes."""
    classes = Storages(len(nodes))
    position = classes._position
    seen: dict[int, int] = {}
    for i, node in enumerate(nodes):
        position[node] = i
    for i, node in enumerate(nodes):
        keys = _storage_keys(node.meta.get("val"))
        if node.op == "get_attr":
            value = attribute(root, cast("str", node.target))
            if isinstance(value, torch.Tensor):
                classes.join(i, classes.of_state(value))
        told = each[i]
        if not (told.doubtful_aliases and _ruled_out(node, told, keys)):
            for other in told.aliases:
                classes.join(i, position[other])
        for key in keys:
            classes.join(i, seen.setdefault(key, i))
    return classes


def _storage_keys(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        return [storage_key(value)]
    if isinstance(value, (tuple, list)):
        return [storage_key(v) for v in cast("Sequence[Any]", value) if isinstance(v, torch.Tensor)]
    return []


def _ruled_out(node: Node, told: Effects, keys: list[int]) -> bool:
    """Whether the values show that a result is memory of its own, where no schema claims otherwise."""
    if not keys:
        # A size, a number, or nothing at all shares no memory; a missing value proves nothing.
        return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
    theirs = [_storage_keys(n.meta.get("val")) for n in told.aliases]
    if any("val" not in n.meta or n.meta["val"] is None for n in told.aliases):
        return False
    return not any(k in keys for ks in theirs for k in ks)


@dataclass(frozen=True)
class Dependencies:
    """Effect edges of a graph by position; data edges are the nodes' own arguments.

    `before[i]` are earlier positions that must stay before `i`. `effects` has an entry for each node that is not
    plainly a value. `written` tells of the nodes whose memory some node of the graph writes.
    """

    nodes: list[Node]
    position: dict[Node, int]
    before: dict[int, list[int]]
    effects: dict[int, Effects]
    written: set[int] = field(default_factory=set[int])
    shared: dict[int, int] = field(default_factory=dict[int, int])

    def why(self, first: int, second: int) -> str:
        """Why the effect edge between two positions is there."""
        a, b = self.effects.get(first, PURE), self.effects.get(second, PURE)
        if a.barrier or b.barrier:
            return "one of them switches a mode for everything after it"
        if a.random and b.random:
            return "both draw from the random stream"
        if a.world and b.world:
            return f"{a.world}, then {b.world}"
        writes_first = bool(a.writes or a.state_written)
        writes_second = bool(b.writes or b.state_written)
        if writes_first and writes_second:
            return "both write the same memory"
        return (
            "it reads what the first has written" if writes_first else "the second overwrites what the first reads"
        )


def dependencies(root: nn.Module, nodes: list[Node], position: dict[Node, int] | None = None) -> Dependencies:
    """The effect edges among `nodes`, which are all the nodes of a graph owned by `root`, in its order."""
    if position is None:
        position = {node: i for i, node in enumerate(nodes)}
    found: dict[int, Effects] = {}
    cheap = _Cheap(root)
    for i, node in enumerate(nodes):
        told = cheap(node)
        if told is not PURE:
            found[i] = told
    edges: dict[int, list[int]] = {}
    _chain(edges, [i for i, e in found.items() if e.random])
    _chain(edges, [i for i, e in found.items() if e.world])
    written: set[int] = set()
    shared: dict[int, int] = {}
    if any(e.writes or e.state_written for e in found.values()):
        written, shared = _order_memory(root, nodes, position, found, edges)
    if any(e.barrier for e in found.values()):
        _order_barriers(nodes, found, edges)
    return Dependencies(nodes, position, edges, found, written, shared)


class _Cheap:
    """Effects by node, asking only once per target for the many that are plainly values."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._plain: dict[Any, bool] = {}
        self._declared = bool(getattr(root, "meta", {}).get("dovetail.effects"))

    def __call__(self, node: Node) -> Effects:
        if node.op != "call_function" or self._declared:
            return effects(node, self._root)
        plain = self._plain.get(node.target)
        if plain:
            return PURE
        told = effects(node, self._root)
        if plain is None:
            self._plain[node.target] = told is PURE
        return told


def _chain(edges: dict[int, list[int]], positions: list[int]) -> None:
    for first, second in zip(positions, positions[1:], strict=False):
        edges.setdefault(second, []).append(first)


def _order_memory(
    root: nn.Module,
    nodes: list[Node],
    position: dict[Node, int],
    found: dict[int, Effects],
    edges: dict[int, list[int]],
) -> tuple[set[int], dict[int, int]]:
    """Reads and writes of one memory keep their order. Returns the positions whose memory is written."""
    classes = storages(root, nodes, [found.get(i, PURE) for i in range(len(nodes))])
    written = {classes.of(w) for e in found.values() for w in e.writes}
    written |= {classes.of_state(t) for e in found.values() for t in e.state_written}
    reshaped = {classes.of(w) for e in found.values() if e.reshapes_in_place for w in e.writes}
    last_write: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        told = found.get(i, PURE)
        writes = {classes.of(w) for w in told.writes} | {classes.of_state(t) for t in told.state_written}
        reads = {classes.of(n) for n in node.all_input_nodes} | {classes.of_state(t) for t in told.state_read}
        if not told.looks:
            reads &= reshaped
        for c in (reads & written) - writes:
            if c in last_write:
                edges.setdefault(i, []).append(last_write[c])
            readers.setdefault(c, []).append(i)
        for c in writes:
            before = readers.pop(c, [])
            if c in last_write:
                before.append(last_write[c])
            if before:
                edges.setdefault(i, []).extend(b for b in before if b != i)
            last_write[c] = i
    shared = {i: classes.of(node) for i, node in enumerate(nodes)}
    return {i for i, c in shared.items() if c in written}, shared


def _order_barriers(nodes: list[Node], found: dict[int, Effects], edges: dict[int, list[int]]) -> None:
    """A switch of modes stays between what came before it and what comes after."""
    last: int | None = None
    since: list[int] = []
    for i, node in enumerate(nodes):
        if node.op in ("placeholder", "get_attr"):
            continue
        if last is not None:
            edges.setdefault(i, []).append(last)
        if found.get(i, PURE).barrier:
            edges.setdefault(i, []).extend(since)
            last, since = i, []
        else:
            since.append(i)
