"""Source over the WAL: one lane, from the stream; from the table where the stream can't serve it.

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

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Final, assert_never

import orjson
import structlog
from psycopg import sql
from psycopg.rows import tuple_row

from relay.database import FURTHER, TIMELINE, unavailable_on_error
from relay.failpoints import failpoint
from relay.marker import Marker
from relay.polling import Floor, Identity, Pending, PollingSource, array, position
from relay.ports import Claim, Published, Receipt, Refused, up_to
from relay.slot import Snapshot, current_snapshot
from relay.stream import UNREADABLE, Channel, Stream

log = structlog.get_logger("relay")

_LOOK_SECONDS: Final = 1.0
_DROP: Final = 5000
_SWEEP_SECONDS: Final = 60.0
_FIRST_PAUSE_SECONDS: Final = 0.005
_LAST_PAUSE_SECONDS: Final = 0.1
# A lease with less left than this part of it is prolonged with the next batch.
_RENEW_PART: Final = 0.7

_STATE: Final = """
SELECT streaming, commit_lsn, commit_number, EXISTS (SELECT FROM {failures} WHERE lane = %(lane)s),
       {timeline}
  FROM {lanes} WHERE lane = %(lane)s AND epoch = %(epoch)s"""

_SET_STREAMING: Final = """
UPDATE {lanes} SET streaming = %(streaming)s WHERE lane = %(lane)s AND epoch = %(epoch)s
RETURNING lane, set_config('synchronous_commit', 'on', true)"""

_PLACED: Final = """
UPDATE {lanes} SET {further} WHERE lane = %(lane)s AND epoch = %(epoch)s
RETURNING lane, set_config('synchronous_commit', 'on', true)"""

_HIGHEST: Final = "SELECT coalesce(max(id), 0) FROM {events} WHERE lane = %(lane)s"

_ANY_UP_TO: Final = "SELECT EXISTS (SELECT FROM {events} WHERE lane = %(lane)s AND id <= %(id)s)"

_OLD_ENDED: Final = """
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint >= coalesce(max(opened_xid), 0) FROM {streams}"""

_LOWEST: Final = """
SELECT min(id), (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint FROM {events} WHERE lane = %(lane)s"""

_WHICH: Final = """
SELECT ARRAY(SELECT id FROM {events} WHERE lane = %(lane)s AND id = ANY(%(next_ids)s::bigint[])),
       pg_current_snapshot()::text
  FROM {lanes} WHERE lane = %(lane)s AND epoch = %(epoch)s"""

# As bytes, whatever it was: the value of the message, to the byte. Its content type is JSON where none is given.
_SPILL: Final = """
INSERT INTO {events} (event_id, aggregate_type, aggregate_id, event_type, payload_bytes, headers, created_at)
SELECT e.event_id, e.kind, e.key, e.type, e.payload, e.headers, coalesce(e.created_at, clock_timestamp())
  FROM unnest(%(event_ids)s::uuid[], %(kinds)s::text[], %(keys)s::text[], %(types)s::text[], %(payloads)s::bytea[],
              %(headers)s::jsonb[], %(times)s::timestamptz[]) WITH ORDINALITY
       AS e(event_id, kind, key, type, payload, headers, created_at, n)
 ORDER BY e.n
RETURNING id"""


class StreamSource(PollingSource):
    """One lane of a relay that reads the WAL. ``wait_seconds`` is how long ``fetch`` waits for the first event."""

    def __init__(self, connect: Any, schema: str, *args: Any, stream: Stream, wait_seconds: float, **options: Any):
        super().__init__(connect, schema, *args, **options)
        self._stream = stream
        self._wait_seconds = wait_seconds
        self._marker: Marker | None = None
        self._unplaced = False
        # Events without a row that are published, and whose place may not be settled.
        self._published: list[str] = []
        self._channel: Channel | None = None
        self._streaming = False
        # Cursors give rows and no claims here: the place in the stream is still to be added.
        self._rows = self._connection.cursor(binary=True, row_factory=tuple_row)
        self._target_lsn: int | None = None
        self._horizon: int | None = None
        self._pause = _FIRST_PAUSE_SECONDS
        self._swept_at = time.monotonic()
        self._orphan: tuple[int, int] | None = None
        self._batch: Sequence[Claim] = ()
        self._failures_at = 0.0
        tables = ("events", "lanes", "failures", "streams")
        names: dict[str, sql.Composable] = {name: sql.Identifier(schema, name) for name in tables}
        names["timeline"], names["further"] = sql.SQL(TIMELINE), sql.SQL(FURTHER)
        self._state, self._set_streaming, self._lowest, self._which, self._spill = (
            sql.SQL(text).format(**names) for text in (_STATE, _SET_STREAMING, _LOWEST, _WHICH, _SPILL)
        )
        self._highest_id, self._up_to, self._old_ended, self._placed = (
            sql.SQL(text).format(**names) for text in (_HIGHEST, _ANY_UP_TO, _OLD_ENDED, _PLACED)
        )

    def adopt(self, marker: Marker | None) -> tuple[Marker | None, Identity]:
        """Settle what the marker names, and go on in the stream behind it."""
        adopted, identity = super().adopt(marker)
        self._marker = adopted
        self._unplaced = adopted is not None and adopted.stream is not None and adopted.timeline != identity.timeline
        return adopted, identity

    def fetch(self, limit: int) -> Sequence[Claim] | None:
        """Settle what is pending and give the next events; wait a little for the first.

        None while the stream is not read yet: other lanes have not joined it.
        """
        channel = self._channel or self._join()
        if self._unplaced and not self._place(channel):
            return None
        try:
            if self._streaming and (self._failures_came_up() or self._passed_by(channel)):
                self._leave_stream(channel)
            return self._from_stream(channel, limit) if self._streaming else self._from_table(channel, limit)
        except Exception:
            # The stream may have ended while Postgres and Kafka are well: what is published must not be sent again.
            self.flush()
            raise

    def settle(self, receipt: Receipt) -> None:
        """Take note of what was published. Refused events, and with them the lane, go over to the table.

        So does a batch of which the publisher has published nothing because it can't be published as it is.
        """
        batch, self._batch = self._batch, ()
        if not batch:
            # What a source before this one has published, so nothing of it was joined to the stream yet.
            self._published += [
                claim.event_id
                for claim, outcome in receipt.results
                if claim.position < 0 and isinstance(outcome, Published)
            ]
            return super().settle(receipt)
        if len(receipt.results) == len(batch) and all(isinstance(outcome, Published) for _, outcome in receipt.results):
            self._pending = Pending.of(receipt, batch[-1].at)
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
        if refused or (receipt.spent and not receipt.results):
            return self._resolve(batch, receipt, published, refused)
        if receipt.results or receipt.batch is not None:
            reached = None
            for claim in batch:
                if claim.position not in published:
                    break
                reached = claim.at
            self._pending = Pending.of(receipt, reached)
        return None

    # From the stream

    def _from_stream(self, channel: Channel, limit: int) -> Sequence[Claim] | None:
        announced: Sequence[Claim] = channel.take(limit)
        if not announced:
            self.flush()
            announced = channel.take(limit, self._wait_seconds)
            if not announced:
                return () if channel.running else None
        with unavailable_on_error(f"reading lane {self._lease.lane}"):
            rows = self._read([claim.position for claim in announced if claim.position > 0])
            claims = self._filled(channel, announced, rows)
        if claims:
            self._batch = claims
            self._pause = _FIRST_PAUSE_SECONDS
            failpoint("batch.fetched")
        return claims

    def _read(self, ids: Sequence[int]) -> dict[int, Sequence[Any]]:
        """Settle what is pending and give those of the rows that are there, by id."""
        asked_at = time.monotonic()
        pending = self._pending
        settles = pending is not None or self._lease.remaining_seconds < self._lease.ttl_seconds * _RENEW_PART
        if settles:
            failpoint("batch.settling")
            values = self._settling_values(pending or Pending()) | {"next_ids": array(ids)}
            rows = self._rows.execute(self._queries.settle_and_read, values).fetchall()
            self._settled(bool(rows), asked_at)
            failpoint("batch.settled")
        else:
            # Reads only: what comes from the WAL is durable, and the lease is prolonged elsewhere.
            rows = self._rows.execute(self._queries.read, {"next_ids": array(ids), **self._mine()}).fetchall()
            if not rows:
                raise self._lost(0)
        there: dict[int, Sequence[Any]] = {row[0]: row for row in rows}
        there.pop(None, None)  # type: ignore[call-overload]
        if pending is not None:
            # The statement that deletes them still sees them.
            for id_ in there.keys() & set(pending.ids):
                del there[id_]
        return there

    def _filled(self, channel: Channel, announced: Sequence[Claim], rows: dict[int, Sequence[Any]]) -> Sequence[Claim]:
        """Give what can be published, up to the first that is not visible yet. Those that are gone are done with."""
        if len(rows) == len(announced):
            # All are there, and none is announced twice.
            return [Claim._make((*rows[claim.position], claim.at)) for claim in announced]
        kept: list[Claim] = []
        gone: list[Claim] = []
        again: tuple[AbstractSet[int], Snapshot] | None = None
        for number, claim in enumerate(announced):
            row = rows.pop(claim.position, None)
            if row is not None:
                kept.append(Claim._make((*row, claim.at)))
                continue
            if again is None:
                again = self._look_again(announced[number:])
            assert claim.at is not None
            if claim.position in again[0] or not again[1].sees(claim.at.xid):
                channel.put_back(announced[number:])
                if not kept:
                    self._wait_for_visibility()
                break
            if claim.position > 0:
                gone.append(claim)
            elif claim.aggregate_type != UNREADABLE:
                kept.append(claim)
            elif kept:
                channel.put_back(announced[number:])
                break
            else:
                self._bury(channel, claim)
        channel.done(gone)
        return kept

    def _look_again(self, claims: Sequence[Claim]) -> tuple[AbstractSet[int], Snapshot]:
        """Give those whose rows are there now, and a snapshot that is as old."""
        ids = array([claim.position for claim in claims if claim.position > 0])
        row = self._connection.execute(self._which, {"next_ids": ids, **self._mine()}).fetchone()
        if row is None:
            raise self._lost(0)
        return set(row[0]), Snapshot(row[1])

    def _wait_for_visibility(self) -> None:
        # With synchronous replication it may take as long as a standby is away.
        time.sleep(self._pause)
        self._pause = min(self._pause * 2, _LAST_PAUSE_SECONDS)

    def _failures_came_up(self) -> bool:
        """Whether the lane has failures. Looked at now and then: a person may put a dead letter back."""
        now = time.monotonic()
        if now - self._failures_at < _LOOK_SECONDS:
            return False
        self._failures_at = now
        with unavailable_on_error(f"looking for failures of lane {self._lease.lane}"):
            row = self._connection.execute(self._queries.any_failures, {"lane": self._lease.lane}).fetchone()
        return row is not None and bool(row[0])

    def _passed_by(self, channel: Channel) -> bool:
        """Whether the table has an event that the stream has not given. It should never; if so, the table is read.

        Such an event would wait for ever, and nobody would know.
        """
        now = time.monotonic()
        if now - self._swept_at < _SWEEP_SECONDS:
            return False
        self._swept_at = now
        settled = self._orphan is not None and channel.settled_up_to(self._orphan[1])
        with unavailable_on_error(f"sweeping lane {self._lease.lane}"):
            row = self._connection.execute(self._lowest, self._mine()).fetchone()
        assert row is not None
        lowest, lsn = row
        if lowest is None:
            self._orphan = None
        elif self._orphan is None or self._orphan[0] != lowest:
            self._orphan = lowest, lsn
            channel.settled_up_to(lsn)
        elif settled:
            log.error("the stream has passed an event by; the table is read", lane=self._lease.lane, id=lowest)
            self._orphan = None
            return True
        return False

    # Between stream and table

    def _join(self) -> Channel:
        with unavailable_on_error(f"looking at lane {self._lease.lane}"):
            row = self._connection.execute(self._state, self._mine()).fetchone()
        if row is None:
            raise self._lost(0)
        self._streaming, commit_lsn, commit_number, failures, timeline = row
        resume = (-1, -1) if commit_lsn is None else (commit_lsn, commit_number)
        repeated = self._published
        if self._marker is not None:
            # Of what stands behind the marker's own position, the rows are settled; the others have only their ids.
            pairs = zip(self._marker.positions, self._marker.event_ids, strict=True)
            repeated = [event_id for position, event_id in pairs if position < 0]
        published = None
        if self._marker is not None and self._marker.stream is not None:
            published = self._marker.timeline, self._marker.stream.commit_lsn
        channel = self._channel = self._stream.join(self._lease.lane, resume, repeated, timeline, published)
        if self._streaming and failures:
            self._leave_stream(channel)
        return channel

    def _place(self, channel: Channel) -> bool:
        """After a failover, write down up to where the marker says that this lane is on Kafka; say whether it is done.

        ``adopt`` could not: it did not know how much of the old timeline is in this server's history, which the stream
        looks at. Before the next batch, because its marker takes the place of the one that names the events without a
        row: from then on only the place says that they are published.
        """
        if not channel.running:
            channel.check()
            return False
        assert self._marker is not None
        assert self._marker.stream is not None
        end = channel.ended(self._marker.timeline)
        if end is not None:
            at = up_to(self._marker.stream, end)
            with unavailable_on_error(f"noting the place of lane {self._lease.lane}"):
                row = self._connection.execute(self._placed, {**position(at), **self._mine()}).fetchone()
            if row is None:
                raise self._lost(0)
        self._unplaced = False
        return True

    def _leave_stream(self, channel: Channel) -> None:
        self.flush()
        self._write_streaming(False)
        channel.rewind((-1, -1), ())
        self._around = True

    def _enter_stream(self) -> None:
        self._write_streaming(True)
        self._horizon, self._target_lsn = None, None
        self._failures_at = time.monotonic()

    def _write_streaming(self, streaming: bool) -> None:
        with unavailable_on_error(f"noting the state of lane {self._lease.lane}"):
            row = self._connection.execute(self._set_streaming, {"streaming": streaming, **self._mine()}).fetchone()
        if row is None:
            raise self._lost(0)
        self._streaming = streaming
        failpoint("stream.entered" if streaming else "stream.left")

    # From the table

    def _from_table(self, channel: Channel, limit: int) -> Sequence[Claim]:
        if self._horizon is None:
            self._drop(channel)
        else:
            # The next session begins when all lanes have joined it: the others must not wait for our table.
            channel.check()
        rows = self._poll(limit)
        if self._around:
            self._horizon = self._target_lsn = None
        elif self._horizon is None:
            # Not before the table is nearly empty: what is kept meanwhile takes room in the stream from other lanes.
            if len(rows) < limit:
                self._catch_up(channel)
        elif not rows or rows[0].position > self._horizon:
            # What was read just now comes again, from the stream; or after what hides below the floor.
            if self._any_up_to(self._horizon):
                self._floor = Floor()
            else:
                self._enter_stream()
            return ()
        if not rows and self._horizon is None:
            channel.wait(self._wait_seconds)
        return rows

    def _catch_up(self, channel: Channel) -> None:
        """Stop dropping, if the stream is ours and has been read nearly to its end.

        Ours: whoever read it before may have dropped what nobody has published. To its end: until a slot that was not
        read for long has given all that, events go out of the table at once.
        """
        if not channel.running:
            return
        if self._target_lsn is None:
            self._target_lsn = self._ask(self._lowest)[1]
        if channel.read_lsn >= self._target_lsn and self._old_ones_have_ended():
            self._horizon = self._highest()

    def _drop(self, channel: Channel) -> None:
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
        self._pause = _FIRST_PAUSE_SECONDS
        if any(claim.position < 0 for claim in dropped):
            self.flush()
            self._write_to_table(dropped)
        channel.done(dropped)

    def _highest(self) -> int:
        return int(self._ask(self._highest_id)[0])

    def _any_up_to(self, id_: int) -> bool:
        """Whether the table has an event up to an id, be it below the floor."""
        return bool(self._ask(self._up_to, id=id_)[0])

    def _old_ones_have_ended(self) -> bool:
        """Whether no transaction is open that could have committed before the slot begins, and is not visible yet."""
        return bool(self._ask(self._old_ended)[0])

    def _ask(self, query: sql.Composed, **more: int) -> Any:
        with unavailable_on_error(f"looking at lane {self._lease.lane}"):
            row = self._connection.execute(query, self._mine() | more).fetchone()
        assert row is not None
        return row

    # To the table

    def _resolve(
        self, batch: Sequence[Claim], receipt: Receipt, published: set[int], refused: list[tuple[Claim, str]]
    ) -> None:
        """Settle what is published, record what is refused, and leave the rest of the batch to the table."""
        lane = self._lease.lane
        asked_at = time.monotonic()
        pending = self._pending = replace(Pending.of(receipt, batch[-1].at), claims=())
        left = [claim for claim in batch if claim.position < 0 and claim.position not in published]
        dead: list[Claim] = []
        with self._transaction(f"settling lane {lane}"):
            held = self._connection.execute(self._queries.settle, self._settling_values(pending)).fetchone()
            if held is not None:
                rows = {claim.position: row for claim, row in zip(left, self._spilled(left), strict=True)}
                moved = [(rows.get(claim.position, claim), reason) for claim, reason in refused]
                dead = self._failures.record(self._connection, lane, moved) if moved else []
                self._connection.execute(self._set_streaming, {"streaming": False, **self._mine()})
        self._settled(held is not None, asked_at)
        self._streaming, self._around = False, True
        assert self._channel is not None
        self._channel.done(batch)
        for claim in dead:
            self._on_dead(claim)

    def _bury(self, channel: Channel, claim: Claim) -> None:
        """Keep what can't be read as a dead letter."""
        self._write_to_table([claim])
        channel.done([claim])

    def _write_to_table(self, claims: Sequence[Claim]) -> None:
        """Give events without a row one, and note that the stream is used up to the last of the claims."""
        lane, at = self._lease.lane, claims[-1].at
        with self._transaction(f"writing events of lane {lane}"):
            values = self._settling_values(Pending(at=at))
            held = self._connection.execute(self._queries.settle, values).fetchone()
            if held is None:
                raise self._lost(0)
            rows = self._spilled([claim for claim in claims if claim.position < 0])
            unreadable = [row for row in rows if row.aggregate_type == UNREADABLE]
            if unreadable:
                self._failures.bury_at_once(self._connection, lane, unreadable)
        failpoint("stream.spilled")
        for row in unreadable:
            self._on_dead(row)

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

    def _settled(self, held: bool, asked_at: float) -> None:
        pending = self._pending
        super()._settled(held, asked_at)
        if pending is not None and self._channel is not None:
            self._channel.done([claim for claim in pending.claims if claim.at is not None])

    def _mine(self) -> dict[str, int]:
        return {"lane": self._lease.lane, "epoch": self._lease.epoch}
