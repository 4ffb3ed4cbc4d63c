"""Connections to the sink's database: how they are opened, and which stay open between transactions.

``connect`` opens sessions of commands and checks. ``OwnSession`` is the session of an object that one thread uses: a
member of the inbox, a caller of External, the lock monitor. ``transaction`` and ``read`` use sessions that this process
keeps, one for each address and application name: the driver has one, and so has each Python worker. While in use, a
session belongs to one thread; a second use at the same time opens another session, which is closed at its end.

| what has happened to a kept session        | what follows                                                            |
|--------------------------------------------|-------------------------------------------------------------------------|
| the server has ended it since its last use | BEGIN fails, and nothing else was sent: it is replaced by a new one     |
| an error ended its transaction             | rolled back and closed; the same when COMMIT gets no answer             |
| it is not idle after its transaction       | closed                                                                  |
| the server is read-only since a failover   | closed, after an error or its report: the next one finds a primary      |
| another server is the primary now, and the | closed when it is MAX_AGE_SECONDS old: the next one connects to where   |
| old one continues without noticing         | the URL's name or hosts lead by then                                    |
| a role or a database has new settings      | the same: ALTER ROLE … SET and the like affect new sessions only        |
| an effect has left something behind        | DISCARD ALL after the transaction, and a psycopg Connection per use     |
| it goes through a pooler                   | closed after an effect, which may have used another server session      |
| this process was forked                    | it stays the parent's; the child starts with none                       |
"""

from __future__ import annotations

import atexit
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors, pq, sql
from psycopg.conninfo import conninfo_to_dict

from outbox._clients.credentials import password_for
from outbox._clients.postgres import UTF8
from outbox._clients.search_path import PIN_LOCAL, PinnedConnection
from outbox._clients.threads import within
from outbox.consumer import patience
from outbox.urls import libpq_url

NOTICE_DEAD_HOSTS: Final[Mapping[str, int]] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""Defaults that the URL may override. Without them it takes two hours to notice that a host has vanished."""

MAX_AGE_SECONDS: Final = 300.0
"""Sessions older than this are not used again. Opening a new one takes a few milliseconds."""
_MOST_KEPT: Final = 8
# Servers report changes of these by themselves, from version 14 on.
_READ_ONLY: Final = (b"in_hot_standby", b"default_transaction_read_only")
_BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED"
_BEGIN_PINNED: Final = f"{_BEGIN}; {PIN_LOCAL}"
_clock: Callable[[], float] = time.monotonic

Key = tuple[str, str]
T = TypeVar("T")


def application_name(text: str) -> str:
    """Return a name in the form that pg_stat_activity shows in all versions: at most 63 bytes of ASCII."""
    return re.sub(r"[^ -~]", "?", text)[:63]


def process_name() -> str:
    """Return the name of this process in the consumers' tables: its host and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"


def connect(url: str, name: str, *, connect_seconds: int | None = None, pinned: bool = True) -> psycopg.Connection[Any]:
    """Open a session in autocommit; with ``pinned``, names mean pg_catalog's. Raises as ``_open`` does."""
    opened = _open(url, name, pinned=pinned, connect_seconds=connect_seconds)
    opened.autocommit = True
    return opened


def _open(url: str, name: str, *, pinned: bool = False, connect_seconds: int | None = None) -> psycopg.Connection[Any]:
    """Open a session. Raises psycopg's errors, and NoTimeLeft when a run has no patience left.

    Transactions are READ COMMITTED, whatever the default of the role or database, so that changes by others are seen at
    once.
    """
    address = libpq_url(url)
    given = conninfo_to_dict(address)
    options: dict[str, Any] = {key: value for key, value in NOTICE_DEAD_HOSTS.items() if key not in given}
    if connect_seconds is not None:
        options["connect_timeout"] = connect_seconds

    def begin() -> psycopg.Connection[Any]:
        opened = (PinnedConnection if pinned else psycopg.Connection).connect(
            address,
            autocommit=pinned,
            # Prepared statements do not survive PgBouncer's transaction mode.
            prepare_threshold=None,
            application_name=application_name(name),
            # COPY sends UTF-8.
            client_encoding=UTF8,
            **options,
            **password_for(address),
        )
        if isinstance(opened, PinnedConnection):
            opened.pin()
        return opened

    with patience.current().ask(math.inf) as seconds:
        # In a thread, because connect_timeout is in whole seconds, two at least, applies to each address of each host,
        # and does not include name resolution.
        try:
            opened = begin() if seconds == math.inf else within(seconds, begin, late=psycopg.Connection.close)
        except TimeoutError:
            raise errors.ConnectionTimeout(f"no connection within {seconds:.1f} s") from None
    opened.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    return opened


@contextmanager
def transaction(
    url: str, name: str, *, reset: bool, pinned: bool | None = None, settings: Mapping[str, int] | None = None
) -> Iterator[psycopg.Connection[Any]]:
    """Run a transaction on a kept session: COMMIT at the end, ROLLBACK and a closed session on an error.

    reset     it runs statements of users, which may leave something that the next transaction must not see.
    settings  hold until the transaction ends; sent together with BEGIN.
    pinned    names mean pg_catalog's. By default unless users' statements are run, which need the role's search path:
              in such transactions and in ``read``, ours are written for any path (see ``outbox._clients.search_path``).

    Afterwards the connection is closed to anyone who still holds it. Raises psycopg's errors.
    """
    key = url, application_name(name)
    begin = _BEGIN if (reset if pinned is None else not pinned) else _BEGIN_PINNED
    for setting, value in (settings or {}).items():
        begin += f"; SET LOCAL {setting} = {value:d}"
    session, connection = _used(key, lambda session: session.begun(begin))
    try:
        yield connection
        # A statement failed and its error was caught: COMMIT is a ROLLBACK.
        spoilt = connection.info.transaction_status == pq.TransactionStatus.INERROR
        connection.commit()
    except BaseException:
        with suppress(psycopg.Error):
            # Closing alone is not enough: the server may take a while to notice, and would keep its locks so long.
            connection.rollback()
        connection.close()
        raise
    connection.pgconn = _RETURNED
    if spoilt or (reset and not session.cleaned()):
        session.close()
    else:
        _here().keep(key, session)


def read(url: str, name: str, query: sql.Composed, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
    """Return the rows of one read-only statement, on a kept session without BEGIN and COMMIT.

    If the server has ended the kept session, the statement is repeated once on a new one.
    """
    key = url, application_name(name)
    session, rows = _used(key, lambda session: session.rows(query, values))
    _here().keep(key, session)
    return rows


def close(url: str, *names: str) -> None:
    for name in names:
        session = _here().take((url, application_name(name)))
        if session is not None:
            session.close()


def close_all() -> None:
    """Close this process's idle sessions."""
    _here().close()


class OwnSession:
    """One session, for one thread: opened at its first use, and replaced when it has ended or is MAX_AGE_SECONDS old.

    connect     opens a session, whose transactions are then READ COMMITTED: changes by others are seen at once.
    autocommit  whether statements outside of a transaction have one each; None: as ``connect`` has it.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], autocommit: bool | None = None) -> None:
        self._connect = connect
        self._autocommit = autocommit
        self._connection: psycopg.Connection[Any] | None = None
        self._opened = 0.0

    @property
    def ended(self) -> bool:
        """Return whether the next use opens another session, because there is none."""
        return self._connection is None or self._connection.closed

    def connected(self) -> psycopg.Connection[Any]:
        """Return the connection. To be called outside of a transaction. Raises what opening a session raises."""
        if _is_old(self._opened):
            self.close()
        if self._connection is None or self._connection.closed:
            # Counted from before the server has the session.
            self._opened = _clock()
            self._connection = self._connect()
            self._connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            if self._autocommit is not None:
                self._connection.autocommit = self._autocommit
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_old(opened: float) -> bool:
    """Return whether a session is so old that its server may no longer be the primary."""
    return _clock() - opened >= MAX_AGE_SECONDS


class _Returned:
    """Takes the place of a connection's session once that was returned: the connection looks closed."""

    status = pq.ConnStatus.BAD
    transaction_status = pq.TransactionStatus.IDLE
    pipeline_status = pq.PipelineStatus.OFF

    def __getattr__(self, name: str) -> Any:
        raise psycopg.OperationalError("the connection is closed: its transaction is over")


_RETURNED: Final[Any] = _Returned()


class _Session:
    """A server session that is kept between its uses.

    Each use gets a new psycopg Connection: an effect may change its row factory, adapters and handlers, or keep one of
    its cursors.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._libpq = connection.pgconn
        self.opened = _clock()
        self._pooled: bool | None = None
        connection.pgconn = _RETURNED

    @property
    def ended(self) -> bool:
        """The server or the network has ended the session."""
        return self._libpq.status == pq.ConnStatus.BAD

    @property
    def usable(self) -> bool:
        """The session is idle, and its server has not reported that it is read-only, as after a failover."""
        return (
            self._libpq.transaction_status == pq.TransactionStatus.IDLE
            and self._libpq.pipeline_status == pq.PipelineStatus.OFF
            and not any(self._libpq.parameter_status(name) == b"on" for name in _READ_ONLY)
        )

    def connection(self, *, autocommit: bool = False) -> psycopg.Connection[Any]:
        """Return a Connection with the same settings as one from ``connect``."""
        made: psycopg.Connection[Any] = psycopg.Connection(self._libpq)
        made.prepare_threshold = None
        made.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        made.autocommit = autocommit
        return made

    def begun(self, begin: str) -> psycopg.Connection[Any]:
        """Return a Connection with a new transaction."""
        connection = self.connection()
        self.rows(begin)
        return connection

    def rows(self, query: str | sql.Composed, values: Mapping[str, object] | None = None) -> list[tuple[Any, ...]]:
        """Return the rows of one statement, for which psycopg opens no transaction."""
        # Keep the handlers of the connection whose transaction may be open.
        handlers = self._libpq.notice_handler, self._libpq.notify_handler
        connection = self.connection(autocommit=True)
        try:
            cursor = connection.execute(query.encode() if isinstance(query, str) else query, values)
            return cursor.fetchall() if cursor.description else []
        finally:
            connection.pgconn = _RETURNED
            self._libpq.notice_handler, self._libpq.notify_handler = handlers

    def cleaned(self) -> bool:
        """Discard what an effect may have left: settings, role, temporary tables, locks, LISTEN. Returns False on
        failure.

        Behind a pooler this is not possible: by now another client may have the effect's server session. A pooler is
        recognized by a backend process id that differs from the one announced at connect.
        """
        if not self.usable:
            return False
        try:
            if self._pooled is None:
                [(answers,)] = self.rows("SELECT pg_catalog.pg_backend_pid()")
                self._pooled = answers != self._libpq.backend_pid
            if not self._pooled:
                self.rows("DISCARD ALL")
        except psycopg.Error:
            return False
        return not self._pooled

    def close(self) -> None:
        self._libpq.finish()


class _Kept:
    """The idle sessions of one process, the most recently used last."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._sessions: dict[Key, _Session] = {}

    def take(self, key: Key) -> _Session | None:
        """Remove an idle session and return it; None if there is none."""
        with self._lock:
            session = self._sessions.pop(key, None)
        if session is not None and _is_old(session.opened):
            session.close()
            return None
        return session

    def keep(self, key: Key, session: _Session) -> None:
        """Keep a session for the next use, or close it if there is one already or it is unusable."""
        if _is_old(session.opened) or not session.usable:
            session.close()
            return
        with self._lock:
            known = self._sessions.setdefault(key, session)
            surplus = [] if known is session else [session]
            if len(self._sessions) > _MOST_KEPT:
                surplus.append(self._sessions.pop(next(iter(self._sessions))))
        for one in surplus:
            one.close()

    def close(self) -> None:
        with self._lock:
            sessions = list(self._sessions.values())
            self._sessions.clear()
        for session in sessions:
            session.close()


_kept = _Kept()


def _here() -> _Kept:
    """Return this process's sessions. After a fork, those of the parent stay the parent's."""
    global _kept
    if _kept.pid != os.getpid():
        _kept = _Kept()
    return _kept


def _used(key: Key, use: Callable[[_Session], T]) -> tuple[_Session, T]:
    """Use a kept session, or a new one if there is none or the server has ended it. An error closes the session."""
    session = _here().take(key)
    if session is not None:
        try:
            return session, use(session)
        except BaseException as error:
            ended = session.ended
            session.close()
            if not (ended and isinstance(error, psycopg.Error)):
                raise
    session = _Session(_open(*key))
    try:
        return session, use(session)
    except BaseException:
        session.close()
        raise


atexit.register(close_all)
