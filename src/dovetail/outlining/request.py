"""What a caller asks to outline, checked against the graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import Node

from dovetail.errors import (
    EmptyRegion,
    InvalidArgument,
    OverlappingRegions,
    UnknownNode,
    checked_init,
    did_you_mean,
)
from dovetail.ir.alias_analysis import rules_out
from dovetail.ir.dependencies import Index
from dovetail.ir.effects import is_subgraph
from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import is_projection, makes_tuple
from dovetail.outlining.region_call import Identity, make_identity

_TRACED_CONSTANT = re.compile(
    r"_?(tensor_constant|lifted_tensor_?|lifted_tensor_constant|param_constant_?)\d+"
)
POLICIES = ("auto", "output", "duplicate", "leave", "refuse")


@checked_init()
@dataclass(frozen=True)
class Request:
    """One region to be made: its operations by node or name in any order, what it is, and what may escape."""

    nodes: Iterable[Node | str]
    kind: str
    version: int = 1
    attrs: Mapping[str, Any] | None = None
    escapes: str | Mapping[Node | str, str] = "auto"
    rule: str | None = None
    round: int | None = None
    arguments: Mapping[str, Node] | None = None
    results: tuple[Node | None, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, (str, Node)) and hasattr(self.nodes, "__iter__"):
            object.__setattr__(self, "nodes", tuple(self.nodes))
        if self.rule is not None and not isinstance(self.rule, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"rule {self.rule!r} is not a name.")
        if self.round is not None and not isinstance(self.round, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"round {self.round!r} is not an int.")


@dataclass
class RegionDraft:
    """A region on its way: positions in the graph, refined step by step before anything is built."""

    identity: Identity
    label: str
    request: Request
    members: set[int]
    policies: dict[int, str]
    default_policy: str
    clones: set[int] = field(default_factory=set[int])
    outputs: list[int] = field(default_factory=list[int])
    escapes: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])

    def policy(self, position: int) -> str:
        return self.policies.get(position, self.default_policy)

    @property
    def inside(self) -> list[int]:
        """Everything the body computes, clones too, in the graph's order."""
        return sorted(self.members | self.clones)


def drafts(index: Index, requests: list[Request]) -> list[RegionDraft]:
    """Drafts of all requests; any bad request raises before anything is decided."""
    made = [_draft(index, request, i, len(requests)) for i, request in enumerate(requests)]
    _share_constants(index, made)
    return made


def _draft(index: Index, request: Request, number: int, count: int) -> RegionDraft:
    if not isinstance(request, Request):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(
            f"outline takes a list of Request or nodes with a kind, not {type(request).__name__}."
        )
    identity = make_identity(request.kind, request.version, request.attrs)
    label = identity.kind if count == 1 else f"{identity.kind} (request {number})"
    listed = {_locate(index, item, label) for item in _as_list(request.nodes, label)}
    if not listed:
        raise EmptyRegion(label, "no node was listed")
    members = complete(index, listed, label)
    default, policies = _policies(index, request.escapes, label)
    return RegionDraft(identity, label, request, members, policies, default)


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
    given = cast("Mapping[Node | str, str]", escapes)
    found = {
        _locate(index, item, label, any_op=True): _policy(policy, label) for item, policy in given.items()
    }
    return "auto", found


def _policy(policy: object, label: str) -> str:
    if policy not in POLICIES:
        raise InvalidArgument(f"region '{label}': escapes {policy!r} is none of {', '.join(POLICIES)}.")
    return cast("str", policy)


def complete(index: Index, listed: set[int], label: str) -> set[int]:
    """The listed operations with what belongs to them, without what always stays outside.

    Raises EmptyRegion if no operation is among them.
    """
    root, nodes, at = index.gm, index.nodes, index.position
    members = {i for i in listed if nodes[i].op != "get_attr" or _is_constant(root, nodes[i])}
    for i in list(members):
        node = nodes[i]
        if makes_tuple(node):
            members.update(at[user] for user in node.users if is_projection(user))
        if isinstance(node.target, HigherOrderOperator):
            members.update(at[n] for n in node.all_input_nodes if is_subgraph(root, n))
    # A sub-graph is no value: it is only ever where the operator is that runs it.
    members -= {
        i
        for i in members
        if nodes[i].op == "get_attr"
        and is_subgraph(root, nodes[i])
        and not any(at[user] in members for user in nodes[i].users)
    }
    # A part of a tuple stays with what makes the tuple: tuples do not cross a region's border.
    kept = {
        i
        for i in members
        if not (is_projection(nodes[i]) and at[cast("Node", nodes[i].args[0])] not in members)
    }
    if not any(nodes[i].op != "get_attr" for i in kept):
        raise EmptyRegion(label, "only parameters, buffers, constants or parts of tuples were listed")
    return kept


def _is_constant(root: nn.Module, node: Node) -> bool:
    """Whether a get_attr names neither a parameter nor a buffer: those are operands always.

    torch's GraphModule registers a tracer's constants as buffers; the names tracers give them tell.
    """
    path, _, name = cast("str", node.target).rpartition(".")
    owner = attribute(root, path) if path else root
    if not isinstance(owner, nn.Module):
        return True
    if name in owner._buffers:
        return _TRACED_CONSTANT.fullmatch(name) is not None
    return name not in owner._parameters


def _share_constants(index: Index, made: list[RegionDraft]) -> None:
    """Each operation is in one region; constants that several list are cloned into each."""
    owner: dict[int, RegionDraft] = {}
    contested: dict[int, bool] = {}
    for draft in made:
        clash = [i for i in draft.members if i in owner]
        hard = [i for i in clash if not _may_be_shared(index, i, (draft, owner[i]), contested)]
        if hard:
            other = owner[min(hard)]
            names = [index.nodes[i].name for i in sorted(hard) if owner[i] is other]
            raise OverlappingRegions(other.label, draft.label, names)
        for i in draft.members:
            owner.setdefault(i, draft)
    for draft in made:
        for i in draft.members & contested.keys():
            draft.members.discard(i)
            draft.clones.add(i)
            draft.escapes[i] = ("duplicate", "a constant of several regions")


def _may_be_shared(
    index: Index, position: int, claims: Iterable[RegionDraft], known: dict[int, bool]
) -> bool:
    """Whether an operation can be in several regions: a constant, which each may have a clone of.

    What was found for a position is kept in `known`: one constant may be in thousands of requests.
    """
    node = index.nodes[position]
    if position not in known:
        told = index.dependencies.effects.get(position)
        fixed = (
            not node.all_input_nodes and position not in index.dependencies.written and not makes_tuple(node)
        )
        pure = (told is None or told.pure) and fixed and not is_viewed(index, position)
        known[position] = node.op == "get_attr" or pure
    asked = any(draft.policy(position) in ("refuse", "output", "leave") for draft in claims)
    return known[position] and (not asked or is_subgraph(index.gm, node))


def readers_among(index: Index, position: int, members: set[int]) -> list[int]:
    """The members that read a value, by way of whichever is fewer: what reads it, or the members."""
    users, at = index.nodes[position].users, index.position
    if len(users) <= len(members):
        return [at[user] for user in users if at[user] in members]
    return [i for i in members if position in index.data[i]]


def unread(index: Index, made: Iterable[RegionDraft]) -> set[int]:
    """What nobody reads any more once these regions are made: every reader has a clone of it."""
    served: dict[int, int] = {}
    wanted: set[int] = set()
    for draft in made:
        for i in draft.clones:
            served[i] = served.get(i, 0) + len(readers_among(index, i, draft.members))
            wanted.update(j for j in index.data[i] if j not in draft.clones)
    gone: set[int] = set()
    for i in sorted(served.keys() - wanted, reverse=True):
        users = index.nodes[i].users
        if served[i] + sum(index.position[u] in gone for u in users) == len(users):
            gone.add(i)
    return gone


_VIEWED: WeakKeyDictionary[Index, dict[int, bool]] = WeakKeyDictionary()


def is_viewed(index: Index, position: int) -> bool:
    """Whether a view of a value is taken: a clone of the value would not share memory with it."""
    # One value may be in thousands of regions, and have as many readers.
    known = _VIEWED.setdefault(index, {})
    if position not in known:
        known[position] = _is_viewed(index, position)
    return known[position]


def _is_viewed(index: Index, position: int) -> bool:
    found = index.dependencies.effects
    for user in index.nodes[position].users:
        told = found.get(index.position[user])
        if told is not None and told.aliases and not rules_out(user, told):
            return True
    return False
