"""Measurements of a store as traces of FlashInfer-Trace."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.tuning.measurement import Measurement, Subject
from dovetail.tuning.store import Store
from dovetail.tuning.tune import run_search
from tests.tuning.helpers import HERE, FakeClock
from tests.tuning.synthetic import Chain, Costs, SyntheticDevice, prepared

CORRECT = ("PASSED", "INCORRECT_NUMERICAL")


def fused() -> Any:
    torch.manual_seed(0)
    return dovetail.fuse(dovetail.capture(Chain().eval(), (torch.randn(4, 8),)))


def traces(folder: Path) -> list[dict[str, Any]]:
    lines = [
        line for path in sorted((folder / "traces").glob("*/*")) for line in path.read_text().splitlines()
    ]
    return [json.loads(line) for line in lines]


def check_trace(trace: dict[str, Any], folder: Path) -> None:
    """Check what the data model of flashinfer-bench 0.1.2 requires of a trace."""
    assert trace.keys() == {"definition", "workload", "solution", "evaluation"}
    (workloads,) = (folder / "workloads").rglob(f"{trace['definition']}.jsonl")
    assert trace["workload"] == json.loads(workloads.read_text())["workload"]
    evaluation = trace["evaluation"]
    assert evaluation["environment"]["hardware"]
    assert all(isinstance(value, str) for value in evaluation["environment"]["libs"].values())
    assert evaluation["timestamp"]
    assert ("correctness" in evaluation) == (evaluation["status"] in CORRECT)
    assert ("performance" in evaluation) == (evaluation["status"] == "PASSED")


def test_what_a_search_measured_are_traces_of_its_regions(tmp_path: Path) -> None:
    ready = prepared(Chain(), torch.randn(4, 8))
    with Store(tmp_path / "store.db") as store:
        run_search(ready, store, budget=1e6, executor=SyntheticDevice(ready.space, Costs()), progress=False)
    dataset = dovetail.to_flashinfer_trace(fused(), tmp_path / "a", store=tmp_path / "store.db")
    written = traces(tmp_path / "a")
    assert len(written) == dataset.traces >= 2 * len(dataset.definitions)
    assert {trace["definition"] for trace in written} == set(dataset.definitions)
    for trace in written:
        check_trace(trace, tmp_path / "a")
        assert trace["evaluation"]["status"] == "PASSED"
        assert trace["evaluation"]["performance"]["speedup_factor"] > 0
    without = dovetail.to_flashinfer_trace(fused(), tmp_path / "b")
    assert without.traces == 0
    assert not (tmp_path / "b" / "traces").exists()


REFUSED = "LoweringError: region 'r', backend 'a': "


@pytest.mark.parametrize(
    ("result", "status", "error"),
    [
        (Measurement((0.002, 0.004, 0.003), numeric_error=1e-7, details={"reference": [0.006]}), "PASSED", 1e-7),
        (Measurement((0.003,)), "PASSED", 0.0),
        (Measurement((0.003,), numeric_error=math.inf), "PASSED", "Infinity"),
        (Measurement((), failure=f"{REFUSED}verify: result 0 is off by 2"), "INCORRECT_NUMERICAL", "NaN"),
        (Measurement((), failure=f"{REFUSED}trial: result 0 has shape (2,), not (3,)."), "INCORRECT_SHAPE", None),
        (Measurement((), failure=f"{REFUSED}trial: result 0 has dtype torch.half"), "INCORRECT_DTYPE", None),
        (Measurement((), failure=f"{REFUSED}compile: KeyError: 'x'"), "COMPILE_ERROR", None),
        (Measurement((), failure="it took longer than 180 s and was stopped"), "TIMEOUT", None),
        (Measurement((), failure="the process died of SIGSEGV"), "RUNTIME_ERROR", None),
    ],
)  # fmt: skip
def test_a_measurement_is_a_trace(tmp_path: Path, result: Measurement, status: str, error: Any) -> None:
    gm = fused()
    key = dovetail.regions(gm)[0].key
    subjects = [Subject("body", key, "f32[4, 8]", "a 1 {}", mode) for mode in ("inference", "training")]
    clock = FakeClock()
    with Store(tmp_path / "store.db", clock=clock) as store:
        store.add([(subject, result) for subject in subjects], HERE)
        store.add([(Subject("body", "another body", "", "a", "inference"), result)], HERE)
    dovetail.to_flashinfer_trace(gm, tmp_path, store=tmp_path / "store.db")
    (trace,) = traces(tmp_path)
    check_trace(trace, tmp_path)
    assert trace["solution"] == "a 1 {}"
    evaluation = trace["evaluation"]
    assert evaluation["status"] == status
    assert evaluation["log"] == result.failure
    assert evaluation["timestamp"] == "1970-01-01T00:16:40+00:00"
    assert evaluation["environment"]["libs"] == {
        "torch": "2.13.0",
        "python": "3.11.7",
        "onnxruntime": "1.31.1",
    }
    if error is not None:
        assert evaluation["correctness"]["max_relative_error"] == error
    if result.samples:
        assert evaluation["performance"]["latency_ms"] == pytest.approx(3.0)
    if "reference" in result.details:
        assert evaluation["performance"]["reference_latency_ms"] == pytest.approx(6.0)
        assert evaluation["performance"]["speedup_factor"] == pytest.approx(2.0)


def test_a_store_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dovetail.StoreError, match="does not exist"):
        dovetail.to_flashinfer_trace(fused(), tmp_path / "out", store=tmp_path / "absent.db")
    assert not list(tmp_path.iterdir())
