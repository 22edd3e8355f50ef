"""Which values of an exported program share memory, before functionalisation hides it."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, ExportGraphSignature
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail import torch_compat


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


_DROPOUTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
)
_EXPANDS = tuple(getattr(torch.ops.aten, name).default for name in ("expand", "expand_as", "broadcast_to"))


def see_through_identities(program: ExportedProgram) -> None:
    """Take out dropout that drops nothing and `expand` that repeats nothing.

    Such dropout returns its input itself, and decomposing would make a copy of that, which what is written into the
    result, here or by the caller, would not reach. What is written through `expand` would be added to its base as a
    difference, which rounds, and is NaN where the base is infinite.
    """
    module = program.graph_module
    is_changed = False
    gone: set[int] = set()
    graphs = [m.graph for m in module.modules() if isinstance(m, GraphModule)]
    written = {place for graph in graphs for node in graph.nodes for place in written_by(node)}
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
        with cast(Any, tensors[0]).fake_mode, torch.set_grad_enabled(grad and not written_by(node)):
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


def written_by(node: Node) -> set[int]:
    """The memory that an operation writes, by what its operands are known to be."""
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:
        return set()
    given = {**dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)), **node.kwargs}
    found: set[int] = set()
    for argument in target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            values: Any = given.get(argument.name)
            for value in values if isinstance(values, (list, tuple)) else (values,):
                known = value.meta.get("val") if isinstance(value, Node) else None
                if isinstance(known, Tensor):
                    found.add(storage_of(known))
    return found


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
    if value.layout is not torch.strided:
        return id(value)
    return value.untyped_storage()._cdata


def rename_results(program: ExportedProgram) -> None:
    """Let the signature call the results by the names that they have now."""
    signature: ExportGraphSignature = program.graph_signature
    results = cast("tuple[Any, ...]", program.graph.output_node().args[0])
    for spec, result in zip(signature.output_specs, results, strict=True):
        if isinstance(result, Node) and not isinstance(spec.arg, ConstantArgument):
            spec.arg = dataclasses.replace(spec.arg, name=result.name)
