"""One relay process: takes lanes, runs a thread for each, keeps the leases, gives lanes up, stops in two stages.

The control loop (this thread) talks to Postgres over a connection of its own; each lane's thread has its own
connection and its own producer, so a lane that waits holds up no other. While Postgres is away the lanes' threads wait
by themselves and the control loop reconnects; the leases are renewed as soon as it is back, unless taken by then.

Stopping: the first signal lets the batches in flight finish, at most ``shutdown_seconds``; then the lanes are released.
A second signal, or the deadline, leaves what is in flight to the next holder of the lane, who sends it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from outbox.errors import SchemaError
from relay.database import Connector, StandingError
from relay.lanes import LaneTable, Lease, next_step
from relay.loop import LaneLoop, Pace
from relay.marker import StateLost
from relay.ports import Claim, LaneLost, Publisher, Source, Unavailable
from relay.stream import Stream

log = structlog.get_logger("relay")


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What a relay does beside publishing, each ``seconds``.

    In a thread of its own, which waits for nothing but this: leases must be renewed while it waits for a lock, and an
    alert must go out while everything else waits for a standby.
    """

    task: Callable[[], None]
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a relay is made of. All times in seconds."""

    instance: str
    version: str
    schema: str
    lease_seconds: float
    shutdown_seconds: float
    pace: Pace
    connect: Connector
    source: Callable[[Lease, Events, Stream | None], Source]
    """Given the lease, whom to tell, and the stream if there is one."""
    publisher: Callable[[Lease, int, Source], Publisher]
    """Given the lease, the number of lanes, and the lane's source."""
    stream: Callable[[Sequence[Lease]], Stream] | None = None
    """Source wal: given the leases of all lanes. A relay without it polls."""
    upkeep: Sequence[Upkeep] = ()
    figures: Callable[[], Mapping[str, float]] = dict
    """For the last line of the log."""


class Events(Protocol):
    """What sources tell, besides what they give to the loop."""

    def dead(self, claim: Claim) -> None:
        """The event failed for good: it is in dead_letters."""
        ...

    def lost(self, count: int) -> None:
        """At-most-once: so many events may not have reached Kafka, and will not be sent again."""
        ...


class _LaneThread(threading.Thread):
    """One lane's loop in a thread. ``error`` holds what ended it, if anything did."""

    def __init__(self, lease: Lease, lanes: int, plan: Plan, stream: Stream | None) -> None:
        super().__init__(name=f"lane-{lease.lane}", daemon=True)
        self.lease = lease
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self._log = log.bind(lane=lease.lane, epoch=lease.epoch)
        self._loop = LaneLoop(
            lambda: plan.source(lease, self, stream),
            lambda source: plan.publisher(lease, lanes, source),
            stop=self.stopping,
            secure=lambda: lease.secure,
            observer=self,
            pace=plan.pace,
        )
        self.count = 0

    def run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001  the supervisor reports and decides
            self.error = error

    def published(self, count: int) -> None:
        self.count += count

    def refused(self, claim: Claim, reason: str) -> None:
        self._log.warning("event refused", **_shown(claim), reason=reason)

    def dead(self, claim: Claim) -> None:
        self._log.error("event is a dead letter now; see `outbox failures show`", **_shown(claim))

    def lost(self, count: int) -> None:
        self._log.error("events may be lost, as at-most-once allows", events=count)

    def unavailable(self, error: Exception, wait_seconds: float) -> None:
        if isinstance(error, StateLost | StandingError):
            # Not before a person has seen to it does it go on, by itself then.
            self._log.error("lane stopped", error=str(error))
        else:
            self._log.warning("waiting for a server", error=str(error), wait_seconds=round(wait_seconds, 2))

    def recovered(self) -> None:
        self._log.info("publishing again")


class _UpkeepThread(threading.Thread):
    """Does it until ``stop``, whatever happens. What is in the way is said once."""

    def __init__(self, upkeep: Upkeep, stop: threading.Event) -> None:
        super().__init__(name="upkeep", daemon=True)
        self._upkeep = upkeep
        self._stop_now = stop
        self._said: str | None = None

    def run(self) -> None:
        while True:
            try:
                self._upkeep.task()
            except (Unavailable, SchemaError) as error:
                if str(error) != self._said:
                    log.warning("upkeep has to wait", error=str(error))
                self._said = str(error)
            except Exception:
                log.exception("upkeep failed")
            else:
                self._said = None
            if self._stop_now.wait(self._upkeep.seconds):
                return


def _shown(claim: Claim) -> dict[str, str]:
    return {"event_id": claim.event_id, "aggregate_type": claim.aggregate_type, "event_type": claim.event_type}


class Supervisor:
    """Runs one relay until ``stop`` is set. Raises nothing for servers that are away: it waits as long as it takes."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._threads: dict[int, _LaneThread] = {}
        self._stream: Stream | None = None
        self._waits = False
        self._table: LaneTable | None = None
        self._failures = 0
        self._published = 0
        # Renewed three times within a lease, and often enough to notice a newcomer soon.
        self._beat_seconds = min(plan.lease_seconds / 3, 1.0)

    def run(self, stop: threading.Event, abandon: threading.Event) -> int:
        """Work until ``stop``; then finish what is in flight until done, the deadline, or ``abandon``.

        Gives the number of lanes whose batch in flight was abandoned: 0 for a clean stop.
        """
        log.info("relay started", instance=self._plan.instance, version=self._plan.version)
        done = threading.Event()
        for upkeep in self._plan.upkeep:
            _UpkeepThread(upkeep, done).start()
        try:
            while not stop.is_set():
                self._tick()
                stop.wait(self._beat_seconds)
        except BaseException:
            self._shut_down(abandon)
            raise
        else:
            return self._shut_down(abandon)
        finally:
            done.set()

    def _tick(self) -> None:
        try:
            if self._table is None:
                self._table = self._connect()
            self._keep(self._table)
            self._balance(self._table)
            if self._failures:
                self._failures = 0
                log.info("Postgres is back")
        except (Unavailable, SchemaError) as error:
            if self._failures == 0:
                log.warning("waiting for Postgres", error=str(error))
            self._failures += 1
            self._disconnect()

    def _connect(self) -> LaneTable:
        plan = self._plan
        source = "polling" if plan.stream is None else "wal"
        return LaneTable(plan.connect(), plan.schema, plan.instance, plan.version, plan.lease_seconds, source)

    def _disconnect(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            table.close()

    def _keep(self, table: LaneTable) -> None:
        """Say that we are alive, prolong the leases, and see to threads that have ended."""
        table.beat()
        renewal = table.renew([thread.lease for thread in self._threads.values()])
        for lease in renewal.lost:
            thread = self._threads[lease.lane]
            if not thread.stopping.is_set():
                log.warning("lane lost", lane=lease.lane, epoch=lease.epoch)
            thread.stopping.set()
        for lease in renewal.switched:
            if not self._threads[lease.lane].stopping.is_set():
                log.info("lane goes over to the other source", lane=lease.lane)
            self._threads[lease.lane].stopping.set()
        ended = [lane for lane, thread in self._threads.items() if not thread.is_alive()]
        if self._stream is not None:
            ended = self._end_together(ended)
        for lane in ended:
            thread = self._threads[lane]
            del self._threads[lane]
            self._published += thread.count
            if isinstance(thread.error, LaneLost):
                log.warning("lane lost", lane=lane, epoch=thread.lease.epoch, error=str(thread.error))
                continue
            table.release(thread.lease)
            if thread.error is not None:
                # Not a server that is away: a mistake in the settings, or a bug. Say it, and end: the process
                # manager restarts us, and the lanes are free for others in the meantime.
                raise thread.error
            log.info("lane released", lane=lane, epoch=thread.lease.epoch)

    def _end_together(self, ended: list[int]) -> list[int]:
        """The stream is read for all lanes or for none: if one ends, all do."""
        if not ended and not any(thread.stopping.is_set() for thread in self._threads.values()):
            return []
        for thread in self._threads.values():
            thread.stopping.set()
        if len(ended) < len(self._threads):
            return []
        self._close_stream()
        return ended

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _balance(self, table: LaneTable) -> None:
        census = table.census()
        if (waits := census.lanes == 0) != self._waits:
            self._waits = waits
            if waits:
                log.warning("this outbox is read from another source; this relay waits. See `outbox relay switch`")
        if self._plan.stream is not None:
            self._take_all(table, self._plan.stream)
            return
        step = next_step(census, self._plan.instance)
        for _ in range(step.acquire):
            lease = table.acquire()
            if lease is None:
                break
            log.info("lane acquired", lane=lease.lane, epoch=lease.epoch)
            self._begin(lease, census.total)
        for thread in list(self._threads.values())[: step.release]:
            thread.stopping.set()

    def _take_all(self, table: LaneTable, stream: Callable[[Sequence[Lease]], Stream]) -> None:
        if self._threads:
            return
        leases = table.acquire_all()
        if leases:
            log.info("lanes acquired", lanes=len(leases), epochs=[lease.epoch for lease in leases])
            self._stream = stream(leases)
            for lease in leases:
                self._begin(lease, len(leases))

    def _begin(self, lease: Lease, lanes: int) -> None:
        thread = _LaneThread(lease, lanes, self._plan, self._stream)
        self._threads[lease.lane] = thread
        thread.start()

    def _shut_down(self, abandon: threading.Event) -> int:
        log.info("relay stopping", lanes=len(self._threads))
        deadline = time.monotonic() + self._plan.shutdown_seconds
        for thread in self._threads.values():
            thread.stopping.set()
        next_beat = 0.0
        while any(thread.is_alive() for thread in self._threads.values()):
            if abandon.is_set() or time.monotonic() >= deadline:
                break
            # The leases must hold while the last batches go out.
            if time.monotonic() >= next_beat:
                self._tick_while_stopping()
                next_beat = time.monotonic() + self._beat_seconds
            abandon.wait(0.01)
        left = [thread for thread in self._threads.values() if thread.is_alive()]
        if not left:
            self._close_stream()
        for thread in left:
            log.error(
                "a batch in flight was abandoned; it stays in the outbox and will be sent again",
                lane=thread.lease.lane,
            )
        self._sign_off([thread for thread in self._threads.values() if not thread.is_alive()])
        published = self._published + sum(thread.count for thread in self._threads.values())
        log.info("relay stopped", published=published, **self._plan.figures())
        return len(left)

    def _tick_while_stopping(self) -> None:
        try:
            if self._table is not None:
                self._table.renew([thread.lease for thread in self._threads.values() if thread.is_alive()])
        except (Unavailable, SchemaError) as error:
            log.warning("could not renew leases while stopping", error=str(error))
            self._disconnect()

    def _sign_off(self, ended: list[_LaneThread]) -> None:
        try:
            if self._table is None:
                self._table = self._connect()
            for thread in ended:
                self._table.release(thread.lease)
            self._table.leave()
        except (Unavailable, SchemaError) as error:
            # The leases run out by themselves.
            log.warning("could not release the lanes", error=str(error))
        finally:
            self._disconnect()
