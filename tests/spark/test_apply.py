"""A job on real Spark, Kafka and Postgres: each message applied once, in order, and the offsets with it."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from support import wait_until
from uuid_utils.compat import uuid7

from outbox.consumer.errors import EffectFailed, Fenced, JobError, TopicRecreated
from spark_jobs.errors import BadMessage
from spark_jobs.job import ConsumerJob

pytestmark = pytest.mark.spark


def test_events_become_rows_once_and_in_order(bench):
    for seq in range(1, 6):
        for order in ("a", "b", "c"):
            bench.send(order, seq)
    totals = bench.once()
    assert (totals.read, totals.applied, totals.duplicates) == (15, 15, 0)
    assert bench.totals() == dict.fromkeys(("a", "b", "c"), (50, 5, 5, 0, "s5"))
    assert sum(bench.positions().values()) == 15
    again = bench.once()
    assert (again.read, again.rounds) == (0, 0)
    bench.send("a", 6)
    assert bench.once().applied == 1
    assert bench.totals()["a"] == (60, 6, 6, 0, "s6")


def test_what_the_producer_repeats_is_applied_once(bench):
    """In the same batch, in a later batch, and while the partition is already under suspicion."""
    first = bench.send("a", 1)
    second = bench.send("a", 2)
    bench.send("a", 1, event_id=first)
    totals = bench.once()
    assert (totals.read, totals.applied, totals.duplicates) == (3, 2, 1)
    assert bench.totals()["a"] == (20, 2, 2, 0, "s2")
    bench.send("a", 2, event_id=second)
    bench.send("a", 3)
    totals = bench.once()
    assert (totals.read, totals.applied, totals.duplicates) == (2, 1, 1)
    assert bench.totals()["a"] == (30, 3, 3, 0, "s3")


def test_an_event_out_of_order_shows(bench):
    """The proof that the reconciliation's last column can be other than 0."""
    for seq in (1, 3, 2):
        bench.send("a", seq)
    bench.once()
    assert bench.totals()["a"][3] == 2


def test_the_older_consumer_is_fenced_and_the_younger_goes_on(bench):
    bench.send("a", 1)
    older, stop = bench.runner(), threading.Event()
    older.once(stop)
    bench.send("a", 2)
    younger = bench.runner()
    younger.once(stop)
    bench.send("a", 3)
    with pytest.raises(Fenced, match=r"another consumer has taken it over|was taken over"):
        older.once(stop)
    assert bench.totals()["a"] == (20, 2, 2, 0, "s2")
    younger.once(stop)
    assert bench.totals()["a"] == (30, 3, 3, 0, "s3")


def test_a_driver_that_stalls_in_a_transaction_or_meets_a_standby_goes_on(bench):
    """A sink may end transactions that are idle or long; after a failover an address may still be the standby's."""
    ends = [
        "SET LOCAL idle_in_transaction_session_timeout = '50ms'",
        "SET LOCAL transaction_timeout = '50ms'",
        "SET TRANSACTION READ ONLY",
    ]
    runner = bench.runner()
    transaction = runner._store.transaction

    @contextmanager
    def stalled(**options):
        with transaction(**options) as connection:
            if ends:
                end = ends.pop(0)
                connection.execute(end)
                alive = f"SELECT FROM pg_stat_activity WHERE pid = {connection.info.backend_pid}"
                wait_until(lambda: "timeout" not in end or not bench.rows(alive), what="the session's end")
            yield connection

    runner._store.transaction = stalled
    bench.send("a", 1)
    assert runner.once(threading.Event()).applied == 1
    waited = [figures["error"] for text, figures in bench.reports if text == "waiting for a server"]
    assert [next(sign for sign in ("idle", "transaction timeout", "read-only") if sign in one) for one in waited] == [
        "idle",
        "transaction timeout",
        "read-only",
    ]


def test_a_partition_added_waits_for_what_its_keys_have_in_others(bench):
    """A backlog of one key in the old partition; its next message goes to a new one, and is applied last."""
    bench.send("a", 1, key="a")
    bench.once()
    bench.orders(["a"], range(2, 3_001))
    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    admin.create_partitions([NewPartitions(bench.topic, 4)])[bench.topic].result(30)
    wait_until(lambda: len(admin.list_topics(bench.topic).topics[bench.topic].partitions) == 4, what="the partitions")
    payload = {"order_id": "a", "seq": 3_001, "customer": "c", "amount_cents": 1, "status": "last"}
    wait_until(lambda: _accepts(bench, json.dumps(payload).encode(), "a"), what="the new partition to take messages")
    # Stopped in the middle and started again: nothing has been noted of the new partition, and it still waits.
    stop = threading.Event()
    with bench.runner(max_records=500) as runner:
        report = runner._report

        def stopping(text, figures):
            report(text, figures)
            if text == "round":
                stop.set()

        runner._report = stopping
        runner.once(stop)
    assert len(bench.positions()) == 2
    bench.once(max_records=500)
    (_, applied, last, out_of_order, _) = bench.totals()["a"]
    assert (applied, last, out_of_order) == (3_001, 3_001, 0)
    # The other new one has no messages yet, and is none of the group's.
    assert bench.positions().keys() == {0, 1, 3}
    waits = [figures["partitions"] for text, figures in bench.reports if text.startswith("new partitions wait")]
    assert waits == [[f"{bench.topic}-3"]] * 2


def test_a_partition_added_that_was_seen_empty_waits_too(bench):
    """Producers hear of a new partition minutes after the driver; and an open transaction hides what came before."""
    bench.send("a", 1, key="a")
    bench.once()
    ((part, _),) = [(at, offset) for at, offset in bench.positions().items() if offset]
    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    admin.create_partitions([NewPartitions(bench.topic, 4)])[bench.topic].result(30)
    wait_until(lambda: len(admin.list_topics(bench.topic).topics[bench.topic].partitions) == 4, what="the partitions")
    with bench.runner(max_records=500) as runner:
        assert runner._round(None) is False
        assert bench.positions().keys() == {0, 1}

        def send(producer, seq):
            payload = {"order_id": "a", "seq": seq, "customer": "c", "amount_cents": 1, "status": "s"}
            headers = [("ce_id", str(uuid7()).encode())]
            producer.produce(bench.topic, json.dumps(payload), "a", headers=headers, partition=part)

        bench.orders(["a"], range(2, 2_001), part)
        hidden = bench.producer(**{"transactional.id": bench.topic})
        hidden.init_transactions(30)
        hidden.begin_transaction()
        send(hidden, 2_001)
        assert hidden.flush(30) == 0
        payload = {"order_id": "a", "seq": 2_002, "customer": "c", "amount_cents": 1, "status": "last"}
        wait_until(lambda: _accepts(bench, json.dumps(payload).encode(), "a"), what="the partition to take messages")
        while runner._round(None):
            pass
        # Everything that is committed in the old one has been applied; what the transaction hides has not.
        assert bench.totals()["a"][1:3] == (2_000, 2_000)
        hidden.commit_transaction(30)
        wait_until(lambda: runner._round(None) is False and bench.totals()["a"][1] == 2_002, what="the rest")
    assert bench.totals()["a"][1:4] == (2_002, 2_002, 0)


def test_a_run_that_gets_further_than_its_target_has_lost_nothing(bench):
    """A transaction that is open when the target is set, and aborted then: the group moves behind it."""

    def send(producer, seq):
        payload = {"order_id": "a", "seq": seq, "customer": "c", "amount_cents": 1, "status": "s"}
        headers = [("ce_id", str(uuid7()).encode())]
        producer.produce(bench.topic, json.dumps(payload), "a", headers=headers, partition=0)

    one, two = (bench.producer(**{"transactional.id": f"{bench.topic}-{n}"}) for n in range(2))
    for producer in (one, two):
        producer.init_transactions(30)
        producer.begin_transaction()
    send(one, 1)
    one.commit_transaction(30)
    for seq in range(2, 7):
        send(two, seq)
    assert two.flush(30) == 0
    with bench.runner() as runner:
        report = runner._report

        def aborting(text, figures):
            report(text, figures)
            if text == "planned":
                two.abort_transaction(30)

        runner._report = aborting
        assert runner.once(threading.Event()).applied == 1
    assert bench.rows("SELECT count(*) FROM consumer.losses") == [(0,)]
    assert bench.totals()["a"][1] == 1


def _accepts(bench, payload, key="new") -> bool:
    try:
        bench.send_raw(payload, [("ce_id", str(uuid7()).encode())], key, partition=3)
    except Exception:  # noqa: BLE001  the client has not heard of the partition yet
        return False
    return True


def test_a_range_of_transaction_markers_is_stepped_over(bench):
    producer = bench.producer(**{"transactional.id": bench.topic})
    producer.init_transactions(30)
    for commit in (True, False, False):
        producer.begin_transaction()
        payload = {"order_id": "a", "seq": 1, "customer": "c", "amount_cents": 1, "status": "s"}
        headers = [("ce_id", str(uuid7()).encode())]
        producer.produce(bench.topic, json.dumps(payload), "a", headers=headers, partition=0)
        producer.flush(30)
        producer.commit_transaction(30) if commit else producer.abort_transaction(30)
        bench.topics.await_transactions(bench.topic)
        bench.once()
    assert bench.totals()["a"][1] == 1
    assert bench.positions()[0] == 6
    assert bench.once().rounds == 0


@pytest.mark.parametrize(
    ("value", "headers", "shown"),
    [(b"not json", [("ce_id", b"01a1fc57-7bb5-74a0-8a25-b5b0753f2bce")], "JSON|fit"), (b"{}", [], "there is no id")],
)
def test_a_message_that_can_not_be_read_halts_the_group_if_it_is_to(bench, value, headers, shown):
    job = replace(bench.job, on_bad="halt")
    bench.send("k", 1)
    bench.once()
    bench.send("k", 2)
    bench.send_raw(value, headers)
    before = bench.positions()
    with pytest.raises(BadMessage, match=rf"{bench.topic}-\d offset \d+: .*({shown})"):
        bench.once(job)
    assert bench.positions() == before
    assert bench.totals()["k"][1] == 1


def test_an_effect_that_fails_rolls_everything_back_and_says_where(bench):
    bench.send("a", 1)
    with pytest.raises(EffectFailed, match=r"offsets 0 to 0: UndefinedTable.*nowhere"):
        bench.once(replace(bench.job, effect="INSERT INTO nowhere SELECT 1"))
    assert sum(bench.positions().values()) == 0
    assert bench.rows("SELECT count(*) FROM consumer.processed_messages") == [(0,)]
    bench.once()
    assert bench.totals()["a"][1] == 1


def test_a_topic_created_again_halts(bench):
    bench.send("a", 1)
    bench.once()
    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    admin.delete_topics([bench.topic])[bench.topic].result(30)
    wait_until(lambda: bench.topic not in admin.list_topics().topics, what="the topic to go")
    bench.topics.create_topic(bench.topic, 2)
    for seq in (1, 2, 3):
        bench.send("b", seq)
    with pytest.raises(TopicRecreated, match="created again"):
        bench.once()
    assert set(bench.totals()) == {"a"}


def test_a_shuffle_is_refused(bench):
    bench.send("a", 1)
    job = replace(bench.job, transform=lambda rows: rows.repartition(3))
    with pytest.raises(JobError, match="transaction of its own"):
        bench.once(job)
    with pytest.raises(JobError, match="message_"):
        bench.once(replace(bench.job, transform=lambda rows: rows.select("order_id")))


def test_types_and_filters_and_bytes(bench):
    """Nested values, text that looks like NULL or like CSV, and rows that a transform drops."""
    job = ConsumerJob(
        group="types",
        topics=[bench.topic],
        schema="t string, n struct<a:int,b:array<string>>, f double, d decimal(10,2), at timestamp, keep boolean",
        transform=lambda rows: rows.filter("keep"),
        setup="CREATE TABLE IF NOT EXISTS typed (t text, n jsonb, f float8, d numeric, at timestamptz, key text)",
        effect="INSERT INTO typed SELECT t, n, f, d, at, message_key FROM batch ORDER BY message_offset",
    )
    texts = ["", 'a,"b"\n\\N', "NULL", "\\.", None, "ü😀"]
    for text in texts:
        value = {"t": text, "n": {"a": 1, "b": ["x"]}, "f": 1.5, "d": 2.25, "at": "2026-01-02T03:04:05Z", "keep": True}
        bench.send_raw(json.dumps(value).encode(), [("id", str(uuid7()).encode())], "key")
    bench.send_raw(b'{"keep": false}', [("id", str(uuid7()).encode())], "dropped")
    bench.once(job)
    rows = bench.rows("SELECT t, n, f, d::text, at::text, key FROM typed")
    assert [row[0] for row in rows] == texts
    assert rows[0][1:4] == ({"a": 1, "b": ["x"]}, 1.5, "2.25")
    assert rows[0][5] == "key"
    assert sum(bench.positions().values()) == 7
    raw = ConsumerJob(
        group="raw",
        topics=[bench.topic],
        effect="INSERT INTO raw SELECT payload FROM batch",
        setup="CREATE TABLE IF NOT EXISTS raw (v bytea)",
    )
    bench.once(raw)
    assert bench.rows("SELECT count(*) FROM raw WHERE convert_from(v, 'UTF8')::jsonb ? 'keep'") == [(7,)]


def test_the_days_partitions_are_made_and_used(bench):
    today = "SELECT (now() AT TIME ZONE 'UTC')::date"
    [(before,)] = bench.rows(today)
    bench.send("a", 1)
    bench.once()
    [(name, day)] = bench.rows("SELECT tableoid::regclass::text, day FROM consumer.processed_messages")
    [(after,)] = bench.rows(today)
    assert name.startswith("consumer.processed_messages_2")
    # Midnight may come in between.
    assert before <= day <= after
    old = "01000000-0000-7000-8000-000000000001"
    bench.send("a", 2, event_id=old)
    bench.once()
    bench.send("a", 2, event_id=old)
    assert bench.once().duplicates == 1


def test_kafkas_own_tools_see_the_group(bench):
    bench.send("a", 1)
    bench.once()
    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    from confluent_kafka import ConsumerGroupTopicPartitions

    answer = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("order-totals")])
    found = answer["order-totals"].result().topic_partitions
    assert sum(at.offset for at in found if at.topic == bench.topic) == 1
