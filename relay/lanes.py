"""Lane leases: who publishes which lane, for how long, and how lanes spread over the relays that run.

A lane is free when its lease has run out by the database's clock. Taking it raises its epoch, the fencing token: every
settling write names the epoch it was fetched under, so a relay that slept through its lease can't settle.
``FOR UPDATE SKIP LOCKED`` keeps relays that reach for lanes at the same moment from waiting for one another.

| what happens                             | what follows                                                            |
|------------------------------------------|-------------------------------------------------------------------------|
| relay stops                              | releases its lanes: free at once                                        |
| relay is killed                          | leases run out, others take the lanes, epoch + 1                        |
| relay sleeps (SIGSTOP) past its lease    | the lane is taken; on waking its renewal and its settling match no row  |
| Postgres is away longer than the lease   | the first to renew or take it when it is back has it; the epoch decides |
| relay joins                              | whoever holds more than a fair share gives one up between batches       |
| two relays reach for one lane            | the second skips the locked row and takes another, or none              |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from outbox.errors import SchemaError
from relay.database import unavailable_on_error

# Synchronous, whatever the role's setting: a crash that took an epoch back would give it to another relay once more.
_ACQUIRE: Final = """
UPDATE {lanes} SET owner = %(me)s, epoch = epoch + 1,
       lease_until = clock_timestamp() + make_interval(secs => %(ttl)s)
 WHERE lane = (SELECT lane FROM {lanes} WHERE lease_until < clock_timestamp() AND source = %(source)s
                ORDER BY lease_until, lane FOR UPDATE SKIP LOCKED LIMIT 1)
RETURNING lane, epoch, set_config('synchronous_commit', 'on', true)"""

# All or none: the WAL is one stream. A lane that is locked is being taken by another, or settled by its owner.
_ACQUIRE_ALL: Final = """
UPDATE {lanes} SET owner = %(me)s, epoch = epoch + 1,
       lease_until = clock_timestamp() + make_interval(secs => %(ttl)s)
 WHERE (SELECT count(*) FROM (SELECT FROM {lanes} WHERE lease_until < clock_timestamp() AND source = %(source)s
                               FOR UPDATE SKIP LOCKED) AS free) = (SELECT count(*) FROM {lanes})
RETURNING lane, epoch, set_config('synchronous_commit', 'on', true)"""

_RENEW: Final = """
UPDATE {lanes} AS l SET lease_until = clock_timestamp() + make_interval(secs => %(ttl)s)
  FROM unnest(%(lanes)s::smallint[], %(epochs)s::bigint[]) AS mine(lane, epoch)
 WHERE l.lane = mine.lane AND l.epoch = mine.epoch
RETURNING l.lane, l.source"""

_RELEASE: Final = """
UPDATE {lanes} SET owner = NULL, lease_until = '-infinity' WHERE lane = %(lane)s AND epoch = %(epoch)s"""

_BEAT: Final = """
INSERT INTO {relays} (instance, version, source, alive_until)
VALUES (%(me)s, %(version)s, %(source)s, clock_timestamp() + make_interval(secs => %(ttl)s))
ON CONFLICT (instance) DO UPDATE SET version = excluded.version, source = excluded.source,
       heartbeat_at = clock_timestamp(), alive_until = excluded.alive_until"""

_LEAVE: Final = "DELETE FROM {relays} WHERE instance = %(me)s"

# Instances that were killed leave their row behind; a day is long enough for a person to have seen it.
_FORGET: Final = "DELETE FROM {relays} WHERE alive_until < clock_timestamp() - interval '1 day'"

_CENSUS: Final = """
SELECT r.instance, count(l.lane), (SELECT count(*) FROM {lanes}),
       (SELECT count(*) FROM {lanes} WHERE source = %(source)s),
       (SELECT count(*) FROM {lanes} WHERE lease_until < clock_timestamp() AND source = %(source)s)
  FROM {relays} AS r LEFT JOIN {lanes} AS l
       ON l.owner = r.instance AND l.lease_until >= clock_timestamp() AND l.source = %(source)s
 WHERE (r.alive_until >= clock_timestamp() AND r.source = %(source)s) OR r.instance = %(me)s
 GROUP BY r.instance"""


class Lease:
    """One lane held by this relay. ``renewed`` and ``secure`` may be called from any thread.

    ``ttl_seconds`` counts from when the renewal was asked for, on this process's own clock, so it always ends before
    the database's reading of the same lease does.
    """

    def __init__(self, lane: int, epoch: int, ttl_seconds: float, asked_at: float) -> None:
        self.lane = lane
        self.epoch = epoch
        self.ttl_seconds = ttl_seconds
        self._lock = threading.Lock()
        self._until = asked_at + ttl_seconds

    def renewed(self, asked_at: float) -> None:
        """Take note that Postgres prolonged the lease; ``asked_at`` is time.monotonic() before it was asked."""
        with self._lock:
            self._until = max(self._until, asked_at + self.ttl_seconds)

    @property
    def secure(self) -> bool:
        """Whether the lease can't have run out yet. If not, nothing may be published before it is renewed."""
        with self._lock:
            return time.monotonic() < self._until

    @property
    def remaining_seconds(self) -> float:
        """For how long the lease holds at least."""
        with self._lock:
            return self._until - time.monotonic()

    def __repr__(self) -> str:
        return f"Lease(lane={self.lane}, epoch={self.epoch})"


@dataclass(frozen=True, slots=True)
class Census:
    """Living relays of one source with the number of lanes each holds, the lanes of that source, how many are free.

    ``total`` counts the lanes of all sources.
    """

    held: Mapping[str, int]
    lanes: int
    free: int
    total: int = 0


@dataclass(frozen=True, slots=True)
class Renewal:
    """Leases that could not be prolonged, and those whose lanes are to go over to the other source."""

    lost: Sequence[Lease] = ()
    switched: Sequence[Lease] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one relay should do next to bring the lanes nearer to an even spread."""

    acquire: int = 0
    release: int = 0


def next_step(census: Census, me: str) -> Step:
    """Say how many lanes to take or to give up, from what every relay can see alike.

    Shares differ by one at most: with L lanes and R relays each holds L // R or one more. A relay below the floor
    takes free lanes; one at the floor takes another only when nobody is below it. Only the relay with the most lanes
    (the greatest name among equals) gives up, and one at a time, so that two never give up for the same newcomer.
    """
    relays = max(len(census.held), 1)
    floor, rest = divmod(census.lanes, relays)
    mine = census.held.get(me, 0)
    someone_short = any(held < floor for held in census.held.values())
    if census.free:
        if mine < floor:
            return Step(acquire=min(floor - mine, census.free))
        if rest and mine == floor and not someone_short:
            return Step(acquire=1)
        return Step()
    fullest = max(census.held, key=lambda name: (census.held[name], name), default=None)
    if fullest == me and mine - min(census.held.values()) > 1:
        return Step(release=1)
    return Step()


class LaneTable:
    """The statements over outbox.lanes and outbox.relays, each in its own short transaction.

    ``connection`` is in autocommit. Every method raises Unavailable when Postgres is away, SchemaError when the tables
    are not there.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        schema: str,
        instance: str,
        version: str,
        ttl_seconds: float,
        source: str = "polling",
    ) -> None:
        self._connection = connection
        self._names = {"lanes": sql.Identifier(schema, "lanes"), "relays": sql.Identifier(schema, "relays")}
        self._me = instance
        self._version = version
        self._ttl = ttl_seconds
        self._source = source

    def beat(self) -> None:
        """Say that this relay is alive, and forget those long dead."""
        values = {"me": self._me, "version": self._version, "ttl": self._ttl, "source": self._source}
        self._run(_BEAT, values, "saying it is alive")
        self._run(_FORGET, {}, "forgetting dead relays")

    def leave(self) -> None:
        """Say that this relay is gone."""
        self._run(_LEAVE, {"me": self._me}, "signing off")

    def renew(self, leases: Collection[Lease]) -> Renewal:
        """Prolong these leases; give those that are lost, and those that are prolonged to be given up in order."""
        if not leases:
            return Renewal()
        asked_at = time.monotonic()
        rows = self._run(
            _RENEW,
            {
                "ttl": self._ttl,
                "lanes": [lease.lane for lease in leases],
                "epochs": [lease.epoch for lease in leases],
            },
            "renewing leases",
        )
        kept = dict(rows)
        for lease in leases:
            if lease.lane in kept:
                lease.renewed(asked_at)
        return Renewal(
            [lease for lease in leases if lease.lane not in kept],
            [lease for lease in leases if kept.get(lease.lane, self._source) != self._source],
        )

    def census(self) -> Census:
        """Count living relays and lanes. Raises SchemaError when there are no lanes at all."""
        rows = self._run(_CENSUS, {"me": self._me, "source": self._source}, "counting lanes")
        if not rows:
            return Census(held={}, lanes=0, free=0)
        if rows[0][2] == 0:
            raise SchemaError("the outbox has no lanes: run `outbox db upgrade`")
        _, _, total, lanes, free = rows[0]
        return Census(held={row[0]: row[1] for row in rows}, lanes=lanes, free=free, total=total)

    def acquire(self) -> Lease | None:
        """Take the lane that has been free for longest, or None when none is free."""
        asked_at = time.monotonic()
        rows = self._run(_ACQUIRE, {"me": self._me, "ttl": self._ttl, "source": self._source}, "taking a lane")
        if not rows:
            return None
        lane, epoch, _ = rows[0]
        return Lease(lane, epoch, self._ttl, asked_at)

    def acquire_all(self) -> list[Lease]:
        """Take all lanes of the outbox, or none: when one is held, or belongs to another source."""
        asked_at = time.monotonic()
        values = {"me": self._me, "ttl": self._ttl, "source": self._source}
        rows = self._run(_ACQUIRE_ALL, values, "taking the lanes")
        return sorted((Lease(lane, epoch, self._ttl, asked_at) for lane, epoch, _ in rows), key=lambda held: held.lane)

    def release(self, lease: Lease) -> None:
        """Make the lane free at once. Does nothing when it is already somebody else's."""
        self._run(_RELEASE, {"lane": lease.lane, "epoch": lease.epoch}, f"releasing lane {lease.lane}")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _run(self, query: str, values: Mapping[str, object], doing: str) -> Sequence[Any]:
        with unavailable_on_error(doing), self._connection.cursor() as cursor:
            cursor.execute(sql.SQL(query).format(**self._names), values)
            return cursor.fetchall() if cursor.description else []
