"""A device with planted costs: trials are answered from a formula, so that the optimum of a search is known.

The cost of a program is that of its operations and regions, of boundaries between backends, and of interactions between
pairs of kinds, which no sum of parts predicts.
"""

import itertools
import pickle
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.lowering.backend_protocol import Backend
from dovetail.outlining.region import Region
from dovetail.tuning.block import Block
from dovetail.tuning.decisions import RegionChoice
from dovetail.tuning.environment import Environment
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.measuring import Measurer
from dovetail.tuning.plan import Plan, body_entry
from dovetail.tuning.preparation import Prepared, prepare
from dovetail.tuning.region_candidates import EXISTING
from dovetail.tuning.search import Searched, search
from dovetail.tuning.search_space import GraphState, SearchSpace
from dovetail.tuning.store import Store
from dovetail.tuning.trial import (
    BoundaryTrial,
    ComparisonTrial,
    DivisionsTrial,
    OperationsTrial,
    ProgramSpec,
    ProgramTrial,
    RegionTrial,
    Trial,
)
from tests.tuning.helpers import FakeClock

HERE = Environment("cpu: synthetic", "", "2.13.0", "3.11.7", 1, ())
US = 1e-6


class Planted(Backend):
    """A backend that takes every region and is never asked to compile one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def supports(self, region: Region) -> Any:
        return True


@dataclass
class Costs:
    """Planted costs in microseconds; `regions` gets kind, number of operations and backend."""

    operations: Callable[[str, int], float] = lambda name, elements: 10.0
    regions: Callable[[str, float, str], float] = lambda kind, seconds, backend: seconds
    boundaries: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    interactions: Callable[[Mapping[int, tuple[str, str]]], float] = lambda chosen: 0.0
    whole: Callable[[float, str], float] = lambda seconds, backend: 2.0 * seconds
    compiled: float = 2.0


class SyntheticDevice:
    """Answers trials from planted costs; every sample of one has the same value, but for `noise`.

    A trial takes `delay` seconds, of a clock that is moved if there is one.
    """

    def __init__(
        self,
        space: SearchSpace,
        costs: Costs,
        *,
        noise: float = 0.0,
        delay: float = 0.0,
        clock: FakeClock | None = None,
    ) -> None:
        self.space, self.costs, self.noise, self.delay, self.clock = space, costs, noise, delay, clock
        self.trials: list[Trial] = []
        self.log: Callable[[Trial], None] = lambda trial: None
        self.restarts = 0

    def add_block(self, block: Block) -> None: ...

    def restart(self) -> None:
        self.restarts += 1

    def close(self) -> None: ...

    def measure(self, trial: Trial, timeout: float) -> Measurement:
        self.trials.append(trial)
        self.log(trial)
        if self.clock is not None:
            self.clock.now += self.delay
        elif self.delay:
            time.sleep(self.delay)
        return self.answer(trial)

    def answer(self, trial: Trial) -> Measurement:
        """Return the planted result of a trial."""
        generator = random.Random(trial.subject.digest)

        def samples(seconds: float) -> list[float]:
            return [seconds * US * (1 + self.noise * generator.uniform(-1, 1)) for _ in range(8)]

        if isinstance(trial, OperationsTrial):
            units = self.units(trial.block)
            return Measurement(
                tuple(samples(sum(units))), details={"operations": [samples(u) for u in units]}
            )
        if isinstance(trial, RegionTrial):
            base = self._members(trial.block, trial.region)
            own = self.region(trial.block, trial.region, trial.backend.name)
            return Measurement(tuple(samples(own)), details={"reference": samples(base)})
        if isinstance(trial, BoundaryTrial):
            names = tuple("as it is" if b is None else b.name for b in (trial.first, trial.second))
            extra = self.costs.boundaries.get((names[0], names[1]), 0.0)
            return Measurement(tuple(samples(1.0)), details={"boundary": extra * US})
        if isinstance(trial, DivisionsTrial):
            reference = sum(self.units(trial.block))
            divided = {
                str(n): samples(self.division(trial.block, [(r, b.name) for r, b in d.regions]))
                for n, d in enumerate(trial.divisions)
            }
            details: Any = {"again": samples(reference), "divisions": divided, "failures": {}, "errors": {}}
            return Measurement(tuple(samples(reference)), details=details)
        if isinstance(trial, ProgramTrial):
            base = self.model()
            return Measurement(
                tuple(samples(self.program(trial.program))), details={"reference": samples(base)}
            )
        assert isinstance(trial, ComparisonTrial)
        programs: Any = {p.key: samples(self.program(p)) for p in trial.programs}
        first = programs[trial.programs[0].key]
        return Measurement(
            tuple(first),
            details={"programs": programs, "again": samples(self.program(trial.programs[0])), "failures": {}},
        )

    def units(self, key: str) -> list[float]:
        block = self.space.blocks[key].block
        return [self._unit(block, k) for k in range(len(block.units))]

    def _unit(self, block: Block, unit: int) -> float:
        node = block.context.nodes[block.units[unit][0]]
        if node.op == "call_module":
            body = block.program.get_submodule(str(node.target))
            inner = [n for n in body.graph.nodes if n.op == "call_function"]  # type: ignore[union-attr]
            return sum(self.costs.operations(_name(n), _elements(n)) for n in inner)
        return self.costs.operations(_name(node), _elements(node))

    def _members(self, key: str, region: RegionChoice) -> float:
        block = self.space.blocks[key].block
        units = self.units(key)
        return sum(units[k] for k in {block.unit_of[i] for i in region.taken if i in block.unit_of})

    def region(self, key: str, region: RegionChoice, backend: str) -> float:
        return self.costs.regions(region.kind, self._members(key, region), backend)

    def division(self, key: str, regions: list[tuple[RegionChoice, str]]) -> float:
        """Return the cost of a block with some regions."""
        block = self.space.blocks[key].block
        units = self.units(key)
        owner: dict[int, tuple[int, str]] = {}
        kinds: dict[int, tuple[str, str]] = {}
        total = 0.0
        for number, (region, backend) in enumerate(regions):
            total += self.region(key, region, backend)
            for position in region.taken:
                if position in block.unit_of:
                    owner[block.unit_of[position]] = (number, backend)
                    kinds[block.unit_of[position]] = (region.kind, backend)
        total += sum(seconds for k, seconds in enumerate(units) if k not in owner)
        crossings = {
            (producer, first, second)
            for producer, reader in block.edges
            if (first := owner.get(producer, (-1 - producer, "as it is")))
            != (second := owner.get(reader, (-1 - reader, "as it is")))
        }
        total += sum(self.costs.boundaries.get((first[1], second[1]), 0.0) for _, first, second in crossings)
        return total + self.costs.interactions(kinds)

    def model(self) -> float:
        state = self.space.states[0]
        return sum(block.calls * sum(self.units(key)) for key, block in state.blocks.items())

    def program(self, program: ProgramSpec) -> float:
        if not program.plan:
            return self.model() if program.name == "eager" else self.costs.compiled * self.model()
        plan = Plan.from_json(program.plan)
        (decision,) = next(iter(plan.graphs.values())).values()
        if decision.execution != "regions":
            return self.model() * (self.costs.compiled if decision.execution == "torch.compile" else 1.0)
        if decision.whole is not None:
            return self.costs.whole(self.model(), decision.whole.name)
        state = next(s for s in self.space.states if s.pipeline == decision.pipeline)
        return sum(block.calls * self._planned(plan, key) for key, block in state.blocks.items())

    def _planned(self, plan: Plan, key: str) -> float:
        space = self.space.blocks[key]
        (block,) = plan.blocks[key].values()
        chosen: list[tuple[RegionChoice, str]] = []
        for candidate in space.candidates:
            is_outlined = candidate.choice in block.regions
            if is_outlined or candidate.choice.rule == EXISTING:
                by_scope = plan.bodies.get(body_entry(candidate.key, space.candidate_operands(candidate)))
                if by_scope is not None:
                    (body,) = by_scope.values()
                    if body.backend is not None:
                        chosen.append((candidate.choice, body.backend.name))
        return self.division(key, chosen)


class PlantedRunner:
    """Answers trials in the process of a worker as a `SyntheticDevice` does; sent there instead of a `TrialRunner`."""

    costs = Costs()
    noise = delay = 0.0
    space = b""
    """The search space, pickled; derived from the model where there is none, which takes seconds."""

    def __init__(self, backends: list[Backend], device: str) -> None:
        self._names = tuple(backend.name for backend in backends)
        self._device: SyntheticDevice | None = None

    def load_model(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: Any
    ) -> None:
        space = pickle.loads(self.space) if self.space else prepared(model, *args, backends=self._names).space
        self._device = SyntheticDevice(space, self.costs, noise=self.noise, delay=self.delay)

    def load_block(self, block: Block) -> None: ...

    def run(self, trial: Trial) -> Measurement:
        assert self._device is not None
        return self._device.measure(trial, 60.0)


def _name(node: Any) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _elements(node: Any) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0


def divisions(space: SearchSpace, key: str, backends: list[str]) -> Iterator[list[tuple[RegionChoice, str]]]:
    """Yield every division of a block: all sets of disjoint candidates, each with every backend."""
    candidates = space.blocks[key].candidates

    def extend(start: int, taken: frozenset[int], chosen: list[RegionChoice]) -> Iterator[list[RegionChoice]]:
        yield chosen
        for i in range(start, len(candidates)):
            if taken.isdisjoint(candidates[i].units):
                yield from extend(i + 1, taken | candidates[i].units, [*chosen, candidates[i].choice])

    for chosen in extend(0, frozenset(), []):
        for assigned in itertools.product(backends, repeat=len(chosen)):
            yield list(zip(chosen, assigned, strict=True))


def exhaustive(device: SyntheticDevice, backends: list[str]) -> tuple[float, int]:
    """Return the cost of the best program by trying all of them, and how many there are."""
    best, count = min(device.model(), *(device.costs.whole(device.model(), b) for b in backends)), 0
    for state in device.space.states:
        total, programs = 0.0, 1
        for key, block in state.blocks.items():
            costs = [device.division(key, division) for division in divisions(device.space, key, backends)]
            total += block.calls * min(costs)
            programs *= len(costs)
        best, count = min(best, total), count + programs
    return best, count


class Chain(nn.Module):
    """A few operations in a row: one block whose divisions can all be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.second = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x)) * 0.5
        return torch.tanh(self.second(torch.nn.functional.gelu(self.middle(y)))) + x


class Siblings(nn.Module):
    """Three products of one value: fusing one with its activation first leaves two to merge."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.skip = nn.Linear(8, 32), nn.Linear(8, 16), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.nn.functional.gelu(self.up(x)), self.gate(x), self.skip(x)


class Merging(nn.Module):
    """Two pairs of sibling products, and a table that depends on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 12)
        self.c, self.d = nn.Linear(8, 16), nn.Linear(8, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = self.a(x), self.b(x)
        x = first.sort().values + torch.arange(8).cos()
        return second, self.c(x), self.d(x)


class Normalized(nn.Module):
    """Elementwise work before a norm, written out: only a round after that of the library takes both into one region."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.tanh(x) * y
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return torch.sigmoid(z) * 0.5


def prepared(model: nn.Module, *inputs: Tensor, backends: tuple[str, ...] = ("a", "b")) -> Prepared:
    torch.manual_seed(0)
    ready = prepare(model.eval(), inputs or (torch.randn(4, 8),), None, [Planted(name) for name in backends])
    ready.environment = HERE
    # All parts are there, so that the best program can be found by trying all of them.
    ready.space.expand(list(ready.space.blocks))
    return ready


def run(
    ready: Prepared,
    device: SyntheticDevice,
    store: Store,
    *,
    budget: float = 1e6,
    trial_seconds: float = 60.0,
    seed: int = 0,
) -> Searched:
    clock = device.clock or time.monotonic
    measurer = Measurer(store, HERE, device, budget=budget, trial_seconds=trial_seconds, clock=clock)
    return search(
        ready.space,
        measurer,
        HERE,
        mode="inference",
        operands=ready.operands,
        label="test",
        seed=seed,
        new_state=ready.new_state,
    )


def cost_of(searched: Searched, device: SyntheticDevice) -> float:
    """Return the planted cost of the winner."""
    assert searched.outcome is not None
    return device.program(searched.outcome.winner.program)


def winner_state(searched: Searched) -> GraphState | None:
    assert searched.outcome is not None
    return searched.outcome.winner.state
