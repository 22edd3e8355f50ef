"""Models that write buffers or inputs: each call that is timed begins with the same ones."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.tuning.executor import InProcess, TunedModel
from dovetail.tuning.model_programs import ModelPrograms
from dovetail.tuning.preparation import prepare
from dovetail.tuning.restored_runs import restored
from dovetail.tuning.timing import Interleaved, RestoredRun, Timer
from dovetail.tuning.trial import ComparisonTrial, OperationsTrial, ProgramSpec, ProgramTrial
from dovetail.tuning.trial_runner import TrialRunner
from tests.tuning.failing_backends import Works
from tests.tuning.test_model_programs import whole_by

TIMER = Timer(torch.device("cpu"), pause=0.0)
ROWS = 8
X = torch.linspace(-1, 1, 4).reshape(1, 4)
EAGER = ProgramSpec("eager", "eager")


class Cache(nn.Module):
    """Writes a row of a static cache, at a position that each call advances."""

    rows: Tensor
    at: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("rows", torch.zeros(ROWS, 4))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.rows.index_copy_(0, self.at, self.linear(x).detach())
        self.at.add_(1)
        return self.rows.sum(0) + self.linear(x)


class Replaces(nn.Module):
    """Puts another tensor in the place of its buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 2
        return x * self.scale


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x.mul_(2.0)) + 1


def programs(model: nn.Module, mode: str = "inference") -> ModelPrograms:
    return ModelPrograms(model, (X.clone(),), {}, mode, [Works()], TIMER)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_position_of_a_cache_does_not_advance_between_samples(mode: str) -> None:
    model = Cache().train(mode == "training")
    runs = programs(model, mode)
    with torch.set_grad_enabled(mode == "training"):
        measured = runs.measure(ProgramTrial(mode, "m", "", EAGER, ""))  # type: ignore[arg-type]
        assert len(measured.samples) > 1
        run = runs.step(model)
        for _ in range(3 * ROWS):
            run()
    assert model.at == 1


def test_programs_are_compared_at_the_same_position() -> None:
    model = Cache().eval()
    runs, spec = programs(model), whole_by(model, X.clone(), Works())
    with torch.no_grad():
        compared = runs.compare(ComparisonTrial("inference", "m", "", (EAGER, spec), "", seconds=0.1))
    assert not compared.details["failures"]
    assert model.at == 0
    assert not model.rows.any()


def test_inputs_and_replaced_buffers_are_restored() -> None:
    for model in (Doubles(), Replaces()):
        run = programs(model.eval()).step(model)
        assert isinstance(run, RestoredRun)
        results = [run() for _ in range(200)]
        assert all(torch.equal(result, results[0]) for result in results)  # type: ignore[arg-type]
    assert not isinstance(programs(nn.Linear(4, 4)).step(nn.Linear(4, 4)), RestoredRun)


@pytest.mark.parametrize("model", [Cache(), Doubles()], ids=["cache", "inputs"])
def test_blocks_are_measured_at_the_same_position(model: nn.Module) -> None:
    space = prepare(model.eval(), (X.clone(),), None, [Works()]).space
    runner = TrialRunner([Works()])
    for key, each in space.blocks.items():
        assert each.block.writes
        runner.load_block(each.block)
        measured = runner.run(OperationsTrial("inference", key, ""))
        assert not measured.failure
        assert all(torch.isfinite(value).all() for value in each.block.inputs)


def test_a_restored_run_is_timed_without_restoring() -> None:
    state, slept = torch.zeros(3), 0

    def run() -> None:
        state.add_(1)

    def restore() -> None:
        nonlocal slept
        slept += 1
        time.sleep(0.002)
        state.zero_()

    interleaved = Interleaved([RestoredRun(run, restore)], TIMER)
    interleaved.sample(3)
    assert max(interleaved.samples[0]) < 0.002
    assert slept > 3 * 3
    assert state.tolist() == [1.0] * 3


def test_only_runs_that_write_are_restored() -> None:
    x, y = torch.zeros(2), torch.full((2,), torch.nan)
    assert not isinstance(restored(lambda: x + 1, (x, 3)), RestoredRun)
    run: Any = restored(lambda: x.add_(1), [x, {"y": y}])
    for _ in range(3):
        run()
    assert x.tolist() == [1.0, 1.0]


def test_a_trial_that_ends_the_process_is_a_failure() -> None:
    class Exits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise SystemExit(3)

    executor = InProcess(TunedModel(Exits().eval(), (X,), {}, "inference"), [])
    measured = executor.measure(ProgramTrial("inference", "m", "", EAGER, ""), 60)
    assert measured is not None
    assert measured.failure == "SystemExit: 3"
