"""A mixture by region: a model cut in several ways, each region by the backend that was fastest on it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import dovetail
from dovetail.lowering.backend_protocol import by_name
from dovetail.runtime.presets import blocks, default_pipeline

_TURNS = 7


def mixture(model: nn.Module, args: Sequence[Any], backends: Sequence[str]) -> Callable[..., Any]:
    """The fastest of these: regions as large as one backend takes them, and blocks that repeat, each by its best."""
    captured = dovetail.capture(model, tuple(args))
    candidates = {"blocks": _by_block(captured, args, backends)}
    for name in backends:
        cut = default_pipeline([by_name(name)])(captured)
        candidates[f"{name} as far as it goes"] = dovetail.lower(cut, [name])
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(_TURNS + 2):
        for name, run in candidates.items():
            start = time.perf_counter()
            run(*args)
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(seconds_of) for name, seconds_of in times.items()}
    best = min(medians, key=medians.__getitem__)
    shown = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in medians.items())
    print(f"mixture: {shown}; chosen: {best}", file=sys.stderr)
    return candidates[best]


def _by_block(captured: torch.fx.GraphModule, args: Sequence[Any], backends: Sequence[str]) -> Any:
    fused = dovetail.Pipeline([dovetail.FoldConstants(), *blocks()])(captured)
    times: dict[str, dict[str, float]] = {}
    for backend in (*backends, ""):
        lowered = dovetail.lower(fused, [backend] if backend else [])
        lowered(*args)
        for key, seconds in _measured(lowered, args).items():
            times.setdefault(key, {})[backend] = seconds
    best = {key: min(timings, key=timings.__getitem__) for key, timings in times.items()}
    plan = {key: ([name] if name else []) for key, name in best.items()}
    return dovetail.lower(fused, [], plan=plan)


def _measured(lowered: torch.fx.GraphModule, args: Sequence[Any]) -> dict[str, float]:
    """Seconds per call of each body, by key, from runs of the whole graph."""
    times: dict[str, list[float]] = {}
    keys = {region.name: region.key for region in dovetail.regions(lowered)}
    from torch.profiler import ProfilerActivity, profile

    for _ in range(_TURNS):
        with profile(activities=[ProfilerActivity.CPU]) as watched:
            lowered(*args)
        sums: dict[str, list[float]] = {}
        for event in watched.events() or []:
            name = event.name.removeprefix("region ")
            if event.name.startswith("region ") and name in keys:
                sums.setdefault(keys[name], []).append(event.cpu_time_total / 1e6)
        for key, each in sums.items():
            times.setdefault(key, []).append(statistics.fmean(each))
    return {key: statistics.median(values) for key, values in times.items()}
