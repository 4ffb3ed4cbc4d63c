"""Dead letters by the hundred: pages tried again, one in ten rows at fault, and those of two topics."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from bench import Bench
from counting import Counting

from outbox.consumer.errors import EffectFailed
from spark_jobs.driver.rounds import RETRIED_AT_ONCE
from spark_jobs.errors import Reject
from spark_jobs.job import ConsumerJob
from spark_jobs.outcomes import RangeOutcome

pytestmark = pytest.mark.spark


LETTERS = 250
KEYS = 50
NAMELESS = 137
"""The one that ends the effect without a name, on the second page."""
REFUSED = {20, 171}
REJECTED = 57


def test_three_pages_of_dead_letters_are_tried_again_in_order(bench):
    """Most succeed, some fail again by name, and one ends the whole effect; each key goes on as far as it can."""

    def not_yet(cursor: Any, rows: Any) -> None:
        raise Reject("not yet", *rows["message_id"].to_pylist())

    def effect(cursor: Any, rows: Any) -> None:
        found = dict(zip(rows["n"].to_pylist(), rows["message_id"].to_pylist(), strict=True))
        if NAMELESS in found:
            raise ValueError("no name")
        if REJECTED in found:
            raise Reject("not this one", found[REJECTED])
        cursor.executemany("INSERT INTO numbers (n) VALUES (%s)", [(n,) for n in found])

    def wholly(cursor: Any, rows: Any) -> None:
        cursor.executemany("INSERT INTO numbers (n) VALUES (%s)", [(n,) for n in rows["n"].to_pylist()])

    job = ConsumerJob("many", [bench.topic], not_yet, schema="n int", keep_order=True)
    refused = ", ".join(map(str, sorted(REFUSED)))
    bench.run(f"CREATE TABLE numbers (at serial, n int CONSTRAINT sane CHECK (n NOT IN ({refused})))")
    bench.produce([({"n": n}, f"k{n % KEYS}", 0) for n in range(LETTERS)])
    assert bench.once(job).dead == LETTERS

    bench.command("dead-letters", "retry", "--side", "consumer", "--all", "--group", "many")
    pages: list[int] = []
    with bench.runner(replace(job, effect=effect)) as runner:
        attempt = runner._rounds._retry

        def counted(letters: Any, *rest: Any) -> Any:
            pages.append(len(letters))
            return attempt(letters, *rest)

        runner._rounds._retry = counted
        totals = runner.once(threading.Event())
    at_fault = {NAMELESS, REJECTED} | REFUSED
    held = {n for bad in at_fault for n in range(bad, LETTERS, KEYS)}
    assert (totals.read, totals.applied, totals.duplicates) == (LETTERS - len(held),) * 2 + (0,)
    # Halving a page for the one without a name takes a few tries for each halving, and not one for each letter.
    assert pages[0] == max(pages) == RETRIED_AT_ONCE
    assert len(pages) < 8 * math.log2(RETRIED_AT_ONCE)
    in_order(bench, set(range(LETTERS)) - held)
    assert bench.rows("SELECT message_offset, reason, state, attempts FROM consumer.dead_letters ORDER BY 1") == [
        (n, ("rejected" if n == REJECTED else "failed") if n in at_fault else "behind", "dead", 2) for n in sorted(held)
    ]
    [(error,)] = bench.rows(f"SELECT error FROM consumer.dead_letters WHERE message_offset = {NAMELESS}")
    assert "ValueError: no name" in error

    bench.run("ALTER TABLE numbers DROP CONSTRAINT sane")
    bench.command("dead-letters", "retry", "--side", "consumer", "--all", "--group", "many")
    assert bench.once(replace(job, effect=wholly)).applied == len(held)
    in_order(bench, set(range(LETTERS)))
    assert bench.rows("SELECT count(*) FROM consumer.dead_letters") == [(0,)]
    assert bench.rows("SELECT sum(applied)::int, sum(duplicates)::int FROM consumer.offsets") == [(LETTERS, 0)]


@pytest.mark.parametrize("atomic", ["partition", "batch"])
def test_dead_letters_one_of_which_is_discarded_meanwhile_are_tried_without_it(bench, atomic):
    """Between the driver's look and its transaction: that one has no effect, and the others have theirs once."""
    job = ConsumerJob("gone", [bench.topic], "INSERT INTO numbers SELECT n FROM batch", schema="n int", atomic=atomic)
    bench.run("CREATE TABLE numbers (n int CONSTRAINT none CHECK (false))")
    bench.produce([({"n": n}, "k", 0) for n in range(3)])
    assert bench.once(job).dead == 3
    bench.run("ALTER TABLE numbers DROP CONSTRAINT none")
    bench.command("dead-letters", "retry", "--side", "consumer", "--all", "--group", "gone")
    outcomes: list[tuple[int, RangeOutcome]] = []
    with bench.runner(job) as runner:
        attempt = runner._rounds._attempts.attempt_retry

        def discarded(letters: Any, *rest: Any) -> Any:
            if not outcomes:
                bench.run("DELETE FROM consumer.dead_letters WHERE message_offset = 1")
            result = attempt(letters, *rest)
            outcomes.append((len(letters), result.outcome))
            return result

        runner._rounds._attempts.attempt_retry = discarded
        totals = runner.once(threading.Event())
    assert outcomes == [(3, RangeOutcome.ALREADY), (2, RangeOutcome.APPLIED)]
    assert (totals.read, totals.applied, totals.duplicates) == (2, 2, 0)
    assert bench.rows("SELECT n FROM numbers ORDER BY n") == [(0,), (2,)]
    assert bench.rows("SELECT count(*) FROM consumer.dead_letters") == [(0,)]


def in_order(bench: Bench, numbers: set[int]) -> None:
    """Check that these were applied, each once, and of each key in their order."""
    keys: dict[int, list[int]] = defaultdict(list)
    for (n,) in bench.rows("SELECT n FROM numbers ORDER BY at"):
        keys[n % KEYS].append(n)
    assert keys == {key: mine for key in range(KEYS) if (mine := [n for n in sorted(numbers) if n % KEYS == key])}


ROWS = 2_500
FAULTS = [n for n in range(ROWS) if n // 10 % 10 == 3]
"""Ten in a row, as of a producer that is wrong for a while."""


def test_one_in_ten_rows_at_fault(bench):
    topic = bench.topics.create_topic(bench.topics.name("rows"), 1)
    bench.produce([({"n": n}, "k", 0) for n in range(ROWS)], topic)
    job = ConsumerJob(
        "bisected",
        [topic],
        "INSERT INTO kept SELECT n, message_offset FROM batch ORDER BY message_offset",
        schema="n int",
        setup="CREATE TABLE IF NOT EXISTS kept (n int CHECK (n / 10 % 10 <> 3), at bigint)",
        max_dead=100,
    )
    with pytest.raises(EffectFailed, match=r"more than 100 messages of one batch fail \(max_dead\); the last: Check"):
        bench.once(job)
    assert bench.rows("SELECT count(*) FROM kept") == [(0,)]
    assert bench.rows("SELECT next_offset, applied, dead FROM consumer.offsets") == [(0, 0, 0)]
    assert bench.rows("SELECT count(*) FROM consumer.dead_letters") == [(0,)]

    database = bench.database
    with Counting(database.url) as counting:
        bench.database = SimpleNamespace(url=counting.url)
        totals = bench.once(replace(job, max_dead=2 * len(FAULTS)))
        bench.database = database
    assert (totals.read, totals.applied, totals.dead) == (ROWS, ROWS - len(FAULTS), len(FAULTS))
    assert bench.rows("SELECT n, at FROM kept ORDER BY at") == [(n, n) for n in range(ROWS) if n not in FAULTS]
    assert bench.rows("SELECT message_offset, reason, sqlstate FROM consumer.dead_letters ORDER BY 1") == [
        (n, "failed", "23514") for n in FAULTS
    ]
    assert bench.rows("SELECT next_offset, applied, dead FROM consumer.offsets") == [
        (ROWS, ROWS - len(FAULTS), len(FAULTS))
    ]
    # Each message by itself would be eight times ROWS; and each of FAULTS has to be tried by itself.
    assert len(counting.statements) < ROWS * math.log2(ROWS) / 3


GOOD = 20


def test_two_topics_whose_messages_are_of_different_types(bench):
    """One group: each topic's dead letters are its own, and one of them is set back without the other."""
    orders, payments = (bench.topics.create_topic(bench.topics.name(name), 2) for name in ("bought", "paid"))
    job = ConsumerJob(
        "both",
        [orders, payments],
        "INSERT INTO orders SELECT order_id, cents, message_offset FROM batch"
        f" WHERE message_topic = '{orders}' ORDER BY message_part, message_offset;"
        "INSERT INTO payments SELECT payment, paid, message_offset FROM batch"
        f" WHERE message_topic = '{payments}' ORDER BY message_part, message_offset",
        schema="order_id string, cents long, payment long, paid decimal(10,2)",
        setup="CREATE TABLE IF NOT EXISTS orders (id text, cents int CONSTRAINT orders_sane CHECK (cents > 0), at int);"
        "CREATE TABLE IF NOT EXISTS payments (id bigint, paid numeric CONSTRAINT paid_sane CHECK (paid > 0), at int)",
    )
    bench.produce(
        [({"order_id": f"o{number}", "cents": 5}, f"k{number}", number % 2) for number in range(GOOD)], orders
    )
    bench.produce([({"payment": number, "paid": 5.25}, f"k{number}", number % 2) for number in range(GOOD)], payments)
    bench.produce([({"order_id": "o", "cents": 0}, "k", 0), ({"order_id": "o", "cents": "many"}, "k", 1)], orders)
    bench.produce([({"payment": 1, "paid": 0}, "k", 0), ({"payment": "one", "paid": 5}, "k", 1)], payments)
    totals = bench.once(job)
    assert (totals.read, totals.applied, totals.dead) == (2 * GOOD + 4, 2 * GOOD, 4)
    dead = "SELECT part, reason, attempts FROM consumer.dead_letters WHERE topic = '{}' ORDER BY part"
    counts = (
        "SELECT part, next_offset, applied, duplicates, dead FROM consumer.offsets WHERE topic = '{}' ORDER BY part"
    )
    for topic in (orders, payments):
        assert bench.rows(dead.format(topic)) == [(0, "failed", 1), (1, "undecodable", 1)]
        assert bench.rows(counts.format(topic)) == [(part, GOOD // 2 + 1, GOOD // 2, 0, 1) for part in range(2)]

    moved = bench.command("offsets", "reset", "both", "--topic", payments, "--to", "earliest", "--reason", "again")
    assert moved.count(f"{GOOD // 2 + 1} come again") == 2
    totals = bench.once(job)
    assert (totals.read, totals.applied, totals.duplicates, totals.dead) == (GOOD + 2, 0, GOOD, 2)
    assert bench.rows(dead.format(orders)) == [(0, "failed", 1), (1, "undecodable", 1)]
    assert bench.rows(dead.format(payments)) == [(0, "failed", 2), (1, "undecodable", 2)]
    assert bench.rows(counts.format(orders)) == [(part, GOOD // 2 + 1, GOOD // 2, 0, 1) for part in range(2)]
    assert bench.rows(counts.format(payments)) == [(part, GOOD // 2 + 1, GOOD // 2, GOOD // 2, 2) for part in range(2)]

    bench.run("ALTER TABLE orders DROP CONSTRAINT orders_sane; ALTER TABLE payments DROP CONSTRAINT paid_sane")
    bench.command("dead-letters", "retry", "--side", "consumer", "--all", "--group", "both", "--topic", payments)
    assert bench.once(job).applied == 1
    assert bench.rows(dead.format(orders)) == [(0, "failed", 1), (1, "undecodable", 1)]
    assert bench.rows(dead.format(payments)) == [(1, "undecodable", 3)]
    assert bench.rows("SELECT id FROM orders ORDER BY 1") == sorted((f"o{number}",) for number in range(GOOD))
    assert bench.rows("SELECT id, paid::text FROM payments ORDER BY 1, 2") == sorted(
        [(number, "5.25") for number in range(GOOD)] + [(1, "0.00")]
    )
