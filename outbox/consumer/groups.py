"""A group's rows in the database of the effects: its claims, its positions, and the ids that were applied.

A generation that rises with every claim is the fencing token, and a position moves in the transaction of the effects. A
member of the inbox claims single partitions: its claim raises the group's generation, and stamps the claimed partitions
alone with it. A Spark driver claims all of them.

Every transaction that moves a position begins with ``fence`` or ``fence_all``, and ends in ``move``. The inbox gives
``move`` the ids. A Spark task has stored them already, where its rows are.

At-most-once there are two transactions: the first one calls ``move`` and ``mark_unconfirmed``, the second one calls
``confirm`` and has the effect. What stays unconfirmed is lost: the next claim records that. The crash tables
are in outbox/inbox/_at_most_once.py and spark_jobs/postgres/at_most_once.py.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg
from psycopg import sql

from outbox._clients.clock import DatabaseClock
from outbox._clients.postgres import SYNCHRONOUS
from outbox.consumer.errors import Fenced, OffsetMoved
from outbox.consumer.ids import NO_TIME, day
from outbox.consumer.model import ClaimedOffset, Loss, Partition, StoredOffset
from outbox.consumer.statements import columns, cursor, execute, statement

# The row lock serializes the group's claims.
_NEXT_GENERATION: Final = """
INSERT INTO {groups} AS g (grp, owner, strategy, atomic) VALUES (%(grp)s, %(owner)s, %(strategy)s, %(atomic)s)
ON CONFLICT (grp) DO UPDATE SET generation = g.generation + 1, owner = excluded.owner, taken_at = pg_catalog.now(),
                                strategy = excluded.strategy, atomic = excluded.atomic
RETURNING generation"""
STORED: Final = """
SELECT topic, part, topic_id, next_offset, leader_epoch, epoch_offset
  FROM {offsets} WHERE grp = %(grp)s AND topic = ANY(%(topics)s)"""
"""SQL: the partition, and the fields of a StoredOffset."""
_KNOWN: Final = "SELECT DISTINCT topic FROM {offsets} WHERE grp = %(grp)s AND topic = ANY(%(topics)s)"
_ADD: Final = """
INSERT INTO {offsets} (grp, topic, part, topic_id, next_offset, generation)
SELECT %(grp)s, topic, part, topic_id, next_offset, %(generation)s
  FROM unnest(%(topics)s::text[], %(parts)s::integer[], %(topic_ids)s::text[], %(starts)s::bigint[])
    AS new (topic, part, topic_id, next_offset)
ON CONFLICT DO NOTHING"""
# Waits for members that are about to commit, and shuts out all that come later.
_CLAIM: Final = """
UPDATE {offsets} AS o SET generation = %(generation)s
  FROM unnest(%(topics)s::text[], %(parts)s::integer[]) AS w (topic, part)
 WHERE o.grp = %(grp)s AND o.topic = w.topic AND o.part = w.part
RETURNING o.topic, o.part, o.topic_id, o.next_offset, o.leader_epoch, o.epoch_offset"""
CLAIM_ALL: Final = "UPDATE {offsets} SET generation = %(generation)s WHERE grp = %(grp)s"
"""SQL: waits for transactions that are about to commit, and shuts out all that come later."""
# The lock holds off a claim until this transaction ends. A member that stops with the lock must not hold it forever.
_FENCE: Final = """
SELECT topic_id, next_offset, generation, pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()),
       pg_catalog.set_config('idle_in_transaction_session_timeout',
           coalesce(%(idle)s, pg_catalog.current_setting('idle_in_transaction_session_timeout')), true), {transaction}
  FROM {offsets} WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s {lock}"""
_TRANSACTION: Final = "pg_catalog.pg_current_xact_id()::text"
_WAS_COMMITTED: Final = "SELECT pg_catalog.pg_xact_status(%(transaction)s::text::xid8) = 'committed'"
# Ordered, so that two of these can't deadlock. A claim can deadlock with one: Postgres ends either, and it is retried.
_FENCE_ALL: Final = """
SELECT o.topic, o.part, o.topic_id, o.next_offset, o.generation,
       pg_catalog.date_part('epoch', pg_catalog.clock_timestamp())
  FROM {offsets} AS o JOIN unnest(%(topics)s::text[], %(parts)s::integer[]) AS w (topic, part)
       ON o.topic = w.topic AND o.part = w.part
 WHERE o.grp = %(grp)s ORDER BY o.topic, o.part FOR UPDATE OF o"""
_MOVE: Final = """
UPDATE {offsets}
   SET next_offset = greatest(next_offset, %(end)s::bigint, %(reached)s::bigint),
       updated_at = CASE WHEN %(end)s::bigint IS NULL THEN updated_at ELSE pg_catalog.now() END,
       log_end = coalesce(greatest(%(log_end)s::bigint, %(reached)s::bigint), log_end),
       leader_epoch = coalesce(%(leader_epoch)s::integer, leader_epoch),
       epoch_offset = CASE WHEN %(leader_epoch)s::integer IS NULL THEN epoch_offset ELSE %(end)s::bigint END,
       applied = applied + %(applied)s + {fresh}, duplicates = duplicates + %(duplicates)s - {fresh},
       dead = dead + %(dead)s
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s"""
_FRESH: Final = "(SELECT pg_catalog.count(*) FROM fresh)"
# Every INSERT into processed_messages has this ORDER BY, and COPY the same order (spark_jobs/dedup/processed.py): two
# transactions with the same ids wait for each other in one direction only, and never in a circle.
_MOVE_WITH_IDS: Final = """
WITH fresh AS (
    INSERT INTO {processed_messages} (grp, day, message_id)
    SELECT %(grp)s, day, id FROM unnest(%(days)s::date[], %(ids)s::uuid[]) AS new (day, id) ORDER BY day, id
        ON CONFLICT DO NOTHING RETURNING message_id),
moved AS ({move})
SELECT array(SELECT message_id FROM fresh), (pg_catalog.clock_timestamp() AT TIME ZONE 'UTC')::date"""
_MARK_UNCONFIRMED: Final = """
UPDATE {offsets} SET unconfirmed_from = %(first)s, unconfirmed_end = %(end)s, applied = applied - %(pending)s
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s RETURNING {synchronous}"""
_CONFIRM: Final = """
UPDATE {offsets} SET unconfirmed_from = NULL, unconfirmed_end = NULL, applied = applied + %(applied)s
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s AND unconfirmed_from = %(first)s
   AND generation = %(generation)s"""
_LOSE_UNCONFIRMED: Final = """
WITH unconfirmed AS (
    SELECT grp, topic, topic_id, part, unconfirmed_from, unconfirmed_end FROM {offsets}
     WHERE grp = %(grp)s AND generation = %(generation)s AND unconfirmed_from IS NOT NULL
       AND (%(topic)s::text IS NULL OR (topic = %(topic)s AND part = %(part)s))
       AND (%(first)s::bigint IS NULL OR unconfirmed_from = %(first)s) FOR UPDATE),
cleared AS (
    UPDATE {offsets} AS o SET unconfirmed_from = NULL, unconfirmed_end = NULL FROM unconfirmed AS u
     WHERE o.grp = u.grp AND o.topic = u.topic AND o.part = u.part)
INSERT INTO {losses} (grp, topic, topic_id, part, first_offset, end_offset, kind, detail)
SELECT grp, topic, topic_id, part, unconfirmed_from, unconfirmed_end, 'given-up',
       pg_catalog.format('%%s-%%s: messages %%s to %%s were given up (at-most-once): their position was committed, and '
                         'it is not known whether they had their effect', topic, part, unconfirmed_from,
                         unconfirmed_end - 1)
  FROM unconfirmed RETURNING detail"""
# One open row for each partition and kind of loss in Kafka. It grows while retention removes more messages of a halted
# group. Each range that was given up has its own.
_RECORD: Final = """
INSERT INTO {losses} AS l (grp, topic, topic_id, part, first_offset, end_offset, kind, detail)
VALUES (%(grp)s, %(topic)s, %(topic_id)s, %(part)s, %(first_offset)s, %(end_offset)s, %(kind)s, %(detail)s)
ON CONFLICT (grp, topic, part, kind) WHERE accepted_at IS NULL AND kind <> 'given-up'
DO UPDATE SET first_offset = least(l.first_offset, excluded.first_offset),
              end_offset = greatest(l.end_offset, excluded.end_offset), detail = excluded.detail
        WHERE l.detail <> excluded.detail"""
_GENERATIONS: Final = """
SELECT o.topic, o.part, o.generation
  FROM {offsets} AS o JOIN unnest(%(topics)s::text[], %(parts)s::integer[]) AS w (topic, part)
       ON o.topic = w.topic AND o.part = w.part
 WHERE o.grp = %(grp)s"""
_STILL_MINE: Final = "SELECT generation, owner FROM {groups} WHERE grp = %(grp)s FOR SHARE"
_FORGOTTEN: Final = "SELECT forgotten_before FROM {groups} WHERE grp = %(grp)s"
_END: Final = "UPDATE {groups} SET ended_at = pg_catalog.now() WHERE grp = %(grp)s AND generation = %(generation)s"

_LOG: Final = logging.getLogger(__name__)

ONE_CONSUMER: Final = (
    "One consumer per group: stop the other, or give this job a group of its own; after `outbox offsets`, start this "
    "one again"
)


class GroupRows:
    """One group's rows. Every method runs in the transaction of the connection that it is given.

    owner         who claims, to be shown.
    idle_seconds  after which Postgres ends a fenced transaction in which nothing happens; None: as the role has it.
    """

    def __init__(self, schema: str, name: str, owner: str = "", *, idle_seconds: float | None = None) -> None:
        self.name = name
        self.clock = DatabaseClock()
        """The database's, read with each ``fence`` and ``fence_all``."""
        self._schema = schema
        self._owner = owner
        self._idle = None if idle_seconds is None else f"{int(idle_seconds * 1000)}ms"

    def stored(self, connection: psycopg.Connection[Any], topics: Collection[str]) -> dict[Partition, StoredOffset]:
        """Return the positions of the partitions that the group has of these topics."""
        rows = self._run(connection, STORED, topics=list(topics))
        return {(topic, part): StoredOffset(*rest) for topic, part, *rest in rows}

    def claim(
        self,
        connection: psycopg.Connection[Any],
        partitions: Collection[Partition],
        starts: Mapping[Partition, tuple[str, int]],
        strategy: str | None = None,
    ) -> dict[Partition, ClaimedOffset]:
        """Claim partitions, and return their positions. Earlier claims of these can't commit any more.

        starts  for each partition, the topic's id and where a group that is new to the topic begins. Has every
                partition of such a topic. A partition that was added to a known topic begins at 0.
        """
        generation = self._next_generation(connection, strategy, None)
        topics = sorted({topic for topic, _ in starts})
        known = {topic for (topic,) in self._run(connection, _KNOWN, topics=topics)}
        # All partitions of a new topic at once: another member would take the rest for added ones.
        added = [
            ((topic, part), id_, 0 if topic in known else start)
            for (topic, part), (id_, start) in sorted(starts.items())
        ]
        new = [one for one in added if one[0] in partitions or one[0][0] not in known]
        self.add(connection, new, generation)
        rows = self._run(connection, _CLAIM, None, **columns(partitions), generation=generation).fetchall()
        self.lose_unconfirmed(connection, generation)
        return {(topic, part): ClaimedOffset(*stored, generation=generation) for topic, part, *stored in rows}

    def claim_all(self, connection: psycopg.Connection[Any], strategy: str | None, atomic: str | None) -> int:
        """Claim all partitions that the group has, and return the claim's generation."""
        generation = self._next_generation(connection, strategy, atomic)
        self._run(connection, CLAIM_ALL, generation=generation)
        self.lose_unconfirmed(connection, generation)
        return generation

    def add(
        self, connection: psycopg.Connection[Any], new: Sequence[tuple[Partition, str, int]], generation: int
    ) -> None:
        """Add partitions that the group does not have: each with its topic's id, and where it begins."""
        values = columns([partition for partition, _, _ in new])
        values |= {"topic_ids": [id_ for _, id_, _ in new], "starts": [start for _, _, start in new]}
        self._run(connection, _ADD, None, **values, generation=generation)

    def fence(
        self, connection: psycopg.Connection[Any], partition: Partition, expected: ClaimedOffset, *, lock: bool = True
    ) -> str | None:
        """Lock a partition's row until the transaction ends; without ``lock`` only look.

        Returns the transaction, for ``was_committed``; without ``lock`` None. Raises OffsetMoved when the row is
        further than ``expected``, and Fenced when another claim has it, or it is gone, of another topic, or set back.
        """
        asked_at = time.monotonic()
        query = statement(
            self._schema,
            _FENCE,
            lock=sql.SQL("FOR UPDATE" if lock else ""),
            transaction=sql.SQL(_TRANSACTION if lock else "NULL"),
        )
        row = self._run(connection, query, partition, idle=self._idle).fetchone()
        if row is not None:
            self.clock.note(row[3], asked_at)
        if row is None or row[0] != expected.topic_id or row[2] != expected.generation or row[1] < expected.next_offset:
            now = "its row is gone" if row is None else f"it stands at offset {row[1]} in generation {row[2]}"
            raise Fenced(
                f"group {self.name} was taken over from generation {expected.generation}: {partition[0]}-"
                f"{partition[1]} at offset {expected.next_offset}, {now}"
            )
        if row[1] > expected.next_offset:
            raise OffsetMoved(partition, row[1])
        transaction: str | None = row[5]
        return transaction

    def was_committed(self, connection: psycopg.Connection[Any], transaction: str) -> bool:
        """Return whether a transaction that has ended, and had called ``fence``, was committed.

        One of which the server knows nothing was lost in a failover. See
        https://www.postgresql.org/docs/current/functions-info.html#FUNCTIONS-PG-SNAPSHOT.
        """
        try:
            [(committed,)] = self._run(connection, _WAS_COMMITTED, transaction=transaction)
        except psycopg.errors.InvalidParameterValue:
            return False
        return bool(committed)

    def fence_all(self, connection: psycopg.Connection[Any], expected: Mapping[Partition, ClaimedOffset]) -> bool:
        """Lock the rows of several partitions until the transaction ends.

        Returns whether each is exactly as in ``expected``; ``fence`` says of a single one why it is not.
        """
        asked_at = time.monotonic()
        rows = self._run(connection, _FENCE_ALL, None, **columns(expected)).fetchall()
        if rows:
            self.clock.note(rows[0][5], asked_at)
        found = {(topic, part): tuple(stored) for topic, part, *stored, _ in rows}
        return found == {at: (one.topic_id, one.next_offset, one.generation) for at, one in expected.items()}

    def generations(
        self, connection: psycopg.Connection[Any], partitions: Collection[Partition]
    ) -> dict[Partition, int]:
        """Return the generation of the claim that has each partition now."""
        rows = self._run(connection, _GENERATIONS, None, **columns(partitions))
        return {(topic, part): generation for topic, part, generation in rows}

    def move(
        self,
        connection: psycopg.Connection[Any],
        partition: Partition,
        end: int | None,
        *,
        reached: int | None = None,
        log_end: int | None = None,
        leader_epoch: int | None = None,
        ids: Sequence[UUID] = (),
        applied: int = 0,
        duplicates: int = 0,
        dead: int = 0,
    ) -> tuple[set[UUID], dt.date]:
        """Move a partition's position, in a transaction that has called ``fence``, and remember ids.

        Returns the new ones of these, and the database's day in UTC; without ids an empty set and NO_TIME.

        end           the next offset to apply; None: only the figures change, as when dead letters are retried.
        reached       there is no message between ``end`` and this offset: the position moves there.
        leader_epoch  of a leader that had the log up to ``end``.
        applied       messages that are applied, besides those of ``ids``; the same with ``duplicates``.
        dead          messages that become dead letters.
        """
        # Ids count as duplicates, minus those that turn out to be new.
        move = statement(self._schema, _MOVE, fresh=sql.SQL(_FRESH if ids else "0"))
        values: dict[str, object] = {
            "end": end,
            "reached": reached,
            "log_end": log_end,
            "leader_epoch": leader_epoch,
            "applied": applied,
            "duplicates": duplicates + len(ids),
            "dead": dead,
        }
        if not ids:
            self._run(connection, move, partition, **values)
            return set(), NO_TIME
        values |= {"days": [day(one) for one in ids], "ids": list(ids)}
        query = statement(self._schema, _MOVE_WITH_IDS, move=move)
        [(new, today)] = self._run(connection, query, partition, **values)
        return set(new), today

    def take_back(self, connection: psycopg.Connection[Any], partition: Partition, applied: int, dead: int = 0) -> None:
        """Subtract messages that ``move`` has counted as applied, or as dead letters."""
        self.move(connection, partition, None, applied=-applied, dead=-dead)

    def mark_unconfirmed(
        self, connection: psycopg.Connection[Any], partition: Partition, first: int, end: int, pending: int
    ) -> None:
        """At-most-once, after ``move``: record that the effect of these offsets is to be confirmed, or lost.

        The COMMIT is durable before the effect: a server that forgot it would have its messages read again.

        pending  how many messages to subtract from those that ``move`` has counted as applied; ``confirm`` adds those
                 whose handler is called.
        """
        query = statement(self._schema, _MARK_UNCONFIRMED, synchronous=sql.SQL(SYNCHRONOUS))
        self._run(connection, query, partition, first=first, end=end, pending=pending)

    def confirm(
        self, connection: psycopg.Connection[Any], partition: Partition, first: int, applied: int, generation: int
    ) -> None:
        """Clear the mark of the range that begins at ``first``, in the transaction of its effect, before the effect.

        Raises Fenced when it is recorded as lost already: then there must be no effect.
        """
        values = {"first": first, "applied": applied, "generation": generation}
        if self._run(connection, _CONFIRM, partition, **values).rowcount == 0:
            raise Fenced(f"group {self.name}: {partition[0]}-{partition[1]} from offset {first} on is recorded as lost")

    def lose_unconfirmed(
        self,
        connection: psycopg.Connection[Any],
        generation: int,
        partition: Partition | None = None,
        first: int | None = None,
    ) -> int:
        """Record as lost what is marked and not confirmed in the partitions of a claim, or in one of them.

        first  only the range that begins there: another one may be under way.

        Returns how many ranges were lost. Locks the rows: a transaction that confirms has ended by then, or fails.
        """
        rows = self._run(connection, _LOSE_UNCONFIRMED, partition, generation=generation, first=first).fetchall()
        for (detail,) in rows:
            _LOG.error("group %s: %s", self.name, detail)
        return len(rows)

    def forgotten_before(self, connection: psycopg.Connection[Any], ids: Collection[UUID], today: dt.date) -> dt.date:
        """Return the day before which the group has forgotten ids; NO_TIME if it has forgotten none.

        Also NO_TIME, without a query, if none of these ids is of a past day. To be called after ``move``, which may
        have waited for the transaction that forgets.
        """
        if not any(NO_TIME < day(one) < today for one in ids):
            return NO_TIME
        row = self._run(connection, _FORGOTTEN).fetchone()
        before: dt.date = NO_TIME if row is None or row[0] is None else row[0]
        return before

    def record_losses(self, connection: psycopg.Connection[Any], found: Iterable[Loss]) -> None:
        """Record losses: what Kafka lost in one open row, which grows until an operator accepts it."""
        rows = [{"grp": self.name, **asdict(loss)} for loss in found]
        if rows:  # without, executemany() asks the server for nothing
            cursor(connection).executemany(statement(self._schema, _RECORD), rows)

    def end(self, connection: psycopg.Connection[Any], generation: int) -> None:
        """Record a normal end, unless another member has claimed partitions since."""
        self._run(connection, _END, generation=generation)

    def require(self, connection: psycopg.Connection[Any], generation: int, *, advice: str = ONE_CONSUMER) -> None:
        """Raise Fenced, with this advice, unless the group is still in this generation.

        The row lock prevents a claim until the transaction ends.
        """
        self.require_row(self._run(connection, _STILL_MINE).fetchone(), generation, advice)

    def require_row(self, row: Sequence[Any] | None, generation: int, advice: str = ONE_CONSUMER) -> None:
        """Do the same with generation and owner as they were read; None: there is no such row."""
        if row is None or row[0] != generation:
            now = "its row is gone" if row is None else f"generation {row[0]} now, by {row[1]}"
            raise Fenced(f"group {self.name} was taken over from generation {generation}: {now}. {advice}")

    def _next_generation(self, connection: psycopg.Connection[Any], strategy: str | None, atomic: str | None) -> int:
        [(raised,)] = self._run(connection, _NEXT_GENERATION, owner=self._owner, strategy=strategy, atomic=atomic)
        return int(raised)

    def _run(
        self,
        connection: psycopg.Connection[Any],
        query: LiteralString | sql.Composed,
        partition: Partition | None = None,
        **values: object,
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        topic, part = partition or (None, None)
        composed = statement(self._schema, query) if isinstance(query, str) else query
        return execute(connection, composed, {"grp": self.name, "topic": topic, "part": part, **values})
