"""Compiling in processes of their own: what happens there costs one body, and nothing is left running."""

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import dovetail
from dovetail import LoweringError
from dovetail.lowering.compile_unit import unit_of
from dovetail.lowering.guards import specialization_of
from dovetail.lowering.lower import lower
from dovetail.lowering.worker_process import WorkerFailed, Workers, cancelled_by
from tests.lowering import faulty
from tests.lowering.helpers import Event, events

KINDS = ("works", "raises", "crashes", "hangs", "stays")


def many(x: Tensor) -> Tensor:
    for i in range(len(KINDS)):
        x = torch.relu(x + i) * 0.5
    return x


def program() -> GraphModule:
    gm = dovetail.capture(many, (torch.ones(2, 3),))
    for i, kind in enumerate(KINDS):
        end = f"_{i}" if i else ""
        gm = dovetail.outline(gm, [f"add{end}", f"relu{end}", f"mul{end}"], kind=kind)
    return gm


def small() -> GraphModule:
    def scaled(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    return dovetail.outline(dovetail.capture(scaled, (torch.ones(3),)), ["relu", "mul"], kind="k")


class HangsAtOnce(faulty.Hangs):
    timeout = 0.5

    def __init__(self) -> None:
        super().__init__(Path(os.devnull))


@pytest.fixture(scope="module")
def lowered() -> GraphModule:
    """One graph with a region for each way to end, all compiled at the same time."""
    sound = faulty.Sound()
    backends = {
        "works": faulty.InWorker(),
        "raises": [faulty.RaisesInWorker(), sound],
        "crashes": [faulty.Crashes(), sound],
        "hangs": [HangsAtOnce(), sound],
        "stays": [faulty.CannotTravel()],
    }
    faulty.InWorker.compiled_by.clear()
    return lower(program(), backends, cache=False)


def of(gm: GraphModule, region: str) -> list[Event]:
    return [e for e in events(gm) if e.region == region]


def test_values_are_right_whatever_happened(lowered: GraphModule) -> None:
    x = torch.randn(2, 3)
    assert torch.equal(lowered(x), many(x))


def test_code_comes_from_another_process(lowered: GraphModule) -> None:
    (event,) = of(lowered, "works_0")
    assert (event.backend, event.outcome) == ("in_worker", "compiled")
    (number,) = faulty.InWorker.compiled_by
    assert number != os.getpid()


@pytest.mark.parametrize(
    ("region", "backend", "stage", "reason"),
    [
        ("raises_0", "raises_in_worker", "compile", "ValueError: cannot make raises of torch.float32"),
        ("crashes_0", "crashes", "compile", "its process died of SIGSEGV"),
        ("hangs_0", "hangs", "compile", "it took longer than 0.5 s and was killed"),
    ],
)
def test_what_goes_wrong_there_costs_one_body(
    lowered: GraphModule, region: str, backend: str, stage: str, reason: str
) -> None:
    first, second = of(lowered, region)
    assert (first.backend, first.outcome, first.reason) == (backend, stage, reason)
    assert (second.backend, second.outcome) == ("sound", "compiled")


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "stage", "reason"),
    [
        (faulty.Exits(), "compile", "its process ended with status 3 and no result"),
        (faulty.LoadRaises(), "load", "OSError: torn"),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_a_process_may_end_in_other_ways(backend: Any, stage: str, reason: str) -> None:
    gm = small()
    ended = lower(gm, [backend, faulty.Sound()], cache=False)
    assert [(e.backend, e.outcome, e.reason) for e in events(ended)] == [
        (backend.name, stage, reason),
        ("sound", "compiled", ""),
    ]


def test_the_trace_shows_where_it_went_wrong(lowered: GraphModule) -> None:
    assert "faulty.py" in of(lowered, "raises_0")[0].trace
    assert "Segmentation fault" in of(lowered, "crashes_0")[0].trace


def test_what_cannot_be_sent_is_reported(lowered: GraphModule) -> None:
    (event,) = of(lowered, "stays_0")
    assert event.reason.startswith("its backend cannot be sent to a process of its own: ")
    assert "lambda" in event.reason


def test_a_class_of_the_running_script_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulty.InWorker, "__module__", "__main__")
    gm = small()
    with pytest.raises(LoweringError, match="the class InWorker is in the script that runs") as caught:
        lower(gm, faulty.InWorker(), cache=False, on_error="raise")
    assert isinstance(caught.value.__cause__, WorkerFailed)


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_job_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    unit = unit_of(dovetail.regions(small())[0])
    note, stop, failed = tmp_path / "note", threading.Event(), list[str]()
    wait = Workers()(faulty.Hangs(note), unit, specialization_of((torch.ones(3),)))

    def run() -> None:
        try:
            with cancelled_by(stop):
                wait()
        except WorkerFailed as error:
            failed.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    until = time.monotonic() + 120
    while not (note.exists() and len(note.read_text().split()) == 2) and time.monotonic() < until:
        time.sleep(0.05)
    numbers = [int(n) for n in note.read_text().split()]
    assert all(map(is_running, numbers))
    stop.set()
    thread.join(30)
    assert failed == ["it was cancelled"]
    until = time.monotonic() + 60
    while any(map(is_running, numbers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_running, numbers))


@pytest.mark.parametrize("is_logged", [True, False])
def test_progress_is_logged_where_it_is_asked_for(is_logged: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dovetail"):
        lower(small(), faulty.Sound(), cache=False, progress=is_logged)
    assert caplog.messages == ["lowering: 1 of 1 bodies, k_0"] * is_logged


def test_nothing_is_shown_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    lower(small(), faulty.Sound(), cache=False)
    assert capsys.readouterr() == ("", "")
