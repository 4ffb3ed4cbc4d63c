"""Logical replication over psycopg's public API: reads one slot as ``pgoutput``, and sends feedback.

Once started, the connection is in COPY BOTH mode, for which psycopg has only low-level functions
(``pgconn.get_copy_data``, ``put_copy_data``). Protocol:
https://www.postgresql.org/docs/current/protocol-replication.html. Not thread-safe.
"""

from __future__ import annotations

import re
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Any, Final

import psycopg
from psycopg import errors, sql
from psycopg.pq import ExecStatus

from outbox._clients.credentials import password_for
from outbox._clients.postgres import UTF8
from outbox.errors import SchemaError
from outbox.urls import display_url, libpq_url
from relay.core.ports import DatabaseUnavailable, Unavailable
from relay.database import NOTICE_DEAD_HOSTS, TRANSACTION_TIMEOUT_SINCE

_KEEPALIVE: Final = Struct(">cQqB")
_FEEDBACK: Final = Struct(">cQQQqB")
_STARTS_AT: Final = Struct(">Q")
_DATA_HEADER: Final = 25
_DATA, _ALIVE = b"wk"
_POSTGRES_EPOCH: Final = 946_684_800

# The text form of values depends on session settings. Feedback is sent every second: a server with a shorter timeout
# would always end the stream.
_SETTINGS: Final = (
    "SET search_path = pg_catalog; SET datestyle = 'ISO'; SET timezone = 'UTC'; SET bytea_output = 'hex'; "
    "SET statement_timeout = 0; SET wal_sender_timeout = '60s'"
)
# The server replays a transaction in one of its own, which lasts until the lanes have taken its events.
_NO_LIMIT: Final = "SET transaction_timeout = 0"

_NEEDS: Final = {
    "wal_level": "set wal_level = logical and restart the server, or use source=polling",
    "publication": (
        "up to Postgres 17 the slot can't be read past a place where its publication was not there: `outbox cdc setup "
        "--repair --reason '…'` makes a new one"
    ),
    "permission": (
        "the relay's role needs REPLICATION: ALTER ROLE … REPLICATION (or, as some hosts have it, a role to grant); "
        "source=polling needs no such right"
    ),
}


# The function that reports a missing publication has the same name on every server, its file has not.
_PUBLICATIONS: Final = "get_publication_oid"
# Some hosts have a role of theirs that may, such as rds_replication. Its members have no attribute.
_MAY_REPLICATE: Final = """
SELECT FROM pg_catalog.pg_roles
 WHERE CASE WHEN rolname OPERATOR(pg_catalog.=) current_user THEN rolreplication OR rolsuper
            ELSE pg_catalog.strpos(rolname, 'replication') OPERATOR(pg_catalog.>) 0
                 AND pg_catalog.pg_has_role(oid, 'MEMBER') END"""


class SlotInUse(Unavailable):
    """Another connection reads the slot."""


def lsn_text(lsn: int) -> str:
    """Return a position in the WAL in Postgres's form: ``16/B374D848``."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Return the position in a text like ``lsn_text``'s. Raises ValueError."""
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


class Replication:
    """One replication connection. Raises Unavailable without a server or stream, SchemaError when it refuses."""

    def __init__(self, url: str, application_name: str) -> None:
        self._url = libpq_url(url)
        self._connected = False
        with self._explained():
            self._connection: psycopg.Connection[Any] = psycopg.connect(
                self._url,
                autocommit=True,
                replication="database",
                application_name=application_name,
                client_encoding=UTF8,
                **NOTICE_DEAD_HOSTS,
                **password_for(self._url),
            )
        self._connected = True
        self._pgconn = self._connection.pgconn
        # Not select(), which takes no descriptor above 1023; a relay can have more.
        self._arrived, self._ready = select.poll(), select.poll()
        self._arrived.register(self._connection.fileno(), select.POLLIN)
        self._ready.register(self._connection.fileno(), select.POLLIN | select.POLLOUT)
        self.position = 0
        """The position up to which the server has read its WAL for us, and sent its contents."""
        self.reply_wanted = False
        """Whether the server has requested immediate feedback."""
        try:
            self._command(_SETTINGS)
            if self._connection.info.server_version >= TRANSACTION_TIMEOUT_SINCE:
                self._command(_NO_LIMIT)
        except BaseException:
            self.close()
            raise

    def identify(self) -> tuple[str, int]:
        row = self._command("IDENTIFY_SYSTEM")
        return row[0], int(row[1])

    def switches(self, timeline: int) -> dict[int, int]:
        """Return where each timeline before this one ended: where a standby was promoted."""
        if timeline == 1:
            return {}
        content = self._command(f"TIMELINE_HISTORY {int(timeline)}")[1]
        lines = (re.match(r"\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)", line) for line in content.splitlines())
        return {int(line[1]): parse_lsn(line[2]) for line in lines if line is not None}

    def start(self, slot: str, publication: str) -> None:
        """Start streaming from the slot's confirmed position. Raises SlotInUse while another connection reads it."""
        options = sql.SQL("proto_version '1', publication_names {}, messages 'true'").format(
            sql.Literal(sql.Identifier(publication).as_string(self._connection))
        )
        command = sql.SQL("START_REPLICATION SLOT {} LOGICAL 0/0 ({})").format(sql.Identifier(slot), options)
        self._command(command.as_string(self._connection), ExecStatus.COPY_BOTH)

    def read(self, limit: int) -> list[bytes]:
        """Return up to ``limit`` messages that have arrived, in pgoutput's form, without waiting."""
        take = self._pgconn.get_copy_data
        messages: list[bytes] = []
        last = b""
        with self._explained():
            # Complete messages may still be in libpq's buffer, and then the socket is not readable.
            self._pgconn.consume_input()
            while len(messages) < limit:
                size, data = take(1)
                if size <= 0:
                    if size < 0 and not messages:
                        self._end()
                    break
                frame = bytes(data)
                if frame[0] == _DATA:
                    messages.append(frame[_DATA_HEADER:])
                    last = frame
                elif frame[0] == _ALIVE:
                    _, position, _, wanted = _KEEPALIVE.unpack(frame)
                    self.position = max(self.position, position)
                    self.reply_wanted = self.reply_wanted or bool(wanted)
        if last:
            self.position = max(self.position, _STARTS_AT.unpack_from(last, 1)[0])
        return messages

    def wait(self, seconds: float) -> bool:
        return bool(self._arrived.poll(seconds * 1000))

    def feedback(self, flushed: int) -> None:
        """Report to the server that the WAL up to ``flushed`` is not needed again, and that we are alive."""
        now = int((time.time() - _POSTGRES_EPOCH) * 1_000_000)
        with self._explained():
            self._pgconn.put_copy_data(_FEEDBACK.pack(b"r", flushed, flushed, flushed, now, 0))
            while self._pgconn.flush():
                # The server does not read while it writes, so its data has to be consumed.
                self._pgconn.consume_input()
                self._ready.poll(1000)
        self.reply_wanted = False

    def close(self) -> None:
        self._connection.close()

    def _command(self, command: str, wanted: ExecStatus = ExecStatus.TUPLES_OK) -> list[str]:
        with self._explained():
            result = self._pgconn.exec_(command.encode())
            if result.status == ExecStatus.FATAL_ERROR:
                raise psycopg.errors.error_from_result(result)
        if result.status == ExecStatus.COMMAND_OK and wanted == ExecStatus.TUPLES_OK:
            return []
        if result.status != wanted:
            raise DatabaseUnavailable(f"Postgres answered {command.split(maxsplit=1)[0]} with {result.status!r}")
        if wanted != ExecStatus.TUPLES_OK or result.ntuples == 0:
            return []
        return [(result.get_value(0, column) or b"").decode() for column in range(result.nfields)]

    def _end(self) -> None:
        result = self._pgconn.get_result()
        if result is not None and result.status == ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(result)
        raise DatabaseUnavailable("Postgres has ended the stream: it is shutting down, or an administrator ended it")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except errors.ObjectInUse as error:
            raise SlotInUse(f"Postgres, replication: {_line(error)}") from error
        except errors.InsufficientPrivilege as error:
            raise SchemaError(f"Postgres, replication: {_line(error)}: {_NEEDS['permission']}") from error
        except psycopg.Error as error:
            text = _line(error)
            if error.sqlstate is not None and not isinstance(error, psycopg.OperationalError):
                need = _NEEDS["wal_level"] if "wal_level" in text else "see `outbox cdc status`"
                if error.diag.source_function == _PUBLICATIONS:
                    need = _NEEDS["publication"]
                raise SchemaError(f"Postgres, replication: {text}: {need}") from error
            # There is no SQLSTATE before the connection is established, and texts may be in any language.
            away = isinstance(error, errors.ConnectionTimeout)
            if error.sqlstate is None and not self._connected and not away and self._lacks_the_right():
                raise SchemaError(f"Postgres, replication: {text}: {_NEEDS['permission']}") from error
            raise DatabaseUnavailable(f"Postgres at {display_url(self._url)}, replication: {text}") from error

    def _lacks_the_right(self) -> bool:
        """Return whether the role may connect, but not for replication."""
        try:
            with psycopg.connect(self._url, **NOTICE_DEAD_HOSTS, **password_for(self._url)) as plain:
                return plain.execute(_MAY_REPLICATE).rowcount == 0
        except psycopg.Error:
            return False


def _line(error: BaseException) -> str:
    return str(error).strip().replace("\n", " ") or type(error).__name__
