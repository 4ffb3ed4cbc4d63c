"""The driver's side of the consumers' tables: take-over, new partitions, losses, dead letters, partitions of days.

Every method is one short transaction on a connection of its own, so a database that restarts between rounds is met by
the next call. Errors of the database pass through as psycopg raises them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import psycopg
from psycopg import sql

from outbox.urls import libpq_url
from spark_jobs import letters
from spark_jobs.applying import Culprit
from spark_jobs.direct import Direct, direct_for
from spark_jobs.errors import Fenced, JobError
from spark_jobs.letters import Retried
from spark_jobs.planner import Loss, Partition, Stored
from spark_jobs.retention import KEEP_DAYS, Memory, Upkeep
from spark_jobs.strategies import Strategy, column_types

_TAKE: Final = """
INSERT INTO {groups} AS g (grp, owner) VALUES (%(grp)s, %(owner)s)
ON CONFLICT (grp) DO UPDATE SET generation = g.generation + 1, owner = excluded.owner, taken_at = now()
RETURNING generation"""
# Waits for tasks of the older generation that are about to commit, and shuts out all that come later.
_FENCE: Final = "UPDATE {offsets} SET generation = %(generation)s WHERE grp = %(grp)s"
_STILL_MINE: Final = "SELECT generation, owner FROM {groups} WHERE grp = %(grp)s FOR SHARE"
_STORED: Final = (
    "SELECT topic, part, topic_id, next_offset FROM {offsets} WHERE grp = %(grp)s AND topic = ANY(%(topics)s)"
)
_ADD: Final = """
INSERT INTO {offsets} (grp, topic, part, topic_id, next_offset, generation)
VALUES (%(grp)s, %(topic)s, %(part)s, %(topic_id)s, %(start)s, %(generation)s) ON CONFLICT DO NOTHING"""
_NEW: Final = "SELECT NOT EXISTS (SELECT FROM {offsets} WHERE grp = %(grp)s)"
# One row for each place and kind until it is accepted. While the group stands, retention goes on: the row grows.
_LOSS: Final = """
INSERT INTO {losses} AS l (grp, topic, topic_id, part, first_offset, end_offset, kind, detail)
VALUES (%(grp)s, %(topic)s, %(topic_id)s, %(part)s, %(first)s, %(end)s, %(kind)s, %(detail)s)
ON CONFLICT (grp, topic, part, kind) WHERE accepted_at IS NULL
DO UPDATE SET first_offset = least(l.first_offset, excluded.first_offset),
              end_offset = greatest(l.end_offset, excluded.end_offset), detail = excluded.detail
        WHERE l.detail <> excluded.detail"""
_DEAD_KEYS: Final = """
SELECT DISTINCT topic, message_key FROM {dead_letters}
 WHERE grp = %(grp)s AND topic = ANY(%(topics)s) AND message_key IS NOT NULL"""
# One partition at a time, so that offsets say the order. A key that has moved to another partition, because some were
# added, has its order from the letters' own ids.
_RETRIED: Final = """
WITH first AS (
    SELECT topic, topic_id, part FROM {dead_letters}
     WHERE grp = %(grp)s AND topic = ANY(%(topics)s) AND state = 'retry' ORDER BY id LIMIT 1)
SELECT id, topic, part, message_offset, message_key, message_value, message_headers, message_time, reason,
       %(keep_order)s AND EXISTS (
           SELECT FROM {dead_letters} AS earlier
            WHERE earlier.grp = letter.grp AND earlier.topic = letter.topic
              AND earlier.state = 'dead' AND earlier.reason <> 'behind'
              AND sha256(earlier.message_key) = sha256(letter.message_key)
              AND CASE WHEN earlier.part = letter.part THEN earlier.message_offset < letter.message_offset
                       ELSE earlier.id < letter.id END)
  FROM {dead_letters} AS letter JOIN first USING (topic, topic_id, part)
 WHERE grp = %(grp)s AND state = 'retry'
 ORDER BY message_offset, id LIMIT %(most)s"""
# A message may have gone behind one that a person was just retrying or discarding: nobody would come back for it.
_RELEASE: Final = """
UPDATE {dead_letters} AS letter SET state = 'retry'
 WHERE grp = %(grp)s AND topic = ANY(%(topics)s) AND state = 'dead' AND reason = 'behind'
   AND NOT EXISTS (
       SELECT FROM {dead_letters} AS other
        WHERE other.grp = letter.grp AND other.topic = letter.topic
          AND sha256(other.message_key) = sha256(letter.message_key)
          AND other.state = 'dead' AND other.reason <> 'behind'
          AND CASE WHEN other.part = letter.part THEN other.message_offset < letter.message_offset
                   ELSE other.id < letter.id END)"""
_SETUP_LOCK: Final = 0x6F7574626F780003


class Store:
    """One group's rows. ``owner`` is shown to people; the generation is what counts."""

    def __init__(self, url: str, schema: str, group: str, owner: str) -> None:
        self._url = url
        self._schema = schema
        self._group = group
        self._owner = owner
        self._names = {name: sql.Identifier(schema, name) for name in ("groups", "offsets", "losses", "dead_letters")}

    def connect(self) -> psycopg.Connection[Any]:
        """Connect for a transaction of the driver's."""
        return psycopg.connect(
            libpq_url(self._url),
            # PgBouncer in transaction mode does not keep prepared statements.
            prepare_threshold=None,
            application_name=f"outbox driver {self._group}"[:63],
            connect_timeout=10,
            client_encoding="UTF8",
        )

    def require_utf8(self) -> None:
        """Raise JobError for a sink that has not all characters that a message may have."""
        with self.connect() as connection:
            row = connection.execute("SHOW server_encoding").fetchone()
        if row != ("UTF8",):
            raise JobError(f"the sink's database is in {row and row[0]}, which has not all characters: it must be UTF8")

    def take_over(self) -> int:
        """Become the group's consumer. Gives the generation; whoever had the one before can commit nothing more."""
        with self.connect() as connection:
            row = self._run(connection, _TAKE, owner=self._owner).fetchone()
            assert row is not None
            self._run(connection, _FENCE, generation=row[0])
        return int(row[0])

    def setup(self, statements: str | None) -> None:
        """Run the job's own DDL, one driver at a time."""
        if statements is None:
            return
        with self.connect() as connection:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_SETUP_LOCK,))
            connection.execute(statements.encode())

    def stored(self, topics: Iterable[str]) -> dict[Partition, Stored]:
        """Return how far the group is."""
        with self.connect() as connection:
            rows = self._run(connection, _STORED, topics=list(topics)).fetchall()
        return {(topic, part): Stored(topic_id, offset) for topic, part, topic_id, offset in rows}

    def is_new(self) -> bool:
        """Return whether the group has no offset, of any topic.

        Who adds some for another driver raises the generation: what is true here is true in ``add``, or that is Fenced.
        """
        with self.connect() as connection:
            row = self._run(connection, _NEW).fetchone()
        assert row is not None
        return bool(row[0])

    def add(
        self,
        partitions: Iterable[Partition],
        topic_ids: Mapping[str, str],
        generation: int,
        starts: Mapping[Partition, int] | None = None,
    ) -> None:
        """Begin with new partitions, all of them or none: at 0, or where ``starts`` says.

        Raises Fenced when the group is somebody else's now.
        """
        starts = starts or {}
        with self.connect() as connection:
            self._require(connection, generation)
            for topic, part in partitions:
                values = {"topic": topic, "part": part, "topic_id": topic_ids[topic], "generation": generation}
                self._run(connection, _ADD, **values, start=starts.get((topic, part), 0))

    def dead_keys(self, topics: Iterable[str]) -> dict[tuple[str, bytes], None]:
        """Return the keys of the group's dead letters, with their topics."""
        with self.connect() as connection:
            rows = self._run(connection, _DEAD_KEYS, topics=list(topics)).fetchall()
        return {(topic, bytes(key)): None for topic, key in rows}

    def retried(self, topics: Iterable[str], most: int, *, keep_order: bool) -> list[Retried]:
        """Return dead letters that are to be tried again: those of one partition, in their messages' order.

        With ``keep_order`` also those that are behind a message which no longer stands in their way.
        """
        with self.connect() as connection:
            if keep_order:
                self._run(connection, _RELEASE, topics=list(topics))
            rows = self._run(connection, _RETRIED, topics=list(topics), most=most, keep_order=keep_order).fetchall()
        return [
            Retried(number, (topic, part, offset), key, value, headers, time, reason, behind)
            for number, topic, part, offset, key, value, headers, time, reason, behind in rows
        ]

    def failed_again(self, failed: Iterable[tuple[int, Culprit]], generation: int) -> None:
        """Count another attempt of dead letters. Raises Fenced."""
        with self.connect() as connection:
            self._require(connection, generation)
            for number, culprit in failed:
                letters.failed_again(connection.cursor(), self._schema, self._group, number, culprit)

    def direct(
        self, effect: object, strategy: Strategy, columns: Mapping[str, str], payload: Sequence[str]
    ) -> Direct | None:
        """Return where rows can go straight to, if there is such a place; see direct.direct_for."""
        with self.connect() as connection:
            return direct_for(connection.cursor(), effect, strategy, columns, payload)

    def column_types(self, table: str) -> dict[str, str]:
        """Return the columns of a table of the sink with their types. Raises JobError when there is no such table."""
        with self.connect() as connection:
            return column_types(connection.cursor(), table)

    def require(self, generation: int) -> None:
        """Raise Fenced unless the group is still in this generation."""
        with self.connect() as connection:
            self._require(connection, generation)

    def record_losses(self, losses: Iterable[Loss], generation: int) -> None:
        """Write down what Kafka lost, once for as long as nobody has accepted it. Raises Fenced."""
        with self.connect() as connection:
            self._require(connection, generation)
            for loss in losses:
                self._run(
                    connection,
                    _LOSS,
                    topic=loss.topic,
                    topic_id=loss.topic_id,
                    part=loss.part,
                    first=loss.first_offset,
                    end=loss.end_offset,
                    kind=loss.kind,
                    detail=loss.detail,
                )

    def make_days(self, keep_days: int = KEEP_DAYS) -> Upkeep:
        """Make the partitions of processed_messages for the days that are kept and a few ahead: see Memory.make."""
        return Memory(self._url, self._schema, keep_days).make()

    def forget_days(self, keep_days: int = KEEP_DAYS) -> Upkeep:
        """Forget the ids of days that are no longer kept: see Memory.forget."""
        return Memory(self._url, self._schema, keep_days).forget()

    def _require(self, connection: psycopg.Connection[Any], generation: int) -> None:
        row = self._run(connection, _STILL_MINE).fetchone()
        if row is None or row[0] != generation:
            now = "its row is gone" if row is None else f"generation {row[0]} now, by {row[1]}"
            raise Fenced(
                f"group {self._group} was taken over from generation {generation}: {now}. One consumer a group: stop "
                "the other, or give this job a group of its own; after `outbox offsets`, start this one again"
            )

    def _run(self, connection: psycopg.Connection[Any], query: str, **values: object) -> psycopg.Cursor[Any]:
        return connection.execute(sql.SQL(query).format(**self._names), {"grp": self._group, **values})
