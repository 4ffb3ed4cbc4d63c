"""Consume → transform → produce: what is made of messages, and the whole chain of processes under kill -9."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import psycopg
import pytest
from bench import Consumer, ided
from support import Load, backlog, check, wait_until
from uuid_utils.compat import uuid7

from examples.jobs import enrich_orders
from outbox.consumer.errors import JobError
from spark_jobs import order_totals
from spark_jobs.effects.produce import Traced, derived_id

pytestmark = pytest.mark.spark

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HOP = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"


def order(seq: int, customer: str = "alice") -> bytes:
    payload = {"order_id": "o", "seq": seq, "customer": customer, "amount_cents": 10, "status": f"s{seq}"}
    return json.dumps(payload).encode()


def events(bench) -> list[tuple[Any, ...]]:
    return bench.rows("SELECT event_id, aggregate_id, event_type, payload, headers FROM outbox.events ORDER BY id")


def test_what_is_made_of_messages(bench):
    """A table and events, from one look at the sink; the trace goes on; a replay makes the same ids."""
    job = enrich_orders.job.with_topics([bench.topic])
    with psycopg.connect(bench.database.url) as connection:
        connection.execute(job.setup)
        connection.execute("INSERT INTO customers VALUES ('alice', 'gold', 'NO')")
    ids = [uuid7() for _ in range(6)]
    headers: list[list[tuple[str, bytes]]] = [
        [("ce_traceparent", TRACE.encode()), ("ce_tracestate", b"a=1"), ("traceparent", HOP.encode())],
        [("ce_traceparent", TRACE.encode()), ("ce_tracestate", b"a=1")],
        [("traceparent", b"\xff\x00 no trace"), ("tracestate", b"a=1")],
        [],
    ]
    for seq, (event_id, own) in enumerate(zip(ids, headers, strict=False), 1):
        bench.send_raw(order(seq), [*ided(event_id), *own], "o")
    bench.send_raw(order(4), [("ce_id", str(ids[3]).encode())], "o")
    bench.send_raw(order(5, "bob"), [("ce_id", str(ids[4]).encode())], "o")
    bench.send_raw(b'{"order_id": "o"}', ided(), "o")
    bench.send_raw(None, ided(), "o")
    totals = bench.once(job)
    assert (totals.applied, totals.duplicates, totals.dead) == (6, 1, 1)

    made = events(bench)
    assert [row[0] for row in made] == [derived_id(event_id, "enrich-orders") for event_id in ids[:5]]
    assert {row[1:3] for row in made} == {("o", "OrderEnriched")}
    assert [row[4] for row in made] == [
        {"traceparent": HOP},
        {"traceparent": TRACE, "tracestate": "a=1"},
        None,
        None,
        None,
    ]
    assert [row[3]["segment"] for row in made] == ["gold"] * 4 + ["unknown"]
    assert made[0][3] == json.loads(order(1)) | {"segment": "gold", "country": "NO"}
    kept = bench.rows("SELECT message_id, seq, segment, country FROM enriched_orders ORDER BY id")
    assert kept == [(ids[seq - 1], seq, "gold", "NO") for seq in range(1, 5)] + [(ids[4], 5, "unknown", "unknown")]

    # As after a restored backup: offsets and ids are those of before, and the relay has published meanwhile.
    with psycopg.connect(bench.database.url) as connection:
        for table in ("offsets", "processed_messages", "dead_letters"):
            connection.execute(f"DELETE FROM consumer.{table}")
        connection.execute("TRUNCATE outbox.events")
    bench.once(job)
    assert [row[0] for row in events(bench)] == [row[0] for row in made]

    with pytest.raises(JobError, match="field traceparent itself"):
        replace(job, schema=Traced("a int, traceparent string")).payload_columns()


class Orders(Load):
    """Load whose events are those of ``enrich_orders``."""

    def _transaction(self, connection: Any, outbox: Any, chance: random.Random, keys: list[str]) -> None:
        class Filled:
            @staticmethod
            def add(connection: Any, event: Any) -> None:
                seq = event.payload["seq"]
                payload = {"order_id": event.aggregate_id, "seq": seq, "amount_cents": 10, "status": f"s{seq}"}
                payload["customer"] = f"c{seq % 2}"
                outbox.add(connection, replace(event, payload=payload, headers={"traceparent": TRACE}))

        super()._transaction(connection, Filled, chance, keys)


@pytest.fixture
def chain(bench, outbox_kafka, tmp_path) -> Iterator[tuple[dict[str, Any], list[str], list[Consumer]]]:
    """Settings of the relay, the two topics, and the two consumers."""
    name = outbox_kafka.name("chain")
    bench.run(enrich_orders.job.setup)
    bench.run("INSERT INTO customers VALUES ('c0', 'gold', 'NO'), ('c1', 'new', 'SE')")
    topics = [outbox_kafka.create_topic(f"{name}.{kind}-events", 3) for kind in ("order", "enrichedorder")]
    settings = {
        "delivery": "exactly-once",
        "name": name,
        "topic_template": f"{name}.{{aggregate_type}}-events",
        "relay__lease_seconds": 1.0,
        "relay__batch_size": 50,
    }
    consumers = []
    for job, topic in zip(("examples.jobs.enrich_orders", "spark_jobs.order_totals"), topics, strict=True):
        folder = tmp_path / job
        folder.mkdir()
        # One core each: two of them run at a time, and partition after partition leaves more between them to be killed.
        options = ("--continuous", "--max-records", "300", "--master", "local[1,4]")
        consumers.append(Consumer(bench, folder, *options, job=f"{job}:job", topic=topic))
    yield settings, topics, consumers
    for consumer in consumers:
        consumer.kill()


@pytest.mark.chaos
def test_the_whole_chain_killed_at_every_hop(bench, chain, outbox_postgres, outbox_kafka, outbox_relay):
    """writer → relay → Spark → outbox → relay → Spark: as many events at the end as were written, in their order."""
    url = outbox_postgres.url
    settings, (orders, enriched), (enrich, total) = chain
    chance = random.Random(11)

    def effects(topic: str) -> int:
        """How many of its events have had their effect."""
        return bench.rows(f"SELECT coalesce(sum(applied), 0)::int FROM consumer.offsets WHERE topic = '{topic}'")[0][0]

    def await_more(consumer: Consumer, topic: str) -> None:
        """Wait until more events have had their effect, and then for a moment in any part of a round."""
        goal = effects(topic) + chance.randint(1, 200)
        consumer.until(lambda: effects(topic) >= goal, f"{goal} to be applied")
        # Progress is seen when a transaction has just ended.
        time.sleep(chance.uniform(0, 1))

    # Drivers take seconds to start: hundreds of events wait for each of them even so, which is more than a round.
    with Orders(url, "Order", pause=0.1) as load:
        relay = outbox_relay(**settings)
        enrich.start()
        total.start()
        relay.wait_for_log("lanes acquired")
        load.more(chance.randint(50, 150))
        relay.kill()
        relay = outbox_relay(**settings)
        # Each kill comes while events flow through every hop, at a point that nobody has chosen.
        await_more(total, enriched)
        relay.kill()
        relay = outbox_relay(**settings)
        await_more(total, enriched)
        total.kill()
        await_more(enrich, orders)
        enrich.kill()
    wait_until(lambda: backlog(url) == 0, 120, "the relay to publish the orders")
    # By the tests' own driver, which takes the groups of the killed ones over.
    bench.once(enrich_orders.job.with_topics([orders]))
    wait_until(lambda: backlog(url) == 0, 120, "the relay to publish the enriched orders")
    bench.once(order_totals.job.with_topics([enriched]))
    assert relay.running

    messages = {topic: outbox_kafka.consume(topic) for topic in (orders, enriched)}
    written = load.committed()
    assert {topic: len(found) for topic, found in messages.items()} == {orders: written, enriched: written}
    # Against what the business committed: none lost, none invented, each key in its order; and no event id twice.
    assert [check(url, found) for found in messages.values()] == [0, 0]
    with outbox_postgres.connect() as connection:
        business = dict(connection.execute("SELECT key, seq FROM business").fetchall())
        kept: dict[str, list[int]] = defaultdict(list)
        for key, seq in connection.execute("SELECT order_id, seq FROM enriched_orders ORDER BY id"):
            kept[key].append(seq)
        assert kept == {key: list(range(1, seq + 1)) for key, seq in business.items()}
        query = "SELECT order_id, events_applied, last_seq, out_of_order, total_cents FROM order_totals"
        applied = {row[0]: row[1:] for row in connection.execute(query)}
        assert applied == {key: (seq, seq, 0, 10 * seq) for key, seq in business.items()}
        # Nothing had to be dropped or put aside for that: offsets alone settle what was read again after a kill.
        query = "SELECT grp, sum(applied), sum(duplicates), sum(dead) FROM consumer.offsets GROUP BY grp ORDER BY grp"
        counted = connection.execute(query).fetchall()
        assert counted == [("enrich-orders", written, 0, 0), ("order-totals", written, 0, 0)]

    headers = {topic: [dict(message.headers()) for message in found] for topic, found in messages.items()}
    ids = {topic: {one["ce_id"].decode() for one in found} for topic, found in headers.items()}
    assert ids[enriched] == {str(derived_id(UUID(one), "enrich-orders")) for one in ids[orders]}
    assert {one["ce_traceparent"] for one in headers[enriched]} == {TRACE.encode()}
    segments = {"c0": "gold", "c1": "new"}
    for message in messages[enriched]:
        payload = json.loads(message.value())
        assert payload["segment"] == segments[payload["customer"]]
