"""A transaction of the sink at-most-once: the offset is committed before the effect, in a session of its own.

To a task, and to a round with ``atomic="batch"``, it looks like the other one: fence, remember, move, apply, COMMIT.

    fence     compare the offset, without a lock
    remember  load the rows; what can't be loaded is named before anything is given up
    move      in a second session: lock the offset, compare, move, mark as unconfirmed, COMMIT
    apply     confirm, which locks the offset; the effect, once; COMMIT

| crash point                                          | result                                                       |
|------------------------------------------------------|--------------------------------------------------------------|
| before the COMMIT of ``move``                        | nothing is given up; the retry reads the same range          |
| behind it, before or in ``apply``                    | the range is recorded as lost: by this process if it lives,  |
|                                                      | by the retry of its task, by the partition's next range, or  |
|                                                      | by the next driver's claim. No effect comes after that. The  |
|                                                      | retry then ends the job: the effect may have killed it       |
| the server stops behind the COMMIT of ``move``       | it is durable, whatever synchronous_commit is by default     |
| a failover loses the COMMIT of ``move``              | the range comes again, and has its effect again: prevented   |
|                                                      | by synchronous replication only                              |
| the COMMIT of the effect fails, or is lost           | the same, unless the offsets row shows that it is confirmed  |
| two attempts at once (speculation, a lost executor)  | the second finds the offset moved; it records a loss, ends   |
|                                                      | the job, and the first has no effect; or waits for it, and   |
|                                                      | finds it confirmed                                           |
| a take-over between the two transactions             | it records the loss; the first one is Fenced, no effect      |
| SQL fails at some messages                           | they are recorded as lost, and the others are applied        |
| a function fails                                     | its range is recorded as lost; the job ends behind it        |
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Final

import psycopg

from outbox.consumer import connections
from outbox.consumer.errors import OffsetMoved
from outbox.consumer.losses import given_up
from outbox.consumer.model import Partition, Range
from spark_jobs.outcomes import EffectError, RejectedRecords
from spark_jobs.postgres.sink import PostgresSink, PostgresTransaction, found_at, move

if TYPE_CHECKING:
    from spark_jobs.sink import Move, Whole

_LOG: Final = logging.getLogger(__name__)


class AtMostOnceTransaction(PostgresTransaction):
    """See sink.Transaction. ``name`` is that of its sessions, ``rows`` the proof that the input was read to its end."""

    def __init__(self, sink: PostgresSink, cursor: psycopg.Cursor[Any], most: int, *, name: str, rows: Whole) -> None:
        super().__init__(sink, cursor, most)
        self._name = name
        self._rows = rows
        self._ahead: dict[Partition, tuple[Range, int]] = {}

    def fence(self, partition: Partition, span: Range) -> bool:
        """Compare the group's offset with the range's start. Raises EffectError for a range that this one finds lost.

        An earlier attempt has given it up and has no effect: its process has died, perhaps of the effect.
        """
        if found_at(self._group, self.cursor.connection, partition, span, self._sink.generation, lock=False):
            return True
        with self._session() as connection:
            lost = self._group.lose_unconfirmed(connection, self._sink.generation, partition, span.start)
        if lost:
            raise EffectError(
                f"{partition[0]}-{partition[1]} from offset {span.start} on is recorded as lost: an attempt had given "
                "it up, and ended without its effect; started again, the job goes on behind it"
            )
        return False

    def move(self, moved: Move) -> None:
        """Commit the move of the group's offset. Messages that would become dead letters are recorded as lost."""
        self._rows.require_whole()
        partition, span = moved.partition, moved.span
        if moved.fresh:
            # Before the COMMIT, whose answer may be lost.
            self._ahead[partition] = span, moved.fresh
        with self._session() as connection:
            if not found_at(self._group, connection, partition, span, self._sink.generation):
                raise OffsetMoved(partition, span.end)
            self._group.lose_unconfirmed(connection, self._sink.generation, partition)
            self._group.record_losses(connection, [given_up(letter.record, span.topic_id) for letter in moved.dead])
            move(self._group, connection, moved)
            if moved.fresh:
                self._group.mark_unconfirmed(connection, partition, span.start, span.end, 0)

    def apply(self) -> None:
        """Confirm what was given up, and run the effect once. Raises EffectError."""
        connection = self.cursor.connection
        for partition, (span, fresh) in sorted(self._ahead.items()):
            self._group.confirm(connection, partition, span.start, fresh, self._sink.generation)
        if self._applying is None:
            return
        try:
            self._applying.apply(at_most_once=True)
        except RejectedRecords as error:
            for one in error.found:
                partition = one.place[:2]
                _LOG.error("%s-%d offset %d was given up: %s", *one.place, one.error)
                topic_id = self._ahead[partition][0].topic_id
                self._group.record_losses(connection, [given_up(one, topic_id)])
                self._group.take_back(connection, partition, applied=1)

    def ended(self) -> None:
        """Record what was given up as lost, unless it is confirmed. To be called behind an error."""
        # Where it can't be recorded now, the next range or claim does.
        with suppress(psycopg.Error), self._session() as connection:
            for partition, (span, _) in sorted(self._ahead.items()):
                self._group.lose_unconfirmed(connection, self._sink.generation, partition, span.start)

    def _session(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        return connections.transaction(self._sink.url, self._name, reset=False)
