"""A group's dead letters: messages that could not be applied, and those that wait behind one of their key.

They share the table, its reasons and states with the Spark consumers, so the same commands list, retry and discard them
(`outbox dead-letters --side consumer`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, LiteralString
from uuid import UUID

import orjson
import psycopg
from psycopg import sql

from outbox.inbox._group import Place, run
from outbox.inbox._message import DeadLetter, KafkaMessage

BEHIND: Final = "an earlier message of its key is a dead letter"
_LONGEST_ERROR: Final = 2000

# A conflict: the offsets were set back, and the same message failed once more.
_WRITE: Final = """
INSERT INTO {letters} AS letter (grp, topic, topic_id, part, message_offset, message_id, message_key, message_value,
                                 message_headers, message_time, reason, error, sqlstate, attempts)
VALUES (%(grp)s, %(topic)s, %(topic_id)s, %(part)s, %(offset)s, %(id)s, %(key)s, %(value)s, %(headers)s::jsonb,
        timestamptz 'epoch' + %(time)s::float8 * interval '1 millisecond',
        %(reason)s, %(error)s, %(sqlstate)s, %(attempts)s)
    ON CONFLICT (grp, topic, part, message_offset, topic_id) DO UPDATE
   SET reason = excluded.reason, error = excluded.error, sqlstate = excluded.sqlstate, state = 'dead',
       attempts = letter.attempts + excluded.attempts, last_failed_at = pg_catalog.now()"""
_KEYS: Final = """
SELECT DISTINCT message_key FROM {letters} WHERE grp = %(grp)s AND topic = %(topic)s AND message_key IS NOT NULL"""
# Messages that were put behind a dead letter while that was being retried or discarded: they would wait for ever. For a
# key that has moved to another partition, because partitions were added, the ids of the dead letters give the order.
_EARLIER: Final = """
SELECT FROM {letters} AS other
 WHERE other.grp = letter.grp AND other.topic = letter.topic
   AND pg_catalog.sha256(other.message_key) = pg_catalog.sha256(letter.message_key)
   AND other.state = 'dead' AND other.reason <> 'behind'
   AND CASE WHEN other.part = letter.part THEN other.message_offset < letter.message_offset
            ELSE other.id < letter.id END"""
_RELEASE: Final = """
UPDATE {letters} AS letter SET state = 'retry'
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s AND state = 'dead' AND reason = 'behind'
   AND NOT EXISTS ({earlier})"""
_WAITING: Final = """
SELECT letter.id, letter.reason, EXISTS ({earlier}), letter.message_offset, letter.message_key, letter.message_value,
       letter.message_headers, letter.message_time
  FROM {letters} AS letter
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s AND state = 'retry'
 ORDER BY message_offset, id LIMIT 1 FOR UPDATE OF letter"""
_ANY: Final = """
SELECT DISTINCT topic, part FROM {letters}
 WHERE grp = %(grp)s AND topic = ANY(%(topics)s) AND (state = 'retry' OR reason = 'behind')"""
_AGAIN: Final = """
UPDATE {letters} SET state = 'dead', attempts = attempts + 1, reason = %(reason)s, error = %(error)s,
                     sqlstate = %(sqlstate)s, last_failed_at = pg_catalog.now()
 WHERE id = %(letter)s AND grp = %(grp)s"""
_GONE: Final = "DELETE FROM {letters} WHERE id = %(letter)s AND grp = %(grp)s"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a message can't be applied: ``reason`` is one of the table's."""

    reason: str
    error: str
    sqlstate: str | None = None

    def values(self) -> dict[str, Any]:
        """Return the columns. An error's text may quote anything from the message."""
        text = self.error.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
        return {"reason": self.reason, "error": text[:_LONGEST_ERROR], "sqlstate": self.sqlstate}


class Letters:
    """The dead letters of one group. Every method runs in the transaction of the connection that it is given."""

    def __init__(self, schema: str, group: str) -> None:
        self._group = group
        self._names: dict[str, sql.Composable] = {"letters": sql.Identifier(schema, "dead_letters")}
        self._names["earlier"] = sql.SQL(_EARLIER).format(**self._names)

    def write(
        self,
        connection: psycopg.Connection[Any],
        topic_id: str,
        message: KafkaMessage,
        id_: UUID | None,
        failure: Failure,
        attempts: int,
    ) -> None:
        """Store a message whole."""
        self._run(
            connection,
            _WRITE,
            topic=message.topic(),
            topic_id=topic_id,
            part=message.partition(),
            offset=message.offset(),
            id=id_,
            key=message.key(),
            value=message.value(),
            headers=_headers(message),
            time=max(message.timestamp()[1], 0),
            attempts=attempts,
            **failure.values(),
        )

    def keys(self, connection: psycopg.Connection[Any], topic: str) -> set[bytes]:
        """Return the keys of a topic's dead letters: later messages of these wait behind them."""
        return {bytes(key) for (key,) in self._run(connection, _KEYS, topic=topic)}

    def places(self, connection: psycopg.Connection[Any], topics: Iterable[str]) -> set[Place]:
        """Return the partitions with dead letters that may have to be retried."""
        return {(topic, part) for topic, part in self._run(connection, _ANY, topics=list(topics))}

    def next(self, connection: psycopg.Connection[Any], place: Place) -> DeadLetter | None:
        """Return the first dead letter of a partition that is to be retried, and lock it."""
        values = {"topic": place[0], "part": place[1]}
        self._run(connection, _RELEASE, **values)
        row = self._run(connection, _WAITING, **values).fetchone()
        if row is None:
            return None
        number, reason, blocked, offset, key, value, headers, time = row
        return DeadLetter(number, reason, blocked, (*place, offset), key, value, headers, time)

    def failed_again(self, connection: psycopg.Connection[Any], letter: int, failure: Failure) -> None:
        """Count another attempt of a dead letter."""
        self._run(connection, _AGAIN, letter=letter, **failure.values())

    def delete(self, connection: psycopg.Connection[Any], letter: int) -> None:
        """Delete a dead letter that was applied."""
        self._run(connection, _GONE, letter=letter)

    def _run(
        self, connection: psycopg.Connection[Any], query: LiteralString, **values: object
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        return run(connection, sql.SQL(query).format(**self._names), {"grp": self._group, **values})


def _headers(message: KafkaMessage) -> str:
    try:
        headers = message.headers() or []
    except UnicodeDecodeError:
        headers = [("(headers with names that are not UTF-8)", None)]
    listed = [
        {"key": name.replace("\0", "\ufffd"), "value": None if value is None else base64.b64encode(value).decode()}
        for name, value in headers
    ]
    return orjson.dumps(listed).decode()
