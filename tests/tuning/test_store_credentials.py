"""URLs of PostgreSQL servers, and that user and password of one are in no message, name, log or plan."""

import logging
import string
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dovetail.cli.entry_point import main
from dovetail.errors import DovetailError, InvalidArgument, StoreError
from dovetail.tuning import postgresql_engine
from dovetail.tuning.store import Store
from tests.tuning.helpers import BODY, DONE, HERE, measured
from tests.tuning.postgresql_server import Server, free_port

# They are part of every user and password below, so that any part of one is recognized however it was escaped.
USER, SECRET = "Uw4kz", "Zq7xj"
ODD = [
    SECRET,
    f"{SECRET}@host",
    f"a@{SECRET}",
    f":{SECRET}:",
    f"/{SECRET}/{SECRET}",
    f"?{SECRET}#{SECRET}&{SECRET}={SECRET}",
    f"%{SECRET}%40%ff%",
    f"+{SECRET} {SECRET}",
    f"'{SECRET}\\'\"",
    f"[{SECRET}]",
    f"ü€\U0001f600{SECRET}",
    f"\n{SECRET}\t",
    f"password={SECRET}",
    f"postgresql://{SECRET}",
    SECRET * 30,
]
PASSWORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8).flatmap(
    lambda text: st.integers(0, len(text)).map(lambda at: text[:at] + SECRET + text[at:])
)
ERRORS = (DovetailError, ModuleNotFoundError)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.tuning.store._OPENING_RETRY_SECONDS", 0.01)
    for name in ("PGPASSWORD", "PGUSER", "PGHOST", "PGPORT", "PGDATABASE", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    for name in (None, "dovetail", "sqlalchemy.engine"):
        caplog.set_level(logging.INFO, name)
    return caplog


def texts(error: BaseException | None) -> list[str]:
    """Return all that can be read of an error and of those behind it."""
    if error is None:
        return []
    own = ["".join(traceback.format_exception(error, chain=False)), repr(error), repr(error.args)]
    return [*own, *map(repr, vars(error).values()), *texts(error.__cause__), *texts(error.__context__)]


def assert_hidden(*shown: str) -> None:
    for text in shown:
        assert SECRET not in text, text
        assert USER not in text, text


def refused(url: Any) -> Exception:
    with pytest.raises(ERRORS) as caught:
        Store(url)
    # The line that calls is a part of the traceback, not of the message; it has the variable, and no text.
    assert_hidden(*texts(caught.value))
    return caught.value


def escaped(text: str) -> str:
    return quote(text, safe="")


# URLs


def arguments(url: str) -> dict[str, str]:
    engine = postgresql_engine.PostgreSQL(url).engine
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psycopg.connect", lambda *_, **options: given.update(options) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.connect()
    ours = {*postgresql_engine._OPTIONS, "client_encoding", "prepare_threshold", "context"}
    return {name: value for name, value in given.items() if name not in ours}


@pytest.mark.parametrize(
    ("url", "expected", "name"),
    [
        (
            "postgresql+psycopg://ann:pw@db.example:5433/plans",
            {"user": "ann", "password": "pw", "host": "db.example", "port": "5433", "dbname": "plans"},
            "postgresql://db.example:5433/plans",
        ),
        ("postgres://host", {"host": "host"}, "postgresql://host/"),
        ("PostgreSQL://", {}, "postgresql:///"),
        ("postgresql:///?service=tuning", {"service": "tuning"}, "postgresql:///"),
        (
            "postgresql://ann@[::1]:5432/a%20b",
            {"user": "ann", "host": "::1", "port": "5432", "dbname": "a b"},
            "postgresql://[::1]:5432/a b",
        ),
        (
            "postgresql:///plans?host=/run/pg&sslmode=require&options=-csearch_path%3Dteam",
            {"dbname": "plans", "host": "/run/pg", "sslmode": "require", "options": "-csearch_path=team"},
            "postgresql:///plans?host=/run/pg",
        ),
        (
            "postgresql://%2Frun%2Fpg/plans",
            {"dbname": "plans", "host": "/run/pg"},
            "postgresql:///plans?host=/run/pg",
        ),
        (
            "postgresql://a,b/plans?port=1,2",
            {"dbname": "plans", "host": "a,b", "port": "1,2"},
            "postgresql://a,b:1,2/plans",
        ),
    ],
)
def test_urls_are_arguments_of_the_driver(url: str, expected: dict[str, str], name: str) -> None:
    assert arguments(url) == expected
    assert postgresql_engine.PostgreSQL(url).name == name


def test_options_of_the_url_replace_defaults() -> None:
    given: dict[str, Any] = {}
    engine = postgresql_engine.PostgreSQL(
        "postgresql://host/db?connect_timeout=77&application_name=mine"
    ).engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psycopg.connect", lambda *_, **options: given.update(options) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.connect()
    assert (given["connect_timeout"], given["application_name"]) == ("77", "mine")
    assert (given["keepalives_idle"], given["client_encoding"]) == (30, "utf8")


@given(user=PASSWORDS, password=PASSWORDS, database=PASSWORDS)
@settings(max_examples=100, deadline=None)
def test_what_is_escaped_comes_back(user: str, password: str, database: str) -> None:
    given = arguments(f"postgresql://{escaped(user)}:{escaped(password)}@host/{escaped(database)}")
    assert given == {"user": user, "password": password, "host": "host", "dbname": database}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"postgresql+psycopg2://{USER}:{SECRET}@host/db", "by the driver 'psycopg', not 'psycopg2'"),
        (f"postgresql+asyncpg://{USER}:{SECRET}@host/db", "by the driver 'psycopg', not 'asyncpg'"),
        (f"postgresql+x:{SECRET}://host/db", "by the driver 'psycopg', not another one"),
        (f"{USER}@{SECRET}://host/db", "no valid dialect"),
        (f"mysql://{USER}:{SECRET}@host/db", "the dialect 'mysql' are not supported"),
        (f" postgresql://{USER}:{SECRET}@host/db", "has spaces around it"),
        (f"postgresql://{USER}:{SECRET}@host/db\n", "has spaces around it"),
        (f"postgresql://{USER}:{SECRET}\udc80@host/db", "control characters"),
        (f"postgresql://{USER}:{SECRET}@@host/db", "cannot be parsed; give 'postgresql"),
        (f"postgresql://{USER}:p@{SECRET}@host/db", "cannot be parsed"),
        (f"postgresql://a/{USER}:{SECRET}@host/db", "cannot be parsed"),
        (f"postgresql://:{SECRET}@host/db", "cannot be parsed"),
        (f"postgresql://{USER}:{SECRET}", "cannot be parsed"),
        (f"postgresql://{USER}:{SECRET}/db", "cannot be parsed"),
        (f"postgresql://{USER}:{SECRET}@host:port/db", "cannot be parsed"),
        (f"postgresql://{USER}:{SECRET}@host:1:2/db", "cannot be parsed"),
        (f"postgresql://{USER}:{SECRET}@[::1/db", "cannot be parsed"),
        (f"postgresql://{USER}:{SECRET}@[::1]x/db", "cannot be parsed"),
        (f"postgresql://{USER}:p/{SECRET}@host/db", "cannot be parsed"),
        (f"postgresql://{USER}:p?{SECRET}@host/db", "cannot be parsed"),
        (f"postgresql://host/db?user={USER}&password=@{SECRET}", "cannot be parsed"),
        (f"postgresql://{USER}:{SECRET}%ff@host/db", "options or escapes"),
        (f"postgresql://{USER}:{SECRET}%00@host/db", "or a NUL"),
        (f"postgresql://{USER}:{SECRET}@ho st/db", "invalid host"),
        (f"postgresql://host/db?user={USER}&password={SECRET}&{SECRET}", "options or escapes"),
        (f"postgresql://host/db?password={SECRET}&{SECRET}=1", "has an option that there is not. They are those of libpq"),
        (f"postgresql://{USER}:{SECRET}@host/db?ssl_mode=require", "Did you mean 'sslmode'"),
        (f"postgresql://{USER}:{SECRET}@host/db?password={SECRET}", "has the option 'password' twice"),
        (f"postgresql://{USER}:{SECRET}@host/db?sslmode=a&sslmode={SECRET}", "has the option 'sslmode' twice"),
        (f"postgresql://host/db?dbname=postgresql://{USER}:{SECRET}@host/db", "cannot be parsed"),
        (f"postgresql://host/db?dbname={SECRET}", "an option that there is not"),
        (f"postgresql://host/db?prepare_threshold={SECRET}", "an option that there is not"),
        (f"{USER}:{SECRET}@host/db", "a path or a URL, and this is neither"),
        (f"postgresql:{USER}:{SECRET}@host/db", "a path or a URL, and this is neither"),
        (f"host=localhost user={USER} password={SECRET}", "a path or a URL, and this is neither"),
        (f"postgresql://{USER}:{SECRET}@host/db".encode(), "cannot be opened at a bytes"),
    ],
)  # fmt: skip
def test_urls_that_are_not_valid_are_refused(
    url: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refused(url)
    assert isinstance(error, InvalidArgument)
    assert reason in str(error)
    assert not list(tmp_path.iterdir())


# Errors of the server and of the driver


@pytest.mark.parametrize("password", ODD)
def test_a_store_shows_no_credentials(
    postgresql: Server, log: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], password: str
) -> None:
    literal = password.replace("'", "''")
    user = f"{USER} {ODD.index(password)} @:/?#ü"
    postgresql.execute(f"CREATE ROLE \"{user}\" LOGIN PASSWORD '{literal}'")
    postgresql.execute(f'CREATE SCHEMA AUTHORIZATION "{user}"')
    with Store(postgresql.tcp_url(user, password)) as store:
        measured(store, BODY, DONE)
        assert_hidden(
            store.name, repr(store), str(store), repr(store._database.engine.url), repr(vars(store))
        )
        with pytest.raises(StoreError) as caught:
            store.transact(lambda connection: connection.execute(sa.select(sa.cast(password, sa.Integer))))
        assert "the reason is not shown, since it contains credentials" in str(caught.value)
        assert_hidden(caught.value.args[0], str(caught.value.__cause__), str(caught.value.__context__))
        store._database.engine.dispose()
        postgresql.execute(f'ALTER ROLE "{user}" NOLOGIN')
        with pytest.raises(StoreError, match="refuses the user or the password") as caught:
            store.get(BODY, HERE)
        assert_hidden(*texts(caught.value))
    assert_hidden(log.text, *capfd.readouterr())


@pytest.mark.parametrize("password", ODD)
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:{closed}/db", "no server accepts connections there"),
        ("127.0.0.1:{port}/postgres", "refuses the user or the password"),
        ("127.0.0.1:{port}/missing", "refuses the user or the password"),
        ("127.0.0.1:{port}/postgres?sslmode=require", "does not support SSL"),
        ("127.0.0.1:{port}/postgres?sslmode=bogus", "invalid sslmode value"),
        ("127.0.0.1:{port}/postgres?connect_timeout=soon", "bad value for connect_timeout"),
        ("127.0.0.1:{port}/postgres?keepalives=yes", "invalid integer value"),
        ("127.0.0.1:99999/postgres", "invalid port number"),
        ("/postgres?host=/no/folder", "no server accepts connections there"),
        ("/postgres?service=missing", "definition of service"),
    ],
)  # fmt: skip
def test_errors_show_no_credentials(
    postgresql: Server, log: pytest.LogCaptureFixture, password: str, address: str, reason: str
) -> None:
    address = address.format(port=postgresql.port, closed=free_port())
    user = escaped(f"{USER}\"'\\ü")
    error = refused(f"postgresql://{user}:{escaped(password)}@{address}")
    assert isinstance(error, StoreError)
    assert reason in str(error)
    for option in ("password", "sslpassword", "oauth_client_secret", "scram_client_key"):
        separator = "&" if "?" in address else "?"
        refused(f"postgresql://{user}@{address}{separator}{option}={escaped(password)}")
    # What was not escaped is refused, or tried as another URL: in either case it is not shown.
    if password.isprintable() and "@" in password:
        refused(f"postgresql://{USER}:{password}@{address}")
    assert_hidden(log.text)


def test_an_unknown_host_shows_no_credentials(log: pytest.LogCaptureFixture) -> None:
    error = refused(f"postgresql://{USER}:{SECRET}@no-host.invalid/db")
    assert "the name of the host is unknown" in str(error)
    assert_hidden(log.text)


@given(text=st.text(st.sampled_from(string.punctuation + "a0 ü"), max_size=12))
@example(text="'\\")
@example(text="%zz")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_passwords_that_were_not_escaped_are_not_shown(text: str, log: pytest.LogCaptureFixture) -> None:
    log.clear()
    closed = free_port()
    for password in (text + SECRET, SECRET + text, text[:3] + SECRET + text[3:]):
        refused(f"postgresql://{USER}:{password}@127.0.0.1:{closed}/db?sslmode=disable")
        refused(f"postgresql://127.0.0.1:{closed}/db?user={USER}&password={password}")
    assert_hidden(log.text)


def test_a_text_of_the_driver_with_a_credential_is_not_shown() -> None:
    database = postgresql_engine.PostgreSQL(f"postgresql://{USER}:{escaped(SECRET + '%@ü')}@host/db")
    driver: Any = database.errors[1]
    for spelling in (f"{SECRET}%@ü", escaped(f"{SECRET}%@ü"), f"{SECRET}%@\\xfc"):
        assert_hidden(database.cause(driver(f"connection failed: unexpected {spelling}")))
    assert_hidden(database.cause(driver(f'user "{USER}" is unexpected')))
    assert "unexpected reply" in database.cause(driver("connection failed: unexpected reply"))


def test_logs_of_sqlalchemy_and_the_driver_show_no_password(
    postgresql: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (None, "sqlalchemy.engine", "sqlalchemy.pool", "psycopg"):
        caplog.set_level(logging.DEBUG, name)
    postgresql.execute(f"CREATE ROLE logged LOGIN PASSWORD '{SECRET}'")
    postgresql.execute("CREATE SCHEMA AUTHORIZATION logged")
    Store(postgresql.tcp_url("logged", SECRET)).close()
    with pytest.raises(StoreError):
        Store(postgresql.tcp_url("logged", f"{SECRET}2"))
    assert "sqlalchemy.pool" in caplog.text
    assert "connection attempt" in caplog.text
    assert_hidden(caplog.text)


def test_the_command_line_shows_no_credentials(
    postgresql: Server, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for url in (
        postgresql.tcp_url(USER, SECRET),
        f"postgresql://{USER}:{SECRET}@host:port/db",
        f"{USER}:{SECRET}@host/db",
    ):
        command = ["tune", "zoo:mlp", "--store", url, "-o", str(tmp_path / "plan.json"), "--traceback"]
        assert main(command) == 2
        out, err = capfd.readouterr()
        assert "Traceback" in err
        assert_hidden(out, err)
