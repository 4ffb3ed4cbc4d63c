"""Lanes that an operator's command holds while relays are running, and one that it frees, whatever its lease."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Collection
from typing import Any, Final, Self

import psycopg
from psycopg import sql

from outbox import __version__
from outbox._clients.clock import uptime
from outbox.errors import OperationRefused, OutboxError, SchemaError
from relay.core.lease import Lease
from relay.database import unavailable_on_error
from relay.lanes import LaneTable
from relay.operations.audit import note
from relay.settle.statements import lease_values, names_of

# Commands do not set structlog up, which would write to standard output.
log = logging.getLogger(__name__)

LEASE_SECONDS: Final = 60.0
_RENEW_SECONDS: Final = 10.0

RENEW: Final = """
UPDATE {lanes} AS l SET lease_until = clock_timestamp() + make_interval(secs => %(lease)s)
  FROM {leases} WHERE {ours}"""

# Whether its relay is alive: of a killed one the row may not have run out, but the lock of its session is gone.
_LANE: Final = """
SELECT owner, lease_until::text,
       CASE WHEN isfinite(lease_until) THEN extract(epoch FROM lease_until - clock_timestamp())::float8 END,
       lease_until >= clock_timestamp(),
       EXISTS (SELECT FROM {relays} AS r WHERE r.instance = l.owner AND {alive}
                AND (r.session IS NULL OR NOT pg_try_advisory_xact_lock_shared(r.session)))
  FROM {lanes} AS l WHERE lane = %s FOR UPDATE"""

# The epoch too: a relay that still holds the lane must not settle or renew. The row still names the ids to fence.
_RELEASE: Final = """
UPDATE {lanes} SET {released} WHERE lane = %s"""


def taken(lane: int) -> OperationRefused:
    return OperationRefused(f"lane {lane} was taken by another process meanwhile; run this again")


class Holding:
    """The lanes that reconcile holds, as ``owner``: their leases and former writers. A thread renews the leases.

    Each statement that matters checks its lane by itself. What is held at the end, after an error, is released.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], schema: str) -> None:
        self.owner = f"reconcile-{secrets.token_hex(3)}"
        self._connect = connect
        self._schema = schema
        # The caller alone changes what is held. The thread copies it meanwhile.
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._former: dict[int, Collection[str]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, name="reconcile-leases", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        try:
            if locked := self._on_lanes(LaneTable.release):
                text = "held lanes %s were not released, as their rows are locked; they are free after %g s"
                log.warning(text, locked, LEASE_SECONDS)
        except OutboxError as error:
            log.warning("held lanes were not released; they are free after %g s: %s", LEASE_SECONDS, error)

    @property
    def epochs(self) -> dict[int, int]:
        return {lane: lease.epoch for lane, lease in self._leases.items()}

    def values(self, lanes: Collection[int]) -> dict[str, Any]:
        """Return the leases of these lanes as parameters; see settle/statements.py."""
        return lease_values([self._leases[lane] for lane in lanes])

    def add(self, lane: int, epoch: int, former: Collection[str]) -> None:
        """Hold one more lane; ``former`` are the transactional.ids that its row named."""
        self._former[lane] = former
        with self._lock:
            self._leases[lane] = Lease(lane, epoch, LEASE_SECONDS, uptime(), owner=self.owner)

    def add_former(self, lane: int, former: Collection[str]) -> None:
        self._former[lane] = {*self._former[lane], *former}

    def done(self, lane: int) -> None:
        with self._lock:
            del self._leases[lane]

    def former(self, lanes: Collection[int] | None = None) -> set[str]:
        return {each for lane, ids in self._former.items() if lanes is None or lane in lanes for each in ids}

    def _keep_renewing(self) -> None:
        while not self._stop.wait(_RENEW_SECONDS):
            try:
                self._on_lanes(LaneTable.renew)
            except OutboxError as error:
                # The next renewal, on a new connection, still comes before the lease expires.
                log.warning("leases of held lanes were not renewed, which is tried again: %s", error)

    def _on_lanes(self, act: Callable[[LaneTable, Collection[Lease]], object]) -> object:
        with self._lock:
            leases = list(self._leases.values())
        if not leases:
            return None
        with contextlib.closing(self._connect()) as connection:
            return act(LaneTable(connection, self._schema, self.owner, __version__, LEASE_SECONDS), leases)


def release_lane(
    connection: psycopg.Connection[Any], schema: str, lane: int, reason: str, *, force: bool = False
) -> tuple[str | None, str] | None:
    """Free a lane, and record that in the audit. Returns its holder and the lease's end; None if it was free.

    Without ``force``, raises OperationRefused when the holder is a relay that is alive: what it is sending could be
    overtaken by the lane's next relay. Raises SchemaError when there is no such lane, Unavailable when Postgres can't
    be reached or the row stays locked.
    """
    names = names_of(schema)
    with unavailable_on_error(f"releasing lane {lane}"), connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '10s'")
        row = connection.execute(sql.SQL(_LANE).format(**names), (lane,)).fetchone()
        if row is None:
            raise SchemaError(f"the outbox has no lane {lane}; see `outbox db check`")
        owner, lease_until, seconds, held, alive = row
        if not held:
            return None
        if alive and not force:
            raise OperationRefused(
                f"the relay {owner} is alive and holds lane {lane}: at-most-once, later events of a key could overtake "
                "those that it is sending. Stop that relay, which frees its lanes; --force takes the lane all the same"
            )
        details = {"lane": lane, "owner": owner, "lease_until": lease_until, "lease_seconds_left": seconds}
        details |= {"forced": True} if alive else {}
        note(connection, names, "release", reason, details)
        connection.execute(sql.SQL(_RELEASE).format(**names), (lane,))
    return owner, lease_until
