"""Apply a partition's messages, and make those that can't be applied dead letters, with the position behind them."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import psycopg

from outbox._clients.backoff import doubled, jittered
from outbox.consumer.delays import TopicDelays, sampled, written_at
from outbox.consumer.letters import BEHIND, DeadLetter
from outbox.consumer.messages import storable_time, stored_headers
from outbox.consumer.model import Partition, RejectedRecord
from outbox.consumer.postgres_errors import Strikes
from outbox.inbox._assigned import Assigned
from outbox.inbox._message import KafkaMessage
from outbox.inbox._transactions import MessageFailed, TransactionEnded, Transactions
from outbox.inbox.errors import HandlerFailed, MessageIdMissing
from outbox.inbox.ids import message_id

_logger: Final = logging.getLogger("outbox.inbox")


@dataclass(eq=False)
class Applier(Transactions):
    """Applies the messages of a member's partitions.

    delays   of what is applied.
    log_end  where Kafka's log of a partition ends, if known.
    """

    delays: TopicDelays
    log_end: Callable[[Partition], int | None] = field(kw_only=True)

    def apply(self, part: Assigned) -> bool:
        """Apply the next messages of a partition in one transaction. Returns whether to continue at once."""
        batch = part.next_batch(self.settings.batch)
        handled: list[KafkaMessage] = []

        def step(connection: psycopg.Connection[Any]) -> None:
            nonlocal handled
            handled = self._apply(connection, part, batch)

        try:
            committed = self._attempt(part, part.strikes, step)
        except TransactionEnded as ended:
            waiting = sum(message.key() in part.dead_keys for message in ended.rest)
            lost = [MessageFailed(message, ended.why.reason, ended.why.error) for message in ended.rest]
            self._stop_if_committed(part, ended, lost, applied=len(lost) - waiting, dead=waiting)
            return self._failed(part, ended)
        except MessageFailed as failed:
            return self._failed(part, failed)
        except psycopg.Error as error:
            # It names no message: an error of COMMIT (a deferred constraint or trigger), or of our own statements.
            if len(batch) > 1:
                part.alone_until = batch[-1].offset()
                return True
            return self._failed(part, MessageFailed.by(batch[0], error))
        if committed:
            part.moved(batch[-1].offset() + 1)
            if handled:
                part.deaths = 0
                self._observe(part, handled)
        return committed

    def _observe(self, part: Assigned, handled: Sequence[KafkaMessage]) -> None:
        """Count how long messages took that have just been committed."""
        committed = self._group.clock.at(time.monotonic())
        some = sampled(len(handled))
        headers = [headers for message in handled[some] if (headers := message.headers())]
        self.delays.observe(part.partition[0], written_at(headers, some.step), committed)

    def pass_markers(self, part: Assigned) -> None:
        """Move a position to the end of what was read, where only transactions' markers were left.

        Otherwise the group would seem to lag, and retention could remove the marker at its position.
        """
        if part.position is None or part.queue or part.end <= part.position.next_offset or part.end < part.fetched:
            return
        end = part.end

        def step(connection: psycopg.Connection[Any]) -> None:
            self._group.move(connection, part.partition, end, log_end=end)

        # No message is at fault, however often it is interrupted.
        if self._attempt(part, Strikes(), step):
            part.moved(end)

    def forget_taken(self, parts: Collection[Assigned]) -> None:
        """Forget idle partitions that another claim has: no transaction of their own would find that."""
        idle = {part.partition: part for part in parts if part.position is not None and not part.queue}
        if not idle:
            return
        with self.session.transaction() as connection:
            found = self._group.generations(connection, idle)
        for partition, part in idle.items():
            assert part.position is not None
            if found.get(partition) != part.position.generation:
                _logger.warning("%s: another claim has it", part.name)
                part.forget_claim(time.monotonic() + self.reclaim_seconds)

    def _apply(
        self, connection: psycopg.Connection[Any], part: Assigned, batch: Sequence[KafkaMessage]
    ) -> list[KafkaMessage]:
        """Apply a batch, and move the position. Returns the messages for which the handler was called."""
        handled = []
        behind = [message.key() in part.dead_keys for message in batch]
        ids = [None if waits else self._id(message) for message, waits in zip(batch, behind, strict=True)]
        dead = sum(behind)
        known = [one for one in ids if one is not None]
        applied = 0 if self.settings.dedup else len(batch) - dead
        new, today = self._move_past(connection, part, batch[-1], ids=known, applied=applied, dead=dead)
        before = self._group.forgotten_before(connection, new, today)
        for n, (message, waits, id_) in enumerate(zip(batch, behind, ids, strict=True)):
            if waits:
                self._store(connection, part, message, MessageFailed(message, "behind", BEHIND).why, 1)
                continue
            if not self._is_new(message, id_, new, before):
                continue
            try:
                self._call(connection, message)
            except TransactionEnded as ended:
                following = zip(batch[n + 1 :], ids[n + 1 :], strict=True)
                ended.rest = [message, *(one for one, other in following if other is None or other in new)]
                raise
            handled.append(message)
        return handled

    def _failed(self, part: Assigned, failed: MessageFailed) -> bool:
        """Handle a message that can't be applied. Raises HandlerFailed. Returns whether to continue at once."""
        message, text = failed.message, failed.why.error
        part.suspect = message.offset()
        if message is not part.queue[0]:
            # The messages before it come first.
            return True
        part.attempts += 1
        about = f"{part.name} offset {message.offset()}"
        if failed.again and part.attempts < self.settings.attempts:
            part.due = time.monotonic() + jittered(doubled(part.attempts - 1, *self.settings.wait))
            _logger.warning("%s failed, attempt %d: %s", about, part.attempts, text)
            self.watch.failed([part.partition], f"offset {message.offset()} failed: {text}")
            return False
        too_many = self.settings.bury and part.deaths >= self.settings.most_dead
        if too_many or not self.settings.bury:
            why = f"as the {part.deaths} before it: " if too_many else ""
            raise HandlerFailed(*part.partition, message.offset(), part.attempts, why + text) from failed.__cause__
        _logger.error("%s is a dead letter now, attempts: %d: %s", about, part.attempts, text)
        return self._bury(part, message, failed.why)

    def _bury(self, part: Assigned, message: KafkaMessage, why: RejectedRecord) -> bool:
        """Make a message a dead letter, in the transaction that moves the position past it."""

        def step(connection: psycopg.Connection[Any]) -> None:
            self._store(connection, part, message, why, part.attempts)
            self._move_past(connection, part, message, dead=1)

        try:
            committed = self._attempt(part, part.strikes, step)
        except psycopg.Error as error:
            if part.strikes.strike(error):
                text = f"it can't be stored as a dead letter: {error}; it failed with: {why.error}"
                raise HandlerFailed(*part.partition, message.offset(), part.attempts, text) from error
            self._interrupted(part, error)
            return False
        if committed:
            part.deaths += 1
            if (key := message.key()) is not None:
                part.dead_keys.add(key)
            part.moved(message.offset() + 1)
        return committed

    def _store(
        self,
        connection: psycopg.Connection[Any],
        part: Assigned,
        message: KafkaMessage,
        why: RejectedRecord,
        attempts: int,
    ) -> None:
        """Store a message whole, as a dead letter."""
        assert part.position is not None
        id_: UUID | None = None
        with suppress(MessageIdMissing):
            id_ = message_id(message, self.settings.key)
        headers, time_ = stored_headers(message.headers() or ()), storable_time(message.timestamp()[1]) * 1000
        letter = DeadLetter(why, id_, message.key(), message.value(), headers, time_, attempts)
        self._letters.write(connection, part.position.topic_id, [letter])

    def _move_past(
        self,
        connection: psycopg.Connection[Any],
        part: Assigned,
        last: KafkaMessage,
        *,
        ids: Sequence[UUID] = (),
        applied: int = 0,
        dead: int = 0,
    ) -> tuple[set[UUID], dt.date]:
        """Move the position past a message; see GroupRows.move."""
        return self._group.move(
            connection,
            part.partition,
            last.offset() + 1,
            log_end=self.log_end(part.partition),
            leader_epoch=last.leader_epoch(),
            ids=ids,
            applied=applied,
            dead=dead,
        )
