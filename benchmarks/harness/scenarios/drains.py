"""How fast a backlog is drained: usual events, small ones, one key alone, and five million."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.bare import BARE, BARE_DELETING, BARE_ONCE
from benchmarks.harness.load import keys_of_lane
from benchmarks.harness.peers import DEBEZIUM, DEBEZIUM_BULK, DEBEZIUM_LATENCY, DEBEZIUM_ONCE
from benchmarks.harness.publishers import Way
from benchmarks.harness.relays import Ours
from benchmarks.harness.results import CPU, PER_CORE, RATE, Results, Run, Target, at_least, beside
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


class DrainSmall(DrainUsual):
    """Events of 128 bytes. The figures stand beside each other: nothing is asked of them."""

    name = "small"
    title = "Drain of 200,000 events of 128 bytes, in transactions of 10,000"
    about = "As the drain before, with what others publish figures of."

    @property
    def ways(self) -> Sequence[Way]:
        if self.quick:
            return (POLLING, POLLING_ONCE, DEBEZIUM_BULK, BARE, BARE_ONCE)
        return super().ways

    def run(self, servers: Servers, way: Way, run: Run) -> None:
        drain(servers, way, run, Drain(self.sizes.drain, self.warm(way), size=128, together=10_000))

    def targets(self, results: Results) -> list[Target]:
        best = results.best("Debezium", "rate")
        found = []
        for way in OURS:
            bare = _bare_of(way)
            found.append(beside(f"{way.name}: times the best Debezium", results.ratio(way.name, best, "rate")))
            found.append(beside(f"{way.name}: of the {bare}", results.ratio(way.name, bare, "rate")))
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


def _sized(way: Ours, count: int) -> Variant:
    return Variant(way, count, f"{count:,}")


class Backlog5M(Scenario):
    """Five million, with --full."""

    name = "backlog"
    title = "Backlog of 5 million, against 200,000"
    about = "Whether the rate depends on how much waits. Only with --full: it takes some minutes and 10 GB of disk."
    metrics = (RATE, PER_CORE, *CPU)
    once = True

    @property
    def ways(self) -> Sequence[Variant]:
        if self.sizes.backlog is None:
            return ()
        return tuple(
            _sized(way, count) for way in (POLLING, POLLING_ONCE) for count in (self.sizes.drain, self.sizes.backlog)
        )

    def run(self, servers: Servers, way: Variant, run: Run) -> None:
        drain(servers, way.way, run, Drain(way.value, self.sizes.warm_ours))

    def targets(self, results: Results) -> list[Target]:
        if self.sizes.backlog is None:
            return []
        found = []
        for way in (POLLING, POLLING_ONCE):
            ratios = results.ratio(_sized(way, self.sizes.backlog).name, _sized(way, self.sizes.drain).name, "rate")
            found.append(at_least(f"{way.name}: 5 million, of the rate of 200,000", ratios, 0.9))
        return found
