"""Which values of an exported program share memory, before functionalisation hides it."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, ExportGraphSignature
from torch.fx import Node
from torch.fx.node import map_arg


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


def see_through_dropout(program: ExportedProgram) -> None:
    """Take out dropout that drops nothing: it returns its input itself, and decomposing would make a copy of that,
    which what is written into the result, here or by who called, would not reach."""
    graph = program.graph
    calls = [n for n in graph.nodes if n.target in _DROPOUTS and len(n.args) == 3]
    idle = [n for n in calls if n.args[2] is False or n.args[1] == 0]
    for node in idle:
        source = cast(Node, node.args[0])
        users = list(node.users)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        if storage_of(source.meta["val"]) != storage_of(node.meta["val"]):
            _seen_anew(users, storage_of(node.meta["val"]))
    if idle:
        program.graph_module.recompile()
        rename_results(program)


def _seen_anew(users: list[Node], place: int) -> None:
    """Work the values out again that were views of memory which is no longer there."""
    queue = users
    for node in queue:
        value = node.meta.get("val")
        parts: Any = value if isinstance(value, (list, tuple)) else (value,)
        tensors = [part for part in parts if isinstance(part, Tensor) and storage_of(part) == place]
        if node.op != "call_function" or not tensors:
            continue
        args, kwargs = cast(Any, map_arg((node.args, node.kwargs), lambda n: n.meta.get("val")))
        with cast(Any, tensors[0]).fake_mode:
            node.meta["val"] = cast(Any, node.target)(*args, **kwargs)
        queue.extend(node.users)


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
    if node.target is not torch.ops.aten.copy_.default or "copy_" in str(node.meta.get("torch_fn")):
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
    """An identity of the storage behind a (fake) tensor."""
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
