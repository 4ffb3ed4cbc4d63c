"""A group is set back and reads 12,000 messages again: what was applied is dropped, and of forgotten days refused."""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import Iterator

import pytest
from bench import ided, produce
from uuid_utils.compat import uuid7

from outbox.testing.fixtures import Topics
from spark_jobs.job import ConsumerJob

pytestmark = pytest.mark.spark

MESSAGES = 12_000
OLD = 300
"""The first ones have ids of another day."""
KEEP_DAYS = 5
AGO = KEEP_DAYS + 5


@pytest.fixture(scope="module")
def topic(outbox_kafka_cluster) -> Iterator[str]:
    """One partition. The times of its messages are those of their numbers, in milliseconds from the epoch of 2026."""
    with Topics(outbox_kafka_cluster.bootstrap_servers) as made:
        name = made.create_topic(made.name("again"), 1, {"retention.ms": "-1"})
        ids = (ided(old_id() if n < OLD else None) for n in range(MESSAGES))
        sent = (({"n": n}, str(n % 100), None, headers, at(n)) for n, headers in enumerate(ids))
        produce(made.bootstrap_servers, name, sent)
        yield name


def at(n: int) -> int:
    return int(dt.datetime(2026, 1, 1, tzinfo=dt.UTC).timestamp() * 1000) + n


def old_id() -> uuid.UUID:
    """Return a UUIDv7 of some days ago."""
    milliseconds = int((time.time() - AGO * 86400) * 1000)
    return uuid.UUID(int=milliseconds << 80 | uuid7().int & (1 << 80) - 1)


def test_a_group_that_is_set_back_has_no_effect_twice(bench, topic):
    job = ConsumerJob(
        "again",
        [topic],
        "INSERT INTO seen SELECT n, message_offset FROM batch ORDER BY message_offset",
        schema="n int",
        # Without a constraint: whatever is applied twice shows.
        setup="CREATE TABLE IF NOT EXISTS seen (n int, at bigint)",
    )
    everything = [(MESSAGES, MESSAGES, 0, MESSAGES - 1)]
    seen = "SELECT count(*), count(DISTINCT n), min(n), max(n) FROM seen"
    counted = "SELECT next_offset, applied, duplicates, dead FROM consumer.offsets"
    assert bench.once(job, keep_days=KEEP_DAYS).applied == MESSAGES
    assert bench.rows(seen) == everything

    to = dt.datetime.fromtimestamp(at(MESSAGES - 5_000) / 1000, dt.UTC).isoformat()
    reset = ["offsets", "reset", "again", "--topic", topic, "--reason", "test", "--to"]
    assert "5,000 come again" in bench.command(*reset, to)
    totals = bench.once(job, keep_days=KEEP_DAYS)
    assert (totals.read, totals.applied, totals.duplicates, totals.dead) == (5_000, 0, 5_000, 0)
    assert "12,000 come again" in bench.command(*reset, "earliest")
    # In several rounds, so that some begin where the suspicion of the one before is known.
    totals = bench.once(job, keep_days=KEEP_DAYS, max_records=5_500)
    assert (totals.read, totals.applied, totals.duplicates, totals.dead) == (MESSAGES, 0, MESSAGES, 0)
    assert bench.rows(seen) == everything
    assert bench.rows(counted) == [(MESSAGES, MESSAGES, 5_000 + MESSAGES, 0)]

    # Time goes by, and the day of the old ids is forgotten when a driver starts.
    bench.run(
        f"UPDATE consumer.processed_messages SET seen_at = seen_at - interval '{AGO} days' "
        f"WHERE day < now() - interval '{KEEP_DAYS} days'"
    )
    assert bench.once(job, keep_days=KEEP_DAYS).read == 0
    [(before,)] = bench.rows("SELECT forgotten_before FROM consumer.groups")
    assert bench.rows("SELECT count(*) FROM consumer.processed_messages") == [(MESSAGES - OLD,)]
    for said in (bench.command(*reset, "earliest", "--dry-run"), bench.command(*reset, "earliest")):
        assert "12,000 come again" in said
        assert (
            f"messages of days before {before} whose ids are not known any more become dead letters (too-old)" in said
        )
    totals = bench.once(job, keep_days=KEEP_DAYS)
    assert (totals.read, totals.applied, totals.duplicates, totals.dead) == (MESSAGES, 0, MESSAGES - OLD, OLD)
    assert bench.rows(seen) == everything
    assert bench.rows("SELECT reason, count(*), max(message_offset) FROM consumer.dead_letters GROUP BY 1") == [
        ("too-old", OLD, OLD - 1)
    ]
