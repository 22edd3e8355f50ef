"""Writes of whole tensors in forms that functionalisation keeps the values and gradients of."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.graph.capturing.alias_groups import (
    Groups,
    grouped,
    grouped_with_gradients,
    operator_name,
    refused,
    same_memory,
    share,
    state_requires_grad,
    written_operands,
)
from dovetail.graph.capturing.aliasing import know_readers, storage_of
from dovetail.graph.capturing.autograd_aliases import COMPARISONS, STORAGE_WRITES
from dovetail.graph.weight_guard import is_dense

_COPY = torch.ops.aten.copy.default
_VIEW = torch.ops.aten.view.default
_aten = torch.ops.aten
_FOREACH_WITHOUT_DERIVATIVE: dict[Any, Any] = {
    _aten._foreach_zero_.default: _aten.zero_.default,
    _aten._foreach_copy_.default: _aten.copy_.default,
}
_KEPT = ("stack_trace", "nn_module_stack", "custom")


def keep_histories(program: ExportedProgram) -> None:
    """Rewrite in-place operators whose functional form has another gradient; edits the program's graph."""
    edited = [_split_foreach(program), _copy_comparisons(program), _copy_through_alias(program)]
    if any([*edited, _fill_diagonals(program), _keep_strides(program.graph)]):
        program.graph_module.recompile()


def make_differentiable(graph: Graph) -> None:
    """Replace `copy` of floating numbers by operators that compute the same, with gradients and strides as in place.

    Where sizes that are not numbers would have to be spread it stays.
    """
    for node in graph.find_nodes(op="call_function", target=_COPY):
        target, source = cast("tuple[Node, Node]", node.args[:2])
        has, reads = target.meta.get("val"), source.meta.get("val")
        if not isinstance(has, Tensor) or not isinstance(reads, Tensor) or not has.dtype.is_floating_point:
            continue
        is_spread = tuple(reads.shape) != tuple(has.shape)
        if is_spread and any(isinstance(size, SymInt) for size in has.shape):
            continue
        with graph.inserting_before(node):
            if reads.dtype != has.dtype or reads.device != has.device:
                form = {"dtype": has.dtype, "device": has.device}
                source = _call(graph, node, torch.ops.aten._to_copy.default, (source,), form)
            if is_spread:
                source = _call(graph, node, torch.ops.aten.expand.default, (source, list(has.shape)), {})
            if has.dim():
                # Its value is that of the copy: torch 2.11 cannot infer it where strides vary with the data.
                new = graph.call_function(torch.ops.aten.slice_scatter.default, (target, source))
            else:
                row, new = (_call(graph, node, _VIEW, (n, [1]), {}) for n in (target, source))
                row = _call(graph, node, torch.ops.aten.slice_scatter.default, (row, new), {})
                new = _call(graph, node, _VIEW, (row, []), {})
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _fill_diagonals(program: ExportedProgram) -> bool:
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
        names = [a.name for a in node.target._schema.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        tensor = cast(Node, given["self"])
        with node.graph.inserting_before(node):
            for view in _diagonal_views(node, tensor, wrap=bool(given.get("wrap"))):
                fill = node.graph.call_function(_aten.fill_.Scalar, (view, given["fill_value"]))
                fill.meta = {
                    **{key: node.meta[key] for key in _KEPT if key in node.meta},
                    "val": view.meta["val"],
                }
        node.replace_all_uses_with(tensor)
        node.graph.erase_node(node)
    for module in modules[1:]:
        module.recompile()
    return bool(calls)


def _diagonal_views(node: Node, tensor: Node, *, wrap: bool) -> list[Node]:
    """Views of what `fill_diagonal_` fills; with `wrap` the diagonal goes on in row width + 1 of a tall matrix."""
    graph = node.graph
    value = cast(Tensor, tensor.meta["val"])
    height, width = value.shape[:2]
    if wrap and value.dim() == 2:
        if type(width) is int and is_contiguous_or_false(value):
            flat = _call(graph, node, _VIEW, (tensor, [-1]), {})
            return [_call(graph, node, _aten.slice.Tensor, (flat, 0, 0, None, width + 1), {})]
        if isinstance(height, SymInt) or isinstance(width, SymInt) or height > 2 * (width + 1):
            raise refused(
                "forward wraps a diagonal around a tensor that is not contiguous or whose width is dynamic, "
                "which a functional graph cannot do",
                node,
                "Call it on a contiguous tensor, or with wrap=False on slices of rows.",
            )
        parts = [tensor]
        if height > width + 1:
            parts.append(_call(graph, node, _aten.slice.Tensor, (tensor, 0, width + 1), {}))
        return [_call(graph, node, _aten.diagonal.default, (part,), {}) for part in parts]
    view = _call(graph, node, _aten.diagonal.default, (tensor,), {})
    for _ in range(value.dim() - 2):
        view = _call(graph, node, _aten.diagonal.default, (view, 0, 0, -1), {})
    return [view]


def _keep_strides(graph: Graph) -> bool:
    """Write out in-place operators whose functional form returns other strides than those of what they write.

    Functionalisation puts that result in place of what was written, and so changes the strides of its base.
    """
    is_changed = False
    for node in graph.nodes:
        operator = _functional_form(node)
        operand = node.args[0] if operator is not None and node.args else None
        value = operand.meta.get("val") if isinstance(operand, Node) else None
        if operator is None or not isinstance(value, FakeTensor) or not _is_permuted(value):
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with value.fake_mode, torch.no_grad():
            result = operator(*args, **kwargs)
        if not isinstance(result, Tensor) or _effective_strides(result) == _effective_strides(value):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(operator, node.args, node.kwargs)
        new.meta = {**node.meta, "val": result}
        node.target, node.args, node.kwargs = _aten.copy_.default, (operand, new), {}
        is_changed = True
    return is_changed


def _functional_form(node: Node) -> OpOverload | None:
    """The operator that returns what an in-place one writes; none for random draws, which depend on strides."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or "out" in node.kwargs:
        return None
    name = operator_name(node)
    if written_operands(node) != list(node.args[:1]) or not name.endswith("_"):
        return None
    if name in ("copy_", *STORAGE_WRITES) or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    operator = getattr(getattr(_aten, name[:-1], None), target._overloadname, None)
    if not isinstance(operator, OpOverload) or _parameters(operator) != _parameters(target):
        return None
    is_view = any(result.alias_info is not None for result in operator._schema.returns)
    return None if is_view else operator


def _parameters(operator: OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in operator._schema.arguments]


def _is_permuted(value: Tensor) -> bool:
    if value.layout is not torch.strided or is_contiguous_or_false(value):
        return False
    return any(isinstance(n, SymInt) for n in (*value.shape, *value.stride())) or is_dense(value)


def _effective_strides(value: Tensor) -> list[str]:
    """The strides of dimensions that have more than one element, as text: comparing symbols would add guards."""
    sizes = zip(value.shape, value.stride(), strict=True)
    return [str(stride) for size, stride in sizes if type(size) is not int or size != 1]


def make_bases_dense(graph: Graph) -> None:
    """Let views that custom operators write be of memory without gaps or offset; edits a decomposed graph.

    Functionalisation describes such a view by the strides and the storage offset that its base had while it traced. The
    base may lie otherwise in a call: a copy of an input with gaps, an input of other strides, a result whose fake kernel
    had other strides than the real one.
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
                with graph.inserting_before(node):
                    copies[index] = _laid_out(graph, node, bases[index], order)
        kwargs["_all_bases"] = [copies.get(i, base) for i, base in enumerate(bases)]
        node.kwargs = kwargs


def _memory_order(value: Tensor) -> list[int] | None:
    """The dimensions from the outermost in memory to the innermost; None where elements do not lie side by side."""
    if any(isinstance(n, SymInt) for n in (*value.shape, *value.stride())):
        return list(range(value.dim())) if is_contiguous_or_false(value) else None
    return sorted(range(value.dim()), key=lambda d: -value.stride(d)) if is_dense(value) else None


def _laid_out(graph: Graph, node: Node, base: Node, order: list[int]) -> Node:
    """A copy of `base` with its dimensions in this order in memory."""
    form = {"memory_format": torch.contiguous_format}
    if order == sorted(order):
        return _call(graph, node, _aten.clone.default, (base,), form)
    permuted = _call(graph, node, _aten.permute.default, (base, order), {})
    copy = _call(graph, node, _aten.clone.default, (permuted,), form)
    return _call(graph, node, _aten.permute.default, (copy, [order.index(d) for d in range(len(order))]), {})


def _call(graph: Graph, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    new = graph.call_function(target, args, kwargs)
    new.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
    with next(value for value in values if isinstance(value, FakeTensor)).fake_mode:
        new.meta["val"] = target(*values, **kwargs)
    return new


def _groups(program: ExportedProgram) -> Groups:
    return grouped(program.graph, state_requires_grad(program))


def _split_foreach(program: ExportedProgram) -> bool:
    """Let an in-place `_foreach` operator write its tensors one after the other, as it does in eager mode.

    The functional form reads all of them before it writes, and lets every result require gradients if one does.
    """
    graph = program.graph
    calls = [n for n in graph.nodes if operator_name(n).startswith("_foreach_") and written_operands(n)]
    groups = _groups(program) if calls else Groups()
    for node in calls:
        written = written_operands(node)
        if any(same_memory(groups, a, b) and share(a, b) for i, a in enumerate(written) for b in written[:i]):
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
            if any(same_memory(groups, a, b) and share(a, b) for a in written[:i] for b in reads):
                raise refused(
                    f"forward reads a tensor in a call of {node.target} that the same call writes before, and the "
                    "gradient of that in torch is not the gradient of what it computes",
                    node,
                    "Write to one after the other.",
                )
        graph.erase_node(node)
    return bool(calls)


def _one_of(graph: Graph, argument: Any, position: int) -> Any:
    """What an argument of a `_foreach` operator is for one of its tensors."""
    if isinstance(argument, (list, tuple)):
        return [cast("list[Any]", argument)[position]]
    if not isinstance(argument, Node) or argument.meta["val"].dim() == 0:
        return argument
    part = graph.call_function(_aten.slice.Tensor, (argument, 0, position, position + 1))
    value = argument.meta["val"]
    with value.fake_mode:
        part.meta["val"] = value.detach()[position : position + 1]
    return part


def _copy_comparisons(program: ExportedProgram) -> bool:
    """Write out comparisons in place of values with gradients as a copy, which has the same gradient: zeros."""
    graph = program.graph
    if not any(operator_name(n) in COMPARISONS for n in graph.nodes):
        return False
    calls = {
        w.node: w.operand
        for groups in (_groups(program), grouped_with_gradients(program))
        for w in groups.writes
        if operator_name(w.node) in COMPARISONS and groups.had_gradient(w.group, w) and not w.has_gradient
    }
    for node, operand in calls.items():
        compare = getattr(
            getattr(_aten, operator_name(node)[:-1]), cast(OpOverload, node.target)._overloadname
        )
        with graph.inserting_before(node):
            result = graph.call_function(compare, node.args, node.kwargs)
            copy = graph.call_function(_aten.copy_.default, (operand, result))
        value = operand.meta["val"]
        with value.fake_mode:
            compared = torch.empty_like(value, dtype=torch.bool)
        result.meta = {**node.meta, "val": compared}
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy)
        graph.erase_node(node)
    return bool(calls)


def _copy_through_alias(program: ExportedProgram) -> bool:
    """Copy into a buffer through an alias where its new value is not in every way the value that is copied.

    torch.export lets what reads the buffer read the source of the last copy instead, without the conversion to the
    buffer's dtype, sizes and strides, and without the history that the buffer had.
    """
    graph = program.graph
    if not graph.find_nodes(op="call_function", target=_aten.copy_.default):
        return False
    groups = _groups(program)
    names = state_requires_grad(program)
    state = {storage_of(n.meta["val"]) for n in graph.find_nodes(op="placeholder") if n.name in names}
    writes = [w for w in groups.writes if w.node.target is _aten.copy_.default and w.group[0] in state]
    calls = [w for w in writes if groups.had_gradient(w.group, w) or not _same_form(*w.node.args[:2])]
    for write in calls:
        with graph.inserting_before(write.node):
            alias = graph.call_function(_aten.alias.default, (write.operand,))
        alias.meta = dict(write.node.meta)
        write.node.replace_input_with(write.operand, alias)
    return bool(calls)


def _same_form(a: Any, b: Any) -> bool:
    values = [n.meta.get("val") if isinstance(n, Node) else None for n in (a, b)]
    if not all(isinstance(v, Tensor) for v in values):
        return False
    forms = [(v.dtype, v.device, tuple(v.shape), v.stride()) for v in cast("list[Tensor]", values)]
    return forms[0] == forms[1]
