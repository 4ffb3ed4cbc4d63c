"""A transaction that stays open holds the server's xmin: dead rows and index entries can't be removed meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from benchmarks.harness.load import Backlog, Steady, fill, held_snapshot, wait_until_empty
from benchmarks.harness.publishers import publishing
from benchmarks.harness.relays import Ours
from benchmarks.harness.results import CPU, P50, P99, RATE, Metric, Results, Run, Target, at_least
from benchmarks.harness.runs import Latency, under_load, warm_up, watch
from benchmarks.harness.scenarios.base import POLLING, POLLING_ONCE, Scenario, Variant
from benchmarks.harness.servers import Servers
from benchmarks.harness.topic import Ends, read_back


def _holding(way: Ours, *, held: bool) -> Variant:
    return Variant(way, held, f"xmin {'held' if held else 'free'}")


class Held(Scenario):
    """2,000 events a second for a while, then a backlog."""

    name = "held"
    title = "xmin held at 2,000 events a second"
    about = (
        "A REPEATABLE READ transaction is open all the time; 2,000 events a second are written, ten in each "
        "transaction, for a minute; then 100,000 are drained while it is still open. Published: "
        "events a second from the first of the load to the last, as they came; rate: of the drain."
    )
    metrics = (RATE, Metric("offered", "events/s written"), Metric("published", "events/s under load"), P50, P99, *CPU)
    once = True

    @property
    def ways(self) -> Sequence[Variant]:
        ways = (POLLING,) if self.quick else (POLLING, POLLING_ONCE)
        return tuple(_holding(way, held=held) for way in ways for held in (False, True))

    def run(self, servers: Servers, way: Variant, run: Run) -> None:
        warm, count = self.sizes.warm_ours, int(2_000 * self.sizes.held_seconds)
        with servers.site(f"{self.name}-{way.name}") as site, publishing(way.way, servers, site) as relay:
            ends = Ends(site)
            warm_up(way.way, relay, ends, Backlog(warm))
            with held_snapshot(site) if way.value else contextlib.nullcontext():
                load = Latency(2_000, self.sizes.held_seconds, warm, strict=not self.quick)
                _, seen = under_load(servers, relay, site, run, load, Steady(2_000, count, warm, together=10))
                relay.halt()
                base = ends.now()
                fill(site, Backlog(self.sizes.held_backlog, warm + count))
                relay.start()
                figures = watch(servers, relay, ends, base, self.sizes.held_backlog)
                wait_until_empty(site, 120)
            appended = read_back(site, warm + count, self.sizes.held_backlog)
            appended.tally.note(run)
            run.figures |= {
                **figures,
                "rate": appended.rate,
                "published": count / ((max(seen) - min(seen)) / 1e9),
            }

    def targets(self, results: Results) -> list[Target]:
        found = []
        for way in (POLLING, POLLING_ONCE):
            held, free = _holding(way, held=True).name, _holding(way, held=False).name
            for metric, what in (("rate", "drain"), ("published", "published under load")):
                found.append(at_least(f"{way.name}: {what}, of unheld", results.ratio(held, free, metric), 0.8))
        return found
