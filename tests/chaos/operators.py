"""The operators' hand: discard, retry, mend, pause, drain, replay, add partitions, delete old records, switch, change
delivery and lanes.

Through the command line, in processes of its own, against the servers as they are: a command that Postgres left alone
is given again for a while, or given up. What is done is in the outbox's audit, from which the checker takes it. Around
a command only that is asked which an operator would look up: how old a dead letter is, which source the lanes have.
"""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
from confluent_kafka import KafkaException
from wal_support import run_outbox

from chaos.course import BLOCKED_SECONDS, LANES, MAX_SIZE, ONCE_AFTER_SECONDS, REFUSED_BYTES, Act, Course
from chaos.faults import Hand, Relays, program
from chaos.history import EventIds, OnceSpan, Replay
from chaos.members import Members
from chaos.reading import LiveReader
from chaos.recovery import Clock
from chaos.stage import Stage
from outbox.sandbox._process import patience
from outbox.sandbox.errors import ServiceError

_AGAIN_SECONDS: Final = 20.0
_PATIENT_SECONDS: Final = 5.0
_STEP_SECONDS: Final = 0.5
_CONFIRM_SECONDS: Final = 4
_LEASE_SECONDS: Final = 6.0
_TAKE_OVER_SECONDS: Final = 8.0
# The command waits itself; what it does not reach in this time, it leaves as it was.
_DRAIN_SECONDS: Final = 10
_REASON: Final = "chaos"

_HELD: Final = "SELECT count(*) FROM outbox.lanes WHERE lease_until >= clock_timestamp()"
_NOT_HELD: Final = "SELECT count(*) FROM outbox.lanes WHERE (lease_until >= clock_timestamp()) IS NOT TRUE"
_AUDIT: Final = "SELECT what, details FROM outbox.audit WHERE what IN ('discard', 'retry', 'replay')"


@dataclass(slots=True)
class Audited:
    """What operators did to events, as the outbox's audit has it."""

    discarded: set[int] = field(default_factory=set)
    retried: Counter[int] = field(default_factory=Counter)
    replays: list[Replay] = field(default_factory=list)


def audited(connection: psycopg.Connection[Any], ids: EventIds) -> Audited:
    """Return what the audit says. An id that is none of this run is found as an event with the number -1."""

    def event(event_id: str) -> int:
        found = ids.event(event_id)
        return -1 if found is None else found

    found = Audited()
    for what, details in connection.execute(_AUDIT):
        match what:
            case "discard":
                found.discarded.add(event(details["event_id"]))
            case "retry":
                found.retried.update(map(event, details["event_ids"]))
            case _:
                named = {name: details.get(name) for name in ("key", "topic")}
                found.replays.append(Replay(details["events"], kind=details.get("type"), **named))
    return found


class OperatorHand(Hand[Act]):
    """Gives the commands, with what they say in ``log``. ``once``: while only exactly-once relays could publish.

    stop_clock  lets the clock stand until new events are read.
    """

    def __init__(
        self,
        course: Course,
        stage: Stage,
        relays: Relays,
        members: Members,
        reader: LiveReader,
        log: Path,
        clock: Clock,
        stop_clock: Callable[[], None],
        mutation: str = "none",
    ) -> None:
        super().__init__("operator-hand", course.acts, clock)
        self._stop_clock = stop_clock
        self._stage = stage
        self._settings = {name: value for name, value in stage.settings.items() if name != "database_url"}
        self._settings["kafka__bootstrap_servers"] = self._settings.pop("bootstrap_servers")
        self._relays = relays
        self._members = members
        self._reader = reader
        self._log = log
        self._program = program(mutation)
        self._changed_at = 0.0
        self._holds = False
        self.delivery: str = course.configuration.delivery
        self.once = [OnceSpan()] if self.delivery == "exactly-once" else []
        self.mixed = self.delivery == "at-least-once"
        """Whether at-least-once relays ran at any time."""
        self.outcomes: Counter[str] = Counter()
        """How often each act had its effect, and under "… in vain" how often it had none."""

    def leave(self) -> None:
        """Resume what is paused, when the servers are well again; the next relays read what the lanes are read from."""
        deadline = time.monotonic() + _AGAIN_SECONDS * patience()
        while paused := self._look("SELECT scope, name FROM outbox.pauses"):
            assert time.monotonic() < deadline, f"still paused: {paused}"
            for scope, name in paused:
                self._give("relay", "resume", *([] if scope == "all" else [f"--{scope}", name]))
        self._relays.change(source=self._source())

    def _begin(self, planned: Act) -> None:
        match planned.name:
            case "discard":
                effect = self._fail(planned, "discard", "--reason", _REASON)
            case "retry":
                effect = self._fail(planned, "retry")
            case "mend":
                effect = self._mend(planned)
            case "pause":
                wait = ("--timeout", str(_CONFIRM_SECONDS)) if planned.seconds > 2 else ("--no-wait",)
                effect = self._give("relay", "pause", *_scope(planned, self._stage), "--reason", _REASON, *wait)
            case "drain":
                limit = ("--timeout", str(_DRAIN_SECONDS))
                effect = self._give("relay", "drain", *_scope(planned, self._stage), "--reason", _REASON, *limit)
            case "replay":
                effect = self._replay(planned)
            case _:
                effect = self._change(planned)
        self.outcomes[planned.name if effect else f"{planned.name} in vain"] += 1
        self._hold_clock(planned)

    def _hold_clock(self, planned: Act) -> None:
        """Let the clock stand while everything is paused, whatever the commands have said."""
        if planned.name not in {"pause", "drain"}:
            return
        paused = bool(self._look("SELECT FROM outbox.pauses WHERE scope = 'all'"))
        if paused and not self._holds:
            self._clock.stop()
        elif self._holds and not paused:
            self._clock.start()
        self._holds = paused

    def _change(self, planned: Act) -> bool:
        match planned.name:
            case "partitions":
                return self._on_kafka(lambda: self._add_partitions(planned))
            case "retention":
                return self._on_kafka(self._delete, insist=True)
            case "switch":
                return self._switch()
            case "delivery":
                return self._change_delivery()
            case "lanes":
                return self._change_lanes(planned.times)
        raise AssertionError(planned)

    def _end(self, planned: Act) -> None:
        match planned.name:
            case "mend":
                assert self._on_kafka(lambda: self._take(planned, REFUSED_BYTES), insist=True)
            case "pause" | "drain":
                self._insist("relay", "resume", *_scope(planned, self._stage))
                self._hold_clock(planned)
            case "delivery":
                self._begin_once()
            case _:
                pass

    # Dead letters

    def _fail(self, planned: Act, command: str, *options: str) -> bool:
        """Discard or retry the oldest ones that have been dead for long enough."""
        old = self._dead(planned)
        return bool(old) and self._insist("dead-letters", command, *old[: planned.times], *options)

    def _dead(self, planned: Act) -> list[str]:
        """Return what has been dead for long enough, the oldest first. In the calm it is waited for."""
        kind = None if planned.kind is None else self._stage.kinds[planned.kind].name
        deadline = time.monotonic() + (_PATIENT_SECONDS if planned.patient else 0.0)
        while True:
            listed = self._json("dead-letters", "list", "--limit", "1000")
            before = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=BLOCKED_SECONDS)
            old = [
                each["event_id"]
                for each in listed.get("failures", ())
                if each["state"].startswith("dead")
                and kind in {None, each["aggregate_type"]}
                and dt.datetime.fromisoformat(each["first_failed_at"]) < before
            ]
            if old or time.monotonic() > deadline or self._stop.wait(_STEP_SECONDS):
                return old

    def _mend(self, planned: Act) -> bool:
        """Let the topic take what it refuses, and have all dead letters of it published."""
        assert planned.kind is not None
        kind = self._stage.kinds[planned.kind].name
        if planned.patient and not self._dead(planned):
            return False
        return self._on_kafka(lambda: self._take(planned, 2 * MAX_SIZE)) and self._insist(
            "dead-letters", "retry", "--all", "--aggregate-type", kind
        )

    def _take(self, planned: Act, size: int) -> bool:
        assert planned.kind is not None
        self._stage.take(planned.kind, size)
        return True

    # The archive

    def _replay(self, planned: Act) -> bool:
        assert planned.kind is not None
        kind = self._stage.kinds[planned.kind]
        which = ("--topic", kind.topic) if planned.key is None else ("--aggregate", f"{kind.name}/{planned.key}")
        done = self._give("replay", *which, "--yes", "--reason", _REASON)
        # The header has the time in seconds, by which the checker tells replays apart.
        self._stop.wait(1.0)
        return done

    def _add_partitions(self, planned: Act) -> bool:
        assert planned.kind is not None
        return self._stage.add_partitions(planned.kind, planned.times, self._reader)

    def _delete(self) -> bool:
        """Delete what all groups are beyond and the reader has seen."""
        passed, seen = self._members.passed(), self._reader.seen.ends()
        return self._stage.delete({place: min(passed[place], seen[place]) for place in passed.keys() & seen})

    # Source, delivery and lanes

    def _switch(self) -> bool:
        """Switch to the other source, and start relays of it, whatever the command says: the lanes' rows decide."""
        before = self._source()
        if before == "polling":
            if not self._insist("cdc", "setup"):
                # One that was cut off has left a slot behind.
                self._give("cdc", "setup", "--repair", "--reason", _REASON)
            self._insist("relay", "switch", "wal", "--reason", _REASON)
        else:
            self._give("relay", "switch", "polling", "--reason", _REASON)
        now = self._source()
        if now != before:
            self._relays.change(source=now)
        if now == "polling":
            self._give("cdc", "drop", "--slot", str(self._settings["wal__slot"]))
        return now != before

    def _change_lanes(self, number: int) -> bool:
        """Change the number of lanes as the docs say it: end what names lanes, read the table, stop the relays.

        Where one was killed in a transaction, the command wants another to find out what is on Kafka first.
        """
        if self._look("SELECT count(*) FROM outbox.lanes") == [(number,)]:
            number = next(other for other in LANES if other != number)
        back_to_wal = self._source() == "wal"
        if back_to_wal and not self._switch():
            return False
        deadline = time.monotonic() + _AGAIN_SECONDS
        while not (done := self._lanes_without_relays(number)) and time.monotonic() < deadline:
            if self._stop.is_set():
                break
        if back_to_wal:
            self._switch()
        return done

    def _lanes_without_relays(self, number: int) -> bool:
        for (lane,) in self._look("SELECT name FROM outbox.pauses WHERE scope = 'lane'"):
            self._give("relay", "resume", "--lane", lane)
        self._wait_while(_NOT_HELD, _TAKE_OVER_SECONDS)
        with self._clock.stopped():
            with self._relays.stopped():
                # Those of relays that were killed.
                self._wait_while(_HELD, _LEASE_SECONDS)
                done = self._give("db", "lanes", str(number))
            # Relays start anew, and take all lanes.
            self._stop_clock()
        return done

    def _wait_while(self, query: str, seconds: float) -> None:
        """Wait while a query counts something, but for no longer than this."""
        until = time.monotonic() + seconds
        while self._look(query) != [(0,)] and time.monotonic() < until and not self._stop.wait(_STEP_SECONDS):
            pass

    def _source(self) -> str:
        """Return what the lanes are read from: one statement switches all of them."""
        found = self._look("SELECT DISTINCT source FROM outbox.lanes")
        assert len(found) <= 1, found
        return str(found[0][0]) if found else str(self._relays.settings()["source"])

    def _change_delivery(self) -> bool:
        if self.delivery == "exactly-once":
            if self.once and self.once[-1].end is None:
                self.once[-1].end = self._reader.seen.ends()
            self.delivery, self.mixed = "at-least-once", True
        else:
            self.delivery = "exactly-once"
        self._relays.change(delivery=self.delivery)
        self._changed_at = time.monotonic()
        return True

    def _begin_once(self) -> None:
        """Begin a span, if the last relays of another delivery ended long enough ago."""
        if self.delivery != "exactly-once" or (self.once and self.once[-1].end is None):
            return
        while time.monotonic() < self._changed_at + ONCE_AFTER_SECONDS:
            if self._stop.wait(_STEP_SECONDS):
                return
        ends: list[dict[tuple[str, int], int]] = []
        if self._on_kafka(lambda: not ends.append(self._stage.ends()), insist=True):
            self.once.append(OnceSpan(ends[0]))

    # Commands

    def _give(self, *arguments: str) -> bool:
        """Give a command. Returns whether it says that all is done. Raises AssertionError where it is not clear."""
        return self._asked(*arguments).returncode == 0

    def _insist(self, *arguments: str) -> bool:
        """Give a command until it says that all is done, for a while."""
        deadline = time.monotonic() + _AGAIN_SECONDS
        while not self._give(*arguments):
            if self._stop.is_set() or time.monotonic() > deadline:
                return False
            self._stop.wait(_STEP_SECONDS)
        return True

    def _json(self, *arguments: str) -> Mapping[str, Any]:
        asked = self._asked(*arguments, "--json")
        found: Mapping[str, Any] = json.loads(asked.stdout.splitlines()[-1]) if asked.returncode == 0 else {}
        return found

    def _asked(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        asked = run_outbox(self._stage.url, self._settings, *arguments, program=self._program)
        with self._log.open("a") as log:
            now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
            log.write(f"{now} outbox {' '.join(arguments)}: {asked.returncode}\n{asked.stdout}{asked.stderr}\n")
        if asked.returncode not in {0, 1} or "Traceback" in asked.stderr:
            raise AssertionError(f"outbox {' '.join(arguments)}: {asked.returncode}\n{asked.stdout}\n{asked.stderr}")
        return asked

    def _look(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query; of Postgres that is away, as soon as it is back."""
        deadline = time.monotonic() + _AGAIN_SECONDS * patience()
        while True:
            try:
                with psycopg.connect(self._stage.url, connect_timeout=5) as connection:
                    return connection.execute(query.encode()).fetchall()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_STEP_SECONDS)

    def _on_kafka(self, change: Callable[[], bool], *, insist: bool = False) -> bool:
        """Return what a change says; False while a server is away. Insisting, it is tried again for a while."""
        deadline = time.monotonic() + _AGAIN_SECONDS * patience()
        while True:
            try:
                return change()
            except (KafkaException, ServiceError, psycopg.OperationalError):
                if not insist or time.monotonic() > deadline:
                    return False
                time.sleep(_STEP_SECONDS)


def _scope(planned: Act, stage: Stage) -> tuple[str, ...]:
    if planned.lane is not None:
        return "--lane", str(planned.lane)
    return () if planned.kind is None else ("--topic", stage.kinds[planned.kind].topic)
