"""How long a message takes from its producer to COMMIT, and what an empty topic costs."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import psycopg
from confluent_kafka import Producer
from uuid_utils import uuid7

from benchmarks.consuming.stage import KEYS, Stage
from spark_jobs.driver.options import Options
from spark_jobs.driver.runner import Runner
from spark_jobs.effects.mapped import Insert
from spark_jobs.job import ConsumerJob


def latency(stage: Stage, topic: str) -> dict[str, Any]:
    """Measure a driver that runs all the time. Returns milliseconds, and what an idle second costs."""
    stop = threading.Event()
    effect = Insert("latency", {"n": "n", "sent": "message_time"})
    job = ConsumerJob(group="latency", topics=[topic], schema="n long", effect=effect)
    runner = Runner(stage.spark, job, Options(stage.url, {"bootstrap.servers": stage.kafka}), lambda *_: None)
    thread = threading.Thread(target=runner.continuous, args=(stop,))
    producer = Producer({"bootstrap.servers": stage.kafka, "linger.ms": 0, "acks": "all"})
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        for number in range(sent, sent + count):
            headers: Any = [("ce_id", str(uuid7()).encode())]
            producer.produce(topic, b'{"n":%d}' % number, b"%d" % (number % KEYS), headers=headers)
        sent += count

    with psycopg.connect(stage.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE latency (n bigint, sent timestamptz)")

        def arrived() -> None:
            while connection.execute("SELECT count(*) FROM latency").fetchone() != (sent,):
                time.sleep(0.01)

        def taken(after: int) -> list[float]:
            query = (
                "SELECT extract(epoch FROM max(pg_xact_commit_timestamp(xmin)) - sent)::float8 * 1000 FROM latency "
                "WHERE n >= %s GROUP BY n, sent ORDER BY 1"
            )
            return [row[0] for row in connection.execute(query, (after,))]

        def counted() -> tuple[int, int]:
            row = connection.execute(
                "SELECT xact_commit + xact_rollback, sessions FROM pg_stat_database WHERE datname = current_database()"
            ).fetchone()
            assert row is not None
            return int(row[0]), int(row[1])

        thread.start()
        for _ in range(5):
            send(200)
            producer.flush(30)
            arrived()
        small: list[float] = []
        for _ in range(40):
            first = sent
            send(10)
            producer.flush(30)
            arrived()
            small.append(taken(first)[-1])
            time.sleep(0.3)
        first, began = sent, time.perf_counter()
        while (passed := time.perf_counter() - began) < 30:
            send(max(0, int(passed * 1000) - (sent - first)))
            producer.poll(0)
            time.sleep(0.002)
        producer.flush(30)
        arrived()
        steady = taken(first + 2000)
        time.sleep(3)
        before, began = counted(), time.perf_counter()
        time.sleep(20)
        after, seconds = counted(), time.perf_counter() - began
        stop.set()
        thread.join()
        connection.execute("DROP TABLE latency")
    small.sort()
    return {
        "ten_p50_ms": round(statistics.median(small), 1),
        "ten_max_ms": round(small[-1], 1),
        "steady_p50_ms": round(statistics.median(steady), 1),
        "steady_p99_ms": round(steady[len(steady) * 99 // 100], 1),
        "idle_transactions_per_second": round((after[0] - before[0]) / seconds, 1),
        "idle_connections_per_second": round((after[1] - before[1]) / seconds, 1),
    }
