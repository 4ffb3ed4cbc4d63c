"""Without any id remembered: what a crash interrupts is applied once, and what the source repeats is applied again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from bench import Bench, Consumer, ided, produce
from faults import by_map, fault_at, reading
from support import wait_until

from outbox._app import migrate as db
from outbox.external import External
from outbox.testing.fixtures import Topics
from spark_jobs.dedup.strategies import Dedup, OffsetsOnly
from spark_jobs.effects.mapped import Insert
from spark_jobs.effects.produce import Produce
from spark_jobs.errors import Reject
from spark_jobs.job import ConsumerJob

pytestmark = pytest.mark.spark

MESSAGES = 10_000
FAULT = 6_345
"""In the midst of a round, of which others come before and after."""
ROUND = 2_500
"""More than a driver applies itself."""
PATIENCE = 120.0

# Without a constraint: whatever is applied twice shows.
SETUP = "CREATE TABLE IF NOT EXISTS seen (n int, at bigint)"
SEEN = Insert("seen", {"n": "n", "at": "message_offset"})
SQL = "INSERT INTO seen SELECT n, message_offset FROM batch ORDER BY message_offset"


@pytest.fixture(scope="module")
def topic(outbox_kafka_cluster) -> Iterator[str]:
    """One partition, and no message has an id."""
    with Topics(outbox_kafka_cluster.bootstrap_servers) as made:
        name = made.create_topic(made.name("plain"), 1)
        produce(made.bootstrap_servers, name, (({"n": n}, str(n % 100), None, []) for n in range(MESSAGES)))
        yield name


def function() -> Any:
    def effect(cursor: psycopg.Cursor[Any], rows: Any) -> None:
        with cursor.copy("COPY seen FROM STDIN") as copy:
            for row in zip(rows["n"].to_pylist(), rows["message_offset"].to_pylist(), strict=True):
                copy.write_row(row)

    return effect


WAYS: dict[str, dict[str, Any]] = {
    "straight": {"effect": SEEN},
    "transform": {"effect": function()},
    "batch": {"effect": SEEN, "atomic": "batch"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_worker_has_nothing_applied_twice(bench: Bench, topic, tmp_path: Path, way):
    killed = tmp_path / "killed"
    passed = fault_at(FAULT, once=killed, kills=True)
    by_spark = way in {"transform", "batch"}
    job = ConsumerJob(
        "killed",
        [topic],
        schema="n int" if by_spark else reading(passed),
        transform=by_map(passed) if by_spark else None,
        strategy=OffsetsOnly(),
        setup=SETUP,
        **WAYS[way],
    )
    totals = bench.once(job, max_records=ROUND, driver_records=0)
    assert killed.exists()
    assert (totals.read, totals.applied, totals.duplicates, totals.dead) == (MESSAGES, MESSAGES, 0, 0)
    once_each(bench)
    assert any(text.startswith("no ids are remembered") for text, _ in bench.reports)


def once_each(bench: Bench) -> None:
    assert bench.rows("SELECT n, at FROM seen ORDER BY n, at") == [(n, n) for n in range(MESSAGES)]
    counted = "SELECT next_offset, applied, duplicates, dead FROM consumer.offsets"
    assert bench.rows(counted) == [(MESSAGES, MESSAGES, 0, 0)]
    assert bench.rows("SELECT count(*) FROM consumer.processed_messages") == [(0,)]


def test_a_jvm_that_dies_under_the_tasks_of_a_round(bench: Bench, topic, tmp_path: Path):
    """A task outlives it, and the driver with it, in the transaction whose effect is done and whose COMMIT waits.

    Drivers that are killed: test_chain.py, where
    nothing comes twice either, nor is a repeat known by its id.
    """
    bench.topic = topic
    (tmp_path / "jobs.py").write_text(
        f"""
from spark_jobs import ConsumerJob, OffsetsOnly

job = ConsumerJob(
    "killed",
    [{topic!r}],
    {SQL!r} + "; SELECT pg_advisory_xact_lock(42) FROM batch WHERE n = {FAULT}",
    schema="n int",
    setup={SETUP!r},
    strategy=OffsetsOnly(),
)
"""
    )
    before = FAULT // ROUND * ROUND
    # One core: a worker less to start, and one task is enough.
    consumer = Consumer(bench, tmp_path, "--continuous", "--master", "local[1,4]", job="jobs:job")
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' "
    waits += "AND application_name = 'outbox consumer killed'"
    with psycopg.connect(bench.database.url, autocommit=True) as holding:
        holding.execute("SELECT pg_advisory_lock(42)")
        consumer.start("--max-records", str(ROUND))
        try:
            consumer.until(lambda: bench.rows(waits) == [(1,)], "the transaction", PATIENCE)
            consumer.jvm().kill()
            consumer.ended(1, "outbox: Spark's JVM has ended; nothing is lost, run the job again")
        finally:
            consumer.kill()
        # Of the range in question nothing is there yet, and of those before it all.
        assert bench.rows("SELECT count(*) FROM seen") == [(before,)]
    wait_until(bench.has_no_session, PATIENCE, "its sessions to be gone")
    assert (bench.positions(), bench.rows("SELECT count(*) FROM seen")) == ({0: before}, [(before,)])
    # Another driver goes on where it was.
    job = ConsumerJob("killed", [topic], SQL, schema="n int", setup=SETUP, strategy=OffsetsOnly())
    bench.once(job, max_records=ROUND, patience=PATIENCE)
    once_each(bench)


REPEATED = 3_000


def test_what_a_source_repeats_is_applied_twice(bench: Bench):
    """Which is why it is for sources that do not; beside Dedup, which drops the same repeats."""
    topic = bench.topics.create_topic(bench.topics.name("repeats"), 1)
    ids = [ided() for _ in range(REPEATED)]
    bench.produce((({"n": n}, "k", None, headers) for n, headers in [*enumerate(ids), *enumerate(ids)]), topic)
    for group, strategy, times in (("offsets", OffsetsOnly(), 2), ("ids", Dedup(), 1)):
        job = ConsumerJob(
            group,
            [topic],
            f"INSERT INTO {group}_seen SELECT n FROM batch",
            schema="n int",
            setup=f"CREATE TABLE IF NOT EXISTS {group}_seen (n int)",
            strategy=strategy,
        )
        totals = bench.once(job)
        assert (totals.applied, totals.duplicates) == (times * REPEATED, (2 - times) * REPEATED)
        assert bench.rows(f"SELECT n, count(*) FROM {group}_seen GROUP BY n ORDER BY n") == [
            (n, times) for n in range(REPEATED)
        ]
        # So with a group that is set back; and the command says which of the two it will be.
        said = " ".join(
            bench.command("offsets", "reset", group, "--topic", topic, "--to", "earliest", "--reason", "test").split()
        )
        assert "a job with OffsetsOnly remembers none, and applies it again" in said
        assert bench.once(job).applied == (2 * REPEATED if times == 2 else 0)


LETTERS = 2_000
UNREADABLE, REJECTED, REFUSED = 150, 777, 1_201
KEYS = 50


@pytest.mark.parametrize(("atomic", "keep_order"), [("partition", True), ("batch", False)])
def test_dead_letters_without_an_id_are_applied_once_when_they_are_tried_again(bench: Bench, atomic, keep_order):
    topic = bench.topics.create_topic(bench.topics.name("letters"), 1)
    values = (b"{" if n == UNREADABLE else {"n": n} for n in range(LETTERS))
    bench.produce(((value, str(n % KEYS), None, []) for n, value in enumerate(values)), topic)

    def effect(cursor: psycopg.Cursor[Any], rows: Any) -> None:
        found = dict(zip(rows["n"].to_pylist(), rows["message_id"].to_pylist(), strict=True))
        assert None not in found.values()
        (mended,) = cursor.execute("SELECT mended FROM state").fetchone() or (None,)
        if REJECTED in found and not mended:
            raise Reject("not this one", found[REJECTED])
        cursor.executemany("INSERT INTO seen (n) VALUES (%s)", [(n,) for n in found])

    bench.run(f"CREATE TABLE seen (n int CONSTRAINT sane CHECK (n <> {REFUSED})); CREATE TABLE state (mended bool)")
    bench.run("INSERT INTO state VALUES (false)")
    job = ConsumerJob(
        "letters", [topic], effect, schema="n int", strategy=OffsetsOnly(), atomic=atomic, keep_order=keep_order
    )
    at_fault = {UNREADABLE: "undecodable", REJECTED: "rejected", REFUSED: "failed"}
    held = {n for bad in at_fault for n in range(bad, LETTERS, KEYS)} if keep_order else set(at_fault)
    totals = bench.once(job)
    assert (totals.applied, totals.dead) == (LETTERS - len(held), len(held))
    reasons = "SELECT message_offset, reason FROM consumer.dead_letters WHERE reason <> 'behind' ORDER BY 1"
    assert bench.rows(reasons) == sorted(at_fault.items())
    assert bench.rows("SELECT count(*) FROM consumer.dead_letters WHERE message_id IS NOT NULL") == [(0,)]

    bench.run("ALTER TABLE seen DROP CONSTRAINT sane; UPDATE state SET mended = true")
    bench.command(
        "dead-letters", "discard", "--side", "consumer", "--reason", "never right", str(letter(bench, UNREADABLE))
    )
    bench.command("dead-letters", "retry", "--side", "consumer", "--all", "--group", "letters")
    assert bench.once(job).applied == len(held) - 1
    # Nor does a round that comes after it.
    assert bench.once(job).applied == 0
    assert bench.rows("SELECT n FROM seen ORDER BY n") == [(n,) for n in range(LETTERS) if n != UNREADABLE]
    assert bench.rows("SELECT count(*) FROM consumer.dead_letters") == [(0,)]


def letter(bench: Bench, offset: int) -> int:
    [(number,)] = bench.rows(f"SELECT id FROM consumer.dead_letters WHERE message_offset = {offset}")
    return int(number)


FEW = 200


def test_what_is_known_by_an_id_has_one_of_the_place(bench: Bench):
    """Events that follow get the same ids when the group is set back, and calls to a provider are reserved once."""
    db.upgrade(bench.database.url)
    topic = bench.topics.create_topic(bench.topics.name("produced"), 1)
    bench.produce((({"n": n}, str(n), None, []) for n in range(FEW)), topic)
    produce = Produce("g", "Number", "n", "Seen", "jsonb_build_object('n', n)")
    external = External("calls", "g", "jsonb_build_object('n', n)", lambda _call: None)
    job = ConsumerJob("g", [topic], f"{produce.insert()}; {external.reserve()}", schema="n int", strategy=OffsetsOnly())
    assert bench.once(job).applied == FEW
    events = "SELECT count(*), count(DISTINCT event_id), count(DISTINCT aggregate_id) FROM outbox.events"
    assert bench.rows(events) == [(FEW, FEW, FEW)]
    bench.command("offsets", "reset", "g", "--topic", topic, "--to", "earliest", "--reason", "test")
    assert bench.once(job).applied == FEW
    assert bench.rows(events) == [(2 * FEW, FEW, FEW)]
    assert bench.rows("SELECT count(*) FROM consumer.reservations") == [(FEW,)]
