"""The search on a device with planted costs, where the best program is known."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.tuning.block import Block
from dovetail.tuning.decisions import BackendChoice, Spread
from dovetail.tuning.division_search import BlockChoice, DivisionSearch
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.measuring import Measurer
from dovetail.tuning.program_search import ProgramSearch, outlined_regions
from dovetail.tuning.region_candidates import RegionCandidate
from dovetail.tuning.search_space import explore
from dovetail.tuning.store import Store
from dovetail.tuning.trial import BlockDivision, ComparisonTrial, ProgramSpec, Trial
from dovetail.tuning.tune import run_search
from tests.tuning.helpers import FakeClock
from tests.tuning.postgresql_server import Server
from tests.tuning.synthetic import (
    HERE,
    Chain,
    Costs,
    Merging,
    Normalized,
    Siblings,
    SyntheticDevice,
    cost_of,
    exhaustive,
    prepared,
    run,
    winner_state,
)


def random_costs(seed: int) -> Costs:
    """Return costs where each kind, backend and boundary has its own, and two kinds interact."""
    generator = random.Random(seed)
    factors: dict[tuple[str, str], float] = {}
    boundaries = {
        (a, b): generator.choice([0.0, 1.0, 4.0])
        for a in ("a", "b", "as it is")
        for b in ("a", "b", "as it is")
        if (a, b) != ("as it is", "as it is")
    }

    def region(kind: str, seconds: float, backend: str) -> float:
        factor = factors.setdefault((kind, backend), generator.uniform(0.3, 1.4))
        return 2.0 + factor * seconds

    return Costs(
        operations=lambda name, _: {"linear": 20.0, "tanh": 6.0}.get(name, 4.0),
        regions=region,
        boundaries=boundaries,
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_best_program_wins(seed: int) -> None:
    ready = prepared(Chain())
    device = SyntheticDevice(ready.space, random_costs(seed))
    with Store("sqlite://") as store:
        searched = run(ready, device, store)
    best, programs = exhaustive(device, ["a", "b"])
    assert 100 < programs < 2000
    assert len(device.trials) <= 60
    assert cost_of(searched, device) <= 1.02 * best


def test_whole_blocks_show_interactions_that_no_sum_predicts() -> None:
    ready = prepared(Chain())
    costs = Costs(
        operations=lambda name, _: 20.0 if name == "linear" else 5.0,
        regions=lambda kind, seconds, backend: 0.6 * seconds if backend == "a" else 0.7 * seconds,
        # Threads of "a" and "b" get in each other's way, and so do those of "a" and the rest.
        interactions=lambda chosen: 40.0 * (len({b for _, b in chosen.values()}) > 1),
    )
    device = SyntheticDevice(ready.space, costs)
    with Store("sqlite://") as store:
        searched = run(ready, device, store)
    best, _ = exhaustive(device, ["a", "b"])
    assert cost_of(searched, device) <= 1.02 * best


def test_boundary_costs_keep_a_block_in_one_backend() -> None:
    ready = prepared(Chain())

    def region(kind: str, seconds: float, backend: str) -> float:
        return seconds * (0.5 if (kind == "linear_activation") == (backend == "a") else 0.6)

    free = Costs(operations=lambda name, _: 10.0, regions=region)
    dear = Costs(
        operations=lambda name, _: 10.0,
        regions=region,
        boundaries={(a, b): 30.0 for a in "ab" for b in "ab" if a != b}
        | {("a", "as it is"): 30.0, ("b", "as it is"): 30.0},
    )
    chosen: list[set[str]] = []
    for costs in (free, dear):
        device = SyntheticDevice(ready.space, costs)
        with Store("sqlite://") as store:
            searched = run(ready, device, store)
        assert searched.outcome is not None
        assert cost_of(searched, device) <= 1.02 * exhaustive(device, ["a", "b"])[0]
        division = next(iter(searched.outcome.winner.choices.values())).division
        chosen.append({backend.name for _, backend in division.regions})
    assert chosen[1] <= {"a"} or chosen[1] <= {"b"}


@pytest.mark.parametrize("fusing_first", [True, False])
def test_the_better_order_of_fusing_and_merging_wins(fusing_first: bool) -> None:
    ready = prepared(Siblings())
    names = {tuple(c.name for c in s.pipeline) for s in ready.space.states}
    assert {(), ("MergeParallel",), ("Fuse", "MergeParallel")} <= names

    def operation(name: str, elements: int) -> float:
        widths = {4 * 52: 12.0 if not fusing_first else 70.0, 4 * 20: 8.0}
        return widths.get(elements, 20.0) if name == "linear" else 3.0

    costs = Costs(
        operations=operation,
        regions=lambda kind, seconds, backend: 0.4 * seconds if kind == "linear_activation" else seconds,
    )
    device = SyntheticDevice(ready.space, costs)
    with Store("sqlite://") as store:
        searched = run(ready, device, store)
    best, _ = exhaustive(device, ["a", "b"])
    assert cost_of(searched, device) <= 1.02 * best
    state = winner_state(searched)
    assert state is not None
    expected = ("Fuse", "MergeParallel") if fusing_first else ("MergeParallel",)
    assert tuple(c.name for c in state.pipeline) == expected


@pytest.mark.parametrize("another_round", [True, False])
def test_regions_of_another_round_of_fusing_win_where_they_are_faster(another_round: bool) -> None:
    ready = prepared(Normalized(), torch.randn(4, 8), torch.randn(4, 8))

    def region(kind: str, seconds: float, backend: str) -> float:
        # Of groups only that of eight operations, of which six are the norm.
        is_fast = (kind, seconds) == ("group", 80.0) if another_round else kind == "rms_norm"
        return 0.1 * seconds if is_fast and backend == "a" else 1.2 * seconds

    device = SyntheticDevice(ready.space, Costs(operations=lambda name, _: 10.0, regions=region))
    with Store("sqlite://") as store:
        searched = run(ready, device, store)
    best, _ = exhaustive(device, ["a", "b"])
    assert cost_of(searched, device) <= 1.02 * best
    assert searched.outcome is not None
    (choice,) = searched.outcome.winner.choices.values()
    ((chosen, backend),) = choice.division.regions
    assert backend.name == "a"
    (space,) = ready.space.blocks.values()
    (candidate,) = [c for c in space.candidates if c.choice == chosen]
    if another_round:
        assert candidate.rules == ("fuse_library_groups",)
    else:
        assert candidate.choice.kind == "rms_norm"


def test_a_backend_that_loses_everywhere_leaves_the_model_as_it_is() -> None:
    ready = prepared(Chain())
    device = SyntheticDevice(ready.space, Costs(regions=lambda kind, seconds, backend: 1.5 * seconds))
    with Store("sqlite://") as store:
        searched = run(ready, device, store)
    assert searched.outcome is not None
    assert searched.outcome.winner.decision.execution == "model"
    assert cost_of(searched, device) == device.model()


def test_the_same_store_and_seed_give_the_same_bytes_without_measuring(tmp_path: Path) -> None:
    ready = prepared(Chain())
    costs = random_costs(3)
    path = tmp_path / "store.db"
    first_device = SyntheticDevice(ready.space, costs, noise=0.02)
    with Store(path) as store:
        first = run(ready, first_device, store).plan.to_json()
    assert first_device.trials
    again_device = SyntheticDevice(ready.space, costs, noise=0.5)
    again_ready = prepared(Chain())
    with Store(path) as store:
        again = run(again_ready, again_device, store).plan.to_json()
    assert again_device.trials == []
    assert again == first


def test_equal_layers_are_measured_once() -> None:
    class Layers(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Chain() for _ in range(depth))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    counts: list[int] = []
    for depth in (4, 24):
        ready = prepared(Layers(depth))
        device = SyntheticDevice(ready.space, random_costs(1))
        with Store("sqlite://") as store:
            searched = run(ready, device, store)
        assert searched.outcome is not None
        counts.append(len(device.trials))
        blocks = [c for c in searched.outcome.winner.choices.values() if outlined_regions(c)]
        assert len(blocks) <= len(ready.space.blocks)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.5])
def test_a_budget_that_is_too_small_still_gives_a_plan_that_applies(seconds: float) -> None:
    ready = prepared(Chain())
    device = SyntheticDevice(ready.space, random_costs(2), delay=0.05, clock=FakeClock())
    with Store("sqlite://") as store:
        searched = run(ready, device, store, budget=seconds)
    assert searched.outcome is not None
    assert not searched.outcome.winner.is_baseline
    assert searched.plan.graphs


def test_torch_compile_of_the_model_is_a_program_that_can_win() -> None:
    ready = prepared(Chain())
    device = SyntheticDevice(ready.space, Costs(compiled=0.1))
    with Store("sqlite://") as store:
        searched = run(ready, device, store)
    assert searched.outcome is not None
    assert searched.outcome.winner.decision.execution == "torch.compile"
    assert not searched.outcome.winner.is_baseline
    assert cost_of(searched, device) == 0.1 * device.model()


def test_passes_and_then_the_whole_graph_by_one_compiler_can_win() -> None:
    ready = prepared(Siblings())
    device = SyntheticDevice(
        ready.space, Costs(whole=lambda seconds, backend: seconds * (0.2 if backend == "a" else 3.0))
    )
    with Store("sqlite://") as store:
        searched = run(ready, device, store)
    names = {
        (tuple(c.name for c in t.decision.pipeline), t.decision.whole.name)
        for t in [searched.outcome.winner, *(row[0] for row in searched.outcome.others)]  # type: ignore[union-attr]
        if t.decision.whole is not None
    }
    assert ((), "a") in names
    assert any(pipeline and backend == "a" for pipeline, backend in names)


def test_every_compiler_on_the_whole_graph_that_is_close_is_among_the_finalists() -> None:
    names = "abcdefgh"
    ready = prepared(Chain(), backends=tuple(names))
    factors = {name: 0.80 + 0.01 * i for i, name in enumerate(names)}
    costs = Costs(whole=lambda seconds, backend: factors[backend] * seconds)
    device = SyntheticDevice(ready.space, costs)
    with Store("sqlite://") as store:
        run(ready, device, store)
    for stage in ("final", "confirmation"):
        (trial,) = [t for t in device.trials if isinstance(t, ComparisonTrial) and t.stage == stage]
        compared = {p.name.removeprefix("the whole graph by ") for p in trial.programs}
        assert set(names) <= compared


def test_a_winner_that_is_slower_than_the_bare_model_is_not_confirmed() -> None:
    class Wrapped(SyntheticDevice):
        """Every program of a plan takes twice the model's time, the model as it is included."""

        def program(self, program: ProgramSpec) -> float:
            return self.model() if program.name == "eager" else 2 * self.model()

    ready = prepared(Chain())
    device = Wrapped(ready.space, Costs())
    with Store("sqlite://") as store:
        searched = run(ready, device, store)
    assert searched.outcome is not None
    assert searched.outcome.winner.decision.execution == "model"
    assert not searched.outcome.is_confirmed


class OtherInFreshProcesses(SyntheticDevice):
    """The whole graph by "a" is fastest, but in fresh processes it takes longer than by "b", or fails."""

    fails, is_fresh = False, False

    def measure(self, trial: Trial, timeout: float) -> Measurement:
        self.is_fresh = isinstance(trial, ComparisonTrial) and trial.stage != "final"
        measured = super().measure(trial, timeout)
        if not (self.is_fresh and self.fails and isinstance(trial, ComparisonTrial)):
            return measured
        failures = {p.key: "Crash: none" for p in trial.programs if p.name == "the whole graph by a"}
        programs = {k: v for k, v in measured.details["programs"].items() if k not in failures}  # type: ignore[union-attr]
        samples: Any = next(iter(programs.values()))
        details = {"programs": programs, "again": samples, "failures": failures}
        return Measurement(tuple(samples), details=details)

    def program(self, program: ProgramSpec) -> float:
        factors = {"the whole graph by a": 0.8 if self.is_fresh else 0.5, "the whole graph by b": 0.7}
        return factors.get(program.name, 1.0) * self.model()


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (False, "it was not confirmed: slower than the whole graph by b in a fresh process"),
        (True, "it failed in a fresh process: Crash: none"),
    ],
)
def test_a_winner_that_is_slower_or_fails_in_a_fresh_process_loses_its_place(
    fails: bool, reason: str
) -> None:
    ready = prepared(Chain())
    device = OtherInFreshProcesses(ready.space, Costs())
    device.fails = fails
    with Store("sqlite://") as store:
        searched = run(ready, device, store)
    assert searched.outcome is not None
    assert searched.outcome.winner.program.name == "the whole graph by b"
    assert searched.outcome.is_confirmed
    (decision,) = next(iter(searched.plan.graphs.values())).values()
    entries = [a for a in (decision.runner_up, *decision.rejected) if a is not None]
    assert [a.reason for a in entries if a.choice == "the whole graph by a"] == [reason]
    # What was compared before is still there.
    assert {"eager", "torch.compile", "the model as it is"} <= {a.choice for a in entries}


class WeightAndInput(nn.Module):
    """Two equal parts of one block, whose products are with a weight and with an input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(torch.nn.functional.linear(x.sin(), self.weight))
        return torch.tanh(torch.nn.functional.linear(y.cumsum(0), other)).exp()


def test_a_plan_has_one_backend_for_a_body_whatever_its_operands_are() -> None:
    ready = prepared(WeightAndInput(), torch.randn(4, 8), torch.randn(8, 8))
    ((key, space),) = ready.space.blocks.items()
    by_key: dict[str, list[RegionCandidate]] = {}
    for candidate in space.candidates:
        by_key.setdefault(candidate.key, []).append(candidate)
    first, second = next(c for c in by_key.values() if len(c) > 1)[:2]
    assert space.candidate_operands(first) != space.candidate_operands(second)
    chosen = BlockDivision(((first.choice, BackendChoice("a")), (second.choice, BackendChoice("b"))))
    with Store("sqlite://") as store:
        measurer = Measurer(store, HERE, SyntheticDevice(ready.space, Costs()), budget=1e6)
        blocks = DivisionSearch(ready.space, "inference", measurer)
        programs = ProgramSearch(
            ready.space, blocks, measurer, mode="inference", operands="", environment=HERE
        )
        decided = programs._bodies({key: BlockChoice(chosen, Spread(1.0, 1.0, 1.0, 1), 1.0, None)})
    assert [str(backend) for backend, _ in decided.values()] == ["a", "a"]


def test_a_region_that_a_pass_left_has_a_decision_also_where_it_runs_as_it_is() -> None:
    ready = prepared(Siblings())

    def operation(name: str, elements: int) -> float:
        return {4 * 52: 70.0, 4 * 20: 8.0}.get(elements, 20.0) if name == "linear" else 3.0

    device = SyntheticDevice(ready.space, Costs(operations=operation, regions=lambda k, s, b: 3 * s))
    with Store("sqlite://") as store:
        searched = run(ready, device, store)
    state = winner_state(searched)
    assert state is not None
    assert [c.name for c in state.pipeline] == ["Fuse", "MergeParallel"]
    assert [d.backend for by in searched.plan.bodies.values() for d in by.values()] == [None]


def test_blocks_of_sampled_states_are_sent_to_the_executor() -> None:
    class Strict(SyntheticDevice):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.known: set[str] = set()

        def add_block(self, block: Block) -> None:
            self.known.add(block.key)

        def measure(self, trial: Trial, timeout: float) -> Measurement:
            assert set(trial.blocks) <= self.known
            return super().measure(trial, timeout)

    ready = prepared(Merging())
    graph, tuned = ready.space.states[0].graph, ready.tuned
    ready.space = explore(graph, tuned.args, tuned.kwargs, "inference", ready.backends, max_states=2)
    assert not ready.space.is_complete
    device = Strict(ready.space, Costs())
    with Store("sqlite://") as store:
        searched = run_search(ready, store, budget=1e6, executor=device, progress=False)
    assert searched.report.states > 2


def test_searches_on_sqlite_and_postgresql_give_the_same_bytes(tmp_path: Path, postgresql: Server) -> None:
    ready = prepared(Chain())
    postgresql.execute("CREATE ROLE searcher LOGIN PASSWORD 'Zq7xj'")
    postgresql.execute("CREATE SCHEMA AUTHORIZATION searcher")
    plans: list[str] = []
    stored: list[Any] = []
    for url in (str(tmp_path / "store.db"), postgresql.tcp_url("searcher", "Zq7xj")):
        device = SyntheticDevice(ready.space, random_costs(3), noise=0.01)
        with Store(url) as store:
            plans.append(run(ready, device, store).plan.to_json())
            measured = len(device.trials)
            assert run(ready, device, store).plan.to_json() == plans[-1]
            assert len(device.trials) == measured
            stored.append([(vars(subject), vars(result)) for subject, result in store.results(HERE)])
    assert plans[0] == plans[1]
    assert stored[0] == stored[1]
    assert "Zq7xj" not in repr((plans, stored))
    assert "searcher" not in repr((plans, stored))
