"""Regions opened again, as a pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from dovetail.errors import checked_init
from dovetail.outlining.inline import inline
from dovetail.outlining.region import regions
from dovetail.passes.base import Pass


@checked_init()
@dataclass(frozen=True, repr=False)
class Inline(Pass):
    """Open regions: all, the one called `region`, or all of a `kind`, as `dovetail.inline` does.

    Needs: nothing; a graph without regions, or with none of the kind, stays as it is, so that it can be repeated. A
    `region` that is not there is an error. Leaves: the operations where they stood, under their names.
    """

    region: str | None = None
    kind: str | None = None
    depth: int | None = None

    def run(self, gm: GraphModule) -> GraphModule:
        """The graph with the regions opened; the very graph it was given if there are none."""
        if self.region is None and not regions(gm, kind=self.kind, nested=self.kind is not None):
            return gm
        return inline(gm, self.region, kind=self.kind, depth=self.depth)
