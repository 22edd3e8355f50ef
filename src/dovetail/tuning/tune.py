"""`dovetail.tune`: boundaries, pass order and backends of a model chosen by measurement, once and ahead of time."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast, overload

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from dovetail.errors import CaptureError, DovetailError, InvalidArgument, TuningError, checked_call
from dovetail.frontend.capture import capture
from dovetail.frontend.model_copy import refuse_scripted
from dovetail.lowering.backend_protocol import Backend, Backends, built_in, resolve
from dovetail.outlining.region import graph_key
from dovetail.runtime.compiled_module import CompiledModule
from dovetail.runtime.presets import Mode
from dovetail.scheduling.call_recording import isolated_run
from dovetail.tuning.apply_plan import make_pass
from dovetail.tuning.block import Block, blocks_of, record_inputs
from dovetail.tuning.decisions import PassChoice
from dovetail.tuning.division_search import DivisionSearch
from dovetail.tuning.environment import Environment, current_environment
from dovetail.tuning.executor import IN_WORKER, Executor, InProcess, LocalExecutor, TunedModel
from dovetail.tuning.measurement import Measurement, Subject
from dovetail.tuning.measuring import TRIAL_SECONDS, Measurer, Progress
from dovetail.tuning.plan import Plan
from dovetail.tuning.progress import make_progress
from dovetail.tuning.region_candidates import Pruned
from dovetail.tuning.search import Searched, SearchReport, search
from dovetail.tuning.search_space import (
    TYPICAL_COMPILE_SECONDS,
    UNKNOWN_COMPILE_SECONDS,
    GraphState,
    SearchSpace,
    block_space,
    explore,
)
from dovetail.tuning.size_ranges import Range, SizedExample, dynamic_shapes_for, sized_examples
from dovetail.tuning.store import Store
from dovetail.tuning.trial import RegionTrial, Trial, digest_of

_LOG = logging.getLogger("dovetail")
_NOT_SEARCHED = {
    "eager": "it runs operations as they are",
    "aoti": "it is Inductor's code ahead of time",
    "int8": "it changes precision",
    "cuda_graphs": "it wraps another backend",
}
"""Built-in backends that are not searched unless they are named, and why."""
_SAMPLE_SECONDS = 0.6
_RECORD_SECONDS = 30.0
_SEARCH_VERSION = 2
"""Raised when searches decide differently: plans of finished ones are then not read from stores."""
_SPACE_SHARE = 0.25
"""The share of the budget after which nothing more of the search space is derived."""
_PACKAGES = ("sqlalchemy", "scipy", "optuna", "rich")


@dataclass(frozen=True)
class DryRun:
    """What a search would do: how many compilations and measurements, an estimate of its time, the least useful budget."""

    space: SearchSpace
    measurements: int
    stored: int
    compilations: int
    seconds: float
    least_budget: float

    def __str__(self) -> str:
        return "\n".join(
            [
                str(self.space),
                f"{self.measurements} measurements at most, {self.stored} of them in the store, "
                f"{self.compilations} compilations",
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
    executor: Literal["local"] = ...,
    progress: bool = ...,
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
    executor: Literal["local"] = ...,
    progress: bool = ...,
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
    executor: Literal["local"] = "local",
    progress: bool = True,
) -> Plan | DryRun:
    """Return the plan of the fastest program for calls like this one, found by measuring for `budget` seconds.

    The plan is for inference, measured without gradients, if the model is in eval mode, and for training steps (forward
    and backward) in train mode. `store` is a file of measurements, created if it does not exist, that later searches and
    other processes share; without one they are lost with the process. `sizes` are further example inputs, tuples like
    `args` that differ in one size, or `{argument: {dim: Dim(name, min=..., max=...)}}`: each is tuned with an equal part of
    the budget for a range of sizes around it, and calls are captured for these ranges. `backends` are those that are
    searched, by default all that are installed and do not change precision. `memory` bounds the peak bytes of a call beyond
    the weights. With `dry_run` nothing is measured: the result says what would be. The same call with the same store gives
    the same plan without measuring; with a larger budget the search goes on. Trials run in a worker process, which needs
    the model to be picklable; otherwise in this one, with a warning. An interrupt (Ctrl-C) ends the search with the best
    program so far.
    """
    start = time.monotonic()
    _check_model(model, args, kwargs)
    _check_options(budget, memory, seed, executor, {"dry_run": dry_run, "progress": progress})
    _require_packages()
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
            )
        deadline = math.inf if dry_run else start + _SPACE_SHARE * budget
        prepared = prepare(model, args, kwargs, backends, deadline=deadline)
        if dry_run:
            return estimate(prepared, opened)
        return run_search(
            prepared, opened, budget=budget, memory=memory, seed=seed, progress=progress, start=start
        ).plan
    finally:
        opened.close()


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
    """Tune each range of sizes; return the plan of all, or what would be measured for all."""
    plan, estimates = Plan(), list[DryRun]()
    for example in examples:
        start = time.monotonic()
        deadline = math.inf if dry_run else start + _SPACE_SHARE * budget / len(examples)
        prepared = prepare_range(model, example, backends, deadline)
        if dry_run:
            estimates.append(estimate(prepared, store))
            continue
        searched = run_search(prepared, store, budget=budget / len(examples), start=start, **options)
        plan |= searched.plan
        if searched.report.is_interrupted:
            break
    if not dry_run:
        return plan
    return replace(
        estimates[0],
        measurements=sum(each.measurements for each in estimates),
        compilations=sum(each.compilations for each in estimates),
        seconds=sum(each.seconds for each in estimates),
        least_budget=sum(each.least_budget for each in estimates),
    )


def prepare_range(
    model: nn.Module, example: SizedExample, backends: Any, deadline: float = math.inf
) -> Prepared:
    """Capture a model for a range of sizes; where these cannot be symbolic, for the example's own."""
    try:
        sizes = {example.pattern: (example.range,)}
        return prepare(model, example.args, example.kwargs, backends, sizes, deadline)
    except CaptureError as error:
        if example.range[0] == example.range[1]:
            raise
        _LOG.warning(
            "sizes from %d to %d are tuned for one of them, for they cannot be symbolic: %s",
            *example.range,
            error,
        )
        return prepare(model, example.args, example.kwargs, backends, deadline=deadline)


@dataclass(eq=False)
class Prepared:
    """A model that is ready to be tuned: captured, with its search space."""

    tuned: TunedModel
    backends: tuple[Backend, ...]
    space: SearchSpace
    environment: Environment
    operands: str
    label: str
    sizes: Mapping[str, tuple[Range, ...]] = field(default_factory=dict[str, tuple[Range, ...]])
    add_block: Callable[[Block], None] = lambda block: None
    """Makes a block of a new state available to trials."""

    def new_state(self, pipeline: Sequence[PassChoice]) -> GraphState | None:
        """Return the state that a pipeline leads to, one of the space if its graph is there already; None if refused."""
        graph = self.space.states[0].graph
        try:
            for choice in pipeline:
                graph = make_pass(choice)(graph)
        except DovetailError as error:
            self.space.pruned.append(Pruned(" -> ".join(map(str, pipeline)), str(error)))
            return None
        key = graph_key(graph)
        known = next((s for s in self.space.states if s.key == key), None)
        if known is not None:
            return known
        blocks, new = blocks_of(graph, {k: s.block for k, s in self.space.blocks.items()})
        tuned = self.tuned
        record_inputs(graph, blocks, tuned.args, tuned.kwargs, grad=tuned.mode == "training")
        for block_key in new:
            self.space.blocks[block_key] = block_space(blocks[block_key], self.space.choices, parts=False)
            self.add_block(blocks[block_key])
        return GraphState(tuple(pipeline), graph, key, blocks)


def prepare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    backends: Any = None,
    sizes: Mapping[str, tuple[Range, ...]] | None = None,
    deadline: float = math.inf,
) -> Prepared:
    """Capture a model, for a range of `sizes` if it has one, and derive its search space until a `deadline`."""
    mode: Mode = "training" if model.training else "inference"
    named = dict(kwargs or {})
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, named))]
    device = next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))
    with torch.set_grad_enabled(mode == "training"), isolated_run(model):
        shapes = dynamic_shapes_for(sizes or {}, model.forward, args, named)
        graph = capture(model, args, named, dynamic_shapes=shapes)
        chosen = _backends(backends, device)
        space = explore(graph, args, named, mode, chosen, deadline=deadline)
    tuned = TunedModel(model, args, named, mode, device)
    operands = _operands(args, named)
    ranges = [f", n from {low} to {high}" for each in (sizes or {}).values() for low, high in each]
    label = f"{type(model).__name__}, {mode}, {operands}{''.join(ranges)}"
    return Prepared(tuned, chosen, space, current_environment(device), operands, label, sizes or {})


def run_search(
    prepared: Prepared,
    store: Store,
    *,
    budget: float,
    memory: int | None = None,
    seed: int = 0,
    progress: bool | Progress = True,
    executor: Executor | None = None,
    start: float | None = None,
) -> Searched:
    """Search with a store and an executor; by default one with a worker process. The budget begins at `start`."""
    start = time.monotonic() if start is None else start
    subject = _search_subject(prepared, budget, memory, seed)
    finished = store.get(subject, prepared.environment)
    if finished is not None:
        details = cast("Mapping[str, Any]", finished.details)
        return Searched(Plan.from_json(details["plan"]), SearchReport(**details["report"]), None)
    display = make_progress(budget) if progress is True else None if progress is False else progress
    runs = executor or _executor(prepared)
    measurer = Measurer(
        store,
        prepared.environment,
        runs,
        budget=budget,
        progress=display,
        trial_seconds=min(TRIAL_SECONDS, max(10.0, 0.3 * budget)),
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
            sizes=prepared.sizes,
        )
        if searched.outcome is None:
            raise _nothing_measured(store, prepared, measurer, memory)
        if not measurer.interrupted:
            _record(store, subject, prepared.environment, searched, measurer.elapsed)
        return searched
    finally:
        measurer.progress.end()
        if executor is None:
            runs.close()


def _search_subject(prepared: Prepared, budget: float, memory: int | None, seed: int) -> Subject:
    """Return what identifies a finished search: one with a larger budget goes on from the measurements of this one."""
    space = prepared.space
    sizes = {pattern: [list(r) for r in ranges] for pattern, ranges in prepared.sizes.items()}
    key = digest_of([_SEARCH_VERSION, space.key, sizes, float(budget), memory, seed, prepared.label])
    backends = " | ".join(space.identity_of(choice) for choice in space.backends)
    return Subject("search", key, prepared.operands, backends, prepared.tuned.mode)


def _nothing_measured(
    store: Store, prepared: Prepared, measurer: Measurer, memory: int | None
) -> BaseException:
    """Return why a search has no program, not even the model as it is."""
    if measurer.interrupted:
        return KeyboardInterrupt()
    failures = [m.failure for _, m in store.results(prepared.environment, kind="program") if m.failure]
    if failures:
        return TuningError(f"no program of the model runs: {failures[0]}")
    if memory is not None and measurer.measured:
        return TuningError(f"no program runs within {memory} bytes. Give a larger `memory`.")
    return TuningError(
        f"nothing could be measured within {measurer.budget:.3g} s. Give a larger `budget`; dry_run=True estimates it."
    )


def _record(
    store: Store, subject: Subject, environment: Environment, searched: Searched, seconds: float
) -> None:
    """Store the plan of a finished search, so that the same search gives the same plan without measuring."""
    report = {f.name: getattr(searched.report, f.name) for f in fields(SearchReport)}
    lease = store.acquire(subject, environment, seconds=_RECORD_SECONDS)
    if lease is not None:
        with lease:
            details = {"plan": searched.plan.to_json(), "report": report}
            lease.complete(Measurement((seconds,), details=details))


def estimate(prepared: Prepared, store: Store) -> DryRun:
    """Return what a search would measure, with an estimate of its time from stored compilations or typical ones.

    Pass orders that are sampled are not counted: what they lead to is not known before.
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
    programs = len(space.backends) + 5
    return DryRun(
        space,
        len(distinct) + programs,
        len(distinct) - len(missing),
        sum(trial.compilations for trial in missing) + programs,
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


def _executor(prepared: Prepared) -> Executor:
    try:
        return LocalExecutor(prepared.tuned, prepared.backends)
    except Exception as error:
        _LOG.warning(
            "trials run in this process, where a crash ends the search: %s", str(error).removesuffix(".")
        )
        return InProcess(prepared.tuned, prepared.backends)


def _backends(backends: Any, device: torch.device) -> tuple[Backend, ...]:
    """Return the backends that are searched: those given, or all that are installed and do not change precision."""
    if backends is not None:
        if isinstance(backends, Mapping):
            raise InvalidArgument("a mapping by kind is for `lower` and `compile`; give a list of backends.")
        return () if isinstance(backends, (list, tuple)) and not backends else resolve(backends)
    available: list[Backend] = []
    for name in built_in():
        if name in _NOT_SEARCHED:
            continue
        backend = resolve(name)[0]
        missing = cast("str | None", getattr(backend, "missing", lambda: None)())
        if missing is None:
            available.append(backend)
        else:
            _LOG.info("backend '%s' is not searched: %s", name, missing)
    return tuple(available)


def _operands(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the inputs of a call in a few words."""
    texts: list[str] = []
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor):
            texts.append(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}")
        else:
            texts.append(repr(leaf) if isinstance(leaf, (int, float, bool, str)) else type(leaf).__name__)
    return ", ".join(texts)


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
        raise InvalidArgument(f"store {store!r}; give the path of a file, or a URL.")
    return Store("sqlite://" if store is None else cast("str", store))


def _check_model(model: Any, args: Any, kwargs: Any) -> None:
    if os.environ.get(IN_WORKER):
        raise InvalidArgument(
            "`tune` is called while a worker process imports the script that runs; put the call under "
            "`if __name__ == '__main__':`."
        )
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"tune takes a module, not a {type(model).__name__}.")
    if isinstance(model, CompiledModule):
        raise InvalidArgument("the model is compiled already; tune the model it was made from.")
    refuse_scripted(model)
    if not isinstance(args, tuple):
        raise InvalidArgument(f"args must be a tuple of example inputs, not a {type(args).__name__}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidArgument(f"kwargs must be a dict of example inputs, not a {type(kwargs).__name__}.")


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
    if executor != "local":
        raise InvalidArgument(f"executor {executor!r}; there is 'local'.")
