"""Small rounds run in the driver, large ones and functions in executors; what comes of them is the same."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from bench import Bench, ided
from counting import Counting
from support import wait_until

from outbox.consumer.errors import ConsumerError, EffectFailed
from spark_jobs.driver.round_context import RoundContext
from spark_jobs.effects.mapped import Insert
from spark_jobs.errors import BadMessage, InputCut
from spark_jobs.job import ConsumerJob
from spark_jobs.payloads.decoding import Json
from spark_jobs.task import reader

pytestmark = pytest.mark.spark

SETUP = "CREATE TABLE IF NOT EXISTS seen (n int CHECK (n <> 13), at bigint, part int, pid int)"
SQL = "INSERT INTO seen SELECT n, message_offset, message_part FROM batch ORDER BY message_part, message_offset"


@pytest.fixture
def jobs_of_spark(monkeypatch) -> list[int]:
    """How many Spark jobs rounds have started to read ranges."""
    started: list[int] = []
    real = RoundContext.by_ranges

    def counted(self: Any, *arguments: Any) -> Any:
        started.append(1)
        return real(self, *arguments)

    monkeypatch.setattr(RoundContext, "by_ranges", counted)
    return started


def send_everything(bench: Bench) -> None:
    """Send what can be the matter with messages: in both partitions, with the same numbers each time."""
    values: list[tuple[int | bytes | None, str, int | None]] = [
        (1, "a", 1),
        (2, "b", 2),
        (1, "a", 1),
        (b"no JSON", "c", 3),
        (3, "c", 4),
        (None, "a", 5),
        (13, "d", 6),
        (4, "d", 7),
        (5, "e", None),
        (b'{"n":"text"}', "f", 8),
        (2**40, "g", 9),
        (6, "g", 10),
    ]
    for part in range(2):
        # A repeat is in the partition of what it repeats.
        ids = [ided() for _ in range(11)]
        bench.produce(
            (numbered(value), f"{key}{part}", part, [] if number is None else ids[number])
            for value, key, number in values
        )


def numbered(value: int | bytes | None) -> Any:
    return {"n": value} if isinstance(value, int) else value


def outcome(bench: Bench, job: ConsumerJob, **options: Any) -> dict[str, Any]:
    """Run the job over all messages in a group of its own, and return everything that it left in the sink."""
    bench.run("DROP TABLE IF EXISTS seen; TRUNCATE consumer.processed_messages, consumer.dead_letters")
    totals = bench.once(job, **options)
    return {
        "totals": (totals.read, totals.applied, totals.duplicates, totals.dead),
        "seen": bench.rows("SELECT part, at, n FROM seen ORDER BY part, at, n"),
        "offsets": bench.rows(
            "SELECT part, next_offset, applied, duplicates, dead FROM consumer.offsets "
            f"WHERE grp = '{job.group}' ORDER BY part"
        ),
        "dead": bench.rows(
            "SELECT part, message_offset, reason, error, message_id, message_key, message_value, message_headers, "
            "message_time FROM consumer.dead_letters ORDER BY part, message_offset"
        ),
    }


@pytest.mark.parametrize(
    ("effect", "keep_order"),
    [(SQL, True), (Insert("seen", {"n": "n", "at": "message_offset", "part": "message_part"}), False)],
)
def test_the_driver_does_what_executors_do(bench, jobs_of_spark, effect, keep_order):
    send_everything(bench)
    job = ConsumerJob("one", (bench.topic,), effect, schema="n int", setup=SETUP, keep_order=keep_order)
    here = outcome(bench, job)
    in_driver = len(jobs_of_spark)
    there = outcome(bench, replace(job, group="two"), driver_records=0)
    by_spark = outcome(bench, replace(job, group="three", transform=lambda rows: rows))
    assert len(jobs_of_spark) > in_driver
    assert in_driver == 0
    assert here == there == by_spark
    assert {row[2] for row in here["dead"]} == {"undecodable", "failed", "no-id"} | (
        {"behind"} if keep_order else set()
    )
    # Of 12: the repeat, and five that are dead by themselves; with keep_order also what is behind three of these.
    dead = 8 if keep_order else 5
    assert [row[1:] for row in here["offsets"]] == [(12, 11 - dead, 1, dead)] * 2


@pytest.mark.parametrize("where", ["driver", "executors"])
def test_what_is_behind_a_dead_letter_is_put_aside_as_it_is_read(bench, jobs_of_spark, monkeypatch, where):
    """A key that has a dead letter costs no second look at the range, in any later round."""
    reads: list[set[Any]] = []
    real = reader.RangeReader._read

    def counted(self: Any, spans: Any) -> Any:
        reads.append(set(spans))
        return real(self, spans)

    monkeypatch.setattr(reader.RangeReader, "_read", counted)
    options = {"driver_records": 2_000 if where == "driver" else 0}
    job = ConsumerJob("behind", (bench.topic,), SQL, schema="n int", setup=SETUP, keep_order=True, max_dead=7)

    def send(*messages: tuple[int, str, int | bytes | None]) -> None:
        bench.produce((numbered(value), key, part, [*ided(), ("h", b"\xff")]) for part, key, value in messages)

    def once(**changes: Any) -> tuple[int, int, int]:
        reads.clear()
        jobs_of_spark.clear()
        totals = bench.once(replace(job, **changes), **options)
        return totals.read, totals.applied, totals.dead

    dead = "SELECT part, message_offset, reason FROM consumer.dead_letters ORDER BY 1, 2"
    send((0, "a", 13), (0, "b", 1), (1, "c", 2))
    assert once() == (3, 2, 1)
    # What is applied is not read again, to find what is behind the other partition's dead letter.
    assert [(bench.topic, 1) in one for one in reads].count(True) == (1 if where == "driver" else 0)
    both = {(bench.topic, 0), (bench.topic, 1)}
    for at in (0, 3):
        # A tombstone, one that does not decode, and one of a key that has moved to another partition.
        send((0, "b", 3), (0, "a", None), (1, "a", b"{"), (0, "a", 4), (1, "c", 5))
        assert once() == (5, 2, 3)
        assert (reads, jobs_of_spark) == (([both], []) if where == "driver" else ([], [1]))
        (last,) = bench.rows(
            "SELECT message_id IS NOT NULL, message_key, message_value, message_headers, error "
            "FROM consumer.dead_letters WHERE part = 1 ORDER BY message_offset DESC LIMIT 1"
        )
        assert (last[:3], last[3][1]) == ((True, b"a", b"{"), {"key": "h", "value": "/w=="})
        assert last[4] == "an earlier message of its key is a dead letter"
        assert len(bench.rows(dead)) == 4 + at
    assert {reason for _, _, reason in bench.rows(dead)[1:]} == {"behind"}
    counted_by_partition = "SELECT part, applied, duplicates, dead FROM consumer.offsets ORDER BY part"
    assert bench.rows(counted_by_partition) == [(0, 3, 0, 5), (1, 3, 0, 2)]

    # More than a range's share of what may be put aside, and not more than that over all: as many as it was before.
    send(*[(0, "a", 6)] * 6, (1, "a", 7), (1, "c", 8))
    assert once() == (8, 1, 7)
    send(*[(0, "a", 6)] * 7, (1, "a", 7), (1, "c", 9))
    with pytest.raises(EffectFailed, match=r"more than 0 .*max_dead"):
        once(max_dead=0)
    assert bench.positions()[0] == 14
    assert once() == (9, 1, 8)
    # With a new dead letter beside them, and what is behind that one; other types stay out of it.
    send((0, "a", 1), (0, "d", 13), (0, "d", 10), (0, "e", 11), (1, "d", 12))
    assert once()[1:] == (2, 3)
    assert [reason for part, at, reason in bench.rows(dead) if part == 0 and at > 20] == ["behind", "failed", "behind"]
    send((0, "a", 1))
    assert once(types=["other"]) == (0, 0, 0)
    # Discarded, it stands in nobody's way.
    bench.run("DELETE FROM consumer.dead_letters")
    send((0, "a", 14))
    assert once() == (1, 1, 0)


@pytest.mark.parametrize(("where", "atomic"), [("driver", "partition"), ("transform", "batch")])
def test_a_hot_key_behind_a_dead_letter_ends_no_job(bench, where, atomic):
    """More of them than max_dead are stored in pieces, in the round of the dead letter and in later ones."""
    transform = (lambda rows: rows.filter("n >= 0")) if where == "transform" else None
    job = ConsumerJob(
        "hot",
        (bench.topic,),
        SQL,
        schema="n int",
        setup=SETUP,
        keep_order=True,
        max_dead=7,
        transform=transform,
        atomic=atomic,
    )

    def send(*keys: tuple[str, int]) -> None:
        bench.produce((numbered(value), key, part, ided()) for key, value in keys for part in (0, 1))

    def once() -> tuple[int, int, int]:
        totals = bench.once(job)
        return totals.read, totals.applied, totals.dead

    send(("free", 1), ("hot", 13), *[("hot", 2), ("free", 3)] * 15)
    assert once() == (64, 32, 32)
    send(*[("hot", 4)] * 15, ("free", 5))
    assert once() == (32, 2, 30)
    found = bench.rows("SELECT reason, count(*), count(DISTINCT message_offset) FROM consumer.dead_letters GROUP BY 1")
    assert [(reason, number) for reason, number, _ in sorted(found)] in (
        [("behind", 60), ("failed", 2)],
        [("behind", 61), ("failed", 1)],
    )
    assert bench.rows("SELECT n, count(*) FROM seen GROUP BY n ORDER BY n") == [(1, 2), (3, 30), (5, 2)]
    assert bench.rows("SELECT sum(applied), sum(dead) FROM consumer.offsets") == [(34, 62)]
    # Those that fail of themselves end the job, however many others wait.
    send(*[(f"k{number}", 13) for number in range(10)], *[("hot", 6)] * 15)
    with pytest.raises(EffectFailed, match=r"more than 7 .*max_dead"):
        once()


def test_functions_run_in_executors(bench, jobs_of_spark):
    def effect(cursor: Any, rows: Any) -> None:
        for n in rows.column("n").to_pylist():
            cursor.execute("INSERT INTO seen (n, pid) VALUES (%s, %s)", (n, os.getpid()))

    bench.send_raw(b'{"n":1}', ided())
    totals = bench.once(ConsumerJob("function", (bench.topic,), effect, schema="n int", setup=SETUP))
    assert (totals.applied, len(jobs_of_spark)) == (1, 1)
    ((pid,),) = bench.rows("SELECT pid FROM seen")
    assert pid not in {None, os.getpid()}


def test_few_messages_that_are_large_are_left_to_executors(bench, jobs_of_spark, monkeypatch):
    monkeypatch.setattr(reader, "_MOST_BYTES", 20_000_000)
    bench.produce(({"n": 100 + number, "pad": "x" * 900_000}, None, 0) for number in range(30))
    totals = bench.once(ConsumerJob("large", (bench.topic,), SQL, schema="n int", setup=SETUP))
    assert (totals.applied, len(jobs_of_spark)) == (30, 1)
    assert bench.rows("SELECT count(DISTINCT n) FROM seen") == [(30,)]


def test_an_idle_driver_hears_of_new_messages_at_once(bench, monkeypatch):
    """Each round begins when Kafka has something, not when the driver looks into the sink the next time."""
    monkeypatch.setattr("spark_jobs.driver.runner._LOOK_SECONDS", 600.0)
    job = ConsumerJob("idle", (bench.topic,), SQL, schema="n int", setup=SETUP)
    runner = bench.runner(job)
    stop = threading.Event()
    thread = threading.Thread(target=runner.continuous, args=(stop,))
    thread.start()
    try:
        for number in range(3):
            bench.send_raw(b'{"n":%d}' % number, ided())
            wait_until(lambda there=number + 1: runner.totals.applied == there, what="the message")
    finally:
        stop.set()
        thread.join(30)
    assert bench.rows("SELECT n FROM seen ORDER BY n") == [(number,) for number in range(3)]


def test_an_idle_driver_asks_one_question_and_opens_nothing(bench, monkeypatch):
    """How often is runner._LOOK_SECONDS: once a second, and more often here."""
    monkeypatch.setattr("spark_jobs.driver.runner._LOOK_SECONDS", 0.2)
    job = ConsumerJob("idle", (bench.topic,), SQL, schema="n int", setup=SETUP, keep_order=True)
    stop = threading.Event()
    with Counting(bench.database.url) as counting:
        bench.database = SimpleNamespace(url=counting.url)
        bench.send_raw(b'{"n":1}', ided())
        marks: list[dict[Any, int]] = []
        with bench.runner(job) as runner:

            def looked(_: float) -> None:
                if runner.totals.applied and len(marks) < 6:
                    marks.append({session: len(texts) for session, texts in counting.sessions.items()})
                    opened.append(counting.opened)
                if len(marks) == 6:
                    stop.set()

            opened: list[int] = []
            runner._caught_up = looked
            thread = threading.Thread(target=runner.continuous, args=(stop,))
            thread.start()
            wait_until(stop.is_set, what="some looks")
            thread.join(30)
    first, last = marks[0], marks[-1]
    asked = [texts[first.get(session, 0) : last.get(session, 0)] for session, texts in counting.sessions.items()]
    # The lock monitor has a session of its own.
    monitor = b"SET search_path", b"pg_backend_pid", b"pg_blocking_pids"
    asked = [texts for texts in asked if not all(any(each in text for each in monitor) for text in texts)]
    assert [[text.split()[1] for text in texts] for texts in asked] == [[b"g.generation,"] * 5]
    assert opened[-1] <= opened[0] + 1


@pytest.mark.parametrize("driver_records", [2_000, 0], ids=["driver", "executors"])
def test_errors_mean_the_same_in_the_driver(bench, driver_records):
    """What may pass by itself is tried again, also of a single message; anything else ends the job at once."""
    bench.send_raw(b'{"n":1}', ided())
    out_of_order = r"offset 0 can't be applied: by itself it failed 3 times.*out of order"
    for of_kafka, error, said, waits in (
        (False, EffectFailed, "ZeroDivisionError", 0),
        (True, BadMessage, out_of_order, 2),
    ):
        job = ConsumerJob("errors", (bench.topic,), SQL, schema=failing(of_kafka=of_kafka), setup=SETUP)
        with pytest.raises(error, match=said):
            bench.once(job, patience=60.0, verdict_seconds=0.0, driver_records=driver_records)
        assert sum(text == "waiting for a server" for text, _ in bench.reports) == waits, error
        assert bench.rows("SELECT count(*) FROM seen") == [(0,)]
        assert set(bench.positions().values()) == {0}


def failing(*, of_kafka: bool) -> Any:
    """Return a decoder that raises an error of the reader's, or one of its own."""

    class Failing:
        """Not at the module's level: executors do not have this module."""

        def task_plan(self) -> Any:
            fields, _ = Json("n int").task_plan()

            def made() -> Any:
                def one(value: bytes, header: bytes | None) -> Any:
                    raise InputCut("out of order") if of_kafka else ZeroDivisionError

                return one

            return fields, made

    return Failing()


def rounds_of(bench: Bench, job: ConsumerJob, driver_records: int) -> list[int]:
    """Return how many offsets each round has read, with 100 and 2 MB a round."""
    bench.run("DROP TABLE IF EXISTS seen")
    with bench.runner(job, driver_records=driver_records, max_records=100, max_bytes=2_000_000) as runner:
        sizes: list[int] = []
        apply = runner._rounds.apply

        def applied(span: Any, generation: int) -> Any:
            sizes.append(sum(one.end - one.start for one in span.ranges.values()))
            return apply(span, generation)

        runner._rounds.apply = applied
        while runner._round(None):
            pass
    return sizes


def test_a_round_is_bounded_by_bytes_too(bench):
    """180 messages of 50,000 bytes: the first round knows nothing, the others take 40 at most. Other ways: below."""
    bench.produce(({"n": 100 + number, "pad": "x" * 50_000}, None, 0) for number in range(180))
    job = ConsumerJob("bytes", (bench.topic,), SQL, schema="n int, pad string", setup=SETUP, atomic="batch")
    first, *others = rounds_of(bench, job, 0)
    assert (first, max(others) <= 40, sum(others)) == (100, True, 80)
    assert bench.rows("SELECT count(*), count(DISTINCT n) FROM seen") == [(180, 180)]


def test_messages_that_become_no_rows_count_in_a_rounds_bytes(bench):
    """One partition, whose large messages do not decode or are of another type, between small ones that are applied."""
    sent = []
    for number in range(180):
        large = number % 4 != 0
        value = b"not json" + b"x" * 50_000 if large else {"n": 100 + number}
        kind = b"Other" if large and number % 2 else b"Wanted"
        sent.append((value, None, 0, [*ided(), ("ce_type", kind)]))
    bench.produce(sent)
    job = ConsumerJob("tasks", (bench.topic,), SQL, schema="n int", types=("Wanted",), setup=SETUP, max_dead=180)
    transformed = replace(job, group="Spark", transform=lambda rows: rows.filter("n >= 0"))
    for made, driver_records in ((job, 0), (replace(job, group="driver"), 2_000), (transformed, 0)):
        first, *others = rounds_of(bench, made, driver_records)
        # Of four messages three have 50,000 bytes, so that 53 of them have 2 MB.
        assert (first, max(others) <= 56, sum(others)) == (100, True, 80), made.group
        assert bench.rows("SELECT count(*), count(DISTINCT n) FROM seen") == [(45, 45)], made.group


@pytest.mark.parametrize("driver_records", [0, 2_000])
def test_what_a_round_that_raises_has_applied_is_in_the_totals(bench, driver_records):
    """The effect fails in one of two partitions: the other one is applied, and counted."""
    bench.produce(({"n": number}, None, number % 2) for number in range(3_000))
    effect = "INSERT INTO seen SELECT n FROM batch WHERE n / CASE n WHEN 1001 THEN 0 ELSE 1 END >= 0"
    setup = "CREATE TABLE IF NOT EXISTS seen (n int)"
    job = ConsumerJob("raises", (bench.topic,), effect, schema="n int", setup=setup, on_bad="halt")
    with bench.runner(job, driver_records=driver_records, max_records=1_600) as runner:
        with pytest.raises(ConsumerError, match="division by zero"):
            runner.once(threading.Event())
        totals = runner.totals
    [(applied,)] = bench.rows("SELECT count(*) FROM seen")
    assert applied == 800
    assert (totals.read, totals.applied, totals.duplicates, totals.dead) == (applied, applied, 0, 0)
    rounds = [figures for text, figures in bench.reports if text == "round"]
    assert [figures["passed"] for figures in rounds] == [800]


def test_after_a_driver_that_was_killed_executors_do_what_waits(bench, jobs_of_spark):
    """A message that crashes a library would end one driver after the other, and nobody would say which it is."""
    job = ConsumerJob("killed", (bench.topic,), SQL, schema="n int", setup=SETUP)

    def sent(number: int) -> None:
        bench.send_raw(b'{"n":%d}' % number, ided())

    sent(1)
    # This one never says that it has ended.
    bench.runner(job).once(threading.Event())
    assert not jobs_of_spark
    sent(2)
    with bench.runner(job) as runner:
        assert runner._round(None) is True
        assert len(jobs_of_spark) == 1
        sent(3)
        assert runner._round(None) is True
        assert len(jobs_of_spark) == 1
    sent(4)
    bench.once(job)
    assert len(jobs_of_spark) == 1
    assert bench.rows("SELECT n FROM seen ORDER BY n") == [(1,), (2,), (3,), (4,)]
