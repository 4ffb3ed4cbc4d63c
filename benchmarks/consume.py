"""Measure a consumer job beside Spark's JDBC append and a loop, on servers of its own.

    python benchmarks/consume.py [--only throughput | latency] [--ways TEXT …] [--list] [--rounds N] [--events N]
                                 [--json FILE]

Throughput. Each way empties the same topic (500,000 events of about 740 bytes of JSON, 5,000 keys, 4 partitions) into
an empty table, in one Spark session with local[2]. It does so once in each round, in changing order, after a warm-up on
other messages; the rows are checked. ``--list`` explains the ways; ``--ways`` takes their names, or parts of names. A
way that fails is left out of the table. Compare the ratios: rows a second depend on the machine.

Latency. ``--continuous`` with dedup, warm: from the producer's timestamp of a message to the COMMIT of its row
(track_commit_timestamp), for rounds of 10 messages and at 1,000 messages a second. Then the transactions and
connections a second that an empty topic costs.

The exit status is 1 after a failure.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# relay.py beside this file is called like the package: the folder above comes first.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path += [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "support")]

import connector
import orjson
import psycopg
from peers.connect import DEBEZIUM, LOCK
from psycopg import sql
from rich.console import Console
from rich.table import Table

from benchmarks.consuming import ways
from benchmarks.consuming.latency import latency
from benchmarks.consuming.stage import PARTITIONS, Stage, fill
from benchmarks.consuming.ways import Way
from benchmarks.harness.choice import choose
from benchmarks.harness.servers import BenchError
from outbox._app import migrate as db
from outbox.sandbox import jars
from outbox.sandbox.kafka import KafkaCluster
from outbox.sandbox.postgres import PostgresServer
from outbox.testing.fixtures import Topics
from spark_jobs.spark import session as spark_session

WARM = 50_000


def measure(stage: Stage, way: Way, number: int) -> float:
    """Run a way once, with number 0 over the messages to warm up on. Returns seconds. Raises BenchError."""
    table = f"{way.name.translate(str.maketrans({',': '', ' ': '_'}))}_{number}"
    warm = number == 0
    events = stage.warm if warm else stage.events
    names = {"table": sql.Identifier(table)}
    with psycopg.connect(stage.url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE TABLE {table} (" + way.sink.columns + ")").format(**names))  # type: ignore[arg-type]
        seconds = way.run(stage, stage.topics[warm], table, events)
        found = connection.execute(sql.SQL(way.sink.look).format(**names)).fetchone()  # type: ignore[arg-type]
        if found != (expected := way.sink.expected(events)):
            raise BenchError(f"{way.name}: {found} stands in its table, and not {expected}")
        connection.execute(sql.SQL("DROP TABLE {table}").format(**names))
        connection.execute("TRUNCATE consumer.processed_messages")
        connection.execute("CHECKPOINT")
    return seconds


def run_all(
    console: Console, stage: Stage, chosen: list[Way], rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Run all ways in all rounds. Returns the rates of each way, and why others failed."""
    rates: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, str] = {}
    # Round 0 is to warm up.
    for number in range(rounds + 1):
        for way in chosen if number % 2 else reversed(chosen):
            if way.name in failed:
                continue
            try:
                seconds = measure(stage, way, number)
            except Exception as error:  # noqa: BLE001  the others still run; it is shown, and in the exit status
                failed[way.name] = str(error) or repr(error)
                console.print(f"{number}: {way.name}: FAILED: {failed[way.name]}", markup=False)
                continue
            if number:
                rates[way.name].append(stage.events / seconds)
                console.print(f"{number}: {way.name}: {rates[way.name][-1]:,.0f}/s [{seconds:.1f} s]", markup=False)
    return rates, failed


def throughput(console: Console, stage: Stage, topics: Topics, chosen: list[Way], rounds: int) -> dict[str, Any]:
    """Measure the ways; print a table. Returns the figures."""
    for warm, name, events in ((True, "warm", stage.warm), (False, "events", stage.events)):
        stage.topics[warm] = topics.create_topic(topics.name(name), PARTITIONS)
        fill(stage.kafka, stage.topics[warm], events)
    rates, failed = run_all(console, stage, chosen, rounds)
    chosen = [way for way in chosen if way.name not in failed]
    if not chosen:
        raise BenchError("every way failed")
    base = ways.BASE if ways.BASE in rates else chosen[0].name
    table = Table("way", "once", *(f"round {number + 1}" for number in range(rounds)), "median", f"{base} ÷ it")
    ratios: dict[str, float] = {}
    for way in chosen:
        found = rates[way.name]
        ratios[way.name] = round(statistics.median(a / b for a, b in zip(rates[base], found, strict=True)), 2)
        shown = [f"{rate:,.0f}/s" for rate in [*found, statistics.median(found)]]
        table.add_row(way.name, "yes" if way.once else "no", *shown, f"{ratios[way.name]:.2f}")
    console.print(table)
    for way in chosen:
        console.print(f"{way.name}: {way.about}", markup=False, soft_wrap=True)
    return {
        "events": stage.events,
        "rounds": rounds,
        "rates": {name: [round(rate) for rate in found] for name, found in rates.items()},
        f"{base}_divided_by": ratios,
        "failed": failed,
    }


def main() -> int:
    """Run the measurements. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["throughput", "latency"])
    parser.add_argument(
        "--ways", nargs="+", default=[], metavar="TEXT", help="only ways with these names, or parts of them"
    )
    parser.add_argument("--rounds", type=int, default=2, help="2")
    parser.add_argument("--events", type=int, default=500_000, help="500,000")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true", help="print the ways, and exit")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    only = options.only or ["throughput", "latency"]
    if options.list:
        for way in ways.ALL:
            console.print(f"{way.name}: {way.about}", markup=False, soft_wrap=True)
        return 0
    for text in options.ways:
        if not choose(ways.ALL, [text]):
            parser.error(f"--ways: no way is called {text!r}; --list prints the names")
    found: dict[str, Any] = {}
    with ExitStack() as open_:
        # The time of a transaction's end is what latency is measured by.
        server = open_.enter_context(PostgresServer(settings={"track_commit_timestamp": "on"}))
        cluster = open_.enter_context(KafkaCluster(heap="1g"))
        topics = open_.enter_context(Topics(cluster.bootstrap_servers))
        url = server.create_database("bench")
        db.upgrade_consumer(url)
        driver = [jar for jar in jars.fetch(DEBEZIUM, lock=LOCK) if "-postgresql-" in jar.name]
        needed = ",".join(map(str, [*connector.fetch(), *driver]))
        spark = spark_session.start("bench", conf={"spark.jars": needed})
        open_.callback(spark.stop)
        stage = Stage(spark, url, cluster.bootstrap_servers, options.events, WARM)
        if "latency" in only:
            found["latency"] = latency(stage, topics.create_topic(topics.name("latency"), PARTITIONS))
            console.print(orjson.dumps(found["latency"]).decode(), markup=False)
        if "throughput" in only:
            found["throughput"] = throughput(console, stage, topics, choose(ways.ALL, options.ways), options.rounds)
    print(orjson.dumps(found).decode())
    if options.json:
        options.json.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    return 1 if found.get("throughput", {}).get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
