"""Outlining: requested operations become calls of regions.

Requests are checked against the graph and become drafts, escaping values are resolved, each call gets its place, and
the new graph is built once.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node

from dovetail.errors import (
    EmptyRegion,
    InvalidArgument,
    InvalidGraph,
    OverlappingRegions,
    RegionError,
    UnknownNode,
    checked_call,
    checked_init,
    did_you_mean,
)
from dovetail.ir.dependencies import Index
from dovetail.ir.effects import is_subgraph
from dovetail.ir.graph_module import attribute, copy_node, pause_gc, rebuild, require_graph, set_attribute
from dovetail.ir.nodes import is_projection, returns_tuple
from dovetail.outlining.bodies import Bodies, common_module_stack
from dovetail.outlining.escapes import POLICIES, RegionDraft, dead_originals, is_viewed, resolve_escapes
from dovetail.outlining.placement import place_regions, read_ranks
from dovetail.outlining.region import (
    Escape,
    Member,
    OutlineState,
    RegionCall,
    call_of,
    make_identity,
    mark_clone,
    state_of,
    walk,
    with_state,
    write_call,
)

_TRACED_CONSTANT = re.compile(
    r"_?(tensor_constant|lifted_tensor_?|lifted_tensor_constant|param_constant_?)\d+"
)


@checked_init()
@dataclass(frozen=True)
class Request:
    """A region to outline: its operations by node or name in any order, its identity, and its escape policies."""

    nodes: Iterable[Node | str]
    kind: str
    version: int = 1
    attrs: Mapping[str, Any] | None = None
    escapes: str | Mapping[Node | str, str] = "auto"
    rule: str | None = None
    round: int | None = None
    arguments: Mapping[str, Node | str] | None = None
    results: Sequence[Node | str | None] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, (str, Node)) and hasattr(self.nodes, "__iter__"):
            object.__setattr__(self, "nodes", tuple(self.nodes))
        if self.rule is not None and not isinstance(self.rule, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"rule {self.rule!r} is not a name.")
        if self.round is not None and not isinstance(self.round, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"round {self.round!r} is not an int.")


def make_drafts(index: Index, requests: list[Request]) -> list[RegionDraft]:
    """Return the drafts of all requests; an invalid request raises before anything is decided."""
    drafts = [_draft(index, request, i, len(requests)) for i, request in enumerate(requests)]
    _share_constants(index, drafts)
    return drafts


def _draft(index: Index, request: Request, number: int, count: int) -> RegionDraft:
    if not isinstance(request, Request):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(
            f"outline takes a list of Request or nodes with a kind, not {type(request).__name__}."
        )
    identity = make_identity(request.kind, request.version, request.attrs)
    label = identity.kind if count == 1 else f"{identity.kind} (request {number})"
    positions = {_locate(index, item, label) for item in _as_list(request.nodes, label)}
    if not positions:
        raise EmptyRegion(label, "no node was listed")
    members = complete_members(index, positions, label)
    default, policies = _policies(index, request.escapes, label)
    return RegionDraft(
        identity,
        label,
        members,
        policies,
        default,
        request.rule,
        request.round,
        _named_arguments(index, request.arguments, label),
        _named_results(index, request.results, label),
    )


def _named_arguments(index: Index, arguments: Any, label: str) -> dict[str, Node]:
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise InvalidArgument(
            f"region '{label}': arguments is a {type(arguments).__name__}; give a mapping from names to nodes."
        )
    items = cast("Mapping[str, Node | str]", arguments).items()
    return {name: index.nodes[_locate(index, item, label, any_op=True)] for name, item in items}


def _named_results(index: Index, results: Any, label: str) -> tuple[Node | None, ...]:
    if isinstance(results, (str, Node)) or not isinstance(results, Iterable):
        raise InvalidArgument(
            f"region '{label}': results is a {type(results).__name__}; give a list of nodes."
        )
    items = cast("Iterable[Node | str | None]", results)
    return tuple(
        None if item is None else index.nodes[_locate(index, item, label, any_op=True)] for item in items
    )


def _as_list(nodes: Any, label: str) -> list[Node | str]:
    if isinstance(nodes, (str, Node)):
        return [nodes]
    try:
        return list(nodes)
    except TypeError:
        raise InvalidArgument(
            f"region '{label}': nodes is a {type(nodes).__name__}; give nodes or names."
        ) from None


def _locate(index: Index, item: Node | str, label: str, *, any_op: bool = False) -> int:
    if isinstance(item, Node):
        position = index.position.get(item)
        if position is None:
            raise UnknownNode(
                f"region '{label}': not a node of this graph", [item.name], "Give the name instead."
            )
    elif isinstance(item, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        position = index.names.get(item)
        if position is None:
            advice = did_you_mean(item, index.names, otherwise="`dovetail.text` lists the names.")
            raise UnknownNode(f"region '{label}': no such node", [item], advice)
    else:
        raise InvalidArgument(f"region '{label}': {item!r} is neither a node nor a name.")
    op = index.nodes[position].op
    if op in ("placeholder", "output") and not any_op:
        raise UnknownNode(
            f"region '{label}': a graph's {op} is not an operation", [index.nodes[position].name]
        )
    return position


def _policies(index: Index, escapes: Any, label: str) -> tuple[str, dict[int, str]]:
    if isinstance(escapes, str):
        return _policy(escapes, label), {}
    if not isinstance(escapes, Mapping):
        raise InvalidArgument(
            f"region '{label}': escapes is a {type(escapes).__name__}; give a policy or a dict."
        )
    items = cast("Mapping[Node | str, str]", escapes).items()
    return "auto", {_locate(index, item, label, any_op=True): _policy(value, label) for item, value in items}


def _policy(policy: object, label: str) -> str:
    if policy not in POLICIES:
        raise InvalidArgument(f"region '{label}': escapes {policy!r} is not one of {', '.join(POLICIES)}.")
    return cast("str", policy)


def complete_members(index: Index, requested: set[int], label: str) -> set[int]:
    """Return the requested operations with the parts of their tuples, without parameters and buffers.

    Raise EmptyRegion if no operation is among them.
    """
    root, nodes, at = index.gm, index.nodes, index.position
    members = {i for i in requested if nodes[i].op != "get_attr" or _is_constant(root, nodes[i])}
    for i in list(members):
        node = nodes[i]
        if returns_tuple(node):
            members.update(at[user] for user in node.users if is_projection(user))
        if isinstance(node.target, HigherOrderOperator):
            members.update(at[n] for n in node.all_input_nodes if is_subgraph(root, n))
    # A sub-graph is not a value: it is always where the operator is that runs it.
    members -= {
        i
        for i in members
        if nodes[i].op == "get_attr"
        and is_subgraph(root, nodes[i])
        and not any(at[user] in members for user in nodes[i].users)
    }
    # An element of a tuple stays with the operation that makes it: tuples do not cross a region's border.
    complete = {
        i
        for i in members
        if not (is_projection(nodes[i]) and at[cast("Node", nodes[i].args[0])] not in members)
    }
    if not any(nodes[i].op != "get_attr" for i in complete):
        raise EmptyRegion(label, "only parameters, buffers, constants or parts of tuples were listed")
    return complete


def _is_constant(root: nn.Module, node: Node) -> bool:
    """Whether a get_attr reads neither a parameter nor a buffer: those are always operands.

    torch's GraphModule registers a tracer's constants as buffers; they are recognized by the tracers' names.
    """
    path, _, name = cast("str", node.target).rpartition(".")
    owner = attribute(root, path) if path else root
    if not isinstance(owner, nn.Module):
        return True
    if name in owner._buffers:
        return _TRACED_CONSTANT.fullmatch(name) is not None
    return name not in owner._parameters


def _share_constants(index: Index, drafts: list[RegionDraft]) -> None:
    """Give each operation to one region; constants of several regions are cloned into each."""
    owner: dict[int, RegionDraft] = {}
    contested: dict[int, bool] = {}
    for draft in drafts:
        clash = [i for i in draft.members if i in owner]
        hard = [i for i in clash if not _may_be_shared(index, i, (draft, owner[i]), contested)]
        if hard:
            other = owner[min(hard)]
            names = [index.nodes[i].name for i in sorted(hard) if owner[i] is other]
            raise OverlappingRegions(other.label, draft.label, names)
        for i in draft.members:
            owner.setdefault(i, draft)
    for draft in drafts:
        for i in draft.members & contested.keys():
            draft.members.discard(i)
            draft.clones.add(i)
            draft.escapes[i] = ("duplicate", "a constant of several regions")


def _may_be_shared(
    index: Index, position: int, claims: Iterable[RegionDraft], known: dict[int, bool]
) -> bool:
    """Whether an operation can be in several regions: a constant, which each may clone.

    `known` caches the answer by position: one constant may be in thousands of requests.
    """
    node = index.nodes[position]
    if position not in known:
        effects = index.dependencies.effects.get(position)
        fixed = (
            not node.all_input_nodes
            and position not in index.dependencies.written
            and not returns_tuple(node)
        )
        pure = (effects is None or effects.pure) and fixed and not is_viewed(index, position)
        known[position] = node.op == "get_attr" or pure
    has_policy = any(draft.policy(position) in ("refuse", "output", "leave") for draft in claims)
    return known[position] and (not has_policy or is_subgraph(index.gm, node))


# A nested body is called from the body around it: much deeper nesting would exceed Python's own stack.
MAX_DEPTH = 64


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
    """Return a graph in which the given operations are called as a region that computes exactly the same.

    Give nodes or names with a `kind`, or a list of `Request` to outline several regions at once. `escapes` is the
    policy for values that are also used outside: "output", "duplicate", "leave", "refuse", "auto", or a dict of these
    per node. The input graph is not changed; a request that cannot be met raises a `RegionError`.
    """
    require_graph(gm)
    requests = _requests(nodes, kind, version, attrs, escapes)
    with pause_gc():
        index = Index(gm)
        index.require_order()
        drafts = make_drafts(index, requests)
        for draft in drafts:
            resolve_escapes(index, draft)
        return outline_drafts(index, drafts)[0]


def outline_drafts(index: Index, drafts: list[RegionDraft]) -> tuple[GraphModule, list[str]]:
    """Return the graph in which drafts with resolved escapes are regions, and the name of each draft's region.

    No operation is a member of two drafts; the same one may be cloned into several.
    """
    state = state_of(index.gm)
    epoch, ranks = read_ranks(index, state)
    order = place_regions(index, drafts, ranks)
    builder = _Builder(index, drafts, ranks, epoch, state)
    return builder.build(order), builder.names


def _requests(nodes: Any, kind: str | None, version: int, attrs: Any, escapes: Any) -> list[Request]:
    if isinstance(nodes, Request):
        nodes = [nodes]
    if kind is not None:
        items: Any = list(nodes) if isinstance(nodes, Iterable) and not isinstance(nodes, str) else nodes
        if isinstance(items, list) and any(isinstance(n, Request) for n in cast("list[Any]", items)):
            raise InvalidArgument("a Request has its own kind: give either requests or nodes with `kind`.")
        return [Request(items, kind, version, attrs, escapes)]
    if not isinstance(nodes, Iterable):
        raise InvalidArgument(f"outline takes nodes with a `kind` or requests, not {type(nodes).__name__}.")
    requests = list(nodes)
    if not requests:
        raise EmptyRegion("?", "no node and no request was given")
    if not all(isinstance(request, Request) for request in requests):
        raise InvalidArgument("nodes need a `kind`: outline(gm, ['add', 'relu'], kind='add_relu').")
    if (version, attrs, escapes) != (1, None, "auto"):
        raise InvalidArgument("version, attrs and escapes belong into each Request.")
    return requests


def operands_of(index: Index, draft: RegionDraft) -> tuple[list[Node], list[Any] | None]:
    """Return the operands of a region, and their values when it runs if some operation changes sizes or strides in place."""
    nodes, dependencies = index.nodes, index.dependencies
    own = {nodes[i] for i in draft.inside}
    first = {n: i for i in sorted(draft.inside, reverse=True) for n in nodes[i].all_input_nodes}
    operands = list(dict.fromkeys(n for i in draft.inside for n in nodes[i].all_input_nodes if n not in own))
    if dependencies.inplace_reshapes is None:
        return operands, None
    inside = set(draft.inside)
    return operands, [dependencies.value_read(node, first[node], inside) for node in operands]


class _Builder:
    """Builds the new graph from drafts that are placed."""

    def __init__(
        self, index: Index, drafts: list[RegionDraft], ranks: list[int], epoch: int, state: OutlineState
    ) -> None:
        self.index, self.drafts, self.ranks, self.epoch = index, drafts, ranks, epoch
        self.counters = dict(state.counters)
        self.names = [""] * len(drafts)
        self.graph = Graph(tracer_cls=index.gm.graph._tracer_cls)
        self.env: dict[Node, Node] = {}
        self.new_ranks: dict[str, int] = {}
        self.used_names = _used_names(index)
        self.bodies = Bodies(index.gm, self.used_names)
        self.dead = dead_originals(index, drafts)

    def build(self, order: list[int]) -> GraphModule:
        nodes, ranks, env, to = self.index.nodes, self.ranks, self.env, self.env.__getitem__
        graph, new_ranks = self.graph, self.new_ranks
        for key in order:
            if key < 0:
                self.names[-1 - key] = self._call(self.drafts[-1 - key])
            elif key not in self.dead:
                node = nodes[key]
                new = env[node] = copy_node(graph, node, to)
                new_ranks[new.name] = ranks[key]
        gm = self.index.gm
        graph.set_codegen(gm.graph._codegen)
        meta = with_state(gm.meta, OutlineState(self.counters, new_ranks, self.epoch))
        new = rebuild(gm, graph, add=self.bodies.added, meta=meta)
        for target, program in self.bodies.converted.items():
            set_attribute(new, target, program)
        return new

    def _call(self, draft: RegionDraft) -> str:
        nodes = self.index.nodes
        inside, outputs = [nodes[i] for i in draft.inside], [nodes[i] for i in draft.outputs]
        operands, values = operands_of(self.index, draft)
        kind = draft.identity.kind
        _, target = self.bodies.share(kind, operands, inside, outputs, values=values)
        name = self._name(kind.replace(".", "_"))
        call = self.graph.create_node("call_module", target, tuple(self.env[n] for n in operands), name=name)
        rank = min(self.ranks[i] for i in draft.members)
        members = tuple(self._member(i, draft) for i in draft.inside)
        depth = 1 + max((c.depth for m in members if (c := call_of(m.meta)) is not None), default=0)
        if depth > MAX_DEPTH:
            raise RegionError(
                f"region '{draft.label}' would nest {depth} deep; {MAX_DEPTH} is the most. Inline some."
            )
        record = RegionCall(
            identity=draft.identity,
            members=members,
            depth=depth,
            rank=rank,
            epoch=self.epoch,
            escapes=tuple((nodes[i].name, Escape(*draft.escapes[i])) for i in sorted(draft.escapes)),
            rule=draft.rule,
            round=draft.round,
            arguments=_arguments(draft, operands),
            results=_results(draft, outputs),
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
        while (name := f"{stem}_{number}") in self.used_names:
            number += 1
        self.counters[stem] = number + 1
        self.used_names.add(name)
        return name


def _arguments(draft: RegionDraft, operands: list[Node]) -> tuple[tuple[str, int], ...]:
    """Return the operand number of each pattern argument; arguments that are not operands are left out."""
    numbers = {node: i for i, node in enumerate(operands)}
    return tuple((name, numbers[node]) for name, node in draft.arguments.items() if node in numbers)


def _results(draft: RegionDraft, outputs: list[Node]) -> tuple[int | None, ...]:
    """Return which result of the pattern each result of the body is."""
    if not draft.results:
        return ()
    numbers = {node: i for i, node in enumerate(draft.results) if node is not None}
    return tuple(numbers.get(node) for node in outputs)


def _used_names(index: Index) -> set[str]:
    """Return the names that a new node must not have: of nodes, of members of regions, of the module's attributes."""
    names = {node.name for node in index.nodes}
    for node in index.nodes:
        call = call_of(node.meta)
        if call is not None:
            names.update(member.name for member in walk(call))
    gm = index.gm
    names.update(gm._modules, gm._parameters, gm._buffers)
    return names
