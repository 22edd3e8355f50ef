"""What a pass is: a value that takes a graph and returns a graph."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, PassError
from dovetail.graph.module import require_graph, without_collector
from dovetail.graph.spellings import qualified_name
from dovetail.passes.changes import Snapshot


@dataclass(frozen=True)
class Finding:
    """What a pass makes of one place in a graph: it changes it, or it has a reason not to.

    `nodes` are the names of the operations it is about. `reason` is empty where it changes them.
    """

    nodes: tuple[str, ...]
    what: str
    reason: str = ""

    @property
    def taken(self) -> bool:
        """Whether the pass changes this place."""
        return not self.reason

    def __str__(self) -> str:
        return f"{', '.join(self.nodes)}: {self.what if self.taken else f'left alone: {self.reason}'}"


@dataclass(frozen=True)
class Pass(ABC):
    """A step from graph to graph, as a value: its fields are its options, so it prints and compares by them.

    Write one as a frozen dataclass with a `run`. A pass never edits the graph it is given; it may return that very
    graph where there is nothing to do. Calling a pass checks both.
    """

    @property
    def name(self) -> str:
        """What records and errors call it."""
        return type(self).__name__

    @abstractmethod
    def run(self, gm: GraphModule) -> GraphModule:
        """The graph that comes of `gm`, which is left as it is. Called through `__call__`."""

    def explain(self, gm: GraphModule) -> tuple[Finding, ...]:
        """What the pass would change in `gm` and what it would leave alone, with reasons, as far as it tells."""
        return ()

    def __call__(self, gm: GraphModule) -> GraphModule:
        return apply(self, gm)[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(_options(self))})"


def apply(step: Pass, gm: GraphModule) -> tuple[GraphModule, float]:
    """Run one pass: what it returned, and the seconds that took. PassError if it did not keep to the rules."""
    require_graph(gm)
    with without_collector():
        before = Snapshot(gm)
    start = time.perf_counter()
    new: object = step.run(gm)
    seconds = time.perf_counter() - start
    if not isinstance(new, GraphModule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PassError(
            step.name, f"returned {type(new).__name__} instead of a GraphModule; let `run` return one"
        )
    with without_collector():
        edited = before.edited()
    if edited is not None:
        raise PassError(
            step.name,
            f"edited the graph it was given ({edited}); work on a copy, as `copy.copy` of a captured graph makes it",
        )
    return new, seconds


def require_fuel(fuel: object) -> None:
    """Raise InvalidArgument unless `fuel` is None or a number of changes, 0 or more."""
    if fuel is not None and (not isinstance(fuel, int) or isinstance(fuel, bool) or fuel < 0):
        raise InvalidArgument(f"fuel {fuel!r}: give None for no limit, or the number of changes, 0 and more.")


def _options(step: Pass) -> list[str]:
    """The fields that differ from their defaults, as they would be written."""
    return [
        f"{field.name}={shown(value)}"
        for field in dataclasses.fields(step)
        if field.repr and not _is_default(field, value := getattr(step, field.name))
    ]


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return value is field.default or (type(value) is type(field.default) and value == field.default)
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return False


def shown(value: object) -> str:
    """An option as text; functions by name, since where they lie in memory says nothing."""
    if isinstance(value, (tuple, list)):
        items = [shown(v) for v in cast("list[object]", value)]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    written = repr(value)
    if " at 0x" in written and isinstance(value, Callable):
        return qualified_name(value)
    return written
