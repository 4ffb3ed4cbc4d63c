"""Lane leases: which relay publishes which lane, for how long, and how lanes are divided among running relays.

A lane is free when its lease has expired by the database's clock, or when its owner's session has ended. Taking it
raises its epoch, the fencing token: every settling write names the epoch and the owner under which its events were
fetched, so a relay that slept through its lease can't settle. With ``FOR UPDATE SKIP LOCKED``, relays that take lanes
at the same moment do not wait for each other.

A relay's session (its control loop's connection) holds an advisory lock on a random number, which the relay's row
names. Postgres releases it when the session ends, and whoever can lock it then knows. That needs no right, and no
other session ever has the same number; pg_stat_activity hides backend_start from other roles, and process ids are used
again.

| what happens                            | what follows                                                            |
|-----------------------------------------|-------------------------------------------------------------------------|
| relay stops                             | releases its lanes: free at once                                        |
| relay is killed                         | its session ends, others take the lanes within two looks, epoch + 1     |
| it is killed, and comes back under its  | before its first beat it frees the lanes of its former session, if that |
| own name                                | has ended; else the leases decide                                       |
| its host or the network is gone         | Postgres keeps the session until keepalives fail: the leases decide     |
| a living relay's connection breaks      | it opens another one, at once and ten times a second for the first      |
|                                         | seconds, and keeps the lanes, also while it stops. If others were       |
|                                         | faster: as one that slept past its lease                                |
| Postgres crashes or fails over          | all sessions are new, also that of who looks, and it has seen none of   |
|                                         | the others alive: the leases decide                                     |
| behind a pooler                         | no session is the relay's own: the leases decide                        |
| at-most-once                            | the leases decide: what a relay has taken from the table it may still   |
|                                         | send, which must not be after the next holder has sent what follows     |
| relay sleeps (SIGSTOP) past its lease   | the lane is taken; on waking its renewal and its settling match no row  |
| a failover loses the commit of a take-  | the next taker gets the same epoch; the owner differs, so the former    |
| over                                    | holder's renewal and settling match no row                              |
| Postgres is down longer than the lease  | the first to renew or take it when it is back has it; the epoch decides |
| the database's clock goes back          | a relay has a share again when it beats; that a session has ended is    |
|                                         | seen as always; leases end later by as much                             |
| relay joins                             | relays with more than their share release the rest between batches      |
| two relays reach for one lane           | the second skips the locked row and takes another, or none              |
| another session has locked its own row  | a beat is given up, but not the session; the leases are renewed, and    |
|                                         | the pauses are read                                                     |
| another session has locked a lane's row | that lane is not renewed, the others are; its lease may run out         |
| the same when it is released            | the others are released; that one is tried again until its lease ends,  |
|                                         | and after a stop it is as if the relay had been killed                  |
| killed after taking a lane              | the row still names the former transactional.id, to be fenced next      |
| a lane is paused while it is taken      | the taking statement reads the pauses; see pauses.py                    |
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import orjson
import psycopg
from psycopg import sql

from outbox._clients.clock import DatabaseClock, uptime
from outbox.errors import SchemaError
from relay.core.lease import Lease, LetGo
from relay.core.pauses import Pauses
from relay.database import one_write, unavailable_on_error
from relay.settle.statements import lease_values, names_of
from relay.tasks.scheduled import NextDue, next_due

# As JSON in one column of other statements, so that reading them costs no statement of its own.
_PAUSES: Final = "(SELECT coalesce(json_agg(json_build_array(number, scope, name)), '[]') FROM {pauses})"

# In rows of lanes. The relays' rows, not their names: one that has opened another session keeps its lanes.
_FREE: Final = """(lease_until < clock_timestamp()
       OR owner IN (SELECT instance FROM {relays} WHERE session = ANY(%(ended)s::bigint[])))"""

# Synchronous, whatever the role's setting: after a crash that loses an epoch, another relay would get the same one.
_ACQUIRE: Final = """
UPDATE {lanes} SET owner = %(me)s, epoch = epoch + 1,
       lease_until = clock_timestamp() + make_interval(secs => %(ttl)s)
 WHERE {which}
RETURNING lane, epoch, transactional_id, last_batch, {paused}::text, set_config('synchronous_commit', 'on', true)"""

_LONGEST_FREE: Final = """lane IN (SELECT lane FROM {lanes} WHERE {free} AND source = %(source)s
                 ORDER BY lease_until, lane FOR UPDATE SKIP LOCKED LIMIT %(count)s)"""

# All or none: the WAL is one stream. A locked lane is being taken by another relay, or settled by its owner.
_ALL: Final = """(SELECT count(*) FROM (SELECT FROM {lanes} WHERE {free} AND source = %(source)s
                               FOR UPDATE SKIP LOCKED) AS free) = (SELECT count(*) FROM {lanes})"""

# Below the part of a lease at which the worker renews it itself (settlement.RENEW_PART), and early enough for several
# tries.
_DUE_PART: Final = 0.6

# A row that another session has locked is skipped: it must not keep the other leases from being renewed.
_RENEW: Final = """
WITH mine AS (
    SELECT l.lane, l.source FROM {lanes} AS l JOIN {leases} ON {ours}),
free AS (
    SELECT l.lane FROM {lanes} AS l JOIN {leases} ON {ours} AND l.lane = ANY(%(due)s::smallint[])
       FOR NO KEY UPDATE OF l SKIP LOCKED),
renewed AS (
    UPDATE {lanes} AS l SET lease_until = clock_timestamp() + make_interval(secs => %(ttl)s)
      FROM free WHERE l.lane = free.lane RETURNING l.lane)
SELECT mine.lane, mine.source, renewed.lane IS NOT NULL FROM mine LEFT JOIN renewed ON renewed.lane = mine.lane"""

# A locked row is skipped here too, and returned.
_RELEASE: Final = """
WITH mine AS (
    SELECT l.lane FROM {lanes} AS l JOIN {leases} ON {ours}),
free AS (
    SELECT l.lane FROM {lanes} AS l JOIN {leases} ON {ours} FOR NO KEY UPDATE OF l SKIP LOCKED),
released AS (
    UPDATE {lanes} AS l SET owner = NULL, lease_until = '-infinity',
           transactional_id = CASE WHEN l.lane = ANY(%(clean)s::smallint[]) THEN NULL ELSE l.transactional_id END
      FROM free WHERE l.lane = free.lane RETURNING l.lane)
SELECT lane FROM mine WHERE lane NOT IN (SELECT lane FROM released)"""

_BEAT: Final = """
INSERT INTO {relays} (instance, version, source, obeys, session, alive_until, started_at)
VALUES (%(me)s, %(version)s, %(source)s, %(obeys)s, %(session)s, clock_timestamp() + make_interval(secs => %(ttl)s),
        clock_timestamp() - make_interval(secs => %(age)s))
ON CONFLICT (instance) DO UPDATE SET version = excluded.version, source = excluded.source, obeys = excluded.obeys,
       session = excluded.session, heartbeat_at = clock_timestamp(), alive_until = excluded.alive_until,
       started_at = excluded.started_at"""

# Only if the session that our own row names has ended, and of lanes that no other session has locked.
_FREE_FORMER: Final = """
UPDATE {lanes} SET lease_until = '-infinity'
 WHERE (SELECT pg_try_advisory_xact_lock_shared(session) FROM {relays} WHERE instance = %(me)s)
   AND lane IN (SELECT lane FROM {lanes} WHERE owner = %(me)s AND lease_until >= clock_timestamp()
                   FOR UPDATE SKIP LOCKED)
RETURNING lane"""

_LEAVE: Final = "DELETE FROM {relays} WHERE instance = %(me)s"

# A killed instance leaves its row; operators can see it for a day.
_FORGET: Final = "DELETE FROM {relays} WHERE alive_until < clock_timestamp() - interval '1 day'"

# Shared and for this statement only: neither relays that look at the same time nor the owner's next session wait. The
# sessions of all whose row has not run out: that of a killed one, whose last beat is from before the clock went back,
# would otherwise never be looked at.
_CENSUS: Final = """
SELECT r.instance, count(l.lane), (SELECT count(*) FROM {lanes}),
       (SELECT count(*) FROM {lanes} WHERE source = %(source)s),
       (SELECT count(*) FROM {lanes} WHERE lease_until < clock_timestamp() AND source = %(source)s), {paused}::text,
       {next_due}, extract(epoch FROM clock_timestamp())::float8, ({alive} OR r.instance = %(me)s), r.session,
       pg_try_advisory_xact_lock_shared(r.session)
  FROM {relays} AS r LEFT JOIN {lanes} AS l
       ON l.owner = r.instance AND l.lease_until >= clock_timestamp() AND l.source = %(source)s
 WHERE (r.alive_until >= clock_timestamp() AND r.source = %(source)s) OR r.instance = %(me)s
 GROUP BY r.instance"""


@dataclass(frozen=True, slots=True)
class LaneDistribution:
    """Live relays of one source with the number of lanes each holds, the lanes of that source, and how many are free.

    ``total`` counts the lanes of all sources.
    """

    held: Mapping[str, int]
    lanes: int
    free: int
    total: int = 0


class EndedSessions:
    """The sessions of other relays that have ended, as one session of our own sees it.

    A session must have been seen alive: after a crash or a failover of the server it is ours that is new. And it must
    be missed twice: a living relay whose connection broke has opened another one by then.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.missed: Collection[int] = ()

    def look(self, sessions: Mapping[int, bool]) -> Collection[int]:
        """Return which of these sessions have ended. The values are whether their locks are gone."""
        missed = {session for session, gone in sessions.items() if gone and session in self._seen}
        ended = missed.intersection(self.missed)
        self._seen.update(session for session, gone in sessions.items() if not gone)
        self._seen &= sessions.keys()
        self.missed = missed
        return ended


def lock_session(connection: psycopg.Connection[Any]) -> int:
    """Lock a random number for as long as this connection's session lives, and return it."""
    session = secrets.randbits(63)
    connection.execute("SELECT pg_advisory_lock(%s)", (session,))
    return session


@dataclass(frozen=True, slots=True)
class Renewal:
    """Leases that are lost, and those whose lanes were switched to the other source."""

    lost: Sequence[Lease] = ()
    switched: Sequence[Lease] = ()


def next_step(distribution: LaneDistribution, me: str) -> int:
    """Return how many lanes to take, or, if it is negative, to release, so that shares differ by at most one.

    Those with the most lanes (the greatest name among equals) keep one more. Every relay computes the same shares.
    """
    relays = max(len(distribution.held), 1)
    floor, rest = divmod(distribution.lanes, relays)
    ranked = sorted(distribution.held, key=lambda name: (distribution.held[name], name), reverse=True)
    mine = distribution.held.get(me, 0)
    share = floor + (1 if me in ranked[:rest] else 0)
    return min(share - mine, distribution.free)


def source_problem(lanes: str, relays: str) -> str:
    """Return what to do about relays of one source while the lanes are read from the other."""
    return (
        f"the lanes are read from source {lanes}, and a relay of source {relays} waits until that changes: run relays "
        f"with OUTBOX_SOURCE={lanes}, or `outbox relay switch {relays}`"
    )


class LaneTable:
    """The statements on outbox.lanes and outbox.relays, each in its own short transaction.

    ``connection`` is in autocommit, and may go through a pooler, see begin_session. ``session`` is the number
    that ``lock_session`` returned; None: this relay's leases decide, and it looks for no other sessions. Each look at
    the distribution notes the database's time in ``clock``. ``began`` is when the relay was started, by ``uptime()``.
    Every method raises Unavailable when Postgres can't be reached, SchemaError when the tables are missing.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        schema: str,
        instance: str,
        version: str,
        ttl_seconds: float,
        source: str = "polling",
        *,
        session: int | None = None,
        clock: DatabaseClock | None = None,
        began: float | None = None,
    ) -> None:
        self._clock = clock
        self._began = uptime() if began is None else began
        self._connection = connection
        self._names = names_of(schema)
        self._names["paused"] = sql.SQL(_PAUSES).format(**self._names)
        self._names["free"] = sql.SQL(_FREE).format(**self._names)
        self._names["next_due"] = next_due(self._names, since=True)
        self._me = instance
        self._version = version
        self._ttl = ttl_seconds
        self._source = source
        self._session = session
        self._sessions = EndedSessions()
        self._ended: list[int] = []
        self.pauses: Pauses | None = None
        """The pauses, as of the last statement that counted or took lanes; None before the first."""

    def beat(self, obeys: Collection[int] = ()) -> None:
        """Record that this relay is alive, and the numbers of the pauses that it obeys."""
        values = {
            "me": self._me,
            "version": self._version,
            "ttl": self._ttl,
            "source": self._source,
            "obeys": sorted(obeys),
            "session": self._session,
            "age": uptime() - self._began,
        }
        self._run(_BEAT, values, "recording that it is alive")

    def free_former(self) -> Sequence[int]:
        """Free the lanes of an ended process that had our name, and return them. To be called once in a process,
        before its first beat, which replaces that process's session: after it no one sees that it has ended.
        """
        if self._session is None:
            return []
        return sorted(
            lane for (lane,) in self._run(_FREE_FORMER, {"me": self._me}, "freeing lanes of a former process")
        )

    def forget_dead(self) -> None:
        self._run(_FORGET, {}, "deleting dead relays")

    def leave(self) -> None:
        self._run(_LEAVE, {"me": self._me}, "recording that it is gone")

    def renew(self, leases: Collection[Lease]) -> Renewal:
        """Renew these leases.

        A lane whose row is locked is neither renewed nor lost. Nor is one that was renewed recently, as the worker does
        when it settles: the two must not block each other.
        """
        if not leases:
            return Renewal()
        asked_at = uptime()
        rows = self._run(
            _RENEW,
            {
                "ttl": self._ttl,
                **lease_values(leases),
                "due": [lease.lane for lease in leases if lease.remaining_seconds < lease.ttl_seconds * _DUE_PART],
            },
            "renewing leases",
        )
        kept = {lane: source for lane, source, _ in rows}
        renewed = {lane for lane, _, prolonged in rows if prolonged}
        for lease in leases:
            if lease.lane in renewed:
                lease.renewed(asked_at)
        return Renewal(
            [lease for lease in leases if lease.lane not in kept],
            [lease for lease in leases if kept.get(lease.lane, self._source) != self._source],
        )

    def distribution(self, next_due: NextDue | None = None) -> LaneDistribution:
        """Return the numbers of live relays and lanes; read the pauses, and write into ``next_due`` when that is.

        Raises SchemaError when there are no lanes at all.
        """
        next_due = next_due or NextDue()
        back = next_due.seconds_back()
        asked_at = time.monotonic()
        rows = self._run(_CENSUS, {"me": self._me, "source": self._source, "back": back}, "counting lanes")
        if not rows:
            return LaneDistribution(held={}, lanes=0, free=0)
        if rows[0][2] == 0:
            raise SchemaError("the outbox has no lanes: run `outbox db upgrade`")
        _, _, total, lanes, free, pauses, due_seconds, database_seconds, *_ = rows[0]
        if self._clock is not None:
            self._clock.note(database_seconds, asked_at)
        next_due.set(due_seconds, back)
        self.pauses = Pauses.of(orjson.loads(pauses))
        if self._session is not None:
            others = {row[-2]: row[-1] for row in rows if row[-2] is not None and row[0] != self._me}
            self._ended = sorted(self._sessions.look(others))
        held = {row[0]: row[1] for row in rows if row[-3] and row[-2] not in self._ended}
        free += sum(row[1] for row in rows if row[-2] in self._ended)
        return LaneDistribution(held=held, lanes=lanes, free=free, total=total)

    def acquire(self, count: int = 1) -> list[Lease]:
        """Take up to ``count`` lanes, those that have been free longest first."""
        return self._taken(_LONGEST_FREE, count=count)

    def acquire_all(self) -> list[Lease]:
        """Take all lanes of the outbox, or none if one is held or belongs to another source."""
        return self._taken(_ALL)

    def release(self, leases: Collection[Lease], *, clean: Collection[int] = ()) -> list[int]:
        """Free lanes at once. Does nothing for lanes that another relay has taken. Returns those that are locked.

        ``clean`` are the lanes of which no Kafka transaction can be open: the next holder need not fence this relay.
        """
        rows = self._run(_RELEASE, {**lease_values(leases), "clean": list(clean)}, "releasing lanes")
        return sorted(lane for (lane,) in rows)

    @property
    def broken(self) -> bool:
        """Return whether the connection has ended, as far as this process has noticed; without a statement."""
        try:
            self._connection.pgconn.consume_input()
        except psycopg.OperationalError:
            return True
        return self._connection.broken

    @property
    def misses_sessions(self) -> bool:
        """Return whether the last look missed a session, and the next one may find that it has ended."""
        return bool(self._sessions.missed)

    def close(self) -> None:
        self._connection.close()

    def _taken(self, which: LiteralString, **values: object) -> list[Lease]:
        asked_at = uptime()
        values |= {"me": self._me, "ttl": self._ttl, "source": self._source, "ended": self._ended}
        rows = self._run(_ACQUIRE, values, "taking lanes", which=sql.SQL(which).format(**self._names))
        leases = [
            Lease(lane, epoch, self._ttl, asked_at, former_id, last_batch, self._me)
            for lane, epoch, former_id, last_batch, *_ in rows
        ]
        if rows:
            self.pauses = Pauses.of(orjson.loads(rows[0][4]))
        return sorted(leases, key=lambda lease: lease.lane)

    def _run(
        self, query: LiteralString, values: Mapping[str, object], doing: str, **more: sql.Composable
    ) -> Sequence[Any]:
        with unavailable_on_error(doing), one_write(self._connection), self._connection.cursor() as cursor:
            cursor.execute(sql.SQL(query).format(**self._names, **more), values)
            return cursor.fetchall() if cursor.description else []


class Releases:
    """The lanes that the worker has let go of and that are not released yet. ``left``: a lock or a failure kept them.

    No other relay takes them before their leases end.
    """

    def __init__(self) -> None:
        self.left: list[LetGo] = []

    def release(self, table: LaneTable, let_go: Collection[LetGo]) -> list[int]:
        """Release these lanes, but those that other relays have, and what is left of before. Returns the released."""
        # Of two leases of a lane the later one says whether it is clean; the other is over.
        self.left = list({gone.lease.lane: gone for gone in (*self.left, *let_go) if not gone.lost}.values())
        if not self.left:
            return []
        clean = [gone.lease.lane for gone in self.left if gone.clean]
        locked = table.release([gone.lease for gone in self.left], clean=clean)
        released = [gone.lease.lane for gone in self.left if gone.lease.lane not in locked]
        self.left = [gone for gone in self.left if gone.lease.lane in locked]
        return released
