"""Files of measurements: written from one store, read into another, refused where a line is not valid."""

import gzip
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.tuning import measurement_files
from dovetail.tuning.measurement_files import Import
from dovetail.tuning.store import Measurement, Store, Subject
from dovetail.tuning.tune import run_search
from tests.tuning.helpers import BODY, DONE, FAILED, HERE, THERE, body, measured
from tests.tuning.synthetic import Chain, Costs, SyntheticDevice, prepared

RESULTS = [
    DONE,
    FAILED,
    Measurement((5e-324, 0.1 + 0.2), numeric_error=math.nan, details={"reference": [1e-9], "text": "ü\n\0"}),
    Measurement((0.0, -0.0), numeric_error=math.inf, peak_bytes=2**63 - 1, compile_seconds=1e300),
]


def filled(url: str) -> str:
    """Fill a store in two environments, with a pending lease in one of them."""
    with Store(url) as store:
        for environment in (HERE, THERE):
            for number, result in enumerate(RESULTS):
                measured(store, body(number), result, environment)
        measured(
            store,
            Subject("search", "graph", "", "a", "inference"),
            Measurement((1.0,), details={"plan": "{}"}),
        )
        assert store.acquire(BODY, HERE, seconds=600) is not None
    return url


@pytest.mark.parametrize("name", ["all.jsonl", "all.jsonl.gz"])
def test_a_store_that_takes_in_a_file_writes_the_same_bytes(
    new_url: Callable[[], str], tmp_path: Path, name: str
) -> None:
    source, target = filled(new_url()), new_url()
    assert dovetail.export_measurements(source, tmp_path / name) == 9
    assert dovetail.import_measurements(tmp_path / name, target) == Import(9, 0, 0)
    assert dovetail.import_measurements(tmp_path / name, target) == Import(0, 9, 0)
    (tmp_path / "again").mkdir()
    dovetail.export_measurements(target, tmp_path / "again" / name)
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()
    with Store(source) as one, Store(target) as other:
        assert other.environments() == one.environments()
        assert repr(list(other.results(HERE))) == repr(list(one.results(HERE)))


def test_one_environment_alone_is_written(tmp_path: Path) -> None:
    source, path = filled(str(tmp_path / "a.db")), tmp_path / "here.jsonl"
    assert dovetail.export_measurements(source, path, environment=THERE.key) == 4
    dovetail.import_measurements(path, tmp_path / "b.db")
    with Store(tmp_path / "b.db") as store:
        assert store.environments() == (THERE,)
    with pytest.raises(
        dovetail.InvalidArgument, match=rf"no environment 'gpu'. It has .*{HERE.key} \(cpu: test\)"
    ):
        dovetail.export_measurements(source, path, environment="gpu")


def test_a_store_that_does_not_exist_is_not_created_to_be_exported(tmp_path: Path) -> None:
    with pytest.raises(dovetail.StoreError, match=r"absent\.db' does not exist"):
        dovetail.export_measurements(tmp_path / "absent.db", tmp_path / "out.jsonl")
    assert not list(tmp_path.iterdir())


def test_measurements_of_the_store_are_kept(new_url: Callable[[], str], tmp_path: Path) -> None:
    path, target = tmp_path / "all.jsonl", new_url()
    dovetail.export_measurements(filled(new_url()), path)
    with Store(target) as store:
        measured(store, body(0), Measurement((9.0,)))
        measured(store, body(2), RESULTS[2])  # whose error is NaN, which equals nothing
        assert dovetail.import_measurements(path, target) == Import(7, 1, 1)
        assert store.get(body(0), HERE) == Measurement((9.0,))
        assert store.get(body(1), HERE) == FAILED


def test_of_a_leased_measurement_the_one_of_the_file_comes_first(
    new_url: Callable[[], str], tmp_path: Path
) -> None:
    path, target = tmp_path / "all.jsonl", new_url()
    dovetail.export_measurements(filled(new_url()), path)
    with Store(target) as store:
        lease = store.acquire(body(0), HERE, seconds=600)
        assert lease is not None
        assert dovetail.import_measurements(path, target).new == 9
        assert store.wait(body(0), HERE, timeout=0) == DONE
        assert not lease.renew(10)
        assert not lease.complete(Measurement((9.0,)))
        assert store.get(body(0), HERE) == DONE


def test_imports_at_the_same_time_store_each_measurement_once(
    new_url: Callable[[], str], tmp_path: Path
) -> None:
    path, target = tmp_path / "many.jsonl", new_url()
    dovetail.export_measurements(many(tmp_path / "many.db", 600), path)
    counts: list[Import] = []
    threads = [
        threading.Thread(target=lambda: counts.append(dovetail.import_measurements(path, target)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(count.new for count in counts) == 600
    assert all(count.new + count.present == 600 for count in counts)


def many(path: Path, count: int) -> str:
    with Store(path) as store:
        for start in range(0, count, 1000):
            store.add([(body(n), DONE) for n in range(start, min(start + 1000, count))], HERE)
    return str(path)


KILLED = """
import os, signal, sys
from tests.tuning import light
from dovetail.tuning import measurement_files

add, calls = light.Store.add, []

def killed(self, results, environment):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return add(self, results, environment)

light.Store.add = killed
measurement_files.import_measurements(*sys.argv[1:])
"""


def test_an_import_that_was_killed_is_completed_by_another(
    new_url: Callable[[], str], tmp_path: Path
) -> None:
    path, target = tmp_path / "many.jsonl", new_url()
    dovetail.export_measurements(many(tmp_path / "many.db", 1000), path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), target], cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert dovetail.import_measurements(path, target) == Import(
        1000 - 2 * measurement_files.BATCH, 2 * measurement_files.BATCH, 0
    )


# Files that are not valid


def lines_of(tmp_path: Path) -> list[bytes]:
    path = tmp_path / "all.jsonl"
    dovetail.export_measurements(filled(str(tmp_path / "source.db")), path)
    return path.read_bytes().splitlines(keepends=True)


def with_checksum(lines: list[bytes]) -> bytes:
    digest = hashlib.blake2b(b"".join(lines[:-1]), digest_size=16).hexdigest()
    return b"".join([*lines[:-1], json.dumps({"checksum": digest}, separators=(",", ":")).encode() + b"\n"])


def refused(tmp_path: Path, content: bytes) -> str:
    """Return why a file is not imported; nothing of it is, and no store is created."""
    path = tmp_path / "refused.jsonl"
    path.write_bytes(content)
    with pytest.raises(dovetail.InvalidFile) as error:
        dovetail.import_measurements(path, tmp_path / "target.db")
    assert not (tmp_path / "target.db").exists()
    return str(error.value)


def change(*where: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def edit(record: dict[str, Any]) -> None:
        for name in where[:-1]:
            record = record[name]
        record[where[-1]] = to

    return edit


@pytest.mark.parametrize(
    ("number", "edit", "reason"),
    [
        (3, change("measurement", "samples", to=[0.1, -0.1]), "not negative, not -0.1"),
        (3, change("measurement", "samples", to=[math.nan]), "NaN where a number belongs"),
        (3, change("measurement", "samples", to=[math.inf]), "Infinity where a number belongs"),
        (3, change("measurement", "samples", to=[10**400]), "too large"),
        (3, change("measurement", "samples", to="0.1"), "samples that are not a list"),
        (3, change("measurement", "failure", to=None), "failure that is not text"),
        (3, change("measurement", "failure", to="and samples"), "one of them, and not both"),
        (3, change("measurement", "numeric_error", to="big"), "'big' as numeric error"),
        (3, change("measurement", "peak_bytes", to=2**63), "number of bytes"),
        (3, change("measurement", "details", to=[]), "details is a dict"),
        (3, change("measurement", "more", to=1), "other fields than samples, failure"),
        (3, change("subject", "key", to="other"), "but its subject"),
        (3, change("subject", "mode", to="testing"), "'inference' or 'training'"),
        (3, change("digest", to="0" * 32), "it has the digest '000"),
        (3, change("subject", to=[]), "other fields than kind"),
        (2, change("environment", "torch", to="9.9"), "but its environment"),
        (2, change("environment", "threads", to="4"), "an integer as threads"),
        (2, change("environment", to=None), "an environment is a dict"),
        (4, change("checksum", to=""), "another checksum"),
    ],
)
def test_lines_that_are_not_valid_are_named(
    tmp_path: Path, number: int, edit: Callable[[dict[str, Any]], None], reason: str
) -> None:
    lines = lines_of(tmp_path)
    record = json.loads(lines[number - 1])
    edit(record)
    lines[number - 1] = json.dumps(record).encode() + b"\n"
    message = refused(tmp_path, with_checksum(lines))
    assert f"cannot be imported: line {number}: " in message
    assert reason in message


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    lines = lines_of(tmp_path)
    whole = b"".join(lines)
    for end in (len(whole) - 1, len(whole) - len(lines[-1]), len(whole) // 2, len(lines[0])):
        assert "is not whole: line " in refused(tmp_path, whole[:end])
    assert "is not whole" in refused(tmp_path, gzip.compress(whole)[:-9])
    assert "is not whole" in refused(tmp_path, b"\x1f\x8b not gzip")
    # A value that is valid by itself.
    assert f"line {len(lines)}: it is another checksum" in refused(
        tmp_path, whole.replace(b"0.125", b"0.126", 1)
    )
    assert "it ends the measurements, but not the file" in refused(tmp_path, whole + whole)
    assert "line 4: it is out of order" in refused(tmp_path, with_checksum([*lines[:3], *lines[2:]]))
    assert "line 4: it is out of order" in refused(
        tmp_path, with_checksum([*lines[:2], lines[3], lines[2], *lines[4:]])
    )
    assert "line 2: it is before the first environment" in refused(
        tmp_path, with_checksum([lines[0], *lines[2:]])
    )
    assert "line 3: it is not JSON" in refused(tmp_path, with_checksum([*lines[:2], b"\xff\n", *lines[3:]]))
    nested = b'{"digest":' + b"[" * 100_000 + b"\n"
    assert "line 3: " in refused(tmp_path, with_checksum([*lines[:2], nested, *lines[3:]]))


def test_other_files_and_newer_ones_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"{}\n", b"[]\n", b"SQLite format 3\0", b'{"format":"dovetail measurements"}\n'):
        assert "is not a file of measurements" in refused(tmp_path, content)
    newer = b'{"format":"dovetail measurements","version":2}\n'
    assert "newer release of dovetail: its format has version 2" in refused(tmp_path, newer)
    with pytest.raises(dovetail.InvalidFile, match="cannot be read: No such file"):
        dovetail.import_measurements(tmp_path / "absent.jsonl", tmp_path / "target.db")
    with pytest.raises(dovetail.SaveError, match="is a folder"):
        dovetail.export_measurements(filled(str(tmp_path / "a.db")), tmp_path)


def test_a_file_stays_as_it_is_where_an_export_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, path = filled(str(tmp_path / "a.db")), tmp_path / "out.jsonl"
    path.write_text("before")

    def results(*_: Any) -> Any:
        raise dovetail.StoreError("a.db", "is damaged")

    monkeypatch.setattr(Store, "results", results)
    with pytest.raises(dovetail.StoreError):
        dovetail.export_measurements(source, path)
    assert path.read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["a.db", "out.jsonl"]


MEASURED = """
import resource, sys
from tests.tuning import light
from dovetail.tuning import measurement_files

count, folder = int(sys.argv[1]), sys.argv[2]
with light.Store(f"{folder}/{count}.db") as store:
    here = light.Environment("cpu: test", "", "2.13.0", "3.11.7", 1, ())
    for start in range(0, count, 1000):
        subjects = [light.Subject("body", f"key{n}", "", "eager", "inference") for n in range(start, start + 1000)]
        store.add([(subject, light.Measurement((0.1,))) for subject in subjects], here)
assert measurement_files.export_measurements(f"{folder}/{count}.db", f"{folder}/{count}.jsonl") == count
assert measurement_files.import_measurements(f"{folder}/{count}.jsonl", f"{folder}/{count}.copy.db").new == count
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_measurements(tmp_path: Path) -> None:
    peaks: list[int] = []
    for count in (2_000, 40_000):
        command = [sys.executable, "-c", MEASURED, str(count), str(tmp_path)]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout))
    assert peaks[1] < 1.1 * peaks[0]


# Searches


def test_a_search_with_imported_measurements_measures_nothing(
    new_url: Callable[[], str], tmp_path: Path
) -> None:
    ready = prepared(Chain(), torch.randn(4, 8))
    costs = Costs(regions=lambda kind, seconds, backend: seconds * (0.6 if backend == "a" else 0.8))
    path, source, plans = tmp_path / "all.jsonl", new_url(), []
    with Store(source) as store:
        first = SyntheticDevice(ready.space, costs, noise=0.01)
        plans.append(run_search(ready, store, budget=1e6, executor=first, progress=False).plan)
    assert len(first.trials) > 20
    dovetail.export_measurements(source, path)
    for keeps_search in (True, False):
        with Store(new_url()) as store:
            dovetail.import_measurements(path, store.url)
            if not keeps_search:
                store.transact(
                    lambda c: c.exec_driver_sql("DELETE FROM tuning_measurements WHERE kind = 'search'"),
                    write=True,
                )
            device = SyntheticDevice(ready.space, costs)
            plans.append(run_search(ready, store, budget=1e6, executor=device, progress=False).plan)
        assert not device.trials
    assert plans[0].to_json() == plans[1].to_json() == plans[2].to_json()
