"""How long events wait when one of two relays is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from benchmarks.harness.load import Backlog, Steady
from benchmarks.harness.publishers import publishing
from benchmarks.harness.results import P50, P99, Metric, Results, Run, Target, at_most
from benchmarks.harness.runs import Latency, under_load, warm_up
from benchmarks.harness.scenarios.base import POLLING, POLLING_ONCE, Scenario, Variant
from benchmarks.harness.scenarios.lanes import with_lanes
from benchmarks.harness.servers import LANES, BenchError, Servers, wait_until
from benchmarks.harness.topic import Ends

_RATE = 300
_KILLED_AFTER_SECONDS = 8.0
_USUAL_SECONDS = 0.5
_SHARED_SECONDS = 60.0
_SHARED = """
SELECT count(*) = 2 AND min(lanes) = max(lanes)
  FROM (SELECT count(*) AS lanes FROM outbox.lanes WHERE lease_until > now() GROUP BY owner) AS held"""
_MOST_SECONDS = {POLLING: 3.0, POLLING_ONCE: 4.0}


class Killed(Scenario):
    """300 events a second."""

    name = "killed"
    title = "One of two relays is killed at 300 events a second"
    about = (
        f"SIGKILL {_KILLED_AFTER_SECONDS:g} s after the load began, when each has half of the lanes. Caught up: from "
        f"the kill until the last event has come that took more than {_USUAL_SECONDS:g} s."
    )
    metrics = (Metric("caught_up", "s", 1), P50, P99, Metric("max", "ms", 1))
    once = True

    @property
    def ways(self) -> Sequence[Variant]:
        counts = (LANES,) if self.quick else (LANES, self.sizes.lanes)
        return tuple(with_lanes(way, lanes) for way in (POLLING, POLLING_ONCE) for lanes in counts)

    def run(self, servers: Servers, way: Variant, run: Run) -> None:
        if servers.arguments:
            raise BenchError("relays are processes of one worker here: measure without --workers")
        load = Latency(_RATE, self.sizes.killed_seconds, self.sizes.warm_ours, strict=not self.quick)
        with (
            servers.site(f"{self.name}-{way.name}", way.value) as site,
            publishing(way.way, servers, site) as relay,
        ):
            warm_up(way.way, relay, Ends(site), Backlog(load.warm))
            other = way.way.open(servers, site)
            killed: list[int] = []

            def share() -> bool:
                return bool(site.value(_SHARED))

            def kill() -> None:
                if other.process.running and share():
                    killed.append(time.monotonic_ns())
                    other.kill()

            timer = threading.Timer(_KILLED_AFTER_SECONDS, kill)
            try:
                other.start()
                wait_until(share, "two relays with half of the lanes each", _SHARED_SECONDS)
                steady = Steady(load.rate, int(load.rate * load.seconds), load.warm)
                committed, seen = under_load(servers, relay, site, run, load, steady, timer.start)
            finally:
                timer.cancel()
                other.kill()
            if not killed:
                raise BenchError("there was no second relay with half of the lanes to be killed")
            late = [there for begun, there in zip(committed, seen, strict=True) if there - begun > _USUAL_SECONDS * 1e9]
            run.figures["caught_up"] = max((there - killed[0]) / 1e9 for there in [*late, killed[0]])

    def targets(self, results: Results) -> list[Target]:
        found = []
        for way in self.ways:
            values = list(results.by_round(way.name, "caught_up").values())
            found.append(at_most(f"{way.name}: caught up", values, _MOST_SECONDS[way.way], 1, " s"))
        return found
