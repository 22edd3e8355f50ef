"""Which values of an exported program share memory, before functionalisation hides it."""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, ExportGraphSignature
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.ir.nodes import storage_key
from dovetail import torch_compat
from dovetail.errors import CaptureError
from dovetail.frontend.input_guards import overlap
from dovetail.ir import source_location
from dovetail.ir.schema import op_name, written_operands


def keep_old_values(program: ExportedProgram) -> None:
    """Return a copy of a buffer's old value where forward gave the buffer a new tensor and returns the old.

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
        value = result.meta.get("val") if isinstance(result, Node) else None
        if isinstance(value, Tensor) and storage_of(value) in targets:
            with graph.inserting_before(rebinds[0]):
                clone = graph.call_function(torch.ops.aten.clone.default, (result,))
            clone.meta = dict(result.meta)
            clone.meta["val"] = fresh_like(value)
            results[i] = clone
    output.args = (tuple(results),)
    program.graph_module.recompile()
    rename_results(program)


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

    Such dropout returns its input itself, and decomposing would make a copy of that, which what is written into the
    result, here or by the caller, would not reach. What is written through `expand` would be added to its base as a
    difference, which rounds, and is NaN where the base is infinite.
    """
    module = program.graph_module
    is_changed = False
    gone: set[int] = set()
    graphs = [m.graph for m in module.modules() if isinstance(m, GraphModule)]
    written = {place for graph in graphs for node in graph.nodes for place in written_storages(node)}
    for graph in graphs:
        calls = [n for n in graph.nodes if _is_idle_dropout(n) or _added_dimensions(n, written) is not None]
        if calls:
            know_readers(graph)
            is_changed = True
        for node in calls:
            source = cast(Node, node.args[0])
            if storage_of(source.meta["val"]) != storage_of(node.meta["val"]):
                gone.add(storage_of(node.meta["val"]))
            for _ in range(_added_dimensions(node, written) or 0):
                with graph.inserting_before(node):
                    added = graph.call_function(torch.ops.aten.unsqueeze.default, (source, 0))
                added.meta = dict(node.meta)
                with node.meta["val"].fake_mode:
                    added.meta["val"] = source.meta["val"].unsqueeze(0)
                source = added
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    if is_changed:
        _see_anew(module, gone, torch.is_grad_enabled())
        rename_results(program)


def _is_idle_dropout(node: Node) -> bool:
    if node.target not in _DROPOUTS or len(node.args) != 3:
        return False
    return node.args[2] is False or bool(node.args[1] == 0)


def _added_dimensions(node: Node, written: set[int]) -> int | None:
    """How many dimensions of size 1 an `expand` adds, if that is all it does; None for any other node.

    One that adds some is a view like any other where nobody writes its memory.
    """
    source = node.args[0] if node.target in _EXPANDS else None
    given, value = (n.meta.get("val") if isinstance(n, Node) else None for n in (source, node))
    if not isinstance(given, Tensor) or not isinstance(value, Tensor):
        return None
    added = value.dim() - given.dim()
    # As text, since comparing symbols would add guards.
    sizes, expected = ([str(size) for size in v.shape] for v in (value, given))
    if sizes != ["1"] * added + expected:
        return None
    return added if not added or storage_of(value) in written else None


def know_readers(graph: Graph) -> None:
    """Let every value know all that read it: the exporter forgets readers whose own results nobody needs."""
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


def _see_anew(module: GraphModule, gone: set[int], grad: bool) -> None:
    """Work the values out again that were views of memory which is no longer there, in blocks of the graph too."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        bodies = [(i, _body(module, arg)) for i, arg in enumerate(node.args)] if _is_wrap(node) else []
        tensors = _tensors(node.meta.get("val"))
        for i, body in bodies:
            if body is not None:
                inner = body.graph.find_nodes(op="placeholder")
                for placeholder, given in zip(inner, node.args[i + 1 :], strict=True):
                    placeholder.meta["val"] = given.meta.get("val") if isinstance(given, Node) else given
                _see_anew(body, gone, False)
                results = cast(Any, body.graph.output_node().args[0])
                node.meta["val"] = map_arg(results, lambda n: n.meta.get("val"))
        if bodies or not any(storage_of(part) in gone for part in tensors):
            continue
        args, kwargs = cast(Any, map_arg((node.args, node.kwargs), lambda n: n.meta.get("val")))
        # A leaf may be written where no gradients are recorded only, and what was written is the same tensor.
        with cast(Any, tensors[0]).fake_mode, torch.set_grad_enabled(grad and not written_storages(node)):
            node.meta["val"] = node.target(*args, **kwargs)
    module.recompile()


def _is_wrap(node: Node) -> bool:
    return getattr(node.target, "__name__", "") in ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def _body(module: GraphModule, value: Any) -> GraphModule | None:
    if not isinstance(value, Node) or value.op != "get_attr":
        return None
    body = operator.attrgetter(cast(str, value.target))(module)
    return body if isinstance(body, GraphModule) else None


def _tensors(value: Any) -> list[Tensor]:
    parts: Any = value if isinstance(value, (list, tuple)) else (value,)
    return [part for part in parts if isinstance(part, Tensor)]


def written_storages(node: Node) -> set[int]:
    """Return the storages that an operation writes, according to the fake values of its operands."""
    values = [operand.meta.get("val") for operand in written_operands(node)]
    return {storage_of(value) for value in values if isinstance(value, Tensor)}


def _is_rebinding(node: Node) -> bool:
    """Whether the exporter added this write because forward assigned a new tensor to a buffer."""
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return False
    # The exporter lets such a write inherit the function that computed what is written.
    function, inherited = (n.meta.get("torch_fn") for n in (node, cast(Node, node.args[1])))
    if function != inherited and any(name in str(function) for name in ("copy_", "__setitem__")):
        return False
    target, source = (cast(Node, a).meta.get("val") for a in node.args[:2])
    if not isinstance(target, Tensor) or not isinstance(source, Tensor):
        return False
    return cast(Node, node.args[0]).op == "placeholder" and storage_of(target) != storage_of(source)


def aliased_results(program: ExportedProgram) -> dict[int, str]:
    """User results that share a placeholder's storage before functionalisation took in-place writes away."""
    signature = program.graph_signature
    owners: dict[int, str] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            owners.setdefault(storage_of(value), node.name)
    found: dict[int, str] = {}
    results = cast("tuple[Any, ...]", program.graph.output_node().args[0])
    names = set(signature.user_outputs)
    position = 0
    for spec, result in zip(signature.output_specs, results, strict=True):
        if spec.kind.name != "USER_OUTPUT":
            continue
        if isinstance(result, Node) and result.name in names and isinstance(result.meta.get("val"), Tensor):
            owner = owners.get(storage_of(result.meta["val"]))
            if owner is not None:
                found[position] = owner
        position += 1
    return found


def fresh_like(value: Any) -> Any:
    """A fake tensor of the same form on a storage of its own."""
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def storage_of(value: Tensor) -> int:
    """An identity of the storage behind a (fake) tensor, inside of vmap too."""
    is_batched, unwrapped = torch_compat.BATCHED_TENSOR.value, torch_compat.FUNCTORCH_UNWRAPPED.value
    while is_batched is not None and unwrapped is not None and is_batched(value):
        value = unwrapped(value)
    return storage_key(value)


def rename_results(program: ExportedProgram) -> None:
    """Let the signature call the results by the names that they have now."""
    signature: ExportGraphSignature = program.graph_signature
    results = cast("tuple[Any, ...]", program.graph.output_node().args[0])
    for spec, result in zip(signature.output_specs, results, strict=True):
        if isinstance(result, Node) and not isinstance(spec.arg, ConstantArgument):
            spec.arg = dataclasses.replace(spec.arg, name=result.name)


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
class AliasGroups:
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


def grouped_with_gradients(program: ExportedProgram) -> AliasGroups:
    """The groups of a program as if all inputs and parameters required gradients: those of a later call may."""
    buffers = dict.fromkeys(program.graph_signature.inputs_to_buffers, False)
    return grouped(program.graph, {**all_required(program), **buffers})


def all_required(program: ExportedProgram) -> dict[str, bool]:
    """All placeholders as if they required gradients."""
    return dict.fromkeys((n.name for n in program.graph.find_nodes(op="placeholder")), True)


def grouped(graph: Graph, state: Mapping[str, bool] = MappingProxyType({})) -> AliasGroups:
    """The groups of a graph; `state` maps placeholders to whether they require gradients before anything is written.

    Their fake values, which the exporter writes to as forward does, may require gradients only since then.
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
            and op_name(node.target) not in _INPLACE_DRAWS
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


def is_recorded(node: Node) -> bool:
    """Whether autograd records the writes of an operation.

    Operators of `torch.library.custom_op` write below autograd: an operand keeps the history it had, or is still a leaf.
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
    line = source_location.of_node(node)
    where = f"\n  at {line}" if line is not None else ""
    return CaptureError(f"{what}{where}\n  {advice}")
