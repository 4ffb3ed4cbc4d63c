"""A relay with nothing to do: what it asks Postgres, what it costs, and whether its memory grows."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.harness.load import Backlog
from benchmarks.harness.measure import (
    Cpu,
    connections,
    count_statements,
    log_statements,
    resident_mb,
    slope,
    threads,
    waits,
)
from benchmarks.harness.publishers import publishing
from benchmarks.harness.relays import Ours, ours
from benchmarks.harness.results import CPU, Metric, Results, Run, Target, at_most
from benchmarks.harness.runs import warm_up
from benchmarks.harness.scenarios.base import POLLING, POLLING_ONCE, WAL, Scenario, Variant
from benchmarks.harness.scenarios.lanes import with_lanes
from benchmarks.harness.servers import LANES, BenchError, Servers, Site
from benchmarks.harness.topic import Ends

_SETTLE_SECONDS = 2.0
_LEAST_TURNS = 100
"""A second, on average. With fewer, what is leaked in each turn would not be seen."""


class Empty(Scenario):
    """Statements and CPU."""

    name = "empty"
    title = "An empty outbox"
    about = (
        "Statements a second by Postgres' own log (log_statement = all), without BEGIN, COMMIT, SET and their like; "
        "the next column includes those. Transactions are pg_stat_database's. CPU as part of one core."
    )
    metrics = (
        Metric("statements", "statements/s", 1),
        Metric("statements_all", "with BEGIN, COMMIT …", 1),
        Metric("transactions", "transactions/s", 1),
        *CPU,
        Metric("connections", "Postgres sessions"),
        Metric("threads", "threads"),
    )

    @property
    def ways(self) -> Sequence[Variant]:
        if self.quick:
            return (with_lanes(POLLING, LANES), with_lanes(POLLING_ONCE, self.sizes.lanes), with_lanes(WAL, LANES))
        return tuple(
            with_lanes(way, lanes) for way in (POLLING, POLLING_ONCE, WAL) for lanes in (LANES, self.sizes.lanes)
        )

    def run(self, servers: Servers, way: Variant, run: Run) -> None:
        with servers.site(f"{self.name}-{way.name}", way.value) as site:
            log_statements(site)
            with publishing(way.way, servers, site) as relay:
                # A relay that has never published has not opened all it needs.
                warm_up(way.way, relay, Ends(site), Backlog(self.sizes.warm_ours))
                time.sleep(_SETTLE_SECONDS)
                before = Cpu.now(servers, relay.pids)
                commits = _transactions(site)
                with count_statements(servers, site) as statements:
                    time.sleep(self.sizes.empty_seconds)
                # The connections that look at the statistics begin transactions of their own: one each.
                transactions = _transactions(site) - commits - 1
                (pid,) = relay.pids
                run.figures |= {
                    "statements": statements.rate,
                    "statements_all": statements.rate_all,
                    "transactions": transactions / statements.seconds,
                    **Cpu.now(servers, relay.pids).percent_since(before),
                    "connections": connections(site),
                    "threads": threads(pid),
                }

    def targets(self, results: Results) -> list[Target]:
        found = []
        for way in self.ways:
            rates = list(results.by_round(way.name, "statements").values())
            found.append(at_most(f"{way.name}: statements a second", rates, 15, 1))
            cpu = list(results.by_round(way.name, "publisher_cpu").values())
            found.append(at_most(f"{way.name}: CPU of the relay", cpu, 1, 1, " % of a core"))
        return found


def _transactions(site: Site) -> int:
    return int(site.value("SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s", site.database))


class Memory(Scenario):
    """Turns and statistics by the thousand instead of days."""

    name = "memory"
    title = "Memory of an idle relay"
    about = (
        "Resident memory while an empty outbox is looked at every millisecond (relay.max_idle_seconds = 0.001, and "
        "relay.watch_seconds = 0: otherwise Postgres would look, for 0.2 s at least). A run with less than "
        f"{_LEAST_TURNS:,} turns a second fails. From the WAL they are the waits of its threads without librdkafka's. "
        "At-least-once also makes a report of librdkafka's statistics every 10 ms, the usual hundredfold, where the "
        "relay takes that setting; exactly-once makes them as it always does. The first third is left out. With one "
        "broker a report has some 4 KB: one leaked each second in each of 4 lanes would be 2.5 MB."
    )
    metrics = (
        Metric("growth", "MB grown", 2),
        Metric("slope", "MB an hour", 1),
        Metric("resident", "MB resident"),
        Metric("turns", "transactions, or waits"),
    )
    once = True

    @property
    def ways(self) -> Sequence[Ours]:
        fast = {"relay__max_idle_seconds": 0.001, "relay__watch_seconds": 0}
        if self.quick:
            return (ours("polling", "exactly-once", **fast),)
        return (
            ours("polling", "at-least-once", **fast, kafka__statistics_interval_ms=10),
            ours("polling", "exactly-once", **fast),
            ours("wal", "at-least-once", **fast, kafka__statistics_interval_ms=10),
            ours("wal", "exactly-once", **fast),
        )

    def run(self, servers: Servers, way: Ours, run: Run) -> None:
        with servers.site(f"{self.name}-{way.name}") as site, publishing(way, servers, site) as relay:
            warm_up(way, relay, Ends(site), Backlog(self.sizes.warm_ours))
            (pid,) = relay.pids
            # An idle stream asks Postgres nothing.
            turns = (lambda: waits(pid)) if way.source == "wal" else (lambda: _transactions(site))
            before = turns()
            times: list[float] = []
            sizes: list[float] = []
            started = time.monotonic()
            while (now := time.monotonic() - started) < self.sizes.memory_seconds:
                times.append(now)
                sizes.append(resident_mb(pid))
                time.sleep(min(1.0, self.sizes.memory_seconds / 20))
            made = turns() - before
            if made < _LEAST_TURNS * self.sizes.memory_seconds:
                raise BenchError(f"{made:,} turns in {self.sizes.memory_seconds:g} s say nothing about memory")
            third = len(times) // 3
            run.figures |= {
                "growth": sizes[-1] - sizes[third],
                "slope": slope(times[third:], sizes[third:]) * 3600,
                "resident": sizes[-1],
                "turns": made,
            }

    def targets(self, results: Results) -> list[Target]:
        return [
            at_most(f"{way.name}: growth", list(results.by_round(way.name, "growth").values()), 1, 2, " MB")
            for way in self.ways
        ]
