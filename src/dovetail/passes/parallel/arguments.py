"""The arguments of joint operations, for whoever computes their values and whoever writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg

from dovetail.graph.normalform import written
from dovetail.passes.parallel.groups import FromRow, Group, Row, Shared

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Joiner = Callable[["Sequence[Node | Missing]", int, str], Any]


@dataclass(frozen=True)
class Missing:
    """The bias of a product that has none, where others of its group do: zeros like theirs."""

    width: int
    like: Tensor

    def made(self, like: Tensor | None = None) -> Tensor:
        other = self.like if like is None else like
        return torch.zeros(self.width, dtype=other.dtype, device=other.device)


def biases(group: Group) -> list[Node | Missing]:
    """The bias of each product of a group, empty if none has one."""
    given = [p.bias for p in group.products if p.bias is not None]
    if not given:
        return []
    like: Tensor = given[0].meta["val"]
    return [p.bias if p.bias is not None else Missing(p.width, like) for p in group.products]


def product_arguments(group: Group, of: Callable[[Node], Any], joined: Joiner) -> Arguments:
    """The arguments of the joint product; `of` gives an operand, `joined` several along a dimension."""
    first = group.products[0]
    arguments = dict(first.arguments)
    arguments[first.value_name] = of(first.value)
    arguments[first.weight_name] = joined([p.weight for p in group.products], first.weight_dim, "weight")
    if first.bias_name is not None:
        given = biases(group)
        arguments[first.bias_name] = joined(given, 0, "bias") if given else None
    return written(cast("OpOverload", first.node.target), arguments)


def row_arguments(
    row: Row, of_row: Callable[[int], Any], of: Callable[[Node], Any], joined: Joiner
) -> Arguments:
    """The arguments of a lifted operation: those of the first branch's, with its operands replaced one by one."""
    made: list[Any] = []
    for operand in row.operands:
        if isinstance(operand, FromRow):
            made.append(of_row(operand.row))
        elif isinstance(operand, Shared):
            made.append(of(operand.node))
        else:
            made.append(joined(operand.nodes, operand.dim, operand.role))
    rest = iter(made)
    node = row.operations[0]
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda _: next(rest))
    return tuple(args), dict(kwargs)
