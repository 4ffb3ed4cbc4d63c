"""The table's CHECKs: plain SQL from any language can't write what the writer would refuse."""

from __future__ import annotations

import json
import time
import uuid

import psycopg
import pytest
from psycopg.types.json import Jsonb

from outbox import Event, EventError
from outbox.event import RESERVED_HEADERS


@pytest.mark.parametrize("column", ["id", "lane"])
def test_what_the_database_computes_can_not_be_given(outbox_postgres, column):
    """A forged id would break the order, a forged lane would give one key two relays."""
    with outbox_postgres.connect() as connection, pytest.raises(psycopg.errors.GeneratedAlways):
        connection.execute(
            f"INSERT INTO outbox.events ({column}, aggregate_type, aggregate_id, event_type) VALUES (1, 'O', '1', 'T')"
        )


def insert(connection, values):
    row = {"aggregate_type": "Order", "aggregate_id": "1", "event_type": "T"} | values
    names, marks = ", ".join(row), ", ".join(f"%({name})s" for name in row)
    with connection.transaction():
        connection.execute(f"INSERT INTO outbox.events ({names}) VALUES ({marks})", row)


def test_what_may_not_be_null(outbox_postgres):
    with outbox_postgres.connect() as connection:
        for column in ("event_id", "aggregate_type", "aggregate_id", "event_type", "created_at"):
            with pytest.raises(psycopg.errors.NotNullViolation) as caught:
                insert(connection, {column: None})
            # Without a key there is no lane, and that column comes first.
            assert caught.value.diag.column_name == ("lane" if column in {"aggregate_type", "aggregate_id"} else column)


def test_the_edges_that_are_allowed(outbox_postgres):
    row = {"aggregate_type": "ü" * 200, "aggregate_id": "ü" * 1000, "event_type": "ü" * 200, "event_id": uuid.uuid4()}
    own = {"x" * 100: "", "content-type": "a/b", "traceparent": "t", "idempotency-key": "ü" * 255}
    own["ce_subject"] = "ü\n" * 500
    headers = json.dumps(own, ensure_ascii=False)
    with outbox_postgres.connect() as connection:
        connection.execute(
            "INSERT INTO outbox.events (event_id, aggregate_type, aggregate_id, event_type, headers, payload_bytes) "
            "VALUES (%(event_id)s, %(aggregate_type)s, %(aggregate_id)s, %(event_type)s, %(headers)s, %(payload)s)",
            {**row, "headers": headers, "payload": b"x" * (1_000_000 - 2000 - len(headers.encode()))},
        )
        found = connection.execute("SELECT event_id, payload, headers FROM outbox.events").fetchall()
    assert found == [(row["event_id"], None, own)]


def test_default_ids_are_distinct_and_rise_with_time(outbox_postgres):
    with outbox_postgres.connect() as connection:
        before = connection.execute("SELECT clock_timestamp()").fetchone()[0]
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) "
            "SELECT 'Order', g::text, 'T' FROM generate_series(1, 5000) g"
        )
        ids = [row[0] for row in connection.execute("SELECT event_id FROM outbox.events ORDER BY id")]
        lanes = dict(connection.execute("SELECT lane, count(*) FROM outbox.events GROUP BY lane").fetchall())
    assert len(set(ids)) == 5000
    assert {(item.version, item.variant) for item in ids} == {(7, uuid.RFC_4122)}
    times = [item.int >> 80 for item in ids]
    assert times == sorted(times)
    assert abs(times[0] / 1000 - before.timestamp()) < 60
    assert sorted(lanes) == [0, 1, 2, 3]
    assert min(lanes.values()) > 1000


BROKEN = [
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
    ("events_headers_text", {"headers": '{"a": ["x"]}'}),
    ("events_headers_text", {"headers": '[{"a": "x"}]'}),
    ("events_headers_text", {"headers": "null"}),
    ("events_headers_text", {"headers": '{"good": "x", "a\\n": "x"}'}),
    ("events_headers_text", {"headers": '{"' + "x" * 101 + '": "x"}'}),
    *[
        ("events_headers_text", {"headers": f'{{"tenant": "acme", "{name}": "x"}}'})
        for lower in ("ce_type", *sorted(RESERVED_HEADERS))
        for name in (lower, lower.upper(), lower.title())
    ],
    *[
        ("events_headers_text", {"headers": f'{{"{name}": "x"}}'})
        for name in ("Content-Type", "Idempotency-Key", "TRACEPARENT")
    ],
    *[
        ("events_headers_text", {"headers": json.dumps({"tenant": "acme", "idempotency-key": key})})
        for key in ("", "x" * 256, "a\nb", "a\x7fb", "a\x1f")
    ],
    *[
        ("events_headers_text", {"headers": json.dumps({"tenant": "acme", name: subject})})
        for name, subject in (("ce_subject", ""), ("ce_subject", "ü" * 1001), ("CE_Subject", "x"), ("ce_subject2", "x"))
    ],
    *[
        ("events_relay_headers", {"headers": f'{{"tenant": "acme", "{name}": "x"}}'})
        for name in ("outbox-", "outbox-dead-letter", "outbox-replay", "Outbox-Replay", "OUTBOX-", "outbox-any")
    ],
    ("events_size", {"payload_bytes": b"x" * 1_000_000}),
    ("events_size", {"headers": '{"a": "' + "x" * 1_000_000 + '"}'}),
    ("events_size", {"payload": '"' + "x" * 1_000_000 + '"'}),
]


def test_what_breaks_a_check_names_it(outbox_postgres):
    with outbox_postgres.connect() as connection:
        for constraint, values in BROKEN:
            with pytest.raises(psycopg.errors.CheckViolation) as caught:
                insert(connection, values)
            assert caught.value.diag.constraint_name == constraint, values


def accepted(connection, headers):
    """Return whether the table takes a row with these headers, which is not kept."""
    row = {"aggregate_type": "Order", "aggregate_id": "1", "event_type": "T", "headers": json.dumps(headers)}
    try:
        with connection.transaction(force_rollback=True):
            insert(connection, row)
    except psycopg.errors.CheckViolation:
        return False
    return True


def is_an_event(**fields):
    try:
        Event("Order", "1", "T", **fields)
    except EventError:
        return False
    return True


def test_lengths_are_those_of_the_library(outbox_postgres):
    """Except that an idempotency key's bytes are the library's, and its characters the table's."""
    with outbox_postgres.connect() as connection:
        for field, name, most in (("idempotency_key", "idempotency-key", 255), ("subject", "ce_subject", 1000)):
            for character in "xü\U0001f600" + ("\n" if field == "subject" else ""):
                for length in (0, 1, most, most + 1):
                    value = character * length
                    taken = accepted(connection, {name: value, "other": "a\nb"})
                    assert taken == (1 <= length <= most), (name, character, length)
                    if field == "subject" or character == "x":
                        assert taken == is_an_event(**{field: value}), (name, character, length)


def test_no_control_character_in_an_idempotency_key(outbox_postgres):
    with outbox_postgres.connect() as connection:
        for code in (*range(1, 34), *range(126, 161)):
            key = f"a{chr(code)}b"
            is_right = not (code < 32 or code == 127)
            assert is_an_event(idempotency_key=key) == is_right, code
            assert accepted(connection, {"idempotency-key": key}) == is_right, code
            assert accepted(connection, {"other": key, "ce_subject": key})


def test_the_check_of_a_header_costs_what_others_do(outbox_postgres):
    """A regular expression that counted the characters took a hundred times as long."""
    with outbox_postgres.connect() as connection:

        def seconds(header):
            began = time.perf_counter()
            with connection.transaction(force_rollback=True):
                connection.execute(
                    "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, headers) "
                    "SELECT 'Order', '1', 'T', %s FROM generate_series(1, 200)",
                    (Jsonb({header: "x" * 255}),),
                )
            return time.perf_counter() - began

        most = 20 * min(seconds("other-header") for _ in range(5))
        for name in ("ce_subject", "idempotency-key"):
            assert min(seconds(name) for _ in range(5)) < most, name
