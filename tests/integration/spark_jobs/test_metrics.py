"""The consumers' metrics over real HTTP, from real Postgres and real Kafka; no Spark."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from reconcile_support import other_program
from support import wait_until

from outbox._app.prometheus import serve
from outbox.errors import ConfigurationError
from outbox.sandbox._ports import free_ports
from relay.config import load
from spark_jobs import metrics as consumer_metrics
from spark_jobs.cli.consume import _metrics
from spark_jobs.health import ConsumerHealth
from spark_jobs.job import ConsumerJob
from spark_jobs.metrics import ConsumerMetrics

NOWHERE = "127.0.0.1:1"


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Return the samples by name and values of labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        (
            sample.name.removeprefix("outbox_consumer_"),
            *(sample.labels[name] for name in ("group", "topic", "partition", "le") if name in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def served(outbox_postgres, outbox_kafka) -> Iterator[Any]:
    def start(topics: list[str], url: str | None = None, servers: str | None = None) -> tuple[ConsumerMetrics, int]:
        kafka = {"bootstrap.servers": servers or outbox_kafka.bootstrap_servers}
        metrics = ConsumerMetrics("g", topics, url or outbox_postgres.url, "consumer", kafka)
        registry = CollectorRegistry()
        registry.register(metrics)
        (port,) = free_ports(1)
        serve(f"127.0.0.1:{port}", registry, "consumer.metrics_address")
        return metrics, port

    return start


def test_everything_there_is(outbox_postgres, outbox_kafka, served, monkeypatch):
    # Nobody is away here: however long an answer takes, it is there.
    monkeypatch.setattr(consumer_metrics, "_PATIENCE", 60.0)
    topic = outbox_kafka.create_topic(outbox_kafka.name("orders"), 2)
    producer = Producer({"bootstrap.servers": outbox_kafka.bootstrap_servers, "linger.ms": 0})
    for _ in range(5):
        producer.produce(topic, b"x", partition=0)
    producer.produce(topic, b"x", partition=1)
    assert producer.flush(30) == 0
    open_transaction = other_program(outbox_kafka, topic, 0, 0, 0)

    metrics, port = served([topic])
    # Nobody has taken the group over yet.
    first = scrape(port)
    assert (first["postgres_up", "g"], first["kafka_up", "g"], first["build_info", "g"]) == (1, 1, 1)
    assert first["lag_messages", "g", topic, "0"] == 5
    assert not any(name[0] in {"generation", "last_round_timestamp_seconds"} for name in first)

    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("INSERT INTO consumer.groups (grp, owner, generation) VALUES ('g', 'me', 7), ('h', 'you', 9)")
        admin.execute(
            "INSERT INTO consumer.offsets (grp, topic, part, topic_id, next_offset, generation, applied, duplicates, "
            "dead) VALUES ('g', %(topic)s, 0, 'T', 3, 7, 20, 3, 2), ('h', %(topic)s, 0, 'T', 1, 9, 1, 1, 1)",
            {"topic": topic},
        )
        admin.execute(
            "INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_headers, "
            "message_time, reason, error, state) SELECT g, %s, 'T', 0, n, '[]', now(), 'failed', '', "
            "CASE n WHEN 3 THEN 'retry' ELSE 'dead' END FROM generate_series(1, 3) AS n, unnest('{g,h}'::text[]) AS g",
            (topic,),
        )
        admin.execute(
            "INSERT INTO consumer.reservations (grp, name, message_id, topic, part, message_offset, state, request, "
            "settled_at, next_attempt_at) SELECT 'g', 'n', gen_random_uuid(), %s, 0, 1, s, '{}', "
            "CASE s WHEN 'confirmed' THEN now() END, "
            "now() - CASE s WHEN 'calling' THEN 1 ELSE 2 END * interval '1 hour' "
            "FROM unnest('{calling,stuck,confirmed}'::text[]) AS s",
            (topic,),
        )
    for seconds in (0.3, 0.3, 400):
        metrics.observe("round", {"read": 25, "round_seconds": seconds})
    metrics.observe("planned", {"messages": 3})
    samples = scrape(port)
    place = ("g", topic, "0")
    ((moved,),) = outbox_postgres.connect().execute(
        "SELECT extract(epoch FROM updated_at)::float8 FROM consumer.offsets WHERE grp = 'g'"
    )
    assert {name: samples[(name, *place)] for name in {name[0] for name in samples if name[1:] == place}} == {
        "last_progress_timestamp_seconds": pytest.approx(moved),
        "next_offset": 3,
        "log_end_offset": 5,
        "lag_messages": 2,
        "uncommitted_messages": 3,
        "messages_applied_total": 20,
        "messages_duplicate_total": 3,
        "messages_dead_total": 2,
        "dead_letters_waiting": 2,
        "dead_letters_retrying": 1,
        "reservations_unsettled": 2,
        "reservations_stuck": 1,
        "reservations_overdue_seconds": pytest.approx(3_600, abs=60),
    }
    # Partition 1 was never read.
    assert samples["lag_messages", "g", topic, "1"] == 1
    assert (samples["generation", "g"], samples["messages_read_total", "g"]) == (7, 25)
    buckets = {name[2]: value for name, value in samples.items() if name[0] == "round_seconds_bucket"}
    assert (buckets["0.25"], buckets["0.5"], buckets["300.0"], buckets["+Inf"]) == (0, 2, 2, 3)
    assert samples["round_seconds_count", "g"] == 3
    assert samples["round_seconds_sum", "g"] == pytest.approx(400.6)
    assert samples["last_round_timestamp_seconds", "g"] > 1.7e9
    # Nothing of other groups.
    assert {name[1] for name in samples} == {"g"}
    open_transaction.abort_transaction(30)
    wait_until(lambda: scrape(port)["uncommitted_messages", "g", topic, "0"] == 0, 30, "the transaction to end")


def test_servers_that_are_away(outbox_postgres, outbox_kafka, served, monkeypatch):
    """Their figures are left out, the others are there; and nobody waits longer than Prometheus does."""
    monkeypatch.setattr(consumer_metrics, "_PATIENCE", 60.0)
    topic = outbox_kafka.create_topic(outbox_kafka.name("orders"), 1)
    _, port = served([topic], url=f"postgresql://{NOWHERE}/x")
    samples = scrape(port)
    assert (samples["postgres_up", "g"], samples["kafka_up", "g"]) == (0, 1)
    assert samples["log_end_offset", "g", topic, "0"] == 0
    assert not any(name[0] in {"lag_messages", "next_offset"} for name in samples)

    metrics, port = served([topic], servers=NOWHERE)
    metrics.observe("round", {"read": 1, "round_seconds": 1.0})
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("INSERT INTO consumer.groups (grp, owner) VALUES ('g', 'me')")
    # This Kafka is silent for ever, and Postgres has to answer within the same time.
    monkeypatch.setattr(consumer_metrics, "_PATIENCE", 2.0)
    for _ in range(2):
        samples = scrape(port)
        assert (samples["postgres_up", "g"], samples["kafka_up", "g"]) == (1, 0)
        assert (samples["generation", "g"], samples["messages_read_total", "g"]) == (1, 1)
        assert not any(name[0] == "lag_messages" for name in samples)


def test_a_port_that_is_taken(served):
    _, port = served([])
    with pytest.raises(ConfigurationError, match=f"OUTBOX_CONSUMER__METRICS_ADDRESS=127.0.0.1:{port}: "):
        serve(f"127.0.0.1:{port}", CollectorRegistry(), "OUTBOX_CONSUMER__METRICS_ADDRESS")


def test_the_outbox_is_a_label_if_a_consumer_knows_it(outbox_postgres, outbox_kafka, monkeypatch):
    """Groups of two outboxes may have the same name. Without OUTBOX_NAME it may read the topics of any outbox."""
    # That of a topic that does not exist is waited for.
    monkeypatch.setattr(consumer_metrics, "_PATIENCE", 0.5)
    for given in ({"name": "orders"}, {}):
        (port,) = free_ports(1)
        settings = load(
            database_url=outbox_postgres.url,
            kafka={"bootstrap.servers": outbox_kafka.bootstrap_servers},
            consumer={"metrics_address": f"127.0.0.1:{port}"},
            **given,
        )
        assert _metrics(settings, ConsumerJob(group="g", topics=["t"], effect="SELECT 1"), ConsumerHealth(300.0))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            outboxes = {sample.labels.get("outbox") for family in families for sample in family.samples}
        assert outboxes == {given.get("name")}
