"""Products of a value and a weight, groups of sibling products, and the operations lifted above their split."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dovetail.ir.dependencies import Index
from dovetail.ir.effects import PURE
from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import size_hint, value_signature
from dovetail.ir.schema import (
    named_arguments,
    normalized_arguments,
    op_name,
    same_size,
    static_size,
    to_args_kwargs,
)

_aten = torch.ops.aten
_BATCH_NORM = _aten._native_batch_norm_legit_no_training.default


@dataclass(frozen=True)
class ProductForm:
    """The names of an operator's value, weight and bias, and the dimension along which weights are joined."""

    value: str
    weight: str
    bias: str | None
    weight_dim: int
    convolves: bool = False


_LINEAR = ProductForm("input", "weight", "bias", 0)
_CONVOLUTION = ProductForm("input", "weight", "bias", 0, convolves=True)
_FORMS: dict[Any, ProductForm] = {
    _aten.linear.default: _LINEAR,
    _aten.mm.default: ProductForm("self", "mat2", None, 1),
    _aten.matmul.default: ProductForm("self", "other", None, 1),
    _aten.addmm.default: ProductForm("mat1", "mat2", "self", 1),
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

    The results of joined weights are concatenated along `dim`, each of size `width`. `rows` is the number of rows that
    are multiplied by the weight, by hint, and `depth` their length.
    """

    node: Node
    position: int
    value: Node
    weight: Node
    bias: Node | None
    form: ProductForm
    dim: int
    width: int
    rows: int | None
    depth: int | None
    facts: tuple[tuple[str, Any], ...]


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
    return Product(
        node=node,
        position=position,
        value=value,
        weight=weight,
        bias=bias,
        form=form,
        dim=dim,
        width=width,
        rows=_product_of(s for i, s in enumerate(result.shape) if i != dim),
        depth=_product_of(s for i, s in enumerate(w.shape) if i != form.weight_dim),
        facts=facts,
    )


def _why_not_form(node: Node, form: ProductForm, arguments: dict[str, Any], x: Tensor, w: Tensor) -> str:
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
    """Return why a value is not a parameter, buffer, constant or input, at most viewed or cast; "" if it is one."""
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


# The row of an operation whose results are read one by one, never as a tuple.
_NOT_READ = -1
_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class FromRow:
    """An operand that is itself a joint value."""

    row: int


@dataclass(frozen=True)
class Shared:
    """An operand that is the same for all branches."""

    node: Node


@dataclass(frozen=True)
class Own:
    """An operand of which each branch has its own, to be joined along `dim`."""

    nodes: tuple[Node, ...]
    dim: int
    role: str


Operand = FromRow | Shared | Own


@dataclass(frozen=True)
class Row:
    """One value of each branch, and the one operation that computes them side by side.

    `operands` are those of the operation, in the order in which its arguments are walked. Where the operation
    returns a tuple, `inner` are the operations and `nodes` the first value of each.
    """

    nodes: tuple[Node, ...]
    operands: tuple[Operand, ...] = ()
    inner: tuple[Node, ...] = ()

    @property
    def operations(self) -> tuple[Node, ...]:
        return self.inner or self.nodes


@dataclass
class SiblingGroup:
    """Products that become one. `rows[0]` is the products; the others are what is lifted above the slices."""

    products: tuple[Product, ...]
    rows: list[Row] = field(default_factory=list[Row])

    @property
    def anchor(self) -> int:
        """The position of the first product, where the joint one is written."""
        return self.products[0].position

    @property
    def dim(self) -> int:
        return self.products[0].dim

    @property
    def widths(self) -> list[int]:
        return [product.width for product in self.products]

    @property
    def members(self) -> set[Node]:
        """Every operation that the joint ones replace."""
        return {node for row in self.rows for node in (*row.nodes, *row.inner)}


def lift(index: Index, products: Sequence[Product], claimed: set[Node], *, by_training: bool) -> SiblingGroup:
    """Return a group with the operations that follow all its products alike and work column by column.

    An operation is lifted if every branch has one with the same operator and the same literals, and its other
    operands are the same for all, or a parameter for each column. Operations `claimed` by other groups are not lifted.
    """
    group = SiblingGroup(tuple(products), [Row(tuple(p.node for p in products))])
    _Lifting(index, group, claimed, by_training).run()
    return group


class _Lifting:
    def __init__(self, index: Index, group: SiblingGroup, claimed: set[Node], by_training: bool) -> None:
        self.index, self.group, self.claimed, self.by_training = index, group, claimed, by_training
        self.before = frozenset(index.dependencies.before.get(group.anchor, ()))
        self.columns: list[dict[Node, int]] = [{} for _ in group.products]
        self.waiting: list[int] = []
        self._add(group.rows[0], 0)

    def run(self) -> None:
        while self.waiting:
            first = self.index.nodes[heapq.heappop(self.waiting)]
            if first in self.columns[0]:
                continue
            signature = self._signature(first, 0)
            if signature is None:
                continue
            alike = [first]
            for branch in range(1, len(self.columns)):
                users = self._users_of_row(signature, branch)
                match = next((u for u in users if self._signature(u, branch) == signature), None)
                if match is None or match in alike:
                    break
                alike.append(match)
            if len(alike) == len(self.columns):
                self._lift(alike)

    def _lift(self, alike: list[Node]) -> None:
        by_branch = [self._operands(node, i) for i, node in enumerate(alike)]
        operands = [_together(parts) for parts in zip(*cast("list[list[Operand]]", by_branch), strict=True)]
        if alike[0].target is _BATCH_NORM:
            results = tuple(next(iter(node.users)) for node in alike)
            row = Row(results, tuple(operands), tuple(alike))
        else:
            row = Row(tuple(alike), tuple(operands))
        self.group.rows.append(row)
        self._add(row, len(self.group.rows) - 1)

    def _add(self, row: Row, number: int) -> None:
        for i, column in enumerate(self.columns):
            column[row.nodes[i]] = number
            if row.inner:
                column[row.inner[i]] = _NOT_READ
        for user in row.nodes[0].users:
            heapq.heappush(self.waiting, self.index.position[user])

    def _users_of_row(self, signature: Any, branch: int) -> Iterator[Node]:
        """Yield what reads, in another branch, the joint value that an operation of the first branch reads."""
        row = next(part[1] for part in signature[2] if part[0] == "row")
        source = self.group.rows[row].nodes[branch]
        for user in sorted(source.users, key=self.index.position.__getitem__):
            if user not in self.columns[branch]:
                yield user

    def _signature(self, node: Node, branch: int) -> Any:
        """Return a value that is equal for operations that can be merged; None for one that cannot be lifted."""
        if node in self.claimed or not self._is_liftable(node, branch):
            return None
        operands = self._operands(node, branch)
        if operands is None:
            return None
        return (
            node.target,
            (_literal(node.args), _literal(node.kwargs)),
            tuple(self._operand_key(operand) for operand in operands),
        )

    def _is_liftable(self, node: Node, branch: int) -> bool:
        i = self.index.position[node]
        dependencies = self.index.dependencies
        if not isinstance(node.target, OpOverload) or not dependencies.effects.get(i, PURE).pure:
            return False
        if i in dependencies.written or frozenset(dependencies.before.get(i, ())) != self.before:
            return False
        if any(user.op in ("output", "call_module") for user in node.users):
            return False  # it allocates its result for them; a slice would have to be copied
        lead: Tensor = self.group.products[branch].node.meta["val"]
        value = node.meta.get("val")
        if node.target is _BATCH_NORM:
            parts = list(node.users)
            if len(parts) != 1 or parts[0].target is not operator.getitem or parts[0].args[1] != 0:
                return False
            return self.group.dim == 1 and lead.dim() > 1
        if torch.Tag.pointwise not in node.target.tags or not isinstance(value, Tensor):
            return False
        same = value.dim() == lead.dim() and all(map(same_size, value.shape, lead.shape))
        return same and value.layout is torch.strided

    def _operands(self, node: Node, branch: int) -> list[Operand] | None:
        operands: list[Operand] = []
        roles = {value: name for name, value in named_arguments(node).items() if isinstance(value, Node)}
        for used in leaves(node):
            row = self.columns[branch].get(used)
            if row is not None:
                if row == _NOT_READ:
                    return None
                operands.append(FromRow(row))
                continue
            role = roles.get(used, "part")
            per_channel = node.target is _BATCH_NORM and role in _PER_CHANNEL
            operand = self._outside(used, branch, role, per_channel=per_channel)
            if operand is None:
                return None
            operands.append(operand)
        return operands

    def _outside(self, node: Node, branch: int, role: str, *, per_channel: bool) -> Operand | None:
        """Return an operand that the group does not compute: the same for every column, or one entry for each."""
        product, value = self.group.products[branch], node.meta.get("val")
        early = self.index.position[node] < self.group.anchor
        if not isinstance(value, Tensor):
            return Shared(node) if early else None
        dim = 0 if per_channel else product.dim - (product.node.meta["val"].dim() - value.dim())
        if not per_channel and (dim < 0 or static_size(value.shape[dim]) == 1):
            return Shared(node) if early else None
        if dim >= value.dim() or static_size(value.shape[dim]) != product.width:
            return None
        fixed = not _why_not_weight(self.index.gm, node) and may_move(self.index, node, self.group.anchor)
        return Own((node,), dim, role) if fixed else None

    def _operand_key(self, operand: Operand) -> tuple[Any, ...]:
        """Return a value that is equal for operands of different branches that can be merged."""
        if isinstance(operand, FromRow):
            return ("row", operand.row)
        if isinstance(operand, Shared):
            return ("shared", operand.node)
        node = operand.nodes[0]
        value: Tensor = node.meta["val"]
        sizes = tuple(str(size) for i, size in enumerate(value.shape) if i != operand.dim)
        described = cast("tuple[Any, ...]", value_signature(value))
        trained = self.by_training and trains(self.index.gm, node)
        return ("own", operand.dim, sizes, value.dtype, described[4], trained)


def may_move(index: Index, node: Node, anchor: int) -> bool:
    """Whether a fixed value can be computed at an earlier position: no write and no mode switch comes between."""
    while index.position[node] > anchor and node.op == "call_function":
        if any(j > anchor for j in index.dependencies.before.get(index.position[node], ())):
            return False
        node = node.all_input_nodes[0]
    return True


def leaves(node: Node) -> list[Node]:
    """Return the nodes among a call's arguments, once per occurrence, in the order of `map_arg`."""
    nodes: list[Node] = []
    map_arg((node.args, dict(node.kwargs)), lambda n: (nodes.append(n), n)[1])
    return nodes


def _together(parts: Sequence[Operand]) -> Operand:
    first = parts[0]
    if isinstance(first, Own):
        return Own(tuple(cast("Own", part).nodes[0] for part in parts), first.dim, first.role)
    return first


def _literal(value: Any) -> Any:
    """Return an argument without its nodes as a comparable value that distinguishes types and signs of zero."""
    if isinstance(value, Node):
        return Node
    if isinstance(value, (tuple, list)):
        return tuple(_literal(v) for v in cast("Sequence[Any]", value))
    if isinstance(value, dict):
        return tuple((k, _literal(v)) for k, v in cast("dict[str, Any]", value).items())
    return (type(value), repr(value) if isinstance(value, float) else value)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Joiner = Callable[["Sequence[Node | Missing]", int, str], Any]


@dataclass(frozen=True)
class Missing:
    """The bias of a product without one in a group with biases: zeros like theirs."""

    width: int
    like: Tensor

    def zeros(self) -> Tensor:
        return torch.zeros(self.width, dtype=self.like.dtype, device=self.like.device)


def biases(group: SiblingGroup) -> list[Node | Missing]:
    """Return the bias of each product of a group, empty if none has one."""
    first = next((p.bias for p in group.products if p.bias is not None), None)
    if first is None:
        return []
    like: Tensor = first.meta["val"]
    return [p.bias if p.bias is not None else Missing(p.width, like) for p in group.products]


def product_arguments(group: SiblingGroup, of: Callable[[Node], Any], joined: Joiner) -> Arguments:
    """Return the arguments of the joint product; `of` maps an operand, `joined` concatenates operands."""
    first, form = group.products[0], group.products[0].form
    arguments = normalized_arguments(first.node)
    arguments[form.value] = of(first.value)
    arguments[form.weight] = joined([p.weight for p in group.products], form.weight_dim, "weight")
    if form.bias is not None:
        group_biases = biases(group)
        arguments[form.bias] = joined(group_biases, 0, "bias") if group_biases else None
    return to_args_kwargs(cast("OpOverload", first.node.target), arguments)


def row_arguments(
    row: Row, of_row: Callable[[int], Any], of: Callable[[Node], Any], joined: Joiner
) -> Arguments:
    """Return the arguments of a lifted operation: those of the first branch, with its operands replaced one by one."""
    operands: list[Any] = []
    for operand in row.operands:
        if isinstance(operand, FromRow):
            operands.append(of_row(operand.row))
        elif isinstance(operand, Shared):
            operands.append(of(operand.node))
        else:
            operands.append(joined(operand.nodes, operand.dim, operand.role))
    rest = iter(operands)
    node = row.operations[0]
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda _: next(rest))
    return tuple(args), dict(kwargs)
