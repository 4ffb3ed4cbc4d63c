"""A Postgres and a Kafka for interactive use: they keep running after the command that started them.

fsync is on, so a restart of the machine loses no committed data; ``up`` starts them again. Postgres asks for a
password, which is kept in the sandbox's directory; Kafka lets every local user in.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg

from outbox.sandbox._dirs import blocking_directory, cache_dir, locked_file, shared_dir, unprivileged_user
from outbox.sandbox.errors import PortTaken
from outbox.sandbox.kafka import KafkaCluster
from outbox.sandbox.postgres import PostgresServer

DATABASE: Final = "outbox"


@dataclass(frozen=True, slots=True)
class SandboxState:
    """The sandbox's servers, with their addresses, which are empty before the first ``up``."""

    directory: Path
    database_url: str = field(repr=False)
    postgres_running: bool
    postgres_log: Path
    bootstrap_servers: str
    brokers: int
    brokers_running: int
    kafka_version: str
    kafka_logs: tuple[Path, ...]

    @property
    def running(self) -> bool:
        return self.postgres_running and 0 < self.brokers == self.brokers_running


class Sandbox:
    """The sandbox in $OUTBOX_SANDBOX, by default in ``sandbox`` in the cache directory.

    Commands that run at the same time wait for each other. ``report`` is called with a line of text for each step.
    """

    def __init__(self, report: Callable[[str], None] = lambda _: None) -> None:
        given = os.environ.get("OUTBOX_SANDBOX")
        self.directory = (Path(given).expanduser() if given else cache_dir() / "sandbox").absolute()
        self._port_file = self.directory / "postgres.port"
        self._password_file = self.directory / "postgres.password"
        self._report = report

    def up(self, brokers: int | None = None, kafka: str | None = None) -> SandboxState:
        """Start the servers that do not run, on their former ports, and create the database ``outbox``.

        brokers   1 or 3; None: the existing number, 1 at first.
        kafka     its version; None: the existing one, at first as for KafkaCluster.

        Raises ServiceError when an existing cluster differs, PortTaken when another process has one of the ports.
        """
        with self._alone():
            if not self._password():
                self._password_file.touch(0o600)
                self._password_file.write_text(secrets.token_urlsafe(24))
            server, cluster = self._postgres(), self._kafka(brokers, kafka)
            try:
                if not server.attach():
                    self._report("Starting Postgres …")
                    server.start()
                self._port_file.write_text(f"{server.port}\n")
                with psycopg.connect(server.url(), autocommit=True) as connection:
                    found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
                if found is None:
                    server.create_database(DATABASE)
                if not (cluster.attach() and cluster.running):
                    self._report("Starting Kafka …")
                cluster.start()
            except PortTaken as error:
                raise PortTaken(f"{error}\nFor a new, empty sandbox: outbox sandbox down --purge") from error
            return self._state(server, cluster)

    def status(self) -> SandboxState:
        with self._alone():
            server, cluster = self._found()
            return self._state(server, cluster)

    def down(self, purge: bool = False) -> SandboxState:
        """Stop the servers. The data is kept for the next ``up``, unless ``purge``."""
        with self._alone():
            server, cluster = self._found()
            if cluster.pids:
                self._report("Stopping Kafka …")
                (cluster.kill if purge else cluster.stop)()
            if server.running:
                self._report("Stopping Postgres …")
                server.stop(immediate=purge)
            if purge:
                usual = {self.directory / "postgres", self.directory / "kafka"}
                for directory in usual | {self._postgres_dir(), self._kafka_dir()}:
                    shutil.rmtree(directory, ignore_errors=True)
                self._port_file.unlink(missing_ok=True)
                self._password_file.unlink(missing_ok=True)
                server, cluster = self._found()
            return self._state(server, cluster)

    # -- the parts

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked_file(self.directory / "lock"):
            yield

    def _found(self) -> tuple[PostgresServer, KafkaCluster]:
        server, cluster = self._postgres(), self._kafka()
        server.attach()
        cluster.attach()
        return server, cluster

    def _postgres(self) -> PostgresServer:
        try:
            port: int | None = int(self._port_file.read_text())
        except (FileNotFoundError, ValueError):
            port = None
        return PostgresServer(self._postgres_dir(), port=port, password=self._password())

    def _kafka(self, brokers: int | None = None, version: str | None = None) -> KafkaCluster:
        return KafkaCluster(self._kafka_dir(), brokers=brokers, version=version)

    def _postgres_dir(self) -> Path:
        return self._reachable(self.directory / "postgres", "")

    def _kafka_dir(self) -> Path:
        usual = self.directory / "kafka"
        # An earlier version's, with its data: where the user can't reach it, it goes on as root.
        return usual if (usual / "cluster.json").exists() else self._reachable(usual, "-kafka")

    def _reachable(self, usual: Path, suffix: str) -> Path:
        """Return a server's directory: the usual one, or another one if its user can't reach that (as root)."""
        user = unprivileged_user()
        if user is None or blocking_directory(usual, user) is None:
            return usual
        name = hashlib.sha256(bytes(self.directory)).hexdigest()[:12]
        return shared_dir(user) / f"sandbox-{name}{suffix}"

    def _password(self) -> str | None:
        """Return Postgres's password; None before the first ``up``."""
        return self._password_file.read_text() or None if self._password_file.exists() else None

    def _state(self, server: PostgresServer, cluster: KafkaCluster) -> SandboxState:
        return SandboxState(
            directory=self.directory,
            database_url=server.url(DATABASE) if self._port_file.exists() else "",
            postgres_running=server.running,
            postgres_log=server.log,
            bootstrap_servers=cluster.bootstrap_servers if cluster.brokers else "",
            brokers=cluster.brokers,
            brokers_running=len(cluster.pids),
            kafka_version=cluster.version if cluster.brokers else "",
            kafka_logs=tuple(cluster.logs),
        )
