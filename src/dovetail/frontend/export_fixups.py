"""Rewrites of an exported graph that keep gradients, strides and kernels as they are in eager mode.

Before decomposition: `flatten_no_grad` inlines the blocks of `torch.no_grad()`, which decomposition would lose;
`multiply_dropped` does without masks that eager mode does not draw; `keep_histories` rewrites in-place operators whose
functional form has other gradients or strides. After decomposition: `choose_kernel_as_eager` selects the batch norm of eager
mode on CUDA, `make_differentiable` gives whole-tensor writes a derivative, and `make_bases_dense` makes the bases of views
that custom operators write independent of their strides.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import combinations
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.frontend.detached_writes import COMPARISONS, STORAGE_WRITES
from dovetail.frontend.export_aliases import (
    AliasGroups,
    alias_groups,
    alias_groups_with_gradients,
    has_symbols,
    insert_call,
    know_readers,
    refused,
    replace_node,
    returned_operand,
    source_meta,
    state_requires_grad,
    storage_at,
    storage_of,
    written_storages,
)
from dovetail.ir.graph_module import copy_node
from dovetail.ir.schema import named_arguments, op_name, value_of, written_operands
from dovetail.ir.weight_guard import is_dense

GRAD_MODE_BLOCK = "wrap_with_set_grad_enabled"


def flatten_no_grad(program: ExportedProgram) -> None:
    """Inline every gradient-mode block and detach what leaves a `no_grad` one.

    Edits the program's graph and the graphs inside it. Values that leave a block get other names.
    """
    for owner in [m for m in program.graph_module.modules() if isinstance(m, GraphModule)]:
        blocks = [n for n in owner.graph.nodes if getattr(n.target, "__name__", "") == GRAD_MODE_BLOCK]
        if blocks:
            know_readers(owner.graph)
            for block in blocks:
                _inline_block(owner, block)
            owner.recompile()


def _inline_block(owner: GraphModule, block: Node) -> None:
    enabled, body_node, *operands = cast(Any, block.args)
    body = cast(GraphModule, owner.get_submodule(body_node.target))
    graph = owner.graph
    mutates = any(_is_mutating(n) for n in body.graph.nodes)
    outer = list(operands)
    with graph.inserting_before(block):
        if not enabled and mutates:
            operands = [_detached(graph, n) if _holds_tensor(n) else n for n in operands]
        results = _splice(owner, body, operands, block)
        for user in list(block.users):
            value = results[cast(int, user.args[1])]
            if not enabled and mutates:
                value = _written_operand(value, dict(zip(operands, outer, strict=True)))
            elif not enabled and isinstance(value, Node) and _holds_tensor(value):
                value = _fresh(graph, _detached(graph, value), operands, block)
            _replace_item(user, value)
    graph.erase_node(block)
    if not body_node.users:
        graph.erase_node(body_node)


def _written_operand(value: Any, outer: dict[Any, Any]) -> Any:
    """Return the operand of a block itself if a result is that tensor after writes, with the history it had before."""
    at = value
    while isinstance(at, Node) and at not in outer and _is_mutating(at):
        at = returned_operand(at)
    return outer[at] if isinstance(at, Node) and at in outer else value


def _splice(owner: GraphModule, body: GraphModule, operands: list[Any], block: Node) -> list[Any]:
    """Copy the nodes of `body` before `block`, and return what its output names."""
    copies: dict[Node, Any] = {}
    unbound = iter(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(unbound)
        elif node.op == "output":
            results = map_arg(node.args[0], copies.__getitem__)
            return list(results) if isinstance(results, (list, tuple)) else [results]
        else:
            new = copy_node(owner.graph, node, copies.__getitem__)
            if node.op == "get_attr":
                new.target = _moved(owner, body, cast(str, node.target))
            if "nn_module_stack" not in new.meta and "nn_module_stack" in block.meta:
                new.meta["nn_module_stack"] = block.meta["nn_module_stack"]
            copies[node] = new
    return []


def _moved(owner: GraphModule, body: GraphModule, target: str) -> str:
    """Set an attribute of `body` on `owner` too, and return its name there, which is not used yet."""
    name = base = target.replace(".", "_")
    count = 0
    while hasattr(owner, name):
        count += 1
        name = f"{base}_{count}"
    setattr(owner, name, operator.attrgetter(target)(body))
    return name


def _replace_item(item: Node, value: Any) -> None:
    """Let readers of a `getitem` of a block have `value`, which may be a constant."""
    for reader in list(item.users):
        arguments = map_arg((reader.args, reader.kwargs), lambda node: value if node is item else node)
        reader.args, reader.kwargs = cast(Any, arguments)
    item.graph.erase_node(item)


def _detached(graph: Graph, node: Node) -> Node:
    new = graph.call_function(torch.ops.aten.detach.default, (node,))
    value = node.meta["val"]
    new.meta = {**source_meta(node), "val": value.detach() if value.requires_grad else value}
    return new


def _fresh(graph: Graph, node: Node, operands: list[Any], block: Node) -> Node:
    """Return a clone of a result of a block if something is written into it after the block, with gradients.

    A write reaches the base of a view, and an alias of that behind `detach` has no gradients.
    """
    storage = storage_of(node.meta["val"])
    if storage in map(storage_at, operands) or not any(storage in written_storages(n) for n in _after(block)):
        return node
    new = graph.call_function(torch.ops.aten.clone.default, (node,))
    new.meta = dict(node.meta)
    return new


def _after(node: Node) -> Iterator[Node]:
    while (node := node.next).op != "root":
        yield node


def _holds_tensor(value: object) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor)


def _is_mutating(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


_aten = torch.ops.aten
_NATIVE_BATCH_NORM = _aten._native_batch_norm_legit_functional.default
_BATCH_NORM = _aten._batch_norm_with_update_functional.default

# Positions of the results of the first in the second: output, mean, inverse deviation, new statistics.
_RESULT_POSITIONS = {0: 0, 1: 1, 2: 2, 3: 4, 4: 5}


def choose_kernel_as_eager(graph: Graph) -> None:
    """Replace the decomposed batch norm on CUDA by the one that picks cuDNN where eager mode does.

    The decomposition always takes the native kernel, which rounds differently. On a CPU there is but one.
    """
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    for node in graph.find_nodes(op="call_function", target=_NATIVE_BATCH_NORM):
        values = cast("tuple[Any, ...]", node.meta.get("val") or ())
        arguments = named_arguments(node)
        on_gpu = bool(values) and isinstance(values[0], FakeTensor) and values[0].device.type == "cuda"
        only_items = all(user.target is operator.getitem for user in node.users)
        if not on_gpu or not only_items or arguments["training"] is not True:
            continue
        with values[0].fake_mode:
            reserve = torch.empty(0, dtype=torch.uint8, device=values[0].device)
        new_values = (*values[:3], reserve, *values[3:])
        operands = tuple(arguments[name] for name in names)
        new = insert_call(node, _BATCH_NORM, operands, value=new_values, meta=node.meta)
        for user in list(node.users):
            user.args = (new, _RESULT_POSITIONS[cast(int, user.args[1])])
        graph.erase_node(node)


_COPY = _aten.copy.default
_VIEW = _aten.view.default
_FOREACH_WITHOUT_DERIVATIVE: dict[Any, Any] = {
    _aten._foreach_zero_.default: _aten.zero_.default,
    _aten._foreach_copy_.default: _aten.copy_.default,
}


def keep_histories(program: ExportedProgram) -> None:
    """Rewrite in-place operators whose functional form has another gradient; edits the program's graph."""
    _split_foreach(program)
    _copy_comparisons(program)
    _copy_through_alias(program)
    _fill_diagonals(program)
    _keep_strides(program.graph)


def make_differentiable(graph: Graph) -> None:
    """Replace `copy` of floating numbers by operators that compute the same, with gradients and strides as in place.

    Where sizes that are not numbers would have to be spread it stays.
    """
    for node in graph.find_nodes(op="call_function", target=_COPY):
        target, source = cast("tuple[Node, Node]", node.args[:2])
        old, new = target.meta.get("val"), source.meta.get("val")
        if not isinstance(old, Tensor) or not isinstance(new, Tensor) or not old.dtype.is_floating_point:
            continue
        is_expanded = tuple(new.shape) != tuple(old.shape)
        if is_expanded and any(isinstance(size, SymInt) for size in old.shape):
            continue
        if new.dtype != old.dtype or new.device != old.device:
            options = {"dtype": old.dtype, "device": old.device}
            source = insert_call(node, _aten._to_copy.default, (source,), options)
        if is_expanded:
            source = insert_call(node, _aten.expand.default, (source, list(old.shape)))
        if old.dim():
            # Its value is that of the copy: torch 2.11 cannot infer it where strides vary with the data.
            result = insert_call(node, _aten.slice_scatter.default, (target, source), value=node.meta["val"])
        else:
            row, element = (insert_call(node, _VIEW, (n, [1])) for n in (target, source))
            row = insert_call(node, _aten.slice_scatter.default, (row, element))
            result = insert_call(node, _VIEW, (row, []))
        result.meta = dict(node.meta)
        replace_node(node, result)


def multiply_dropped(program: ExportedProgram) -> None:
    """Write dropout of all elements as the product with zero that it is in eager mode, where no mask is drawn."""
    modules = [m for m in program.graph_module.modules() if isinstance(m, GraphModule)]
    for module in modules:
        for node in module.graph.find_nodes(op="call_function", target=_aten.dropout.default):
            source, probability, trains = node.args
            if trains is True and probability == 1:
                replace_node(node, insert_call(node, _aten.mul.Tensor, (source, 0), meta=node.meta))


def _fill_diagonals(program: ExportedProgram) -> None:
    """Fill diagonals through `diagonal` views; edits the graphs of blocks too.

    `fill_diagonal_` itself decomposes into `as_strided_scatter`, which has wrong gradients in torch and writes to other
    elements where the tensor's strides are not those of the export.
    """
    modules = [m for m in program.graph_module.modules() if isinstance(m, GraphModule)]
    calls = [
        n
        for m in modules
        for n in m.graph.find_nodes(op="call_function", target=_aten.fill_diagonal_.default)
    ]
    for graph in dict.fromkeys(n.graph for n in calls):
        know_readers(graph)
    for node in calls:
        arguments = named_arguments(node)
        tensor = cast(Node, arguments["self"])
        for view in _diagonal_views(node, tensor, wrap=bool(arguments.get("wrap"))):
            insert_call(node, _aten.fill_.Scalar, (view, arguments["fill_value"]))
        replace_node(node, tensor)
    for module in modules[1:]:
        module.recompile()


def _diagonal_views(node: Node, tensor: Node, *, wrap: bool) -> list[Node]:
    """Views of what `fill_diagonal_` fills; with `wrap` the diagonal goes on in row width + 1 of a tall matrix."""
    value = cast(Tensor, tensor.meta["val"])
    height, width = value.shape[:2]
    if wrap and value.dim() == 2:
        if type(width) is int and is_contiguous_or_false(value):
            flat = insert_call(node, _VIEW, (tensor, [-1]))
            return [insert_call(node, _aten.slice.Tensor, (flat, 0, 0, None, width + 1))]
        if isinstance(height, SymInt) or isinstance(width, SymInt) or height > 2 * (width + 1):
            raise refused(
                "forward wraps a diagonal around a tensor that is not contiguous or whose width is dynamic, "
                "which a functional graph cannot do",
                node,
                "Call it on a contiguous tensor, or with wrap=False on slices of rows.",
            )
        parts = [tensor]
        if height > width + 1:
            parts.append(insert_call(node, _aten.slice.Tensor, (tensor, 0, width + 1)))
        return [insert_call(node, _aten.diagonal.default, (part,)) for part in parts]
    view = insert_call(node, _aten.diagonal.default, (tensor,))
    for _ in range(value.dim() - 2):
        view = insert_call(node, _aten.diagonal.default, (view, 0, 0, -1))
    return [view]


def _keep_strides(graph: Graph) -> None:
    """Replace in-place operators whose functional form returns other strides than the operand has by a copy.

    Functionalization replaces the operand by that result, and so changes the strides of its base.
    """
    for node in graph.nodes:
        functional = _functional_form(node)
        operand = node.args[0] if functional is not None and node.args else None
        value = value_of(operand)
        if functional is None or not isinstance(value, FakeTensor) or not _is_permuted(value):
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with value.fake_mode, torch.no_grad():
            result = functional(*args, **kwargs)
        if not isinstance(result, Tensor) or _effective_strides(result) == _effective_strides(value):
            continue
        new = insert_call(node, functional, node.args, node.kwargs, result, node.meta)
        node.target, node.args, node.kwargs = _aten.copy_.default, (operand, new), {}


def _functional_form(node: Node) -> OpOverload | None:
    """Return the operator that returns what an in-place one writes; None for random draws, which depend on strides."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or "out" in node.kwargs:
        return None
    name = op_name(node.target)
    if written_operands(node) != list(node.args[:1]) or not name.endswith("_"):
        return None
    if name in ("copy_", *STORAGE_WRITES) or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    functional = getattr(getattr(_aten, name[:-1], None), target._overloadname, None)
    if not isinstance(functional, OpOverload) or _parameters(functional) != _parameters(target):
        return None
    is_view = any(result.alias_info is not None for result in functional._schema.returns)
    return None if is_view else functional


def _parameters(op: OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments]


def _is_permuted(value: Tensor) -> bool:
    if value.layout is not torch.strided or is_contiguous_or_false(value):
        return False
    return has_symbols(value) or is_dense(value)


def _effective_strides(value: Tensor) -> list[str]:
    """The strides of dimensions that have more than one element, as text: comparing symbols would add guards."""
    sizes = zip(value.shape, value.stride(), strict=True)
    return [str(stride) for size, stride in sizes if type(size) is not int or size != 1]


def make_bases_dense(graph: Graph) -> None:
    """Let views that custom operators write be of memory without gaps or offset; edits a decomposed graph.

    Functionalization describes such a view by the strides and the storage offset that its base had during tracing. In a
    call the base may have others: a copy of an input with gaps, an input of other strides, a result whose fake kernel
    returned other strides than the real one.
    """
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.auto_functionalized_v2, sort=True
    ):
        kwargs = dict(node.kwargs)
        bases = list(cast("list[Node]", kwargs["_all_bases"]))
        copies: dict[int, Node] = {}
        for key in [k for k in kwargs if k.endswith("_base_index") and kwargs[k] is not None]:
            view, index = key.removesuffix("_base_index"), cast(int, kwargs[key])
            value = cast(Tensor, bases[index].meta["val"])
            offset = cast(int, value.storage_offset())
            if f"{view}_slice_dim" in kwargs and offset:
                start = offset // value.stride(cast(int, kwargs[f"{view}_slice_dim"]))
                for bound in (f"{view}_slice_start", f"{view}_slice_end"):
                    kwargs[bound] = cast(int, kwargs[bound]) - start
            if f"{view}_stride" not in kwargs:
                continue
            order = _memory_order(value)
            if order is None:
                raise refused(
                    f"forward lets {node.args[0]} write a view of a tensor whose memory has gaps",
                    node,
                    "Let it write a clone of the view, and copy_ that into the view.",
                )
            kwargs[f"{view}_storage_offset"] = cast(int, kwargs[f"{view}_storage_offset"]) - offset
            if index not in copies:
                copies[index] = _copy_in_order(node, bases[index], order)
        kwargs["_all_bases"] = [copies.get(i, base) for i, base in enumerate(bases)]
        node.kwargs = kwargs


def _memory_order(value: Tensor) -> list[int] | None:
    """Return the dimensions from the outermost in memory to the innermost; None if the memory has gaps."""
    if has_symbols(value):
        return list(range(value.dim())) if is_contiguous_or_false(value) else None
    return sorted(range(value.dim()), key=lambda d: -value.stride(d)) if is_dense(value) else None


def _copy_in_order(node: Node, base: Node, order: list[int]) -> Node:
    """Insert a copy of `base` with its dimensions in this order in memory."""
    options = {"memory_format": torch.contiguous_format}
    if order == sorted(order):
        return insert_call(node, _aten.clone.default, (base,), options)
    permuted = insert_call(node, _aten.permute.default, (base, order))
    copy = insert_call(node, _aten.clone.default, (permuted,), options)
    return insert_call(node, _aten.permute.default, (copy, [order.index(d) for d in range(len(order))]))


def _split_foreach(program: ExportedProgram) -> None:
    """Let an in-place `_foreach` operator write its tensors one after the other, as it does in eager mode.

    The functional form reads all of them before it writes, and lets every result require gradients if one does.
    """
    graph = program.graph
    calls = [n for n in graph.nodes if op_name(n.target).startswith("_foreach_") and written_operands(n)]
    groups = alias_groups(program) if calls else AliasGroups()
    for node in calls:
        written = written_operands(node)
        if any(groups.may_overlap(a, b) for a, b in combinations(written, 2)):
            continue
        target: Any = _FOREACH_WITHOUT_DERIVATIVE.get(node.target)
        for i, tensor in enumerate(written):
            with graph.inserting_before(node):
                args = [_one_of(graph, argument, i) for argument in node.args]
                kwargs = {name: _one_of(graph, argument, i) for name, argument in node.kwargs.items()}
                if target is not None:
                    args = [a[0] if isinstance(a, list) else a for a in args]
                new = graph.call_function(target or node.target, tuple(args), cast(Any, kwargs))
            new.meta = dict(node.meta)
            if target is not None:
                new.meta["val"] = tensor.meta["val"]
            reads = [n for n in new.all_input_nodes if n is not tensor]
            if any(groups.may_overlap(a, b) for a in written[:i] for b in reads):
                raise refused(
                    f"forward reads a tensor in a call of {node.target} that the same call writes before, and the "
                    "gradient of that in torch is not the gradient of what it computes",
                    node,
                    "Write to one after the other.",
                )
        graph.erase_node(node)


def _one_of(graph: Graph, argument: Any, position: int) -> Any:
    """Return an argument of a `_foreach` operator for one of its tensors."""
    if isinstance(argument, (list, tuple)):
        return [cast("list[Any]", argument)[position]]
    if not isinstance(argument, Node) or argument.meta["val"].dim() == 0:
        return argument
    part = graph.call_function(_aten.slice.Tensor, (argument, 0, position, position + 1))
    value = argument.meta["val"]
    with value.fake_mode:
        part.meta["val"] = value.detach()[position : position + 1]
    return part


def _copy_comparisons(program: ExportedProgram) -> None:
    """Replace in-place comparisons of values with gradients by a copy, which has the same gradient: zeros."""
    if not any(op_name(n.target) in COMPARISONS for n in program.graph.nodes):
        return
    calls = {
        w.node: w.operand
        for groups in (alias_groups(program), alias_groups_with_gradients(program))
        for w in groups.writes
        if op_name(w.node.target) in COMPARISONS and groups.had_gradient(w.group, w) and not w.has_gradient
    }
    for node, operand in calls.items():
        packet = getattr(_aten, op_name(node.target)[:-1])
        compare = getattr(packet, cast(OpOverload, node.target)._overloadname)
        value = operand.meta["val"]
        with value.fake_mode:
            compared = torch.empty_like(value, dtype=torch.bool)
        result = insert_call(node, compare, node.args, node.kwargs, compared, node.meta)
        copy = insert_call(
            node, _aten.copy_.default, (operand, result), value=node.meta["val"], meta=node.meta
        )
        replace_node(node, copy)


def _copy_through_alias(program: ExportedProgram) -> None:
    """Copy into a buffer through an alias unless its new value is exactly the value that is copied.

    torch.export redirects the readers of the buffer to the source of the last copy, without the conversion to the
    buffer's dtype, sizes and strides, and without the history that the buffer had.
    """
    graph = program.graph
    if not graph.find_nodes(op="call_function", target=_aten.copy_.default):
        return
    groups = alias_groups(program)
    names = state_requires_grad(program)
    state = {storage_of(n.meta["val"]) for n in graph.find_nodes(op="placeholder") if n.name in names}
    writes = [w for w in groups.writes if w.node.target is _aten.copy_.default and w.group[0] in state]
    calls = [w for w in writes if groups.had_gradient(w.group, w) or not _same_form(*w.node.args[:2])]
    for node, operand in [(write.node, write.operand) for write in calls]:
        alias = insert_call(node, _aten.alias.default, (operand,), value=node.meta["val"], meta=node.meta)
        node.replace_input_with(operand, alias)


def _same_form(a: Any, b: Any) -> bool:
    values = [value_of(n) for n in (a, b)]
    if not all(isinstance(v, Tensor) for v in values):
        return False
    forms = [(v.dtype, v.device, tuple(v.shape), v.stride()) for v in cast("list[Tensor]", values)]
    return forms[0] == forms[1]
