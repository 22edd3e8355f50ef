"""Stores in files, and everything that cannot be opened."""

import importlib
import os
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import InvalidArgument, StoreError
from dovetail.tuning.store import Store
from tests.tuning.helpers import BODY, DONE, HERE, body, measured, scalar

# Files


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


def test_files_are_durable_and_concurrent(tmp_path: Path) -> None:
    with Store(tmp_path / "store.db") as store:
        assert scalar(store, "PRAGMA journal_mode") == "wal"
        assert scalar(store, "PRAGMA synchronous") == 2
        assert scalar(store, "PRAGMA busy_timeout") == 30000


def test_a_version_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE tuning_schema SET version = 'one'")
    connection.close()
    with pytest.raises(StoreError, match="no valid schema version"):
        Store(path)


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.touch()
    with Store(path) as store:
        measured(store, BODY, DONE)


def test_a_damaged_file_is_an_error_of_the_store(tmp_path: Path) -> None:
    """Wherever it is damaged: in the header, the schema, whose names are no text then, or the rows."""
    path = tmp_path / "store.db"
    with Store(path) as store:
        for number in range(20):
            measured(store, body(number), DONE)
    whole, draw = path.read_bytes(), random.Random(0)
    refused: list[tuple[Path, StoreError]] = []
    for number in range(60):
        damaged = bytearray(whole)
        for _ in range(50):
            damaged[draw.randrange(100, len(damaged))] = draw.randrange(256)
        copied = tmp_path / f"damaged{number}.db"
        copied.write_bytes(damaged)
        try:
            with Store(copied) as store:
                list(store.results(HERE))
        except StoreError as error:
            refused.append((copied, error))
    assert len(refused) > 30
    assert all(str(path) in str(error) for path, error in refused)


# What cannot be opened


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (None, "cannot be opened at a NoneType; give the path of a file"),
        (3, "cannot be opened at a int"),
        (b"store.db", "cannot be opened at a bytes"),
        ("", "cannot be opened at ''"),
        ("a\0b", "cannot be opened at"),
        ("mysql://ann:secret@host/db", "the dialect 'mysql' are not supported"),
        ("ann:secret@host/db", "a path or a URL, and this is neither"),
        ("postgresql:ann:secret@host/db", "a path or a URL, and this is neither"),
        ("host=localhost password=secret", "a path or a URL, and this is neither"),
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


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dovetail.tuning.store")
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dovetail\[tune\]'"):
        importlib.import_module("dovetail.tuning.store")
