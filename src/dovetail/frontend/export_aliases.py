"""Alias analysis of an exported program, before functionalization hides which values share memory.

A group is a set of values that share a storage and a gradient history: `detach` begins another group on the same
storage. `grouped` finds the groups and the writes in one walk over the graph, by the storages of the fake values. The
functions after it inspect and edit graphs for this and the other rewrites; two rewrites are here: `keep_old_values` and
`remove_identities`.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail import torch_compat
from dovetail.errors import CaptureError
from dovetail.frontend.input_guards import overlap
from dovetail.ir import source_location
from dovetail.ir.nodes import storage_key
from dovetail.ir.schema import op_name, value_of, written_operands

DETACHES = (torch.ops.aten.detach.default,)
RANDOM_FILLS = frozenset(
    ["normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"]
)

# Results that have no gradient though they are computed from tensors that do.
_CONSTANT = frozenset(
    [f"{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")]
    + [f"new_{name}" for name in ("zeros", "ones", "full", "empty", "empty_strided", "tensor")]
    + ["bernoulli", "multinomial"]
)
Group = tuple[int, Node | None]


@dataclass(frozen=True)
class Write:
    """An in-place operation: its position, what it writes, and whether the values that it writes have gradients."""

    position: int
    node: Node
    operand: Node
    group: Group
    has_gradient: bool


@dataclass
class AliasGroups:
    of: dict[Node, Group] = field(default_factory=dict[Node, Group])
    members: dict[Group, list[Node]] = field(default_factory=lambda: defaultdict(list))
    by_storage: dict[int, dict[Group, None]] = field(default_factory=lambda: defaultdict(dict))
    # The group of the tensor that each detached group was detached from.
    parent: dict[Group, Group] = field(default_factory=dict[Group, Group])
    # The position from which each group that has gradients has them.
    gradient: dict[Group, int] = field(default_factory=dict[Group, int])
    position: dict[Node, int] = field(default_factory=dict[Node, int])
    writes: list[Write] = field(default_factory=list[Write])

    def add(self, node: Node, group: Group) -> None:
        self.of[node] = group
        self.members[group].append(node)
        self.by_storage[group[0]].setdefault(group)

    def others(self, group: Group) -> list[Group]:
        """Return the other groups of the same storage."""
        return [other for other in self.by_storage[group[0]] if other != group]

    def detaches(self, group: Group) -> Iterator[Node]:
        """Yield the `detach` that began a group, then those of the detached groups that it derives from."""
        at: Group | None = group
        while at is not None and at[1] is not None:
            yield at[1]
            at = self.parent.get(at)

    def may_overlap(self, a: Node, b: Node) -> bool:
        """Return whether two values are on one storage and may have elements in common."""
        return same_memory(self, a, b) and may_overlap(a, b)

    def had_gradient(self, group: Group, write: Write) -> bool:
        """Return whether a group had gradients before a write."""
        return self.gradient.get(group, write.position) < write.position

    def is_differentiable(self, write: Write) -> bool:
        return write.has_gradient or self.had_gradient(write.group, write)

    def writes_before(self, group: Group, position: int) -> list[Write]:
        return [write for write in self.writes if write.group == group and write.position < position]

    def visible(self, group: Group) -> list[Node]:
        """Return the members of a group that the caller has too: inputs, parameters and buffers."""
        return [member for member in self.members[group] if member.op == "placeholder"]

    def uses_after(self, group: Group, position: int, *, values: bool = False) -> list[Node]:
        """Return the members of a group that are read after a position; `detach` reads values only."""
        return [
            member
            for member in self.members[group]
            if any(
                self.position.get(user, -1) > position and (values or user.target not in DETACHES)
                for user in member.users
            )
        ]


def alias_groups(program: ExportedProgram) -> AliasGroups:
    """Return the groups of a program with the parameters and buffers that require gradients now."""
    return grouped(program.graph, state_requires_grad(program))


def alias_groups_with_gradients(program: ExportedProgram) -> AliasGroups:
    """Return the groups of a program as if all inputs and parameters required gradients: in a later call they may."""
    buffers = dict.fromkeys(program.graph_signature.inputs_to_buffers, False)
    return grouped(program.graph, {**all_required(program), **buffers})


def all_required(program: ExportedProgram) -> dict[str, bool]:
    """Return for every placeholder that it requires gradients."""
    return dict.fromkeys((n.name for n in program.graph.find_nodes(op="placeholder")), True)


def grouped(graph: Graph, state: Mapping[str, bool] = MappingProxyType({})) -> AliasGroups:
    """Return the groups of a graph; `state` maps placeholders to whether they require gradients before any write.

    Their fake values, which the exporter writes to as forward does, may require gradients only because of a write.
    """
    groups = AliasGroups()
    for position, node in enumerate(graph.nodes):
        groups.position[node] = position
        if node.op == "placeholder":
            requires = getattr(node.meta.get("val"), "requires_grad", False)
            _enter(groups, node, None, state.get(node.name, requires), -1)
        elif node.op == "call_function":
            _visit(groups, node, position)
    return groups


def _visit(groups: AliasGroups, node: Node, position: int) -> None:
    sources = [groups.of[n] for n in node.all_input_nodes if n in groups.of and is_float(n.meta.get("val"))]
    flows = any(group in groups.gradient for group in sources) and op_name(node.target) not in _CONSTANT
    written = written_operands(node)
    for operand in written:
        group = groups.of.get(operand)
        if group is None:
            continue
        others = [groups.of[n] for n in node.all_input_nodes if n is not operand and n in groups.of]
        has_gradient = (
            any(g in groups.gradient for g in others)
            and op_name(node.target) not in RANDOM_FILLS
            and is_recorded(node)
        )
        groups.writes.append(Write(position, node, operand, group, has_gradient))
        if has_gradient and is_float(operand.meta.get("val")):
            groups.gradient.setdefault(group, position)
    _enter(groups, node, written[0] if written else None, flows and not written, position)


def _enter(groups: AliasGroups, node: Node, written: Node | None, flows: bool, position: int) -> None:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        value = next((v for v in cast("list[Any]", value) if isinstance(v, Tensor)), None)
    if not isinstance(value, Tensor):
        return
    storage = storage_of(value)
    operands = [groups.of[n] for n in (written, *node.all_input_nodes) if n is not None and n in groups.of]
    base = next((group for group in operands if group[0] == storage), None)
    group: Group = (storage, None) if base is None else base
    if node.target in DETACHES:
        if base is not None:
            groups.parent[storage, node] = group
        group = (storage, node)
    elif flows and is_float(value):
        groups.gradient.setdefault(group, position)
    groups.add(node, group)


def is_recorded(node: Node) -> bool:
    """Return whether autograd records the writes of an operation.

    Operators of `torch.library.custom_op` write below autograd: an operand keeps its history, or remains a leaf.
    """
    definition = torch_compat.CUSTOM_OPERATOR.value
    return definition is None or not isinstance(node.target, OpOverload) or definition(node.target) is None


def is_float(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(is_float(part) for part in cast("list[Any]", value))
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def same_memory(groups: AliasGroups, a: Node, b: Node) -> bool:
    return groups.of.get(a, (None,))[0] == groups.of.get(b, (None,))[0]


def view_chain(groups: AliasGroups, node: Node) -> Iterator[Node]:
    """Yield a value and what it is a view of, from view to base, without placeholders."""
    at: Node | None = node
    while at is not None and at.op == "call_function":
        yield at
        at = next((operand for operand in at.all_input_nodes if same_memory(groups, operand, at)), None)


def state_requires_grad(program: ExportedProgram) -> dict[str, bool]:
    """Return whether each parameter and buffer requires gradients, by placeholder."""
    specs = zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
    tensors = {**program.constants, **program.state_dict}
    state = {node.name: tensors.get(spec.target) for node, spec in specs if spec.target is not None}
    return {name: value.requires_grad for name, value in state.items() if isinstance(value, Tensor)}


def may_overlap(a: Node, b: Node) -> bool:
    """Return whether two values on one storage may have elements in common."""
    first, second = a.meta.get("val"), b.meta.get("val")
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return True
    if any(getattr(value, "_has_symbolic_sizes_strides", True) for value in (first, second)):
        return True
    return overlap(first, second)


def know_readers(graph: Graph) -> None:
    """Complete `users` of every node: the exporter omits readers whose own results are unused."""
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


def written_storages(node: Node) -> set[int]:
    """Return the storages that an operation writes, according to the fake values of its operands."""
    storages = [storage_at(operand) for operand in written_operands(node)]
    return {storage for storage in storages if storage is not None}


def returned_operand(node: Node) -> Node | None:
    """Return the one operand that an operator writes and returns, be it the first or `out`; None for any other node."""
    written = written_operands(node)
    if len(written) != 1:
        return None
    schema = cast(OpOverload, node.target)._schema
    results = [r.alias_info.before_set for r in schema.returns if r.alias_info is not None]
    targets = [a.alias_info.before_set for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    is_returned = len(schema.returns) == len(results) == 1 and any(results[0] & one for one in targets)
    return written[0] if is_returned else None


def aliased_results(program: ExportedProgram) -> dict[int, str]:
    """Return the user results that share a placeholder's storage in the program, before its writes are functional."""
    placeholders = reversed(program.graph.find_nodes(op="placeholder"))
    owners = {storage_at(node): node.name for node in placeholders}
    results = cast("tuple[Any, ...]", program.graph.output_node().args[0])
    specs = zip(program.graph_signature.output_specs, results, strict=True)
    storages = [storage_at(result) for spec, result in specs if spec.kind.name == "USER_OUTPUT"]
    return {i: owners[s] for i, s in enumerate(storages) if s is not None and s in owners}


def has_symbols(value: Any) -> bool:
    """Return whether a value is a tensor that has symbolic sizes or strides."""
    return isinstance(value, Tensor) and any(type(n) is not int for n in (*value.shape, *value.stride()))


def source_meta(node: Node) -> dict[str, Any]:
    """Return the meta of a node about where in the model it comes from."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def trace_meta(node: Node) -> dict[str, Any]:
    """Return the meta of a node that nodes inserted for it inherit: its source, and what users annotated."""
    custom = {"custom": node.meta["custom"]} if "custom" in node.meta else {}
    return source_meta(node) | custom


def insert_call(
    node: Node,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    value: Any = None,
    meta: Mapping[str, Any] | None = None,
) -> Node:
    """Insert a call before `node`, with its `trace_meta` or other meta, and a fake value computed unless one is passed."""
    kwargs = dict(kwargs or {})
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args, kwargs)
    new.meta = trace_meta(node) if meta is None else dict(meta)
    if value is None:
        values = [value_of(argument) for argument in args]
        value = values[0]
        if not target._schema.is_mutable:
            with next(v for v in values if isinstance(v, FakeTensor)).fake_mode:
                value = target(*values, **kwargs)
    new.meta["val"] = value
    return new


def replace_node(node: Node, new: Node) -> None:
    """Let the readers of `node` read `new`, and erase it."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def fresh_like(value: Any) -> Any:
    """Return a fake tensor of the same shape, strides and dtype on a new storage."""
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def storage_of(value: Tensor) -> int:
    """An identity of the storage behind a (fake) tensor, inside of vmap too."""
    is_batched, unwrapped = torch_compat.BATCHED_TENSOR.value, torch_compat.FUNCTORCH_UNWRAPPED.value
    while is_batched is not None and unwrapped is not None and is_batched(value):
        value = unwrapped(value)
    return storage_key(value)


def storage_at(argument: Any) -> int | None:
    """Return the storage of a node's fake value; None unless that is a tensor."""
    value = value_of(argument)
    return storage_of(value) if isinstance(value, Tensor) else None


def refused(what: str, node: Node, advice: str) -> CaptureError:
    """Return the error for a node: what is wrong, the line of source, and what to do."""
    return CaptureError(source_location.located(what, source_location.of_node(node), advice))


def keep_old_values(program: ExportedProgram) -> None:
    """Let a program return a copy of a buffer's old value if forward assigns a new tensor to it and returns the old.

    The exporter writes the new value into the buffer before it returns, which would change the old one too.
    """
    graph = program.graph
    output = graph.output_node()
    rebinds = [n for n in graph.nodes if _is_rebinding(n)]
    if not rebinds:
        return
    targets = {storage_of(cast(Node, n.args[0]).meta["val"]) for n in rebinds}
    results = list(cast("tuple[Any, ...]", output.args[0]))
    for i, result in enumerate(results):
        if storage_at(result) in targets:
            clone, fresh = torch.ops.aten.clone.default, fresh_like(result.meta["val"])
            results[i] = insert_call(rebinds[0], clone, (result,), value=fresh, meta=result.meta)
    output.args = (tuple(results),)


_DROPOUTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
)
_EXPANDS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("expand", "expand_as", "broadcast_to")
)
MAYBE_IDENTITIES = _DROPOUTS | _EXPANDS


def remove_identities(program: ExportedProgram) -> None:
    """Remove dropout that drops nothing and `expand` that repeats nothing.

    Such dropout returns its input itself, and decomposition would copy it, so that writes into the result, in the graph
    or by the caller, would not reach the input. Writes through `expand` would be added to its base as a difference,
    which rounds, and is NaN where the base is infinite.
    """
    module = program.graph_module
    is_changed = False
    removed: set[int] = set()
    graphs = [m.graph for m in module.modules() if isinstance(m, GraphModule)]
    written = {storage for graph in graphs for node in graph.nodes for storage in written_storages(node)}
    for graph in graphs:
        calls = [n for n in graph.nodes if _is_idle_dropout(n) or _added_dimensions(n, written) is not None]
        if calls:
            know_readers(graph)
            is_changed = True
        for node in calls:
            source = cast(Node, node.args[0])
            if storage_of(source.meta["val"]) != storage_of(node.meta["val"]):
                removed.add(storage_of(node.meta["val"]))
            for _ in range(_added_dimensions(node, written) or 0):
                source = insert_call(node, torch.ops.aten.unsqueeze.default, (source, 0), meta=node.meta)
            replace_node(node, source)
    if is_changed:
        _update_values(module, removed, torch.is_grad_enabled())


def _is_idle_dropout(node: Node) -> bool:
    if node.target not in _DROPOUTS or len(node.args) != 3:
        return False
    return node.args[2] is False or bool(node.args[1] == 0)


def _added_dimensions(node: Node, written: set[int]) -> int | None:
    """Return how many dimensions of size 1 an `expand` adds, if that is all it does; None for any other node.

    An `expand` that adds dimensions is left as it is if nothing writes its memory.
    """
    operand = value_of(node.args[0]) if node.target in _EXPANDS else None
    value = node.meta.get("val")
    if not isinstance(operand, Tensor) or not isinstance(value, Tensor):
        return None
    added = value.dim() - operand.dim()
    # As text, since comparing symbols would add guards.
    sizes, expected = ([str(size) for size in v.shape] for v in (value, operand))
    if sizes != ["1"] * added + expected:
        return None
    return added if not added or storage_of(value) in written else None


def _update_values(module: GraphModule, removed: set[int], grad: bool) -> None:
    """Recompute the values that were views of removed storages, in blocks of the graph too."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        bodies = [(i, _body(module, arg)) for i, arg in enumerate(node.args)] if _is_wrap(node) else []
        value: Any = node.meta.get("val")
        tensors = [
            v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, FakeTensor)
        ]
        for i, body in bodies:
            if body is not None:
                inner = body.graph.find_nodes(op="placeholder")
                for placeholder, operand in zip(inner, node.args[i + 1 :], strict=True):
                    placeholder.meta["val"] = value_of(operand)
                _update_values(body, removed, False)
                results = cast(Any, body.graph.output_node().args[0])
                node.meta["val"] = map_arg(results, lambda n: n.meta.get("val"))
        if bodies or not any(storage_of(part) in removed for part in tensors):
            continue
        args, kwargs = cast(Any, map_arg((node.args, node.kwargs), lambda n: n.meta.get("val")))
        # A leaf may be written only where no gradients are recorded, and what was written is the same tensor.
        with tensors[0].fake_mode, torch.set_grad_enabled(grad and not written_storages(node)):
            node.meta["val"] = node.target(*args, **kwargs)
    module.recompile()


def _is_wrap(node: Node) -> bool:
    return getattr(node.target, "__name__", "") in ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def _body(module: GraphModule, value: Any) -> GraphModule | None:
    if not isinstance(value, Node) or value.op != "get_attr":
        return None
    body = operator.attrgetter(cast(str, value.target))(module)
    return body if isinstance(body, GraphModule) else None


def _is_rebinding(node: Node) -> bool:
    """Return whether the exporter added this write because forward assigned a new tensor to a buffer."""
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return False
    # Such a write has the `torch_fn` of the function that computed the value.
    function, inherited = (n.meta.get("torch_fn") for n in (node, cast(Node, node.args[1])))
    if function != inherited and any(name in str(function) for name in ("copy_", "__setitem__")):
        return False
    target, source = (cast(Node, a).meta.get("val") for a in node.args[:2])
    if not isinstance(target, Tensor) or not isinstance(source, Tensor):
        return False
    return cast(Node, node.args[0]).op == "placeholder" and storage_of(target) != storage_of(source)
