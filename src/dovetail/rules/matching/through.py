"""What a pattern may look through when it says so: views that move nothing, and casts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import SymInt, Tensor
from torch.fx import Node

from dovetail.graph.commuting import commutes
from dovetail.graph.normalform import by_name, op_name
from dovetail.graph.spellings import traits
from dovetail.rules.matching.comparing import SameNumber, argument_name, same_fact, same_shape
from dovetail.rules.matching.template import Where

_VIEWS = frozenset({"reshape", "view", "unsqueeze", "squeeze", "clone", "alias", "flatten"})
_CASTS = frozenset({"_to_copy", "to"})
_DIMS = frozenset({"dim", "dims", "dim0", "dim1"})
WAYS = ("views", "casts")


class Through:
    """What may lie between the operations of a pattern.

    Only views that keep the elements in their order count, and they may not change what an operation means: it must
    make the same elements in the same order. Casts are those between floats.
    """

    def __init__(self, what: Iterable[str]) -> None:
        self.views, self.casts = "views" in what, "casts" in what

    def source(self, node: Node) -> Node | None:
        """The operand of an operation to be looked through, None for any other."""
        name = op_name(node.target)
        operand: Any = by_name(node).get("self")
        if not isinstance(operand, Node):
            return None
        before, after = operand.meta.get("val"), node.meta.get("val")
        if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.device != after.device:
            return None
        is_view = self.views and name in _VIEWS
        is_cast = self.casts and name in _CASTS
        floats = before.is_floating_point() and after.is_floating_point()
        return operand if is_view or (is_cast and floats) else None

    def same_dim(self, where: Where, theirs: Node, ours_dim: int, their_dim: int) -> bool:
        """Whether two dims are the same counted from the end, in an argument that is a dim."""
        if where is None or not self.views or argument_name(where) not in _DIMS:
            return False
        left, right = _first_tensor(where[0]), _first_tensor(theirs)
        return left is not None and right is not None and ours_dim - left.dim() == their_dim - right.dim()

    def same_value(self, ours: Node, theirs: Node, same_number: SameNumber) -> bool:
        """Whether two values are the same but for what was looked through."""
        left, right = ours.meta.get("val"), theirs.meta.get("val")
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            return same_fact(left, right, same_number) and _same_operands(ours, theirs, same_number)
        both_floats = left.is_floating_point() and right.is_floating_point()
        if left.dtype != right.dtype and not (self.casts and both_floats):
            return False
        if left.device != right.device:
            return False
        if not self.views:
            return same_shape(left, right, same_number)
        return _same_elements(ours, theirs, same_number)


def _same_elements(ours: Node, theirs: Node, same_number: SameNumber) -> bool:
    """Whether an operation makes the same elements in the same order of operands that only differ in their shape.

    Operands of one shape leave no doubt. Elementwise work does so if it spreads nothing but along leading dims; other
    work if all that it tells apart are trailing dims, the same in both.
    """
    if _same_operands(ours, theirs, same_number):
        return same_shape(ours.meta["val"], theirs.meta["val"], same_number)
    left, right = _tensors(ours), _tensors(theirs)
    if len(left) != len(right) or not same_number(ours.meta["val"].numel(), theirs.meta["val"].numel()):
        return False
    if traits(ours).pointwise:
        return all(_tiles(n, ours) for n in left) and all(_tiles(n, theirs) for n in right)
    count = _trailing(ours)
    if count is None or not _agree(left[1:], right[1:], same_number):
        return False
    mine, other = left[0].meta["val"].shape, right[0].meta["val"].shape
    if min(len(mine), len(other)) < count:
        return False
    tails = zip(mine[len(mine) - count :], other[len(other) - count :], strict=True)
    return all(same_number(a, b) for a, b in tails)


def _same_operands(ours: Node, theirs: Node, same_number: SameNumber) -> bool:
    """Whether the tensors that two operations read agree in shape, one by one."""
    left, right = _tensors(ours), _tensors(theirs)
    if len(left) != len(right):
        return False
    if _agree(left, right, same_number):
        return True
    if len(left) != 2 or not commutes(ours):
        return False
    # Swapped, but only where sizes tell which is which.
    one, two = (n.meta["val"].numel() for n in left)
    return not same_number(one, two) and _agree(left, right[::-1], same_number)


def _trailing(node: Node) -> int | None:
    """How many trailing dims of its first operand an operation tells apart; None if that is not known."""
    arguments, name = by_name(node), op_name(node.target)
    operands = _tensors(node)
    rank = operands[0].meta["val"].dim()
    if name == "linear":
        return 1
    if name == "matmul":
        return 1 if len(operands) == 2 and operands[1].meta["val"].dim() <= 2 else None
    shape = arguments.get("normalized_shape")
    if isinstance(shape, (list, tuple)):
        return len(cast("list[Any]", shape))
    if len(operands) > 1:
        return None
    given = [arguments[n] for n in _DIMS if n in arguments]
    dims = [d for g in given for d in (cast("list[Any]", g) if isinstance(g, (list, tuple)) else [g])]
    if not dims or not all(type(d) is int and 0 <= d < rank for d in dims):
        return None
    return rank - min(dims)


def _tiles(operand: Node, result: Node) -> bool:
    """Whether elementwise work reads an operand in order, over and over: it is spread along leading dims alone."""
    mine, whole = list(operand.meta["val"].shape), list(result.meta["val"].shape)
    while mine and _is(mine[0], 1):
        mine.pop(0)
    return len(mine) <= len(whole) and all(
        _is(a, b) for a, b in zip(mine, whole[len(whole) - len(mine) :], strict=True)
    )


def _is(a: Any, b: Any) -> bool:
    """Whether two sizes of one graph are the same, symbols by what they stand for."""
    left = a.node.expr if isinstance(a, SymInt) else a
    right = b.node.expr if isinstance(b, SymInt) else b
    return bool(left == right)


def _agree(left: list[Node], right: list[Node], same_number: SameNumber) -> bool:
    return all(
        same_shape(a.meta["val"], b.meta["val"], same_number) for a, b in zip(left, right, strict=True)
    )


def _tensors(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]


def _first_tensor(node: Node) -> Tensor | None:
    operands = _tensors(node)
    return operands[0].meta["val"] if operands else None
