"""The hands that carry a course out: two of them, one for the relays and one for servers and networks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

import kafka_proxy
import psutil
from kafka_proxy import Action, KafkaProxy
from proxy import TcpProxy
from standby import Standby
from support import MUTANT, logged
from threads import Threads

from chaos.course import RELAYS, Course, Fault
from chaos.recovery import Clock
from outbox.sandbox.errors import ServiceError
from outbox.sandbox.kafka import KafkaCluster
from outbox.sandbox.postgres import PostgresServer
from outbox.testing.fixtures import RelayFactory, RelayProcess
from relay.failpoints import VARIABLE

_API_KEYS: Final = {
    "produce": kafka_proxy.PRODUCE,
    "init_producer_id": kafka_proxy.INIT_PRODUCER_ID,
    "metadata": kafka_proxy.METADATA,
    "add_partitions_to_txn": kafka_proxy.ADD_PARTITIONS_TO_TXN,
    "end_txn": kafka_proxy.END_TXN,
}
_ACTIONS: Final[dict[str, Action]] = {
    "drop_request": kafka_proxy.drop_request,
    "drop_response": kafka_proxy.drop_response,
    "duplicate_request": kafka_proxy.duplicate_request,
    "delay_request": kafka_proxy.delay_request(1.5),
    "delay_response": kafka_proxy.delay_response(1.0),
}
# A relay that a failpoint has halted is woken after this, as an operator's SIGCONT would.
_HALTED_SECONDS: Final = 6.0
_END_SECONDS: Final = 15.0
_OF_BROKER: Final = frozenset({"broker_kill", "broker_pause", "kafka_cut", "kafka_blackhole"})


def program(mutation: str) -> tuple[str, ...]:
    """Return how the command line is started, with a guard taken out."""
    return ("-m", "relay.cli") if mutation == "none" else (MUTANT, mutation)


@dataclass
class Servers:
    """What a run goes on. ``postgres`` is the one that takes writes; ``standby`` is None once it is promoted."""

    postgres: PostgresServer
    kafka: KafkaCluster
    postgres_proxies: Sequence[TcpProxy]
    kafka_proxies: Sequence[KafkaProxy]
    standby: Standby | None = None

    def heal(self) -> None:
        """Undo whatever may still be broken."""
        for proxy in self.kafka_proxies:
            proxy.clear()
            proxy.heal()
            proxy.release()
        for each in self.postgres_proxies:
            each.heal()
        self.heal_kafka()
        self.postgres.start()

    def heal_kafka(self) -> None:
        """Let every broker run: they serve the next run too, however this one ends."""
        for number in range(self.kafka.brokers):
            self.kafka.resume_broker(number)
            self.kafka.start_broker(number)


class Relays:
    """Three relays, each replaced when it ends. ``mutation``: a guard taken out, for the checker to find."""

    def __init__(
        self,
        factory: RelayFactory,
        course: Course,
        settings: dict[str, Any],
        mutation: str = "none",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._factory = factory
        self._env = dict(env or {})
        self._program = program(mutation)
        self._course = course
        self._settings = dict(settings)
        self._lock = threading.RLock()
        self._starts = 0
        self._held_back = False
        self._halted: dict[int, float] = {}
        self.paused: set[int] = set()
        self.armed = 0
        self.changed = 0
        """Relays that were ended because they were to be started with other settings."""
        self.all: list[RelayProcess] = []
        self.present: list[RelayProcess] = [self._start() for _ in range(RELAYS)]

    def replace(self, slot: int) -> None:
        """Start another one in this place, unless operators want none."""
        with self._lock:
            if not self._held_back:
                self._halted.pop(slot, None)
                self.present[slot] = self._start()

    def tend(self) -> None:
        """Replace the relays that a failpoint has ended, wake those that it has halted."""
        for slot, relay in enumerate(self.present):
            if not relay.running:
                self.replace(slot)
            elif slot not in self.paused and _halted(relay):
                since = self._halted.setdefault(slot, time.monotonic())
                if time.monotonic() - since > _HALTED_SECONDS:
                    del self._halted[slot]
                    relay.resume()

    def end(self) -> None:
        """End all of them, as a crash would."""
        for relay in self.present:
            relay.kill()

    def last(self) -> list[RelayProcess]:
        """Start the ones that drain the outbox in the end, without failpoints."""
        self.present = [self._make({}) for _ in range(self._course.last_relays)]
        return self.present

    def _start(self) -> RelayProcess:
        armed = self._course.failpoint(self._starts)
        self._starts += 1
        self.armed += bool(armed)
        return self._make({VARIABLE: armed} if armed else {})

    def change(self, **settings: Any) -> None:
        """Start relays with these settings from now on, and end those that have others, each after its turn.

        Others than RelayHand may call this and ``stopped``: it starts the successors, and wakes those that are halted.
        """
        with self._lock:
            self._settings |= settings
            old = [relay for relay in self.all if relay.running]
        self._terminate(old)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """End the relays and start no others meanwhile. One that is halted sleeps on: it looks as if it had ended."""
        with self._lock:
            self._held_back = True
            asleep = [self.present[slot] for slot in self.paused]
            old = [relay for relay in self.all if relay.running and relay not in asleep]
        try:
            self._terminate(old)
            yield
        finally:
            self._held_back = False

    def _terminate(self, relays: Sequence[RelayProcess]) -> None:
        for relay in relays:
            relay.terminate()
        for relay in relays:
            try:
                relay.wait(_END_SECONDS)
            except AssertionError:
                relay.kill()
        self.changed += len(relays)

    def settings(self) -> dict[str, Any]:
        """Return what relays are started with."""
        with self._lock:
            return dict(self._settings)

    def _make(self, env: dict[str, str]) -> RelayProcess:
        with self._lock:
            relay = self._factory(env={**self._env, **env}, program=self._program, **self._settings)
            self.all.append(relay)
        return relay


def _halted(relay: RelayProcess) -> bool:
    try:
        return psutil.Process(relay.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


class Planned(Protocol):
    """A fault, or an operator's act."""

    @property
    def at(self) -> float: ...
    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float: ...


_P = TypeVar("_P", bound=Planned)


@dataclass(order=True)
class _Step(Generic[_P]):
    at: float
    number: int
    planned: _P = field(compare=False)
    begins: bool = field(compare=False)


class Hand(Threads, Generic[_P]):
    """Carries out one track of the course in a thread, and calls ``healed`` with the name of each step that has ended.

    It lets ``clock`` stand while nothing can be published. ``stop`` lets it finish the step in hand and heal what is
    broken.
    """

    def __init__(
        self, name: str, planned: Sequence[_P], clock: Clock, healed: Callable[[str], None] = lambda _: None
    ) -> None:
        self._clock = clock
        self._healed = healed
        steps: list[_Step[_P]] = []
        for number, each in enumerate(planned):
            steps.append(_Step(each.at, 2 * number, each, begins=True))
            steps.append(_Step(each.at + each.seconds, 2 * number + 1, each, begins=False))
        self._steps = sorted(steps)
        self.done: list[_P] = []
        super().__init__({name: self._run}, seconds=None)

    def _run(self) -> None:
        started = time.monotonic()
        for step in self._steps:
            while not self._stop.is_set() and time.monotonic() < started + step.at:
                self._stop.wait(min(max(started + step.at - time.monotonic(), 0.001), 0.25))
                self._meanwhile()
            if self._stop.is_set() and step.begins:
                continue
            if step.begins:
                self._begin(step.planned)
                self.done.append(step.planned)
            elif step.planned in self.done:
                self._end(step.planned)
                self._healed(step.planned.name)
        while not self._stop.wait(0.25):
            self._meanwhile()

    def _meanwhile(self) -> None:
        pass

    def _begin(self, planned: _P) -> None:
        raise NotImplementedError

    def _end(self, planned: _P) -> None:
        raise NotImplementedError


class RelayHand(Hand[Fault]):
    """Kills, stops and halts relays, and replaces those that ended."""

    def __init__(self, course: Course, relays: Relays, clock: Clock, healed: Callable[[str], None]) -> None:
        super().__init__("relay-hand", [each for each in course.faults if each.name.startswith("relay")], clock, healed)
        self._relays = relays

    def _meanwhile(self) -> None:
        self._relays.tend()

    def _begin(self, planned: Fault) -> None:
        relay = self._relays.present[planned.target]
        match planned.name:
            case "relay_kill":
                relay.kill()
            case "relay_term":
                # A halted one would end when it is woken.
                relay.resume()
                relay.terminate()
            case "relay_pause" if relay.running:
                self._relays.paused.add(planned.target)
                try:
                    relay.pause()
                except (ServiceError, psutil.NoSuchProcess):
                    # A failpoint may have ended it in this very moment.
                    if relay.running:
                        raise

    def _end(self, planned: Fault) -> None:
        if planned.name == "relay_pause":
            self._relays.paused.discard(planned.target)
            self._relays.present[planned.target].resume()
        else:
            self._relays.replace(planned.target)


class ServerHand(Hand[Fault]):
    """Strikes Postgres, the brokers and the networks on both sides of the relays."""

    def __init__(self, course: Course, servers: Servers, clock: Clock, healed: Callable[[str], None]) -> None:
        faults = [each for each in course.faults if not each.name.startswith("relay")]
        super().__init__("server-hand", faults, clock, healed)
        self._servers = servers

    def _stops_all(self, planned: Fault) -> bool:
        """Return whether nothing can be published until this has ended."""
        name = planned.name
        return name.startswith(("postgres", "promote")) or (
            name in _OF_BROKER and len(self._servers.kafka_proxies) == 1
        )

    def _begin(self, planned: Fault) -> None:
        if self._stops_all(planned):
            self._clock.stop()
        servers = self._servers
        match planned.name:
            case "postgres_kill":
                servers.postgres.kill()
            case "postgres_cut":
                for each in servers.postgres_proxies:
                    each.cut()
            case "postgres_blackhole":
                for each in servers.postgres_proxies:
                    each.blackhole()
            case "promote":
                self._promote()
            case "broker_kill":
                servers.kafka.kill_broker(planned.target)
            case "broker_pause":
                servers.kafka.pause_broker(planned.target)
            case _:
                self._disturb_kafka(planned)

    def _disturb_kafka(self, fault: Fault) -> None:
        networks = self._servers.kafka_proxies
        match fault.name:
            case "kafka_cut":
                networks[fault.target].cut()
            case "kafka_blackhole":
                networks[fault.target].blackhole()
            case "kafka_requests":
                # To whichever broker they go.
                for each in networks:
                    each.on(_API_KEYS[fault.request], _ACTIONS[fault.action], fault.times)
            case _:
                raise AssertionError(fault)

    def _end(self, planned: Fault) -> None:
        servers = self._servers
        match planned.name:
            case "postgres_kill":
                servers.postgres.start()
            case "postgres_blackhole":
                for each in servers.postgres_proxies:
                    each.heal()
            case "broker_kill":
                servers.kafka.start_broker(planned.target)
            case "broker_pause":
                servers.kafka.resume_broker(planned.target)
            case "kafka_blackhole":
                servers.kafka_proxies[planned.target].heal()
            case "kafka_requests":
                for network in servers.kafka_proxies:
                    network.clear()
                    network.release()
        if self._stops_all(planned):
            self._clock.start()

    def _promote(self) -> None:
        """The primary is lost for good, and its standby takes over."""
        servers = self._servers
        assert servers.standby is not None
        servers.postgres.kill()
        servers.standby.promote()
        servers.postgres, servers.standby = servers.standby, None


def loss_bound_of(done: Sequence[Fault], relays: Relays, turn_events: int, brokers: int) -> tuple[int, int]:
    """Return how many events may be lost at most once, and how many may come late, for the checker.

    Relays count what is not acknowledged in time, and what comes late all the same; but not the turn in flight of one
    that is killed, or that has abandoned it. Nor what another broker is to lead: it is sent again; and what was
    acknowledged is lost if its leader fails before a replica has it.
    """
    said = sum(line["events"] for relay in relays.all for line in logged(relay, '"events may be lost'))
    # The status of a relay that has abandoned its turn is 1.
    killed = sum(not relay.running and relay.wait() in {-signal.SIGKILL, 1} for relay in relays.all)
    led = RELAYS * sum(fault.name.startswith("broker") for fault in done)
    return said + turn_events * (killed + led * (brokers > 1)), said + turn_events * (killed + led)


def bound_of(done: Sequence[Fault], relays: Relays, turn_events: int) -> tuple[int, int, int]:
    """Return events of a turn, faults, and how often a worker was hit, for the checker's bound on repeats.

    Failpoints that were armed count as if they had been reached, and so do the end of all relays before the drain, and
    relays that were ended for other settings: Kafka may be away just then.
    """
    hits = sum(1 if fault.name.startswith("relay") else RELAYS for fault in done) + relays.changed
    return turn_events, len(done) + relays.armed + relays.changed + 1, hits + relays.armed + RELAYS
