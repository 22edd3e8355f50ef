"""Stores in SQLite files and in memory: paths and URLs, transactions, the write-ahead log, causes of errors."""

from __future__ import annotations

import os
import random
import re
import sqlite3
import stat
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.pool import StaticPool

from dovetail.errors import InvalidArgument, StoreError
from dovetail.tuning.store_database import Database

LOCK_TIMEOUT = 30.0
"""How many seconds a transaction waits for the write lock of another process."""
_MEMORY = ":memory:"
_FORMS = (
    "give the path of a file, 'sqlite:///path', 'sqlite://' for a store in memory, or "
    "'postgresql+psycopg://user:password@host:port/database'"
)
# A URL without its scheme, or parameters of libpq: as the path of a file they would be shown, with the password in them.
_NOT_A_PATH = re.compile(
    r"postgres\w*:|(?![a-z]:[/\\])[^/\\]*:[^@]*@|.*\bpassword\s*=", re.IGNORECASE | re.DOTALL
)


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
    elif isinstance(url, str) and _NOT_A_PATH.match(text):
        raise InvalidArgument(f"a store is given by a path or a URL, and this is neither; {_FORMS}.")
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
        if not re.fullmatch(r"[\w+.-]+", dialect):
            raise InvalidArgument(f"the URL of the store has no valid dialect; {_FORMS}.")
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


class SQLite(Database):
    """A store in a file, or in memory if `path` is None; the file is not opened yet.

    Raise StoreError for a path at which no store can be written.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            _check_path(path)
        self.name = _MEMORY if path is None else str(path)
        self.is_in_memory = path is None
        # The last is raised for names and texts of a damaged file, those in messages of SQLite among them.
        self.errors = (exc.SQLAlchemyError, sqlite3.Error, UnicodeDecodeError)
        self.chains_errors = True
        self.engine = sa.create_engine(
            sa.URL.create("sqlite+pysqlite", database=_MEMORY if path is None else os.path.realpath(path)),
            connect_args={"timeout": LOCK_TIMEOUT, "check_same_thread": False},
            poolclass=StaticPool,
            hide_parameters=True,
        )

        @event.listens_for(self.engine, "connect")
        def configure(connection: sqlite3.Connection, _: object) -> None:
            # The driver would begin transactions by itself, and only before the first statement that writes.
            connection.isolation_level = None
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")

        @event.listens_for(self.engine, "begin")
        def begin(connection: sa.Connection) -> None:
            is_write = connection.get_execution_options().get("is_write", False)
            connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")

        _ = configure, begin

    def prepare(self) -> None:
        """Turn the write-ahead log on, which the file remembers."""
        if self._enable_write_ahead_log() not in ("wal", "memory"):
            raise StoreError(
                self.name, "is on a file system without write-ahead logging; give a path on a local disk"
            )

    def _enable_write_ahead_log(self) -> str:
        """Return the journal mode that the file has then.

        Changing the mode takes an exclusive lock, and of two processes that do so at once SQLite fails one immediately,
        whatever its timeout.
        """
        deadline = time.monotonic() + LOCK_TIMEOUT
        pooled = self.engine.raw_connection()
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

    def is_temporary(self, error: Exception) -> bool:
        return False  # a lock has been waited for already

    def cause(self, error: Exception) -> str:
        text = str(getattr(error, "orig", None) or error)
        if "not a database" in text:
            return "is not a SQLite database; it was left as it is. Give another path"
        if "locked" in text:
            return (
                f"is locked: another process has been writing for {LOCK_TIMEOUT:.0f} seconds. Try again later"
            )
        if "readonly" in text or "unable to open" in text:
            return f"cannot be opened for writing ({text}). Check its permissions, or give another path"
        return f"cannot be used: {text}"


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
