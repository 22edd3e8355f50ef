"""Sampling of pass orders on a device with planted costs, where states were limited."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from dovetail import InvalidGraph
from dovetail.tuning import pass_sampler, preparation
from dovetail.tuning.decisions import PassChoice
from dovetail.tuning.division_search import DivisionSearch
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.measuring import Measurer
from dovetail.tuning.pass_sampler import PassSampler
from dovetail.tuning.preparation import Prepared
from dovetail.tuning.search_space import GraphState, explore
from dovetail.tuning.store import Store
from dovetail.tuning.trial import OperationsTrial, Trial
from tests.tuning.helpers import FakeClock
from tests.tuning.synthetic import (
    HERE,
    Chain,
    Costs,
    Merging,
    SyntheticDevice,
    cost_of,
    prepared,
    run,
    winner_state,
)

FIRST, SECOND = "aten.linear.default 4x8 to [8, 12]", "aten.linear.default 4x8 to [16, 20]"


@cache
def complete() -> Prepared:
    return prepared(Merging(), backends=("a",))


def limited(max_states: int) -> Prepared:
    """The model with a space of that many states at most."""
    ready = complete()
    tuned, graph = ready.tuned, ready.space.states[0].graph
    space = explore(graph, tuned.args, tuned.kwargs, "inference", ready.backends, max_states=max_states)
    return replace(ready, space=space)


@dataclass
class Sampling:
    """One sampling with what it proposed and measured."""

    ready: Prepared
    store: Store
    clock: FakeClock = field(default_factory=FakeClock)
    pipelines: list[tuple[PassChoice, ...]] = field(default_factory=list[tuple[PassChoice, ...]])
    trials: list[Trial] = field(default_factory=list[Trial])
    interrupted: bool = False

    def new_state(self, pipeline: Sequence[PassChoice]) -> GraphState | None:
        self.pipelines.append(tuple(pipeline))
        return self.ready.new_state(pipeline)

    def run(
        self,
        new_state: Callable[[Sequence[PassChoice]], GraphState | None] | None = None,
        *,
        device: SyntheticDevice | None = None,
        seed: int = 0,
        budget: float = 1e6,
    ) -> "Sampling":
        space = self.ready.space
        executor = device or SyntheticDevice(space, Costs())
        executor.log = self.trials.append
        measurer = Measurer(self.store, HERE, executor, budget=budget, clock=self.clock)
        measurer.interrupted = self.interrupted
        blocks = DivisionSearch(space, "inference", measurer)
        PassSampler(space, blocks, new_state or self.new_state, seed=seed).run(measurer, 1.0)
        return self

    @property
    def keys(self) -> list[str]:
        return [state.key for state in self.ready.space.states]


@pytest.fixture
def memory() -> Iterator[Store]:
    with Store("sqlite://") as store:
        yield store


def test_sampling_adds_the_states_that_the_limit_left_out(memory: Store) -> None:
    every = {state.key for state in complete().space.states}
    assert len(every) == 8
    ready = limited(3)
    assert not ready.space.is_complete
    assert [s.pipeline for s in ready.space.states] == [
        (),
        (PassChoice("FoldConstants"),),
        (PassChoice("MergeParallel", {"groups": [FIRST, SECOND], "materialise": True}),),
    ]
    sampled = Sampling(ready, memory).run()
    assert len(sampled.keys) > 5
    assert len(set(sampled.keys)) == len(sampled.keys)
    assert set(sampled.keys) <= every
    for state in ready.space.states:
        assert set(state.blocks) <= set(ready.space.blocks)
        assert all(
            block.inputs or not block.program.graph.find_nodes(op="placeholder")
            for block in state.blocks.values()
        )


def test_pipelines_have_each_pass_once_with_the_options_of_the_space(memory: Store) -> None:
    sampled = Sampling(limited(3), memory).run()
    assert len(sampled.pipelines) == pass_sampler._MAX_SAMPLES
    names = [[choice.name for choice in pipeline] for pipeline in sampled.pipelines]
    # Only fusing comes twice, then with other rules.
    assert all(len({*map(str, pipeline)}) == len(pipeline) for pipeline in sampled.pipelines)
    assert all(len({*each} - {"Fuse"}) == len(each) - each.count("Fuse") for each in names)
    assert max(each.count("Fuse") for each in names) == 2
    assert {name for each in names for name in each} >= {"FoldConstants", "MergeParallel", "Fuse"}
    merges = [c.options for p in sampled.pipelines for c in p if c.name == "MergeParallel"]
    assert all(options["materialise"] is True for options in merges)
    assert {tuple(options["groups"]) for options in merges} <= {(FIRST, SECOND), (FIRST,), (SECOND,)}
    assert {tuple(options["groups"]) for options in merges} >= {(FIRST,), (SECOND,)}


def test_a_seed_determines_what_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_sampler, "_MAX_SAMPLES", 14)
    runs: list[Sampling] = []
    for seed in (0, 0, 1):
        with Store("sqlite://") as store:
            runs.append(Sampling(limited(3), store).run(seed=seed))
    first, again, other = runs
    assert first.pipelines == again.pipelines
    assert first.keys == again.keys
    assert [t.subject for t in first.trials] == [t.subject for t in again.trials]
    assert first.pipelines != other.pipelines


def test_equal_graphs_are_measured_once(memory: Store) -> None:
    sampled = Sampling(limited(3), memory).run()
    digests = [trial.subject.digest for trial in sampled.trials]
    assert len(set(digests)) == len(digests)
    # Orders that lead to one graph were proposed, and gave one state.
    distinct = {str(pipeline) for pipeline in sampled.pipelines}
    assert len(sampled.keys) < len(distinct) < len(sampled.pipelines)
    measured = {trial.block for trial in sampled.trials if isinstance(trial, OperationsTrial)}
    used = {key for p in sampled.pipelines for key in reached(sampled, p).blocks}
    assert measured == used
    again = Sampling(sampled.ready, memory).run(seed=5)
    new = {t.block for t in again.trials if isinstance(t, OperationsTrial)}
    assert not new & measured


def reached(sampled: Sampling, pipeline: Sequence[PassChoice]) -> GraphState:
    state = sampled.ready.new_state(pipeline)
    assert state in sampled.ready.space.states
    assert state is not None
    return state


def test_without_time_or_after_an_interrupt_nothing_is_sampled(memory: Store) -> None:
    ready = limited(3)
    for sampling, budget in (
        (Sampling(ready, memory), 0.0),
        (Sampling(ready, memory, interrupted=True), 1e6),
    ):
        sampling.run(budget=budget)
        assert (sampling.pipelines, sampling.trials) == ([], [])
        assert len(sampling.keys) == 3


def test_the_budget_ends_sampling(memory: Store) -> None:
    sampling = Sampling(limited(3), memory)

    def delayed(pipeline: Sequence[PassChoice]) -> GraphState | None:
        sampling.pipelines.append(tuple(pipeline))
        sampling.clock.now += 1
        return sampling.ready.space.states[0]

    sampling.run(delayed, budget=4.5)
    assert len(sampling.pipelines) == 5


def test_time_that_ends_before_a_new_state_is_measured_ends_sampling(memory: Store) -> None:
    sampling = Sampling(limited(3), memory)

    def slow(pipeline: Sequence[PassChoice]) -> GraphState | None:
        state = sampling.new_state(pipeline)
        sampling.clock.now += 100
        return state

    sampling.run(slow, budget=50)
    assert len(sampling.pipelines) == 1
    assert sampling.trials == []


def test_pipelines_without_a_state_are_passed_over(memory: Store) -> None:
    sampling = Sampling(limited(3), memory)
    seen: list[Any] = []

    def none(pipeline: Sequence[PassChoice]) -> None:
        seen.append(pipeline)

    sampling.run(none)
    assert len(seen) == pass_sampler._MAX_SAMPLES
    assert len(sampling.keys) == 3


def test_states_whose_operations_fail_are_passed_over(memory: Store) -> None:
    class Failing(SyntheticDevice):
        def measure(self, trial: Trial, timeout: float) -> Measurement:
            return Measurement((), failure="no kernel")

    sampling = Sampling(limited(3), memory)
    sampling.run(device=Failing(sampling.ready.space, Costs()))
    assert len(sampling.pipelines) == pass_sampler._MAX_SAMPLES


def test_a_pass_that_refuses_the_graph_of_a_pipeline_is_passed_over(
    memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = preparation.make_pass

    def make_pass(choice: PassChoice) -> Any:
        def refuse(gm: Any) -> Any:
            raise InvalidGraph("its weights are constants")

        return refuse if choice.name == "FoldConstants" else make(choice)

    ready = limited(3)
    monkeypatch.setattr(preparation, "make_pass", make_pass)
    sampled = Sampling(ready, memory).run()
    assert len(sampled.pipelines) == pass_sampler._MAX_SAMPLES


def test_a_sampled_state_wins_the_search_where_it_is_the_fastest(memory: Store) -> None:
    def operation(name: str, elements: int) -> float:
        # Merging the second pair pays, merging the first one does not.
        return {4 * 36: 8.0, 4 * 20: 20.0, 4 * 16: 20.0}.get(elements, 5.0) if name == "linear" else 1.0

    def region(kind: str, seconds: float, backend: str) -> float:
        return 2 * seconds

    best: list[float] = []
    for ready in (complete(), limited(3)):
        device = SyntheticDevice(ready.space, Costs(operations=operation, regions=region))
        with Store("sqlite://") as store:
            searched = run(ready, device, store)
        assert ("sampled" in searched.report.phases) == (not ready.space.is_complete)
        assert len({trial.subject.digest for trial in device.trials}) == len(device.trials)
        best.append(cost_of(searched, device))
        state = winner_state(searched)
        assert state is not None
        (merge,) = [choice for choice in state.pipeline if choice.name == "MergeParallel"]
        assert SECOND in merge.options["groups"]
    # Forty samples are not all pipelines: that without folding the table too may remain.
    assert best[0] <= best[1] <= 1.1 * best[0]


def test_a_complete_space_is_not_sampled(memory: Store) -> None:
    ready = prepared(Chain())
    assert ready.space.is_complete
    searched = run(ready, SyntheticDevice(ready.space, Costs()), memory)
    assert "sampled" not in searched.report.phases
    assert searched.report.states == 1
