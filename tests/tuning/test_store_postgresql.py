"""Stores on a PostgreSQL server: lost connections, time limits, databases that others use too, rights."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import event

from dovetail.errors import StoreError
from dovetail.tuning import store_schema
from dovetail.tuning.store import Store
from tests.tuning.helpers import BODY, DONE, FAILED, HERE, body, measured, scalar
from tests.tuning.postgresql_server import Server, free_port

TABLES = {
    *("tuning_schema", "tuning_environments", "tuning_measurements"),
    *("tuning_searches", "tuning_files", "tuning_trials", "tuning_workers"),
}


@pytest.fixture
def url(postgresql: Server) -> str:
    return postgresql.url()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store(url) as opened:
        yield opened


def session(store: Store) -> int:
    return scalar(store, "SELECT pg_backend_pid()")


def tables(server: Server, schema: str) -> set[object]:
    rows = server.execute(f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'")
    return {name for (name,) in rows}


# Lost connections


def test_a_session_that_was_ended_between_transactions_is_opened_again(
    store: Store, postgresql: Server, caplog: pytest.LogCaptureFixture
) -> None:
    measured(store, BODY, DONE)
    before = session(store)
    postgresql.execute(f"SELECT pg_terminate_backend({before})")
    assert store.get(BODY, HERE) == DONE
    assert session(store) != before
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@contextmanager
def ended_at(store: Store, server: Server, when: str, number: int) -> Iterator[list[int]]:
    """End the session of a store before or after one of its statements, or after one of its commits, by number."""
    engine = store._database.engine
    counted = [0]

    def end(connection: sa.Connection, *_: Any) -> None:
        counted[0] += 1
        if counted[0] == number:
            driver: Any = connection.connection.driver_connection
            server.execute(f"SELECT pg_terminate_backend({driver.info.backend_pid})")

    commit = psycopg.Connection.commit

    def lose_acknowledgement(connection: Any) -> None:
        commit(connection)
        counted[0] += 1
        if counted[0] == number:
            connection.close()
            raise psycopg.OperationalError("the connection is closed")

    with pytest.MonkeyPatch.context() as patch:
        if when == "acknowledgement":
            patch.setattr(psycopg.Connection, "commit", lose_acknowledgement)
        else:
            event.listen(engine, f"{when}_cursor_execute", end)
        try:
            yield counted
        finally:
            if when != "acknowledgement":
                event.remove(engine, f"{when}_cursor_execute", end)


@pytest.mark.parametrize("when", ["before", "after", "acknowledgement"])
def test_a_connection_lost_at_any_moment_loses_and_doubles_nothing(
    store: Store, postgresql: Server, when: str
) -> None:
    last, number = 1, 0
    while number < last:
        number += 1
        with ended_at(store, postgresql, when, number) as counted:
            lease = store.acquire(body(number), HERE, seconds=60)
            assert lease is not None
            assert lease.attempt == 1
            assert lease.renew(60)
            lease.release()
            lease = store.acquire(body(number), HERE, seconds=60)
            assert lease is not None
            assert lease.attempt == 1
            with Store(postgresql.url(schema=schema_of(store))) as other:
                assert other.acquire(body(number), HERE, seconds=60) is None
            assert lease.complete(DONE)
            assert store.get(body(number), HERE) == DONE
        last = counted[0]
    assert last >= {"before": 15, "after": 15, "acknowledgement": 5}[when]
    assert [measurement for _, measurement in store.results(HERE)] == [DONE] * number


def schema_of(store: Store) -> str:
    return scalar(store, "SELECT current_schema()")


def test_a_measurement_is_not_stored_twice_when_its_acknowledgement_is_lost(
    store: Store, postgresql: Server
) -> None:
    lease = store.acquire(BODY, HERE, seconds=0.05)
    time.sleep(0.1)
    other = store.acquire(BODY, HERE, seconds=60)
    assert lease is not None
    assert other is not None
    with ended_at(store, postgresql, "acknowledgement", 1):
        assert other.complete(DONE)
    with ended_at(store, postgresql, "acknowledgement", 1):
        assert not lease.complete(FAILED)
    assert store.get(BODY, HERE) == DONE


def test_a_server_that_is_restarted_is_waited_for(
    store: Store, postgresql: Server, caplog: pytest.LogCaptureFixture
) -> None:
    measured(store, BODY, DONE)
    results: list[Any] = []
    postgresql.stop()
    reader = threading.Thread(target=lambda: results.append(store.get(BODY, HERE)))
    reader.start()
    time.sleep(2.5)
    postgresql.start()
    reader.join(60)
    assert results == [DONE]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        f"the store '{store.name}' cannot be reached: no server accepts connections there; it is tried again"
    ]


def test_a_server_that_does_not_come_back_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("dovetail.tuning.store.RETRY_SECONDS", 0.5)
        store = Store(url)
    with store:
        lease = store.acquire(BODY, HERE, seconds=60)
        assert lease is not None

        def unreachable(*_: Any, **__: Any) -> None:
            raise psycopg.OperationalError("connection failed: Connection refused")

        monkeypatch.setattr(psycopg.Connection, "execute", unreachable)
        monkeypatch.setattr(psycopg.Cursor, "execute", unreachable)
        start = time.monotonic()
        with pytest.raises(StoreError, match=r"cannot be reached: .* It was tried again for 0\.5 seconds\."):
            store.get(BODY, HERE)
        assert 0.5 <= time.monotonic() - start < 30
        with pytest.raises(StoreError, match="cannot be reached"):
            lease.complete(DONE)
        monkeypatch.undo()
        assert lease.complete(DONE)  # it was not given up
        assert store.get(BODY, HERE) == DONE


def test_opening_waits_for_a_server_too(monkeypatch: pytest.MonkeyPatch, postgresql: Server) -> None:
    monkeypatch.setattr("dovetail.tuning.store._OPENING_RETRY_SECONDS", 0.2)
    message = r"'postgresql://127\.0\.0\.1:\d+/db' cannot be reached: no server accepts connections there\. It was tried"
    with pytest.raises(StoreError, match=message):
        Store(f"postgresql://127.0.0.1:{free_port()}/db")
    missing = r"'postgresql:///db\?host=/no/such/folder' cannot be reached: no server"
    with pytest.raises(StoreError, match=missing):
        Store("postgresql:///db?host=/no/such/folder")
    with pytest.raises(StoreError, match="the name of the host is unknown"):
        Store("postgresql://no-such-host.invalid/db")


def test_deadlocks_are_run_again(url: str) -> None:
    with Store(url) as one, Store(url) as two:
        for number in range(2):
            measured(one, body(number), DONE)
        runs: list[int] = []
        meeting = threading.Barrier(2, timeout=60)

        def lock(order: tuple[int, int]) -> Callable[[sa.Connection], None]:
            def work(connection: sa.Connection) -> None:
                runs.append(order[0])
                update = sa.update(store_schema.MEASUREMENTS)
                for position, number in enumerate(order):
                    row = update.where(store_schema.MEASUREMENTS.c.subject == body(number).digest)
                    connection.execute(row.values(attempts=store_schema.MEASUREMENTS.c.attempts + 1))
                    if position == 0 and runs.count(order[0]) == 1:
                        meeting.wait()

            return work

        other = threading.Thread(target=lambda: two.transact(lock((1, 0)), write=True))
        other.start()
        one.transact(lock((0, 1)), write=True)
        other.join()
        assert len(runs) == 3
        query = "SELECT attempts FROM tuning_measurements"
        rows = one.transact(lambda connection: connection.exec_driver_sql(query).scalars().all())
        assert rows == [3, 3]


def test_what_cannot_be_serialized_is_run_again(store: Store) -> None:
    runs: list[int] = []

    def work(connection: sa.Connection) -> int:
        runs.append(0)
        if len(runs) < 3:
            connection.exec_driver_sql("DO $$ BEGIN RAISE 'busy' USING ERRCODE = '40001'; END $$")
        return len(runs)

    assert store.transact(work) == 3


def test_an_interrupt_leaves_a_store_that_can_be_used(store: Store) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    measured(store, BODY, DONE)
    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            scalar(store, "SELECT pg_sleep(50)")
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert store.get(BODY, HERE) == DONE


# Time limits


def test_sessions_have_time_limits(store: Store) -> None:
    assert scalar(store, "SHOW lock_timeout") == "30s"
    assert scalar(store, "SHOW statement_timeout") == "1min"
    assert scalar(store, "SHOW idle_in_transaction_session_timeout") == "10s"
    assert scalar(store, "SHOW transaction_isolation") == "read committed"
    assert (
        scalar(store, "SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid()")
        == "dovetail"
    )


def test_limits_of_the_url_are_kept(store: Store, url: str) -> None:
    options = (
        "%20-clock_timeout%3D100%20-cstatement_timeout%3D1000%20-cidle_in_transaction_session_timeout%3D200"
    )
    with Store(url + options) as limited:
        assert scalar(limited, "SHOW lock_timeout") == "100ms"
        measured(store, BODY, DONE)

        def blocked(_: sa.Connection) -> None:
            limited.transact(
                lambda connection: connection.execute(sa.text("DELETE FROM tuning_measurements"))
            )

        def lock(connection: sa.Connection) -> None:
            connection.exec_driver_sql("SELECT 1 FROM tuning_measurements FOR UPDATE")
            blocked(connection)

        with pytest.raises(StoreError, match="is locked: another transaction has held a lock for too long"):
            store.transact(lock)
        with pytest.raises(StoreError, match="has taken too long to answer"):
            scalar(limited, "SELECT pg_sleep(50)")
        runs: list[int] = []

        def stopped(connection: sa.Connection) -> int:
            runs.append(connection.exec_driver_sql("SELECT 1").scalar_one())
            time.sleep(0.5 if len(runs) == 1 else 0.0)
            return connection.exec_driver_sql("SELECT 2").scalar_one()

        assert limited.transact(stopped) == 2
        assert len(runs) >= 2


# Databases that others use


def test_a_store_leaves_other_tables_alone(postgresql: Server) -> None:
    postgresql.execute(
        "CREATE SCHEMA others; CREATE TABLE others.orders (id int); INSERT INTO others.orders VALUES (7)"
    )
    with Store(postgresql.url(schema="others")) as store:
        measured(store, BODY, DONE)
    assert tables(postgresql, "others") == {*TABLES, "orders"}
    assert postgresql.execute("SELECT id FROM others.orders") == [(7,)]


def test_schemas_are_separate_stores(postgresql: Server) -> None:
    with Store(postgresql.url()) as one, Store(postgresql.url()) as two:
        measured(one, BODY, DONE)
        assert two.get(BODY, HERE) is None


def test_a_store_is_the_first_on_the_search_path(postgresql: Server) -> None:
    postgresql.execute("CREATE SCHEMA team; CREATE SCHEMA own")
    with Store(postgresql.url(schema="team")) as store:
        measured(store, BODY, DONE)
    with Store(postgresql.url(schema="own,team")) as store:
        assert store.get(BODY, HERE) == DONE
    assert tables(postgresql, "own") == set()
    with Store(postgresql.url(schema="missing,own")) as store:
        assert store.get(BODY, HERE) is None
    assert tables(postgresql, "own") == TABLES


def test_a_search_path_without_schemas_is_refused(postgresql: Server) -> None:
    with pytest.raises(StoreError, match=r"no schema of the search path exists\. Create one"):
        Store(postgresql.url(schema="missing"))


@pytest.mark.parametrize(
    "statement",
    ["TABLE {}.tuning_measurements (id int)", "VIEW {}.tuning_schema AS SELECT 'no store' AS note"],
)
def test_a_relation_of_the_same_name_is_refused(postgresql: Server, statement: str) -> None:
    url = postgresql.url()
    schema = url.rpartition("%3D")[2]
    postgresql.execute(f"CREATE {statement.format(schema)}")
    with pytest.raises(StoreError, match=r"of something else.* give a database or a schema of its own"):
        Store(url)
    assert len(tables(postgresql, schema)) == statement.startswith("TABLE")


def test_an_encoding_that_lacks_characters_is_refused(postgresql: Server) -> None:
    postgresql.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(StoreError, match="has the encoding LATIN1; give a database with ENCODING 'UTF8'"):
        Store(postgresql.url(database="latin"))


# Rights


def test_rights_that_are_missing_are_named(postgresql: Server) -> None:
    postgresql.execute(
        "CREATE SCHEMA guarded; CREATE ROLE reader LOGIN; GRANT USAGE ON SCHEMA guarded TO reader"
    )
    owner = postgresql.url(schema="guarded")
    reader = owner.replace("tester@", "reader@")
    with pytest.raises(
        StoreError, match=r"rights of its user \(permission denied for schema guarded\)\. Grant them"
    ):
        Store(reader)
    with Store(owner) as store:
        measured(store, BODY, DONE)
    postgresql.execute("GRANT SELECT ON ALL TABLES IN SCHEMA guarded TO reader")
    with Store(reader) as store:
        assert store.get(BODY, HERE) == DONE
        with pytest.raises(StoreError, match="permission denied for table tuning_"):
            store.acquire(body(1), HERE, seconds=1)


def test_a_server_that_can_only_be_read_is_named(url: str) -> None:
    with pytest.raises(StoreError, match=r"can only be read: .* Give the primary server"):
        Store(f"{url}%20-cdefault_transaction_read_only%3Don")


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dovetail\[postgresql\]'"):
        Store("postgresql://host/db")
