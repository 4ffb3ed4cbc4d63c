"""What events cost the machines, on their way from the table to the topic: CPU by process, and bytes.

The relay is halted by SIGSTOP while the events are written, so that neither their writing nor its start is counted.
These figures hold on a busy machine, too: they count what was done, not how long it took.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.harness.load import Backlog, fill, wait_until_empty
from benchmarks.harness.measure import Cpu
from benchmarks.harness.publishers import publishing
from benchmarks.harness.relays import Ours, Relay
from benchmarks.harness.results import Metric, Run
from benchmarks.harness.runs import warm_up
from benchmarks.harness.servers import LANES, BenchError, Servers, Site, wait_until
from benchmarks.harness.topic import Ends, read_back

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
