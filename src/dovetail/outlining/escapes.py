"""Escapes: values computed inside a region that are also used outside.

For each one, the region returns it, has a clone of the operation that computes it (rematerialization), or leaves the
operation outside. The default compares memory traffic: an operation is cloned where reading its operands again costs
no more bytes than storing its result and reading that back. The walk is backwards over the members, so that the users
of a value are decided before it: linear in the members and the edges at them.

The trade is the one of Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
MLSys 2020, taken locally for one value at a time.
"""

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
        """Everything the body computes, clones included, in graph order."""
        return sorted(self.members | self.clones)

    def operands(self, index: Index) -> set[int]:
        """Return the positions of the values that the body reads from outside."""
        inside = self.members | self.clones
        return {j for i in inside for j in index.data[i] if j not in inside}


def readers_among(index: Index, position: int, members: set[int]) -> list[int]:
    """Return the members that read a value, in time linear in the fewer of its readers and the members."""
    users, at = index.nodes[position].users, index.position
    if len(users) <= len(members):
        return [at[user] for user in users if at[user] in members]
    return [i for i in members if position in index.data[i]]


def dead_originals(index: Index, drafts: Iterable[RegionDraft]) -> set[int]:
    """Return the operations without readers once these regions exist: every reader has a clone."""
    served: dict[int, int] = {}
    read_by_clones: set[int] = set()
    for draft in drafts:
        for i in draft.clones:
            served[i] = served.get(i, 0) + len(readers_among(index, i, draft.members))
            read_by_clones.update(j for j in index.data[i] if j not in draft.clones)
    dead: set[int] = set()
    for i in sorted(served.keys() - read_by_clones, reverse=True):
        users = index.nodes[i].users
        if served[i] + sum(index.position[u] in dead for u in users) == len(users):
            dead.add(i)
    return dead


_VIEWED: WeakKeyDictionary[Index, dict[int, bool]] = WeakKeyDictionary()


def is_viewed(index: Index, position: int) -> bool:
    """Whether some operation takes a view of a value: a clone of the value would not share memory with it."""
    # One value may be in thousands of regions, and have as many readers.
    known = _VIEWED.setdefault(index, {})
    if position not in known:
        known[position] = any(
            effects.aliases and not values_exclude_alias(user, effects)
            for user in index.nodes[position].users
            if (effects := index.dependencies.effects.get(index.position[user])) is not None
        )
    return known[position]


def resolve_escapes(index: Index, draft: RegionDraft) -> None:
    """Decide for each escaping value whether it is returned, cloned or left outside, and record why.

    An operation that was cloned or left out is still in the outer graph and reads its operands there.
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
            draft.members.discard(i)  # the operation it belongs to was left outside
            outside.add(i)
            continue
        if not used_inside and draft.policies.get(i) not in ("leave", "refuse"):
            draft.outputs.append(i)  # a result: nothing inside reads it
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
            # All elements of a tuple are left with the operation that makes it.
            i = at[cast("Node", node.args[0])]
        if not is_subgraph(index.gm, node):
            draft.escapes[i] = (policy, reason)
    draft.outputs.reverse()
    if not any(nodes[i].op != "get_attr" for i in draft.members):
        raise EmptyRegion(draft.label, "every operation was left outside")


def _leave_out(index: Index, draft: RegionDraft) -> set[int]:
    """Drop what is to be left outside before anything else, so that no decision depends on the order of nodes."""
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
    """Return a position with the operation that makes its tuple, if any, and the other elements of that tuple."""
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
    """Return why "auto" would not clone an operation into a region without its operands, "" if it would."""
    obstacle = _clone_obstacle(index, position)
    if obstacle:
        return obstacle
    policy, reason = _default_policy(index, set(), position)
    return "" if policy == "duplicate" else reason


def _clone_obstacle(index: Index, position: int) -> str:
    """Return why running an operation twice would be observable, "" if it is not."""
    node = index.nodes[position]
    dependencies = index.dependencies
    effects = dependencies.effects.get(position)
    if effects is not None and effects.random:
        return "it draws at random"
    if effects is not None and not effects.pure:
        return f"it has an effect ({effects.host_effect or 'it writes memory'})"
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
    """Return the default: clone constants and what is cheaper to recompute than to store, return the rest."""
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
    if node.op == "call_module" or not traits_of(node).pointwise:
        return "output", "more than reading and writing to redo"
    reads, stores = nbytes([n.meta.get("val") for n in inputs]), nbytes(value)
    if reads is None or stores is None:
        return "output", "sizes are not known"
    if reads <= 2 * stores:
        return (
            "duplicate",
            f"reading {reads} bytes to redo it costs no more than {2 * stores} to store and reload",
        )
    return "output", f"reading {reads} bytes to redo it costs more than {2 * stores} to store and reload"


def _is_view(index: Index, position: int) -> bool:
    effects = index.dependencies.effects.get(position)
    return effects is not None and bool(effects.aliases) and not effects.reads_data


def _may_be_returned(index: Index, position: int) -> bool:
    """Whether a reader may return the value itself, as `to` and dropout do: a clone would be another tensor."""
    by_position, value = index.dependencies.effects, index.nodes[position].meta.get("val")
    for user in index.nodes[position].users:
        effects = by_position.get(index.position[user])
        result = user.meta.get("val")
        # A call of a region returns a tuple, which may contain the tensor.
        each = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else (result,)
        if (
            effects is not None
            and effects.aliases
            and effects.reads_data
            and any(compatible_values(value, v) for v in each)
        ):
            return True
    return False
