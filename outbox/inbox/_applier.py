"""Apply a partition's messages, and the dead letters that are retried: one transaction each, under the claim's lock.

Every transaction runs in ``_attempt``, which decides in one order what an error means: another claim, a position that
an earlier COMMIT has moved, an interruption that is no message's fault, or a message that can't be applied.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus

from outbox._clients.backoff import MEMBER_PAUSE, doubled, jittered, pause
from outbox.consumer.delays import TopicDelays, sampled, written_at
from outbox.consumer.errors import Fenced, OffsetMoved, shown
from outbox.consumer.groups import GroupStore
from outbox.consumer.ids import NO_TIME, day
from outbox.consumer.letters import BEHIND
from outbox.consumer.losses import given_up
from outbox.consumer.messages import NOT_UTF8, UndecodableHeaders
from outbox.consumer.model import AT_MOST_ONCE, DEDUP, DEDUP_BY_KEY, Partition, RejectedRecord
from outbox.consumer.postgres_errors import Strikes, caused_by, spoilt
from outbox.consumer.stalled import Watch
from outbox.inbox._assigned import Assigned
from outbox.inbox._letters import Letters
from outbox.inbox._message import KafkaMessage, RetriedMessage
from outbox.inbox._once import too_old
from outbox.inbox._session import Session
from outbox.inbox.errors import HandlerFailed, MessageIdMissing, Reject
from outbox.inbox.ids import message_id

Handler = Callable[[psycopg.Connection[Any], KafkaMessage], None]

_logger: Final = logging.getLogger("outbox.inbox")


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked arguments of ``Consumer``; see there.

    bury    messages that fail become dead letters.
    key     the header whose value is the id; None: the event's id.
    at_end  a group that is new to a topic begins at the log's end.
    """

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
    key: str | None
    at_end: bool
    at_most_once: bool

    @property
    def strategy(self) -> str:
        """Return how messages are recognized, as the group's row shows it."""
        if self.at_most_once:
            return AT_MOST_ONCE
        if not self.dedup:
            return "OffsetsOnly"
        return DEDUP if self.key is None else DEDUP_BY_KEY


class MessageFailed(Exception):
    """A message can't be applied, and why. ``__cause__`` is the handler's error, if it is one.

    again  another attempt may succeed.
    """

    def __init__(
        self, message: KafkaMessage, reason: str, error: str, sqlstate: str | None = None, *, again: bool = False
    ) -> None:
        super().__init__(error)
        self.message = message
        self.why = RejectedRecord((message.topic(), message.partition(), message.offset()), reason, error, sqlstate)
        self.again = again

    @classmethod
    def by(cls, message: KafkaMessage, error: Exception) -> MessageFailed:
        """Return what an error of the handler, or of the COMMIT, means for its message."""
        if isinstance(error, Reject):
            return cls(message, "rejected", str(error))
        text = f"{type(error).__name__}: {error}"
        found = cls(message, "failed", text, getattr(caused_by(error), "sqlstate", None), again=True)
        found.__cause__ = error
        return found


class TransactionEnded(MessageFailed):
    """The handler has ended the transaction, and may have committed the position after the whole batch.

    rest         the message and those after it in its batch, which are without effect if it has.
    transaction  for GroupStore.was_committed.
    """

    def __init__(self, failed: MessageFailed) -> None:
        why = failed.why
        super().__init__(failed.message, why.reason, why.error, why.sqlstate, again=failed.again)
        self.rest: Sequence[KafkaMessage] = ()
        self.transaction = ""


class Applier:
    """Runs the transactions of a member's partitions.

    delays   of what is applied.
    log_end  where Kafka's log of a partition ends, if known.
    """

    def __init__(
        self,
        settings: Settings,
        session: Session,
        handler: Handler,
        watch: Watch,
        delays: TopicDelays,
        *,
        log_end: Callable[[Partition], int | None],
        reclaim_seconds: float,
        stopping: Event,
    ) -> None:
        self._settings = settings
        self._stopping = stopping
        self._group, self._letters = settings.group, settings.letters
        self._session = session
        self._handler = handler
        self._watch = watch
        self._delays = delays
        self._log_end = log_end
        self._reclaim_seconds = reclaim_seconds

    def apply(self, part: Assigned) -> bool:
        """Apply the next messages of a partition in one transaction. Returns whether to continue at once."""
        batch = part.next_batch(self._settings.batch)
        handled: list[KafkaMessage] = []

        def step(connection: psycopg.Connection[Any]) -> None:
            nonlocal handled
            handled = self._apply(connection, part, batch)

        try:
            committed = self._attempt(part, part.strikes, step, self._postpone)
        except TransactionEnded as ended:
            dead = sum(message.key() in part.dead_keys for message in ended.rest)
            lost = [MessageFailed(message, ended.why.reason, ended.why.error) for message in ended.rest]
            self._stop_if_committed(part, ended, lost, applied=dead - len(lost), dead=-dead)
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
        self._delays.observe(part.partition[0], written_at(headers, some.step), committed)

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
        if self._attempt(part, Strikes(), step, self._postpone):
            part.moved(end)

    def forget_taken(self, parts: Collection[Assigned]) -> None:
        """Forget idle partitions that another claim has: no transaction of their own would find that."""
        idle = {part.partition: part for part in parts if part.position is not None and not part.queue}
        if not idle:
            return
        with self._session.transaction() as connection:
            found = self._group.generations(connection, idle)
        for partition, part in idle.items():
            assert part.position is not None
            if found.get(partition) != part.position.generation:
                _logger.warning("%s: another claim has it", part.name)
                part.forget_claim(time.monotonic() + self._reclaim_seconds)

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
            committed = self._attempt(part, part.letter_strikes, step, self._leave_letters)
        except TransactionEnded as ended:
            # The dead letter is kept for an operator: its id is known, so a retry would only delete it.
            keep = self._failing_again(ended)
            self._stop_if_committed(part, ended, [ended], applied=-1, also=keep)
            return self._letter_failed(part, ended)
        except MessageFailed as failed:
            return self._letter_failed(part, failed)
        except psycopg.Error as error:
            if found is None:
                raise
            # An error that names no message: of COMMIT (a deferred constraint or trigger), or of our own statements.
            return self._letter_failed(part, MessageFailed.by(found, error))
        if committed:
            part.letter_strikes.count = 0
        return committed and found is not None

    def interrupted(self, error: BaseException, doing: str, partitions: Collection[Partition] = ()) -> None:
        """Record an error that no message has caused, and that keeps these partitions from moving."""
        why = f"{doing}: {shown(error)}"
        _logger.warning("%s", why)
        self._watch.failed(partitions, why)
        if caused_by(error) is not None:
            # The session's server may not be the primary any more.
            self._session.close()

    def postpone(self, parts: Collection[Assigned], error: BaseException, doing: str) -> None:
        """Record such an error of some partitions, which are retried together after a pause."""
        earlier = max(part.interrupted for part in parts)
        due = time.monotonic() + jittered(doubled(earlier, *MEMBER_PAUSE))
        for part in parts:
            part.interrupted, part.due = earlier + 1, due
        self.interrupted(error, doing, [part.partition for part in parts])

    def _attempt(
        self,
        part: Assigned,
        strikes: Strikes,
        step: Callable[[psycopg.Connection[Any]], None],
        wait: Callable[[Assigned, BaseException], None],
    ) -> bool:
        """Run a transaction that holds a partition's claim.

        Returns whether it was committed; if not, there is another attempt when the partition is due, or claimed again.
        Raises MessageFailed for what is a message's fault, and psycopg.Error where that names no message.
        """
        assert part.position is not None
        transaction: str | None = None
        found: MessageFailed | psycopg.Error
        try:
            with self._session.transaction() as connection:
                transaction = self._group.fence(connection, part.partition, part.position)
                step(connection)
        except Fenced as fenced:
            _logger.warning("%s; nothing was applied", fenced)
            part.forget_claim(time.monotonic() + self._reclaim_seconds)
            return False
        except OffsetMoved:
            # An earlier COMMIT has succeeded, and its answer was lost. A claim reads what it has written: the position,
            # and the keys of dead letters.
            part.forget_claim(0.0)
            return False
        except TransactionEnded as ended:
            assert transaction is not None
            ended.transaction = transaction
            raise
        except MessageFailed as failed:
            found, cause = failed, failed.__cause__
        except psycopg.Error as error:
            found = cause = error
        else:
            return True
        # Counts a strike: an interruption that keeps coming is taken for the message's fault.
        if transaction is None or (self._session.passes(cause) and not strikes.strike(cause)):
            wait(part, cause or found)
            return False
        raise found

    def _apply(
        self, connection: psycopg.Connection[Any], part: Assigned, batch: Sequence[KafkaMessage]
    ) -> list[KafkaMessage]:
        """Apply a batch, and move the position. Returns the messages for which the handler was called."""
        assert part.position is not None
        handled = []
        behind = [message.key() in part.dead_keys for message in batch]
        ids = [None if waits else self._id(message) for message, waits in zip(batch, behind, strict=True)]
        dead = sum(behind)
        new, today = self._group.move(
            connection,
            part.partition,
            batch[-1].offset() + 1,
            log_end=self._log_end(part.partition),
            leader_epoch=batch[-1].leader_epoch(),
            ids=[one for one in ids if one is not None],
            applied=0 if self._settings.dedup else len(batch) - dead,
            dead=dead,
        )
        before = self._group.forgotten_before(connection, new, today)
        for n, (message, waits, id_) in enumerate(zip(batch, behind, ids, strict=True)):
            if waits:
                why = MessageFailed(message, "behind", BEHIND).why
                self._letters.bury(
                    connection, part.position.topic_id, message, _id_or_none(message, self._settings.key), why, 1
                )
                continue
            if id_ is not None:
                if id_ not in new:
                    continue
                # If several messages have one id, the first counts.
                new.discard(id_)
                self._check_age(message, id_, before)
            try:
                self._call(connection, message)
            except TransactionEnded as ended:
                following = zip(batch[n + 1 :], ids[n + 1 :], strict=True)
                ended.rest = [message, *(one for one, other in following if other is None or other in new)]
                raise
            handled.append(message)
        return handled

    def _apply_letter(self, connection: psycopg.Connection[Any], part: Assigned, message: RetriedMessage) -> None:
        letter = message.letter
        if letter.behind:
            self._letters.failed_again(connection, letter.id, self._why_behind(connection, message))
            return
        id_ = self._id(message)
        new, today = self._group.move(
            connection,
            part.partition,
            None,
            ids=[] if id_ is None else [id_],
            applied=0 if self._settings.dedup else 1,
        )
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

    def _id(self, message: KafkaMessage) -> UUID | None:
        """Return the id by which a message is recognized. Raises MessageFailed for one that no handler may get."""
        if isinstance(message.headers(), UndecodableHeaders):
            raise MessageFailed(message, "undecodable", NOT_UTF8)
        if not self._settings.dedup:
            return None
        try:
            return message_id(message, self._settings.key)
        except MessageIdMissing as error:
            raise MessageFailed(message, "no-id", str(error)) from error

    def _check_age(self, message: KafkaMessage, id_: UUID, before: dt.date) -> None:
        if NO_TIME < day(id_) < before:
            raise MessageFailed(message, "too-old", too_old(self._group.name, id_, before))

    def _call(self, connection: psycopg.Connection[Any], message: KafkaMessage) -> None:
        try:
            try:
                self._handler(connection, message)
            except Exception as error:
                raise MessageFailed.by(message, error) from error
            if (text := spoilt(connection)) is not None:
                raise MessageFailed(message, "failed", text, again=True)
        except MessageFailed as failed:
            if connection.info.transaction_status is TransactionStatus.IDLE:
                raise TransactionEnded(failed) from failed.__cause__
            raise

    def _stop_if_committed(
        self,
        part: Assigned,
        ended: TransactionEnded,
        lost: Sequence[MessageFailed],
        *,
        applied: int,
        dead: int = 0,
        also: Callable[[psycopg.Connection[Any]], None] = lambda _: None,
    ) -> None:
        """Record as lost what the handler has committed, with no effect or half of one. Raises HandlerFailed if it has.

        Waits while Postgres is away. Raises HandlerFailed also if that can't be recorded, or until ``stop``.
        """
        message, why, attempt, recorded = ended.message, ended.why.error, 0, True
        while True:
            try:
                with self._session.transaction() as connection:
                    if not self._group.was_committed(connection, ended.transaction):
                        return
                    self._group.move(connection, part.partition, None, applied=applied, dead=dead)
                    self._record(connection, part, lost)
                    also(connection)
            except psycopg.Error as error:
                self.interrupted(error, f"recording what is lost of {part.name}", [part.partition])
                if self._stopping.is_set() or not self._session.passes(error):
                    why = f"{why}; if it was committed, messages are lost, {len(lost)} of them: {error}"
                    recorded = False
                    break
                pause(self._stopping, attempt)
                attempt += 1
            else:
                break
        cause = ended.__cause__ or ended
        place = message.topic(), message.partition(), message.offset()
        raise HandlerFailed(*place, 1, why, given_up=True, recorded=recorded) from cause

    def _record(self, connection: psycopg.Connection[Any], part: Assigned, failures: Iterable[MessageFailed]) -> None:
        assert part.position is not None
        topic_id = part.position.topic_id
        self._group.record_losses(connection, [given_up(failed.why, topic_id) for failed in failures])

    def _failed(self, part: Assigned, failed: MessageFailed) -> bool:
        """Handle a message that can't be applied. Raises HandlerFailed. Returns whether to continue at once."""
        message, text = failed.message, failed.why.error
        part.suspect = message.offset()
        if message is not part.queue[0]:
            # The messages before it come first.
            return True
        part.attempts += 1
        about = f"{part.name} offset {message.offset()}"
        if failed.again and part.attempts < self._settings.attempts:
            part.due = time.monotonic() + jittered(doubled(part.attempts - 1, *self._settings.wait))
            _logger.warning("%s failed, attempt %d: %s", about, part.attempts, text)
            self._watch.failed([part.partition], f"offset {message.offset()} failed: {text}")
            return False
        too_many = self._settings.bury and part.deaths >= self._settings.most_dead
        if too_many or not self._settings.bury:
            why = f"as the {part.deaths} before it: " if too_many else ""
            raise HandlerFailed(*part.partition, message.offset(), part.attempts, why + text) from failed.__cause__
        _logger.error("%s is a dead letter now, attempts: %d: %s", about, part.attempts, text)
        return self._bury(part, message, failed.why)

    def _bury(self, part: Assigned, message: KafkaMessage, why: RejectedRecord) -> bool:
        """Make a message a dead letter, in the transaction that moves the position past it."""
        assert part.position is not None
        topic_id, id_ = part.position.topic_id, _id_or_none(message, self._settings.key)

        def step(connection: psycopg.Connection[Any]) -> None:
            self._letters.bury(connection, topic_id, message, id_, why, part.attempts)
            self._group.move(
                connection,
                part.partition,
                message.offset() + 1,
                log_end=self._log_end(part.partition),
                leader_epoch=message.leader_epoch(),
                dead=1,
            )

        try:
            committed = self._attempt(part, part.strikes, step, self._postpone)
        except psycopg.Error as error:
            if part.strikes.strike(error):
                text = f"it can't be stored as a dead letter: {error}; it failed with: {why.error}"
                raise HandlerFailed(*part.partition, message.offset(), part.attempts, text) from error
            self._postpone(part, error)
            return False
        if committed:
            part.deaths += 1
            if (key := message.key()) is not None:
                part.dead_keys.add(key)
            part.moved(message.offset() + 1)
        return committed

    def _letter_failed(self, part: Assigned, failed: MessageFailed) -> bool:
        committed = self._attempt(part, part.letter_strikes, self._failing_again(failed), self._leave_letters)
        if committed:
            part.letter_strikes.count = 0
        return committed

    def _failing_again(self, failed: MessageFailed) -> Callable[[psycopg.Connection[Any]], None]:
        assert isinstance(failed.message, RetriedMessage)
        number = failed.message.letter.id
        return lambda connection: self._letters.failed_again(connection, number, failed.why)

    def _postpone(self, part: Assigned, error: BaseException) -> None:
        self.postpone([part], error, f"applying {part.name}")

    def _leave_letters(self, part: Assigned, error: BaseException) -> None:
        """The next upkeep retries it: the partition's messages do not wait for that."""
        part.letters_first = False
        self.interrupted(error, "retrying a dead letter")


def _id_or_none(message: KafkaMessage, key: str | None) -> UUID | None:
    try:
        return message_id(message, key)
    except MessageIdMissing:
        return None
