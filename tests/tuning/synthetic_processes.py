"""Run as a script: searches on a device with planted costs, in forked processes that share a store.

`python -m tests.tuning.synthetic_processes CASE FOLDER` prints what happened as JSON. The graph is captured once, before
processes are forked; the planted device runs no tensor code.
"""

import json
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from dovetail.tuning.store import Store
from dovetail.tuning.trial import Trial
from tests.tuning.synthetic import HERE, Chain, Costs, SyntheticDevice, prepared, run
from tests.tuning.workers import exit_code, forked

KILLS, MOST = 20, 1
COSTS = Costs(
    operations=lambda name, _: 20.0 if name == "linear" else 5.0,
    regions=lambda kind, seconds, backend: 1.0 + seconds * (0.6 if backend == "a" else 0.7),
    boundaries={("a", "b"): 2.0, ("b", "a"): 2.0},
)


def searched(folder: Path, name: str, *, delay: float, plan: str = "plan", most: float = math.inf) -> None:
    """Search with the store of a name, write the plan, and log each measurement when it begins.

    The measurement after `most` of them does not end.
    Leases last longer than the test: those of killed processes must not be waited for.
    """
    device = SyntheticDevice(READY.space, COSTS, noise=0.01, delay=delay)
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def record(trial: Trial) -> None:
        os.write(log, f"{trial.subject.digest}\n".encode())  # one write: lines do not mix
        if len(device.trials) > most:
            time.sleep(600)

    device.log = record
    with Store(folder / f"{name}.db") as store:
        result = run(READY, device, store, trial_seconds=600.0)
    (folder / f"{name}.{plan}.json").write_text(result.plan.to_json())


def contents(folder: Path, name: str) -> list[object]:
    with Store(folder / f"{name}.db") as store:
        return [(vars(subject), vars(measured)) for subject, measured in store.results(HERE)]


def kills(folder: Path) -> dict[str, object]:
    """Kill a search at random moments, each time started again, and compare its store with that of an undisturbed one.

    However late it is killed on a busy machine, it has not ended by then.
    """
    searched(folder, "whole", delay=0.0)
    count = len((folder / "whole.log").read_text().splitlines())
    generator = random.Random(7)
    assert count > KILLS * MOST
    killed = 0
    for _ in range(KILLS):
        pid = forked(lambda: searched(folder, "killed", delay=0.1, most=MOST))
        time.sleep(generator.uniform(0.02, 0.35))
        os.kill(pid, signal.SIGKILL)
        killed += exit_code(pid) == -signal.SIGKILL
    assert exit_code(forked(lambda: searched(folder, "killed", delay=0.0))) == 0
    begun = Counter((folder / "killed.log").read_text().splitlines())
    return {
        "kills": killed,
        "measurements": count,
        "repeated": sum(begun.values()) - len(begun),
        "stores are equal": contents(folder, "whole") == contents(folder, "killed"),
        "plans are equal": (folder / "whole.plan.json").read_text()
        == (folder / "killed.plan.json").read_text(),
    }


def workers(folder: Path) -> dict[str, object]:
    """Search with one, two and four processes at once."""
    result: dict[str, object] = {}
    plans: set[str] = set()
    for count in (1, 2, 4):
        name = f"by{count}"
        pids = [
            forked(lambda i=i, name=name: searched(folder, name, delay=0.02, plan=f"plan{i}"))
            for i in range(count)
        ]
        assert [exit_code(pid) for pid in pids] == [0] * count
        begun = Counter((folder / f"{name}.log").read_text().splitlines())
        result[name] = [len(begun), sum(begun.values())]
        plans.update((folder / f"{name}.plan{i}.json").read_text() for i in range(count))
    result["plans"] = len(plans)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    READY = prepared(Chain())
    case, path = sys.argv[1:]
    print(json.dumps({"kills": kills, "workers": workers}[case](Path(path))))
