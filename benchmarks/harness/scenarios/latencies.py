"""From COMMIT to a consumer's hands, under a steady load."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.peers import DEBEZIUM, DEBEZIUM_LATENCY, DEBEZIUM_ONCE
from benchmarks.harness.publishers import Way
from benchmarks.harness.results import CPU, P50, P99, Metric, Results, Run, Target, at_most
from benchmarks.harness.runs import KAFKA_ONLY, Latency, latency
from benchmarks.harness.scenarios.base import AT_MOST_ONCE, OURS, POLLING, POLLING_ONCE, WAL, Scenario
from benchmarks.harness.servers import Servers

_MAX = Metric("max", "ms", 1)
_OFFERED = Metric("offered", "commits/s")


class Steady600(Scenario):
    """600 events a second."""

    name = "latency"
    title = "Latency at 600 events a second"
    about = (
        "One writer, one event of 740 bytes in each transaction, 5,000 keys, 4 lanes. From the return of COMMIT to "
        "poll() in a read_committed consumer; the first second is left out."
    )
    metrics = (P50, P99, _MAX, *CPU, _OFFERED)
    warmed_by = (POLLING_ONCE, POLLING)

    @property
    def ways(self) -> Sequence[Way]:
        return (AT_MOST_ONCE, *OURS, DEBEZIUM, DEBEZIUM_LATENCY, DEBEZIUM_ONCE, KAFKA_ONLY)

    def run(self, servers: Servers, way: Way, run: Run) -> None:
        latency(servers, way, run, Latency(600, self.sizes.steady_seconds, self.warm(way), strict=not self.quick))

    def targets(self, results: Results) -> list[Target]:
        once = DEBEZIUM_ONCE.name
        found = []
        for way in OURS:
            is_once = way.delivery == "exactly-once"
            for metric, goal in (("p50", 0.7 if is_once else 0.5), ("p99", 0.1 if is_once else 0.6)):
                what = f"{way.name}: {metric}, of the best Debezium's with the same guarantee"
                peer = once if is_once else results.best_debezium(metric, least=True, but=once)
                found.append(at_most(what, results.ratio(way.name, peer, metric), goal))
        return found


class AfterRest(Scenario):
    """Two events a second, after a rest."""

    name = "rest"
    title = "Latency at 2 events a second, after a minute of rest"
    about = "As the latency at 600 events a second, when the outbox is nearly always empty."
    metrics = (P50, P99, _MAX, *CPU)
    once = True

    @property
    def ways(self) -> Sequence[Way]:
        return (POLLING, WAL) if self.quick else (*OURS, DEBEZIUM_LATENCY)

    def run(self, servers: Servers, way: Way, run: Run) -> None:
        rest = self.sizes.rest_seconds
        load = Latency(2, self.sizes.slow_seconds, self.warm(way), strict=not self.quick, rest=rest)
        latency(servers, way, run, load)

    def targets(self, results: Results) -> list[Target]:
        found = [(way.name, list(results.by_round(way.name, "p50").values())) for way in OURS]
        return [at_most(f"{name}: p50", values, 4, 1, " ms") for name, values in found]
