"""What the driver does in the consumers' tables: take-over, new partitions, losses, dead letters, daily partitions.

Every method is one short transaction on the driver's session, which stays open between calls and is replaced if the
server has restarted (see connections). Raises psycopg's errors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from outbox.consumer import connections
from outbox.consumer.errors import JobError
from outbox.consumer.groups import STORED, GroupRows
from outbox.consumer.letters import BY_INDEX, EARLIER, ELSEWHERE, KEYS, RETRIED, DeadLetterStore, RetryRecord
from outbox.consumer.model import AT_MOST_ONCE, Loss, Partition, RejectedRecord, StoredOffset
from outbox.consumer.postgres_errors import clear_schema_errors
from outbox.consumer.retention import KEEP_DAYS, IdRetention
from outbox.consumer.statements import statement
from spark_jobs.dedup.strategies import ColumnType, Strategy, column_types
from spark_jobs.postgres import lock_monitor
from spark_jobs.postgres.direct_copy import DirectCopy, direct_for

_ENDED: Final = "SELECT coalesce(ended_at >= taken_at, false) FROM {groups} WHERE grp = %(grp)s FOR UPDATE"
# A group that has lost a topic is not new, even if its offsets were forgotten. What retention removed before the group
# read anything is a loss, too, and such a group may still begin elsewhere.
_NEW: Final = """
SELECT NOT EXISTS (SELECT FROM {offsets} WHERE grp = %(grp)s)
   AND NOT EXISTS (SELECT FROM {losses} WHERE grp = %(grp)s AND (kind <> 'retention' OR first_offset > 0))"""
_ADDED_ENDS: Final = "SELECT added_ends FROM {groups} WHERE grp = %(grp)s"
_NOTE_ADDED: Final = """
UPDATE {groups} SET added_ends = %(ends)s::jsonb WHERE grp = %(grp)s AND generation = %(generation)s"""
# One partition at a time, so that offsets give the order. Both parts read the index of those to be retried: ORDER BY id
# alone would read the primary key, and in it the dead letters of all groups. A dead letter to be retried in another
# partition may be an earlier one of the same key.
_RETRIED: Final = """
WITH lowest AS (
    SELECT id FROM {dead_letters} WHERE grp = %(grp)s AND topic = ANY(%(topics)s) AND state = 'retry'
     ORDER BY id + 0 LIMIT 1),
first AS (SELECT topic, topic_id, part FROM {dead_letters} WHERE id = (SELECT id FROM lowest)),
page AS MATERIALIZED (
    SELECT letter.*, pg_catalog.sha256(letter.message_key) AS hash
      FROM first CROSS JOIN LATERAL (
            SELECT * FROM {dead_letters} AS one
             WHERE one.grp = %(grp)s AND one.topic = first.topic AND one.topic_id = first.topic_id
               AND one.part = first.part AND one.state = 'retry'
               AND (NOT %(alone)s OR one.id = (SELECT id FROM lowest))
             ORDER BY one.message_offset, one.id LIMIT %(most)s) AS letter),
elsewhere AS MATERIALIZED (
    SELECT letter.hash, ({elsewhere}) AS id
      FROM (SELECT DISTINCT topic, topic_id, part, hash FROM page WHERE hash IS NOT NULL AND %(keep_order)s) AS letter)
SELECT letter.id, letter.topic, letter.part, letter.message_offset, letter.message_key, letter.message_value,
       letter.message_headers, letter.message_time, letter.reason,
       %(keep_order)s AND EXISTS (
           SELECT FROM {dead_letters} AS other WHERE {earlier}),
       coalesce(letter.id > elsewhere.id, false)
  FROM page AS letter LEFT JOIN elsewhere ON elsewhere.hash = letter.hash
 ORDER BY letter.message_offset, letter.id"""
# A message may have been put behind a dead letter that was being retried or discarded: it would wait forever.
_RELEASE: Final = """
UPDATE {dead_letters} AS letter SET state = 'retry'
 WHERE grp = %(grp)s AND topic = ANY(%(topics)s) AND state = 'dead' AND reason = 'behind'
   AND NOT EXISTS (SELECT FROM {dead_letters} AS other WHERE {earlier})"""
# ORDER BY makes it use the index: otherwise all dead letters are read while another group retries many.
_RETRY_WAITS: Final = """(
    SELECT true FROM {dead_letters} WHERE grp = %(grp)s AND topic = ANY(%(topics)s) AND state = 'retry'
     ORDER BY topic LIMIT 1) IS NOT NULL"""
# Discarding and retrying release what is behind; this finds what they could not see, because it was written meanwhile.
# It was written lately, so each look takes the newest ones, and a part of the others: the time does not grow with them.
_LOOKED_AT: Final = """
SELECT letter.id, letter.topic = ANY(%(topics)s) AND NOT EXISTS (
           SELECT FROM {dead_letters} AS other WHERE {earlier}) AS stranded
  FROM {dead_letters} AS letter
 WHERE letter.grp = %(grp)s AND letter.state = 'dead' AND letter.reason = 'behind' {below}
 ORDER BY - letter.id LIMIT {most}"""
_STATE: Final = """
SELECT g.generation, g.owner, {retry_waits} OR look.stranded, look.lowest, o.topic, o.part, o.topic_id, o.next_offset,
       o.leader_epoch, o.epoch_offset
  FROM {groups} AS g CROSS JOIN ({look}) AS look
       LEFT JOIN {offsets} AS o ON o.grp = g.grp AND o.topic = ANY(%(topics)s)
 WHERE g.grp = %(grp)s"""
_NO_LOOK: Final = "SELECT false AS stranded, NULL::bigint AS lowest"
_LOOK: Final = """
WITH newest AS MATERIALIZED ({newest}), others AS MATERIALIZED ({others})
SELECT EXISTS (SELECT FROM newest WHERE stranded) OR EXISTS (SELECT FROM others WHERE stranded) AS stranded,
       (SELECT pg_catalog.min(id) FROM others) AS lowest"""
_NEWEST: Final = 100
_OTHERS: Final = 150
_SETUP_LOCK: Final = 0x6F7574626F780003


@dataclass(frozen=True, slots=True)
class AddedEnds:
    """Where the group's partitions of a topic ended when one that was added to it was looked at.

    before  while it had no messages.
    ends    once it had some; empty until then.
    """

    before: Mapping[Partition, int]
    ends: Mapping[Partition, int]


class PostgresGroupStore:
    """One group's rows: see sink.GroupStore. ``owner`` is only informative; the generation identifies the consumer."""

    def __init__(self, url: str, schema: str, group: str, owner: str) -> None:
        self.url = url
        self.schema = schema
        self.group = group
        self.rows = GroupRows(schema, group, owner)
        """The group's rows, in a transaction of the caller's."""
        self._name = lock_monitor.names(group)[0]
        self.predecessor_did_not_end = False
        """After ``take_over``: the previous driver is still running, or was killed."""
        self._letters = DeadLetterStore(schema, group)
        self._below: int | None = None
        """Where the next look at what is behind dead letters goes on; None: at the newest."""
        self._released = False
        self._maintained_at: float | None = None

    def transaction(
        self, *, reset: bool = False, pinned: bool | None = None
    ) -> AbstractContextManager[psycopg.Connection[Any]]:
        """Run a transaction on the driver's session. ``reset``: it runs statements of the user's."""
        return connections.transaction(self.url, self._name, reset=reset, pinned=pinned)

    def close(self) -> None:
        """Close the group's idle sessions in this process. Later calls open new ones."""
        connections.close(self.url, *lock_monitor.names(self.group))

    def require_utf8(self) -> None:
        """Raise JobError for a database whose encoding lacks characters that a message may have."""
        [(encoding,)] = self._read("SELECT pg_catalog.current_setting('server_encoding')")
        if encoding != "UTF8":
            raise JobError(f"the sink's database is in {encoding}, which has not all characters: it must be UTF8")

    def take_over(self, strategy: str | None = None, atomic: str | None = None) -> int:
        """Become the group's consumer. Returns the new generation; consumers of older ones can't commit any more.

        What the job declares is stored to be shown.
        """
        with self.transaction() as connection:
            before = self._run(connection, _ENDED).fetchone()
            self.predecessor_did_not_end = before is not None and not before[0]
            generation = self.rows.claim_all(connection, strategy, atomic)
            if strategy == AT_MOST_ONCE:
                # Behind the claim, which waits for consumers that write dead letters.
                self._letters.require_none(connection)
            return generation

    def end(self, generation: int) -> None:
        """Record that this driver ended normally."""
        with self.transaction() as connection:
            self.rows.end(connection, generation)

    def setup(self, statements: str | None) -> None:
        """Run the job's ``setup`` statements, one driver at a time."""
        if statements is None:
            return
        with self.transaction(reset=True) as connection:
            connection.execute("SELECT pg_catalog.pg_advisory_xact_lock(%s)", (_SETUP_LOCK,))
            connection.execute(statements.encode())

    def stored(self, topics: Iterable[str]) -> dict[Partition, StoredOffset]:
        rows = self._read(STORED, topics=list(topics))
        return {(topic, part): StoredOffset(*rest) for topic, part, *rest in rows}

    def is_new(self) -> bool:
        """Return whether the group has no offsets of any topic, and has lost nothing that it had.

        Another driver that adds offsets raises the generation, so ``add`` raises Fenced if this is no longer true.
        """
        [(is_new,)] = self._read(_NEW)
        return bool(is_new)

    def add(
        self,
        partitions: Iterable[Partition],
        topic_ids: Mapping[str, str],
        generation: int,
        starts: Mapping[Partition, int] | None = None,
    ) -> None:
        """Add new partitions, all of them or none, at offset 0 or at that of ``starts``.

        Raises Fenced when another consumer has the group.
        """
        starts = starts or {}
        with self.transaction() as connection:
            self.rows.require(connection, generation)
            new = [(partition, topic_ids[partition[0]], starts.get(partition, 0)) for partition in partitions]
            self.rows.add(connection, new, generation)

    def added_ends(self, topic_ids: Mapping[str, str]) -> dict[Partition, AddedEnds]:
        """Return what ``note_added`` has stored last, of these topics in the incarnations that they have now."""
        with clear_schema_errors("reading where added partitions begin"):
            rows = self._read(_ADDED_ENDS)
        stored: Mapping[str, Mapping[str, Any]] = (rows[0][0] if rows else None) or {}
        return {
            (topic, int(part)): AddedEnds(
                # A driver of version 0.1 has noted no ``before``.
                *({(topic, int(at)): int(end) for at, end in one.get(name, {}).items()} for name in ("before", "ends"))
            )
            for topic, parts in stored.items()
            for part, one in parts.items()
            if one["topic_id"] == topic_ids.get(topic)
        }

    def note_added(self, ends: Mapping[Partition, AddedEnds], topic_ids: Mapping[str, str], generation: int) -> None:
        """Store where the other partitions end for each added one, instead of what was stored. Raises Fenced."""
        noted: dict[str, dict[int, Any]] = {}
        for (topic, part), others in ends.items():
            before, after = ({other: end for (_, other), end in one.items()} for one in (others.before, others.ends))
            noted.setdefault(topic, {})[part] = {"topic_id": topic_ids[topic], "before": before, "ends": after}
        with self.transaction() as connection:
            changed = self._run(connection, _NOTE_ADDED, ends=json.dumps(noted), generation=generation)
            if not changed.rowcount:
                self.rows.require(connection, generation)

    def dead_keys(self, topics: Iterable[str]) -> dict[tuple[str, bytes], None]:
        rows = self._read(KEYS, topics=list(topics))
        return {(topic, bytes(key)): None for topic, key in rows}

    def retried(self, topics: Iterable[str], most: int, *, keep_order: bool) -> list[RetryRecord]:
        """Return dead letters to be retried: those of one partition, in the order of their messages.

        With ``keep_order``, dead letters are left out for which one of their key in another partition goes first, and
        those are added that waited behind a dead letter that is gone. The latter are looked for once after each
        ``state``, because that reads all that wait.
        """
        with self.transaction() as connection:
            if keep_order:
                if not self._released:
                    self._run(connection, _RELEASE, topics=list(topics))
                self._run(connection, BY_INDEX)
            values = {"grp": self.group, "topics": list(topics), "most": most, "keep_order": keep_order}
            query = self._retried_query()
            rows = connection.execute(query, {**values, "alone": False}).fetchall()
            if rows and all(row[-1] for row in rows):
                # The one with the lowest id waits for none, and is not among them.
                rows = connection.execute(query, {**values, "alone": True}).fetchall()
        self._released = True
        return [
            RetryRecord(number, (topic, part, offset), key, value, headers, time, reason, behind)
            for number, topic, part, offset, key, value, headers, time, reason, behind, waits in rows
            if not waits
        ]

    def _retried_query(self) -> sql.Composed:
        return self._named(_RETRIED, elsewhere=self._named(ELSEWHERE, retried=sql.SQL(RETRIED)))

    def failed_again(self, failed: Iterable[tuple[int, RejectedRecord]], generation: int) -> None:
        with self.transaction() as connection:
            self.rows.require(connection, generation)
            for number, record in failed:
                self._letters.failed_again(connection, number, record)

    def direct(
        self, effect: object, strategy: Strategy, columns: Mapping[str, str], payload: Sequence[str]
    ) -> DirectCopy | None:
        with self.transaction(pinned=False) as connection:
            return direct_for(connection.cursor(), effect, strategy, columns, payload)

    def column_types(self, table: str) -> dict[str, ColumnType]:
        with self.transaction(pinned=False) as connection:
            return column_types(connection.cursor(), table)

    def state(
        self, topics: Iterable[str], generation: int | None, *, keep_order: bool
    ) -> tuple[dict[Partition, StoredOffset], bool]:
        """Return the stored offsets and whether there are dead letters to retry, in one statement.

        Raises Fenced unless the group is still in this generation. None: before the group is taken over.
        """
        rows = connections.read(
            self.url, self._name, self._state_query(keep_order), {"grp": self.group, "topics": list(topics)}
        )
        if generation is not None:
            self.rows.require_row(rows[0][:2] if rows else None, generation)
            self._released = False
            self._below = rows[0][3]
        stored = {(topic, part): StoredOffset(*rest) for _, _, _, _, topic, part, *rest in rows if topic is not None}
        return stored, bool(rows) and rows[0][2]

    def _state_query(self, keep_order: bool) -> sql.Composed:
        """Return the statement of ``state``. With ``keep_order`` it looks at some of those that are behind others."""
        look: sql.Composable = sql.SQL(_NO_LOOK)
        if keep_order:
            below = sql.SQL("") if self._below is None else sql.SQL("AND - letter.id > {}").format(-self._below)
            look = sql.SQL(_LOOK).format(
                newest=self._named(_LOOKED_AT, below=sql.SQL(""), most=sql.Literal(_NEWEST)),
                others=self._named(_LOOKED_AT, below=below, most=sql.Literal(_OTHERS)),
            )
        return self._named(_STATE, look=look, retry_waits=self._named(_RETRY_WAITS))

    def record_losses(self, found: Iterable[Loss], generation: int) -> None:
        """Record what Kafka lost, once until it is accepted. Raises Fenced."""
        with self.transaction() as connection:
            self.rows.require(connection, generation)
            self.rows.record_losses(connection, found)

    def retention(self, keep_days: int = KEEP_DAYS) -> IdRetention:
        """Return what creates and forgets the days of ids, on the driver's session."""
        return IdRetention(self.url, self.schema, keep_days, self._name)

    def maintain_days(self, keep_days: int, report: Callable[[str, Mapping[str, Any]], None]) -> None:
        """Create and forget days of ids, once an hour, and report what could not be done."""
        if self._maintained_at is not None and time.monotonic() - self._maintained_at <= 3600:
            return
        retention = self.retention(keep_days)
        for result in (retention.make(), retention.forget()):
            if result.problem:
                report("days of processed_messages", result.problem_figures())
        self._maintained_at = time.monotonic()

    def _named(self, query: LiteralString, **parts: sql.Composable) -> sql.Composed:
        return statement(self.schema, query, earlier=sql.SQL(EARLIER), **parts)

    def _run(self, connection: psycopg.Connection[Any], query: LiteralString, **values: object) -> psycopg.Cursor[Any]:
        return connection.execute(self._named(query), {"grp": self.group, **values})

    def _read(self, query: LiteralString, **values: object) -> list[tuple[Any, ...]]:
        return connections.read(self.url, self._name, self._named(query), {"grp": self.group, **values})
