"""Rounds over another database: Kafka's messages through real Spark tasks into SQLite, by spark_jobs.sink alone."""

from __future__ import annotations

import contextlib

import pytest

from examples.jobs.sqlite_sink import TABLES, SqliteSinks, SqliteStore, open_file
from outbox.consumer.errors import JobError
from outbox.consumer.model import Range
from spark_jobs.dedup.strategies import Dedup, Fingerprint, OffsetsOnly
from spark_jobs.driver.partition_attempts import PartitionAttempts
from spark_jobs.driver.round_context import OffsetRanges, RoundContext
from spark_jobs.driver.rounds import Rounds
from spark_jobs.job import ConsumerJob
from spark_jobs.task.reader import ReaderSettings

# More than Spark hands over at once. This sink looks for the bad one row by row.
MESSAGES = 1_100
BAD = 1_050


def test_rounds_and_dead_letters_need_nothing_of_postgres(bench, small_batches, tmp_path):
    path = str(tmp_path / "sink")
    with contextlib.closing(open_file(path)) as connection:
        connection.executescript(TABLES + f"CREATE TABLE numbers (n INT CHECK (n <> {BAD}), place INT, part INT)")
        connection.execute("INSERT INTO groups VALUES ('g', 1)")
        connection.executemany(
            "INSERT INTO offsets (grp, topic, part, topic_id, next_offset, generation) VALUES ('g', ?, ?, 'id', 0, 1)",
            [(bench.topic, part) for part in (0, 1)],
        )
    bench.produce((b"no JSON" if number == 7 else {"n": number}, "k", 0) for number in range(MESSAGES))
    bench.produce([({"n": -1}, "k", 1)])

    job = ConsumerJob(
        "g",
        [bench.topic],
        "INSERT INTO numbers SELECT n, message_offset, message_part FROM batch ORDER BY message_offset",
        schema="n int",
        transform=lambda rows: rows.filter("n >= 0"),
    )
    kafka = {"bootstrap.servers": bench.topics.bootstrap_servers}
    reading = ReaderSettings(kafka, "g")
    store = SqliteStore(path, "g")
    context = RoundContext(bench.spark, job, store, SqliteSinks(path, job), reading, few=0)
    rounds = Rounds(context, PartitionAttempts(context))
    ranges = {(bench.topic, 0): Range("id", 0, MESSAGES), (bench.topic, 1): Range("id", 0, 1)}
    counts = rounds.apply(OffsetRanges(ranges, {}), 1)

    assert (counts.applied, counts.dead, counts.duplicates) == (MESSAGES - 2, 2, 0)
    assert store.run("SELECT next_offset FROM offsets ORDER BY part") == [(MESSAGES,), (1,)]
    expected = [n for n in range(MESSAGES) if n not in {7, BAD}]
    assert [n for (n,) in store.run("SELECT n FROM numbers WHERE part = 0 ORDER BY place")] == expected
    assert store.run("SELECT message_offset, reason FROM dead_letters ORDER BY 1") == [
        (7, "undecodable"),
        (BAD, "failed"),
    ]
    # The sink takes it now.
    store.run("CREATE TABLE others (n INT, place INT, part INT)")
    store.run("INSERT INTO others SELECT * FROM numbers")
    store.run("DROP TABLE numbers")
    store.run("ALTER TABLE others RENAME TO numbers")
    store.run("UPDATE dead_letters SET state = 'retry'")
    assert rounds.retry(1) is False
    assert rounds.counts.applied == 1
    assert store.run("SELECT message_offset, state FROM dead_letters") == [(7, "dead")]
    assert store.run("SELECT count(*) FROM numbers WHERE n = ?", BAD) == [(1,)]
    # The same again: it was applied.
    assert rounds.apply(OffsetRanges(ranges, {}), 1).applied == 0


@pytest.mark.parametrize("strategy", [OffsetsOnly(), Fingerprint(), Dedup(key="idempotency-key")])
def test_a_strategy_that_a_sink_does_not_implement_is_refused(strategy):
    job = ConsumerJob("g", ["t"], "SELECT 1", schema="n int", strategy=strategy)
    with pytest.raises(JobError, match=r"SqliteSinks implements Dedup\(\), not "):
        SqliteSinks("sink", job)
