"""From COMMIT to a consumer's hands, under a steady load."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.peers import DEBEZIUM, DEBEZIUM_LATENCY, DEBEZIUM_ONCE
from benchmarks.harness.publishers import Way
from benchmarks.harness.results import CPU, P50, P99, Metric, Results, Run, Spread
from benchmarks.harness.runs import Latency, latency
from benchmarks.harness.scenarios.base import AT_MOST_ONCE, OURS, Scenario
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

    @property
    def ways(self) -> Sequence[Way]:
        return (AT_MOST_ONCE, *OURS, DEBEZIUM, DEBEZIUM_LATENCY, DEBEZIUM_ONCE)

    def run(self, servers: Servers, way: Way, run: Run) -> None:
        latency(servers, way, run, Latency(600, self.sizes.steady_seconds, self.warm(way), strict=not self.quick))

    def ratios(self, results: Results) -> dict[str, Spread | None]:
        best = results.best_debezium("p50", least=True)
        return {
            f"{way.name}: {metric} as part of the best Debezium's (by p50)": results.ratio(way.name, best, metric)
            for way in OURS
            for metric in ("p50", "p99")
        }
