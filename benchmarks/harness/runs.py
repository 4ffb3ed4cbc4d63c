"""The two measurements that most scenarios are made of: a drain, and the latency under a steady load."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.harness.load import SMALL, Backlog, Steady, bare_writer, fill, received, wait_until_empty, writer
from benchmarks.harness.measure import Cpu, percentile
from benchmarks.harness.publishers import Publisher, Way, publishing
from benchmarks.harness.relays import Relay
from benchmarks.harness.results import Run
from benchmarks.harness.servers import LANES, BenchError, Servers, Site, wait_until
from benchmarks.harness.topic import Ends, read_back, reader

_LOOK_SECONDS: Final = 0.02
_QUIET_SECONDS: Final = 0.7
_STUCK_SECONDS: Final = 90.0
_CHECK_SECONDS: Final = 2.0
_LEFT_OUT_SECONDS: Final = 1.0
_OFFERED_PART: Final = 0.95
KAFKA_ONLY: Final = Way("bare produce(), no outbox")
"""What the clients and the broker take by themselves: from before produce() to poll()."""

Probe = Callable[[Publisher], dict[str, float]]


@dataclass(frozen=True)
class Drain:
    """A backlog to be drained. ``warm`` events go first; the publisher is halted while the others are written.

    size    of each payload in bytes.
    keys    chooses the keys; None: the usual ones.
    probe   looks at the publisher when the first events of the backlog have come; its figures are kept.
    """

    count: int
    warm: int
    lanes: int = LANES
    size: int = SMALL
    keys: Callable[[Site], tuple[str, ...]] | None = None
    probe: Probe | None = None


def drain(servers: Servers, way: Way, run: Run, what: Drain) -> None:
    """Measure how fast a backlog is drained. The rate is by the broker's clock, from the first append to the last."""
    with servers.site(f"{run.scenario}-{way.name}", what.lanes) as site, publishing(way, servers, site) as publisher:
        ends = Ends(site)
        backlog = Backlog(what.count, what.warm, what.size)
        if what.keys is not None:
            backlog = replace(backlog, keys=what.keys(site))
        warm_up(way, publisher, ends, replace(backlog, count=what.warm, first=0))
        publisher.halt()
        base = ends.now()
        fill(site, backlog)
        publisher.start()
        figures = watch(servers, publisher, ends, base, what.count, what.probe)
        if isinstance(publisher, Relay):
            wait_until_empty(site, _STUCK_SECONDS)
        appended = read_back(site, what.warm, what.count)
        appended.tally.note(run)
        run.figures |= {"rate": appended.rate, **figures}


def warm_up(way: Way, publisher: Publisher, ends: Ends, backlog: Backlog) -> None:
    """Start the publisher and have it publish, so that code, caches, connections and the topic are warm."""
    if way.follows:
        publisher.start()
        fill(publisher.site, backlog)
    else:
        fill(publisher.site, backlog)
        publisher.start()
    wait_until(lambda: ends.now() >= backlog.count, f"{backlog.count} events to warm up", _STUCK_SECONDS, every=0.05)
    if isinstance(publisher, Relay):
        wait_until_empty(publisher.site, _STUCK_SECONDS)


def watch(
    servers: Servers, publisher: Publisher, ends: Ends, base: int, count: int, probe: Probe | None = None
) -> dict[str, float]:
    """Look at the topic until the backlog has come and nothing more does; return what it cost.

    Transactions have a control record in each partition, so the end of the topic alone does not say that all has come:
    that is counted afterwards.
    """
    first: Cpu | None = None
    last: Cpu | None = None
    at_first, now = base, base
    figures: dict[str, float] = {}
    changed = looked = time.monotonic()
    while now < base + count or time.monotonic() < changed + _QUIET_SECONDS:
        time.sleep(_LOOK_SECONDS)
        found = ends.now()
        if found == now:
            if time.monotonic() > looked + _CHECK_SECONDS:
                publisher.check()
                looked = time.monotonic()
            if time.monotonic() > changed + _STUCK_SECONDS:
                raise BenchError(f"nothing new for {_STUCK_SECONDS:g} s; {found - base} of {count} have come")
            continue
        now, changed = found, time.monotonic()
        cpu = Cpu.now(servers, publisher.pids)
        if first is None:
            first, at_first = cpu, found
            if probe is not None:
                figures |= probe(publisher)
        elif last is None or cpu.publisher >= last.publisher:
            # A bare loop is gone as soon as all is acknowledged.
            last = cpu
    if first is not None and last is not None and last.total > first.total:
        figures |= {"per_core": (now - at_first) / (last.total - first.total), **last.percent_since(first)}
    return figures


@dataclass(frozen=True)
class Latency:
    """A steady load to be measured, after a warm-up; strict: see check_offered. ``together`` are committed at once.

    With ``rest`` seconds without events before it, what the first second brings counts, too.
    """

    rate: float
    seconds: float
    warm: int
    lanes: int = LANES
    strict: bool = True
    together: int = 1
    rest: float = 0


def check_offered(run: Run, committed: Sequence[int], rate: float, *, strict: bool) -> None:
    """Note the load that there really was. Raises BenchError if it was much less than what was to be measured.

    On a machine that is busy with other things the writer does not get there; ``strict`` off lets that pass.
    """
    run.figures["offered"] = offered = (len(committed) - 1) / ((committed[-1] - committed[0]) / 1e9)
    if strict and offered < _OFFERED_PART * rate:
        raise BenchError(f"the writer reached {offered:.0f} of {rate:g} events a second: is the machine quiet?")


def latency(servers: Servers, way: Way, run: Run, what: Latency) -> None:
    """Measure from the return of COMMIT in the writer to poll() in a reader of committed messages.

    Writer and reader are processes of their own; both use the machine's monotonic clock. What the first second brings
    is left out.
    """
    with servers.site(f"{run.scenario}-{way.name}", what.lanes) as site:
        count = int(what.rate * what.seconds)
        if way is KAFKA_ONLY:
            under_load(servers, None, site, run, what, Steady(what.rate, count))
            return
        with publishing(way, servers, site) as publisher:
            warm_up(way, publisher, Ends(site), Backlog(what.warm))
            time.sleep(what.rest)
            under_load(servers, publisher, site, run, what, Steady(what.rate, count, what.warm, what.together))


def under_load(
    servers: Servers,
    publisher: Publisher | None,
    site: Site,
    run: Run,
    what: Latency,
    steady: Steady,
    begun: Callable[[], object] = lambda: None,
) -> tuple[array[int], array[int]]:
    """Write a steady load, call ``begun`` when it begins, and note its latency and cost.

    Returns when each event was committed and when it came, in ns of the monotonic clock.
    """
    begin = writer if publisher is not None else bare_writer
    with reader(site, steady.first, steady.count) as receiving, begin(site, steady) as writing:
        pids = publisher.pids if publisher is not None else []
        before = Cpu.now(servers, pids)
        writing.send(b"go")
        begun()
        committed = received(writing, "the writer", what.seconds * 3 + 60)
        cost = Cpu.now(servers, pids).percent_since(before)
        seen, tally = received(receiving, "the reader", what.seconds * 5 + 60)
    tally.note(run)
    skipped = 0 if what.rest else int(what.rate * _LEFT_OUT_SECONDS)
    times = sorted((seen[n] - committed[n]) / 1e6 for n in range(skipped, steady.count))
    run.figures |= {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99), "max": times[-1], **cost}
    check_offered(run, committed, what.rate, strict=what.strict)
    return committed, seen
