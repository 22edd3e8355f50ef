"""Regions as users meet them: frozen snapshots of what a graph calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, InvalidGraph, checked_call
from dovetail.ir.effects import declared_in, summary
from dovetail.ir.graph_module import GraphOwner, attribute, graphs_of
from dovetail.ir.meta_keys import LOWERING
from dovetail.ir.nodes import is_projection
from dovetail.outlining.bodies import body_key
from dovetail.outlining.region_call import Escape, RegionCall, call_of


@dataclass(frozen=True, eq=False)
class Region:
    """One call of a region: what it is, what it computes, and which operations it was made of.

    `name` is a label (`outer_0/inner_1` when nested); identity is `kind`, `version` and `attrs`. `inputs` are the
    operands and `outputs` the values taken from the call, as nodes of the graph that has the call. `arguments` says
    which operand each argument of the pattern is, and `results` which result of the pattern each result of the body
    is, None for an inner value that is used outside; both are empty where no pattern made the region. `backend` is
    the name of the backend that runs it now, in calls like the last one; None where it runs as it is.
    """

    name: str
    kind: str
    version: int
    attrs: dict[str, Any]
    body: GraphModule = field(repr=False)
    node: Node = field(repr=False)
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    nodes: tuple[str, ...]
    escapes: dict[str, Escape] = field(repr=False)
    effects: tuple[str, ...]
    rule: str | None = None
    round: int | None = None
    backend: str | None = None
    arguments: dict[str, int] = field(default_factory=dict[str, int], repr=False)
    results: tuple[int | None, ...] = field(default=(), repr=False)

    @property
    def key(self) -> str:
        """The canonical hash of the body, equal for equal computations in any process."""
        return body_key(self.body)

    def reproducer(self, path: str | Path, *, seed: int = 0) -> Path:
        """Write the region alone, with made-up inputs of its shapes, as a script that runs by itself."""
        if not isinstance(path, (str, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"path {path!r} is neither a str nor a Path.")
        return _WRITERS["reproducer"]()(self, Path(path), seed=seed)

    def export(self, folder: str | Path, *, seed: int = 0) -> Path:
        """Write the region alone into a new folder: its body, made-up operands, what comes of them, and what it is.

        For whoever writes faster code for it and has no model: `check.py` in the folder compares, and
        `dovetail.replace_region` brings the result back. A folder that is there must be empty.
        """
        if not isinstance(folder, (str, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"folder {folder!r} is neither a str nor a Path.")
        return _WRITERS["export"]()(self, Path(folder), seed=seed)


class RegionWriter(Protocol):
    """Writes one region to a path, with sample operands drawn from a seed."""

    def __call__(self, region: Region, path: Path, /, *, seed: int) -> Path: ...


_WRITERS: dict[str, Callable[[], RegionWriter]] = {}


def install_writers(**writers: Callable[[], RegionWriter]) -> None:
    """Set what the methods `export` and `reproducer` write with: functions that import the writer when called."""
    _WRITERS.update(writers)


@checked_call()
def regions(gm: GraphModule | GraphOwner, *, kind: str | None = None, nested: bool = False) -> list[Region]:
    """The regions a graph calls, in execution order; with `nested`, those inside them right after each.

    Of a compiled model, those of all its graphs.
    """
    if kind is not None and not isinstance(kind, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"kind {kind!r} is not a name.")
    return [r for graph in graphs_of(gm) for r in _regions(graph, nested) if kind is None or r.kind == kind]


def _regions(gm: GraphModule, nested: bool) -> list[Region]:
    collector = _Collector(declared_in(gm), nested, gm.meta.get(LOWERING))
    for node in gm.graph.nodes:
        call = call_of(node.meta)
        if call is not None:
            collector.collect(gm, node, call, node.name)
    return collector.found


class _Collector:
    def __init__(self, declared: Mapping[str, str], nested: bool, lowering: Any) -> None:
        self.declared, self.nested, self.lowering = declared, nested, lowering
        self.found: list[Region] = []

    def collect(self, owner: GraphModule, node: Node, call: RegionCall, name: str) -> None:
        body = attribute(owner, cast("str", node.target))
        if not isinstance(body, GraphModule):
            raise InvalidGraph(f"the region calls '{node.target}', which is not a graph", node.name)
        self.found.append(self._snapshot(node, call, body, name))
        if not self.nested:
            return
        inside = [n for n in body.graph.nodes if n.op not in ("placeholder", "output")]
        if len(inside) != len(call.members):
            raise InvalidGraph("the body does not fit its call: one of them was edited since", node.name)
        for inner_node, member in zip(inside, call.members, strict=True):
            inner = call_of(member.meta)
            if inner is not None:
                self.collect(body, inner_node, inner, f"{name}/{member.name}")

    def _snapshot(self, node: Node, call: RegionCall, body: GraphModule, name: str) -> Region:
        results = [u for u in node.users if is_projection(u)]
        # The record is of the time of lowering; code that fails in a call is replaced after that.
        backend = self.lowering.backend_of(name, call.backend) if self.lowering is not None else call.backend
        return Region(
            name=name,
            kind=call.identity.kind,
            version=call.identity.version,
            attrs=json.loads(call.identity.attrs),
            body=body,
            node=node,
            inputs=tuple(cast("Node", a) for a in node.args),
            outputs=tuple(sorted(results, key=lambda n: cast("int", n.args[1]))),
            nodes=_originals(call),
            escapes=dict(call.escapes),
            effects=_effects(body, self.declared),
            rule=call.rule,
            round=call.round,
            backend=backend,
            arguments=dict(call.arguments),
            results=call.results,
        )


def _originals(call: RegionCall) -> tuple[str, ...]:
    names: list[str] = []
    stack = list(reversed(call.members))
    while stack:
        member = stack.pop()
        inner = call_of(member.meta)
        if inner is None:
            names.append(member.original)
        else:
            stack.extend(reversed(inner.members))
    # A result of a nested region has the name of the operation it stands for.
    return tuple(dict.fromkeys(names))


def _effects(body: GraphModule, declared: Mapping[str, str]) -> tuple[str, ...]:
    told = summary(body, declared)
    words = ["writes"] if told.writes or told.state_written else []
    if told.random:
        words.append("random")
    if told.world:
        words.append(told.world)
    return tuple(words)
