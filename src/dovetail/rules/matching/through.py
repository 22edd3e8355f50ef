"""What a pattern may look through when it says so: views that move nothing, and casts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.fx import Node

from dovetail.graph.normalform import by_name, op_name
from dovetail.graph.spellings import traits
from dovetail.rules.matching.template import Where

_VIEWS = frozenset({"reshape", "view", "unsqueeze", "squeeze", "clone", "alias", "flatten"})
_CASTS = frozenset({"_to_copy", "to"})
_DIMS = frozenset({"dim", "dims", "dim0", "dim1"})
WAYS = ("views", "casts")


class Through:
    """What may lie between the operations of a pattern.

    Only views that keep the elements in their order count, and they may not change what an operation means:
    dims are the same counted from the end, and what is not elementwise finds and leaves the same last dimension
    and as many elements. Casts are those between floats.
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
        """Whether two dims are the same counted from the end, in an argument that is a dim, and equally long."""
        if where is None or not self.views:
            return False
        node, path = where
        schema = getattr(node.target, "_schema", None)
        name = path[1] if path[0] == 1 else schema.arguments[path[1]].name if schema is not None else ""
        left, right = _first_tensor(node), _first_tensor(theirs)
        if name not in _DIMS or left is None or right is None:
            return False
        return (
            ours_dim - left.dim() == their_dim - right.dim()
            and left.shape[ours_dim] == right.shape[their_dim]
        )

    def same_value(self, ours: Node, theirs: Node, same_number: Callable[[Any, Any], bool]) -> bool:
        """Whether two values are the same but for what was looked through."""
        left, right = ours.meta.get("val"), theirs.meta.get("val")
        if not isinstance(left, Tensor) or not isinstance(right, Tensor) or left.device != right.device:
            return False
        both_floats = left.is_floating_point() and right.is_floating_point()
        if left.dtype != right.dtype and not (self.casts and both_floats):
            return False
        if left.dim() == right.dim() and all(
            same_number(a, b) for a, b in zip(left.shape, right.shape, strict=True)
        ):
            return True
        if not self.views or not same_number(left.numel(), right.numel()):
            return False
        return traits(ours).pointwise or _same_last(ours, theirs, same_number)


def _first_tensor(node: Node) -> Tensor | None:
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if isinstance(value, Tensor):
            return value
    return None


def _same_last(ours: Node, theirs: Node, same_number: Callable[[Any, Any], bool]) -> bool:
    """Whether the results, and each pair of tensor operands, have last dimensions of the same size."""
    left = [ours, *ours.all_input_nodes]
    right = [theirs, *theirs.all_input_nodes]
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        mine, other = a.meta.get("val"), b.meta.get("val")
        if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
            continue
        if (mine.dim() == 0) != (other.dim() == 0):
            return False
        if mine.dim() and not same_number(mine.shape[-1], other.shape[-1]):
            return False
    return True
