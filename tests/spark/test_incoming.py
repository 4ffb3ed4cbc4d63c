"""What the task makes of Kafka's columns is what Spark makes of them: ids above all, which repeats are known by."""

from __future__ import annotations

import datetime as dt
import json
import random
import uuid
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from outbox.consumer.errors import JobError
from outbox.consumer.ids import DAY_OF_ID, LAST_DAY, NO_TIME
from outbox.consumer.ids import day as day_of
from spark_jobs import ids as identity
from spark_jobs.dedup.strategies import Dedup, Fingerprint, OffsetsOnly, uuid8
from spark_jobs.effects.mapped import Insert
from spark_jobs.effects.produce import Traced
from spark_jobs.job import META, ConsumerJob
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.payloads.framing import HEADER
from spark_jobs.spark import rows as spark_rows
from spark_jobs.task.incoming import Incoming, Messages

pytestmark = pytest.mark.spark

KAFKA = (
    "topic string, partition int, offset long, timestamp timestamp, key binary, value binary, "
    "headers array<struct<key: string, value: binary>>"
)
NOON = dt.datetime(2026, 3, 4, 12, tzinfo=dt.UTC)
# Not "$", which in Java also stands before a last newline.
UUID = r"\A[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\z"
V7 = "0195d9c2-5c00-7abc-8def-0123456789ab"
TEXTS = [
    b"",
    b"k",
    "schl\u00fcssel\U0001f600".encode(),
    b"a\0b",
    b"\xff\xfe",
    b"\xf0\x9f\x98",
    b"\xc3(x",
]
IDS = [
    V7.encode(),
    V7.upper().encode(),
    str(uuid.UUID(int=5)).encode(),
    b"order-5",
    b"",
    b"\xff\xfe",
    V7.encode() + b"\n",
    V7.replace("-", "").encode(),
    V7.replace("-", "0").encode(),
    ("g" + V7[1:]).encode(),
    ("-" + V7[1:]).encode(),
    V7[:35].encode() + b"\xff",
    "\u0660".encode() * 18,
]


def messages() -> list[tuple]:
    """Every id with and without each other header that matters; then many at random."""
    chance = random.Random(7)
    headers: list[list[tuple[str, bytes | None]] | None] = [None, []]
    for given in IDS:
        headers += [[("ce_id", given)], [("id", given)], [("x", b"1"), ("ce_id", given), ("ce_source", b"/shop")]]
        headers += [[("ce_id", None), ("id", given)], [("ce_id", given), ("ce_id", b"second"), ("ce_type", b"A")]]
    headers += [[("ce_type", kind), ("event-type", b"other")] for kind in TEXTS]
    headers += [
        [("event-type", b"B"), ("CE_ID", b"x")],
        [(HEADER, b"\x01abc"), (HEADER, b"no")],
        [("ce_source", b"/s")],
    ]
    names = ["ce_id", "id", "ce_type", "event-type", "ce_source", HEADER, "ID", "other"]
    for _ in range(200):
        headers.append(
            [(chance.choice(names), chance.choice([*IDS, *TEXTS, None])) for _ in range(chance.randrange(6))]
        )
    times = [NOON, dt.datetime(1, 1, 1, 12, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, tzinfo=dt.UTC)]
    return [
        (
            "t",
            0,
            number,
            chance.choice(times),
            None if number % 7 == 0 else bytearray(chance.choice(TEXTS)),
            None if number % 5 == 0 else bytearray(chance.choice([*TEXTS, b'{"n":1}'])),
            None if these is None else [(name, None if one is None else bytearray(one)) for name, one in these],
        )
        for number, these in enumerate(headers)
    ]


def read(rows: list[tuple]) -> Messages:
    """Return the same messages as a task reads them."""
    _, _, offsets, times, keys, values, headers = zip(*rows, strict=True)
    begin = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    return Messages(
        "t",
        0,
        offsets,
        [(one - begin) // dt.timedelta(milliseconds=1) for one in times],
        *([None if one is None else bytes(one) for one in column] for column in (keys, values)),
        [[(name, None if one is None else bytes(one)) for name, one in these or ()] for these in headers],
    )


# How Spark's own expressions make the columns of META: an oracle, in another language and by another way.


def by_spark(rows: Any, job: ConsumerJob) -> Any:
    """Return the columns of META over those of Kafka, and Kafka's key, value and headers."""
    if job.types is not None:
        rows = rows.filter(header("ce_type", "event-type").isin(list(job.types)))
    meta = {
        "message_topic": F.col("topic"),
        "message_part": F.col("partition"),
        "message_offset": F.col("offset"),
        "message_key": F.translate(F.col("key").cast("string"), "\0", "\ufffd"),
        "message_type": F.translate(header("ce_type", "event-type"), "\0", "\ufffd"),
        "message_time": time_of(),
        "message_tombstone": F.col("value").isNull(),
        "message_id": message_id(job),
    }
    return rows.select(*(column.alias(name) for name, column in meta.items()), "key", "value", "headers")


def header(*names: str) -> Any:
    """Return the value of the first header of the first of these names, as text."""

    def value(name: str) -> Any:
        return F.get(F.filter("headers", lambda one: one["key"] == name), F.lit(0))["value"]

    return F.coalesce(*map(value, names)).cast("string")


def time_of() -> Any:
    low, high = (F.lit(text).cast("timestamp") for text in ("0001-01-02 00:00:00", "9999-12-30 00:00:00"))
    return F.greatest(F.least(F.col("timestamp"), high), low)


def message_id(job: ConsumerJob) -> Any:
    """Return what the headers say, a hash of it when that is no UUID, or what the strategy makes an id of."""
    if isinstance(job.strategy, Fingerprint):
        # NULL and empty are two contents, and the key's length keeps key and value apart.
        content = F.concat(
            F.coalesce(F.octet_length("key").cast("string"), F.lit("-")).cast("binary"),
            F.lit(":").cast("binary"),
            F.coalesce(F.col("key"), F.lit(b"")),
            F.when(F.col("value").isNull(), F.lit(b"-")).otherwise(F.lit(b"+")),
            F.coalesce(F.col("value"), F.lit(b"")),
        )
        return uuid8(F.sha2(content, 256))
    given = header("ce_id", "id")
    # Two sources may use one name (CloudEvents: source and id together are unique); a UUID is unique by itself.
    named = F.concat_ws("\0", F.coalesce(header("ce_source"), F.lit("")), given)
    said = F.when(given.rlike(UUID), given).when(given != "", uuid8(F.sha2(named.cast("binary"), 256)))
    if not isinstance(job.strategy, OffsetsOnly):
        return said
    numbers = (F.col("partition"), F.col("offset"), F.unix_micros(time_of()))
    place = F.concat_ws("/", "topic", *(one.cast("string") for one in numbers))
    return F.coalesce(said, uuid8(F.sha2(place.cast("binary"), 256)))


@pytest.mark.parametrize(
    ("strategy", "types"),
    [(Dedup(), None), (Fingerprint(), None), (OffsetsOnly(), None), (Dedup(), ["A", "k", "\u00e9"])],
    ids=str,
)
def test_the_task_takes_messages_in_as_spark_does(spark, strategy, types):
    job = ConsumerJob(group="g", topics=["t"], effect=Insert("a"), strategy=strategy, types=types, schema=None)
    rows = spark.createDataFrame(messages(), KAFKA).coalesce(1)
    expected = by_spark(rows, job).select(*META).toArrow().to_pylist()
    taken = Incoming(None if types is None else tuple(types), spark_rows.ids_from(strategy))
    by_task = []
    for meta, payloads, headers, problems in map(taken.taken, [read(messages()[:50]), read(messages()[50:])]):
        assert len(payloads) == len(headers) == len(meta["message_id"]) == problems.null_count
        columns = zip(*(meta[name].to_pylist() for name in META), strict=True)
        by_task += [dict(zip(META, one, strict=True)) for one in columns]
    assert len(by_task) > (10 if types else 250)
    for here, there in zip(by_task, expected, strict=True):
        assert here == there
    # Without any header that names it: the same whenever it is read, another one in a topic that was made anew.
    made = [one["message_id"] for one in by_task[:2]]
    if isinstance(strategy, OffsetsOnly):
        assert [uuid.UUID(one).version for one in made] == [8, 8]
        assert len({one["message_id"] for one in by_task if not one["message_id"].startswith(V7[:8])}) > 100
    elif isinstance(strategy, Dedup) and types is None:
        assert made == [None, None]


HOP = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ORIGIN = b"00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
TRACES = [HOP, ORIGIN, b"", HOP.upper(), HOP + b"\n", HOP[:-1], b"\xff" + HOP[1:], None]
STATES = [b"vendor=1,other=2", b"", b"x" * 512, b"x" * 513, "schl\u00fcssel".encode(), b"a\tb", None]


def trace_by_spark() -> dict[str, Any]:
    """Return the columns of Traced."""

    def fitting(name: str, pattern: str) -> Any:
        return F.when(header(name).rlike(pattern), header(name))

    parent = r"\A[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\z"
    hop, origin = (fitting(name, parent) for name in ("traceparent", "ce_traceparent"))
    states = [fitting(name, r"\A[ -~]{1,512}\z") for name in ("tracestate", "ce_tracestate")]
    state = F.when(hop.isNotNull(), states[0]).when(origin.isNotNull(), states[1])
    return {"traceparent": F.coalesce(hop, origin), "tracestate": state}


def traced() -> list[tuple]:
    """Messages with every combination of what the four headers may hold, and payloads of all kinds."""
    chance = random.Random(3)
    names = {"traceparent": TRACES, "ce_traceparent": TRACES, "tracestate": STATES, "ce_tracestate": STATES}
    found = []
    for number in range(600):
        headers = [(name, chance.choice(values)) for name, values in names.items() if chance.random() < 0.8]
        headers += [("traceparent", HOP)] * (number % 11 == 0)
        chance.shuffle(headers)
        value = chance.choice([b'{"n": 1}', b"no JSON", b"", b"\0\xff", b"x" * 200, None])
        found.append(("t", 0, number, NOON, b"k", value, [*headers, ("ce_id", V7.encode())]))
    return found


@pytest.mark.parametrize("schema", [None, Traced(None), Traced("n int")], ids=["bytes", "traced bytes", "traced"])
def test_the_task_reads_bytes_and_traces_as_spark_does(spark, schema):
    job = ConsumerJob("g", ["t"], Insert("a"), schema=schema)
    decoder = spark_rows.task_decoder(job)
    names = [*job.payload_columns(), *META, PROBLEM]
    rows = spark.createDataFrame(traced(), KAFKA).coalesce(1)
    from_kafka = by_spark(rows, job)
    if schema is not None:
        from_kafka = from_kafka.withColumns(trace_by_spark())
    expected = job.decoder.decode(from_kafka).select(*names).toArrow().to_pylist()
    by_task = [
        row for batch in decoder.decoding([read(traced()[:300]), read(traced()[300:])]) for row in batch.to_pylist()
    ]
    assert [{name: row[name] for name in names} for row in by_task] == expected
    assert decoder.columns is not None
    assert set(decoder.columns) == set(names) - {PROBLEM}
    if schema is not None:
        assert {row["traceparent"] for row in by_task} == {None, HOP.decode(), ORIGIN.decode()}
        assert {row["tracestate"] for row in by_task} == {None, "vendor=1,other=2", "x" * 512}
    # Bytes are whatever they are; a column of a schema has a type.
    assert any(row[PROBLEM] for row in by_task) == ("n" in job.payload_columns())


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
    import psycopg
    import pyarrow as pa

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
