"""Activation checkpointing of a region, as a backend that runs its body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.checkpoint import checkpoint

from dovetail.lowering.backend import Answer, Backend, Compiled
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline


class Checkpoint(Backend):
    """Runs a body and keeps none of its inner values for backward: they are computed again, by torch's own means."""

    name = "checkpoint"
    version = "1"
    trains = True

    def supports(self, region: Region) -> Answer:
        if any(word != "random" for word in region.effects):
            return Decline(f"it has effects ({', '.join(region.effects)}) that would happen twice")
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        body = region.body

        def run(*operands: Any) -> Any:
            return checkpoint(body, *operands, use_reentrant=False)

        return run
