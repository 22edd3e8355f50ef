"""Calls with `out=`, in a form that functionalisation keeps the shape and strides of.

Functionalisation puts the result of the functional operator where `out` was, whatever its shape and strides. Eager mode
writes into `out` as it is, and resizes it where the shape is another, which for a view means another part of its memory.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from dovetail.errors import CaptureError
from dovetail.frontend.export_aliases import grouped_with_gradients, refused, rename_results, storage_of
from dovetail.ir.meta_keys import DRAWS_IN_PLACE
from dovetail.ir.weight_guard import is_dense

_KEPT = ("stack_trace", "nn_module_stack", "custom")


def refuse_resizing(program: ExportedProgram) -> None:
    """Raise for a call that resizes `out`, unless that is a new tensor without elements and without other views."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, GraphModule)]
    for node in [n for graph in graphs for n in graph.nodes]:
        for name, result in _results(node).items():
            given: Any = cast(Node, node.kwargs[name]).meta.get("val")
            if _has_other_shape(given, result) and not _is_new_and_empty(given, graphs):
                raise refused(
                    f"forward gives {node.target} an `{name}` of shape {tuple(given.shape)} for a result of shape "
                    f"{tuple(result.shape)}, and a graph cannot resize a tensor",
                    node,
                    f"Give a tensor of the right shape, or leave `{name}` out.",
                )


def _results(node: Node) -> dict[str, Any]:
    """The result of a call for each of the tensors that it is given as `out`."""
    value = node.meta.get("val")
    parts: Any = value if isinstance(value, (list, tuple)) else (value,)
    return {name: parts[at] for name, at in _positions(node).items()}


def _positions(node: Node) -> dict[str, int]:
    """Which result is the tensor that a call is given as `out`, for each of them; a schema may list them in any order."""
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


def _has_other_shape(given: Any, result: Any) -> bool:
    if not isinstance(given, Tensor) or not isinstance(result, Tensor):
        return False
    # As text, since comparing symbols would add guards.
    return [str(size) for size in given.shape] != [str(size) for size in result.shape]


def _is_new_and_empty(value: Tensor, graphs: list[Graph]) -> bool:
    place = storage_of(value)
    nodes = [n for graph in graphs for n in graph.nodes if _place(n) == place]
    nodes = [n for n in nodes if n.op != "placeholder" or n.graph is graphs[0]]
    is_new = nodes[0].op == "call_function" and _is_empty(nodes[0].meta["val"])
    return is_new and not any(_is_empty(n.meta["val"]) for n in nodes[1:])


def _is_empty(value: Tensor) -> bool:
    return any(type(size) is int and size == 0 for size in value.shape)


def _place(node: Node) -> int | None:
    value = node.meta.get("val")
    return storage_of(value) if isinstance(value, Tensor) else None


def keep_strides(program: ExportedProgram) -> None:
    """Let calls write into contiguous memory that is copied to `out` if the result of the functional operator might have
    other strides than that, or if random numbers were drawn there, which nothing would keep; edits the program's graph."""
    drawn = {_place(n) for n in program.graph.nodes if _is_random(n)} - {None}
    calls = [n for n in program.graph.nodes if _may_differ_in_strides(n) or _writes_any(n, drawn)]
    for node in calls:
        _write_into_fresh_memory(program.graph, node)
    if calls:
        program.graph_module.recompile()
        rename_results(program)


def _is_random(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _writes_any(node: Node, places: set[int | None]) -> bool:
    operands = [cast(Node, node.kwargs[name]) for name in _results(node)]
    return not _is_random(node) and any(_place(operand) in places for operand in operands)


def _may_differ_in_strides(node: Node) -> bool:
    results = _results(node)
    if not results or _is_random(node):
        return False
    values = [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [v for v in values if isinstance(v, Tensor) and v.layout is torch.strided]
    if any(isinstance(size, SymInt) for v in tensors for size in (*v.shape, *v.stride())):
        return False
    if any(
        _has_other_shape(cast(Node, node.kwargs[name]).meta.get("val"), results[name]) for name in results
    ):
        return False
    return not all(v.is_contiguous() for v in tensors)


def _write_into_fresh_memory(graph: Graph, node: Node) -> None:
    meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    for name, position in _positions(node).items():
        operand = cast(Node, node.kwargs[name])
        given = operand.meta["val"]
        form: dict[str, Any] = {"memory_format": torch.contiguous_format}
        with graph.inserting_before(node):
            fresh = graph.call_function(torch.ops.aten.empty_like.default, (operand,), form)
        with given.fake_mode:
            value = torch.empty_like(given, **form)
        fresh.meta = {**meta, "val": value}
        node.update_kwarg(name, fresh)
        items = [node]
        if isinstance(node.meta["val"], (list, tuple)):
            items = [user for user in node.users if user.args[1] == position] or [
                _item(graph, node, position)
            ]
        for item in items:
            item.meta["val"] = value
            with graph.inserting_after(item):
                copy = graph.call_function(torch.ops.aten.copy_.default, (operand, item))
            copy.meta = {**meta, "val": given}
            item.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _item(graph: Graph, node: Node, position: int) -> Node:
    with graph.inserting_after(node):
        item = graph.call_function(operator.getitem, (node, position))
    item.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    return item


@dataclass(frozen=True)
class _Functional:
    """The functional form of an operator that returns what it writes: `returned` is the position of each result.

    It takes the same arguments and returns the new value of each of `written`, then the results that are no aliases.
    """

    form: OpOverload
    original: OpOverload
    written: tuple[str, ...]
    returned: tuple[int, ...]


_LIBRARY: list[torch.library.Library] = []
_FUNCTIONAL: dict[OpOverload, _Functional | None] = {}
_ALIAS = re.compile(r"\(\w+!?( -> [\w*|]+)?\)")


def call_functional_forms(program: ExportedProgram) -> None:
    """Call custom operators that write an operand and return it in a form that functionalisation accepts.

    It takes only operators whose results are no aliases. Edits the program's graph; `call_originals` is the inverse.
    """
    graph, calls = program.graph, list[Node]()
    for node in graph.nodes:
        functional = _functional_form(node.target) if isinstance(node.target, OpOverload) else None
        if functional is not None and node.op == "call_function":
            _write_separately(graph, node, functional)
            calls.append(node)
    if calls:
        program.graph_module.recompile()
        rename_results(program)


def _functional_form(op: OpOverload) -> _Functional | None:
    if op.namespace in ("aten", "prims", "prim") or not op._schema.is_mutable:
        return None
    if op not in _FUNCTIONAL:
        _FUNCTIONAL[op] = _define(op)
    return _FUNCTIONAL[op]


def _define(op: OpOverload) -> _Functional | None:
    """Define the functional form; None where the results are no aliases, or not only tensors that are written."""
    schema = op._schema
    aliases = [a.alias_info for a in schema.returns]
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not any(aliases) or any(not isinstance(a.type, torch.TensorType) for a in (*written, *schema.returns)):
        return None
    sets = [cast(Any, a.alias_info).before_set for a in written]
    if any(alias is not None and alias.before_set not in sets for alias in aliases):
        return None
    own = [i for i, alias in enumerate(aliases) if alias is None]
    returned = tuple(
        len(written) + own.index(i) if a is None else sets.index(a.before_set) for i, a in enumerate(aliases)
    )
    name = re.sub(r"\W", "_", f"functional_{op.name()}")
    arguments = _ALIAS.sub("", str(schema).partition("(")[2].partition(") -> ")[0])
    results = ", ".join(["Tensor"] * (len(written) + len(own)))
    if not _LIBRARY:
        _LIBRARY.append(torch.library.Library("dovetail", "FRAGMENT"))
    _LIBRARY[0].define(f"{name}({arguments}) -> ({results})", tags=tuple(op.tags))
    names = tuple(a.name for a in written)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip([a.name for a in schema.arguments], args, strict=False)), **kwargs}
        new = {name: given[name].clone() for name in names}
        result = op(**{**given, **new})
        parts = result if isinstance(result, (list, tuple)) else (result,)
        values = [*new.values(), *(parts[i] for i in own)]
        return values if len(values) > 1 else values[0]

    _LIBRARY[0].impl(name, kernel, "CompositeExplicitAutograd")
    return _Functional(getattr(torch.ops.dovetail, name).default, op, names, returned)


def _given(op: OpOverload, node: Node) -> dict[str, Any]:
    return {**dict(zip([a.name for a in op._schema.arguments], node.args, strict=False)), **node.kwargs}


def _write_separately(graph: Graph, node: Node, functional: _Functional) -> None:
    """Replace a call by one of the functional form, and a `copy_` of each new value to the operand."""
    meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    given = _given(functional.original, node)
    operands = [cast(Node, given[name]) for name in functional.written]
    value = node.meta.get("val")
    parts: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    values: list[Any] = []
    for operand in operands:
        with operand.meta["val"].fake_mode:
            values.append(torch.empty_like(operand.meta["val"]))
    values += [part for part, at in zip(parts, functional.returned, strict=True) if at >= len(operands)]
    with graph.inserting_before(node):
        call = graph.call_function(functional.form, (), given)
        call.meta = {**meta, "val": tuple(values) if len(values) > 1 else values[0]}
        news = [call] if len(values) == 1 else [_item(graph, call, i) for i in range(len(values))]
        for item, part in zip(news, values, strict=True):
            item.meta["val"] = part
        results: list[Node] = []
        for operand, new in zip(operands, news, strict=False):
            copy = graph.call_function(torch.ops.aten.copy_.default, (operand, new))
            copy.meta = {**meta, "val": operand.meta["val"]}
            results.append(copy)
    _take_results(graph, node, [[*results, *news[len(operands) :]][at] for at in functional.returned])


def _take_results(graph: Graph, node: Node, results: Sequence[Node]) -> None:
    """Let readers of a call read these instead, one for each of its results, and erase it."""
    if len(results) == 1:
        node.replace_all_uses_with(results[0])
    for user in list(node.users):
        user.replace_all_uses_with(results[cast(int, user.args[1])])
        graph.erase_node(user)
    graph.erase_node(node)


def call_originals(graph: Graph) -> None:
    """Call the operators themselves on a copy of what they write where the graph has their functional form."""
    originals = {f.form: f for f in _FUNCTIONAL.values() if f is not None}
    for node in [n for n in graph.nodes if n.target in originals]:
        functional = originals[cast(OpOverload, node.target)]
        given = _given(functional.form, node)
        value = node.meta["val"]
        parts: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
        clones: list[Node] = []
        with graph.inserting_before(node):
            for name, part in zip(functional.written, parts, strict=False):
                clone = graph.call_function(torch.ops.aten.clone.default, (given[name],))
                clone.meta = {**meta, "val": part}
                given[name] = clone
                clones.append(clone)
            values = [parts[at] for at in functional.returned]
            call = graph.call_function(functional.original, *_by_position(functional.original, given))
            call.meta = {**meta, "val": values[0] if len(values) == 1 else tuple(values)}
            items = [call] if len(values) == 1 else [_item(graph, call, i) for i in range(len(values))]
            for item, part in zip(items, values, strict=True):
                item.meta = {**meta, "val": part}
        results = [
            items[functional.returned.index(i)] if i in functional.returned else clones[i]
            for i in range(len(parts))
        ]
        _take_results(graph, node, results)


def _by_position(op: OpOverload, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: list[Any] = []
    kwargs = dict(given)
    for argument in op._schema.arguments:
        if argument.kwarg_only or argument.name not in kwargs:
            break
        args.append(kwargs.pop(argument.name))
    return tuple(args), kwargs


_aten = torch.ops.aten
_FILLS = frozenset(
    ["normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"]
)
_DROPOUTS = frozenset(["dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"])
_OUT = {_aten.randn.out: _aten.normal_.default, _aten.rand.out: _aten.uniform_.default}

# The functional operators that decomposition makes of draws, and the draws they are made of.
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
    """Rewrite in-place draws that functionalisation would change; edits the program's graph. Whether there were any."""
    graph = program.graph
    draws = [n for n in graph.nodes if _is_draw(n)]
    if not draws:
        return False
    groups = grouped_with_gradients(program)
    differentiable = {write.node for write in groups.writes if groups.had_gradient(write.group, write)}
    for node in draws:
        _rewrite(graph, node, node in differentiable)
    program.graph_module.recompile()
    return True


def _is_draw(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.is_mutable or target.namespace != "aten":
        return False
    name = _name(target)
    random = name in _FILLS or name in _DROPOUTS or name == "rrelu_"
    return random or (torch.Tag.nondeterministic_seeded in target.tags and "out" in node.kwargs)


def _name(target: OpOverload) -> str:
    return target._schema.name.removeprefix("aten::")


def _rewrite(graph: Graph, node: Node, differentiable: bool) -> None:
    target = cast(OpOverload, node.target)
    name = _name(target)
    operand = cast(Node, node.kwargs["out"] if "out" in node.kwargs else node.args[0])
    value = operand.meta.get("val")
    if not isinstance(value, Tensor):
        return
    if name == "rrelu_":
        # Its functional form keeps noise for the backward that was never drawn.
        _copied(
            graph,
            node,
            operand,
            _call(graph, node, _aten.rrelu.default, (operand, *node.args[1:]), node.kwargs),
        )
        return
    is_contiguous = _is_contiguous(operand)
    if is_contiguous and (name in _DROPOUTS or not differentiable or "out" in node.kwargs):
        return
    if not is_contiguous_or_false(value) and any(
        isinstance(n, SymInt) for n in (*value.shape, *value.stride())
    ):
        raise _refused(node, "forward draws random numbers into a view whose strides vary with dynamic sizes")
    if name in _DROPOUTS:
        _drop(graph, node, operand, name)
        return
    if "out" in node.kwargs:
        sizes = cast(Any, node.args[0])
        if target not in _OUT or list(sizes) != list(value.shape):
            raise _refused(node, f"forward draws random numbers by {target} into a view")
        drawn = _draw(
            graph, node, _OUT[target], _empty(graph, node, operand), (), _generator(node), is_contiguous
        )
    else:
        drawn = _draw(
            graph, node, target, _empty(graph, node, operand), node.args[1:], node.kwargs, is_contiguous
        )
    _copied(graph, node, operand, drawn)


def _drop(graph: Graph, node: Node, operand: Node, name: str) -> None:
    """Write out in-place dropout as ATen defines it, so that its mask is drawn in the order of the mask's memory."""
    p, train = cast("tuple[float, bool]", node.args[1:3])
    value = cast(Tensor, operand.meta["val"])
    if p == 0 or not train or any(type(n) is int and n == 0 for n in value.shape):
        node.replace_all_uses_with(operand)
        graph.erase_node(node)
        return
    if p == 1:
        return
    is_contiguous = name.startswith("feature")
    if is_contiguous:
        sizes = [*value.shape[:2], *(1 for _ in value.shape[2:])]
        mask = _call(graph, node, _aten.new_empty.default, (operand, sizes), {})
    else:
        mask = _call(graph, node, _aten.empty_like.default, (operand,), {})
    noise = _draw(graph, node, _aten.bernoulli_.float, mask, (1 - p,), {}, is_contiguous)
    if "alpha" in name:
        alpha = 1.7580993408473766
        a = 1.0 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
        shift = _call(graph, node, _aten.add.Scalar, (noise, -1), {})
        shift = _call(graph, node, _aten.mul.Scalar, (shift, alpha * a), {})
        shift = _call(graph, node, _aten.add.Scalar, (shift, alpha * a * p), {})
        scale = _call(graph, node, _aten.mul.Scalar, (noise, a), {})
    else:
        shift = None
        scale = _call(graph, node, _aten.div.Scalar, (noise, 1 - p), {})
    result = _call(graph, node, _aten.mul_.Tensor, (operand, scale), {}, operand.meta["val"])
    if shift is not None:
        result = _call(graph, node, _aten.add_.Tensor, (result, shift), {}, operand.meta["val"])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _generator(node: Node) -> dict[str, Any]:
    return {k: v for k, v in node.kwargs.items() if k == "generator"}


def _empty(graph: Graph, node: Node, operand: Node) -> Node:
    """Memory to draw into, of the strides of `operand`."""
    value = cast(Tensor, operand.meta["val"])
    if is_contiguous_or_false(value) or is_dense(value):
        # The strides of the call, which fake kernels are not always right about: batch norm's of a transpose.
        return _call(graph, node, _aten.empty_like.default, (operand,), {})
    form = {"dtype": value.dtype, "device": value.device}
    args = ([int(n) for n in value.shape], [int(n) for n in value.stride()])
    with cast(Any, value).fake_mode:
        fake = torch.empty_strided(*args, dtype=value.dtype, device=value.device)
    return _call(graph, node, _aten.empty_strided.default, args, form, fake)


def _is_contiguous(operand: Node) -> bool:
    """Whether a value, and what it is a view of, are contiguous; the strides of a fake result may be wrong otherwise."""
    place, node = storage_of(operand.meta["val"]), operand
    while is_contiguous_or_false(node.meta["val"]):
        base = node.args[0] if node.args else None
        value = base.meta.get("val") if isinstance(base, Node) else None
        if not isinstance(value, Tensor) or storage_of(value) != place:
            return True
        node = cast(Node, base)
    return False


def _draw(
    graph: Graph,
    node: Node,
    target: OpOverload,
    fresh: Node,
    args: tuple[Any, ...],
    kwargs: Any,
    is_contiguous: bool,
) -> Node:
    drawn = _call(graph, node, target, (fresh, *args), kwargs)
    if not is_contiguous:
        drawn.meta["custom"] = {**drawn.meta.get("custom", {}), DRAWS_IN_PLACE: True}
    return drawn


def _copied(graph: Graph, node: Node, operand: Node, drawn: Node) -> None:
    copy = _call(graph, node, _aten.copy_.default, (operand, drawn), {}, node.meta.get("val"))
    node.replace_all_uses_with(copy)
    graph.erase_node(node)


def _call(
    graph: Graph, node: Node, target: Any, args: tuple[Any, ...], kwargs: Any, value: Any = None
) -> Node:
    """Add a call before `node`, with a fake value worked out unless one is given."""
    with graph.inserting_before(node):
        new = graph.call_function(target, args, dict(kwargs))
    new.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    if value is None:
        values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
        if target._schema.is_mutable:
            value = values[0]
        else:
            first = next(v for v in values if isinstance(v, Tensor))
            with cast(Any, first).fake_mode:
                value = target(*values, **kwargs)
    new.meta["val"] = value
    return new


def draw_in_place(graph: Graph) -> None:
    """Draw in place again into memory with gaps or permuted strides that was made for it; edits a decomposed graph.

    The functional operator would draw into a contiguous copy.
    """
    for node in graph.nodes:
        if not node.meta.get("custom", {}).get(DRAWS_IN_PLACE):
            continue
        node.meta["custom"] = {k: v for k, v in node.meta["custom"].items() if k != DRAWS_IN_PLACE}
        # The tracer hands the mark on to a generator that the draw reads, too.
        fresh = node.args[0] if node.args else None
        value = fresh.meta.get("val") if isinstance(fresh, Node) and len(fresh.users) == 1 else None
        if node.target in _IN_PLACE and isinstance(value, Tensor):
            node.target = node.meta["original_aten"] = _IN_PLACE[node.target]
            node.meta["val"] = value


def _refused(node: Node, what: str) -> CaptureError:
    return refused(
        f"{what}, and a functional graph would draw other numbers", node, "Draw a new tensor and copy_ it."
    )
