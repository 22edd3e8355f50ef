"""The tables of a store of measurements, their version, and the steps from one version to the next."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from dovetail.errors import StoreError

VERSION = 1
MIGRATIONS: dict[int, Callable[[sa.Connection], None]] = {}
"""By version of the schema, what turns it into the next version. A step is never edited once it was released."""

PENDING, MEASURED, FAILED = "pending", "measured", "failed"
"""The status of a measurement: not completed yet, whether it is leased or not; completed; completed without samples."""

# For PostgreSQL it is extract(epoch from clock_timestamp()).
_CLOCKS = {"sqlite": "(julianday('now') - 2440587.5) * 86400.0"}

_METADATA = sa.MetaData()
_SCHEMA = sa.Table("tuning_schema", _METADATA, sa.Column("version", sa.Integer, nullable=False))
ENVIRONMENTS = sa.Table(
    "tuning_environments",
    _METADATA,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("description", sa.Text, nullable=False),
)
# Floats are text as `repr` writes them: SQLite would read NaN as NULL and -0.0 as 0.0.
MEASUREMENTS = sa.Table(
    "tuning_measurements",
    _METADATA,
    sa.Column("environment", sa.Text, sa.ForeignKey(ENVIRONMENTS.c.key), primary_key=True),
    sa.Column("subject", sa.Text, primary_key=True),
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


def read_version(connection: sa.Connection, store: str) -> int:
    """Return the version of the schema, 0 for an empty database; raise StoreError if it cannot be used."""
    tables = sa.inspect(connection).get_table_names()
    if not tables:
        return 0
    if _SCHEMA.name not in tables:
        raise StoreError(store, "is a database of something else; give the path of a store, or of a new file")
    versions = connection.execute(sa.select(_SCHEMA.c.version)).scalars().all()
    if len(versions) != 1 or type(versions[0]) is not int or versions[0] < 1:
        raise StoreError(store, f"has no valid schema version ({list(versions)}); give another path")
    if versions[0] > VERSION:
        raise StoreError(
            store,
            f"was written by a newer release of dovetail: its schema has version {versions[0]}, this release reads up to "
            f"{VERSION}. Update dovetail, or give another path",
        )
    return versions[0]


def migrate(connection: sa.Connection, store: str) -> None:
    """Create the tables in an empty database, or bring older ones to the current version, in the given transaction."""
    version = read_version(connection, store)  # another process may have migrated it since it was read last
    if version == 0:
        _METADATA.create_all(connection)
        connection.execute(sa.insert(_SCHEMA).values(version=VERSION))
        return
    for step in range(version, VERSION):
        MIGRATIONS[step](connection)
    connection.execute(sa.update(_SCHEMA).values(version=VERSION))


def read_clock(connection: sa.Connection) -> float:
    """Return the seconds since 1970 by the clock of the database, in fractions of at least a millisecond."""
    return connection.execute(sa.select(sa.literal_column(_CLOCKS[connection.dialect.name]))).scalar_one()
