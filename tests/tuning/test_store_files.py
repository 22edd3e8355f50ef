"""Files and versions of stores, and everything that cannot be opened."""

import importlib
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import InvalidArgument, StoreError
from dovetail.tuning import store_schema
from dovetail.tuning.store import Store
from tests.tuning.helpers import BODY, DONE, HERE, measured

# Files and versions


def test_a_store_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a store ü?.db"
    with Store(path) as store:
        measured(store, BODY, DONE)
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.db").symlink_to(path)
    for url in (str(path), path.name, "link.db"):
        with Store(url) as store:
            assert store.get(BODY, HERE) == DONE


@pytest.mark.parametrize("form", ["sqlite:///{}", "sqlite+pysqlite:///{}"])
def test_urls_are_paths(tmp_path: Path, form: str) -> None:
    path = tmp_path / "store.db"
    with Store(form.format(path)) as store:
        measured(store, BODY, DONE)
        assert store.name == str(path)
    with Store(path) as store:
        assert store.get(BODY, HERE) == DONE


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", ":memory:"])
def test_stores_in_memory_are_separate(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Store(url) as one, Store(url) as two:
        measured(one, BODY, DONE)
        assert two.get(BODY, HERE) is None
    assert not list(tmp_path.iterdir())


def test_files_are_durable_and_concurrent(store: Store) -> None:
    with store._transaction() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 30000


def test_the_clock_is_that_of_the_database(tmp_path: Path) -> None:
    with Store(tmp_path / "store.db") as store, store._transaction() as connection:
        assert abs(store._now(connection) - time.time()) < 5.0


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.touch()
    with Store(path) as store:
        measured(store, BODY, DONE)


def with_version(path: Path, version: object) -> None:
    with Store(path) as store:
        measured(store, BODY, DONE)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE tuning_schema SET version = ?", (version,))
    connection.close()


def test_a_newer_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with_version(path, 2)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"version 2, this release reads up to 1\. Update dovetail") as error:
        Store(path)
    assert str(path) in str(error.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [0, -1, "one"])
def test_a_store_without_a_valid_version_is_refused(tmp_path: Path, version: object) -> None:
    with_version(tmp_path / "store.db", version)
    with pytest.raises(StoreError, match="no valid schema version"):
        Store(tmp_path / "store.db")


def add_column(connection: Any) -> None:
    connection.exec_driver_sql("ALTER TABLE tuning_measurements ADD COLUMN power TEXT")


def test_an_older_store_is_migrated_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    with_version(path, 1)
    steps: list[int] = []
    monkeypatch.setattr(store_schema, "VERSION", 3)
    monkeypatch.setattr(store_schema, "MIGRATIONS", {1: add_column, 2: lambda _: steps.append(2)})
    for _ in range(2):
        with Store(path) as store, store._transaction() as connection:
            connection.exec_driver_sql("SELECT power FROM tuning_measurements")
        with Store(path) as store:
            assert store.get(BODY, HERE) == DONE
    assert steps == [2]


def test_a_failed_migration_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    with_version(path, 1)

    def fail(_: Any) -> None:
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(store_schema, "VERSION", 3)
        patch.setattr(store_schema, "MIGRATIONS", {1: add_column, 2: fail})
        with pytest.raises(RuntimeError, match="interrupted"):
            Store(path)
    with Store(path) as store:
        assert store.get(BODY, HERE) == DONE
        with pytest.raises(StoreError, match="no such column"), store._transaction() as connection:
            connection.exec_driver_sql("SELECT power FROM tuning_measurements")


# What cannot be opened


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (None, "cannot be opened at a NoneType; give the path of a file"),
        (3, "cannot be opened at a int"),
        (b"store.db", "cannot be opened at a bytes"),
        ("", "cannot be opened at ''"),
        ("a\0b", "cannot be opened at"),
        ("postgresql://ann:secret@host/db", "the dialect 'postgresql' are not supported"),
        ("postgresql://ann:secret@host:port/db", "the dialect 'postgresql' are not supported"),
        ("sqlite+aiosqlite:///secret", "the dialect 'sqlite\\+aiosqlite' are not supported"),
        ("sqlite://ann:secret@/store.db", "no host, port, user or password"),
        ("sqlite://secret/store.db", "no host, port, user or password"),
        ("sqlite://ann:secret@host:port/db", "cannot be parsed"),
        ("sqlite:store.db", "cannot be parsed"),
        ("sqlite:///store.db?mode=secret", "no options \\(mode\\)"),
    ],
)
def test_other_places_are_refused_without_their_password(url: Any, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason) as error:
        Store(url)
    assert "secret" not in str(error.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no folder '.*/missing'\. Create it first"):
        Store(tmp_path / "missing" / "store.db")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a folder"):
        Store(tmp_path)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="not a regular file"):
        Store(tmp_path / "pipe")


@pytest.mark.parametrize("content", [b"hello", b"not a database " * 1000])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match="is not a SQLite database; it was left as it is") as error:
        Store(path)
    assert str(path) in str(error.value)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "bookmarks.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="is a database of something else"):
        Store(path)
    assert path.read_bytes() == before


UNPRIVILEGED = """
import os, sys
from tests.tuning.light import Store, StoreError
Store("sqlite://").close()  # imports all there is to import, which others may not read
if os.getuid() == 0:
    os.setuid(65534)
try:
    Store(sys.argv[1])
except StoreError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("folder_mode", "file_mode", "reason"),
    [
        (0o555, None, "the folder '.*' is read-only"),
        (0o777, 0o444, "be read and written with its permissions"),
    ],
    ids=["folder", "file"],
)
def test_what_is_read_only_is_refused(folder_mode: int, file_mode: int | None, reason: str) -> None:
    # The folders of tmp_path are closed to other users, and root may write everywhere.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        if file_mode is not None:
            path.touch(file_mode)
        before = list(Path(folder).iterdir())
        os.chmod(folder, folder_mode)
        command = [sys.executable, "-c", UNPRIVILEGED, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert re.search(reason, done.stdout), done.stdout + done.stderr
        assert list(Path(folder).iterdir()) == before
        os.chmod(folder, 0o777)


def test_a_locked_store_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.tuning.sqlite_engine.LOCK_TIMEOUT", 0.05)
    with Store(tmp_path / "store.db") as store:
        blocker = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="is locked: another process has been writing"):
            store.acquire(BODY, HERE, seconds=1)
        assert store.get(BODY, HERE) is None  # readers do not wait
        blocker.close()
        measured(store, BODY, DONE)


def test_a_damaged_row_is_named(store: Store) -> None:
    measured(store, BODY, DONE)
    with store._transaction(write=True) as connection:
        connection.exec_driver_sql("UPDATE tuning_measurements SET samples = '[0.1'")
    with pytest.raises(StoreError, match=f"measurement that cannot be read .subject {BODY.digest}"):
        store.get(BODY, HERE)


def test_a_closed_store_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.db")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed; open it again"):
        store.get(BODY, HERE)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dovetail.tuning.store")
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dovetail\[tune\]'"):
        importlib.import_module("dovetail.tuning.store")
