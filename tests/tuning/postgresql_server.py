"""A PostgreSQL server of the installed package, started by tests in a temporary folder and stopped with their process."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from urllib.parse import quote

import psycopg

# On a disk that is lost with the machine nothing is gained by waiting for it.
SETTINGS = (
    "fsync=off",
    "full_page_writes=off",
    "autovacuum=off",
    "log_min_messages=fatal",
    "max_connections=60",
)
# Sessions on the socket are trusted, those by TCP need a password.
ACCESS = "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
ADMINISTRATOR = "tester"


def binaries() -> Path | None:
    """Return the folder with initdb and postgres; None if PostgreSQL is not installed."""
    on_path = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: float(folder.parent.name))
    candidates = [Path(on_path).resolve().parent] if on_path else folders[::-1]
    return next((folder for folder in candidates if (folder / "postgres").exists()), None)


@dataclass
class Server:
    """A running server; it refuses to run as root, so that it then runs as the user of the package."""

    folder: Path
    binaries: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def create(self) -> None:
        if os.getuid() == 0:
            import pwd  # POSIX

            os.chown(self.folder, *pwd.getpwnam("postgres")[2:4])
        options = ["--username", ADMINISTRATOR, "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8"]
        initdb = [self.binaries / "initdb", "--pgdata", self.data, *options, "--no-sync", "--no-instructions"]
        subprocess.run([*self._as_user(), *initdb], cwd="/", check=True, stdout=subprocess.DEVNULL)
        (self.data / "pg_hba.conf").write_text(ACCESS)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        """Start the server, on a free port or on that which it had before, and wait until it accepts connections."""
        self.port = self.port or free_port()
        settings = (
            *SETTINGS,
            f"port={self.port}",
            "listen_addresses=127.0.0.1",
            f"unix_socket_directories={self.folder}",
        )
        command = [self.binaries / "postgres", "-D", self.data, *(f"--{each}" for each in settings)]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen([*self._as_user(), *command], cwd="/", stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while True:
            try:
                self.execute("SELECT 1")
                return
            except psycopg.OperationalError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError((self.folder / "log").read_text()) from None
                time.sleep(0.02)

    def stop(self) -> None:
        """End all sessions, abort their transactions, and stop."""
        if self.process is not None:
            # Fast shutdown; setpriv has replaced itself by the server.
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
            self.process = None

    def execute(self, statement: str, *, database: str = "postgres") -> list[tuple[object, ...]]:
        address = {"host": str(self.folder), "port": self.port, "user": ADMINISTRATOR, "dbname": database}
        with psycopg.connect(**address, autocommit=True) as connection:
            done = connection.execute(statement)
            return done.fetchall() if done.description else []

    def url(self, *, schema: str | None = None, database: str = "postgres") -> str:
        """Return the URL of a new schema, or of one that exists, through the socket."""
        if schema is None:
            schema = f"store{next(self.numbers)}"
            self.execute(f"CREATE SCHEMA {schema}", database=database)
        query = f"host={self.folder}&port={self.port}&options=-csearch_path%3D{schema}"
        return f"postgresql+psycopg://{ADMINISTRATOR}@/{database}?{query}"

    def tcp_url(self, user: str, password: str, *, database: str = "postgres", query: str = "") -> str:
        address = f"127.0.0.1:{self.port}/{database}{query}"
        return f"postgresql://{quote(user, safe='')}:{quote(password, safe='')}@{address}"

    def _as_user(self) -> list[str]:
        # The server gets SIGQUIT when its parent is killed.
        setpriv = shutil.which("setpriv")
        if os.getuid() == 0:
            assert setpriv, "root starts the server by setpriv"
            user = ["--reuid=postgres", "--regid=postgres", "--clear-groups"]
        else:
            user = []
        return [setpriv, *user, "--pdeathsig=SIGQUIT"] if setpriv else []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(folder_of_binaries: Path) -> Iterator[Server]:
    """Create and start a server; it is stopped and removed at the end."""
    with tempfile.TemporaryDirectory(prefix="dovetail-postgresql-") as folder:
        server = Server(Path(folder), folder_of_binaries)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()
