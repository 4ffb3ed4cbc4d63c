"""A real PgBouncer in transaction mode, before a Postgres of the tests."""

from __future__ import annotations

import os
import shutil
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, LiteralString, Self
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from support import wait_until

from outbox.sandbox._dirs import temporary_directory, unprivileged_user
from outbox.sandbox._ports import free_ports
from outbox.sandbox._process import Supervised, kill_with_children

_INSTALL = "there is no pgbouncer to run: apt-get install pgbouncer (brew install pgbouncer), or put it into the PATH"
_CONFIGURATION = """\
[databases]
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
admin_users = pooler
pool_mode = transaction
default_pool_size = {size}
server_login_retry = 1
"""


def require_pgbouncer() -> str:
    """Return the program. Where there is none, CI fails; elsewhere the test is skipped.

    No Python package has it, and `make test` installs nothing outside of its virtual environment. What CI runs installs
    it, so that nobody can pass there without these tests.
    """
    # Debian installs it for the administrator alone.
    program = shutil.which("pgbouncer", path=os.environ.get("PATH", os.defpath) + os.pathsep + "/usr/sbin")
    if program is None and os.environ.get("CI"):
        pytest.fail(_INSTALL)
    elif program is None:
        pytest.skip(_INSTALL)
    return program


class PgBouncer:
    """Listens on 127.0.0.1 and shares ``size`` connections to a Postgres of the tests among all clients of a database.

    ``url`` is of a database there; it must be a superuser's. A context manager.
    """

    def __init__(self, url: str, *, size: int) -> None:
        program, user = require_pgbouncer(), unprivileged_user()
        self._parts = urlsplit(url)
        (self.port,) = free_ports(1)
        self._directory = temporary_directory("pgbouncer", user)
        self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        configuration, users = self._directory / "pgbouncer.ini", self._directory / "users.txt"
        users.write_text(f'"{self._parts.username}" ""\n"pooler" ""\n')
        configuration.write_text(_CONFIGURATION.format(server=self._parts.port, port=self.port, size=size, users=users))
        self.log: Path = self._directory / "pgbouncer.log"
        # It refuses to run as root.
        self._process = Supervised(
            [program, str(configuration)], log=self.log, user=user, cwd=self._directory, remove=self._directory
        )

    @property
    def url(self) -> str:
        """The database's address, by way of the pooler."""
        return urlunsplit(self._parts._replace(netloc=f"{self._parts.username}@127.0.0.1:{self.port}"))

    def __enter__(self) -> Self:
        wait_until(self._answers, what="PgBouncer to listen")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.signal(signal.SIGINT)
        if not self._process.wait(60):
            kill_with_children(self._process)
        print(self.log.read_text()[-4000:])
        self._remove()

    def servers(self) -> int:
        """Return how many connections to Postgres it has for clients' use."""
        return len(self._console("SHOW SERVERS").fetchall())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disconnect from Postgres and let clients wait, as for a planned failover."""
        self._console("PAUSE")
        yield
        self._console("RESUME")

    def _console(self, command: LiteralString) -> psycopg.Cursor[Any]:
        with psycopg.connect(f"postgresql://pooler@127.0.0.1:{self.port}/pgbouncer", autocommit=True) as console:
            # It knows simple queries alone.
            return psycopg.ClientCursor(console).execute(command)

    def _answers(self) -> bool:
        assert self._process.running, self.log.read_text()
        try:
            psycopg.connect(self.url).close()
        except psycopg.OperationalError:
            return False
        return True
