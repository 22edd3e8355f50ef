"""From a captured graph to a lowered one: the passes that `compile` runs, and the backends it lowers to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument
from dovetail.lowering.backend import setting
from dovetail.lowering.choosing import Granularity
from dovetail.lowering.lower import DEFAULT, check_choice, checked_settings, lower
from dovetail.outlining.record import call_of
from dovetail.passes.base import Pass
from dovetail.passes.fuse import Fuse
from dovetail.passes.pipeline import Pipeline
from dovetail.rules.capability import capability
from dovetail.rules.repeats import repeats

REST = "rest"


def _is_plain(node: Node) -> bool:
    return call_of(node.meta) is None


def blocks() -> tuple[Pass, ...]:
    """Passes that leave nothing outside of regions: blocks that repeat, each one body, and what is around them."""
    return (
        Fuse(repeats(), rounds=1),
        Fuse(capability(_is_plain, REST, min_size=1, join_siblings=True), rounds=1),
    )


@dataclass(frozen=True)
class Recipe:
    """What is done to every graph of a model: the pipeline, the backends and how they are used."""

    pipeline: Pass
    backends: Any = DEFAULT
    plan: Mapping[str, Any] | None = None
    on_error: Literal["fallback", "raise"] = "fallback"
    verify: bool = False
    granularity: Granularity = "outer"
    smallest: int = 2
    specialisations: int = 8
    timeout: float | None = None
    cache: bool | str | Path = True
    grad: bool | None = None

    def __post_init__(self) -> None:
        checked_settings(self.on_error, self.verify, self.specialisations, self.timeout, self.cache)
        check_choice(self.granularity, self.smallest, self.grad)

    def __call__(self, gm: GraphModule, ready: Callable[[], None] | None = None) -> GraphModule:
        """The lowered graph; `ready` is called between the passes and the lowering."""
        fused = self.pipeline(gm)
        if ready is not None:
            ready()
        return lower(
            fused,
            self.backends,
            plan=self.plan,
            on_error=self.on_error,
            verify=self.verify,
            granularity=self.granularity,
            smallest=self.smallest,
            specialisations=self.specialisations,
            timeout=self.timeout,
            cache=self.cache,
            grad=self.grad,
        )


def default_pipeline(backends: Any, rules: Any = None) -> Pipeline:
    """The passes for some backends.

    Compilers get blocks as large as they repeat. Rules go first where the caller names some, or where a backend has
    kernels for kinds, which the rules of the library find.
    """
    named = rules is not None or any(setting(b, "kernels") for b in backends)
    if not named:
        return Pipeline(list(blocks()))
    return Pipeline([Fuse(rules), *blocks()])


def as_pipeline(value: Any) -> Pass:
    """A pass, or a list of them as a pipeline."""
    if isinstance(value, Pass):
        return value
    if isinstance(value, (list, tuple)):
        return Pipeline(list(value))  # pyright: ignore[reportUnknownArgumentType]
    raise InvalidArgument(f"pipeline {value!r} is neither a pass nor a list of passes.")
