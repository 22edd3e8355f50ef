"""Run as a script: searches on a device with planted costs whose trials workers in processes of their own measure.

`python -m tests.tuning.queue_processes CASE FOLDER` prints what happened as JSON.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import cloudpickle
import torch

from dovetail import zoo
from dovetail.errors import DovetailError, TuningError
from dovetail.tuning.environment import current_environment
from dovetail.tuning.queue_executor import QueueExecutor, WorkerEngine
from dovetail.tuning.search import Searched
from dovetail.tuning.store import Store
from dovetail.tuning.trial import Trial
from dovetail.tuning.tune import run_search
from tests.tuning.synthetic import Block, Chain, Costs, PlantedRunner, SyntheticDevice, prepared

COSTS = Costs(
    operations=lambda name, _: 20.0 if name == "linear" else 5.0,
    regions=lambda kind, seconds, backend: 1.0 + seconds * (0.6 if backend == "a" else 0.7),
    boundaries={("a", "b"): 2.0, ("b", "a"): 2.0},
)
READY_SECONDS = 200.0
TRIAL_SECONDS = 1.15
"""What trials of a Llama of four layers take in the mean, compilation included (benchmarks/RESULTS.md)."""


class Planted(PlantedRunner):
    """Writes each measurement into a log when it begins."""

    costs = COSTS
    noise = 0.01
    log = ""

    def load_model(self, *loaded: object) -> None:
        super().load_model(*loaded)  # type: ignore[arg-type]
        assert self._device is not None
        self._device.log = self.record

    def load_block(self, block: Block) -> None: ...

    def record(self, trial: Trial) -> None:
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, f"{trial.subject.digest}\n".encode())  # one write: lines do not mix
        os.close(log)


def planted(folder: Path, name: str, delay: float) -> type[Planted]:
    values = {"delay": delay, "log": str(folder / f"{name}.log"), "space": cloudpickle.dumps(READY.space)}
    return type("Logged", (Planted,), values)


def worker(store: Path, *, patch: str = "pass") -> subprocess.Popen[bytes]:
    start = f"{patch}; from dovetail.tuning.worker import run_worker; run_worker({str(store)!r})"
    return subprocess.Popen([sys.executable, "-c", start], stderr=subprocess.DEVNULL)


def ended(*workers: subprocess.Popen[bytes]) -> list[int]:
    for each in workers:
        each.terminate()
    return [each.wait(60) for each in workers]


def locally(folder: Path) -> Searched:
    device = SyntheticDevice(READY.space, COSTS, noise=0.01)
    with Store(folder / "local.db") as store:
        return run_search(READY, store, budget=1e6, executor=device, progress=False)


def executor(store: Store, runner: type[PlantedRunner], engine: WorkerEngine | None = None) -> QueueExecutor:
    tuned, backends = READY.tuned, READY.backends
    return QueueExecutor(
        store, READY.environment, tuned, backends, label="planted", runner=runner, engine=engine
    )


def when_ready(runs: QueueExecutor, count: int) -> None:
    """Wait until so many workers have loaded the model."""
    until = time.monotonic() + READY_SECONDS
    while len(runs.queue.workers(runs.search)) < count:
        assert time.monotonic() < until, "the workers do not start"
        time.sleep(0.05)


def contents(store: Store) -> list[object]:
    return [
        (vars(subject), vars(measured))
        for subject, measured in store.results(READY.environment)
        if subject.kind != "search"
    ]


def searched(folder: Path, name: str, count: int, *, delay: float, kills: int = 0) -> dict[str, object]:
    """Search with some workers; kill one of them now and then, and start another."""
    path = folder / f"{name}.db"
    workers: list[subprocess.Popen[bytes]] = []
    with Store(path) as store:
        runs = executor(store, planted(folder, name, delay))
        try:
            workers += [worker(path) for _ in range(count)]
            when_ready(runs, count)
            done = threading.Event()
            killed: list[int] = []

            def kill() -> None:
                generator = random.Random(3)
                while len(killed) < kills and not done.wait(generator.uniform(0.3, 1.0)):
                    victim = workers.pop(0)
                    os.kill(victim.pid, signal.SIGKILL)
                    killed.append(victim.wait())
                    workers.append(worker(path))

            killer = threading.Thread(target=kill)
            killer.start()
            start = time.monotonic()
            result = run_search(READY, store, budget=1e6, executor=runs, progress=False)
            seconds = time.monotonic() - start
            done.set()
            killer.join()
            stored = contents(store)
        finally:
            runs.close()
            codes = ended(*workers)
    begun = Counter((folder / f"{name}.log").read_text().splitlines())
    return {
        "seconds": seconds,
        "measured": len(begun),
        "repeated": sum(begun.values()) - len(begun),
        "kills": len(killed),
        "codes": codes,
        "plan": result.plan.to_json(),
        "stored": stored,
    }


def scaling(folder: Path) -> dict[str, object]:
    """The time to the same plan with one, two and four workers."""
    plan = locally(folder).plan.to_json()
    runs = {count: searched(folder, f"by{count}", count, delay=TRIAL_SECONDS) for count in (1, 2, 4)}
    return {
        "plans are equal": all(run["plan"] == plan for run in runs.values()),
        "repeated": sum(run["repeated"] for run in runs.values()),  # type: ignore[misc]
        "measured": [run["measured"] for run in runs.values()],
        "seconds": [run["seconds"] for run in runs.values()],
    }


def two(folder: Path) -> dict[str, object]:
    """Two workers, of which one is killed now and then, and a store that equals that of a local search."""
    local = locally(folder)
    run = searched(folder, "two", 2, delay=0.2, kills=3)
    with Store(folder / "local.db") as store:
        expected = contents(store)
    return {
        "plans are equal": run["plan"] == local.plan.to_json(),
        "stores are equal": run["stored"] == expected,
        "kills": run["kills"],
        "repeated": run["repeated"],
        "codes": run["codes"],
    }


def withdrawn(folder: Path) -> dict[str, object]:
    """A search that is closed while a worker measures for it, and a second one that this worker serves next."""
    path = folder / "withdrawn.db"
    started = worker(path)
    with Store(path) as store:
        slow = executor(store, planted(folder, "slow", 1000.0))

        def search() -> None:
            with contextlib.suppress(DovetailError):
                run_search(READY, store, budget=1e6, executor=slow, progress=False)

        thread = threading.Thread(target=search, daemon=True)
        thread.start()
        until = time.monotonic() + READY_SECONDS
        while not (folder / "slow.log").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        slow.close()
        quick = executor(store, planted(folder, "quick", 0.0))
        try:
            result = run_search(READY, store, budget=1e6, executor=quick, progress=False)
        finally:
            quick.close()
        left = [
            store.transact(lambda c, t=t: c.exec_driver_sql(f"SELECT count(*) FROM {t}").scalar())
            for t in ("tuning_searches", "tuning_trials", "tuning_files", "tuning_workers")
        ]
        codes = ended(started)
    return {"is_found": result.outcome is not None, "left": left, "codes": codes}


def refused(folder: Path) -> dict[str, object]:
    """A worker with another version of a package, beside none that fits."""
    path = folder / "refused.db"
    patch = "import dovetail.tuning.environment as e; e._installed = lambda: (('openvino', '0.1'),)"
    started = worker(path, patch=patch)
    with Store(path) as store:
        runs = executor(store, planted(folder, "refused", 0.0))
        try:
            when_ready(runs, 1)
            run_search(READY, store, budget=3.0, executor=runs, progress=False)
            message = ""
        except TuningError as error:
            message = str(error)
        finally:
            runs.close()
            codes = ended(started)
    return {"message": message, "codes": codes, "measured": (folder / "refused.log").exists()}


def prepare_model(*, is_llama: bool = False) -> None:
    """Prepare what is searched: a chain, or a model with phases of many trials, as real searches have them."""
    global READY
    torch.set_num_threads(1)
    entry = zoo.get("llama")
    READY = prepared(entry.build(), *entry.example_inputs().args) if is_llama else prepared(Chain())
    READY.environment = current_environment()


if __name__ == "__main__":
    case, path = sys.argv[1:]
    prepare_model(is_llama=case == "scaling")
    cases = {"scaling": scaling, "two": two, "withdrawn": withdrawn, "refused": refused}
    print(json.dumps(cases[case](Path(path))))
