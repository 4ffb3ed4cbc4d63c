"""Source over the WAL: the lanes of a worker from the stream; from the table where the stream can't serve one.

The stream says which events there are, and in which order; what is in them is read from their rows. So an event of the
stream is published only when Postgres shows it: its row is there (or, without a row, its transaction is visible). A
commit stands in the WAL before it is visible, and with synchronous replication for as long as no standby has it: until
then a failover could undo it. A row that is not there although its transaction is visible has been published, or taken
away. So what the stream repeats, and what was published from the table, goes out once.

| state     | events come from                       | events of the stream are                                       |
|-----------|----------------------------------------|----------------------------------------------------------------|
| streaming | the stream, in commit order            | published, settled by row and position                         |
| table     | the table, as polling reads it         | dropped when visible: their rows are in the table. Those       |
|           |                                        | without a row are written to the table                         |
| catching  | the table, up to the highest id that   | kept; the first of them follows when the table has nothing up  |
| up        | was visible when dropping stopped      | to that id                                                     |

A lane is in ``table`` after a switch from polling, after the slot was made anew, and while it has failures: events of
a key that waits stay in the table, and go out from there, with the attempts, the backoff and the dead letters of
polling. ``lanes.streaming`` says which it is and is written, durably, before the first event is dropped and after the
last was caught up with; so whoever takes the lane over goes on in the same state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Final, assert_never

import orjson
import structlog
from psycopg import sql
from psycopg.rows import tuple_row

from outbox.errors import OutboxError
from relay.database import FURTHER, TIMELINE, unavailable_on_error
from relay.failpoints import failpoint
from relay.lease import Lease
from relay.marker import Identity, Marker
from relay.polling.low_water_mark import LOWEST
from relay.polling.queries import COLUMNS, SIZE
from relay.polling.source import PollingSource
from relay.ports import Claim, Fetched, Kind, LaneLost, Published, Receipt, Refused
from relay.position import up_to
from relay.retries import Failures
from relay.settlement import Pending, Settlement, lanes_text
from relay.statements import array, names_of, position
from relay.wal.channel import Channel
from relay.wal.events import UNREADABLE
from relay.wal.session import Stream
from relay.wal.slot import Snapshot, current_snapshot

log = structlog.get_logger("relay")

_LOOK_SECONDS: Final = 1.0
_DROP: Final = 5000
_SWEEP_SECONDS: Final = 60.0
_SAY_SECONDS: Final = 10.0
_FIRST_PAUSE_SECONDS: Final = 0.005
_LAST_PAUSE_SECONDS: Final = 0.1
# Rows are asked for by their ids, before anything is known of their size.
_FIRST_ROWS: Final = 64

_STATE: Final = """
SELECT l.lane, streaming, commit_lsn, commit_number, EXISTS (SELECT FROM {failures} AS f WHERE f.lane = l.lane),
       {timeline}
  FROM {lanes} AS l
  JOIN unnest(%(lanes)s::smallint[], %(epochs)s::bigint[]) AS m(lane, epoch) ON l.lane = m.lane AND l.epoch = m.epoch"""

_SET_STREAMING: Final = """
UPDATE {lanes} SET streaming = %(streaming)s WHERE lane = %(lane)s AND epoch = %(epoch)s
RETURNING lane, set_config('synchronous_commit', 'on', true)"""

# Without waiting for a lock on the row: the other lanes would wait as well.
_LEAVE_UNLOCKED: Final = """
UPDATE {lanes} SET streaming = false
 WHERE lane = (SELECT lane FROM {lanes} WHERE lane = %(lane)s AND epoch = %(epoch)s FOR NO KEY UPDATE SKIP LOCKED)
RETURNING lane, set_config('synchronous_commit', 'on', true)"""

_PLACED: Final = """
UPDATE {lanes} SET {further} WHERE lane = %(lane)s AND epoch = %(epoch)s
RETURNING lane, set_config('synchronous_commit', 'on', true)"""

_HIGHEST: Final = "SELECT coalesce(max(id), 0) FROM {events} WHERE lane = %(lane)s"

_ANY_UP_TO: Final = "SELECT EXISTS (SELECT FROM {events} WHERE lane = %(lane)s AND id <= %(id)s)"

_MORE: Final = """
SELECT count(*) FROM (SELECT FROM {events} WHERE lane = %(lane)s AND id > %(id)s LIMIT %(most)s) AS more"""

_OLD_ENDED: Final = """
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint >= coalesce(max(opened_xid), 0) FROM {streams}"""

_LOWEST: Final = """
SELECT min(id), (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint FROM {events} WHERE lane = %(lane)s"""

_WHICH: Final = """
SELECT ARRAY(SELECT id FROM {events} WHERE lane = %(lane)s AND id = ANY(%(next_ids)s::bigint[])),
       pg_current_snapshot()::text
  FROM {lanes} WHERE lane = %(lane)s AND epoch = %(epoch)s"""

# Of each lane as many as fit into the bytes, and one at least; ``cut`` is the number of the first that does not fit.
# OFFSET 0 keeps the planner from joining the other way around, which compares each row of the table with each id.
_READ: Final = """
SELECT e.*, s.lane, s.cut
  FROM (SELECT *, min(n) FILTER (WHERE before >= %(max_bytes)s) OVER (PARTITION BY lane) AS cut
          FROM (SELECT a.lane, a.id, a.n,
                       sum(e.size) OVER (PARTITION BY a.lane ORDER BY a.n ROWS UNBOUNDED PRECEDING) - e.size AS before
                  FROM unnest(%(lanes)s::smallint[], %(ids)s::bigint[], %(numbers)s::int[]) AS a(lane, id, n)
                 CROSS JOIN LATERAL (SELECT {size} AS size FROM {events} AS e
                                      WHERE e.lane = a.lane AND e.id = a.id OFFSET 0) AS e) AS sized) AS s
 CROSS JOIN LATERAL (SELECT {columns} FROM {events} AS e WHERE e.lane = s.lane AND e.id = s.id OFFSET 0) AS e
 WHERE s.before < %(max_bytes)s"""

_SPILL: Final = """
INSERT INTO {events} (event_id, aggregate_type, aggregate_id, event_type, payload_bytes, headers, created_at)
SELECT e.event_id, e.kind, e.key, e.type, e.payload, e.headers, coalesce(e.created_at, clock_timestamp())
  FROM unnest(%(event_ids)s::uuid[], %(kinds)s::text[], %(keys)s::text[], %(types)s::text[], %(payloads)s::bytea[],
              %(headers)s::jsonb[], %(times)s::timestamptz[]) WITH ORDINALITY
       AS e(event_id, kind, key, type, payload, headers, created_at, n)
 ORDER BY e.n
RETURNING id"""


@dataclass(slots=True)
class _Lane:
    """One lane: where its events come from, and what is under way."""

    lease: Lease
    marker: Marker | None = None
    unplaced: bool = False
    # Events without a row that are published, and whose place may not be settled.
    published: list[str] = field(default_factory=list)
    channel: Channel | None = None
    streaming: bool = False
    target_lsn: int | None = None
    horizon: int | None = None
    swept_at: float = field(default_factory=time.monotonic)
    orphan: tuple[int, int] | None = None
    batch: Sequence[Claim] = ()
    rows: int = _FIRST_ROWS
    row_bytes: float = 0.0
    absent: bool = False


class StreamSource:
    """The lanes of a worker that reads the WAL. See ports.Source for the contract.

    What comes from the table is read by a polling source, on the same connection. ``stream`` is the one of these lanes.
    """

    def __init__(self, connect: Any, schema: str, failures: Failures, *, stream: Stream, on_dead: Any, **options: Any):
        self._stream = stream
        self._failures = failures
        self._on_dead = on_dead
        self._table = PollingSource(
            connect,
            schema,
            failures,
            on_dead=on_dead,
            on_settled=self._note_settled,
            watch_seconds=0.0,
            overlap=False,
            **options,
        )
        self._connection = self._table.connection
        self._settlement: Settlement = self._table.settlement
        self._turn_bytes = self._table.turn_bytes
        self._lanes: dict[int, _Lane] = {}
        # Cursors return rows and no claims here: the place in the stream is still to be added.
        self._rows = self._connection.cursor(binary=True, row_factory=tuple_row)
        self._pause = _FIRST_PAUSE_SECONDS
        self._looked_at = 0.0
        self._fetched_at = 0.0
        self._step = _FIRST_PAUSE_SECONDS
        self._leaves_out = False
        self._troubled: set[int] = set()
        self._absent: Collection[int] = ()
        self._first = 0
        self._warned_at = time.monotonic()
        names = names_of(schema)
        names["timeline"], names["further"] = sql.SQL(TIMELINE), sql.SQL(FURTHER)
        names["columns"] = sql.SQL(COLUMNS.replace("id, event_id", "e.id, e.event_id", 1))
        names["size"] = sql.SQL(SIZE)
        self._state, self._set_streaming, self._lowest, self._which, self._spill, self._by_ids = (
            sql.SQL(text).format(**names) for text in (_STATE, _SET_STREAMING, _LOWEST, _WHICH, _SPILL, _READ)
        )
        self._highest_id, self._up_to, self._old_ended, self._placed, self._more = (
            sql.SQL(text).format(**names) for text in (_HIGHEST, _ANY_UP_TO, _OLD_ENDED, _PLACED, _MORE)
        )
        self._leave_unlocked = sql.SQL(_LEAVE_UNLOCKED).format(**names)

    @property
    def store(self) -> StreamSource:
        """Itself: it takes lanes over as well."""
        return self

    def lane_count(self) -> int:
        """Return how many lanes the outbox has."""
        return self._table.store.lane_count()

    def identity(self, leases: Sequence[Lease]) -> tuple[Identity | None, dict[int, OutboxError]]:
        """Return which Postgres this is, and the lanes that have another owner."""
        return self._table.store.identity(leases)

    def adopt(self, lease: Lease, marker: Marker | None, own_id: str | None) -> tuple[Marker | None, Identity]:
        """Settle what the marker names, and go on in the stream behind it."""
        adopted, identity = self._table.store.adopt(lease, marker, own_id)
        lane = self._lanes[lease.lane]
        lane.marker = adopted
        lane.unplaced = adopted is not None and adopted.stream is not None and adopted.timeline != identity.timeline
        # Whatever was taken from it is read again behind the marker.
        lane.channel, lane.batch = None, ()
        lane.horizon = lane.target_lsn = None
        return adopted, identity

    def hold(self, lease: Lease) -> None:
        """Begin to read a lane."""
        self._table.hold(lease)
        self._lanes[lease.lane] = _Lane(lease)

    def drop(self, lane: int) -> None:
        """Forget a lane."""
        self._table.drop(lane)
        self._lanes.pop(lane, None)

    def confirm(self, deadline: float) -> dict[int, OutboxError]:  # noqa: ARG002
        """Return nothing: a fetch has settled the turn before when it returns."""
        return {}

    def leave_out(self, kinds: frozenset[Kind]) -> None:
        """Do not return events of these kinds; in the stream they are known only once they are read."""
        self._table.leave_out(kinds)
        self._leaves_out = bool(kinds)

    def go_on_without(self, lanes: Collection[int]) -> None:
        """Leave these lanes to the table, as far as that loses nothing; see ``_see_to_absent``."""
        self._absent = lanes

    def fetch(self, limits: Mapping[int, int]) -> Fetched:
        """Settle what is pending and return the next events.

        ``known`` is False while the stream is not read yet: other lanes have not joined it.
        """
        self._fetched_at = time.monotonic()
        try:
            return self._fetch(limits)
        except Exception:
            # The stream may have ended while Postgres and Kafka are well: what is published must not be sent again.
            self.flush(list(self._lanes))
            raise

    def settle(self, receipts: Mapping[int, Receipt]) -> dict[int, OutboxError]:
        """Record what was published. Refused events, and with them the lane, go over to the table.

        So does a batch of which the publisher has published nothing because it can't be published as it is.
        """
        failed: dict[int, OutboxError] = {}
        from_table: dict[int, Receipt] = {}
        for number, lane in self._lanes.items():
            batch, lane.batch = lane.batch, ()
            receipt = receipts.get(number)
            if batch:
                error = self._settle_stream(number, lane, batch, receipt or Receipt())
                if error is not None:
                    failed[number] = error
            elif receipt is not None:
                from_table[number] = _of_rows(lane, receipt)
        return failed | self._table.settle(from_table)

    def flush(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        """Settle what is pending of these lanes."""
        return self._table.flush(lanes)

    def wait(self, lanes: Collection[int], seconds: float, stop: threading.Event) -> bool:
        """Wait until the stream has events, or a lane in the table may have."""
        if not lanes:
            stop.wait(seconds)
            return False
        if any(not self._lanes[lane].streaming for lane in lanes):
            # What the table has at last, a read only shows.
            self._stream.wait(lanes, min(self._step, seconds))
            self._step = min(self._step * 2, seconds)
            return True
        return self._stream.wait(lanes, seconds) or time.monotonic() - self._fetched_at >= _LOOK_SECONDS

    def close(self) -> None:
        """Close the connection."""
        self._table.close()

    # One turn

    def _fetch(self, limits: Mapping[int, int]) -> Fetched:
        failed = self._join([lane for lane in limits if self._lanes[lane].channel is None])
        left = [number for number in limits if number not in failed]
        placed = self._each(left, failed, self._place)
        known = len(placed) == len(left)
        ready = []
        for number in placed:
            channel = self._lanes[number].channel
            assert channel is not None
            known = known and channel.running
            if not self._lanes[number].unplaced:
                ready.append(number)
        if not known:
            self._say_who_is_absent()
        self._look_for_trouble([number for number in ready if self._lanes[number].streaming])
        ready = self._each(ready, failed, self._leave_where_needed)
        batches: dict[int, Sequence[Claim]] = {}
        streaming = {number: limits[number] for number in ready if self._lanes[number].streaming}
        if streaming:
            batches |= self._from_stream(streaming, failed)
        table = {number: limits[number] for number in ready if number not in streaming}
        if table:
            batches |= self._from_table(table, failed)
        if batches:
            self._pause = self._step = _FIRST_PAUSE_SECONDS
        self._see_to_absent(limits.keys() - failed.keys())
        return Fetched(batches, failed, known or bool(batches))

    def _each(
        self, numbers: Collection[int], failed: dict[int, OutboxError], step: Callable[[_Lane, Channel], None]
    ) -> list[int]:
        """Take a step with each lane; return the lanes without those that turn out to be lost."""
        for number in numbers:
            lane = self._lanes[number]
            assert lane.channel is not None
            try:
                step(lane, lane.channel)
            except LaneLost as error:
                failed[number] = error
        return [number for number in numbers if number not in failed]

    def _say_who_is_absent(self) -> None:
        """Return which lanes the stream waits for, now and then: until then only tables are read."""
        now = time.monotonic()
        absent = self._stream.absent()
        if absent and now - self._warned_at >= _SAY_SECONDS:
            self._warned_at = now
            log.warning("the stream is not read before all lanes have joined it", absent=lanes_text(absent))

    # Lanes that can't be read

    def _see_to_absent(self, present: Collection[int]) -> None:
        """Keep lanes that are ours and can't be taken over (their state is lost, say) from holding up the others.

        There is one stream: what is not done with in one channel is held, keeps the slot where it is, and at last
        fills the stream. So such a lane is put into the state ``table``, durably, and what the stream gives of its
        rows is let go of, as in that state: they are in the table, and leave it only when they are settled. That holds
        before the lane is taken over too: what its former holder has published is settled by the marker then, by its
        ids, and everything else is read from the table.

        An event without a row is not let go of. It is in the WAL alone, and a transaction that is not decided yet may
        have published it: to write it into the table could double it. So the slot stays in front of the first one of
        such a lane, and the others go on until the stream holds as much as it may.
        """
        for number in present:
            self._lanes[number].absent = False
        absent = [number for number in self._absent if number in self._lanes and number not in present]
        if not absent:
            return
        self._stream.begin_without(absent)
        for number in absent:
            channel = self._stream.channel(number)
            # What is published must be settled before the lane changes its state; the loop sees to that first.
            if channel is not None and not self._settlement.lanes[number].pending and self._leave(number, channel):
                self._let_go_of_rows(channel)

    def _leave(self, number: int, channel: Channel) -> bool:
        """Put an absent lane into the state ``table``; return whether it is, now or since before."""
        lane = self._lanes[number]
        if lane.absent:
            return True
        with unavailable_on_error(f"noting the state of lane {number}"):
            row = self._connection.execute(self._leave_unlocked, _mine(lane)).fetchone()
        # None: locked, or another relay's. The stream holds what it gives for the lane, and this is tried again.
        if row is not None:
            lane.absent, lane.streaming, lane.batch = True, False, ()
            lane.horizon = lane.target_lsn = None
            channel.rewind((-1, -1), ())
            self._table.read_all_again(number)
            log.warning("the lane can't be read; its rows wait in the table, the others go on", lane=number)
        return row is not None

    def _let_go_of_rows(self, channel: Channel) -> None:
        """Let go of rows that are visible, up to the first event without a row."""
        while claims := channel.take(_DROP):
            snapshot = current_snapshot(self._connection)
            kept = [n for n, claim in enumerate(claims) if not claim.has_row or not _is_visible(snapshot, claim)]
            count = kept[0] if kept else len(claims)
            channel.put_back(claims[count:])
            channel.done(claims[:count])
            if kept:
                break

    def _look_for_trouble(self, numbers: Collection[int]) -> None:
        """See which lanes have failures, now and then: a person may put a dead letter back."""
        now = time.monotonic()
        self._troubled = set()
        if numbers and now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._troubled = self._table.look_for_failures(numbers)

    def _leave_where_needed(self, lane: _Lane, channel: Channel) -> None:
        """Read a lane from the table that has failures, or of which the table has what the stream did not give."""
        if lane.streaming and (lane.lease.lane in self._troubled or self._passed_by(lane, channel)):
            self._leave_stream(lane, channel)

    # From the stream

    def _from_stream(self, limits: Mapping[int, int], failed: dict[int, OutboxError]) -> dict[int, Sequence[Claim]]:
        announced = self._announced(limits)
        batches: dict[int, Sequence[Claim]] = {}
        with unavailable_on_error(f"reading {lanes_text(limits)}"):
            rows, cuts, lost = self._read(announced)
            failed |= lost

            def fill(lane: _Lane, _channel: Channel) -> None:
                number = lane.lease.lane
                lane.batch = self._filled(lane, announced[number], rows.get(number, {}), cuts.get(number))
                self._note_size(lane, len(announced[number]))
                if lane.batch:
                    batches[number] = lane.batch

            self._each([number for number in announced if number not in lost], failed, fill)
            for number in lost.keys() & announced.keys():
                # The lane's row is locked, say. What was announced comes again.
                self._put_back(self._lanes[number], announced[number])
        if batches:
            failpoint("batch.fetched")
        return batches

    def _announced(self, limits: Mapping[int, int]) -> dict[int, Sequence[Claim]]:
        """Take the next events of each lane; of as many lanes as a turn has room for, by the size of their last ones.

        Each lane gives one event at least, however large. So with large ones the lanes take turns.
        """
        announced: dict[int, Sequence[Claim]] = {}
        expected = 0.0
        after, self._first = self._first, 0
        for number in sorted(limits, key=lambda number: (number < after, number)):
            lane = self._lanes[number]
            assert lane.channel is not None
            if expected >= self._turn_bytes:
                self._first = number
                break
            if taken := lane.channel.take(min(limits[number], lane.rows)):
                announced[number] = taken
                expected += lane.row_bytes
        share = self._turn_bytes // max(len(announced), 1)
        for number, claims in announced.items():
            # Rows are cut where they are read; what has none is here already.
            before = 0
            for n, claim in enumerate(claims):
                if before > share:
                    channel = self._lanes[number].channel
                    assert channel is not None
                    channel.put_back(claims[n:])
                    announced[number] = claims[:n]
                    break
                before += len(claim.value) if claim.value is not None else 0
        return announced

    def _read(
        self, announced: Mapping[int, Sequence[Claim]]
    ) -> tuple[dict[int, dict[int, Sequence[Any]]], dict[int, int], dict[int, OutboxError]]:
        """Settle what is pending, and return those of the rows that are there, by lane and id.

        Where there is nothing to settle, this reads only: what comes from the WAL is durable, and a commit could wait
        for a standby.
        """
        settled = sorted({*self._settlement.unsettled, *filter(self._settlement.prolongs, announced)})
        checked = [lane for lane in announced if lane not in set(settled)]
        named = [(lane, claim.position, n) for lane, claims in announced.items() for n, claim in enumerate(claims)]
        named = [each for each in named if each[1] > 0]
        asked_at = time.monotonic()
        going = {lane: {c.position for c in self._settlement.lanes[lane].pending.rows} for lane in announced}
        settling, checking = self._connection.cursor(), self._connection.cursor()
        with self._connection.pipeline() as pipeline:
            if named:
                values = {
                    "lanes": array([each[0] for each in named]),
                    "ids": array([each[1] for each in named]),
                    "numbers": array([each[2] for each in named]),
                    "max_bytes": max(self._turn_bytes // max(len(announced), 1), 1),
                }
                self._rows.execute(self._by_ids, values)
                pipeline.sync()
            if checked:
                checking.execute(*self._settlement.still_held(checked))
                pipeline.sync()
            if settled:
                failpoint("batch.settling")
                self._settlement.send(settling, settled)
                pipeline.sync()
        found = self._rows.fetchall() if named else []
        failed: dict[int, OutboxError] = {}
        if checked:
            failed |= self._settlement.lost_of(checked, checking.fetchall())
        if settled:
            failed |= self._settlement.answered(settling, settled, asked_at)
            failpoint("batch.settled")
        rows: dict[int, dict[int, Sequence[Any]]] = {}
        cuts: dict[int, int] = {}
        for row in found:
            lane = row[8]
            # What goes with this turn was still there when it was read.
            if row[0] not in going[lane]:
                rows.setdefault(lane, {})[row[0]] = row
            if row[9] is not None:
                cuts[lane] = row[9]
        return rows, cuts, failed

    def _filled(  # noqa: C901  one event after the other, and all that each can be
        self, lane: _Lane, announced: Sequence[Claim], rows: dict[int, Sequence[Any]], cut: int | None
    ) -> Sequence[Claim]:
        """Return what can be published, up to the first that is not visible yet. Those that are gone are done with."""
        channel, number_of_lane = lane.channel, lane.lease.lane
        assert channel is not None
        if cut is not None:
            # The others did not fit.
            channel.put_back(announced[cut:])
            announced = announced[:cut]
        if len(rows) == len(announced):
            # All are there, and none is announced twice.
            return [Claim._make((*rows[claim.position][:8], claim.at, number_of_lane)) for claim in announced]
        kept: list[Claim] = []
        gone: list[Claim] = []
        again: tuple[AbstractSet[int], Snapshot] | None = None
        for number, claim in enumerate(announced):
            row = rows.pop(claim.position, None)
            if row is not None:
                kept.append(Claim._make((*row[:8], claim.at, number_of_lane)))
                continue
            if again is None:
                again = self._look_again(lane, announced[number:])
            assert claim.at is not None
            if claim.position in again[0] or not again[1].sees(claim.at.xid):
                channel.put_back(announced[number:])
                if not kept:
                    self._wait_for_visibility()
                break
            if claim.has_row:
                gone.append(claim)
            elif claim.aggregate_type != UNREADABLE:
                kept.append(claim._replace(lane=number_of_lane))
            elif not kept:
                self._bury(lane, channel, claim)
            else:
                channel.put_back(announced[number:])
                break
        channel.done(gone)
        return kept

    def _put_back(self, lane: _Lane, claims: Sequence[Claim]) -> None:
        assert lane.channel is not None
        lane.channel.put_back(claims)

    def _note_size(self, lane: _Lane, asked: int) -> None:
        """Ask for as many rows next time as fit into the bytes by the size of these."""
        if not lane.batch:
            return
        total = sum(len(claim.value) if claim.value is not None else 0 for claim in lane.batch)
        lane.row_bytes = total / len(lane.batch)
        fitting = int(self._turn_bytes / 4 / max(lane.row_bytes, 1.0))
        if asked >= lane.rows or fitting < lane.rows:
            lane.rows = max(min(lane.rows * 4, fitting, 50_000), 1)

    def _look_again(self, lane: _Lane, claims: Sequence[Claim]) -> tuple[AbstractSet[int], Snapshot]:
        """Return those whose rows are there now, and a snapshot that is as old."""
        ids = array([claim.position for claim in claims if claim.has_row])
        row = self._connection.execute(self._which, {"next_ids": ids, **_mine(lane)}).fetchone()
        if row is None:
            raise self._lost(lane)
        return set(row[0]), Snapshot(row[1])

    def _wait_for_visibility(self) -> None:
        # With synchronous replication it may take as long as a standby is away.
        time.sleep(self._pause)
        self._pause = min(self._pause * 2, _LAST_PAUSE_SECONDS)

    def _passed_by(self, lane: _Lane, channel: Channel) -> bool:
        """Return whether the table has an event that the stream has not given. It never should; then the table is read.

        Such an event would wait for ever, and nobody would know.
        """
        now = time.monotonic()
        if now - lane.swept_at < _SWEEP_SECONDS:
            return False
        lane.swept_at = now
        settled = lane.orphan is not None and channel.settled_up_to(lane.orphan[1])
        lowest, lsn = self._ask(lane, self._lowest)
        if lowest is None:
            lane.orphan = None
        elif lane.orphan is None or lane.orphan[0] != lowest:
            lane.orphan = lowest, lsn
            channel.settled_up_to(lsn)
        elif settled:
            log.error("the stream has passed an event by; the table is read", lane=lane.lease.lane, id=lowest)
            lane.orphan = None
            return True
        return False

    # Between stream and table

    def _join(self, numbers: Collection[int]) -> dict[int, OutboxError]:
        if not numbers:
            return {}
        lanes = [self._lanes[number] for number in numbers]
        with unavailable_on_error(f"looking at {lanes_text(numbers)}"):
            rows = self._connection.execute(
                self._state,
                {"lanes": list(numbers), "epochs": [lane.lease.epoch for lane in lanes]},
            ).fetchall()
        states = {row[0]: row[1:] for row in rows}
        failed: dict[int, OutboxError] = {}
        for number, lane in zip(numbers, lanes, strict=True):
            state = states.get(number)
            if state is None:
                failed[number] = self._lost(lane)
                continue
            lane.streaming, commit_lsn, commit_number, failures, timeline = state
            resume = (-1, -1) if commit_lsn is None else (commit_lsn, commit_number)
            repeated = lane.published
            if lane.marker is not None:
                # Of what stands behind the marker's own position, the rows are settled; the others have only their ids.
                repeated = [event_id for _, event_id in lane.marker.without_row]
            published = None
            if lane.marker is not None and lane.marker.stream is not None:
                published = lane.marker.timeline, lane.marker.stream.commit_lsn
            lane.channel = self._stream.join(number, resume, repeated, timeline, published)
            if lane.streaming and failures:
                self._each([number], failed, self._leave_stream)
        return failed

    def _place(self, lane: _Lane, channel: Channel) -> None:
        """After a failover, write down up to where the marker says the lane is on Kafka, as soon as that can be known.

        ``adopt`` could not: it did not know how much of the old timeline is in this server's history, which the stream
        looks at. Before the next batch, because its marker takes the place of the one that names the events without a
        row: from then on only the place says that they are published.
        """
        if not lane.unplaced:
            return
        if not channel.running:
            channel.check()
            return
        assert lane.marker is not None
        assert lane.marker.stream is not None
        end = channel.ended(lane.marker.timeline)
        if end is not None:
            at = up_to(lane.marker.stream, end)
            self._change(lane, self._placed, **position(at))
        lane.unplaced = False

    def _leave_stream(self, lane: _Lane, channel: Channel) -> None:
        self._flush_one(lane)
        self._write_streaming(lane, streaming=False)
        channel.rewind((-1, -1), ())
        self._table.read_all_again(lane.lease.lane)

    def _enter_stream(self, lane: _Lane) -> None:
        self._write_streaming(lane, streaming=True)
        lane.horizon, lane.target_lsn = None, None

    def _write_streaming(self, lane: _Lane, *, streaming: bool) -> None:
        self._change(lane, self._set_streaming, streaming=streaming)
        lane.streaming = streaming
        failpoint("stream.entered" if streaming else "stream.left")

    # From the table

    def _from_table(self, limits: Mapping[int, int], failed: dict[int, OutboxError]) -> dict[int, Sequence[Claim]]:
        left = self._each(limits, failed, self._make_room)
        fetched = self._table.fetch({number: limits[number] for number in left})
        failed |= fetched.failed
        batches = dict(fetched.batches)

        def step(lane: _Lane, channel: Channel) -> None:
            number = lane.lease.lane
            rows = batches.get(number, ())
            if self._table.has_failures(number) or self._leaves_out:
                # Events stay in the table, and others must not wait for them.
                lane.horizon = lane.target_lsn = None
            elif lane.horizon is None:
                if self._nearly_empty(lane, rows, limits[number]):
                    self._catch_up(lane, channel)
            elif not rows or rows[0].position > lane.horizon:
                # What was read just now comes again, from the stream; or after what hides below the mark.
                batches.pop(number, None)
                if self._ask(lane, self._up_to, id=lane.horizon)[0]:
                    self._table.read_all_again(number)
                else:
                    self._enter_stream(lane)

        ours = self._each([number for number in left if number not in failed], failed, step)
        return {number: batch for number, batch in batches.items() if number in set(ours)}

    def _make_room(self, lane: _Lane, channel: Channel) -> None:
        """Take from the stream what need not be kept."""
        if lane.horizon is None:
            self._drop(lane, channel)
        else:
            # The next session begins when all lanes have joined it: the others must not wait for our table.
            channel.check()

    def _nearly_empty(self, lane: _Lane, rows: Sequence[Claim], limit: int) -> bool:
        """Return whether the table has little beside these. What is kept from then on takes room in the stream.

        Fewer rows than were asked for prove nothing: large ones are read by their bytes.
        """
        if len(rows) >= limit:
            return False
        last = rows[-1].position if rows else LOWEST
        return bool(len(rows) + self._ask(lane, self._more, id=last, most=limit)[0] < limit)

    def _catch_up(self, lane: _Lane, channel: Channel) -> None:
        """Stop dropping, if the stream is ours and has been read nearly to its end.

        Ours: whoever read it before may have dropped what nobody has published. To its end: until a slot that was not
        read for long has given all that, events go out of the table at once.
        """
        if not channel.running:
            return
        if lane.target_lsn is None:
            lane.target_lsn = self._ask(lane, self._lowest)[1]
        if channel.read_lsn >= (lane.target_lsn or 0) and self._ask(lane, self._old_ended)[0]:
            lane.horizon = int(self._ask(lane, self._highest_id)[0])

    def _drop(self, lane: _Lane, channel: Channel) -> None:
        """Let go of events whose rows are in the table for all to see; write those that have no row there."""
        claims = channel.take(_DROP)
        if not claims:
            return
        snapshot = current_snapshot(self._connection)
        visible = len(claims)
        for number, claim in enumerate(claims):
            assert claim.at is not None
            if not snapshot.sees(claim.at.xid):
                visible = number
                channel.put_back(claims[number:])
                break
        dropped = claims[:visible]
        if not dropped:
            self._wait_for_visibility()
            return
        self._pause = self._step = _FIRST_PAUSE_SECONDS
        if any(not claim.has_row for claim in dropped):
            self._flush_one(lane)
            self._write_to_table(lane, dropped)
        channel.done(dropped)

    def _ask(self, lane: _Lane, query: sql.Composed, **more: int) -> Any:
        with unavailable_on_error(f"looking at lane {lane.lease.lane}"):
            row = self._connection.execute(query, _mine(lane) | more).fetchone()
        assert row is not None
        return row

    def _change(self, lane: _Lane, query: sql.Composed, **values: Any) -> None:
        with unavailable_on_error(f"noting the state of lane {lane.lease.lane}"):
            row = self._connection.execute(query, {**values, **_mine(lane)}).fetchone()
        if row is None:
            raise self._lost(lane)

    # What became of a batch

    def _settle_stream(self, number: int, lane: _Lane, batch: Sequence[Claim], receipt: Receipt) -> OutboxError | None:
        settlement = self._settlement.lanes[number]
        if len(receipt.results) == len(batch) and all(isinstance(outcome, Published) for _, outcome in receipt.results):
            settlement.pending = Pending.of(receipt, batch[-1].at)
            return None
        refused: list[tuple[Claim, str]] = []
        published = set()
        for claim, outcome in receipt.results:
            match outcome:
                case Published():
                    published.add(claim.position)
                case Refused():
                    refused.append((claim, outcome.reason))
                case _:
                    assert_never(outcome)
        if refused or receipt.needs_rows or receipt.left_out:
            return self._resolve(lane, batch, receipt, published, refused)
        if receipt.results or receipt.batch is not None:
            reached = None
            for claim in batch:
                if claim.position not in published:
                    break
                reached = claim.at
            settlement.pending = Pending.of(receipt, reached)
        # What is not known to be published comes again. What is has to be done with before that.
        failed = self._settlement.settle([number]) if settlement.pending else {}
        if lane.channel is not None:
            lane.channel.rewind((-1, -1), ())
        return failed.get(number)

    def _resolve(
        self,
        lane: _Lane,
        batch: Sequence[Claim],
        receipt: Receipt,
        published: set[int],
        refused: list[tuple[Claim, str]],
    ) -> OutboxError | None:
        """Settle what is published, record what is refused, and leave the rest of the batch to the table."""
        number = lane.lease.lane
        left = [claim for claim in batch if not claim.has_row and claim.position not in published]
        dead: list[Claim] = []

        def leave() -> None:
            rows = {claim.position: row for claim, row in zip(left, self._spilled(left), strict=True)}
            moved = [(rows.get(claim.position, claim), reason) for claim, reason in refused]
            if moved:
                dead.extend(self._failures.record(self._connection, number, moved))
            self._connection.execute(self._set_streaming, {"streaming": False, **_mine(lane)})

        pending = replace(Pending.of(receipt, batch[-1].at), claims=())
        error = self._settle_with(lane, pending, f"settling lane {number}", leave)
        if error is not None:
            return error
        lane.streaming = False
        self._table.read_all_again(number)
        assert lane.channel is not None
        lane.channel.done(batch)
        for claim in dead:
            self._on_dead(number, claim)
        return None

    def _bury(self, lane: _Lane, channel: Channel, claim: Claim) -> None:
        """Keep what can't be read as a dead letter."""
        self._write_to_table(lane, [claim])
        channel.done([claim])

    def _write_to_table(self, lane: _Lane, claims: Sequence[Claim]) -> None:
        """Return events without a row one, and note that the stream is used up to the last of the claims."""
        number = lane.lease.lane
        unreadable: list[Claim] = []

        def write() -> None:
            rows = self._spilled([claim for claim in claims if not claim.has_row])
            unreadable.extend(row for row in rows if row.aggregate_type == UNREADABLE)
            if unreadable:
                self._failures.bury_at_once(self._connection, number, unreadable)

        error = self._settle_with(lane, Pending(at=claims[-1].at), f"writing events of lane {number}", write)
        if error is not None:
            raise error
        failpoint("stream.spilled")
        for row in unreadable:
            self._on_dead(number, row)

    def _settle_with(self, lane: _Lane, pending: Pending, doing: str, more: Callable[[], None]) -> OutboxError | None:
        """Settle, and do more in the same transaction. Return what is wrong with the lane, if it is not held.

        Where that fails nothing of it stays pending: a place must not be settled without what goes with it.
        """
        number = lane.lease.lane
        settled = self._settlement.lanes[number]
        before, settled.pending = settled.pending, pending
        asked_at = time.monotonic()
        try:
            with self._table.transaction(lane.lease, doing):
                cursor = self._connection.cursor()
                self._settlement.send(cursor, [number], in_transaction=True)
                if cursor.rowcount:
                    more()
            failed = self._settlement.answered(cursor, [number], asked_at)
        except BaseException:
            settled.pending = before
            raise
        if failed:
            settled.pending = before
        return failed.get(number)

    def _flush_one(self, lane: _Lane) -> None:
        for error in self.flush([lane.lease.lane]).values():
            raise error

    def _spilled(self, claims: Sequence[Claim]) -> list[Claim]:
        if not claims:
            return []
        cursor = self._connection.execute(
            self._spill,
            {
                "event_ids": [claim.event_id for claim in claims],
                "kinds": [claim.aggregate_type for claim in claims],
                "keys": [claim.aggregate_id for claim in claims],
                "types": [claim.event_type for claim in claims],
                "payloads": [claim.value for claim in claims],
                "headers": [
                    None if claim.headers is None else orjson.dumps(claim.headers).decode() for claim in claims
                ],
                "times": [claim.time or None for claim in claims],
            },
        )
        return [claim._replace(position=row[0], at=None) for claim, row in zip(claims, cursor.fetchall(), strict=True)]

    def _note_settled(self, lane: int, pending: Pending) -> None:
        known = self._lanes.get(lane)
        if known is not None and known.channel is not None:
            known.channel.done([claim for claim in pending.claims if claim.at is not None])

    def _lost(self, lane: _Lane) -> LaneLost:
        return self._settlement.lost(lane.lease.lane)


def _of_rows(lane: _Lane, receipt: Receipt) -> Receipt:
    """Return what a receipt says of rows. It may tell again of events without a row: a channel joined later must know.

    A channel that is joined knows; to be told of what it no longer holds would stay with it.
    """
    if all(claim.has_row for claim, _ in receipt.results):
        return receipt
    if lane.channel is None:
        results: Sequence[tuple[Claim, Any]] = receipt.results
        lane.published += [
            claim.event_id for claim, outcome in results if not claim.has_row and isinstance(outcome, Published)
        ]
    return replace(receipt, results=[result for result in receipt.results if result[0].has_row])


def _is_visible(snapshot: Snapshot, claim: Claim) -> bool:
    assert claim.at is not None
    return snapshot.sees(claim.at.xid)


def _mine(lane: _Lane) -> dict[str, int]:
    return {"lane": lane.lease.lane, "epoch": lane.lease.epoch}
