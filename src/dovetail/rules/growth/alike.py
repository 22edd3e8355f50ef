"""When two operations do the same with a value that both read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from dovetail.graph.commuting import commutes
from dovetail.graph.module import attribute

Form = tuple[Any, ...]
_SHARED = "the shared value"


def form(node: Node, shared: Node, root: nn.Module, same: Callable[[Node], Any]) -> Form:
    """What an operation does with a value that it reads; equal for operations that are alike.

    Literals count as they are, the shared value by its place among the arguments, anything else by what `same` says.
    """
    args = [_form(a, shared, same) for a in node.args]
    if len(args) > 1 and commutes(node):
        args[:2] = sorted(args[:2], key=repr)
    kwargs = tuple((k, _form(v, shared, same)) for k, v in sorted(node.kwargs.items()))
    return (_called(node, root), tuple(args), kwargs)


def kind_of_operand(node: Node) -> Any:
    """What two operands must agree on: dtype and rank, None where they are not known."""
    value = node.meta.get("val")
    return (str(value.dtype), value.dim()) if isinstance(value, torch.Tensor) else None


def difference(first: Form, second: Form) -> str:
    """In words how two forms of one operation differ."""
    for a, b in zip((*first[1], *first[2]), (*second[1], *second[2]), strict=False):
        if a != b:
            return f"{_words(a)} here and {_words(b)} there"
    return "other arguments"


def _words(part: Any) -> str:
    if isinstance(part, tuple):
        items = cast("tuple[Any, ...]", part)
        if len(items) == 2 and items[0] == "operand":
            known = items[1]
            return f"a {known[0].removeprefix('torch.')} of rank {known[1]}" if known else "an operand"
        return f"({', '.join(_words(p) for p in items)})"
    return str(part)


def _called(node: Node, root: nn.Module) -> Any:
    """What is called: the target itself, or for a leaf module what kind of module it is."""
    if node.op != "call_module":
        return (node.op, node.target)
    module = attribute(root, cast("str", node.target))
    if not isinstance(module, nn.Module) or isinstance(module, GraphModule):
        return (node.op, node.target)
    weights = tuple((n, str(p.dtype), p.dim()) for n, p in module.named_parameters())
    # A linear layer says nothing but its sizes.
    return (type(module), weights, "" if isinstance(module, nn.Linear) else module.extra_repr())


def _form(value: Any, shared: Node, same: Callable[[Node], Any]) -> Any:
    if value is shared:
        return _SHARED
    if isinstance(value, Node):
        return ("operand", same(value))
    if isinstance(value, (tuple, list)):
        return tuple([_form(v, shared, same) for v in cast("list[Any]", value)])
    if isinstance(value, slice):
        return ("slice", *(_form(v, shared, same) for v in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return ("dict", *((k, _form(v, shared, same)) for k, v in items))
    return f"{type(value).__name__} {value!r}"
