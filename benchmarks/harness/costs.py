"""What events cost the machines, on their way from the table to the topic: CPU by process, and bytes.

The relay is halted by SIGSTOP while the events are written, so that neither their writing nor its start is counted.
These figures hold on a busy machine, too: they count what was done, not how long it took.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from benchmarks.harness.load import Backlog, fill, wait_until_empty
from benchmarks.harness.measure import Cpu, wal_position
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


def used(servers: Servers, site: Site, relay: Relay) -> dict[str, float]:
    """Return what was used so far, by the names of COSTS. CPU in µs; ``to_broker`` is what the broker has read: it
    reads no log, and only the relay talks to it.
    """
    cpu = Cpu.now(servers, relay.pids)
    # Topics of former runs are removed a minute after their end.
    folders = servers.kafka.data_dir.glob("broker-*/data/*")
    mine = [each for each in folders if each.name.startswith((site.kind, "__transaction_state-"))]
    return {
        "relay": cpu.publisher * 1e6,
        "postgres": cpu.postgres * 1e6,
        "broker": cpu.broker * 1e6,
        "to_broker": sum(_read_bytes(pid) for pid in servers.kafka.pids),
        "on_its_disk": sum(path.stat().st_size for folder in mine for path in folder.glob("*.log")),
        "wal": wal_position(site),
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
        before = used(servers, site, relay)
        relay.process.resume()
        wait_until_empty(site, _SECONDS)
        # At-most-once deletes before it sends. Control records follow the answer to a commit.
        wait_until(lambda: ends.now() >= base + count, "the events on Kafka", _SECONDS, every=0.2)
        time.sleep(_CONTROL_RECORDS_SECONDS)
        figures = {name: (now - before[name]) / count for name, now in used(servers, site, relay).items()}
        appended = read_back(site, warm, count)
        appended.tally.note(run)
        if run.repeated:
            raise BenchError(f"{run.repeated} events were sent again: is relay.lease_seconds too short for the pause?")
        run.figures |= {"rate": appended.rate, **figures}
