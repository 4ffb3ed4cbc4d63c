"""Ids of produced events, and declarations that can't work; no server. What Postgres makes of it: integration."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StructType
from uuid_utils.compat import uuid7

from examples.jobs import enrich_orders
from outbox.consumer.errors import JobError
from spark_jobs.effects.produce import Produce, Traced, derived_id
from spark_jobs.job import ConsumerJob, find_job

A = UUID("0191b2c4-5e6f-7abc-8def-0123456789ab")
RANDOM = UUID("6ba7b810-9dad-41d1-80b4-00c04fd430c8")
PLAIN = Produce("a-name", "Thing", "message_key", "Happened", "to_jsonb(1)")


def test_ids_stay_what_they_are():
    """Written down once: an id that changes with a version of this library would not be known downstream."""
    assert derived_id(A, "enrich-orders") == UUID("0191b2c4-5e6f-76a7-8eb7-f7a062291374")
    assert derived_id(A, "enrich-orders", "2") == UUID("0191b2c4-5e6f-7ffa-853c-aa39d4f84336")
    assert derived_id(RANDOM, "enrich-orders") == UUID("1fb6dbf3-279d-8414-839f-283f239c24c6")


@given(st.uuids(), st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1), st.text())
def test_an_id_keeps_the_time_that_the_message_has(message, name, part):
    part = part.encode("utf-8", "replace").decode()
    made = derived_id(message, name, part)
    assert made.variant == "specified in RFC 4122"
    assert made.version == (7 if message.hex[12] == "7" and message.hex[16] in "89ab" else 8)
    if made.version == 7:
        assert made.hex[:12] == message.hex[:12]
    assert derived_id(message, name, part) == made
    assert len({made, message, derived_id(message, name + "x", part), derived_id(message, name, part + "x")}) == 4


def test_many_messages_of_one_millisecond_have_ids_of_their_own():
    messages = [UUID(int=(A.int >> 62 << 62) | number) for number in range(10_000)]
    assert len({derived_id(message, "n") for message in messages}) == 10_000
    one = uuid7()
    assert len({derived_id(one, "n", str(part)) for part in range(10_000)}) == 10_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\0b"}, "NUL"),
        ({"name": "n" * 201}, "201 characters"),
        ({"aggregate_type": ""}, "aggregate_type"),
        ({"event_type": "e" * 201}, "event_type"),
        ({"aggregate_id": " "}, "aggregate_id"),
        ({"payload": ""}, "payload"),
        ({"where": ""}, "where"),
        ({"schema": ""}, "schema"),
        ({"rows": "a.b.c"}, "SCHEMA.NAME"),
    ],
)
def test_declarations_that_can_not_work(change, said):
    with pytest.raises(JobError, match=said):
        replace(PLAIN, **change)


def test_names_are_quoted_and_texts_are_literals():
    text = replace(PLAIN, name="it's", aggregate_type="O'Hara", schema='a"b', rows='c"d').insert()
    assert 'INSERT INTO "a""b"."events" ' in text
    assert 'FROM "c""d"' in text
    assert "'it''s'" in text
    assert "'O''Hara'" in text


def test_a_traced_payload_has_no_such_field_itself():
    class Own:
        def task_plan(self):
            return StructType().add("a", "string").add("TraceParent", "string"), None

    job = ConsumerJob("g", effect="SELECT 1", schema=Traced(None))
    assert job.payload_columns() == ("payload", "traceparent", "tracestate")
    with pytest.raises(JobError, match="field TraceParent itself"):
        Traced(Own()).task_plan()


def test_the_job_to_copy_can_be_found():
    assert find_job("examples.jobs.enrich_orders:job") is enrich_orders.job
    assert enrich_orders.produce.name == enrich_orders.job.group
