"""Values of an exported graph in groups that share memory and gradient history, and what is written to them.

Tensors of one storage are put into groups by the `detach` they come from: a write through one changes the values of all
and the history of its own group. One pass over the nodes, linear but for the groups of one storage.
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

from dovetail import torch_compat
from dovetail.errors import CaptureError
from dovetail.graph.capturing import blame
from dovetail.graph.capturing.aliasing import storage_of
from dovetail.graph.capturing.sharing import overlap

DETACHES = (torch.ops.aten.detach.default,)
_INPLACE_DRAWS = frozenset(
    ["normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"]
)
# Results that have no gradient though they are made from tensors that do.
_CONSTANT = frozenset(
    [f"{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")]
    + [f"new_{name}" for name in ("zeros", "ones", "full", "empty", "empty_strided", "tensor")]
    + ["bernoulli", "multinomial"]
)
Group = tuple[int, Node | None]


@dataclass(frozen=True)
class Write:
    """An in-place operation: where it stands, what it writes, and whether what it writes has gradients."""

    position: int
    node: Node
    operand: Node
    group: Group
    has_gradient: bool


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
                self.position.get(user, -1) > position and (values or user.target not in DETACHES)
                for user in member.users
            )
        ]


def grouped_with_gradients(program: ExportedProgram) -> Groups:
    """The groups of a program as if all inputs and parameters required gradients: those of a later call may."""
    buffers = dict.fromkeys(program.graph_signature.inputs_to_buffers, False)
    return grouped(program.graph, {**all_required(program), **buffers})


def all_required(program: ExportedProgram) -> dict[str, bool]:
    """All placeholders as if they required gradients."""
    return dict.fromkeys((n.name for n in program.graph.find_nodes(op="placeholder")), True)


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
    sources = [groups.of[n] for n in node.all_input_nodes if n in groups.of and is_float(n.meta.get("val"))]
    flows = any(group in groups.gradient for group in sources) and operator_name(node) not in _CONSTANT
    written = written_operands(node)
    for operand in written:
        group = groups.of.get(operand)
        if group is None:
            continue
        others = [groups.of[n] for n in node.all_input_nodes if n is not operand and n in groups.of]
        has_gradient = (
            any(g in groups.gradient for g in others)
            and operator_name(node) not in _INPLACE_DRAWS
            and is_recorded(node)
        )
        groups.writes.append(Write(position, node, operand, group, has_gradient))
        if has_gradient and is_float(operand.meta.get("val")):
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
    if node.target in DETACHES:
        if base is not None:
            groups.parent[storage, node] = group
        group = (storage, node)
    elif flows and is_float(value):
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


def is_recorded(node: Node) -> bool:
    """Whether autograd records the writes of an operation.

    Operators of `torch.library.custom_op` write below autograd: an operand keeps the history it had, or is still a leaf.
    """
    definition = torch_compat.CUSTOM_OPERATOR.value
    return definition is None or not isinstance(node.target, OpOverload) or definition(node.target) is None


def operator_name(node: Node) -> str:
    target = node.target
    return target._schema.name.split("::")[-1] if isinstance(target, OpOverload) else ""


def is_float(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(is_float(part) for part in cast("list[Any]", value))
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def same_memory(groups: Groups, a: Node, b: Node) -> bool:
    return groups.of.get(a, (None,))[0] == groups.of.get(b, (None,))[0]


def view_chain(groups: Groups, node: Node) -> Iterator[Node]:
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
