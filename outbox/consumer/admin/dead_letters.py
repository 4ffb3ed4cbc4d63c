"""Messages that could not be applied: lists and pages of them, and operators' actions, retry and discard.

| action                     | what follows                                                                          |
|----------------------------|---------------------------------------------------------------------------------------|
| retry                      | state ``retry``: the next round of the group's consumer applies it, or counts another |
|                            | attempt and sets it to ``dead``                                                       |
| retry one of a key whose   | all of the key are retried, in the order of their offsets: none overtakes another     |
| later messages wait behind |                                                                                       |
| discard the first of them  | those behind it are marked for a retry, in the same transaction                       |
| discard a later one        | only that one is deleted; the others wait as before                                   |

Every change leaves a row in ``audit``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple

import orjson
import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from outbox.consumer.letters import CONTENTS, DESCRIBED, EARLIER
from outbox.consumer.postgres_errors import clear_errors
from outbox.consumer.statements import note, statement
from outbox.errors import ConfigurationError, NotFound

REASONS: Final = ("undecodable", "no-id", "too-old", "failed", "rejected", "behind")
"""Why a message is a dead letter. ``behind``: only because an earlier message of its key is a dead letter."""
PAGE: Final = 50
COUNTED: Final = 10_000
"""At most this many dead letters are grouped."""
# Errors that differ only in numbers and ids are one kind: of a topic that is too small for its messages, each event has
# an error with a size of its own.
KIND: Final = r"""regexp_replace(regexp_replace(left({error}, 300),
       '[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}', '…', 'gi'), '[0-9]+', 'N', 'g')"""


_CHOSEN: Final = """(%(ids)s::bigint[] IS NULL OR d.id = ANY(%(ids)s::bigint[]))
   AND (%(grp)s::text IS NULL OR d.grp = %(grp)s)
   AND (%(topic)s::text IS NULL OR d.topic = %(topic)s)
   AND (%(reason)s::text IS NULL OR d.reason = %(reason)s)"""

_LIST: Final = """
SELECT d.id, d.grp, d.topic, d.part, d.message_offset, d.message_id::text, d.message_key, d.message_time, d.reason,
       d.error, d.sqlstate, d.state, d.attempts, d.died_at, d.last_failed_at
  FROM {dead_letters} AS d WHERE {chosen}
 ORDER BY d.died_at, d.topic, d.part, d.message_offset, d.id LIMIT %(limit)s"""

_SHOW: Final = """
SELECT d.id, d.grp, d.topic, d.topic_id, d.part, d.message_offset, d.message_id::text, d.message_key, d.message_value,
       d.message_headers, d.message_time, d.reason, d.error, d.sqlstate, d.state, d.attempts, d.died_at,
       d.last_failed_at,
       (SELECT count(*) FROM {dead_letters} AS other
         WHERE {same_key} AND other.reason = 'behind'
           AND CASE WHEN (other.part, other.topic_id) = (d.part, d.topic_id)
                    THEN other.message_offset > d.message_offset ELSE other.id > d.id END) AS behind_it,
       CASE WHEN d.reason = 'behind' THEN (
           SELECT other.id FROM (SELECT d.*) AS letter, {dead_letters} AS other
            WHERE {earlier} ORDER BY other.id LIMIT 1) END AS waits_for
  FROM {dead_letters} AS d WHERE d.id = %(id)s"""

_GROUPED: Final = """
SELECT kind, grp, topic, reason, state, min(error) AS sample, count(*) AS messages, min(died_at) AS first,
       max(last_failed_at) AS last
  FROM (SELECT grp, topic, reason, state, died_at, last_failed_at, left(error, 300) AS error, {kind} AS kind
          FROM {dead_letters} LIMIT %(most)s) AS counted
 GROUP BY kind, grp, topic, reason, state ORDER BY count(*) DESC, grp, topic, reason, kind, state LIMIT 200"""

_PAGE: Final = """
SELECT id, grp, topic, part, message_offset, message_id, reason, error, state, attempts, died_at, last_failed_at
  FROM {dead_letters}
 WHERE (%(kind)s::text IS NULL OR {kind} = %(kind)s) AND (%(group)s::text IS NULL OR grp = %(group)s)
   AND (%(topic)s::text IS NULL OR topic = %(topic)s) AND (%(part)s::bigint IS NULL OR part = %(part)s)
   AND (%(cause)s::text IS NULL OR reason = %(cause)s) AND (%(after)s::bigint IS NULL OR id > %(after)s)
 ORDER BY id LIMIT %(limit)s"""

# By hash to use the index, and by the key itself to be exact. A message without a key has no others of its key.
_SAME_KEY: Final = """other.grp = d.grp AND other.topic = d.topic
   AND sha256(other.message_key) = sha256(d.message_key) AND other.message_key = d.message_key"""

# A key has rows with the reason ``behind`` only if its group keeps the order; then all of its rows are retried, or
# none. Locked in the same order as by a consumer, so that the two never wait for each other in a circle.
_RETRY: Final = """
WITH ordered AS (
    SELECT DISTINCT d.grp, d.topic, d.message_key FROM {dead_letters} AS d
     WHERE {chosen} AND EXISTS (
        SELECT FROM {dead_letters} AS other WHERE {same_key} AND other.reason = 'behind')),
wanted AS MATERIALIZED (
    SELECT d.id FROM {dead_letters} AS d
     WHERE ({chosen}) OR (
        -- Whether one that is too old was applied before is for an operator to decide, one by one.
        d.reason <> 'too-old' AND (d.grp, d.topic, d.message_key) IN (SELECT grp, topic, message_key FROM ordered))
     ORDER BY d.id FOR UPDATE OF d),
retried AS (
    UPDATE {dead_letters} AS d SET state = 'retry' FROM wanted WHERE d.id = wanted.id
    RETURNING d.id, d.grp, d.topic, d.part, d.message_offset, d.message_id::text, d.reason),
noted AS (
    INSERT INTO {audit} (what, details)
    SELECT 'retry dead letters', jsonb_build_object('dead_letters', jsonb_agg(jsonb_build_object(
               'id', id, 'group', grp, 'topic', topic, 'part', part, 'offset', message_offset,
               'message_id', message_id) ORDER BY topic, part, message_offset, id))
      FROM retried HAVING count(*) > 0)
SELECT * FROM retried ORDER BY topic, part, message_offset, id"""

_DISCARD: Final = """
WITH wanted AS MATERIALIZED (
    SELECT d.id FROM {dead_letters} AS d WHERE {chosen}
     ORDER BY d.id FOR UPDATE OF d),
gone AS (DELETE FROM {dead_letters} AS d USING wanted WHERE d.id = wanted.id RETURNING d.*),
noted AS (
    INSERT INTO {audit} (what, why, details)
    SELECT 'discard dead letter', %(why)s, {described} || CASE WHEN %(keep_message)s THEN {contents} ELSE '{{}}' END
      FROM gone ORDER BY topic, part, message_offset, id)
SELECT id, grp, topic, part, message_offset, message_id::text, message_key, reason FROM gone
 ORDER BY topic, part, message_offset, id"""

# Messages that waited only for the discarded one.
_FREE: Final = """
UPDATE {dead_letters} AS letter SET state = 'retry'
  FROM (SELECT DISTINCT * FROM unnest(%(groups)s::text[], %(topics)s::text[], %(keys)s::bytea[]) AS k (grp, topic, key))
    AS freed
 WHERE letter.grp = freed.grp AND letter.topic = freed.topic AND sha256(letter.message_key) = sha256(freed.key)
   AND letter.message_key = freed.key AND letter.reason = 'behind' AND letter.state = 'dead'
   AND NOT EXISTS (SELECT FROM {dead_letters} AS other WHERE {earlier})
RETURNING letter.id"""

_PARTS: Final = {
    "chosen": sql.SQL(_CHOSEN),
    "same_key": sql.SQL(_SAME_KEY),
    "earlier": sql.SQL(EARLIER),
    "described": sql.SQL(DESCRIBED),
    "contents": sql.SQL(CONTENTS),
    "kind": sql.SQL(KIND).format(error=sql.Identifier("error")),
}
_TIMEOUT: Final = "SELECT set_config('lock_timeout', '10s', true)"
_PAGE_TIMEOUT: Final = "SELECT set_config('statement_timeout', '10s', true)"


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects dead letters by id, group, topic and reason; all of them if nothing is given.

    Raises ConfigurationError for an unknown reason.
    """

    ids: Sequence[int] | None = None
    group: str | None = None
    topic: str | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.reason is not None and self.reason not in REASONS:
            raise ConfigurationError(f"reason {self.reason!r}: must be one of {', '.join(REASONS)}")

    def bound(self) -> dict[str, Any]:
        ids = list(self.ids) if self.ids is not None else None
        return {"ids": ids, "grp": self.group, "topic": self.topic, "reason": self.reason}


class Filter(NamedTuple):
    """Which dead letters a page shows: by the kind of their error (``kind`` of a group), group, partition and cause."""

    kind: str | None = None
    group: str | None = None
    topic: str | None = None
    part: int | None = None
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class Discarded:
    """The result of a discard: the deleted rows, and the ids of those that are retried because of it."""

    gone: Sequence[dict[str, Any]]
    freed: Sequence[int]


class DeadLetters:
    """The dead letters of one sink. ``connection`` is in autocommit; each call is one transaction.

    Methods raise ConsumerUnavailable when Postgres is away or a round of the group is using the rows, and SchemaError
    when tables or rights are missing.
    """

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection = connection
        self._schema = schema

    def list(self, selection: Selection, limit: int = 100) -> Sequence[dict[str, Any]]:
        """Return up to ``limit`` dead letters, the oldest first, with keys but without values and headers."""
        with clear_errors("listing dead letters"):
            return self._run(_LIST, selection.bound() | {"limit": limit})

    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Return kind, grp, topic, reason, state, messages, first and last of each group, the largest first.

        ``sample`` is one of its errors.
        """
        return self._look(_GROUPED, {"most": COUNTED})

    def page(
        self, chosen: Filter, after: int | None = None, limit: int = PAGE
    ) -> tuple[Sequence[Mapping[str, Any]], int | None]:
        """Return a page of dead letters without contents, and the id that the next page begins behind."""
        rows = self._look(_PAGE, {**chosen._asdict(), "after": after, "limit": limit + 1})
        return rows[:limit], rows[limit - 1]["id"] if len(rows) > limit else None

    def selection(self, chosen: Filter) -> Selection:
        """Return up to COUNTED of these dead letters, for ``retry`` and ``discard``."""
        return Selection([row["id"] for row in self.page(chosen, limit=COUNTED)[0]])

    def show(self, dead_letter: int) -> dict[str, Any]:
        """Return the whole row, with the number of messages ``behind_it`` and the one that it ``waits_for``, if any.

        Raises NotFound.
        """
        with clear_errors("reading a dead letter"):
            found = self._run(_SHOW, {"id": dead_letter})
        if not found:
            raise NotFound(f"no dead letter has the id {dead_letter}; see `outbox dead-letters list --side consumer`")
        return found[0]

    def retry(self, selection: Selection) -> Sequence[dict[str, Any]]:
        """Mark dead letters for retry in the next round of their groups. Returns them and the others of their keys."""
        with clear_errors("retrying dead letters"), self._connection.transaction():
            self._connection.execute(_TIMEOUT)
            return self._run(_RETRY, selection.bound())

    def discard(self, selection: Selection, reason: str, *, keep_message: bool = True) -> Discarded:
        """Delete dead letters. ``audit`` records who, why and which, and the message itself if ``keep_message``."""
        with clear_errors("discarding dead letters"), self._connection.transaction():
            self._connection.execute(_TIMEOUT)
            gone = self._run(_DISCARD, selection.bound() | {"why": reason, "keep_message": keep_message})
            keyed = [row for row in gone if row["message_key"] is not None]
            values = {
                "groups": [row["grp"] for row in keyed],
                "topics": [row["topic"] for row in keyed],
                "keys": [bytes(row["message_key"]) for row in keyed],
            }
            freed = sorted(row["id"] for row in self._run(_FREE, values)) if keyed else []
            if freed:
                details = {"behind_discarded": [row["id"] for row in gone], "ids": freed}
                note(self._connection, self._schema, "retry dead letters", None, details)
        return Discarded(gone, freed)

    def _look(self, query: LiteralString, values: dict[str, Any]) -> Sequence[dict[str, Any]]:
        with clear_errors("looking through dead letters"), self._connection.transaction():
            self._connection.execute(_PAGE_TIMEOUT)
            return self._run(query, values)

    def _run(self, query: LiteralString, values: dict[str, Any]) -> Sequence[dict[str, Any]]:
        with self._connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(statement(self._schema, query, **_PARTS), values).fetchall()


def readable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for display and scripts: bytes in a readable form, each with its encoding.

    ``key`` and header values are text or hexadecimal digits (``…_encoding``: utf-8 or hex). A header whose name is not
    UTF-8 keeps its ``key_base64``. ``value`` is the message's
    own JSON, as an orjson.Fragment, so that no number is rounded; or text; or base64.
    """
    shown = dict(row)
    shown["group"] = shown.pop("grp")
    shown["offset"] = shown.pop("message_offset")
    shown["key"], shown["key_encoding"] = _text(shown.pop("message_key"))
    if "message_value" in shown:
        shown["value"], shown["value_encoding"] = _value(shown.pop("message_value"))
    if "message_headers" in shown:
        shown["headers"] = [_header(header) for header in shown.pop("message_headers")]
    return shown


def _header(header: Mapping[str, Any]) -> dict[str, Any]:
    raw = header["value"]
    value, encoding = _text(None if raw is None else base64.b64decode(raw))
    return {**header, "value": value, "encoding": encoding}


def _text(raw: bytes | None) -> tuple[str | None, str | None]:
    if raw is None:
        return None, None
    try:
        return bytes(raw).decode(), "utf-8"
    except UnicodeDecodeError:
        return bytes(raw).hex(), "hex"


def _value(raw: bytes | None) -> tuple[object, str | None]:
    if raw is None:
        return None, None
    content = bytes(raw)
    try:
        orjson.loads(content)
    except ValueError:
        text, encoding = _text(content)
        return (base64.b64encode(content).decode(), "base64") if encoding == "hex" else (text, encoding)
    # Line breaks in valid JSON are only between its tokens, so they can be replaced to keep it on one line.
    return orjson.Fragment(content.replace(b"\r", b" ").replace(b"\n", b" ")), "json"
