"""What a round does with messages that can't be applied, with each strategy, and as one transaction."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
from bench import ided
from round_support import NUL, letters, order, put, retry

from outbox.consumer.errors import EffectFailed, JobError
from spark_jobs.dedup.strategies import Fingerprint, Natural, Version
from spark_jobs.driver import rounds
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.errors import BadMessage, Reject
from spark_jobs.job import ConsumerJob

pytestmark = pytest.mark.spark


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


def test_hundreds_of_dead_letters_and_some_that_end_the_effect_keep_no_group_from_its_messages(bench, monkeypatch):
    monkeypatch.setattr("spark_jobs.driver.rounds.FAILED_ALONE", 1)

    def effect(cursor, rows):
        if {13, 15, 17} & set(rows["n"].to_pylist()):
            raise ValueError("thirteen")
        cursor.executemany("INSERT INTO numbers VALUES (%s)", [(n,) for n in rows["n"].to_pylist()])

    job = ConsumerJob("many", [bench.topic], effect, schema="n int", keep_order=True)
    bench.run("CREATE TABLE numbers (n int)")
    bench.produce((b'{"n": "bad"}', f"key{number}", number % 2) for number in range(350))
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
        bench.job, transform=lambda rows: rows.filter("amount_cents > 5").withColumn("ExchangeRate", rows["seq"] + 1)
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


WAYS = {
    "task": ("partition", None),
    "spark": ("partition", lambda rows: rows.filter("true")),
    "batch": ("batch", None),
    "shuffle": ("batch", lambda rows: rows.repartition(3)),
}


@pytest.mark.parametrize(
    ("wrong", "ways"),
    [
        ("undecodable", ["task", "shuffle"]),
        ("no id", ["batch"]),
        ("not for Postgres", ["task", "shuffle"]),
        ("rejected", ["spark"]),
        ("forgotten", ["task"]),
    ],
)
def test_very_many_bad_messages_are_counted_and_not_collected(bench, small_batches, monkeypatch, wrong, ways):
    """More than Spark sends at once: what a task reports, and what the driver holds, is bounded by ``max_dead``."""
    told, checked = [], []
    read_report, check_number = rounds.rejected_from, rounds.Rounds._check_number

    def measured(text):
        told.append(len(text))
        return read_report(text)

    def checking(self, state, more):
        checked.append(len(more))
        check_number(self, state, more)

    monkeypatch.setattr(rounds, "rejected_from", measured)
    monkeypatch.setattr(rounds.Rounds, "_check_number", checking)

    def rejecting(cursor, rows):
        raise Reject("x" * 10_000, *rows["message_id"].to_pylist())

    value = {"undecodable": b'{"order_id": "' + b"x" * 500, "not for Postgres": NUL.encode()}
    sent = []
    for number in range(1_100):
        event_id = f"01900000-0000-7000-8000-{number:012x}" if wrong == "forgotten" else None
        data = value.get(wrong, order("a", number))
        sent.append((data, "a", 0, [] if wrong == "no id" else ided(event_id)))
    bench.produce(sent)
    for way in ways:
        atomic, transform = WAYS[way]
        effect = rejecting if wrong == "rejected" else bench.job.effect
        job = replace(bench.job, group=way, max_dead=100, effect=effect, atomic=atomic, transform=transform)
        # Few messages would be applied by the driver.
        with bench.runner(job, driver_records=0) as runner:
            runner._begin()
            bench.run("UPDATE consumer.groups SET forgotten_before = '2024-06-11'")
            with pytest.raises(EffectFailed, match=r"more than 100 .*max_dead"):
                runner.once(threading.Event())
    assert (set(bench.positions().values()), letters(bench)) == ({0}, [])
    # One more than there may be, and of each no more than a dead letter shows.
    assert checked == [101] * len(ways)
    assert all(size < 101 * 2_200 for size in told)


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
