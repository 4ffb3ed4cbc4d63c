"""A relay with nothing to do: what it asks Postgres, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.harness.load import Backlog
from benchmarks.harness.measure import Cpu, connections, count_statements, log_statements, threads
from benchmarks.harness.publishers import publishing
from benchmarks.harness.results import CPU, Metric, Run
from benchmarks.harness.runs import warm_up
from benchmarks.harness.scenarios.base import POLLING, POLLING_ONCE, WAL, Scenario, Variant
from benchmarks.harness.scenarios.lanes import with_lanes
from benchmarks.harness.servers import LANES, Servers, Site
from benchmarks.harness.topic import Ends

_SETTLE_SECONDS = 2.0


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
                    "statements": (statements.all - statements.control) / statements.seconds,
                    "statements_all": statements.all / statements.seconds,
                    "transactions": transactions / statements.seconds,
                    **Cpu.now(servers, relay.pids).percent_since(before),
                    "connections": connections(site),
                    "threads": threads(pid),
                }


def _transactions(site: Site) -> int:
    return int(site.value("SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s", site.database))
