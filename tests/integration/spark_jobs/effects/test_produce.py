"""Events out of a consumer's effect, on a real Postgres: their ids, order, headers, limits and rights."""

from __future__ import annotations

import json
import random
import uuid
from dataclasses import replace

import psycopg
import pytest
from psycopg import sql
from rows_and_roles import login_role
from uuid_utils.compat import uuid7

from outbox.consumer.ids import DAY_OF_ID
from relay.operations.roles import RoleKind, grants
from spark_jobs.effects.produce import Produce, derived_id

BATCH = """
CREATE TEMPORARY TABLE batch (
    message_id uuid, message_topic text, message_part integer, message_offset bigint, message_key text,
    body jsonb, extra jsonb, traceparent text, tracestate text)"""
PRODUCE = Produce("a job", "Thing", "message_key", "Happened", "body")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-11111111111111111111111111111111-2222222222222222-01"


class Sink:
    """A connection with a ``batch`` as an effect sees it."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection
        connection.execute(BATCH)
        self._offset = 0

    def message(self, message_id=None, key="k", body=None, offset=None, **columns) -> uuid.UUID:
        message_id = message_id or uuid7()
        self._offset += 1
        values = {
            "message_id": message_id,
            "message_topic": "t",
            "message_part": 0,
            "message_offset": self._offset if offset is None else offset,
            "message_key": key,
            "body": None if body is None else json.dumps(body),
            **columns,
        }
        names = sql.SQL(", ").join(map(sql.Identifier, values))
        marks = sql.SQL(", ").join(map(sql.Placeholder, values))
        self.connection.execute(sql.SQL("INSERT INTO batch ({}) VALUES ({})").format(names, marks), values)
        return message_id

    def events(self, *columns: str) -> list[tuple]:
        return self.connection.execute(f"SELECT {', '.join(columns)} FROM outbox.events ORDER BY id").fetchall()


@pytest.fixture
def sink(outbox_postgres):
    with outbox_postgres.connect() as connection:
        yield Sink(connection)


@pytest.mark.parametrize("name", ["a job", "it's \\ 100% {braces} ünï"])
def test_ids_are_what_python_says(sink, name):
    """Of every version, and all bits: the SQL and ``derived_id`` make the same ones."""
    chance = random.Random(7)
    messages = [uuid7() for _ in range(200)] + [uuid.UUID(int=chance.getrandbits(128)) for _ in range(2000)]
    messages += [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1), uuid.uuid4(), uuid.uuid5(uuid.NAMESPACE_DNS, "x")]
    for message in messages:
        sink.message(message)
    sink.connection.execute(replace(PRODUCE, name=name).insert().encode())
    made = [row[0] for row in sink.events("event_id")]
    assert made == [derived_id(message, name) for message in messages]
    # The day by which the next consumer remembers it is the message's own.
    day = f"SELECT ({DAY_OF_ID})::text FROM unnest(%s::uuid[]) WITH ORDINALITY AS ids(message_id, n) ORDER BY n"
    of_made, of_messages = (sink.connection.execute(day, (ids,)).fetchall() for ids in (made, messages))
    assert of_made == of_messages


def test_several_events_of_one_message(sink):
    message = sink.message(body=["x", "y", "z"])
    sink.connection.execute(
        b"WITH lines AS (SELECT batch.*, line, n FROM batch, "
        b"jsonb_array_elements(body) WITH ORDINALITY AS l(line, n) ORDER BY n DESC)"
        + Produce("lines", "Line", "message_key", "Added", "line", rows="lines", part="n").insert().encode()
    )
    assert sink.events("event_id", "payload") == [
        (derived_id(message, "lines", str(n)), line) for n, line in enumerate("xyz", 1)
    ]
    # A constant tells two kinds of events of one name apart.
    sink.connection.execute(replace(PRODUCE, part="'first'").insert().encode())
    sink.connection.execute(replace(PRODUCE, part="2").insert().encode())
    assert [row[0] for row in sink.events("event_id")[3:]] == [
        derived_id(message, "a job", part) for part in ("first", "2")
    ]


def test_two_events_of_one_id_are_refused(sink):
    """As of a message whose lines are a row each: downstream the second would be a repeat of the first."""
    message = sink.message(body=1)
    sink.message(message, body=2, extra="{}")
    sink.message(body=3, extra="{}")
    for wrong in (PRODUCE, replace(PRODUCE, part="'same'")):
        said = f"more than one row of message {message}: Produce needs a part"
        with pytest.raises(psycopg.errors.InvalidTextRepresentation, match=said), sink.connection.transaction():
            sink.connection.execute(wrong.insert().encode())
    sink.connection.execute(replace(PRODUCE, part="body", where="body IS NOT NULL").insert().encode())
    sink.connection.execute(replace(PRODUCE, where="extra IS NOT NULL").insert().encode())
    assert [row[0] for row in sink.events("payload")] == [1, 2, 3, 2, 3]


def test_events_stand_in_the_order_of_offsets_and_not_of_rows(sink):
    offsets = list(range(500))
    random.Random(1).shuffle(offsets)
    for offset in offsets:
        sink.message(offset=offset, key=f"k{offset % 7}", body=offset)
    sink.connection.execute(PRODUCE.insert().encode())
    assert [row[0] for row in sink.events("payload")] == list(range(500))
    names = sink.events("aggregate_type", "aggregate_id", "event_type", "headers")
    assert names[8] == ("Thing", "k1", "Happened", None)


@pytest.mark.parametrize(
    ("own", "traceparent", "tracestate", "expected"),
    [
        (None, TRACE, "a=b", {"traceparent": TRACE, "tracestate": "a=b"}),
        (None, TRACE, None, {"traceparent": TRACE}),
        (None, None, None, None),
        ({"tenant": "x"}, TRACE, None, {"tenant": "x", "traceparent": TRACE}),
        ({"tenant": "x"}, None, None, {"tenant": "x"}),
        ({"traceparent": OTHER}, TRACE, "a=b", {"traceparent": OTHER}),
        ({"ce_subject": "thing-1"}, TRACE, None, {"ce_subject": "thing-1", "traceparent": TRACE}),
    ],
)
def test_the_trace_is_carried_on_beside_own_headers(sink, own, traceparent, tracestate, expected):
    extra = None if own is None else json.dumps(own)
    sink.message(traceparent=traceparent, tracestate=tracestate, extra=extra)
    for headers in ("extra", "extra -- of the message"):
        sink.connection.execute(replace(PRODUCE, headers=headers, traced=True).insert().encode())
    sink.connection.execute(replace(PRODUCE, headers="extra").insert().encode())
    assert sink.events("headers") == [(expected,), (expected,), (own,)]


def test_what_the_outbox_refuses_is_refused_here(sink):
    """So the message becomes a dead letter: these are errors of class 23."""
    sink.message(key="x" * 1001)
    with pytest.raises(psycopg.errors.CheckViolation, match="events_aggregate_id_length"):
        sink.connection.execute(PRODUCE.insert().encode())
    sink.connection.rollback()
    for expression in ({"aggregate_id": "NULL"}, {"part": "NULL"}):
        sink.connection.execute(BATCH)
        sink.message()
        with pytest.raises(psycopg.errors.NotNullViolation):
            sink.connection.execute(replace(PRODUCE, **expression).insert().encode())
        sink.connection.rollback()


def test_a_consumer_needs_to_insert_and_no_more(outbox_postgres):
    """The rights are a writer's, as docs/guides/pipelines.md says."""
    with outbox_postgres.connect(autocommit=True) as admin, login_role(admin, "consumer") as role:
        for statement in grants([(RoleKind.WRITER, role)], "outbox", "consumer", wal=False):
            admin.execute(statement.encode())
        with psycopg.connect(outbox_postgres.url, user=role) as consumer:
            here = Sink(consumer)
            here.message()
            consumer.execute(PRODUCE.insert().encode())
            consumer.commit()
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                consumer.execute("SELECT * FROM outbox.events")
        assert admin.execute("SELECT count(*) FROM outbox.events").fetchone() == (1,)
