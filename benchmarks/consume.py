"""How fast one consumer job empties a topic into a table, beside what people would otherwise run.

    python benchmarks/consume.py [--events 500000] [--rounds 2] [--only throughput | latency]

Throughput. All read the same topic (JSON of about 740 bytes, 5,000 keys, 4 partitions) into tables of the same columns,
in one session with local[2]:

- dedup: our consumer as it comes: each event's row, id and offset in one transaction.
- without: the same without remembering ids: what dedup costs.
- append: Spark's own way, foreachBatch and a JDBC append: batchsize 10,000, reWriteBatchedInserts. May repeat rows.
- tuned: the same with our options for Kafka's reader.
- loop: confluent-kafka and psycopg, COPY and a commit each 10,000 messages, in one process. May repeat rows.

Latency. ``--continuous`` with dedup, warm: from the timestamp of a message, which its producer gave it, to the COMMIT
of its row (track_commit_timestamp); for rounds of 10 messages, and at 1,000 messages a second. Then what an empty
topic costs: transactions and connections a second.

The ratios are the figures; rows a second depend on the machine. The reader is warmed up on other messages first.
``python benchmarks/consume.py lock`` writes jars.lock, the JDBC driver's checksum, anew.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# relay.py beside this file is called like the package: the folder above comes first.
sys.path.insert(0, str(Path(__file__).parents[1]))

import orjson
import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition
from psycopg import sql
from rich.console import Console
from rich.table import Table
from uuid_utils import uuid7

from outbox._app import migrate as db
from outbox.sandbox import jars
from outbox.sandbox.kafka import KafkaCluster
from outbox.sandbox.postgres import PostgresServer
from outbox.testing.fixtures import Topics
from spark_jobs.dedup.strategies import Dedup
from spark_jobs.driver.runner import Options, Runner
from spark_jobs.effects.mapped import Insert
from spark_jobs.job import ConsumerJob
from spark_jobs.spark import session as spark_session
from spark_jobs.spark.installed import connector_jars

LOCK = Path(__file__).with_name("jars.lock")
PARTITIONS = 4
KEYS = 5_000
SCHEMA = "order_id string, seq int, customer string, amount_cents long, status string, note string"
COLUMNS = "order_id text, seq int, customer text, amount_cents bigint, status text, note text"
NAMES = ["order_id", "seq", "customer", "amount_cents", "status", "note"]


class Forgetful(Dedup):
    """Dedup that remembers nothing: only to measure what dedup costs."""

    remembers = False


@dataclass
class Place:
    """Where everything is."""

    spark: Any
    url: str
    jdbc: str
    kafka: str


def fill(kafka: str, topic: str, events: int) -> None:
    """Write the events, as a relay would: key, JSON, headers."""
    producer = Producer({"bootstrap.servers": kafka, "linger.ms": 20, "compression.type": "lz4", "acks": "all"})
    pad = "the quick brown fox jumps over the lazy dog " * 14
    for number in range(events):
        order = f"order-{number % KEYS}"
        event = {
            "order_id": order,
            "seq": number // KEYS,
            "customer": f"customer-{number % 977}",
            "amount_cents": number % 10_000,
            "status": "placed",
            "note": pad,
        }
        headers: Any = [("ce_id", str(uuid7()).encode()), ("ce_type", b"OrderPlaced"), ("ce_source", b"/shop")]
        while True:
            try:
                producer.produce(topic, orjson.dumps(event), order, headers=headers)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(120) == 0


def ours(place: Place, topic: str, table: str, strategy: Dedup) -> float:
    """Run our consumer once."""
    job = ConsumerJob(group=table, topics=[topic], schema=SCHEMA, effect=Insert(table), strategy=strategy)
    runner = Runner(place.spark, job, Options(place.url, {"bootstrap.servers": place.kafka}), lambda *_: None)
    started = time.perf_counter()
    runner.once(threading.Event())
    return time.perf_counter() - started


def append(place: Place, topic: str, table: str, reader: Mapping[str, str]) -> float:
    """Run Spark's own stream until all is there."""
    from pyspark.sql import functions as F  # noqa: N812

    def write(rows: Any, _: int) -> None:
        rows.write.format("jdbc").options(
            url=place.jdbc, dbtable=table, driver="org.postgresql.Driver", batchsize=10_000
        ).mode("append").save()

    folder = tempfile.mkdtemp()
    started = time.perf_counter()
    rows = (
        place.spark.readStream.format("kafka")
        .options(
            **{f"kafka.{name}": value for name, value in reader.items()},
            **{
                "kafka.bootstrap.servers": place.kafka,
                "kafka.isolation.level": "read_committed",
                "subscribe": topic,
                "startingOffsets": "earliest",
                "maxOffsetsPerTrigger": 200_000,
            },
        )
        .load()
        .select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("parsed"))
        .select("parsed.*")
    )
    query = rows.writeStream.foreachBatch(write).option("checkpointLocation", folder).trigger(availableNow=True).start()
    query.awaitTermination()
    seconds = time.perf_counter() - started
    shutil.rmtree(folder, ignore_errors=True)
    return seconds


def loop(place: Place, topic: str, table: str, events: int) -> float:
    """Read, COPY, commit; then commit the offsets to Kafka."""
    consumer = Consumer(
        {
            "bootstrap.servers": place.kafka,
            "group.id": table,
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "fetch.min.bytes": 100_000,
        }
    )
    listed = sql.SQL(", ").join(map(sql.Identifier, NAMES))
    copy_into = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(table), listed)
    started = time.perf_counter()
    consumer.assign([TopicPartition(topic, part, 0) for part in range(PARTITIONS)])
    done = 0
    with psycopg.connect(place.url) as connection:
        while done < events:
            messages = consumer.consume(10_000, timeout=1)
            with connection.cursor().copy(copy_into) as copy:
                for message in messages:
                    assert message.error() is None
                    event = orjson.loads(message.value() or b"")
                    copy.write_row([event[name] for name in NAMES])
            connection.commit()
            if messages:
                consumer.commit(asynchronous=False)
            done += len(messages)
    seconds = time.perf_counter() - started
    consumer.close()
    return seconds


def latency(place: Place, topic: str) -> dict[str, Any]:
    """Measure a driver that runs all the time. Returns milliseconds, and what an idle second costs."""
    stop = threading.Event()
    effect = Insert("latency", {"n": "n", "sent": "message_time"})
    job = ConsumerJob(group="latency", topics=[topic], schema="n long", effect=effect)
    runner = Runner(place.spark, job, Options(place.url, {"bootstrap.servers": place.kafka}), lambda *_: None)
    thread = threading.Thread(target=runner.continuous, args=(stop,))
    producer = Producer({"bootstrap.servers": place.kafka, "linger.ms": 0, "acks": "all"})
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        for number in range(sent, sent + count):
            headers: Any = [("ce_id", str(uuid7()).encode())]
            producer.produce(topic, b'{"n":%d}' % number, b"%d" % (number % KEYS), headers=headers)
        sent += count

    with psycopg.connect(place.url, autocommit=True) as connection:
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


def main() -> None:
    """Run, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=["throughput", "latency"])
    options = parser.parse_args()
    driver = jars.fetch("jdbc", lock=LOCK)
    spark = spark_session.start("bench", jars=[*connector_jars(), *driver])
    settings = {"track_commit_timestamp": "on"}
    others = ("append", "tuned", "without", "loop")
    table = Table("round", "dedup", "without", "append", "tuned", "loop", *(f"dedup/{other}" for other in others))
    ratios: dict[str, list[float]] = defaultdict(list)
    with PostgresServer(settings=settings) as server, KafkaCluster() as cluster:
        url = server.create_database("bench")
        db.upgrade_consumer(url)
        host = psycopg.conninfo.conninfo_to_dict(url)
        jdbc = (
            f"jdbc:postgresql://{host['host']}:{host['port']}/{host['dbname']}?user={host['user']}"
            "&reWriteBatchedInserts=true"
        )
        place = Place(spark, url, jdbc, cluster.bootstrap_servers)
        topics = Topics(cluster.bootstrap_servers)
        warm, topic = topics.create_topic("warm", PARTITIONS), topics.create_topic("events", PARTITIONS)
        if options.only != "throughput":
            found = latency(place, topics.create_topic("latency", PARTITIONS))
            print(orjson.dumps(found).decode(), flush=True)
        if options.only == "latency":
            spark.stop()
            return
        fill(place.kafka, warm, 50_000)
        fill(place.kafka, topic, options.events)

        def run(name: str, of: str, events: int, way: Callable[[str, str], float]) -> float:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f"CREATE TABLE {name} ({COLUMNS})")
                seconds = way(of, name)
                assert connection.execute(f"SELECT count(*) FROM {name}").fetchone() == (events,)
                connection.execute(f"DROP TABLE {name}")
                connection.execute("TRUNCATE consumer.processed_messages")
                connection.execute("CHECKPOINT")
            return seconds

        ways: dict[str, Callable[[str, str], float]] = {
            "dedup": lambda of, name: ours(place, of, name, Dedup()),
            "without": lambda of, name: ours(place, of, name, Forgetful()),
            "append": lambda of, name: append(place, of, name, {}),
            "tuned": lambda of, name: append(place, of, name, spark_session.READER_OPTIONS),
            "loop": lambda of, name: loop(place, of, name, 50_000 if of == warm else options.events),
        }
        for name, way in ways.items():
            run(f"warm_{name}", warm, 50_000, way)
        for number in range(1, options.rounds + 1):
            seconds = {}
            for name in list(ways) if number % 2 else reversed(ways):
                seconds[name] = run(f"{name}_{number}", topic, options.events, ways[name])
            rates = {name: options.events / spent for name, spent in seconds.items()}
            for other in others:
                ratios[other].append(rates["dedup"] / rates[other])
            table.add_row(
                str(number),
                *(f"{rates[name]:,.0f}/s" for name in ways),
                *(f"{ratios[other][-1]:.2f}" for other in others),
            )
    spark.stop()
    Console(width=140).print(table)
    medians = {f"dedup/{other}": round(statistics.median(found), 2) for other, found in ratios.items()}
    print(orjson.dumps({"events": options.events, "median_ratios": medians}).decode())


if __name__ == "__main__":
    if sys.argv[1:] == ["lock"]:
        heading = (
            "The JDBC driver that a consumer is measured against: Maven coordinates, SHA-256, size in bytes.",
            "Written by: python benchmarks/consume.py lock",
        )
        LOCK.write_text(jars.resolve({"jdbc": (False, ("org.postgresql:postgresql:42.7.8",))}, heading))
    else:
        main()
