"""SQLite files as engines of SQLAlchemy: paths and URLs, transactions, the write-ahead log, forks, causes of errors."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.pool import StaticPool

from dovetail.errors import InvalidArgument, StoreError

ERRORS = (exc.SQLAlchemyError, sqlite3.Error)
LOCK_TIMEOUT = 30.0
"""How many seconds a transaction waits for the write lock of another process."""
_MEMORY = ":memory:"
_FORMS = "give the path of a file, 'sqlite:///path', or 'sqlite://' for a store in memory"


def database_path(url: str | os.PathLike[str]) -> Path | None:
    """Return the absolute path of a path or URL, None for a store in memory.

    Raise InvalidArgument for anything else. Its message shows the dialect of a URL and nothing more: the rest may
    contain a password, also in a URL that cannot be parsed.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else url  # pyright: ignore[reportUnnecessaryIsInstance]
    if not isinstance(text, str) or not text or "\0" in text:  # pyright: ignore[reportUnnecessaryIsInstance]
        shown = repr(text) if isinstance(text, str) else f"a {type(text).__name__}"  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"a store cannot be opened at {shown}; {_FORMS}.")
    database = text
    if isinstance(url, str) and (text.startswith("sqlite:") or "://" in text):
        database = _database_of_url(text)
    if database == _MEMORY:
        return None
    try:
        return Path(database).expanduser().absolute()
    except RuntimeError as error:
        raise InvalidArgument(
            f"a store cannot be opened at '{database}': {error} Give the whole path."
        ) from None


def _database_of_url(text: str) -> str:
    dialect = text.partition(":")[0]
    if dialect not in ("sqlite", "sqlite+pysqlite"):
        raise InvalidArgument(f"stores of the dialect '{dialect}' are not supported; {_FORMS}.")
    try:
        url = sa.make_url(text)
    except (exc.ArgumentError, ValueError):
        raise InvalidArgument(f"the URL of the store cannot be parsed; {_FORMS}.") from None
    if url.host or url.port or url.username or url.password:
        raise InvalidArgument(f"a SQLite URL has no host, port, user or password; {_FORMS}.")
    if url.query:
        raise InvalidArgument(f"the URL of a store has no options ({', '.join(url.query)}); {_FORMS}.")
    return url.database or _MEMORY


def create(path: Path | None, lock: threading.Lock) -> sa.Engine:
    """Return an engine with one connection, which is used under `lock`; the file is not opened yet.

    Raise StoreError for a path at which no store can be written.
    """
    if path is not None:
        _check_path(path)
    database = _MEMORY if path is None else os.path.realpath(path)
    engine = sa.create_engine(
        sa.URL.create("sqlite+pysqlite", database=database),
        connect_args={"timeout": LOCK_TIMEOUT, "check_same_thread": False},
        poolclass=StaticPool,
        hide_parameters=True,
    )

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: object) -> None:
        # The driver would begin transactions by itself, and only before the first statement that writes.
        connection.isolation_level = None
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        is_write = connection.get_execution_options().get("is_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")

    _ = configure, begin
    _ENGINES[engine] = lock
    return engine


def _check_path(path: Path) -> None:
    target = Path(os.path.realpath(path))
    folder = target.parent
    if not folder.is_dir():
        raise StoreError(str(path), f"cannot be created: there is no folder '{folder}'. Create it first")
    if target.is_dir():
        raise StoreError(str(path), "is a folder; give the path of a file")
    if os.path.lexists(target) and not stat.S_ISREG(os.lstat(target).st_mode):
        raise StoreError(str(path), "is not a regular file; give another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        # SQLite keeps its log in files beside the database.
        raise StoreError(
            str(path), f"cannot be written: the folder '{folder}' is read-only. Give another path"
        )
    if target.exists() and not os.access(target, os.R_OK | os.W_OK):
        raise StoreError(
            str(path), "cannot be read and written with its permissions. Change them, or give another path"
        )


def enable_write_ahead_log(engine: sa.Engine) -> str:
    """Turn the write-ahead log on, which the file remembers; return the journal mode it has then.

    Changing the mode takes an exclusive lock, and of two processes that do so at once SQLite fails one immediately,
    whatever its timeout.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT
    pooled = engine.raw_connection()
    try:
        connection: Any = pooled.driver_connection
        while True:
            try:
                return str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0.005, 0.02))
    finally:
        pooled.close()


def cause(error: Exception) -> str:
    """Return what an error of SQLAlchemy or SQLite means for a store, without the statement and its parameters."""
    text = str(getattr(error, "orig", None) or error)
    if "not a database" in text:
        return "is not a SQLite database; it was left as it is. Give another path"
    if "locked" in text:
        return f"is locked: another process has been writing for {LOCK_TIMEOUT:.0f} seconds. Try again later"
    if "readonly" in text or "unable to open" in text:
        return f"cannot be opened for writing ({text}). Check its permissions, or give another path"
    return f"cannot be used: {text}"


# SQLite forbids to use a connection across a fork, and even to open the same file in the child while one is inherited:
# the child would count on locks that only its parent holds. So files are closed before a fork, between transactions, and
# opened again by the next transaction on either side. A store in memory is copied.
_ENGINES: weakref.WeakKeyDictionary[sa.Engine, threading.Lock] = weakref.WeakKeyDictionary()
_FORKING = threading.Lock()
_held: list[threading.Lock] = []


def _before_fork() -> None:
    _FORKING.acquire()
    for engine, lock in list(_ENGINES.items()):
        lock.acquire()
        _held.append(lock)
        if engine.url.database != _MEMORY:
            engine.dispose()


def _after_fork() -> None:
    while _held:
        _held.pop().release()
    _FORKING.release()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
