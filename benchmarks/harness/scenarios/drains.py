"""How fast a backlog is drained: usual events, and one key alone."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.bare import BARE, BARE_ONCE
from benchmarks.harness.load import keys_of_lane
from benchmarks.harness.peers import DEBEZIUM, DEBEZIUM_BULK, DEBEZIUM_LATENCY, DEBEZIUM_ONCE
from benchmarks.harness.publishers import Way
from benchmarks.harness.relays import Ours
from benchmarks.harness.results import CPU, PER_CORE, RATE, Results, Run, Spread
from benchmarks.harness.runs import Drain, drain
from benchmarks.harness.scenarios.base import OURS, POLLING, POLLING_ONCE, WAL, WAL_ONCE, Scenario, Variant
from benchmarks.harness.servers import Servers, Site


class DrainUsual(Scenario):
    """Events of 740 bytes."""

    name = "drain"
    title = "Drain of 200,000 events of 740 bytes"
    about = (
        "Committed 100 at a time while the publisher was halted; it was warmed up before. Events a second from the "
        "broker's first append to its last; per core: CPU of publisher, Postgres and broker together. The bare loop "
        "reads the same rows and produces them with the same headers, and does nothing else."
    )
    metrics = (RATE, PER_CORE, *CPU)

    @property
    def ways(self) -> Sequence[Way]:
        return (*OURS, DEBEZIUM, DEBEZIUM_LATENCY, DEBEZIUM_BULK, DEBEZIUM_ONCE, BARE, BARE_ONCE)

    def run(self, servers: Servers, way: Way, run: Run) -> None:
        drain(servers, way, run, Drain(self.sizes.drain, self.warm(way)))

    def ratios(self, results: Results) -> dict[str, Spread | None]:
        best = results.best_debezium("rate")
        found = {}
        for way in OURS:
            found[f"{way.name}: times the best Debezium"] = results.ratio(way.name, best, "rate")
            bare = (BARE_ONCE if way.delivery == "exactly-once" else BARE).name
            found[f"{way.name}: of the {bare}"] = results.ratio(way.name, bare, "rate")
        for wal, polling in ((WAL, POLLING), (WAL_ONCE, POLLING_ONCE)):
            found[f"{wal.name}: of polling"] = results.ratio(wal.name, polling.name, "rate")
        return found


def _keyed(way: Ours, keys: int) -> Variant:
    return Variant(way, keys, "one key" if keys == 1 else f"{keys:,} keys")


class HotKey(Scenario):
    """One key against one lane."""

    name = "hot-key"
    title = "All events of one key, against one lane with many keys"
    about = "100,000 events of 740 bytes in one of 4 lanes. Those of one key go to one partition, too."
    metrics = (RATE, PER_CORE, *CPU)

    @property
    def ways(self) -> Sequence[Variant]:
        ways = (POLLING,) if self.quick else (POLLING, POLLING_ONCE)
        return tuple(_keyed(way, keys) for way in ways for keys in (1_000, 1))

    def run(self, servers: Servers, way: Variant, run: Run) -> None:
        def keys(site: Site) -> tuple[str, ...]:
            return keys_of_lane(site, 0, way.value)

        drain(servers, way.way, run, Drain(self.sizes.hot, self.sizes.warm_ours, keys=keys))

    def ratios(self, results: Results) -> dict[str, Spread | None]:
        return {
            f"{way.name}: one key, of one lane's rate": results.ratio(
                _keyed(way, 1).name, _keyed(way, 1_000).name, "rate"
            )
            for way in (POLLING, POLLING_ONCE)
        }
