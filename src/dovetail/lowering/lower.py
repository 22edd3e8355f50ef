"""Lowering: every distinct region of a graph is compiled once, by the backend preferred for it.

`replace_region` lowers regions by a callable of the user, checked like the code of a backend.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.fx import GraphModule

from dovetail.errors import (
    InvalidArgument,
    LoweringError,
    RegionError,
    UnknownRegion,
    checked_call,
    checked_init,
    user_stacklevel,
)
from dovetail.ir.graph_module import require_graph
from dovetail.ir.meta_keys import LEDGER
from dovetail.ir.tensor_spec import Specialization
from dovetail.ir.weight_guard import CHECK_INTERVAL
from dovetail.lowering.assign import ALL, Assigner, preferences
from dovetail.lowering.backend_protocol import (
    DEFAULT,
    Backend,
    BackendChain,
    Backends,
    Compiled,
    checked_backends,
    resolve,
)
from dovetail.lowering.compile_unit import GradAnalysis, unit_of
from dovetail.lowering.dispatch import Dispatcher
from dovetail.lowering.failures import fault_of, report_fault
from dovetail.lowering.guards import Unguardable, disable_autocast, expected_specialization
from dovetail.lowering.lowered_state import LoweredState, lowered_state_of, with_lowering
from dovetail.lowering.options import Granularity, Options
from dovetail.lowering.worker_process import cancelled_by
from dovetail.outlining.region import Region, local_name, path_prefixes, regions
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
        for dispatcher, specialization in inline if len(inline) > 1 else ():
            if not dispatcher.begin(specialization) and dispatcher.strict:
                break
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
    others; names or objects; None is the default, and `[]` removes every lowering. `plan` maps keys of bodies to
    backends that are used for these, however small they are; `[]` for a body that runs as it is. A fault of a backend
    moves a region to the next one that supports it and finally to its own body; `explain(gm).lowered` lists them. Code
    is compiled now for calls with gradients if `grad` is True, or if it is None and the graph is in train mode; for
    other calls when they come. Each compiled body is logged at level INFO, unless `progress` is False. With `verify`
    compiled code is compared with the body on sample inputs, which does not cover later calls. Where a backend copies
    weights, their contents are compared once in `weight_check_interval` calls, for writes that version counters do not
    show; with None never.
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
        return with_lowering(gm, None)
    preferred = preferences(_planned(options.plan, backends, candidates), candidates)
    assigner = Assigner(candidates, preferred, options)
    state = LoweredState(assigner.chains, options.assigned())
    by_name = {r.name: r for r in candidates}
    for fault in assigner.declined:
        if options.strict and fault.error is not None:
            raise fault.as_error()
        state.record(unit_of(by_name[fault.region]), fault)
    grad = gm.training if options.grad is None else options.grad
    # Code is for calls without autocast, whatever is active now.
    with disable_autocast():
        _compile_expected(gm, state, candidates, grad, progress)
    lowered = with_lowering(gm, state)
    if whole:
        _settle(lowered, state)
    return lowered


def settle_parts(model: nn.Module, backends: Iterable[Any]) -> None:
    """Let backends settle on a model, parts of which run lowered graphs; log those that raise."""
    for backend in {id(b): b for value in backends for b in resolve(value)}.values():
        try:
            backend.settle(model)
        except Exception as error:
            report_fault(fault_of("", backend.name, "settle", error))


def _settle(lowered: GraphModule, state: LoweredState) -> None:
    for backend in {id(b): b for chain in state.assigned.values() for b in chain}.values():
        try:
            backend.settle(lowered)
        except Exception as error:
            fault = fault_of("", backend.name, "settle", error)
            if state.options.strict:
                raise fault.as_error() from error
            state.note("", backend.name, fault.stage, fault.reason)
            report_fault(fault)


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
    gm: GraphModule, state: LoweredState, candidates: list[Region], grad: bool, progress: bool
) -> None:
    """Compile the specializations that the first calls are expected to need."""
    flags = GradAnalysis().operands(gm, candidates)
    jobs: list[Job] = []
    for region in candidates:
        chain = state.assigned.get(local_name(region.name))
        if chain is None:
            continue
        unit, requires_grad = unit_of(region), flags[region.name]
        padded = (*requires_grad, *[False] * (len(unit.values) - len(requires_grad)))
        try:
            specialization = expected_specialization(unit.values, padded, grad=grad)
        except Unguardable:
            continue
        jobs.append((state.dispatcher(region, chain), specialization))
    compile_all(jobs, progress)


@checked_init(strict="on_error='raise'")
@dataclass(frozen=True, repr=False)
class Lower(Options, Pass):
    """Lower regions as `dovetail.lower` does; its options are the same.

    Needs: regions. Leaves: the same graph with compiled state beside its bodies, values equal within tolerance.
    """

    backends: Backends | None = None

    __repr__ = Pass.__repr__

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.backends, Mapping):
            for value in cast("Mapping[Any, Any]", self.backends).values():
                checked_backends(value)
        else:
            checked_backends(self.backends)

    def run(self, gm: GraphModule) -> GraphModule:
        """Return the graph with its regions lowered."""
        return lower_with(gm, self.backends, Options.pick(vars(self)))


@checked_call()
def replace_region(
    gm: GraphModule,
    name_or_key: str,
    callable: Callable[..., Any],
    *,
    check: bool = True,
    trains: bool = False,
) -> GraphModule:
    """Return a graph in which a region, or every region with a body of this key, runs a callable.

    It takes the operands as `region.export` lists them and returns a tensor, or a tuple of them. It is run on sample
    inputs: its results must have the body's dtypes, shapes and strides and, with `check`, its values; otherwise
    LoweringError is raised with the difference. With `trains` autograd goes through it, and gradients are compared too.
    Calls that it does not cover (gradients without `trains`, autocast) run the body. Other regions keep their backends.
    """
    require_graph(gm)
    _check_arguments(name_or_key, callable, check, trains)
    candidates = regions(gm, nested=True)
    replaced = [r for r in candidates if r.name == name_or_key]
    replaced = replaced or [r for r in candidates if r.key == name_or_key]
    if not replaced:
        raise UnknownRegion(
            f"the graph has no region of the name or key '{name_or_key}'",
            [r.name for r in candidates],
            name_or_key,
        )
    before = lowered_state_of(gm)
    _require_unassigned(before, replaced)
    backend = _Replacement(callable, trains)
    if trains:
        # Code for calls with gradients is compiled when such a call comes; it is compared now.
        _lower(gm, backend, replaced, check, grad=True)
    lowered = _lower(gm, backend, replaced, check, grad=False)
    if before is None:
        return lowered
    inside = tuple(f"{region.name}/" for region in replaced)
    nested = [local_name(r.name) for r in candidates if r.name.startswith(inside)]
    after = lowered_state_of(lowered)
    return with_lowering(gm, before.joined(after, nested) if after is not None else before)


class _Replacement(Backend):
    """Runs regions by one callable."""

    smallest = 1

    def __init__(self, function: Callable[..., Any], trains: bool) -> None:
        self.name = getattr(function, "__qualname__", None) or type(function).__qualname__
        self.function, self.trains = function, trains

    def supports(self, region: Region) -> Any:
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        def call(*operands: Any) -> Any:
            results = self.function(*operands)
            return (results,) if isinstance(results, Tensor) else results

        return call


def _check_arguments(name_or_key: Any, function: Any, check: Any, trains: Any) -> None:
    if not isinstance(name_or_key, str):
        raise InvalidArgument(f"{name_or_key!r} is neither the name of a region nor the key of a body.")
    if not callable(function):
        raise InvalidArgument(f"a {type(function).__name__} cannot be called in place of '{name_or_key}'.")
    for name, value in (("check", check), ("trains", trains)):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{name} {value!r}; give True or False.")


def _lower(
    gm: GraphModule, backend: Backend, replaced: list[Region], check: bool, *, grad: bool
) -> GraphModule:
    options = Options(on_error="raise", verify=check, smallest=1, cache=False, grad=grad)
    lowered = lower_with(gm, {region.name: backend for region in replaced}, options, progress=False)
    state = lowered_state_of(lowered)
    for region in replaced:
        if state is None or state.backend_of(region.name) is None:
            reasons = [] if state is None else [e.reason for e in state.events if e.reason]
            reason = reasons[0] if reasons else "its operands have no known values"
            raise LoweringError(region.name, backend.name, f"it cannot replace the region: {reason}")
    return lowered


def _require_unassigned(before: LoweredState | None, replaced: list[Region]) -> None:
    """Raise for a region inside one that a backend runs as a whole."""
    if before is None:
        return
    for region in replaced:
        for outer in path_prefixes(region.name):
            if outer != region.name and local_name(outer) in before.assigned:
                raise RegionError(
                    f"region '{region.name}' is inside '{outer}', which '{before.backend_of(outer)}' runs as a whole. "
                    f"Replace that one, or lower the graph without it."
                )
