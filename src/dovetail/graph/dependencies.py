"""What must come before what: data edges, and effect edges kept per storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn
from torch.fx import Node

from dovetail.graph.effects import PURE, Effects, Reader
from dovetail.graph.spellings import traits
from dovetail.graph.storages import storages


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
    switches_modes: bool = False

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
            "it reads what the first has written"
            if writes_first
            else "the second overwrites what the first reads"
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
    if any(e.writes or e.state_written for e in found.values()):
        written = _order_memory(root, nodes, found, edges)
    switches_modes = any(e.barrier for e in found.values())
    if switches_modes:
        _order_barriers(nodes, found, edges)
    return Dependencies(nodes, position, edges, found, written, switches_modes)


class _Cheap:
    """Effects by node, asking only once per target for the many that are plainly values."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._plain: dict[Any, bool] = {}
        self._reader = Reader(root)

    def __call__(self, node: Node) -> Effects:
        if node.op == "call_function" and not self._reader.declared:
            plain = self._plain.get(node.target)
            if plain is None:
                plain = self._plain[node.target] = traits(node).plain
            if plain:
                return PURE
        return self._reader.effects(node, self._root)


def _chain(edges: dict[int, list[int]], positions: list[int]) -> None:
    for first, second in pairwise(positions):
        edges.setdefault(second, []).append(first)


def _order_memory(
    root: nn.Module,
    nodes: list[Node],
    found: dict[int, Effects],
    edges: dict[int, list[int]],
) -> set[int]:
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
    return {i for i, node in enumerate(nodes) if classes.of(node) in written}


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
