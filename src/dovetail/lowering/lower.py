"""Lowering: every distinct region of a graph compiled once, by the backend preferred for it."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

from torch import nn
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, checked_call, checked_init, user_stacklevel
from dovetail.ir.graph_module import copy_graph, rebuild, require_graph
from dovetail.ir.meta_keys import LEDGER, LOWERING
from dovetail.ir.tensor_spec import Specialization
from dovetail.ir.weight_guard import CHECK_INTERVAL
from dovetail.lowering.assign import ALL, Assigner, Granularity, preferences
from dovetail.lowering.backend_protocol import DEFAULT, requested, resolve, setting
from dovetail.lowering.compile_unit import GradAnalysis, unit_of
from dovetail.lowering.dispatch import Dispatcher
from dovetail.lowering.failures import fault_of
from dovetail.lowering.guards import Unguardable, autocast_off, expected_specialization
from dovetail.lowering.lowered_state import LoweredState
from dovetail.lowering.options import Options
from dovetail.lowering.worker import stopped_by
from dovetail.outlining.region import Region, regions
from dovetail.outlining.region_call import call_of, write_call
from dovetail.passes.pass_manager import Pass

Job = tuple[Dispatcher, Specialization]
_LOG = logging.getLogger(__name__)


def make_all(jobs: Iterable[Job], progress: bool) -> None:
    """Make each entry, equal ones once. The first error is raised, and what still compiles is killed.

    With `progress` a line is logged for each that is done.
    """
    distinct = list(dict.fromkeys(jobs))
    isolated = [job for job in distinct if _is_isolated(job[0])]
    inline = [job for job in distinct if not _is_isolated(job[0])]
    stop, lock, done = threading.Event(), threading.Lock(), count(1)

    def make(job: Job) -> None:
        dispatcher, situation = job
        with stopped_by(stop):
            dispatcher.entry_for(situation)
        if progress:
            with lock:
                _LOG.info(
                    "lowering: %d of %d bodies, %s", next(done), len(distinct), dispatcher.unit.region.name
                )

    pool = ThreadPoolExecutor(_at_once(len(isolated)), "dovetail-lowering")
    try:
        waiting = [pool.submit(make, job) for job in isolated]
        for job in inline:
            make(job)
        for future in as_completed(waiting):
            future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _is_isolated(dispatcher: Dispatcher) -> bool:
    return any(setting(b, "isolation") == "process" for b in dispatcher.backends)


def _at_once(jobs: int) -> int:
    """How many processes compile at a time: each keeps a core busy and holds a torch of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(jobs, cores))


@checked_call(rules="them to `fuse`, which comes before", strict="on_error='raise'")
def lower(
    gm: GraphModule,
    backends: Any = None,
    *,
    plan: Mapping[str, Any] | None = None,
    on_error: Literal["fallback", "raise"] = "fallback",
    verify: bool = False,
    granularity: Granularity = "outer",
    smallest: int = 2,
    recompile_limit: int | None = None,
    timeout: float | None = None,
    cache: bool | str | Path = True,
    grad: bool | None = None,
    weight_check_interval: int | None = CHECK_INTERVAL,
    progress: bool = True,
) -> GraphModule:
    """A graph that computes the same, its regions run by backends; the input graph is untouched.

    `backends` is an ordered preference, or a mapping from region name, body key or kind to one, with `"*"` for the
    others; names or objects; None is the default, and `[]` takes every lowering back. Whatever goes wrong with a
    backend moves a region to the next one that takes it and finally to its own body; `explain(gm).lowered` tells.
    Code is made now for calls with gradients if `grad` says so, or if it is None and the graph is in train mode; for
    others when they come. Each body that is done is a line of level INFO in the log, unless `progress` is False. With
    `verify` compiled code is compared with the body on made-up operands, which says nothing of later calls. Where a
    backend copies weights, their contents are compared once in `weight_check_interval` calls, for writes that version
    counters do not show; with None never.
    """
    require_graph(gm)
    options = Options(
        plan=plan,
        on_error=on_error,
        verify=verify,
        granularity=granularity,
        smallest=smallest,
        recompile_limit=recompile_limit,
        timeout=timeout,
        cache=cache,
        grad=grad,
        weight_check_interval=weight_check_interval,
    )
    if not isinstance(progress, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"progress {progress!r}; give True, or False to log nothing.")
    if not _is_empty(backends) and not regions(gm):
        fused = LEDGER in gm.meta
        what = (
            "no rule made any; `dovetail.explain` lists the reasons"
            if fused
            else "`dovetail.fuse` makes them, and comes first"
        )
        warnings.warn(f"the graph has no regions to lower: {what}.", stacklevel=user_stacklevel())
    return lower_with(gm, backends, options, progress)


def lower_with(
    gm: GraphModule, backends: Any, options: Options, progress: bool = True, *, whole: bool = True
) -> GraphModule:
    """What `lower` returns, for options that were checked already.

    A graph that is not of a `whole` model is not shown to backends that want to see it: what they have is for the model.
    """
    found = regions(gm, nested=True)
    if backends is None:
        backends = DEFAULT
    if options.plan is None and _is_empty(backends):
        return with_lowering(gm, None, {})
    wanted = preferences(_planned(options.plan, backends, found), found)
    assignment = Assigner(gm, wanted, options.granularity, options.smallest).assign()
    lowering = LoweredState(assignment.chains, options.assigned())
    units = {r.name: r for r in found if _own(r.name) in assignment.chains}
    by_name = {r.name: r for r in found}
    for fault in assignment.declined:
        if options.strict and fault.error is not None:
            raise fault.raised()
        lowering.tell(unit_of(by_name[fault.region]), fault)
    grad = gm.training if options.grad is None else options.grad
    # Code is for calls without autocast, whatever is on now.
    with autocast_off():
        _compile_all(gm, lowering, list(units.values()), grad, progress)
    told = {_own(name): lowering.backend_of(name) for name in units}
    lowered = with_lowering(gm, lowering, told)
    if whole:
        _settle(lowered, lowering)
    return lowered


def settle_parts(model: nn.Module, backends: Iterable[Any]) -> None:
    """Show a model, parts of which run lowered graphs, to the backends that want to see it; a warning where that fails."""
    for backend in {id(b): b for given in backends for b in resolve(given)}.values():
        if callable(getattr(backend, "settle", None)):
            try:
                backend.settle(model)
            except Exception as error:
                warnings.warn(f"'{backend.name}' cannot look at the model: {error}", stacklevel=3)


def _settle(lowered: GraphModule, lowering: LoweredState) -> None:
    """Show a lowered graph to the backends that want to see it."""
    for backend in {id(b): b for chain in lowering.assigned.values() for b in chain}.values():
        if not callable(getattr(backend, "settle", None)):
            continue
        try:
            backend.settle(lowered)
        except Exception as error:
            fault = fault_of("", backend.name, "settle", error)
            if lowering.options.strict:
                raise fault.raised() from error
            lowering.note("", backend.name, fault.stage, fault.reason)


def _is_empty(backends: Any) -> bool:
    return isinstance(backends, (list, tuple)) and not backends


def _planned(plan: Mapping[str, Any] | None, backends: Any, found: list[Region]) -> Any:
    """The preferences of a plan for the bodies that are here, and the others for the rest."""
    if plan is None:
        return backends
    keys = {region.key for region in found}
    others = backends if isinstance(backends, Mapping) else {ALL: backends}
    return {**others, **{key: chain for key, chain in plan.items() if key in keys}}


def _own(name: str) -> str:
    return name.rpartition("/")[2]


def _compile_all(
    gm: GraphModule, lowering: LoweredState, wanted: list[Region], grad: bool, progress: bool
) -> None:
    """Make the code that the first calls will need; other situations are met when they come."""
    flags = GradAnalysis().operands(gm)
    jobs: list[tuple[Dispatcher, Specialization]] = []
    for region in wanted:
        situation = _foreseen(region, flags[region.name], grad)
        if situation is not None:
            jobs.append((lowering.dispatcher(region, lowering.assigned[_own(region.name)]), situation))
    make_all(jobs, progress)


def _foreseen(region: Region, flags: tuple[bool, ...], grad: bool) -> Specialization | None:
    unit = unit_of(region)
    padded = (*flags, *[False] * (len(unit.values) - len(flags)))
    try:
        return expected_specialization(unit.values, padded, grad=grad)
    except Unguardable:
        return None


def with_lowering(
    gm: GraphModule, lowering: LoweredState | None, backends: Mapping[str, str | None]
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


@checked_init(strict="on_error='raise'")
@dataclass(frozen=True, repr=False)
class Lower(Pass):
    """Give regions to backends, as `dovetail.lower` does; its options are the same.

    Needs: regions. Leaves: the same graph with compiled state beside its bodies, values equal within tolerance.
    """

    backends: Any = None
    plan: Mapping[str, Any] | None = field(default=None, hash=False)
    on_error: Literal["fallback", "raise"] = "fallback"
    verify: bool = False
    granularity: Granularity = "outer"
    smallest: int = 2
    recompile_limit: int | None = None
    timeout: float | None = None
    cache: bool | str | Path = True
    weight_check_interval: int | None = CHECK_INTERVAL

    def __post_init__(self) -> None:
        self._options()  # what is wrong is told where it is written
        if isinstance(self.backends, Mapping):
            for value in cast("Mapping[Any, Any]", self.backends).values():
                requested(value)
        else:
            requested(self.backends)

    def run(self, gm: GraphModule) -> GraphModule:
        """The graph with its regions lowered."""
        return lower_with(gm, self.backends, self._options())

    def _options(self) -> Options:
        given = vars(self)
        return Options(**{f.name: given[f.name] for f in fields(Options) if f.name in given})
