"""A job on real Spark, Kafka and Postgres: transactions, what it refuses, and a driver that stalls."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from support import wait_until

from outbox.consumer.errors import EffectFailed, JobError
from outbox.errors import SchemaError
from spark_jobs.errors import BadMessage

pytestmark = pytest.mark.spark


def test_an_event_out_of_order_shows(bench):
    """The proof that the reconciliation's last column can be other than 0."""
    for seq in (1, 3, 2):
        bench.send("a", seq)
    bench.once()
    assert bench.totals()["a"][3] == 2


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


def test_a_run_that_gets_further_than_its_target_has_lost_nothing(bench):
    """A transaction that is open when the target is set, and aborted then: the group moves behind it."""
    one, two = map(bench.in_transaction, "ab")
    bench.send("a", 1, producer=one, part=0)
    one.commit_transaction(30)
    for seq in range(2, 7):
        bench.send("a", seq, producer=two, part=0)
    with bench.runner(then=lambda text: two.abort_transaction(30) if text == "planned" else None) as runner:
        assert runner.once(threading.Event()).applied == 1
    assert bench.rows("SELECT count(*) FROM consumer.losses") == [(0,)]
    assert bench.totals()["a"][1] == 1


def test_a_range_of_transaction_markers_is_stepped_over(bench):
    producer = bench.in_transaction()
    for number, commit in enumerate((True, False, False)):
        if number:
            producer.begin_transaction()
        bench.send("a", 1, producer=producer, part=0)
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


def test_a_job_that_can_not_work_says_why_and_applies_nothing(bench):
    bench.send("a", 1)
    for declared, error, why in (
        ({"effect": "INSERT INTO nowhere SELECT 1"}, EffectFailed, r"offsets 0 to 0: UndefinedTable.*nowhere"),
        ({"transform": lambda rows: rows.repartition(3)}, JobError, "transaction of its own"),
        ({"transform": lambda rows: rows.select("order_id")}, JobError, "message_"),
    ):
        with pytest.raises(error, match=why):
            bench.once(replace(bench.job, **declared))
        assert sum(bench.positions().values()) == 0
        assert bench.rows("SELECT count(*) FROM consumer.processed_messages") == [(0,)]
    bench.once()
    assert bench.totals()["a"][1] == 1
    bench.run("DROP SCHEMA consumer CASCADE")
    with pytest.raises(
        SchemaError, match=r'relation "consumer.groups" does not exist; run `outbox db upgrade --consumer`'
    ):
        bench.once()
