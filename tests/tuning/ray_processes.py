"""Run as a script: searches on a device with planted costs whose trials actors of Ray measure.

`python -m tests.tuning.ray_processes CASE FOLDER` prints what happened as JSON. Nodes of a cluster are processes of this
machine.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from ray.cluster_utils import Cluster

from dovetail.tuning.queue_executor import QueueExecutor
from dovetail.tuning.ray_engine import RayEngine
from dovetail.tuning.search import Searched
from dovetail.tuning.store import Store
from dovetail.tuning.tune import run_search
from tests.tuning import queue_processes
from tests.tuning.queue_processes import TRIAL_SECONDS, contents, executor, locally, planted, prepare_model

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
SECRET = "Zq7xj"
# The first module that Python imports, on the node of another environment.
OTHER_VERSION = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: "0.1" if name == "openvino" else version(name)
"""
NOTED = Path("/tmp/ray/ray_current_cluster")
WARNINGS: list[str] = []
RUNNING: list[QueueExecutor] = []


class Collected(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        WARNINGS.append(record.getMessage())


@contextlib.contextmanager
def cluster() -> Iterator[tuple[Cluster, Path]]:
    """A cluster whose head has no slots, and the folder of its logs."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # paths of sockets are short
    head = {**NODE, "num_cpus": 0, "include_dashboard": False, "temp_dir": str(folder)}
    started = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = started.address
    try:
        yield started, folder
    finally:
        started.shutdown()
        # `ray start` and this class note the last cluster there, and nothing removes it.
        NOTED.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def processes() -> dict[int, tuple[int, str]]:
    """The processes that descend from this one: the parent and the command line of each number."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    below = {os.getpid()}
    while more := {number for number, parent in parents.items() if parent in below} - below:
        below |= more
    return {number: (parents[number], lines[number]) for number in below}


def trials() -> list[int]:
    """The actors that have a process for trials."""
    return [parent for parent, line in processes().values() if "run_worker(int" in line]


def actors() -> list[int]:
    return [number for number, (_, line) in processes().items() if "ray::TrialWorker" in line]


def begun(folder: Path, name: str) -> Counter[str]:
    log = folder / f"{name}.log"
    return Counter(log.read_text().splitlines() if log.exists() else ())


def when(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def able(runs: QueueExecutor) -> list[str]:
    """The workers that have loaded the model of a search."""
    return [each.worker for each in runs.queue.workers(runs.search) if not each.refusal]


def search(
    folder: Path, name: str, *, delay: float, store: str = ""
) -> tuple[Searched, list[str], list[object]]:
    """Search with the workers of a cluster; return the names of these too, and the contents of the store."""
    with Store(store or folder / f"{name}.db") as opened:
        engine = RayEngine(opened, torch.device("cpu"), queue_processes.READY.environment)
        runs = executor(opened, planted(folder, name, delay), engine)
        RUNNING.append(runs)
        try:
            result = run_search(queue_processes.READY, opened, budget=1e6, executor=runs, progress=False)
            names = able(runs)
        finally:
            runs.close()
        return result, names, contents(opened)


def lost(started: Cluster, folder: Path) -> dict[str, Any]:
    """A search on nodes of which one has another environment, one is lost, and one joins late."""
    plan = locally(folder).plan.to_json()
    with Store(folder / "local.db") as store:
        expected = contents(store)
    (folder / "sitecustomize.py").write_text(OTHER_VERSION)
    first, victim = started.add_node(**NODE), started.add_node(**NODE)
    started.add_node(**NODE, env_vars={"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"})
    # Nodes are started on the main thread; searches are not bound to one.
    with ThreadPoolExecutor(1) as pool:
        searching = pool.submit(search, folder, "lost", delay=0.3)
        when(lambda: RUNNING and len(able(RUNNING[0])) == 2 and len(begun(folder, "lost")) > 3)
        # Workers that were lost leave the list after a while.
        before = able(RUNNING[0])
        started.remove_node(victim, allow_graceful=False)
        count = len(begun(folder, "lost"))
        when(lambda: len(begun(folder, "lost")) > count)
        started.remove_node(first, allow_graceful=False)
        started.add_node(**NODE)
        result, names, stored = searching.result()
    repeated = begun(folder, "lost")
    return {
        "plans are equal": result.plan.to_json() == plan,
        "stores are equal": stored == expected,
        "repeated": sum(repeated.values()) - len(repeated),
        "workers": len({*before, *names}),
        "warnings": list(WARNINGS),
        "left": len(trials() + actors()),
    }


def interrupted(folder: Path) -> dict[str, Any]:
    """A search that is interrupted, after a worker of it was killed."""

    def interrupt() -> None:
        when(lambda: len(begun(folder, "interrupted")) > 3)
        os.kill(trials()[0], signal.SIGKILL)
        count = len(begun(folder, "interrupted"))
        when(lambda: len(begun(folder, "interrupted")) > count + 3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    result, _, _ = search(folder, "interrupted", delay=0.2)
    repeated = begun(folder, "interrupted")
    return {
        "is interrupted": result.report.is_interrupted,
        "has a program": result.outcome is not None,
        "repeated": sum(repeated.values()) - len(repeated),
        "left": len(trials() + actors()),
    }


def placed(started: Cluster) -> dict[str, Any]:
    """Where workers for GPUs are placed, and why none can run; the store cannot be opened by any."""
    environment = queue_processes.READY.environment
    url = f"postgresql://Uw4kz:{SECRET}@127.0.0.1:1/plans?nonsense=1"
    store = cast("Store", SimpleNamespace(url=url, name="postgresql://127.0.0.1:1/plans"))

    def engine(device: str, kind: str) -> RayEngine:
        return RayEngine(store, torch.device(device), replace(environment, device=f"{device}: {kind}"))

    started.add_node(**NODE, num_gpus=1, resources={"accelerator_type:A100": 1})
    right = started.add_node(**NODE, num_gpus=1, resources={"accelerator_type:H200": 1})
    present, missing = engine("cuda", "NVIDIA H200, sm_90"), engine("cuda", "NVIDIA B200, sm_100")
    many = RayEngine(store, torch.device("cpu"), replace(environment, threads=64))
    try:
        first = present.supervise()
        places = [node for node, _ in present.workers]
        when(present.supervise)
        return {
            "is possible": not first,
            "is placed right": places == [right.node_id],
            "no store": present.supervise(),
            "no kind": missing.supervise(),
            "no cores": many.supervise(),
        }
    finally:
        for each in (present, missing, many):
            each.close()


def nodes(folder: Path) -> dict[str, Any]:
    with cluster() as (started, _):
        return lost(started, folder)


def slots(folder: Path) -> dict[str, Any]:
    """An interrupt and the placement of workers, and whether Ray's logs or processes show the password of a store."""
    with cluster() as (started, logs):
        started.add_node(**NODE)
        happened = {"interrupted": interrupted(folder), "placed": placed(started)}
        return {**happened, **shown(logs, json.dumps(happened))}


def alone(folder: Path) -> dict[str, Any]:
    """A search on a cluster of its own, which is interrupted from outside."""
    handler = signal.getsignal(signal.SIGTERM)
    priorities: list[int] = []

    def observe() -> None:
        when(trials)
        priorities.extend(os.getpriority(os.PRIO_PROCESS, number) for number in trials())

    threading.Thread(target=observe).start()
    result, _, _ = search(folder, "alone", delay=0.5)
    return {
        "has the priority of this process": set(priorities) == {os.getpriority(os.PRIO_PROCESS, 0)},
        "is interrupted": result.report.is_interrupted,
        "has a program": result.outcome is not None,
        "is restored": signal.getsignal(signal.SIGTERM) is handler,
    }


def server(folder: Path) -> dict[str, Any]:
    """A search with a store on a server, whose URL is in a file."""
    plan = locally(folder).plan.to_json()
    with cluster() as (started, logs):
        started.add_node(**{**NODE, "num_cpus": 2})
        result, names, _ = search(folder, "server", delay=0.2, store=(folder / "url").read_text())
        return {
            "plans are equal": result.plan.to_json() == plan,
            "workers": len(names),
            **shown(logs, result.plan.to_json()),
        }


def shown(logs: Path, *others: str) -> dict[str, Any]:
    """Whether logs, warnings or processes have the password of a store."""
    texts = [path.read_text(errors="replace") for path in logs.rglob("*") if path.is_file()]
    every = [*texts, *(line for _, line in processes().values()), *WARNINGS, *others]
    return {"files": len(texts), "is shown": any(SECRET in text for text in every)}


def scaling(folder: Path) -> dict[str, Any]:
    """The time to the same plan on nodes with one, two and four slots."""
    ready = queue_processes.READY
    plan = locally(folder).plan.to_json()
    seconds: list[float] = []
    equal = True
    for count in (1, 2, 4):
        with cluster() as (started, _), Store(folder / f"by{count}.db") as store:
            started.add_node(**{**NODE, "num_cpus": count})
            engine = RayEngine(store, torch.device("cpu"), ready.environment)
            runs = executor(store, planted(folder, f"by{count}", TRIAL_SECONDS), engine)
            try:
                when(lambda runs=runs, count=count: runs.supervise() or len(able(runs)) == count)
                start = time.monotonic()
                result = run_search(ready, store, budget=1e6, executor=runs, progress=False)
                seconds.append(time.monotonic() - start)
            finally:
                runs.close()
            equal = equal and result.plan.to_json() == plan
    return {"plans are equal": equal, "seconds": seconds}


if __name__ == "__main__":
    case, path = sys.argv[1:]
    logging.getLogger("dovetail").addHandler(Collected())
    prepare_model(is_llama=case == "scaling")
    cases = {"nodes": nodes, "slots": slots, "alone": alone, "server": server, "scaling": scaling}
    print(json.dumps(cases[case](Path(path))))
