"""Consume Kafka with the positions in Postgres: each message's effect is committed once, in order per key.

    Consumer(url, ["order-events"], group="billing", kafka={"bootstrap.servers": "…"}).run(handle)

``handle(connection, message)`` is called in a transaction that also moves the partition's position and remembers the
ids of the messages. Kafka divides the partitions among the members of a group. A member that gets one claims its row:
the claim's generation is the fencing token, and the position in the row is where the member reads on, whatever Kafka
has stored for the group.

    Kafka assigns ─> claim: generation + 1, read the position ─> seek ─> ┌─ batch: lock the row, compare generation and
                         ^                                               │  position; ids; handler; move; COMMIT
                         └─────── fenced, and Kafka still assigns it ────┴──> Kafka revokes: forget what was fetched

| what happens                                | what follows                                                         |
|---------------------------------------------|----------------------------------------------------------------------|
| killed before COMMIT                        | rolled back with the position; the next member begins there          |
| killed after COMMIT                         | the position has moved; nothing is applied again                     |
| the answer to COMMIT is lost                | the row shows whether it moved: then it is claimed again, and the    |
|                                             | keys that have dead letters are read again with it                   |
| rebalance between two transactions          | what was fetched is forgotten; the next member claims, and fences    |
| rebalance during a transaction              | the claim waits for its end, and begins behind it                    |
| sleep beyond the session's time-out, outside| others have claimed: its next transaction finds another generation,  |
|   a transaction                             | changes nothing, and Kafka reports its partitions as lost            |
| … inside a transaction                      | Postgres ends it after ``idle_seconds``, and frees the row           |
| a sleeper claims before Kafka reports that  | the rightful member is fenced, claims again, and fences the sleeper  |
| Postgres away, without disk, memory or      | nothing is applied; retried with backoff, and Kafka is still polled  |
|   connections                               |                                                                      |
| Kafka away                                  | nothing comes; librdkafka connects again                             |
| … or it refuses the client                  | see ``consumer.member_clients``; its end is KafkaFailed              |
| partitions are added while a member with a  | the first of these members leaves the group, and joins it again: see |
|   ``group.instance.id``, which led the      | ``consumer.static_groups``                                           |
|   group, is away                            |                                                                      |
| Postgres fails over to a replica that lacks | effects, ids and positions go back together: all is read again       |
|   the last transactions                     |                                                                      |
| … and the old primary goes on, unnoticed    | each session is replaced after five minutes, and finds the new one   |
| a position that Kafka no longer has         | PositionLost: recorded in ``losses``, nothing is skipped             |
| a log that was cut before it and grew again | the same, by the leader epoch that is stored with the position       |
| topic created again                         | TopicReplaced, at a claim and while it runs                          |
| a partition of a topic that the group knows | the others are claimed, and that one when it has: then it is known   |
|   has no leader                             | whether its log is whole; one that was added begins at 0             |
| a message always ends its session or        | after a few interruptions in a row each counts as an attempt of the  |
|   transaction, as by transaction_timeout    | message: see Strikes in consumer/postgres_errors.py                  |
| the handler fails                           | retried; then HandlerFailed, or a dead letter with all later         |
|                                             | messages of its key behind it                                        |
| the handler hides a database error          | the same: the transaction can't be committed any more                |
| the handler executes COMMIT                 | the position has moved: its message and the rest of the batch are    |
|                                             | recorded as lost; HandlerFailed                                      |

At-most-once, see ``_at_most_once``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Event
from typing import Any, Final, cast

import confluent_kafka
import psycopg
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from outbox._clients.backoff import pause
from outbox.consumer.delays import TopicDelays
from outbox.consumer.kafka_admin import of_known_topics
from outbox.consumer.member_clients import MemberClients, subscribe
from outbox.consumer.messages import checked
from outbox.consumer.model import ClaimedOffset, Partition, StoredOffset
from outbox.consumer.stalled import Watch
from outbox.consumer.static_groups import StaticGroup
from outbox.consumer.topic_ids import TopicIds
from outbox.inbox import _kafka
from outbox.inbox._applier import Applier
from outbox.inbox._assigned import Assigned, size_of
from outbox.inbox._at_most_once import AtMostOnceApplier
from outbox.inbox._message import KafkaMessage
from outbox.inbox._retries import Retries
from outbox.inbox._session import Session
from outbox.inbox._transactions import Handler, Settings
from outbox.inbox._waiting import WaitingLetters
from outbox.inbox.errors import KafkaFailed

_POLL_SECONDS: Final = 0.5
_TURN_SECONDS: Final = 1.0
_TAKEN: Final = 1_000
_TAKEN_BYTES: Final = 8 << 20
# The most that one partition queues, checked after each message. _ALL_QUEUED limits the sum: there may be hundreds.
_MOST_QUEUED: Final = 5_000
_MOST_QUEUED_BYTES: Final = 32 << 20
_ALL_QUEUED: Final = 50_000
_ALL_QUEUED_BYTES: Final = 128 << 20
_RESUME_BELOW: Final = 1 / 5
"""A paused partition is read again when this part of its limit is left."""
_UPKEEP_SECONDS: Final = 1.0
_HEARTBEAT_MS: Final = 3_000
_SILENT_SECONDS: Final = 60.0
"""Without partitions, a member counts as joined if it was not fenced for this long: librdkafka does not report more."""
_CLAIM_ATTEMPTS: Final = 8
"""How often Kafka is asked for offsets at a claim, with backoff: a broker that has just started does not know all."""


class Member:
    """One run of a consumer: a member of Kafka's group, its partitions, and its session of Postgres."""

    def __init__(
        self,
        settings: Settings,
        handler: Handler,
        stopping: Event,
        watch: Watch,
        delays: TopicDelays,
        clients: MemberClients,
    ) -> None:
        self._settings = settings
        self._watch = watch
        self._group = settings.group
        self._stopping = stopping
        self._parts: dict[Partition, Assigned] = {}
        self._stored: dict[Partition, StoredOffset] = {}
        self._generation: int | None = None
        self._upkeep_at = 0.0
        options = settings.options
        # How long a fenced member waits before it claims again: by then one that slept has noticed its loss.
        reclaim_seconds = 2 * int(options.get("heartbeat.interval.ms", _HEARTBEAT_MS)) / 1000
        strategy, protocol = options.get("partition.assignment.strategy", ""), options.get("group.protocol", "")
        # With this protocol, librdkafka does not call back a member that gets no partitions.
        self._kip_848 = str(protocol).lower() == "consumer"
        self._incremental = "cooperative" in str(strategy) or self._kip_848
        self._admin = _kafka.Admin(options)
        self._topic_ids = TopicIds(self._admin.kafka.describe)
        self._static = StaticGroup(settings.group.name, options, self._admin.kafka)
        self._session = Session(settings.connect)
        self._applier = (AtMostOnceApplier if settings.at_most_once else Applier)(
            settings,
            self._session,
            handler,
            watch,
            delays,
            log_end=self._log_end,
            reclaim_seconds=reclaim_seconds,
            stopping=stopping,
        )
        retries = Retries(settings, self._session, handler, watch, reclaim_seconds=reclaim_seconds, stopping=stopping)
        self._waiting = WaitingLetters(settings.letters, self._session, retries)
        self._assume_joined_at = math.inf
        self._clients = clients
        self._kafka = confluent_kafka.Consumer({**options, "error_cb": clients.hear})

    def run(self) -> KafkaError | None:
        """Consume. Returns the Kafka error after which only a new member can continue; None when stopped."""
        self._note_unassigned()
        self._assume_joined_at = time.monotonic() + _SILENT_SECONDS
        self._subscribe()
        while not self._stopping.is_set():
            self._fetch()
            self._clients.check()
            if self._clients.lost is not None:
                return self._clients.lost
            until = time.monotonic() + _TURN_SECONDS
            for part in list(self._parts.values()):
                self._note(part)
                self._work(part, until)
                self._note(part)
            if time.monotonic() >= self._upkeep_at:
                self._keep_up()
                self._upkeep_at = time.monotonic() + _UPKEEP_SECONDS
        self._show_positions()
        if self._generation is not None:
            with suppress(psycopg.Error), self._session.transaction() as connection:
                self._group.end(connection, self._generation)
        return None

    def _subscribe(self) -> None:
        subscribe(self._kafka, self._settings.topics, self._assigned, self._revoked, incremental=self._incremental)

    def _note_unassigned(self) -> None:
        if not self._parts and not self._kip_848:
            self._watch.unassigned(self._settings.topics)

    def _note(self, part: Assigned) -> None:
        """Note for a probe whether messages wait in a partition, and where."""
        if part.position is None:
            self._watch.waits(part.partition, None)
        elif part.queue or part.cut_off:
            self._watch.waits(part.partition, part.position.next_offset)
        else:
            self._watch.moved([part.partition])

    def close(self) -> None:
        self._kafka.close()
        self._parts.clear()
        self._session.close()

    # Kafka

    def _fetch(self) -> None:
        """Take what Kafka has fetched; wait for it if there is nothing to do."""
        # One by one: what poll() returns after a rebalance belongs to the new assignment.
        message = self._kafka.poll(self._idle_seconds())
        taken = size = 0
        while message is not None:
            error = message.error()
            # Its type says that its methods may return None; they don't for messages of a broker.
            received = cast("KafkaMessage", message)
            part = self._parts.get((received.topic(), received.partition()))
            if error is None or error.code() == KafkaError._PARTITION_EOF:
                self._clients.worked()
            if error is not None:
                self._kafka_error(part, received, error)
            elif part is not None:
                part.add(checked(received))
                # Not only after the loop: of hundreds each could have so much more than its share.
                self._limit_queues([part])
            taken, size = taken + 1, size + size_of(received)
            full = taken >= _TAKEN or size >= _TAKEN_BYTES or self._stopping.is_set()
            message = None if full else self._kafka.poll(0)
        self._limit_queues(self._parts.values())

    def _limit_queues(self, parts: Iterable[Assigned]) -> None:
        """Pause partitions with long queues: one whose messages fail must not be read into memory as a whole."""
        count = max(len(self._parts), 1)
        most, most_bytes = min(_MOST_QUEUED, _ALL_QUEUED // count), min(_MOST_QUEUED_BYTES, _ALL_QUEUED_BYTES // count)
        for part in parts:
            if not part.paused and (len(part.queue) >= most or part.size >= most_bytes):
                self._kafka.pause([TopicPartition(*part.partition)])
                part.paused = True
            elif part.paused and len(part.queue) <= most * _RESUME_BELOW and part.size <= most_bytes * _RESUME_BELOW:
                self._kafka.resume([TopicPartition(*part.partition)])
                part.paused = False

    def _idle_seconds(self) -> float:
        now = time.monotonic()
        due = [
            part.due
            for part in self._parts.values()
            if part.position is None or (part.queue and not part.letters_first)
        ]
        return max(0.0, min([now + _POLL_SECONDS, *due]) - now)

    def _kafka_error(self, part: Assigned | None, message: KafkaMessage, error: KafkaError) -> None:
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            if part is not None and part.position is not None:
                part.end = max(part.end, message.offset())
        elif code in _kafka.OUT_OF_RANGE:
            if part is not None:
                part.cut_off = True
        else:
            self._clients.judge(error, cast("Message", message))

    def _assigned(self, kafka: Any, assigned: Sequence[TopicPartition]) -> None:
        """Claim what Kafka has assigned, and begin where Postgres says. Waits while Postgres is away."""
        partitions = [(one.topic, one.partition) for one in assigned]
        claimed: dict[Partition, ClaimedOffset] | None = None
        self._watch.assigned({*self._parts, *partitions})
        self._clients.worked()
        for partition in partitions:
            self._watch.waits(partition, None)
        attempt = failures = 0
        while partitions and claimed is None and not self._stopping.is_set():
            try:
                claimed = self._claim(partitions)
            except (psycopg.Error, KafkaFailed) as error:
                if not self._hear_refusal(error) and isinstance(error, KafkaFailed):
                    failures += 1
                    if failures >= _CLAIM_ATTEMPTS:
                        raise
                self._applier.record_interruption(error, "claiming partitions", partitions)
                pause(self._stopping, attempt)
                attempt += 1
        parts = [] if claimed is None else [self._assign(partition, claimed.get(partition)) for partition in partitions]
        self._wait_for_leaders([part for part in parts if part.position is None], "claiming partitions")
        found = [TopicPartition(*part.partition, part.fetched) for part in parts]
        (kafka.incremental_assign if self._incremental else kafka.assign)(found)
        # librdkafka keeps the pause of a partition that was taken away (its issue 1849).
        kafka.resume(found)

    def _hear_refusal(self, error: BaseException) -> bool:
        """Note if Kafka refuses the credentials, which may pass, and return whether. Raises KafkaFailed if it lasts."""
        credentials = _kafka.refused_credentials(error)
        if credentials is None:
            return False
        self._clients.hear(credentials)
        self._clients.check()
        return True

    def _assign(self, partition: Partition, position: ClaimedOffset | None) -> Assigned:
        keys = set() if position is None else self._waiting.keys[partition[0]]
        # Of one that was added to its topic, nothing is stored before its first claim.
        here = position or self._stored.get(partition)
        self._parts[partition] = part = Assigned(partition, position, keys, 0 if here is None else here.next_offset)
        return part

    def _revoked(self, kafka: Any, revoked: Sequence[TopicPartition]) -> None:  # noqa: ARG002
        """Forget what was fetched of partitions that are another member's from now on."""
        for one in revoked:
            self._parts.pop((one.topic, one.partition), None)
        self._watch.moved([(one.topic, one.partition) for one in revoked])
        self._note_unassigned()

    def _claim(self, partitions: Collection[Partition]) -> dict[Partition, ClaimedOffset]:
        """Claim partitions, and return their positions. Without those that have no leader, of topics that it knows."""
        topics = {topic for topic, _ in partitions}
        with self._session.transaction() as connection:
            stored = self._group.stored(connection, topics)
        self._stored |= stored
        optional = of_known_topics(stored)
        ids, bounds = self._admin.look(topics, optional)
        starts = {
            (topic, part): (ids[topic], at.end if self._settings.at_end else at.first)
            for (topic, part), at in bounds.items()
        }
        if missing := [partition for partition in partitions if partition not in starts and not optional(partition)]:
            raise KafkaFailed(f"Kafka has assigned {missing[0][0]}-{missing[0][1]}, and does not list it")
        partitions = [partition for partition in partitions if partition in starts]
        if not partitions:
            return {}
        with self._session.transaction() as connection:
            positions = self._group.claim(connection, partitions, starts, self._settings.strategy)
            if self._settings.at_most_once:
                # After the claim, which waits for members that write dead letters.
                self._settings.letters.require_none(connection)
            keys = self._waiting.read(connection, topics)
        self._waiting.know(keys)
        self._generation = next(iter(positions.values())).generation
        self._check_positions(positions)
        return positions

    def _check_positions(self, positions: Mapping[Partition, ClaimedOffset]) -> None:
        """Record and raise what Kafka has lost after these positions. They can't move meanwhile: they are claimed."""
        if losses := self._admin.find_losses(positions):
            with self._session.transaction() as connection:
                self._group.record_losses(connection, losses)
            raise _kafka.lost(losses, positions, self._group.name)

    # Messages

    def _work(self, part: Assigned, until: float) -> None:
        """Apply the messages of a partition, and stop in time for the next poll."""
        while time.monotonic() >= part.due and not self._stopping.is_set():
            if part.position is None:
                self._reclaim_due()
            elif part.letters_first:
                return
            elif not part.queue:
                if not part.cut_off:
                    return
                # A claim finds out what is lost. If Kafka has the position after all, it is read again from there.
                part.forget_claim(time.monotonic() + _POLL_SECONDS)
            elif not self._applier.apply(part):
                return
            if time.monotonic() >= until:
                return

    def _reclaim_due(self) -> None:
        """Claim, together, all partitions that are due: their claims are lost or in doubt, or they had no leader.

        Kafka still assigns them to this member.
        """
        now = time.monotonic()
        parts = {part.partition: part for part in self._parts.values() if part.position is None and part.due <= now}
        try:
            claimed = self._claim(parts)
        except (psycopg.Error, KafkaFailed) as error:
            self._hear_refusal(error)
            self._applier.postpone(parts.values(), error, "claiming partitions again")
            return
        for partition, position in claimed.items():
            part = parts.pop(partition)
            try:
                self._seek(part, position.next_offset)
            except KafkaException as error:
                self._applier.postpone([part], error, f"claiming {part.name} again")
            else:
                part.claimed(position, self._waiting.keys[partition[0]])
        self._wait_for_leaders(list(parts.values()), "claiming partitions again")

    def _wait_for_leaders(self, parts: Sequence[Assigned], doing: str) -> None:
        if parts:
            more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
            error = KafkaFailed(f"Kafka names no leader of {parts[0].name}{more}")
            self._applier.postpone(parts, error, doing)

    def _seek(self, part: Assigned, offset: int) -> None:
        here = TopicPartition(*part.partition, offset)
        try:
            self._kafka.seek(here)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE:
                raise
            # Out of range, librdkafka has stopped reading it, until it is assigned again.
            if self._incremental:
                self._kafka.incremental_unassign([here])
                self._kafka.incremental_assign([here])
                again = [part]
            else:
                again = list(self._parts.values())
                others = [TopicPartition(*one.partition, one.fetched) for one in again if one is not part]
                self._kafka.assign([here, *others])
            self._kafka.resume([TopicPartition(*one.partition) for one in again])
            for one in again:
                one.paused = False

    # Upkeep

    def _keep_up(self) -> None:
        try:
            self._applier.forget_taken(self._parts.values())
            for part in self._parts.values():
                self._applier.pass_markers(part)
            if not self._settings.at_most_once:
                until = time.monotonic() + _TURN_SECONDS
                self._waiting.keep_up(self._parts, lambda: time.monotonic() < until and not self._stopping.is_set())
            self._check_topics()
        except (psycopg.Error, KafkaFailed) as error:
            self._applier.record_interruption(error, "upkeep")
        if self._static.needs_rebalance(self._settings.topics):
            self._kafka.unsubscribe()
            self._subscribe()
        if self._kip_848 and not self._parts and time.monotonic() >= self._assume_joined_at:
            self._watch.assigned(())
        self._show_positions()

    def _show_positions(self) -> None:
        """Show Kafka's own tools how far the group is. Nothing reads it back, so a failure does not matter."""
        found = []
        for part in self._parts.values():
            if part.position is not None and part.position.next_offset != part.shown:
                part.shown = part.position.next_offset
                found.append(TopicPartition(*part.partition, part.shown))
        if found:
            with suppress(KafkaException):
                self._kafka.commit(offsets=found, asynchronous=True)

    def _log_end(self, partition: Partition) -> int | None:
        try:
            known = self._kafka.get_watermark_offsets(TopicPartition(*partition), cached=True)
        except KafkaException:
            return None
        return known[1] if known[1] >= 0 else None

    def _check_topics(self) -> None:
        """Check from time to time that the topics are those that the group has read. Does not wait for Kafka."""
        ids = self._topic_ids.look(topic for topic, _ in self._parts)
        other = {
            part.partition: part.position
            for part in self._parts.values()
            if part.position is not None
            and ids.get(part.partition[0], part.position.topic_id) != part.position.topic_id
        }
        if other:
            self._check_positions(other)
