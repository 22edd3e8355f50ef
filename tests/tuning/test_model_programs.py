"""Whole programs: verified on the model's own state, restored afterwards, and failed where a backend fails."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.lowering.backend_protocol import Backend
from dovetail.scheduling.call_recording import copy_tensors
from dovetail.tuning.decisions import BackendChoice, GraphDecision
from dovetail.tuning.executor import InProcess, TunedModel
from dovetail.tuning.model_programs import InvalidProgram, ModelPrograms
from dovetail.tuning.plan import Plan
from dovetail.tuning.preparation import prepare
from dovetail.tuning.timing import Timer, peak_bytes
from dovetail.tuning.trial import ComparisonTrial, ProgramSpec, ProgramTrial
from tests.tuning.failing_backends import IsWrong, Raises, Works

CPU = torch.device("cpu")
X = torch.randn(4, 8)
EAGER = ProgramSpec("eager", "eager")


class Counts(nn.Module):
    """Its result depends on how often it was called."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return torch.relu(self.linear(x)) * self.calls


class Doubles(nn.Module):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x.mul_(2.0)) + 1


def whole_by(model: nn.Module, x: Tensor, backend: Backend | None) -> ProgramSpec:
    """A program that has the whole graph by a backend; without one, the graph as it is."""
    ready = prepare(model, copy_tensors((x,)), None, [] if backend is None else [backend])
    decision = (
        GraphDecision("", execution="graph")
        if backend is None
        else GraphDecision("", whole=BackendChoice(backend.name))
    )
    plan = Plan().with_decisions("inference", ready.environment, graphs={ready.space.key: decision})
    return ProgramSpec(decision.choice, decision.choice, plan.to_json())


def programs(model: nn.Module, x: Tensor, *backends: Backend, mode: str = "inference") -> ModelPrograms:
    return ModelPrograms(model, (x,), {}, mode, backends, Timer(CPU, pause=0.0))  # type: ignore[arg-type]


def test_a_model_that_counts_its_calls_is_verified_from_the_same_count_each_time() -> None:
    model = Counts().eval()
    spec = whole_by(model, X, Works())
    runs = programs(model, X, Works())
    with torch.no_grad():
        for _ in range(3):
            measured = runs.measure(ProgramTrial("inference", "m", "", spec, ""))
            assert measured.numeric_error == pytest.approx(0.0, abs=1e-6)
        assert model.calls == 0
        compared = runs.compare(ComparisonTrial("inference", "m", "", (spec, EAGER), "", seconds=0.1))
    assert not compared.details["failures"]
    assert model.calls == 0


def test_a_program_that_computes_something_else_fails_although_the_model_changes_its_state() -> None:
    model = Counts().eval()
    runs = programs(model, X, IsWrong())
    with torch.no_grad(), pytest.raises(Exception, match=r"is_wrong|does not compute the same"):
        runs.measure(ProgramTrial("inference", "m", "", whole_by(model, X, IsWrong()), ""))


def test_a_backend_that_cannot_compile_is_a_failed_program() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    runs = programs(model, X, Raises())
    with torch.no_grad(), pytest.raises(Exception, match="no kernel for this"):
        runs.measure(ProgramTrial("inference", "m", "", whole_by(model, X, Raises()), ""))


def test_each_program_runs_on_inputs_of_its_own() -> None:
    model, x = Doubles().eval(), X.clone()
    spec = whole_by(model, x, None)
    x = X.clone()
    runs = programs(model, x)
    with torch.no_grad():
        measured = runs.measure(ProgramTrial("inference", "m", "", spec, ""))
    assert measured.samples
    assert torch.equal(x, X)


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.ReLU(), nn.GELU()), nn.Linear(8, 8).requires_grad_(False)]
)
def test_a_training_step_without_gradients_is_a_forward(model: nn.Module) -> None:
    runs = programs(model.train(), X, mode="training")
    assert runs.measure(ProgramTrial("training", "m", "", EAGER, "")).samples


def test_trials_in_this_process_leave_the_model_and_its_inputs_alone() -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)).train(), X.clone()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    executor = InProcess(TunedModel(model, (x,), {}, "training"), [])
    measured = executor.measure(ProgramTrial("training", "m", "", EAGER, ""), 60)
    assert measured.samples
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(x, X)


def test_memory_of_a_call_is_measured_after_it_has_run_before() -> None:
    x = torch.randn(2**22)

    def run() -> Tensor:
        return ((x + 1) * 2).sum()

    for _ in range(3):
        run()
    needed = [peak_bytes(run, CPU) for _ in range(3)]
    if None in needed:
        pytest.skip("this system does not report the peak of a call")
    assert min(n for n in needed if n is not None) >= 2**24


def test_programs_of_a_graph_run_what_they_are_named_after() -> None:
    """The code of a graph is generated by its first call, between the captures of two programs."""
    graph = dovetail.capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), (X[:1].expand(4, 8),))
    expanded = X[:1].expand(4, 8)
    specs = [whole_by(graph, expanded, Works()), whole_by(graph, expanded, None)]
    runs = programs(graph, expanded, Works())
    with torch.no_grad():
        built = [runs.build(spec) for spec in specs]
        torch.compile(graph, backend="eager")(expanded)
        for module in built:
            runs.step(module)()
            assert not getattr(module, "diagnostics", ())
            runs.require_planned(module)
    first, second = (cast("Any", module).graphs for module in built)
    assert [r.backend for r in dovetail.regions(first[0])] == [Works().name]
    assert not dovetail.regions(second[0])


def test_a_program_whose_calls_are_captured_without_a_decision_is_a_failure() -> None:
    """Another mode after the capture: the plan was for the graph of the first."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout()).eval()
    spec = whole_by(model, X, Works())
    runs = programs(model, X, Works())
    with torch.no_grad():
        module = runs.build(spec)
        model.train()
        module(X)
        with pytest.raises(InvalidProgram, match="no decision"):
            runs.require_planned(module)
        compared = runs.compare(ComparisonTrial("inference", "m", "", (EAGER, spec), "", seconds=0.1))
    failures = cast("dict[str, str]", compared.details["failures"])
    assert "do not run what the plan decides" in failures[spec.key] or "same" in failures[spec.key]
