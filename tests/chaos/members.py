"""The consumers of a run: a group whose members are killed and halted, and what it has applied in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import psycopg

from chaos.course import MEMBERS, Consumers, Course, Fault
from chaos.faults import Hand
from chaos.history import Effect, EventIds
from chaos.stage import Stage
from outbox._app import migrate as db
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.sandbox._process import patience

GROUP: Final = "effects"
_SCRIPT: Final = Path(__file__).with_name("member.py")
_TABLE: Final = """
CREATE TABLE effects (number bigint GENERATED ALWAYS AS IDENTITY, event_id uuid, topic text, part integer, at bigint)"""
_EFFECTS: Final = "SELECT event_id::text, topic, part, at FROM effects ORDER BY number"
_POSITIONS: Final = "SELECT topic, part, next_offset FROM consumer.offsets WHERE grp = %s"
_STANDS_STILL_SECONDS: Final = 60.0
_KAFKA: Final = {
    "session.timeout.ms": 6000,
    "fetch.wait.max.ms": 50,
    "topic.metadata.refresh.interval.ms": 2000,
    "reconnect.backoff.max.ms": 500,
    "log_level": 0,
}


class Members:
    """Two processes of the inbox, or `outbox consume --continuous`; each is replaced when it ends.

    They reach the servers as relays do, by the proxies.
    """

    def __init__(self, stage: Stage, folder: Path, consumers: Consumers) -> None:
        self._folder = folder
        self._url = stage.url
        self._kafka = stage.settings["bootstrap_servers"]
        self.topics = stage.first_topics
        self._consumers = consumers
        self._given = {
            "database": stage.settings["database_url"],
            "topics": self.topics,
            "group": GROUP,
            "kafka": {"bootstrap.servers": self._kafka, **_KAFKA},
            "wait": [0.05, 0.5],
            "idle_seconds": 5.0,
        }
        self._opened = ExitStack()
        self._started = 0
        self.present: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        db.upgrade_consumer(self._url)
        with psycopg.connect(self._url) as connection:
            connection.execute(_TABLE)
        self.present = [self._start() for _ in range(MEMBERS if self._consumers == "inbox" else 1)]
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

    def tend(self) -> None:
        """Replace the members that have ended."""
        for number, one in enumerate(self.present):
            if one.poll() is not None:
                self.present[number] = self._start()

    def await_applied(self) -> None:
        """Wait until the group has reached the ends of its topics, or has not moved for a while."""
        admin = KafkaAdmin({"bootstrap.servers": self._kafka})
        seen, changed_at = None, time.monotonic()
        while time.monotonic() - changed_at < _STANDS_STILL_SECONDS * patience() / 4:
            self.tend()
            with psycopg.connect(self._url) as connection:
                positions = {(topic, part): at for topic, part, at in connection.execute(_POSITIONS, (GROUP,))}
            ends = admin.snapshot(self.topics).bounds
            if all(positions.get(place, 0) >= bounds.end for place, bounds in ends.items()):
                return
            if positions != seen:
                seen, changed_at = positions, time.monotonic()
            time.sleep(0.2)

    def effects(self, connection: psycopg.Connection[Any], ids: EventIds) -> Iterator[Effect]:
        """Return what was applied, in the order in which it was."""
        with connection.cursor("effects") as cursor:
            cursor.itersize = 10_000
            cursor.execute(_EFFECTS)
            for event_id, topic, part, at in cursor:
                yield Effect(ids.event(event_id), (topic, part), at)

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        log = self._opened.enter_context((self._folder / f"member-{self._started}.log").open("wb"))
        words = [str(_SCRIPT), json.dumps(self._given)]
        if self._consumers == "spark":
            topics = [word for topic in self.topics for word in ("--topic", topic)]
            words = ["-m", "relay.cli", "consume", "chaos.effects_job:job", "--continuous", *topics]
        environment = os.environ | {
            "PYTHONPATH": str(_SCRIPT.parents[1]),
            "OUTBOX_DATABASE_URL": self._given["database"],
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": self._kafka,
            "OUTBOX_LOG_FORMAT": "json",
        }
        # A group of its own: Spark has children.
        return subprocess.Popen(
            [sys.executable, *words], stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a member and its children."""
    if process.poll() is None:
        os.killpg(process.pid, number)


class MemberHand(Hand[Fault]):
    """Kills, stops and halts members, and replaces those that ended."""

    def __init__(self, course: Course, members: Members) -> None:
        super().__init__("member-hand", course.member_faults, lambda _: None)
        self._members = members

    def _meanwhile(self) -> None:
        self._members.tend()

    def _begin(self, planned: Fault) -> None:
        self._members.strike(planned)

    def _end(self, planned: Fault) -> None:
        self._members.heal(planned)
