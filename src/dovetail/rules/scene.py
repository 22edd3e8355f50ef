"""A graph as rules see it: one index and the facts derived from it, shared by all rules of a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar, cast

from torch.fx import GraphModule, Node

from dovetail.graph.index import Index
from dovetail.graph.labels import structural_order
from dovetail.outlining.record import Call, call_of
from dovetail.rules.limits import UNLIMITED, Limits

Fact = TypeVar("Fact")


class Scene:
    """What rules look at. Positions are those of `index`; facts are worked out when first asked for.

    `barred` has the positions that no rule may take, each with the reason.
    """

    def __init__(
        self,
        gm: GraphModule,
        *,
        index: Index | None = None,
        limits: Limits = UNLIMITED,
        barred: Mapping[int, str] | None = None,
        round: int = 1,
    ) -> None:
        self.gm = gm
        self.index = index if index is not None else Index(gm)
        self.limits = limits
        self.barred: Mapping[int, str] = barred or {}
        self.round = round
        self._facts: dict[Any, Any] = {}

    def fact(self, make: Callable[[Scene], Fact]) -> Fact:
        """What `make` says of this scene, worked out once."""
        if make not in self._facts:
            self._facts[make] = make(self)
        return self._facts[make]

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the graph by position."""
        return self.index.nodes

    @cached_property
    def order(self) -> list[int]:
        """A place for each position that neither names nor the listing can change, for breaking ties."""
        return structural_order(self.index)

    @cached_property
    def calls(self) -> dict[int, Call]:
        """The record of each position that calls a region."""
        found: dict[int, Call] = {}
        for i, node in enumerate(self.nodes):
            if node.op == "call_module":
                call = call_of(node.meta)
                if call is not None:
                    found[i] = call
        return found

    def kind_of(self, position: int) -> str | None:
        """The kind of the region called at a position, None for any other operation."""
        call = self.calls.get(position)
        return call.identity.kind if call is not None else None

    def value(self, position: int) -> Any:
        """What is known of a position's value: a fake tensor, a number, a tuple; None if nothing is."""
        return self.nodes[position].meta.get("val")

    def module_path(self, position: int) -> str:
        """The path of the innermost module that an operation came from, "" if that is not known."""
        stack = self.nodes[position].meta.get("nn_module_stack")
        if not stack:
            return ""
        return str(cast("tuple[Any, ...]", list(cast("dict[str, Any]", stack).values())[-1])[0])
