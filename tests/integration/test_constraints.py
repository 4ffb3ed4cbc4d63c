"""The table's CHECKs: plain SQL from any language can't write what the writer would refuse."""

from __future__ import annotations

import datetime as dt
import json
import uuid

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox import Event, Outbox
from outbox.event import RESERVED_HEADERS

INSERT = "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) VALUES (%s, %s, %s, %s)"


def test_plain_sql_with_a_default_id(outbox_postgres):
    with outbox_postgres.connect() as connection:
        before = connection.execute("SELECT clock_timestamp()").fetchone()[0]
        connection.execute(INSERT, ("Order", "1", "OrderPlaced", '{"a": 1}'))
        row = connection.execute("SELECT event_id, lane, created_at FROM outbox.events").fetchone()
        made = dt.datetime.fromtimestamp((row[0].int >> 80) / 1000, dt.UTC)
    assert row[0].version == 7
    assert row[0].variant == uuid.RFC_4122
    assert abs((made - before).total_seconds()) < 5
    assert 0 <= row[1] < 4


def test_default_ids_are_distinct_and_rise_with_time(outbox_postgres):
    with outbox_postgres.connect() as connection:
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) "
            "SELECT 'Order', g::text, 'T' FROM generate_series(1, 5000) g"
        )
        ids = [row[0] for row in connection.execute("SELECT event_id FROM outbox.events ORDER BY id")]
        lanes = dict(connection.execute("SELECT lane, count(*) FROM outbox.events GROUP BY lane").fetchall())
    assert len(set(ids)) == 5000
    times = [item.int >> 80 for item in ids]
    assert times == sorted(times)
    assert sorted(lanes) == [0, 1, 2, 3]
    assert min(lanes.values()) > 1000


def test_one_key_is_always_in_one_lane(outbox_postgres):
    with outbox_postgres.connect() as connection:
        for _ in range(3):
            connection.execute(INSERT, ("Order", "same", "T", None))
        assert len(connection.execute("SELECT DISTINCT lane FROM outbox.events").fetchall()) == 1


@pytest.mark.parametrize(
    ("constraint", "values"),
    [
        ("events_aggregate_type_length", {"aggregate_type": ""}),
        ("events_aggregate_type_length", {"aggregate_type": "x" * 201}),
        ("events_aggregate_id_length", {"aggregate_id": ""}),
        ("events_aggregate_id_length", {"aggregate_id": "x" * 1001}),
        ("events_event_type_length", {"event_type": ""}),
        ("events_event_type_length", {"event_type": "x" * 201}),
        ("events_one_payload", {"payload": "{}", "payload_bytes": b"x"}),
        ("events_headers_text", {"headers": "[]"}),
        ("events_headers_text", {"headers": '"x"'}),
        ("events_headers_text", {"headers": '{"a": 1}'}),
        ("events_headers_text", {"headers": '{"a": null}'}),
        ("events_headers_text", {"headers": '{"": "x"}'}),
        ("events_headers_text", {"headers": '{"a b": "x"}'}),
        ("events_headers_text", {"headers": '{"ce_type": "x"}'}),
        *[("events_headers_text", {"headers": f'{{"{name}": "x"}}'}) for name in sorted(RESERVED_HEADERS)],
        ("events_size", {"payload_bytes": b"x" * 1_000_000}),
        ("events_size", {"payload": '"' + "x" * 1_000_000 + '"'}),
    ],
)
def test_what_breaks_a_check_names_it(outbox_postgres, constraint, values):
    row = {"aggregate_type": "Order", "aggregate_id": "1", "event_type": "T"} | values
    names, marks = ", ".join(row), ", ".join(f"%({name})s" for name in row)
    with outbox_postgres.connect() as connection, pytest.raises(psycopg.errors.CheckViolation) as caught:
        connection.execute(f"INSERT INTO outbox.events ({names}) VALUES ({marks})", row)
    assert caught.value.diag.constraint_name == constraint


def test_a_nul_never_gets_in(outbox_postgres):
    with outbox_postgres.connect(autocommit=True) as connection:
        with pytest.raises((psycopg.DataError, ValueError)):
            connection.execute(INSERT, ("Order", "a\0b", "T", None))
        with pytest.raises(psycopg.errors.UntranslatableCharacter):
            connection.execute(INSERT, ("Order", "1", "T", '{"a": "\\u0000"}'))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner, max_size=4)
    ),
    max_leaves=20,
).filter(lambda value: isinstance(value, dict | list))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(payload=JSON)
def test_any_json_comes_back_equal(outbox_postgres, payload):
    with psycopg.connect(outbox_postgres.url) as connection:
        Outbox().add(connection, Event("Order", "1", "T", payload))
        row = connection.execute("SELECT payload::text FROM outbox.events").fetchone()
        connection.rollback()
    # jsonb keeps numbers exactly but may write 6e16 as 60000000000000000: compare them as numbers.
    assert json.loads(row[0], parse_int=float) == json.loads(json.dumps(payload), parse_int=float)
