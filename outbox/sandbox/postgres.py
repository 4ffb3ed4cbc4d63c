"""A real Postgres server on loopback, without Docker.

``with PostgresServer() as server:`` and then ``url = server.create_database("shop")``.

Every local user can connect unless there is a password. For tests, demonstrations and development.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

import psycopg
from psycopg import sql

from outbox.sandbox import _postmaster
from outbox.sandbox._dirs import blocking_directory, hand_over, make_directory, temporary_directory, unprivileged_user
from outbox.sandbox._pgbin import binaries, major_version
from outbox.sandbox._ports import free_ports
from outbox.sandbox._process import Detached, Supervised, completed, kill_with_children, wait_for
from outbox.sandbox.errors import PortTaken, ServiceError, StartFailed

USER: Final = "postgres"
"""The superuser of every server started here. A schema with this name would be its default schema."""

_START_TIMEOUT: Final = 60.0
_STOP_TIMEOUT: Final = 60.0
_PORT_ATTEMPTS: Final = 5
_SETTING_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_DEFAULTS: Final = {
    "wal_level": "logical",
    "max_connections": "200",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "lc_messages": "C",
    "log_timezone": "UTC",
    "timezone": "UTC",
}


class PostgresServer:
    """One server: its data in ``data_dir``/pgdata, its log in ``data_dir``/postgres.log.

    data_dir   None: a temporary directory, removed by ``close`` (or by leaving the ``with`` block), and a server that
               ends when this process does, even by kill -9. A given directory is kept, its server outlives this
               process, and ``start`` finds one that runs already.
    port       on 127.0.0.1; None: a free one, kept across restarts.
    settings   for postgresql.conf; they override ours: wal_level=logical, max_connections=200. fsync is on by default.
    password   of the superuser, by SCRAM, for new data and in ``url``; None: every local user can connect.

    If we run as root, the server runs as the user ``postgres`` or ``nobody``.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        password: str | None = None,
    ) -> None:
        self._user = unprivileged_user()
        self._temporary = data_dir is None
        if data_dir is None:
            data_dir = temporary_directory("postgres", self._user)
            self._cleanup = weakref.finalize(self, shutil.rmtree, data_dir, ignore_errors=True)
        self.data_dir = data_dir.absolute()
        self._pgdata = self.data_dir / "pgdata"
        self._wanted_port = port
        self._port: int | None = port
        self._password = password
        self._settings = dict(settings or {})
        for name, value in self._settings.items():
            if not _SETTING_NAME.fullmatch(name) or "\n" in value:
                raise ServiceError(f"{name!r} = {value!r} is not a setting of postgresql.conf")
        self._process: Supervised | Detached | None = None

    @property
    def log(self) -> Path:
        return self.data_dir / "postgres.log"

    @property
    def port(self) -> int:
        """The port on 127.0.0.1. Raises ServiceError before the first start unless it was given."""
        if self._port is None:
            raise ServiceError("this Postgres was never started, so it has no port yet; call start()")
        return self._port

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.running else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def url(self, database: str = "postgres") -> str:
        return self._url(self.port, database)

    def _url(self, port: int, database: str) -> str:
        password = "" if self._password is None else f":{quote(self._password, safe='')}"
        return f"postgresql://{USER}{password}@127.0.0.1:{port}/{quote(database, safe='')}"

    def start(self) -> Self:
        """Start the server and wait until it accepts connections. Does nothing if it runs.

        Raises PortTaken when another process has the requested port, StartFailed with the end of the log when the
        server does not become ready, ServiceError when Postgres is not installed.
        """
        if self.running or self.attach():
            return self
        program = binaries(self._user) / "postgres"
        self._initialize()
        _postmaster.remove_stale_file(self._pgdata, _STOP_TIMEOUT)
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            port = self._port or free_ports(1)[0]
            try:
                self._launch(program, port)
            except PortTaken:
                if self._port is not None or attempt == _PORT_ATTEMPTS:
                    raise
            else:
                self._port = port
                return self
        raise AssertionError("unreachable")

    def attach(self) -> bool:
        """Find the server that runs on data_dir, and wait until it is ready. Returns whether there is one.

        Raises StartFailed when its port is not the requested one.
        """
        found = _postmaster.running_on(self._pgdata)
        if found is None:
            return False
        process, port = found
        if self._wanted_port not in {None, port}:
            raise StartFailed(f"the Postgres on {self._pgdata} listens on port {port}, not {self._wanted_port}")
        self._process = Detached(process)
        self._port = port
        self._wait_until_ready(port)
        return True

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server and keep its data for the next ``start``. Open transactions are rolled back.

        immediate   leave the rollback to the next start. Raises ServiceError when the server does not end within a
                    minute.
        """
        if self._process is None:
            return
        self._process.signal(signal.SIGQUIT if immediate else signal.SIGINT)
        if not self._process.wait(_STOP_TIMEOUT):
            raise ServiceError(
                f"Postgres (pid {self._process.pid}) did not stop within {_STOP_TIMEOUT:g} s; see {self.log}, or use "
                "kill()"
            )
        self._process = None

    def kill(self) -> None:
        """Kill the server and all its processes by SIGKILL, like a crash; the next ``start`` recovers."""
        if self._process is not None:
            kill_with_children(self._process)
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop the server; a temporary data directory is removed."""
        if self._temporary:
            self.stop(immediate=True)
            self._cleanup()
        else:
            self.stop()

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create a database, as a copy of ``template`` if given (which must have no connections). Returns its URL."""
        # Without fsync, copying the files is ten times cheaper than logging each page.
        create_database(self.url(), name, template, copy_files=self._settings.get("fsync") == "off")
        return self.url(name)

    def drop_database(self, name: str) -> None:
        drop_database(self.url(), name)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- starting

    def _initialize(self) -> None:
        """Run initdb if there is no data yet; write the settings."""
        make_directory(self.data_dir, self._user)
        blocked = blocking_directory(self.data_dir, self._user)
        if blocked is not None and self._user is not None:
            raise ServiceError(
                f"Postgres runs as the user {self._user.name}, who can't pass {blocked}; "
                f"choose another data directory, or allow it with: chmod o+x {blocked}"
            )
        if not self._pgdata.exists():
            # Created in a temporary directory and then renamed, so that an interrupted initdb leaves no incomplete
            # database.
            with tempfile.TemporaryDirectory(prefix="initdb-", dir=self.data_dir) as parent:
                aside = Path(parent)
                new = aside / "pgdata"
                hand_over(aside, self._user)
                self._initdb(new)
                with (new / "postgresql.conf").open("a") as file:
                    file.write("include 'outbox.conf'\n")
                new.rename(self._pgdata)
        lines = [
            f"{name} = '{value.replace(chr(39), chr(39) * 2)}'\n"
            for name, value in {**_DEFAULTS, **self._settings}.items()
        ]
        configuration = self._pgdata / "outbox.conf"
        configuration.write_text("".join(lines))
        hand_over(configuration, self._user)

    def _initdb(self, target: Path) -> None:
        folder = binaries(self._user)
        # UTF-8 in code point order, whatever locales the machine has; the built-in provider is new in Postgres 17.
        builtin = (
            ("--locale-provider", "builtin", "--builtin-locale", "C.UTF-8")
            if major_version(folder / "postgres") >= 17
            else ()
        )
        access: list[str | Path] = ["-A", "trust"]
        if self._password is not None:
            # Beside the data only until the database is renamed. As an argument, every user could read it.
            file = target.with_name("password")
            file.touch(0o600)
            file.write_text(self._password)
            hand_over(file, self._user)
            access = ["-A", "scram-sha-256", "--pwfile", file]
        arguments: list[str | Path] = [
            folder / "initdb",
            *("-D", target, "-U", USER, *access, "-E", "UTF8", "--no-instructions"),
            *("--locale", "C", "--lc-ctype", "C", *builtin),
        ]
        if self._temporary or self._settings.get("fsync") == "off":
            arguments.append("--no-sync")
        try:
            result = completed(arguments, self._user)
        except (OSError, subprocess.SubprocessError) as error:
            whom = "" if self._user is None else f" as the user {self._user.name}"
            raise StartFailed(
                f"{arguments[0]} can't be executed{whom}: {error}; run this as an ordinary user, or set "
                "OUTBOX_DATABASE_URL to a server that is there"
            ) from error
        if result.returncode != 0:
            raise StartFailed(f"initdb failed with status {result.returncode}:\n{result.stdout}{result.stderr}")

    def _launch(self, program: Path, port: int) -> None:
        """Start a postmaster on this port. If it raises PortTaken or StartFailed, none is left running."""
        argv = [
            *(str(program), "-D", str(self._pgdata), "-p", str(port)),
            *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
        ]
        begin = self.log.stat().st_size if self.log.exists() else 0
        if self._temporary:
            self._process = Supervised(
                argv, log=self.log, user=self._user, orphan_signal=signal.SIGQUIT, remove=self.data_dir
            )
        else:
            self._process = Detached.start(argv, log=self.log, user=self._user)
        try:
            self._wait_until_ready(port)
        except BaseException:
            process, self._process = self._process, None
            kill_with_children(process)
            with self.log.open("rb") as file:
                file.seek(begin)
                if b"could not bind" in file.read():
                    raise PortTaken(f"another process listens on port {port} of 127.0.0.1", self.log) from None
            raise

    def _wait_until_ready(self, port: int) -> None:
        """Wait until our postmaster, and no other server, answers on this port."""

        def answers() -> bool:
            if self._answers(port):
                return True
            if not self.running:
                raise StartFailed("Postgres ended while starting", self.log)
            return False

        if not wait_for(answers, _START_TIMEOUT):
            raise StartFailed(f"Postgres was not ready within {_START_TIMEOUT:g} s", self.log)

    def _answers(self, port: int) -> bool:
        assert self._process is not None
        lines = _postmaster.lines(self._pgdata)
        # Line 1 is the postmaster's pid, 4 its port, 8 its state. Our child wrote the file, so it listens on this port.
        if len(lines) < 8 or lines[0] != str(self._process.pid) or lines[3] != str(port):
            return False
        if lines[7].strip() != "ready":
            return False
        try:
            with psycopg.connect(self._url(port, "postgres"), connect_timeout=5) as connection:
                row = connection.execute("SELECT current_setting('data_directory')").fetchone()
        except psycopg.OperationalError:
            return False
        if row is None or Path(row[0]).resolve() != self._pgdata.resolve():
            raise PortTaken(f"another Postgres, with its data in {row and row[0]}, answers on port {port}")
        return True


def create_database(server_url: str, name: str, template: str | None = None, *, copy_files: bool = False) -> None:
    """Create a database on the server of ``server_url``, whose user needs CREATEDB.

    copy_files   between two checkpoints, instead of logging every page, which is the default since Postgres 15.
    """
    statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    if template is not None:
        statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
    with psycopg.connect(server_url, autocommit=True) as connection:
        if copy_files and connection.info.server_version >= 150000:
            statement += sql.SQL(" STRATEGY FILE_COPY")
        connection.execute(statement)


def drop_database(server_url: str, name: str) -> None:
    """Drop a database of the server of ``server_url`` if it exists, ending its connections and its slots."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        drop_database_over(connection, name)


def drop_database_over(connection: psycopg.Connection[Any], name: str) -> None:
    """Do as drop_database over a connection to another database of the server, in autocommit."""
    # FORCE does not drop the slots, and Postgres refuses to drop a database that has one. Its reader may have ended a
    # moment ago.
    for slots in (
        "SELECT pg_terminate_backend(active_pid, 60000) FROM pg_replication_slots WHERE database = %s AND active",
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s AND NOT active",
    ):
        connection.execute(slots, (name,))
    connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
