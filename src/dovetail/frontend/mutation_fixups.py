"""Rewrites of calls that write to an operand, so that functionalization keeps their results.

Functionalization replaces an operand that is written by the result of the functional operator, whatever the shape and
strides of that are. Eager mode writes into the operand as it is. Three kinds of calls differ:

- `out=` variants. Eager mode resizes `out` if the shape is another, which for a view is another part of its memory: that
  is refused. If the strides may differ, the call writes into contiguous memory that is copied to `out`.
- Custom operators that write an operand and return it, which functionalization does not accept: they are called in a
  functional form that is defined here, and in the original form again after decomposition.
- Random draws into memory that is not contiguous, whose order is that of memory: they draw into new memory of the same
  strides, and are in place again after decomposition.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from dovetail.errors import CaptureError
from dovetail.frontend.export_aliases import (
    RANDOM_FILLS,
    alias_groups_with_gradients,
    fresh_like,
    has_symbols,
    insert_call,
    refused,
    replace_node,
    storage_at,
    storage_of,
    trace_meta,
)
from dovetail.ir.meta_keys import DRAWS_IN_PLACE
from dovetail.ir.schema import named_arguments, op_name, to_args_kwargs, value_of
from dovetail.ir.weight_guard import is_dense

_aten = torch.ops.aten


def refuse_resizing(program: ExportedProgram) -> None:
    """Raise CaptureError for a call that resizes `out`, unless that is a new, empty tensor without other views."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, GraphModule)]
    for node in [n for graph in graphs for n in graph.nodes]:
        for name, result in _out_results(node).items():
            out = value_of(node.kwargs[name])
            if _differs_in_shape(out, result) and not _is_new_and_empty(out, graphs):
                raise refused(
                    f"forward gives {node.target} an `{name}` of shape {tuple(out.shape)} for a result of shape "
                    f"{tuple(result.shape)}, and a graph cannot resize a tensor",
                    node,
                    f"Give a tensor of the right shape, or leave `{name}` out.",
                )


def _out_results(node: Node) -> dict[str, Any]:
    """Return the result of a call for each `out` argument."""
    parts = _parts(node.meta.get("val"))
    return {name: parts[at] for name, at in _out_positions(node).items()}


def _parts(value: Any) -> list[Any]:
    return list(cast("Sequence[Any]", value)) if isinstance(value, (list, tuple)) else [value]


def _out_positions(node: Node) -> dict[str, int]:
    """Return the position of the result for each `out` argument; a schema may have them in another order."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return {}
    schema = node.target._schema
    returned = [None if r.alias_info is None else r.alias_info.before_set for r in schema.returns]
    outs = {a.name: cast(Any, a.alias_info).before_set for a in schema.arguments if a.is_out}
    return {
        name: returned.index(alias)
        for name, alias in outs.items()
        if alias in returned and isinstance(node.kwargs.get(name), Node)
    }


def _differs_in_shape(out: Any, result: Any) -> bool:
    if not isinstance(out, Tensor) or not isinstance(result, Tensor):
        return False
    # As text, since comparing symbols would add guards.
    return [str(size) for size in out.shape] != [str(size) for size in result.shape]


def _is_new_and_empty(value: Tensor, graphs: list[Graph]) -> bool:
    storage = storage_of(value)
    nodes = [n for graph in graphs for n in graph.nodes if storage_at(n) == storage]
    nodes = [n for n in nodes if n.op != "placeholder" or n.graph is graphs[0]]
    is_new = nodes[0].op == "call_function" and _is_empty(nodes[0].meta["val"])
    return is_new and not any(_is_empty(n.meta["val"]) for n in nodes[1:])


def _is_empty(value: Tensor) -> bool:
    return any(type(size) is int and size == 0 for size in value.shape)


def keep_strides(graph: Graph) -> None:
    """Let calls write into contiguous memory that is copied to `out`; edits the graph.

    Edited are calls whose functional operator may return other strides, or whose `out` holds random numbers, which
    nothing else would keep.
    """
    drawn = {storage_at(n) for n in graph.nodes if is_random(n)} - {None}
    calls = [n for n in graph.nodes if not is_random(n) and _out_positions(n)]
    outs = {n: {storage_at(n.kwargs[name]) for name in _out_positions(n)} for n in calls}
    for node in [n for n in calls if _may_differ_in_strides(n) or outs[n] & drawn]:
        _write_into_fresh_memory(node)


def is_random(node: Node) -> bool:
    """Return whether an operator draws random numbers, according to its tags."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _may_differ_in_strides(node: Node) -> bool:
    results = _out_results(node)
    values = [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [v for v in values if isinstance(v, Tensor) and v.layout is torch.strided]
    if any(map(has_symbols, tensors)):
        return False
    if any(_differs_in_shape(value_of(node.kwargs[name]), result) for name, result in results.items()):
        return False
    return not all(v.is_contiguous() for v in tensors)


def _write_into_fresh_memory(node: Node) -> None:
    for name, position in _out_positions(node).items():
        operand = cast(Node, node.kwargs[name])
        options = {"memory_format": torch.contiguous_format}
        fresh = insert_call(node, _aten.empty_like.default, (operand,), options)
        value = fresh.meta["val"]
        node.update_kwarg(name, fresh)
        items = [node]
        if isinstance(node.meta["val"], (list, tuple)):
            items = [user for user in node.users if user.args[1] == position] or [_item(node, position)]
        for item in items:
            item.meta["val"] = value
            with node.graph.inserting_after(item):
                copy = node.graph.call_function(_aten.copy_.default, (operand, item))
            copy.meta = {**trace_meta(node), "val": operand.meta["val"]}
            item.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _item(node: Node, position: int, value: Any = None) -> Node:
    with node.graph.inserting_after(node):
        item = node.graph.call_function(operator.getitem, (node, position))
    item.meta = {**trace_meta(node), "val": value}
    return item


def _insert_with_results(
    node: Node, target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Sequence[Any]
) -> list[Node]:
    """Insert a call before `node` that returns `values`, and return the node of each."""
    if len(values) == 1:
        return [insert_call(node, target, args, kwargs, values[0])]
    call = insert_call(node, target, args, kwargs, tuple(values))
    return [_item(call, i, value) for i, value in enumerate(values)]


@dataclass(frozen=True)
class _FunctionalForm:
    """The functional form of an operator that returns what it writes: `returned` is the position of each result.

    It has the same arguments and returns the new value of each of `written`, then the results that are not aliases.
    """

    op: OpOverload
    original: OpOverload
    written: tuple[str, ...]
    returned: tuple[int, ...]


_LIBRARY: list[torch.library.Library] = []
_FUNCTIONAL: dict[OpOverload, _FunctionalForm | None] = {}
_ALIAS = re.compile(r"\(\w+!?( -> [\w*|]+)?\)")


def call_functional_forms(graph: Graph) -> None:
    """Call custom operators that write an operand and return it in a form that functionalization accepts.

    It accepts only operators whose results are not aliases. Edits the graph; `call_originals` is the inverse.
    """
    for node in graph.nodes:
        functional = _functional_form(node.target) if isinstance(node.target, OpOverload) else None
        if functional is not None and node.op == "call_function":
            _write_separately(node, functional)


def _functional_form(op: OpOverload) -> _FunctionalForm | None:
    if op.namespace in ("aten", "prims", "prim") or not op._schema.is_mutable:
        return None
    if op not in _FUNCTIONAL:
        _FUNCTIONAL[op] = _define(op)
    return _FUNCTIONAL[op]


def _define(op: OpOverload) -> _FunctionalForm | None:
    """Define the functional form; return None unless results are aliases of operands that are written, all tensors."""
    schema = op._schema
    aliases = [a.alias_info for a in schema.returns]
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not any(aliases) or any(not isinstance(a.type, torch.TensorType) for a in (*written, *schema.returns)):
        return None
    sets = [cast(Any, a.alias_info).before_set for a in written]
    if any(alias is not None and alias.before_set not in sets for alias in aliases):
        return None
    new = [i for i, alias in enumerate(aliases) if alias is None]
    returned = tuple(
        len(written) + new.index(i) if a is None else sets.index(a.before_set) for i, a in enumerate(aliases)
    )
    name = re.sub(r"\W", "_", f"functional_{op.name()}")
    arguments = _ALIAS.sub("", str(schema).partition("(")[2].partition(") -> ")[0])
    results = ", ".join(["Tensor"] * (len(written) + len(new)))
    if not _LIBRARY:
        _LIBRARY.append(torch.library.Library("dovetail", "FRAGMENT"))
    _LIBRARY[0].define(f"{name}({arguments}) -> ({results})", tags=tuple(op.tags))
    names = tuple(a.name for a in written)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip([a.name for a in schema.arguments], args, strict=False)), **kwargs}
        clones = {name: arguments[name].clone() for name in names}
        parts = _parts(op(**{**arguments, **clones}))
        values = [*clones.values(), *(parts[i] for i in new)]
        return values if len(values) > 1 else values[0]

    _LIBRARY[0].impl(name, kernel, "CompositeExplicitAutograd")
    return _FunctionalForm(getattr(torch.ops.dovetail, name).default, op, names, returned)


def _write_separately(node: Node, functional: _FunctionalForm) -> None:
    """Replace a call by one of the functional form, and a `copy_` of each new value to the operand."""
    arguments = named_arguments(node)
    operands = [cast(Node, arguments[name]) for name in functional.written]
    parts = _parts(node.meta.get("val"))
    values: list[Any] = []
    for operand in operands:
        with operand.meta["val"].fake_mode:
            values.append(torch.empty_like(operand.meta["val"]))
    values += [part for part, at in zip(parts, functional.returned, strict=True) if at >= len(operands)]
    news = _insert_with_results(node, functional.op, (), arguments, values)
    for i, operand in enumerate(operands):
        news[i] = insert_call(node, _aten.copy_.default, (operand, news[i]))
    _replace_results(node, [news[at] for at in functional.returned])


def _replace_results(node: Node, results: Sequence[Node]) -> None:
    """Let readers of a call read `results`, one for each of its own, and erase it."""
    if len(results) == 1:
        node.replace_all_uses_with(results[0])
    for user in list(node.users):
        replace_node(user, results[cast(int, user.args[1])])
    node.graph.erase_node(node)


def call_originals(graph: Graph) -> None:
    """Replace each functional form by the operator itself, called on a clone of what it writes."""
    originals = {f.op: f for f in _FUNCTIONAL.values() if f is not None}
    for node in [n for n in graph.nodes if n.target in originals]:
        functional = originals[cast(OpOverload, node.target)]
        arguments = named_arguments(node)
        parts = _parts(node.meta["val"])
        for name, part in zip(functional.written, parts, strict=False):
            arguments[name] = insert_call(node, _aten.clone.default, (arguments[name],), value=part)
        clones = [arguments[name] for name in functional.written]
        args, kwargs = to_args_kwargs(functional.original, arguments)
        values = [parts[at] for at in functional.returned]
        items = _insert_with_results(node, functional.original, args, kwargs, values)
        results = [
            items[functional.returned.index(i)] if i in functional.returned else clones[i]
            for i in range(len(parts))
        ]
        _replace_results(node, results)


_DROPOUTS = frozenset(["dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"])
_OUT = {_aten.randn.out: _aten.normal_.default, _aten.rand.out: _aten.uniform_.default}

# The functional operator that decomposition replaces each in-place draw by, and that draw.
_IN_PLACE: dict[Any, Any] = {
    _aten.normal_functional.default: _aten.normal_.default,
    _aten.uniform.default: _aten.uniform_.default,
    _aten.bernoulli.p: _aten.bernoulli_.float,
    _aten.bernoulli.Tensor: _aten.bernoulli_.Tensor,
    _aten.exponential.default: _aten.exponential_.default,
    _aten.cauchy.default: _aten.cauchy_.default,
    _aten.log_normal.default: _aten.log_normal_.default,
    _aten.geometric.default: _aten.geometric_.default,
    _aten.random.default: _aten.random_.default,
    _aten.random.to: _aten.random_.to,
}


def draw_into_fresh_memory(program: ExportedProgram) -> bool:
    """Rewrite in-place draws that functionalization would change; edits the program's graph. Whether there were any."""
    graph = program.graph
    draws = [n for n in graph.nodes if _is_draw(n)]
    if not draws:
        return False
    groups = alias_groups_with_gradients(program)
    differentiable = {write.node for write in groups.writes if groups.had_gradient(write.group, write)}
    for node in draws:
        _rewrite(node, node in differentiable)
    return True


def _is_draw(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.is_mutable or target.namespace != "aten":
        return False
    name = op_name(target)
    draws = name in RANDOM_FILLS or name in _DROPOUTS or name == "rrelu_"
    return draws or (is_random(node) and "out" in node.kwargs)


def _rewrite(node: Node, differentiable: bool) -> None:
    target = cast(OpOverload, node.target)
    name = op_name(target)
    operand = cast(Node, node.kwargs["out"] if "out" in node.kwargs else node.args[0])
    value = operand.meta.get("val")
    if not isinstance(value, Tensor):
        return
    if name == "rrelu_":
        # Its functional form keeps noise for the backward that was never drawn.
        drawn = insert_call(node, _aten.rrelu.default, (operand, *node.args[1:]), node.kwargs)
        _copy_to(operand, drawn, node)
        return
    is_contiguous = _is_contiguous(operand)
    if is_contiguous and (name in _DROPOUTS or not differentiable or "out" in node.kwargs):
        return
    if has_symbols(value) and not is_contiguous_or_false(value):
        raise _refused(node, "forward draws random numbers into a view whose strides vary with dynamic sizes")
    if name in _DROPOUTS:
        _drop(node, operand, name)
        return
    args, kwargs = node.args[1:], dict(node.kwargs)
    if "out" in node.kwargs:
        sizes = cast(Any, node.args[0])
        if target not in _OUT or list(sizes) != list(value.shape):
            raise _refused(node, f"forward draws random numbers by {target} into a view")
        target, args, kwargs = _OUT[target], (), {k: v for k, v in kwargs.items() if k == "generator"}
    drawn = _draw(node, target, _empty_like(node, operand), args, kwargs, is_contiguous)
    _copy_to(operand, drawn, node)


def _copy_to(operand: Node, drawn: Node, node: Node) -> None:
    replace_node(node, insert_call(node, _aten.copy_.default, (operand, drawn), value=node.meta.get("val")))


def _drop(node: Node, operand: Node, name: str) -> None:
    """Decompose in-place dropout as ATen defines it, so that its mask is drawn in the order of the mask's memory."""
    p, train = cast("tuple[float, bool]", node.args[1:3])
    value = cast(Tensor, operand.meta["val"])
    if p == 0 or not train or _is_empty(value):
        replace_node(node, operand)
        return
    if p == 1:
        return
    is_contiguous = name.startswith("feature")
    if is_contiguous:
        sizes = [*value.shape[:2], *(1 for _ in value.shape[2:])]
        mask = insert_call(node, _aten.new_empty.default, (operand, sizes))
    else:
        mask = insert_call(node, _aten.empty_like.default, (operand,))
    noise = _draw(node, _aten.bernoulli_.float, mask, (1 - p,), {}, is_contiguous)
    if "alpha" in name:
        alpha = 1.7580993408473766
        a = 1.0 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
        shift = insert_call(node, _aten.add.Scalar, (noise, -1))
        shift = insert_call(node, _aten.mul.Scalar, (shift, alpha * a))
        shift = insert_call(node, _aten.add.Scalar, (shift, alpha * a * p))
        scale = insert_call(node, _aten.mul.Scalar, (noise, a))
    else:
        shift = None
        scale = insert_call(node, _aten.div.Scalar, (noise, 1 - p))
    result = insert_call(node, _aten.mul_.Tensor, (operand, scale), value=operand.meta["val"])
    if shift is not None:
        result = insert_call(node, _aten.add_.Tensor, (result, shift), value=operand.meta["val"])
    replace_node(node, result)


def _empty_like(node: Node, operand: Node) -> Node:
    """Insert memory to draw into, with the strides of `operand`."""
    value = cast(Tensor, operand.meta["val"])
    if is_contiguous_or_false(value) or is_dense(value):
        # The strides of the call, which fake kernels are not always right about: batch norm's of a transpose.
        return insert_call(node, _aten.empty_like.default, (operand,))
    options = {"dtype": value.dtype, "device": value.device}
    args = ([int(n) for n in value.shape], [int(n) for n in value.stride()])
    return insert_call(node, _aten.empty_strided.default, args, options, fresh_like(value))


def _is_contiguous(operand: Node) -> bool:
    """Return whether a value and its bases are contiguous; otherwise the strides of a fake result may be wrong."""
    storage, node = storage_of(operand.meta["val"]), operand
    while is_contiguous_or_false(node.meta["val"]):
        base = node.args[0] if node.args else None
        if storage_at(base) != storage:
            return True
        node = cast(Node, base)
    return False


def _draw(
    node: Node,
    target: OpOverload,
    fresh: Node,
    args: tuple[Any, ...],
    kwargs: Any,
    is_contiguous: bool,
) -> Node:
    drawn = insert_call(node, target, (fresh, *args), kwargs)
    if not is_contiguous:
        drawn.meta["custom"] = {**drawn.meta.get("custom", {}), DRAWS_IN_PLACE: True}
    return drawn


def draw_in_place(graph: Graph) -> None:
    """Draw in place again into the new memory with gaps or permuted strides; edits a decomposed graph.

    The functional operator would draw into a contiguous copy.
    """
    for node in graph.nodes:
        if not node.meta.get("custom", {}).get(DRAWS_IN_PLACE):
            continue
        node.meta["custom"] = {k: v for k, v in node.meta["custom"].items() if k != DRAWS_IN_PLACE}
        # The tracer copies the mark to a generator that the draw reads, too.
        fresh = node.args[0] if node.args else None
        value = value_of(fresh) if isinstance(fresh, Node) and len(fresh.users) == 1 else None
        if node.target in _IN_PLACE and isinstance(value, Tensor):
            node.target = node.meta["original_aten"] = _IN_PLACE[node.target]
            node.meta["val"] = value


def _refused(node: Node, what: str) -> CaptureError:
    return refused(
        f"{what}, and a functional graph would draw other numbers", node, "Draw a new tensor and copy_ it."
    )
