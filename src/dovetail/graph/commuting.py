"""Which operations take their two operands in any order."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from dovetail.graph.spellings import traits

_NAMES = """
    add mul eq ne maximum minimum max min fmax fmin logical_and logical_or logical_xor bitwise_and bitwise_or
    bitwise_xor and_ or_ xor hypot logaddexp logaddexp2 __and__ __or__ __xor__ __add__ __mul__ __radd__ __rmul__
"""
_COMMUTATIVE = frozenset(_NAMES.split())


def base_name(node: Node) -> str:
    """The name of what a call does without namespace, overload or spelling: `add`, whatever adds."""
    target: Any = node.target
    if isinstance(target, str):
        return target
    overloaded = getattr(target, "overloadpacket", None)
    name = getattr(overloaded or target, "__name__", "")
    return str(name)


def commutes(node: Node) -> bool:
    """Whether the first two operands may be swapped without changing the value."""
    if node.op not in ("call_function", "call_method") or base_name(node) not in _COMMUTATIVE:
        return False
    if len(node.args) < 2 or (len(node.args) > 2 and node.args[2] != 1):
        return False
    if node.kwargs.get("alpha", 1) != 1:
        return False
    if base_name(node) in ("max", "min") and not all(isinstance(a, Node) for a in node.args):
        return False  # the second is a dim
    told = traits(node)
    return not told.writes or told.writes == ("out",)
