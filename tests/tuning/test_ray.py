"""Workers on Ray, on clusters of local nodes that are lost, join late, or have other devices."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import dovetail
from dovetail.errors import InvalidArgument, TuningError
from dovetail.tuning import ray_engine
from dovetail.tuning.environment import current_environment
from dovetail.tuning.ray_engine import RayEngine
from dovetail.tuning.store import Store

MARK = "DOVETAIL_TEST_MARK"
FILE = cast("Store", SimpleNamespace(url="/measurements.db", name="/measurements.db"))


def command(case: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.tuning.ray_processes", case, str(folder)]


def outcome(case: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(command(case, folder), capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    # Ray prints nothing there.
    (line,) = done.stdout.splitlines()
    return json.loads(line)


@pytest.mark.timeout(600)
def test_a_search_reaches_the_plan_of_a_local_one_although_nodes_are_lost_and_join_late(
    tmp_path: Path,
) -> None:
    lost = outcome("nodes", tmp_path)
    assert lost["plans are equal"]
    assert lost["stores are equal"]
    # Two nodes were lost, each with one trial at most.
    assert lost["repeated"] <= 2
    assert lost["workers"] == 3
    assert any("takes no trials" in line and "openvino 0.1, was " in line for line in lost["warnings"])
    assert any("was lost with its node" in line for line in lost["warnings"])
    assert lost["left"] == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_interrupts_end_workers_and_gpus_are_asked_for_by_their_kind(tmp_path: Path) -> None:
    happened = outcome("slots", tmp_path)
    interrupted = happened["interrupted"]
    assert interrupted["is interrupted"]
    assert interrupted["has a program"]
    assert interrupted["repeated"] <= 1
    assert interrupted["left"] == 0
    placed = happened["placed"]
    assert placed["is possible"]
    assert placed["is placed right"]
    assert "the URL of the store has an option that there is not" in placed["no store"]
    assert "no node of the Ray cluster has a GPU of the kind 'NVIDIA B200'" in placed["no kind"]
    assert "1 CPU, 1 GPU (A100)" in placed["no kind"]
    assert "no node of the Ray cluster has 64 CPUs, the threads of the search" in placed["no cores"]
    assert happened["files"] > 20
    assert not happened["is shown"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_interrupt_at_the_terminal_ends_the_cluster_that_the_search_started(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "RAY_ADDRESS": "local"}
    process = subprocess.Popen(
        command("alone", tmp_path), env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    log, until = tmp_path / "alone.log", time.monotonic() + 200.0
    while not log.exists() or len(log.read_text().splitlines()) < 5:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    assert len(marked(mark)) > 5
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    happened = json.loads(output)
    assert len(happened) == 4
    assert all(happened.values()), happened
    until = time.monotonic() + 20.0
    while marked(mark):
        assert time.monotonic() < until, marked(mark)
        time.sleep(0.1)


def marked(mark: str) -> list[str]:
    """The command lines of processes with a mark in their environment."""
    lines: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                lines.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return lines


@pytest.mark.long
@pytest.mark.timeout(600)
def test_tune_starts_a_cluster_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", "local")
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(), torch.randn(2, 8)
    options: dict[str, Any] = {"store": tmp_path / "store.db", "backends": []}
    plan = dovetail.tune(model, (x,), budget=90.0, executor="ray", **options)
    assert plan.graphs
    assert not ray.is_initialized()
    output, progress = capfd.readouterr()
    assert not output
    assert all(line.startswith("dovetail.tune: ") for line in progress.splitlines())
    assert "baselines" in progress
    again = dovetail.tune(model, (x,), budget=90.0, executor="ray", **options)
    assert again.to_json() == plan.to_json()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_store_on_a_server_is_reached_with_a_password_that_nothing_shows(
    tmp_path: Path, postgresql: Any
) -> None:
    postgresql.execute("CREATE ROLE \"Uw4kz\" LOGIN PASSWORD 'Zq7xj@Zq7xj'")
    postgresql.execute('CREATE DATABASE ray OWNER "Uw4kz"')
    (tmp_path / "url").write_text(postgresql.tcp_url("Uw4kz", "Zq7xj@Zq7xj", database="ray"))
    happened = outcome("server", tmp_path)
    assert happened["plans are equal"]
    assert happened["workers"] == 2
    assert happened["files"] > 20
    assert not happened["is shown"]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_more_slots_reach_the_same_plan_in_less_time(tmp_path: Path) -> None:
    happened = outcome("scaling", tmp_path)
    assert happened["plans are equal"]
    one, two, four = happened["seconds"]
    assert one / two > 1.6
    assert one / four > 2.9


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs ray, which is not installed; pip install 'dovetail\[ray\]'"
    ):
        ray_engine.require_ray()


def test_a_node_without_dovetail_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'dovetail'", name="dovetail")

    monkeypatch.setattr("dovetail.tuning.worker.serve", missing)
    assert "dovetail is not installed there" in ray_engine._worker_class()().run("url", "cpu")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_an_address_at_which_no_cluster_is_is_an_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(TuningError, match=f"RAY_ADDRESS.*{address}|{address}.*RAY_ADDRESS"):
        RayEngine(FILE, torch.device("cpu"), current_environment())


def test_the_address_of_a_cluster_that_ended_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _: "127.0.0.1:1")
    assert ray_engine._cluster_address() == ""
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _: None)
    assert ray_engine._cluster_address() == ""


def test_devices_without_slots_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="has slots for CPUs and CUDA, and the model is on 'xpu'"):
        RayEngine(FILE, torch.device("xpu"), current_environment())


def node(number: int, host: str, **resources: float) -> dict[str, Any]:
    identity = str(number).ljust(56, "0")
    return {
        "NodeID": identity,
        "NodeManagerAddress": host,
        "NodeManagerHostname": host,
        "Alive": True,
        "Resources": resources,
    }


class FakeRay:
    """Nodes, and workers that never become ready."""

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self.present = list(nodes)

    def nodes(self) -> list[dict[str, Any]]:
        return self.present

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: self.present[0]["NodeID"])

    def remote(self, actor: type) -> Any:
        method = SimpleNamespace(remote=lambda *arguments: object())
        methods = SimpleNamespace(is_ready=method, run=method, stop=method)
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: methods))

    def wait(self, references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [], references

    def kill(self, actor: Any, **_: Any) -> None: ...


def engine(monkeypatch: pytest.MonkeyPatch, fake: FakeRay, *, device: str = "cpu") -> RayEngine:
    monkeypatch.setattr(ray_engine, "_connected", lambda *_: fake)
    monkeypatch.setattr(ray_engine, "_LOOK_SECONDS", 0.0)
    name = f"{device}: NVIDIA H200, sm_90"
    return RayEngine(FILE, torch.device(device), replace(current_environment(), threads=4, device=name))


def test_a_node_has_as_many_slots_as_the_threads_of_the_search_fit_into_its_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRay(node(1, "a", CPU=11.0), node(2, "a", CPU=3.0), node(3, "a"))
    present = engine(monkeypatch, fake)
    assert present.supervise() == ""
    assert list(present.workers) == [(node(1, "a")["NodeID"], 0), (node(1, "a")["NodeID"], 1)]
    assert present.why_waiting().startswith(
        "2 workers on Ray start, or wait for slots that others use: a (10000000): 11 CPUs"
    )
    fake.present.append(node(4, "a", CPU=4.0))
    assert present.supervise() == ""
    assert len(present.workers) == 3


def test_searches_on_a_gpu_have_workers_where_its_kind_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(kind: str, count: float = 1.0) -> dict[str, float]:
        return {"CPU": 8.0, "GPU": count, f"accelerator_type:{kind}": 1.0}

    fake = FakeRay(node(1, "a", CPU=64.0), node(2, "a", **gpus("A100")), node(3, "a", **gpus("H200", 2.0)))
    present = engine(monkeypatch, fake, device="cuda")
    assert present.supervise() == ""
    assert list(present.workers) == [(node(3, "a")["NodeID"], 0), (node(3, "a")["NodeID"], 1)]
    del fake.present[2]
    reason = engine(monkeypatch, fake, device="cuda").supervise()
    assert "has a GPU of the kind 'NVIDIA H200' and a CPU" in reason
    assert "a (20000000): 8 CPUs, 1 GPU (A100)" in reason


def test_files_are_for_workers_of_this_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeRay(node(1, "here", CPU=4.0), node(2, "there", CPU=4.0))
    present = engine(monkeypatch, fake)
    assert present.supervise() == present.supervise() == ""
    assert [slot for slot, _ in present.workers] == [node(1, "here")["NodeID"]]
    (line,) = caplog.messages
    assert "not on 1 other node of the Ray cluster: the store '/measurements.db' is a file" in line
    fake.present[0]["Resources"] = {}
    assert (
        "no node of the Ray cluster on this host, where the file of the store is, has 4 CPUs"
        in engine(monkeypatch, fake).supervise()
    )


def test_a_cluster_without_slots_is_an_error_at_once_but_lost_nodes_may_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (
        "has 4 CPUs, the threads of the search; it has a (10000000): 0 CPUs"
        in engine(monkeypatch, FakeRay(node(1, "a"))).supervise()
    )
    fake = FakeRay(node(1, "a", CPU=4.0))
    present = engine(monkeypatch, fake)
    assert present.supervise() == ""
    fake.present[0]["Alive"] = False
    assert present.supervise() == ""
    assert not present.workers
    monkeypatch.setattr(ray_engine, "_ABSENT_SECONDS", 0.0)
    assert "it has no node" in present.supervise()


@pytest.mark.parametrize(
    ("kind", "names", "has_kind"),
    [
        ("NVIDIA H200", ["H200"], True),
        ("NVIDIA A100-SXM4-40GB", ["A100", "A100-40G"], True),
        ("NVIDIA RTX PRO 6000 Blackwell", ["RTX-PRO-6000"], True),
        ("NVIDIA A10", ["A100"], False),
        ("NVIDIA A100-SXM4-40GB", ["A10"], False),
        ("NVIDIA H200", [], True),
    ],
)
def test_kinds_of_gpus_are_those_that_ray_names(kind: str, names: list[str], has_kind: bool) -> None:
    resources = {"GPU": 1.0, **{f"accelerator_type:{name}": 1.0 for name in names}}
    assert ray_engine._has_kind(resources, kind) == has_kind
