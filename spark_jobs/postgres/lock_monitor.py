"""Find the sessions that block a group's transactions: otherwise a task or a take-over would wait silently."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import psycopg

from outbox.consumer.connections import OwnSession, application_name, connect

_WAITING: Final = """
SELECT waiting.application_name, by.pid,
       coalesce(nullif(blocker.application_name, ''), 'no application_name'), coalesce(blocker.usename, '?'),
       coalesce(blocker.state, '?'), coalesce(extract(epoch FROM clock_timestamp() - blocker.xact_start)::int, 0)
  FROM pg_stat_activity AS waiting
 CROSS JOIN LATERAL unnest(pg_blocking_pids(waiting.pid)) AS by (pid)
  LEFT JOIN pg_stat_activity AS blocker ON blocker.pid = by.pid
 WHERE waiting.datname = current_database() AND waiting.application_name = ANY(%(names)s)
   AND waiting.wait_event_type = 'Lock' AND clock_timestamp() - waiting.query_start > interval '1 second'
 ORDER BY by.pid, waiting.pid"""

CHECK_SECONDS: Final = 5.0
"""The interval between checks. Waits of less than a second are not reported."""


def names(group: str) -> tuple[str, str]:
    """Return the application names of the group's sessions: of the driver, and of its tasks."""
    return application_name(f"outbox driver {group}"), application_name(f"outbox consumer {group}")


class LockMonitor:
    """Checks regularly, in a thread of its own, and reports each session that blocks the group once.

    url, group  the sink, and the group whose sessions may be blocked.
    report      called with a text and its figures.

    A context manager: the thread runs inside the ``with`` block.
    """

    def __init__(self, url: str, group: str, report: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._url = url
        self._group = group
        self._report = report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox-blockers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        # A daemon thread with timeouts of its own: a server that does not answer must not keep a driver from ending.
        self._thread.join(1.0)

    def _run(self) -> None:
        reported: set[int] = set()
        # One session for all checks, used by this thread only.
        session = OwnSession(lambda: connect(self._url, f"outbox watch {self._group}"))
        try:
            while not self._stop.wait(CHECK_SECONDS):
                try:
                    values = {"names": list(names(self._group))}
                    found = session.connected().execute(_WAITING, values).fetchall()
                except psycopg.Error:
                    # The driver's own sessions report what is wrong with the server; nothing depends on this one.
                    session.close()
                    continue
                for waiting, pid, *blocker in found:
                    if pid not in reported:
                        self._report("waiting for a lock", _figures(waiting, pid, *blocker))
                reported = {row[1] for row in found}
        finally:
            session.close()


def _figures(waiting: str, pid: int, application: str, user: str, state: str, seconds: int) -> dict[str, str]:
    if not pid:
        # pg_blocking_pids says so of all prepared transactions.
        return {
            "waiting": waiting,
            "blocked_by": "a prepared transaction: SELECT gid, owner, prepared FROM pg_prepared_xacts",
            "to_end_it": "ROLLBACK PREPARED with its gid, as its owner, unless it is to be committed",
        }
    about = f"{application}, user {user}, {state}, its transaction is open for {seconds} s"
    end = f"SELECT pg_terminate_backend({pid})"
    return {"waiting": waiting, "blocked_by": f"session {pid} ({about})", "to_end_it": end}
