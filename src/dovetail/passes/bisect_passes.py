"""Bisection: finding the pass, and the one change of that pass, that breaks a graph.

`first_bad` is the binary search and `GraphCheck` the evaluation of the user's predicate; `bisect_lowering` and
`Schedule.verify` use them too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, checked_call
from dovetail.ir.graph_module import require_graph
from dovetail.outlining.region import Region, regions
from dovetail.passes.graph_equality import same_graph
from dovetail.passes.pass_manager import Composite, Pass, Pipeline, Place, Step, Watcher, trace


@dataclass(frozen=True, eq=False)
class Verdict:
    """The result of `bisect`. `culprit` is None if the graph is good after all passes.

    `place` is the culprit's place in the pipeline. `fuel` is the number of its first change that breaks the graph, if
    it has a `fuel` option; `regions` are the names of those that this one change created. `before` is the last good graph
    and `after` the first bad one: `dovetail.diff(v.before, v.after)` shows the change. `error` is the exception that
    the pass or `still_good` raised, if that was the breakage.
    """

    culprit: Pass | None
    place: str = ""
    steps: int = 0
    evaluations: int = 0
    fuel: int | None = None
    regions: tuple[str, ...] = ()
    error: Exception | None = field(default=None, repr=False)
    before: GraphModule | None = field(default=None, repr=False)
    after: GraphModule | None = field(default=None, repr=False)

    @property
    def good(self) -> bool:
        """Whether no pass breaks the graph."""
        return self.culprit is None

    def __str__(self) -> str:
        evaluations = f"({_counted(self.evaluations, 'evaluation')})"
        if self.culprit is None:
            return f"still good after all of {_counted(self.steps, 'pass', 'passes')} {evaluations}"
        lines = [f"pass {self.place} breaks it: {self.culprit!r} {evaluations}"]
        if self.fuel is not None:
            lines.append(f"  its change number {self.fuel} is the first that does (fuel={self.fuel})")
        lines += [f"  which made region '{name}'" for name in self.regions]
        if self.error is not None:
            lines.append(f"  {type(self.error).__name__}: {self.error}")
        return "\n".join(lines)


@checked_call()
def bisect(
    pipeline: Pass,
    gm: GraphModule,
    still_good: Callable[[GraphModule], bool],
    *,
    errors: str = "bad",
    in_order: bool = False,
) -> Verdict:
    """Find the first pass after which `still_good(graph)` is false, and its first change if it takes `fuel`.

    The pipeline runs once; nested pipelines and rounds count as steps of their own. The number of evaluations is then
    logarithmic in the steps, and in the changes of the culprit. If the graph breaks, heals and breaks again, one of
    the breakages is found; with `in_order` every step is evaluated, and it is the first. A graph for which
    `still_good` raises is bad; with `errors="raise"` the exception is raised.
    """
    require_graph(gm)
    if not isinstance(pipeline, Pass):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"bisect takes a pass or a pipeline, not {type(pipeline).__name__}.")
    is_good = GraphCheck(still_good, errors)
    if not is_good(gm):
        raise InvalidArgument(
            "the graph is not good before any pass, so no pass can have broken it; look at `still_good`."
        ) from is_good.raised.get(gm)
    history, failure = _History(gm), None
    try:
        trace(pipeline if isinstance(pipeline, Composite) else Pipeline([pipeline]), gm, watcher=history)
    except Exception as error:
        if history.running is None:
            raise
        failure = error
    graphs, last = history.graphs, len(history.graphs) - 1
    bad: int | None = None
    if in_order:
        bad = next((i for i in range(1, last + 1) if not is_good(graphs[i])), None)
    elif last and not is_good(graphs[last]):
        bad = first_bad(0, last, lambda i: not is_good(graphs[i]))
    if bad is not None:
        return _narrowed(history, is_good, bad)
    if history.running is None:
        return Verdict(None, steps=history.steps, evaluations=is_good.count)
    step, place = history.running
    steps = history.steps + 1
    return Verdict(step, place, steps, is_good.count, error=failure, before=graphs[-1])


def first_bad(good: int, bad: int, is_bad: Callable[[int], bool]) -> int:
    """Return a bad number that follows a good one, by binary search between a good and a bad number."""
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_bad(middle):
            bad = middle
        else:
            good = middle
    return bad


class GraphCheck:
    """Evaluates `still_good` on graphs, counts the evaluations, and stores what it raised by graph."""

    def __init__(self, still_good: Callable[[GraphModule], bool], errors: str) -> None:
        if not callable(still_good):
            raise InvalidArgument(
                f"still_good is a {type(still_good).__name__}; give a function of the graph."
            )
        if errors not in ("bad", "raise"):
            raise InvalidArgument(f"errors {errors!r} is neither 'bad' nor 'raise'.")
        self.still_good, self.errors = still_good, errors
        self.count = 0
        self.raised: dict[GraphModule, Exception] = {}

    def __call__(self, gm: GraphModule) -> bool:
        self.count += 1
        try:
            answer: Any = self.still_good(gm)
        except Exception as error:
            if self.errors == "raise":
                raise
            self.raised[gm] = error
            return False
        if answer is None:
            raise InvalidArgument("still_good returned None: let it return True or False.")
        return bool(answer)


class _History(Watcher):
    """The graphs before and after each step of a pipeline that changed something."""

    def __init__(self, gm: GraphModule) -> None:
        self.graphs = [gm]
        self.changes: list[tuple[Pass, str]] = []
        self.running: tuple[Pass, str] | None = None
        self.steps = 0

    def started(self, step: Pass, place: Place) -> None:
        self.running = (step, str(place))

    def finished(self, step: Pass, row: Step, before: GraphModule, after: GraphModule) -> None:
        self.steps += 1
        self.running = None
        if row.changed:
            self.graphs.append(after)
            self.changes.append((step, row.place))


def _narrowed(history: _History, is_good: GraphCheck, bad: int) -> Verdict:
    """Return the verdict for the step that produced a bad graph: with fuel, the first of its changes."""
    (step, place), before, after = history.changes[bad - 1], history.graphs[bad - 1], history.graphs[bad]
    fuel: int | None = None
    if any(f.name == "fuel" for f in dataclasses.fields(step)):
        fuel, before, after = _first_change(step, before, after, is_good)
    return Verdict(
        culprit=step,
        place=place,
        steps=history.steps,
        evaluations=is_good.count,
        fuel=fuel,
        regions=() if fuel is None else _new_regions(before, after),
        error=is_good.raised.get(after),
        before=before,
        after=after,
    )


def _first_change(
    step: Pass, good: GraphModule, bad: GraphModule, is_good: GraphCheck
) -> tuple[int | None, GraphModule, GraphModule]:
    """Return the least fuel with which a pass breaks a graph, and the graphs before and after that change."""
    start, most = good, cast("int | None", getattr(step, "fuel", None))
    low, high = 0, 1
    while True:
        graph = _with_fuel(step, high)(start)
        if (most is not None and high >= most) or same_graph(graph, bad):
            high = high if most is None else min(high, most)
            break
        if not is_good(graph):
            bad = graph
            break
        low, good = high, graph
        high *= 2
        if low > len(start.graph.nodes):
            return None, start, bad  # with any fuel it does not do what it does without a limit

    def is_bad(fuel: int) -> bool:
        nonlocal good, bad
        graph = _with_fuel(step, fuel)(start)
        if same_graph(graph, bad):
            return True
        if is_good(graph):
            good = graph
            return False
        bad = graph
        return True

    fuel = first_bad(low, high, is_bad)
    return fuel, good, bad


def _with_fuel(step: Pass, fuel: int) -> Pass:
    return cast("Pass", dataclasses.replace(cast("Any", step), fuel=fuel))


def _new_regions(before: GraphModule, after: GraphModule) -> tuple[str, ...]:
    """Return the regions of the later graph that the earlier one does not have, compared by kind and operations."""

    def key(region: Region) -> tuple[str, tuple[str, ...]]:
        return region.kind, region.nodes

    known = {key(r) for r in regions(before, nested=True)}
    return tuple(r.name for r in regions(after, nested=True) if key(r) not in known)


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
