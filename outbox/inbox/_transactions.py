"""A transaction under a partition's claim, which applies a message, and what its errors mean.

Every transaction runs in ``_attempt``, which decides in one order what an error means: another claim, a position that
an earlier COMMIT has moved, an interruption that is no message's fault, or a message that can't be applied.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus

from outbox._clients.backoff import MEMBER_PAUSE, doubled, jittered, pause
from outbox.consumer.errors import Fenced, OffsetMoved, shown
from outbox.consumer.groups import GroupRows
from outbox.consumer.ids import NO_TIME, day
from outbox.consumer.losses import given_up
from outbox.consumer.messages import NOT_UTF8, UndecodableHeaders
from outbox.consumer.model import AT_MOST_ONCE, DEDUP, DEDUP_BY_KEY, Partition, RejectedRecord
from outbox.consumer.postgres_errors import Strikes, caused_by, spoilt
from outbox.consumer.stalled import Watch
from outbox.inbox._assigned import Assigned
from outbox.inbox._letters import Letters
from outbox.inbox._message import KafkaMessage
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
    group: GroupRows
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
    transaction  for GroupRows.was_committed.
    """

    def __init__(self, failed: MessageFailed) -> None:
        why = failed.why
        super().__init__(failed.message, why.reason, why.error, why.sqlstate, again=failed.again)
        self.rest: Sequence[KafkaMessage] = ()
        self.transaction = ""


@dataclass(eq=False)
class Transactions:
    """Runs transactions under the claims of a member's partitions."""

    settings: Settings
    session: Session
    handler: Handler
    watch: Watch
    reclaim_seconds: float = field(kw_only=True)
    stopping: Event = field(kw_only=True)

    def __post_init__(self) -> None:
        self._group, self._letters = self.settings.group, self.settings.letters

    def record_interruption(self, error: BaseException, doing: str, partitions: Collection[Partition] = ()) -> None:
        """Record an error that no message has caused, and that keeps these partitions from moving."""
        why = f"{doing}: {shown(error)}"
        _logger.warning("%s", why)
        self.watch.failed(partitions, why)
        if caused_by(error) is not None:
            # The session's server may not be the primary any more.
            self.session.close()

    def postpone(self, parts: Collection[Assigned], error: BaseException, doing: str) -> None:
        """Record such an error of some partitions, which are retried together after a pause."""
        earlier = max(part.interruptions for part in parts)
        due = time.monotonic() + jittered(doubled(earlier, *MEMBER_PAUSE))
        for part in parts:
            part.interruptions, part.due = earlier + 1, due
        self.record_interruption(error, doing, [part.partition for part in parts])

    def _attempt(self, part: Assigned, strikes: Strikes, step: Callable[[psycopg.Connection[Any]], None]) -> bool:
        """Run a transaction that holds a partition's claim.

        strikes  counts its interruptions: one that keeps coming is taken for the message's fault.

        Returns whether it was committed; if not, there is another attempt when the partition is due, or claimed again.
        Raises MessageFailed for what is a message's fault, and psycopg.Error where that names no message.
        """
        assert part.position is not None
        transaction: str | None = None
        try:
            with self.session.transaction() as connection:
                transaction = self._group.fence(connection, part.partition, part.position)
                step(connection)
        except Fenced as fenced:
            _logger.warning("%s; nothing was applied", fenced)
            part.forget_claim(time.monotonic() + self.reclaim_seconds)
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
        except (MessageFailed, psycopg.Error) as error:
            cause = error.__cause__ if isinstance(error, MessageFailed) else error
            # Before it has the claim, no message can be at fault.
            if transaction is not None and (not self.session.passes(cause) or strikes.strike(cause)):
                raise
            self._interrupted(part, cause or error)
            return False
        strikes.count = 0
        return True

    def _interrupted(self, part: Assigned, error: BaseException) -> None:
        """Note that a transaction was interrupted by what is no message's fault, and when the next one is due."""
        self.postpone([part], error, f"applying {part.name}")

    def _id(self, message: KafkaMessage) -> UUID | None:
        """Return the id by which a message is recognized. Raises MessageFailed for one that no handler may get."""
        if isinstance(message.headers(), UndecodableHeaders):
            raise MessageFailed(message, "undecodable", NOT_UTF8)
        if not self.settings.dedup:
            return None
        try:
            return message_id(message, self.settings.key)
        except MessageIdMissing as error:
            raise MessageFailed(message, "no-id", str(error)) from error

    def _is_new(self, message: KafkaMessage, id_: UUID | None, new: set[UUID], before: dt.date) -> bool:
        """Return whether a message is to be applied; of several with one id, the first. Raises MessageFailed."""
        if id_ is None:
            return True
        if id_ not in new:
            return False
        new.discard(id_)
        self._check_age(message, id_, before)
        return True

    def _check_age(self, message: KafkaMessage, id_: UUID, before: dt.date) -> None:
        if NO_TIME < day(id_) < before:
            raise MessageFailed(message, "too-old", too_old(self._group.name, id_, before))

    def _call(self, connection: psycopg.Connection[Any], message: KafkaMessage) -> None:
        try:
            try:
                self.handler(connection, message)
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
        message, why, attempt, recorded = ended.message, ended.why.error, 0, False
        while not recorded:
            try:
                with self.session.transaction() as connection:
                    if not self._group.was_committed(connection, ended.transaction):
                        return
                    self._group.take_back(connection, part.partition, applied=applied, dead=dead)
                    self._record(connection, part, lost)
                    also(connection)
                recorded = True
            except psycopg.Error as error:
                self.record_interruption(error, f"recording what is lost of {part.name}", [part.partition])
                if self.stopping.is_set() or not self.session.passes(error):
                    why = f"{why}; if it was committed, messages are lost, {len(lost)} of them: {error}"
                    break
                pause(self.stopping, attempt)
                attempt += 1
        cause = ended.__cause__ or ended
        place = message.topic(), message.partition(), message.offset()
        raise HandlerFailed(*place, 1, why, given_up=True, recorded=recorded) from cause

    def _record(self, connection: psycopg.Connection[Any], part: Assigned, failures: Iterable[MessageFailed]) -> None:
        assert part.position is not None
        topic_id = part.position.topic_id
        self._group.record_losses(connection, [given_up(failed.why, topic_id) for failed in failures])
