"""The tables of a store of measurements, their version, and the steps from one version to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from dovetail.errors import StoreError

VERSION = 2

PENDING, MEASURED, FAILED = "pending", "measured", "failed"
"""The status of a measurement: not completed yet, whether it is leased or not; completed; completed without samples."""

_CLOCKS = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    # now() is when the transaction began.
    "postgresql": "extract(epoch from clock_timestamp())::double precision",
}
_INSERTS = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}

_COLUMNS = {
    "sqlite": (
        "SELECT m.name, c.name FROM sqlite_master m LEFT JOIN pragma_table_info(m.name) c "
        "WHERE m.type IN ('table', 'view') AND m.name NOT LIKE 'sqlite~_%' ESCAPE '~'"
    ),
    "postgresql": (
        "SELECT r.relname, a.attname FROM pg_catalog.pg_class r LEFT JOIN pg_catalog.pg_attribute a "
        "ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped "
        "WHERE r.relname = ANY(:names) AND pg_catalog.pg_table_is_visible(r.oid)"
    ),
}
_MIGRATION_LOCK = int.from_bytes(b"dovetail", "big")

# Hexadecimal digits: their order, and with it an index, must not depend on the locale of the server.
_HASH = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_METADATA = sa.MetaData()
_SCHEMA = sa.Table("tuning_schema", _METADATA, sa.Column("version", sa.Integer, nullable=False))
ENVIRONMENTS = sa.Table(
    "tuning_environments",
    _METADATA,
    sa.Column("key", _HASH, primary_key=True),
    sa.Column("description", sa.Text, nullable=False),
)
# Floats are text as `repr` writes them: SQLite would read NaN as NULL and -0.0 as 0.0.
MEASUREMENTS = sa.Table(
    "tuning_measurements",
    _METADATA,
    sa.Column("environment", _HASH, sa.ForeignKey(ENVIRONMENTS.c.key), primary_key=True),
    sa.Column("subject", _HASH, primary_key=True),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("kind", "key", "operands", "backend", "mode")),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("worker", sa.Text, nullable=False),
    sa.Column("lease", sa.Text, nullable=False),
    sa.Column("expires", sa.Double, nullable=False),
    sa.Column("completed", sa.Double),
    sa.Column("samples", sa.Text),
    sa.Column("failure", sa.Text),
    sa.Column("numeric_error", sa.Text),
    sa.Column("peak_bytes", sa.BigInteger),
    sa.Column("compile_seconds", sa.Text),
    sa.Column("details", sa.Text),
)

# The queue of trials that searches have for workers. Times are by the clock of the database.
SEARCHES = sa.Table(
    "tuning_searches",
    _METADATA,
    sa.Column("search", sa.Text, primary_key=True),
    sa.Column("environment", sa.Text, sa.ForeignKey(ENVIRONMENTS.c.key), nullable=False),
    sa.Column("label", sa.Text, nullable=False),
    sa.Column("release", sa.Text, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("expires", sa.Double, nullable=False),
)
FILES = sa.Table(
    "tuning_files",
    _METADATA,
    sa.Column("search", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("part", sa.Integer, primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
TRIALS = sa.Table(
    "tuning_trials",
    _METADATA,
    sa.Column("search", sa.Text, primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("trial", sa.LargeBinary, nullable=False),
    sa.Column("timeout", sa.Double, nullable=False),
    sa.Column("trial_seconds", sa.Double, nullable=False),
    sa.Column("is_fresh", sa.Boolean, nullable=False),
    sa.Column("is_stopped", sa.Boolean, nullable=False),
    sa.Column("claimed", sa.Double, nullable=False),
)
WORKERS = sa.Table(
    "tuning_workers",
    _METADATA,
    sa.Column("search", sa.Text, primary_key=True),
    sa.Column("worker", sa.Text, primary_key=True),
    sa.Column("refusal", sa.Text, nullable=False),
    sa.Column("seen", sa.Double, nullable=False),
)


def _add_queue(connection: sa.Connection) -> None:
    _METADATA.create_all(connection, [SEARCHES, FILES, TRIALS, WORKERS])


MIGRATIONS: dict[int, Callable[[sa.Connection], None]] = {1: _add_queue}
"""By version of the schema, what turns it into the next version. A step is never edited once it was released."""


def read_version(connection: sa.Connection, store: str) -> int:
    """Return the version of the schema, 0 if it has no tables yet; raise StoreError if the database cannot be used.

    A database on a server may have other tables too, while a file that has them belongs to another program.
    """
    is_shared = connection.dialect.name == "postgresql"
    if is_shared:
        _check_server(connection, store)
    advice = (
        "give a database or a schema of its own"
        if is_shared
        else "give the path of a store, or of a new file"
    )
    columns = _read_columns(connection)
    if not columns:
        return 0
    if _SCHEMA.name not in columns:
        raise StoreError(store, f"is a database of something else (it has '{min(columns)}'); {advice}")
    _check_columns(columns, [_SCHEMA], store, advice)
    versions = connection.execute(sa.select(_SCHEMA.c.version)).scalars().all()
    if len(versions) != 1 or type(versions[0]) is not int or versions[0] < 1:
        raise StoreError(store, f"has no valid schema version ({list(versions)}); {advice}")
    if versions[0] > VERSION:
        raise StoreError(
            store,
            f"was written by a newer release of dovetail: its schema has version {versions[0]}, this release reads up to "
            f"{VERSION}. Update dovetail, or {advice}",
        )
    if versions[0] == VERSION:
        _check_columns(columns, _METADATA.sorted_tables, store, advice)
    return versions[0]


def migrate(connection: sa.Connection, store: str) -> None:
    """Create the tables in an empty database, or bring older ones to the current version, in the given transaction."""
    if connection.dialect.name == "postgresql":  # on SQLite the transaction has the write lock already
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
    version = read_version(connection, store)  # another process may have migrated it since it was read last
    if version == 0:
        _METADATA.create_all(connection)
        connection.execute(sa.insert(_SCHEMA).values(version=VERSION))
        return
    for step in range(version, VERSION):
        MIGRATIONS[step](connection)
    connection.execute(sa.update(_SCHEMA).values(version=VERSION))


def _read_columns(connection: sa.Connection) -> dict[str, set[str]]:
    """Return the columns of tables and views by name: of a file all, on a server those that our names refer to there.

    On a server a name refers to the first relation on the search path; where there is none, tables are created in the
    first schema of the path.
    """
    query = sa.text(_COLUMNS[connection.dialect.name])
    if connection.dialect.name == "postgresql":
        query = query.bindparams(names=list(_METADATA.tables))
    columns: dict[str, set[str]] = {}
    for table, column in connection.execute(query):
        columns.setdefault(table, set()).add(column)
    return columns


def _check_columns(
    columns: Mapping[str, set[str]], tables: Iterable[sa.Table], store: str, advice: str
) -> None:
    for table in tables:
        missing = {column.name for column in table.columns} - columns.get(table.name, set())
        if missing:
            raise StoreError(
                store,
                f"has a table '{table.name}' of something else, or lacks it (there is no column '{min(missing)}'); {advice}",
            )


def _check_server(connection: sa.Connection, store: str) -> None:
    query = "SELECT current_setting('server_encoding'), current_schema()"
    encoding, schema = connection.execute(sa.text(query)).one()
    if encoding != "UTF8":
        raise StoreError(store, f"has the encoding {encoding}; give a database with ENCODING 'UTF8'")
    if schema is None:
        raise StoreError(
            store,
            "has no schema to keep tables in: no schema of the search path exists. Create one, or name another in the URL "
            "(?options=-csearch_path%3Dname)",
        )


def read_clock(connection: sa.Connection) -> float:
    """Return the seconds since 1970 by the clock of the database, in fractions of at least a millisecond."""
    return connection.execute(sa.select(sa.literal_column(_CLOCKS[connection.dialect.name]))).scalar_one()


def insert_if_absent(connection: sa.Connection, table: sa.Table, **values: Any) -> bool:
    """Insert a row; return False if there is one with the same primary key."""
    insert = _INSERTS[connection.dialect.name](table).values(**values).on_conflict_do_nothing()
    return connection.execute(insert.execution_options(preserve_rowcount=True)).rowcount == 1


def insert_measurements(connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows of measurements with equal columns, or complete those that are pending; final ones are left as they are."""
    statement = _INSERTS[connection.dialect.name](MEASUREMENTS)
    keys = [column.name for column in MEASUREMENTS.primary_key.columns]
    statement = statement.on_conflict_do_update(
        index_elements=keys,
        set_={name: statement.excluded[name] for name in rows[0] if name not in keys},
        where=MEASUREMENTS.c.status == PENDING,
    )
    connection.execute(statement, [dict(row) for row in rows])
