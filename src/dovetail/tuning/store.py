"""The store of measurements: a database that any number of processes read and write at once.

A measurement is leased before it is taken, so that no two workers take the same one; the lease of a worker that died
expires. A row is pending while nobody has measured it, leased or not, and then final. Each method is one short
transaction, and none stays open between calls: a process killed at any moment leaves the measurements that were
completed, and at most one lease.

*Clock.* Leases are timed by the clock of the database, read inside the transaction, since clocks of workers on different
machines differ while the database has one. It is the wall clock: a monotonic one starts anew with the machine, while
leases do not. Set forward, it lets a lease expire early: two workers take the same measurement, the first result is kept,
and `complete` returns False to the second worker. Set back, it lets a lease last longer.

*Transactions.* On SQLite those that write begin with `BEGIN IMMEDIATE`, which takes the write lock before anything is
read. A lease is taken by one conditional UPDATE, or by an INSERT under a unique key, and by the number of rows they
changed, so that it stays exclusive on a database that has no such lock.

*Durability.* SQLite keeps a write-ahead log with synchronous=FULL: a commit is on the disk when `complete` returns. A
killed process would lose nothing with less (NORMAL), a machine without power would; measurements cost more than fsync.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import random
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Self

from dovetail.errors import InvalidArgument, StoreError
from dovetail.tuning.environment import Environment, canonical_json
from dovetail.tuning.measurement import Measurement, Subject

try:
    import sqlalchemy as sa
    from sqlalchemy import exc

    from dovetail.tuning import sqlite_engine, store_schema
    from dovetail.tuning.store_schema import ENVIRONMENTS, FAILED, MEASURED, MEASUREMENTS, PENDING
except ModuleNotFoundError as missing:
    if missing.name != "sqlalchemy":
        raise
    raise ModuleNotFoundError(
        "measurements are stored with sqlalchemy, which is not installed; pip install 'dovetail[tune]'",
        name="sqlalchemy",
    ) from None

_ROW = MEASUREMENTS.c
_PAGE = 256
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0


class Store:
    """Measurements by subject and environment, in a database.

    `url` is the path of a SQLite file, which is created if it does not exist, or a URL: "sqlite:///path", or "sqlite://"
    for a store in memory, which ends with the process and is copied by a fork. Methods may be called from any thread, and
    of a file on both sides of a fork. `clock` replaces the clock of the database in tests.
    """

    def __init__(self, url: str | os.PathLike[str], *, clock: Callable[[], float] | None = None) -> None:
        path = sqlite_engine.database_path(url)
        self.name = ":memory:" if path is None else str(path)
        self.is_closed = False
        self._clock = clock
        self._lock = threading.Lock()
        self._engine = sqlite_engine.create(path, self._lock)
        try:
            self._prepare_schema()
        except BaseException:
            self._engine.dispose()
            raise

    def get(self, subject: Subject, environment: Environment) -> Measurement | None:
        """Return the measurement of a subject, failed or not; None if there is none yet."""
        with self._transaction() as connection:
            row = connection.execute(
                sa.select(MEASUREMENTS).where(_is_row_of(subject, environment), _ROW.status != PENDING)
            ).one_or_none()
        return None if row is None else self._measurement(row)

    def results(
        self, environment: Environment, *, kind: str | None = None
    ) -> Iterator[tuple[Subject, Measurement]]:
        """Yield the measurements of an environment in the order of their digests, which is the same in every store.

        They are read in pages; one that is completed meanwhile may be left out.
        """
        query = sa.select(MEASUREMENTS).where(_ROW.environment == environment.key, _ROW.status != PENDING)
        if kind is not None:
            query = query.where(_ROW.kind == kind)
        last = ""
        while True:
            with self._transaction() as connection:
                page = query.where(_ROW.subject > last).order_by(_ROW.subject).limit(_PAGE)
                rows = connection.execute(page).all()
            for row in rows:
                subject = Subject(row.kind, row.key, row.operands, row.backend, row.mode)
                yield subject, self._measurement(row)
            if len(rows) < _PAGE:
                return
            last = rows[-1].subject

    def environments(self) -> tuple[Environment, ...]:
        """Return the environments that measurements were leased in, in the order of their keys."""
        with self._transaction() as connection:
            rows = connection.execute(sa.select(ENVIRONMENTS).order_by(ENVIRONMENTS.c.key)).all()
        try:
            return tuple(Environment.from_json(json.loads(row.description)) for row in rows)
        except ValueError as error:
            raise StoreError(self.name, f"has an environment that cannot be read: {error}") from error

    def acquire(self, subject: Subject, environment: Environment, *, seconds: float) -> Lease | None:
        """Return a lease to measure a subject; None if it is measured already or leased by a live worker.

        It expires after `seconds` unless it is renewed. Of any number of workers one gets it.
        """
        _check_seconds(seconds)
        token, worker = uuid.uuid4().hex, f"{platform.node()}:{os.getpid()}"
        with self._transaction(write=True) as connection:
            now = self._now(connection)
            lease = {"lease": token, "worker": worker, "expires": now + seconds}
            taken = connection.execute(
                sa.update(MEASUREMENTS)
                .where(_is_row_of(subject, environment), _ROW.status == PENDING, _ROW.expires <= now)
                .values(attempts=_ROW.attempts + 1, **lease)
            )
            attempts = connection.execute(
                sa.select(_ROW.attempts).where(_is_row_of(subject, environment))
            ).scalar_one_or_none()
            if attempts is not None:
                return Lease(self, subject, environment, token, attempts) if taken.rowcount else None
            _insert_if_absent(
                connection,
                sa.insert(ENVIRONMENTS).values(
                    key=environment.key, description=canonical_json(environment.to_json())
                ),
            )
            inserted = _insert_if_absent(
                connection,
                sa.insert(MEASUREMENTS).values(
                    environment=environment.key,
                    subject=subject.digest,
                    **vars(subject),
                    status=PENDING,
                    attempts=1,
                    **lease,
                ),
            )
        return Lease(self, subject, environment, token, 1) if inserted else None

    def wait(self, subject: Subject, environment: Environment, *, timeout: float) -> Measurement | None:
        """Return the measurement of a subject, waiting while another worker holds its lease.

        None after `timeout` seconds, or as soon as no worker holds the lease: then it can be acquired. The store is read
        at growing intervals of up to a second.
        """
        if not isinstance(timeout, int | float) or not timeout >= 0.0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"timeout is a number of seconds, not {timeout!r}.")
        deadline = time.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        while True:
            with self._transaction() as connection:
                query = sa.select(MEASUREMENTS).where(_is_row_of(subject, environment))
                row = connection.execute(query).one_or_none()
                now = self._now(connection)
            if row is not None and row.status != PENDING:
                return self._measurement(row)
            left = deadline - time.monotonic()
            if row is None or row.expires <= now or left <= 0.0:
                return None
            # Random, so that workers that wait for the same measurement do not read at the same moments.
            time.sleep(min(pause * random.uniform(0.5, 1.0), left, max(row.expires - now, 0.001)))
            pause = min(2.0 * pause, _LONGEST_PAUSE)

    def close(self) -> None:
        """Close the connection to the database; what was completed is kept. A closed store cannot be used."""
        with self._lock:
            self.is_closed = True
            self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.name!r})"

    def _complete(self, lease: Lease, measurement: Measurement) -> bool:
        error = measurement.numeric_error
        with self._transaction(write=True) as connection:
            done = connection.execute(
                sa.update(MEASUREMENTS)
                .where(_is_row_of(lease.subject, lease.environment), _ROW.status == PENDING)
                .values(
                    status=FAILED if measurement.failure else MEASURED,
                    lease="",
                    worker=f"{platform.node()}:{os.getpid()}",
                    completed=self._now(connection),
                    samples=canonical_json(measurement.samples),
                    failure=measurement.failure,
                    numeric_error=None if error is None else repr(error),
                    peak_bytes=measurement.peak_bytes,
                    compile_seconds=repr(measurement.compile_seconds),
                    details=canonical_json(measurement.details),
                )
            )
        return done.rowcount == 1

    def _set_expiry(self, lease: Lease, seconds: float) -> bool:
        """Let a lease expire in some seconds, 0 to release it; return False if the worker no longer holds it."""
        values: dict[str, Any] = {} if seconds else {"lease": "", "attempts": _ROW.attempts - 1}
        with self._transaction(write=True) as connection:
            changed = connection.execute(
                sa.update(MEASUREMENTS)
                .where(
                    _is_row_of(lease.subject, lease.environment),
                    _ROW.status == PENDING,
                    _ROW.lease == lease.token,
                )
                .values(expires=self._now(connection) + seconds, **values)
            )
        return changed.rowcount == 1

    def _measurement(self, row: Any) -> Measurement:
        try:
            return Measurement(
                samples=tuple(json.loads(row.samples)),
                failure=row.failure,
                numeric_error=None if row.numeric_error is None else float(row.numeric_error),
                peak_bytes=row.peak_bytes,
                compile_seconds=float(row.compile_seconds),
                details=json.loads(row.details),
            )
        except (TypeError, ValueError) as error:
            what = f"has a measurement that cannot be read (subject {row.subject}): {error}"
            raise StoreError(self.name, what) from error

    def _now(self, connection: sa.Connection) -> float:
        return store_schema.read_clock(connection) if self._clock is None else self._clock()

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = False) -> Generator[sa.Connection]:
        """Run the block as one transaction, which is rolled back if it raises."""
        with self._lock, self._translated_errors():
            if self.is_closed:
                raise StoreError(self.name, "is closed; open it again with Store(...)")
            with self._engine.connect().execution_options(is_write=write) as connection, connection.begin():
                yield connection

    @contextlib.contextmanager
    def _translated_errors(self) -> Generator[None]:
        try:
            yield
        except sqlite_engine.ERRORS as error:
            raise StoreError(self.name, sqlite_engine.cause(error)) from error

    def _prepare_schema(self) -> None:
        """Create or migrate the tables; a database that is not a store, or too new, is refused before it is written to."""
        with self._transaction() as connection:
            version = store_schema.read_version(connection, self.name)
        with self._translated_errors():
            journal_mode = sqlite_engine.enable_write_ahead_log(self._engine)
        if journal_mode not in ("wal", "memory"):
            raise StoreError(
                self.name, "is on a file system without write-ahead logging; give a path on a local disk"
            )
        if version != store_schema.VERSION:
            with self._transaction(write=True) as connection:
                store_schema.migrate(connection, self.name)


class Lease:
    """The right to measure a subject until it expires; as a context manager it is released unless it was completed.

    `attempt` counts the leases of the subject that were not released, this one included: from 2 on, workers before this
    one died or took too long.
    """

    def __init__(
        self, store: Store, subject: Subject, environment: Environment, token: str, attempt: int
    ) -> None:
        self.store, self.subject, self.environment = store, subject, environment
        self.token, self.attempt = token, attempt
        self._process = os.getpid()
        self._is_open = True

    def complete(self, measurement: Measurement) -> bool:
        """Store the measurement; return False if another worker has completed one after this lease had expired.

        The first measurement is kept. A lease that has expired meanwhile can be completed as long as there is none.
        """
        self._check_open()
        if not isinstance(measurement, Measurement):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(
                f"a lease is completed with a Measurement, not {type(measurement).__name__}."
            )
        is_stored = self.store._complete(self, measurement)
        self._is_open = False
        return is_stored

    def renew(self, seconds: float) -> bool:
        """Let the lease expire in `seconds` from now; return False if another worker has taken it over or completed it."""
        self._check_open()
        _check_seconds(seconds)
        return self.store._set_expiry(self, seconds)

    def release(self) -> None:
        """Give the lease back, so that another worker can take it at once; one that was taken over is left alone."""
        if self._is_open:
            self._is_open = False
            self.store._set_expiry(self, 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:  # a forked child leaves its parent's lease alone
            return
        # It expires by itself; a store that cannot be written must not hide why the measurement failed.
        with contextlib.suppress(*(() if error is None else (StoreError,))):
            self.release()

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreError(self.store.name, "has this lease no longer: it was completed or released")


def _is_row_of(subject: Subject, environment: Environment) -> sa.ColumnElement[bool]:
    return sa.and_(_ROW.environment == environment.key, _ROW.subject == subject.digest)


def _insert_if_absent(connection: sa.Connection, statement: sa.Insert) -> bool:
    """Insert a row; return False if there is one with the same primary key."""
    try:
        with connection.begin_nested():
            connection.execute(statement)
    except exc.IntegrityError:
        return False
    return True


def _check_seconds(seconds: float) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.0 < seconds < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"seconds is how long a lease lasts, positive and finite, not {seconds!r}.")
