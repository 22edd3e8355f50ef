"""Products: operations that multiply a value by a weight, read through their schema."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import size_hint, value_signature
from dovetail.ir.schema import named_arguments, normalized_arguments, op_name, static_size

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Form:
    """The names of an operator's value, weight and bias, and the dimension along which weights are joined."""

    value: str
    weight: str
    bias: str | None
    weight_dim: int
    convolves: bool = False


_LINEAR = _Form("input", "weight", "bias", 0)
_CONVOLUTION = _Form("input", "weight", "bias", 0, convolves=True)
_FORMS: dict[Any, _Form] = {
    _aten.linear.default: _LINEAR,
    _aten.mm.default: _Form("self", "mat2", None, 1),
    _aten.matmul.default: _Form("self", "other", None, 1),
    _aten.addmm.default: _Form("mat1", "mat2", "self", 1),
    _aten.conv1d.default: _CONVOLUTION,
    _aten.conv2d.default: _CONVOLUTION,
    _aten.conv3d.default: _CONVOLUTION,
    _aten.conv1d.padding: _CONVOLUTION,
    _aten.conv2d.padding: _CONVOLUTION,
    _aten.conv3d.padding: _CONVOLUTION,
    _aten.convolution.default: _CONVOLUTION,
}
WRITTEN_BEFORE = "what was written before"

# Operators that may come between a parameter and the product; the weight still counts as fixed.
_VIEWS_AND_CASTS = frozenset({"t", "transpose", "permute", "_to_copy", "to", "detach", "alias", "clone"})


@dataclass(frozen=True)
class Product:
    """One product: its operands, and the properties in which siblings must agree, by name.

    Weights are joined along `weight_dim`; their results are then concatenated along `dim`, each of size `width`. `rows`
    is the number of rows that are multiplied by the weight, by hint, and `depth` their length.
    """

    node: Node
    position: int
    value: Node
    weight: Node
    bias: Node | None
    value_name: str
    weight_name: str
    bias_name: str | None
    weight_dim: int
    dim: int
    width: int
    rows: int | None
    depth: int | None
    facts: tuple[tuple[str, Any], ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name, defaults filled in."""
        return normalized_arguments(self.node)


def is_product(node: Node) -> bool:
    """Whether a node calls an operator that multiplies by a weight."""
    return node.op == "call_function" and node.target in _FORMS


def value_read(node: Node) -> Node | None:
    """Return the value that a product multiplies by its weight."""
    value = named_arguments(node).get(_FORMS[node.target].value)
    return value if isinstance(value, Node) else None


def read_product(index: Index, position: int, *, by_training: bool) -> Product | str:
    """Return the product at a position, or the reason why it cannot be merged.

    With `by_training`, frozen and trained weights are not siblings.
    """
    node = index.nodes[position]
    form = _FORMS[node.target]
    arguments = normalized_arguments(node)
    value, weight = arguments[form.value], arguments[form.weight]
    bias = arguments.get(form.bias) if form.bias is not None else None
    if not isinstance(value, Node) or not isinstance(weight, Node):
        return "its operands are not values of the graph"
    known = [n.meta.get("val") for n in (value, weight, node)]
    if not all(isinstance(v, FakeTensor) for v in known):
        return "the shapes are not known: give the graph values with `capture`"
    x, w, result = cast("list[Tensor]", known)
    reason = _why_not_weight(index.gm, weight) or _why_not_form(node, form, arguments, x, w)
    if reason:
        return reason
    if bias is not None and (not isinstance(bias, Node) or _why_not_weight(index.gm, bias)):
        return "its bias is computed, not a parameter"
    width = static_size(w.shape[form.weight_dim])
    if width is None:
        return "the width of its weight is not a number"
    if bias is not None and not _is_row(bias.meta.get("val"), width):
        return "its bias is not one number for each column"
    roles = {form.value, form.weight, form.bias}
    options = {k: v for k, v in arguments.items() if k not in roles}
    spatial = w.dim() - 2 if form.convolves else 0
    dim = result.dim() - 1 - spatial
    described = cast("tuple[Any, ...]", value_signature(w))
    sizes = tuple(str(s) for i, s in enumerate(w.shape) if i != form.weight_dim)
    facts: tuple[tuple[str, Any], ...] = (
        ("operator", node.target),
        ("sizes of the weight", sizes),
        ("dtype of the weight", w.dtype),
        ("device of the weight", described[4]),
        ("training of the weight", by_training and any(trains(index.gm, n) for n in (weight, bias) if n)),
        *((name, tuple(v) if isinstance(v, list) else v) for name, v in options.items()),
        (WRITTEN_BEFORE, frozenset(index.dependencies.before.get(position, ()))),
    )
    rows = _product_of(s for i, s in enumerate(result.shape) if i != dim)
    depth = _product_of(s for i, s in enumerate(w.shape) if i != form.weight_dim)
    return Product(
        node=node,
        position=position,
        value=value,
        weight=weight,
        bias=bias,
        value_name=form.value,
        weight_name=form.weight,
        bias_name=form.bias,
        weight_dim=form.weight_dim,
        dim=dim,
        width=width,
        rows=rows,
        depth=depth,
        facts=facts,
    )


def _why_not_form(node: Node, form: _Form, arguments: dict[str, Any], x: Tensor, w: Tensor) -> str:
    """Return why a call of an operator of this form cannot be widened, "" if it can."""
    if x.layout is not torch.strided or w.layout is not torch.strided:
        return "its operands are not plain strided tensors"
    roles = {form.value, form.weight, form.bias}
    if any(isinstance(value, Node) for name, value in arguments.items() if name not in roles):
        return "one of its options is computed"
    if not form.convolves:
        return "" if w.dim() == 2 else f"its weight has {w.dim()} dimensions, not 2"
    if arguments.get("transposed"):
        return "it is a transposed convolution"
    if arguments.get("groups") != 1:
        return f"it has {arguments.get('groups')} groups"
    return ""


def _why_not_weight(gm: GraphModule, node: Node) -> str:
    source = node
    while source.op == "call_function" and op_name(source.target) in _VIEWS_AND_CASTS:
        if len(source.all_input_nodes) != 1:
            return "its weight is computed, not a parameter"
        source = source.all_input_nodes[0]
    if source.op == "placeholder":
        return ""
    if source.op != "get_attr":
        return "its weight is computed, not a parameter"
    held = attribute(gm, cast("str", source.target))
    if type(held) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"its weight is a {type(held).__name__}, not a plain tensor"
    return ""


def is_fixed(gm: GraphModule, node: Node) -> bool:
    """Whether a value is a parameter, a buffer, a constant or an input, at most viewed or cast."""
    return not _why_not_weight(gm, node)


def trains(gm: GraphModule, node: Node) -> bool:
    """Whether a value requires gradients: a frozen weight joined with a trained one would get some."""
    source = source_of(node)
    held = attribute(gm, cast("str", source.target)) if source.op == "get_attr" else source.meta.get("val")
    return isinstance(held, Tensor) and held.requires_grad


def source_of(node: Node) -> Node:
    """Return the attribute or input that a fixed value is a view or cast of."""
    while node.op == "call_function":
        node = node.all_input_nodes[0]
    return node


def _is_row(value: Any, width: int) -> bool:
    return isinstance(value, FakeTensor) and value.dim() == 1 and static_size(value.shape[0]) == width


def _product_of(sizes: Iterator[Any]) -> int | None:
    hints = [size_hint(size) for size in sizes]
    return None if None in hints else math.prod(cast("list[int]", hints))
