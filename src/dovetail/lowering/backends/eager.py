"""The body itself, as a backend: what everything is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.lowering.backend import Answer, Backend, Compiled
from dovetail.outlining.region import Region


class Eager(Backend):
    """Runs a region's body as it is."""

    name = "eager"
    trains = True

    def supports(self, region: Region) -> Answer:
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        return region.body
