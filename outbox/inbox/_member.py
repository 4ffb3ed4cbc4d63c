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
| the answer to COMMIT is lost                | the row shows whether it moved: what was applied is dropped          |
| rebalance between two transactions          | what was fetched is forgotten; the next member claims, and fences    |
| rebalance during a transaction              | the claim waits for its end, and begins behind it                    |
| sleep beyond the session's time-out, outside| others have claimed: its next transaction finds another generation,  |
|   a transaction                             | changes nothing, and Kafka tells it that the partitions are lost     |
| … inside a transaction                      | Postgres ends it after ``idle_seconds``, and frees the row           |
| a sleeper claims before Kafka tells it      | the rightful member is fenced, claims again, and fences the sleeper  |
| Postgres away, without disk, memory or      | nothing is applied; tried again with backoff, and Kafka polled on    |
|   connections                               |                                                                      |
| Kafka away                                  | nothing comes; librdkafka connects again                             |
| Postgres fails over to a replica that lacks | effects, ids and positions go back together: all is read again       |
|   the last transactions                     |                                                                      |
| a position that Kafka no longer has         | PositionLost: recorded in ``losses``, nothing is skipped             |
| a log that was cut before it and grew again | the same, by the leader epoch that is stored with the position       |
| topic created again                         | TopicReplaced, at a claim and while it runs                          |
| a message always ends its session or        | after a few interruptions in a row each counts as an attempt of the  |
|   transaction, as by transaction_timeout    | message: see below                                                   |
| the handler fails                           | tried again; then HandlerFailed, or a dead letter with all that      |
|                                             | comes later of its key behind it                                     |
| the handler hides a database error          | the same: the transaction can't be committed any more                |
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event
from typing import Any, Final, cast
from uuid import UUID

import confluent_kafka
import psycopg
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from psycopg.pq import TransactionStatus

from outbox._clients.kafka_rules import is_refusal
from outbox.consumer.errors import Fenced, OffsetMoved
from outbox.consumer.groups import GroupStore
from outbox.consumer.ids import NO_TIME, day
from outbox.consumer.messages import NOT_UTF8, UndecodableHeaders, checked
from outbox.consumer.model import ClaimedOffset, Partition
from outbox.consumer.standing import Watch
from outbox.errors import SchemaError
from outbox.inbox import _kafka
from outbox.inbox._assigned import Assigned, backoff, size_of
from outbox.inbox._letters import BEHIND, LOOKED_AT, Failure, Letters, NewLetters
from outbox.inbox._message import DeadLetter, KafkaMessage
from outbox.inbox._once import too_old
from outbox.inbox.errors import HandlerFailed, KafkaFailed, MessageIdMissing, Reject
from outbox.inbox.ids import message_id

Handler = Callable[[psycopg.Connection[Any], KafkaMessage], None]

_logger: Final = logging.getLogger("outbox.inbox")

# Connections, serialization and deadlocks, a server that stops or starts, lacks resources, or is read-only.
_PASSING: Final = ("08", "40", "53", "57P", "25006")
# The server has no disk, memory or connections left. What goes beyond a configured limit (53400) may be the message's.
_EXHAUSTED: Final = frozenset(("53000", "53100", "53200", "53300"))
_SCHEMA: Final = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.InsufficientPrivilege,
)
_POLL_SECONDS: Final = 0.5
_TURN_SECONDS: Final = 1.0
_TAKEN: Final = 1_000
_TAKEN_BYTES: Final = 8 << 20
_MOST_QUEUED: Final = 5_000
_MOST_QUEUED_BYTES: Final = 32 << 20
_UPKEEP_SECONDS: Final = 1.0
_TOPIC_SECONDS: Final = 10.0
_HEARTBEAT_MS: Final = 3_000
_RETRIED_AT_ONCE: Final = 100
_AWAY: Final = (0.1, 5.0)
_MOST_STRIKES: Final = 5
"""How often in a row a transaction may be interrupted although Postgres is there, until that is its message's fault."""
_CLAIM_ATTEMPTS: Final = 8
"""How often Kafka is asked for offsets at a claim, with backoff: a broker that has just started does not know all."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``Consumer`` describes, checked. ``bury``: messages that fail become dead letters."""

    connect: Callable[[], psycopg.Connection[Any]]
    options: Mapping[str, Any]
    group: GroupStore
    letters: Letters
    topics: Sequence[str]
    batch: int
    bury: bool
    attempts: int
    wait: tuple[float, float]
    most_dead: int
    dedup: bool
    at_end: bool


class _Failed(Exception):
    """A message of a batch can't be applied: its index, and why. ``__cause__`` is the handler's error, if it is one.

    again  another attempt may succeed.
    """

    def __init__(self, index: int, failure: Failure, *, again: bool) -> None:
        super().__init__(failure.error)
        self.index = index
        self.failure = failure
        self.again = again


class Member:
    """One run of a consumer: a member of Kafka's group, its partitions, and its session of Postgres."""

    def __init__(self, settings: Settings, handler: Handler, stopping: Event, watch: Watch) -> None:
        self._settings = settings
        self._watch = watch
        self._handler = handler
        self._group, self._letters = settings.group, settings.letters
        self._stopping = stopping
        self._parts: dict[Partition, Assigned] = {}
        self._connection: psycopg.Connection[Any] | None = None
        self._generation: int | None = None
        # Of each topic, one set for all partitions; and which of these keys are to be looked at next.
        self._dead_keys: dict[str, set[bytes]] = {}
        self._keys_to_look_at: deque[tuple[str, bytes]] = deque()
        self._new_letters = NewLetters(self._letters)
        self._upkeep_at = 0.0
        self._topics_at = time.monotonic() + _TOPIC_SECONDS
        self._described: Mapping[str, Future[Any]] = {}
        options = settings.options
        # By then Kafka has told a member that slept that its partitions are lost.
        self._reclaim_seconds = 2 * int(options.get("heartbeat.interval.ms", _HEARTBEAT_MS)) / 1000
        strategy, protocol = options.get("partition.assignment.strategy", ""), options.get("group.protocol", "")
        self._incremental = "cooperative" in str(strategy) or str(protocol).lower() == "consumer"
        self._admin = _kafka.Admin(options)
        # A broker that refuses the client sends no message: librdkafka would try for ever.
        self._refusal: KafkaError | None = None
        self._kafka = confluent_kafka.Consumer({**options, "error_cb": self._noted})

    def run(self) -> None:
        """Consume until it is to stop."""
        self._kafka.subscribe(
            list(self._settings.topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )
        while not self._stopping.is_set():
            self._fetch()
            if self._refusal is not None:
                raise _refused(self._refusal)
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
            with suppress(psycopg.Error), self._transaction() as connection:
                self._group.end(connection, self._generation)

    def _note(self, part: Assigned) -> None:
        """Note for a probe whether messages wait in a partition, and where."""
        if part.position is None:
            self._watch.waits(part.place, None)
        elif part.queue or part.cut_off:
            self._watch.waits(part.place, part.position.next_offset)
        else:
            self._watch.moved([part.place])

    def close(self) -> None:
        """Leave the group, and close the session."""
        self._kafka.close()
        self._parts.clear()
        if self._connection is not None:
            self._connection.close()

    # Kafka

    def _fetch(self) -> None:
        """Take what Kafka has fetched; wait for it if there is nothing to do."""
        # One by one: what poll() returns behind a rebalance belongs to the new assignment.
        message = self._kafka.poll(self._idle_seconds())
        taken = size = 0
        while message is not None:
            error = message.error()
            # Its methods may return None, says its type; not for messages of a broker.
            received = cast("KafkaMessage", message)
            part = self._parts.get((received.topic(), received.partition()))
            if error is not None:
                self._kafka_error(part, received, error)
            elif part is not None:
                part.add(checked(received))
            taken, size = taken + 1, size + size_of(received)
            full = taken >= _TAKEN or size >= _TAKEN_BYTES or self._stopping.is_set()
            message = None if full else self._kafka.poll(0)
        for part in self._parts.values():
            # A partition whose messages fail must not be read into memory as a whole.
            if not part.paused and (len(part.queue) >= _MOST_QUEUED or part.size >= _MOST_QUEUED_BYTES):
                self._kafka.pause([TopicPartition(*part.place)])
                part.paused = True
            elif part.paused and len(part.queue) < _TAKEN and part.size < _TAKEN_BYTES:
                self._kafka.resume([TopicPartition(*part.place)])
                part.paused = False

    def _idle_seconds(self) -> float:
        now = time.monotonic()
        due = [part.due for part in self._parts.values() if part.queue or part.position is None]
        return max(0.0, min([now + _POLL_SECONDS, *due]) - now)

    def _kafka_error(self, part: Assigned | None, message: KafkaMessage, error: KafkaError) -> None:
        code = error.code()
        if code == KafkaError._PARTITION_EOF:  # noqa: SLF001  a documented name, in spite of the underscore
            if part is not None and part.position is not None:
                part.end = max(part.end, message.offset())
        elif code in _kafka.OUT_OF_RANGE:
            if part is not None:
                part.cut_off = True
        elif is_refusal(error):
            raise _refused(error)
        elif code in _kafka.UNREADABLE or error.fatal():
            raise KafkaFailed(f"Kafka, {message.topic()}-{message.partition()}: {error.str()}. Nothing was skipped")
        else:
            # Brokers that are away, a topic that is not there yet, a poll that came too late: librdkafka goes on.
            _logger.warning("kafka: %s", error.str())

    def _noted(self, error: KafkaError) -> None:
        if is_refusal(error):
            self._refusal = error
        if given := self._settings.options.get("error_cb"):
            given(error)

    def _assigned(self, kafka: Any, partitions: Sequence[TopicPartition]) -> None:
        """Claim what Kafka has assigned, and begin where Postgres says. Waits while Postgres is away."""
        places = [(one.topic, one.partition) for one in partitions]
        claimed: dict[Partition, tuple[ClaimedOffset, set[bytes]]] = {}
        for place in places:
            self._watch.waits(place, None)
        attempt = 0
        while places and not claimed and not self._stopping.is_set():
            try:
                claimed = self._claim(places)
            except (psycopg.Error, KafkaFailed) as error:
                attempt += 1
                if isinstance(error, KafkaFailed) and attempt >= _CLAIM_ATTEMPTS:
                    raise
                self._interrupted(error, "claiming partitions", places)
                self._stopping.wait(backoff(attempt, *_AWAY))
        for place, (position, keys) in claimed.items():
            self._parts[place] = Assigned(place, position, keys, position.next_offset)
        found = [TopicPartition(*place, position.next_offset) for place, (position, _) in claimed.items()]
        (kafka.incremental_assign if self._incremental else kafka.assign)(found)
        # librdkafka keeps the pause of a partition that was taken away (its issue 1849).
        kafka.resume(found)

    def _revoked(self, kafka: Any, partitions: Sequence[TopicPartition]) -> None:  # noqa: ARG002
        """Forget what was fetched of partitions that are another member's from now on."""
        for one in partitions:
            self._parts.pop((one.topic, one.partition), None)
        self._watch.moved([(one.topic, one.partition) for one in partitions])

    def _claim(self, places: Collection[Partition]) -> dict[Partition, tuple[ClaimedOffset, set[bytes]]]:
        topics = {topic for topic, _ in places}
        ids, bounds = self._admin.look(topics)
        starts = {place: (ids[place[0]], at.end if self._settings.at_end else at.first) for place, at in bounds.items()}
        if missing := [place for place in places if place not in starts]:
            raise KafkaFailed(f"Kafka has assigned {missing[0][0]}-{missing[0][1]}, and does not list it")
        with self._transaction() as connection:
            positions = self._group.claim(connection, places, starts)
            newest = self._letters.newest(connection)
            keys = {topic: self._letters.keys(connection, topic) for topic in topics}
        self._new_letters.claimed(newest)
        for topic, found in keys.items():
            known = self._dead_keys.setdefault(topic, found)
            known.intersection_update(found)
            known.update(found)
        self._generation = next(iter(positions.values())).generation
        self._check_positions(positions)
        return {place: (position, self._dead_keys[place[0]]) for place, position in positions.items()}

    def _check_positions(self, positions: Mapping[Partition, ClaimedOffset]) -> None:
        """Record and raise what Kafka has lost behind these positions. They can't move meanwhile: they are claimed."""
        losses = self._admin.find_losses(positions)
        if losses:
            with self._transaction() as connection:
                self._group.record_losses(connection, losses)
            raise _kafka.lost(losses, positions, self._group.name)

    # Postgres

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection[Any]]:
        """Open a transaction on the member's session. Raises SchemaError and psycopg's errors."""
        if self._connection is None or self._connection.closed:
            self._connection = self._settings.connect()
            # Changes by others are seen at once, whatever the default of the role or database.
            self._connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        try:
            with self._connection.transaction():
                yield self._connection
        except _SCHEMA as error:
            denied = isinstance(error, psycopg.errors.InsufficientPrivilege)
            text = f"Postgres: {str(error).partition(chr(10))[0]}"
            raise SchemaError.refused(text, denied=denied, options=" --consumer") from error

    def _interrupted(self, error: BaseException, doing: str, places: Collection[Partition] = ()) -> None:
        """Note an error that is no message's fault, and keeps these partitions from moving."""
        why = f"{doing}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        _logger.warning("%s", why)
        self._watch.failed(places, why)
        if self._connection is not None and isinstance(error, psycopg.Error):
            # The session's server may not be the primary any more.
            self._connection.close()

    # Messages

    def _work(self, part: Assigned, until: float) -> None:
        """Apply what a partition has, for a while: Kafka wants to be polled."""
        while time.monotonic() >= part.due and not self._stopping.is_set():
            if part.position is None:
                self._claim_again(part)
            elif not part.queue:
                if not part.cut_off:
                    return
                # A claim finds out what is lost. If Kafka has the position after all, it is read again from there.
                part.lose(time.monotonic() + _POLL_SECONDS)
            elif not self._apply(part):
                return
            if time.monotonic() >= until:
                return

    def _claim_again(self, part: Assigned) -> None:
        """Claim a partition that another claim has taken although Kafka still assigns it to this member."""
        try:
            [(position, keys)] = self._claim([part.place]).values()
            self._kafka.seek(TopicPartition(*part.place, position.next_offset))
        except (psycopg.Error, KafkaFailed, KafkaException) as error:
            part.interrupted += 1
            part.due = time.monotonic() + backoff(part.interrupted, *_AWAY)
            self._interrupted(error, f"claiming {part.place[0]}-{part.place[1]} again", [part.place])
            return
        part.claimed(position, keys)

    def _apply(self, part: Assigned) -> bool:
        """Apply the next messages of a partition in one transaction. Returns whether to go on at once."""
        batch = part.next_batch(self._settings.batch)
        try:
            handled = self._commit(part, batch)
        except Fenced:
            self._fenced(part)
            return False
        except OffsetMoved as moved:
            part.moved(moved.next_offset)
            return True
        except _Failed as failed:
            return self._failed(part, batch[failed.index], failed)
        except psycopg.Error as error:
            if not part.confirmed or (self._passes(error) and not self._struck(part, error)):
                return self._wait(part, error)
            # Deferred constraints and triggers.
            if len(batch) > 1:
                part.alone_until = batch[-1].offset()
                return True
            return self._failed(part, batch[0], _failure_of(0, error))
        part.moved(batch[-1].offset() + 1)
        if handled:
            part.deaths = 0
        return True

    def _commit(self, part: Assigned, batch: Sequence[KafkaMessage]) -> int:
        """Run the transaction of a batch. Returns for how many messages the handler was called."""
        assert part.position is not None
        handled = 0
        with self._confirmed(part) as connection:
            behind = [message.key() in part.dead_keys for message in batch]
            dead = sum(behind)
            ids = [
                None if waits else self._id(index, message)
                for index, (message, waits) in enumerate(zip(batch, behind, strict=True))
            ]
            known = [one for one in ids if one is not None]
            new, today = self._group.move(
                connection,
                part.place,
                batch[-1].offset() + 1,
                log_end=self._log_end(part.place),
                leader_epoch=_kafka.epoch_of(batch[-1]),
                ids=known,
                others=0 if self._settings.dedup else len(batch) - dead,
                dead=dead,
            )
            before = self._group.forgotten_before(connection, new, today)
            for index, (message, id_) in enumerate(zip(batch, ids, strict=True)):
                if behind[index]:
                    id_ = _id_or_none(message)  # noqa: PLW2901
                    failure = Failure("behind", BEHIND)
                    self._letters.write(connection, part.position.topic_id, message, id_, failure, 1)
                    continue
                if id_ is not None:
                    if id_ not in new:
                        continue
                    # Of messages with the same id the first one counts.
                    new.discard(id_)
                    self._check_age(index, id_, before)
                self._call(connection, index, message)
                handled += 1
        return handled

    def _id(self, index: int, message: KafkaMessage) -> UUID | None:
        """Return the id by which a message is recognized. Raises _Failed for one that no handler may get."""
        if isinstance(message.headers(), UndecodableHeaders):
            raise _Failed(index, Failure("undecodable", NOT_UTF8), again=False)
        if not self._settings.dedup:
            return None
        try:
            return message_id(message)
        except MessageIdMissing as error:
            raise _Failed(index, Failure("no-id", str(error)), again=False) from error

    def _check_age(self, index: int, id_: UUID, before: Any) -> None:
        if NO_TIME < day(id_) < before:
            raise _Failed(index, Failure("too-old", too_old(self._group.name, id_, before)), again=False)

    def _call(self, connection: psycopg.Connection[Any], index: int, message: KafkaMessage) -> None:
        try:
            self._handler(connection, message)
        except Exception as error:
            raise _failure_of(index, error) from error
        if connection.info.transaction_status is not TransactionStatus.INTRANS:
            # COMMIT would be a ROLLBACK, without an error.
            text = "the handler has caught an error of the database, or ended the transaction: nothing can be committed"
            raise _Failed(index, Failure("failed", text), again=True)

    @contextmanager
    def _confirmed(self, part: Assigned) -> Iterator[psycopg.Connection[Any]]:
        """Open a transaction that holds a partition's claim. Raises Fenced, OffsetMoved, and as ``_transaction``."""
        assert part.position is not None
        part.confirmed = False
        with self._transaction() as connection:
            self._group.fence(connection, part.place, part.position)
            part.confirmed = True
            yield connection

    @staticmethod
    def _struck(part: Assigned, error: BaseException | None) -> bool:
        """Count an interruption of a confirmed transaction. Returns whether there were too many of them in a row."""
        if _is_exhausted(error):
            return False
        part.strikes += part.confirmed
        return part.confirmed and part.strikes > _MOST_STRIKES

    def _failed(self, part: Assigned, message: KafkaMessage, failed: _Failed) -> bool:
        """Decide what follows from a message that can't be applied. Raises HandlerFailed. Returns whether to go on."""
        cause = failed.__cause__
        if self._passes(cause) and not self._struck(part, cause):
            return self._wait(part, cause or failed)
        if message is not part.queue[0]:
            # Those before it first.
            part.suspect = message.offset()
            return True
        part.suspect = message.offset()
        part.attempts += 1
        topic, number = part.place
        about = f"{topic}-{number} offset {message.offset()}"
        if failed.again and part.attempts < self._settings.attempts:
            part.due = time.monotonic() + backoff(part.attempts, *self._settings.wait)
            _logger.warning("%s failed, attempt %d: %s", about, part.attempts, failed.failure.error)
            self._watch.failed([part.place], f"offset {message.offset()} failed: {failed.failure.error}")
            return False
        part.deaths += 1
        too_many = self._settings.bury and part.deaths > self._settings.most_dead
        if too_many or not self._settings.bury:
            why = f"as the {part.deaths - 1} before it: " if too_many else ""
            raise HandlerFailed(topic, number, message.offset(), part.attempts, why + failed.failure.error) from cause
        _logger.error("%s is a dead letter now, attempts: %d: %s", about, part.attempts, failed.failure.error)
        return self._bury(part, message, failed.failure)

    def _bury(self, part: Assigned, message: KafkaMessage, failure: Failure) -> bool:
        """Make a message a dead letter, in the transaction that moves the position behind it."""
        assert part.position is not None
        try:
            with self._confirmed(part) as connection:
                self._letters.write(
                    connection, part.position.topic_id, message, _id_or_none(message), failure, part.attempts
                )
                self._group.move(
                    connection,
                    part.place,
                    message.offset() + 1,
                    log_end=self._log_end(part.place),
                    leader_epoch=_kafka.epoch_of(message),
                    dead=1,
                )
        except Fenced:
            self._fenced(part)
            return False
        except OffsetMoved as moved:
            part.moved(moved.next_offset)
            return True
        except psycopg.Error as error:
            part.deaths -= 1
            if self._struck(part, error):
                why = f"it can't be stored as a dead letter: {error}; it failed with: {failure.error}"
                raise HandlerFailed(*part.place, message.offset(), part.attempts, why) from error
            return self._wait(part, error)
        key = message.key()
        if key is not None:
            part.dead_keys.add(key)
        part.moved(message.offset() + 1)
        return True

    def _fenced(self, part: Assigned) -> None:
        _logger.warning("%s-%d was claimed by another member; nothing was applied", *part.place)
        part.lose(time.monotonic() + self._reclaim_seconds)

    def _wait(self, part: Assigned, error: BaseException) -> bool:
        part.interrupted += 1
        part.due = time.monotonic() + backoff(part.interrupted, *_AWAY)
        self._interrupted(error, f"applying {part.place[0]}-{part.place[1]}", [part.place])
        return False

    def _passes(self, error: BaseException | None) -> bool:
        """Return whether an error is no message's fault: the session is gone, or its transaction was interrupted."""
        if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith(_PASSING):
            return True
        closed = self._connection is None or self._connection.closed
        # Postgres ends a session whose handler takes too long: the next attempt may take as long.
        return bool(closed) and not isinstance(error, psycopg.errors.IdleInTransactionSessionTimeout)

    # Upkeep

    def _keep_up(self) -> None:
        try:
            for part in self._parts.values():
                self._pass_markers(part)
            self._retry_letters()
            self._check_topics()
        except (psycopg.Error, KafkaFailed) as error:
            self._interrupted(error, "upkeep")
        self._show_positions()

    def _pass_markers(self, part: Assigned) -> None:
        """Move a position to the end of what was read, where only transactions' markers were left.

        Otherwise the group would seem to lag, and retention could remove the marker at its position.
        """
        if part.position is None or part.queue or part.end <= part.position.next_offset or part.end < part.fetched:
            return
        try:
            with self._transaction() as connection:
                self._group.fence(connection, part.place, part.position)
                self._group.move(connection, part.place, part.end, log_end=part.end)
        except Fenced:
            self._fenced(part)
        except OffsetMoved as moved:
            part.moved(moved.next_offset)
        else:
            part.moved(part.end)

    def _retry_letters(self) -> None:
        """Apply the dead letters that an operator retries, and those that wait behind one that is gone."""
        if not self._parts:
            return
        with self._transaction() as connection:
            self._letters.look(connection)
            waiting, behind = self._letters.places(connection, self._parts.keys())
            for place in behind:
                part = self._parts[place]
                released, part.released = self._letters.release(connection, place, part.released)
                if released:
                    waiting.add(place)
        for place in sorted(waiting):
            part = self._parts[place]
            left = _RETRIED_AT_ONCE
            while left and part.position is not None and self._retry(part):
                left -= 1
        until = time.monotonic() + _TURN_SECONDS
        while self._check_keys() and time.monotonic() < until:
            pass

    def _check_keys(self) -> bool:
        """Note which keys have dead letters now, some of them in each call. Returns whether to look on at once."""
        if not self._keys_to_look_at:
            self._keys_to_look_at.extend((topic, key) for topic, keys in self._dead_keys.items() for key in keys)
        looked_at: dict[str, list[bytes]] = defaultdict(list)
        for _ in range(min(LOOKED_AT, len(self._keys_to_look_at))):
            topic, key = self._keys_to_look_at.popleft()
            looked_at[topic].append(key)
        with self._transaction() as connection:
            # Of other members too: the key of a message may have moved to another partition.
            added, more = self._new_letters.look(connection, self._dead_keys, self._letters.look(connection))
            gone = {topic: self._letters.gone(connection, topic, keys) for topic, keys in looked_at.items()}
        for topic, keys in gone.items():
            self._dead_keys[topic] -= keys
        for topic, added_key in added:
            if added_key is not None:
                self._dead_keys[topic].add(added_key)
        return more or any(gone.values())

    def _retry(self, part: Assigned) -> bool:
        """Try the next dead letter of a partition once. Returns whether there was one."""
        letter: DeadLetter | None = None
        try:
            with self._transaction() as connection:
                letter = self._apply_letter(connection, part)
        except Fenced:
            self._fenced(part)
            return False
        except OffsetMoved as moved:
            part.moved(moved.next_offset)
            return True
        except _Failed as failed:
            if self._passes(failed.__cause__) and not self._letter_struck(part, failed.__cause__):
                self._interrupted(failed.__cause__ or failed, "retrying a dead letter")
                return False
            return self._letter_failed(part, failed)
        except psycopg.Error as error:
            if letter is None or (self._passes(error) and not self._letter_struck(part, error)):
                raise
            # At COMMIT.
            return self._letter_failed(part, _failure_of(letter.id, error))
        part.letter_strikes = 0
        return letter is not None

    @staticmethod
    def _letter_struck(part: Assigned, error: BaseException | None) -> bool:
        if _is_exhausted(error):
            return False
        part.letter_strikes += 1
        return part.letter_strikes > _MOST_STRIKES

    def _apply_letter(self, connection: psycopg.Connection[Any], part: Assigned) -> DeadLetter | None:
        assert part.position is not None
        self._group.fence(connection, part.place, part.position)
        letter = self._letters.next(connection, part.place)
        if letter is None:
            return None
        if letter.blocked:
            self._letters.failed_again(connection, letter.id, Failure("behind", BEHIND))
            return letter
        # The index names the letter.
        id_ = self._id(letter.id, letter)
        new, today = self._group.move(
            connection,
            part.place,
            part.position.next_offset,
            ids=[] if id_ is None else [id_],
            others=0 if self._settings.dedup else 1,
        )
        if id_ is None or id_ in new:
            # An operator who retries a message that is too old says that it was not applied.
            if id_ is not None and letter.reason != "too-old":
                self._check_age(letter.id, id_, self._group.forgotten_before(connection, new, today))
            self._call(connection, letter.id, letter)
        self._letters.delete(connection, letter.id)
        return letter

    def _letter_failed(self, part: Assigned, failed: _Failed) -> bool:
        assert part.position is not None
        try:
            with self._transaction() as connection:
                self._group.fence(connection, part.place, part.position)
                self._letters.failed_again(connection, failed.index, failed.failure)
        except Fenced:
            self._fenced(part)
            return False
        part.letter_strikes = 0
        return True

    def _show_positions(self) -> None:
        """Show Kafka's own tools how far the group is. Nothing reads it back, so a failure is no matter."""
        found = []
        for part in self._parts.values():
            if part.position is not None and part.position.next_offset != part.shown:
                part.shown = part.position.next_offset
                found.append(TopicPartition(*part.place, part.shown))
        if found:
            with suppress(KafkaException):
                self._kafka.commit(offsets=found, asynchronous=True)

    def _log_end(self, place: Partition) -> int | None:
        try:
            known = self._kafka.get_watermark_offsets(TopicPartition(*place), cached=True)
        except KafkaException:
            return None
        return known[1] if known[1] >= 0 else None

    def _check_topics(self) -> None:
        """Look from time to time whether the topics are those that the group has read. Does not wait for Kafka."""
        if self._described and all(future.done() for future in self._described.values()):
            described, self._described = self._described, {}
            ids = {name: str(future.result().topic_id) for name, future in described.items() if not future.exception()}
            other = {
                part.place: part.position
                for part in self._parts.values()
                if part.position is not None
                and ids.get(part.place[0], part.position.topic_id) != part.position.topic_id
            }
            if other:
                self._check_positions(other)
        elif not self._described and self._parts and time.monotonic() >= self._topics_at:
            self._described = self._admin.describe({topic for topic, _ in self._parts})
            self._topics_at = time.monotonic() + _TOPIC_SECONDS


def _refused(error: KafkaError) -> KafkaFailed:
    return KafkaFailed(f"Kafka: {error.str()}; look at the credentials and the ACLs. Nothing was skipped")


def _is_exhausted(error: BaseException | None) -> bool:
    return isinstance(error, psycopg.Error) and error.sqlstate in _EXHAUSTED


def _failure_of(index: int, error: Exception) -> _Failed:
    """Return what a handler's error means for its message."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, Reject):
        return _Failed(index, Failure("rejected", str(error)), again=False)
    found = _Failed(index, Failure("failed", text, getattr(error, "sqlstate", None)), again=True)
    found.__cause__ = error
    return found


def _id_or_none(message: KafkaMessage) -> UUID | None:
    try:
        return message_id(message)
    except MessageIdMissing:
        return None
