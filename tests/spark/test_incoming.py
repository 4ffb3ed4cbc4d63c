"""Ids, traces and times where Spark or the database makes them: the same as those of the tasks that read Kafka."""

from __future__ import annotations

import hashlib
import json
import random
import uuid
from dataclasses import replace

import psycopg
import pyarrow as pa
import pytest
from bench import Bench
from pyspark.sql import functions as F  # noqa: N812

from outbox.consumer import ids as of_content
from outbox.consumer.errors import JobError
from outbox.consumer.ids import DAY_OF_ID, LAST_DAY, NO_TIME
from outbox.consumer.ids import day as day_of
from spark_jobs import ids as identity
from spark_jobs.dedup.strategies import Dedup, Fingerprint, uuid8
from spark_jobs.effects.produce import Traced
from spark_jobs.job import ConsumerJob
from spark_jobs.spark import rows as spark_rows

pytestmark = pytest.mark.spark

V7 = "0195d9c2-5c00-7abc-8def-0123456789ab"
ORIGIN = b"00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"


def test_a_hash_is_the_same_id_in_spark(spark):
    contents = [b"", b"order-5", b"\0\xff"]
    rows = spark.createDataFrame([(hashlib.sha256(one).hexdigest(),) for one in contents], "digest string")
    made = [row[0] for row in rows.coalesce(1).select(uuid8(F.col("digest"))).collect()]
    assert made == list(map(of_content.uuid8, contents))


def test_a_payload_that_spark_reads_is_traced_too(bench):
    job = replace(
        bench.job,
        schema=Traced("variant"),
        setup="CREATE TABLE IF NOT EXISTS seen (payload jsonb, traceparent text)",
        effect="INSERT INTO seen SELECT payload, traceparent FROM batch",
    )
    bench.send_raw(b'{"n": 1}', [("ce_id", V7.encode()), ("ce_traceparent", ORIGIN), ("traceparent", b"no")])
    assert bench.once(job).applied == 1
    assert bench.rows("SELECT * FROM seen") == [({"n": 1}, ORIGIN.decode())]


def test_ids_have_the_day_and_the_order_that_the_database_sees(outbox_postgres):
    chance = random.Random(11)
    texts = [str(uuid.UUID(int=chance.getrandbits(128))) for _ in range(300)]
    texts = [
        text[:14] + chance.choice("7777148f") + text[15:19] + chance.choice("89ab7c0") + text[20:] for text in texts
    ]
    texts += [V7, V7.upper(), f"{0:08x}-0000-7000-8000-{0:012x}", "ffffffff-ffff-7fff-bfff-ffffffffffff"]
    # The end of the year 9999, and what comes next: those have no time.
    texts += ["e677d21f-dbff-7000-8000-000000000000", "e677d21f-dc00-7000-8000-000000000000"]
    ids, wrong = identity.parsed(pa.array([None, "x", *texts])[2:])
    assert not wrong.any()
    assert [str(uuid.UUID(bytes=one.tobytes())) for one in ids] == [text.lower() for text in texts]
    with psycopg.connect(outbox_postgres.url) as connection:
        rows = connection.execute(
            f"SELECT message_id, {DAY_OF_ID} - date '1970-01-01' FROM unnest(%s::uuid[]) AS given (message_id)",  # type: ignore[arg-type]
            (texts,),
        ).fetchall()
        ordered = connection.execute(
            f"SELECT message_id FROM unnest(%s::uuid[]) AS given (message_id) ORDER BY {DAY_OF_ID}, message_id",  # type: ignore[arg-type]
            (texts,),
        ).fetchall()
    assert identity.days(ids).tolist() == [day for _, day in rows]
    assert [(day_of(uuid.UUID(text)) - NO_TIME).days for text in texts] == [day for _, day in rows]
    assert [day for _, day in rows[-3:]] == [0, LAST_DAY, 0]
    assert [one.tobytes() for one in identity.in_order(ids)] == [one.bytes for (one,) in ordered]


def test_times_are_whole_in_what_is_made_of_them(spark):
    """Two payments of one millisecond are two; and jsonb has the microseconds that the message has."""
    rows = spark.range(2).selectExpr(
        "'a' AS account",
        "timestamp_micros(1769860800000001 + id) AS at",
        "timestamp_micros(1769860800000001 + id)::timestamp_ntz AS local",
        "named_struct('at', timestamp_micros(1769860800000001 + id), 'local', localtimestamp()) AS nested",
    )
    ways = {
        "columns": Fingerprint(["account", "at"]),
        "local": Fingerprint(["account", "local"]),
        "nested": Fingerprint(["account", "nested"]),
        "time": Fingerprint(["account"], time="at"),
    }
    ids = rows.select(*(way.message_id().alias(name) for name, way in ways.items())).collect()
    assert {name for name in ways if ids[0][name] == ids[1][name]} == set()
    (nested, _) = (json.loads(row.nested) for row in spark_rows.copyable(rows)[0].collect())
    assert nested["at"] == "2026-01-31T12:00:00.000001Z"
    assert len(nested["local"].partition(".")[2]) == 6
    for name in ("outbox_batch_staged_by", "ctid"):
        with pytest.raises(JobError, match=f"column {name}: the name is"):
            spark_rows.copyable(rows.withColumnRenamed("account", name))


def numbers(bench: Bench, strategy: Dedup) -> ConsumerJob:
    return replace(
        bench.job,
        schema="n int",
        setup="CREATE TABLE IF NOT EXISTS seen (n int)",
        effect="INSERT INTO seen SELECT n FROM batch",
        strategy=strategy,
    )


def test_events_with_one_idempotency_key_are_applied_once(bench):
    own = "idempotency-key"

    def send(n: int, kind: bytes, *headers: tuple[str, bytes]) -> None:
        bench.send_raw(b'{"n": %d}' % n, [("aggregate-type", kind), *headers])

    send(1, b"Order", ("ce_id", str(uuid.uuid4()).encode()), (own, b"request 1"))
    send(2, b"Order", ("ce_id", str(uuid.uuid4()).encode()), (own, b"request 1"))
    send(3, b"Invoice", ("ce_id", str(uuid.uuid4()).encode()), (own, b"request 1"))
    for n in (4, 5):
        send(n, b"Order", ("ce_id", V7.encode()), (own, V7.encode()))
    job = numbers(bench, Dedup(key=own))
    totals = bench.once(job)
    assert (totals.applied, totals.duplicates, totals.dead) == (3, 2, 0)
    assert bench.rows("SELECT n FROM seen ORDER BY n") == [(1,), (3,), (4,)]
    # In a later round they are known too.
    send(6, b"Order", ("ce_id", str(uuid.uuid4()).encode()), (own, b"request 1"))
    assert bench.once(job).duplicates == 1


def test_messages_without_an_id_are_applied_by_their_places_if_that_is_allowed(bench):
    for n in (1, 1):
        bench.send_raw(b'{"n": %d}' % n, [])
    for n in (2, 3):
        bench.send_raw(b'{"n": %d}' % n, [("ce_id", V7.encode())])
    job = numbers(bench, Dedup(allow_producer_repeats=True))
    totals = bench.once(job)
    assert (totals.applied, totals.duplicates, totals.dead) == (3, 1, 0)
    assert bench.rows("SELECT n FROM seen ORDER BY n") == [(1,), (1,), (2,)]
    bench.command("offsets", "reset", job.group, "--topic", job.topics[0], "--to", "earliest", "--reason", "test")
    assert bench.once(job).duplicates == 4
