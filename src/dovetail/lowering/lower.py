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
from dovetail.lowering.choosing import ALL, Assigner, Granularity, preferences
from dovetail.lowering.compiling import make_all
from dovetail.lowering.dispatch import Dispatcher
from dovetail.lowering.gradients import Foresight
from dovetail.lowering.lowering import Lowering
from dovetail.lowering.situation import Situation, Unguardable, autocast_off, expected_situation
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
    grad: bool | None = None,
    progress: bool | None = None,
) -> GraphModule:
    """A graph that computes the same, its regions run by backends; the input graph is untouched.

    `backends` is an ordered preference, or a mapping from region name, body key or kind to one, with `"*"` for the
    others; names or objects; None is the default, and `[]` takes every lowering back. Whatever goes wrong with a
    backend moves a region to the next one that takes it and finally to its own body; `explain(gm).lowered` tells.
    Code is made now for calls with gradients if `grad` says so, or if it is None and the graph is in train mode; for
    others when they come; a terminal is shown how far that is unless `progress` is False. With `verify` compiled code is compared with the body on made-up operands, which says nothing of later calls.
    """
    require_graph(gm)
    settings = checked_settings(on_error, verify, specialisations, timeout, cache)
    check_choice(granularity, smallest, grad)
    if progress is not None and not isinstance(progress, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"progress {progress!r}; give True, False, or None to show it on a terminal.")
    found = regions(gm, nested=True)
    if backends is None:
        backends = DEFAULT
    if plan is None and _is_empty(backends):
        return with_lowering(gm, None, {})
    wanted = preferences(_planned(plan, backends, found), found)
    assignment = Assigner(gm, wanted, granularity, smallest).assign()
    lowering = Lowering(assignment.chains, settings)
    units = {r.name: r for r in found if _own(r.name) in assignment.chains}
    for fault in assignment.declined:
        if settings.strict and fault.error is not None:
            raise fault.raised()
        lowering.tell(unit_of(next(r for r in found if r.name == fault.region)), fault)
    # Code is for calls without autocast, whatever is on now.
    with autocast_off():
        _compile_all(gm, lowering, list(units.values()), gm.training if grad is None else grad, progress)
    return with_lowering(gm, lowering, _backends(gm, lowering, list(units.values())))


def checked_settings(on_error: Any, verify: Any, specialisations: Any, timeout: Any, cache: Any) -> Settings:
    """How code is made and used, or InvalidArgument saying which option is wrong."""
    if on_error not in ("fallback", "raise"):
        raise InvalidArgument(f"on_error {on_error!r}; give 'fallback' or 'raise'.")
    if not isinstance(verify, bool):
        raise InvalidArgument(f"verify {verify!r}; give True or False.")
    if not isinstance(specialisations, int) or isinstance(specialisations, bool) or specialisations < 1:
        raise InvalidArgument(f"specialisations {specialisations!r}; give 1 or more.")
    if timeout is not None and (not isinstance(timeout, (int, float)) or timeout <= 0):
        raise InvalidArgument(f"timeout {timeout!r}; give seconds, or None for the backend's own.")
    if not isinstance(cache, (bool, str, Path)):
        raise InvalidArgument(f"cache {cache!r}; give True, False or a folder.")
    return Settings(specialisations, on_error == "raise", verify, timeout, cache)


def check_choice(granularity: Any, smallest: Any, grad: Any) -> None:
    """Raise InvalidArgument for options of the choice that are none."""
    if granularity not in ("outer", "inner"):
        raise InvalidArgument(f"granularity {granularity!r}; give 'outer' or 'inner'.")
    if not isinstance(smallest, int) or isinstance(smallest, bool) or smallest < 1:
        raise InvalidArgument(f"smallest {smallest!r}; give 1 or more.")
    if grad is not None and not isinstance(grad, bool):
        raise InvalidArgument(f"grad {grad!r}; give True, False, or None to go by the mode of the graph.")


def _is_empty(backends: Any) -> bool:
    return isinstance(backends, (list, tuple)) and not backends


def _planned(plan: Mapping[str, Any] | None, backends: Any, found: list[Region]) -> Any:
    """The preferences of a plan for the bodies that are here, and the others for the rest."""
    if plan is None:
        return backends
    if not isinstance(plan, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"plan {plan!r}; give a mapping from the keys of bodies to backends.")
    keys = {region.key for region in found}
    others = backends if isinstance(backends, Mapping) else {ALL: backends}
    return {**others, **{key: chain for key, chain in plan.items() if key in keys}}


def _own(name: str) -> str:
    return name.rpartition("/")[2]


def _compile_all(
    gm: GraphModule, lowering: Lowering, wanted: list[Region], grad: bool, progress: bool | None
) -> None:
    """Make the code that the first calls will need; other situations are met when they come."""
    flags = Foresight().operands(gm)
    jobs: list[tuple[Dispatcher, Situation]] = []
    for region in wanted:
        situation = _foreseen(region, flags[region.name], grad)
        if situation is not None:
            jobs.append((lowering.dispatcher(region, lowering.assigned[_own(region.name)]), situation))
    make_all(jobs, progress)


def _foreseen(region: Region, flags: tuple[bool, ...], grad: bool) -> Situation | None:
    unit = unit_of(region)
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


def with_lowering(
    gm: GraphModule, lowering: Lowering | None, backends: Mapping[str, str | None]
) -> GraphModule:
    """A copy of a graph that runs as a lowering says, or with None as it is; `backends` is what its regions tell."""
    graph = copy_graph(gm.graph)
    for node in graph.nodes:
        call = call_of(node.meta)
        if call is not None:
            write_call(node, replace(call, backend=backends.get(node.name)).lowered(backends))
    meta = {k: v for k, v in gm.meta.items() if k != LOWERING}
    if lowering is not None:
        meta[LOWERING] = lowering
    return rebuild(gm, graph, meta=meta)
