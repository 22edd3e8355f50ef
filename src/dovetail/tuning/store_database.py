"""What a store needs of its database, and engines whose connections are closed before a fork."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

import sqlalchemy as sa


class Database(Protocol):
    """A database that keeps a store; its engine has one connection, which is used under the lock of the store.

    `name` identifies it in messages: it has neither the user nor the password. `errors` are the exceptions of its driver;
    `chains_errors` says whether they may be the cause of a StoreError, which is shown in tracebacks.
    """

    name: str
    engine: sa.Engine
    is_in_memory: bool
    errors: tuple[type[Exception], ...]
    chains_errors: bool

    def prepare(self) -> None:
        """Set what the database remembers, before tables are created or migrated."""
        ...

    def is_temporary(self, error: Exception) -> bool:
        """Return whether the same transaction may succeed when it is run again, on a new connection if it was lost."""
        ...

    def cause(self, error: Exception) -> str:
        """Return what an error means for a store, without the statement, its parameters, the user and the password."""
        ...


# A connection cannot be used on both sides of a fork, and the child must not close it either: of a server, that ends the
# session of the parent. SQLite forbids even to open the same file in the child while a connection is inherited: the child
# would count on locks that only its parent holds. So connections are closed before a fork, between transactions, and
# opened again by the next transaction on either side. A store in memory is copied.
_DATABASES: weakref.WeakKeyDictionary[Database, threading.Lock] = weakref.WeakKeyDictionary()
_FORKING = threading.Lock()
_held: list[threading.Lock] = []


def close_before_fork(database: Database, lock: threading.Lock) -> None:
    """Close the connection of a database under the lock of its store before each fork, as long as the object exists."""
    with _FORKING:
        _DATABASES[database] = lock


def _before_fork() -> None:
    _FORKING.acquire()
    for database, lock in list(_DATABASES.items()):
        lock.acquire()
        _held.append(lock)
        if not database.is_in_memory:
            database.engine.dispose()


def _after_fork() -> None:
    while _held:
        _held.pop().release()
    _FORKING.release()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
