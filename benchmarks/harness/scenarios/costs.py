"""What a delivery costs: CPU and bytes of each event, and how the length of a transaction matters.

The relay is halted by SIGSTOP while the events are written, so that neither their writing nor its start is counted.
These figures hold on a busy machine, too: they count what was done, not how long it took.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.harness.load import Backlog, fill, wait_until_empty
from benchmarks.harness.measure import Cpu
from benchmarks.harness.publishers import publishing
from benchmarks.harness.relays import Ours, Relay
from benchmarks.harness.results import P50, P99, RATE, Metric, Results, Run, Spread
from benchmarks.harness.runs import Latency, latency, warm_up
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
from benchmarks.harness.servers import LANES, BenchError, Servers, Site, wait_until
from benchmarks.harness.topic import Ends, read_back

_TURNS: Final = (1, 10, 100, 500, 2_000)
_BURSTS: Final = 4
_LONG_LEASE: Final = ("relay__lease_seconds", 120)
COSTS: Final = (
    Metric("relay", "CPU, µs", 1),
    Metric("postgres", "CPU, µs", 1),
    Metric("broker", "CPU, µs", 1),
    Metric("to_broker", "bytes"),
    Metric("on_its_disk", "bytes"),
    Metric("wal", "bytes"),
)
_SECONDS: Final = 300.0
_CONTROL_RECORDS_SECONDS: Final = 0.5
_POSITION: Final = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"


@dataclass(frozen=True)
class Counters:
    """What was used so far: CPU seconds, and bytes that the broker has read, that its logs have, and of WAL."""

    cpu: Cpu
    to_broker: int
    on_its_disk: int
    wal: int

    @classmethod
    def now(cls, servers: Servers, site: Site, relay: Relay) -> Counters:
        """Read them. Nothing but the relay talks to the broker meanwhile, which reads no log: what it reads is sent."""
        received = sum(_read_bytes(pid) for pid in servers.kafka.pids)
        folders = servers.kafka.data_dir.glob("broker-*/data/*")
        # Topics of former runs are removed a minute after their end.
        mine = [each for each in folders if each.name.startswith((site.kind, "__transaction_state-"))]
        logs = sum(path.stat().st_size for folder in mine for path in folder.glob("*.log"))
        return cls(Cpu.now(servers, relay.pids), received, logs, int(site.value(_POSITION)))

    def each_since(self, before: Counters, count: int) -> dict[str, float]:
        """Return what each of ``count`` events has taken, by the names of COSTS."""
        cpu = {
            "relay": self.cpu.publisher - before.cpu.publisher,
            "postgres": self.cpu.postgres - before.cpu.postgres,
            "broker": self.cpu.broker - before.cpu.broker,
        }
        return {name: seconds * 1e6 / count for name, seconds in cpu.items()} | {
            "to_broker": (self.to_broker - before.to_broker) / count,
            "on_its_disk": (self.on_its_disk - before.on_its_disk) / count,
            "wal": (self.wal - before.wal) / count,
        }


def _read_bytes(pid: int) -> int:
    """Return how many bytes a process has read, from sockets and files."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"])


def costs(servers: Servers, way: Ours, run: Run, count: int, warm: int, lanes: int = LANES) -> None:
    """Measure what ``count`` events cost that are published as a backlog, and at which rate they are."""
    with servers.site(f"{run.scenario}-{way.name}", lanes) as site, publishing(way, servers, site) as relay:
        assert isinstance(relay, Relay)
        ends = Ends(site)
        warm_up(way, relay, ends, Backlog(warm))
        base = ends.now()
        relay.process.pause()
        fill(site, Backlog(count, warm))
        before = Counters.now(servers, site, relay)
        relay.process.resume()
        wait_until_empty(site, _SECONDS)
        # At-most-once deletes before it sends. Control records follow the answer to a commit.
        wait_until(lambda: ends.now() >= base + count, "the events on Kafka", _SECONDS, every=0.2)
        time.sleep(_CONTROL_RECORDS_SECONDS)
        figures = Counters.now(servers, site, relay).each_since(before, count)
        appended = read_back(site, warm, count)
        appended.tally.note(run)
        if run.repeated:
            raise BenchError(f"{run.repeated} events were sent again: is relay.lease_seconds too short for the pause?")
        run.figures |= {"rate": appended.rate, **figures}


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
    cold = True
    """Whether the broker has just been started: its first 200,000 events take four times as much CPU as later ones."""

    @property
    def ways(self) -> Sequence[Ours]:
        return (AT_MOST_ONCE, *OURS)

    def run(self, servers: Servers, way: Ours, run: Run) -> None:
        if self.cold:
            costs(servers, _patient(POLLING_ONCE), Run(self.name, "warm", 0), self.sizes.drain, self.sizes.warm_ours)
            self.cold = False
        costs(servers, _patient(way), run, self.sizes.drain, self.sizes.warm_ours)

    def ratios(self, results: Results) -> dict[str, Spread | None]:
        return {
            f"{way.name}: {metric}, of {other.name}": results.ratio(way.name, other.name, metric)
            for way, other in ((AT_MOST_ONCE, POLLING), (POLLING_ONCE, POLLING), (WAL, POLLING), (WAL_ONCE, WAL))
            for metric in ("rate", "broker", "to_broker")
        }


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
