"""The consumers of a run: an inbox group whose members are killed and halted, and what it has applied in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import psutil
import psycopg

from chaos.course import MEMBERS, Course, Fault
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
    """Two processes of one group, each replaced when it ends. They reach the servers as relays do, by the proxies."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self._folder = folder
        self._url = stage.url
        self._kafka = stage.settings["bootstrap_servers"]
        self.topics = stage.first_topics
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
        self._paused: set[int] = set()
        self.present: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        db.upgrade_consumer(self._url)
        with psycopg.connect(self._url) as connection:
            connection.execute(_TABLE)
        self.present = [self._start() for _ in range(MEMBERS)]
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.present:
            one.kill()
            one.wait()
        self._opened.close()

    def strike(self, fault: Fault) -> None:
        """Kill, stop or halt a member."""
        one = self.present[fault.target]
        match fault.name:
            case "member_kill":
                one.kill()
            case "member_term":
                one.terminate()
            case "member_pause" if one.poll() is None:
                self._paused.add(fault.target)
                psutil.Process(one.pid).suspend()

    def heal(self, fault: Fault) -> None:
        """Wake a member that was halted."""
        if fault.target in self._paused and fault.name == "member_pause":
            self._paused.discard(fault.target)
            one = self.present[fault.target]
            if one.poll() is None:
                psutil.Process(one.pid).resume()

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
        return subprocess.Popen(
            [sys.executable, str(_SCRIPT), json.dumps(self._given)], stdout=log, stderr=log, env=os.environ
        )


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
