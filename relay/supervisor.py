"""One worker process: takes lanes, renews the leases, releases lanes, and stops in two stages.

The control loop (this thread) has its own connection to Postgres; the worker's loop, in another thread, has a second
one and the producers, for all lanes together. While Postgres is unavailable, the worker's loop waits by itself and the
control loop reconnects; the leases are renewed as soon as Postgres is back, unless another relay has taken the lanes.

A relay that has not been able to publish for two leases, and at least ten seconds, releases its lanes if another relay
is alive: that one may reach the brokers. It then does not count as alive for a minute, so that the others share all
lanes, and tries again; at once when none of the others is alive any more, and then it gives way to the next one at its
first failure.

Stopping: the first signal lets the turn in flight finish, for at most ``shutdown_seconds``; then the lanes are
released. A second signal, or the deadline, leaves the turn in flight to the next holders of the lanes, who send it
again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from outbox._clients.clock import DatabaseClock, uptime
from outbox.errors import SchemaError
from relay.core.health import STANDING_LEASES, Health, WorkerHealth
from relay.core.lane import LoopSettings, listed
from relay.core.lease import HeldLanes, Lease, LetGo
from relay.core.loop import WorkerLoop
from relay.core.pauses import CurrentPauses
from relay.core.ports import Publisher, Source, StatementCutShort, Unavailable
from relay.core.reports import FailureLog, LoopReports, Reminder, TurnMetrics
from relay.database import LOCK_PART, Connector, begin_session, unavailable_on_error
from relay.lanes import LaneDistribution, LaneTable, Releases, lock_session, next_step, source_problem
from relay.tasks.scheduled import NextDue
from relay.upkeep import MaintenanceTask

log = structlog.get_logger("relay")

# How long a relay that released its lanes because it can't publish takes no free ones.
_STAY_AWAY_SECONDS: Final = 60.0
_FORGET_SECONDS: Final = 60.0
# How often to see whether the control loop's connection has broken: several times before other relays, which then miss
# the session, look again after _MISSED_SECONDS.
_BROKEN_SECONDS: Final = 0.1
_MISSED_SECONDS: Final = 0.5
# How long to try that often to open another session: by then other relays have taken the lanes, or can't.
_HURRY_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of a relay. All times are in seconds."""

    instance: str
    version: str
    schema: str
    lease_seconds: float
    shutdown_seconds: float
    loop: LoopSettings
    connect: Connector
    source: Callable[[LoopReports], Source]
    publisher: Callable[[Source], Publisher]
    begin_stream: Callable[[Sequence[Lease]], None] | None = None
    """Source wal: called with the leases of all lanes when they are taken. A relay without it polls."""
    end_stream: Callable[[], None] = lambda: None
    """Source wal: called when the worker has let go of all lanes."""
    sends_again: bool = True
    """Whether the next holder of a lane sends again what was in flight. Then other relays may take the lanes as soon as
    this one's session in Postgres has ended; see lanes.py."""
    upkeep: Sequence[MaintenanceTask] = ()
    hanging: Callable[[], Sequence[float]] = tuple
    """For how many seconds a transaction has hung, for each partition with one."""
    topics: Callable[[], Mapping[str, str]] = dict
    """The topics that can't be written to, with the reasons."""
    grown: Callable[[], Mapping[str, str]] = dict
    """The topics that got more partitions lately, with what that means."""
    meter: TurnMetrics = field(default_factory=TurnMetrics)
    clock: DatabaseClock = field(default_factory=DatabaseClock)
    """Written by the control loop; the meter reads it."""
    pauses: CurrentPauses = field(default_factory=CurrentPauses)
    """Written by the control loop and the worker's loop; other parts read it."""
    next_due: NextDue = field(default_factory=NextDue)
    """Written by the control loop; the task that moves scheduled events reads it."""
    first_contact: Callable[[], None] = lambda: None
    """Asks Kafka for something when the relay starts, and logs that it does not answer. May wait."""
    began: float = field(default_factory=uptime)
    about: Mapping[str, object] = field(default_factory=dict)
    """The settings that the first line of the log shows."""

    @property
    def reads_wal(self) -> bool:
        return self.begin_stream is not None


class _WorkerThread(threading.Thread):
    """The worker's loop in a thread. ``error`` is the exception that ended it, if one did."""

    def __init__(self, components: Components, held: HeldLanes, health: WorkerHealth) -> None:
        super().__init__(name="worker", daemon=True)
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self.observer = LoopReports(health, components.meter)
        self.loop = WorkerLoop(
            lambda: components.source(self.observer),
            components.publisher,
            held=held,
            stop=self.stopping,
            observer=self.observer,
            settings=components.loop,
            pauses=components.pauses,
        )

    def run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001  the supervisor reports and decides
            self.error = error


class Supervisor:
    """Runs one worker until ``stop`` is set. Waits for unavailable servers as long as it takes."""

    def __init__(self, components: Components) -> None:
        self._components = components
        self._held = HeldLanes()
        self._releases = Releases()
        self._health = WorkerHealth(STANDING_LEASES * components.lease_seconds)
        self._worker = _WorkerThread(components, self._held, self._health)
        self._source_problem: str | None = None
        self._source_reminder = Reminder()
        self._table: LaneTable | None = None
        self._begun = False
        self._failures = FailureLog("waiting for Postgres", what="the leases")
        # Often enough to notice a new relay soon.
        self._tick_seconds = min(components.lease_seconds / 3, 1.0)
        # How long a lane that can't be settled may hold up the others of a stream.
        self._settle_seconds = STANDING_LEASES * components.lease_seconds
        self._beat_at: float | None = None
        self._forgot_at = self._disconnected_at = -1e9
        self._reported: frozenset[int] = frozenset()
        self._away_until = 0.0
        self._early_until = 0.0
        """When the time away would have ended that was cut short because no other relay was alive."""
        self._expired_reminder = Reminder()

    def health(self) -> Health:
        """Return what the lanes wait for, what is paused, and whether the relay is ready. Thread-safe."""
        held, obeyed = self._held.leases, self._components.pauses.obeyed
        health = self._health.look(
            held,
            self._worker.loop.turned_at,
            away=self._away,
            hanging=self._components.hanging(),
            topics=self._components.topics(),
            grown=self._components.grown(),
            source_problem=self._source_problem,
        )
        lanes = [lease.lane for lease in held if obeyed.covers(lease.lane)]
        return replace(health, paused_lanes=lanes, paused_topics=sorted(obeyed.topics))

    def run(self, stop: threading.Event, abandon: threading.Event) -> int:
        """Work until ``stop``; then finish what is in flight, until the deadline or ``abandon``.

        Returns the number of lanes whose batch in flight was abandoned: 0 for a clean stop.
        """
        components = self._components
        log.info("relay started", instance=components.instance, version=components.version, **components.about)
        threading.Thread(target=components.first_contact, name="first contact", daemon=True).start()
        done = threading.Event()
        for upkeep in components.upkeep:
            upkeep.start(done, self._health)
        self._worker.start()
        try:
            while not stop.is_set():
                self._tick()
                if self._worker.error is not None:
                    # Not an unavailable server, but a mistake in the settings, or a bug. End: the process manager
                    # restarts us, and meanwhile other relays can take the lanes.
                    raise self._worker.error
                self._rest(stop)
        except BaseException:
            self._shut_down(abandon)
            raise
        else:
            return self._shut_down(abandon)
        finally:
            done.set()

    def _rest(self, stop: threading.Event) -> None:
        """Wait until the next tick, which is early if our own session ends."""
        next_tick = time.monotonic() + self._until_tick()
        while (left := next_tick - time.monotonic()) > 0 and not stop.wait(min(left, _BROKEN_SECONDS)):
            if self._table is not None and self._table.broken:
                return

    def _until_tick(self) -> float:
        """Return the seconds until the next tick: few while another session is missed, or lanes are held with none."""
        if self._table is None:
            hurries = self._held.leases and time.monotonic() - self._disconnected_at < _HURRY_SECONDS
            return _BROKEN_SECONDS if hurries else self._tick_seconds
        return min(_MISSED_SECONDS, self._tick_seconds) if self._table.misses_sessions else self._tick_seconds

    def _tick(self) -> None:
        connected = self._table is not None
        if not self._try_tick() and connected and self._table is None:
            # Open another session before other relays take this one for ended.
            self._try_tick()

    def _try_tick(self) -> bool:
        """Do what is due. Returns False if Postgres is unavailable or refuses."""
        try:
            if self._table is None:
                self._table = self._connect()
            if not self._begun:
                self._begin(self._table)
            try:
                self._keep(self._table)
            except StatementCutShort:
                # The pauses are read in any case: with the leases renewed, we would publish on without knowing them.
                self._balance(self._table)
                raise
            self._balance(self._table)
            if self._health.ticked(started=self._worker.loop.has_succeeded or not self._held.leases):
                self._failures.over()
                log.info("Postgres is back")
        except (Unavailable, SchemaError) as error:
            self._failures.failed(error, self._health.control_waits(error))
            self._disconnect_after(error)
            return False
        return True

    def _connect(self) -> LaneTable:
        components = self._components
        source = "wal" if components.reads_wal else "polling"
        connection = components.connect()
        with unavailable_on_error("beginning a session"):
            pooled = not begin_session(connection, components.lease_seconds * LOCK_PART)
            session = lock_session(connection) if components.sends_again and not pooled else None
        # The next beat tells the others of this session, and the next renewal shows whether the lanes are still ours.
        self._beat_at = None
        return LaneTable(
            connection,
            components.schema,
            components.instance,
            components.version,
            components.lease_seconds,
            source,
            session=session,
            clock=components.clock,
            began=components.began,
        )

    def _begin(self, table: LaneTable) -> None:
        """Free the lanes of a process that had our name and was killed. Later they would be our own."""
        freed = table.free_former()
        self._begun = True
        if freed:
            log.info("lanes of a former process of this name are free", lanes=listed(freed))

    def _disconnect(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            self._disconnected_at = time.monotonic()
            table.close()

    def _disconnect_after(self, error: Exception) -> None:
        """Close the session, unless it can go on: others may take our lanes when it has ended. A server that has become
        a standby, for one, refuses everything until we connect again.
        """
        if not isinstance(error, StatementCutShort):
            self._disconnect()

    def _keep(self, table: LaneTable) -> None:
        """Record that we are alive, renew the leases, and release lanes that the worker has let go of."""
        now = uptime()  # the clock of leases: they are renewed as soon as a suspended machine wakes
        let_go = self._held.take_let_go()
        # Whether a turn or the renewal has found them taken.
        self._components.meter.lanes_lost.inc(sum(gone.lost for gone in let_go))
        self._release(table, let_go)
        obeyed = self._components.pauses.obeyed.numbers
        # Three times within a lease, and slightly early, because ticks are not exact.
        if self._beat_at is None or now - self._beat_at >= self._components.lease_seconds / 3 - self._tick_seconds / 3:
            self._beat_and_renew(table)
        elif obeyed != self._reported and not self._away:
            # A command waits for it.
            table.beat(obeyed)
        elif any(lease.remaining_seconds < lease.ttl_seconds * 0.3 for lease in self._held.ours):
            self._renew(table)  # their rows were locked, as the worker does when it settles
        self._reported = obeyed
        if now - self._forgot_at >= _FORGET_SECONDS:
            self._forgot_at = now
            table.forget_dead()

    def _beat_and_renew(self, table: LaneTable) -> None:
        now = uptime()
        try:
            if not self._away:
                table.beat(self._components.pauses.obeyed.numbers)
        except StatementCutShort:
            # Another session has our row locked, but not those of the lanes.
            self._renew(table)
            raise
        self._renew(table)
        self._beat_at = now

    def _renew(self, table: LaneTable) -> None:
        renewal = table.renew(self._held.ours)
        lost, switched = ([lease.lane for lease in leases] for leases in (renewal.lost, renewal.switched))
        if lost:
            log.warning("lane lost", lanes=listed(lost))
        if new := sorted(set(switched) - set(self._held.recalled)):
            log.info("lanes go over to the other source", lanes=listed(new))
        self._held.recall(lost, lost=True)
        self._held.recall(switched, settle_seconds=self._settle_seconds)
        if (lost or switched) and self._components.reads_wal:
            # The stream is read for all lanes or for none.
            self._held.recall_all(settle_seconds=self._settle_seconds)
        self._log_expired()

    def _log_expired(self) -> None:
        """Log our lanes whose leases can't be renewed: the loop silently skips them."""
        recalled = self._held.recalled
        expired = [lease for lease in self._held.leases if lease.remaining_seconds < 0 and lease.lane not in recalled]
        if expired and self._expired_reminder.is_due("expired"):
            log.error(
                "the leases of lanes have run out, and another session has their rows locked; see pg_stat_activity",
                lanes=listed([lease.lane for lease in expired]),
                seconds=round(max(-lease.remaining_seconds for lease in expired)),
            )

    def _release(self, table: LaneTable, let_go: Sequence[LetGo]) -> None:
        try:
            if released := self._releases.release(table, let_go):
                log.info("lanes released", lanes=listed(released))
        finally:
            if let_go and self._components.reads_wal:
                if self._held.leases:
                    self._held.recall_all(settle_seconds=self._settle_seconds)
                else:
                    self._components.end_stream()

    def _balance(self, table: LaneTable) -> None:
        distribution = table.distribution(self._components.next_due)
        self._note_pauses(table)
        self._note_source(waits=bool(distribution.total and not distribution.lanes))
        if self._give_way(table, distribution):
            return
        leases: Sequence[Lease] = []
        if self._components.reads_wal:
            leases = [] if self._held.leases else table.acquire_all()
        elif (step := next_step(distribution, self._components.instance)) > 0:
            leases = table.acquire(step)
        elif step < 0:
            self._held.recall_up_to(-step)
        if leases:
            self._note_pauses(table)
            self._give(leases)

    def _note_source(self, *, waits: bool) -> None:
        if not waits:
            self._source_problem = None
            self._source_reminder.over()
            return
        ours, other = ("wal", "polling") if self._components.reads_wal else ("polling", "wal")
        self._source_problem = source_problem(other, ours)
        if self._source_reminder.is_due(self._source_problem):
            log.warning(
                "this outbox is read from another source; this relay waits. See `outbox relay switch`",
                problem=self._source_problem,
            )

    def _note_pauses(self, table: LaneTable) -> None:
        """Hand over the pauses to the worker's loop, before lanes, so that the first turn obeys them."""
        known = self._components.pauses
        if table.pauses is None or table.pauses == known.now:
            return
        before, known.now = known.now, table.pauses
        if replace(before, numbers=known.now.numbers) != known.now:
            log.info(
                "pauses have changed",
                every_lane=known.now.every_lane,
                lanes=sorted(known.now.lanes),
                topics=sorted(known.now.topics),
            )

    def _give_way(self, table: LaneTable, distribution: LaneDistribution) -> bool:
        """Release the lanes after a while without success, if another relay is alive, and take none for a minute.

        Returns whether we take none now.
        """
        now = time.monotonic()
        loop = self._worker.loop
        since = loop.failing_since
        others = len(distribution.held.keys() - {self._components.instance})
        if self._away and not others:
            log.info("no other relay is alive; this one takes lanes again")
            self._early_until, self._away_until = self._away_until, now
            # It counts from now on, and shares the lanes of the next tick.
            self._beat_and_renew(table)
            return True
        # It has been patient before.
        patience = 0.0 if now < self._early_until else max(2 * self._components.lease_seconds, 10.0)
        if self._components.reads_wal and loop.lanes.has_unsettled and loop.without_session_since is None:
            # The stream is read for all lanes or for none, and what some have published must be settled first.
            since = None
        if since is not None and others and now - since >= patience and self._held.leases and not self._away:
            log.error("nothing could be published; the lanes are left to another relay", seconds=round(now - since))
            self._held.recall_all()
            self._away_until = now + _STAY_AWAY_SECONDS
            # The others share all lanes among themselves when this relay does not count.
            table.leave()
        return self._away

    @property
    def _away(self) -> bool:
        return time.monotonic() < self._away_until

    def _give(self, leases: Sequence[Lease]) -> None:
        if self._components.begin_stream is not None:
            self._components.begin_stream(leases)
        # Waits from when we held them before are over.
        self._health.goes_on([lease.lane for lease in leases])
        log.info("lanes acquired", lanes=len(leases), epochs={lease.lane: lease.epoch for lease in leases[:16]})
        if not self._held.leases:
            self._worker.loop.failing_since = None
        self._held.give(leases)

    def _shut_down(self, abandon: threading.Event) -> int:
        log.info("relay stopping", lanes=len(self._held.leases))
        deadline = time.monotonic() + self._components.shutdown_seconds
        self._worker.stopping.set()
        next_tick = 0.0
        while self._worker.is_alive() and not abandon.is_set() and time.monotonic() < deadline:
            if self._table is not None and self._table.broken:
                self._disconnect()
                next_tick = 0.0
            # Session and leases must hold while the last turn goes out.
            if time.monotonic() >= next_tick and self._held.leases:
                self._tick_while_stopping()
                next_tick = time.monotonic() + self._until_tick()
            self._worker.join(0.01)
        if not (left := self._held.leases if self._worker.is_alive() else []):
            self._components.end_stream()
        else:
            event = "a turn in flight was abandoned; its events stay in the outbox and will be sent again"
            if not self._components.sends_again:
                event = "a turn in flight was abandoned; its events may be lost, as at-most-once allows"
            log.error(event, lanes=listed([lease.lane for lease in left]))
        self._sign_off(abandoned=bool(left))
        log.info("relay stopped", published=self._worker.observer.count)
        return len(left)

    def _tick_while_stopping(self) -> None:
        try:
            if self._table is None:
                self._table = self._connect()
            if self._beat_at is None:
                self._beat_and_renew(self._table)
            else:
                self._table.renew(self._held.leases)
        except (Unavailable, SchemaError) as error:
            self._failures.failed(error, self._health.control_waits(error))
            self._disconnect_after(error)

    def _sign_off(self, *, abandoned: bool) -> None:
        """Release the lanes and leave. With a turn ``abandoned``, only lanes that were let go of before are released:
        the row and the session stay until the process ends, and other relays take this one for killed.
        """
        try:
            if self._table is None:
                self._table = self._connect()
            # A worker that ended with an error has not let go of its lanes.
            left = [] if abandoned else [LetGo(lease, clean=False) for lease in self._held.leases]
            self._releases.release(self._table, [*self._held.take_let_go(), *left])
            if not abandoned and not self._releases.left:  # others take those when our session has ended
                self._table.leave()
        except (Unavailable, SchemaError) as error:
            # The leases expire by themselves.
            log.warning("could not release the lanes", error=str(error))
        finally:
            if not abandoned:
                self._disconnect()
