"""A group's dead letters: messages that could not be applied, and those that wait behind one of their key.

They share the table, its reasons and states with the Spark consumers, so the same commands list, retry and discard them
(`outbox dead-letters --side consumer`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import psycopg
from psycopg import sql

from outbox.consumer.letters import BEHIND, BY_INDEX, EARLIER, ELSEWHERE, KEYS, RETRIED, DeadLetterStore, RetryRecord
from outbox.consumer.model import Partition
from outbox.consumer.statements import columns, statement
from outbox.inbox._message import RetriedMessage

_FORGIVEN: Final = f"{BEHIND}; it is too old, and was retried all the same"
"""The error of one that is too old, and waits although an operator has it retried: its age is not checked again.

Both are stored and compared: never reword them.
"""
LOOKED_AT: Final = 200
"""How many keys are looked at in one statement that releases: what waits must cost nothing."""

# LIMIT keeps it a look into the index for each: as a join it reads all letters.
_EARLIER: Final = "SELECT true FROM {dead_letters} AS other WHERE {earlier} LIMIT 1"
_ANY: Final = """
SELECT topic, part,
       (SELECT true FROM {dead_letters} AS letter
         WHERE grp = %(grp)s AND letter.topic = mine.topic AND letter.part = mine.part AND state = 'retry'
         ORDER BY message_offset, id LIMIT 1) IS NOT NULL,
       (SELECT true FROM {dead_letters} AS letter
         WHERE grp = %(grp)s AND letter.topic = mine.topic AND letter.part = mine.part
           AND state = 'dead' AND reason = 'behind'
         ORDER BY pg_catalog.sha256(message_key), message_offset LIMIT 1) IS NOT NULL
  FROM unnest(%(topics)s::text[], %(parts)s::integer[]) AS mine (topic, part)"""
# The first letter of each key, from key to key through the index: however many wait behind one, one of them is read.
_FIRST: Final = """
SELECT pg_catalog.sha256(message_key) AS hash, grp, topic, topic_id, part, id, message_offset, message_key
  FROM {dead_letters}
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s AND state = 'dead' AND reason = 'behind'
   AND pg_catalog.sha256(message_key) > {after} ORDER BY pg_catalog.sha256(message_key), message_offset LIMIT 1"""
_KEYS_BEHIND: Final = """
WITH RECURSIVE found AS (
    ({first}) UNION ALL SELECT following.* FROM found CROSS JOIN LATERAL ({following}) AS following),
letter AS (SELECT * FROM found LIMIT %(most)s)
SELECT hash, CASE WHEN ({earlier}) IS NULL THEN coalesce(({retried}) > id, true) ELSE false END FROM letter"""
# Messages that were put behind a dead letter while that was being retried or discarded: they would wait forever.
# Without those that would be held back again: a partition's messages wait while any of its letters is retried.
_RELEASE: Final = """
WITH first AS MATERIALIZED (
    SELECT letter.*, ({elsewhere}) AS id
      FROM (SELECT DISTINCT topic, topic_id, part, pg_catalog.sha256(message_key) AS hash FROM {dead_letters}
             WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s AND state = 'dead' AND reason = 'behind'
               AND pg_catalog.sha256(message_key) = ANY(%(hashes)s)) AS letter)
UPDATE {dead_letters} AS letter SET state = 'retry'
  FROM first
 WHERE letter.grp = %(grp)s AND letter.topic = first.topic AND letter.part = first.part
   AND pg_catalog.sha256(letter.message_key) = first.hash AND letter.topic_id = first.topic_id
   AND letter.state = 'dead' AND letter.reason = 'behind' AND coalesce(first.id > letter.id, true)
   AND ({earlier}) IS NULL"""
# Of those to be retried an earlier one of the key may be in another partition, where another member retries it, or an
# operator may have it retried at any time.
_HOLD_BACK: Final = """
WITH page AS MATERIALIZED (
    SELECT id, topic, topic_id, part, pg_catalog.sha256(message_key) AS hash FROM {dead_letters}
     WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s AND state = 'retry'
     ORDER BY message_offset, id LIMIT %(most)s),
first AS MATERIALIZED (
    SELECT letter.*, ({elsewhere}) AS id
      FROM (SELECT DISTINCT topic, topic_id, part, hash FROM page WHERE hash IS NOT NULL) AS letter),
held_back AS (
    UPDATE {dead_letters} AS letter
       SET state = 'dead', reason = 'behind', sqlstate = NULL,
           error = CASE WHEN reason = 'too-old' OR error = %(forgiven)s THEN %(forgiven)s ELSE %(behind)s END
      FROM first
     WHERE first.id IS NOT NULL AND letter.grp = %(grp)s AND letter.topic = first.topic
       AND pg_catalog.sha256(letter.message_key) = first.hash AND letter.topic_id = first.topic_id
       AND letter.part = first.part AND letter.state <> 'dead' AND letter.id > first.id)
SELECT page.id, coalesce(page.id < first.id, true)
  FROM page LEFT JOIN first ON first.hash = page.hash AND first.topic_id = page.topic_id"""
# A topic that was created again may have fewer partitions, and the group has none of the others since.
_GONE: Final = """
SELECT topic, part, (
       SELECT pg_catalog.min(first.part) FROM {offsets} AS first
        WHERE first.grp = %(grp)s AND first.topic = letter.topic)
  FROM (SELECT DISTINCT topic, part FROM {dead_letters} WHERE grp = %(grp)s AND topic = ANY(%(topics)s)) AS letter
 WHERE NOT EXISTS (
       SELECT FROM {offsets} AS known
        WHERE known.grp = %(grp)s AND known.topic = letter.topic AND known.part = letter.part)"""
_WAITING: Final = """
SELECT letter.id, CASE WHEN letter.error = %(forgiven)s THEN 'too-old' ELSE letter.reason END,
       ({earlier}) IS NOT NULL, letter.message_offset, letter.message_key, letter.message_value, letter.message_headers,
       letter.message_time
  FROM {dead_letters} AS letter
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s AND state = 'retry'
 ORDER BY message_offset, id LIMIT 1 FOR UPDATE OF letter"""
_BLOCKED: Final = "SELECT FROM {dead_letters} AS letter WHERE letter.id = %(letter)s AND ({earlier}) IS NOT NULL"


class Letters(DeadLetterStore):
    """The dead letters of one group, as its members see them: partition by partition, and key by key."""

    def __init__(self, schema: str, group: str) -> None:
        super().__init__(schema, group)
        self._parts |= {
            "earlier": statement(schema, _EARLIER, earlier=sql.SQL(EARLIER)),
            "retried": statement(schema, ELSEWHERE, retried=sql.SQL(RETRIED)),
            "elsewhere": statement(schema, ELSEWHERE, retried=sql.SQL("")),
            "first": statement(schema, _FIRST, after=sql.SQL("%(after)s::bytea")),
            "following": statement(schema, _FIRST, after=sql.SQL("found.hash")),
        }

    def keys(self, connection: psycopg.Connection[Any], topic: str) -> set[bytes]:
        """Return the keys of a topic's dead letters: later messages of these wait behind them."""
        return {bytes(key) for _, key in self._run(connection, KEYS, topics=[topic])}

    def gone(self, connection: psycopg.Connection[Any], topics: Collection[str]) -> dict[Partition, Partition]:
        """Return partitions with dead letters that the group no longer has, and for each the topic's first one."""
        rows = self._run(connection, _GONE, topics=list(topics))
        return {(topic, part): (topic, first) for topic, part, first in rows}

    def by_index(self, connection: psycopg.Connection[Any]) -> None:
        """Keep this transaction's plans to the indexes. To be called before the methods that look for changes."""
        self._run(connection, BY_INDEX)

    def with_letters(
        self, connection: psycopg.Connection[Any], partitions: Collection[Partition]
    ) -> tuple[set[Partition], set[Partition]]:
        """Return those of the partitions with dead letters to be retried, and those with some behind others."""
        rows = self._run(connection, _ANY, **columns(partitions)).fetchall()
        return {row[:2] for row in rows if row[2]}, {row[:2] for row in rows if row[3]}

    def release(self, connection: psycopg.Connection[Any], partition: Partition, after: bytes) -> tuple[bool, bytes]:
        """Mark for a retry what waits behind no dead letter any more, of the next LOOKED_AT keys of a partition.

        after  where the last call ended, b"" at first.

        Returns whether there was any, and where the next call begins.
        """
        values: dict[str, Any] = {"topic": partition[0], "part": partition[1]}
        rows = self._run(connection, _KEYS_BEHIND, **values, after=after, most=LOOKED_AT).fetchall()
        hashes = [hash_ for hash_, free in rows if free]
        released = self._run(connection, _RELEASE, **values, hashes=hashes).rowcount if hashes else 0
        return released > 0, bytes(rows[-1][0]) if len(rows) == LOOKED_AT else b""

    def hold_back(self, connection: psycopg.Connection[Any], partition: Partition, most: int) -> set[int] | None:
        """Put behind others what is to be retried although an earlier one of its key is in another partition.

        Looks at the keys of the first ``most`` of a partition. Returns the ids of the others, for ``next``; None if
        nothing is to be retried.
        """
        values: dict[str, Any] = {"topic": partition[0], "part": partition[1]}
        rows = self._run(connection, _HOLD_BACK, **values, most=most, behind=BEHIND, forgiven=_FORGIVEN).fetchall()
        return {number for number, first in rows if first} if rows else None

    def next(
        self, connection: psycopg.Connection[Any], partition: Partition, cleared: Collection[int]
    ) -> RetriedMessage | None:
        """Return the first dead letter of a partition that is to be retried, and lock it. None if it is not cleared.

        cleared  as ``hold_back`` has returned it: one that was marked since may have an earlier one elsewhere.
        """
        values = {"topic": partition[0], "part": partition[1], "forgiven": _FORGIVEN}
        row = self._run(connection, _WAITING, **values).fetchone()
        if row is None or row[0] not in cleared:
            return None
        number, reason, blocked, offset, key, value, headers, time = row
        # Another member may have had the lock, and the first look is from before it had it.
        blocked = blocked or self._run(connection, _BLOCKED, letter=number).fetchone() is not None
        return RetriedMessage(RetryRecord(number, (*partition, offset), key, value, headers, time, reason, blocked))
