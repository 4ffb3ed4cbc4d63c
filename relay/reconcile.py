"""When marker and table contradict each other: look at the topics themselves, and begin anew from what they hold.

A lane that stopped with StateLost does not know which of its rows are on Kafka. The topics do: every event carries its
id. So for each such lane the rows still in the outbox are looked up in their topics (read_committed, from shortly
before the oldest of them was written); those found are settled, and a fresh marker is written. Events that Kafka has
and Postgres has lost are beyond this: they were published, and their business rows are gone. So are events whose
messages the topic's retention has deleted: they would be published again.

Applying it fences the lane first, in Postgres (epoch) and in Kafka (transactional.id): it may run beside relays.

| killed                                    | what follows                                                   |
|-------------------------------------------|----------------------------------------------------------------|
| before the rows are settled               | nothing has changed but the epoch; the lane is still stopped   |
| settled, new marker not written           | the lane is still stopped; running it again finishes           |
| marker written, last_batch not            | the same: marker and last_batch still contradict, or agree     |
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from psycopg import sql
from psycopg.types.json import Jsonb

from outbox.errors import OutboxError
from outbox.event import CE_ID, DEAD_LETTER, REPLAY
from relay.database import unavailable_on_error
from relay.marker import Marker, StateLost, resume
from relay.ports import Claim, Unavailable
from relay.routing import NoRoute, Router
from relay.sending import silent, text_of
from relay.transactions import StateTopic

_LEASE: Final = "10 minutes"
_MARGIN: Final = dt.timedelta(hours=1)
"""The relay stamps messages with its own clock, rows have the database's."""
_KAFKA_SECONDS: Final = 30.0

_LANES: Final = """
SELECT lane, epoch, last_batch, owner, (SELECT system_identifier::text FROM pg_control_system()),
       ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int
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
UPDATE {lanes} SET last_batch = %s, owner = NULL, lease_until = '-infinity'
 WHERE lane = %s AND epoch = %s RETURNING 1"""

_AUDIT: Final = "INSERT INTO {audit} (what, why, details) VALUES ('reconcile', %s, %s)"


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
    """Compares and, if told to, repairs. ``client_options`` are for reading, ``producer_options`` the relay's own."""

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        schema: str,
        name: str,
        router: Router,
        state: StateTopic,
        client_options: Mapping[str, str],
        producer_options: Mapping[str, Any],
    ) -> None:
        self._connection = connect()
        self._name = name
        self._router = router
        self._state = state
        self._client = dict(client_options)
        self._producer = dict(producer_options)
        tables = ("events", "lanes", "failures", "audit")
        self._names = {table: sql.Identifier(schema, table) for table in tables}

    def look(self) -> list[LaneState]:
        """Compare every lane. Raises Unavailable when Postgres or Kafka is away."""
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

    def _lanes(self) -> dict[int, tuple[int, int | None, str, int]]:
        """Lane to epoch, last batch, system identifier and timeline."""
        with unavailable_on_error("reading lanes"):
            rows = self._connection.execute(sql.SQL(_LANES).format(**self._names)).fetchall()
        return {lane: (epoch, last_batch, system, timeline) for lane, epoch, last_batch, _, system, timeline in rows}

    def _look(self, lane: int) -> LaneState:
        while True:
            _, last_batch, system, _ = self._lanes()[lane]
            marker, problem = self._compare(lane, last_batch, system)
            # A relay at work moves both; only what stands still can contradict.
            if problem is None or self._lanes()[lane][1] == last_batch:
                break
        rows = len(self._rows(lane))
        found = self._found(lane) if problem is not None else []
        return LaneState(lane, last_batch, marker.batch if marker is not None else None, problem, rows, found)

    def _compare(self, lane: int, last_batch: int | None, system: str) -> tuple[Marker | None, str | None]:
        """Give the marker, and why a relay would stop on the lane."""
        marker: Marker | None = None
        try:
            marker = self._state.last_marker(lane)
            resume(lane, last_batch, marker, system)
        except StateLost as error:
            return marker, str(error)
        if marker is not None and last_batch is not None and marker.batch != last_batch:
            there = {(claim.position, claim.event_id) for claim, _ in self._rows(lane)}
            gone = len(set(zip(marker.positions, marker.event_ids, strict=True)) - there)
            if gone:
                return marker, f"lane {lane}: Kafka holds {gone} events of batch {marker.batch} that Postgres has lost"
        return marker, None

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
        _, _, system, timeline = self._lanes()[state.lane]
        fresh = Marker(state.next_batch, epoch, system, timeline)
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
        self._release(state.lane, fresh.batch, epoch)
        return LaneState(state.lane, fresh.batch, fresh.batch, None, state.rows - len(settled), settled)

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

    def _release(self, lane: int, batch: int, epoch: int) -> None:
        with unavailable_on_error(f"releasing lane {lane}"):
            done = self._connection.execute(sql.SQL(_DONE).format(**self._names), (batch, lane, epoch)).fetchone()
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
