"""Writes through `detach`, in a form that functionalization keeps the gradients of.

In eager mode `d = y.detach()` shares memory with `y` and has a gradient history of its own: a write through one changes
the values of both and the history of one. Functionalization has one value per storage, history included. So a group of
aliases that is written with gradients gets memory of its own, shared by the groups detached from it, and its writes are
copied to the tensor it was detached from. If a group with gradients is read after a write through another group, no
functional graph computes the same, and the program is refused. The cost is linear in nodes, and for each write in the
groups of its storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from dovetail.errors import CaptureError
from dovetail.frontend.export_aliases import (
    AliasGroups,
    Group,
    Write,
    all_required,
    grouped,
    has_symbols,
    insert_call,
    is_float,
    is_recorded,
    may_overlap,
    refused,
    replace_node,
    returned_operand,
    source_meta,
    state_requires_grad,
    storage_of,
    view_chain,
)
from dovetail.frontend.input_guards import overlaps_itself
from dovetail.ir.schema import named_arguments, op_name, written_operands

_aten = torch.ops.aten
_LIFTS = ("lift", "lift_fresh", "lift_fresh_copy")
_IN_PLACE_VIEWS = {
    _aten.t_.default: _aten.t.default,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.swapaxes_.default: _aten.swapaxes.default,
    _aten.swapdims_.default: _aten.swapdims.default,
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
}
STORAGE_WRITES = ("set_", "resize_", "resize_as_")
_RELATIONS = ("not_equal", "less", "less_equal", "greater", "greater_equal")
COMPARISONS = frozenset(f"{name}_" for name in ("eq", "ne", "lt", "le", "gt", "ge", *_RELATIONS))
_LOGICAL = frozenset(["logical_not_", "logical_and_", "logical_or_", "logical_xor_"])


@dataclass(frozen=True)
class DetachedInputs:
    """Inputs written only through `detach` or below autograd; `read_after` are those whose new values forward reads.

    `ungraded` are the inputs that must not require gradients, because the functional form would differ; `graded` are
    those that require them.
    """

    written: frozenset[str] = frozenset()
    read_after: frozenset[str] = frozenset()
    ungraded: frozenset[str] = frozenset()
    graded: frozenset[str] = frozenset()


def separate(program: ExportedProgram, inputs: DetachedInputs) -> DetachedInputs:
    """Give groups that are written with gradients memory of their own; edits the program's graph.

    Return `inputs`, which has those that require gradients, with what is known of the writes.
    """
    graph = program.graph
    state = state_requires_grad(program)
    _replace_resizing(graph)
    _replace_in_place_views(graph)
    _replace_detach_in_place(graph)
    groups = grouped(graph, state)
    separated = _planned(groups, state)
    placeholders = graph.find_nodes(op="placeholder")
    inputs = replace(_detached_inputs(program, groups), graded=inputs.graded)
    if groups.writes and _differs_with_gradients(program, state, separated):
        inputs = replace(inputs, ungraded=frozenset(n.name for n in placeholders) - inputs.graded)
    # Copies come right after the write, so that those of inner aliases, inserted last, come before those of outer ones.
    for root in sorted(separated, key=groups.position.__getitem__):
        _separate(graph, groups, root)
    return inputs


def _planned(groups: AliasGroups, state: Mapping[str, bool]) -> dict[Node, int]:
    """Return the `detach` of each group that needs memory of its own, with the position of the first differentiable write."""
    _refuse_unsupported(groups)
    separated: dict[Node, int] = {}
    owned = {group for node, group in groups.of.items() if state.get(node.name)}
    for write in groups.writes:
        _refuse_hidden_history(groups, write, owned)
        root = write.group[1]
        if root is not None and write.has_gradient:
            separated.setdefault(root, write.position)
    for root, first in separated.items():
        _refuse_earlier_writes(groups, root, first)
    for write in groups.writes:
        _refuse_stale_reads(groups, write, set(separated))
    return separated


def _differs_with_gradients(
    program: ExportedProgram, state: Mapping[str, bool], separated: dict[Node, int]
) -> bool:
    """Return whether the functional form would differ, or not exist, if all inputs required gradients."""
    try:
        return _planned(grouped(program.graph, {**all_required(program), **state}), state) != separated
    except CaptureError:
        return True


def _replace_detach_in_place(graph: Graph) -> None:
    """Let what follows `y.detach_()` read `y.detach()`, which functionalization keeps."""
    calls = [n for n in graph.nodes if n.target is _aten.detach_.default]
    calls = [n for n in calls if op_name(cast(Node, n.args[0]).target) not in _LIFTS]
    groups, edited = grouped(graph) if calls else AliasGroups(), set[int]()
    for node in calls:
        tensor = cast(Node, node.args[0])
        storage = storage_of(tensor.meta["val"])
        if storage in edited:
            groups = grouped(graph)
        edited.add(storage)
        at, group = groups.position[node], groups.of[tensor]
        views = [n for n in groups.uses_after(group, at) if n is not tensor and groups.position[n] < at]
        if group in groups.gradient and views:
            raise refused(
                "forward detaches a tensor in place that others are views of, which a functional graph cannot do",
                node,
                "Use `y = y.detach()`.",
            )
        new = insert_call(node, _aten.detach.default, (tensor,), value=node.meta["val"], meta=node.meta)
        for user in [user for user in tensor.users if groups.position.get(user, -1) > at]:
            user.replace_input_with(tensor, new)
        replace_node(node, new)


def _replace_resizing(graph: Graph) -> None:
    """Let what follows `y.resize_()` to no more elements read a view of the first elements."""
    for node in [n for n in graph.nodes if op_name(n.target) in ("resize_", "resize_as_")]:
        tensor = cast(Node, node.args[0])
        old, value = tensor.meta.get("val"), node.meta.get("val")
        if not isinstance(old, FakeTensor) or not isinstance(value, Tensor):
            continue
        if has_symbols(old) or has_symbols(value):
            continue
        if not (old.is_contiguous() and value.is_contiguous() and value.numel() <= old.numel()):
            continue
        new = tensor
        for target, args in (
            (_aten.view.default, ([-1],)),
            (_aten.slice.Tensor, (0, 0, value.numel())),
            (_aten.view.default, (list(value.shape),)),
        ):
            with torch.no_grad():
                new = insert_call(node, target, (new, *args), meta=node.meta)
        replace_node(node, new)


def _replace_in_place_views(graph: Graph) -> None:
    """Let what follows `y.t_()` read `y.t()` if sizes are symbolic: torch 2.15 cannot retrace the former."""
    calls = [n for n in graph.nodes if n.target in _IN_PLACE_VIEWS and has_symbols(n.meta.get("val"))]
    position = {node: i for i, node in enumerate(graph.nodes)} if calls else {}
    for node in calls:
        view = insert_call(
            node, _IN_PLACE_VIEWS[node.target], node.args, node.kwargs, node.meta["val"], node.meta
        )
        for member in _same_tensor(cast(Node, node.args[0])):
            for user in [user for user in member.users if position.get(user, -1) > position[node]]:
                user.replace_input_with(member, view)
        replace_node(node, view)


def _same_tensor(node: Node) -> list[Node]:
    """Return the nodes that are the same tensor as a node: in-place operators return what they write."""
    while (written := returned_operand(node)) is not None:
        node = written
    same = [node]
    for each in same:
        same += [user for user in each.users if returned_operand(user) is each]
    return same


def _refuse_lost_history(groups: AliasGroups, write: Write) -> None:
    """Raise CaptureError for writes over values with gradients whose functional form has no derivative."""
    name = op_name(write.node.target)
    if not (name in COMPARISONS or name in _LOGICAL or "out" in write.node.kwargs):
        return
    at = write.position
    if groups.is_differentiable(write) and (
        groups.visible(write.group) or groups.uses_after(write.group, at)
    ):
        raise refused(
            f"forward writes over a value with gradients by {write.node.target}, whose functional form has no derivative",
            write.node,
            "Use the operator that returns a new tensor, or write to a detached clone.",
        )


def _refuse_unsupported(groups: AliasGroups) -> None:
    for write in groups.writes:
        if op_name(write.node.target) in STORAGE_WRITES:
            raise refused(
                f"forward changes the storage of a tensor by {op_name(write.node.target)}, which a functional graph cannot do",
                write.node,
                "Make a new tensor (torch.empty, clone, narrow) instead.",
            )
        _refuse_lost_history(groups, write)
        if groups.had_gradient(write.group, write) and not is_float(write.operand.meta.get("val")):
            raise _hidden(write)
        written = written_operands(write.node)
        if any(groups.may_overlap(a, b) for a, b in combinations(written, 2)):
            raise refused(
                "forward writes to tensors in one call that share memory, which functionalization writes once only",
                write.node,
                "Write to one after the other.",
            )
        views = list(view_chain(groups, write.operand))
        if any(_repeats_elements(view) for view in (write.operand, *views)):
            raise refused(
                "forward writes to a tensor whose elements overlap in memory (an expanded one)",
                write.node,
                "Write to the tensor that was expanded, or to a clone.",
            )
        if groups.is_differentiable(write) and any(op_name(view.target) == "as_strided" for view in views):
            raise _refused_scatter(write.node)
        if any(_skips_elements(view) for view in views):
            raise refused(
                "forward writes into windows of a tensor (unfold) that do not cover it, which functionalization clears "
                "outside of them",
                write.node,
                "Take the view with indexing, narrow or unflatten.",
            )


def _repeats_elements(view: Node) -> bool:
    value = view.meta.get("val")
    return isinstance(value, Tensor) and overlaps_itself(value)


def _skips_elements(view: Node) -> bool:
    """Return whether a view is an `unfold` whose windows do not cover their dimension."""
    if op_name(view.target) != "unfold":
        return False
    given = named_arguments(view)
    length = given["self"].meta["val"].shape[given["dimension"]]
    return type(length) is not int or given["size"] != given["step"] or length % given["size"] != 0


def refuse_strided_scatters(graph: Graph, state: Mapping[str, bool]) -> None:
    """Raise CaptureError for `as_strided_scatter` over values with gradients that decomposition introduced.

    A call in forward itself has the same gradients in eager mode.
    """
    nodes = graph.find_nodes(op="call_function", target=_aten.as_strided_scatter.default)
    groups = grouped(graph, state) if nodes else AliasGroups()
    for node in nodes:
        in_forward = "as_strided_scatter" in str(node.meta.get("torch_fn"))
        if groups.of.get(node) in groups.gradient and not in_forward:
            raise _refused_scatter(node)


def _refused_scatter(node: Node) -> CaptureError:
    return refused(
        "forward writes into an as_strided view of a value with gradients, and the functional form of that has wrong "
        "gradients in torch (aten.as_strided_scatter)",
        node,
        "Take the view with indexing, narrow, unfold or diagonal.",
    )


def _refuse_hidden_history(groups: AliasGroups, write: Write, owned: set[Group]) -> None:
    """Raise CaptureError if a group with gradients is read after a write through another group of its memory.

    `owned`, state that requires gradients, is excepted: any write to it is refused elsewhere.
    """
    # For the history, a write through a detached alias replaces everything that the alias covers.
    covers = {groups.parent.get(groups.of[root]): root for root in groups.detaches(write.group)}
    for group in groups.others(write.group):
        if not groups.had_gradient(group, write) or group in owned:
            continue
        later = groups.uses_after(group, write.position)
        if any(groups.is_differentiable(w) for w in groups.writes_before(group, write.position)):
            # An input or a buffer has the new history after the call, whether or not forward reads it.
            later += groups.visible(group)
        if any(may_overlap(covers.get(group, write.operand), member) for member in later):
            raise _hidden(write)


def _refuse_stale_reads(groups: AliasGroups, write: Write, separated: set[Node]) -> None:
    """Raise CaptureError if separated memory is read after a write to its storage that is not copied to it."""
    above = set(groups.detaches(write.group))
    for group in groups.others(write.group):
        memory = next((root for root in groups.detaches(group) if root in separated), None)
        if memory is None or memory in above or groups.position[memory] > write.position:
            continue
        later = groups.uses_after(group, write.position, values=True)
        if any(may_overlap(write.operand, member) for member in later):
            raise _hidden(write)


def _hidden(write: Write) -> CaptureError:
    return refused(
        "forward writes to a tensor through detach(), in torch.no_grad() or as integers, and then uses the tensor, whose "
        "gradient history does not know of the write; a functional graph cannot compute that",
        write.node,
        "Write to a clone, or use torch.where, index_put or another operator that returns a new tensor.",
    )


def _refuse_earlier_writes(groups: AliasGroups, root: Node, first: int) -> None:
    begin = groups.position[root]
    storage = groups.of[root][0]
    for write in groups.writes:
        if not begin < write.position < first or write.group[0] != storage:
            continue
        if root not in groups.detaches(write.group) and may_overlap(write.operand, root):
            raise refused(
                "forward writes to a tensor and then, with gradients, to its detached alias; a functional graph cannot "
                "keep both histories",
                write.node,
                "Detach after the write, or write to a clone of the detached tensor.",
            )


def _detached_inputs(program: ExportedProgram, groups: AliasGroups) -> DetachedInputs:
    inputs = set(program.graph_signature.user_inputs)
    written: dict[str, bool] = {}
    direct: set[str] = set()
    nodes = [n for n in program.graph.find_nodes(op="placeholder") if n.name in inputs and n in groups.of]
    placeholders = {groups.of[n]: n.name for n in nodes}
    for write in groups.writes:
        if write.group in placeholders:
            if is_recorded(write.node):
                direct.add(placeholders[write.group])
            else:
                # Forward reads a clone with the history of the input afterwards, as in eager mode.
                written.setdefault(placeholders[write.group], False)
        for group in groups.others(write.group):
            if group in placeholders:
                later = groups.uses_after(group, write.position)
                written[placeholders[group]] = written.get(placeholders[group], False) or bool(later)
    names = frozenset(written) - direct
    return DetachedInputs(names, frozenset(name for name in written if written[name]))


def _separate(graph: Graph, groups: AliasGroups, root: Node) -> None:
    """Give the group that `root` begins memory of its own; its writes are copied back without history."""
    source = cast(Node, root.args[0])
    group = groups.of[root]
    others = groups.others(group)
    is_visible = any(n.op == "placeholder" for g in others for n in groups.members[g])
    with graph.inserting_after(root):
        clone = graph.call_function(_aten.clone.default, (root,))
    clone.meta = dict(root.meta)
    for user in [user for user in root.users if user is not clone]:
        user.replace_input_with(root, clone)
    for write in groups.writes:
        if root not in groups.detaches(write.group):
            continue
        if is_visible or any(groups.uses_after(g, write.position, values=True) for g in others):
            with graph.inserting_after(write.node):
                values = graph.call_function(_aten.detach.default, (clone,))
            with graph.inserting_after(values):
                copy = graph.call_function(_aten.copy_.default, (source, values))
            for new in (values, copy):
                new.meta = {**source_meta(write.node), "val": source.meta["val"]}
