"""256 lanes in one relay, against 4."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.measure import connections, resident_mb, threads
from benchmarks.harness.publishers import Publisher
from benchmarks.harness.relays import Ours
from benchmarks.harness.results import P50, P99, PER_CORE, RATE, Metric, Results, Run, Target, at_least, at_most
from benchmarks.harness.runs import Drain, Latency, drain, latency
from benchmarks.harness.scenarios.base import POLLING, POLLING_ONCE, WAL, Scenario, Variant
from benchmarks.harness.servers import LANES, Servers


def with_lanes(way: Ours, lanes: int) -> Variant:
    """Return our relay on an outbox with so many lanes."""
    return Variant(way, lanes, f"{lanes} lanes")


def footprint(publisher: Publisher) -> dict[str, float]:
    """Return what a relay takes besides CPU."""
    (pid,) = publisher.pids
    return {"threads": threads(pid), "connections": connections(publisher.site), "resident": resident_mb(pid)}


class Lanes(Scenario):
    """Drain and latency."""

    name = "lanes"
    title = "256 lanes in one relay, against 4"
    about = (
        "A drain of 200,000 events and a steady load of 600 a second; threads, sessions and memory during the drain."
    )
    metrics = (
        RATE,
        PER_CORE,
        P50,
        P99,
        Metric("threads", "threads"),
        Metric("connections", "Postgres sessions"),
        Metric("resident", "MB resident"),
    )

    @property
    def ways(self) -> Sequence[Variant]:
        ways = (POLLING, POLLING_ONCE) if self.quick else (POLLING, POLLING_ONCE, WAL)
        return tuple(with_lanes(way, lanes) for way in ways for lanes in (LANES, self.sizes.lanes))

    def run(self, servers: Servers, way: Variant, run: Run) -> None:
        warm = self.sizes.warm_ours
        load = Latency(600, self.sizes.steady_seconds, warm, lanes=way.value, strict=not self.quick)
        latency(servers, way.way, run, load)
        drain(servers, way.way, run, Drain(self.sizes.drain, warm, lanes=way.value, probe=footprint))

    def targets(self, results: Results) -> list[Target]:
        found = []
        for few, many in ((w.name, with_lanes(w.way, self.sizes.lanes).name) for w in self.ways if w.value == LANES):
            found.append(at_least(f"{many}: rate, of 4 lanes'", results.ratio(many, few, "rate"), 0.9))
            found += [
                at_most(f"{many}: {metric}, of 4 lanes'", results.ratio(many, few, metric), 1.0)
                for metric in ("threads", "connections")
            ]
        return found
