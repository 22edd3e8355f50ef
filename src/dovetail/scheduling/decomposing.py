"""Operations taken apart into simpler ones."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from dovetail.errors import ScheduleError


def decomposed(gm: GraphModule, names: list[str]) -> GraphModule:
    """The graph with some operations written out; those that cannot be are a ScheduleError."""
    raise ScheduleError(f"{names[0]} cannot be taken apart")


def can_be_taken_apart(node: Node) -> bool:
    """Whether an operation has a form of simpler ones."""
    return False
