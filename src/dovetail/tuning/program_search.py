"""Level 3: whole programs end to end, and the plan of the fastest one.

The model as it is, torch.compile and each compiler on the whole graph are always among the programs, beside the divisions
of the best states. All are verified and measured alone first, so that one that crashes takes no other with it. The
fastest are then interleaved until they separate or are a tie; a tie goes to the simpler program. The winner is confirmed
in a fresh process, and loses its place to any of the always present ones that is faster there.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from dovetail.runtime.presets import Execution, Mode
from dovetail.tuning.decisions import (
    Alternative,
    BackendChoice,
    BlockDecision,
    BodyDecision,
    Decision,
    GraphDecision,
    Spread,
)
from dovetail.tuning.division_search import BlockChoice, BodyCost, DivisionSearch
from dovetail.tuning.environment import Environment
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.measuring import Measurer
from dovetail.tuning.model_programs import EAGER, TORCH_COMPILE
from dovetail.tuning.plan import Plan, body_entry
from dovetail.tuning.region_candidates import EXISTING
from dovetail.tuning.search_space import GraphState, SearchSpace
from dovetail.tuning.size_ranges import Range
from dovetail.tuning.timing import MAX_TIE, Comparison, compare, noise_of, spread_of
from dovetail.tuning.trial import BlockDivision, ComparisonTrial, ProgramSpec, ProgramTrial, digest_of

_FINALISTS = 5
"""Programs other than those without dovetail that are compared in the end."""
_WITHIN = 1.3
"""Programs that take more than this many times the best one's time are not compared in the end."""
_RIVAL = 1.5
"""Programs that take more than this many times the winner's time in the end cannot be faster in a fresh process."""
_CONFIRMATIONS = 3
COMPILERS = 2
"""Compilers that get the states after passes as one region."""
_EXECUTION: Mapping[str, str] = {EAGER: "model", TORCH_COMPILE: "torch.compile"}
"""What a plan says for a program without dovetail."""


@dataclass(eq=False)
class ProgramCandidate:
    """A whole program, its decision, and how simple it is: ties go to the lowest `complexity`."""

    program: ProgramSpec
    decision: GraphDecision
    complexity: int
    state: GraphState | None = None
    choices: Mapping[str, BlockChoice] = field(default_factory=dict[str, BlockChoice])

    @property
    def is_baseline(self) -> bool:
        """Whether it runs without dovetail, for comparison only."""
        return not self.program.plan

    @property
    def is_guaranteed(self) -> bool:
        """Whether the winner must not be slower than this one."""
        if self.decision.pipeline:
            return False
        return (
            self.is_baseline
            or self.decision.whole is not None
            or self.decision.execution in _EXECUTION.values()
        )


@dataclass(eq=False)
class Outcome:
    """The result of level 3: the winner, all comparisons with it, and what failed."""

    winner: ProgramCandidate
    seconds: Spread
    noise: float | None
    others: list[tuple[ProgramCandidate, Comparison, Spread]] = field(
        default_factory=list[tuple[ProgramCandidate, Comparison, Spread]]
    )
    rejected: list[Alternative] = field(default_factory=list[Alternative])
    is_confirmed: bool = False
    undecided: int = 0


class ProgramSearch:
    """Level 3 for one model."""

    def __init__(
        self,
        space: SearchSpace,
        blocks: DivisionSearch,
        measurer: Measurer,
        *,
        mode: Mode,
        operands: str,
        environment: Environment,
        memory: int | None = None,
        seed: int = 0,
        sizes: Mapping[str, tuple[Range, ...]] | None = None,
    ) -> None:
        self.space, self.blocks, self.measurer = space, blocks, measurer
        self.mode: Mode = mode
        self.operands, self.environment, self.memory, self.seed = operands, environment, memory, seed
        self._sizes = dict(sizes or {})
        self.is_cuda = environment.device.startswith("cuda")
        self.candidates: dict[str, ProgramCandidate] = {}

    def add_baselines(self) -> None:
        """Add the programs that are always compared: eager, torch.compile, and each compiler on the whole graph."""
        self._add(ProgramCandidate(ProgramSpec(EAGER, EAGER), GraphDecision(EAGER), 0))
        self._add_execution("model", 0)
        for choice in self.space.backends:
            if not choice.options:
                self._add_whole(choice)
        self._add(
            ProgramCandidate(ProgramSpec(TORCH_COMPILE, TORCH_COMPILE), GraphDecision(TORCH_COMPILE), 1)
        )
        self._add_execution("torch.compile", 1)
        self._add_execution("graph", 1)

    def _add_execution(self, execution: Execution, complexity: int) -> None:
        decision = GraphDecision("", execution=execution)
        self._add(self._candidate(decision.choice, decision, complexity))

    def _add_whole(self, choice: BackendChoice, state: GraphState | None = None) -> None:
        """Add the graph, or a state of it, as one region."""
        pipeline = () if state is None else state.pipeline
        decision = GraphDecision("", pipeline=pipeline, whole=choice)
        name = (
            f"the whole graph by {choice}"
            if not pipeline
            else f"{cast('GraphState', state).label}, whole by {choice}"
        )
        self._add(self._candidate(name, decision, 2 + bool(choice.options) + len(pipeline)))

    def add_states(self, states: Sequence[GraphState]) -> None:
        """Add the divisions that were chosen for the blocks of some states, and these states as one region each.

        As one region they are compiled by the fastest compilers of the whole graph. The default pipeline by each backend
        is added too.
        """
        for state in states:
            choices = {key: self.blocks.choices[key] for key in state.blocks if key in self.blocks.choices}
            if len(choices) < len(state.blocks):
                continue
            decision = GraphDecision("", pipeline=state.pipeline)
            size = sum(len(choice.division.regions) for choice in choices.values())
            name = f"{state.label}, regions of its blocks"
            self._add(self._candidate(name, decision, 4 + len(state.pipeline) + size, state, choices))
        for choice in self._fastest_compilers():
            for state in states:
                self._add_whole(choice, state)
        for backend in self.space.choices:
            self._add_single_backend(self.space.states[0], backend)
        for choice in self.space.backends:
            self._add_whole(choice)

    def add_wholes(self) -> None:
        """Add every state of the graph as one region by the fastest compiler of the whole graph."""
        for choice in self._fastest_compilers()[:1]:
            for state in self.space.states:
                self._add_whole(choice, state)

    def _fastest_compilers(self) -> list[BackendChoice]:
        """Return the backends that run the whole graph fastest, of those that were measured."""
        ratios = self._ratios()
        wholes = [
            (ratios[key], candidate.decision.whole)
            for key, candidate in self.candidates.items()
            if candidate.decision.whole is not None and candidate.is_guaranteed and key in ratios
        ]
        ranked = sorted(wholes, key=lambda row: row[0])
        return [choice for ratio, choice in ranked[:COMPILERS] if choice and ratio <= _WITHIN * ranked[0][0]]

    def _add_single_backend(self, state: GraphState, backend: str) -> None:
        """Add the blocks of a state as wholes by one backend, as far as it takes them."""
        choices: dict[str, BlockChoice] = {}
        for key in state.blocks:
            whole = [c for c in self.blocks.costs(key, self.blocks.whole(key)) if str(c.backend) == backend]
            if not whole:
                return
            cost = min(whole, key=lambda c: c.ratio)
            seconds = self.blocks.seconds(key) * cost.ratio
            division = BlockDivision(((cost.candidate.choice, cost.backend),))
            choices[key] = BlockChoice(division, Spread(seconds, seconds, seconds, 1), seconds, None)
        decision = GraphDecision("", pipeline=state.pipeline)
        name = f"{state.label}, blocks as wholes by {backend}"
        self._add(self._candidate(name, decision, 3 + len(state.pipeline), state, choices))

    def _candidate(
        self,
        name: str,
        decision: GraphDecision,
        complexity: int,
        state: GraphState | None = None,
        choices: Mapping[str, BlockChoice] | None = None,
    ) -> ProgramCandidate:
        plan = self._plan(decision, choices or {}).to_json()
        program = ProgramSpec(name, digest_of(plan), plan)
        return ProgramCandidate(program, decision, complexity, state, choices or {})

    def _add(self, candidate: ProgramCandidate) -> None:
        self.candidates.setdefault(candidate.program.key, candidate)
        decision = candidate.decision
        if candidate.is_baseline or decision.execution != "regions":
            return
        if self.is_cuda and decision.cuda_graphs is None:
            # Recording copies the inputs, which may cost more than the launches it saves.
            unrecorded = replace(decision, cuda_graphs=False)
            without = f"{candidate.program.name}, without CUDA graphs"
            complexity, choices = candidate.complexity, candidate.choices
            self._add(self._candidate(without, unrecorded, complexity, candidate.state, choices))

    def _plan(self, decision: GraphDecision, choices: Mapping[str, BlockChoice]) -> Plan:
        """Return the plan of a program, without times: equal programs have equal plans."""
        blocks = {key: BlockDecision("", regions=outlined_regions(choice)) for key, choice in choices.items()}
        bodies = {
            body_entry(key, operands): BodyDecision("", operands=operands, backend=backend)
            for (key, operands), (backend, _) in self._bodies(choices).items()
        }
        return self._with_decisions(graphs={self.space.key: decision}, blocks=blocks, bodies=bodies)

    def _with_decisions(self, **decisions: Mapping[str, Decision]) -> Plan:
        return Plan().with_decisions(self.mode, self.environment, sizes=self._sizes, **decisions)

    def _bodies(
        self, choices: Mapping[str, BlockChoice]
    ) -> dict[tuple[str, str], tuple[BackendChoice | None, str]]:
        """Return the backend and a label of each body, with its operands, in divisions, the weightiest block's first.

        A body is compiled once for all operands that it has in a program: by the backend of the weightiest call.
        """
        bodies: dict[tuple[str, str], tuple[BackendChoice | None, str]] = {}
        by_key: dict[str, BackendChoice | None] = {}
        weight = {key: self.blocks.seconds(key) * self.space.calls(key) for key in choices}
        for key in sorted(choices, key=lambda k: (-weight[k], k)):
            block = self.space.blocks[key]
            by_choice = {id(c.choice): c for c in block.candidates}
            for region, backend in choices[key].division.regions:
                candidate = by_choice.get(id(region)) or next(
                    c for c in block.candidates if c.choice == region
                )
                operands = block.candidate_operands(candidate)
                label = f"{candidate.label} of {block.block.label}"
                bodies.setdefault(
                    (candidate.key, operands), (by_key.setdefault(candidate.key, backend), label)
                )
        for key in choices:
            # Regions that passes left and that the division has no backend for run as they are.
            block = self.space.blocks[key]
            for candidate in block.candidates:
                if candidate.choice.rule == EXISTING:
                    label = f"{candidate.label} of {block.block.label}"
                    backend = by_key.setdefault(candidate.key, None)
                    bodies.setdefault((candidate.key, block.candidate_operands(candidate)), (backend, label))
        return bodies

    def _identity(self) -> str:
        return " | ".join(self.space.identity_of(choice) for choice in self.space.backends)

    def trial(self, candidate: ProgramCandidate) -> ProgramTrial:
        return ProgramTrial(self.mode, self.space.key, self.operands, candidate.program, self._identity())

    def measure(self, phase: str, share: float) -> None:
        """Measure all programs alone."""
        self.measurer.measure(phase, [self.trial(c) for c in self.candidates.values()], share=share)
        best = min(self._ratios().items(), key=lambda item: item[1], default=None)
        if best is not None:
            measured = self.measurer.get(self.trial(self.candidates[best[0]]))
            if measured is not None:
                name = self.candidates[best[0]].program.name
                self.measurer.progress.best(name, statistics.median(measured.samples))

    @property
    def has_result(self) -> bool:
        """Whether a program was measured that may win."""
        return bool(self._ratios())

    def first_failure(self) -> str:
        """Return why the first of the programs that do not run does not; empty if none was found not to."""
        measured = (self.measurer.get(self.trial(candidate)) for candidate in self.candidates.values())
        return next((each.failure for each in measured if each is not None and each.failure), "")

    def _ratios(self) -> dict[str, float]:
        """Return the time of each program relative to the model as it is, of those that may win."""
        ratios: dict[str, float] = {}
        for key, candidate in self.candidates.items():
            measured = self.measurer.get(self.trial(candidate))
            if measured is not None and measured.samples and not self._exceeds_memory(measured):
                reference = cast("list[float]", measured.details["reference"])
                pairs = zip(measured.samples, reference, strict=True)
                ratios[key] = statistics.median(a / b for a, b in pairs)
        return ratios

    def _exceeds_memory(self, measured: Measurement) -> bool:
        if self.memory is None:
            return False
        return measured.peak_bytes is None or measured.peak_bytes > self.memory

    def decide(self) -> Outcome | None:
        """Return the fastest program by comparing the best ones; None if there was no time to compare them."""
        ratios = self._ratios()
        if not ratios:
            return None
        finalists = self._finalists(ratios)
        outcome = self._compare(finalists, "final")
        if outcome is None:
            return None
        self._add_rejected(outcome, ratios, finalists)
        return self._confirmed(outcome)

    def decide_alone(self) -> Outcome | None:
        """Return the fastest program by the measurements of each alone; None if none was measured."""
        ratios = self._ratios()
        if not ratios:
            return None
        outcome = self._without_comparison(ratios)
        self._add_rejected(outcome, ratios, [outcome.winner, *(c for c, *_ in outcome.others)])
        return outcome

    def _without_comparison(self, ratios: Mapping[str, float]) -> Outcome:
        """Return the fastest program by the measurements of each alone, where there was no time to compare them.

        They are ranked by their ratios to the model as it is; times are those that were measured, beside each other or not.
        """
        samples = {key: list(self._measured(key).samples) for key in ratios}
        planned = {key: ratio for key, ratio in ratios.items() if not self.candidates[key].is_baseline}
        for key, candidate in self.candidates.items():
            # What runs without dovetail runs by a plan too, which was not measured yet if the time ended before.
            baseline = next((n for n, e in _EXECUTION.items() if e == candidate.decision.execution), "")
            if baseline in ratios and self.measurer.get(self.trial(candidate)) is None:
                planned[key], samples[key] = ratios[baseline], samples[baseline]
        if not planned:
            as_it_is = next(c for c in self.candidates.values() if c.decision.execution == "model")
            planned = {as_it_is.program.key: 1.0}
            references = [cast("list[float]", self._measured(key).details["reference"]) for key in ratios]
            samples[as_it_is.program.key] = list(itertools.chain(*references))
        ranked = sorted(planned, key=lambda key: (planned[key], self.candidates[key].complexity))
        ratios = {**planned, **ratios}
        outcome = Outcome(self.candidates[ranked[0]], spread_of(samples[ranked[0]]), None)
        for key in sorted(ratios, key=ratios.__getitem__):
            if key != ranked[0]:
                ratio = ratios[key] / planned[ranked[0]]
                comparison = Comparison(ratio, ratio, ratio, 0.0, "slower" if ratio >= 1 else "faster")
                outcome.others.append((self.candidates[key], comparison, spread_of(samples[key])))
        return outcome

    def _measured(self, key: str) -> Measurement:
        """Return the measurement of a program that has a ratio."""
        return cast("Measurement", self.measurer.get(self.trial(self.candidates[key])))

    def _finalists(self, ratios: Mapping[str, float]) -> list[ProgramCandidate]:
        """Return the programs that are compared: those without dovetail, and the fastest of the others."""
        best = min(ratios.values())
        ranked = sorted(ratios, key=lambda key: (ratios[key], self.candidates[key].complexity, key))
        close = [self.candidates[key] for key in ranked if ratios[key] <= _WITHIN * best]
        planned = [c for c in close if not c.is_baseline]
        baselines = [self.candidates[key] for key in ranked if self.candidates[key].is_baseline]
        # What the fastest baseline is decided as must be there if the baseline is.
        wrapped = [
            self.candidates[key]
            for key in ranked
            if baselines
            and self.candidates[key].decision.execution == _EXECUTION[baselines[0].program.name]
            and not self.candidates[key].is_baseline
        ]
        # Slow when measured alone may be noise: the winner must not be slower than any of these.
        guaranteed = [self.candidates[key] for key in ranked if self.candidates[key].is_guaranteed]
        chosen = [*planned[:_FINALISTS], *guaranteed, *wrapped, *baselines]
        return list({c.program.key: c for c in chosen}.values())

    def _compare(self, candidates: Sequence[ProgramCandidate], stage: str) -> Outcome | None:
        trial = ComparisonTrial(
            self.mode,
            self.space.key,
            self.operands,
            tuple(c.program for c in candidates),
            self._identity(),
            stage,
            self.seed,
            seconds=max(2.0, min(30.0, 0.25 * self.measurer.left())),
        )
        self.measurer.measure(f"{stage} comparison", [trial], share=1.05)
        measured = self.measurer.get(trial)
        if measured is None or not measured.samples:
            return None
        details: Mapping[str, Any] = measured.details
        samples: dict[str, list[float]] = details["programs"]
        noise = noise_of(measured.samples, details["again"])
        planned = [c for c in candidates if c.program.key in samples and not c.is_baseline]
        if not planned:
            return None
        fastest = min(planned, key=lambda c: statistics.median(samples[c.program.key]))
        reference = samples[fastest.program.key]
        compared = [(c, compare(samples[c.program.key], reference, noise)) for c in planned]
        ties = [c for c, it in compared if it.verdict == "tie" and it.ratio <= 1 + MAX_TIE]
        winner = min([fastest, *ties], key=lambda c: (c.complexity, c is not fastest))
        won = samples[winner.program.key]
        outcome = Outcome(winner, spread_of(won), noise)
        for candidate in candidates:
            if candidate is not winner and candidate.program.key in samples:
                mine = samples[candidate.program.key]
                comparison = compare(mine, won, noise)
                outcome.others.append((candidate, comparison, spread_of(mine)))
                outcome.undecided += comparison.verdict == "undecided"
        for key, reason in details["failures"].items():
            outcome.rejected.append(Alternative(self.candidates[key].program.name, None, str(reason)))
        return outcome

    def _confirmed(self, outcome: Outcome) -> Outcome:
        """Return the outcome of comparisons in fresh processes: no program that must not be faster is.

        Those that were much slower in this one are not compiled again for it.
        """
        guaranteed = [
            c for c, comparison, _ in outcome.others if c.is_guaranteed and comparison.low <= _RIVAL
        ]
        for number in range(_CONFIRMATIONS):
            if self.measurer.interrupted or self.measurer.left(1.05) <= 0:
                return outcome
            self.measurer.executor.restart()
            stage = "confirmation" if number == 0 else f"confirmation {number + 1}"
            others = [c for c in guaranteed if c is not outcome.winner]
            again: Outcome | None = None
            with self.measurer.until_interrupted():
                again = self._compare([outcome.winner, *others], stage)
            if again is None:
                return outcome
            reason = _replacement_reason(outcome.winner, again)
            if not reason:
                outcome.is_confirmed = not any(
                    comparison.verdict == "faster" and c in guaranteed for c, comparison, _ in again.others
                )
                return outcome
            compared = {again.winner.program.key, *(c.program.key for c, *_ in again.others)}
            name = outcome.winner.program.name
            if outcome.winner.is_guaranteed and outcome.winner.program.key in compared:
                guaranteed.append(outcome.winner)
            outcome = replace(
                outcome,
                winner=again.winner,
                seconds=again.seconds,
                noise=again.noise,
                undecided=again.undecided,
                others=[row for row in again.others if row[0] is not outcome.winner],
                rejected=[
                    *outcome.rejected,
                    Alternative(name, outcome.seconds, reason),
                    *(
                        Alternative(c.program.name, s, f"{comparison.ratio:.3f} times the time of {name}")
                        for c, comparison, s in outcome.others
                        if c.program.key not in compared
                    ),
                ],
            )
        return outcome

    def _add_rejected(
        self, outcome: Outcome, ratios: Mapping[str, float], finalists: Sequence[ProgramCandidate]
    ) -> None:
        for key, candidate in self.candidates.items():
            if candidate in finalists:
                continue
            measured = self.measurer.get(self.trial(candidate))
            seconds = None if measured is None or not measured.samples else spread_of(measured.samples)
            if measured is None:
                reason = "not measured within the budget"
            elif measured.failure:
                reason = measured.failure
            elif self._exceeds_memory(measured):
                needed = "an unknown number of" if measured.peak_bytes is None else measured.peak_bytes
                reason = f"it needs {needed} bytes, and the limit is {self.memory}"
            else:
                reason = f"{ratios[key]:.3f} times the time of the model as it is"
            outcome.rejected.append(Alternative(candidate.program.name, seconds, reason))

    def plan(self, outcome: Outcome, label: str) -> Plan:
        """Return the plan of the winner, with times and what came second."""
        winner = outcome.winner
        graph = replace(
            winner.decision,
            label=label,
            seconds=outcome.seconds,
            runner_up=_runner_up(outcome),
            rejected=_rejected(outcome),
            is_confirmed=outcome.is_confirmed,
            noise=None if outcome.noise is None else round(outcome.noise, 4),
            undecided=outcome.undecided,
        )
        choices = winner.choices or self._best_choices()
        blocks = {
            key: BlockDecision(
                f"{self.space.blocks[key].block.label}, {self.space.calls(key)} calls",
                choice.seconds,
                choice.runner_up,
                choice.rejected,
                outlined_regions(choice),
                None if choice.gap is None else round(choice.gap, 6),
            )
            for key, choice in choices.items()
        }
        bodies = {
            body_entry(key, operands): self._body_decision(key, operands, backend, text, choices)
            for (key, operands), (backend, text) in self._bodies(choices).items()
        }
        return self._with_decisions(graphs={self.space.key: graph}, blocks=blocks, bodies=bodies)

    def _best_choices(self) -> Mapping[str, BlockChoice]:
        """Return the divisions of the best state, for other models that have its blocks."""
        ratios = self._ratios()
        with_choices = [c for c in self.candidates.values() if c.choices and c.program.key in ratios]
        best = min(with_choices, key=lambda c: (ratios[c.program.key], c.complexity), default=None)
        return {} if best is None else best.choices

    def _body_decision(
        self,
        key: str,
        operands: str,
        backend: BackendChoice | None,
        label: str,
        choices: Mapping[str, BlockChoice],
    ) -> BodyDecision:
        """Return the decision for a body: its time by the chosen backend, and by the others."""
        rows: dict[str, tuple[BodyCost, float]] = {}
        for block_key in choices:
            units = self.blocks.unit_seconds(block_key)
            block = self.space.blocks[block_key]
            numbers = [
                i
                for i, c in enumerate(block.candidates)
                if c.key == key and block.candidate_operands(c) == operands
            ]
            for cost in self.blocks.costs(block_key, numbers[:1]):
                base = sum(units[k] for k in cost.candidate.units)
                rows.setdefault(str(cost.backend), (cost, base))
        if backend is None or str(backend) not in rows:
            return BodyDecision(label, operands=operands, backend=backend)
        times = {
            name: Spread(cost.ratio * base, cost.low * base, cost.high * base, cost.samples)
            for name, (cost, base) in rows.items()
        }
        base = rows[str(backend)][1]
        others = [Alternative(name, times[name]) for name in times if name != str(backend)]
        others.append(Alternative("as it is", Spread(base, base, base, 1)))
        others.sort(key=lambda a: (cast("Spread", a.seconds).median, a.choice))
        own = times[str(backend)].median or 1.0
        slower = [
            replace(a, reason=f"{cast('Spread', a.seconds).median / own:.3f} times the time") for a in others
        ]
        return BodyDecision(label, times[str(backend)], slower[0], tuple(slower[1:]), operands, backend)


def outlined_regions(choice: BlockChoice) -> tuple[Any, ...]:
    """Return the regions of a division that a plan has to outline."""
    return tuple(region for region, _ in choice.division.regions if region.rule != EXISTING)


def _replacement_reason(winner: ProgramCandidate, again: Outcome) -> str:
    """Return why the winner of a comparison in a fresh process replaces an earlier one; "" if it does not."""
    if again.winner is winner:
        return ""
    own = next((comparison for c, comparison, _ in again.others if c is winner), None)
    if own is None:
        failures = (a.reason for a in again.rejected if a.choice == winner.program.name)
        return f"it failed in a fresh process: {next(failures, 'no reason is known')}"
    if own.verdict != "slower":
        return ""
    return f"it was not confirmed: slower than {again.winner.program.name} in a fresh process"


def _runner_up(outcome: Outcome) -> Alternative | None:
    ranked = sorted(outcome.others, key=lambda row: row[1].ratio)
    return _alternative(*ranked[0]) if ranked else None


def _rejected(outcome: Outcome) -> tuple[Alternative, ...]:
    ranked = sorted(outcome.others, key=lambda row: row[1].ratio)
    return (*(_alternative(*row) for row in ranked[1:]), *outcome.rejected)


def _alternative(candidate: ProgramCandidate, comparison: Comparison, seconds: Spread) -> Alternative:
    words = {
        "slower": f"{comparison.ratio:.3f} times the time",
        "tie": f"{comparison.ratio:.3f} times the time, equal within the noise of {comparison.noise:.1%}",
        "undecided": f"{comparison.ratio:.3f} times the time, not separated from the noise of {comparison.noise:.1%}",
        "faster": f"{comparison.ratio:.3f} times the time, but not a plan's own program",
    }
    return Alternative(candidate.program.name, seconds, words[comparison.verdict])
