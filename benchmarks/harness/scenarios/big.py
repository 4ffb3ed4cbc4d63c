"""Big payloads: how much memory the relay takes for them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.measure import peak_mb
from benchmarks.harness.publishers import Publisher
from benchmarks.harness.results import CPU, RATE, Metric, Results, Run, Target, at_most
from benchmarks.harness.runs import Drain, drain
from benchmarks.harness.scenarios.base import OURS, POLLING, POLLING_ONCE, Scenario, Variant
from benchmarks.harness.servers import Servers


def _peak(publisher: Publisher) -> dict[str, float]:
    (pid,) = publisher.pids
    return {"peak": peak_mb(pid)}


class Big(Scenario):
    """200 KB and nearly 1 MB: an event has 1,000,000 bytes at most, key included."""

    name = "big"
    title = "Big payloads: 20,000 of 200 KB, 2,000 of 1 MB"
    about = "Text that does not compress. The most memory that was ever resident, from start to the empty outbox."
    metrics = (
        Metric("peak", "MB resident at most", 0),
        RATE,
        Metric("mb", "MB/s"),
        *CPU,
    )
    once = True

    @property
    def ways(self) -> Sequence[Variant]:
        ways = (POLLING, POLLING_ONCE) if self.quick else OURS
        return tuple(Variant(way, size, f"{size // 1000} KB") for way in ways for size in (200_000, 990_000))

    def run(self, servers: Servers, way: Variant, run: Run) -> None:
        count = self.sizes.big if way.value == 200_000 else self.sizes.huge
        drain(servers, way.way, run, Drain(count, 10, way.value, together=10, after=_peak))
        run.figures["mb"] = run.figures["rate"] * way.value / 1e6

    def targets(self, results: Results) -> list[Target]:
        return [
            at_most(f"{way.name}: resident", list(results.by_round(way.name, "peak").values()), 300, 0, " MB")
            for way in self.ways
        ]
