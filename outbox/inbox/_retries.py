"""Retry dead letters: one transaction each, under the claim of their partition or of the topic's first one."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection
from typing import Any

import psycopg

from outbox.consumer.letters import BEHIND
from outbox.consumer.model import Partition, RejectedRecord
from outbox.inbox._assigned import Assigned
from outbox.inbox._message import RetriedMessage
from outbox.inbox._transactions import MessageFailed, TransactionEnded, Transactions


class Retries(Transactions):
    """Applies the dead letters that an operator, or the end of another one, has released."""

    def retry(self, part: Assigned, partition: Partition, cleared: Collection[int]) -> bool:
        """Try the next dead letter of a partition once, under the claim of ``part``. Returns whether there was one.

        cleared  see Letters.next.
        """
        found: RetriedMessage | None = None

        def step(connection: psycopg.Connection[Any]) -> None:
            nonlocal found
            found = self._letters.next(connection, partition, cleared)
            if found is not None:
                self._apply_letter(connection, part, found)

        try:
            return self._attempt(part, part.letter_strikes, step) and found is not None
        except TransactionEnded as ended:
            # The dead letter is kept for an operator: its id is known, so a retry would only delete it.
            keep = self._failing_again(ended)
            self._stop_if_committed(part, ended, [ended], applied=1, also=keep)
            return self._letter_failed(part, ended)
        except MessageFailed as failed:
            return self._letter_failed(part, failed)
        except psycopg.Error as error:
            if found is None:
                raise
            # An error that names no message: of COMMIT (a deferred constraint or trigger), or of our own statements.
            return self._letter_failed(part, MessageFailed.by(found, error))

    def _apply_letter(self, connection: psycopg.Connection[Any], part: Assigned, message: RetriedMessage) -> None:
        letter = message.letter
        if letter.behind:
            self._letters.failed_again(connection, letter.id, self._why_behind(connection, message))
            return
        id_ = self._id(message)
        ids = [] if id_ is None else [id_]
        applied = 0 if self.settings.dedup else 1
        new, today = self._group.move(connection, part.partition, None, ids=ids, applied=applied)
        if id_ is None or id_ in new:
            # An operator who retries a message that is too old says that it was not applied.
            if id_ is not None and letter.reason != "too-old":
                self._check_age(message, id_, self._group.forgotten_before(connection, new, today))
            self._call(connection, message)
        self._letters.delete(connection, [letter.id])

    def _why_behind(self, connection: psycopg.Connection[Any], message: RetriedMessage) -> RejectedRecord:
        """Return why a dead letter waits: behind another, or too old itself, so that an operator sees all of a key."""
        try:
            id_ = self._id(message)
            if id_ is not None:
                # Every day counts as past, so the database is asked.
                self._check_age(message, id_, self._group.forgotten_before(connection, [id_], dt.date.max))
        except MessageFailed as failed:
            return failed.why
        return MessageFailed(message, "behind", BEHIND).why

    def _letter_failed(self, part: Assigned, failed: MessageFailed) -> bool:
        return self._attempt(part, part.letter_strikes, self._failing_again(failed))

    def _failing_again(self, failed: MessageFailed) -> Callable[[psycopg.Connection[Any]], None]:
        assert isinstance(failed.message, RetriedMessage)
        number = failed.message.letter.id
        return lambda connection: self._letters.failed_again(connection, number, failed.why)

    def _interrupted(self, part: Assigned, error: BaseException) -> None:
        """The next upkeep retries it: the partition's messages do not wait for that."""
        part.letters_first = False
        self.record_interruption(error, "retrying a dead letter")
