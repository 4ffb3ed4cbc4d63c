"""Servers of tests, from files with the outbox's tables that initdb and the migrations have made once in a run.

Both together take seconds of processor time for each server. Each has an identity of its own, as initdb gives it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from outbox.sandbox.postgres import PostgresServer
from outbox.testing.fixtures import Database, PrivatePostgres, migrate

_TEMPLATE: Final = "prepared"
_PROGRAMS: Final = os.environ.get("OUTBOX_PG_BIN")
_IDENTITY: Final = struct.Struct("=Q")
_CHECKSUM: Final = struct.Struct("=I")


class Prepared(PostgresServer):
    """A server that begins with copied files. Of other programs than usual it has its own."""

    prepared = False

    def _initdb(self, target: Path) -> None:
        if os.environ.get("OUTBOX_PG_BIN") != _PROGRAMS:
            super()._initdb(target)
            return
        # With the owner of each file.
        subprocess.run(["cp", "-a", _files(), target], check=True)
        _identify(target)
        self.prepared = True


class PreparedPostgres(PrivatePostgres):
    """The factory of the test kit, with such servers."""

    def __call__(self, settings: Mapping[str, str] | None = None) -> PostgresServer:
        return self.enter_context(Prepared(settings=settings))

    def database(self, server: PostgresServer, name: str = "outbox") -> Database:
        if not isinstance(server, Prepared) or not server.prepared:
            return super().database(server, name)
        return self.enter_context(Database(server.create_database(name, _TEMPLATE), name))


def _files() -> Path:
    """Return the files that are copied. Whichever process of a run needs them first makes them."""
    found = Path(os.environ["TEST_FORMATTED"], "postgres")
    with found.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            with PostgresServer(settings={"fsync": "off"}) as server:
                migrate(server.create_database(_TEMPLATE))
                server.stop()
                half = found.with_suffix(".half")
                subprocess.run(["cp", "-a", server.data_dir / "pgdata", half], check=True)
                half.rename(found)
    return found


def _identify(files: Path) -> None:
    """Give a server another identity: it is in the control file, and in the first page of each file of the WAL."""
    identity = _IDENTITY.pack(secrets.randbits(62))
    control = files / "global" / "pg_control"
    content = control.read_bytes()
    size = next(
        at
        for at in range(len(identity), len(content), _CHECKSUM.size)
        if _crc32c(content[:at]) == content[at : at + _CHECKSUM.size]
    )
    changed = identity + content[len(identity) : size]
    control.write_bytes(changed + _crc32c(changed) + content[size + _CHECKSUM.size :])
    for segment in (files / "pg_wal").glob("[0-9A-F]" * 24):
        with segment.open("r+b") as file:
            # Behind the header that each page has.
            file.seek(24)
            file.write(identity)


def _crc32c(content: bytes) -> bytes:
    """Return a checksum as Postgres has it in its control file."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return _CHECKSUM.pack(crc ^ 0xFFFFFFFF)
