"""Find one message on the consumers' side: applied, dead, given up, or waiting. For `outbox trace`."""

from __future__ import annotations

import datetime as dt
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from outbox._clients.visible import VisibleTables
from outbox.consumer.admin.checks import declared_groups
from outbox.consumer.ids import DAY_OF_ID
from outbox.consumer.postgres_errors import clear_errors
from outbox.consumer.statements import statement

_LIMIT: Final = "SELECT set_config('statement_timeout', '30s', true)"

# By the primary key, in the one partition of the id's day.
_APPLIED: Final = """
SELECT grp, seen_at FROM {processed_messages} AS p, (SELECT %(message_id)s::uuid AS message_id) AS wanted
 WHERE p.message_id = %(message_id)s AND p.day = {day}"""

# Also by the message's place: the letter of a group with a key has an id that is made of that, a UUID of version 8.
_DEAD: Final = """
SELECT id, grp, topic, part, topic_id, message_id, reason, state, attempts, error, died_at
  FROM {dead_letters} AS d
 WHERE message_id = %(message_id)s
    OR pg_catalog.substr(message_id::text, 15, 1) = '8'
   AND (d.topic, d.part, d.message_offset)
    IN (SELECT * FROM unnest(%(topics)s::text[], %(parts)s::integer[], %(offsets)s::bigint[]))
 ORDER BY id"""

_EXTERNAL: Final = """
SELECT grp, name, state, attempts, last_error, reserved_at, settled_at
  FROM {reservations} WHERE message_id = %(message_id)s ORDER BY id"""

_GIVEN_UP: Final = """
SELECT grp, l.topic, l.part, topic_id, min(found_at) AS found_at
  FROM {losses} AS l JOIN unnest(%(topics)s::text[], %(parts)s::integer[], %(offsets)s::bigint[]) AS p (topic, part, at)
    ON l.topic = p.topic AND l.part = p.part AND p.at >= l.first_offset AND p.at < l.end_offset
 WHERE kind = 'given-up' GROUP BY grp, l.topic, l.part, topic_id"""

_GROUPS: Final = "SELECT grp, topic, part, topic_id, next_offset, updated_at FROM {offsets} ORDER BY grp, topic, part"


@dataclass(frozen=True, slots=True)
class DeadLetterTrace:
    """A dead letter of the message. ``state`` is dead, or retry once a retry has been requested."""

    id: int
    reason: str
    state: str
    attempts: int
    error: str
    died_at: dt.datetime


@dataclass(frozen=True, slots=True)
class CallTrace:
    """An external effect that was requested for the message."""

    name: str
    state: str
    attempts: int
    last_error: str | None
    reserved_at: dt.datetime
    settled_at: dt.datetime | None


@dataclass(frozen=True, slots=True)
class GroupTrace:
    """What one group has done with the message.

    state        applied: its effect is in the sink. dead: it is a dead letter. waiting: the group has not reached it.
                 given-up: at-most-once, and it is recorded as lost.
                 passed: the group is past it and has no record of its id: with OffsetsOnly or a key, after the ids of
                 its day were deleted, or if the transform or ``types`` left it out. unknown: its place is not known.
    applied_at   when the transaction of its effect began; at-most-once, of its position.
    lost_at      when it was recorded as lost.
    behind       the offsets between the group's position and the message, while it waits.
    """

    group: str
    state: str
    applied_at: dt.datetime | None = None
    behind: int | None = None
    letter: DeadLetterTrace | None = None
    external: Sequence[CallTrace] = ()
    lost_at: dt.datetime | None = None


def find(
    connection: psycopg.Connection[Any],
    schema: str,
    message_id: UUID,
    places: Sequence[tuple[str, int, int]],
    topics: Sequence[str],
    hidden: MutableMapping[str, str],
) -> list[GroupTrace]:
    """Return what each group that reads the message's topic has done with it.

    places   the message's places, as (topic, partition, offset); several if it was repeated.
    topics   the topics in which it may appear; their groups are included too.
    hidden   gets the tables that the role can't read, with the grants that are missing.

    Raises ConsumerUnavailable; or SchemaError if tables are missing.
    """
    day = sql.SQL(DAY_OF_ID.replace("message_id", "wanted.message_id"))
    bound = {
        "message_id": message_id,
        "topics": [topic for topic, _, _ in places],
        "parts": [part for _, part, _ in places],
        "offsets": [offset for _, _, offset in places],
    }
    visible = VisibleTables(connection, schema)
    with clear_errors("looking for the message"), connection.cursor(row_factory=dict_row) as cursor:

        def read(table: str, text: LiteralString) -> list[dict[str, Any]]:
            rows: list[dict[str, Any]] = []
            with visible.reading(table):
                rows = cursor.execute(statement(schema, text, day=day), bound).fetchall()
            return rows

        with connection.transaction():
            cursor.execute(_LIMIT)
            applied = read("processed_messages", _APPLIED)
            dead = read("dead_letters", _DEAD)
            given_up = read("losses", _GIVEN_UP)
            external = read("reservations", _EXTERNAL)
            offsets = read("offsets", _GROUPS)
    hidden.update(visible.hidden)
    seen = {row["grp"]: row["seen_at"] for row in applied}
    ids = {(row["grp"], row["topic"], row["part"]): row["topic_id"] for row in offsets}

    def of_former_topic(row: dict[str, Any]) -> bool:
        """Return whether a place is of a topic with this name before it was created again: of another message."""
        of_former: bool = ids.get((row["grp"], row["topic"], row["part"]), row["topic_id"]) != row["topic_id"]
        return of_former

    letters = {row["grp"]: row for row in dead if row["message_id"] == message_id or not of_former_topic(row)}
    lost: dict[str, dt.datetime] = {}
    for row in given_up:
        if not of_former_topic(row):
            lost[row["grp"]] = min(row["found_at"], lost.get(row["grp"], row["found_at"]))
    calls: dict[str, list[CallTrace]] = {}
    for row in external:
        calls.setdefault(row.pop("grp"), []).append(CallTrace(**row))
    wanted = {*topics, *(topic for topic, _, _ in places)}
    groups = sorted({row["grp"] for row in offsets if row["topic"] in wanted} | set(seen) | set(letters) | set(calls))
    return [_of_group(group, lost, seen, letters, offsets, places, calls.get(group, ())) for group in groups]


def topics(connection: psycopg.Connection[Any], schema: str) -> list[str]:
    """Return the topics that groups read. Raises ConsumerUnavailable; or SchemaError if tables are missing."""
    with clear_errors("looking for the topics"):
        return sorted({topic for group in declared_groups(connection, schema) for topic in group.topics})


def _of_group(
    group: str,
    lost: dict[str, dt.datetime],
    seen: dict[str, dt.datetime],
    letters: dict[str, dict[str, Any]],
    offsets: Sequence[dict[str, Any]],
    places: Sequence[tuple[str, int, int]],
    external: Sequence[CallTrace],
) -> GroupTrace:
    if group in lost:
        return GroupTrace(group, "given-up", external=external, lost_at=lost[group])
    if group in letters:
        row = letters[group]
        letter = DeadLetterTrace(*(row[name] for name in ("id", "reason", "state", "attempts", "error", "died_at")))
        return GroupTrace(group, "dead", seen.get(group), letter=letter, external=external)
    if group in seen:
        return GroupTrace(group, "applied", seen[group], external=external)
    next_offsets = {(row["topic"], row["part"]): row["next_offset"] for row in offsets if row["grp"] == group}
    behind = [offset - next_offsets[topic, part] for topic, part, offset in places if (topic, part) in next_offsets]
    if not places or min(behind, default=0) < 0:
        return GroupTrace(group, "passed" if places else "unknown", external=external)
    return GroupTrace(group, "waiting", behind=min(behind, default=None), external=external)
