"""How fast a backlog is drained: usual events, small ones, and one key alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness.bare import BARE, BARE_DELETING, BARE_ONCE
from benchmarks.harness.load import SMALL, keys_of_lane
from benchmarks.harness.peers import DEBEZIUM, DEBEZIUM_BULK, DEBEZIUM_LATENCY, DEBEZIUM_ONCE
from benchmarks.harness.publishers import Way
from benchmarks.harness.relays import Ours
from benchmarks.harness.results import CPU, PER_CORE, RATE, Results, Run, Target, at_least, beside
from benchmarks.harness.runs import Drain, drain
from benchmarks.harness.scenarios.base import OURS, POLLING, POLLING_ONCE, WAL, WAL_ONCE, Scenario, Variant
from benchmarks.harness.servers import Servers, Site

_AGAIN = replace(POLLING, name=f"{POLLING.name}, again")
"""The same once more: what differs between the two is noise."""


def _is_once(way: Ours) -> bool:
    return way.delivery == "exactly-once"


def _bare_of(way: Ours) -> str:
    return BARE_ONCE.name if _is_once(way) else BARE.name


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
    warmed_by = (POLLING_ONCE,)
    size = SMALL

    @property
    def ways(self) -> Sequence[Way]:
        return (*OURS, _AGAIN, DEBEZIUM, DEBEZIUM_LATENCY, DEBEZIUM_BULK, DEBEZIUM_ONCE, BARE, BARE_ONCE, BARE_DELETING)

    def run(self, servers: Servers, way: Way, run: Run) -> None:
        drain(servers, way, run, Drain(self.sizes.drain, self.warm(way), size=self.size))

    def targets(self, results: Results) -> list[Target]:
        once = DEBEZIUM_ONCE.name
        best = results.best_debezium("rate", but=once)
        found = []
        for way in OURS:
            ratios = results.ratio(way.name, once if _is_once(way) else best, "rate")
            goal = 3.0 if _is_once(way) else 2.5
            found.append(at_least(f"{way.name}: times the best Debezium with the same guarantee", ratios, goal))
            bare = _bare_of(way)
            found.append(at_least(f"{way.name}: of the {bare}", results.ratio(way.name, bare, "rate"), 0.85))
        for way in (POLLING, WAL):
            ratios = results.ratio(way.name, BARE_DELETING.name, "rate")
            found.append(beside(f"{way.name}: of the {BARE_DELETING.name}", ratios))
        for wal, polling in ((WAL, POLLING), (WAL_ONCE, POLLING_ONCE)):
            found.append(at_least(f"{wal.name}: of polling", results.ratio(wal.name, polling.name, "rate"), 0.9))
        return [*found, beside("noise: the same again", results.ratio(_AGAIN.name, POLLING.name, "rate"))]


class DrainSmall(DrainUsual):
    """Events of 128 bytes, the size for which others publish figures."""

    name = "small"
    title = "Drain of 200,000 events of 128 bytes"
    about = "As the drain before: what an event costs besides its bytes."
    size = 128

    @property
    def ways(self) -> Sequence[Way]:
        ways = (POLLING, POLLING_ONCE, DEBEZIUM_BULK, BARE)
        return ways if self.quick else (*ways, DEBEZIUM_ONCE, BARE_ONCE, BARE_DELETING)

    def targets(self, results: Results) -> list[Target]:
        found = []
        for way in (POLLING, POLLING_ONCE):
            bare, peer = _bare_of(way), (DEBEZIUM_ONCE if _is_once(way) else DEBEZIUM_BULK).name
            found.append(at_least(f"{way.name}: of the {bare}", results.ratio(way.name, bare, "rate"), 0.65))
            found.append(beside(f"{way.name}: times {peer}", results.ratio(way.name, peer, "rate")))
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
