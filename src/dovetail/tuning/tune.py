"""`dovetail.tune`: boundaries, pass order and backends of a model chosen by measurement, once and ahead of time."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, cast, get_args, overload

import torch
from torch import nn

from dovetail.errors import InvalidArgument, TuningError, checked_call
from dovetail.frontend.model_copy import refuse_scripted
from dovetail.lowering.backend_protocol import Backends
from dovetail.lowering.failures import one_line
from dovetail.lowering.guards import active_autocast
from dovetail.runtime.compiled_module import CompiledModule
from dovetail.runtime.group_call import RANK_TIMEOUT, GroupCall, require_rank_timeout
from dovetail.tuning.division_search import DivisionSearch
from dovetail.tuning.environment import Environment
from dovetail.tuning.executor import (
    IN_WORKER,
    Executor,
    InProcess,
    LocalExecutor,
    can_interrupt,
)
from dovetail.tuning.measurement import Measurement, Subject
from dovetail.tuning.measuring import TRIAL_SECONDS, Measurer, Progress
from dovetail.tuning.plan import Plan
from dovetail.tuning.preparation import Prepared, prepare, prepare_range
from dovetail.tuning.program_search import COMPILERS
from dovetail.tuning.progress import make_progress
from dovetail.tuning.queue_executor import QueueExecutor
from dovetail.tuning.ray_engine import RayEngine, require_ray
from dovetail.tuning.search import BEST_STATES, Searched, SearchReport, search
from dovetail.tuning.search_space import (
    TYPICAL_COMPILE_SECONDS,
    UNKNOWN_COMPILE_SECONDS,
    SearchSpace,
)
from dovetail.tuning.size_ranges import SizedExample, model_pattern, sized_examples
from dovetail.tuning.store import Store
from dovetail.tuning.trial import RegionTrial, Trial, digest_of

_LOG = logging.getLogger("dovetail")
_SAMPLE_SECONDS = 0.6
_RECORD_SECONDS = 30.0
_SEARCH_VERSION = 5
"""Raised when searches decide differently: plans of finished ones are then not read from stores."""
_SPACE_SHARE = 0.25
"""The share of the budget after which nothing more of the search space is derived."""
ExecutorName: TypeAlias = Literal["local", "workers", "ray"]
_PACKAGES = ("sqlalchemy", "scipy", "optuna", "rich", "cloudpickle")


@dataclass(frozen=True)
class DryRun:
    """What a search would do: how many compilations and measurements, an estimate of its time, the least useful budget.

    `spaces` are the search spaces, one for each range of sizes.
    """

    spaces: tuple[SearchSpace, ...]
    measurements: int
    stored: int
    compilations: int
    seconds: float
    least_budget: float

    def __str__(self) -> str:
        return "\n".join(
            [
                *map(str, self.spaces),
                f"about {self.measurements} measurements, {self.stored} of them in the store, and "
                f"{self.compilations} compilations for all of it",
                f"about {self.seconds:.0f} s for all of them; less than {self.least_budget:.0f} s is not useful, "
                f"for it would not measure the compilers on the whole model",
            ]
        )


@overload
def tune(
    model: nn.Module,
    args: tuple[Any, ...] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    budget: float = ...,
    store: str | os.PathLike[str] | None = ...,
    sizes: Sequence[tuple[Any, ...]] | Mapping[Any, Mapping[int, Any]] | None = ...,
    backends: Backends | None = ...,
    memory: int | None = ...,
    dry_run: Literal[False] = ...,
    seed: int = ...,
    executor: ExecutorName = ...,
    progress: bool = ...,
    process_group: torch.distributed.ProcessGroup | None = ...,
    rank_timeout: float = ...,
) -> Plan: ...


@overload
def tune(
    model: nn.Module,
    args: tuple[Any, ...] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    budget: float = ...,
    store: str | os.PathLike[str] | None = ...,
    sizes: Sequence[tuple[Any, ...]] | Mapping[Any, Mapping[int, Any]] | None = ...,
    backends: Backends | None = ...,
    memory: int | None = ...,
    dry_run: Literal[True],
    seed: int = ...,
    executor: ExecutorName = ...,
    progress: bool = ...,
    process_group: torch.distributed.ProcessGroup | None = ...,
    rank_timeout: float = ...,
) -> DryRun: ...


@checked_call(
    plan="it to `compile`", timeout="`budget`", workers="`executor`", rules="nothing: all rules are searched"
)
def tune(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: float = 300.0,
    store: str | os.PathLike[str] | None = None,
    sizes: Sequence[tuple[Any, ...]] | Mapping[Any, Mapping[int, Any]] | None = None,
    backends: Backends | None = None,
    memory: int | None = None,
    dry_run: bool = False,
    seed: int = 0,
    executor: ExecutorName = "local",
    progress: bool = True,
    process_group: torch.distributed.ProcessGroup | None = None,
    rank_timeout: float = RANK_TIMEOUT,
) -> Plan | DryRun:
    """Return the plan of the fastest program for calls like this one, found by measuring for `budget` seconds.

    The plan is for inference, measured without gradients, if the model is in eval mode, and for training steps (forward
    and backward) in train mode. `store` is a file of measurements, created if it does not exist, or the URL of a
    PostgreSQL database, that later searches and other processes share; without one they are lost with the process.
    `sizes` are further example inputs, tuples like `args` that differ in one size, or `{argument: {dim: Dim(name,
    min=..., max=...)}}`: each is tuned with an equal part of the budget for a range of sizes around it, and calls are
    captured for these ranges. `backends` are those that are searched, by default all that are installed and do not
    change precision. `memory` bounds the peak bytes of a call beyond the weights. With `dry_run` nothing is measured:
    the result says what would be. The same call with the same store gives the same plan without measuring; with a
    larger budget the search goes on. Trials run in a worker process, to which the model is sent by cloudpickle; one
    that cannot be sent is measured in this process, with a warning. An interrupt (Ctrl-C) ends the search with the
    best program so far. With `executor="workers"` trials are measured by workers that were started by hand (`dovetail
    worker --store`), with "ray" by workers that Ray starts on a cluster: in both cases on machines of this one's
    environment that reach the `store`. With a `process_group`, one of `torch.distributed`, all ranks of which call this,
    rank 0 searches and every rank returns its plan; a rank waits for it for the budget and `rank_timeout` seconds. Then
    all ranks, rank 0 too, return an empty plan, with a warning. A dry run is each rank's own.
    """
    start = time.monotonic()
    _check_call(model, args, kwargs)

    def check() -> None:
        _check_model(model)
        _check_options(budget, memory, seed, executor, {"dry_run": dry_run, "progress": progress})
        require_rank_timeout(rank_timeout)

    def measure() -> Plan | DryRun:
        _require_packages()
        if executor == "ray":
            require_ray()
        opened = _open_store(store)
        try:
            if sizes is not None:
                return _tune_sizes(
                    model,
                    sized_examples(args, kwargs or {}, sizes),
                    opened,
                    backends=backends,
                    budget=budget,
                    memory=memory,
                    seed=seed,
                    progress=progress,
                    dry_run=dry_run,
                    executor=executor,
                )
            deadline = math.inf if dry_run else start + _SPACE_SHARE * budget
            prepared = prepare(model, args, kwargs, backends, deadline=deadline)
            if dry_run:
                return estimate(prepared, opened)
            return run_search(
                prepared,
                opened,
                budget=budget,
                memory=memory,
                seed=seed,
                progress=progress,
                executor=executor,
                start=start,
            ).plan
        finally:
            opened.close()

    if process_group is None or dry_run is True:
        check()
        return measure()
    # Before what only some ranks may refuse, so that all of them number their calls alike.
    call = GroupCall(process_group, "tune", model, args, kwargs)
    with _raised_on_all_ranks(call):
        check()
    call.seconds = budget + rank_timeout
    return _plan_of_group(call, cast("Callable[[], Plan]", measure))


@contextlib.contextmanager
def _raised_on_all_ranks(call: GroupCall) -> Generator[None]:
    """Let the other ranks know why there is no plan if rank 0 raises."""
    try:
        yield
    except BaseException as error:
        if call.rank == 0:
            call.decide("plan", b"", f"rank 0 raised {one_line(error)}")
        raise


def _plan_of_group(call: GroupCall, search: Callable[[], Plan]) -> Plan:
    """Return the plan that rank 0 searches for; an empty one on all ranks if one has waited for it in vain."""
    shared, note = call.read("plan") if call.rank == 0 else None, ""
    if shared is None and call.rank == 0:
        with _raised_on_all_ranks(call):
            shared = call.decide("plan", search().to_json().encode())
    elif shared is None:
        shared, note = call.wait("plan")
        if call.mismatch:
            raise TuningError(
                f"ranks tune different models: {call.mismatch}. Give each part a process group of its own."
            )
    if shared is None:
        shared = call.decide("plan", Plan().to_json().encode(), note)
    if not shared.data:
        raise TuningError(f"there is no plan: {shared.note}.")
    if call.failure or shared.note:
        _LOG.warning(
            "rank %d has no plan of rank 0 but an empty one: %s", call.rank, call.failure or shared.note
        )
    return Plan() if call.failure else Plan.from_json(shared.data.decode())


def _tune_sizes(
    model: nn.Module,
    examples: Sequence[SizedExample],
    store: Store,
    *,
    backends: Any,
    budget: float,
    dry_run: bool,
    **options: Any,
) -> Plan | DryRun:
    """Tune each range of sizes; return the plan of all, or what would be measured for all.

    Where one cannot be tuned, or at an interrupt, the plan has the ranges before it; the first one raises.
    """
    plan, estimates = Plan(), list[DryRun]()
    for number, example in enumerate(examples):
        start = time.monotonic()
        deadline = math.inf if dry_run else start + _SPACE_SHARE * budget / len(examples)
        try:
            prepared = prepare_range(model, example, backends, deadline)
            if dry_run:
                estimates.append(estimate(prepared, store))
                continue
            searched = run_search(prepared, store, budget=budget / len(examples), start=start, **options)
        except (TuningError, KeyboardInterrupt) as error:
            if not number or dry_run:
                raise
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            _LOG.warning("sizes from %d to %d are not in the plan: %s", *example.range, reason)
            if isinstance(error, KeyboardInterrupt):
                break
            continue
        plan |= searched.plan
        if searched.report.is_interrupted:
            break
    if not dry_run:
        return plan
    return replace(
        estimates[0],
        spaces=tuple(space for each in estimates for space in each.spaces),
        measurements=sum(each.measurements for each in estimates),
        compilations=sum(each.compilations for each in estimates),
        seconds=sum(each.seconds for each in estimates),
        least_budget=sum(each.least_budget for each in estimates),
    )


def run_search(
    prepared: Prepared,
    store: Store,
    *,
    budget: float,
    memory: int | None = None,
    seed: int = 0,
    progress: bool | Progress = True,
    executor: Executor | QueueExecutor | ExecutorName = "local",
    start: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Searched:
    """Search with a store and an executor, or one of a name. The budget begins at `start`."""
    start = clock() if start is None else start
    subject = _search_subject(prepared, budget, memory, seed)
    finished = store.get(subject, prepared.environment)
    if finished is not None:
        return _stored_search(finished)
    left = budget - (clock() - start)
    try:
        runs = _executor(prepared, store, executor, left) if isinstance(executor, str) else executor
    except TimeoutError:
        raise _out_of_time(budget) from None
    # A display that is live must be ended, so that nothing may fail between here and `try`.
    left = budget - (clock() - start)
    display = make_progress(left) if progress is True else None if progress is False else progress
    measurer = Measurer(
        store,
        prepared.environment,
        runs,
        budget=budget,
        progress=display,
        trial_seconds=min(TRIAL_SECONDS, max(10.0, 0.3 * budget)),
        clock=clock,
        start=start,
    )
    try:
        for space in prepared.space.blocks.values():
            runs.add_block(space.block)
        prepared.add_block = runs.add_block
        searched = search(
            prepared.space,
            measurer,
            prepared.environment,
            mode=prepared.tuned.mode,
            operands=prepared.operands,
            label=prepared.label,
            memory=memory,
            seed=seed,
            new_state=prepared.new_state,
            sizes={model_pattern(p, prepared.tuned.model): ranges for p, ranges in prepared.sizes.items()},
        )
        if searched.outcome is None:
            raise _nothing_measured(searched, measurer, memory)
        if not measurer.interrupted:
            return _record(store, subject, prepared.environment, searched, measurer.elapsed)
        return searched
    finally:
        measurer.progress.end()
        if isinstance(executor, str):
            runs.close()


def _search_subject(prepared: Prepared, budget: float, memory: int | None, seed: int) -> Subject:
    """Return what identifies a finished search: one with a larger budget goes on from the measurements of this one."""
    space = prepared.space
    sizes = {pattern: [list(r) for r in ranges] for pattern, ranges in prepared.sizes.items()}
    key = digest_of([_SEARCH_VERSION, space.key, sizes, float(budget), memory, seed, prepared.label])
    backends = " | ".join(space.identity_of(choice) for choice in space.backends)
    return Subject("search", key, prepared.operands, backends, prepared.tuned.mode)


def _nothing_measured(searched: Searched, measurer: Measurer, memory: int | None) -> BaseException:
    """Return why a search has no program, not even the model as it is."""
    if measurer.interrupted:
        return KeyboardInterrupt()
    if searched.failure:
        return TuningError(f"no program of the model runs: {searched.failure}")
    if memory is not None and measurer.measured:
        return TuningError(f"no program runs within {memory} bytes. Give a larger `memory`.")
    alone = measurer.executor.why_alone() if isinstance(measurer.executor, QueueExecutor) else ""
    if alone:
        return TuningError(f"nothing was measured within {measurer.budget:.3g} s: {alone}.")
    return _out_of_time(measurer.budget)


def _out_of_time(budget: float) -> TuningError:
    return TuningError(
        f"nothing could be measured within {budget:.3g} s. Give a larger `budget`; dry_run=True estimates it."
    )


def _stored_search(finished: Measurement) -> Searched:
    details = cast("Mapping[str, Any]", finished.details)
    return Searched(Plan.from_json(details["plan"]), SearchReport(**details["report"]), None)


def _record(
    store: Store, subject: Subject, environment: Environment, searched: Searched, seconds: float
) -> Searched:
    """Store the plan of a finished search, so that the same search gives the same plan without measuring.

    Returns the search of another process that has finished it first, if there is one.
    """
    report = {f.name: getattr(searched.report, f.name) for f in fields(SearchReport)}
    lease = store.acquire(subject, environment, seconds=_RECORD_SECONDS)
    if lease is not None:
        with lease:
            details = {"plan": searched.plan.to_json(), "report": report}
            if lease.complete(Measurement((seconds,), details=details)):
                return searched
    finished = store.wait(subject, environment, timeout=_RECORD_SECONDS)
    return searched if finished is None else _stored_search(finished)


def estimate(prepared: Prepared, store: Store) -> DryRun:
    """Return what a search would measure, with an estimate of its time from stored compilations or typical ones.

    Pass orders that are sampled are not counted: what they lead to is not known before. Divisions, boundaries and programs
    that depend on what is measured first are counted as many as there may be.
    """
    space, environment = prepared.space, prepared.environment
    typical = _compile_seconds(prepared, store)
    measurer = Measurer(store, environment, InProcess(prepared.tuned, prepared.backends), budget=math.inf)
    blocks = DivisionSearch(space, prepared.tuned.mode, measurer)
    trials: list[Trial] = [blocks.operations_trial(key) for key in space.blocks]
    for key, block in space.blocks.items():
        trials += blocks.region_trials(key, range(len(block.candidates)))
    distinct = {trial.subject.digest: trial for trial in trials}.values()
    missing = [trial for trial in distinct if store.get(trial.subject, environment) is None]
    seconds = sum(
        _SAMPLE_SECONDS
        + (
            typical.get(trial.backend.name, UNKNOWN_COMPILE_SECONDS)
            if isinstance(trial, RegionTrial)
            else 0.0
        )
        for trial in missing
    )
    # Whole programs: as they are, by torch.compile, by each backend, and the comparisons in the end.
    wholes = (
        sum(5 * typical.get(choice.name, UNKNOWN_COMPILE_SECONDS) + 5.0 for choice in space.backends) + 15.0
    )
    states, backends = min(BEST_STATES, len(space.states)), len(space.backends)
    # As they are, by torch.compile, each backend on the whole graph; states after passes as one region by the fastest
    # compilers, and divided; the default pipeline by each backend; two comparisons.
    programs = 5 + backends + len(space.states) + states * (COMPILERS + 1) + len(space.choices) + 2
    divisions = len(space.blocks)
    pairs = (len(space.choices) + 1) ** 2 - 1
    each_division = 1 + 2 * len(space.choices)
    return DryRun(
        (space,),
        len(distinct) + programs + divisions + pairs,
        len(distinct) - len(missing),
        sum(trial.compilations for trial in missing) + programs + divisions * each_division + 2 * pairs,
        seconds + wholes,
        1.4 * wholes,
    )


def _compile_seconds(prepared: Prepared, store: Store) -> dict[str, float]:
    """Return how long each backend compiles a body: the median in the store, else a typical time."""
    known: dict[str, list[float]] = {}
    for subject, measured in store.results(prepared.environment, kind="body"):
        for name in {choice.name for choice in prepared.space.backends}:
            if f" {name} " in f" {subject.backend} ":
                known.setdefault(name, []).append(measured.compile_seconds)
    return {**TYPICAL_COMPILE_SECONDS, **{name: statistics.median(values) for name, values in known.items()}}


def _executor(
    prepared: Prepared, store: Store, name: ExecutorName, seconds: float = math.inf
) -> Executor | QueueExecutor:
    """Return the executor of a name; raise TimeoutError if its process does not start within so many seconds."""
    start = time.monotonic()
    if name != "local":
        if store.is_in_memory:
            raise InvalidArgument(
                f"executor='{name}' needs a store that workers reach; give store= the URL of a database, or a file."
            )
        device = prepared.tuned.device
        if device.index:
            raise InvalidArgument(
                f"executor='{name}' measures on one GPU, the first that a worker has, and the model is on '{device}': "
                f"move it to '{device.type}:0'; CUDA_VISIBLE_DEVICES hides others."
            )
        engine = None
        if name == "ray":
            engine = RayEngine(store, device, prepared.environment)
        try:
            return QueueExecutor(
                store,
                prepared.environment,
                prepared.tuned,
                prepared.backends,
                label=prepared.label,
                engine=engine,
            )
        except BaseException:
            if engine is not None:
                engine.close()
            raise
    try:
        return LocalExecutor(prepared.tuned, prepared.backends, seconds)
    except Exception as error:
        if isinstance(error, TimeoutError) and time.monotonic() - start >= seconds:
            raise
        _LOG.warning(
            "trials run in this process, where a crash ends the search%s: %s",
            "" if can_interrupt() else " and a trial that hangs is not stopped",
            (str(error) or "its process does not start").removesuffix("."),
        )
        return InProcess(prepared.tuned, prepared.backends)


def _require_packages() -> None:
    """Raise for what is not installed before anything is measured, not when it is needed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"tuning needs {' and '.join(missing)}, not installed; pip install 'dovetail[tune]'",
            name=missing[0],
        )


def _open_store(store: Any) -> Store:
    if store is not None and not isinstance(store, (str, os.PathLike)):
        # What it contains is not shown: it may be a URL with a password, as bytes or as an object.
        raise InvalidArgument(f"store is a {type(store).__name__}; give the path of a file, or a URL.")
    return Store("sqlite://" if store is None else cast("str", store))


def _check_call(model: Any, args: Any, kwargs: Any) -> None:
    if os.environ.get(IN_WORKER):
        raise InvalidArgument(
            "`tune` is called while a worker process imports the script that runs; put the call under "
            "`if __name__ == '__main__':`."
        )
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"tune takes a module, not a {type(model).__name__}.")
    if not isinstance(args, tuple):
        raise InvalidArgument(f"args must be a tuple of example inputs, not a {type(args).__name__}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidArgument(f"kwargs must be a dict of example inputs, not a {type(kwargs).__name__}.")


def _check_model(model: nn.Module) -> None:
    if isinstance(model, CompiledModule):
        raise InvalidArgument("the model is compiled already; tune the model it was made from.")
    refuse_scripted(model)
    if active_autocast():
        raise InvalidArgument(
            "tune is called under torch.autocast, which trials in other processes do not run under. Call it outside, with "
            "a model whose forward enters torch.autocast itself."
        )


def _check_options(budget: Any, memory: Any, seed: Any, executor: Any, switches: Mapping[str, Any]) -> None:
    is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if not is_number or not 0 < budget < math.inf:
        raise InvalidArgument(f"budget {budget!r}; give a positive number of seconds.")
    if memory is not None and (not isinstance(memory, int) or isinstance(memory, bool) or memory <= 0):
        raise InvalidArgument(f"memory {memory!r}; give a number of bytes, or None.")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise InvalidArgument(f"seed {seed!r}; give an integer of 0 or more.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise InvalidArgument(f"{name} {value!r}; give True or False.")
    if executor not in get_args(ExecutorName):
        names = ", ".join(f"'{name}'" for name in get_args(ExecutorName))
        raise InvalidArgument(f"executor {executor!r}; there are {names}.")
