"""Earlier states of a private Postgres: restored by its WAL to a point, a copy of its files, or what a crash leaves."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any, Self

from standby import ask, base_backup
from support import wait_until

from outbox.sandbox.postgres import PostgresServer

NOW = "SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US')"
KEPT = {"wal_keep_size": "1GB"}
"""Settings of a server that is to be restored: its WAL is the archive."""


class Restored(PostgresServer):
    """A server with the files of another one."""

    def __init__(self, source: Path, settings: dict[str, Any]) -> None:
        self._source = source
        super().__init__(settings=settings)

    def start(self) -> Self:
        """Start it, and wait until it has reached the point and takes writes."""
        super().start()
        wait_until(lambda: not ask(self.url(), "SELECT pg_is_in_recovery()"), what="the end of the recovery")
        return self

    def _initdb(self, target: Path) -> None:
        shutil.copytree(self._source, target, symlinks=True)
        for path in (target, *target.rglob("*")):
            if self._user is not None:
                shutil.chown(path, self._user.uid, self._user.gid)
        target.chmod(0o700)
        (target / "postmaster.pid").unlink(missing_ok=True)


class Backup:
    """A base backup of a running server, and the point to which it will be restored: now, until ``here`` is called."""

    def __init__(self, primary: PostgresServer) -> None:
        self._primary = primary
        self._files = primary.data_dir / "backup"
        user = primary._user
        self._files.mkdir()
        if user is not None:
            shutil.chown(self._files, user.uid, user.gid)
        base_backup(primary, user, self._files, "-X", "none")

    def here(self) -> str:
        """Mark the point. Returns the server's time."""
        ask(self._primary.url(), "SELECT pg_create_restore_point('here')")
        return ask(self._primary.url(), NOW)

    def restore(self) -> Restored:
        """Return the server as it was at the point, on a new timeline. The primary must not run any more."""
        assert not self._primary.running
        wal = self._primary.data_dir / "pgdata" / "pg_wal"
        (self._files / "recovery.signal").touch()
        settings = {
            **self._primary._settings,
            "restore_command": f"cp {wal}/%f %p",
            "recovery_target_name": "here",
            "recovery_target_action": "promote",
        }
        return Restored(self._files, settings)


def snapshot(server: PostgresServer) -> Restored:
    """Return a copy of the server's files as they are after a crash: the same timeline. The server is started again."""
    copy = server.data_dir / "snapshot"
    server.kill()
    shutil.copytree(server.data_dir / "pgdata", copy, symlinks=True)
    server.start()
    return Restored(copy, dict(server._settings))


def stop_flushing(url: str) -> None:
    """Halt the process that flushes the WAL in the background: a crash loses what no COMMIT has flushed."""
    os.kill(ask(url, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"), signal.SIGSTOP)
