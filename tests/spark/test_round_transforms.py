"""Rounds with a transform: joins, aggregates and shuffles over all partitions."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import replace

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from pyspark.sql import functions
from round_support import NUL, letters, order, put, retry

from outbox.consumer.errors import EffectFailed, Fenced, JobError
from outbox.consumer.model import Range
from spark_jobs.dedup.strategies import Fingerprint, Natural
from spark_jobs.effects.mapped import Upsert
from spark_jobs.job import ConsumerJob
from spark_jobs.spark import rows as spark_rows
from spark_jobs.task.reader import ReaderSettings

pytestmark = pytest.mark.spark


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


def waits_again(bench, group, key, first, last, state="retry"):
    """Dead letters by hand, of these offsets: ``key`` is SQL that may use ``n``."""
    bench.run(
        "INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_id, message_key,"
        f" message_headers, message_time, reason, error, state) SELECT '{group}', '{bench.topic}', 't', 0, n,"
        f" gen_random_uuid(), {key}, '[]', now(), 'failed', 'x', '{state}' FROM generate_series({first}, {last}) AS n"
    )


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
        return spark_rows.of_ranges(spark, bench.job, spark_rows.task_decoder(bench.job), whole, {}, reading)

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
    assert "column customer: CharacterNotInRepertoire" in why
    sums = replace(
        job,
        group="sums",
        transform=lambda rows: rows.groupBy("customer").agg({"order_id": "count"}).toDF("customer", "orders"),
        effect="INSERT INTO seen SELECT orders::text, customer FROM batch",
    )
    with pytest.raises(EffectFailed, match=r"column customer: CharacterNotInRepertoire.*of no one message"):
        bench.once(sums)
    assert bench.rows("SELECT count(*) FROM seen") == [(2,)]
    assert bench.rows("SELECT DISTINCT next_offset FROM consumer.offsets WHERE grp = 'sums'") == [(0,)]


def test_rows_that_are_still_messages_after_a_shuffle(bench, spark):
    """The latest of a key counts there too, and what can't be recognized is refused."""
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

    states = Upsert("states", ["id"], ["id", "state", "name"])
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
    assert bench.rows("SELECT * FROM states ORDER BY id") == [(1, "s4", "one"), (2, "s4", "two")]
    put(bench, {"id": 2, "state": "another"}, "2", partition=1)
    # Compaction takes it away behind the first of the reads; with its id remembered, it would have no effect. Here it
    # comes back with the next attempt, which shows that there is one.
    policy = ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)
    topic = ConfigResource(ConfigResource.Type.TOPIC, bench.topic, incremental_configs=[policy])
    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    admin.incremental_alter_configs([topic])[topic].result(30)
    source, reads = runner._context.source, itertools.count()
    runner._context.source = lambda span, without: source(
        span, {**without, (bench.topic, 1): [6]} if 0 < next(reads) < 3 else without
    )
    runner.once(threading.Event())
    assert [text for text, figures in bench.reports if "compacted" in str(figures)] == ["waiting for a server"]
    assert bench.rows("SELECT state FROM states ORDER BY id") == [("s4",), ("another",)]
    with pytest.raises(JobError, match="deletes does not go with a transform that shuffles"):
        bench.once(replace(job, group="deletes", effect=replace(states, deletes=True)))

    def lost(rows):
        return joined("left")(rows).drop("message_part")

    with pytest.raises(EffectFailed, match="CardinalityViolation"):
        bench.once(replace(job, group="lost", transform=lost))
    # Two rows of one message with one key: none of them is the latest.
    put(bench, {"id": 3, "state": "a"}, "3", partition=0)
    with pytest.raises(EffectFailed, match="CardinalityViolation"):
        bench.once(job)
    assert bench.rows("SELECT id, state FROM states ORDER BY id") == [(1, "s4"), (2, "another")]
    moved = "SELECT grp, sum(next_offset) FROM consumer.offsets WHERE grp IN ('deletes', 'lost', 'states') GROUP BY 1"
    assert dict(bench.rows(moved)) == {"deletes": 0, "lost": 0, "states": 13}


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
