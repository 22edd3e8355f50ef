"""A mixture by region: blocks of a model, each run by the backend that was fastest on it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import dovetail
from dovetail.lowering.recipe import blocks

_TURNS = 7


def mixture(model: nn.Module, args: Sequence[Any], backends: Sequence[str]) -> Callable[..., Any]:
    """The model cut into blocks, lowered by a plan that was measured."""
    fused = dovetail.Pipeline(list(blocks()))(dovetail.capture(model, tuple(args)))
    times: dict[str, dict[str, float]] = {}
    for backend in (*backends, ""):
        lowered = dovetail.lower(fused, [backend] if backend else [])
        lowered(*args)
        for key, seconds in _measured(lowered, args).items():
            times.setdefault(key, {})[backend] = seconds
    best = {key: min(found, key=found.__getitem__) for key, found in times.items()}
    plan = {key: ([name] if name else []) for key, name in best.items()}
    return dovetail.lower(fused, [], plan=plan)


def _measured(lowered: torch.fx.GraphModule, args: Sequence[Any]) -> dict[str, float]:
    """Seconds per call of each body, by key, from runs of the whole graph."""
    found: dict[str, list[float]] = {}
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
            found.setdefault(key, []).append(statistics.fmean(each))
    return {key: statistics.median(values) for key, values in found.items()}
