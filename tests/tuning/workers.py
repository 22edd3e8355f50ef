"""Run as a script: processes that share a store, forked from one that has imported no torch.

`python -m tests.tuning.workers CASE PATH` prints what happened as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.tuning.light import Environment, Measurement, Store, Subject

HERE = Environment("cpu: test", "", "2.13.0", "3.11.7", 1, ())
SUBJECTS = [Subject("body", f"key{n}", "f32[2]", "eager", "inference") for n in range(50)]


def forked(act: Callable[[], None]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def work(path: str, *, lease: float, measuring: float, seed: int) -> None:
    """Measure all subjects in an order of its own, with a log of what was begun and what was completed."""
    subjects = SUBJECTS.copy()
    random.Random(seed).shuffle(subjects)
    log = os.open(f"{path}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def record(event: str, subject: Subject, value: float) -> None:
        os.write(log, f"{json.dumps([event, subject.key, value])}\n".encode())  # one write: lines do not mix

    with Store(path) as store:
        for subject in subjects:
            while store.get(subject, HERE) is None:
                held = store.acquire(subject, HERE, seconds=lease)
                if held is None:
                    store.wait(subject, HERE, timeout=30)
                    continue
                value = random.random()
                record("begin", subject, value)
                time.sleep(measuring)
                if held.complete(Measurement((value, 0.1, 1e-9))):
                    record("complete", subject, value)


def report(path: str, codes: list[int]) -> None:
    log = Path(f"{path}.log")
    with Store(path) as store:
        stored = {subject.key: measurement.samples for subject, measurement in store.results(HERE)}
        with store._transaction() as connection:
            integrity = connection.exec_driver_sql("PRAGMA integrity_check").scalar()
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    print(json.dumps({"codes": codes, "stored": stored, "events": events, "integrity": integrity}))


def contend(path: str) -> None:
    """Eight processes that create the store and measure the same subjects at once."""
    pids = [forked(lambda seed=seed: work(path, lease=60, measuring=0.001, seed=seed)) for seed in range(8)]
    report(path, [exit_code(pid) for pid in pids])


def kill(path: str) -> None:
    """Twenty workers killed one after the other at random moments, then one that ends."""
    codes: list[int] = []
    for seed in range(20):
        pid = forked(lambda seed=seed: work(path, lease=0.2, measuring=0.01, seed=seed))
        time.sleep(random.uniform(0.0, 0.12))
        os.kill(pid, signal.SIGKILL)
        codes.append(exit_code(pid))
    exit_code(forked(lambda: work(path, lease=0.2, measuring=0.0, seed=20)))
    report(path, codes)


def fork(path: str) -> None:
    """A store and a lease that were open before a fork: parent and child go on with the same store."""
    codes: list[int] = []
    with Store(path) as store:
        held = store.acquire(SUBJECTS[0], HERE, seconds=60)
        assert held is not None

        def child() -> None:
            with held:  # leaving it does not release what the parent holds
                lease = store.acquire(SUBJECTS[1], HERE, seconds=60)
                assert lease is not None
                assert lease.complete(Measurement((1.0,)))

        codes.append(exit_code(forked(child)))
        assert store.get(SUBJECTS[1], HERE) == Measurement((1.0,))
        assert store.acquire(SUBJECTS[0], HERE, seconds=60) is None
        opened, closed = os.pipe(), os.pipe()

        def outlive() -> None:
            # SQLite deletes the log when it takes a connection for the last one: what is written then must not be lost.
            store.get(SUBJECTS[2], HERE)
            os.write(opened[1], b"1")
            os.read(closed[0], 1)
            lease = store.acquire(SUBJECTS[2], HERE, seconds=60)
            assert lease is not None
            assert lease.complete(Measurement((3.0,)))

        late = forked(outlive)
        os.read(opened[0], 1)
        assert held.complete(Measurement((2.0,)))
    os.write(closed[1], b"1")
    codes.append(exit_code(late))
    report(path, codes)


if __name__ == "__main__":
    {"contend": contend, "kill": kill, "fork": fork}[sys.argv[1]](sys.argv[2])
