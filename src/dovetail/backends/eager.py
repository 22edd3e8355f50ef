"""Runs the body itself, as the reference for other backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from dovetail.errors import checked_init
from dovetail.ir.graph_module import Body
from dovetail.lowering.backend_protocol import Answer, Backend, Compiled
from dovetail.outlining.inline import flat
from dovetail.outlining.region import Region


@checked_init()
class Eager(Backend):
    """Runs a region's body unchanged."""

    name = "eager"
    trains = True
    double_backward = True

    def supports(self, region: Region) -> Answer:
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        # Calling a module costs more than many of its operations.
        return flat(cast("Body", region.body)).forward
