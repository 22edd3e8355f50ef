"""Workers in processes of their own, which measure for a search on a device with planted costs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import InvalidArgument
from dovetail.tuning.environment import current_environment
from dovetail.tuning.measuring import pause_after
from dovetail.tuning.store import Store
from dovetail.tuning.trial_queue import OpenSearch
from dovetail.tuning.tune import run_search
from dovetail.tuning.worker import only_visible, run_worker, why_refused
from tests.tuning.synthetic import Chain, prepared

HERE = current_environment()


def outcome(case: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.tuning.queue_processes", case, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(900)
def test_two_workers_reach_the_plan_of_a_local_search_although_some_are_killed(tmp_path: Path) -> None:
    happened = outcome("two", tmp_path)
    assert happened["plans are equal"]
    assert happened["stores are equal"]
    assert happened["kills"] >= 1
    assert happened["repeated"] <= happened["kills"]
    assert happened["codes"] == [0, 0]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_worker_leaves_a_search_that_ended_and_serves_the_next(tmp_path: Path) -> None:
    happened = outcome("withdrawn", tmp_path)
    assert happened["is_found"]
    assert happened["left"] == [0, 0, 0, 0]
    assert happened["codes"] == [0]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_worker_of_another_environment_refuses_with_what_differs(tmp_path: Path) -> None:
    happened = outcome("refused", tmp_path)
    assert "openvino 0.1, was " in happened["message"]
    assert "start 'dovetail worker' with the store" in happened["message"]
    assert not happened["measured"]
    assert happened["codes"] == [0]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_more_workers_reach_the_same_plan_in_less_time(tmp_path: Path) -> None:
    happened = outcome("scaling", tmp_path)
    assert happened["plans are equal"]
    assert happened["repeated"] == 0
    one, two, four = happened["seconds"]
    # At most 1.94 and 3.59, for trials of a phase wait for those of the one before; less where others use the cores.
    assert one / two > 1.6
    assert one / four > 2.9


def changed(**values: Any) -> OpenSearch:
    return OpenSearch("name", "label", replace(HERE, **values))


def test_threads_and_settings_are_those_of_the_search() -> None:
    assert not why_refused(changed(threads=1, settings=(("matmul", "high"),)), HERE)
    assert "cores, for 100000 threads" in why_refused(changed(threads=100000), HERE)


def test_trials_of_another_release_are_refused() -> None:
    search = OpenSearch("name", "label", HERE, "0.0.1")
    assert why_refused(search, HERE).endswith(", was 0.0.1")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"device": "cuda: NVIDIA H200, sm_90"}, "device cpu: "),
        ({"torch": "2.11.0"}, "was 2.11.0"),
        ({"python": "3.14.0"}, "was 3.14.0"),
        ({"packages": (*HERE.packages, ("triton", "9.9"))}, "triton not installed, was 9.9"),
    ],
)
def test_what_differs_is_the_reason(values: dict[str, Any], reason: str) -> None:
    assert reason in why_refused(changed(**values), HERE)


@pytest.mark.parametrize("executor", ["workers", "ray"])
def test_a_store_that_workers_cannot_reach_is_refused(executor: Any) -> None:
    model, x = torch.nn.Linear(2, 2).eval(), torch.randn(1, 2)
    for store in (None, "sqlite://"):
        with pytest.raises(InvalidArgument, match="needs a store that workers reach"):
            dovetail.tune(model, (x,), budget=5, store=store, executor=executor, backends=[], progress=False)


@pytest.mark.parametrize("executor", ["workers", "ray"])
def test_a_model_on_another_gpu_than_the_first_is_refused(tmp_path: Path, executor: Any) -> None:
    ready = prepared(Chain())
    ready.tuned.device = torch.device("cuda:1")
    with (
        Store(tmp_path / "store.db") as store,
        pytest.raises(InvalidArgument, match="the model is on 'cuda:1': move it to 'cuda:0'"),
    ):
        run_search(ready, store, budget=5.0, executor=executor, progress=False)


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cpu", "4,7", {}),
        ("cuda", None, {"CUDA_VISIBLE_DEVICES": "0"}),
        ("cuda:1", None, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("cuda:1", "4, 7", {"CUDA_VISIBLE_DEVICES": "7"}),
        ("cuda:0", "GPU-8a2f,GPU-1c3d", {"CUDA_VISIBLE_DEVICES": "GPU-8a2f"}),
    ],
)
def test_trials_have_the_gpu_of_their_worker_as_the_first(
    device: str, visible: str | None, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert only_visible(torch.device(device)) == expected


def test_pauses_grow_with_the_time_waited() -> None:
    assert [pause_after(seconds) for seconds in (0.0, 1.0, 60.0)] == [0.02, 0.1, 0.5]


def test_executors_have_names() -> None:
    with pytest.raises(InvalidArgument, match="there are 'local', 'workers', 'ray'"):
        dovetail.tune(torch.nn.Linear(2, 2).eval(), (torch.randn(1, 2),), executor="slurm")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"store": "sqlite://"}, "a store in memory has no workers"),
        ({"device": "cuda:77"}, "device 'cuda:77' cannot be used"),
        ({"device": "nonsense"}, "device 'nonsense' cannot be used"),
        ({"idle": -1.0}, "idle -1.0; give a number of seconds"),
        ({"idle": float("nan")}, "idle nan; give a number of seconds"),
    ],
)
def test_wrong_options_of_a_worker_are_named(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        run_worker(options.pop("store", str(tmp_path / "store.db")), **options)


def test_a_worker_ends_when_it_has_been_idle(tmp_path: Path) -> None:
    lines: list[str] = []
    assert run_worker(str(tmp_path / "store.db"), idle=0.1, report=lines.append) == 0
    assert "takes trials from" in lines[0]
