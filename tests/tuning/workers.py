"""Run as a script: processes that share a store, forked from one that has imported no torch.

`python -m tests.tuning.workers CASE FOLDER URL` prints what happened as JSON.
"""

import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

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


def work(
    url: str,
    *,
    lease: float,
    measuring: float,
    seed: int,
    count: int = len(SUBJECTS),
    most: int = len(SUBJECTS),
) -> None:
    """Measure subjects in an order of its own, with a log of what was begun and what was completed.

    The one after `most` measurements does not end.
    """
    subjects = SUBJECTS[:count]
    random.Random(seed).shuffle(subjects)
    log = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def record(event: str, subject: Subject, value: float) -> None:
        os.write(log, f"{json.dumps([event, subject.key, value])}\n".encode())  # one write: lines do not mix

    with Store(url) as store:
        for subject in subjects:
            while store.get(subject, HERE) is None:
                held = store.acquire(subject, HERE, seconds=lease)
                if held is None:
                    store.wait(subject, HERE, timeout=30)
                    continue
                value = random.random()
                record("begin", subject, value)
                time.sleep(measuring if most else 600)
                most -= 1
                if held.complete(Measurement((value, 0.1, 1e-9))):
                    record("complete", subject, value)


def check(connection: sa.Connection) -> str:
    return connection.exec_driver_sql("PRAGMA integrity_check").scalar_one()


def report(url: str, codes: list[int]) -> None:
    with Store(url) as store:
        stored = {subject.key: measurement.samples for subject, measurement in store.results(HERE)}
        integrity = store.transact(check) if url.startswith("sqlite:") else "ok"
    events = [json.loads(line) for line in LOG.read_text().splitlines()] if LOG.exists() else []
    print(json.dumps({"codes": codes, "stored": stored, "events": events, "integrity": integrity}))


def contend(url: str) -> None:
    """Processes that create the store and measure the same 25 subjects at once."""
    count = 8
    if url.startswith("postgresql"):
        count = 32
        for name in ("psycopg", "sqlalchemy.dialects.postgresql.psycopg"):
            importlib.import_module(name)  # here, not again in each process
    pids = [
        forked(lambda seed=seed: work(url, lease=60, measuring=0.001, seed=seed, count=25))
        for seed in range(count)
    ]
    report(url, [exit_code(pid) for pid in pids])


def outage(url: str) -> None:
    """Eight processes, for as long as the parent needs to interrupt the server."""
    pids = [forked(lambda seed=seed: work(url, lease=600, measuring=0.2, seed=seed)) for seed in range(8)]
    report(url, [exit_code(pid) for pid in pids])


def kill(url: str) -> None:
    """Twenty workers killed one after the other at random moments, then one that ends.

    None measures all that is left before it is killed, however late that is.
    """
    codes: list[int] = []
    for seed in range(20):
        pid = forked(lambda seed=seed: work(url, lease=60, measuring=0.01, seed=seed, most=2))
        time.sleep(random.uniform(0.0, 0.12))
        os.kill(pid, signal.SIGKILL)
        codes.append(exit_code(pid))
    exit_code(forked(lambda: work(url, lease=60, measuring=0.0, seed=20)))
    report(url, codes)


def fork(url: str) -> None:
    """A store and a lease that were open before a fork: parent and child go on with the same store."""
    codes: list[int] = []
    with Store(url) as store:
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
    report(url, codes)


def ended(url: str) -> None:
    """A process is killed while it holds a lease: before, nobody gets the lease; after that, another process at once."""
    opened, closed = os.pipe(), os.pipe()

    def hold() -> None:
        with Store(url) as store:
            assert store.acquire(SUBJECTS[0], HERE, seconds=600) is not None
            os.write(opened[1], b"1")
            os.read(closed[0], 1)

    pid = forked(hold)
    os.read(opened[0], 1)
    with Store(url) as store:
        is_acquired = store.acquire(SUBJECTS[0], HERE, seconds=600) is not None
        start = time.monotonic()
        store.wait(SUBJECTS[0], HERE, timeout=0.2)
        is_waited_for = time.monotonic() - start >= 0.2
        os.kill(pid, signal.SIGKILL)
        code = exit_code(pid)
        start = time.monotonic()
        waited = store.wait(SUBJECTS[0], HERE, timeout=300)
        lease = store.acquire(SUBJECTS[0], HERE, seconds=600)
        seconds = time.monotonic() - start
    after = {"waited": waited, "attempt": lease and lease.attempt}
    print(
        json.dumps(
            {
                "codes": [code],
                "while it ran": [is_acquired, is_waited_for],
                "after": after,
                "seconds": seconds,
            }
        )
    )


if __name__ == "__main__":
    LOG = Path(sys.argv[2], "log")
    cases = {"contend": contend, "outage": outage, "kill": kill, "fork": fork, "ended": ended}
    cases[sys.argv[1]](sys.argv[3])
