"""Source over ``outbox.events``: the lanes of a worker, read by polling, settled row by row.

Every read starts from the lowest id that may still be unpublished, not from the last one seen: a transaction that drew
a low id and committed late is found by the next read. A row leaves by DELETE, so there is no position to keep.

One round trip a turn: a statement that reads all lanes, and the one that settles the turn before (settlement.py), whose
commit makes what was read durable and whose leases say of which lanes it may be published. They are two transactions of
one session, so nothing can crash in between unnoticed. Behind a pooler a session is no proof of that: there the rows
that were read are looked at once more by the statement that settles.

Postgres works while Kafka is waited for (background.py), in one of three ways:

- While a backlog is drained, the next turn's rows are read while this turn's are published. They are settled against in
  the same way: the statement that settles comes after their read.
- At-least-once, while two turns are not more than a batch, the turn before is settled while this one is published. Then
  another statement says, after the read, of which lanes the leases hold, and that all WAL of that moment is flushed:
  what was read can't be lost any more. It is waited for a little, as it is flushed by the commits of others and by the
  WAL writer; then, or where a standby has to have it as well, the statement that settles comes first after all.
- Exactly-once, while no backlog is drained, the turn before is settled while this one is sent. The Kafka transaction is
  committed after ``confirm``: when the statement's answer is there. It says of which lanes the leases hold, and its
  commit makes durable what was read.

Keys that wait
    A lane with rows in ``failures`` is read by statements of its own, which leave out the events whose key waits (see
    failures.py). Events that are due again come by themselves, in turns with batches of the others: one at first, and
    twice as many after each turn in which all of them could be published. A worker without failures pays nothing for
    this but a look at an empty table each second.

Waiting
    An idle worker leaves one statement with the server, which looks every few milliseconds whether any transaction has
    committed, by comparing snapshots, and only then for events. So an event is noticed within milliseconds, at a few
    statements a second. Behind a pooler it would keep a server connection busy; there the client polls instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple, assert_never

import orjson
import psycopg
from psycopg import errors, sql
from psycopg.types.json import set_json_loads

from outbox.errors import OutboxError
from outbox.event import DEAD_LETTER
from relay.database import TIMELINE, begin_session, unavailable_on_error
from relay.failpoints import failpoint
from relay.lease import Lease
from relay.marker import Identity, Marker, StateLost, resume
from relay.polling.low_water_mark import LowWaterMarks, Marks
from relay.ports import Claim, DatabaseUnavailable, Fetched, Kind, LaneBusy, Published, Receipt, Refused
from relay.retries import Failures
from relay.settlement import NOTHING, RENEW_PART, Pending, SettledLane, Settlement, by_lane, lanes_text
from relay.statements import KEEP_TO_THE_INDEX, array, names_of, position

_LOOK_SECONDS: Final = 1.0
_WAIT_SECONDS: Final = 0.2
_CLIENT_STEP_SECONDS: Final = 0.002
# How long it is waited for a flush by others, how often it is looked for, and when it is tried again after that was in
# vain: nobody else may be writing.
_FLUSH_SECONDS: Final = 0.005
_FLUSH_STEP_SECONDS: Final = 0.0003
_FLUSH_AGAIN_SECONDS: Final = 1.0
# A turn may hold this much of payloads and headers. With the driver's and librdkafka's copies it is in memory thrice.
TURN_BYTES: Final = 16 << 20
_LANE_BYTES: Final = 1 << 20
# Of many lanes with events of this size, a few are read at a time: to know how much fits, each has to be unpacked.
_LARGE_BYTES: Final = 64 << 10
# Up to so many events in hand, a prepared plan is as quick as one of its own; see _Read.
_MANY: Final = 100
_MOST_DUE: Final = 500
# With this many lanes, a turn's statement settles all of them, whether they had events lately or not.
_FEW_LANES: Final = 16

# In the order of Claim's fields.
COLUMNS: Final = """
id, event_id::text, aggregate_type, aggregate_id, event_type,
       to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
       coalesce(payload_bytes, convert_to(payload::text, 'UTF8')), headers"""

# What an event takes in memory. Only of a compressed payload it has to be unpacked to be known; jsonb that is not
# compressed is about as long as its text.
SIZE: Final = """CASE WHEN pg_column_compression(payload) IS NULL THEN coalesce(pg_column_size(payload), 0)
                      ELSE octet_length(payload::text) END
                 + coalesce(octet_length(payload_bytes), 0) + coalesce(pg_column_size(headers), 0)"""

# The turn before, which is settled a moment later, is left out; rows behind its last one need no look at the list.
_THERE: Final = """lane = {lane} AND id > {above} AND (id > {after} OR id <> ALL(%(pending)s::bigint[]))"""

# As many as fit into the bytes, and one at least. The limit is worked out over narrow rows first. Dead rows before the
# first one, which a held xmin keeps, are passed here and not again by the read.
_FITTING: Final = """(SELECT greatest(1, count(*) FILTER (WHERE total <= %(max_bytes)s)) AS fitting, count(*) AS there,
                          coalesce(max(total) FILTER (WHERE total <= %(max_bytes)s), min(total), 0) AS bytes,
                          min(id) AS first
                     FROM (SELECT id, sum(size) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) AS total
                             FROM (SELECT id, {size} AS size FROM {events} AS e WHERE {conditions}
                                    ORDER BY id LIMIT {most}) AS sized) AS summed)"""

# Lane after lane, until the turn is full. Of a lane with events for which there is no room one row says so: without an
# id, behind all others.
_READ: Final = """
SELECT e.*, l.lane
  FROM (SELECT *, sum(bytes) OVER (ROWS UNBOUNDED PRECEDING) AS running
          FROM (SELECT l.*, f.*
                  FROM unnest(%(lanes)s::smallint[], %(above)s::bigint[], %(after)s::bigint[], %(limits)s::bigint[])
                              AS l(lane, above, after, most)
                 CROSS JOIN LATERAL {fitting} AS f) AS l) AS l
  LEFT JOIN LATERAL (
     SELECT {columns}, NULL FROM {events} AS e
      WHERE (l.running <= %(turn_bytes)s OR l.running = l.bytes) AND id >= l.first AND {conditions}
      ORDER BY id LIMIT l.fitting) AS e ON true
 WHERE e.id IS NOT NULL OR (l.there > 0 AND l.running > %(turn_bytes)s)"""

# Without the events that have failed, and without those of a key of which an earlier one has failed. The hash is what
# the index has (keys can be too long for one).
_NOT_BLOCKED: Final = """ AND NOT EXISTS (SELECT FROM {failures} AS f WHERE f.lane = %(lane)s AND f.id = e.id)
   AND (NOT EXISTS (SELECT FROM {failures} AS f
                     WHERE f.lane = %(lane)s AND f.aggregate_type = e.aggregate_type
                       AND hashtextextended(f.aggregate_id, 0) = hashtextextended(e.aggregate_id, 0)
                       AND f.aggregate_id = e.aggregate_id AND f.id < e.id AND f.blocks)
        OR e.headers ? %(copy)s)"""

# Without those whose topic can't be written to now. A copy for a dead-letter topic has a topic of its own.
_NOT_LEFT_OUT: Final = """ AND NOT EXISTS (
       SELECT FROM unnest(%(left_types)s::text[], %(left_copies)s::boolean[]) AS o(kind, copy)
        WHERE o.kind = e.aggregate_type AND o.copy = coalesce(e.headers ? %(copy)s, false))"""

_READ_AROUND: Final = """
SELECT {columns}, NULL, lane FROM {events} AS e WHERE {conditions}
 ORDER BY id LIMIT (SELECT fitting FROM {fitting} AS f)"""

# Those that have failed and are due, of each key the first. They may lie below the mark, if they were put back.
_READ_DUE: Final = """
SELECT {columns}, NULL, lane
  FROM {events} AS e
 WHERE lane = %(lane)s AND id <> ALL(%(pending)s::bigint[])
   AND id = ANY(ARRAY(
            SELECT f.id FROM {failures} AS f
              WHERE f.lane = %(lane)s AND f.next_attempt_at <= clock_timestamp() AND f.id <> ALL(%(pending)s::bigint[])
                AND EXISTS (SELECT FROM {events} AS e WHERE e.lane = f.lane AND e.id = f.id{usable})
                AND (NOT f.blocks OR NOT EXISTS (SELECT FROM {failures} AS g
                                      WHERE g.lane = f.lane AND g.aggregate_type = f.aggregate_type
                                        AND hashtextextended(g.aggregate_id, 0) = hashtextextended(f.aggregate_id, 0)
                                        AND g.aggregate_id = f.aggregate_id AND g.id < f.id AND g.blocks))
              ORDER BY f.next_attempt_at, f.id LIMIT %(due)s))
 ORDER BY id"""

# The lowest ids of the lane's failures, and how many there are. With the last id of the lane: up to it, rows that wait
# need not be looked at with each read. See low_water_mark.py.
_FAILURES: Final = """
SELECT f.*, (SELECT id FROM {events} AS e WHERE e.lane = f.lane ORDER BY id DESC LIMIT 1)
  FROM (SELECT l.lane, count(*), sum(f.id)::text,
               ARRAY(SELECT g.id FROM {failures} AS g WHERE g.lane = l.lane ORDER BY g.id LIMIT 1000)
          FROM unnest(%(lanes)s::smallint[]) AS l(lane) JOIN {failures} AS f ON f.lane = l.lane
         GROUP BY l.lane) AS f"""

# By id and event id: after a restore an id may have been given to another event. LIMIT and ctid as in settlement.
_SETTLE_MARKER: Final = """
WITH gone AS (
    DELETE FROM {events} WHERE ctid = ANY(ARRAY(
        SELECT e.place
          FROM unnest(%(ids)s::bigint[], %(event_ids)s::uuid[]) AS p(place_id, place_event_id)
         CROSS JOIN LATERAL (SELECT e.ctid AS place FROM {events} AS e
                              WHERE e.lane = %(lane)s AND e.id = p.place_id AND e.event_id = p.place_event_id
                              LIMIT 1) AS e))
    RETURNING *){kept}
SELECT count(*) FROM gone"""

_KEPT: Final = """,
kept AS (
    INSERT INTO {published} (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes,
                             headers, created_at, published_at)
    SELECT lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers, created_at,
           clock_timestamp() FROM gone)"""

_HELD: Final = """
SELECT last_batch, (SELECT system_identifier::text FROM pg_control_system()), {timeline},
       (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint
  FROM {lanes} WHERE lane = %(lane)s AND epoch = %(epoch)s FOR UPDATE NOWAIT"""

# Whatever is visible was written to the WAL before: only with synchronous_commit = off it may not be flushed yet. Once
# what is there now is, so is all that was read before.
_WRITTEN: Final = """
SELECT pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn(),
       current_setting('synchronous_standby_names') = ''"""

_FLUSHED: Final = "SELECT pg_current_wal_flush_lsn() >= %(lsn)s::pg_lsn"

_STILL_HELD: Final = """
SELECT l.lane, (SELECT system_identifier::text FROM pg_control_system()), {timeline}
  FROM {lanes} AS l
  JOIN unnest(%(lanes)s::smallint[], %(epochs)s::bigint[]) AS m(lane, epoch) ON l.lane = m.lane AND l.epoch = m.epoch"""

_ADOPTED: Final = """
UPDATE {lanes} SET last_batch = coalesce(%(batch)s, last_batch), transactional_id = %(own_id)s, {further}
 WHERE lane = %(lane)s"""

# For transactions of several statements, which hold the lane's row.
_SEVERAL: Final = "SELECT {synchronous}, set_config('idle_in_transaction_session_timeout', %(ttl_ms)s, true)"

_DRAW_XID: Final = "SELECT pg_current_xact_id()::text::bigint"
_XMIN: Final = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"

# Looks again only when some transaction has ended since: the snapshot is another one then. The pause between two looks
# grows with what one costs, so that looking takes a thirtieth of the time at most. Comparing snapshots costs next to
# nothing, so the first commit after a rest is noticed at once.
_WATCH: Final = """
DECLARE
    seen text := '';
    now_seen text;
    asked_at timestamptz;
    look_at timestamptz := clock_timestamp();
    ends_at timestamptz := look_at + make_interval(secs => {seconds});
    step float8 := 0.001;
BEGIN
    LOOP
        now_seen := pg_current_snapshot()::text;
        asked_at := clock_timestamp();
        IF now_seen <> seen AND asked_at >= look_at THEN
            seen := now_seen;
            PERFORM FROM unnest({lanes}::smallint[], {above}::bigint[]) AS l(lane, above)
              CROSS JOIN LATERAL (SELECT FROM {events} AS e WHERE e.lane = l.lane AND e.id > l.above LIMIT 1) AS e
              LIMIT 1;
            EXIT WHEN FOUND;
            look_at := clock_timestamp() + 30 * (clock_timestamp() - asked_at);
        END IF;
        EXIT WHEN asked_at >= ends_at;
        PERFORM pg_sleep(step);
        step := least(step + 0.0005, {watch});
    END LOOP;
END"""


class Queries:
    """The statements of one outbox, with its names put in. For the source, and for the tests that guard their plans."""

    def __init__(self, schema: str, *, archive: bool = False) -> None:
        names = names_of(schema)
        names["columns"], names["size"], names["timeline"] = sql.SQL(COLUMNS), sql.SQL(SIZE), sql.SQL(TIMELINE)

        def query(text: LiteralString, **more: sql.Composable) -> sql.Composed:
            return sql.SQL(text).format(**names, **more)

        def bounded(text: LiteralString, conditions: sql.Composable, most: sql.Composable) -> sql.Composed:
            fitting = query(_FITTING, conditions=conditions, most=most)
            return query(text, conditions=conditions, fitting=fitting)

        def there(lane: sql.Composable, above: sql.Composable, after: sql.Composable) -> sql.Composed:
            return sql.SQL(_THERE).format(lane=lane, above=above, after=after)

        of_many = there(sql.SQL("l.lane"), sql.SQL("l.above"), sql.SQL("l.after"))
        of_one = there(sql.SQL("%(lane)s"), sql.SQL("%(above)s"), sql.SQL("%(after)s"))
        usable = sql.SQL(_NOT_LEFT_OUT)
        around = of_one + query(_NOT_BLOCKED)
        self.read = bounded(_READ, of_many, sql.SQL("l.most"))
        self.read_some = bounded(_READ, of_many + usable, sql.SQL("l.most"))
        self.read_around = bounded(_READ_AROUND, around, sql.SQL("%(limit)s"))
        self.read_some_around = bounded(_READ_AROUND, around + usable, sql.SQL("%(limit)s"))
        self.read_due = query(_READ_DUE, usable=sql.SQL(""))
        self.read_some_due = query(_READ_DUE, usable=usable)
        self.failures = query(_FAILURES)
        self.several = query(_SEVERAL)
        self.settle_marker = query(_SETTLE_MARKER, kept=query(_KEPT) if archive else sql.SQL(""))
        self.held = query(_HELD)
        self.still_held = query(_STILL_HELD)
        self.adopted = query(_ADOPTED)
        self.lane_count = query("SELECT count(*) FROM {lanes}")


class _Failures(NamedTuple):
    """The failures of a lane: how many, their ids' sum, and the lowest ids."""

    size: int
    total: str
    lowest: Sequence[int]

    def freed_by(self, now: _Failures | None) -> int | None:
        """Return an id behind which rows may go that waited before, if ``now`` is what is left; None if none may."""
        if now is None:
            return self.lowest[0]
        gone = set(self.lowest) - set(now.lowest)
        if gone:
            # Or new ones took their places in the list; then this reads too much, once.
            return min(gone)
        if self.size == len(self.lowest) or (self.size, self.total) == (now.size, now.total):
            return None
        return self.lowest[-1]


@dataclass(slots=True)
class _Lane:
    """What a source knows of one lane besides what is to be settled."""

    lease: Lease
    known: bool = False
    """Whether the lane's failures have been looked at since it is held, or since one was recorded."""
    failures: _Failures | None = None
    """What the lane's failures look like; a change of it is a change of what waits. None: there are none."""
    due: int = 1
    due_next: bool = True
    reading_due: bool = False
    row_bytes: float = 0.0
    busy_until: float = 0.0


@dataclass(slots=True)
class _Ahead:
    """A read that is under way while the turn before, ``in_hand``, is published.

    It is the next turn only if all of that one was published: events that were not come first.
    """

    reads: Sequence[_Read]
    lanes: Collection[int]
    in_hand: Mapping[int, Sequence[Claim]]
    stale: bool = False


@dataclass(slots=True)
class _Read:
    """One statement that reads. ``due`` names the lane whose due events it reads.

    ``many`` says that the list of events that are in hand is long. Only a plan that is made for this list looks rows up
    in it by their hash; one that fits any list compares each row with all of it.
    """

    query: sql.Composed
    values: dict[str, Any]
    lanes: Collection[int]
    marks: Marks
    due: int | None = None
    many: bool = False
    cursor: psycopg.Cursor[Claim] | None = None
    rows: Sequence[Claim] = ()


class PollingSource:
    """The rows of a worker's lanes. Holds one connection, in autocommit. See ports.Source for the contract.

    ``connect`` makes a fresh connection. With ``archive`` published events are kept in ``published``. ``watch_seconds``
    is how often an idle worker's statement looks, inside the server, whether anything was committed; 0 lets the client
    poll instead, as behind PgBouncer in transaction mode, where no session state is used and no plan is kept.
    """

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        schema: str,
        failures: Failures,
        *,
        archive: bool = False,
        on_dead: Callable[[int, Claim], None] = lambda _lane, _claim: None,
        on_settled: Callable[[int, Pending], None] = lambda _lane, _pending: None,
        renew_part: float = RENEW_PART,
        watch_seconds: float = 0.003,
        turn_bytes: int = TURN_BYTES,
        overlap: bool = True,
    ) -> None:
        self._failures = failures
        self._on_dead = on_dead
        self._on_settled = on_settled
        self._turn_bytes = turn_bytes
        self._queries = Queries(schema, archive=archive)
        self._events = sql.Identifier(schema, "events")
        self._connection = connect()
        self._marks = LowWaterMarks()
        self._lanes: dict[int, _Lane] = {}
        self._looked_at = -_LOOK_SECONDS
        self._step = _CLIENT_STEP_SECONDS
        self._crowded = False
        self._rotation = 0
        self._first = 0
        self._ahead: _Ahead | None = None
        self._left_out: frozenset[Kind] = frozenset()
        self._identity: Identity | None = None
        try:
            set_json_loads(orjson.loads, self._connection)
            with unavailable_on_error("beginning a session"):
                self._pooled = not begin_session(self._connection)
                if not self._pooled:
                    self._connection.execute(KEEP_TO_THE_INDEX, {"local": False})
        except BaseException:
            self._connection.close()
            raise
        self._watch_seconds = 0.0 if self._pooled else watch_seconds
        self._overlaps = overlap and not self._pooled
        self._failed_behind: dict[int, OutboxError] = {}
        self._unconfirmed: Collection[int] = ()
        self._flush_in_vain_at = -_FLUSH_AGAIN_SECONDS
        self.settlement = Settlement(
            self._connection,
            schema,
            archive=archive,
            prepared=not self._pooled,
            renew_part=renew_part,
            on_settled=self._note_settled,
        )

    @property
    def turn_bytes(self) -> int:
        """How much of payloads and headers a turn may hold."""
        return self._turn_bytes

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The connection, with nothing under way on it."""
        self._free()
        return self._connection

    @property
    def store(self) -> PollingSource:
        """Itself: it takes lanes over as well."""
        return self

    def lane_count(self) -> int:
        """Return how many lanes the outbox has."""
        self._free()
        with unavailable_on_error("counting lanes"):
            return self._number(self._queries.lane_count)

    def hold(self, lease: Lease) -> None:
        """Begin to read a lane."""
        self.settlement.hold(lease)
        self._lanes[lease.lane] = _Lane(lease)
        self._marks.reset(lease.lane)

    def drop(self, lane: int) -> None:
        """Forget a lane."""
        self._end()
        self.settlement.drop(lane)
        self._lanes.pop(lane, None)
        if self._ahead is not None:
            self._ahead.stale = True

    def fetch(self, limits: Mapping[int, int]) -> Fetched:
        """Settle what is pending, and return the lowest unpublished events of these lanes."""
        failed_behind = self.finish_settling()
        if self._ahead is not None and not self._comes_next(self._ahead, limits):
            self._free()
        ahead, self._ahead = self._ahead, None
        lanes = list(ahead.lanes) if ahead is not None else self._crowd(limits)
        limited = {lane: limits[lane] for lane in lanes}
        settling: Collection[int] = ()
        unconfirmed: Collection[int] = ()
        with unavailable_on_error(f"reading {lanes_text(lanes)}"):
            if ahead is not None:
                claims, failed = self._settle_after(ahead, limited)
            else:
                self._look_first()
                if self._overlaps and self.settlement.overlaps(lanes):
                    claims, failed, settling = self._read_and_check(limited)
                elif self._overlaps and self.settlement.precedes_commit(lanes):
                    claims, failed, unconfirmed = self._read_before_settling(limited)
                else:
                    claims, failed = self._read_and_settle(limited)
        failed = failed_behind | failed
        batches = {lane: batch for lane, batch in by_lane(claims).items() if lane not in failed}
        self._note_sizes(batches)
        if batches:
            failpoint("batch.fetched")
        self._unconfirmed = batches.keys() if unconfirmed else ()
        if settling or unconfirmed:
            self.settlement.begin(settling or unconfirmed)
        elif self._overlaps and self._worth_reading_ahead(batches, limits) and not failed:
            # Lanes that have joined since are read with the others from now on.
            with unavailable_on_error("reading ahead"):
                self._read_ahead({lane: limits[lane] for lane in self._crowd(limits)}, batches)
        return Fetched(batches, failed, settling=settling, unconfirmed=bool(unconfirmed))

    def confirm(self, deadline: float) -> dict[int, OutboxError]:
        """Wait until the turn before is settled, and with it these leases are checked and what was read is durable.

        Lanes that have no events in this turn do not take it back: of those ``settle`` says what has failed.
        """
        self._end(deadline)
        failed = {lane: error for lane, error in self._failed_behind.items() if lane in self._unconfirmed}
        self._failed_behind = {lane: error for lane, error in self._failed_behind.items() if lane not in failed}
        return failed

    def leave_out(self, kinds: frozenset[Kind]) -> None:
        """Do not return events of these kinds: their topics can't be written to."""
        if kinds != self._left_out:
            self._left_out = kinds
            self._free()
            for lane in self._lanes:
                # What was left out lies below the mark by now.
                self._marks.reset(lane)

    def go_on_without(self, lanes: Collection[int]) -> None:
        """Do nothing: the rows of a lane wait for nobody."""

    def settle(self, receipts: Mapping[int, Receipt]) -> dict[int, OutboxError]:
        """Record what was published: it goes with the next fetch. Refused events are recorded at once."""
        failed = self.finish_settling()
        for lane, receipt in receipts.items():
            refused = refused_of(receipt)
            if len(refused) < len(receipt.results) or receipt.batch is not None:
                held, published = self.settlement.lanes[lane], Pending.of(receipt)
                if lane in failed:
                    held.pending = held.pending.then(published)
                elif not held.pending.covers(published):
                    held.pending = published
            self._note_due(lane, receipt, refused)
            if refused and (error := self._settle_with(lane, refused)) is not None:
                failed[lane] = error
        return failed

    def flush(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        """Settle what is pending of these lanes."""
        failed = self.finish_settling()
        unsettled = [lane for lane in self.settlement.unsettled if lane in set(lanes) and lane not in failed]
        if not unsettled:
            return failed
        self._free()
        return failed | self.settlement.settle(unsettled)

    def wait(self, lanes: Collection[int], seconds: float, stop: threading.Event) -> bool:
        """Wait until these lanes may have events, for ``seconds`` at most; return whether a fetch is worth it."""
        if not lanes:
            stop.wait(seconds)
            return False
        if self._ahead is not None:
            return True
        self._end()
        # What waits and may become due is known to a read only.
        waiting = bool(self._left_out) or any(self._lanes[lane].failures is not None for lane in lanes)
        if waiting or self._watch_seconds == 0.0:
            stop.wait(min(self._step, seconds))
            self._step = min(self._step * 2, seconds)
            return True
        seconds = max(seconds, _WAIT_SECONDS) if seconds <= 1.0 else 1.0
        began = time.monotonic()
        with unavailable_on_error(f"waiting for events of {lanes_text(lanes)}"):
            self._connection.execute(self._watch(lanes, seconds), prepare=False)
        now = time.monotonic()
        if now - began < seconds:
            for lane in lanes:
                self._lanes[lane].busy_until = now + 1.0
            return True
        return now - self._looked_at >= _LOOK_SECONDS

    def identity(self, leases: Sequence[Lease]) -> tuple[Identity | None, dict[int, OutboxError]]:
        """Return which Postgres this is, and the lanes that have another owner already. None when all of them have."""
        self._free()
        with unavailable_on_error("looking at the lanes"):
            rows = self._connection.execute(
                self._queries.still_held,
                {"lanes": [lease.lane for lease in leases], "epochs": [lease.epoch for lease in leases]},
            ).fetchall()
        self._identity = Identity(*rows[0][1:]) if rows else None
        held = {row[0] for row in rows}
        lost: dict[int, OutboxError] = {
            lease.lane: self.settlement.lost(lease.lane) for lease in leases if lease.lane not in held
        }
        return self._identity, lost

    def adopt(self, lease: Lease, marker: Marker | None, own_id: str | None) -> tuple[Marker | None, Identity]:
        """Settle what the lane's last marker says is on Kafka, if the epoch still holds, before anything is fetched.

        Write ``own_id`` into the lane's row in the same transaction: from its commit on whoever takes the lane over
        fences it. None for a worker without transactions. Return the marker to go on from (None: there has never been
        one) and which database this is. Raise LaneLost, or StateLost when marker and table contradict each other.
        """
        lane, epoch = lease.lane, lease.epoch
        held_lane = self.settlement.lanes[lane]
        if self._is_ours(held_lane, marker, own_id):
            assert self._identity is not None
            return marker, self._identity
        with self.transaction(lease, f"taking lane {lane} over"):
            try:
                held = self._connection.execute(self._queries.held, {"lane": lane, "epoch": epoch}).fetchone()
            except errors.LockNotAvailable as error:
                raise LaneBusy(lane) from error
            if held is None:
                held_lane.pending = NOTHING
                raise self.settlement.lost(lane)
            last_batch, system_identifier, timeline, insert_lsn = held
            adopted = resume(lane, last_batch, marker, system_identifier, timeline)
            if adopted is not None and adopted.stream is not None and adopted.stream.commit_lsn > insert_lsn:
                raise StateLost(
                    f"lane {lane}: Kafka holds events from farther on in the WAL than this server has written: it has "
                    "lost commits (a restore, or a failover to a standby that was behind). See `outbox relay reconcile`"
                )
            batch, stream = last_batch, None
            if adopted is not None and adopted.batch != last_batch:
                # On another timeline the same place can be another event's. The marker's own are known by their ids.
                stream = adopted.stream if adopted.timeline == timeline else None
                batch = adopted.batch
                self._settle_marker(lane, last_batch, adopted)
            self._connection.execute(
                self._queries.adopted, {"lane": lane, "batch": batch, "own_id": own_id, **position(stream)}
            )
        lease.former_id, lease.last_batch = own_id, batch
        held_lane.pending = NOTHING
        held_lane.expected = batch if own_id is not None else None
        held_lane.own_id = own_id
        held_lane.confirmed = True
        return adopted, Identity(system_identifier, timeline)

    def _is_ours(self, held: SettledLane, marker: Marker | None, own_id: str | None) -> bool:
        """Return whether there is nothing to take over: the publisher was made again, and all of the lane is settled.

        The row names us and has the marker's batch: the last statement over it has found or written that. That the
        epoch still holds was read by ``identity`` after the producers had been initialized again: whoever takes the
        lane later fences them. A turn that fails would otherwise cost a transaction for each lane of the worker.
        """
        return (
            own_id is not None
            and held.own_id == own_id
            and held.confirmed
            and not held.pending
            and marker is not None
            and marker.batch == held.expected
            and self._identity == Identity(marker.system_identifier, marker.timeline)
            and not self._pooled
        )

    def close(self) -> None:
        """Close the connection."""
        self._ahead = None
        self.settlement.background.close()
        self._connection.close()

    def finish_settling(self) -> dict[int, OutboxError]:
        """Wait for the turn before to be settled, if that is under way; return the lanes for which it has failed."""
        self._end()
        failed, self._failed_behind = self._failed_behind, {}
        return failed

    @contextmanager
    def transaction(self, lease: Lease, doing: str) -> Iterator[None]:
        """Open a multi-statement transaction; Postgres ends the session if it idles longer than the lease."""
        self._free()
        with unavailable_on_error(doing), self._connection.transaction():
            self._connection.execute(self._queries.several, {"ttl_ms": str(int(lease.ttl_seconds * 1000))})
            if self._pooled:
                self._connection.execute(KEEP_TO_THE_INDEX, {"local": True})
            yield

    def read_all_again(self, lane: int) -> None:
        """Read the lane from its lowest id, and look for failures first."""
        self._lanes[lane].known = False
        self._marks.reset(lane)

    def has_failures(self, lane: int) -> bool:
        """Return whether the lane has failures, as far as the last look shows."""
        return self._lanes[lane].failures is not None

    def look_for_failures(self, lanes: Collection[int]) -> set[int]:
        """Return those of the lanes that have failures now."""
        with unavailable_on_error(f"looking for failures of {lanes_text(lanes)}"):
            rows = self.connection.execute(self._queries.failures, {"lanes": list(lanes)}).fetchall()
        return {row[0] for row in rows}

    # One turn

    def _crowd(self, limits: Mapping[int, int]) -> list[int]:
        """Return the lanes to read now: all, or while events are huge, as many as a turn has room for, in turns."""
        lanes = sorted(limits)
        most = max(self._turn_bytes // _LANE_BYTES, 1)
        if not self._crowded or len(lanes) <= most:
            return lanes
        start = self._rotation % len(lanes)
        self._rotation += most
        # What is pending goes with its lane's turn.
        return sorted((lanes + lanes)[start : start + most])

    def _reads(self, limits: Mapping[int, int], in_hand: Mapping[int, Sequence[Claim]]) -> list[_Read]:
        """Return the statements that read these lanes; ``in_hand`` is what must not be read again."""
        lanes = list(limits)
        marks = self._marks.start(lanes, draw_xid=self._draw_xid, xmin=self._xmin)
        after = {lane: claims[-1].position for lane, claims in in_hand.items() if claims}
        pending = array([claim.position for claims in in_hand.values() for claim in claims])
        many = sum(map(len, in_hand.values())) > _MANY
        share = max(self._turn_bytes // max(len(lanes) if self._crowded else 4, 1), 1)
        common: dict[str, Any] = {"pending": pending, "max_bytes": share}
        if some := bool(self._left_out):
            common["left_types"] = [kind for kind, _ in self._left_out]
            common["left_copies"] = [copy for _, copy in self._left_out]
            common["copy"] = DEAD_LETTER
        common["turn_bytes"] = self._turn_bytes
        plain = [lane for lane in lanes if self._lanes[lane].failures is None]
        # Lanes for which the last turn had no room come first.
        plain.sort(key=lambda lane: (lane < self._first, lane))
        reads = []
        if plain:
            values = {
                "lanes": array(plain),
                "above": array([marks.above[lane] for lane in plain]),
                "after": array([after.get(lane, marks.above[lane]) for lane in plain]),
                "limits": array([self._rows(lane, limits[lane], share) for lane in plain]),
                **common,
            }
            query = self._queries.read_some if some else self._queries.read
            reads.append(_Read(query, values, plain, marks, many=many))
        for lane in lanes:
            state = self._lanes[lane]
            if state.failures is None:
                continue
            values = {"lane": lane, "copy": DEAD_LETTER, **common}
            # Of due events it is not worked out how many fit.
            values["due"] = self._rows(lane, min(state.due, limits[lane]), share // 2)
            values |= {"above": marks.above[lane], "after": after.get(lane, marks.above[lane])}
            values["limit"] = self._rows(lane, limits[lane], share)
            if state.due_next:
                due = self._queries.read_some_due if some else self._queries.read_due
                reads.append(_Read(due, values, [lane], marks, due=lane, many=many))
            around = self._queries.read_some_around if some else self._queries.read_around
            reads.append(_Read(around, values, [lane], marks, many=many))
        return reads

    def _rows(self, lane: int, limit: int, share: int) -> int:
        """Return how many rows to ask for: what is read beyond the bytes that fit was read in vain."""
        size = self._lanes[lane].row_bytes
        return limit if size < 4096 else max(min(limit, int(2 * share / size)), 1)

    def _read_and_settle(self, limits: Mapping[int, int]) -> tuple[list[Claim], dict[int, OutboxError]]:
        lanes = list(limits)
        in_hand = self._in_hand()
        looks = self._looks(lanes)
        reads = self._reads(limits, in_hand)
        settled = [lane for lane in lanes if self._expects(lane)]
        settled += [lane for lane in self.settlement.unsettled if lane not in set(settled)]
        if self._pooled:
            claims, looked = self._read_pooled(reads, looks)
            found = {claim.lane for claim in claims}
            settled = [lane for lane in self.settlement.lanes if lane in found or lane in in_hand]
            failed: dict[int, OutboxError] = {}
            there = 0
            if settled:
                there, failed = self.settlement.settle_and_count(settled, claims)
            alive = sum(claim.lane not in failed for claim in claims)
            if alive and there != len(claims):
                raise self._gone(len(claims) - there, len(claims))
            self._took(looked, looks)
            return claims, failed
        asked_at = time.monotonic()
        settling = self._connection.cursor()
        with self._connection.pipeline() as pipeline:
            looking = self._send(reads, looks)
            pipeline.sync()
            if settled:
                failpoint("batch.settling")
                self.settlement.send(settling, settled)
                pipeline.sync()
        _receive(reads)
        claims = self._collect(reads)
        self._took(looking.fetchall() if looking is not None else None, looks)
        failed = {}
        if settled:
            failed = self.settlement.answered(settling, settled, asked_at)
            failpoint("batch.settled")
        # Lanes that nobody expected to have events.
        late = {claim.lane for claim in claims} - set(settled)
        if late:
            failed |= self.settlement.settle(sorted(late))
        return claims, failed

    def _read_and_check(self, limits: Mapping[int, int]) -> tuple[list[Claim], dict[int, OutboxError], Collection[int]]:
        """Read, and see that it may be published before the turn before is settled; return the lanes of that one.

        Where it may not, that turn is settled at once, and what was read is durable by its commit.
        """
        unsettled = self.settlement.unsettled
        in_hand = self._in_hand()
        claims = self._read_only(limits, in_hand)
        batches = by_lane(claims)
        # What a crash may repeat of a lane stays a batch.
        small = all(len(batch) + len(in_hand.get(lane, ())) <= limits[lane] for lane, batch in batches.items())
        small = small and not self._worth_reading_ahead(batches, limits)
        if claims and small and (lost := self._check(batches.keys())) is not None:
            return claims, lost, unsettled
        settled = sorted(batches.keys() | set(unsettled))
        return claims, self.settlement.settle(settled), ()

    def _read_before_settling(
        self, limits: Mapping[int, int]
    ) -> tuple[list[Claim], dict[int, OutboxError], Collection[int]]:
        """Read, and return the lanes to be settled before these events are committed.

        None in a backlog: the next turn's rows are read meanwhile, and the turn before is settled at once.
        """
        claims = self._read_only(limits, self._in_hand())
        batches = by_lane(claims)
        # What is pending of a lane that was given up is its marker's to settle, when it is taken over again.
        settled = sorted(batches.keys() | (set(self.settlement.unsettled) & limits.keys()))
        if claims and not self._worth_reading_ahead(batches, limits):
            return claims, {}, settled
        return claims, self.settlement.settle(settled), ()

    def _in_hand(self) -> dict[int, Sequence[Claim]]:
        """Return the rows that are published and not yet settled, by lane."""
        return {lane: self.settlement.lanes[lane].pending.rows for lane in self.settlement.unsettled}

    def _read_only(self, limits: Mapping[int, int], in_hand: Mapping[int, Sequence[Claim]]) -> list[Claim]:
        looks = self._looks(list(limits))
        reads = self._reads(limits, in_hand)
        with self._connection.pipeline() as pipeline:
            looking = self._send(reads, looks)
            pipeline.sync()
        _receive(reads)
        claims = self._collect(reads)
        self._took(looking.fetchall() if looking is not None else None, looks)
        return claims

    def _check(self, lanes: Collection[int]) -> dict[int, OutboxError] | None:
        """Return which of these lanes are another relay's now; None if Postgres may still lose what was read."""
        with self._connection.pipeline():
            written = self._connection.execute(_WRITTEN)
            holding = self._connection.execute(*self.settlement.still_held(lanes))
        row = written.fetchone()
        assert row is not None
        lsn, flushed, alone = row
        if not alone:
            return None
        began = time.monotonic()
        if not flushed and began - self._flush_in_vain_at < _FLUSH_AGAIN_SECONDS:
            return None
        while not flushed:
            if time.monotonic() - began >= _FLUSH_SECONDS:
                self._flush_in_vain_at = began
                return None
            time.sleep(_FLUSH_STEP_SECONDS)
            row = self._connection.execute(_FLUSHED, {"lsn": lsn}).fetchone()
            flushed = row is not None and row[0]
        return self.settlement.lost_of(lanes, holding.fetchall())

    def _settle_after(self, ahead: _Ahead, limits: Mapping[int, int]) -> tuple[list[Claim], dict[int, OutboxError]]:
        """Take what was read ahead, and settle the turn before: its commit comes after that read."""
        claims = [claim for claim in self._finish(ahead) if claim.lane in limits]
        settled = sorted({claim.lane for claim in claims} | set(self.settlement.unsettled))
        failed: dict[int, OutboxError] = {}
        if settled:
            failed = self.settlement.settle(settled)
        return claims, failed

    def _expects(self, lane: int) -> bool:
        """Return whether to settle the lane in the same round trip as it is read."""
        return (
            len(self._lanes) <= _FEW_LANES
            or bool(self.settlement.lanes[lane].pending)
            or time.monotonic() < self._lanes[lane].busy_until
        )

    def _send(self, reads: Sequence[_Read], looks: Collection[int]) -> psycopg.Cursor[Any] | None:
        for read in reads:
            read.cursor = self._connection.cursor(binary=True, row_factory=_claim_row)
            # A statement that is not prepared has a plan of its own.
            read.cursor.execute(read.query, read.values, prepare=not self._pooled and not read.many)
        if not looks:
            return None
        return self._connection.execute(self._queries.failures, {"lanes": list(looks)})

    def _collect(self, reads: Sequence[_Read]) -> list[Claim]:
        """Return the events of statements whose answers are there; note what they say about the marks."""
        claims: list[Claim] = []
        due: set[int] = set()
        for read in reads:
            rows = read.rows
            if read.due is not None:
                self._lanes[read.due].reading_due = bool(rows)
                self._lanes[read.due].due_next = not rows
                if rows:
                    due.add(read.due)
                    claims += rows
                continue
            full: set[int] = set()
            if rows and not rows[-1].position:
                no_room = [row.lane for row in rows if not row.position]
                full, self._first = set(no_room), no_room[0]
                rows = rows[: -len(no_room)]
            for lane in read.lanes:
                if self._lanes[lane].failures is not None and lane not in due:
                    self._lanes[lane].due_next = True
                    self._lanes[lane].reading_due = False
            rows = [row for row in rows if row.lane not in due] if due else rows
            lowest: dict[int, int] = {}
            for row in reversed(rows):
                lowest[row.lane] = row.position
            for lane in read.lanes:
                if lane not in due and lane not in full:
                    self._marks.seen(read.marks, lane, lowest.get(lane))
            claims += rows
        return claims

    def _read_pooled(self, reads: Sequence[_Read], looks: Collection[int]) -> tuple[list[Claim], list[Any] | None]:
        # A pipeline: few round trips; SET LOCAL's reach ends with the transaction.
        with self._connection.pipeline(), self._connection.transaction():
            self._connection.execute(KEEP_TO_THE_INDEX, {"local": True})
            looking = self._send(reads, looks)
        _receive(reads)
        return self._collect(reads), looking.fetchall() if looking is not None else None

    def _gone(self, gone: int, read: int) -> DatabaseUnavailable:
        return DatabaseUnavailable(
            f"Postgres: {gone} of {read} events that were there a moment ago are gone: it has crashed, or somebody "
            "deletes events"
        )

    # Reading ahead

    def _worth_reading_ahead(self, batches: Mapping[int, Sequence[Claim]], limits: Mapping[int, int]) -> bool:
        """Return whether there is a backlog, and no lane whose failures the next turn has to know first."""
        return any(
            2 * len(batch) > limits[lane] or sum(_size(claim) for claim in batch[:1]) * len(batch) > _LANE_BYTES
            for lane, batch in batches.items()
        ) and all(self._lanes[lane].failures is None for lane in limits)

    def _read_ahead(self, limits: Mapping[int, int], in_hand: Mapping[int, Sequence[Claim]]) -> None:
        if self._must_look():
            # The next turn has to look at the failures.
            return
        reads = self._reads(limits, in_hand)
        self._ahead = _Ahead(reads, list(limits), in_hand)
        self.settlement.background.start(lambda: self._read_all(reads))

    def _read_all(self, reads: Sequence[_Read]) -> None:
        """Execute statements that read and receive their rows. Nothing else may use the connection meanwhile."""
        lost: psycopg.OperationalError | None = None
        with self._connection.pipeline():
            try:
                self._send(reads, ())
            except psycopg.OperationalError as error:
                # A pipeline that is left with an error logs one of its own: a warning at every stop.
                lost = error
        if lost is not None:
            raise lost
        _receive(reads)

    def _comes_next(self, ahead: _Ahead, lanes: Collection[int]) -> bool:
        """Return whether what was read ahead is the next turn of these lanes, or of some of them.

        Not when a lane is gone or must not be published now, and not when an event of the turn in hand was not
        published: the broker has refused the batch, or the event's topic can't be written to. It is read again, and
        comes first.
        """
        pending = self.settlement.lanes
        return (
            not ahead.stale
            and set(ahead.lanes) <= set(lanes)
            and all(lane in pending and pending[lane].pending.rows == batch for lane, batch in ahead.in_hand.items())
        )

    def _finish(self, ahead: _Ahead) -> list[Claim]:
        self.settlement.background.wait()
        return self._collect(ahead.reads)

    def _end(self, deadline: float | None = None) -> None:
        self._failed_behind |= self.settlement.end(deadline)

    def _free(self) -> None:
        """Free the connection. What was read ahead is let go of, and read again."""
        self._end()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            with unavailable_on_error("reading ahead"):
                self.settlement.background.wait()

    # What is known of the lanes

    def _looks(self, lanes: Collection[int]) -> Collection[int]:
        """Return the lanes whose failures have to be looked at with this turn."""
        if self._must_look():
            self._looked_at = time.monotonic()
            return list(self._lanes)
        return [lane for lane in lanes if self._lanes[lane].failures is not None]

    def _must_look(self) -> bool:
        """Return whether it is time to look at the failures of all lanes."""
        return time.monotonic() - self._looked_at >= _LOOK_SECONDS

    def _look_first(self) -> None:
        """Look at the failures of lanes of which they are not known: they decide by which statement a lane is read."""
        unknown = [lane for lane, state in self._lanes.items() if not state.known]
        if unknown:
            rows = self._connection.execute(self._queries.failures, {"lanes": unknown}).fetchall()
            self._took(rows, unknown)

    def _took(self, rows: Sequence[Any] | None, lanes: Collection[int]) -> None:
        """Take the answer of a look at the ``failures`` of these lanes."""
        if rows is None:
            return
        found = {row[0]: _Failures(*row[1:-1]) for row in rows}
        for lane in lanes:
            state = self._lanes[lane]
            before, state.failures, state.known = state.failures, found.get(lane), True
            if before is not None and (freed := before.freed_by(state.failures)) is not None:
                # What waited may go now, and lies below the mark.
                self._marks.lower(lane, freed)
        for row in rows:
            if row[-1] is not None and row[0] in self._lanes:
                self._marks.there(row[0], row[-1])

    def _note_sizes(self, batches: Mapping[int, Sequence[Claim]]) -> None:
        total = 0
        for lane, batch in batches.items():
            size = sum(_size(claim) for claim in batch)
            total += size
            self._lanes[lane].row_bytes = size / len(batch)
            self._lanes[lane].busy_until = time.monotonic() + 1.0
        if batches:
            self._step = _CLIENT_STEP_SECONDS
        if total > max(self._turn_bytes // 2, _LARGE_BYTES * sum(map(len, batches.values()))):
            self._crowded = True
        elif total < self._turn_bytes // 8:
            self._crowded = False

    def _note_settled(self, lane: int, pending: Pending) -> None:
        if pending.rows:
            self._marks.settled(lane, max(claim.position for claim in pending.rows))
        self._on_settled(lane, pending)

    def _note_due(self, lane: int, receipt: Receipt, refused: Sequence[Any]) -> None:
        state = self._lanes[lane]
        if state.reading_due and receipt.results:
            state.due = 1 if refused else min(state.due * 2, _MOST_DUE)

    def _settle_marker(self, lane: int, last_batch: int | None, adopted: Marker) -> None:
        rows = adopted.rows
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

    def _settle_with(self, lane: int, refused: Sequence[tuple[Claim, str]]) -> OutboxError | None:
        """Settle what is pending of a lane, and record what was refused in the same transaction."""
        settlement, lease = self.settlement, self._lanes[lane].lease
        asked_at = time.monotonic()
        dead: list[Claim] = []
        with self.transaction(lease, f"settling lane {lane}"):
            cursor = self._connection.cursor()
            settlement.send(cursor, [lane], in_transaction=True)
            if cursor.rowcount:
                dead = self._failures.record(self._connection, lane, refused)
        # Not before the commit: what is rolled back prolongs no lease.
        with unavailable_on_error(f"settling lane {lane}"):
            failed = settlement.answered(cursor, [lane], asked_at)
        if failed:
            return failed[lane]
        self._lanes[lane].known = False
        for claim in dead:
            self._on_dead(lane, claim)
        return None

    def _watch(self, lanes: Collection[int], seconds: float) -> str:
        body = sql.SQL(_WATCH).format(
            events=self._events,
            seconds=sql.Literal(seconds),
            watch=sql.Literal(self._watch_seconds),
            lanes=sql.Literal(array(list(lanes))),
            above=sql.Literal(array([self._marks.above(lane) for lane in lanes])),
        )
        return sql.SQL("DO {}").format(sql.Literal(body.as_string(self._connection))).as_string(self._connection)

    def _draw_xid(self) -> int:
        return self._number(_DRAW_XID)

    def _xmin(self) -> int:
        return self._number(_XMIN)

    def _number(self, query: LiteralString | sql.Composed) -> int:
        row = self._connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])


def refused_of(receipt: Receipt) -> list[tuple[Claim, str]]:
    """Return the events of a receipt that can't be published as they are, with the reasons."""
    refused = []
    for claim, outcome in receipt.results:
        match outcome:
            case Published():
                pass
            case Refused():
                refused.append((claim, outcome.reason))
            case _:
                assert_never(outcome)
    return refused


def _receive(reads: Sequence[_Read]) -> None:
    for read in reads:
        assert read.cursor is not None
        read.rows = read.cursor.fetchall()


def _size(claim: Claim) -> int:
    return len(claim.value) if claim.value is not None else 0


def _claim_row(_cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], Claim]:
    return Claim._make
