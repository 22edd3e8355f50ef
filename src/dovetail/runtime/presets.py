"""The default pipelines of `compile`: passes from a captured graph to a lowered one, for some backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument
from dovetail.lowering.lower import lower_with
from dovetail.lowering.options import Options
from dovetail.outlining.region import call_of
from dovetail.passes.fold_constants import FoldConstants
from dovetail.passes.pass_manager import Pass, Pipeline
from dovetail.passes.region_passes import Fuse
from dovetail.rules.partition import capability
from dovetail.rules.repeated_blocks.repeats_rule import repeats

REST = "rest"


def _is_not_a_region(node: Node) -> bool:
    return call_of(node.meta) is None


def blocks() -> tuple[Pass, ...]:
    """Return passes that leave nothing outside of regions: repeated blocks, each one body, and what is between them."""
    return (
        Fuse(repeats(), rounds=1),
        Fuse(capability(_is_not_a_region, REST, min_size=1, join_siblings=True), rounds=1),
    )


@dataclass(frozen=True)
class CompilePreset:
    """What is done to every captured graph of a model: the pipeline, the backends and the options."""

    pipeline: Pass
    backends: Any
    options: Options

    @property
    def strict(self) -> bool:
        """Whether a call that cannot be captured is an error."""
        return self.options.strict

    def __call__(self, gm: GraphModule) -> GraphModule:
        """Return the lowered graph."""
        fused = self.pipeline(gm)
        return lower_with(fused, self.backends, self.options)


def default_pipeline(backends: Any, rules: Any = None) -> Pipeline:
    """Return the passes for some backends.

    Compilers get repeated blocks as large as possible. Rules go first if the caller names some, or if a backend has
    kernels for kinds, which the rules of the library find. If a backend has rules of its own, what is between its
    regions goes to the others: a block that contains some could not be assigned as a whole. Such a backend may lack
    the operations that compute masks and positions, which are folded before.
    """
    own_rules = [b.rules for b in backends if b.rules is not None]
    if rules is None and own_rules:
        return Pipeline([FoldConstants(), *map(Fuse, own_rules), blocks()[-1]])
    named = rules is not None or any(b.kernels for b in backends)
    if not named:
        return Pipeline(list(blocks()))
    return Pipeline([Fuse(rules), *blocks()])


def as_pipeline(value: Any) -> Pass:
    """Return a pass, or a list of them as a pipeline."""
    if isinstance(value, Pass):
        return value
    if isinstance(value, (list, tuple)):
        return Pipeline(list(value))  # pyright: ignore[reportUnknownArgumentType]
    raise InvalidArgument(f"pipeline {value!r} is neither a pass nor a list of passes.")
