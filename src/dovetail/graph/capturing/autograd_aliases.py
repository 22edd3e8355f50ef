"""Writes through `detach`, in a form that functionalisation keeps the gradients of.

In eager mode `d = y.detach()` shares memory with `y` and has a gradient history of its own: a write through one changes
the values of both and the history of one. Functionalisation keeps one value per storage, history included. So tensors of
a storage are put into groups by the `detach` they come from. A group that is written with gradients gets memory of its
own, which groups detached from it share, and what is written there is copied to the tensor it was detached from; where a
group with gradients would have to see a write through another, no functional graph computes it, and the program is
refused. One pass over the nodes, linear but for the groups of one storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from dovetail.errors import CaptureError
from dovetail.graph.capturing import blame
from dovetail.graph.capturing.aliasing import storage_of
from dovetail.graph.capturing.sharing import overlap, overlaps_itself

_aten = torch.ops.aten
_DETACHES = (_aten.detach.default,)
_LIFTS = ("lift", "lift_fresh", "lift_fresh_copy")
_STORAGE_WRITES = ("set_", "resize_", "resize_as_")
_INPLACE_DRAWS = frozenset(
    ["normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"]
)
# Results that have no gradient though they are made from tensors that do.
_CONSTANT = frozenset(
    [
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_empty_strided",
        "new_tensor",
        "bernoulli",
        "multinomial",
    ]
)
COMPARISONS = frozenset(
    [
        "eq_",
        "ne_",
        "lt_",
        "le_",
        "gt_",
        "ge_",
        "not_equal_",
        "less_",
        "less_equal_",
        "greater_",
        "greater_equal_",
    ]
)
_LOGICAL = frozenset(["logical_not_", "logical_and_", "logical_or_", "logical_xor_"])
Group = tuple[int, Node | None]


@dataclass(frozen=True)
class Write:
    """An in-place operation: where it stands, what it writes, and whether what it writes has gradients."""

    position: int
    node: Node
    operand: Node
    group: Group
    has_gradient: bool


@dataclass(frozen=True)
class DetachedInputs:
    """Inputs written through `detach` only; `read_after` are those whose new values forward reads itself."""

    written: frozenset[str] = frozenset()
    read_after: frozenset[str] = frozenset()


@dataclass
class Groups:
    of: dict[Node, Group] = field(default_factory=dict[Node, Group])
    members: dict[Group, list[Node]] = field(default_factory=lambda: defaultdict(list))
    by_storage: dict[int, dict[Group, None]] = field(default_factory=lambda: defaultdict(dict))
    # The group of the tensor that each detached group was detached from.
    parent: dict[Group, Group] = field(default_factory=dict[Group, Group])
    # Where each group that has gradients came to have them.
    gradient: dict[Group, int] = field(default_factory=dict[Group, int])
    position: dict[Node, int] = field(default_factory=dict[Node, int])
    writes: list[Write] = field(default_factory=list[Write])

    def add(self, node: Node, group: Group) -> None:
        self.of[node] = group
        self.members[group].append(node)
        self.by_storage[group[0]].setdefault(group)

    def others(self, group: Group) -> list[Group]:
        """The other groups of the same memory."""
        return [other for other in self.by_storage[group[0]] if other != group]

    def detaches(self, group: Group) -> Iterator[tuple[Group, Node]]:
        """The detached groups that lead to a group, that itself first, each with the `detach` that began it."""
        at: Group | None = group
        while at is not None and at[1] is not None:
            yield at, at[1]
            at = self.parent.get(at)

    def had_gradient(self, group: Group, write: Write) -> bool:
        """Whether a group had gradients when a write began."""
        return self.gradient.get(group, write.position) < write.position

    def is_differentiable(self, write: Write) -> bool:
        return write.has_gradient or self.had_gradient(write.group, write)

    def writes_before(self, group: Group, position: int) -> list[Write]:
        return [write for write in self.writes if write.group == group and write.position < position]

    def visible(self, group: Group) -> list[Node]:
        """Members of a group that the caller has too: inputs, parameters and buffers."""
        return [member for member in self.members[group] if member.op == "placeholder"]

    def uses_after(self, group: Group, position: int, *, values: bool = False) -> list[Node]:
        """Members of a group that something reads after a position; `detach` reads values only."""
        return [
            member
            for member in self.members[group]
            if any(
                self.position.get(user, -1) > position and (values or user.target not in _DETACHES)
                for user in member.users
            )
        ]


def differentiable_draws(graph: Graph) -> set[Node]:
    """In-place operations whose written operand may have a gradient history."""
    groups = grouped(graph)
    return {write.node for write in groups.writes if groups.had_gradient(write.group, write)}


def separate(program: ExportedProgram) -> DetachedInputs:
    """Give groups that are written with gradients memory of their own; edits the program's graph."""
    graph = program.graph
    state = state_requires_grad(program)
    changed = _replace_detach_in_place(graph)
    if not any(node.target in _DETACHES for node in graph.nodes):
        _refuse_unsupported(grouped(graph, state))
        return _recompiled(program, changed, DetachedInputs())
    groups = grouped(graph, state)
    _refuse_unsupported(groups)
    separated: dict[Node, int] = {}
    owned = {group for node, group in groups.of.items() if state.get(node.name)}
    for write in groups.writes:
        _refuse_hidden_history(groups, write, owned)
        root = write.group[1]
        if root is not None and write.has_gradient:
            separated.setdefault(root, write.position)
    inputs = _detached_inputs(program, groups)
    for root, first in separated.items():
        _refuse_earlier_writes(groups, root, first)
    for write in groups.writes:
        _refuse_stale_reads(groups, write, set(separated))
    # Copies come right after the write, so that those of inner aliases, inserted last, come before those of outer ones.
    for root in sorted(separated, key=groups.position.__getitem__):
        _separate(graph, groups, root)
    return _recompiled(program, changed or bool(separated), inputs)


def _recompiled(program: ExportedProgram, changed: bool, inputs: DetachedInputs) -> DetachedInputs:
    if changed:
        program.graph_module.recompile()
    return inputs


def grouped(graph: Graph, state: Mapping[str, bool] = MappingProxyType({})) -> Groups:
    """The groups of a graph; `state` maps placeholders to whether they require gradients before anything is written.

    Their fake values, which the exporter writes to as forward does, may require gradients only since then.
    """
    groups = Groups()
    for position, node in enumerate(graph.nodes):
        groups.position[node] = position
        if node.op == "placeholder":
            requires = getattr(node.meta.get("val"), "requires_grad", False)
            _enter(groups, node, None, state.get(node.name, requires), -1)
        elif node.op == "call_function":
            _visit(groups, node, position)
    return groups


def _visit(groups: Groups, node: Node, position: int) -> None:
    sources = [groups.of[n] for n in node.all_input_nodes if n in groups.of and _is_float(n.meta.get("val"))]
    flows = any(group in groups.gradient for group in sources) and operator_name(node) not in _CONSTANT
    written = written_operands(node)
    for operand in written:
        group = groups.of.get(operand)
        if group is None:
            continue
        others = [groups.of[n] for n in node.all_input_nodes if n is not operand and n in groups.of]
        has_gradient = operator_name(node) not in _INPLACE_DRAWS and any(g in groups.gradient for g in others)
        groups.writes.append(Write(position, node, operand, group, has_gradient))
        if has_gradient and _is_float(operand.meta.get("val")):
            groups.gradient.setdefault(group, position)
    _enter(groups, node, written[0] if written else None, flows and not written, position)


def _enter(groups: Groups, node: Node, written: Node | None, flows: bool, position: int) -> None:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        value = next((v for v in cast("list[Any]", value) if isinstance(v, Tensor)), None)
    if not isinstance(value, Tensor):
        return
    storage = storage_of(value)
    base = next(
        (
            n
            for n in (written, *node.all_input_nodes)
            if n is not None and groups.of.get(n, (None,))[0] == storage
        ),
        None,
    )
    group: Group = (storage, None) if base is None else groups.of[base]
    if node.target in _DETACHES:
        if base is not None:
            groups.parent[storage, node] = group
        group = (storage, node)
    elif flows and _is_float(value):
        groups.gradient.setdefault(group, position)
    groups.add(node, group)


def written_operands(node: Node) -> list[Node]:
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:
        return []
    names = [a.name for a in target._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    operands: list[Node] = []
    for argument in target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            parts: Any = value if isinstance(value, (list, tuple)) else (value,)
            operands += [part for part in parts if isinstance(part, Node)]
    return operands


def operator_name(node: Node) -> str:
    target = node.target
    return target._schema.name.split("::")[-1] if isinstance(target, OpOverload) else ""


def _is_float(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_float(part) for part in cast("list[Any]", value))
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _replace_detach_in_place(graph: Graph) -> bool:
    """Let what follows `y.detach_()` read `y.detach()`, which functionalisation keeps."""
    calls = [n for n in graph.nodes if n.target is _aten.detach_.default]
    calls = [n for n in calls if operator_name(cast(Node, n.args[0])) not in _LIFTS]
    for node in calls:
        groups = grouped(graph)
        tensor = cast(Node, node.args[0])
        at, group = groups.position[node], groups.of[tensor]
        if group in groups.gradient and any(n not in (tensor, node) for n in groups.uses_after(group, at)):
            raise refused(
                "forward detaches a tensor in place that others are views of, which a functional graph cannot do",
                node,
                "Use `y = y.detach()`.",
            )
        with graph.inserting_before(node):
            new = graph.call_function(_aten.detach.default, (tensor,))
        new.meta = dict(node.meta)
        later = [user for user in tensor.users if groups.position.get(user, -1) > at]
        for user in later:
            user.replace_input_with(tensor, new)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return bool(calls)


def _refuse_lost_history(groups: Groups, write: Write) -> None:
    """Raise for writes over values with gradients whose functional form has no derivative."""
    name = operator_name(write.node)
    if not (name in COMPARISONS or name in _LOGICAL or "out" in write.node.kwargs):
        return
    at = write.position
    if groups.is_differentiable(write) and (
        groups.visible(write.group) or groups.uses_after(write.group, at)
    ):
        raise refused(
            f"forward writes over a value with gradients by {write.node.target}, the functional form of which has none",
            write.node,
            "Use the operator that returns a new tensor, or write to a detached clone.",
        )


def _refuse_unsupported(groups: Groups) -> None:
    for write in groups.writes:
        if operator_name(write.node) in _STORAGE_WRITES:
            raise refused(
                f"forward changes the storage of a tensor by {operator_name(write.node)}, which a functional graph cannot do",
                write.node,
                "Make a new tensor (torch.empty, clone, narrow) instead.",
            )
        _refuse_lost_history(groups, write)
        written = written_operands(write.node)
        if any(share(a, b) for i, a in enumerate(written) for b in written[:i] if same_memory(groups, a, b)):
            raise refused(
                "forward writes to tensors in one call that share memory, which functionalisation writes once only",
                write.node,
                "Write to one after the other.",
            )
        value = write.operand.meta.get("val")
        if isinstance(value, Tensor) and overlaps_itself(value):
            raise refused(
                "forward writes to a tensor whose elements overlap in memory (an expanded one)",
                write.node,
                "Write to the tensor that was expanded, or to a clone.",
            )
        if groups.is_differentiable(write) and any(
            operator_name(view) == "as_strided" for view in _view_chain(groups, write.operand)
        ):
            raise _refused_scatter(write.node)


def refuse_strided_scatters(graph: Graph, state: Mapping[str, bool]) -> None:
    """Raise for `as_strided_scatter` over values with gradients that decomposition introduced.

    A call in forward itself has the same gradients in eager mode.
    """
    nodes = graph.find_nodes(op="call_function", target=_aten.as_strided_scatter.default)
    groups = grouped(graph, state) if nodes else Groups()
    for node in nodes:
        is_own = "as_strided_scatter" in str(node.meta.get("torch_fn"))
        if groups.of.get(node) in groups.gradient and not is_own:
            raise _refused_scatter(node)


def _refused_scatter(node: Node) -> CaptureError:
    return refused(
        "forward writes into an as_strided view of a value with gradients, and the functional form of that has wrong "
        "gradients in torch (aten.as_strided_scatter)",
        node,
        "Take the view with indexing, narrow, unfold or diagonal.",
    )


def same_memory(groups: Groups, a: Node, b: Node) -> bool:
    return groups.of.get(a, (None,))[0] == groups.of.get(b, (None,))[0]


def _view_chain(groups: Groups, node: Node) -> Iterator[Node]:
    at: Node | None = node
    while at is not None and at.op == "call_function":
        yield at
        here = groups.of.get(at, (None,))[0]
        at = next((n for n in at.all_input_nodes if groups.of.get(n, (None,))[0] == here), None)


def state_requires_grad(program: ExportedProgram) -> dict[str, bool]:
    """Whether each parameter and buffer requires gradients, by placeholder."""
    specs = zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
    tensors = {**program.constants, **program.state_dict}
    held = {node.name: tensors.get(spec.target) for node, spec in specs if spec.target is not None}
    return {name: value.requires_grad for name, value in held.items() if isinstance(value, Tensor)}


def _refuse_hidden_history(groups: Groups, write: Write, owned: set[Group]) -> None:
    """Raise where a group with gradients is read after a write through another group of its memory.

    But for `owned`, state that requires gradients: a write to that is refused for that alone.
    """
    # A write through a detached alias replaces all that the alias covers, as far as the history is concerned.
    covers = {groups.parent.get(group): root for group, root in groups.detaches(write.group)}
    for group in groups.others(write.group):
        if not groups.had_gradient(group, write) or group in owned:
            continue
        later = groups.uses_after(group, write.position)
        if any(groups.is_differentiable(w) for w in groups.writes_before(group, write.position)):
            # The new history of an input or a buffer is there after the call, whether or not forward reads it.
            later += groups.visible(group)
        if any(share(covers.get(group, write.operand), member) for member in later):
            raise _hidden(write)


def _refuse_stale_reads(groups: Groups, write: Write, separated: set[Node]) -> None:
    """Raise where separated memory is read after a write to its storage that is not copied to it."""
    above = {root for _, root in groups.detaches(write.group)}
    for group in groups.others(write.group):
        memory = next((root for _, root in groups.detaches(group) if root in separated), None)
        if memory is None or memory in above or groups.position[memory] > write.position:
            continue
        later = groups.uses_after(group, write.position, values=True)
        if any(share(write.operand, member) for member in later):
            raise _hidden(write)


def _hidden(write: Write) -> CaptureError:
    return refused(
        "forward writes to a tensor through detach() or in torch.no_grad(), and then uses the tensor, whose "
        "gradient history does not know of the write; a functional graph cannot compute that",
        write.node,
        "Write to a clone, or use torch.where, index_put or another operator that returns a new tensor.",
    )


def _refuse_earlier_writes(groups: Groups, root: Node, first: int) -> None:
    begin = groups.position[root]
    storage = groups.of[root][0]
    for write in groups.writes:
        if not begin < write.position < first or write.group[0] != storage:
            continue
        if all(node is not root for _, node in groups.detaches(write.group)) and share(write.operand, root):
            raise refused(
                "forward writes to a tensor and then, with gradients, to its detached alias; a functional graph cannot "
                "keep both histories",
                write.node,
                "Detach after the write, or write to a clone of the detached tensor.",
            )


def _detached_inputs(program: ExportedProgram, groups: Groups) -> DetachedInputs:
    inputs = set(program.graph_signature.user_inputs)
    written: dict[str, bool] = {}
    direct: set[str] = set()
    nodes = [n for n in program.graph.find_nodes(op="placeholder") if n.name in inputs and n in groups.of]
    placeholders = {groups.of[n]: n.name for n in nodes}
    for write in groups.writes:
        if write.group in placeholders:
            direct.add(placeholders[write.group])
        for group in groups.others(write.group):
            if group in placeholders:
                later = groups.uses_after(group, write.position)
                written[placeholders[group]] = written.get(placeholders[group], False) or bool(later)
    names = frozenset(written) - direct
    return DetachedInputs(names, frozenset(name for name in written if written[name]))


def _separate(graph: Graph, groups: Groups, root: Node) -> None:
    """Let the group that `root` begins have memory of its own; what is written to it is copied back without history."""
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
        if all(node is not root for _, node in groups.detaches(write.group)):
            continue
        if is_visible or any(groups.uses_after(g, write.position, values=True) for g in others):
            with graph.inserting_after(write.node):
                values = graph.call_function(_aten.detach.default, (clone,))
            with graph.inserting_after(values):
                copy = graph.call_function(_aten.copy_.default, (source, values))
            for new in (values, copy):
                new.meta = {
                    k: v for k, v in write.node.meta.items() if k in ("stack_trace", "nn_module_stack")
                }
                new.meta["val"] = source.meta["val"]


def share(a: Node, b: Node) -> bool:
    values = a.meta.get("val"), b.meta.get("val")
    if not all(isinstance(v, Tensor) for v in values):
        return True
    first, second = cast("tuple[Tensor, Tensor]", values)
    if any(getattr(v, "_has_symbolic_sizes_strides", True) for v in values):
        return True
    return overlap(first, second)


def refused(what: str, node: Node, advice: str) -> CaptureError:
    line = blame.of_node(node)
    where = f"\n  at {line}" if line is not None else ""
    return CaptureError(f"{what}{where}\n  {advice}")
