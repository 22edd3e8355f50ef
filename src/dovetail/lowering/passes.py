"""Lowering as a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

from torch.fx import GraphModule

from dovetail.errors import checked_init
from dovetail.graph.weight_guard import CHECK_INTERVAL
from dovetail.lowering.backend import requested
from dovetail.lowering.choosing import Granularity
from dovetail.lowering.lower import lower_with
from dovetail.lowering.options import Options
from dovetail.passes.base import Pass


@checked_init(strict="on_error='raise'")
@dataclass(frozen=True, repr=False)
class Lower(Pass):
    """Give regions to backends, as `dovetail.lower` does; its options are the same.

    Needs: regions. Leaves: the same graph with compiled state beside its bodies, values equal within tolerance.
    """

    backends: Any = None
    plan: Mapping[str, Any] | None = field(default=None, hash=False)
    on_error: Literal["fallback", "raise"] = "fallback"
    verify: bool = False
    granularity: Granularity = "outer"
    smallest: int = 2
    recompile_limit: int | None = None
    timeout: float | None = None
    cache: bool | str | Path = True
    weight_check_interval: int | None = CHECK_INTERVAL

    def __post_init__(self) -> None:
        self._options()  # what is wrong is told where it is written
        if isinstance(self.backends, Mapping):
            for value in cast("Mapping[Any, Any]", self.backends).values():
                requested(value)
        else:
            requested(self.backends)

    def run(self, gm: GraphModule) -> GraphModule:
        """The graph with its regions lowered."""
        return lower_with(gm, self.backends, self._options())

    def _options(self) -> Options:
        given = vars(self)
        return Options(**{f.name: given[f.name] for f in fields(Options) if f.name in given})
