"""What happens to values made inside a region that are also used outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.fx import Node

from dovetail.errors import EmptyRegion, EscapingValue
from dovetail.ir.alias_analysis import values_exclude_alias
from dovetail.ir.dependencies import Index
from dovetail.ir.effects import is_subgraph
from dovetail.ir.nodes import compatible_values, is_projection, nbytes, returns_tuple
from dovetail.ir.op_traits import traits_of
from dovetail.outlining.region import Identity


def resolve_escapes(index: Index, draft: RegionDraft) -> None:
    """Decide for each escaping value whether it is returned, cloned or left out, and note why.

    Walks from the last operation to the first, so that the users of a value are settled before it: an operation
    that was cloned or left out still stands outside and reads its operands there.
    """
    nodes, at = index.nodes, index.position
    outside = _leave_out(index, draft)
    for i in sorted(draft.members | draft.clones, reverse=True):
        node = nodes[i]
        if i in draft.clones:
            outside.add(i)
            if not readers_among(index, i, draft.members | draft.clones):
                draft.clones.discard(i)
            continue
        if i in outside:
            continue
        inside = [u for u in readers_among(index, i, draft.members) if u not in outside]
        if len(inside) == len(node.users) or (returns_tuple(node) and all(map(is_projection, node.users))):
            continue
        used_inside = bool(inside) or bool(readers_among(index, i, draft.clones))
        if not used_inside and is_subgraph(index.gm, node):
            draft.members.discard(i)  # it came with an operation that was left outside
            outside.add(i)
            continue
        if not used_inside and draft.policies.get(i) not in ("leave", "refuse"):
            draft.outputs.append(i)  # a result: nothing inside needs it, so there is nothing to decide
            continue
        policy, reason = _decide(index, draft, i)
        if policy == "leave":
            left = _with_projections(index, i)
            draft.members -= left
            outside |= left
            draft.outputs = [o for o in draft.outputs if o not in left]
            for other in left:
                draft.escapes.pop(other, None)
        elif policy == "duplicate":
            draft.members.discard(i)
            draft.clones.add(i)
            outside.add(i)
        else:
            draft.outputs.append(i)
        if is_projection(node) and policy == "leave":
            i = at[
                cast("Node", node.args[0])
            ]  # its parts are left with it, whichever of them was asked about
        if not is_subgraph(index.gm, node):
            draft.escapes[i] = (policy, reason)
    draft.outputs.reverse()
    if not any(nodes[i].op != "get_attr" for i in draft.members):
        raise EmptyRegion(draft.label, "every operation was left outside")


def _leave_out(index: Index, draft: RegionDraft) -> set[int]:
    """Drop what is to be left outside before anything is weighed, so that no decision depends on the listing."""
    nodes, at = index.nodes, index.position
    outside: set[int] = set()
    for i in sorted(draft.members, reverse=True):
        if i in outside or draft.policy(i) != "leave" or is_subgraph(index.gm, nodes[i]):
            continue
        users = [at[u] for u in nodes[i].users]
        escapes = any(u not in draft.members for u in users)
        if escapes and (i in draft.policies or any(u in draft.members for u in users)):
            left = _with_projections(index, i)
            draft.members -= left
            outside |= left
            named = at[cast("Node", nodes[i].args[0])] if is_projection(nodes[i]) else i
            draft.escapes[named] = ("leave", "as asked")
    return outside


def _with_projections(index: Index, position: int) -> set[int]:
    """A value that is left out takes along the operation that makes its tuple, and that one's other parts."""
    node = index.nodes[position]
    if is_projection(node):
        node = cast("Node", node.args[0])
    parts = [u for u in node.users if is_projection(u)]
    return {index.position[n] for n in [node, *parts]}


def _decide(index: Index, draft: RegionDraft, position: int) -> tuple[str, str]:
    node = index.nodes[position]
    policy = draft.policy(position)
    if is_subgraph(index.gm, node):
        return "duplicate", "a sub-graph is not a value"
    if policy == "refuse":
        escaping = [u.name for u in node.users if index.position[u] not in draft.members]
        raise EscapingValue(draft.label, node.name, escaping)
    if policy == "leave":
        return "leave", "as asked"
    if node.op == "get_attr":
        return "duplicate", "a constant"
    if policy == "output":
        return "output", "as asked"
    obstacle = _clone_obstacle(index, position)
    if policy == "duplicate":
        return ("output", f"not cloned: {obstacle}") if obstacle else ("duplicate", "as asked")
    if obstacle:
        return "output", f"not cloned: {obstacle}"
    return _default_policy(index, draft.members, position)


def why_not_clone(index: Index, position: int) -> str:
    """Why "auto" would not clone an operation into a region that has none of its operands, "" if it would."""
    obstacle = _clone_obstacle(index, position)
    if obstacle:
        return obstacle
    policy, reason = _default_policy(index, set(), position)
    return "" if policy == "duplicate" else reason


def _clone_obstacle(index: Index, position: int) -> str:
    """Why running an operation twice could be seen, empty if it could not."""
    node = index.nodes[position]
    dependencies = index.dependencies
    told = dependencies.effects.get(position)
    if told is not None and told.random:
        return "it draws at random"
    if told is not None and not told.pure:
        return f"it has an effect ({told.host_effect or 'it writes memory'})"
    if is_projection(node) or returns_tuple(node):
        return "it is one of several results"
    if position in dependencies.written:
        return "its memory is written in this graph"
    if any(index.position[n] in dependencies.written for n in node.all_input_nodes):
        return "it reads memory that is written in this graph"
    if dependencies.switches_modes:
        return "modes are switched in this graph"
    return ""


def _default_policy(index: Index, members: set[int], position: int) -> tuple[str, str]:
    """The default: constants and what is cheaper to redo than to store are cloned, the rest is returned."""
    node = index.nodes[position]
    inputs = node.all_input_nodes
    if is_viewed(index, position) and not _is_view(index, position):
        return "output", "a view of it is taken: a clone would not share its memory"
    if not inputs:
        return "duplicate", "a constant"
    for n in inputs:
        i = index.position[n]
        if i in members and all(index.position[u] in members for u in n.users):
            return "output", f"redoing it outside would need '{n.name}' there"
    value = node.meta.get("val")
    if isinstance(value, (int, torch.SymInt)):
        return "duplicate", "a size costs nothing to read again"
    if _is_view(index, position):
        if _may_be_returned(index, position):
            return "output", "what reads it may return the very same tensor"
        return "duplicate", "a view costs nothing to take again"
    if not (traits_of(node).pointwise if node.op != "call_module" else False):
        return "output", "more than reading and writing to redo"
    reads = _bytes(inputs)
    stores = nbytes(value)
    if reads is None or stores is None:
        return "output", "sizes are not known"
    if reads <= 2 * stores:
        return (
            "duplicate",
            f"reading {reads} bytes to redo it costs no more than {2 * stores} to store and reload",
        )
    return "output", f"reading {reads} bytes to redo it costs more than {2 * stores} to store and reload"


def _is_view(index: Index, position: int) -> bool:
    told = index.dependencies.effects.get(position)
    return told is not None and bool(told.aliases) and not told.reads_data


def _may_be_returned(index: Index, position: int) -> bool:
    """Whether a reader may return the value itself, as `to` and dropout do: a clone would be another object."""
    found, value = index.dependencies.effects, index.nodes[position].meta.get("val")
    for user in index.nodes[position].users:
        told = found.get(index.position[user])
        made = user.meta.get("val")
        # A region that is called gives a tuple, and the tensor may be among what it gives.
        each = cast("tuple[Any, ...]", made) if isinstance(made, tuple) else (made,)
        if (
            told is not None
            and told.aliases
            and told.reads_data
            and any(compatible_values(value, v) for v in each)
        ):
            return True
    return False


def _bytes(nodes: list[Node]) -> int | None:
    total = 0
    for node in nodes:
        value: Any = node.meta.get("val")
        size = nbytes(value)
        if size is None:
            return None
        total += size
    return total


POLICIES = ("auto", "output", "duplicate", "leave", "refuse")


@dataclass
class RegionDraft:
    """A region before it is built: positions in the graph, refined step by step.

    `arguments` and `results` are the nodes that a pattern bound to its arguments and results.
    """

    identity: Identity
    label: str
    members: set[int]
    policies: dict[int, str]
    default_policy: str
    rule: str | None = None
    round: int | None = None
    arguments: Mapping[str, Node] = field(default_factory=dict[str, Node])
    results: tuple[Node | None, ...] = ()
    clones: set[int] = field(default_factory=set[int])
    outputs: list[int] = field(default_factory=list[int])
    escapes: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])

    def policy(self, position: int) -> str:
        return self.policies.get(position, self.default_policy)

    @property
    def inside(self) -> list[int]:
        """Everything the body computes, clones too, in the graph's order."""
        return sorted(self.members | self.clones)


def readers_among(index: Index, position: int, members: set[int]) -> list[int]:
    """The members that read a value, by way of whichever is fewer: what reads it, or the members."""
    users, at = index.nodes[position].users, index.position
    if len(users) <= len(members):
        return [at[user] for user in users if at[user] in members]
    return [i for i in members if position in index.data[i]]


def dead_originals(index: Index, made: Iterable[RegionDraft]) -> set[int]:
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
        if told is not None and told.aliases and not values_exclude_alias(user, told):
            return True
    return False
