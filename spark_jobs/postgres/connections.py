"""Connections to the sink's database: how each is opened, and which stay open from one transaction to the next.

``connect`` opens every session of the consumer. ``transaction`` and ``read`` work on sessions that this process keeps:
one for each address and application name, so the driver has one and so has each Python worker. While it is in use a
session belongs to one thread alone; a second use at the same time opens another, which is closed in the end.

| what has happened to a kept session        | what follows                                                            |
|--------------------------------------------|-------------------------------------------------------------------------|
| the server has ended it since its last use | BEGIN fails, nothing else was sent: a new one takes its place           |
| an error ended its transaction             | rolled back and closed; the same when COMMIT gets no answer             |
| it is not idle after its transaction       | closed                                                                  |
| the server is read-only since a failover   | closed, after an error or when it says so: the next one finds a primary |
| another server is the primary now, and the | closed when it is MAX_AGE_SECONDS old, whatever it says: the next one   |
| old one goes on as if nothing had happened | goes where the name or the hosts of the URL lead by then                |
| a role or a database has other settings    | the same: ALTER ROLE … SET and the like reach new sessions alone        |
| an effect has left something behind        | DISCARD ALL after the transaction, and a Connection of psycopg per use  |
| there is a pooler between                  | closed after an effect: it may have had another session of the server   |
| this process was forked                    | it stays the parent's; the child begins with none                       |
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg
from psycopg import errors, pq, sql
from psycopg.conninfo import conninfo_to_dict

from outbox.urls import libpq_url
from spark_jobs.patience import asking

NOTICE_DEAD_HOSTS: Final[Mapping[str, int]] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""Unless the URL has other values. Without them a host that has vanished is waited for for two hours."""

MAX_AGE_SECONDS: Final = 300.0
"""A session is kept so long after it was opened, and not used again after that. A new one costs some milliseconds."""
_MOST_KEPT: Final = 8
# Servers from version 14 on report these without being asked.
_READ_ONLY: Final = (b"in_hot_standby", b"default_transaction_read_only")
_BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED"
_clock: Callable[[], float] = time.monotonic

Key = tuple[str, str]


def application_name(text: str) -> str:
    """Return a name as pg_stat_activity shows it, whatever the version: 63 bytes of ASCII."""
    return re.sub(r"[^ -~]", "?", text)[:63]


def connect(
    url: str, name: str, *, autocommit: bool = False, connect_seconds: int | None = None
) -> psycopg.Connection[Any]:
    """Open a session. Errors pass through as psycopg raises them; NoTimeLeft from a run without any patience left.

    What is forgotten or moved by others must be seen at once, so transactions are READ COMMITTED, whatever a role's or
    a database's default is.
    """
    address = libpq_url(url)
    given = conninfo_to_dict(address)
    options: dict[str, Any] = {key: value for key, value in NOTICE_DEAD_HOSTS.items() if key not in given}
    if connect_seconds is not None:
        options["connect_timeout"] = connect_seconds
    begin = functools.partial(
        psycopg.connect,
        address,
        autocommit=autocommit,
        # PgBouncer in transaction mode does not keep prepared statements.
        prepare_threshold=None,
        application_name=application_name(name),
        # COPY sends UTF-8.
        client_encoding="UTF8",
        **options,
    )
    with asking(math.inf) as seconds:
        opened = begin() if seconds == math.inf else _within(seconds, begin)
    opened.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    return opened


def _within(seconds: float, begin: Callable[[], psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    """Return what ``begin`` opens. Raises ConnectionTimeout after so many seconds.

    In a thread: connect_timeout is in whole seconds, two at least, for each address of each host, and does not count
    how long a name takes to be resolved.
    """
    result: Future[psycopg.Connection[Any]] = Future()

    def run() -> None:
        try:
            opened = begin()
        except BaseException as error:  # noqa: BLE001  raised below
            if result.set_running_or_notify_cancel():
                result.set_exception(error)
            return
        if result.set_running_or_notify_cancel():
            result.set_result(opened)
        else:
            # Nobody waits for it any more.
            opened.close()

    try:
        threading.Thread(target=run, name="outbox-connect", daemon=True).start()
        return result.result(seconds)
    except TimeoutError:
        if not result.cancel():
            return result.result()
        raise errors.ConnectionTimeout(f"no connection within {seconds:.1f} s") from None
    except BaseException:
        result.cancel()
        raise


@contextmanager
def transaction(url: str, name: str, *, reset: bool) -> Iterator[psycopg.Connection[Any]]:
    """Run a transaction on a kept session: COMMIT at the end, ROLLBACK and a closed session on an error.

    reset  there may be something of an effect's left in the session, which the next transaction must not see.

    The connection is closed to whoever still holds it afterwards. Errors pass through as psycopg raises them.
    """
    key = url, application_name(name)
    session, connection = _begin(key)
    try:
        yield connection
        # Statements that were refused, and whose error was caught: COMMIT is a ROLLBACK.
        spoilt = connection.info.transaction_status == pq.TransactionStatus.INERROR
        connection.commit()
    except BaseException:
        with suppress(psycopg.Error):
            # Not by closing alone: the server may take a while to see that, and its locks would last as long.
            connection.rollback()
        connection.close()
        raise
    connection.pgconn = _RETURNED
    if spoilt or (reset and not session.cleaned()):
        session.close()
    else:
        _here().keep(key, session)


def read(url: str, name: str, query: sql.Composed, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
    """Return the rows of one statement that changes nothing, on a kept session: no BEGIN, no COMMIT.

    Tried once more, on a new session, where the server has ended the kept one.
    """
    key = url, application_name(name)
    session = _here().take(key)
    if session is not None:
        try:
            rows = session.rows(query, values)
        except BaseException as error:
            ended = session.ended
            session.close()
            if not (ended and isinstance(error, psycopg.Error)):
                raise
        else:
            _here().keep(key, session)
            return rows
    session = _Session(connect(url, name))
    try:
        rows = session.rows(query, values)
    except BaseException:
        session.close()
        raise
    _here().keep(key, session)
    return rows


def close(url: str, *names: str) -> None:
    """Close this process's sessions of these names that nobody uses now."""
    for name in names:
        session = _here().take((url, application_name(name)))
        if session is not None:
            session.close()


def close_all() -> None:
    """Close this process's sessions that nobody uses now."""
    _here().close()


class Age:
    """How old a session is. For whoever keeps one by itself."""

    def __init__(self) -> None:
        self._opened = _clock()

    @property
    def over(self) -> bool:
        """Return whether it is old enough to be replaced."""
        return _clock() - self._opened >= MAX_AGE_SECONDS


class _Returned:
    """What a connection has in the place of its session when that was given back: it is closed."""

    status = pq.ConnStatus.BAD
    transaction_status = pq.TransactionStatus.IDLE
    pipeline_status = pq.PipelineStatus.OFF

    def __getattr__(self, name: str) -> Any:
        raise psycopg.OperationalError("the connection is closed: its transaction is over")


_RETURNED: Final[Any] = _Returned()


class _Session:
    """A session of the server, between its uses.

    Each use has a Connection of psycopg of its own: an effect may change its row factory, adapters and handlers, or
    keep a cursor of it for later.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._libpq = connection.pgconn
        self._age = Age()
        self._pooled: bool | None = None
        connection.pgconn = _RETURNED

    @property
    def ended(self) -> bool:
        """The server, or the network, has ended it."""
        return self._libpq.status == pq.ConnStatus.BAD

    @property
    def old(self) -> bool:
        """Its server may not be the primary any more, and not know it."""
        return self._age.over

    @property
    def usable(self) -> bool:
        """It is idle, and its server has not said that it takes no writes: another one may be the primary by now."""
        return (
            self._libpq.transaction_status == pq.TransactionStatus.IDLE
            and self._libpq.pipeline_status == pq.PipelineStatus.OFF
            and not any(self._libpq.parameter_status(name) == b"on" for name in _READ_ONLY)
        )

    def connection(self, *, autocommit: bool = False) -> psycopg.Connection[Any]:
        """Return a Connection that is as ``connect`` gives it."""
        made: psycopg.Connection[Any] = psycopg.Connection(self._libpq)
        made.prepare_threshold = None
        made.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        made.autocommit = autocommit
        return made

    def rows(self, query: str | sql.Composed, values: Mapping[str, object] | None = None) -> list[tuple[Any, ...]]:
        """Return the rows of one statement that psycopg puts into no transaction."""
        # Notices and notifications are for the connection in whose transaction this may be.
        handlers = self._libpq.notice_handler, self._libpq.notify_handler
        connection = self.connection(autocommit=True)
        try:
            cursor = connection.execute(query.encode() if isinstance(query, str) else query, values)
            return cursor.fetchall() if cursor.description else []
        finally:
            connection.pgconn = _RETURNED
            self._libpq.notice_handler, self._libpq.notify_handler = handlers

    def cleaned(self) -> bool:
        """Forget what an effect may have left: settings, role, temporary tables, locks, LISTEN. False: could not.

        Behind a pooler the session that the effect had may have others by now, and this be another one. A pooler is
        recognized by the process that was announced at the start, which is not the one that answers.
        """
        if not self.usable:
            return False
        try:
            if self._pooled is None:
                [(answers,)] = self.rows("SELECT pg_backend_pid()")
                self._pooled = answers != self._libpq.backend_pid
            if not self._pooled:
                self.rows("DISCARD ALL")
        except psycopg.Error:
            return False
        return not self._pooled

    def close(self) -> None:
        """End it."""
        self._libpq.finish()


class _Kept:
    """The sessions of one process that nobody uses now, the one used last at the end."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._sessions: dict[Key, _Session] = {}

    def take(self, key: Key) -> _Session | None:
        """Return a session that is the caller's alone."""
        with self._lock:
            session = self._sessions.pop(key, None)
        if session is not None and session.old:
            session.close()
            return None
        return session

    def keep(self, key: Key, session: _Session) -> None:
        """Keep a session for the next use, unless there is one already or it is of no use."""
        if session.old or not session.usable:
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
        """Close all of them."""
        with self._lock:
            sessions = list(self._sessions.values())
            self._sessions.clear()
        for session in sessions:
            session.close()


_kept = _Kept()


def _here() -> _Kept:
    """Return this process's sessions. Those of the process that it was forked from stay that one's."""
    global _kept
    if _kept.pid != os.getpid():
        _kept = _Kept()
    return _kept


def _begin(key: Key) -> tuple[_Session, psycopg.Connection[Any]]:
    """Return a session in a transaction that has just begun, and its connection."""
    session = _here().take(key)
    if session is not None:
        try:
            return session, _began(session)
        except psycopg.Error:
            session.close()
        except BaseException:
            session.close()
            raise
    session = _Session(connect(*key))
    try:
        return session, _began(session)
    except BaseException:
        session.close()
        raise


def _began(session: _Session) -> psycopg.Connection[Any]:
    connection = session.connection()
    session.rows(_BEGIN)
    return connection


atexit.register(close_all)
