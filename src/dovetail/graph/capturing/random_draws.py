"""In-place random draws, in a functional form that draws the very same numbers.

Kernels fill memory in an order that depends on strides, and some consume the stream differently for tensors that are not
contiguous. The functional operators that decomposition puts in their place draw into a tensor of other strides, and most
have no derivative. So a draw into a view, or over values with gradients, is made into fresh memory of the very same
strides and then copied.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from dovetail.errors import CaptureError
from dovetail.graph.capturing.alias_groups import grouped_with_gradients, refused
from dovetail.graph.capturing.aliasing import storage_of
from dovetail.graph.keys import DRAWS_IN_PLACE
from dovetail.graph.weight_guard import is_dense

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
_KEPT = ("stack_trace", "nn_module_stack", "custom")


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
