"""A worker's loop with a source and a publisher that do what a test says.

Both keep the contracts of ``relay.core.ports``: tests/integration/relay/core/test_source_contract.py and
test_publisher_contract.py run over them and over the real ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from threads import in_background

from outbox._clients.clock import uptime
from outbox.errors import OutboxError, SchemaError
from relay.core import lane as core_lane
from relay.core import loop
from relay.core.lane import LoopSettings
from relay.core.lease import HeldLanes, Lease
from relay.core.loop import WorkerLoop
from relay.core.pauses import CurrentPauses
from relay.core.ports import (
    Batches,
    Claim,
    Completed,
    Confirm,
    Failed,
    Fetched,
    Receipt,
    Sent,
    StatementCutShort,
    Unavailable,
    Unconfirmed,
    UnsettledBatch,
)

SETTINGS = LoopSettings(batch_size=2, max_idle_seconds=0.002, min_backoff_seconds=0.001, max_backoff_seconds=0.004)


def claim(lane: int, position: int) -> Claim:
    return Claim(position, f"e{position}", "Order", "k", "T", "2026-01-01T00:00:00Z", b"{}", None, lane=lane)


def all_of(batches: Batches) -> Completed:
    return Completed({lane: Receipt(UnsettledBatch(claims)) for lane, claims in batches.items()})


def positions(batches: Batches) -> dict[int, list[int]]:
    return {lane: [item.position for item in claims] for lane, claims in batches.items()}


class Clock:
    """What the loop has for the module ``time``."""

    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


class Stop(threading.Event):
    """Whoever waits for it has waited at once."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if not self.is_set():
            self._clock.sleep(timeout)
        return self.is_set()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    for module in (loop, core_lane):
        monkeypatch.setattr(module, "time", clock)
    return clock


@dataclass
class Table:
    """The rows of all lanes, as several sources see them one after the other."""

    rows: dict[int, list[int]]
    opened: int = 0
    closed: int = 0
    fetched: list[dict[int, int]] = field(default_factory=list)
    waited: list[set[int]] = field(default_factory=list)
    left_out: list[frozenset[Any]] = field(default_factory=list)
    without: list[set[int]] = field(default_factory=list)
    paused: list[set[int]] = field(default_factory=list)
    on_pause: Callable[[Collection[int]], None] = lambda _: None
    refused: list[int] = field(default_factory=list)
    fail_fetch: list[Exception] = field(default_factory=list)
    fail_settle: list[Exception] = field(default_factory=list)
    fail_lanes: dict[int, list[OutboxError]] = field(default_factory=dict)
    """What fetch, settle and flush say of a lane, once for each error."""
    stuck: set[int] = field(default_factory=set)
    locked: dict[int, int] = field(default_factory=dict)
    """How many more statements on a lane wait for a lock, each until ``on_lock`` returns, and are cut short."""
    on_lock: Callable[[], None] = lambda: None
    known: bool = True
    behind: bool = False
    """Whether a turn is settled while the next one is published, as long as there is one."""
    unconfirmed: bool = False
    """A turn is sent before the one before is settled, and published after that."""
    fail_confirm: list[OutboxError] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    on_wait: Callable[[Collection[int]], None] = lambda _: None

    def source(self) -> OneSource:
        self.opened += 1
        return OneSource(self)

    @property
    def left(self) -> list[int]:
        return sorted(row for rows in self.rows.values() for row in rows)


class OneSource:
    """One source over the table. What it was told to settle is gone with the next fetch or flush."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.leases: dict[int, Lease] = {}
        self.unsettled: dict[int, UnsettledBatch] = {}
        self.settling: list[int] = []
        self.closed = False

    @property
    def store(self) -> Any:
        raise NotImplementedError

    def hold(self, lease: Lease) -> None:
        self.leases[lease.lane] = lease

    def drop(self, lane: int) -> None:
        self.leases.pop(lane, None)
        self.unsettled.pop(lane, None)

    def fetch(self, limits: Mapping[int, int]) -> Fetched:
        assert limits.keys() <= self.leases.keys()
        if self.table.fail_fetch:
            raise self.table.fail_fetch.pop(0)
        assert not self.settling
        self.table.fetched.append(dict(limits))
        if self.table.behind and self.unsettled and (left := self._left(limits)):
            self.settling = list(self.unsettled)
            return Fetched(left, {}, self.table.known, list(self.settling))
        if self.table.unconfirmed and (left := self._left(limits)):
            self.settling = sorted(self.unsettled.keys() | left.keys())
            return Fetched(left, unconfirmed=True)
        failed = self._make_durable(self.unsettled.keys() | limits.keys())
        batches = {
            lane: [claim(lane, row) for row in sorted(self.table.rows.get(lane, []))[:limit]]
            for lane, limit in limits.items()
            if lane not in failed
        }
        return Fetched({lane: batch for lane, batch in batches.items() if batch}, failed, self.table.known)

    def confirm(self, deadline: float) -> Mapping[int, OutboxError]:
        assert self.settling
        if self.table.fail_confirm:
            raise self.table.fail_confirm.pop(0)
        settling, self.settling = self.settling, []
        return self._make_durable(settling)

    def _left(self, limits: Mapping[int, int]) -> dict[int, list[Claim]]:
        """Return what is neither settled nor being settled."""
        going = {item.position for batch in self.unsettled.values() for item in batch.rows}
        rows = {lane: sorted(set(self.table.rows.get(lane, [])) - going)[:limit] for lane, limit in limits.items()}
        return {lane: [claim(lane, row) for row in each] for lane, each in rows.items() if each}

    def go_on_without(self, lanes: Collection[int]) -> None:
        self.table.without.append(set(lanes))

    def pause(self, lanes: Collection[int]) -> Mapping[int, OutboxError]:
        self.table.paused.append(set(lanes))
        self.table.on_pause(lanes)
        return {}

    def leave_out(self, kinds: frozenset[Any]) -> None:
        self.table.left_out.append(kinds)

    def settle(self, receipts: Mapping[int, Receipt]) -> Mapping[int, OutboxError]:
        if self.table.fail_settle:
            raise self.table.fail_settle.pop(0)
        settling, self.settling = self.settling, []
        failed = self._make_durable(settling)
        self.table.ended += settling
        for lane, receipt in receipts.items():
            before = self.unsettled[lane].rows if lane in failed else ()
            refused = [item for item, _ in receipt.refused]
            self.unsettled[lane] = replace(receipt.published, rows=[*before, *receipt.published.rows, *refused])
        for receipt in receipts.values():
            self.table.refused += [item.position for item, _ in receipt.refused]
        return failed

    def flush(self, lanes: Collection[int]) -> Mapping[int, OutboxError]:
        return self._make_durable(lanes)

    def wait(self, lanes: Collection[int], seconds: float, stop: threading.Event) -> bool:
        unknown = not self.table.known
        self.table.waited.append(set(lanes))
        self.table.on_wait(lanes)
        stop.wait(seconds)
        return unknown or any(self.table.rows.get(lane) for lane in lanes)

    def close(self) -> None:
        self.table.closed += not self.closed
        self.closed = True

    def _make_durable(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        stuck = [
            item.position
            for lane in lanes
            if lane in self.unsettled
            for item in self.unsettled[lane].rows
            if item.position in self.table.stuck
        ]
        if stuck:
            raise SchemaError(f"{stuck} is too long")
        for lane in self.unsettled.keys() & set(lanes):
            if self.table.locked.get(lane):
                self.table.locked[lane] -= 1
                self.table.on_lock()
                raise StatementCutShort(f"lane {lane} is locked")
        failed = {lane: self.table.fail_lanes[lane].pop(0) for lane in lanes if self.table.fail_lanes.get(lane)}
        for lane in set(lanes) - failed.keys():
            for item in self.unsettled.pop(lane, UnsettledBatch()).rows:
                if item.position in self.table.rows[lane]:
                    self.table.rows[lane].remove(item.position)
        return failed


Step = Callable[[Batches], Sent]


@dataclass
class Broker:
    """What was published; ``script`` says what becomes of the coming turns, then all is acknowledged."""

    script: list[Step] = field(default_factory=list)
    log: list[int] = field(default_factory=list)
    turns: list[dict[int, list[int]]] = field(default_factory=list)
    joins: list[list[int]] = field(default_factory=list)
    fail_join: dict[int, list[OutboxError]] = field(default_factory=dict)
    fail_open: list[Exception] = field(default_factory=list)
    always: Step = all_of
    opened: int = 0
    closed: int = 0
    served: int = 0
    paused: frozenset[Any] = frozenset()

    def publisher(self, source: OneSource) -> OnePublisher:
        assert source.table.opened == source.table.closed + 1
        assert self.opened == self.closed
        if self.fail_open:
            raise self.fail_open.pop(0)
        self.opened += 1
        return OnePublisher(self)


class OnePublisher:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.joined: dict[int, Lease] = {}
        self.closed = False

    def join(self, leases: Sequence[Lease]) -> Mapping[int, OutboxError]:
        self.broker.joins.append([lease.lane for lease in leases])
        failing = self.broker.fail_join
        failed = {lease.lane: failing[lease.lane].pop(0) for lease in leases if failing.get(lease.lane)}
        self.joined |= {lease.lane: lease for lease in leases if lease.lane not in failed}
        return failed

    def publish(self, batches: Batches, confirm: Confirm | None = None) -> Sent:
        assert batches
        assert batches.keys() <= self.joined.keys()
        assert all(self.joined[lane].secure for lane in batches)
        self.broker.turns.append(positions(batches))
        sent = (self.broker.script.pop(0) if self.broker.script else self.broker.always)(batches)
        if confirm is not None and isinstance(sent, Completed):
            try:
                if unconfirmed := confirm(0.0):
                    return Unconfirmed(unconfirmed, publisher_unusable=True)
            except Unavailable as error:
                return Failed(error)
        for receipt in sent.receipts.values():
            self.broker.log += [item.position for item in receipt.published.rows]
        return sent

    def unpublishable_kinds(self) -> frozenset[Any]:
        return self.broker.paused

    def serve(self) -> None:
        self.broker.served += 1

    def close(self) -> None:
        self.broker.closed += not self.closed
        self.closed = True


@dataclass
class Watcher:
    seen: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    errors: dict[int, int] = field(default_factory=dict)
    raised: list[Exception] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    limits: list[tuple[int, int]] = field(default_factory=list)

    def published(self, batches: Sequence[Sequence[Claim]], at: float) -> None:
        assert at <= time.monotonic()
        self.seen.append(f"published {sum(map(len, batches))}")

    def turn(self, events: int, *_: float) -> None:
        self.turns.append(events)

    def turn_limits(self, events: int, lanes: int) -> None:
        self.limits.append((events, lanes))

    def refused(self, lane: int, item: Claim, reason: str) -> None:
        self.refusals.append(item.position)
        self.seen.append(f"refused {lane}/{item.position} {reason}")

    def unavailable(self, lanes: Collection[int], error: Exception, wait_seconds: float) -> None:
        self.waits.append(wait_seconds)
        self.raised.append(error)
        for lane in lanes:
            self.errors[lane] = self.errors.get(lane, 0) + 1
        self.seen.append(f"unavailable {sorted(lanes)} {error}")

    def recovered(self, lanes: Collection[int]) -> None:
        self.seen.append(f"recovered {sorted(lanes)}")


class World:
    """A worker's loop over a table and a broker. ``run`` ends when an idle worker finds that nothing is left."""

    def __init__(self, rows: Mapping[int, Sequence[int]], *steps: Step, settings: LoopSettings = SETTINGS) -> None:
        assert isinstance(loop.time, Clock)
        self.clock = loop.time
        self.stop = Stop(self.clock)
        self.held = HeldLanes()
        self.pauses = CurrentPauses()
        self.table = Table({lane: list(each) for lane, each in rows.items()})
        self.broker = Broker(list(steps))
        self.watcher = Watcher()
        self.leases = {lane: Lease(lane, 1, 60.0, uptime()) for lane in rows}
        self.held.give(self.leases.values())
        self.table.on_wait = lambda _: self.stop.set() if not self.table.left else None
        self.loop = WorkerLoop(
            self.table.source,
            self.broker.publisher,
            held=self.held,
            stop=self.stop,
            observer=self.watcher,
            settings=settings,
            pauses=self.pauses,
        )

    def run(self) -> World:
        # What would never end is a failure, and the loop lets go in order all the same.
        alarm = threading.Timer(20, self.stop.set)
        alarm.start()
        self.loop.run()
        assert alarm.is_alive(), "the loop did not come to an end by itself"
        alarm.cancel()
        return self

    def clean(self) -> dict[int, bool]:
        """Lanes that were let go of, and whether their row need name no id any more."""
        return {lane: clean for lane, (clean, _) in self.let_go().items()}

    def let_go(self) -> dict[int, tuple[bool, bool]]:
        """The same, and whether they were lost."""
        return {gone.lease.lane: (gone.clean, gone.lost) for gone in self.held.take_let_go()}


@contextmanager
def looped(source: Callable[[], Any], leases: Collection[Lease], always: Step, *, batch: int) -> Iterator[Watcher]:
    """The product's own loop in a thread, over a source of the test's, and a broker that treats all turns alike."""
    stop, held, watcher, publisher = threading.Event(), HeldLanes(), Watcher(), OnePublisher(Broker(always=always))
    held.give(leases)
    loop = WorkerLoop(
        source,
        lambda _source: publisher,
        held=held,
        stop=stop,
        observer=watcher,
        settings=LoopSettings(batch_size=batch, min_backoff_seconds=0.001, max_backoff_seconds=0.001),
    )
    with in_background(lambda _: loop.run(), stop=stop):
        yield watcher


def spread(lanes: int, each: int) -> dict[int, list[int]]:
    """Rows of some lanes; ids come in turns, as writers draw them."""
    return {lane: [1 + lane + lanes * n for n in range(each)] for lane in range(lanes)}


def in_order(world: World, rows: Mapping[int, Sequence[int]]) -> bool:
    """Return whether every lane's events were published in order and once."""
    return all([row for row in world.broker.log if row in set(each)] == sorted(each) for each in rows.values())
