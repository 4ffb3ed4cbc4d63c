"""The runbooks of consumers. Each shows the cause of its failure, and its way out ends it.

Commands and queries come out of docs/operations/runbooks.md itself; see runbooks.py. They are run with the rights that
the page names. ``firing`` evaluates the real alert rules on what real relays and consumers show.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from alerting import Samples, collected, firing
from consumer_group import event_id
from external_support import payments, provider, sink
from offsets_driver import GROUP, Driver, driver
from prometheus_client import CollectorRegistry
from proxy import TcpProxy
from rows_and_roles import execute
from runbook_support import every_step_was_taken, forgotten, of
from support import wait_until
from task_sink import Sink as NumbersSink

from outbox._app.prometheus import serve
from outbox.consumer.errors import DataLost, Fenced, Interrupted
from outbox.consumer.groups import GroupRows
from outbox.consumer.letters import DeadLetter, DeadLetterStore
from outbox.consumer.losses import given_up
from outbox.consumer.model import RejectedRecord
from relay.metrics.groups import GroupWatch
from spark_jobs.driver.options import Options
from spark_jobs.driver.poison_search import PoisonSearch
from spark_jobs.driver.round_context import Counts, OffsetRanges, RoundState
from spark_jobs.driver.runner import Runner
from spark_jobs.health import ConsumerHealth
from spark_jobs.job import ConsumerJob
from spark_jobs.metrics import ConsumerMetrics
from spark_jobs.postgres import lock_monitor
from spark_jobs.task import partition as task
from spark_jobs.task.feed import rejected_from

__all__ = ["driver", "provider", "sink"]


@pytest.fixture(autouse=True)
def locks_are_looked_for_often(monkeypatch):
    monkeypatch.setattr(lock_monitor, "CHECK_SECONDS", 0.1)


class Consumer:
    """A consumer of a driver's topic that steps over what it reads, for there is no Spark; and what it shows.

    url  of the sink, where it is not the driver's.
    """

    def __init__(self, driver: Driver, address: str | None = None, url: str | None = None) -> None:
        kafka = {"bootstrap.servers": driver.topics.bootstrap_servers}
        job = ConsumerJob(group=GROUP, topics=[driver.topic], effect="SELECT 1")
        self.reports: list[tuple[str, dict[str, Any]]] = []
        self._url = url or driver.url
        self._metrics = ConsumerMetrics(GROUP, [driver.topic], self._url, "consumer", kafka)
        self._health = ConsumerHealth(300.0)
        self._registry = CollectorRegistry()
        self._registry.register(self._metrics)
        options = Options(self._url, kafka, patience=30.0, max_backoff_seconds=0.2)
        self.runner = Runner(None, job, options, self._report, self._health.succeeded, self._health.lagging)
        self.runner._rounds.apply = self._step_over
        if address is not None:
            serve(address, self._registry, "consumer.metrics_address", self._health.look)

    def samples(self) -> Samples:
        """Return what it shows to Prometheus."""
        return collected(self._registry)

    def alerts(self, before: Samples | None = None) -> set[str]:
        """Return which of the consumers' alerts fire."""
        return {alert for alert in firing(self.samples(), before) if alert.startswith("Consumer")}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run it in a thread."""
        stop = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(self.runner.continuous, stop)
            try:
                yield
            finally:
                stop.set()
            running.result(60)

    def _report(self, text: str, figures: Mapping[str, Any]) -> None:
        self.reports.append((text, dict(figures)))
        self._metrics.observe(text, figures)
        self._health.observe(text, figures)

    def _step_over(self, span: OffsetRanges, generation: int) -> Counts:
        self.runner._rounds._step_over(span, RoundState(), generation)
        return Counts()


@of("A consumer stands still")
def test_kafka_lost_what_a_group_had_not_read(operator, driver):
    for part in (0, 1):
        driver.send(part, 10)
    driver.meet()
    driver.read(0, 2)
    driver.read(1, 9)
    driver.delete_before(0, 5)
    consumer = Consumer(driver)
    with pytest.raises(DataLost, match="outbox offsets reset"):
        consumer.runner.once(threading.Event())
    before = consumer.samples()
    assert consumer.alerts() == {"ConsumerStandsStill"}
    assert "ConsumerGone" in firing({}, before)
    assert "1 loss to accept: `outbox offsets show`" in operator.look("outbox status").text
    assert "retention" in operator.look("outbox offsets show", GROUP=GROUP).text
    operator.follow("A group has lost messages").act("outbox offsets reset", GROUP=GROUP, TOPIC=driver.topic)
    # Where nothing was lost, it goes neither back nor on.
    assert driver.positions() == {0: 5, 1: 9}
    consumer = Consumer(driver)
    consumer.runner.once(threading.Event())
    assert driver.positions() == {0: 10, 1: 10}
    assert (consumer.alerts(before), "ConsumerGone" in firing(consumer.samples(), before)) == (set(), False)


def of_a_relay(driver: Driver) -> Callable[[], set[str]]:
    """Return what looks at the groups as a relay does, and says which alerts fire for what it shows."""
    registry = CollectorRegistry()
    kafka = {"bootstrap.servers": driver.topics.bootstrap_servers}
    watch = GroupWatch(driver.url, "consumer", kafka, lambda: True, registry)

    def alerts() -> set[str]:
        watch.look()
        return firing(collected(registry), later=660.0)

    return alerts


@of("A group has lost messages")
def test_a_group_has_given_up_messages(operator, driver):
    """At-most-once: the group does not halt, so nothing else says it."""
    driver.meet()
    driver.send(0, 3)
    driver.read(0, 3)
    alerts = of_a_relay(driver)
    wait_until(lambda: "ConsumerLosses" not in alerts(), 120, "no alert")
    with psycopg.connect(driver.url) as connection:
        found = given_up(RejectedRecord((driver.topic, 0, 1), "failed", "refused"), "id")
        GroupRows("consumer", GROUP).record_losses(connection, [found])
    # A look that took long is followed by a rest.
    wait_until(lambda: "ConsumerLosses" in alerts(), 120, "the alert")
    assert "message 1 was given up" in operator.look("outbox offsets show", GROUP=GROUP).text
    operator.act("outbox offsets reset", GROUP=GROUP, TOPIC=driver.topic)
    assert driver.positions() == {0: 3, 1: 0}
    wait_until(lambda: "ConsumerLosses" not in alerts(), 120, "the alert to end")


@of("A consumer stands still")
def test_a_group_is_not_needed_any_more(operator, driver):
    """What a relay shows of it, and its alert, ends with the command."""
    driver.meet()
    driver.send(0, 3)
    alerts = of_a_relay(driver)
    execute(driver.url, "UPDATE consumer.offsets SET updated_at = now() - interval '1 day'")
    alerts()
    # A look that took long is followed by a rest.
    wait_until(lambda: "ConsumerGone" in alerts(), 120, "the alert")
    operator.act("outbox offsets forget", GROUP=GROUP, TOPIC=driver.topic)
    wait_until(lambda: "ConsumerGone" not in alerts(), 120, "the alert to end")


@of("A consumer stands still")
def test_the_sink_is_away_and_then_locked(operator, driver, address):
    parts = urlsplit(driver.url)
    with TcpProxy("127.0.0.1", parts.port) as proxy:
        consumer = Consumer(driver, address, driver.url.replace(f":{parts.port}/", f":{proxy.port}/"))
        driver.send(0, 3)
        with consumer.running():
            wait_until(lambda: driver.positions().get(0) == 3, what="the first round")
            wait_until(lambda: "[+]servers ok" in operator.look("curl -s", CONSUMER=address).text, what="it to say so")
            proxy.stop()
            line = "[-]servers failed: waiting for "
            wait_until(lambda: line in operator.look("curl -s", CONSUMER=address).text, what="it to say so")
            assert consumer.alerts() == {"ConsumerServerAway"}
            proxy.start()
            wait_until(lambda: "[+]servers ok" in operator.look("curl -s", CONSUMER=address).text, what="it to say so")
            wait_until(lambda: consumer.alerts() == set(), what="the alert to be over")
            with forgotten(driver.url, "SELECT FROM consumer.offsets FOR UPDATE") as pid:
                driver.send(0, 4)
                waiting = wait_until(lambda: dict(consumer.reports).get("waiting for a lock"), what="the log")
                assert waiting["blocked_by"].startswith(f"session {pid} (forgetful")
                assert waiting["to_end_it"] == f"SELECT pg_terminate_backend({pid})"
                operator.execute("pg_terminate_backend", PID=pid)
            wait_until(lambda: driver.positions()[0] == 7, what="it to go on")


@of("A partition stands still")
def test_a_message_that_always_runs_into_a_limit_while_the_other_partition_moves(operator, driver):
    """The second of three messages; the sink ends its statement each time."""
    consumer = Consumer(driver)
    step_over = consumer.runner._rounds.apply

    def apply(span: OffsetRanges, generation: int) -> Counts:
        here = span.ranges.get((driver.topic, 0))
        if here is None or not here.start <= 1 < here.end:
            return step_over(span, generation)
        step_over(span.only([at for at in span.ranges if at != (driver.topic, 0)]), generation)
        failed = Interrupted(f"{driver.topic}-0: QueryCanceled: canceling statement due to statement timeout")
        failed.by_partition = {(driver.topic, 0): failed}
        raise failed

    consumer.runner._rounds.apply = apply
    consumer.runner._search = PoisonSearch()
    old = int(time.time() * 1000) - 600_000
    for part in (0, 1):
        driver.send(part, 3, timestamp=old)
    with consumer.running():
        found = wait_until(lambda: dict(consumer.reports).get("a partition stands still"), what="the log")
        assert (found["partition"], found["offset"]) == (0, 1)
        driver.rows(
            "UPDATE consumer.offsets SET updated_at = now() - interval '10 minutes' WHERE part = 0", result=False
        )
        driver.send(1, 2)
        wait_until(lambda: driver.positions() == {0: 1, 1: 5}, what="the other partition to move")
        assert consumer.alerts() == {"ConsumerPartitionStandsStill"}
        assert f"{driver.topic}-0 stands at offset 1 since " in operator.look("outbox status").text
        assert "2" in operator.look("outbox offsets show", GROUP=GROUP).text
    operator.act("outbox offsets set", GROUP=GROUP, TOPIC=driver.topic, PARTITION=0, OFFSET=2)
    consumer = Consumer(driver)
    consumer.runner.once(threading.Event())
    assert (driver.positions(), consumer.alerts()) == ({0: 3, 1: 5}, set())


@of("A consumer falls behind")
def test_a_hundred_thousand_messages_wait_in_one_partition(operator, driver):
    consumer = Consumer(driver)
    driver.send(1, 1)
    consumer.runner.once(threading.Event())
    before = consumer.samples()
    for _ in range(2):
        driver.send(0, 50_001)
    assert "ConsumerLagGrows" in consumer.alerts(before)
    shown = operator.look("outbox offsets show", GROUP=GROUP).text
    assert re.search(rf"{driver.topic}-0\b.*100[,.]?002", shown), shown
    consumer.runner.once(threading.Event())
    assert consumer.alerts() == set()


@of("A consumer is fenced")
def test_two_processes_run_one_group(operator, driver):
    """Each is started again when it has ended."""
    consumer = Consumer(driver)
    driver.send(0, 1)
    consumer.runner.once(threading.Event())
    before = consumer.samples()
    for _ in range(5):
        other, consumer = consumer, Consumer(driver)
        consumer.runner.once(threading.Event())
        with pytest.raises(Fenced, match="was taken over") as fenced:
            other.runner._round(None)
    assert consumer.alerts(before) == {"ConsumerFenced"}
    shown = operator.look("outbox consumers groups", GROUP=GROUP).text
    (owner,) = re.findall(r"generation 6, taken over by (\S+) at", shown)
    assert owner in str(fenced.value)
    # The other one is stopped.
    consumer.runner.once(threading.Event())
    assert consumer.alerts() == set()


def alarms(group: str, url: str, kafka: Any) -> set[str]:
    """Return which of the consumers' alerts fire for the group of a sink that reads the topic t."""
    registry = CollectorRegistry()
    registry.register(ConsumerMetrics(group, [], url, "consumer", {"bootstrap.servers": kafka.bootstrap_servers}))
    return {alert for alert in firing(collected(registry)) if alert.startswith("Consumer")}


@of("A message can't be applied")
def test_the_sink_refuses_messages(operator, outbox_postgres, outbox_kafka, monkeypatch):
    """What a task names becomes a dead letter; one is applied after all, one is not."""
    sink = NumbersSink(outbox_postgres.url)
    sink.begin([0, 1])
    sink.run("CREATE TABLE numbers (n int CONSTRAINT small CHECK (n < 100), place bigint)")
    report = sink.apply([(event_id(n), 100 + n) for n in range(2)])
    with psycopg.connect(sink.url) as connection:
        found = [
            DeadLetter(one, event_id(one.place[2]), b"k", b"{}", "[]", 0) for one in rejected_from(report["detail"])
        ]
        DeadLetterStore("consumer", "g").write(connection, "id", found)
    assert alarms("g", sink.url, outbox_kafka) == {"ConsumerDeadLetters"}
    listed = operator.act("outbox dead-letters list")
    assert "small" in listed
    first, second = re.findall(r"^(\d+) ", listed, re.MULTILINE)
    assert json.loads(operator.act("outbox dead-letters show", DEAD_LETTER=first))["reason"] == "failed"
    sink.run("ALTER TABLE numbers DROP CONSTRAINT small")
    operator.act("outbox dead-letters retry", DEAD_LETTER=first)
    operator.act("outbox dead-letters discard", DEAD_LETTER=second)
    assert alarms("g", sink.url, outbox_kafka) == set()
    asked = {("t", 0, 0): (int(first), "failed")}
    monkeypatch.setattr(task, "apply_rows", lambda plan, rows: task.report_retry(plan, asked, rows))
    assert (sink.apply([(event_id(0), 100)])["outcome"], sink.numbers()) == ("applied", [100])
    assert sink.run("SELECT count(*) FROM consumer.dead_letters") == [(0,)]


@of("A call is stuck")
def test_a_provider_fails(operator, sink, provider, outbox_kafka):
    """One call is made again, one as if for the first time, one is taken back."""
    external = payments(provider.url, max_attempts=2, cancel=True)
    for name in ("bad", "lost", "worse"):
        provider.tell(name, "500", "500")
    again, unknown, never = map(str, sink.reserve(external, [("bad", "k"), ("lost", "m"), ("worse", "l")]))
    sink.reserve(external, [("behind", "k")])
    assert sink.drain(external)["stuck"] == 3
    assert alarms("orders", sink.url, outbox_kafka) == {"ConsumerEffectStuck"}
    listed = operator.act("outbox external list")
    assert re.search(rf"^{again} .*stuck, may have happened, 2 attempts, 1 wait behind it: .*HTTP 500", listed, re.M)
    operator.act("outbox external retry MESSAGE_ID", MESSAGE_ID=again)
    operator.act("outbox external retry MESSAGE_ID --not-done", MESSAGE_ID=unknown)
    operator.act("outbox external cancel", MESSAGE_ID=never)
    assert alarms("orders", sink.url, outbox_kafka) == set()
    sink.drain(external)
    done = dict.fromkeys(("bad", "behind", "lost"), "confirmed")
    assert sink.states() == done | {"worse": "cancelled"}
    assert alarms("orders", sink.url, outbox_kafka) == set()


@of("A call is stuck")
def test_nobody_makes_the_calls(operator, sink, provider, outbox_kafka):
    external = payments(provider.url)
    sink.reserve(external, ["o"])
    assert alarms("orders", sink.url, outbox_kafka) == set()
    execute(sink.url, "UPDATE consumer.reservations SET next_attempt_at = now() - interval '10 minutes'")
    assert alarms("orders", sink.url, outbox_kafka) == {"ConsumerEffectOverdue"}
    assert "1 reserved" in operator.act("outbox external list")
    sink.drain(external)
    assert alarms("orders", sink.url, outbox_kafka) == set()


def test_every_step_was_taken(request):
    """Runs last; of a section only if all of its tests were to run."""
    every_step_was_taken(request)
