"""Regions made by request, as a pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, checked_init
from dovetail.outlining.outline import outline
from dovetail.outlining.requests import Request
from dovetail.passes.base import Pass


@checked_init()
@dataclass(frozen=True, repr=False, init=False)
class Outline(Pass):
    """Make the regions that are asked for, all in one sweep, as `dovetail.outline` does.

    Needs: operations by name, for a node belongs to one graph only. Leaves: a call of each region where its
    operations stood. A request that cannot be met raises, and nothing has changed.
    """

    requests: tuple[Request, ...] = ()

    def __init__(self, *requests: Request | Iterable[Request]) -> None:
        flat = [r for given in requests for r in ([given] if isinstance(given, Request) else _listed(given))]
        for request in flat:
            if not isinstance(request, Request):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgument(f"Outline takes requests, not {type(request).__name__}.")
            if any(isinstance(node, Node) for node in request.nodes):
                raise InvalidArgument(
                    f"Outline: the request for '{request.kind}' lists nodes of one graph; give their names."
                )
        if not flat:
            raise InvalidArgument("Outline needs at least one Request.")
        object.__setattr__(self, "requests", tuple(flat))

    def run(self, gm: GraphModule) -> GraphModule:
        """The graph with the regions made."""
        return outline(gm, list(self.requests))


def _listed(requests: object) -> list[Request]:
    if not isinstance(requests, Iterable):
        raise InvalidArgument(f"Outline takes requests, not {type(requests).__name__}.")
    return list(requests)
