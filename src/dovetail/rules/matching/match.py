"""A match as guards see it: the values bound to a pattern's arguments, and the operations found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from dovetail.graph.module import attribute


@dataclass(frozen=True, eq=False)
class Value:
    """A value bound to an argument of a pattern: what is known of it, and the node of the graph that makes it."""

    node: Node
    value: Any = field(repr=False)
    owner: nn.Module = field(repr=False)
    aten: Node | None = field(default=None, repr=False)
    """The node in canonical ATen that it is bound to, None where no pattern was matched."""

    @property
    def name(self) -> str:
        """The name of its node."""
        return self.node.name

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype; TypeError if it is no tensor, as for the next three."""
        return self._tensor.dtype

    @property
    def shape(self) -> torch.Size:
        """Its sizes; some may be symbols."""
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return self._tensor.dim()

    @property
    def device(self) -> torch.device:
        """The device it is on."""
        return self._tensor.device

    @property
    def users(self) -> tuple[Node, ...]:
        """The operations that read it, in the match or not."""
        return tuple(self.node.users)

    @property
    def is_input(self) -> bool:
        """Whether the graph's caller gives it."""
        return self.node.op == "placeholder"

    @property
    def is_constant(self) -> bool:
        """Whether it is a parameter, a buffer or a constant of the model, so that it is known before the graph runs."""
        return self.node.op in ("get_attr", "call_module")

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter of the model."""
        return self.node.op == "get_attr" and isinstance(
            attribute(self.owner, str(self.node.target)), nn.Parameter
        )

    @property
    def _tensor(self) -> Tensor:
        if not isinstance(self.value, Tensor):
            raise TypeError(f"'{self.name}' is {self.value!r}, not a tensor")
        return self.value


@dataclass(frozen=True, eq=False)
class Match:
    """One place where a pattern was found.

    `m["x"]` is the `Value` bound to an operand, None for an optional one that is absent, or the literal captured.
    `nodes` are the operations that would move into the region. `alternatives` tells what was taken at each `either`.
    `aten` has the operations as canonical ATen in the order of the graph, each with the node it stands for: the
    graph's own may be functions, methods and modules.
    """

    rule: str
    operands: Mapping[str, Value | None]
    literals: Mapping[str, Any]
    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]
    module_path: str = ""
    alternatives: Mapping[tuple[int, ...], int] = field(
        default_factory=dict[tuple[int, ...], int], repr=False
    )
    aten: Mapping[Node, Node] = field(default_factory=dict[Node, Node], repr=False)

    def __getitem__(self, name: str) -> Any:
        if name in self.operands:
            return self.operands[name]
        if name in self.literals:
            return self.literals[name]
        known = ", ".join([*self.operands, *self.literals])
        raise KeyError(f"'{name}' is no argument of the pattern '{self.rule}'; it has {known}")

    def __contains__(self, name: str) -> bool:
        return name in self.operands or name in self.literals
