"""Source over outbox.events: one lane, read by polling, settled row by row.

Every fetch starts from the lowest id that may still be unpublished, not from the last one seen: a transaction that
drew a low id and committed late is found by the next fetch. A row leaves by DELETE, so there is no position to keep.

Batch k is read; then one statement settles batch k-1, sees that batch k is still there, and commits synchronously; only
then batch k is given out. That commit is the flush barrier: rows of writers with ``synchronous_commit = off`` are
visible before they are durable; once it has come back, what it saw can't be lost any more. That it looks again matters
behind a pooler: Postgres may crash between two transactions without the relay's connection noticing.

It is one statement, because a relay that sleeps (SIGSTOP, a paused virtual machine, a lost host) between a write to the
lane's row and the commit would keep everybody from the lane for as long as it sleeps; Postgres' limits on silent
sessions do not hold within a pipeline. Where a transaction of several statements can't be avoided (a failure is
recorded, a lane is taken over), its session ends when it says nothing for the length of a lease.

The floor
    Deleted rows leave dead index entries at the low end. Postgres steps over them quickly unless some old snapshot
    (a forgotten session, a long dump) forbids it to forget them; then each fetch would visit them all. So fetches
    start above a floor, which rises to an id M only when no transaction can still commit an id up to M:
      1. M is the last id settled; some seconds pass (``_SETTLE_SECONDS``), in which every INSERT that had drawn an id
         up to M got its transaction id; then a transaction id of our own is drawn, X. (A snapshot's xmax would not do:
         it is the last completed id plus one, and transactions beyond it may be running already.)
      2. once the snapshot's xmin has reached X, all those transactions have ended;
      3. a fetch after that, still from the old floor, found nothing up to M.
    A snapshot held by a reader has no transaction id and does not hold the floor back; a forgotten writer does, as it
    must. (An INSERT that stands still for longer than the wait in 1, between drawing its id and writing, as in a BEFORE
    trigger that sleeps, is found by the full sweep every ``_SWEEP_SECONDS``.)

Keys that wait
    While the lane has rows in ``failures``, fetches leave out the events whose key waits (see failures.py), and the
    floor stays where it is: what waits is not behind it. Events that are due again come one at a time, in turns with
    batches of the others. A lane without failures pays nothing for this but a look at
    an empty table each second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, LiteralString, assert_never

import orjson
import psycopg
from psycopg import sql
from psycopg.types.json import set_json_loads

from outbox.errors import SchemaError
from outbox.event import DEAD_LETTER
from relay.database import FURTHER, TIMELINE, unavailable_on_error
from relay.failpoints import failpoint
from relay.failures import Failures
from relay.lanes import Lease
from relay.marker import Marker, StateLost, resume
from relay.ports import At, Claim, LaneLost, Published, Receipt, Refused, Unavailable

_LOWEST: Final = -(2**63)
_SETTLE_SECONDS: Final = 5.0
_SWEEP_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 1.0

_COLUMNS: Final = """
SELECT id, event_id::text, aggregate_type, aggregate_id, event_type,
       to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
       coalesce(payload_bytes, convert_to(payload::text, 'UTF8')), headers"""

# The batch before, which is settled a moment later, is left out; rows behind its last one need no look at the list.
_FETCH: Final = """
{columns}, NULL
  FROM {events}
 WHERE lane = %(lane)s AND id > %(floor)s AND (id > %(after)s OR id <> ALL(%(pending)s::bigint[]))
 ORDER BY id LIMIT %(limit)s"""

# Without the events that have failed, and without those of a key of which an earlier one has failed. The hash is what
# the index has (keys can be too long for one).
_FETCH_AROUND: Final = """
{columns}, NULL
  FROM {events} AS e
 WHERE lane = %(lane)s AND id > %(floor)s AND (id > %(after)s OR id <> ALL(%(pending)s::bigint[]))
   AND NOT EXISTS (SELECT FROM {failures} AS f WHERE f.lane = %(lane)s AND f.id = e.id)
   AND (NOT EXISTS (SELECT FROM {failures} AS f
                     WHERE f.lane = %(lane)s AND f.aggregate_type = e.aggregate_type
                       AND hashtextextended(f.aggregate_id, 0) = hashtextextended(e.aggregate_id, 0)
                       AND f.aggregate_id = e.aggregate_id AND f.id < e.id AND f.blocks)
        OR e.headers ? %(copy)s)
 ORDER BY id LIMIT %(limit)s"""

# One that has failed and is due, by itself: if it is refused again, no other event has to be sent again because of it.
# It may lie below the floor, if a person has put it back.
_FETCH_DUE: Final = """
{columns}, NULL
  FROM {events} AS e
 WHERE lane = %(lane)s AND id <> ALL(%(pending)s::bigint[])
   AND id = (SELECT f.id FROM {failures} AS f JOIN {events} AS due ON due.lane = f.lane AND due.id = f.id
              WHERE f.lane = %(lane)s AND f.next_attempt_at <= clock_timestamp() AND f.id <> ALL(%(pending)s::bigint[])
                AND (NOT f.blocks OR NOT EXISTS (SELECT FROM {failures} AS g
                                      WHERE g.lane = f.lane AND g.aggregate_type = f.aggregate_type
                                        AND hashtextextended(g.aggregate_id, 0) = hashtextextended(f.aggregate_id, 0)
                                        AND g.aggregate_id = f.aggregate_id AND g.id < f.id AND g.blocks))
              ORDER BY f.next_attempt_at, f.id LIMIT 1)"""

_ANY_FAILURES: Final = "SELECT EXISTS (SELECT FROM {failures} WHERE lane = %(lane)s)"

_LEASE: Final = """UPDATE {lanes} SET lease_until = clock_timestamp() + make_interval(secs => %(ttl)s),
           last_batch = coalesce(%(batch)s, last_batch), commit_lsn = coalesce(%(commit_lsn)s, commit_lsn),
           commit_number = coalesce(%(commit_number)s, commit_number)
     WHERE lane = %(lane)s AND epoch = %(epoch)s RETURNING lane, {synchronous} AS synchronous"""

# A role or a database may have synchronous_commit off. It counts at the commit, so the statement itself can set it.
_SYNCHRONOUS: Final = """set_config('synchronous_commit',
       CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
            ELSE current_setting('synchronous_commit') END, true)"""

# How many of the events that were just read are there.
_THERE: Final = """(SELECT count(*) FROM {events}
         WHERE lane = %(lane)s AND id = ANY(%(next_ids)s::bigint[]) AND event_id = ANY(%(next_event_ids)s::uuid[]))"""

# One statement: the lease is checked and prolonged, and only under it rows go; by id and event id, because behind a
# pooler the server may be another one by now, which gave the id to another event. One that had failed leaves failures
# too, always: one that a person has just put back may be published before this source knows of any failure.
_SETTLING: Final = """
WITH lease AS ({lease}),
freed AS (
    DELETE FROM {failures} WHERE lane = (SELECT lane FROM lease) AND id = ANY(%(ids)s::bigint[])),
gone AS (
    DELETE FROM {events} WHERE lane = (SELECT lane FROM lease) AND id = ANY(%(ids)s::bigint[])
                           AND event_id = ANY(%(event_ids)s::uuid[]))"""

_ARCHIVED: Final = """
INSERT INTO {published} (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers,
                         created_at, published_at, topic, partition, "offset")
SELECT lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers, created_at,
       clock_timestamp(), topic, part, off FROM gone"""

_SETTLING_INTO_ARCHIVE: Final = """
WITH lease AS ({lease}),
freed AS (
    DELETE FROM {failures} WHERE lane = (SELECT lane FROM lease) AND id = ANY(%(ids)s::bigint[])),
deleted AS (
    DELETE FROM {events} WHERE lane = (SELECT lane FROM lease) AND id = ANY(%(ids)s::bigint[])
                           AND event_id = ANY(%(event_ids)s::uuid[]) RETURNING *),
gone AS (
    SELECT deleted.*, p.topic, p.part, p.off
      FROM deleted JOIN unnest(%(ids)s::bigint[], %(topics)s::text[], %(partitions)s::int[], %(offsets)s::bigint[])
                        AS p(place_id, topic, part, off) ON p.place_id = deleted.id),
kept AS ({archived})"""

_SETTLE: Final = "{settling} SELECT {there}, synchronous FROM lease"

# Rows by their ids: a row of NULLs at least, while the lease holds.
_SETTLE_AND_READ: Final = """{settling}
{columns}
  FROM lease LEFT JOIN {events} AS e ON e.lane = %(lane)s AND e.id = ANY(%(next_ids)s::bigint[])"""

_READ: Final = """
{columns}
  FROM {lanes} AS l LEFT JOIN {events} AS e ON e.lane = %(lane)s AND e.id = ANY(%(next_ids)s::bigint[])
 WHERE l.lane = %(lane)s AND l.epoch = %(epoch)s"""

# By id and event id: after a restore an id may have been given to another event.
_SETTLE_MARKER: Final = """
WITH gone AS (
    DELETE FROM {events} AS e USING unnest(%(ids)s::bigint[], %(event_ids)s::uuid[]) AS p(place_id, place_event_id)
     WHERE e.lane = %(lane)s AND e.id = p.place_id AND e.event_id = p.place_event_id
    RETURNING e.*, NULL::text AS topic, NULL::int AS part, NULL::bigint AS off),
kept AS ({archived})
SELECT count(*) FROM gone"""

_HELD: Final = """
SELECT last_batch, (SELECT system_identifier::text FROM pg_control_system()),
       {timeline},
       (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint
  FROM {lanes} WHERE lane = %(lane)s AND epoch = %(epoch)s FOR UPDATE"""

_STILL_HELD: Final = """
SELECT (SELECT system_identifier::text FROM pg_control_system()), {timeline} FROM {lanes}
 WHERE lane = %(lane)s AND epoch = %(epoch)s"""

_LAST_BATCH: Final = """
UPDATE {lanes} SET last_batch = %(batch)s, {further} WHERE lane = %(lane)s"""

# The index gives a lane in id order. Without fresh statistics the planner may sort the whole backlog for each batch
# instead; a new outbox has none, and a relay has no right to ANALYZE.
KEEP_TO_THE_INDEX: Final = (
    "SELECT set_config('enable_sort', 'off', true), set_config('enable_bitmapscan', 'off', true), "
    "set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true), "
    "set_config('enable_mergejoin', 'off', true)"
)

# For transactions of several statements, which hold the lane's row.
_SEVERAL: Final = "SELECT {synchronous}, set_config('idle_in_transaction_session_timeout', %(ttl_ms)s, true)"

_DRAW_XID: Final = "SELECT pg_current_xact_id()::text::bigint"
_XMIN: Final = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"


@dataclass(frozen=True, slots=True)
class Identity:
    """Which Postgres a batch was read from."""

    system_identifier: str
    timeline: int


class Queries:
    """The statements of one outbox, with its names put in. For the source, and for the tests that guard their plans."""

    def __init__(self, schema: str, *, archive: bool = False) -> None:
        tables = ("events", "lanes", "failures", "published")
        names: dict[str, sql.Composable] = {name: sql.Identifier(schema, name) for name in tables}
        names["columns"] = sql.SQL(_COLUMNS)
        names["timeline"], names["further"] = sql.SQL(TIMELINE), sql.SQL(FURTHER)
        names["synchronous"] = sql.SQL(_SYNCHRONOUS)
        names["there"] = sql.SQL(_THERE).format(**names)
        names["lease"] = sql.SQL(_LEASE).format(**names)
        names["archived"] = sql.SQL(_ARCHIVED if archive else "SELECT 1 FROM gone").format(**names)
        names["settling"] = sql.SQL(_SETTLING_INTO_ARCHIVE if archive else _SETTLING).format(**names)

        def query(text: LiteralString) -> sql.Composed:
            return sql.SQL(text).format(**names)

        self.fetch = query(_FETCH)
        self.fetch_around = query(_FETCH_AROUND)
        self.fetch_due = query(_FETCH_DUE)
        self.any_failures = query(_ANY_FAILURES)
        self.several = query(_SEVERAL)
        self.settle = query(_SETTLE)
        self.settle_and_read = query(_SETTLE_AND_READ)
        self.read = query(_READ)
        self.settle_marker = query(_SETTLE_MARKER)
        self.held = query(_HELD)
        self.still_held = query(_STILL_HELD)
        self.last_batch = query(_LAST_BATCH)


def _claim_row(_cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], Claim]:
    return Claim._make


def position(at: At | None) -> dict[str, int | None]:
    return {"commit_lsn": None if at is None else at.commit_lsn, "commit_number": None if at is None else at.number}


def array(values: Sequence[int | str]) -> str:
    """Give numbers or UUIDs as Postgres reads an array; the driver's own way costs a microsecond for each."""
    return "{" + ",".join(map(str, values)) + "}"


@dataclass(frozen=True, slots=True)
class Pending:
    """What is published and not yet settled: the rows, in order, and the number of the Kafka transaction they are in.

    ``claims`` are all of them, with those that have no row; ``at`` is up to where the lane is done with the stream.
    """

    ids: Sequence[int] = ()
    event_ids: Sequence[str] = ()
    places: Sequence[Published] = ()
    batch: int | None = None
    claims: Sequence[Claim] = ()
    at: At | None = None

    @staticmethod
    def of(receipt: Receipt, at: At | None = None) -> Pending:
        results: Sequence[tuple[Claim, Any]] = receipt.results
        done = [result for result in results if isinstance(result[1], Published)]
        rows = [result for result in done if result[0].position > 0]
        return Pending(
            [claim.position for claim, _ in rows],
            [claim.event_id for claim, _ in rows],
            [place for _, place in rows],
            receipt.batch,
            [claim for claim, _ in done],
            at,
        )


class PollingSource:
    """One lane of outbox.events. Holds one connection, in autocommit: no transaction is open between calls.

    ``connect`` gives a fresh connection; ``lease`` is the lane's and carries the epoch that fences settling. With
    ``archive`` published events are kept in ``published``.
    Works behind PgBouncer in transaction mode: no session state, no prepared statements.
    """

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        schema: str,
        lease: Lease,
        failures: Failures,
        *,
        archive: bool = False,
        on_dead: Callable[[Claim], None] = lambda _claim: None,
    ) -> None:
        self._lease = lease
        self._failures = failures
        self._archive = archive
        self._on_dead = on_dead
        self._queries = Queries(schema, archive=archive)
        self._connection = connect()
        set_json_loads(orjson.loads, self._connection)
        self._cursor = self._connection.cursor(binary=True, row_factory=_claim_row)
        self._floor = Floor()
        self._pending: Pending | None = None
        # Until a look has shown that there are none.
        self._around = True
        self._due_next = True
        self._looked_at = -_LOOK_SECONDS

    def fetch(self, limit: int) -> Sequence[Claim] | None:
        """Settle what is pending and give up to ``limit`` unpublished events of the lane, lowest id first."""
        return self._poll(limit)

    def _poll(self, limit: int) -> Sequence[Claim]:
        lane = self._lease.lane
        with unavailable_on_error(f"reading lane {lane}"):
            floor = self._floor.start(draw_xid=self._draw_xid, xmin=self._xmin)
            pending = self._pending.ids if self._pending is not None else ()
            looking = None
            bound = {
                "lane": lane,
                "floor": floor,
                "limit": limit,
                "copy": DEAD_LETTER,
                "pending": array(pending),
                "after": pending[-1] if pending else floor,
            }
            around = self._around
            due = around and self._due_next
            self._due_next = not due
            query = self._queries.fetch
            if around:
                query = self._queries.fetch_due if due else self._queries.fetch_around
            look = around or time.monotonic() - self._looked_at >= _LOOK_SECONDS
            # A pipeline: few round trips; SET LOCAL's reach ends with the transaction (PgBouncer).
            with self._connection.pipeline(), self._connection.transaction():
                self._connection.execute(KEEP_TO_THE_INDEX)
                self._cursor.execute(query, bound)
                if look:
                    looking = self._connection.execute(self._queries.any_failures, bound)
            rows = self._cursor.fetchall()
            if looking is not None:
                self._looked_at = time.monotonic()
                self._around = bool(looking.fetchall()[0][0])
            if self._pending is not None:
                failpoint("batch.settling")
            if (rows or self._pending is not None) and (gone := len(rows) - self._settle(rows)):
                raise Unavailable(
                    f"Postgres, reading lane {lane}: {gone} of {len(rows)} events that were there a moment ago are "
                    "gone: it has crashed, or somebody deletes events"
                )
        if due and not rows:
            return self._poll(limit)
        if not around:
            self._floor.seen(rows[0].position if rows else None)
        if rows:
            failpoint("batch.fetched")
        return rows

    def settle(self, receipt: Receipt) -> None:
        """Take note of what was published: it goes with the next fetch. Refused events are recorded at once.

        Raises LaneLost when the lease does not hold.
        """
        refused = []
        for claim, outcome in receipt.results:
            match outcome:
                case Published():
                    pass
                case Refused():
                    refused.append((claim, outcome.reason))
                case _:
                    assert_never(outcome)
        if len(refused) < len(receipt.results) or receipt.batch is not None:
            self._pending = Pending.of(receipt)
        if refused:
            self._settle_with(refused)

    def flush(self) -> None:
        """Settle what is pending."""
        if self._pending is not None:
            with unavailable_on_error(f"settling lane {self._lease.lane}"):
                self._settle()

    def check_epoch(self) -> Identity:
        """Say which Postgres this is. Raises LaneLost when the lane has another owner already."""
        with unavailable_on_error(f"looking at lane {self._lease.lane}"):
            held = self._connection.execute(
                self._queries.still_held, {"lane": self._lease.lane, "epoch": self._lease.epoch}
            ).fetchone()
        if held is None:
            raise self._lost(0)
        return Identity(*held)

    def adopt(self, marker: Marker | None) -> tuple[Marker | None, Identity]:
        """Settle what the last marker says is on Kafka, if the epoch still holds. For exactly-once, before any fetch.

        Gives the marker to go on from (None: there has never been one) and which database this is. Raises LaneLost,
        or StateLost when marker and table contradict each other.
        """
        lane, epoch = self._lease.lane, self._lease.epoch
        with self._transaction(f"taking lane {lane} over"):
            held = self._connection.execute(self._queries.held, {"lane": lane, "epoch": epoch}).fetchone()
            if held is None:
                raise self._lost(0)
            last_batch, system_identifier, timeline, insert_lsn = held
            adopted = resume(lane, last_batch, marker, system_identifier, timeline)
            if adopted is not None and adopted.stream is not None and adopted.stream.commit_lsn > insert_lsn:
                raise StateLost(
                    f"lane {lane}: Kafka holds events from farther on in the WAL than this server has written: it has "
                    "lost commits (a restore, or a failover to a standby that was behind). See `outbox relay reconcile`"
                )
            if adopted is not None and adopted.batch != last_batch:
                # On another timeline the same place can be another event's. The marker's own are known by their ids.
                stream = adopted.stream if adopted.timeline == timeline else None
                rows = [(n, text) for n, text in zip(adopted.positions, adopted.event_ids, strict=True) if n > 0]
                ids = [n for n, _ in rows]
                gone = self._connection.execute(
                    self._queries.settle_marker, {"lane": lane, "ids": ids, "event_ids": [text for _, text in rows]}
                ).fetchone()
                if last_batch is not None and gone is not None and gone[0] != len(ids):
                    # They were durable before they were published, and nobody else settles them.
                    raise StateLost(
                        f"lane {lane}: Kafka holds batch {adopted.batch} with {len(ids)} events, of which Postgres has "
                        f"only {gone[0]}: it has lost commits (a restore, or a failover to a standby that was behind), "
                        "or somebody deleted events. See `outbox relay reconcile`"
                    )
                self._failures.forget(self._connection, lane, ids)
                self._connection.execute(
                    self._queries.last_batch, {"lane": lane, "batch": adopted.batch, **position(stream)}
                )
        self._pending = None
        return adopted, Identity(system_identifier, timeline)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _settle(self, rows: Sequence[Claim] = ()) -> int:
        """Settle what is pending; say how many of the rows just read are there, and can't be lost."""
        asked_at = time.monotonic()
        values = self._settling_values(self._pending or Pending(), rows)
        found = self._connection.execute(self._queries.settle, values).fetchone()
        self._settled(found is not None, asked_at)
        failpoint("batch.settled")
        return int(found[0]) if found is not None else 0

    def _settle_with(self, refused: list[tuple[Claim, str]]) -> None:
        """Settle what is pending, and record what was refused in the same transaction."""
        lane = self._lease.lane
        asked_at = time.monotonic()
        dead: list[Claim] = []
        pending = self._pending or Pending()
        with self._transaction(f"settling lane {lane}"):
            held = self._connection.execute(self._queries.settle, self._settling_values(pending)).fetchone()
            if held is not None:
                dead = self._failures.record(self._connection, lane, refused)
                self._around = True
        self._settled(held is not None, asked_at)
        for claim in dead:
            self._on_dead(claim)

    def _settling_values(self, pending: Pending, rows: Sequence[Claim] = ()) -> dict[str, Any]:
        values = self._lease_values(pending)
        values["ids"] = array(pending.ids)
        values["event_ids"] = array(pending.event_ids)
        values["next_ids"] = array([claim.position for claim in rows])
        values["next_event_ids"] = array([claim.event_id for claim in rows])
        if self._archive:
            values["topics"] = [place.topic for place in pending.places]
            values["partitions"] = [place.partition for place in pending.places]
            values["offsets"] = [place.offset for place in pending.places]
        return values

    def _settled(self, held: bool, asked_at: float) -> None:
        pending, self._pending = self._pending, None
        if not held:
            raise self._lost(len(pending.ids) if pending is not None and pending.batch is None else 0)
        self._lease.renewed(asked_at)
        if pending is not None and pending.ids:
            self._floor.settled(pending.ids[-1])

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[None]:
        """Be in a transaction of several statements: a session that is silent in it for a lease's length is ended."""
        with unavailable_on_error(doing), self._connection.transaction():
            self._connection.execute(self._queries.several, {"ttl_ms": str(int(self._lease.ttl_seconds * 1000))})
            yield

    def _lease_values(self, pending: Pending) -> dict[str, Any]:
        return {
            "ttl": self._lease.ttl_seconds,
            "lane": self._lease.lane,
            "epoch": self._lease.epoch,
            "batch": pending.batch,
            **position(pending.at),
        }

    def _lost(self, unsettled: int) -> LaneLost:
        text = f"lane {self._lease.lane}: epoch {self._lease.epoch} is over, another relay has taken the lane"
        if unsettled:
            text += f"; the {unsettled} events just published will be published again by it"
        return LaneLost(text)

    def _draw_xid(self) -> int:
        return self._number(_DRAW_XID)

    def _xmin(self) -> int:
        return self._number(_XMIN)

    def _number(self, query: LiteralString) -> int:
        row = self._connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])


class DeletingSource(PollingSource):
    """At-most-once: the rows are gone, durably, before they are sent. What is not acknowledged then may be lost.

    ``on_lost`` is told of events that may not have reached Kafka. Refused ones become dead letters at once.
    """

    def __init__(self, *args: Any, on_lost: Callable[[int], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._on_lost = on_lost
        self._sent = 0

    def settle(self, receipt: Receipt) -> None:
        """The rows are gone already: keep what was refused, count what was lost."""
        refused = [(claim, outcome.reason) for claim, outcome in receipt.results if isinstance(outcome, Refused)]
        sent, self._sent = self._sent, 0
        if refused:
            try:
                with unavailable_on_error(f"keeping dead letters of lane {self._lease.lane}"):
                    self._failures.bury(self._connection, self._lease.lane, refused)
            except (Unavailable, SchemaError):
                # Their rows are gone, and nobody else has them.
                self._on_lost(sent - len(receipt.results) + len(refused))
                raise
            for claim, _ in refused:
                self._on_dead(claim)
        if sent > len(receipt.results):
            self._on_lost(sent - len(receipt.results))

    def _settle(self, rows: Sequence[Claim] = ()) -> int:
        found = super()._settle(rows)
        if rows and found == len(rows):
            self._pending = Pending([claim.position for claim in rows], [claim.event_id for claim in rows])
            super()._settle()
            self._sent = len(rows)
        return found


class Floor:
    """Where a fetch may start. See the module's docstring for why each step is needed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._floor = _LOWEST
        self._last_settled: int | None = None
        self._candidate: int | None = None
        self._candidate_at = 0.0
        self._xid: int | None = None
        self._ended = False
        self._looked_at = clock()
        self._swept_at = clock()

    def start(self, *, draw_xid: Callable[[], int], xmin: Callable[[], int]) -> int:
        """Give the id to start above. Asks the database at most once a second."""
        now = self._clock()
        if now - self._swept_at >= _SWEEP_SECONDS:
            self._swept_at = now
            return _LOWEST
        if now - self._looked_at >= 1.0:
            self._looked_at = now
            self._look(now, draw_xid, xmin)
        return self._floor

    def _look(self, now: float, draw_xid: Callable[[], int], xmin: Callable[[], int]) -> None:
        if self._candidate is None:
            if self._last_settled is not None and self._last_settled > self._floor:
                self._candidate, self._candidate_at, self._xid = self._last_settled, now, None
        elif self._xid is None:
            if now - self._candidate_at >= _SETTLE_SECONDS:
                self._xid = draw_xid()
        elif not self._ended:
            self._ended = xmin() >= self._xid

    def seen(self, lowest: int | None) -> None:
        """Take note of the lowest id that a fetch gave."""
        if self._ended and self._candidate is not None and (lowest is None or lowest > self._candidate):
            self._floor, self._candidate, self._ended = self._candidate, None, False

    def settled(self, last: int) -> None:
        """Take note of the last id that was settled."""
        self._last_settled = last if self._last_settled is None else max(last, self._last_settled)
