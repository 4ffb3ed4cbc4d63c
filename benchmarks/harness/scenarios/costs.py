"""What a delivery costs: CPU and bytes of each event, and how the length of a transaction matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from benchmarks.harness.costs import COSTS, costs
from benchmarks.harness.relays import Ours
from benchmarks.harness.results import P50, P99, RATE, Results, Run, Target, beside
from benchmarks.harness.runs import Latency, latency
from benchmarks.harness.scenarios.base import (
    AT_MOST_ONCE,
    OURS,
    POLLING,
    POLLING_ONCE,
    WAL,
    WAL_ONCE,
    Scenario,
    Variant,
)
from benchmarks.harness.servers import Servers

_TURNS: Final = (1, 10, 100, 500, 2_000)
_BURSTS: Final = 4
_LONG_LEASE: Final = ("relay__lease_seconds", 120)


def _patient(way: Ours, *settings: tuple[str, object]) -> Ours:
    """Return the relay with a lease that outlasts the pause in which the events are written."""
    return replace(way, settings=(*way.settings, _LONG_LEASE, *settings))


class Costs(Scenario):
    """Each source and delivery."""

    name = "costs"
    title = "What each event costs"
    about = (
        "A backlog of 740-byte events in 4 lanes, in turns of up to 8,000. CPU by process; bytes that the broker "
        "received, that its logs grew by, and of WAL while the events were published, the first since a checkpoint."
    )
    metrics = (*COSTS, RATE)
    warmed_by = (POLLING_ONCE,)

    @property
    def ways(self) -> Sequence[Ours]:
        return (AT_MOST_ONCE, *OURS)

    def run(self, servers: Servers, way: Ours, run: Run) -> None:
        costs(servers, _patient(way), run, self.sizes.drain, self.sizes.warm_ours)

    def targets(self, results: Results) -> list[Target]:
        found = []
        for way, other in ((AT_MOST_ONCE, POLLING), (POLLING_ONCE, POLLING), (WAL, POLLING), (WAL_ONCE, WAL)):
            for metric in ("rate", "broker", "to_broker"):
                what = f"{way.name}: {metric}, of {other.name}"
                found.append(beside(what, results.ratio(way.name, other.name, metric)))
        return found


class Turns(Scenario):
    """The number of events in a Kafka transaction."""

    name = "turns"
    title = "The length of a transaction, exactly-once"
    about = (
        "One lane, so that a turn is a transaction of so many events, which go to 4 partitions. p50 and p99: as many "
        "events are committed at once, four times a second; from COMMIT to poll() in a read_committed consumer. The "
        "others: a backlog in turns of this size."
    )
    metrics = (P50, P99, RATE, *COSTS)
    once = True

    @property
    def ways(self) -> Sequence[Variant]:
        sizes = (1, 100) if self.quick else _TURNS
        return tuple(
            Variant(_patient(POLLING_ONCE, ("relay__batch_size", size)), size, f"{size:,} in a turn") for size in sizes
        )

    def run(self, servers: Servers, way: Variant, run: Run) -> None:
        load = Latency(
            _BURSTS * way.value,
            self.sizes.steady_seconds,
            self.sizes.warm_ours // 10,
            lanes=1,
            strict=False,
            together=way.value,
        )
        latency(servers, way.way, run, load)
        count = min(self.sizes.drain, max(2_000, 100 * way.value))
        costs(servers, way.way, run, count, self.sizes.warm_ours // 10, lanes=1)

    def targets(self, results: Results) -> list[Target]:
        return []
