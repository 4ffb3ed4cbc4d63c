"""The consumers of a run: groups whose members are killed and halted, and what they have made of it in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final, Self

import confluent_kafka
import psycopg
from confluent_kafka import Consumer, KafkaException, TopicPartition
from nursery import Forked, Nursery

from chaos.checker import Verdict
from chaos.course import Course, Fault
from chaos.faults import Hand, program
from chaos.history import Effect, EventIds, Group, Place
from chaos.member import FROM
from chaos.payments import ATOMIC, DELIVERY, GROUP, JOB_GROUP, PROVIDER, SPARK_GROUP, TABLE, TOPICS, ChaosProvider
from chaos.reading import LiveReader, headers, read_all
from chaos.recovery import Clock
from chaos.stage import Stage
from outbox._app import migrate as db
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.event import CE_ID
from outbox.sandbox._process import patience
from outbox.transform import PLACE

_ROLES: Final = ("inbox", "inbox", "transform", "transform", "external", "external")
_WITH_SPARK: Final = ("spark", "transform", "transform", "external", "external")
_ALL: Final = ("inbox", "inbox", "spark", "transform", "transform", "external", "external")
_SCRIPT: Final = Path(__file__).with_name("member.py")
_TABLES: Final = f"""
CREATE TABLE effects (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, grp text DEFAULT '{GROUP}',
                      event_id uuid, topic text, part integer, at bigint);
{TABLE}"""
_EFFECTS: Final = "SELECT event_id::text, topic, part, at FROM effects WHERE grp = %s ORDER BY number"
_SETTLED: Final = "SELECT event_id::text, topic, part, at, outcome FROM settled ORDER BY number"
_DEAD: Final = "SELECT topic, part, message_offset FROM consumer.dead_letters WHERE grp = %s"
_POSITIONS: Final = """
SELECT topic, part, min(next_offset) FROM consumer.offsets
 WHERE grp = ANY(%(groups)s) GROUP BY topic, part HAVING count(*) = cardinality(%(groups)s)"""
_RESERVED: Final = "SELECT message_id::text, message_offset, topic, part, order_key FROM consumer.reservations"
# With what a member at-most-once has in hand, which is behind its position.
_UNSETTLED: Final = """
SELECT (SELECT count(*) FROM consumer.reservations WHERE state NOT IN ('confirmed', 'cancelled'))
       + (SELECT count(*) FROM consumer.offsets WHERE unconfirmed_from IS NOT NULL)"""
_GIVEN_UP: Final = (
    "SELECT topic, part, first_offset, end_offset FROM consumer.losses WHERE grp = %s AND kind = 'given-up'"
)
_STANDS_STILL_SECONDS: Final = 60.0
_KAFKA: Final = {
    "session.timeout.ms": 6000,
    # How long a group waits for members that a restarted broker knows by its log and sets no time-out for.
    "max.poll.interval.ms": 30_000,
    "fetch.wait.max.ms": 50,
    "topic.metadata.refresh.interval.ms": 2000,
    "reconnect.backoff.max.ms": 500,
    "log_level": 0,
}


Process = subprocess.Popen[bytes] | Forked


class Members:
    """Processes of the inbox and of `outbox consume --continuous`, of the transformer and of `outbox external run`.

    Each is replaced when it ends. They reach the servers as relays do, by the proxies.
    """

    def __init__(
        self, stage: Stage, folder: Path, course: Course, mutation: str = "none", nursery: Nursery | None = None
    ) -> None:
        self._stage = stage
        self._folder = folder
        self._url = stage.url
        self._topics = stage.first_topics
        self._mutation = mutation
        self._nursery = nursery
        self._transform_group = stage.topics.name("results")
        self._roles = {"inbox": _ROLES, "spark": _WITH_SPARK, "both": _ALL}[course.configuration.consumers]
        # Of those that have their positions in Postgres.
        self._groups = [GROUP, SPARK_GROUP] if course.configuration.consumers == "both" else [GROUP]
        self._atomic = "batch" if course.seed // 2 % 2 else "partition"
        self._delivery = "at-most-once" if course.gives_up else "exactly-once"
        self._static = course.static
        self._opened = ExitStack()
        self._provider = ChaosProvider(course.seed)
        self._started = 0
        self.present: list[Process] = []

    def __enter__(self) -> Self:
        db.upgrade_consumer(self._url)
        with psycopg.connect(self._url) as connection:
            connection.execute(_TABLES)
        self._opened.enter_context(self._provider)
        self.present = [self._start(number) for number in range(len(self._roles))]
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.present:
            _signal(one, signal.SIGKILL)
            one.wait()
        self._opened.close()

    def strike(self, fault: Fault) -> None:
        """Kill, stop or halt a member."""
        number = fault.target % len(self.present)
        match fault.name:
            case "member_kill":
                _signal(self.present[number], signal.SIGKILL)
            case "member_term":
                self.present[number].terminate()
            case "member_pause":
                _signal(self.present[number], signal.SIGSTOP)

    def heal(self, fault: Fault) -> None:
        """Wake a member that was halted."""
        if fault.name == "member_pause":
            _signal(self.present[fault.target % len(self.present)], signal.SIGCONT)

    def role(self, fault: Fault) -> str:
        """Return what the member does that is struck."""
        return self._roles[fault.target % len(self._roles)]

    def pids(self) -> list[tuple[str, int]]:
        """Return what each member does, and its process."""
        return [(role, one.pid) for role, one in zip(self._roles, self.present, strict=True)]

    def tend(self) -> None:
        """Replace the members that have ended."""
        for number, one in enumerate(self.present):
            if one.poll() is not None:
                self.present[number] = self._start(number)

    def await_applied(self, reader: LiveReader) -> None:
        """Wait until the groups have reached the ends of their topics and all is settled, or nothing moves any more.

        What stands behind a transaction that a stranger has left open is not seen before the coordinator aborts it.
        """
        self._stage.topics.await_transactions(self._topics)
        admin = KafkaAdmin({"bootstrap.servers": self._stage.settings["bootstrap_servers"]})
        seen, changed_at = None, time.monotonic()
        with self._transformer() as transformer:
            while time.monotonic() - changed_at < _STANDS_STILL_SECONDS * patience() / 4:
                self.tend()
                with psycopg.connect(self._url) as connection:
                    positions = _positions(connection, self._groups)
                    unsettled = connection.execute(_UNSETTLED).fetchone()
                ends = {place: bounds.end for place, bounds in admin.snapshot(self._topics).bounds.items()}
                # Behind the last message there may be an end of a transaction, which is no message to be read.
                read = {place: end for place, end in reader.seen.ends().items() if place in ends}
                committed = _committed(transformer, list(read))
                if _reached(positions, ends) and _reached(committed, read) and unsettled == (0,):
                    return
                if (positions, committed, unsettled) != seen:
                    seen, changed_at = (positions, committed, unsettled), time.monotonic()
                time.sleep(0.2)

    def passed(self) -> dict[Place, int]:
        """Return the offsets that all groups are beyond. Raises psycopg.OperationalError."""
        with psycopg.connect(self._url, connect_timeout=5) as connection, self._transformer() as transformer:
            positions = _positions(connection, self._groups)
            committed = _committed(transformer, list(positions))
        found = {place: min(at, committed.get(place, 0)) for place, at in positions.items()}
        return {place: at for place, at in found.items() if at > 0}

    def _transformer(self) -> closing[Consumer]:
        """Return a client that asks where the transformer's group is."""
        servers = self._stage.topics.bootstrap_servers
        return closing(Consumer({"bootstrap.servers": servers, "group.id": self._transform_group, "log_level": 0}))

    def groups(self, connection: psycopg.Connection[Any]) -> list[Group]:
        """Return what the groups have made of the messages."""
        paid = self._stage.limited_topics
        refused = Counter(read_all(self._stage.topics, [self._stage.refused], _refused))
        settled = connection.execute(_SETTLED).fetchall()
        ids = self._stage.ids
        calls = [Effect(ids.event(event_id), (topic, part), at) for event_id, topic, part, at, _ in settled]
        results = read_all(self._stage.topics, [self._stage.results], lambda message: _result(message, ids))
        return [
            *(self._in_postgres(connection, name) for name in self._groups),
            Group("results", self._topics, results, per_message=True, by_key=True, dead=refused),
            # Calls are reserved with the effects.
            Group("payments", paid, calls, by_key=True, losses=_given_up(connection, GROUP)),
        ]

    def _in_postgres(self, connection: psycopg.Connection[Any], name: str) -> Group:
        letters = Counter(((topic, part), at) for topic, part, at in connection.execute(_DEAD, (name,)))
        effects, losses = _effects(connection, name, self._stage.ids), _given_up(connection, name)
        # At-most-once the audit has no ids of what was applied.
        audited = self._delivery == "exactly-once"
        return Group(name, self._topics, effects, dead=letters, audited=audited, losses=losses)

    def compare_with_provider(self, connection: psycopg.Connection[Any], verdict: Verdict) -> None:
        """Find calls that the provider has in another state, or in another order, than the database."""
        standing = self._provider.standing()
        for event_id, *_, outcome in connection.execute(_SETTLED):
            times = standing.pop(event_id, 0)
            if times != (outcome == "confirmed"):
                shown = f"payments: {event_id} is {outcome}, and {times} times at the provider"
                verdict.found("applied_twice" if times > 1 else "misapplied", shown)
        for event_id in standing:
            verdict.found("misapplied", f"payments: {event_id} is at the provider, and not settled here")
        reserved = {event_id: (line, at) for event_id, at, *line in connection.execute(_RESERVED)}
        last: dict[tuple[Any, ...], int] = {}
        for event_id in self._provider.effects():
            line, at = reserved[event_id]
            # Messages of strangers may have no key, and so no order.
            if line[-1] is not None and at < last.get(tuple(line), 0):
                verdict.found("applied_late", f"payments: {event_id} reached the provider after a later one of {line}")
            last[tuple(line)] = at

    def _start(self, number: int) -> Process:
        role = self._roles[number]
        self._started += 1
        log = self._opened.enter_context((self._folder / f"member-{self._started}-{role}.log").open("wb"))
        settings = self._stage.settings
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(_SCRIPT.parents[1]), str(_SCRIPT.parents[1] / "support"))),
            "OUTBOX_DATABASE_URL": settings["database_url"],
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": settings["bootstrap_servers"],
            "OUTBOX_LOG_FORMAT": "json",
            PROVIDER: self._provider.url,
            TOPICS: ",".join(self._stage.limited_topics),
            ATOMIC: self._atomic,
            DELIVERY: self._delivery,
            JOB_GROUP: self._groups[-1],
        }
        if self._nursery is not None and role != "spark":
            return self._nursery.fork(self._words(number), environment, Path.cwd(), Path(log.name))
        # A group of its own: Spark has children.
        return subprocess.Popen(
            [sys.executable, *self._words(number)], stdout=log, stderr=log, env=environment, start_new_session=True
        )

    def _words(self, number: int) -> list[str]:
        role = self._roles[number]
        if role == "external":
            return [*program(self._mutation), "external", "run", "chaos.payments:payments"]
        if role == "spark":
            topics = [word for topic in self._topics for word in ("--topic", topic)]
            return ["-m", "relay.cli", "consume", "chaos.effects_job:job", "--continuous", *topics]
        kafka = {"bootstrap.servers": self._stage.settings["bootstrap_servers"], **_KAFKA}
        if self._static:
            kafka["group.instance.id"] = f"{role}-{number}"
        given: dict[str, Any] = {"mutation": self._mutation, "topics": self._topics, "kafka": kafka}
        if role == "inbox":
            more: Mapping[str, Any] = {"wait": [0.05, 0.5], "idle_seconds": 5.0, "most_dead": 10_000}
            given |= {"database": self._stage.settings["database_url"], "group": GROUP, **more}
            given["delivery"] = self._delivery
        else:
            # Readers wait for so long where a member was killed.
            given |= {"group": self._transform_group, "transaction_seconds": 6.0}
            given |= {"results": self._stage.results, "dead_letter_topic": self._stage.refused}
        return [str(_SCRIPT), role, json.dumps(given)]


def _positions(connection: psycopg.Connection[Any], groups: list[str]) -> dict[Place, int]:
    return {(topic, part): at for topic, part, at in connection.execute(_POSITIONS, {"groups": groups})}


def _given_up(connection: psycopg.Connection[Any], group: str) -> dict[Place, list[range]]:
    losses: dict[Place, list[range]] = {}
    for topic, part, first, end in connection.execute(_GIVEN_UP, (group,)):
        losses.setdefault((topic, part), []).append(range(first, end))
    return losses


def _committed(consumer: Consumer, places: list[Place]) -> dict[Place, int]:
    try:
        found = consumer.committed([TopicPartition(topic, part) for topic, part in places], 10.0)
    except KafkaException:
        return {}
    return {(each.topic, each.partition): each.offset for each in found}


def _reached(positions: Mapping[Place, int], ends: Mapping[Place, int]) -> bool:
    return all(positions.get(place, 0) >= end for place, end in ends.items())


def _effects(connection: psycopg.Connection[Any], group: str, ids: EventIds) -> Iterator[Effect]:
    with connection.cursor("effects") as cursor:
        cursor.itersize = 10_000
        cursor.execute(_EFFECTS, (group,))
        for event_id, topic, part, at in cursor:
            yield Effect(ids.event(event_id), (topic, part), at)


def _result(message: confluent_kafka.Message, ids: EventIds) -> Effect:
    named = headers(message)
    place, offset = _place(named[FROM])
    return Effect(ids.event(named[CE_ID]), place, offset)


def _refused(message: confluent_kafka.Message) -> tuple[Place, int]:
    return _place(headers(message)[PLACE])


def _place(text: str) -> tuple[Place, int]:
    """Return the parts of ``topic-partition@offset``."""
    place, _, offset = text.rpartition("@")
    topic, _, partition = place.rpartition("-")
    return (topic, int(partition)), int(offset)


def _signal(process: Process, number: int) -> None:
    """Send a signal to a member and its children, which only Spark has."""
    if isinstance(process, Forked):
        process.signal(number)
    elif process.poll() is None:
        os.killpg(process.pid, number)


class MemberHand(Hand[Fault]):
    """Kills, stops and halts members, and replaces those that ended. ``applies``: one that applies events is healed."""

    def __init__(self, course: Course, members: Members, clock: Clock, applies: Callable[[str], None]) -> None:
        super().__init__("member-hand", course.member_faults, clock)
        self._members = members
        self._applies = applies

    def _meanwhile(self) -> None:
        self._members.tend()

    def _begin(self, planned: Fault) -> None:
        self._members.strike(planned)

    def _end(self, planned: Fault) -> None:
        self._members.heal(planned)
        if self._members.role(planned) in {"inbox", "spark"}:
            self._applies(planned.name)
