"""Stores on PostgreSQL servers: URLs, connections and their time limits, what is tried again, causes of errors.

The driver is psycopg 3. Transactions are READ COMMITTED: a conditional UPDATE that has waited for another one checks its
condition again on the new row, and an INSERT that has waited for one with the same key changes nothing, so that of two
workers one gets a lease.

*Credentials.* User and password are in the arguments of the driver and nowhere else: not in the engine's URL, not in the
name of the store. An error of the driver is neither the cause nor the context of a StoreError, and a text of the driver
that contains a credential is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

import sqlalchemy as sa
from sqlalchemy import event, exc

from dovetail.errors import InvalidArgument, did_you_mean
from dovetail.tuning.store_database import Database

_DIALECTS = ("postgresql", "postgres")
_DRIVER = "psycopg"
_FORM = (
    "give 'postgresql+psycopg://user:password@host:port/database?option=value', with @ : / ? # & % of user, password and "
    "values escaped ('@' is %40)"
)
_HOSTS = re.compile(r"[\w.,%:-]*|/.*")
_RESERVED = {"dbname", "client_encoding", "replication"}
_CREDENTIALS = (
    "password",
    "sslpassword",
    "oauth_client_secret",
    "scram_client_key",
    "scram_server_key",
)
"""Options of libpq with a secret as their value. `passfile`, `service` and `sslkey` are names of files."""

_LIMITS = {
    # Below the lock time-out: a process that was stopped inside of a transaction loses its locks before others give up.
    "idle_in_transaction_session_timeout": 10_000,
    "lock_timeout": 30_000,
    "statement_timeout": 60_000,
}
"""Time limits of a session in milliseconds, where server, user or URL set none."""
_OPTIONS = {
    "connect_timeout": 10,
    "tcp_user_timeout": 30_000,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "fallback_application_name": "dovetail",
}
"""Options of libpq that a URL may replace. Without these limits a host that is gone is waited for for hours."""

_LOST = "has lost its connection to the server"
_BUSY = "cannot finish a transaction beside those of others ({text})"
_FULL = "has no free connection. Raise max_connections of the server"
_TEMPORARY_STATES = {
    "25P03": _LOST,  # the transaction was idle for too long
    "40001": _BUSY,  # it cannot be serialized
    "40P01": _BUSY,  # deadlock
    "53300": _FULL,
    "57P01": _LOST,  # the server is shut down, or the session was ended
    "57P02": _LOST,  # the server crashed
    "57P03": _LOST,  # the server is starting
    "57P05": _LOST,  # the session was idle for too long
}
_PERMANENT_STATES = {
    "25006": "can only be read: the server is a standby, or its transactions are read-only. Give the primary server",
    "42501": "cannot be used with the rights of its user ({text}). Grant them, or give another schema",
    "55P03": "is locked: another transaction has held a lock for too long. Try again later",
    "57014": "has taken too long to answer ({text}). Try again later",
}
# libpq gives no SQLSTATE for what happens before there is a session.
_PERMANENT_TEXTS = {
    r"authentication failed|no password supplied|not permitted to log in|role \".*\" does not exist": (
        "refuses the user or the password. Correct them in the URL or in the password file"
    ),
    r"database \".*\" does not exist": "is not a database of this server. Create it, or correct the URL",
    r"pg_hba\.conf": (
        "does not admit this user from this host, or not with this encryption (pg_hba.conf). Admit it there, or set sslmode"
    ),
    r"does not support (SSL|GSS)|certificate|[Pp]ermission denied|definition of service|(^| )([Ii]nvalid|bad) \w+ ": (
        "cannot be used: {text}"
    ),
}
_TEMPORARY_TEXTS = {
    r"Connection refused|No such file": "cannot be reached: no server accepts connections there",
    r"failed to resolve|could not translate": "cannot be reached: the name of the host is unknown",
    r"time-?out|timed out": "cannot be reached: the host does not answer",
    r"starting up|shutting down|recovery": "cannot be reached: the server is starting or shutting down",
    r"too many|connection slots": _FULL,
    r"closed|terminat": _LOST,
}


def is_url(text: str) -> bool:
    """Return whether a URL is one of a PostgreSQL server, for this driver or another one."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme.strip().lower().partition("+")[0] in _DIALECTS


class PostgreSQL(Database):
    """A store on a server, which is not connected to yet.

    Raise InvalidArgument for a URL that is not valid. Its message has nothing of the URL but the driver: any other part
    may belong to a password that was not escaped.
    """

    is_in_memory = False
    chains_errors = False

    def __init__(self, url: str) -> None:
        driver = _import_driver(url)
        arguments = _arguments(url, {option.keyword.decode() for option in driver.pq.Conninfo.get_defaults()})
        self.name = _name(arguments)
        self.errors = (exc.SQLAlchemyError, driver.Error)
        self._connection_errors = (driver.OperationalError, driver.InterfaceError)
        self._secrets = frozenset(_secrets(arguments))
        self.engine = sa.create_engine(
            sa.URL.create("postgresql+psycopg"),
            # No prepared statements: a pool of connections may run the next transaction in another session.
            connect_args={**_OPTIONS, **arguments, "client_encoding": "utf8", "prepare_threshold": None},
            isolation_level="READ COMMITTED",
            pool_size=1,
            max_overflow=0,
            use_native_hstore=False,
            hide_parameters=True,
        )
        event.listen(self.engine, "connect", _set_limits)

    def prepare(self) -> None: ...

    def is_temporary(self, error: Exception) -> bool:
        original = getattr(error, "orig", None) or error
        state = getattr(original, "sqlstate", None)
        if getattr(error, "connection_invalidated", False) or state in _TEMPORARY_STATES:
            return True
        if state is not None:
            return state.startswith("08")
        # What is not recognized, such as texts in other languages, may be temporary.
        return (
            isinstance(original, self._connection_errors) and _find(_PERMANENT_TEXTS, str(original)) is None
        )

    def cause(self, error: Exception) -> str:
        original: Any = getattr(error, "orig", None) or error
        state = getattr(original, "sqlstate", None)
        if state is not None:
            text = str(original.diag.message_primary or original)
            known = {**_TEMPORARY_STATES, **_PERMANENT_STATES}.get(
                state, _LOST if state.startswith("08") else None
            )
        else:
            text = str(original)
            known = _find(_PERMANENT_TEXTS, text) or _find(_TEMPORARY_TEXTS, text)
        if any(secret in text for secret in self._secrets):
            shown = "the reason is not shown, since it contains credentials"
        else:
            shown = " ".join(re.split("failed: |is bad: ", text)[-1].split()).rstrip(".")
        return (known or "cannot be used: {text}").format(text=shown)


def _find(causes: dict[str, str], text: str) -> str | None:
    return next((cause for pattern, cause in causes.items() if re.search(pattern, text)), None)


def _import_driver(url: str) -> Any:
    driver = url.partition("://")[0].strip().partition("+")[2] or _DRIVER
    if driver != _DRIVER:
        other = f"not '{driver}'" if re.fullmatch(r"\w+", driver) else "not another one"
        raise InvalidArgument(f"PostgreSQL is used by the driver '{_DRIVER}', {other}; {_FORM}.")
    try:
        import psycopg
    except ImportError:  # also where psycopg has no libpq
        raise ModuleNotFoundError(
            "stores on PostgreSQL need psycopg with libpq, which is not installed; pip install 'dovetail[postgresql]'",
            name=_DRIVER,
        ) from None
    return psycopg


def _arguments(url: str, known: set[str]) -> dict[str, str]:
    """Return the arguments of the driver for a URL."""
    if url != url.strip() or not url.isprintable():
        raise InvalidArgument(f"the URL of the store has spaces around it or control characters; {_FORM}.")
    credentials, at, rest = url.partition("://")[2].rpartition("@")
    address, _, query = rest.partition("?")
    hosts, _, database = address.partition("/")
    user, _, password = credentials.partition(":")
    match = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)(?::(\d*))?", hosts)
    # With these characters in a password, what follows an '@' could be a part of it as well as the host.
    if match is None or set("@/?") & set(credentials) or (at and not user):
        raise InvalidArgument(f"the URL of the store cannot be parsed; {_FORM}.")
    values = _unescaped([user, password, match[1].strip("[]"), database])
    options = _options(query)
    if values is None or options is None:
        raise InvalidArgument(f"the options or escapes of the store's URL cannot be parsed; {_FORM}.")
    pairs = [*zip(("user", "password", "host", "dbname"), values, strict=True), ("port", match[2] or "")]
    arguments = {name: value for name, value in pairs if value}
    for name, value in options:
        if name not in known or name in _RESERVED:
            advice = did_you_mean(
                name, known - _RESERVED, otherwise="They are those of libpq, such as sslmode."
            )
            raise InvalidArgument(f"the URL of the store has an option that there is not. {advice}")
        if name in arguments:
            raise InvalidArgument(f"the URL of the store has the option '{name}' twice; give it once.")
        arguments[name] = value
    if not _HOSTS.fullmatch(arguments.get("host", "")) or any("\0" in value for value in arguments.values()):
        raise InvalidArgument(f"the URL of the store has an invalid host or a NUL; {_FORM}.")
    return arguments


# Errors that these catch contain a part of the URL, and would be the context of an error raised there.
def _unescaped(parts: list[str]) -> list[str] | None:
    try:
        return [unquote(part, errors="strict") for part in parts]
    except UnicodeDecodeError:
        return None


def _options(query: str) -> list[tuple[str, str]] | None:
    try:
        return parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), errors="strict")
    except ValueError:
        return None


def _name(arguments: dict[str, str]) -> str:
    host = arguments.get("host") or arguments.get("hostaddr", "")
    is_socket = host.startswith("/")
    shown = "" if is_socket else f"[{host}]" if ":" in host else host
    port = f":{arguments['port']}" if "port" in arguments else ""
    return f"postgresql://{shown}{port}/{arguments.get('dbname', '')}{f'?host={host}' if is_socket else ''}"


def _secrets(arguments: dict[str, str]) -> Iterator[str]:
    """Yield what must not be in a message: secrets as they are or escaped, and the user as messages quote it."""
    if "user" in arguments:
        yield f'"{arguments["user"]}"'
    for value in filter(None, map(arguments.get, _CREDENTIALS)):
        yield from (value, quote(value), quote(value, safe=""), repr(value)[1:-1], ascii(value)[1:-1])
        yield value.replace("\\", "\\\\").replace("'", "\\'")


def _set_limits(connection: Any, _: object) -> None:
    parts = (
        f"SELECT set_config('{name}', '{limit}', false) WHERE current_setting('{name}') = '0'"
        for name, limit in _LIMITS.items()
    )
    connection.autocommit = True
    connection.execute(" UNION ALL ".join(parts))
    connection.autocommit = False
