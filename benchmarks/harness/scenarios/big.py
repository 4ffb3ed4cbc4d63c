"""Big payloads: how much memory the relay takes for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.measure import peak_mb
from benchmarks.harness.publishers import Publisher
from benchmarks.harness.relays import Ours
from benchmarks.harness.results import CPU, RATE, Metric, Results, Run, Target, at_most
from benchmarks.harness.runs import Drain, drain
from benchmarks.harness.scenarios.base import OURS, POLLING, POLLING_ONCE, Scenario
from benchmarks.harness.servers import Servers


@dataclass(frozen=True)
class Loaded:
    """Our relay and payloads of one size."""

    way: Ours
    size: int
    count: int

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{self.way.name}, {self.size // 1000:,} KB"


def _peak(publisher: Publisher) -> dict[str, float]:
    (pid,) = publisher.pids
    return {"peak": peak_mb(pid)}


class Big(Scenario):
    """200 KB and nearly 1 MB: an event has 1,000,000 bytes at most, key included."""

    name = "big"
    title = "Big payloads: 20,000 of 200 KB, 2,000 of 1 MB"
    about = "Text that does not compress. The most memory that was ever resident, from start to the empty outbox."
    metrics = (
        Metric("peak", "MB resident at most", 0, plotted=True, less_is_better=True),
        RATE,
        Metric("mb", "MB/s"),
        *CPU,
    )
    once = True

    @property
    def ways(self) -> Sequence[Loaded]:
        ways = (POLLING, POLLING_ONCE) if self.quick else OURS
        sizes = ((200_000, self.sizes.big), (990_000, self.sizes.huge))
        return tuple(Loaded(way, size, count) for way in ways for size, count in sizes)

    def run(self, servers: Servers, way: Loaded, run: Run) -> None:
        drain(servers, way.way, run, Drain(way.count, 10, way.size, together=10, after=_peak))
        run.figures["mb"] = run.figures["rate"] * way.size / 1e6

    def targets(self, results: Results) -> list[Target]:
        return [
            at_most(f"{way.name}: resident", list(results.by_round(way.name, "peak").values()), 300, 0, " MB")
            for way in self.ways
        ]
