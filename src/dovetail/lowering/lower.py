"""Lowering: every distinct region of a graph is compiled once, by the backend preferred for it."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
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
from dovetail.lowering.backend_protocol import DEFAULT, BackendChain, Backends, checked_backends, resolve
from dovetail.lowering.compile_unit import GradAnalysis, unit_of
from dovetail.lowering.dispatch import Dispatcher
from dovetail.lowering.failures import fault_of
from dovetail.lowering.guards import Unguardable, disable_autocast, expected_specialization
from dovetail.lowering.lowered_state import LoweredState
from dovetail.lowering.options import Options
from dovetail.lowering.worker import cancelled_by
from dovetail.outlining.region import Region, call_of, local_name, regions, write_call
from dovetail.passes.pass_manager import Pass

Job = tuple[Dispatcher, Specialization]
_LOG = logging.getLogger(__name__)


def compile_all(jobs: Iterable[Job], progress: bool) -> None:
    """Compile each entry, equal ones once. The first error is raised, and running compilations are cancelled.

    With `progress` each one is logged when it is done.
    """
    distinct = list(dict.fromkeys(jobs))
    isolated = [job for job in distinct if _is_isolated(job[0])]
    inline = [job for job in distinct if not _is_isolated(job[0])]
    stop, lock, done = threading.Event(), threading.Lock(), count(1)

    def compile_one(job: Job) -> None:
        dispatcher, specialization = job
        with cancelled_by(stop):
            dispatcher.entry_for(specialization)
        if progress:
            with lock:
                _LOG.info(
                    "lowering: %d of %d bodies, %s", next(done), len(distinct), dispatcher.unit.region.name
                )

    pool = ThreadPoolExecutor(_worker_count(len(isolated)), "dovetail-lowering")
    try:
        futures = [pool.submit(compile_one, job) for job in isolated]
        for job in inline:
            compile_one(job)
        for future in as_completed(futures):
            future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _is_isolated(dispatcher: Dispatcher) -> bool:
    return any(b.isolation == "process" for b in dispatcher.backends)


def _worker_count(jobs: int) -> int:
    """Return how many processes compile at a time: each keeps a core busy and has a torch of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(jobs, cores))


@checked_call(rules="them to `fuse`, which comes before", strict="on_error='raise'")
def lower(
    gm: GraphModule,
    backends: Backends | None = None,
    *,
    plan: Mapping[str, BackendChain] | None = None,
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
    """Return a graph that computes the same, its regions run by backends; the input graph is unchanged.

    `backends` is an ordered preference, or a mapping from region name, body key or kind to one, with `"*"` for the
    others; names or objects; None is the default, and `[]` removes every lowering. A fault of a backend moves a region
    to the next one that supports it and finally to its own body; `explain(gm).lowered` lists them. Code is compiled now
    for calls with gradients if `grad` is True, or if it is None and the graph is in train mode; for other calls when
    they come. Each compiled body is logged at level INFO, unless `progress` is False. With `verify` compiled code is
    compared with the body on sample inputs, which does not cover later calls. Where a backend copies weights, their
    contents are compared once in `weight_check_interval` calls, for writes that version counters do not show; with
    None never.
    """
    require_graph(gm)
    options = Options.pick(locals())
    if not isinstance(progress, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"progress {progress!r}; give True, or False to log nothing.")
    if not _is_empty(backends) and not regions(gm):
        reason = (
            "no rule made any; `dovetail.explain` lists the reasons"
            if LEDGER in gm.meta
            else "`dovetail.fuse` makes them, and comes first"
        )
        warnings.warn(f"the graph has no regions to lower: {reason}.", stacklevel=user_stacklevel())
    return lower_with(gm, backends, options, progress)


def lower_with(
    gm: GraphModule, backends: Any, options: Options, progress: bool = True, *, whole: bool = True
) -> GraphModule:
    """Lower a graph with options that were checked already.

    Backends `settle` on a graph of a `whole` model only.
    """
    candidates = regions(gm, nested=True)
    if backends is None:
        backends = DEFAULT
    if options.plan is None and _is_empty(backends):
        return with_lowering(gm, None, {})
    preferred = preferences(_planned(options.plan, backends, candidates), candidates)
    assignment = Assigner(gm, preferred, options.granularity, options.smallest).assign()
    state = LoweredState(assignment.chains, options.assigned())
    assigned = [r for r in candidates if local_name(r.name) in assignment.chains]
    by_name = {r.name: r for r in candidates}
    for fault in assignment.declined:
        if options.strict and fault.error is not None:
            raise fault.as_error()
        state.record(unit_of(by_name[fault.region]), fault)
    grad = gm.training if options.grad is None else options.grad
    # Code is for calls without autocast, whatever is active now.
    with disable_autocast():
        _compile_expected(gm, state, assigned, grad, progress)
    lowered = with_lowering(gm, state, {local_name(r.name): state.backend_of(r.name) for r in assigned})
    if whole:
        _settle(lowered, state)
    return lowered


def settle_parts(model: nn.Module, backends: Iterable[Any]) -> None:
    """Let backends settle on a model, parts of which run lowered graphs; warn of those that raise."""
    for backend in {id(b): b for value in backends for b in resolve(value)}.values():
        try:
            backend.settle(model)
        except Exception as error:
            warnings.warn(f"'{backend.name}' cannot look at the model: {error}", stacklevel=3)


def _settle(lowered: GraphModule, state: LoweredState) -> None:
    for backend in {id(b): b for chain in state.assigned.values() for b in chain}.values():
        try:
            backend.settle(lowered)
        except Exception as error:
            fault = fault_of("", backend.name, "settle", error)
            if state.options.strict:
                raise fault.as_error() from error
            state.note("", backend.name, fault.stage, fault.reason)


def _is_empty(backends: Any) -> bool:
    return isinstance(backends, (list, tuple)) and not backends


def _planned(plan: Mapping[str, Any] | None, backends: Any, candidates: list[Region]) -> Any:
    """Return the preferences with those of a plan for the bodies in this graph."""
    if plan is None:
        return backends
    keys = {region.key for region in candidates}
    others = backends if isinstance(backends, Mapping) else {ALL: backends}
    return {**others, **{key: chain for key, chain in plan.items() if key in keys}}


def _compile_expected(
    gm: GraphModule, state: LoweredState, assigned: list[Region], grad: bool, progress: bool
) -> None:
    """Compile the specializations that the first calls are expected to need."""
    flags = GradAnalysis().operands(gm)
    jobs: list[Job] = []
    for region in assigned:
        unit, requires_grad = unit_of(region), flags[region.name]
        padded = (*requires_grad, *[False] * (len(unit.values) - len(requires_grad)))
        try:
            specialization = expected_specialization(unit.values, padded, grad=grad)
        except Unguardable:
            continue
        jobs.append((state.dispatcher(region, state.assigned[local_name(region.name)]), specialization))
    compile_all(jobs, progress)


def with_lowering(
    gm: GraphModule, state: LoweredState | None, backends: Mapping[str, str | None]
) -> GraphModule:
    """Return a copy of a graph with a lowered state, or without any; `backends` are the names that regions show."""
    graph = copy_graph(gm.graph)
    for node in graph.nodes:
        call = call_of(node.meta)
        if call is not None:
            write_call(node, replace(call, backend=backends.get(node.name)).with_backends(backends))
    meta = {k: v for k, v in gm.meta.items() if k != LOWERING}
    if state is not None:
        meta[LOWERING] = state
    return rebuild(gm, graph, meta=meta)


@checked_init(strict="on_error='raise'")
@dataclass(frozen=True, repr=False)
class Lower(Pass):
    """Lower regions as `dovetail.lower` does; its options are the same.

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
        Options.pick(vars(self))  # invalid options are reported where the pass is written
        if isinstance(self.backends, Mapping):
            for value in cast("Mapping[Any, Any]", self.backends).values():
                checked_backends(value)
        else:
            checked_backends(self.backends)

    def run(self, gm: GraphModule) -> GraphModule:
        """Return the graph with its regions lowered."""
        return lower_with(gm, self.backends, Options.pick(vars(self)))
