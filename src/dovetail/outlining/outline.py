"""Moving operations into regions: look, decide, then build a new graph once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch.fx import Graph, GraphModule, Node

from dovetail.errors import EmptyRegion, InvalidArgument, InvalidGraph, RegionError, checked_call
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import copy_node, install, rebuild, require_graph, without_collector
from dovetail.outlining.bodies import Bodies, common_module_stack
from dovetail.outlining.escapes import settle
from dovetail.outlining.placement import place, read_ranks
from dovetail.outlining.region_call import (
    Escape,
    Member,
    OutlineState,
    RegionCall,
    call_of,
    mark_clone,
    state_of,
    walk,
    with_state,
    write_call,
)
from dovetail.outlining.request import RegionDraft, Request, drafts, unread

# Python calls a body from within the body around it: far deeper, its own stack would end first.
DEEPEST = 64


@checked_call()
def outline(
    gm: GraphModule,
    nodes: Iterable[Node | str] | Iterable[Request] | Request,
    *,
    kind: str | None = None,
    version: int = 1,
    attrs: Mapping[str, Any] | None = None,
    escapes: str | Mapping[Node | str, str] = "auto",
) -> GraphModule:
    """A graph in which the given operations are called as a region that computes exactly the same.

    Give nodes or names with a `kind`, or a list of `Request` to make several regions in one sweep. `escapes` says
    what happens to a value that is also used outside: "output", "duplicate", "leave", "refuse", "auto", or a dict
    of these per node. The input graph is untouched; a request that cannot be met raises a `RegionError`.
    """
    require_graph(gm)
    requests = _requests(nodes, kind, version, attrs, escapes)
    with without_collector():
        index = Index(gm)
        index.require_order()
        made = drafts(index, requests)
        for draft in made:
            settle(index, draft)
        return outline_drafts(index, made)[0]


def outline_drafts(index: Index, made: list[RegionDraft]) -> tuple[GraphModule, list[str]]:
    """The graph in which settled drafts are regions, and the name of each draft's region.

    No operation is a member of two drafts; the same one may be cloned into several.
    """
    state = state_of(index.gm)
    epoch, ranks = read_ranks(index, state)
    listing = place(index, made, ranks)
    builder = _Builder(index, made, ranks, epoch, state)
    return builder.build(listing), builder.names


def _requests(nodes: Any, kind: str | None, version: int, attrs: Any, escapes: Any) -> list[Request]:
    if isinstance(nodes, Request):
        nodes = [nodes]
    if kind is not None:
        listed: Any = list(nodes) if isinstance(nodes, Iterable) and not isinstance(nodes, str) else nodes
        if isinstance(listed, list) and any(isinstance(n, Request) for n in cast("list[Any]", listed)):
            raise InvalidArgument("a Request has its own kind: give either requests or nodes with `kind`.")
        return [Request(listed, kind, version, attrs, escapes)]
    if not isinstance(nodes, Iterable):
        raise InvalidArgument(f"outline takes nodes with a `kind` or requests, not {type(nodes).__name__}.")
    listed = list(nodes)
    if not listed:
        raise EmptyRegion("?", "no node and no request was given")
    if not all(isinstance(request, Request) for request in listed):
        raise InvalidArgument("nodes need a `kind`: outline(gm, ['add', 'relu'], kind='add_relu').")
    if (version, attrs, escapes) != (1, None, "auto"):
        raise InvalidArgument("version, attrs and escapes belong into each Request.")
    return listed


class _Builder:
    """Writes the new graph, once everything is decided."""

    def __init__(
        self, index: Index, made: list[RegionDraft], ranks: list[int], epoch: int, state: OutlineState
    ) -> None:
        self.index, self.made, self.ranks, self.epoch = index, made, ranks, epoch
        self.counters = dict(state.counters)
        self.names = [""] * len(made)
        self.graph = Graph(tracer_cls=index.gm.graph._tracer_cls)
        self.env: dict[Node, Node] = {}
        self.new_ranks: dict[str, int] = {}
        self.taken = _taken_names(index)
        self.bodies = Bodies(index.gm, self.taken)
        self.dropped = unread(index, made)

    def build(self, listing: list[int]) -> GraphModule:
        nodes, ranks, env, to = self.index.nodes, self.ranks, self.env, self.env.__getitem__
        graph, new_ranks = self.graph, self.new_ranks
        for key in listing:
            if key < 0:
                self.names[-1 - key] = self._call(self.made[-1 - key])
            elif key not in self.dropped:
                node = nodes[key]
                new = env[node] = copy_node(graph, node, to)
                new_ranks[new.name] = ranks[key]
        gm = self.index.gm
        graph.set_codegen(gm.graph._codegen)
        meta = with_state(gm.meta, OutlineState(self.counters, new_ranks, self.epoch))
        new = rebuild(gm, graph, add=self.bodies.added, meta=meta)
        for target, program in self.bodies.converted.items():
            install(new, target, program)
        return new

    def _call(self, draft: RegionDraft) -> str:
        nodes = self.index.nodes
        inside = [nodes[i] for i in draft.inside]
        own = set(inside)
        operands = list(dict.fromkeys(n for node in inside for n in node.all_input_nodes if n not in own))
        outputs = [nodes[i] for i in draft.outputs]
        kind = draft.identity.kind
        _, target = self.bodies.share(kind, operands, inside, outputs, values=self._values(draft, operands))
        name = self._name(kind.replace(".", "_"))
        call = self.graph.create_node("call_module", target, tuple(self.env[n] for n in operands), name=name)
        rank = min(self.ranks[i] for i in draft.members)
        members = tuple(self._member(i, draft) for i in draft.inside)
        depth = 1 + max((c.depth for m in members if (c := call_of(m.meta)) is not None), default=0)
        if depth > DEEPEST:
            raise RegionError(
                f"region '{draft.label}' would nest {depth} deep; {DEEPEST} is the most. Inline some."
            )
        record = RegionCall(
            identity=draft.identity,
            members=members,
            depth=depth,
            rank=rank,
            epoch=self.epoch,
            escapes=tuple((nodes[i].name, Escape(*draft.escapes[i])) for i in sorted(draft.escapes)),
            rule=draft.request.rule,
            round=draft.request.round,
            arguments=_arguments(draft.request, operands),
            results=_results(draft.request, outputs),
        )
        self._describe(call, record, inside, outputs)
        self.new_ranks[call.name] = rank
        for k, node in enumerate(outputs):
            result = self.graph.create_node("call_function", operator.getitem, (call, k), name=node.name)
            result.meta = dict(node.meta)
            mark_clone(result, None)
            if call_of(result.meta) is not None:
                raise InvalidGraph(
                    "its results are used as one; take them apart with getitem first", node.name
                )
            self.env[node] = result
            self.new_ranks[result.name] = rank
        return call.name

    def _values(self, draft: RegionDraft, operands: list[Node]) -> list[Any] | None:
        """What the operands are when the region runs, where something changes the form of tensors in place."""
        found = self.index.dependencies
        if not found.reshaping:
            return None
        first = {
            n: i for i in sorted(draft.inside, reverse=True) for n in self.index.nodes[i].all_input_nodes
        }
        return [found.value_read(node, first[node]) for node in operands]

    def _member(self, position: int, draft: RegionDraft) -> Member:
        node = self.index.nodes[position]
        target = cast("str", node.target) if node.op in ("get_attr", "call_module") else None
        is_clone = position in draft.clones
        return Member(node.name, dict(node.meta), self.ranks[position], target, is_clone, node.type)

    @staticmethod
    def _describe(call: Node, record: RegionCall, inside: list[Node], outputs: list[Node]) -> None:
        if all("val" in node.meta for node in outputs):
            call.meta["val"] = tuple(node.meta["val"] for node in outputs)
        traces = [t for node in reversed(inside) if (t := node.meta.get("stack_trace"))]
        if traces:
            call.meta["stack_trace"] = traces[0]
        stack = common_module_stack(node.meta for node in inside if "nn_module_stack" in node.meta)
        if stack:
            call.meta["nn_module_stack"] = stack
        write_call(call, record)

    def _name(self, stem: str) -> str:
        number = self.counters.get(stem, 0)
        while (name := f"{stem}_{number}") in self.taken:
            number += 1
        self.counters[stem] = number + 1
        self.taken.add(name)
        return name


def _arguments(request: Request, operands: list[Node]) -> tuple[tuple[str, int], ...]:
    """Which operand each argument of a pattern became; arguments that are no operands are left out."""
    numbers = {node: i for i, node in enumerate(operands)}
    named = (request.arguments or {}).items()
    return tuple((name, numbers[node]) for name, node in named if node in numbers)


def _results(request: Request, outputs: list[Node]) -> tuple[int | None, ...]:
    """Which result of a pattern each result of the body is."""
    if not request.results:
        return ()
    numbers = {node: i for i, node in enumerate(request.results) if node is not None}
    return tuple(numbers.get(node) for node in outputs)


def _taken_names(index: Index) -> set[str]:
    """Names that a new node must not have: of nodes, of what regions will give back, of the module's attributes."""
    taken = {node.name for node in index.nodes}
    for node in index.nodes:
        call = call_of(node.meta)
        if call is not None:
            taken.update(member.name for member in walk(call))
    gm = index.gm
    taken.update(gm._modules, gm._parameters, gm._buffers)
    return taken
