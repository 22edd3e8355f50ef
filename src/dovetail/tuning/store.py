"""The store of measurements: a database that any number of processes read and write at once.

A measurement is leased before it is taken, so that no two workers take the same one. The lease of a worker that died
expires; on the machine that it ran on it can be taken over at once. A row is pending while nobody has measured it, leased
or not, and then final. Each method is one short transaction, and none stays open between calls: a process killed at any
moment leaves the measurements that were completed, and at most one lease.

*Clock.* Leases are timed by the clock of the database, read inside the transaction, since clocks of workers on different
machines differ while the database has one. It is the wall clock: a monotonic one starts anew with the machine, while
leases do not. Set forward, it lets a lease expire early: two workers take the same measurement, the first result is kept,
and `complete` returns False to the second worker. Set back, it lets a lease last longer.

*Transactions.* A lease is taken by one conditional UPDATE, or by an INSERT under a unique key, and belongs to the worker
whose token the row then has. On SQLite transactions that write begin with `BEGIN IMMEDIATE`, which takes the write lock
before anything is read; on PostgreSQL they are READ COMMITTED, where a statement that has waited for another one checks
its condition again. What a transaction does may be done twice, since it can be committed although the connection was lost
before that was acknowledged: a worker knows by the token that it is the one that holds a lease, or that completed it.

*Durability.* SQLite keeps a write-ahead log with synchronous=FULL: a commit is on the disk when `complete` returns. A
killed process would lose nothing with less (NORMAL), a machine without power would; measurements cost more than fsync.
PostgreSQL does the same by default.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import platform
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from dovetail.errors import InvalidArgument, StoreError
from dovetail.tuning.environment import Environment, canonical_json
from dovetail.tuning.measurement import Measurement, Subject

try:
    import sqlalchemy as sa

    from dovetail.tuning import postgresql_engine, sqlite_engine, store_schema
    from dovetail.tuning.store_database import Database, close_before_fork
    from dovetail.tuning.store_schema import ENVIRONMENTS, FAILED, MEASURED, MEASUREMENTS, PENDING
except ModuleNotFoundError as missing:
    if missing.name != "sqlalchemy":
        raise
    raise ModuleNotFoundError(
        "measurements are stored with sqlalchemy, which is not installed; pip install 'dovetail[tune]'",
        name="sqlalchemy",
    ) from None

_T = TypeVar("_T")
_ROW = MEASUREMENTS.c
_PAGE = 256
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
RETRY_SECONDS = 60.0
"""For how many seconds a transaction that failed temporarily is tried again."""
_OPENING_RETRY_SECONDS = 10.0
"""The same while a store is opened, where a wrong host or port is more likely than a server that is restarted."""
_LOG = logging.getLogger("dovetail")


class Store:
    """Measurements by subject and environment, in a database.

    `url` is the path of a SQLite file, which is created if it does not exist, or a URL: "sqlite:///path", "sqlite://" for a
    store in memory, which ends with the process and is copied by a fork, or
    "postgresql+psycopg://user:password@host:port/database". Methods may be called from any thread, and on both sides of a
    fork, where a store in memory is another one. `name` is the path, or the URL without user, password and options. `clock`
    replaces the clock of the database in tests.
    """

    def __init__(self, url: str | os.PathLike[str], *, clock: Callable[[], float] | None = None) -> None:
        self._database = _database(url)
        self.name = self._database.name
        self.is_in_memory = self._database.is_in_memory
        text = os.fspath(url) if isinstance(self._database, postgresql_engine.PostgreSQL) else self.name
        self._url = lambda: text  # a function, because dumps of attributes must not show a password
        self.is_closed = False
        self._clock = clock
        self._lock = threading.Lock()
        self._retry_seconds = _OPENING_RETRY_SECONDS
        close_before_fork(self._database, self._lock)
        try:
            self._prepare_schema()
        except BaseException:
            self._database.engine.dispose()
            raise
        self._retry_seconds = RETRY_SECONDS

    @property
    def url(self) -> str:
        """What opens this store in another process; it may contain a password."""
        return self._url()

    def get(self, subject: Subject, environment: Environment) -> Measurement | None:
        """Return the measurement of a subject, failed or not; None if there is none yet."""
        query = sa.select(MEASUREMENTS).where(_is_row_of(subject, environment), _ROW.status != PENDING)
        row = self.transact(lambda connection: connection.execute(query).one_or_none())
        return None if row is None else self._measurement(row)

    def get_all(self, subjects: Sequence[Subject], environment: Environment) -> dict[str, Measurement]:
        """Return the measurements of those of some subjects that have one, by digest."""
        measured: dict[str, Measurement] = {}
        for start in range(0, len(subjects), _PAGE):
            page = [subject.digest for subject in subjects[start : start + _PAGE]]
            query = sa.select(MEASUREMENTS).where(_ROW.environment == environment.key, _ROW.status != PENDING)
            rows = self._rows(query.where(_ROW.subject.in_(page)))
            measured.update((row.subject, self._measurement(row)) for row in rows)
        return measured

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
            rows = self._rows(query.where(_ROW.subject > last).order_by(_ROW.subject).limit(_PAGE))
            for row in rows:
                subject = Subject(row.kind, row.key, row.operands, row.backend, row.mode)
                yield subject, self._measurement(row)
            if len(rows) < _PAGE:
                return
            last = rows[-1].subject

    def completed(self, subject: Subject, environment: Environment) -> float:
        """Return when the measurement of a subject was stored, in seconds since 1970; 0 if there is none."""
        query = sa.select(_ROW.completed).where(_is_row_of(subject, environment))
        return self.transact(lambda connection: connection.execute(query).scalar_one_or_none()) or 0.0

    def environments(self) -> tuple[Environment, ...]:
        """Return the environments that measurements were leased in, in the order of their keys."""
        rows = self._rows(sa.select(ENVIRONMENTS).order_by(ENVIRONMENTS.c.key))
        try:
            return tuple(Environment.from_json(json.loads(row.description)) for row in rows)
        except ValueError as error:
            raise StoreError(self.name, f"has an environment that cannot be read: {error}") from error

    def add(
        self, results: Sequence[tuple[Subject, Measurement]], environment: Environment
    ) -> tuple[set[str], set[str]]:
        """Store measurements that were taken elsewhere, in one transaction; existing ones are kept.

        Return the digests of those that are new, and of those whose existing measurement is another one. Where a worker
        holds the lease of a subject, its own measurement comes second.
        """
        if not results:
            return set(), set()
        token, worker = uuid.uuid4().hex, worker_name()
        columns = {subject.digest: _columns(measurement) for subject, measurement in results}
        compared = sa.select(
            _ROW.subject, _ROW.lease, *(MEASUREMENTS.c[name] for name in next(iter(columns.values())))
        ).where(_ROW.environment == environment.key, _ROW.subject.in_(columns))

        def insert(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
            shared = {
                "environment": environment.key,
                "attempts": 0,
                "worker": worker,
                "lease": token,
                "expires": 0.0,
            }
            shared["completed"] = self.now(connection)
            _insert_environment(connection, environment)
            rows = [{**shared, "subject": s.digest, **vars(s), **columns[s.digest]} for s, _ in results]
            store_schema.insert_measurements(connection, rows)
            return connection.execute(compared).all()

        stored = self.transact(insert, write=True)
        new = {row.subject for row in stored if row.lease == token}
        other = {
            row.subject for row in stored if {**row._mapping, **columns[row.subject]} != dict(row._mapping)
        }
        return new, other

    def acquire(self, subject: Subject, environment: Environment, *, seconds: float) -> Lease | None:
        """Return a lease to measure a subject; None if it is measured already or leased by a live worker.

        It expires after `seconds` unless it is renewed, or when its process has ended. Of any number of workers one gets
        it.
        """
        _check_seconds(seconds)
        token, worker = uuid.uuid4().hex, worker_name()
        is_row, is_own = _is_row_of(subject, environment), _ROW.lease == token

        def take(connection: sa.Connection) -> int | None:
            now = self.now(connection)
            lease = {"lease": token, "worker": worker, "expires": now + seconds}
            is_free = sa.or_(_ROW.expires <= now, is_own)
            holder = connection.execute(
                sa.select(_ROW.worker).where(is_row, _ROW.status == PENDING)
            ).scalar_one_or_none()
            if holder is not None and has_ended(holder):
                is_free = sa.or_(is_free, _ROW.worker == holder)
            attempts = sa.case((is_own, _ROW.attempts), else_=_ROW.attempts + 1)
            connection.execute(
                sa.update(MEASUREMENTS)
                .where(is_row, _ROW.status == PENDING, is_free)
                .values(attempts=attempts, **lease)
            )
            row = connection.execute(sa.select(_ROW.lease, _ROW.attempts).where(is_row)).one_or_none()
            if row is not None:
                return row.attempts if row.lease == token else None
            _insert_environment(connection, environment)
            is_inserted = store_schema.insert_if_absent(
                connection,
                MEASUREMENTS,
                environment=environment.key,
                subject=subject.digest,
                **vars(subject),
                status=PENDING,
                attempts=1,
                **lease,
            )
            return 1 if is_inserted else None

        attempt = self.transact(take, write=True)
        return None if attempt is None else Lease(self, subject, environment, token, attempt)

    def wait(self, subject: Subject, environment: Environment, *, timeout: float) -> Measurement | None:
        """Return the measurement of a subject, waiting while another worker holds its lease.

        None after `timeout` seconds, or as soon as no worker holds the lease: then it can be acquired. The store is read
        at growing intervals of up to a second.
        """
        if not isinstance(timeout, int | float) or not timeout >= 0.0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"timeout is a number of seconds, not {timeout!r}.")
        deadline = time.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        query = sa.select(MEASUREMENTS).where(_is_row_of(subject, environment))

        def read(connection: sa.Connection) -> tuple[sa.Row[Any] | None, float]:
            return connection.execute(query).one_or_none(), self.now(connection)

        while True:
            row, now = self.transact(read)
            if row is not None and row.status != PENDING:
                return self._measurement(row)
            left = deadline - time.monotonic()
            if row is None or row.expires <= now or left <= 0.0 or has_ended(row.worker):
                return None
            # Random, so that workers that wait for the same measurement do not read at the same moments.
            time.sleep(min(pause * random.uniform(0.5, 1.0), left, max(row.expires - now, 0.001)))
            pause = min(2.0 * pause, _LONGEST_PAUSE)

    def transact(self, work: Callable[[sa.Connection], _T], *, write: bool = False) -> _T:
        """Run `work` as one transaction, which is rolled back if it raises; return its result once it is committed.

        After a lost connection, a deadlock or the like it is run again, for up to `RETRY_SECONDS` seconds, also if it was
        committed: when the connection was lost, that is not known. `work` must not call other methods of the store than
        `now`.
        """

        def run() -> _T:
            with self._lock:
                if self.is_closed:
                    raise StoreError(self.name, "is closed; open it again with Store(...)")
                connection = self._database.engine.connect().execution_options(is_write=write)
                with connection, connection.begin():
                    return work(connection)

        return self._retried(run)

    def now(self, connection: sa.Connection) -> float:
        """Return the seconds since 1970 by the clock that leases are timed by."""
        return store_schema.read_clock(connection) if self._clock is None else self._clock()

    def close(self) -> None:
        """Close the connection to the database; what was completed is kept. A closed store cannot be used."""
        with self._lock:
            self.is_closed = True
            self._database.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.name!r})"

    def _complete(self, lease: Lease, measurement: Measurement) -> bool:
        is_row = _is_row_of(lease.subject, lease.environment)
        values = {"lease": lease.token, "worker": worker_name(), **_columns(measurement)}

        def complete(connection: sa.Connection) -> bool:
            completed = self.now(connection)
            connection.execute(
                sa.update(MEASUREMENTS)
                .where(is_row, _ROW.status == PENDING)
                .values(completed=completed, **values)
            )
            query = sa.select(_ROW.lease).where(is_row, _ROW.status != PENDING)
            return connection.execute(query).scalar_one_or_none() == lease.token

        return self.transact(complete, write=True)

    def _set_expiry(self, lease: Lease, seconds: float) -> bool:
        """Let a lease expire in some seconds, 0 to release it; return False if the worker no longer holds it."""
        values: dict[str, Any] = {} if seconds else {"lease": "", "attempts": _ROW.attempts - 1}

        def change(connection: sa.Connection) -> bool:
            changed = connection.execute(
                sa.update(MEASUREMENTS)
                .where(
                    _is_row_of(lease.subject, lease.environment),
                    _ROW.status == PENDING,
                    _ROW.lease == lease.token,
                )
                .values(expires=self.now(connection) + seconds, **values)
            )
            return changed.rowcount == 1

        return self.transact(change, write=True)

    def _rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        return self.transact(lambda connection: connection.execute(query).all())

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

    def _retried(self, act: Callable[[], _T]) -> _T:
        """Run `act`, again after errors that are temporary; raise StoreError for the others, and when time is up."""
        deadline, pause, is_reported = math.inf, _SHORTEST_PAUSE, False
        while True:
            try:
                return act()
            except self._database.errors as error:
                failure = error
            cause = self._database.cause(failure)
            if not self._database.is_temporary(failure):
                break
            now = time.monotonic()
            deadline = min(deadline, now + self._retry_seconds)
            if now >= deadline:
                cause = f"{cause}. It was tried again for {self._retry_seconds:g} seconds"
                break
            if pause >= _LONGEST_PAUSE and not is_reported:
                _LOG.warning("the store '%s' %s; it is tried again", self.name, cause)
                is_reported = True
            # Random, so that transactions that met in a deadlock do not meet again.
            time.sleep(min(pause * random.uniform(0.5, 1.0), deadline - now))
            pause = min(2.0 * pause, _LONGEST_PAUSE)
        # Not in the `except` clause: an error of a driver may contain the user, also as context of another error.
        raise StoreError(self.name, cause) from (failure if self._database.chains_errors else None)

    def _prepare_schema(self) -> None:
        """Create or migrate the tables; a database that is not a store, or too new, is refused before it is written to."""
        version = self.transact(lambda connection: store_schema.read_version(connection, self.name))
        self._retried(self._database.prepare)
        if version != store_schema.VERSION:
            self.transact(lambda connection: store_schema.migrate(connection, self.name), write=True)


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


def open_existing(url: str | os.PathLike[str]) -> Store:
    """Open a store; raise StoreError where `Store` would create a file."""
    if not (isinstance(url, str) and postgresql_engine.is_url(url)):
        path = sqlite_engine.database_path(url)
        if path is not None and not path.exists():
            raise StoreError(str(path), "does not exist; give that of a search")
    return Store(url)


def _database(url: str | os.PathLike[str]) -> Database:
    if isinstance(url, str) and postgresql_engine.is_url(url):
        return postgresql_engine.PostgreSQL(url)
    return sqlite_engine.SQLite(sqlite_engine.database_path(url))


@functools.cache
def _machine() -> str:
    """Return what processes have in common that can see each other: machine, its start, and namespace of processes.

    Machines and containers may have equal names. After a restart leases of before expire, as on other machines.
    """
    parts = [platform.node().encode(errors="backslashreplace").decode()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8])
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return "/".join(parts)


def worker_name() -> str:
    return f"{_machine()}:{os.getpid()}"


def has_ended(worker: str) -> bool:
    """Return whether a process of this machine has ended; False where that is not known.

    Another process may have its number by now: then its leases expire.
    """
    machine, _, number = worker.rpartition(":")
    if os.name != "posix" or machine != _machine() or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _is_row_of(subject: Subject, environment: Environment) -> sa.ColumnElement[bool]:
    return sa.and_(_ROW.environment == environment.key, _ROW.subject == subject.digest)


def _insert_environment(connection: sa.Connection, environment: Environment) -> None:
    description = canonical_json(environment.to_json())
    store_schema.insert_if_absent(connection, ENVIRONMENTS, key=environment.key, description=description)


def _columns(measurement: Measurement) -> dict[str, Any]:
    """Return the columns of a measurement that are the same wherever and whenever it is stored."""
    error = measurement.numeric_error
    return {
        "status": FAILED if measurement.failure else MEASURED,
        "samples": canonical_json(measurement.samples),
        "failure": measurement.failure,
        "numeric_error": None if error is None else repr(error),
        "peak_bytes": measurement.peak_bytes,
        "compile_seconds": repr(measurement.compile_seconds),
        "details": canonical_json(measurement.details),
    }


def _check_seconds(seconds: float) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.0 < seconds < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"seconds is how long a lease lasts, positive and finite, not {seconds!r}.")
