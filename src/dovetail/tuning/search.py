"""The search: baselines, coarse costs of all states, full costs of the best ones, divisions, and whole programs.

Each phase may use a part of the time that is left. What does not fit is left out, and the plan says so; a later search with
the same store goes on where this one ended. Decisions depend on stored samples alone, so that a search that finds all of
them gives the same plan without measuring.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.runtime.presets import Mode
from dovetail.tuning.division_search import DivisionSearch
from dovetail.tuning.environment import Environment
from dovetail.tuning.measuring import Measurer
from dovetail.tuning.pass_sampler import PassSampler
from dovetail.tuning.plan import Plan
from dovetail.tuning.program_search import Outcome, ProgramSearch
from dovetail.tuning.search_space import GraphState, SearchSpace
from dovetail.tuning.size_ranges import Range

BEST_STATES = 3
"""States whose blocks are searched in full, those of the least coarse cost."""
_SHARES: Mapping[str, float] = {
    "baselines": 0.85,
    "passes": 0.35,
    "coarse": 0.22,
    "sampled": 0.1,
    "candidates": 0.45,
    "boundaries": 0.1,
    "divisions": 0.35,
    "programs": 0.45,
}
"""The part of the time left that each phase may use."""
_RESERVED, _MAX_RESERVED = 0.3, 60.0
"""The part of the budget that is kept for the comparison in the end and its confirmation, and its most seconds."""


@dataclass
class SearchReport:
    """What a search did: sizes, times of its phases, and how well costs predicted whole blocks."""

    programs_log10: float = 0.0
    states: int = 0
    blocks: int = 0
    options: int = 0
    measured: int = 0
    reused: int = 0
    failures: int = 0
    compilations: int = 0
    undecided: int = 0
    noise: float | None = None
    is_confirmed: bool = False
    is_interrupted: bool = False
    phases: dict[str, float] = field(default_factory=dict[str, float])
    predictions: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's correlation of predicted and measured times of whole blocks; None for fewer than three."""
        if len(self.predictions) < 3:
            return None
        predicted, measured = [row[1] for row in self.predictions], [row[2] for row in self.predictions]
        if len(set(predicted)) < 2 or len(set(measured)) < 2:
            return None
        return statistics.correlation(_ranks(predicted), _ranks(measured))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [statistics.mean(i for i, v in enumerate(ordered) if v == value) for value in values]


@dataclass(eq=False)
class Searched:
    """The result of a search."""

    plan: Plan
    report: SearchReport
    outcome: Outcome | None
    failure: str = ""
    """Why a program of the model does not run, where there is no outcome."""


def search(
    space: SearchSpace,
    measurer: Measurer,
    environment: Environment,
    *,
    mode: Mode,
    operands: str,
    label: str,
    memory: int | None = None,
    seed: int = 0,
    new_state: Callable[[Sequence[Any]], GraphState | None] | None = None,
    sizes: Mapping[str, tuple[Range, ...]] | None = None,
) -> Searched:
    """Return the plan of the fastest program that was measured; an empty plan if there was none.

    `new_state` makes the state of a pipeline that is not in the space yet; None if an equal one is.
    """
    report = SearchReport()
    blocks = DivisionSearch(space, mode, measurer, memory=memory)
    programs = ProgramSearch(
        space,
        blocks,
        measurer,
        mode=mode,
        operands=operands,
        environment=environment,
        memory=memory,
        seed=seed,
        sizes=sizes,
    )

    def phase(name: str, run: Callable[[float], object]) -> None:
        start = measurer.elapsed
        reserved = min(_RESERVED * measurer.budget, _MAX_RESERVED)
        end = start + _SHARES[name] * max(0.0, measurer.left() - reserved)
        with measurer.until_interrupted():
            run(end / measurer.budget)
        report.phases[name] = measurer.elapsed - start

    best: list[GraphState] = []
    keys: list[str] = []

    def baselines(share: float) -> None:
        programs.add_baselines()
        programs.measure("baselines", share)
        if not programs.has_result:
            # The time for a comparison is of no use without anything to compare.
            programs.measure("baselines", 1.0)

    def wholes(share: float) -> None:
        programs.add_wholes()
        programs.measure("whole graph after passes", share)

    def candidates(share: float) -> None:
        best.extend(best_states(space, blocks))
        keys.extend(dict.fromkeys(key for state in best for key in state.blocks))
        blocks.measure_candidates(keys, share)

    def divided(share: float) -> None:
        programs.add_states(best)
        programs.measure("programs", share)

    phase("baselines", baselines)
    phase("passes", wholes)
    phase("coarse", lambda share: blocks.measure_coarse(list(space.blocks), share))
    if not space.is_complete and new_state is not None:
        make = new_state
        phase("sampled", lambda share: PassSampler(space, blocks, make, seed=seed).run(measurer, share))
    phase("candidates", candidates)
    phase("boundaries", lambda share: blocks.measure_boundaries(keys, share))
    phase("divisions", lambda share: blocks.choose(keys, share))
    phase("programs", divided)
    start = measurer.elapsed
    outcome: Outcome | None = None
    with measurer.until_interrupted():
        outcome = programs.decide()
    if outcome is None:
        outcome = programs.decide_alone()
    report.phases["final"] = measurer.elapsed - start
    report.programs_log10, report.states = space.log10_programs, len(space.states)
    report.blocks, report.options = len(space.blocks), space.options
    report.measured, report.reused = measurer.measured, measurer.reused
    report.failures, report.compilations = measurer.failures, measurer.compilations
    report.predictions, report.is_interrupted = blocks.predictions, measurer.interrupted
    if outcome is None:
        return Searched(Plan(), report, None, programs.first_failure())
    report.undecided, report.noise, report.is_confirmed = (
        outcome.undecided,
        outcome.noise,
        outcome.is_confirmed,
    )
    measurer.progress.best(outcome.winner.program.name, outcome.seconds.median)
    return Searched(programs.plan(outcome, label), report, outcome)


def best_states(space: SearchSpace, blocks: DivisionSearch, most: int = BEST_STATES) -> list[GraphState]:
    """Return the states of the least coarse cost, the shortest pipeline first among equals."""

    def cost(state: GraphState) -> tuple[float, int]:
        calls = {key: block.calls for key, block in state.blocks.items()}
        return round(blocks.coarse_seconds(calls), 9), len(state.pipeline)

    measured = [s for s in space.states if all(blocks.seconds(key) for key in s.blocks)]
    return sorted(measured, key=cost)[:most]
