"""The lanes that an operator's command holds while relays are running."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Self

import psycopg
from psycopg import sql

from outbox.errors import OutboxError
from relay.database import unavailable_on_error
from relay.ports import Unavailable

LEASE_SECONDS: Final = 60.0
_RENEW_SECONDS: Final = 10.0

_RENEW: Final = """
UPDATE {lanes} AS l SET lease_until = clock_timestamp() + make_interval(secs => %(lease)s)
  FROM unnest(%(lanes)s::smallint[], %(epochs)s::bigint[]) AS mine(lane, epoch)
 WHERE l.lane = mine.lane AND l.epoch = mine.epoch"""

# The row still names the ids to fence.
_LET_GO: Final = """
UPDATE {lanes} AS l SET owner = NULL, lease_until = '-infinity'
  FROM unnest(%(lanes)s::smallint[], %(epochs)s::bigint[]) AS mine(lane, epoch)
 WHERE l.lane = mine.lane AND l.epoch = mine.epoch"""


class LaneBusy(OutboxError):
    """Another relay or another reconcile has the lane, or has taken it meanwhile."""


def taken(lane: int) -> LaneBusy:
    """Return the error for a lane whose epoch has changed."""
    return LaneBusy(f"lane {lane} was taken by somebody else meanwhile; run this again")


class Holding:
    """The lanes that reconcile holds: their epochs and former writers. A thread renews their leases.

    Each statement that matters checks by itself whether its lane is still held. Lanes that are held at the end, after
    an error, are released; their rows still name the ids to fence.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], names: Mapping[str, sql.Composable]) -> None:
        self._connect = connect
        self._names = names
        self._lock = threading.Lock()
        self._epochs: dict[int, int] = {}
        self._former: dict[int, Collection[str]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, name="reconcile-leases", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        # A lease that is not released expires.
        with contextlib.suppress(Unavailable):
            self._execute(_LET_GO)

    @property
    def epochs(self) -> dict[int, int]:
        """Each lane's epoch."""
        with self._lock:
            return dict(self._epochs)

    def add(self, lane: int, epoch: int, former: Collection[str]) -> None:
        """Hold one more lane; ``former`` are the transactional.ids that its row named."""
        with self._lock:
            self._epochs[lane] = epoch
            self._former[lane] = former

    def done(self, lane: int) -> None:
        """Record that a lane was released."""
        with self._lock:
            del self._epochs[lane]

    def former(self, lanes: Collection[int] | None = None) -> set[str]:
        """Return the transactional.ids under which these lanes, or all, were written."""
        with self._lock:
            named = [ids for lane, ids in self._former.items() if lanes is None or lane in lanes]
        return {each for ids in named for each in ids}

    def _keep_renewing(self) -> None:
        while not self._stop.wait(_RENEW_SECONDS):
            # The next renewal, on a new connection, still comes before the lease expires.
            with contextlib.suppress(Unavailable):
                self._execute(_RENEW)

    def _execute(self, statement: str) -> None:
        epochs = self.epochs
        if not epochs:
            return
        values = {"lanes": list(epochs), "epochs": list(epochs.values()), "lease": LEASE_SECONDS}
        with contextlib.closing(self._connect()) as connection, unavailable_on_error("renewing leases"):
            connection.execute(sql.SQL(statement).format(**self._names), values)
