"""Inlining, the inverse of outlining: the operations of regions restored in their places, with names and meta.

Procedure inlining with one addition: what outlining changed is undone. The record of each call has the name, meta and
rank of every member. A clone is merged with its original where both are inlined and read the same values, and the
nodes are sorted topologically by rank, so that inlining everything restores the graph from before outlining. Linear in
the operations, apart from the sort. `Flattener` writes the operations of bodies without that bookkeeping, for
compilation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.errors import InvalidArgument, InvalidGraph, UnknownRegion, checked_call
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import Body, Program, attribute, pause_gc, rebuild, require_graph, set_attribute
from dovetail.ir.nodes import is_projection
from dovetail.ir.quotient_graph import topological_order
from dovetail.outlining.bodies import Bodies
from dovetail.outlining.placement import (
    SPACING,
    is_ascending,
    priority,
    ranks_from,
    read_ranks,
)
from dovetail.outlining.region import (
    Member,
    OutlineState,
    RegionCall,
    call_of,
    clone_of,
    mark_clone,
    path_prefixes,
    results,
    state_of,
    walk,
    with_state,
    write_call,
)


@checked_call()
def inline(
    gm: GraphModule, name: str | None = None, *, kind: str | None = None, depth: int | None = None
) -> GraphModule:
    """Return a graph in which regions are replaced by their operations: all, the one named `name`, or all of a `kind`.

    Nested regions are included, by `outer_0/inner_1` or by kind. Regions inside an inlined region are inlined as
    well; `depth=1` inlines one level. The input graph is not changed.
    """
    require_graph(gm)
    for value, what in ((name, "name"), (kind, "kind")):
        if value is not None and not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"inline takes a region's {what} as a str, not a {type(value).__name__}.")
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"depth {depth!r}: give None for every level, or 1 and more.")
    return _inlined(gm, _RegionFilter(None if name is None else (name,), kind, depth))


def inline_named(gm: GraphModule, names: Iterable[str], *, depth: int | None = None) -> GraphModule:
    """Return a graph in which several regions, by name, are inlined; each as `inline` would do it."""
    return _inlined(require_graph(gm), _RegionFilter(tuple(dict.fromkeys(names)), None, depth))


def _inlined(gm: GraphModule, selected: _RegionFilter) -> GraphModule:
    with pause_gc():
        index = Index(gm)
        index.require_order()
        selected.require(index)
        state = state_of(gm)
        epoch, ranks = read_ranks(index, state)
        return _Inliner(index, selected, ranks, epoch).run(state)


@dataclass(frozen=True)
class _RegionFilter:
    """Which calls to inline, by their paths of region names."""

    names: tuple[str, ...] | None
    kind: str | None
    depth: int | None
    _name_set: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_name_set", frozenset(self.names or ()))

    def opens(self, call: RegionCall, path: str, opened: int) -> bool:
        if self.depth is not None and opened >= self.depth:
            return False
        if self.kind is not None and call.identity.kind != self.kind:
            return False
        return self.names is None or not self._name_set.isdisjoint(path_prefixes(path))

    def reaches_into(self, call: RegionCall, path: str, opened: int) -> bool:
        """Whether a region nested in a call that is kept is to be inlined."""
        if self.names is None and self.kind is None:
            return False
        return any(self.opens(inner, f"{path}/{way}", opened) for way, inner in _nested(call))

    def require(self, index: Index) -> None:
        calls = [(n.name, call) for n in index.nodes if (call := call_of(n.meta)) is not None]
        if self.names is not None:
            self._require_names(calls)
        elif self.kind is not None and not any(
            self.opens(c, n, 0) or self.reaches_into(c, n, 0) for n, c in calls
        ):
            kinds = sorted(
                {c.identity.kind for _, c in calls}
                | {i.identity.kind for _, c in calls for _, i in _nested(c)}
            )
            raise UnknownRegion(f"the graph has no region of kind '{self.kind}'", kinds, self.kind)

    def _require_names(self, calls: list[tuple[str, RegionCall]]) -> None:
        known = {n for n, c in calls if self.kind in (None, c.identity.kind)}
        if not self._name_set <= known:
            inner = ((f"{n}/{way}", i) for n, c in calls for way, i in _nested(c))
            matching = [n for n, c in (*calls, *inner) if self.kind in (None, c.identity.kind)]
            known.update(prefix for path in matching for prefix in path_prefixes(path))
        for name in self.names or ():
            if name not in known:
                is_kind = any(c.identity.kind == name for _, c in calls)
                advice = " (a kind is given as kind=...)" if is_kind else ""
                raise UnknownRegion(
                    f"the graph has no region named '{name}'{advice}", [n for n, _ in calls], name
                )


def _nested(call: RegionCall) -> list[tuple[str, RegionCall]]:
    nested: list[tuple[str, RegionCall]] = []
    stack: list[tuple[str, RegionCall]] = [("", call)]
    while stack:
        path, at = stack.pop()
        for member in at.members:
            inner = call_of(member.meta)
            if inner is not None:
                nested.append((path + member.name, inner))
                stack.append((f"{path}{member.name}/", inner))
    return nested


@dataclass
class _NewGraph:
    """A graph being built, with the member record of each node, and its nodes by original name and operands."""

    graph: Graph
    facts: dict[Node, Member] = field(default_factory=dict[Node, Member])
    known: dict[tuple[Any, ...], Node] = field(default_factory=dict[tuple[Any, ...], Node])


@dataclass
class _Frame:
    """A graph or body being read: its nodes with their member records, and their images in the new graph."""

    owner: GraphModule
    nodes: Sequence[Node]
    members: Sequence[Member]
    env: dict[Node, Any]
    path: str
    opened: int
    epoch: int


class _Inliner:
    def __init__(self, index: Index, selected: _RegionFilter, ranks: list[int], epoch: int) -> None:
        self.index, self.selected, self.ranks, self.epoch = index, selected, ranks, epoch
        self.gm = index.gm
        self.bodies = Bodies(index.gm, {node.name for node in index.nodes})
        self.held: dict[str, Any] = {}

    def run(self, state: OutlineState) -> GraphModule:
        graph = Graph(tracer_cls=self.gm.graph._tracer_cls)
        new_graph = _NewGraph(graph)
        facts = [
            Member(node.name, node.meta, rank, None, False, node.type)
            for node, rank in zip(self.index.nodes, self.ranks, strict=True)
        ]
        self._read(_Frame(self.gm, self.index.nodes, facts, {}, "", 0, self.epoch), new_graph)
        graph.set_codegen(self.gm.graph._codegen)
        left = [call for node in graph.nodes if (call := call_of(node.meta)) is not None]
        used = {node.target for node in graph.nodes if node.op == "call_module"}
        hidden = [member for call in left for member in walk(call)]
        used.update(member.target for member in hidden)
        _settle_names(new_graph, hidden)
        known = {**self.gm._modules, **self.bodies.added}
        unused = frozenset(n for n, m in known.items() if isinstance(m, Body) and n not in used)
        new = rebuild(self.gm, graph, add=self.bodies.added, drop=unused)
        for name in unused & self.bodies.added.keys():
            new._modules.pop(name)
        for target, value in self.held.items():
            # Another tool may have removed attributes that only bodies still use.
            if value is not None and attribute(new, target) is None:
                set_attribute(new, target, value)
        _restore_order(new, new_graph)
        ranks = {node.name: new_graph.facts[node].rank for node in graph.nodes} if left else None
        new.meta = with_state(self.gm.meta, OutlineState(state.counters, ranks, self.epoch))
        return new

    def _read(self, frame: _Frame, new_graph: _NewGraph) -> None:
        for i in range(len(frame.nodes)):
            self._step(frame, i, new_graph)

    def _step(self, frame: _Frame, i: int, new_graph: _NewGraph) -> None:
        node, member = frame.nodes[i], frame.members[i]
        env = frame.env
        if node in env:
            return
        call = call_of(member.meta)
        if call is not None:
            path = f"{frame.path}{member.name}"
            if self.selected.opens(call, path, frame.opened):
                env[node] = self._open(frame, node, member, call, path, new_graph)
                return
            if self.selected.reaches_into(call, path, frame.opened):
                target, inner = self._rewrite(frame, node, call, path)
                meta = dict(member.meta)
                self._write(frame, node, member._replace(meta=meta, target=target), new_graph)
                write_call(env[node], inner)
                return
        if _is_getitem(node):
            results = env[node.args[0]] if isinstance(node.args[0], Node) else None
            if isinstance(results, tuple):
                env[node] = cast("tuple[Any, ...]", results)[cast("int", node.args[1])]
                return
        self._write(frame, node, member, new_graph)

    def _open(
        self, frame: _Frame, node: Node, member: Member, call: RegionCall, path: str, new_graph: _NewGraph
    ) -> tuple[Any, ...]:
        """Write the operations of a call into the new graph and return its results there."""
        arguments = [frame.env[a] if isinstance(a, Node) else a for a in node.args]
        inner = self._inside(frame, node, call, arguments, f"{path}/", frame.opened + 1)
        if call.epoch != frame.epoch:
            inner.members = _in_a_row(call.members, member.rank)
        self._read(inner, new_graph)
        return tuple(inner.env[n] for n in results(inner.owner))

    def _inside(
        self, frame: _Frame, node: Node, call: RegionCall, arguments: Sequence[Any], path: str, opened: int
    ) -> _Frame:
        body = attribute(frame.owner, cast("str", node.target))
        if not isinstance(body, GraphModule):
            raise InvalidGraph(f"the region calls '{node.target}', which is not a graph", node.name)
        nodes = list(body.graph.nodes)
        inputs = [n for n in nodes if n.op == "placeholder"]
        inside = nodes[len(inputs) : -1]
        if len(inputs) != len(arguments) or len(inside) != len(call.members):
            raise InvalidGraph("the body does not fit its call: one of them was edited since", node.name)
        env: dict[Node, Any] = dict(zip(inputs, arguments, strict=True))
        return _Frame(body, inside, call.members, env, path, opened, call.epoch)

    def _rewrite(self, frame: _Frame, node: Node, call: RegionCall, path: str) -> tuple[str, RegionCall]:
        """Inline regions nested in a call that is kept; return the target of its new body, and its new record."""
        new_graph = _NewGraph(Graph())
        body = cast("GraphModule", attribute(frame.owner, cast("str", node.target)))
        inputs: list[Node] = []
        for old in body.graph.find_nodes(op="placeholder"):
            new = new_graph.graph.placeholder(old.name)
            new.meta = dict(old.meta)
            inputs.append(new)
        inner = self._inside(frame, node, call, inputs, f"{path}/", frame.opened)
        self._read(inner, new_graph)
        outputs = [inner.env[n] for n in results(body)]
        new_graph.graph.output(tuple(outputs))
        # Targets of nodes are relative to the outermost graph, as when the region was outlined.
        draft = rebuild(self.gm, new_graph.graph, add=self.bodies.added)
        inside = _restore_order(draft, new_graph)[len(inputs) : -1]
        _, target = self.bodies.share(call.identity.kind, inputs, inside, outputs, draft)
        return target, replace(call, members=tuple(new_graph.facts[n] for n in inside))

    def _write(self, frame: _Frame, node: Node, member: Member, new_graph: _NewGraph) -> None:
        args = map_arg(node.args, frame.env.__getitem__)
        kwargs = map_arg(node.kwargs, frame.env.__getitem__)
        target = member.target or node.target
        reads = (frame.env[n] for n in node.all_input_nodes)
        key = (member.original, *[n for n in reads if isinstance(n, Node)])
        known = new_graph.known.get(key)
        if known is not None and _same(known, node.op, target, args, kwargs):
            fact = new_graph.facts[known]
            if not (fact.is_original and member.is_original):
                if member.standing < fact.standing:
                    known.meta = dict(member.meta)
                    new_graph.facts[known] = member._replace(meta=known.meta)
                frame.env[node] = known
                return
        new = new_graph.graph.create_node(node.op, target, args, kwargs, member.original, member.type)
        new.meta = dict(member.meta)
        if member.target is not None:
            self.held.setdefault(member.target, attribute(frame.owner, cast("str", node.target)))
        frame.env[node] = new
        new_graph.facts[new] = member._replace(meta=new.meta)
        new_graph.known.setdefault(key, new)


def _settle_names(new_graph: _NewGraph, hidden: Sequence[Member]) -> None:
    """Give each node its original name, and each clone whose original is elsewhere an unused one.

    A name denotes one operation, in the graph and in every region it calls, so that a later inlining finds the
    original names unused.
    """
    facts = new_graph.facts
    taken = {member.name for member in (*facts.values(), *hidden)}
    owned = {member.name for member in (*facts.values(), *hidden) if not member.clone}
    assigned: set[str] = set()
    numbers: dict[str, int] = {}

    def free(stem: str) -> str:
        number = numbers.get(stem, 0) + 1
        while (name := f"{stem}_{number}") in taken:
            number += 1
        numbers[stem] = number
        return name

    for node, fact in facts.items():
        name, original = fact.name, fact.original
        if fact.clone and name in owned:
            name = free(original)
            beside = fact.rank - fact.rank % SPACING if clone_of(node) else fact.rank
            fact = fact._replace(rank=beside + numbers[original])
            mark_clone(node, original if hidden else None)
        elif original not in taken:  # another tool may have removed the region that had it
            mark_clone(node, None)
            name = original
        elif not hidden:
            mark_clone(node, None)
        if name in assigned:  # another tool may have used the name of a member of a region for a new node
            name = free(name)
        assigned.add(name)
        owned.add(name)
        taken.add(name)
        facts[node] = fact._replace(name=name, clone=False)
        if node.name != name:
            new_graph.graph._graph_namespace.create_name(name, None)
            node.name = name


def _in_a_row(members: Sequence[Member], rank: int) -> list[Member]:
    """Return members ranked from the call's rank on: the graph was ranked anew since the region was outlined."""
    counted = ranks_from(rank, (member.meta for member in members))
    return [member._replace(rank=rank) for member, rank in zip(members, counted, strict=True)]


def _restore_order(new: Program, new_graph: _NewGraph) -> list[Node]:
    """Order the nodes of a new graph by rank, as far as dependencies allow, and return them in that order."""
    nodes: list[Node] = list(new.graph.nodes)
    ranks = [_rank(node, new_graph) for node in nodes]
    if is_ascending(
        [rank for node, rank in zip(nodes, ranks, strict=True) if rank >= 0 or node.op == "placeholder"]
    ):
        return nodes
    index = Index(new)
    before = [[*reads] for reads in index.data]
    for i, earlier in index.dependencies.before.items():
        for j in earlier:
            first, second = _rank_ordered(nodes, new_graph, j, i)
            before[second].append(first)
    order = topological_order(before, ranks)
    if len(order) < len(nodes):
        return nodes  # the current order is valid, if not the original one
    ordered = [nodes[i] for i in order]
    for previous, node in pairwise(ordered):
        previous.append(node)
    return ordered


def _rank_ordered(nodes: list[Node], new_graph: _NewGraph, first: int, second: int) -> tuple[int, int]:
    """Return the ends of an effect edge in the order of their ranks, unless one is a call, which has many ranks.

    Regions may have moved two operations past each other that only the conservative alias analysis relates.
    """
    ends = [new_graph.facts.get(nodes[i]) for i in (first, second)]
    if any(fact is None or call_of(fact.meta) is not None for fact in ends) or _is_getitem(nodes[first]):
        return first, second
    ranks = [cast("Member", fact).rank for fact in ends]
    return (first, second) if ranks[0] <= ranks[1] else (second, first)


def _rank(node: Node, new_graph: _NewGraph) -> float:
    if node in new_graph.facts:
        return priority(node, new_graph.facts[node].rank)
    return -1 if node.op == "placeholder" else float("inf")


def _is_getitem(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem and len(node.args) == 2


def _same(node: Node, op: str, target: Any, args: Any, kwargs: Any) -> bool:
    return node.op == op and node.target == target and node.args == args and node.kwargs == kwargs


Keep = Callable[[str], Any]
"""Returns the callable to use for a region by name, or None to write its operations."""
Held = Callable[[Node, str], Node]
"""Returns the node for an object that a body holds and that the outermost graph has at a target."""


class Flattener:
    """Writes operations into a graph, the bodies of regions in place of their calls.

    Objects that bodies hold are looked up by their targets in the outermost graph, so that its current attributes are
    used, not those that a body was built with.
    """

    def __init__(self, graph: Graph, keep: Keep, held: Held) -> None:
        self.graph, self.keep, self.held = graph, keep, held

    def write(self, owner: nn.Module, nodes: Iterable[Node], env: dict[Node, Any]) -> None:
        """Append operations of the outermost graph. `env` maps each node to its value in the new graph."""
        for node in nodes:
            self._node(owner, node, env, "", call_of(node.meta), node.name, None)

    def write_body(
        self, body: Body, operands: Sequence[Any], prefix: str = "", call: RegionCall | None = None
    ) -> tuple[Any, ...]:
        """Append the operations of a body called with `operands`, and return its results.

        With the record of the call, nested regions have the names and records in it.
        """
        nodes = list(body.graph.nodes)
        env: dict[Node, Any] = dict(zip((n for n in nodes if n.op == "placeholder"), operands, strict=True))
        rest = [n for n in nodes if n.op not in ("placeholder", "output")]
        for i, node in enumerate(rest):
            # One body serves many calls: names and records of nested calls are in the record of the outer call.
            meta, name = (
                (node.meta, node.name) if call is None else (call.members[i].meta, call.members[i].name)
            )
            self._node(body, node, env, prefix, call_of(meta), name, body.borrowed)
        return tuple(env[n] for n in results(body))

    def _node(
        self,
        owner: nn.Module,
        node: Node,
        env: dict[Node, Any],
        prefix: str,
        call: RegionCall | None,
        name: str,
        borrowed: Mapping[str, str] | None,
    ) -> None:
        if call is not None:
            env[node] = self._call(owner, node, env, f"{prefix}{name}", call)
        elif borrowed is not None and node.op == "get_attr":
            env[node] = self.held(node, borrowed[cast("str", node.target)])
        elif is_projection(node) and isinstance(env.get(cast("Node", node.args[0])), tuple):
            env[node] = env[cast("Node", node.args[0])][cast("int", node.args[1])]
        else:
            target: Any = node.target
            if borrowed is not None and node.op == "call_module":
                target = borrowed[target]
            args, kwargs = (cast("Any", map_arg(v, env.__getitem__)) for v in (node.args, node.kwargs))
            label = f"{prefix}{name}".replace("/", "__")
            new = env[node] = self.graph.create_node(node.op, target, args, kwargs, label, node.type)
            new.meta = dict(node.meta)

    def _call(self, owner: nn.Module, node: Node, env: dict[Node, Any], name: str, call: RegionCall) -> Any:
        body = cast("Body", attribute(owner, cast("str", node.target)))
        operands = [env[a] for a in cast("tuple[Node, ...]", node.args)]
        kernel = self.keep(name)
        if kernel is None:
            return self.write_body(body, operands, f"{name}/", call)
        lifted = [self.held(node, target) for target in kernel.lifted]
        label = name.replace("/", "__")
        new = self.graph.create_node("call_function", kernel, (*operands, *lifted), name=label)
        new.meta = dict(node.meta)
        return new


def flat(body: Body) -> GraphModule:
    """Return a GraphModule of a body's operations, nested regions inlined; it returns a tuple."""
    graph = Graph()
    operands = copy_placeholders(body.graph, graph)
    objects: dict[str, Any] = {}
    named: dict[str, str] = {}

    def held(node: Node, target: str) -> Node:
        name = named.setdefault(target, f"held_{len(named)}")
        objects[name] = held_value(body, target)
        return graph.create_node("get_attr", name)

    graph.output(Flattener(graph, lambda _: None, held).write_body(body, operands))
    return GraphModule(objects, graph)


def copy_placeholders(source: Graph, graph: Graph) -> list[Node]:
    """Append copies of the inputs of a graph; their targets are their names, which are unique."""
    copies: list[Node] = []
    for node in source.find_nodes(op="placeholder"):
        copies.append(graph.create_node("placeholder", node.name, name=node.name))
        copies[-1].meta = dict(node.meta)
    return copies


def held_value(body: Body, target: str) -> Any:
    """Return the object that a body, or one nested in it, holds for `target` of the outermost graph."""
    stack = [body]
    while stack:
        at = stack.pop()
        for name, held in at.borrowed.items():
            if held == target:
                return at.__dict__[name]
        stack.extend(m for m in at._modules.values() if isinstance(m, Body))
    return None
