"""Measure a consumer job beside Spark's JDBC append, Debezium's JDBC sink and a loop, on servers of its own.

    python benchmarks/consume.py [--only throughput | latency | partitions] [--ways TEXT …] [--list] [--rounds N]
                                 [--events N] [--partitions N] [--json FILE]

``--only`` chooses among three measurements; without it the first two run.

Throughput. Each way empties the same topic (500,000 events of about 740 bytes of JSON, 5,000 keys, 4 partitions) into
an empty table, in one Spark session with local[2]. It does so once in each round, in changing order, after a warm-up on
other messages; the rows are checked. ``--list`` explains the ways; ``--ways`` takes their names, or parts of names. A
way that fails is left out of the table. Compare the ratios: rows a second depend on the machine.

Latency. ``--continuous`` with dedup, warm: from the producer's timestamp of a message to the COMMIT of its row
(track_commit_timestamp), for rounds of 10 messages and at 1,000 messages a second. Then the transactions and
connections a second that an empty topic costs.

Partitions. `outbox consume --once` over 5,000,000 events in 500 partitions: the memory of the driver's JVM, of its
Python and of the workers by quarter of the run, and the most sessions in Postgres at a time. The ways are the jobs
``plain`` and ``transform``. More sessions than the cores and two, or memory that grows by a quarter from the second
quarter of the run to the last, is a failure.

The exit status is 1 after a failure. ``python benchmarks/consume.py lock`` writes jars.lock.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# relay.py beside this file is called like the package: the folder above comes first.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import connector
import orjson
import psycopg
from psycopg import sql
from rich.console import Console
from rich.table import Table

from benchmarks.consuming import debezium, partitions, ways
from benchmarks.consuming.latency import latency
from benchmarks.consuming.partitions import Job
from benchmarks.consuming.stage import PARTITIONS, Stage, fill, flat, nested
from benchmarks.consuming.ways import Way
from benchmarks.harness import report
from benchmarks.harness.choice import choose
from benchmarks.harness.results import Target, at_least, at_most
from benchmarks.harness.servers import BenchError
from outbox._app import migrate as db
from outbox.sandbox import jars
from outbox.sandbox.kafka import KafkaCluster
from outbox.sandbox.postgres import PostgresServer
from outbox.testing.fixtures import Topics
from release.jars import resolve
from spark_jobs.spark import session as spark_session

LISTED: dict[str, Sequence[Way | Job]] = {"throughput": ways.ALL, "partitions": partitions.JOBS}
LOCK = debezium.LOCK
WARM = 50_000
THROUGHPUT_EVENTS = 500_000
PARTITIONS_EVENTS = 5_000_000
MOST_GROWTH = 0.25


def measure(stage: Stage, way: Way, number: int) -> float:
    """Run a way once, with number 0 over the messages to warm up on. Returns seconds. Raises BenchError."""
    table = f"{way.name.translate(str.maketrans({',': '', ' ': '_'}))}_{number}"
    warm = number == 0
    events = stage.warm if warm else stage.events
    topic = stage.topics[warm, way.nested]
    names = {"table": sql.Identifier(table)}
    with psycopg.connect(stage.url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE TABLE {table} (" + way.sink.columns + ")").format(**names))  # type: ignore[arg-type]
        seconds = way.run(stage, topic, table, events)
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
    for is_nested in {way.nested for way in chosen}:
        for warm, events in ((True, stage.warm), (False, stage.events)):
            name = f"{'warm' if warm else 'timed'}-{'nested' if is_nested else 'flat'}"
            topic = topics.create_topic(topics.name(name), PARTITIONS)
            stage.topics[warm, is_nested] = topic
            fill(stage.kafka, topic, events, nested if is_nested else flat)
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
    kept = {way.name: rates[way.name] for way in chosen}
    report.show_targets(console, [_times(kept, *goal) for goal in ways.GOALS if {*goal[:2]} <= kept.keys()])
    return {
        "events": stage.events,
        "rounds": rounds,
        "rates": {name: [round(rate) for rate in found] for name, found in rates.items()},
        f"{base}_divided_by": ratios,
        "failed": failed,
    }


def _times(rates: dict[str, list[float]], name: str, other: str, goal: float) -> Target:
    """Return the target that a way is so many times as fast as another, by rounds."""
    found = [mine / theirs for mine, theirs in zip(rates[name], rates[other], strict=True)]
    return at_least(f"{name}: times {other}", found, goal)


def wide(console: Console, stage: Stage, topics: Topics, parts: int, jobs: list[Job]) -> tuple[dict[str, Any], bool]:
    """Measure very many partitions; print tables. Returns the figures, and whether memory and sessions are bounded."""
    topic = topics.create_topic(topics.name("partitions"), parts)
    fill(stage.kafka, topic, stage.events, partitions.event, parts)
    by_job: dict[str, Any] = {}
    good = True
    for job in [each.name for each in jobs]:
        folder = stage.folder / job
        folder.mkdir()
        figures, sampled = partitions.consume(stage.url, stage.kafka, topic, folder, job)
        with psycopg.connect(stage.url, autocommit=True) as connection:
            row = connection.execute("SELECT count(*), count(DISTINCT n) FROM wide").fetchone()
            if row != (stage.events, stage.events):
                raise BenchError(f"partitions, {job}: {row} rows and different ones, and not {stage.events}")
            for table in ("wide", "consumer.processed_messages"):
                connection.execute(f"TRUNCATE {table}")
            connection.execute("DELETE FROM consumer.groups")
        memory = partitions.quarters(sampled)
        sessions = partitions.most_sessions(sampled)
        table = Table(f"{job}: MB resident", *(f"quarter {number}" for number in range(1, 5)), "last ÷ second")
        growth = {role: partitions.grown(spread) for role, spread in memory.items()}
        for role, spread in memory.items():
            cells = [f"{low:,.0f} / {middle:,.0f} / {high:,.0f}" for low, middle, high in spread]
            table.add_row(role, *cells, f"{1 + growth[role]:.2f}")
        console.print(table)
        rounds = figures["rounds"]
        console.print(
            f"{job}: {stage.events:,} events in {parts} partitions, {figures['rows_per_second']:,.0f}/s, {rounds} "
            f"rounds of {stage.events / rounds:,.0f} events; most sessions at a time: {sessions}",
            markup=False,
        )
        if sessions["all"] > partitions.CORES + 2:
            console.print(f"{job}: more sessions than {partitions.CORES} cores and two", markup=False)
            good = False
        for role, more in growth.items():
            if more > MOST_GROWTH:
                console.print(f"{job}: {role} grew by {more:.0%}", markup=False)
                good = False
        by_job[job] = {"figures": figures, "memory": memory, "sessions": sessions}
    return {"events": stage.events, "partitions": parts, "jobs": by_job}, good


def show_names(console: Console) -> None:
    """Print the ways of the measurements that have several."""
    for measurement, each in LISTED.items():
        console.print(measurement)
        for way in each:
            console.print(f"    {way.name}: {way.about}", markup=False, soft_wrap=True)


def main() -> int:
    """Run the measurements. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["throughput", "latency", "partitions"])
    parser.add_argument(
        "--ways", nargs="+", default=[], metavar="TEXT", help="only ways with these names, or parts of them"
    )
    parser.add_argument("--rounds", type=int, default=2, help="2")
    parser.add_argument("--events", type=int, help="500,000; for partitions 5,000,000")
    parser.add_argument("--partitions", type=int, default=500, help="500")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true", help="print the ways, and exit")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    only = options.only or ["throughput", "latency"]
    if options.list:
        show_names(console)
        return 0
    for text in options.ways:
        if not any(choose(LISTED[measurement], [text]) for measurement in LISTED if measurement in only):
            parser.error(f"--ways: no way is called {text!r}; --list prints the names")
    chosen, jobs = choose(ways.ALL, options.ways), choose(partitions.JOBS, options.ways)
    found: dict[str, Any] = {}
    good = True
    folder = Path(tempfile.mkdtemp(prefix="outbox-bench-"))
    with ExitStack() as open_:
        # The time of a transaction's end is what latency is measured by.
        server = open_.enter_context(PostgresServer(settings={"track_commit_timestamp": "on"}))
        cluster = open_.enter_context(KafkaCluster(heap="1g"))
        topics = open_.enter_context(Topics(cluster.bootstrap_servers))
        url = server.create_database("bench")
        db.upgrade_consumer(url)
        stage = Stage(None, url, cluster.bootstrap_servers, folder, options.events or THROUGHPUT_EVENTS, WARM)
        if set(only) - {"partitions"}:
            needed = [*connector.fetch(), *jars.fetch("jdbc", lock=LOCK)]
            stage.spark = spark_session.start("bench", conf={"spark.jars": ",".join(map(str, needed))})
            open_.callback(stage.spark.stop)
        open_.callback(lambda: [worker.stop() for worker in stage.kept.values()])
        if "latency" in only:
            found["latency"] = latency(stage, topics.create_topic(topics.name("latency"), PARTITIONS))
            console.print(orjson.dumps(found["latency"]).decode(), markup=False)
            goals = {"ten_p50_ms": 15, "steady_p50_ms": 12, "steady_p99_ms": 35}
            shown = [at_most(name, [found["latency"][name]], goal, 1, " ms") for name, goal in goals.items()]
            report.show_targets(console, shown)
        if "throughput" in only and chosen:
            found["throughput"] = throughput(console, stage, topics, chosen, options.rounds)
            good = good and not found["throughput"]["failed"]
        if "partitions" in only and jobs:
            stage.events = options.events or PARTITIONS_EVENTS
            found["partitions"], held = wide(console, stage, topics, options.partitions, jobs)
            good = good and held
    print(orjson.dumps(found).decode())
    if options.json:
        options.json.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["lock"]:
        heading = (
            "What a consumer is measured against: the JDBC driver, and Debezium's JDBC sink connector.",
            "Maven coordinates, SHA-256, size in bytes.",
            "Written by: python benchmarks/consume.py lock",
        )
        LOCK.write_text(resolve({"jdbc": (False, ("org.postgresql:postgresql:42.7.8",)), **debezium.ROOTS}, heading))
        sys.exit(0)
    sys.exit(main())
