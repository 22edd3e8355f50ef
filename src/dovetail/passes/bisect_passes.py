"""Finding the pass, and the one change of that pass, that breaks something."""

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
    """What bisecting found. `culprit` is None if the graph is good after everything.

    `place` is where the culprit stands in the pipeline. `fuel` is the number of its first change that breaks, where
    it can be told to stop after so many; `regions` are the names of those that this one change made. `before` is the
    last good graph and `after` the first bad one: `dovetail.diff(v.before, v.after)` shows the change. `error` is
    what was raised, by the pass or by `still_good`, where that was the breakage.
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
        """Whether nothing breaks it."""
        return self.culprit is None

    def __str__(self) -> str:
        looked = f"({_counted(self.evaluations, 'evaluation')})"
        if self.culprit is None:
            return f"still good after all of {_counted(self.steps, 'pass', 'passes')} {looked}"
        lines = [f"pass {self.place} breaks it: {self.culprit!r} {looked}"]
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
    """Find the first pass after which `still_good(graph)` is false, and its first change where it takes `fuel`.

    The pipeline runs once; nested pipelines and rounds count as steps of their own. Then the number of evaluations
    is logarithmic in the steps, and in the changes of the culprit. If the graph breaks, heals and breaks again, one
    of the breakages is found; with `in_order` every step is evaluated, and it is the first. A `still_good` that
    raises has found the graph bad, or with `errors="raise"` raises.
    """
    require_graph(gm)
    if not isinstance(pipeline, Pass):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"bisect takes a pass or a pipeline, not {type(pipeline).__name__}.")
    if not callable(still_good):
        raise InvalidArgument(f"still_good is a {type(still_good).__name__}; give a function of the graph.")
    if errors not in ("bad", "raise"):
        raise InvalidArgument(f"errors {errors!r} is neither 'bad' nor 'raise'.")
    judge = _Judge(still_good, errors)
    if not judge(gm):
        raise InvalidArgument(
            "the graph is not good before any pass, so no pass can have broken it; look at `still_good`."
        ) from judge.raised.get(gm)
    history, failure = _History(gm), None
    try:
        trace(pipeline if isinstance(pipeline, Composite) else Pipeline([pipeline]), gm, watcher=history)
    except Exception as error:
        if history.running is None:
            raise
        failure = error
    bad = _first_in_order(history, judge) if in_order else _first_bad(history, judge)
    if bad is not None:
        return _narrowed(history, judge, bad)
    if history.running is None:
        return Verdict(None, steps=history.steps, evaluations=judge.count)
    step, place = history.running
    steps = history.steps + 1
    return Verdict(step, place, steps, judge.count, error=failure, before=history.graphs[-1])


class _Judge:
    """Asks `still_good` once for each graph, counts how often, and keeps what it raised."""

    def __init__(self, still_good: Callable[[GraphModule], bool], errors: str) -> None:
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
    """The graphs that a pipeline goes through, one more than the steps that changed something."""

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


def _first_bad(history: _History, judge: _Judge) -> int | None:
    """The index of a bad graph that comes right after a good one; None if the last one is good."""
    low, high = 0, len(history.graphs) - 1
    if high == 0 or judge(history.graphs[high]):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if judge(history.graphs[middle]):
            low = middle
        else:
            high = middle
    return high


def _first_in_order(history: _History, judge: _Judge) -> int | None:
    return next((i for i, graph in enumerate(history.graphs) if i and not judge(graph)), None)


def _narrowed(history: _History, judge: _Judge, bad: int) -> Verdict:
    """The verdict for the step that made a bad graph: with fuel, the first of its changes."""
    (step, place), before, after = history.changes[bad - 1], history.graphs[bad - 1], history.graphs[bad]
    fuel: int | None = None
    if any(f.name == "fuel" for f in dataclasses.fields(step)):
        fuel, before, after = _first_change(step, before, after, judge)
    return Verdict(
        culprit=step,
        place=place,
        steps=history.steps,
        evaluations=judge.count,
        fuel=fuel,
        regions=() if fuel is None else _made(before, after),
        error=judge.raised.get(after),
        before=before,
        after=after,
    )


def _first_change(
    step: Pass, good: GraphModule, bad: GraphModule, judge: _Judge
) -> tuple[int | None, GraphModule, GraphModule]:
    """The least fuel with which a pass breaks a graph, and the graphs just before and after that change."""
    start, most = good, cast("int | None", getattr(step, "fuel", None))
    low, high = 0, 1
    while True:
        graph = _with_fuel(step, high)(start)
        if (most is not None and high >= most) or same_graph(graph, bad):
            high = high if most is None else min(high, most)
            break
        if not judge(graph):
            bad = graph
            break
        low, good = high, graph
        high *= 2
        if low > len(start.graph.nodes):
            return None, start, bad  # it does not do the same with all the fuel it wants as without a limit
    while high - low > 1:
        middle = (low + high) // 2
        graph = _with_fuel(step, middle)(start)
        if same_graph(graph, bad):
            high = middle
        elif judge(graph):
            low, good = middle, graph
        else:
            high, bad = middle, graph
    return high, good, bad


def _with_fuel(step: Pass, fuel: int) -> Pass:
    return cast("Pass", dataclasses.replace(cast("Any", step), fuel=fuel))


def _made(before: GraphModule, after: GraphModule) -> tuple[str, ...]:
    """Regions of the later graph that the earlier one does not have, by what they are made of."""

    def key(region: Region) -> tuple[str, tuple[str, ...]]:
        return region.kind, region.nodes

    known = {key(r) for r in regions(before, nested=True)}
    return tuple(r.name for r in regions(after, nested=True) if key(r) not in known)


def _counted(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"
