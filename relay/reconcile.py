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
 WHERE e.lane = %s AND e.id = p.id AND e.event_id = p.event_id
   AND EXISTS (SELECT FROM {lanes} WHERE lane = %s AND epoch = %s)"""

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
        with unavailable_on_error("reading lanes"):
            lanes = self._connection.execute(sql.SQL(_LANES).format(**self._names)).fetchall()
        return [self._look(lane, last_batch, system) for lane, _, last_batch, _, system, _ in lanes]

    def repair(self, state: LaneState, reason: str) -> LaneState:
        """Fence the lane, settle what stands on Kafka, write a fresh marker. Gives the lane as it was under the fence.

        Raises LaneBusy when somebody took the lane meanwhile; running it again is safe.
        """
        with unavailable_on_error(f"taking lane {state.lane}"):
            row = self._connection.execute(sql.SQL(_TAKE).format(**self._names), (_LEASE, state.lane)).fetchone()
            identity = self._connection.execute(sql.SQL(_LANES).format(**self._names)).fetchall()
        assert row is not None
        epoch: int = row[0]
        system, timeline = next((entry[4], entry[5]) for entry in identity if entry[0] == state.lane)
        self._state.require(len(identity))
        fresh = Marker(state.next_batch, epoch, system, timeline)
        found = self._begin_anew(state.lane, fresh)
        self._finish(state, epoch, found, reason)
        return LaneState(state.lane, fresh.batch, fresh.batch, None, state.rows - len(found), found)

    def _begin_anew(self, lane: int, fresh: Marker) -> list[tuple[int, str]]:
        """Settle what stands on Kafka and write the marker; give what was settled.

        A relay that was just taking the lane over may fence us once: it finds its epoch over, and does not come again.
        """
        settled: list[tuple[int, str]] = []
        for last in (False, False, True):
            producer = Producer({**self._producer, "transactional.id": f"{self._name}.relay.{lane}"}, logger=silent())
            try:
                producer.init_transactions(_KAFKA_SECONDS)
                # Again, now that nobody else can publish: what was under way has been committed or aborted.
                found = self._found(lane)
                self._settle(lane, fresh.epoch, found)
                settled += found
                producer.begin_transaction()
                producer.produce(self._state.name, fresh.encode(), b"marker", partition=lane)
                producer.commit_transaction(_KAFKA_SECONDS)
                break
            except KafkaException as error:
                if last:
                    raise Unavailable(f"Kafka, reconciling lane {lane}: {text_of(error)}") from error
            finally:
                producer.purge()
        return settled

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _look(self, lane: int, last_batch: int | None, system: str) -> LaneState:
        marker: Marker | None = None
        problem: str | None = None
        try:
            marker = self._state.last_marker(lane)
            resume(lane, last_batch, marker, system)
        except StateLost as error:
            problem = str(error)
        with unavailable_on_error("counting events"):
            rows = len(self._rows(lane))
        found = self._found(lane) if problem is not None else []
        return LaneState(lane, last_batch, marker.batch if marker is not None else None, problem, rows, found)

    def _rows(self, lane: int) -> list[tuple[Claim, dt.datetime]]:
        rows = self._connection.execute(sql.SQL(_ROWS).format(**self._names), (lane,)).fetchall()
        return [(Claim(*row[:8]), row[8]) for row in rows]

    def _found(self, lane: int) -> list[tuple[int, str]]:
        """Say which of the lane's rows stand on Kafka.

        A replay, or a copy for a dead-letter topic, has its event's id too, and is told from it by its header.
        """
        with unavailable_on_error("reading events"):
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
        found: set[Key] = set()
        there = consumer.list_topics(timeout=_KAFKA_SECONDS).topics.get(topic)
        if there is None:
            return found
        from_time = int((since - _MARGIN).timestamp() * 1000)
        starts = consumer.offsets_for_times(
            [TopicPartition(topic, partition, from_time) for partition in there.partitions], timeout=_KAFKA_SECONDS
        )
        ends = {start.partition: consumer.get_watermark_offsets(start, timeout=_KAFKA_SECONDS)[1] for start in starts}
        # A negative offset says that nothing is as young as that.
        starts = [start for start in starts if start.offset >= 0 and start.offset < ends[start.partition]]
        consumer.assign(starts)
        unread = {start.partition for start in starts}
        heard = time.monotonic()
        while unread:
            message = consumer.poll(1.0)
            if message is None:
                if time.monotonic() - heard > _KAFKA_SECONDS:
                    raise Unavailable(f"Kafka: {topic!r} could not be read to its end")
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

    def _settle(self, lane: int, epoch: int, found: Sequence[tuple[int, str]]) -> None:
        ids, event_ids = [id_ for id_, _ in found], [event_id for _, event_id in found]
        with unavailable_on_error(f"settling lane {lane}"), self._connection.transaction():
            self._connection.execute(sql.SQL(_SETTLE).format(**self._names), (ids, event_ids, lane, lane, epoch))
            self._connection.execute(sql.SQL(_FORGET).format(**self._names), (lane, ids))

    def _finish(self, state: LaneState, epoch: int, found: Sequence[tuple[int, str]], reason: str) -> None:
        details = {
            "lane": state.lane,
            "problem": state.problem,
            "batch": state.next_batch,
            "settled_event_ids": [event_id for _, event_id in found],
        }
        with unavailable_on_error(f"releasing lane {state.lane}"), self._connection.transaction():
            done = self._connection.execute(
                sql.SQL(_DONE).format(**self._names), (state.next_batch, state.lane, epoch)
            ).fetchone()
            if done is None:
                raise LaneBusy(f"lane {state.lane} was taken by somebody else meanwhile; run this again")
            self._connection.execute(sql.SQL(_AUDIT).format(**self._names), (reason, Jsonb(details)))


def _mark(claim: Claim) -> str:
    headers = claim.headers or {}
    return headers.get(REPLAY) or headers.get(DEAD_LETTER) or ""


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
