"""Measured times of regions: of a plan's decisions, or of a profile whose ranges are named after regions."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch.fx import GraphModule

from dovetail.errors import InvalidArgument
from dovetail.fusion.coverage import coverage
from dovetail.fusion.ledger import ledger_of
from dovetail.fusion.ledger_entries import Measured
from dovetail.ir.profiler_ranges import range_label
from dovetail.outlining.region import Region, local_name, regions
from dovetail.tuning.apply_plan import body_entries
from dovetail.tuning.plan import Plan

_PREFIX = range_label("", "").strip()


def plan_times(gm: GraphModule, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the time of each region whose body a plan has measured."""
    for region in regions(gm, nested=True):
        by_scope = (plan.bodies.get(entry, {}) for entry in body_entries(plan, region))
        decisions = (d for decisions in by_scope for d in decisions.values())
        decision = next((d for d in decisions if d.seconds is not None), None)
        if decision is None or decision.seconds is None:
            continue
        others = [a for a in (decision.runner_up, *decision.rejected) if a is not None]
        yield {
            "region": region.name,
            "seconds": decision.seconds.median,
            "calls": 1,
            "source": "the plan's measurement of its body alone",
            "alternatives": [f"{a.choice}: {a.seconds or a.reason}" for a in others][:8],
        }


def whole_graph_time(gm: GraphModule, measured: Iterable[Measured]) -> Iterator[dict[str, Any]]:
    """Yield the time that a plan measured of a graph as that of its region, if one has all operations."""
    outermost, covered = regions(gm), coverage(gm)
    decision = next((m for m in measured if m.scope == "graph" and m.seconds is not None), None)
    if decision is None or len(outermost) != 1 or covered.inside.launches < covered.total.launches:
        return
    second = decision.runner_up_seconds
    others = [f"{decision.runner_up}: {second or 'not measured'}"] if decision.runner_up else []
    yield {
        "region": outermost[0].name,
        "seconds": decision.seconds,
        "calls": 1,
        "source": "the plan's measurement of the whole graph",
        "alternatives": others,
    }


def has_plan_times(graphs: Iterable[GraphModule], plan: Plan) -> bool:
    """Return whether a plan, or one that was applied to the graphs, has measured a region of theirs."""
    return any(
        next(times, None) is not None
        for gm in graphs
        for times in (plan_times(gm, plan), whole_graph_time(gm, ledger_of(gm).measured))
    )


Ranges = Mapping[str, tuple[float, int]]
"""Seconds and calls of the ranges of regions in a profile, by their labels."""


def shared_labels(graphs: Iterable[GraphModule]) -> set[str]:
    """Return the labels of ranges that more than one of the graphs has: a profile does not tell whose they are."""
    counts = Counter(
        label for gm in graphs for label in {x for r in regions(gm, nested=True) for x in _labels(r)}
    )
    return {label for label, count in counts.items() if count > 1}


def _labels(region: Region) -> set[str]:
    return {range_label(region.kind, name) for name in (region.name, local_name(region.name))}


def profile_times(gm: GraphModule, ranges: Ranges, shared: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the time per call of each region of a graph that has a range; those of `shared` labels say so."""
    for region in regions(gm, nested=True):
        for label in _labels(region) & ranges.keys():
            seconds, calls = ranges[label]
            yield {
                "region": region.name,
                "seconds": seconds / max(1, calls),
                "calls": calls,
                "source": "a profile, in which regions of several graphs have this name"
                if label in shared
                else "a profile",
            }


def read_profile(profile: Any) -> Ranges:
    """Return the ranges of regions in a profile of torch.profiler, or in a trace that it exported.

    On a GPU a range has the time of the kernels under it, else its own. Raises InvalidArgument if there is none.
    """
    spent: dict[str, tuple[float, int]] = {}
    rows = _trace_rows(Path(profile)) if isinstance(profile, (str, os.PathLike)) else _profile_rows(profile)
    for label, seconds, calls in rows:
        if label.startswith(_PREFIX):
            total, count = spent.get(label, (0.0, 0))
            spent[label] = (total + seconds, count + calls)
    if not spent:
        raise InvalidArgument(
            "the profile has no ranges of regions: take it while the graph, or the model, runs."
        )
    return spent


def _profile_rows(profile: Any) -> Iterator[tuple[str, float, int]]:
    averages = getattr(profile, "key_averages", None)
    if not callable(averages):
        raise InvalidArgument(
            f"profile is a {type(profile).__name__}; give a torch.profiler profile, or the path of a trace it exported."
        )
    try:
        rows = list(cast("Sequence[Any]", averages()))
    except (AssertionError, RuntimeError) as error:
        raise InvalidArgument(
            f"the profile has no events: {error}. Give it after its `with` block."
        ) from error
    for row in rows:
        device = float(getattr(row, "device_time_total", 0.0) or 0.0)
        yield str(row.key), (device or float(row.cpu_time_total)) * 1e-6, int(row.count)


def _trace_rows(path: Path) -> Iterator[tuple[str, float, int]]:
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"profile '{path}' cannot be read as a trace of torch.profiler: {error}."
        ) from error
    rows: Any = (
        cast("Mapping[str, Any]", events).get("traceEvents", ()) if isinstance(events, dict) else events
    )
    if not isinstance(rows, list):
        raise InvalidArgument(f"profile '{path}' has no list of trace events.")
    on_device: list[tuple[str, float, int]] = []
    on_host: list[tuple[str, float, int]] = []
    for event in cast("list[Any]", rows):
        if isinstance(event, dict) and isinstance(event.get("dur"), (int, float)):
            row = (str(event.get("name", "")), float(event["dur"]) * 1e-6, 1)
            if row[0].startswith(_PREFIX):
                (on_device if event.get("cat") == "gpu_user_annotation" else on_host).append(row)
    # The same range has an event on the CPU and one on the GPU.
    yield from on_device or on_host
