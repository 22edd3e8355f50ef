"""What runs the calls of a capture: the graph, the model, torch.compile of it, and for which calls; and torch.compile."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
import dovetail.zoo
from dovetail import InvalidArgument, LoweringError, Plan, PlanMismatch
from dovetail.lowering.backend_protocol import by_name
from dovetail.runtime import capture_cache
from dovetail.runtime.own_forward import GuardedForward, TorchCompiledForward
from dovetail.tuning.apply_plan import environment_of
from dovetail.tuning.decisions import BackendChoice, BodyDecision, GraphDecision
from dovetail.tuning.preparation import prepare
from tests.lowering.helpers import Counting
from tests.tuning.failing_backends import Works
from tests.tuning.plans import Layers, X, block_of, captured, halves, kinds, messages, plan_for

EXECUTIONS = ("graph", "model", "torch.compile")


class Counted(Layers):
    """Counts the calls of its own forward, except those that a tracer makes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            Counted.calls += 1
        return super().forward(x)


class Norm(nn.Module):
    """Writes its statistics and draws at random in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x)).relu()


def executed(model: nn.Module, execution: Any, *args: Any, **options: Any) -> Any:
    plan = plan_for(model, *args, decision=GraphDecision("model", execution=execution))
    return dovetail.compile(model, args, backends="eager", plan=plan, **options)


def runs(compiled: Any) -> list[str]:
    return [entry.execution for entry in compiled._captures.captures]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_calls_are_run_as_the_plan_has_it(execution: str) -> None:
    model = Counted().eval()
    fast = executed(model, execution, X, check_capture=False)
    assert runs(fast) == [execution]
    assert kinds(fast) == []
    Counted.calls = 0
    result = fast(X)
    assert Counted.calls == {"graph": 0, "model": 1, "torch.compile": 0}[execution]
    torch.testing.assert_close(result, model(X))
    run = fast._captures.captures[0].run
    assert isinstance(run, GuardedForward) == (execution != "graph")
    assert isinstance(run, TorchCompiledForward) == (execution == "torch.compile")
    assert not fast.diagnostics
    fast(X).sum().backward()
    assert model.layers[0].weight.grad is not None


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_guards_of_the_capture_choose_the_calls(execution: str) -> None:
    model = Counted().eval()
    # Otherwise sizes would be dynamic in the second capture, which covers the first call too.
    fast = executed(model, execution, X, check_capture=False, dynamic=False)
    Counted.calls = 0
    wide = torch.cat([X, X])
    torch.testing.assert_close(fast(wide), Layers.forward(model, wide))
    # The other call was captured by itself, and the plan does not know its graph.
    assert runs(fast) == [execution, "regions"]
    assert Counted.calls == 0
    for given in (X, wide, X):
        torch.testing.assert_close(fast(given), Layers.forward(model, given))
    assert len(fast.graphs) == 2
    assert Counted.calls == (2 if execution == "model" else 0)
    assert "the graph" in messages(fast, "unplanned")[0]
    with pytest.raises(TypeError):
        fast(X, X)
    model.double()
    torch.testing.assert_close(fast(X.double()), Layers.forward(model, X.double()))


@pytest.mark.parametrize("execution", ["model", "torch.compile"])
def test_autocast_is_that_of_the_caller(execution: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        fast = executed(model, execution, X)
        assert runs(fast) == [execution]
        assert fast(X).dtype == model(X).dtype == torch.bfloat16
        torch.testing.assert_close(fast(X), model(X))
    with torch.no_grad():
        assert fast(X).dtype == torch.float32
    assert len(fast.graphs) == 2


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_without_gradients_and_in_inference_mode(execution: str) -> None:
    model = Layers().eval()
    expected = model(X).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            fast = executed(model, execution, X.clone())
            assert runs(fast) == [execution]
            torch.testing.assert_close(fast(X.clone()), expected)
            assert not messages(fast, "failed")
        torch.testing.assert_close(fast(X.clone().requires_grad_()).detach(), expected)
        fast(X).sum().backward()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_hooks_of_the_model_run_once_around_each_call(execution: str) -> None:
    model = Layers().eval()
    events: list[str] = []
    model.register_forward_pre_hook(lambda *_: events.append("before"))
    model.register_forward_hook(lambda *_: events.append("after"))
    fast = executed(model, execution, X)
    events.clear()
    fast(X)
    assert events == ["before", "after"]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_training_writes_statistics_and_draws_as_the_model_does(execution: str) -> None:
    model = Norm().train()
    expected = copy.deepcopy(model)
    stream = torch.get_rng_state()
    fast = executed(model, execution, X)
    # Compiling has run nothing that can be noticed.
    assert torch.equal(torch.get_rng_state(), stream)
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))
    assert runs(fast) == [execution]
    for _ in range(2):
        fast(X)
        expected(X)
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))
    if execution == "model":
        with torch.random.fork_rng():
            results = fast(X)
        assert torch.equal(results, expected(X))
    fast.eval()
    torch.testing.assert_close(fast(X), model.eval()(X))
    assert runs(fast) == [execution, "regions"]


@pytest.mark.parametrize("execution", ["regions", *EXECUTIONS])
def test_copies_and_pickles_run_calls_alike(execution: str) -> None:
    model = Layers().eval()
    fast = executed(model, execution, X)
    expected = fast(X)
    again = pickle.loads(pickle.dumps(fast))
    assert runs(again) == [execution]
    torch.testing.assert_close(again(X), expected)
    copied = copy.deepcopy(fast)
    torch.testing.assert_close(copied(X), expected)
    assert runs(copied) == [execution]
    other = torch.cat([X, X])
    torch.testing.assert_close(again(other), fast(other))


def test_inputs_that_share_memory_with_what_the_model_writes_are_other_calls() -> None:
    class Writing(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return x * y

    model = Writing().eval()
    one, two = torch.ones(4), torch.ones(4)
    fast = executed(model, "model", one.clone(), two.clone())
    (entry,) = fast._captures.captures
    entry.run(one, two)
    with pytest.raises(dovetail.CallMismatch, match="share memory"):
        entry.run(one, one)
    assert one.tolist() == [2.0] * 4


def test_torch_compile_that_fails_is_reported_and_the_model_runs(monkeypatch: Any) -> None:
    def failing(gm: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **options: original(fn, backend=failing, **options))
    model = Counted().eval()
    fast = executed(model, "torch.compile", X)
    (failure,) = messages(fast, "failed")
    assert "torch.compile, which the plan has for the model, failed" in failure
    assert failure.endswith("RuntimeError: no compiler here")
    Counted.calls = 0
    torch.testing.assert_close(fast(X), model(X))
    assert Counted.calls == 2
    with pytest.raises(LoweringError, match=r"backend 'torch\.compile': .*no compiler here"):
        executed(model, "torch.compile", X, on_error="raise")


def test_recorded_cuda_graphs_need_a_gpu() -> None:
    model = Layers().eval()
    for planned in (None, False):
        plan = plan_for(model, X, decision=GraphDecision("layers", cuda_graphs=planned))
        assert not messages(dovetail.compile(model, (X,), backends="eager", plan=plan), "stale")
    plan = plan_for(model, X, decision=GraphDecision("layers", cuda_graphs=True))
    fast = dovetail.compile(model, (X,), backends="eager", plan=plan)
    (problem,) = messages(fast, "stale")
    assert problem == "the plan has its calls recorded as a CUDA graph, but nothing of it is on a CUDA device"
    assert not messages(dovetail.compile(model, (X,), plan=plan, cuda_graphs=False), "stale")
    with pytest.raises(PlanMismatch, match="CUDA graph"):
        dovetail.compile(model, (X,), backends="eager", plan=plan, on_error="raise")
    with pytest.raises(InvalidArgument, match="cuda_graphs=True, but the plan has 'model' run its calls"):
        executed(model, "model", X, cuda_graphs=True)


def test_the_plan_decides_on_recording_where_the_caller_does_not(monkeypatch: Any) -> None:
    class Replay:
        def __init__(self, run: Any, program: Any) -> None:
            self.run = run

        def begin(self, args: Any, kwargs: Any) -> None:
            return None

        def __call__(self, *args: Any) -> Any:
            return self.run(*args)

    monkeypatch.setattr(capture_cache, "why_not_recorded", lambda program, example: None)
    monkeypatch.setattr(capture_cache, "CudaGraphReplay", Replay)
    model = Layers().eval()
    for planned, given, expected in (
        (None, "auto", True),
        (True, "auto", True),
        (False, "auto", False),
        (False, True, True),
        (True, False, False),
    ):
        plan = plan_for(model, X, decision=GraphDecision("layers", cuda_graphs=planned))
        fast = dovetail.compile(model, (X,), backends="eager", plan=plan, cuda_graphs=given)
        assert isinstance(fast._captures.captures[0].run, Replay) == expected
    recorded = executed(model, "graph", X)
    assert isinstance(recorded._captures.captures[0].run, Replay)
    assert torch.equal(recorded(X), model(X))
    assert isinstance(executed(model, "model", X)._captures.captures[0].run, GuardedForward)


def compiled_by_dynamo(model: nn.Module, plan: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="dovetail", options={"plan": plan, **options})


def test_torch_compile_applies_plans_for_the_captured_model(tmp_path: Path, caplog: Any) -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    bodies = {block.key: BodyDecision("layer", backend=BackendChoice("mine"))}
    plan = plan_for(model, X, decision=GraphDecision("layers"), bodies=bodies)
    path = tmp_path / "plan.json"
    plan.save(path)
    with torch.no_grad():
        for given in (plan, path, str(path), {block.key: "eager"}):
            mine, other = Counting("mine"), Counting("other")
            fast = compiled_by_dynamo(model, given, backends=[other, mine], cache=False)
            with caplog.at_level("INFO", "dovetail"):
                torch.testing.assert_close(fast(X), model(X))
            assert mine.compiled == ([] if isinstance(given, dict) else ["block_0"])
            assert other.compiled == ["rest_0", "rest_1"]
    # The graph of torch.compile has the weights as inputs, and the same key.
    assert not [r for r in caplog.records if "the graph" in r.message and "plan" in r.message]


def test_torch_compile_reports_ranges_of_sizes_that_it_does_not_follow(caplog: Any) -> None:
    model = Layers().eval()
    sized = Plan().with_decisions(
        "inference", environment_of(captured(model)), sizes={"float32[n, 8]": ((2, 8),)}
    )
    for plan, expected in ((sized, True), (plan_for(model, X, decision=GraphDecision("layers")), False)):
        caplog.clear()
        with torch.no_grad(), caplog.at_level("WARNING", "dovetail"):
            fast = compiled_by_dynamo(model, plan, backends=Counting("mine"), cache=False)
            torch.testing.assert_close(fast(X), model(X))
        assert ("ranges of sizes, which captures of torch.compile do not follow" in caplog.text) == expected


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_torch_compile_runs_the_graph_as_it_is_or_whole(execution: Any, monkeypatch: Any) -> None:
    model = Layers().eval()
    plan = plan_for(model, X, decision=GraphDecision("layers", execution=execution))
    regions: list[str] = []
    inductor = by_name("inductor")
    compiles = type(inductor).compile
    monkeypatch.setattr(
        type(inductor),
        "compile",
        lambda self, region, examples: regions.append(region.kind) or compiles(self, region, examples),
    )
    mine = Counting("mine")
    with torch.no_grad():
        fast = compiled_by_dynamo(model, plan, backends=mine, cache=False)
        torch.testing.assert_close(fast(X), model(X))
    assert mine.calls == 0
    assert regions == (["whole"] if execution == "torch.compile" else [])


def test_torch_compile_reports_what_a_plan_does_not_cover(caplog: Any) -> None:
    model = Layers().eval()
    with torch.no_grad(), caplog.at_level("INFO", "dovetail"):
        compiled_by_dynamo(model, Plan(), backends="eager")(X)
    assert [r.levelname for r in caplog.records if "the plan has no decision for the graph" in r.message] == [
        "INFO"
    ]
    with pytest.raises(Exception, match="give a plan or rules"):
        compiled_by_dynamo(model, Plan(), rules=dovetail.rules.DEFAULT)(X)
    with pytest.raises(Exception, match="cannot be read as a plan"):
        compiled_by_dynamo(model, "/nowhere/plan.json")(X)


def test_a_model_of_the_zoo_by_a_plan_from_a_file(tmp_path: Path) -> None:
    zoo = dovetail.zoo.get("llama")
    model, inputs = zoo.build("tiny").eval(), zoo.example_inputs("tiny")
    plan = plan_for(model, *inputs.args, decision=GraphDecision("llama", execution="graph"))
    plan.save(tmp_path / "plan.json")
    fast = dovetail.compile(model, inputs.args, plan=tmp_path / "plan.json")
    assert runs(fast) == ["graph"]
    assert torch.equal(fast(*inputs.args), model(*inputs.args))
    layers = Layers().eval()
    divided = {block_of(captured(layers)).key: halves(block_of(captured(layers)))}
    both = Plan.load(tmp_path / "plan.json") | plan_for(layers, X, divided=divided)
    assert "head" in kinds(dovetail.compile(layers, (X,), backends="eager", plan=both))
    assert runs(dovetail.compile(model, inputs.args, plan=both)) == ["graph"]


def test_the_whole_graph_by_a_backend_that_takes_a_part_is_the_largest_regions_it_takes() -> None:
    class NoSine(Works):
        """Takes everything but sine, and has a rule that finds that."""

        name = "no_sine"
        rules = dovetail.rules.capability(lambda node: "sin" not in str(node.target), kind="no_sine")

        def supports(self, region: dovetail.Region) -> Any:
            taken = all("sin" not in name for name in region.nodes)
            return True if taken else dovetail.Decline("it has no sine")

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(torch.sin(torch.exp(x) * 2.0) + 1.0)

    model, x = Model().eval(), torch.randn(4, 8)
    backend = NoSine()
    ready = prepare(model, (x,), None, [backend])
    decision = GraphDecision("", whole=BackendChoice("no_sine"))
    plan = Plan().with_decisions("inference", ready.environment, graphs={ready.space.key: decision})
    with torch.no_grad():
        compiled = dovetail.compile(model, (x,), plan=plan, backends=[backend], on_error="raise")
        assert torch.equal(compiled(x), model(x))
    assert "no_sine: 2 pieces of code" in str(dovetail.explain(compiled))
