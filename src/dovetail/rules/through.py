"""What a pattern may look through when it says so: views that move nothing, and casts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.fx import Node

from dovetail.graph.normalform import by_name, op_name

_VIEWS = frozenset(
    {"reshape", "view", "unsqueeze", "squeeze", "expand", "clone", "alias", "contiguous", "flatten"}
)
_CASTS = frozenset({"_to_copy", "to"})


def see_through(what: Iterable[str]) -> Callable[[Node], Node | None]:
    """A function that gives the operand of an operation to be looked through, None for any other.

    Only views that keep the order of the elements count: a permute puts other values in a dimension's place.
    """
    allowed = frozenset(what)

    def source(node: Node) -> Node | None:
        name = op_name(node.target)
        is_view = "views" in allowed and name in _VIEWS
        if not is_view and not ("casts" in allowed and name in _CASTS and _only_casts(node)):
            return None
        operand: Any = by_name(node).get("self")
        return operand if isinstance(operand, Node) else None

    return source


def _only_casts(node: Node) -> bool:
    operand: Any = by_name(node).get("self")
    before, after = getattr(operand, "meta", {}).get("val"), node.meta.get("val")
    return (
        isinstance(before, Tensor)
        and isinstance(after, Tensor)
        and before.device == after.device
        and before.is_floating_point()
        and after.is_floating_point()
    )
