"""How fast a backlog is drained: usual events, and one key alone."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.bare import BARE, BARE_DELETING, BARE_ONCE
from benchmarks.harness.load import keys_of_lane
from benchmarks.harness.peers import DEBEZIUM, DEBEZIUM_BULK, DEBEZIUM_LATENCY, DEBEZIUM_ONCE
from benchmarks.harness.publishers import Way
from benchmarks.harness.relays import Ours
from benchmarks.harness.results import CPU, PER_CORE, RATE, Results, Run, Target, at_least
from benchmarks.harness.runs import Drain, drain
from benchmarks.harness.scenarios.base import OURS, POLLING, POLLING_ONCE, WAL, WAL_ONCE, Scenario, Variant
from benchmarks.harness.servers import Servers, Site


def _bare_of(way: Ours) -> str:
    return BARE_ONCE.name if way.delivery == "exactly-once" else BARE.name


class DrainUsual(Scenario):
    """Events of 740 bytes."""

    name = "drain"
    title = "Drain of 200,000 events of 740 bytes"
    about = (
        "Committed 100 at a time while the publisher was halted; it was warmed up before. Events a second from the "
        "broker's first append to its last; per core: CPU of publisher, Postgres and broker together. The bare loop "
        "reads the same rows and produces them with the same headers, and does nothing else; the one that deletes has "
        "turns of the relay's size, whose rows it deletes: the bound for an outbox in a table."
    )
    metrics = (RATE, PER_CORE, *CPU)

    @property
    def ways(self) -> Sequence[Way]:
        return (*OURS, DEBEZIUM, DEBEZIUM_LATENCY, DEBEZIUM_BULK, DEBEZIUM_ONCE, BARE, BARE_ONCE, BARE_DELETING)

    def run(self, servers: Servers, way: Way, run: Run) -> None:
        drain(servers, way, run, Drain(self.sizes.drain, self.warm(way)))

    def targets(self, results: Results) -> list[Target]:
        best = results.best_debezium("rate")
        found = []
        for way in OURS:
            once = way.delivery == "exactly-once"
            found.append(
                at_least(
                    f"{way.name}: times the best Debezium", results.ratio(way.name, best, "rate"), 4 if once else 5
                )
            )
            bare = _bare_of(way)
            what = f"{way.name}: of the {bare}"
            found.append(at_least(what, results.ratio(way.name, bare, "rate"), 0.5 if once else 0.6))
        for wal, polling in ((WAL, POLLING), (WAL_ONCE, POLLING_ONCE)):
            found.append(at_least(f"{wal.name}: of polling", results.ratio(wal.name, polling.name, "rate"), 0.8))
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

    def targets(self, results: Results) -> list[Target]:
        found = []
        for way in (POLLING, POLLING_ONCE):
            ratios = results.ratio(_keyed(way, 1).name, _keyed(way, 1_000).name, "rate")
            found.append(at_least(f"{way.name}: one key, of one lane's rate", ratios, 0.9))
        return found
