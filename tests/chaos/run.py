"""One run: servers, load and faults of a course; then everything is healed, drained, read and checked."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

import confluent_kafka
import protocol_trace
import psycopg
from nursery import Nursery
from nursery import relays as relays_from

from chaos.audit import compare_with_audit
from chaos.checker import EXACTLY_ONCE, LossBound, RepeatBound, Verdict, check
from chaos.course import Course
from chaos.faults import RelayHand, Relays, ServerHand, bound_of, loss_bound_of
from chaos.history import Committed, EventIds, History, Message, Place
from chaos.members import MemberHand, Members
from chaos.operators import OperatorHand, audited
from chaos.reading import LiveReader, read_all, to_message
from chaos.recovery import STEADY, Clock, EffectWatch, RecoveryWatch
from chaos.specification import compare_with_specification
from chaos.stage import KafkaSite, Stage
from chaos.strangers import Strangers
from chaos.workload import Pace, Workload
from outbox.sandbox._process import patience
from outbox.testing.fixtures import RelayFactory

_EVENTS_A_SECOND: Final = 700.0
# With operators the relays' turns are to end with nothing left: marks rise to what waits behind dead letters only then.
_EVENTS_A_SECOND_BESIDE_OPERATORS: Final = 200.0
_BYTES_A_SECOND: Final = 2_000_000.0
# Three brokers and their replicas take half of two processors by themselves: a recovery would wait for these.
_PART_WITH_THREE_BROKERS: Final = 0.5
_STANDS_STILL_SECONDS: Final = 60.0
# What a relay logs of lanes that it can't publish.
_STANDING: Final = (
    '"lane stopped"',
    '"still waiting"',
    '"waiting for a server"',
    '"nothing could be published',
    "KAFKA-20734",
)

_BACKLOG: Final = """
SELECT count(*), (SELECT sum(attempts) FROM outbox.failures), (SELECT count(*) FROM outbox.dead_letters)
  FROM outbox.events AS e
 WHERE NOT EXISTS (SELECT FROM outbox.failures AS f
                    WHERE f.lane = e.lane AND f.aggregate_type = e.aggregate_type AND f.aggregate_id = e.aggregate_id
                      AND f.id < e.id AND f.next_attempt_at = 'infinity')"""


Observer = Callable[[Stage, Relays, Members, LiveReader], AbstractContextManager[object]]
"""Returns what is open while faults go on: it may look at the servers and the processes."""


@dataclass(slots=True)
class Result:
    """What a run showed."""

    course: Course
    verdict: Verdict = field(default_factory=Verdict)
    size: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    operators: dict[str, int] = field(default_factory=dict)
    rolled_back: int = 0
    unknown: int = 0
    first_reads: list[float] = field(default_factory=list)
    by_fault: dict[str, list[float]] = field(default_factory=dict)
    catch_ups: list[float] = field(default_factory=list)
    effects: list[float] = field(default_factory=list)
    drain_seconds: float = 0.0
    standing: list[str] = field(default_factory=list)
    """What the last relays logged about lanes that they could not publish."""
    notes: dict[str, int] = field(default_factory=dict)
    explained: dict[str, int] = field(default_factory=dict)
    """Where relays have recorded their steps: how many of them the specification explains."""

    @property
    def sound(self) -> bool:
        """Return whether the relay kept its promise."""
        return self.verdict.sound

    def as_json(self) -> dict[str, Any]:
        """Return the run as the table keeps it."""
        configuration = self.course.configuration
        return {
            "seed": self.course.seed,
            "source": configuration.source,
            "delivery": configuration.delivery,
            "brokers": configuration.brokers,
            "seconds": configuration.seconds,
            "consumers": configuration.consumers,
            "lanes": self.course.lanes,
            "standby": self.course.standby,
            "events": self.verdict.committed,
            "messages": self.verdict.messages,
            "bytes": self.size,
            "rolled_back": self.rolled_back,
            "unknown": self.unknown,
            "dead": self.verdict.dead,
            "blocked": self.verdict.blocked,
            "faults": self.faults,
            "operators": self.operators,
            "applied": self.verdict.applied,
            "strangers": self.verdict.strangers,
            "refused": self.verdict.refused,
            "repeats": self.verdict.repeats,
            "lost": self.verdict.lost,
            "late": self.verdict.late,
            "given_up": {name: len(events) for name, events in self.verdict.given_up.items()},
            "anomalies": dict(self.verdict.counts),
            "examples": self.verdict.examples,
            **_percentiles("recovery", self.first_reads),
            "recoveries": self.by_fault,
            **_percentiles("catch_up", self.catch_ups),
            **_percentiles("effect", self.effects),
            "drain_seconds": round(self.drain_seconds, 1),
            "standing": self.standing,
            "log": self.notes,
            "explained": self.explained,
        }


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    middle, last = (seconds[len(seconds) // 2], seconds[-1]) if seconds else (None, None)
    return {f"{name}_p50": middle and round(middle, 2), f"{name}_max": last and round(last, 2)}


def run(
    course: Course,
    site: KafkaSite,
    folder: Path,
    say: Callable[[str], None] = print,
    mutation: str = "none",
    observer: Observer = lambda *_: nullcontext(),
    *,
    nursery: Nursery | None = None,
    keep: bool = False,
) -> Result:
    """Carry a course out, in a folder for the logs, which is removed again when all is well, except with ``keep``.

    nursery  what relays and members are forked from; None: each is a program that is executed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    say(str(course))
    with ExitStack() as opened:
        result = _Run(course, site, folder, opened, mutation, observer, nursery).carry_out()
    if result.sound and mutation == "none" and not keep:
        shutil.rmtree(folder)
    return result


class _Run:
    def __init__(
        self,
        course: Course,
        site: KafkaSite,
        folder: Path,
        opened: ExitStack,
        mutation: str,
        observer: Observer,
        nursery: Nursery | None,
    ) -> None:
        self.course = course
        self.folder = folder
        self.opened = opened
        self.mutation = mutation
        self.observer = observer
        self.nursery = nursery
        self.stage = Stage(course, site, opened)
        self.steps = folder / "steps.jsonl"
        self.seen: dict[Place, list[str]] = {}

    def carry_out(self) -> Result:
        course, seconds = self.course, self.course.configuration.seconds
        most = _EVENTS_A_SECOND_BESIDE_OPERATORS if course.configuration.operators else _EVENTS_A_SECOND
        part = _PART_WITH_THREE_BROKERS if course.configuration.brokers > 1 else 1.0
        pace = Pace(course.configuration.rate or part * most, part * _BYTES_A_SECOND)
        clock = Clock()
        given = self._no_url, self._no_url, self.folder
        factory = relays_from(self.nursery, *given) if self.nursery else RelayFactory(*given)
        self.opened.enter_context(_quiet(factory))
        with (
            Workload(course, self.stage.kinds, self.stage.ids, self.stage.url, pace) as load,
            RecoveryWatch(self.stage.url, STEADY, pace, lambda: load.attempted, clock) as watch,
            LiveReader(self.stage.topics, self.stage.ids, watch.read, keep=course.retention) as reader,
        ):
            reader.follow(self.stage.first_topics)
            mutation, env = self.mutation, {}
            if course.configuration.traces:
                mutation, env = f"{mutation}+records", {protocol_trace.VARIABLE: str(self.steps)}
            relays = Relays(factory, course, self.stage.settings, mutation, env)
            members = Members(self.stage, self.folder, course, self.mutation, self.nursery)
            self.opened.enter_context(members)
            strangers = self.opened.enter_context(Strangers(self.stage, course))
            effects = EffectWatch(self.stage.url, self.stage.ids, pace, lambda: load.attempted, clock)
            self.opened.enter_context(effects)
            self.stage.await_standby()
            started = time.monotonic()
            one = RelayHand(course, relays, clock, watch.healed)
            other = ServerHand(course, self.stage.servers, clock, watch.healed)
            log = self.folder / "operators.log"
            operators = OperatorHand(
                course, self.stage, relays, members, reader, log, clock, watch.stop_clock, self.mutation
            )
            consuming = MemberHand(course, members, clock, effects.healed)
            with self.observer(self.stage, relays, members, reader), one, other, operators, consuming:
                _sleep_until(started + course.topic_created_at)
                self.stage.create_late(reader)
                _sleep_until(started + seconds)
                # First: the other hands go on waking and starting what its commands wait for.
                operators.stop()
                one.stop()
                other.stop()
                consuming.stop()
            load.stop()
            strangers.stop()
            self.stage.servers.heal()
            relays.end()
            operators.leave()
            result = Result(course, size=sum(load.committed_bytes))
            result.rolled_back, result.unknown = sum(load.rolled_back), sum(load.unknown)
            result.drain_seconds = self._drain(relays)
            members.await_applied(reader)
            reader.stop()
            effects.stop()
        done = [*one.done, *other.done]
        result.faults = dict(sorted(Counter(fault.name for fault in [*done, *consuming.done]).items()))
        result.faults["failpoints"] = relays.armed
        result.operators = dict(sorted(operators.outcomes.items()))
        result.first_reads, result.catch_ups = watch.first_reads(), watch.catch_ups()
        result.by_fault = watch.by_fault()
        result.effects = effects.first_reads()
        bound = EXACTLY_ONCE
        if operators.mixed:
            bound = RepeatBound(*bound_of(done, relays, self.stage.turn_events))
        losses = None
        if course.configuration.lossy:
            brokers = course.configuration.brokers
            losses = LossBound(*loss_bound_of(done, relays, self.stage.turn_events, brokers))
        result.verdict = self._check(load, reader, operators, members, bound, losses)
        if course.configuration.audited:
            moved = any(name.startswith("partitions") for name in operators.outcomes)
            compare_with_audit(self.stage, result.verdict, bound, sure=not moved, losses=losses)
        if course.configuration.traces:
            delivery = course.configuration.delivery
            result.explained = compare_with_specification(self.steps, delivery, self.seen, result.verdict)
        if not result.sound:
            result.standing = _standing(relays)
        result.notes = _notes(relays)
        return result

    def _drain(self, relays: Relays) -> float:
        """Wait until nothing is left but what waits behind a dead letter; the checker looks at what is left then.

        Slow is not stuck: that is when nothing leaves the outbox and no event is refused any more, for a while.
        """
        started = changed_at = time.monotonic()
        relays.last()
        seen: tuple[Any, ...] | None = None
        with psycopg.connect(self.stage.url, autocommit=True) as connection:
            while time.monotonic() - changed_at < _STANDS_STILL_SECONDS * patience() / 4:
                row = connection.execute(_BACKLOG).fetchone()
                assert row is not None
                if not row[0]:
                    break
                if row != seen:
                    seen, changed_at = row, time.monotonic()
                time.sleep(0.2)
        seconds = time.monotonic() - started
        for relay in relays.present:
            if relay.running:
                relay.terminate()
                relay.wait(60)
        return seconds

    def _check(
        self,
        load: Workload,
        reader: LiveReader,
        operators: OperatorHand,
        members: Members,
        bound: RepeatBound,
        losses: LossBound | None,
    ) -> Verdict:
        stage = self.stage

        def take(message: confluent_kafka.Message) -> Message:
            return to_message(message, stage.ids)

        def taken() -> Iterator[Message]:
            topics = [kind.topic for kind in stage.kinds.values()]
            there = read_all(stage.topics, topics, take, stage.deleted)
            for message in chain(reader.deleted(stage.deleted), there):
                # Hundreds of megabytes in a long run, so only where they are compared.
                if self.course.configuration.traces and message.event is not None:
                    place = message.topic, message.partition
                    self.seen.setdefault(place, []).append(str(stage.ids.id_of(message.event)))
                yield message

        with psycopg.connect(stage.url) as connection:
            known = audited(connection, stage.ids)
            history = History(
                stage.final_kinds,
                _committed(connection),
                load.attempted,
                taken(),
                dead=_events(connection, stage.ids, "SELECT event_id::text FROM outbox.dead_letters"),
                waiting=_events(connection, stage.ids, "SELECT event_id::text FROM outbox.events"),
                copies=read_all(stage.topics, stage.dead_letter_topics, take),
                seen=reader.seen,
                discarded=known.discarded,
                retried=known.retried,
                replays=known.replays,
                once=operators.once,
                groups=members.groups(connection),
            )
            verdict = check(history, bound, losses)
            members.compare_with_provider(connection, verdict)
            return verdict

    @staticmethod
    def _no_url() -> str:
        raise AssertionError("every relay is given its addresses")


@contextmanager
def _quiet(factory: RelayFactory) -> Iterator[RelayFactory]:
    """End the factory's relays without showing their logs: they are files in the run's folder."""
    try:
        yield factory
    finally:
        for relay in factory._started:
            relay.kill()


def _committed(connection: psycopg.Connection[Any]) -> Iterator[Committed]:
    with connection.cursor("committed") as cursor:
        cursor.itersize = 10_000
        cursor.execute("SELECT event, kind, key, seq, digest, poisoned FROM business")
        for row in cursor:
            yield Committed(*row)


def _events(connection: psycopg.Connection[Any], ids: EventIds, query: str) -> set[int]:
    found = {ids.event(event_id) for (event_id,) in connection.execute(query)}
    # No writer has the number -1: an event that is none of this run is found as invented.
    return {-1 if event is None else event for event in found}


def _standing(relays: Relays) -> list[str]:
    """Return what the last relays said about lanes that stand still, each text once."""
    found: dict[str, None] = {}
    for relay in relays.present:
        for line in relay.log().splitlines():
            if any(what in line for what in _STANDING):
                entry = json.loads(line)
                found[f"{entry.get('event')}: lanes {entry.get('lanes')}: {entry.get('error')}"] = None
    return list(found)[:20]


def _notes(relays: Relays) -> dict[str, int]:
    """Return how often the relays logged what an operator would look at."""
    counts: Counter[str] = Counter()
    for relay in relays.all:
        log = relay.log()
        for what in ("lane stopped", "KAFKA-20734", "Traceback"):
            counts[what] += log.count(what)
    return {what: count for what, count in counts.items() if count}


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.monotonic(), 0.0))
