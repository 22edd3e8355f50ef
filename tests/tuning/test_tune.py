"""`dovetail.tune` as a user calls it: plans, stores, budgets, interrupts and bad input."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.errors import CaptureError, DovetailError, InvalidArgument, StoreError, TuningError
from dovetail.tuning import search as search_module
from dovetail.tuning.division_search import DivisionSearch
from dovetail.tuning.executor import IN_WORKER
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.measuring import Silent
from dovetail.tuning.plan import Plan
from dovetail.tuning.preparation import prepare
from dovetail.tuning.program_search import ProgramSearch
from dovetail.tuning.store import Store
from dovetail.tuning.timing import spread_of
from dovetail.tuning.trial import ComparisonTrial, ProgramTrial, RegionTrial, Trial
from dovetail.tuning.tune import DryRun, estimate, run_search
from tests.tuning.failing_backends import Works
from tests.tuning.helpers import FakeClock
from tests.tuning.synthetic import HERE, Chain, Costs, Planted, SyntheticDevice, cost_of, prepared

X = torch.randn(4, 8)
HALVED = Costs(regions=lambda kind, seconds, backend: 0.5 * seconds)


def chain() -> nn.Module:
    torch.manual_seed(0)
    return Chain().eval()


def seconds_to_start_a_process() -> float:
    """How long a process with what trials import takes to start, on this machine with the load that it has."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import dovetail.tuning.trial_runner"], check=True)
    return time.monotonic() - start


@pytest.mark.timeout(600)
def test_a_tuned_model_computes_the_same_and_is_not_tuned_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = chain(), tmp_path / "store.db"
    budget = 30.0
    start = time.monotonic()
    plan = dovetail.tune(model, (X,), budget=budget, store=store, backends=[Works()], progress=False)
    seconds = time.monotonic() - start
    # The confirmation starts a process, which on a busy machine takes longer than a tenth of so small a budget.
    assert seconds < 1.1 * budget + 5.0 + 5.0 * seconds_to_start_a_process()
    (by_scope,) = plan.graphs.values()
    ((scope, decision),) = by_scope.items()
    assert scope.mode == "inference"
    assert decision.seconds is not None
    assert decision.runner_up is not None
    compiled = dovetail.compile(model, (X,), plan=plan, backends=[Works()], on_error="raise")
    torch.testing.assert_close(compiled(X), model(X))
    plan.save(tmp_path / "plan.json")
    Plan.load(tmp_path / "plan.json").check(model, (X,))

    def measure(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("dovetail.tuning.tune._executor", measure)
    again = dovetail.tune(model, (X,), budget=budget, store=store, backends=[Works()], progress=False)
    assert again.to_json() == plan.to_json()


def test_a_dry_run_counts_what_the_store_has() -> None:
    ready = prepared(Chain())
    with Store("sqlite://") as store:
        before = estimate(ready, store)
        run_search(ready, store, budget=1e6, executor=SyntheticDevice(ready.space, HALVED), progress=False)
        after = estimate(ready, store)
    assert before.stored == 0
    assert after.stored > 0
    assert after.compilations < before.compilations


def test_a_dry_run_measures_nothing_and_names_the_least_useful_budget(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    dry = dovetail.tune(chain(), (X,), store=store, backends=["openvino"], dry_run=True)
    assert isinstance(dry, DryRun)
    assert dry.stored == 0
    assert dry.measurements > dry.spaces[0].options
    assert dry.least_budget > 0
    assert dry.compilations > 0
    text = str(dry)
    assert "compilations" in text
    assert f"less than {dry.least_budget:.0f} s is not useful" in text
    with Store(store) as opened:
        assert list(opened.results(HERE)) == []


class Interrupted(SyntheticDevice):
    """Is interrupted by the user in one of its trials."""

    at = 12

    def measure(self, trial: Trial, timeout: float) -> Measurement:
        if len(self.trials) == self.at:
            self.trials.append(trial)
            raise KeyboardInterrupt
        return super().measure(trial, timeout)


def test_an_interrupt_keeps_the_best_so_far_and_the_next_search_goes_on(tmp_path: Path) -> None:
    ready = prepared(Chain())
    device = Interrupted(ready.space, HALVED)
    with Store(tmp_path / "store.db") as store:
        searched = run_search(ready, store, budget=1e6, executor=device, progress=False)
        assert searched.plan.graphs
        assert len(device.trials) == device.at + 1
        rest = SyntheticDevice(ready.space, HALVED)
        whole = run_search(ready, store, budget=1e6, executor=rest, progress=False)
        known = {trial.subject for trial in device.trials[: device.at]}
        assert known.isdisjoint(trial.subject for trial in rest.trials)
        assert whole.outcome is not None
        assert cost_of(whole, rest) < rest.model()


def test_an_interrupt_at_any_moment_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between trials too, and in the confirmation, whose search keeps the winner of the comparison before it."""
    ready = prepared(Chain())
    undisturbed = SyntheticDevice(ready.space, HALVED)
    with Store("sqlite://") as store:
        whole = run_search(ready, store, budget=1e6, executor=undisturbed, progress=False)
    assert whole.outcome is not None
    assert whole.outcome.noise is not None
    last = len(undisturbed.trials) - 1
    for at in (1, last // 2, last):
        device = Interrupted(ready.space, HALVED)
        device.at = at
        with Store("sqlite://") as store:
            searched = run_search(ready, store, budget=1e6, executor=device, progress=False)
        assert searched.plan.graphs
        assert searched.report.is_interrupted
    assert searched.outcome is not None
    assert searched.outcome.winner.program.key == whole.outcome.winner.program.key
    assert searched.outcome.noise == whole.outcome.noise
    assert not searched.outcome.is_confirmed

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for owner, name in (
        (ProgramSearch, "add_wholes"),
        (ProgramSearch, "add_states"),
        (DivisionSearch, "solve"),
        (search_module, "best_states"),
    ):
        with monkeypatch.context() as patched, Store("sqlite://") as store:
            patched.setattr(owner, name, interrupt)
            device = SyntheticDevice(ready.space, HALVED)
            searched = run_search(ready, store, budget=1e6, executor=device, progress=False)
            assert searched.plan.graphs, name


def test_a_finished_search_is_read_from_the_store_and_a_larger_budget_goes_on(tmp_path: Path) -> None:
    ready = prepared(Chain())
    with Store(tmp_path / "store.db") as store:
        plans: list[str] = []
        counts: list[int] = []
        for budget in (1e6, 1e6, 2e6):
            device = SyntheticDevice(ready.space, HALVED)
            searched = run_search(ready, store, budget=budget, executor=device, progress=False)
            plans.append(searched.plan.to_json())
            counts.append(len(device.trials))
            assert searched.report.measured > 0 or budget == 2e6
    assert counts[0] > 0
    assert counts[1:] == [0, 0]
    assert plans[0] == plans[1] == plans[2]


class NeedsMemory(SyntheticDevice):
    """Every region of backend "a" needs a gigabyte."""

    def measure(self, trial: Trial, timeout: float) -> Measurement:
        measured = super().measure(trial, timeout)
        is_large = isinstance(trial, RegionTrial) and trial.backend.name == "a"
        if isinstance(trial, ProgramTrial):
            is_large = '"name": "a"' in trial.program.plan
        return replace(measured, peak_bytes=2**30 if is_large else 2**10)


def test_a_program_that_needs_more_memory_than_allowed_does_not_win() -> None:
    costs = Costs(regions=lambda kind, seconds, backend: seconds * {"a": 0.3, "b": 0.8}[backend])
    ready = prepared(Chain())
    chosen: list[str] = []
    for memory in (None, 2**20):
        with Store("sqlite://") as store:
            device = NeedsMemory(ready.space, costs)
            searched = run_search(ready, store, budget=1e6, memory=memory, executor=device, progress=False)
        chosen.append(searched.plan.to_json())
    assert '"name": "a"' in chosen[0]
    assert '"name": "a"' not in chosen[1]
    assert '"name": "b"' in chosen[1]
    assert f"it needs {2**30} bytes, and the limit is {2**20}" in chosen[1]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Missing(nn.Module):
    pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 0}, "budget 0; give a positive number of seconds"),
        ({"budget": -1.5}, "budget -1.5"),
        ({"budget": float("nan")}, "budget nan"),
        ({"budget": float("inf")}, "budget inf"),
        ({"budget": True}, "budget True"),
        ({"budget": "60"}, "budget '60'"),
        ({"memory": 0}, "memory 0; give a number of bytes"),
        ({"memory": 1.5}, "memory 1.5"),
        ({"dry_run": "yes"}, "dry_run 'yes'; give True or False"),
        ({"executor": "threads"}, "executor 'threads'"),
        ({"store": 3}, "store is a int; give the path of a file, or a URL"),
        ({"backends": {"linear": "openvino"}}, "give a list of backends"),
        ({"backends": ["opnvino"]}, "openvino"),
        ({"sizes": []}, "sizes must be a list of example inputs"),
        ({"sizes": [(X,)]}, "no size differs"),
        ({"seed": "0"}, "seed '0'; give an integer"),
        ({"seed": -1}, "seed -1; give an integer of 0 or more"),
        ({"progress": 1}, "progress 1; give True or False"),
        ({"timeout": 3}, "give `budget`"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        dovetail.tune(chain(), (X,), **given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "message"),
    [
        (torch.relu, (X,), None, "tune takes a module"),
        (Chain(), [X], None, "args must be a tuple"),
        (Chain(), (X,), [X], "kwargs must be a dict"),
    ],
)
def test_what_is_not_a_model_with_inputs_is_refused(model: Any, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        dovetail.tune(model, args, kwargs)


def test_a_compiled_model_is_refused() -> None:
    compiled = dovetail.compile(chain(), (X,), backends=[])
    with pytest.raises(InvalidArgument, match="the model is compiled already"):
        dovetail.tune(compiled, (X,))


def test_a_model_that_cannot_be_captured_is_an_error_of_capturing() -> None:
    with pytest.raises(CaptureError):
        dovetail.tune(Branches().eval(), (X,))
    with pytest.raises(DovetailError):
        dovetail.tune(Missing().eval(), (X,))


def test_a_store_that_cannot_be_opened_is_an_error_and_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no folder"):
        dovetail.tune(chain(), (X,), store=tmp_path / "missing" / "store.db")
    text = tmp_path / "notes.txt"
    text.write_text("not a database, and longer than the header of one " * 10)
    with pytest.raises(StoreError, match=r"notes\.txt"):
        dovetail.tune(chain(), (X,), store=text)
    assert text.read_text().startswith("not a database")


def test_packages_that_are_missing_are_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.tuning.tune._PACKAGES", ("sqlalchemy", "no_such_package"))
    with pytest.raises(ModuleNotFoundError, match=r"no_such_package.*dovetail\[tune\]"):
        dovetail.tune(chain(), (X,))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_training_step_has_a_plan_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Chain().train()
    plan = dovetail.tune(model, (X,), budget=60, store=tmp_path / "s.db", backends=[Works()], progress=False)
    ((scope, _),) = next(iter(plan.graphs.values())).items()
    assert scope.mode == "training"
    expected = torch.autograd.grad(model(X).sum(), list(model.parameters()))
    compiled = dovetail.compile(model, (X,), plan=plan, backends=[Works()], on_error="raise")
    actual = torch.autograd.grad(compiled(X).sum(), list(model.parameters()))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.long
@pytest.mark.timeout(600)
def test_sizes_are_tuned_in_ranges_that_guards_choose_from(tmp_path: Path) -> None:
    model = chain()
    plan = dovetail.tune(
        model,
        (X,),
        sizes=[(torch.randn(64, 8),)],
        budget=90,
        store=tmp_path / "s.db",
        backends=[Works()],
        progress=False,
    )
    (((scope, tuned),),) = (by_scope.items() for by_scope in plan.sizes.values())
    assert (scope.mode, tuned) == ("inference", ((2, 16), (17, 64)))
    assert len(plan.graphs) == 2
    compiled = dovetail.compile(model, (X,), plan=plan, backends=[Works()])
    for rows in (4, 12, 17, 64):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(("error", "reason"), [(TuningError, "nothing"), (KeyboardInterrupt, "interrupted")])
def test_ranges_before_one_that_cannot_be_tuned_are_kept(
    error: type[BaseException], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    fails_at = 1
    calls = 0

    def searched(ready: Any, store: Store, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at + 1:
            raise error(reason)
        device = SyntheticDevice(ready.space, HALVED)
        return run_search(ready, store, budget=1e6, executor=device, progress=False)

    monkeypatch.setattr("dovetail.tuning.tune.run_search", searched)

    def tune() -> Plan:
        sizes = [(torch.randn(64, 8),)]
        return dovetail.tune(
            chain(), (X,), sizes=sizes, store="sqlite://", backends=[Planted("a")], progress=False
        )

    (((_, ranges),),) = (by_scope.items() for by_scope in tune().sizes.values())
    assert ranges == ((2, 16),)
    assert f"sizes from 17 to 64 are not in the plan: {reason}" in caplog.text
    fails_at, calls = 0, 0
    with pytest.raises(error):
        tune()


def test_the_plan_of_the_process_that_finished_first_is_the_plan_of_all() -> None:
    class FinishesBetween(Silent):
        """Another process finishes the same search after the first measurement of this one."""

        def done(self, trial: Trial, measurement: Measurement, *, is_stored: bool) -> None:
            if not plans:
                other = SyntheticDevice(ready.space, HALVED)
                plans.append(run_search(ready, store, budget=1e6, executor=other, progress=False).plan)

    ready, plans = prepared(Chain()), list[Plan]()
    with Store("sqlite://") as store:
        device = SyntheticDevice(ready.space, HALVED)
        second = run_search(ready, store, budget=1e6, executor=device, progress=FinishesBetween())
    assert second.outcome is None  # it is not this search's own
    assert second.plan.to_json() == plans[0].to_json()


def test_the_time_left_counts_what_was_used_before_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    ready = prepared(Chain())
    device = SyntheticDevice(ready.space, HALVED)
    with Store("sqlite://") as store:
        run_search(ready, store, budget=1000.0, executor=device, start=time.monotonic() - 400.0)
    first = capsys.readouterr().err.splitlines()[0]
    left = first.rpartition(" | ")[2]
    assert 400 < int(left.removesuffix(" s left")) <= 600


def test_the_time_for_the_comparison_is_used_where_nothing_is_measured_before_it() -> None:
    ready, clock = prepared(Chain()), FakeClock()
    device = SyntheticDevice(ready.space, HALVED, delay=0.02, clock=clock)
    with Store("sqlite://") as store:
        late = clock.now - 0.75 * 8.0
        searched = run_search(
            ready, store, budget=8.0, executor=device, start=late, clock=clock, progress=False
        )
    assert searched.outcome is not None
    assert searched.plan.graphs


class TakesTime(SyntheticDevice):
    """Trials take a tenth of a second, comparisons the time that they are given; each is stopped at its time-out."""

    def measure(self, trial: Trial, timeout: float) -> Measurement | None:  # type: ignore[override]
        assert self.clock is not None
        seconds = trial.seconds if isinstance(trial, ComparisonTrial) else self.delay
        self.trials.append(trial)
        self.clock.now += min(seconds, timeout)
        return None if seconds > timeout else self.answer(trial)


@pytest.mark.parametrize("budget", [10.0, 40.0, 400.0])
def test_a_search_ends_within_a_tenth_of_its_budget(budget: float) -> None:
    ready, clock = prepared(Chain()), FakeClock()
    device, start = TakesTime(ready.space, HALVED, delay=0.1, clock=clock), clock.now
    with Store("sqlite://") as store:
        searched = run_search(ready, store, budget=budget, executor=device, clock=clock, progress=False)
    assert searched.plan.graphs
    assert clock.now - start <= 1.1 * budget


def test_without_a_comparison_the_plan_is_not_slower_than_what_runs_without_dovetail() -> None:
    """Of torch.compile only the program without a plan was measured when the time ended, and it is the fastest."""

    class Ends(SyntheticDevice):
        def measure(self, trial: Trial, timeout: float) -> Measurement:
            is_planned = (
                isinstance(trial, ProgramTrial) and trial.program.name == "the model by torch.compile"
            )
            if is_planned or not isinstance(trial, ProgramTrial):
                raise KeyboardInterrupt
            return super().measure(trial, timeout)

    ready = prepared(Chain())
    device = Ends(ready.space, Costs(compiled=0.5, whole=lambda seconds, backend: 0.9 * seconds))
    with Store("sqlite://") as store:
        searched = run_search(ready, store, budget=1e6, executor=device, progress=False)
    (decision,) = next(iter(searched.plan.graphs.values())).values()
    assert decision.execution == "torch.compile"
    others = [a.choice for a in (decision.runner_up, *decision.rejected) if a is not None]
    assert "the model by torch.compile" not in others
    assert len(others) == len(set(others))


def test_a_search_without_any_measurement_is_an_error_with_what_to_do() -> None:
    ready = prepared(Chain())
    for budget, memory, message in (
        (1e-9, None, "Give a larger `budget`"),
        (1e6, 1, "Give a larger `memory`"),
    ):
        device = NeedsMemory(ready.space, HALVED)
        with Store("sqlite://") as store, pytest.raises(TuningError) as caught:
            run_search(ready, store, budget=budget, memory=memory, executor=device, progress=False)
        assert message in str(caught.value)


def test_the_failure_of_another_model_in_the_store_is_not_the_reason() -> None:
    class Fails(SyntheticDevice):
        def measure(self, trial: Trial, timeout: float) -> Measurement:
            return Measurement((), failure="the cache is full")

    ready, other = prepared(Chain()), prepared(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    with Store("sqlite://") as store:
        with pytest.raises(TuningError, match="no program of the model runs: the cache is full"):
            run_search(other, store, budget=1e6, executor=Fails(other.space, HALVED), progress=False)
        with pytest.raises(TuningError, match=r"nothing could be measured within 1e-09 s"):
            run_search(
                ready, store, budget=1e-9, executor=SyntheticDevice(ready.space, HALVED), progress=False
            )


def test_autocast_around_the_call_is_refused() -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InvalidArgument, match=r"under torch\.autocast"),
    ):
        dovetail.tune(chain(), (X,), dry_run=True)


class SlowToLoad(nn.Linear):
    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.environ.get(IN_WORKER):
            time.sleep(60)
        super().__setstate__(state)


def test_a_worker_that_does_not_start_in_time_ends_the_search() -> None:
    ready, start = prepare(SlowToLoad(8, 8).eval(), (X,), None, [Works()]), time.monotonic()
    with (
        Store("sqlite://") as store,
        pytest.raises(TuningError, match=r"nothing could be measured within 0\.2 s"),
    ):
        run_search(ready, store, budget=0.2, progress=False)
    assert time.monotonic() - start < 30


def test_without_a_comparison_times_are_those_that_were_measured() -> None:
    class Ends(SyntheticDevice):
        """Ends before the comparison; what each sample of a program is, is known."""

        def measure(self, trial: Trial, timeout: float) -> Measurement:
            if not isinstance(trial, ProgramTrial):
                raise KeyboardInterrupt
            measured.append(super().measure(trial, timeout))
            return measured[-1]

    measured: list[Any] = []
    ready = prepared(Chain())
    device = Ends(ready.space, Costs(whole=lambda seconds, backend: 0.5 * seconds), noise=0.2)
    with Store("sqlite://") as store:
        searched = run_search(ready, store, budget=1e6, executor=device, progress=False)
    (decision,) = next(iter(searched.plan.graphs.values())).values()
    known = {spread_of(each.samples) for each in measured}
    known |= {spread_of(each.details["reference"]) for each in measured}
    alternatives = [a for a in (decision.runner_up, *decision.rejected) if a is not None]
    assert decision.seconds in known
    assert {a.seconds for a in alternatives if a.seconds is not None} <= known
