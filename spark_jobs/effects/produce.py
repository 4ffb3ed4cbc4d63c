"""Consume → transform → produce: results that become events, written to the outbox together with the effect.

The INSERT into ``outbox.events`` is part of the transaction that moves the offsets and remembers the ids, so there is
one event for each applied message, even if processes are killed. The relay then publishes it.

| crash point                                    | result                                                          |
|------------------------------------------------|-----------------------------------------------------------------|
| before the task's COMMIT                       | no event, and the offsets have not moved: read again            |
| COMMIT sent, answer lost; or killed after it   | the event is in the outbox, and the offsets have moved          |
| the relay, anywhere                            | its delivery: exactly-once, or again with the same event id     |
| a backup of the sink is restored, offsets back | made again, with the same id: the next consumer recognizes it   |

The event's id depends only on the message's id and a name. It keeps the message's time (a UUIDv7 gives a UUIDv7 of the
same millisecond), because consumers remember ids by day: if the event is made again a week later, its id must be found
among those of the original day. A message id without a time gives a UUIDv8, also without a time.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID

from psycopg import sql

from outbox.consumer.errors import JobError
from outbox.errors import EventError
from outbox.event import (
    DEFAULT_SCHEMA,
    MAX_AGGREGATE_TYPE,
    MAX_EVENT_TYPE,
    TRACEPARENT,
    TRACESTATE,
    check_text,
)
from spark_jobs.dedup.strategies import identifier
from spark_jobs.payloads.decoding import Decoder, decoder_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from spark_jobs.payloads.decoding import Plan

_LONGEST_NAME: Final = 200

# The rows are sorted before their numbers (events.id) are assigned, in whose order the relay publishes a key. Only the
# new rows are locked: there is no unique index on event_id, so transactions don't wait for each other here.
_INSERT: Final = """
INSERT INTO {events} (event_id, aggregate_type, aggregate_id, event_type, payload, headers)
SELECT CASE count(*) OVER (PARTITION BY message_id{part}) WHEN 1 THEN {event_id} ELSE {twice} END,
       {aggregate_type}, {aggregate_id}::text, {event_type}, {payload}::jsonb, {headers}
  FROM {rows}
 WHERE {where}
 ORDER BY message_topic, message_part, message_offset{part}"""
# 32 hexadecimal digits of a UUID. The 13th is the version; the 17th is 8, the variant of RFC 9562.
_ID: Final = """
(CASE WHEN message_id::text ~ '^.{{14}}7.{{4}}[89ab]'
 THEN overlay(overlay(overlay({digest} placing
                      pg_catalog.left(pg_catalog.replace(message_id::text, '-', ''), 12) from 1)
                      placing '7' from 13) placing '8' from 17)
 ELSE overlay(overlay({digest} placing '8' from 13) placing '8' from 17) END)::uuid"""
# The cast fails on purpose: consumers would apply only one of two events with the same id.
_TWICE: Final = (
    "pg_catalog.concat('more than one row of message ', message_id, "
    "': Produce needs a part that tells them apart')::uuid"
)
_DIGEST: Final = (
    "pg_catalog.left(pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to({name}, 'UTF8') || "
    "pg_catalog.decode('00', 'hex') || pg_catalog.uuid_send(message_id) || {part}), 'hex'), 32)"
)
# A traceparent in the event's own headers replaces both values, because a tracestate belongs to its traceparent.
_TRACED: Final = """
       nullif(coalesce({own}::jsonb, '{{}}') || CASE WHEN {own}::jsonb ? 'traceparent'::text THEN '{{}}' ELSE
           pg_catalog.jsonb_strip_nulls(pg_catalog.jsonb_build_object(
               'traceparent', traceparent, 'tracestate', tracestate)) END, '{{}}')"""


@dataclass(frozen=True, slots=True)
class Produce:
    """Events made from messages, one for each row. Part of a job's effect: ``insert()`` returns the SQL.

    name            the events' ids are made from it and the message's id. It must be unique in the outbox; the job's
                    group is a good choice. Each kind of event needs its own. Changing it changes the ids.
    aggregate_type  and event_type: of the events, as text.
    aggregate_id    SQL expression over the rows: the events' key. Events of a key are in the order of its messages if
                    these are all in one partition, as with the key of the messages.
    payload         SQL expression that returns jsonb. NULL is a tombstone.
    rows            what to select from: ``batch``, a table, or a CTE that was begun before ``insert()``. It must have
                    ``batch``'s columns message_id, message_topic, message_part and message_offset.
    where           SQL condition over the rows.
    part            SQL expression that distinguishes the events of one message, such as a line number. Two rows of a
                    message with the same part, or without one, are an error.
    headers         SQL expression that returns a jsonb object with text values, or NULL. ``ce_subject`` is the event's
                    subject.
    traced          continue the message's trace: the rows have the columns of ``Traced``.
    schema          of the outbox, in the sink's database.

    Expressions are used as they are. Raises JobError for a declaration that can't work.
    """

    name: str
    aggregate_type: str
    aggregate_id: str
    event_type: str
    payload: str
    rows: str = "batch"
    where: str = "true"
    part: str | None = None
    headers: str | None = None
    traced: bool = False
    schema: str = DEFAULT_SCHEMA

    def __post_init__(self) -> None:
        for field, longest in (
            ("name", _LONGEST_NAME),
            ("aggregate_type", MAX_AGGREGATE_TYPE),
            ("event_type", MAX_EVENT_TYPE),
        ):
            try:
                check_text(field, getattr(self, field), longest)
            except EventError as error:
                raise JobError(f"Produce: {error}") from error
        for field in ("aggregate_id", "payload", "where", "schema"):
            if not getattr(self, field).strip():
                raise JobError(f"Produce: {field} must not be empty")
        identifier(self.rows)

    def insert(self) -> str:
        """Return an INSERT without a semicolon or placeholders, to be used alone or after ``WITH … AS (…)``."""
        # coalesce(), because ORDER BY would take a constant for a column number.
        part = sql.SQL("") if self.part is None else sql.SQL(", coalesce({})").format(_expression(self.part))
        return (
            sql.SQL(_INSERT)
            .format(
                events=sql.Identifier(self.schema, "events"),
                event_id=self._event_id(),
                aggregate_type=sql.Literal(self.aggregate_type),
                aggregate_id=_expression(self.aggregate_id),
                event_type=sql.Literal(self.event_type),
                payload=_expression(self.payload),
                headers=self._headers(),
                rows=identifier(self.rows),
                where=_expression(self.where),
                part=part,
                twice=sql.SQL(_TWICE),
            )
            .as_string(None)
        )

    def _headers(self) -> sql.Composable:
        own = sql.SQL("NULL") if self.headers is None else _expression(self.headers)
        return sql.SQL(_TRACED if self.traced else "{own}::jsonb").format(own=own)

    def _event_id(self) -> sql.Composable:
        part: sql.Composable = sql.SQL("''::bytea")
        if self.part is not None:
            part = sql.SQL("pg_catalog.convert_to({}::text, 'UTF8')").format(_expression(self.part))
        return sql.SQL(_ID).format(digest=sql.SQL(_DIGEST).format(name=sql.Literal(self.name), part=part))


def derived_id(message_id: UUID, name: str, part: str = "") -> UUID:
    """Return the id of the event that ``Produce`` makes from a message: for effects that are functions, and for tests.

    part  the text of Produce's ``part``; empty if there is only one event for each message.
    """
    digest = hashlib.sha256(name.encode() + b"\0" + message_id.bytes + part.encode()).hexdigest()[:32]
    timed = message_id.version == 7
    start = message_id.hex[:12] + "7" if timed else digest[:12] + "8"
    return UUID(start + digest[13:16] + "8" + digest[17:])


@dataclass(frozen=True, slots=True)
class Traced:
    """A job's ``schema`` with two more columns from the message's headers: ``traceparent`` and ``tracestate``.

    schema  as for ConsumerJob.
    The trace is that of the last hop, or else that of the writer (ce_traceparent). An invalid W3C trace context is
    NULL.
    """

    schema: str | Decoder | None

    def task_plan(self) -> tuple[StructType, Plan]:
        """Return the payload's fields and plan. The task that reads the messages adds the other two columns.

        Raises JobError if the payload has one of them itself.
        """
        fields, plan = decoder_of(self.schema).task_plan()
        for name in fields.fieldNames():
            if name.lower() in {TRACEPARENT, TRACESTATE}:
                raise JobError(f"Traced: the payload has a field {name} itself")
        return fields, plan


def _expression(text: str) -> sql.Composed:
    # The parenthesis is on its own line, so that a comment at the end of the text does not include it.
    return sql.Composed([sql.SQL("("), sql.SQL(text), sql.SQL("\n)")])
