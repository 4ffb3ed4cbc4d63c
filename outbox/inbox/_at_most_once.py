"""Apply a partition's messages at-most-once: the position is committed first, in its own transaction, then the effect.

For effects that must not come late or twice, such as a message with a one-time password: a handler that calls another
system has its effect whether its transaction commits or not, so it is called once for each message, whatever follows.

    ┌─ 1: lock the row, compare generation and position; ids; move; mark as unconfirmed; COMMIT
    └─ 2: lock the row, compare; confirm; handler, each message behind a savepoint; COMMIT

| what happens                                | what follows                                                          |
|---------------------------------------------|-----------------------------------------------------------------------|
| killed before the first COMMIT              | nothing has moved, and no handler was called: the next member begins  |
|                                             | there                                                                 |
| the answer to the first COMMIT is lost      | the row shows whether it moved: then the claim records the batch as   |
|                                             | lost, and no handler was called                                       |
| the server stops after the first COMMIT     | it is durable, whatever synchronous_commit is by default              |
| a failover loses the first COMMIT           | the batch comes again, and its handlers are called again: prevented   |
|                                             | by synchronous replication only                                       |
| killed between the two, or in the second    | the next claim records the batch as lost; handlers may have been      |
|                                             | called for some of its messages, and are not called again             |
| the second COMMIT fails, or its session ends| the same, by the next claim: at once, or after a pause for a session   |
| the answer to the second COMMIT is lost     | the row shows whether it is confirmed: then nothing is lost           |
| rebalance, or a sleep, between the two      | the claim of the next member records the batch as lost; then this one |
|                                             | is fenced, and calls no handler                                       |
| … in the second one                         | the claim waits for its end, or until Postgres ends it                |
| the handler fails, or leaves a deferred     | its changes are rolled back, its message is recorded as lost in the   |
|   constraint violated                       | same transaction, and the others of the batch go on                   |
| the handler ends the transaction            | its message and the rest of the batch are recorded as lost;           |
|                                             | HandlerFailed                                                         |
| a message without an id, or that is not     | recorded as lost in the first transaction                             |
| UTF-8, or too old                           |                                                                       |
| more than ``most_dead`` failures in a row,  | HandlerFailed: messages are not the cause                             |
| where a batch that was lost counts as one   |                                                                       |

There are no dead letters: to apply one later is what must not happen, and keys do not wait behind what is lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import psycopg

from outbox.consumer.errors import shown
from outbox.consumer.model import ClaimedOffset
from outbox.consumer.postgres_errors import Strikes
from outbox.consumer.statements import IMMEDIATE, cursor
from outbox.inbox._applier import Applier
from outbox.inbox._assigned import Assigned
from outbox.inbox._message import KafkaMessage
from outbox.inbox._transactions import MessageFailed, TransactionEnded
from outbox.inbox.errors import HandlerFailed

# Deferred constraints: at COMMIT they would fail the whole batch. The next handler may need them deferred again.
_CHECK: Final = f"{IMMEDIATE}; SET CONSTRAINTS ALL DEFERRED"

_logger: Final = logging.getLogger("outbox.inbox")


@dataclass(slots=True)
class _Batch:
    """Messages of a partition: all of a batch, those to be applied, and by their offsets those that can't be."""

    messages: Sequence[KafkaMessage]
    pending: list[KafkaMessage] = field(default_factory=list)
    failures: dict[int, MessageFailed] = field(default_factory=dict)

    @property
    def first(self) -> int:
        return self.messages[0].offset()

    @property
    def last(self) -> int:
        return self.messages[-1].offset()


@dataclass(eq=False)
class AtMostOnceApplier(Applier):
    """Runs the transactions of a member's partitions, two for each batch."""

    _interruption: deque[BaseException] = field(default_factory=lambda: deque(maxlen=1), init=False)
    """What has interrupted a transaction last."""

    def apply(self, part: Assigned) -> bool:
        """Commit the position past the next messages, then call the handler for each of them.

        Returns whether to continue at once.
        """
        batch = _Batch(part.next_batch(self.settings.batch))
        # No message is at fault, however often it is interrupted: none was looked at.
        try:
            if not self._attempt(part, Strikes(), lambda connection: self._commit_position(connection, part, batch)):
                return False
        except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled) as error:
            self._interrupted(part, error)
            return False
        part.moved(batch.last + 1)
        if not batch.pending:
            self._count(part, batch)
            return True
        return self._run_effect(part, batch)

    def _run_effect(self, part: Assigned, batch: _Batch) -> bool:
        """Confirm the batch, then call the handler for its pending messages, in one transaction.

        Returns whether to continue at once.
        """
        assert part.position is not None
        claim, pending = part.position, batch.pending
        called: list[KafkaMessage] = []
        found: list[MessageFailed] = []
        self._interruption.clear()

        def apply(connection: psycopg.Connection[Any]) -> None:
            self._group.confirm(connection, part.partition, batch.first, len(pending), claim.generation)
            found.extend(
                failed for message in pending if (failed := self._failure(connection, message, called)) is not None
            )
            if found:
                self._group.take_back(connection, part.partition, applied=len(found))
                self._record(connection, part, found)
                batch.failures.update((failed.message.offset(), failed) for failed in found)

        try:
            committed = self._attempt(part, Strikes(), apply)
        except (MessageFailed, psycopg.Error) as error:
            if isinstance(error, TransactionEnded):
                # If it was committed, so is what ``confirm`` did.
                at, why = error.message.offset(), error.why
                rest = [MessageFailed(message, "failed", why.error) for message in pending if message.offset() >= at]
                self._stop_if_committed(part, error, [*found, *rest], applied=len(found) + len(rest))
            name = f"{part.name} offsets {batch.first} to {batch.last}"
            _logger.error("%s can't be committed: %s", name, error)  # noqa: TRY400  its text is enough
            part.forget_claim(0.0)
            self._count_lost(part, claim, batch, (called or batch.messages)[-1], error)
            return True
        if committed:
            self._observe(part, [message for message in pending if message.offset() not in batch.failures])
            self._count(part, batch)
            return True
        # The claim records what was not confirmed.
        part.forget_claim(part.due)
        if self._interruption and called:
            self._count_lost(part, claim, batch, called[-1], self._interruption[-1])
        return False

    def _commit_position(self, connection: psycopg.Connection[Any], part: Assigned, batch: _Batch) -> None:
        """Move the position past a batch. Finds the messages to be applied, and those that can't be.

        A message whose id was applied, or given up, before is neither.
        """
        ids: dict[int, UUID | None] = {}
        for message in batch.messages:
            try:
                ids[message.offset()] = self._id(message)
            except MessageFailed as failed:
                batch.failures[message.offset()] = failed
        known = [one for one in ids.values() if one is not None]
        unknown = len(ids) - len(known)
        new, today = self._move_past(connection, part, batch.messages[-1], ids=known, applied=unknown)
        counted = unknown + len(new)
        before = self._group.forgotten_before(connection, new, today)
        for message in (one for one in batch.messages if one.offset() in ids):
            try:
                if self._is_new(message, ids[message.offset()], new, before):
                    batch.pending.append(message)
            except MessageFailed as failed:
                batch.failures[message.offset()] = failed
        if batch.failures:
            self._record(connection, part, batch.failures.values())
        if batch.pending:
            self._group.mark_unconfirmed(connection, part.partition, batch.first, batch.last + 1, counted)
        elif counted:
            self._group.take_back(connection, part.partition, applied=counted)

    def _interrupted(self, part: Assigned, error: BaseException) -> None:
        self._interruption.append(error)
        super()._interrupted(part, error)

    def _failure(
        self, connection: psycopg.Connection[Any], message: KafkaMessage, called: list[KafkaMessage]
    ) -> MessageFailed | None:
        """Call the handler behind a savepoint. Returns its failure, without its changes."""
        try:
            with connection.transaction():
                called.append(message)
                self._call(connection, message)
                try:
                    cursor(connection).execute(_CHECK)
                except psycopg.Error as error:
                    raise MessageFailed.by(message, error) from error
        except TransactionEnded:
            raise
        except MessageFailed as failed:
            return failed
        return None

    def _count(self, part: Assigned, batch: _Batch) -> None:
        """Log failures that are recorded. Raises HandlerFailed for too many in a row."""
        applied = {message.offset() for message in batch.pending} - batch.failures.keys()
        for message in batch.messages:
            if message.offset() in applied:
                part.deaths = 0
            elif (failed := batch.failures.get(message.offset())) is not None:
                part.deaths += 1
                text = failed.why.error
                _logger.error("%s offset %d was given up: %s", part.name, message.offset(), text)
                if part.deaths > self.settings.most_dead:
                    why = f"as the {part.deaths - 1} before it: {text}"
                    raise HandlerFailed(*part.partition, message.offset(), 1, why, given_up=True) from failed.__cause__

    def _count_lost(
        self, part: Assigned, claim: ClaimedOffset, batch: _Batch, last: KafkaMessage, error: BaseException
    ) -> None:
        """Count a batch that was lost behind the call of a handler. Raises HandlerFailed for too many in a row.

        last  for which the handler was called.
        """
        part.deaths += 1
        if part.deaths <= self.settings.most_dead:
            return
        # No claim follows. Where this can't be recorded now, the next one does.
        with suppress(psycopg.Error), self.session.transaction() as connection:
            self._group.lose_unconfirmed(connection, claim.generation, part.partition, batch.first)
        why = (
            f"offsets {batch.first} to {batch.last} are recorded as lost, as the {part.deaths - 1} "
            f"failures before them: {shown(error)}"
        )
        raise HandlerFailed(*part.partition, last.offset(), 1, why, given_up=True) from error
