"""Versions of stores, their migration, and tables that are not those of a store, on each database."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from dovetail.errors import StoreError
from dovetail.tuning import store_schema
from dovetail.tuning.store import Store
from tests.tuning.helpers import BODY, DONE, HERE, measured, scalar

VERSION = store_schema.VERSION
TABLES = ("tuning_schema", "tuning_environments", "tuning_measurements")


def execute(store: Store, statement: str) -> None:
    store.transact(lambda connection: connection.exec_driver_sql(statement), write=True)


def contents(store: Store) -> list[Any]:
    def read(connection: sa.Connection) -> list[Any]:
        return [connection.exec_driver_sql(f"SELECT * FROM {table}").all() for table in TABLES]

    return store.transact(read)


def test_the_clock_is_that_of_the_database(url: str) -> None:
    with Store(url) as store:
        assert abs(store.transact(store.now) - time.time()) < 5.0


def test_a_store_is_opened_again(url: str) -> None:
    with Store(url) as store:
        measured(store, BODY, DONE)
    for _ in range(2):
        with Store(url) as store:
            assert store.get(BODY, HERE) == DONE


# Versions


def with_version(url: str, version: object) -> None:
    with Store(url) as store:
        measured(store, BODY, DONE)
        execute(store, f"UPDATE tuning_schema SET version = {version!r}")


def test_a_newer_store_is_refused_and_left_alone(url: str) -> None:
    with Store(url) as opened:
        with_version(url, VERSION + 1)
        before = contents(opened)
        message = rf"version {VERSION + 1}, this release reads up to {VERSION}\. Update dovetail"
        with pytest.raises(StoreError, match=message) as error:
            Store(url)
        assert opened.name in str(error.value)
        assert contents(opened) == before


@pytest.mark.parametrize("version", [0, -1])
def test_a_store_without_a_valid_version_is_refused(url: str, version: int) -> None:
    with_version(url, version)
    with pytest.raises(StoreError, match=rf"no valid schema version \(\[{version}\]\)"):
        Store(url)


@pytest.mark.parametrize("statement", ["DELETE FROM tuning_schema", "INSERT INTO tuning_schema VALUES (1)"])
def test_a_store_without_one_version_is_refused(url: str, statement: str) -> None:
    with Store(url) as store:
        execute(store, statement)
    with pytest.raises(StoreError, match="no valid schema version"):
        Store(url)


def add_column(connection: Any) -> None:
    connection.exec_driver_sql("ALTER TABLE tuning_measurements ADD COLUMN power TEXT")


def test_an_older_store_is_migrated_step_by_step(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_version(url, 1)
    steps: list[int] = []
    monkeypatch.setattr(store_schema, "VERSION", 3)
    monkeypatch.setattr(store_schema, "MIGRATIONS", {1: add_column, 2: lambda _: steps.append(2)})
    for _ in range(2):
        with Store(url) as store:
            scalar(store, "SELECT power FROM tuning_measurements")
        with Store(url) as store:
            assert store.get(BODY, HERE) == DONE
    assert steps == [2]


def test_a_failed_migration_changes_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_version(url, VERSION)

    def fail(_: Any) -> None:
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(store_schema, "VERSION", VERSION + 2)
        patch.setattr(store_schema, "MIGRATIONS", {VERSION: add_column, VERSION + 1: fail})
        with pytest.raises(RuntimeError, match="interrupted"):
            Store(url)
    with Store(url) as store:
        assert store.get(BODY, HERE) == DONE
        with pytest.raises(StoreError, match="column"):
            scalar(store, "SELECT power FROM tuning_measurements")


# Tables of something else


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("DROP TABLE tuning_schema", r"of something else \(it has 'tuning_environments'\)"),
        ("DROP TABLE tuning_measurements", "lacks it .there is no column 'attempts'"),
        ("ALTER TABLE tuning_schema RENAME COLUMN version TO number", "'tuning_schema' of something else"),
        ("ALTER TABLE tuning_measurements DROP COLUMN samples", "there is no column 'samples'"),
    ],
)
def test_tables_of_another_form_are_refused(url: str, statement: str, reason: str) -> None:
    with Store(url) as store:
        execute(store, statement)
    with pytest.raises(StoreError, match=reason):
        Store(url)


def test_tables_are_created_in_one_transaction(
    new_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_url()
    with monkeypatch.context() as patch:
        patch.setattr(store_schema, "VERSION", None)  # cannot be stored: the last statement fails
        with pytest.raises(StoreError):
            Store(url)
    with Store(url) as store:
        measured(store, BODY, DONE)


# What cannot be used


def test_a_damaged_row_is_named(store: Store) -> None:
    measured(store, BODY, DONE)
    execute(store, "UPDATE tuning_measurements SET samples = '[0.1'")
    with pytest.raises(StoreError, match=f"measurement that cannot be read .subject {BODY.digest}"):
        store.get(BODY, HERE)


def test_a_closed_store_is_refused(url: str) -> None:
    store = Store(url)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed; open it again"):
        store.get(BODY, HERE)
