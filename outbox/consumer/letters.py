"""Dead letters: written by a task, by the driver and by the inbox, and what happens when one is retried.

Messages that wait behind a dead letter of their key are released when that one is discarded or retried. One that was
written meanwhile must be looked for, and inbox and Spark look in different ways, with the same condition (EARLIER): a
member of the inbox asks for the partitions that it has claimed, key by key; the driver of a Spark group has all of them
and asks in the statement that reads its state, so that an idle round is one statement.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg
from psycopg import sql

from outbox.consumer.errors import LONGEST_ERROR, storable
from outbox.consumer.messages import Headers, loaded_headers
from outbox.consumer.model import MessageRef, RejectedRecord
from outbox.consumer.statements import cursor, execute, statement
from outbox.errors import ConfigurationError

# A conflict: the offsets were set back, and the same message failed once more. Or another one did, as the log was
# cut and grew again: the audit keeps the first.
_WRITE: Final = """
WITH other AS (
    SELECT * FROM {dead_letters}
     WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s AND message_offset = %(offset)s
       AND topic_id = %(topic_id)s
       AND (message_id, message_key, message_value) IS DISTINCT FROM
           (%(message_id)s::uuid, %(key)s::bytea, %(value)s::bytea)),
kept AS (
    INSERT INTO {audit} (what, why, details)
    SELECT 'replace dead letter', 'its offset has another message: the log was cut', {described} || {contents}
      FROM other)
INSERT INTO {dead_letters} AS letter (
       grp, topic, topic_id, part, message_offset, message_id, message_key, message_value, message_headers,
       message_time, reason, error, sqlstate, attempts)
VALUES (%(grp)s, %(topic)s, %(topic_id)s, %(part)s, %(offset)s, %(message_id)s, %(key)s, %(value)s, %(headers)s,
        timestamptz 'epoch' + %(time)s::float8 * interval '1 microsecond',
        %(reason)s, %(error)s, %(sqlstate)s, %(attempts)s)
    ON CONFLICT (grp, topic, part, message_offset, topic_id) DO UPDATE
   SET reason = excluded.reason, error = excluded.error, sqlstate = excluded.sqlstate, state = 'dead',
       message_id = excluded.message_id, message_key = excluded.message_key, message_value = excluded.message_value,
       message_headers = excluded.message_headers, message_time = excluded.message_time,
       attempts = excluded.attempts + CASE WHEN EXISTS (SELECT FROM other) THEN 0 ELSE letter.attempts END,
       died_at = CASE WHEN EXISTS (SELECT FROM other) THEN pg_catalog.now() ELSE letter.died_at END,
       last_failed_at = pg_catalog.now()"""
_AGAIN: Final = """
UPDATE {dead_letters} SET state = 'dead', attempts = attempts + 1, reason = %(reason)s, error = %(error)s,
                     sqlstate = %(sqlstate)s, last_failed_at = pg_catalog.now()
 WHERE id = %(letter)s AND grp = %(grp)s"""
_DELETE: Final = "DELETE FROM {dead_letters} WHERE grp = %(grp)s AND id = ANY(%(ids)s)"
_LEAVE_OUT: Final = """
INSERT INTO {audit} (what, why, details)
SELECT 'leave out dead letter', 'tried again, and the types or the transform that its job has today leave it out',
       {described} || {contents}
  FROM {dead_letters} WHERE grp = %(grp)s AND id = ANY(%(ids)s) ORDER BY id"""
_STORED: Final = ("message_id", "key", "value", "headers", "time", "attempts")
"""What is bound as it is. asdict() would copy each value of a message."""
_ONE: Final = "SELECT FROM {dead_letters} WHERE grp = %(grp)s LIMIT 1"
BEHIND: Final = "an earlier message of its key is a dead letter"
"""The error of a message that is put aside although nothing is wrong with it. Never to be reworded: it is stored, and
the inbox compares stored ones with a text that begins with it."""
KEYS: Final = """
SELECT DISTINCT topic, message_key FROM {dead_letters}
 WHERE grp = %(grp)s AND topic = ANY(%(topics)s) AND message_key IS NOT NULL"""
"""The keys of a group's dead letters: later messages of these wait behind them."""
# The planner may have statistics of a time when there were no letters.
BY_INDEX: Final = """
SELECT pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true),
       pg_catalog.set_config('enable_sort', 'off', true)"""
"""Keeps the plans of a transaction to the indexes."""
EARLIER: Final = """
other.grp = letter.grp AND other.topic = letter.topic
   AND pg_catalog.sha256(other.message_key) = pg_catalog.sha256(letter.message_key)
   AND other.state = 'dead' AND other.reason <> 'behind'
   AND CASE WHEN (other.part, other.topic_id) = (letter.part, letter.topic_id)
            THEN other.message_offset < letter.message_offset ELSE other.id < letter.id END"""
"""SQL: ``letter`` waits behind ``other``. Where their offsets give no order, because partitions were added and the key
has moved, or the topic was created again, the ids of the dead letters do."""
ELSEWHERE: Final = """
SELECT pg_catalog.min(other.id + 0) FROM {dead_letters} AS other
 WHERE other.grp = %(grp)s AND other.topic = letter.topic AND pg_catalog.sha256(other.message_key) = letter.hash
   AND (other.part, other.topic_id) <> (letter.part, letter.topic_id) {retried}"""
"""SQL: the lowest id of the key ``letter.hash``, where the ids give the order. Reads all dead letters of the key: to be
asked once for a key, and not for each letter, with BY_INDEX."""
RETRIED: Final = "AND other.state <> 'dead'"
"""SQL: only those to be retried. With ``= 'retry'`` the planner may read all of them, whatever their key."""
DESCRIBED: Final = """pg_catalog.jsonb_build_object(
               'id', id, 'group', grp, 'topic', topic, 'topic_id', topic_id, 'part', part, 'offset', message_offset,
               'message_id', message_id, 'message_time', message_time, 'reason', reason, 'error', error,
               'sqlstate', sqlstate, 'attempts', attempts, 'died_at', died_at)"""
"""What ``audit`` keeps of a dead letter that is deleted without its effect; SQL over its row."""
CONTENTS: Final = """pg_catalog.jsonb_build_object(
               'key_base64', pg_catalog.translate(pg_catalog.encode(message_key, 'base64'), E'\\n', ''),
               'value_base64', pg_catalog.translate(pg_catalog.encode(message_value, 'base64'), E'\\n', ''),
               'headers', message_headers)"""
"""The message itself, so that a mistake can be repaired."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A whole message to be stored as a dead letter. ``headers``: ``[{"key": name, "value": base64 or null}, …]``.

    time      Kafka's timestamp in microseconds since 1970.
    attempts  how often the message was tried.
    """

    record: RejectedRecord
    message_id: UUID | str | None
    key: bytes | None
    value: bytes | None
    headers: str
    time: int
    attempts: int = 1


class DeadLetterStore:
    """The dead letters of one group. Every method runs in the transaction of the connection that it is given."""

    def __init__(self, schema: str, group: str) -> None:
        self._schema = schema
        self._group = group
        self._parts: dict[str, sql.Composable] = {"described": sql.SQL(DESCRIBED), "contents": sql.SQL(CONTENTS)}

    def require_none(self, connection: psycopg.Connection[Any]) -> None:
        """Raise ConfigurationError if the group has dead letters: at-most-once, nothing retries them."""
        if self._run(connection, _ONE).fetchone() is not None:
            raise ConfigurationError(
                f"group {self._group} has dead letters, and with delivery='at-most-once' nothing retries them: retry "
                "or discard them before (`outbox dead-letters list --side consumer`), or give the consumer another "
                "group"
            )

    def write(self, connection: psycopg.Connection[Any], topic_id: str, letters: Iterable[DeadLetter]) -> int:
        """Store dead letters. Returns how many."""
        own = {"grp": self._group, "topic_id": topic_id}
        rows = [{name: getattr(letter, name) for name in _STORED} | _values(letter.record) | own for letter in letters]
        if rows:
            cursor(connection).executemany(self._statement(_WRITE), rows)
        return len(rows)

    def failed_again(self, connection: psycopg.Connection[Any], letter: int, record: RejectedRecord) -> None:
        """Count another attempt of a dead letter."""
        self._run(connection, _AGAIN, **_values(record), letter=letter)

    def delete(self, connection: psycopg.Connection[Any], ids: Sequence[int]) -> None:
        self._run(connection, _DELETE, ids=list(ids))

    def leave_out(self, connection: psycopg.Connection[Any], ids: Sequence[int]) -> None:
        """Record in ``audit`` dead letters that are deleted without an effect: the job now filters such messages
        out.
        """
        self._run(connection, _LEAVE_OUT, ids=list(ids))

    def _statement(self, query: LiteralString) -> sql.Composed:
        return statement(self._schema, query, **self._parts)

    def _run(
        self, connection: psycopg.Connection[Any], query: LiteralString, **values: object
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        return execute(connection, self._statement(query), {"grp": self._group, **values})


def _values(record: RejectedRecord) -> dict[str, Any]:
    topic, part, offset = record.place
    # An error's text may quote anything from the message.
    why = {"reason": record.reason, "error": storable(record.error)[:LONGEST_ERROR], "sqlstate": record.sqlstate}
    return {"topic": topic, "part": part, "offset": offset, **why}


@dataclass(frozen=True, slots=True)
class RetryRecord:
    """A dead letter to be retried, as a Kafka message.

    reason  why it failed the last time.
    behind  an earlier message of its key is a dead letter.
    """

    id: int
    place: MessageRef
    key: bytes | None
    value: bytes | None
    headers: Sequence[Mapping[str, str | None]]
    time: dt.datetime
    reason: str
    behind: bool

    def message_headers(self) -> Headers:
        return loaded_headers(self.headers)

    def same_key(self, other: RetryRecord) -> bool:
        return self.key is not None and (self.place[0], self.key) == (other.place[0], other.key)
