"""Compare a history with what the relay promises, in the terms of Jepsen's Kafka workload.

| anomaly         | Jepsen's name          | what it is                                                           |
|-----------------|------------------------|----------------------------------------------------------------------|
| lost            | lost-write, unseen     | committed, and not on a topic, nor a dead letter, nor still waiting  |
| duplicated      | duplicate              | exactly-once: twice. At-least-once: more often than faults explain   |
| aborted         | G1a, aborted read      | on a topic, but rolled back, or lost by Postgres in a crash          |
| reordered       | nonmonotonic-poll      | a key's event first appears behind a later one of the key            |
| wrong_partition | –                      | a key's events are in more than one partition                        |
| corrupted       | –                      | another payload or another key than was committed                    |
| misrouted       | –                      | on the topic of another type                                         |
| invented        | –                      | no writer has ever written it                                        |
| unstable        | inconsistent-offsets   | what a reader saw at an offset is gone, or is another event          |
| dead_letters    | –                      | dead without reason, published and dead, refused and not dead, or    |
|                 |                        | with a wrong number of copies                                        |
| stuck           | –                      | still in the outbox although nothing holds it up                     |

Not there, because they are about a consumer's position and not about what stands on the topics: poll-skip,
nonmonotonic-poll within one consumer, and the anomalies of the consumer's own transactions (G0, G1c).

Repeats, at-least-once. A repeat must be explained by a fault: when a worker dies, loses a server or is cut off, what it
had in flight may be sent again, and that is two turns at most, the one that is published and the one that is being
settled. A fault of a server hits every worker. So a run may repeat at most ``turns × events of a turn`` for each time
that a worker was hit, and no single event more often than there were faults. Once repeats are dropped the order of a
key holds: no later event may appear before the first appearance of an earlier one, whether in a repeat or not.

The history is read once, from front to back; memory grows with the number of events and keys, not with payloads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from chaos.history import Committed, History, Message, Sightings

ANOMALIES: Final = (
    "lost",
    "duplicated",
    "aborted",
    "reordered",
    "wrong_partition",
    "corrupted",
    "misrouted",
    "invented",
    "unstable",
    "dead_letters",
    "stuck",
)

_EXAMPLES: Final = 5
TURNS_IN_FLIGHT: Final = 2


@dataclass(frozen=True, slots=True)
class RepeatBound:
    """What may be repeated at least once. ``faults``: how often anything was struck; ``hits``: workers that were."""

    turn_events: int
    faults: int
    hits: int

    @property
    def events(self) -> int:
        """How many repeats the faults explain."""
        return TURNS_IN_FLIGHT * self.turn_events * self.hits


EXACTLY_ONCE: Final = RepeatBound(0, 0, 0)


@dataclass(slots=True)
class Verdict:
    """What was found: how often each anomaly, with the first few examples."""

    messages: int = 0
    committed: int = 0
    repeats: int = 0
    dead: int = 0
    blocked: int = 0
    """Events that wait behind a dead letter of their key, as their route wants it."""
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.counts

    def found(self, anomaly: str, example: str, times: int = 1) -> None:
        """Add an anomaly."""
        assert anomaly in ANOMALIES, anomaly
        self.counts[anomaly] += times
        examples = self.examples.setdefault(anomaly, [])
        if len(examples) < _EXAMPLES:
            examples.append(example)

    def __str__(self) -> str:
        if self.sound:
            return f"sound: {self.messages} messages, {self.committed} committed, {self.repeats} repeats"
        lines = [f"{name} ({count}): " + "; ".join(self.examples[name]) for name, count in self.counts.items()]
        return "\n".join(lines)


def check(history: History, bound: RepeatBound) -> Verdict:
    """Return what is wrong with a history. ``bound`` is EXACTLY_ONCE, or what may be repeated."""
    checker = _Checker(history, bound)
    checker.read_topics()
    checker.read_copies()
    checker.look_for_missing()
    checker.compare_sightings()
    return checker.verdict


class _Checker:
    def __init__(self, history: History, bound: RepeatBound) -> None:
        self._history = history
        self._bound = bound
        self._rows: dict[int, Committed] = {row.event: row for row in history.committed}
        self._dead = frozenset(history.dead)
        self._waiting = frozenset(history.waiting)
        self._times: dict[int, int] = {}
        self._last_seq: dict[tuple[int, str], int] = {}
        self._partition: dict[tuple[int, str], int] = {}
        self._final = Sightings()
        self.verdict = Verdict(committed=len(self._rows), dead=len(self._dead))

    def read_topics(self) -> None:
        """Compare each message with the row of its event."""
        for message in self._history.messages:
            self.verdict.messages += 1
            self._final.add((message.topic, message.partition), message.offset, message.event)
            row = self._row(message)
            if row is not None:
                self._compare(message, row)
                self._count(message, row)
        if self._bound.faults and self.verdict.repeats > self._bound.events:
            self.verdict.found(
                "duplicated",
                f"{self.verdict.repeats} repeats, of which the faults explain {self._bound.events} "
                f"({self._bound.hits} times a worker was hit, {TURNS_IN_FLIGHT} turns of {self._bound.turn_events})",
                self.verdict.repeats - self._bound.events,
            )

    def read_copies(self) -> None:
        """Compare the copies of dead letters with the table of dead letters."""
        copies: Counter[int] = Counter()
        for message in self._history.copies:
            if message.event is None or message.event not in self._dead:
                self.verdict.found(
                    "dead_letters", f"{_at(message)}: a copy of event {message.event}, which is not dead"
                )
            else:
                copies[message.event] += 1
        for event in self._dead:
            row = self._rows.get(event)
            wanted = row is not None and self._history.kinds[row.kind].dead_letter_topic is not None
            # A copy is an event like any other: at least once, it may be repeated.
            if copies[event] < wanted or (copies[event] > wanted and copies[event] > wanted + self._bound.faults):
                self.verdict.found("dead_letters", f"event {event} is dead and has {copies[event]} copies")

    def look_for_missing(self) -> None:
        """Find the committed events that are on no topic and should be."""
        first_dead: dict[tuple[int, str], int] = {}
        for event in self._dead:
            row = self._rows.get(event)
            if row is None:
                name = "aborted" if self._history.was_attempted(event) else "invented"
                self.verdict.found(name, f"event {event} is a dead letter and was never committed")
                continue
            key = (row.kind, row.key)
            first_dead[key] = min(row.seq, first_dead.get(key, row.seq))
            if not row.poisoned:
                self.verdict.found("dead_letters", f"event {event} is dead, and could have been published")
            if event in self._times:
                self.verdict.found("dead_letters", f"event {event} is dead, and published")
        for event, row in self._rows.items():
            if event in self._waiting:
                self._look_at_waiting(row, first_dead)
            elif event not in self._times and event not in self._dead:
                if row.poisoned:
                    self.verdict.found("dead_letters", f"event {event} was to become a dead letter, and is gone")
                else:
                    self.verdict.found("lost", f"event {event} ({self._name(row)})")

    def compare_sightings(self) -> None:
        """Look whether what a reader saw earlier is still there."""
        for place, offset, event in self._history.seen.items():
            now = self._final.at(place, offset)
            if now != event:
                self.verdict.found("unstable", f"{place[0]}/{place[1]}@{offset}: {event} was there, and now {now}")

    def _row(self, message: Message) -> Committed | None:
        event = message.event
        row = None if event is None else self._rows.get(event)
        if row is None:
            attempted = event is not None and self._history.was_attempted(event)
            self.verdict.found("aborted" if attempted else "invented", f"{_at(message)}: event {event}")
        return row

    def _compare(self, message: Message, row: Committed) -> None:
        kind = self._history.kinds[row.kind]
        if message.topic != kind.topic:
            self.verdict.found("misrouted", f"{_at(message)}: event {row.event} of {kind.name}")
            return
        if message.key != row.key or message.digest != row.digest:
            what = "payload" if message.key == row.key else f"key {message.key!r}"
            self.verdict.found("corrupted", f"{_at(message)}: {what} of event {row.event} ({self._name(row)})")
        if row.poisoned:
            self.verdict.found("dead_letters", f"{_at(message)}: event {row.event} should have been refused")
        if self._partition.setdefault((row.kind, row.key), message.partition) != message.partition:
            self.verdict.found("wrong_partition", f"{_at(message)}: event {row.event} ({self._name(row)})")

    def _count(self, message: Message, row: Committed) -> None:
        times = self._times[row.event] = self._times.get(row.event, 0) + 1
        key = (row.kind, row.key)
        if times > 1:
            self.verdict.repeats += 1
            if times - 1 > self._bound.faults:
                self.verdict.found("duplicated", f"{_at(message)}: event {row.event} for the {times}. time")
            return
        if message.partition != self._partition.get(key, message.partition):
            return  # no order between partitions
        last = self._last_seq.get(key, 0)
        if row.seq < last:
            self.verdict.found(
                "reordered", f"{_at(message)}: number {row.seq} of {self._name(row)} appears behind number {last}"
            )
        else:
            self._last_seq[key] = row.seq

    def _look_at_waiting(self, row: Committed, first_dead: Mapping[tuple[int, str], int]) -> None:
        behind = first_dead.get((row.kind, row.key))
        if row.event in self._times:
            self.verdict.found("stuck", f"event {row.event} is published, and still in the outbox")
        elif self._history.kinds[row.kind].blocks and behind is not None and behind < row.seq:
            self.verdict.blocked += 1
        else:
            self.verdict.found("stuck", f"event {row.event} ({self._name(row)})")

    def _name(self, row: Committed) -> str:
        return f"{self._history.kinds[row.kind].name}/{row.key}"


def _at(message: Message) -> str:
    return f"{message.topic}/{message.partition}@{message.offset}"
