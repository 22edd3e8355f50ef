"""The queue of trials that a search has for workers on this machine or others, in the store of its measurements.

A search writes the files that workers load (`executor.TrialFiles`) and publishes trials; workers take them. What comes of a
trial is a measurement of the store, under a lease as everywhere: the queue says what a search waits for, and never who may measure
it. A worker claims a trial for a few seconds, with its row locked and locked rows skipped, so that workers that look for
work at the same moment get different ones; then it acquires the lease. A worker that dies between the two delays one trial
by these seconds.

A search that has ended or died is no longer open: it expires unless its process renews it. Workers then stop what they
measure for it, and the next search that opens removes what it has left.
"""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import sqlalchemy as sa

from dovetail.errors import StoreError, TuningError
from dovetail.tuning import store_schema
from dovetail.tuning.environment import Environment, canonical_json
from dovetail.tuning.store import Lease, Store, has_ended
from dovetail.tuning.store_schema import ENVIRONMENTS, FILES, MEASUREMENTS, PENDING, SEARCHES, TRIALS, WORKERS
from dovetail.tuning.trial import Trial

OPEN_SECONDS = 120.0
"""How long a search stays open that is not renewed."""
SEEN_SECONDS = 60.0
"""How long ago a worker that is not gone was last seen, at most."""
_CLAIM_SECONDS = 10.0
_PART_BYTES = 4 << 20


@dataclass(frozen=True)
class OpenSearch:
    """A search that has, or may soon have, trials for workers."""

    search: str
    label: str
    environment: Environment
    release: str = field(default_factory=lambda: version("dovetail"))
    """The version of dovetail that wrote its trials, which another one may not read."""


@dataclass(frozen=True)
class QueuedTrial:
    """A trial in the queue, where it is stopped, and whether it needs a fresh process."""

    search: OpenSearch
    position: int
    trial: Trial
    timeout: float
    trial_seconds: float
    is_fresh: bool


@dataclass(frozen=True)
class WorkerState:
    """A worker that a search has seen; `refusal` is why it takes no trials of this search, empty if it does."""

    worker: str
    refusal: str


class TrialQueue:
    """Trials of any number of searches for any number of workers; `lease_seconds` is how long leases last unrenewed."""

    def __init__(self, store: Store, *, lease_seconds: float = 30.0) -> None:
        self.store, self.lease_seconds = store, lease_seconds

    # Methods of the process that searches.

    def open(self, environment: Environment, label: str) -> str:
        """Open a search in an environment; return its name. What searches that have died left is removed."""
        search = uuid.uuid4().hex
        description = canonical_json(environment.to_json())

        def work(connection: sa.Connection) -> None:
            now = self.store.now(connection)
            dead = sa.select(SEARCHES.c.search).where(SEARCHES.c.expires <= now)
            _remove(connection, list(connection.execute(dead).scalars()))
            store_schema.insert_if_absent(
                connection, ENVIRONMENTS, key=environment.key, description=description
            )
            store_schema.insert_if_absent(
                connection,
                SEARCHES,
                search=search,
                environment=environment.key,
                label=label,
                release=version("dovetail"),
                created=now,
                expires=now + OPEN_SECONDS,
            )

        self.store.transact(work, write=True)
        return search

    def renew(self, search: str) -> None:
        """Keep a search open."""

        def work(connection: sa.Connection) -> None:
            expires = self.store.now(connection) + OPEN_SECONDS
            connection.execute(sa.update(SEARCHES).where(SEARCHES.c.search == search).values(expires=expires))

        self.store.transact(work, write=True)

    def close(self, search: str) -> None:
        """End a search: workers stop what they measure for it."""
        self.store.transact(lambda connection: _remove(connection, [search]), write=True)

    def add_file(self, search: str, path: Path) -> None:
        """Make a file available to workers under its name, in parts that a database takes."""
        with path.open("rb") as file:
            part = 0
            while (data := file.read(_PART_BYTES)) or not part:
                self._add_part(search, path.name, part, data)
                part += 1

    def _add_part(self, search: str, name: str, part: int, data: bytes) -> None:
        values = {"search": search, "name": name, "part": part, "data": data}
        self.store.transact(lambda c: store_schema.insert_if_absent(c, FILES, **values), write=True)

    def publish(
        self,
        search: str,
        trials: Sequence[Trial],
        *,
        timeout: float,
        trial_seconds: float,
        is_fresh: bool = False,
    ) -> None:
        """Add trials behind those that are in the queue; raise TuningError if the search is no longer open."""
        rows = [(trial.subject.digest, pickle.dumps(trial)) for trial in trials]

        def work(connection: sa.Connection) -> bool:
            is_open = sa.select(SEARCHES.c.search).where(SEARCHES.c.search == search)
            if connection.execute(is_open).first() is None:
                return False
            last = connection.execute(
                sa.select(sa.func.max(TRIALS.c.position)).where(TRIALS.c.search == search)
            ).scalar()
            present = set(
                connection.execute(sa.select(TRIALS.c.subject).where(TRIALS.c.search == search)).scalars()
            )
            values = [
                {
                    "search": search,
                    "position": (last or 0) + number,
                    "subject": subject,
                    "trial": packed,
                    "timeout": timeout,
                    "trial_seconds": trial_seconds,
                    "is_fresh": is_fresh,
                    "is_stopped": False,
                    "claimed": 0.0,
                }
                for number, (subject, packed) in enumerate(rows, 1)
                if subject not in present
            ]
            if values:
                connection.execute(sa.insert(TRIALS), values)
            return True

        if not self.store.transact(work, write=True):
            raise TuningError(
                f"the search was removed from {self.store.name}, because its process did nothing for more than "
                f"{OPEN_SECONDS:.0f} s. Start it again: what was measured is in the store."
            )

    def withdraw(self, search: str, *, only_free: bool = False) -> None:
        """Remove the trials of a search, or those that no worker measures; workers stop what is removed."""

        def work(connection: sa.Connection) -> None:
            chosen = TRIALS.c.search == search
            if only_free:
                now = self.store.now(connection)
                held = _measurement_of_trial().where(MEASUREMENTS.c.expires > now)
                held = held.where(MEASUREMENTS.c.status == PENDING)
                held = held.where(SEARCHES.c.search == TRIALS.c.search)
                chosen = sa.and_(chosen, TRIALS.c.claimed <= now, ~sa.exists(held.correlate(TRIALS)))
            connection.execute(sa.delete(TRIALS).where(chosen))

        self.store.transact(work, write=True)

    def remaining(self, search: str) -> dict[str, bool]:
        """Return the subjects of the trials that are in the queue, with whether each was stopped without a result."""
        query = sa.select(TRIALS.c.subject, TRIALS.c.is_stopped).where(TRIALS.c.search == search)
        return self.store.transact(lambda connection: {s: bool(x) for s, x in connection.execute(query)})

    def workers(self, search: str) -> list[WorkerState]:
        """Return the workers that were seen lately, in the order of their names."""

        def work(connection: sa.Connection) -> list[WorkerState]:
            since = self.store.now(connection) - SEEN_SECONDS
            query = sa.select(WORKERS).where(WORKERS.c.search == search, WORKERS.c.seen > since)
            rows = connection.execute(query.order_by(WORKERS.c.worker)).all()
            return [WorkerState(row.worker, row.refusal) for row in rows]

        return self.store.transact(work)

    # Methods of workers.

    def searches(self) -> list[OpenSearch]:
        """Return the open searches, the oldest first."""

        def work(connection: sa.Connection) -> Sequence[Any]:
            now = self.store.now(connection)
            columns = (SEARCHES.c.search, SEARCHES.c.label, SEARCHES.c.release, ENVIRONMENTS.c.description)
            query = (
                sa.select(*columns)
                .join(ENVIRONMENTS, SEARCHES.c.environment == ENVIRONMENTS.c.key)
                .where(SEARCHES.c.expires > now)
                .order_by(SEARCHES.c.created, SEARCHES.c.search)
            )
            return connection.execute(query).all()

        rows = self.store.transact(work)
        return [
            OpenSearch(row.search, row.label, Environment.from_json(json.loads(row.description)), row.release)
            for row in rows
        ]

    def report(self, search: str, worker: str, refusal: str = "") -> None:
        """Record that a worker is there for a search, or why it is not."""

        def work(connection: sa.Connection) -> None:
            values = {"refusal": refusal, "seen": self.store.now(connection)}
            if not store_schema.insert_if_absent(connection, WORKERS, search=search, worker=worker, **values):
                is_row = sa.and_(WORKERS.c.search == search, WORKERS.c.worker == worker)
                connection.execute(sa.update(WORKERS).where(is_row).values(**values))

        self.store.transact(work, write=True)

    def take(self, searches: Sequence[OpenSearch]) -> tuple[QueuedTrial, Lease] | None:
        """Return a trial of one of some searches, the oldest first, with its lease; None if there is none to take."""
        if not searches:
            return None
        by_name = {each.search: each for each in searches}

        def work(connection: sa.Connection) -> Any:
            now = self.store.now(connection)
            row = connection.execute(_free_trials(by_name, now, ())).first()
            if row is None:
                ended = [name for name in _holders(connection, by_name) if has_ended(name)]
                row = connection.execute(_free_trials(by_name, now, ended)).first() if ended else None
            if row is not None:
                connection.execute(
                    sa.update(TRIALS)
                    .where(TRIALS.c.search == row.search, TRIALS.c.position == row.position)
                    .values(claimed=now + _CLAIM_SECONDS)
                )
            return row

        row = self.store.transact(work, write=True)
        if row is None:
            return None
        try:
            trial = cast("Trial", pickle.loads(row.trial))
        except Exception as error:
            raise StoreError(
                self.store.name,
                f"has a trial that cannot be read ({type(error).__name__}: {error}): is the search of another release?",
            ) from error
        search = by_name[row.search]
        queued = QueuedTrial(search, row.position, trial, row.timeout, row.trial_seconds, row.is_fresh)
        lease = self.store.acquire(trial.subject, search.environment, seconds=self.lease_seconds)
        return None if lease is None else (queued, lease)

    def is_queued(self, queued: QueuedTrial) -> bool:
        """Return whether the search still waits for a trial that was taken."""

        def work(connection: sa.Connection) -> bool:
            query = (
                sa.select(TRIALS.c.position)
                .join(SEARCHES, SEARCHES.c.search == TRIALS.c.search)
                .where(
                    TRIALS.c.search == queued.search.search,
                    TRIALS.c.position == queued.position,
                    SEARCHES.c.expires > self.store.now(connection),
                )
            )
            return connection.execute(query).first() is not None

        return self.store.transact(work)

    def finish(self, queued: QueuedTrial, *, has_result: bool) -> None:
        """Remove a trial that has a result, or mark one that was stopped without: it is not taken again."""
        is_row = sa.and_(TRIALS.c.search == queued.search.search, TRIALS.c.position == queued.position)
        change = (
            sa.delete(TRIALS).where(is_row)
            if has_result
            else sa.update(TRIALS).where(is_row).values(is_stopped=True)
        )
        self.store.transact(lambda connection: connection.execute(change), write=True)

    def read_file(self, search: str, name: str, path: Path) -> bool:
        """Write a file of a search to a path; return False if the search does not have it any longer."""
        temporary = path.with_name(path.name + ".part")
        part = 0
        with temporary.open("wb") as file:
            while True:
                query = sa.select(FILES.c.data).where(
                    FILES.c.search == search, FILES.c.name == name, FILES.c.part == part
                )
                data = self.store.transact(lambda c, query=query: c.execute(query).scalar_one_or_none())
                if data is None:
                    break
                file.write(data)
                part += 1
        if part:
            temporary.replace(path)
        else:
            temporary.unlink()
        return part > 0


def _measurement_of_trial() -> sa.Select[tuple[str]]:
    """Select the measurement of the subject of a trial in the environment of its search."""
    return sa.select(MEASUREMENTS.c.subject).where(
        MEASUREMENTS.c.environment == SEARCHES.c.environment, MEASUREMENTS.c.subject == TRIALS.c.subject
    )


def _free_trials(searches: Collection[str], now: float, ended: Sequence[str]) -> sa.Select[Any]:
    """Select the first trial that is neither measured, nor leased by a live worker, nor claimed, and lock its row."""
    is_held = MEASUREMENTS.c.expires > now
    if ended:
        is_held = sa.and_(is_held, MEASUREMENTS.c.worker.not_in(ended))
    taken = _measurement_of_trial().where(sa.or_(MEASUREMENTS.c.status != PENDING, is_held))
    return (
        sa.select(TRIALS)
        .join(SEARCHES, SEARCHES.c.search == TRIALS.c.search)
        .where(
            TRIALS.c.search.in_(searches),
            SEARCHES.c.expires > now,
            TRIALS.c.claimed <= now,
            TRIALS.c.is_stopped.is_(False),
            ~sa.exists(taken.correlate(TRIALS, SEARCHES)),
        )
        .order_by(SEARCHES.c.created, TRIALS.c.search, TRIALS.c.position)
        .limit(1)
        .with_for_update(of=TRIALS, skip_locked=True)
    )


def _holders(connection: sa.Connection, searches: Collection[str]) -> list[str]:
    """Return the workers that hold leases of trials."""
    query = (
        sa.select(MEASUREMENTS.c.worker)
        .distinct()
        .join(SEARCHES, SEARCHES.c.environment == MEASUREMENTS.c.environment)
        .join(
            TRIALS,
            sa.and_(TRIALS.c.search == SEARCHES.c.search, TRIALS.c.subject == MEASUREMENTS.c.subject),
        )
        .where(TRIALS.c.search.in_(searches), MEASUREMENTS.c.status == PENDING)
    )
    return list(connection.execute(query).scalars())


def _remove(connection: sa.Connection, searches: Sequence[str]) -> None:
    for table in (TRIALS, FILES, WORKERS, SEARCHES):
        connection.execute(sa.delete(table).where(table.c.search.in_(searches)))
