"""When marker and table contradict each other: look at the topics themselves, and begin anew from what they hold.

A lane that stopped with StateLost does not know which of its rows are on Kafka. The topics do: every event carries its
id. So for each such lane the rows still in the outbox are looked up in their topics (read_committed, from shortly
before the oldest of them was written); those found are settled, and a fresh marker is written. Events that Kafka has
and Postgres has lost are beyond this: they were published, and their business rows are gone. So are events whose
messages the topic's retention has deleted: they would be published again.

Of events from the WAL the marker says how far they are published; that is carried over, as far as this server's history
goes with the marker's. An event without a row that both have is so known to be published, or comes from the stream.
Where no marker is left, events without a row that the last batch had may be published again.

Applying it fences the lane first, in Postgres (epoch) and in Kafka (transactional.id): it may run beside relays.

| killed                                    | what follows                                                   |
|-------------------------------------------|----------------------------------------------------------------|
| before the rows are settled               | nothing has changed but the epoch; the lane is still stopped   |
| settled, new marker not written           | the lane is still stopped; running it again finishes           |
| marker written, last_batch not            | the same: marker and last_batch still contradict, or agree     |
"""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from psycopg import errors, sql
from psycopg.types.json import Jsonb

from outbox.errors import OutboxError, SchemaError
from outbox.event import CE_ID, DEAD_LETTER, REPLAY
from relay.database import FURTHER, TIMELINE, unavailable_on_error
from relay.marker import Marker, StateLost, resume
from relay.polling import position
from relay.ports import At, Claim, Unavailable, up_to
from relay.routing import NoRoute, Router
from relay.sending import silent, text_of
from relay.transactions import StateTopic
from relay.wal import Replication, lsn_text

_LEASE: Final = "10 minutes"
_MARGIN: Final = dt.timedelta(hours=1)
"""The relay stamps messages with its own clock, rows have the database's."""
_KAFKA_SECONDS: Final = 30.0

_LANES: Final = """
SELECT lane, last_batch, (SELECT system_identifier::text FROM pg_control_system()),
       {timeline},
       (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint
  FROM {lanes} ORDER BY lane"""

_ROWS: Final = """
SELECT id, event_id::text, aggregate_type, aggregate_id, event_type, '', NULL, headers, created_at
  FROM {events} WHERE lane = %s ORDER BY id"""

_TAKE: Final = """
UPDATE {lanes} SET owner = 'reconcile', epoch = epoch + 1, lease_until = clock_timestamp() + %s::interval
 WHERE lane = %s RETURNING epoch"""

_SETTLE: Final = """
DELETE FROM {events} AS e USING unnest(%s::bigint[], %s::uuid[]) AS p(id, event_id)
 WHERE e.lane = %s AND e.id = p.id AND e.event_id = p.event_id"""

_KEEP: Final = """
UPDATE {lanes} SET lease_until = clock_timestamp() + %s::interval WHERE lane = %s AND epoch = %s RETURNING 1"""

_FORGET: Final = "DELETE FROM {failures} WHERE lane = %s AND id = ANY(%s::bigint[])"

_DONE: Final = """
UPDATE {lanes} SET last_batch = %(batch)s, owner = NULL, lease_until = '-infinity',
       {further}
 WHERE lane = %(lane)s AND epoch = %(epoch)s RETURNING 1"""

_AUDIT: Final = "INSERT INTO {audit} (what, why, details) VALUES ('reconcile', %s, %s)"


class _Lane(NamedTuple):
    last_batch: int | None
    system: str
    timeline: int
    insert_lsn: int


Key = tuple[str, str]
"""An event id, and the mark that tells a replay or a dead-letter copy from the event itself."""


class LaneBusy(OutboxError):
    """Another relay or another reconcile took the lane meanwhile."""


@dataclass(frozen=True, slots=True)
class LaneState:
    """One lane, as table, marker and topics show it.

    ``problem`` is why a relay would stop on it, None when it would not. ``rows`` are in the outbox; of those, ``found``
    are on Kafka already (looked up only when there is a problem).
    """

    lane: int
    last_batch: int | None
    marker_batch: int | None
    problem: str | None
    rows: int
    found: Sequence[tuple[int, str]]

    @property
    def next_batch(self) -> int:
        """The batch number to begin anew from: beyond any that either side knows."""
        return max(self.last_batch or 0, self.marker_batch or 0) + 1


class Reconciler:
    """Compares and, if told to, repairs. ``client_options`` are for reading, ``producer_options`` the relay's own.

    ``replicate`` is asked only after a failover, and only when events came from the WAL: where did the timelines part?
    """

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        schema: str,
        name: str,
        router: Router,
        state: StateTopic,
        client_options: Mapping[str, str],
        producer_options: Mapping[str, Any],
        replicate: Callable[[], Replication],
    ) -> None:
        self._connection = connect()
        self._name = name
        self._router = router
        self._state = state
        self._client = dict(client_options)
        self._producer = dict(producer_options)
        self._replicate = replicate
        self._ended: dict[int, int] | None = None
        tables = ("events", "lanes", "failures", "audit")
        self._names: dict[str, sql.Composable] = {table: sql.Identifier(schema, table) for table in tables}
        self._names["timeline"], self._names["further"] = sql.SQL(TIMELINE), sql.SQL(FURTHER)

    def look(self) -> list[LaneState]:
        """Compare every lane. Raises Unavailable when Postgres or Kafka is away, SchemaError on a standby."""
        return [self._look(lane) for lane in self._lanes()]

    def repair(self, states: Sequence[LaneState], reason: str) -> list[LaneState]:
        """Fence the lanes that have a problem, settle what stands on Kafka, write fresh markers.

        Gives these lanes as they are now. Raises LaneBusy when somebody took one meanwhile, and SchemaError without the
        rights of the tables' owner; running it again is safe.
        """
        broken = [state for state in states if state.problem is not None]
        # The line in the audit first: whoever may not write it shall not begin.
        self._audit(broken, reason)
        self._state.require(len(self._lanes()))
        # All before the first look: an open transaction of one lane hides what another has committed behind it.
        fenced = [(state, self._take(state.lane), self._fence(state.lane)) for state in broken]
        return [self._repair(state, epoch, producer) for state, epoch, producer in fenced]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _lanes(self) -> dict[int, _Lane]:
        with unavailable_on_error("reading lanes"):
            try:
                rows = self._connection.execute(sql.SQL(_LANES).format(**self._names)).fetchall()
            except errors.ObjectNotInPrerequisiteState as error:
                raise SchemaError(
                    "this server is a standby: run this on the primary, or promote this one first"
                ) from error
        return {lane: _Lane(*values) for lane, *values in rows}

    def _look(self, lane: int) -> LaneState:
        while True:
            seen = self._lanes()[lane]
            marker, problem = self._compare(lane, seen)
            # A relay at work moves both; only what stands still can contradict.
            if problem is None or self._lanes()[lane].last_batch == seen.last_batch:
                break
        rows = len(self._rows(lane))
        found = self._found(lane) if problem is not None else []
        return LaneState(lane, seen.last_batch, marker.batch if marker is not None else None, problem, rows, found)

    def _compare(self, lane: int, seen: _Lane) -> tuple[Marker | None, str | None]:
        """Give the marker, and why a relay would stop on the lane."""
        marker: Marker | None = None
        try:
            marker = self._state.last_marker(lane)
            resume(lane, seen.last_batch, marker, seen.system, seen.timeline)
        except StateLost as error:
            return marker, str(error)
        if marker is None:
            return marker, None
        if seen.last_batch is not None and marker.batch != seen.last_batch:
            there = {(claim.position, claim.event_id) for claim, _ in self._rows(lane)}
            # A negative position is an event without a row.
            named = {pair for pair in zip(marker.positions, marker.event_ids, strict=True) if pair[0] > 0}
            gone = len(named - there)
            if gone:
                return marker, f"lane {lane}: Kafka holds {gone} events of batch {marker.batch} that Postgres has lost"
        if marker.stream is not None:
            end = self._end_of(marker.timeline, seen)
            if marker.stream.commit_lsn >= (seen.insert_lsn if end is None else end):
                return marker, (
                    f"lane {lane}: Kafka holds events up to {lsn_text(marker.stream.commit_lsn)} of timeline "
                    f"{marker.timeline}, of which this server, on timeline {seen.timeline}, has the WAL up to "
                    f"{lsn_text(seen.insert_lsn if end is None else end)} only: it has lost commits"
                )
        return marker, None

    def _end_of(self, timeline: int, seen: _Lane) -> int | None:
        """Where a timeline ended in this server's history; None when it is its own, or none of its history."""
        if timeline == seen.timeline:
            return None
        if self._ended is None:
            replication = self._replicate()
            try:
                self._ended = {switch.timeline: switch.lsn for switch in replication.switches(seen.timeline)}
            finally:
                replication.close()
        return self._ended.get(timeline)

    def _published(self, marker: Marker | None, seen: _Lane) -> At | None:
        """Up to where this server's stream is on Kafka, if the marker says more than ``lanes`` can know."""
        if marker is None or marker.stream is None or marker.system_identifier != seen.system:
            return None
        # On the same timeline, this server may be an older copy of itself: its WAL then says other things there now.
        end = self._end_of(marker.timeline, seen)
        if end is None:
            return None
        return up_to(marker.stream, end)

    def _take(self, lane: int) -> int:
        with unavailable_on_error(f"taking lane {lane}"):
            row = self._connection.execute(sql.SQL(_TAKE).format(**self._names), (_LEASE, lane)).fetchone()
        assert row is not None
        epoch: int = row[0]
        return epoch

    def _fence(self, lane: int) -> Producer:
        try:
            producer = Producer({**self._producer, "transactional.id": f"{self._name}.relay.{lane}"}, logger=silent())
            producer.init_transactions(_KAFKA_SECONDS)
        except KafkaException as error:
            raise Unavailable(f"Kafka, fencing lane {lane}: {text_of(error)}") from error
        return producer

    def _repair(self, state: LaneState, epoch: int, producer: Producer) -> LaneState:
        # The others are fenced: the marker that is there now is the last that one of them has written.
        fresh = self._fresh(state, epoch)
        settled: list[tuple[int, str]] = []
        # A relay that was just taking the lane over may fence us once; it finds its epoch over, and stays away.
        for last in (False, False, True):
            try:
                # Again, now that nobody else can publish: what was under way has been committed or aborted.
                found = self._found(state.lane)
                self._settle(state.lane, epoch, found)
                settled += found
                producer.begin_transaction()
                producer.produce(self._state.name, fresh.encode(), b"marker", partition=state.lane)
                producer.commit_transaction(_KAFKA_SECONDS)
                break
            except KafkaException as error:
                if last:
                    raise Unavailable(f"Kafka, reconciling lane {state.lane}: {text_of(error)}") from error
                producer.purge()
                producer = self._fence(state.lane)
        self._release(state.lane, epoch, fresh)
        return LaneState(state.lane, fresh.batch, fresh.batch, None, state.rows - len(settled), settled)

    def _fresh(self, state: LaneState, epoch: int) -> Marker:
        """Give the marker to begin anew from. Of what has no row, the last one's events stay known by their ids."""
        seen = self._lanes()[state.lane]
        last: Marker | None = None
        with contextlib.suppress(StateLost):
            last = self._state.last_marker(state.lane)
        names: list[tuple[int, str]] = []
        if last is not None and last.system_identifier == seen.system:
            pairs = zip(last.positions, last.event_ids, strict=True)
            names = [(position, event_id) for position, event_id in pairs if position < 0]
        return Marker(
            max(state.next_batch, 0 if last is None else last.batch + 1),
            epoch,
            seen.system,
            seen.timeline,
            tuple(position for position, _ in names),
            tuple(event_id for _, event_id in names),
            self._published(last, seen),
        )

    def _rows(self, lane: int) -> list[tuple[Claim, dt.datetime]]:
        with unavailable_on_error("reading events"):
            rows = self._connection.execute(sql.SQL(_ROWS).format(**self._names), (lane,)).fetchall()
        return [(Claim(*row[:8]), row[8]) for row in rows]

    def _found(self, lane: int) -> list[tuple[int, str]]:
        """Say which of the lane's rows stand on Kafka.

        A replay, or a copy for a dead-letter topic, has its event's id too, and is told from it by its header.
        """
        rows = self._rows(lane)
        wanted: dict[str, dict[Key, int]] = {}
        oldest: dict[str, dt.datetime] = {}
        for claim, created_at in rows:
            try:
                topic = self._router.topic(claim)
            except NoRoute:
                continue
            wanted.setdefault(topic, {})[claim.event_id, _mark(claim)] = claim.position
            oldest[topic] = min(oldest.get(topic, created_at), created_at)
        found: list[tuple[int, str]] = []
        for topic, ids in wanted.items():
            found += [(ids[key], key[0]) for key in self._on_kafka(topic, oldest[topic], ids.keys())]
        return sorted(found)

    def _on_kafka(self, topic: str, since: dt.datetime, wanted: AbstractSet[Key]) -> set[Key]:
        consumer = Consumer(
            {
                **self._client,
                "group.id": "outbox-reconcile",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "allow.auto.create.topics": False,
            },
            logger=silent(),
        )
        try:
            return self._scan(consumer, topic, since, wanted)
        except KafkaException as error:
            raise Unavailable(f"Kafka, reading {topic!r}: {text_of(error)}") from error
        finally:
            consumer.close()

    def _scan(self, consumer: Consumer, topic: str, since: dt.datetime, wanted: AbstractSet[Key]) -> set[Key]:
        there = consumer.list_topics(timeout=_KAFKA_SECONDS).topics.get(topic)
        if there is None:
            return set()
        from_time = int((since - _MARGIN).timestamp() * 1000)
        starts = consumer.offsets_for_times(
            [TopicPartition(topic, partition, from_time) for partition in there.partitions], timeout=_KAFKA_SECONDS
        )
        ends = self._ends(starts)
        # A negative offset says that nothing is as young as that.
        starts = [start for start in starts if start.offset >= 0 and start.offset < ends[start.partition]]
        consumer.assign(starts)
        return self._until(consumer, topic, {start.partition for start in starts}, ends, wanted)

    def _until(
        self, consumer: Consumer, topic: str, unread: set[int], ends: Mapping[int, int], wanted: AbstractSet[Key]
    ) -> set[Key]:
        """Read the partitions to their ends; give what is wanted and found."""
        found: set[Key] = set()
        heard = time.monotonic()
        while unread:
            message = consumer.poll(1.0)
            if message is None:
                if time.monotonic() - heard > _KAFKA_SECONDS:
                    raise Unavailable(
                        f"Kafka: {topic!r} could not be read to its end; is a transaction of another producer open?"
                    )
                continue
            heard = time.monotonic()
            error = message.error()
            if error is None:
                headers = dict(message.headers() or ())
                key = (_text(headers.get(CE_ID)), _text(headers.get(REPLAY) or headers.get(DEAD_LETTER)))
                if key in wanted:
                    found.add(key)
            elif error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
            elif (message.offset() or 0) >= ends[message.partition() or 0]:
                unread.discard(message.partition() or 0)
        return found

    def _ends(self, partitions: Sequence[TopicPartition]) -> dict[int, int]:
        """Where each partition ends, open transactions included: a committed event may stand behind one."""
        for partition in partitions:
            if partition.error is not None:
                raise KafkaException(partition.error)
        consumer = Consumer(
            {**self._client, "group.id": "outbox-reconcile", "isolation.level": "read_uncommitted"}, logger=silent()
        )
        try:
            return {
                partition.partition: consumer.get_watermark_offsets(partition, timeout=_KAFKA_SECONDS)[1]
                for partition in partitions
            }
        finally:
            consumer.close()

    def _settle(self, lane: int, epoch: int, found: Sequence[tuple[int, str]]) -> None:
        """Under the lane's row, and only while the lane is still ours: a marker that came after would be a lie."""
        ids, event_ids = [id_ for id_, _ in found], [event_id for _, event_id in found]
        with unavailable_on_error(f"settling lane {lane}"), self._connection.transaction():
            self._connection.execute("SET LOCAL idle_in_transaction_session_timeout = '10s'")
            held = self._connection.execute(sql.SQL(_KEEP).format(**self._names), (_LEASE, lane, epoch)).fetchone()
            if held is None:
                raise LaneBusy(f"lane {lane} was taken by somebody else meanwhile; run this again")
            self._connection.execute(sql.SQL(_SETTLE).format(**self._names), (ids, event_ids, lane))
            self._connection.execute(sql.SQL(_FORGET).format(**self._names), (lane, ids))

    def _release(self, lane: int, epoch: int, fresh: Marker) -> None:
        values = {"lane": lane, "epoch": epoch, "batch": fresh.batch, **position(fresh.stream)}
        with unavailable_on_error(f"releasing lane {lane}"):
            done = self._connection.execute(sql.SQL(_DONE).format(**self._names), values).fetchone()
        if done is None:
            raise LaneBusy(f"lane {lane} was taken by somebody else meanwhile; run this again")

    def _audit(self, states: Sequence[LaneState], reason: str) -> None:
        with unavailable_on_error("writing the audit"), self._connection.transaction():
            for state in states:
                details = {
                    "lane": state.lane,
                    "problem": state.problem,
                    "batch": state.next_batch,
                    "event_ids_on_kafka": [event_id for _, event_id in state.found],
                }
                self._connection.execute(sql.SQL(_AUDIT).format(**self._names), (reason, Jsonb(details)))


def _mark(claim: Claim) -> str:
    headers = claim.headers or {}
    return headers.get(REPLAY) or headers.get(DEAD_LETTER) or ""


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
