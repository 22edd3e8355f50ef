"""Lowering: every distinct region of a graph compiled once, by the backend preferred for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch.fx import GraphModule

from dovetail.errors import InvalidArgument
from dovetail.graph.keys import LOWERING
from dovetail.graph.module import copy_graph, rebuild
from dovetail.lowering.choosing import Assigner, Granularity, preferences
from dovetail.lowering.gradients import Foresight
from dovetail.lowering.lowering import Lowering
from dovetail.lowering.situation import Situation, Unguardable, expected_situation
from dovetail.lowering.unit import unit_of
from dovetail.lowering.workshop import Settings
from dovetail.outlining.record import call_of, write_call
from dovetail.outlining.region import Region, regions
from dovetail.outlining.requests import require_graph

DEFAULT = ("inductor",)


def lower(
    gm: GraphModule,
    backends: Any = None,
    *,
    plan: Mapping[str, Any] | None = None,
    on_error: Literal["fallback", "raise"] = "fallback",
    verify: bool = False,
    granularity: Granularity = "outer",
    smallest: int = 2,
    specialisations: int = 8,
    timeout: float | None = None,
    cache: bool | str | Path = True,
) -> GraphModule:
    """A graph that computes the same, its regions run by backends; the input graph is untouched.

    `backends` is an ordered preference, or a mapping from region name, body key or kind to one, with `"*"` for the
    others; names or objects; None is the default, and `[]` takes every lowering back. Whatever goes wrong with a
    backend moves a region to the next one that takes it and finally to its own body; `explain(gm).lowered` tells.
    With `verify` compiled code is compared with the body on made-up operands, which says nothing of later calls.
    """
    require_graph(gm)
    settings = _settings(on_error, verify, specialisations, timeout, cache)
    _check(granularity, smallest)
    found = regions(gm, nested=True)
    if plan is not None:
        backends = {
            **dict(plan),
            **(
                {"*": DEFAULT if backends is None else backends}
                if not isinstance(backends, Mapping)
                else backends
            ),
        }
    if backends is None:
        backends = DEFAULT
    if not isinstance(backends, Mapping) and not isinstance(backends, str) and _is_empty(backends):
        return _with_lowering(gm, None, {})
    wanted = preferences(backends, found)
    assignment = Assigner(gm, wanted, granularity, smallest).assign()
    lowering = Lowering(assignment.chains, settings)
    units = {r.name: r for r in found if _own(r.name) in assignment.chains}
    for fault in assignment.declined:
        lowering.tell(unit_of(next(r for r in found if r.name == fault.region)), fault)
    _compile_all(gm, lowering, list(units.values()))
    return _with_lowering(gm, lowering, _backends(gm, lowering, list(units.values())))


def _settings(on_error: Any, verify: Any, specialisations: Any, timeout: Any, cache: Any) -> Settings:
    if on_error not in ("fallback", "raise"):
        raise InvalidArgument(f"on_error {on_error!r}; give 'fallback' or 'raise'.")
    if not isinstance(specialisations, int) or isinstance(specialisations, bool) or specialisations < 1:
        raise InvalidArgument(f"specialisations {specialisations!r}; give 1 or more.")
    if timeout is not None and (not isinstance(timeout, (int, float)) or timeout <= 0):
        raise InvalidArgument(f"timeout {timeout!r}; give seconds, or None for the backend's own.")
    if not isinstance(cache, (bool, str, Path)):
        raise InvalidArgument(f"cache {cache!r}; give True, False or a folder.")
    return Settings(specialisations, on_error == "raise", bool(verify), timeout, cache)


def _check(granularity: Any, smallest: Any) -> None:
    if granularity not in ("outer", "inner"):
        raise InvalidArgument(f"granularity {granularity!r}; give 'outer' or 'inner'.")
    if not isinstance(smallest, int) or isinstance(smallest, bool) or smallest < 1:
        raise InvalidArgument(f"smallest {smallest!r}; give 1 or more.")


def _is_empty(backends: Any) -> bool:
    return hasattr(backends, "__len__") and len(backends) == 0


def _own(name: str) -> str:
    return name.rpartition("/")[2]


def _compile_all(gm: GraphModule, lowering: Lowering, wanted: list[Region]) -> None:
    """Make the code that the first calls will need; other situations are met when they come."""
    flags = Foresight().operands(gm)
    for region in wanted:
        situation = _foreseen(region, flags[region.name], gm)
        if situation is not None:
            lowering.dispatcher(region, lowering.assigned[_own(region.name)]).entry_for(situation)


def _foreseen(region: Region, flags: tuple[bool, ...], gm: GraphModule) -> Situation | None:
    unit = unit_of(region)
    # A graph in eval mode is taken to be called without gradients; calls that need them compile again.
    grad = gm.training and any(flags)
    padded = (*flags, *[False] * (len(unit.values) - len(flags)))
    try:
        return expected_situation(unit.values, padded, grad=grad)
    except Unguardable:
        return None


def _backends(gm: GraphModule, lowering: Lowering, wanted: list[Region]) -> dict[str, str | None]:
    made: dict[str, str | None] = {}
    for region in wanted:
        dispatcher = lowering.dispatcher(region, lowering.assigned[_own(region.name)])
        made[_own(region.name)] = next((e.backend for e in dispatcher.entries.values()), None)
    return made


def _with_lowering(
    gm: GraphModule, lowering: Lowering | None, backends: Mapping[str, str | None]
) -> GraphModule:
    graph = copy_graph(gm.graph)
    for node in graph.nodes:
        call = call_of(node.meta)
        if call is not None:
            write_call(node, replace(call, backend=backends.get(node.name)).lowered(backends))
    meta = {k: v for k, v in gm.meta.items() if k != LOWERING}
    if lowering is not None:
        meta[LOWERING] = lowering
    return rebuild(gm, graph, meta=meta)
