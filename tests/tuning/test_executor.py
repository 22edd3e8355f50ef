"""Trials in worker processes: results, crashes, hangs and wrong values."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.errors import InvalidArgument
from dovetail.lowering.backend_protocol import Backend
from dovetail.outlining.region import Region
from dovetail.tuning.executor import (
    Executor,
    InProcess,
    LocalExecutor,
    ProcessExecutor,
    can_interrupt,
    interrupted_after,
)
from dovetail.tuning.preparation import Prepared, prepare
from dovetail.tuning.store import Store
from dovetail.tuning.trial import (
    BlockDivision,
    DivisionsTrial,
    OperationsTrial,
    ProgramSpec,
    ProgramTrial,
    RegionTrial,
)
from dovetail.tuning.tune import _executor, run_search
from tests.tuning.failing_backends import (
    Crashes,
    ExhaustsMemory,
    Hangs,
    IsWrong,
    Loops,
    LoopsOn,
    Raises,
    Works,
)
from tests.tuning.synthetic import Chain

BACKENDS = [Works(), Raises(), Crashes(), Hangs(), IsWrong(), ExhaustsMemory()]


@pytest.fixture(scope="module")
def ready() -> Prepared:
    torch.manual_seed(0)
    return prepare(Chain().eval(), (torch.randn(4, 8),), None, BACKENDS)


@pytest.fixture(scope="module")
def executor(ready: Prepared) -> Iterator[LocalExecutor]:
    running = LocalExecutor(ready.tuned, ready.backends)
    for space in ready.space.blocks.values():
        running.add_block(space.block)
    yield running
    running.close()


def region_trial(ready: Prepared, backend: str) -> RegionTrial:
    key = next(iter(ready.space.states[0].blocks))
    space = ready.space.blocks[key]
    number = next(i for i, c in enumerate(space.candidates) if len(c.units) > 1)
    candidate = space.candidates[number]
    choice = next(c for c in space.backends[number] if c.name == backend)
    return RegionTrial("inference", key, candidate.choice, candidate.key, "", choice, backend)


def test_operations_and_a_region_are_measured(ready: Prepared, executor: LocalExecutor) -> None:
    key = next(iter(ready.space.states[0].blocks))
    operations = executor.measure(OperationsTrial("inference", key, ""), 60)
    assert operations is not None
    assert not operations.failure
    rows = operations.details["operations"]
    assert isinstance(rows, list)
    assert len(rows) == len(ready.space.blocks[key].block.units)
    region = executor.measure(region_trial(ready, "works"), 60)
    assert region is not None
    assert not region.failure
    assert region.numeric_error == 0.0
    assert len(region.samples) >= 3


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("raises", "no kernel for this"),
        ("crashes", "SIGABRT"),
        ("is_wrong", "is_wrong"),
        ("exhausts_memory", "exhausts_memory"),
    ],
)
def test_a_failure_has_its_reason_and_the_next_trial_runs(
    ready: Prepared, executor: LocalExecutor, backend: str, reason: str
) -> None:
    failed = executor.measure(region_trial(ready, backend), 60)
    assert failed is not None
    assert not failed.samples
    assert reason in failed.failure
    worked = executor.measure(region_trial(ready, "works"), 60)
    assert worked is not None
    assert worked.samples


@pytest.mark.long
def test_a_spare_process_takes_the_place_of_one_that_ended_unless_it_ended_too(
    ready: Prepared, executor: LocalExecutor
) -> None:
    running = ProcessExecutor(executor.files, has_spare=True)
    trial = region_trial(ready, "works")
    try:
        for is_lost in (False, True):
            running.check()
            spare = running._spare
            assert spare is not None
            if is_lost:
                spare.signal()
                spare._process.wait()
            running.restart()
            measured = running.measure(trial, 60)
            assert measured is not None
            assert measured.samples
            assert (running._process is spare) == (not is_lost)
            assert running._spare is None
            running.restart()
        running.check()
        spare = running._spare
    finally:
        running.close()
    assert spare is not None
    assert not spare.is_running


def test_a_trial_that_hangs_is_stopped(ready: Prepared, executor: LocalExecutor) -> None:
    assert executor.measure(region_trial(ready, "hangs"), 2.0) is None
    worked = executor.measure(region_trial(ready, "works"), 60)
    assert worked is not None
    assert worked.samples


def test_a_division_that_fails_leaves_the_others(ready: Prepared, executor: LocalExecutor) -> None:
    good, bad = region_trial(ready, "works"), region_trial(ready, "raises")
    divisions = tuple(BlockDivision(((t.region, t.backend),)) for t in (good, bad))
    measured = executor.measure(DivisionsTrial("inference", good.block, "", divisions, ""), 60)
    assert measured is not None
    assert measured.samples
    assert set(measured.details["divisions"]) == {"0"}  # type: ignore[arg-type]
    assert "no kernel" in measured.details["failures"]["1"]  # type: ignore[index, call-overload, operator]


def test_the_model_itself_is_a_program(ready: Prepared, executor: LocalExecutor) -> None:
    measured = executor.measure(ProgramTrial("inference", "m", "", ProgramSpec("eager", "eager"), ""), 60)
    assert measured is not None
    assert measured.samples
    assert measured.numeric_error == 0.0


def ready_for(model: nn.Module, backend: Backend) -> Prepared:
    return prepare(model.eval(), (torch.randn(4, 8),), None, [backend])


def with_blocks(running: Executor, ready: Prepared) -> Executor:
    for space in ready.space.blocks.values():
        running.add_block(space.block)
    return running


EAGER = ProgramTrial("inference", "m", "", ProgramSpec("eager", "eager"), "")


def test_local_classes_and_lambdas_are_sent_by_value() -> None:
    class Activation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = lambda x: torch.relu(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(8, 8), Activation()

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.act, Activation)
            return self.act(self.linear(x))

    class Inner(Works):
        name = "inner"

        def supports(self, region: Region) -> Any:
            return type(self) is Inner

    ready = ready_for(Model(), Inner())
    running = LocalExecutor(ready.tuned, ready.backends)
    try:
        with_blocks(running, ready)
        for trial in (EAGER, region_trial(ready, "inner")):
            measured = running.measure(trial, 60)
            assert measured is not None
            assert not measured.failure
            assert measured.samples
    finally:
        running.close()


class Owned(nn.Module):
    """Refers to its owner weakly, which no process can be sent; its copies share the owner."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.owner = nn.Linear(8, 8), weakref.ref(BACKENDS[0])

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def test_what_cannot_be_sent_is_measured_in_this_process() -> None:
    ready = ready_for(Owned(), Works())
    with pytest.raises(InvalidArgument, match="the model cannot be sent to another process"):
        LocalExecutor(ready.tuned, ready.backends)
    inline = with_blocks(InProcess(ready.tuned, ready.backends), ready)
    for trial in (EAGER, region_trial(ready, "works")):
        measured = inline.measure(trial, 60)
        assert measured is not None
        assert measured.samples


def test_a_model_that_cannot_even_be_copied_is_an_error_with_the_reason() -> None:
    model = Owned()
    model.lock = threading.Lock()  # type: ignore[assignment]
    ready = ready_for(model, Works())
    with pytest.raises(InvalidArgument, match=r"neither be sent to another process nor be copied: .*lock"):
        InProcess(ready.tuned, ready.backends).measure(EAGER, 60)


@pytest.mark.parametrize("backend", [Loops(), LoopsOn()], ids=["loops", "catches all errors"])
def test_a_trial_that_loops_in_this_process_is_stopped(backend: Backend) -> None:
    ready = ready_for(Owned(), backend)
    inline = with_blocks(InProcess(ready.tuned, [backend]), ready)
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    start = time.monotonic()
    assert inline.measure(region_trial(ready, backend.name), 0.5) is None
    assert time.monotonic() - start < 20
    assert signal.getsignal(signal.SIGALRM) is handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (timer > 0)
    measured = inline.measure(EAGER, 60)
    assert measured is not None
    assert measured.samples


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """What an alarm of the caller records, with the one that was set before kept."""
    left = signal.setitimer(signal.ITIMER_REAL, 0)
    rung: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    yield rung
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *left)


def test_a_timer_of_the_caller_goes_on(alarms: list[int]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 3600.0)
    assert interrupted_after(0.2, lambda: time.sleep(60)) is None
    assert interrupted_after(600, lambda: "done") == "done"
    assert alarms == []
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 3599.9
    # One that is due meanwhile rings afterwards.
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    assert interrupted_after(600, lambda: time.sleep(0.3) or "done") == "done"
    until = time.monotonic() + 60
    while not alarms and time.monotonic() < until:
        time.sleep(0.01)
    assert alarms == [signal.SIGALRM]


def test_a_time_out_of_the_code_itself_is_its_own_error(alarms: list[int]) -> None:
    def refused() -> None:
        raise TimeoutError("a lock was not free")

    with pytest.raises(TimeoutError, match="a lock was not free"):
        interrupted_after(60, refused)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize("on_main_thread", [True, False])
def test_the_warning_names_what_is_not_enforced(
    on_main_thread: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ready = ready_for(Owned(), Works())
    chosen: list[object] = []

    def choose() -> None:
        assert can_interrupt() is on_main_thread
        chosen.append(_executor(ready, Store("sqlite://"), "local"))

    with caplog.at_level("WARNING", "dovetail"):
        if on_main_thread:
            choose()
        else:
            thread = threading.Thread(target=choose)
            thread.start()
            thread.join()
    assert isinstance(chosen[0], InProcess)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("trials run in this process, where a crash ends the search")
    assert ("a trial that hangs is not stopped" in text) is not on_main_thread


WITHOUT_GUARD = """
import logging, sys, torch, dovetail
from tests.tuning.failing_backends import Works
logging.basicConfig()

class Act(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act = torch.nn.Linear(8, 8), Act()

    def forward(self, x):
        assert isinstance(self.act, Act)
        return self.act(self.linear(x))

class Own(Works):
    name = "own"

print("runs", flush=True)
x = torch.randn(4, 8)
plan = dovetail.tune(Net().eval(), (x,), budget=60, store=sys.argv[1], backends=[Own()], progress=False)
print(len(plan.graphs))
"""
WITH_OPERATOR = """
import logging, sys, torch, dovetail
from tests.tuning.failing_backends import Works
logging.basicConfig()

@torch.library.custom_op("script::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x):
    return torch.empty_like(x)

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.relu(twice(x)) + 1

if __name__ == "__main__":
    print("runs", flush=True)
    x = torch.randn(4, 8)
    plan = dovetail.tune(Net().eval(), (x,), budget=60, store=sys.argv[1], backends=[Works()], progress=False)
    print(len(plan.graphs))
"""


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "text", [WITHOUT_GUARD, WITH_OPERATOR], ids=["no guard", "an operator of the script"]
)
def test_a_script_that_defines_its_model_is_tuned_in_a_worker(tmp_path: Path, text: str) -> None:
    script, store = tmp_path / "script.py", tmp_path / "store.db"
    script.write_text(text)
    root = Path(__file__).parents[2]
    source = str(Path(dovetail.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script), str(store)],
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["runs", "1"]
    assert "trials run in this process" not in done.stderr
    with Store(store) as opened:
        # The script's own environment: it may have another number of threads.
        (environment,) = opened.environments()
        failures = [m.failure for _, m in opened.results(environment) if m.failure]
        kinds = {subject.kind for subject, m in opened.results(environment) if m.samples}
    assert failures == []
    assert {"program", "body"} <= kinds


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_search_with_backends_that_fail_ends_with_one_that_works(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ready = prepare(Chain().eval(), (torch.randn(4, 8),), None, [Works(), Raises(), Crashes(), IsWrong()])
    with Store(tmp_path / "store.db") as store:
        searched = run_search(ready, store, budget=150, progress=False)
        failures = [m.failure for _, m in store.results(ready.environment) if m.failure]
    assert any("SIGABRT" in f for f in failures)
    assert searched.outcome is not None
    text = searched.plan.to_json()
    for name in ("raises", "crashes", "is_wrong"):
        assert f'"name": "{name}"' not in text
