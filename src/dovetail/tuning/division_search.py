"""Levels 1 and 2: the measured cost of every body by every backend, and from these the division of each block.

The cost of a body is the ratio to its operations in the same rounds, times what these operations take in the block, so
that costs measured at different times can be added. Boundaries between backends are measured when a division has them, and
the division is solved again. The best divisions by these costs are then measured as whole blocks, which decides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from torch import Tensor

from dovetail.ir.nodes import size_hints
from dovetail.runtime.presets import Mode
from dovetail.tuning.decisions import Alternative, BackendChoice, Spread
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.measuring import Measurer
from dovetail.tuning.region_candidates import Pruned, RegionCandidate, cloned_units
from dovetail.tuning.search_space import SearchSpace
from dovetail.tuning.set_partitioning import AS_IT_IS, Option, divide
from dovetail.tuning.timing import MAX_TIE, compare, median_interval, noise_of
from dovetail.tuning.trial import BlockDivision, BoundaryTrial, DivisionsTrial, OperationsTrial, RegionTrial

_MIN_SHARE = 0.004
"""Candidates whose operations take less than this part of all blocks' time are not compiled."""
_HOPELESS = 2.0
_BOUNDARY_ROUNDS = 3
_SLOW_COMPILATION = 1.5
"""Seconds to compile a block from which on further options of the backend are tried on the whole block only."""


@dataclass(frozen=True)
class BodyCost:
    """The measured cost of a candidate by a backend, relative to its operations as they are."""

    candidate: RegionCandidate
    backend: BackendChoice
    ratio: float
    low: float
    high: float
    samples: int


@dataclass(eq=False)
class BlockChoice:
    """The division chosen for a block, with its time, and what else was measured."""

    division: BlockDivision
    seconds: Spread
    predicted: float
    gap: float | None
    runner_up: Alternative | None = None
    rejected: tuple[Alternative, ...] = ()
    measured: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])
    """Label, predicted and measured time of each division that was measured, relative to the block as it is."""


class DivisionSearch:
    """Levels 1 and 2 for the blocks of a search space."""

    def __init__(
        self, space: SearchSpace, mode: Mode, measurer: Measurer, *, memory: int | None = None
    ) -> None:
        self.space, self.measurer, self.memory = space, measurer, memory
        self.mode: Mode = mode
        self.boundaries: dict[tuple[str, str], float] = {}
        self.choices: dict[str, BlockChoice] = {}

    def operations_trial(self, key: str) -> OperationsTrial:
        return OperationsTrial(self.mode, key, self.space.blocks[key].operands)

    def region_trials(
        self, key: str, candidates: Iterable[int], skip: Iterable[str] = ()
    ) -> Iterator[RegionTrial]:
        """Yield the trials of some candidates of a block by all backends that take them."""
        block, skipped = self.space.blocks[key], set(skip)
        for number in candidates:
            candidate = block.candidates[number]
            for backend in block.backends.get(number, ()):
                if str(backend) not in skipped:
                    yield self._region_trial(key, candidate, backend)

    def _region_trial(self, key: str, candidate: RegionCandidate, backend: BackendChoice) -> RegionTrial:
        block = self.space.blocks[key]
        # An equal body of another block is measured with it if its step has as many gradients.
        operands = ", ".join(filter(None, (block.candidate_operands(candidate), block.missing_gradients)))
        identity = self.space.identity_of(backend)
        return RegionTrial(self.mode, key, candidate.choice, candidate.key, operands, backend, identity)

    def whole(self, key: str) -> list[int]:
        """Return the candidates that contain every operation of a block."""
        block = self.space.blocks[key]
        count = len(block.block.units) - len(block.block.copies)
        return [i for i, c in enumerate(block.candidates) if len(c.units) == count]

    def measure_coarse(self, keys: Sequence[str], share: float) -> None:
        """Measure the operations of blocks, and each block as a whole by every backend."""
        self.measurer.measure("operations of blocks", map(self.operations_trial, keys), share=share)
        variants = [str(choice) for choice in self.space.backends if choice.options]
        trials = [
            t for key in self._by_weight(keys) for t in self.region_trials(key, self.whole(key), variants)
        ]
        self.measurer.measure("whole blocks", trials, share=share)

    def measure_candidates(self, keys: Sequence[str], share: float) -> None:
        """Measure all candidates of some blocks, those of the largest share of the time first."""
        self.space.expand(keys, time.monotonic() + self.measurer.left(share))
        totals = {key: self.seconds(key) * self.space.calls(key) for key in keys}
        total = sum(totals.values()) or 1.0
        ranked: list[tuple[float, int, RegionTrial]] = []
        for key in keys:
            block = self.space.blocks[key]
            costs = self.unit_seconds(key)
            hopeless, slow, whole = self._hopeless(key), self._slow_variants(key), self.whole(key)
            for number, candidate in enumerate(block.candidates):
                weight = self.space.calls(key) * sum(costs[k] for k in candidate.units) / total
                if weight < _MIN_SHARE:
                    reason = f"its operations take {weight:.2%} of the time, less than {_MIN_SHARE:.1%}"
                    block.prune(Pruned(candidate.label, reason))
                    continue
                for trial in self.region_trials(
                    key, [number], hopeless if number in whole else {*hopeless, *slow}
                ):
                    ranked.append((weight, len(ranked), trial))
        ranked.sort(key=lambda row: (-row[0], row[1]))
        self.measurer.measure("regions by backend", [trial for *_, trial in ranked], share=share)

    def _hopeless(self, key: str) -> dict[str, str]:
        """Return the backends that are much slower on the whole block, with the reason why its parts are pruned."""
        block = self.space.blocks[key]
        hopeless: dict[str, str] = {}
        for cost in self.costs(key, self.whole(key)):
            if cost.low > _HOPELESS:
                name = str(cost.backend)
                hopeless[name] = f"'{name}' takes {cost.ratio:.1f} times the operations on the whole block"
                block.prune(Pruned(f"parts of the block by {name}", hopeless[name]))
        return hopeless

    def _slow_variants(self, key: str) -> dict[str, str]:
        """Return further options of backends that take long to compile: they are tried on whole blocks only."""
        slow: dict[str, str] = {}
        for choice in self.space.backends:
            times = [
                measured.compile_seconds
                for trial in self.region_trials(key, self.whole(key))
                if trial.backend.name == choice.name and not trial.backend.options
                if (measured := self.measurer.get(trial)) is not None
            ]
            if choice.options and max(times, default=0.0) > _SLOW_COMPILATION:
                slow[str(choice)] = f"'{choice.name}' takes {max(times):.0f} s to compile the whole block"
                self.space.blocks[key].prune(Pruned(f"parts of the block by {choice}", slow[str(choice)]))
        return slow

    def _by_weight(self, keys: Sequence[str]) -> list[str]:
        return sorted(keys, key=lambda key: -self.seconds(key) * self.space.calls(key))

    def seconds(self, key: str) -> float:
        """Return the time of a block as it is; 0 if that is not measured."""
        measured = self.measurer.get(self.operations_trial(key))
        return statistics.median(measured.samples) if measured is not None and measured.samples else 0.0

    def unit_seconds(self, key: str) -> list[float]:
        """Return the time of each operation of a block, scaled so that they add up to the block's."""
        block = self.space.blocks[key].block
        measured = self.measurer.get(self.operations_trial(key))
        if measured is None or not measured.samples:
            return [0.0] * len(block.units)
        rows = cast("list[list[float]]", measured.details["operations"])
        each = [0.0 if k in block.copies else statistics.median(row) for k, row in enumerate(rows)]
        scale = statistics.median(measured.samples) / (sum(each) or 1.0)
        return [seconds * scale for seconds in each]

    def costs(self, key: str, candidates: Iterable[int] | None = None) -> list[BodyCost]:
        """Return the measured costs of candidates of a block; those that failed or need too much memory are left out."""
        block = self.space.blocks[key]
        numbers = range(len(block.candidates)) if candidates is None else candidates
        costs: list[BodyCost] = []
        for number in numbers:
            for trial in self.region_trials(key, [number]):
                measured = self.measurer.get(trial)
                if measured is None or not measured.samples or self._exceeds_memory(measured):
                    continue
                reference = cast("list[float]", measured.details["reference"])
                ratios = [a / b for a, b in zip(measured.samples, reference, strict=True)]
                low, high = median_interval(ratios)
                costs.append(
                    BodyCost(
                        block.candidates[number],
                        trial.backend,
                        statistics.median(ratios),
                        low,
                        high,
                        len(ratios),
                    )
                )
        return costs

    def _exceeds_memory(self, measured: Measurement) -> bool:
        if self.memory is None:
            return False
        return measured.peak_bytes is None or measured.peak_bytes > self.memory

    def coarse_seconds(self, keys: Mapping[str, int]) -> float:
        """Return the time of blocks with so many calls each, as they are or as a whole by the fastest backend."""
        total = 0.0
        for key, calls in keys.items():
            ratios = [cost.ratio for cost in self.costs(key, self.whole(key))]
            total += calls * self.seconds(key) * min([1.0, *ratios])
        return total

    def solve(self, key: str, backends: Iterable[str] | None = None) -> tuple[BlockDivision, float, float]:
        """Return the division of least cost with some backends, its cost and the gap that is not excluded."""
        block = self.space.blocks[key]
        units = self.unit_seconds(key)
        options = [Option(frozenset([k]), AS_IT_IS, seconds) for k, seconds in enumerate(units)]
        costs = [c for c in self.costs(key) if backends is None or str(c.backend) in set(backends)]
        for cost in costs:
            seconds = cost.ratio * sum(units[k] for k in cost.candidate.units)
            clones = cloned_units(block.block, cost.candidate)
            options.append(Option(cost.candidate.units, str(cost.backend), seconds, clones))
        solved = divide(len(units), block.block.edges, options, self.boundaries)
        chosen = [costs[i - len(units)] for i in solved.chosen if i >= len(units)]
        chosen.sort(key=lambda cost: min(cost.candidate.units))
        regions = tuple((cost.candidate.choice, cost.backend) for cost in chosen)
        return BlockDivision(regions), solved.seconds, solved.gap

    def measure_boundaries(self, keys: Sequence[str], share: float) -> None:
        """Measure what values cost that pass between backends in the best divisions, until no pair is new."""
        for _ in range(_BOUNDARY_ROUNDS):
            pairs = dict.fromkeys(
                pair
                for key in keys
                for pair in self._pairs(key, self.solve(key)[0])
                if pair not in self.boundaries
            )
            if not pairs:
                return
            trials = {pair: self._boundary_trial(keys, *pair) for pair in pairs}
            self.measurer.measure("boundaries", trials.values(), share=share)
            for pair, trial in trials.items():
                measured = self.measurer.get(trial)
                if measured is None or measured.failure:
                    # Never cheaper than a division without it.
                    self.boundaries[pair] = max(map(self.seconds, keys))
                else:
                    extra = cast("float", measured.details.get("boundary", 0.0))
                    self.boundaries[pair] = max(0.0, float(extra))

    def _pairs(self, key: str, division: BlockDivision) -> Iterator[tuple[str, str]]:
        """Yield the pairs of backends that values pass between in a division."""
        block = self.space.blocks[key].block
        owner: dict[int, tuple[int, str]] = {}
        for number, (region, backend) in enumerate(division.regions):
            for position in region.taken:
                if position in block.unit_of:
                    owner[block.unit_of[position]] = (number, str(backend))
        for producer, reader in block.edges:
            first, second = owner.get(producer, (-1, AS_IT_IS)), owner.get(reader, (-1, AS_IT_IS))
            if first != second and (first[1], second[1]) != (AS_IT_IS, AS_IT_IS):
                yield first[1], second[1]

    def _boundary_trial(self, keys: Sequence[str], first: str, second: str) -> BoundaryTrial:
        choices = [None if name == AS_IT_IS else self.space.backend(name) for name in (first, second)]
        identity = " -> ".join(AS_IT_IS if c is None else self.space.identity_of(c) for c in choices)
        shape, dtype, device = self._typical_value(tuple(keys))
        return BoundaryTrial(self.mode, shape, dtype, device, choices[0], choices[1], identity)

    def _typical_value(self, keys: tuple[str, ...]) -> tuple[tuple[int, ...], str, str]:
        """Return sizes, dtype and device of a floating-point value of median size within the blocks."""
        values: list[tuple[int, tuple[int, ...], str, str]] = []
        for key in keys:
            for node in self.space.blocks[key].block.context.nodes:
                value = node.meta.get("val")
                if node.op != "call_function" or not isinstance(value, Tensor):
                    continue
                sizes = size_hints(value)
                if sizes is not None and value.dtype.is_floating_point:
                    dtype = str(value.dtype).removeprefix("torch.")
                    values.append((value.numel(), tuple(sizes), dtype, str(value.device)))
        if not values:
            return (1, 64), "float32", "cpu"
        values.sort()
        return values[len(values) // 2][1:]

    def choose(self, keys: Sequence[str], share: float) -> None:
        """Measure the best divisions of blocks as a whole, and choose one for each."""
        trials: dict[str, tuple[DivisionsTrial, list[tuple[str, float]], float]] = {}
        for key in self._by_weight(keys):
            trials[key] = self._divisions(key)
        self.measurer.measure("divisions of blocks", [t for t, *_ in trials.values()], share=share)
        for key, (trial, predicted, bound) in trials.items():
            self.choices[key] = self._choice(key, trial, predicted, bound)

    def _divisions(self, key: str) -> tuple[DivisionsTrial, list[tuple[str, float]], float]:
        """Return the trial of the most promising divisions, the label and the predicted ratio of each, and their bound.

        The bound is the least ratio that any division may have by the costs.
        """
        base = self.seconds(key) or 1.0
        best, seconds, gap = self.solve(key)
        divisions: dict[str, tuple[BlockDivision, str, float]] = {
            best.key: (best, "best by costs", seconds / base)
        }
        for name in self.space.choices:
            division, seconds, _ = self.solve(key, [name])
            divisions.setdefault(division.key, (division, f"best by costs with {name} alone", seconds / base))
        for cost in self.costs(key, self.whole(key)):
            division = BlockDivision(((cost.candidate.choice, cost.backend),))
            divisions.setdefault(division.key, (division, f"whole block by {cost.backend}", cost.ratio))
        chosen = [row for row in divisions.values() if row[0].regions]
        block = self.space.blocks[key]
        identity = " | ".join(self.space.identity_of(choice) for choice in self.space.backends)
        trial = DivisionsTrial(self.mode, key, block.operands, tuple(row[0] for row in chosen), identity)
        bound = divisions[best.key][2] * (1 - gap)
        return trial, [(label, ratio) for _, label, ratio in chosen], bound

    def _choice(
        self, key: str, trial: DivisionsTrial, predicted: Sequence[tuple[str, float]], bound: float
    ) -> BlockChoice:
        base = self.seconds(key)
        as_it_is = BlockChoice(BlockDivision(), Spread(base, base, base, 1), base, 0.0)
        measured = self.measurer.get(trial)
        if measured is None or not measured.samples:
            return self._predicted_choice(key, as_it_is, measured)
        details: Mapping[str, Any] = measured.details
        noise = noise_of(measured.samples, details["again"])
        rows: list[tuple[float, int, int]] = [(1.0, -1, 0)]
        alternatives: dict[int, Alternative] = {-1: Alternative(AS_IT_IS, _spread(measured.samples, base))}
        pairs: list[tuple[str, float, float]] = []
        for number, (label, ratio) in enumerate(predicted):
            text = str(number)
            what = f"{label}: {division_label(trial.divisions[number])}"
            if text not in details["divisions"]:
                reason = details["failures"].get(text, "not measured")
                alternatives[number] = Alternative(what, None, str(reason))
                continue
            samples = details["divisions"][text]
            comparison = compare(samples, measured.samples, noise)
            pairs.append((what, ratio, comparison.ratio))
            regions = len(trial.divisions[number].regions)
            is_tie = comparison.verdict in ("tie", "undecided")
            rows.append((1.0 if is_tie and comparison.ratio >= 1 else comparison.ratio, number, regions))
            alternatives[number] = Alternative(what, _scaled(samples, measured.samples, base))
        best_ratio = min(row[0] for row in rows)
        # Among divisions that cannot be told apart, the one with the fewest regions.
        winner = min(
            (row for row in rows if row[0] <= best_ratio * (1 + min(noise, MAX_TIE))),
            key=lambda row: (row[2], row[0]),
        )
        others = sorted((row for row in rows if row is not winner), key=lambda row: row[0])
        division = BlockDivision() if winner[1] < 0 else trial.divisions[winner[1]]
        cost = 1.0 if winner[1] < 0 else predicted[winner[1]][1]
        gap = max(0.0, (cost - bound) / cost) if cost > 0 else 0.0
        runner_up = None
        if others:
            second = alternatives[others[0][1]]
            runner_up = Alternative(
                second.choice, second.seconds, f"{others[0][0] / winner[0]:.3f} times the time"
            )
        rejected = tuple(
            Alternative(
                a.choice, a.seconds, a.reason or f"{_ratio_of(rows, n) / winner[0]:.3f} times the time"
            )
            for n, a in alternatives.items()
            if n != winner[1] and (not others or n != others[0][1])
        )
        seconds = cast("Spread", alternatives[winner[1]].seconds)
        return BlockChoice(division, seconds, best_ratio * base, gap, runner_up, rejected, pairs)

    def _predicted_choice(self, key: str, as_it_is: BlockChoice, measured: Measurement | None) -> BlockChoice:
        """Return the choice by costs alone, where the divisions could not be measured as whole blocks."""
        division, seconds, gap = self.solve(key)
        if not division.regions or (measured is not None and measured.failure):
            return as_it_is
        return BlockChoice(division, Spread(seconds, seconds, seconds, 1), seconds, gap)

    @cached_property
    def predictions(self) -> list[tuple[str, float, float]]:
        """Label, predicted and measured ratio of all divisions that were measured."""
        return [pair for choice in self.choices.values() for pair in choice.measured]


def _ratio_of(rows: Sequence[tuple[float, int, int]], number: int) -> float:
    return next((row[0] for row in rows if row[1] == number), float("nan"))


def _spread(samples: Sequence[float], base: float) -> Spread:
    """Return the spread of samples around a time that was measured elsewhere."""
    return _scaled(samples, samples, base)


def _scaled(samples: Sequence[float], reference: Sequence[float], base: float) -> Spread:
    """Return the time of samples relative to a reference of the same rounds, which takes `base` seconds."""
    middle = statistics.median(reference)
    ratios = [value / middle for value in samples]
    low, high = median_interval(ratios)
    return Spread(statistics.median(ratios) * base, low * base, high * base, len(samples))


def division_label(division: BlockDivision) -> str:
    """Return a division in one line: kinds and sizes of its regions by backend."""
    by_backend: dict[str, list[str]] = {}
    for region, backend in division.regions:
        by_backend.setdefault(str(backend), []).append(f"{region.kind} ({len(region.members)})")
    return "; ".join(f"{name}: {', '.join(kinds)}" for name, kinds in by_backend.items()) or AS_IT_IS
