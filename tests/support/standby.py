"""A standby of a private Postgres: made with pg_basebackup of the same programs, streaming, on loopback."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import wait_until

from outbox.sandbox import _postmaster
from outbox.sandbox._dirs import User, identity
from outbox.sandbox._pgbin import binaries, major_version
from outbox.sandbox.postgres import USER, PostgresServer

PHYSICAL_SLOT = "to_standby"
needs_failover_slots = pytest.mark.skipif(
    major_version(binaries(None) / "postgres") < 17, reason="a standby has no failover slots before Postgres 17"
)


def base_backup(primary: PostgresServer, user: User | None, target: Path, *options: str) -> None:
    """Copy the files of a running server, as this account."""
    subprocess.run(
        [
            *(binaries(user) / "pg_basebackup", "-D", target, "-h", "127.0.0.1", "-p", str(primary.port)),
            *("-U", USER, "-c", "fast", "--no-sync", *options),
        ],
        cwd="/",
        stdin=subprocess.DEVNULL,
        check=True,
        **identity(user),
    )


class Standby(PostgresServer):
    """Follows ``primary`` until it is promoted. Runs, ends and is removed as every PostgresServer.

    synced_slots   failover slots of the primary are kept here too (Postgres 17 and later).
    via_port       of a proxy before the primary, by which a test cuts the two apart.
    """

    def __init__(
        self,
        primary: PostgresServer,
        *,
        synced_slots: bool = False,
        via_port: int | None = None,
    ) -> None:
        self.primary = primary
        source = f"host=127.0.0.1 port={via_port or primary.port} user={USER} application_name=standby dbname=postgres"
        # Tries to connect again each time that it finds no WAL: at once, in a test.
        own = {"primary_conninfo": source, "primary_slot_name": PHYSICAL_SLOT, "wal_retrieve_retry_interval": "100ms"}
        if synced_slots:
            own |= {"sync_replication_slots": "on", "hot_standby_feedback": "on"}
        super().__init__(settings={**primary._settings, **own})

    def _initdb(self, target: Path) -> None:
        """Copy the primary instead of making a new cluster."""
        user = self._user
        base_backup(self.primary, user, target, "-X", "stream", "-C", "-S", PHYSICAL_SLOT)
        signal_file = target / "standby.signal"
        signal_file.touch()
        if user is not None:
            shutil.chown(signal_file, user.uid, user.gid)

    def _answers(self, port: int) -> bool:
        found = _postmaster.lines(self._pgdata)
        # The state is "standby" for as long as it follows; otherwise as the server it is made from.
        if len(found) < 8 or found[7].strip() != "standby":
            return super()._answers(port)
        if found[0] != str(self.pid) or found[3] != str(port):
            return False
        try:
            psycopg.connect(self.url(), connect_timeout=5).close() if self._port else None
        except psycopg.OperationalError:
            return False
        return True

    def promote(self) -> None:
        """Make it a primary, and wait until it is one. The primary's processes are not touched."""
        assert ask(self.url(), "SELECT pg_promote(true, 60)")
        wait_until(lambda: not ask(self.url(), "SELECT pg_is_in_recovery()"), what="the promotion")

    def caught_up(self) -> bool:
        """Return whether it has replayed all that the primary has written."""
        end = ask(self.primary.url(), "SELECT pg_current_wal_lsn()::text")
        return ask(self.url(), "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", end)

    def await_slot(self, name: str) -> None:
        """Wait until the slot would be here after a promotion: synced, and not only for the time being.

        It is kept from where the primary's slot has got to a snapshot of the running transactions that was written
        after this server began with it. Such a one is written every 15 seconds, or when it is asked for. What syncs the
        slots rests for up to half a minute where it has found nothing to do; a reload wakes it.
        """

        def there() -> bool:
            ask(self.primary.url(), "SELECT pg_log_standby_snapshot()")
            ask(self.url(), "SELECT pg_reload_conf()")
            return ask(
                self.url(),
                "SELECT count(*) > 0 FROM pg_replication_slots WHERE slot_name = %s AND synced AND NOT temporary",
                name,
            )

        wait_until(there, 60, "the slot to be on the standby")


def ask(url: str, query: str, *values: Any) -> Any:
    """Return the first column of the first row, in autocommit."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(query, values).fetchone()
    return None if row is None else row[0]


def set_parameter(url: str, name: str, value: str) -> None:
    """Set a parameter of a server that runs."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        connection.execute("SELECT pg_reload_conf()")
    wait_until(lambda: ask(url, f"SHOW {name}") == value, what=f"{name} to be {value!r}")


def require_standby(primary: PostgresServer) -> None:
    """Commits wait for the standby from now on."""
    set_parameter(primary.url(), "synchronous_standby_names", "standby")
    wait_until(
        lambda: (
            ask(primary.url(), "SELECT sync_state FROM pg_stat_replication WHERE application_name = 'standby'")
            == "sync"
        ),
        what="the standby to be synchronous",
    )


def either(first: PostgresServer, second: PostgresServer, database: str) -> str:
    """An address that leads to whichever of the two takes writes."""
    return (
        f"postgresql://{USER}@127.0.0.1:{first.port},127.0.0.1:{second.port}/{database}?target_session_attrs=read-write"
    )
