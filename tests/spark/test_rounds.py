"""What a round does with messages that can't be applied, with each strategy, and as one transaction."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import replace

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from pyspark.sql import functions
from uuid_utils.compat import uuid7

from spark_jobs.dedup.strategies import Fingerprint, Natural, Version
from spark_jobs.driver import rounds
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.errors import BadMessage, EffectFailed, Fenced, JobError, Reject
from spark_jobs.job import ConsumerJob
from spark_jobs.model import Range
from spark_jobs.spark import rows as spark_rows
from spark_jobs.task import partition as task
from spark_jobs.task.reader import ReaderSettings

pytestmark = pytest.mark.spark

NUL = '{"order_id": "a\\u0000b", "seq": 1, "customer": "c", "amount_cents": 10, "status": "s"}'


def letters(bench, columns="message_offset, reason"):
    return bench.rows(f"SELECT {columns} FROM consumer.dead_letters ORDER BY part, message_offset")


def put(bench, value, key="k", event_id=None, kind="order.placed", **where):
    event_id = uuid7() if event_id is None else event_id
    headers = [("ce_id", str(event_id).encode()), ("ce_type", kind.encode())]
    data = value if isinstance(value, bytes | None) else json.dumps(value).encode()
    bench.send_raw(data, headers, key, **where)
    return event_id


def order(order_id, seq, **changes):
    return {"order_id": order_id, "seq": seq, "customer": "c", "amount_cents": 10, "status": f"s{seq}"} | changes


def retry(bench):
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")


def waits_again(bench, group, key, first, last, state="retry"):
    """Dead letters by hand, of these offsets: ``key`` is SQL that may use ``n``."""
    bench.run(
        "INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_id, message_key,"
        f" message_headers, message_time, reason, error, state) SELECT '{group}', '{bench.topic}', 't', 0, n,"
        f" gen_random_uuid(), {key}, '[]', now(), 'failed', 'x', '{state}' FROM generate_series({first}, {last}) AS n"
    )


def test_a_bad_message_costs_one_row_and_can_be_tried_again(bench):
    """Not JSON, without an id, refused by a constraint, and not even fit for COPY: all in one batch with good ones."""
    job = replace(bench.job, setup=bench.job.setup + ";ALTER TABLE order_totals ADD CHECK (customer <> 'bad')")
    for seq in range(1, 40):
        put(bench, order(f"o{seq % 5}", (seq + 4) // 5), f"o{seq % 5}", partition=0)
    put(bench, b"not json", partition=0)
    bench.send_raw(json.dumps(order("x", 1)).encode(), [("h", b"\xff"), ("h", None)], "x", partition=0)
    put(bench, order("y", 1, customer="bad"), "y", partition=0)
    refused = put(bench, order("z", 1, customer="bad"), "z", partition=0)
    put(bench, NUL.encode(), "n", partition=0)
    put(bench, order("last", 1), "last", partition=0)
    totals = bench.once(job)
    assert (totals.read, totals.applied, totals.duplicates, totals.dead) == (45, 40, 0, 5)
    assert [row[1] for row in letters(bench)] == ["undecodable", "no-id", "failed", "failed", "failed"]
    ((headers, key, value, sqlstate, error),) = bench.rows(
        "SELECT message_headers, message_key, convert_from(message_value, 'UTF8')::json, sqlstate, error "
        f"FROM consumer.dead_letters WHERE message_id = '{refused}'"
    )
    assert ([one["key"] for one in headers], key, value["order_id"], sqlstate) == (
        ["ce_id", "ce_type"],
        b"z",
        "z",
        "23514",
    )
    assert "order_totals_customer_check" in error
    (headers,) = bench.rows("SELECT message_headers FROM consumer.dead_letters WHERE reason = 'no-id'")[0]
    assert headers == [{"key": "h", "value": "/w=="}, {"key": "h", "value": None}]
    assert bench.positions() == {0: 45, 1: 0}
    assert bench.rows("SELECT applied, duplicates, dead FROM consumer.offsets WHERE part = 0") == [(40, 0, 5)]
    assert bench.rows("SELECT count(*) FROM consumer.processed_messages") == [(40,)]
    # The sink is mended, and all are tried again: two can be applied now, the others count another attempt.
    bench.run("ALTER TABLE order_totals DROP CONSTRAINT order_totals_customer_check")
    retry(bench)
    totals = bench.once()
    assert (totals.applied, totals.dead) == (2, 0)
    assert letters(bench, "reason, attempts, state") == [
        ("undecodable", 2, "dead"),
        ("no-id", 2, "dead"),
        ("failed", 2, "dead"),
    ]
    assert {name: found[1] for name, found in bench.totals().items()} == {
        **dict.fromkeys(("o0", "o1", "o2", "o3"), 8),
        "o0": 7,
        **dict.fromkeys(("last", "y", "z"), 1),
        "o4": 8,
    }
    # What has been applied from its dead letter is known when the producer sends it again.
    put(bench, order("z", 1), "z", event_id=refused)
    assert bench.once().duplicates == 1


@pytest.mark.parametrize("transform", [None, lambda rows: rows.filter("true")], ids=["task", "spark"])
def test_what_is_the_matter_on_the_straight_way_is_found_on_the_other(bench, transform):
    """Insert's rows go straight into the table; the first bad thing sends the range through ``batch``."""
    bench.run("CREATE TABLE log (order_id varchar(8), seq int CHECK (seq < 100), at timestamptz DEFAULT now())")
    job = replace(bench.job, setup=None, effect=Insert("log", ["order_id", "seq"]), transform=transform)
    known = put(bench, order("a", 1), partition=0)
    put(bench, order("b", 1), partition=1)
    assert bench.once(job).applied == 2
    put(bench, b"not json", partition=0)
    bench.send_raw(json.dumps(order("x", 1)).encode(), [], "x", partition=0)
    put(bench, order("refused", 100), partition=0)
    put(bench, order("too long for it", 2), partition=0)
    put(bench, NUL.encode(), partition=0)
    put(bench, order("a", 1), event_id=known, partition=0)
    put(bench, None, partition=0)
    put(bench, order("c", 1), event_id="no-uuid", partition=0)
    put(bench, order("d", 1), partition=1)
    # What an attempt that Spark gave up had applied is in the sink's counts below, and not in this driver's.
    assert bench.once(job).dead == 5
    assert [reason for _, reason in letters(bench)] == ["undecodable", "no-id", "failed", "failed", "failed"]
    assert bench.rows("SELECT order_id FROM log ORDER BY 1") == [("a",), ("b",), ("c",), ("d",)]
    assert bench.rows("SELECT part, applied, duplicates, dead FROM consumer.offsets ORDER BY 1") == [
        (0, 3, 1, 5),
        (1, 2, 0, 0),
    ]
    assert bench.rows("SELECT count(*) FROM consumer.processed_messages") == [(5,)]
    # The table is altered while the driver runs: the next round sees it as it is.
    runner = bench.runner(job)
    runner.once(threading.Event())
    bench.run("ALTER TABLE log ALTER COLUMN seq TYPE numeric(12,1) USING seq + 0.5")
    put(bench, order("e", 5), partition=1)
    runner.once(threading.Event())
    assert bench.rows("SELECT order_id, seq::text FROM log ORDER BY 1 OFFSET 3") == [("d", "1.5"), ("e", "5.0")]


def test_with_keep_order_no_message_overtakes_a_dead_letter_of_its_key(bench):
    setup = bench.job.setup + ";ALTER TABLE order_totals ADD CONSTRAINT sane CHECK (total_cents < 1000)"
    job = replace(bench.job, keep_order=True, setup=setup, max_dead=2)
    # More messages of the key in front of the bad one than there may be dead letters: they are not among those behind.
    for number in range(4):
        put(bench, order(f"x{number}", 1), "a")
    put(bench, order("a", 1), "a")
    put(bench, order("b", 1), "b")
    put(bench, order("a", 2, amount_cents=5000), "a")
    put(bench, order("a", 3), "a")
    put(bench, order("b", 2), "b")
    assert (bench.once(job).dead, bench.totals()["a"][1], bench.totals()["b"][1]) == (2, 1, 2)
    # In a later round too, for as long as the dead letter stands; and what is tried again in vain stays in front.
    put(bench, order("a", 4), "a")
    put(bench, order("b", 3), "b")
    retry(bench)
    job = replace(job, setup=None)
    assert (bench.once(job).dead, bench.totals()["a"][1], bench.totals()["b"][1]) == (1, 1, 3)
    assert [reason for (reason,) in letters(bench, "reason")] == ["failed", "behind", "behind"]
    bench.run("ALTER TABLE order_totals DROP CONSTRAINT sane")
    retry(bench)
    put(bench, order("a", 5), "a")
    totals = bench.once(job)
    assert letters(bench) == []
    assert (totals.applied, bench.totals()["a"]) == (4, (5040, 5, 5, 0, "s5"))


def test_hundreds_of_dead_letters_and_some_that_end_the_effect_keep_no_group_from_its_messages(bench, monkeypatch):
    monkeypatch.setattr("spark_jobs.driver.rounds.FAILED_ALONE", 1)

    def effect(cursor, rows):
        if {13, 15, 17} & set(rows["n"].to_pylist()):
            raise ValueError("thirteen")
        cursor.executemany("INSERT INTO numbers VALUES (%s)", [(n,) for n in rows["n"].to_pylist()])

    job = ConsumerJob("many", [bench.topic], effect, schema="n int", keep_order=True)
    bench.run("CREATE TABLE numbers (n int)")
    producer = bench.producer()
    for number in range(350):
        headers = [("ce_id", str(uuid7()).encode())]
        producer.produce(bench.topic, b'{"n": "bad"}', f"key{number}", headers=headers, partition=number % 2)
    assert producer.flush(30) == 0
    put(bench, {"n": 1}, "good", partition=0)
    put(bench, {"n": 2}, "key0", partition=0)
    totals = bench.once(job)
    assert (totals.applied, totals.dead, letters(bench)[175]) == (1, 351, (176, "behind"))
    # Tried again, each alone in the end: one keeps neither those after it back, nor what is new, which comes first
    # after as many of them as may fail in one round.
    for number in (13, 15, 17, 19):
        bench.run(
            f"UPDATE consumer.dead_letters SET state = 'retry', message_value = '{{\"n\": {number}}}' "
            f"WHERE message_key = 'key{number}'"
        )
    put(bench, {"n": 3}, "good", partition=0)
    put(bench, {"n": 4}, "key13", partition=1)
    totals = bench.once(job)
    assert (totals.applied, totals.dead) == (2, 1)
    assert bench.rows("SELECT n FROM numbers ORDER BY ctid") == [(1,), (3,), (19,)]
    again = "SELECT convert_from(message_key, 'UTF8'), reason, state, error LIKE '%ValueError: thirteen%' "
    assert bench.rows(again + "FROM consumer.dead_letters WHERE attempts = 2 ORDER BY 1") == [
        (f"key{number}", "failed", "dead", True) for number in (13, 15, 17)
    ]


def test_a_row_that_does_not_decode_is_not_filtered_away_by_a_transform(bench):
    """Its columns are NULL: a filter on them would drop it without a word."""
    job = replace(
        bench.job,
        transform=lambda rows: rows.filter("amount_cents > 5").withColumn("ExchangeRate", rows["seq"] + 1),
    )
    put(bench, order("a", 1))
    put(bench, b'{"order_id": 17}')
    put(bench, order("b", 1, amount_cents=1))
    totals = bench.once(job)
    assert (totals.applied, totals.dead, set(bench.totals())) == (1, 1, {"a"})
    assert letters(bench, "reason") == [("undecodable",)]
    retry(bench)
    assert bench.once(job).applied == 0
    assert letters(bench, "reason, attempts, state") == [("undecodable", 2, "dead")]
    put(bench, b'{"order_id": 17}')
    with pytest.raises(BadMessage, match="order_id"):
        bench.once(replace(job, on_bad="halt"))
    with pytest.raises(JobError, match="message_time must stay timestamp, and is bigint"):
        bench.once(replace(job, transform=lambda rows: rows.withColumn("message_time", rows["message_offset"])))
    put(bench, order("c", 1))
    assert (
        bench.once(
            replace(job, transform=lambda rows: rows.selectExpr("* EXCEPT (message_key)", "NULL AS message_key"))
        ).dead
        == 1
    )


def test_too_many_bad_messages_end_the_job_instead(bench):
    put(bench, order("a", 1), partition=0)
    for _ in range(4):
        put(bench, b"{", partition=0)
    with pytest.raises(EffectFailed, match=r"more than 3 .*max_dead"):
        bench.once(replace(bench.job, max_dead=3))
    assert (bench.positions()[0], letters(bench)) == (0, [])
    assert bench.once(replace(bench.job, max_dead=4)).dead == 4


WAYS = {
    "task": ("partition", None),
    "spark": ("partition", lambda rows: rows.filter("true")),
    "batch": ("batch", None),
    "shuffle": ("batch", lambda rows: rows.repartition(3)),
}


@pytest.mark.parametrize(
    ("wrong", "ways"),
    [
        ("undecodable", ["task", "spark", "batch", "shuffle"]),
        ("no id", ["task", "batch"]),
        ("not for Postgres", ["task", "shuffle"]),
        ("rejected", ["spark"]),
        ("forgotten", ["task"]),
    ],
)
def test_very_many_bad_messages_are_counted_and_not_collected(bench, monkeypatch, wrong, ways):
    """25,000 in one partition: what its task reports, and what the driver holds, is bounded by ``max_dead``."""
    told, checked = [], []
    culprits_from, check_number = task.culprits_from, rounds.Rounds._check_number

    def measured(text):
        told.append(len(text))
        return culprits_from(text)

    def checking(self, state, more, error):
        checked.append(more)
        check_number(self, state, more, error)

    monkeypatch.setattr(task, "culprits_from", measured)
    monkeypatch.setattr(rounds.Rounds, "_check_number", checking)

    def rejecting(cursor, rows):
        raise Reject("x" * 10_000, *rows["message_id"].to_pylist())

    value = {"undecodable": b'{"order_id": "' + b"x" * 500, "not for Postgres": NUL.encode()}
    producer = bench.producer(**{"linger.ms": 20})
    for number in range(25_000):
        event_id = f"01900000-0000-7000-8000-{number:012x}" if wrong == "forgotten" else str(uuid7())
        headers = [] if wrong == "no id" else [("ce_id", event_id.encode())]
        data = value.get(wrong, json.dumps(order("a", number)).encode())
        producer.produce(bench.topic, data, "a", 0, headers=headers)
        producer.poll(0)
    assert producer.flush(60) == 0
    for way in ways:
        atomic, transform = WAYS[way]
        effect = rejecting if wrong == "rejected" else bench.job.effect
        job = replace(bench.job, group=way, max_dead=100, effect=effect, atomic=atomic, transform=transform)
        with bench.runner(job) as runner:
            runner._begin()
            bench.run("UPDATE consumer.groups SET forgotten_before = '2024-06-11'")
            with pytest.raises(EffectFailed, match=r"more than 100 .*max_dead"):
                runner.once(threading.Event())
    assert (set(bench.positions().values()), letters(bench)) == ({0}, [])
    # One more than there may be, and of each no more than a dead letter shows.
    assert checked == [101] * len(ways)
    assert all(size < 101 * 2_200 for size in told)


def test_a_table_may_be_joined_that_is_sent_to_all_tasks(bench):
    """The messages stay where they are. Where they do not, or meet those of other partitions, that is refused."""
    known = [("c0", "zero")]

    def table(rows):
        return rows.sparkSession.createDataFrame(known * 2, "customer string, name string")

    def customers(rows):
        # Anew in each round, and out of a shuffle itself.
        return table(rows).groupBy("customer").agg(functions.max("name").alias("name"))

    def joined(rows):
        names = functions.broadcast(customers(rows))
        again = names.select("customer", functions.col("name").alias("once_more"))
        return rows.join(names, "customer", "left").join(functions.broadcast(again), "customer", "left")

    bench.run("CREATE TABLE named (order_id text, name text, part int)")
    job = replace(
        bench.job,
        setup=None,
        transform=joined,
        effect="INSERT INTO named SELECT order_id, name || once_more, message_part FROM batch ORDER BY message_offset",
    )
    for seq in range(6):
        put(bench, order(f"o{seq}", 1, customer=f"c{seq % 3}"), f"o{seq}", partition=seq % 2)
    assert bench.once(job).applied == 6
    named = "SELECT order_id, name, part FROM named ORDER BY 1"
    before = [(f"o{seq}", "zerozero" if seq % 3 == 0 else None, seq % 2) for seq in range(6)]
    assert bench.rows(named) == before
    known.append(("c1", "one"))
    put(bench, b"{", partition=1)
    put(bench, order("o7", 1, customer="c1"), "o7", partition=1)
    totals = bench.once(job)
    assert (totals.applied, totals.dead) == (1, 1)
    assert bench.rows(named) == [*before, ("o7", "oneone", 1)]
    # What was a dead letter is joined like the others.
    mended = json.dumps(order("o6", 1, customer="c1"))
    bench.run(f"UPDATE consumer.dead_letters SET state = 'retry', message_value = '{mended}'")
    assert bench.once(job).applied == 1
    assert bench.rows(named) == [*before, ("o6", "oneone", 1), ("o7", "oneone", 1)]

    put(bench, order("o8", 1), partition=0)
    broadcast = functions.broadcast
    for wrong in (
        # The messages are what is sent to all tasks.
        lambda rows: table(rows).join(broadcast(rows), "customer", "left"),
        lambda rows: broadcast(rows).join(table(rows), "customer", "right"),
        # Each meets those of all partitions.
        lambda rows: rows.join(broadcast(rows.select("customer", "seq").toDF("customer", "other")), "customer"),
        lambda rows: rows.join(broadcast(rows.groupBy("customer").count()), "customer"),
        # What no task has found is added once, by one more task.
        lambda rows: rows.join(broadcast(customers(rows).toDF("c", "name")), functions.col("seq") > 0, "full"),
        # A join that is none of a table that is sent.
        lambda rows: rows.join(customers(rows).hint("merge"), "customer", "left"),
    ):
        with pytest.raises(JobError, match=r"(?s)atomic='batch'"):
            bench.once(replace(job, transform=wrong))
    assert len(bench.rows(named)) == 8


def test_a_function_rejects_what_it_can_not_take(bench):
    def effect(cursor, rows):
        seen = rows.to_pylist()
        wrong = [row["message_id"] for row in seen if row["n"] % 10 == 3]
        if wrong:
            raise Reject("no number that ends in 3", *wrong)
        cursor.executemany("INSERT INTO numbers VALUES (%s, %s)", [(row["n"], row["payload"]) for row in seen])

    bench.run("CREATE TABLE numbers (n int CHECK (n <> 15), raw bytea)")
    job = ConsumerJob(
        group="numbers",
        topics=[bench.topic],
        effect=effect,
        transform=lambda rows: rows.withColumn("n", rows["payload"].cast("string").cast("int")),
    )
    for number in range(20):
        put(bench, str(number).encode(), partition=0)
    totals = bench.once(job)
    assert (totals.applied, totals.dead) == (17, 3)
    assert letters(bench) == [(3, "rejected"), (13, "rejected"), (15, "failed")]
    assert bench.rows("SELECT count(*), bool_and(raw = n::text::bytea) FROM numbers") == [(17, True)]


def test_messages_of_forgotten_days_and_of_other_types_and_ids_that_are_no_uuids(bench):
    job = replace(bench.job, types=["order.placed"])
    put(bench, order("a", 1), event_id="order/1")
    put(bench, order("a", 1), event_id="order/1")
    put(bench, order("b", 1), event_id="")
    put(bench, b"of another schema", kind="customer.moved")
    put(bench, order("c", 1), event_id="01900000-0000-7000-8000-000000000001")
    bench.once(replace(job, max_dead=1000))
    assert letters(bench, "reason") == [("no-id",)]
    assert {name: found[1] for name, found in bench.totals().items()} == {"a": 1, "c": 1}
    assert bench.rows("SELECT day::text FROM consumer.processed_messages ORDER BY 1") == [
        ("1970-01-01",),
        ("2024-06-10",),
    ]
    bench.run("UPDATE consumer.groups SET forgotten_before = '2024-06-11'")
    put(bench, order("c", 2), event_id="01900000-0000-7000-8000-000000000002")
    put(bench, order("a", 2), event_id="order/2")
    totals = bench.once(job)
    assert (totals.applied, totals.dead) == (1, 1)
    assert letters(bench, "reason") == [("no-id",), ("too-old",)]
    # A person who tries it again has decided that it was not applied before.
    retry(bench)
    bench.once(job)
    assert bench.totals()["c"][1] == 2


def test_natural_and_version_and_fingerprint(bench):
    schema = "key string, value int, at timestamp, version bigint, doc struct<a:int>"
    bench.run(
        "CREATE TABLE states (key uuid PRIMARY KEY, value int, version bigint, doc jsonb, made_at timestamptz);"
        "CREATE TABLE latest (LIKE states INCLUDING ALL); CREATE TABLE log (value smallint, key text);"
        "CREATE TABLE plain (key text, value int, at timestamptz, version bigint, doc json)"
    )
    one, two = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"

    def state(key, value, version):
        bench.send_raw(
            json.dumps(
                {"key": key, "value": value, "version": version, "doc": {"a": value}, "at": "2026-01-02T03:04:05Z"}
            ).encode(),
            [],
            key,
            partition=0,
        )

    natural = ConsumerJob(
        group="natural",
        topics=[bench.topic],
        schema=schema,
        strategy=Natural(["key"]),
        effect=Upsert("states", ["key"], ["key", "value", "version", "doc"], deletes=True),
    )
    version = replace(
        natural,
        group="version",
        strategy=Version("public.latest", {"ref": "key"}, "version"),
        transform=lambda rows: rows.withColumnRenamed("key", "ref").withColumnRenamed("at", "made_at"),
        effect=Upsert(
            "public.latest",
            ["key"],
            {"key": "ref", "value": "value", "version": "version", "made_at": "made_at"},
            version="version",
            keep=["made_at"],
        ),
    )
    fingerprint = replace(
        natural,
        group="fingerprint",
        strategy=Fingerprint(["key", "value"], time="at"),
        effect=Insert("log", ["key", "value"]),
    )
    for key, value, number in ((one, 1, 1), (one, 3, 3), (one, 2, 2), (two, 9, 9)):
        state(key, value, number)
    assert bench.once(natural).applied == 2
    assert (bench.once(version).applied, bench.once(fingerprint).applied) == (2, 4)
    by_key = "SELECT right(key::text, 1)::int, value FROM {} ORDER BY 1"
    assert bench.rows(by_key.format("states")) == [(1, 2), (2, 9)]
    assert bench.rows(by_key.format("latest")) == [(1, 3), (2, 9)]
    assert bench.rows("SELECT doc FROM states WHERE value = 9") == [({"a": 9},)]
    state(one, 2, 2)
    bench.send_raw(None, [], two, partition=0)
    assert bench.once(natural).read == 2
    # The same content, and a version that is not newer: these two have the tombstone only, and pass over it.
    assert (bench.once(fingerprint).applied, bench.once(version).applied) == (1, 1)
    assert bench.rows(by_key.format("states")) == [(1, 2)]
    assert bench.rows(by_key.format("latest")) == [(1, 3), (2, 9)]
    assert bench.rows("SELECT count(*) FROM log") == [(4,)]
    days = "SELECT DISTINCT day::text FROM consumer.processed_messages"
    assert bench.rows(days + " ORDER BY 1") == [("1970-01-01",), ("2026-01-02",)]
    passed_over = replace(fingerprint, group="other", types=["nothing"], effect=Insert("plain"))
    assert bench.once(passed_over).read == 0
    assert bench.rows("SELECT sum(next_offset) FROM consumer.offsets WHERE grp = 'other'") == [(6,)]
    with pytest.raises(JobError, match="no table nowhere"):
        bench.once(replace(fingerprint, group="third", effect=Insert("nowhere")))
    with pytest.raises(JobError, match="log has no column"):
        bench.once(replace(fingerprint, group="third", effect=Insert("log")))


def test_a_whole_round_is_one_transaction(bench):
    """Staged by executors, applied by the driver: dedup, dead letters, retry, and a failure that moves nothing."""
    job = replace(
        bench.job, atomic="batch", setup=bench.job.setup + ";ALTER TABLE order_totals ADD CHECK (customer <> 'bad')"
    )
    known = put(bench, order("a", 1), "a", partition=0)
    put(bench, order("b", 1), "b", partition=1)
    put(bench, b"not json", "c", partition=1)
    put(bench, order("d", 1, customer="bad"), "d", partition=0)
    put(bench, NUL.encode(), "n", partition=0)
    put(bench, order("a", 1), "a", event_id=known, partition=1)
    older = bench.runner(job)
    totals = older.once(threading.Event())
    assert (totals.read, totals.applied, totals.duplicates, totals.dead) == (6, 2, 1, 3)
    assert [row[1] for row in letters(bench)] == ["failed", "failed", "undecodable"]
    assert bench.positions() == {0: 3, 1: 3}
    put(bench, order("a", 2), "a", partition=0)
    put(bench, order("b", 2), "b", partition=1)
    before = bench.positions()
    with pytest.raises(EffectFailed, match="nowhere"):
        bench.once(replace(job, setup=None, effect=job.effect + ";INSERT INTO nowhere SELECT 1"))
    assert (bench.positions(), bench.totals()["a"][1]) == (before, 1)
    bench.run("ALTER TABLE order_totals DROP CONSTRAINT order_totals_customer_check")
    retry(bench)
    totals = bench.once(replace(job, setup=None))
    assert (totals.applied, {name: found[1] for name, found in bench.totals().items()}) == (3, {"a": 2, "b": 2, "d": 1})
    staged = "SELECT relname FROM pg_class WHERE relname LIKE 'staged%' AND relkind = 'r'"
    assert bench.rows(staged) == []
    # The one that had the group before makes no staging table any more, and says why.
    put(bench, order("a", 3), "a", partition=0)
    put(bench, b"not json", partition=0)
    with pytest.raises(Fenced, match="taken over"):
        older.once(threading.Event())
    assert bench.rows(staged) == []
    # A function must not end the transaction; what it has committed is in the books all the same.
    with pytest.raises(EffectFailed, match="savepoint"):
        bench.once(replace(job, setup=None, effect=lambda cursor, _: cursor.execute("COMMIT")))
    assert [reason for _, reason in letters(bench)] == ["failed", "undecodable", "undecodable"]
    assert bench.rows("SELECT sum(applied)::int, sum(dead)::int FROM consumer.offsets") == [(6, 4)]


def test_a_round_may_aggregate_over_partitions(bench):
    """A shuffle: what is a repeat, or does not decode, is not in the sums."""
    job = ConsumerJob(
        group="sums",
        topics=[bench.topic],
        schema=bench.job.schema,
        atomic="batch",
        transform=lambda rows: (
            rows.groupBy("customer")
            .agg({"amount_cents": "sum", "order_id": "count"})
            .toDF("customer", "cents", "orders")
        ),
        setup="CREATE TABLE IF NOT EXISTS sums "
        "(customer text PRIMARY KEY, cents bigint, orders int, rounds int DEFAULT 1)",
        effect="INSERT INTO sums AS s SELECT customer, cents, orders FROM batch ORDER BY customer "
        "ON CONFLICT (customer) DO UPDATE "
        "SET cents = s.cents + excluded.cents, orders = s.orders + excluded.orders, rounds = s.rounds + 1",
    )
    ids = [put(bench, order(f"o{seq}", 1, customer=f"c{seq % 3}"), partition=seq % 2) for seq in range(12)]
    totals = bench.once(job)
    assert (totals.read, totals.applied) == (12, 12)
    assert bench.rows("SELECT * FROM sums ORDER BY 1") == [(f"c{number}", 40, 4, 1) for number in range(3)]
    for seq, known in enumerate(ids[:5]):
        put(bench, order(f"o{seq}", 1, customer=f"c{seq % 3}"), event_id=known, partition=1)
    put(bench, b"?", partition=0)
    put(bench, order("new", 1, customer="c0"), partition=0)
    totals = bench.once(job)
    assert (totals.read, totals.applied, totals.duplicates, totals.dead) == (7, 1, 5, 1)
    assert bench.rows("SELECT cents, orders, rounds FROM sums WHERE customer = 'c0'") == [(50, 5, 2)]
    assert bench.rows("SELECT sum(cents) FROM sums") == [(130,)]
    with pytest.raises(JobError, match="atomic='batch'"):
        bench.once(replace(job, atomic="partition", group="other"))
    # Columns mapped to a table, over rows that are no messages any more.
    bench.run("CREATE TABLE other_sums (customer text PRIMARY KEY, cents numeric, orders int)")
    bench.once(replace(job, group="mapped", setup=None, effect=Upsert("other_sums", ["customer"])))
    assert bench.rows("SELECT sum(cents), sum(orders) FROM other_sums") == [(130, 13)]
    put(bench, order("newer", 1))
    with pytest.raises(JobError, match="Natural and Version"):
        bench.once(replace(job, strategy=Natural(["customer"])))


def test_a_task_has_the_rows_of_one_partition_whatever_a_transform_does(bench, spark):
    """Two tasks with rows of one partition: the first moves its offset, and the other one's rows would be lost."""
    from pyspark.sql import functions as F  # noqa: N812

    def again(rdd, rows):
        return spark.createDataFrame(rdd, rows.schema)

    for seq in range(4):
        put(bench, order(f"o{seq}", 1), partition=seq % 2)
    whole = {(bench.topic, part): Range("", 0, 2) for part in (0, 1)}
    reading = ReaderSettings({"bootstrap.servers": bench.topics.bootstrap_servers}, "g")

    def read():
        return spark_rows.of_ranges(spark, bench.job, spark_rows.late(bench.job), whole, {}, reading)

    source = read()
    rows = source.rows
    twice = functions.explode(functions.array("message_key", "message_key"))
    for stays in (
        rows.filter("message_offset > 7").withColumn("twice", twice).sortWithinPartitions("order_id"),
        again(rows.rdd.map(lambda row: row), rows),
        rows.cache(),
    ):
        assert sorted(source.tasks(stays).items()) == list(enumerate(sorted(whole)))
    assert source.tasks(rows.filter("1 = 0")) == {}
    # The last are the same messages, and another reading of them.
    for moved in (rows.rdd.coalesce(1), rows.rdd.repartition(2), rows.collect(), read().rows.rdd):
        with pytest.raises(JobError, match=r"(?s)it comes from \[.*Partition.*atomic='batch'"):
            source.tasks(again(moved, rows))
    with pytest.raises(JobError, match="one Kafka partition"):
        source.tasks(rows.union(rows))
    # And a job is asked: for its rounds, for what it tries again, and by its tasks.
    collected = replace(bench.job, transform=lambda rows: again(rows.collect(), rows))
    with pytest.raises(JobError, match="one Kafka partition"):
        bench.once(collected)
    with pytest.raises(EffectFailed, match=r"message_part is not \d: the transform mixes partitions"):
        bench.once(
            replace(bench.job, transform=lambda rows: rows.withColumn("message_part", 1 - F.col("message_part")))
        )
    assert (bench.positions(), bench.totals()) == ({0: 0, 1: 0}, {})
    # A whole round in one transaction may move rows, and need not keep which messages they were.
    counted = replace(
        bench.job,
        atomic="batch",
        transform=lambda rows: spark.createDataFrame([(len(rows.collect()),)], "n int"),
        effect="INSERT INTO order_totals SELECT 'all', 'c', 's', n, 1, 1, 0 FROM batch",
    )
    assert bench.once(counted).applied == 4
    assert bench.totals()["all"][0] == 4
    waits_again(bench, bench.job.group, "NULL", 1, 2)
    with pytest.raises(JobError, match="several tasks"):
        bench.once(replace(collected, schema=None, effect="SELECT 1"))
    assert bench.rows("SELECT state FROM consumer.dead_letters") == [("retry",)] * 2


def test_text_that_postgres_refuses_after_a_shuffle_is_never_left_out(bench):
    """A row that still says which message it is costs that message; of a sum nobody can say which one it was."""
    job = replace(
        bench.job,
        atomic="batch",
        setup="CREATE TABLE IF NOT EXISTS seen (order_id text, customer text)",
        effect="INSERT INTO seen SELECT order_id, customer FROM batch",
    )
    put(bench, order("a", 1))
    put(bench, order("b", 1, customer="nul\0"))
    put(bench, order("c", 1))
    totals = bench.once(replace(job, transform=lambda rows: rows.repartition(2)))
    assert (totals.read, totals.applied, totals.dead) == (3, 2, 1)
    assert bench.rows("SELECT order_id FROM seen ORDER BY 1") == [("a",), ("c",)]
    ((why,),) = bench.rows("SELECT error FROM consumer.dead_letters")
    assert "column customer holds a NUL character" in why
    sums = replace(
        job,
        group="sums",
        transform=lambda rows: rows.groupBy("customer").agg({"order_id": "count"}).toDF("customer", "orders"),
        effect="INSERT INTO seen SELECT orders::text, customer FROM batch",
    )
    with pytest.raises(EffectFailed, match=r"column customer holds a NUL character.*of no one message"):
        bench.once(sums)
    assert bench.rows("SELECT count(*) FROM seen") == [(2,)]
    assert bench.rows("SELECT DISTINCT next_offset FROM consumer.offsets WHERE grp = 'sums'") == [(0,)]


def test_rows_that_are_still_messages_after_a_shuffle(bench, spark):
    """The latest of a key counts there too, tombstones delete, and what can't be told is refused."""
    names = spark.createDataFrame([(1, "one"), (2, "two"), (3, "three"), (3, "drei")], "id long, name string")
    number = itertools.count()

    def joined(how):
        # With another column each time, as a pivot has them.
        # And without another kind's tombstones, on purpose.
        return lambda rows: (
            rows.filter("message_key NOT LIKE 'c%'")
            .join(functions.broadcast(names), "id", how)
            .withColumn(f"n{next(number)}", functions.lit(1))
        )

    states = Upsert("states", ["id"], ["id", "state", "name"], deletes=True)
    job = ConsumerJob(
        group="states",
        topics=[bench.topic],
        schema="id long, state string",
        atomic="batch",
        transform=joined("left"),
        effect=states,
        setup="CREATE TABLE IF NOT EXISTS states (id bigint PRIMARY KEY, state text, name text)",
    )
    for state in range(5):
        for key in (1, 2):
            put(bench, {"id": key, "state": f"s{state}"}, str(key), partition=key - 1)
    put(bench, None, "2", partition=1)
    put(bench, None, "c-1", partition=0)
    runner = bench.runner(job)
    runner.once(threading.Event())
    assert bench.rows("SELECT * FROM states") == [(1, "s4", "one")]
    put(bench, {"id": 2, "state": "another"}, "2", partition=1)
    # Compaction takes it away behind the first of the reads; with its id remembered, it would have no effect. Here it
    # comes back with the next attempt, which shows that there is one.
    policy = ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)
    topic = ConfigResource(ConfigResource.Type.TOPIC, bench.topic, incremental_configs=[policy])
    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    admin.incremental_alter_configs([topic])[topic].result(30)
    source, reads = runner._rounds._source, itertools.count()
    runner._rounds._source = lambda span, without: source(
        span, {**without, (bench.topic, 1): [6]} if 0 < next(reads) < 3 else without
    )
    runner.once(threading.Event())
    assert [text for text, figures in bench.reports if "compacted" in str(figures)] == ["waiting for a server"]
    assert bench.rows("SELECT state FROM states ORDER BY id") == [("s4",), ("another",)]
    with pytest.raises(EffectFailed, match=r"left out the tombstone .*'s?, 1, 5.*join from the left"):
        bench.once(replace(job, group="inner", transform=joined("inner")))

    def lost(rows):
        return joined("left")(rows).drop("message_part")

    with pytest.raises(JobError, match="deletes needs to know"):
        bench.once(replace(job, group="lost", transform=lost))
    updates = replace(states, deletes=False)
    with pytest.raises(EffectFailed, match="CardinalityViolation"):
        bench.once(replace(job, group="lost", transform=lost, effect=updates))
    # Two rows of one message with one key: none of them is the latest.
    put(bench, {"id": 3, "state": "a"}, "3", partition=0)
    with pytest.raises(EffectFailed, match="CardinalityViolation"):
        bench.once(replace(job, effect=updates))
    assert bench.rows("SELECT id, state FROM states ORDER BY id") == [(1, "s4"), (2, "another")]
    moved = "SELECT grp, sum(next_offset) FROM consumer.offsets WHERE grp IN ('inner', 'lost', 'states') GROUP BY 1"
    assert dict(bench.rows(moved)) == {"inner": 0, "lost": 0, "states": 13}


def test_a_dead_letter_that_a_shuffle_leaves_out_leaves_a_note(bench):
    job = ConsumerJob("left", [bench.topic], "SELECT 1", strategy=Fingerprint(), atomic="batch")
    for transform, first, last, noted in (
        (lambda rows: rows.repartition(2).filter("message_offset <> 1"), 1, 2, [1]),
        # Of a sum nobody can say what it is made of; without any it is made of nothing.
        (lambda rows: rows.groupBy("message_type").count().filter("count > 2"), 3, 4, [1, 3, 4]),
        (lambda rows: rows.groupBy("message_type").count(), 5, 6, [1, 3, 4]),
    ):
        waits_again(bench, "left", "convert_to('k' || n, 'UTF8')", first, last, state="retry")
        assert bench.once(replace(job, transform=transform)).applied == 2
        assert letters(bench) == []
        assert bench.rows("SELECT (details ->> 'offset')::int FROM consumer.audit ORDER BY 1") == [(n,) for n in noted]


@pytest.mark.parametrize("atomic", ["partition", "batch"])
def test_the_generation_fences_both_ways_of_applying(bench, atomic):
    job = replace(bench.job, atomic=atomic)
    put(bench, order("a", 1))
    runner = bench.runner(job)
    prepared = runner._rounds._sinks.prepared

    def taken_over(*arguments):
        made = prepared(*arguments)
        bench.run("UPDATE consumer.groups SET generation = 99; UPDATE consumer.offsets SET generation = 99")
        return made

    runner._rounds._sinks.prepared = taken_over
    with pytest.raises(Fenced, match="taken over"):
        runner.once(threading.Event())
    assert bench.rows("SELECT count(*) FROM order_totals") == [(0,)]
