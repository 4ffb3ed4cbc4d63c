"""Compare a history with what the relay promises, in the terms of Jepsen's Kafka workload.

| anomaly         | Jepsen's name          | what it is                                                           |
|-----------------|------------------------|----------------------------------------------------------------------|
| lost            | lost-write, unseen     | committed, and not on a topic, nor a dead letter, nor still waiting  |
| duplicated      | duplicate              | exactly-once: twice. At-least-once: more often than faults explain   |
| aborted         | G1a, aborted read      | on a topic, but rolled back, or lost by Postgres in a crash          |
| reordered       | nonmonotonic-poll      | a key's event first appears behind a later one of the key, or before |
|                 |                        | a dead one that it has to wait for                                   |
| wrong_partition | –                      | a key's events are in more than one partition                        |
| corrupted       | –                      | another payload or another key than was committed                    |
| misrouted       | –                      | on the topic of another type                                         |
| invented        | –                      | no writer has ever written it                                        |
| unstable        | inconsistent-offsets   | what a reader saw at an offset is gone, or is another event          |
| dead_letters    | –                      | dead or discarded without reason, published and dead, refused and    |
|                 |                        | not dead, or with a wrong number of copies. Of a group: not exactly  |
|                 |                        | the messages of strangers that it can't apply                        |
| stuck           | –                      | still in the outbox although nothing holds it up                     |

| unapplied       | –                      | on a topic, and a consumer group beyond it has no effect of it       |
| applied_twice   | –                      | a group has two effects of it, whatever was repeated                 |
| misapplied      | –                      | an effect of a message that is not there                             |
| applied_late    | nonmonotonic-poll      | an effect behind that of a later message of its partition, or key    |
| audit           | –                      | `outbox audit` says something else                                   |
| unexplained     | –                      | the specification allows no such steps of the relays                 |

Not there, because a group's position moves with its effects: poll-skip, and the anomalies of a consumer that commits
elsewhere.

Repeats, at-least-once. A repeat must be explained by a fault: when a worker dies, loses a server or is cut off, what it
had in flight may be sent again, and that is two turns at most, the one that is published and the one that is being
settled. A fault of a server hits every worker. So a run may repeat at most ``turns × events of a turn`` for each time
that a worker was hit, and no single event more often than there were faults. Once repeats are dropped the order of a
key holds: no later event may appear before the first appearance of an earlier one, whether in a repeat or not.

At-most-once. What is not on a topic was in flight when something failed: relays have counted it as lost, or one was
killed with a turn in hand, or of three brokers a leader failed that had no replica of it (LossBound). None comes twice.
Each key is in order, but for what a broker refused because another one leads, or what arrived when its producer had
given it up: these were sent before what they follow, as their times say, and are no more than faults explain. A broker
refuses a request as a whole, so dead letters may be beside the event that is too large; keys do not wait for them. A
group at-most-once has each effect once, or has recorded that it gave the message up.

Operators change what may be expected, and only that. What they did is in the outbox's audit, written in the transaction
that did it, so it is known also where their command was cut off.

| an operator                | what the checker expects then                                                          |
|----------------------------|----------------------------------------------------------------------------------------|
| discards                   | the event is on no topic. (At-least-once, where the topic took it for a while: it may  |
|                            | have been published before by a relay that died before it settled it.)                 |
| retries                    | a copy more each time that it is dead again. Where keys go on without dead letters     |
|                            | (``skip``), the event may appear behind later ones of its key; where keys wait, never  |
| mends a topic for a while  | what it refuses may be published, or dead, and is never gone                           |
| pauses, drains, resumes,   | nothing else: nothing is left, everything in order                                     |
| switches the source,       |                                                                                        |
| changes the number of lanes|                                                                                        |
| changes the delivery       | an event that first appears while only exactly-once relays could publish is never      |
|                            | repeated, not even later; others are repeated as at-least-once allows                  |
| replays                    | as many messages with the header of a replay as were sent again, each once as the      |
|                            | delivery has it, and each replay's in the order of each key; others are not excused    |
| deletes old records        | nothing else: those count that a reader has kept from before                           |
| adds partitions            | a key is in the partition that its hash has under a number of partitions that the      |
|                            | topic has had. In each partition the order of a key holds, but for an event that is    |
|                            | in another one too: its repeats need not follow its first appearance there             |

The history is read once, from front to back; memory grows with the number of events and keys, not with payloads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from chaos.history import Committed, Group, History, Kind, Message, Place, Sightings, partition_of

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
    "unapplied",
    "applied_twice",
    "misapplied",
    "applied_late",
    "audit",
    "unexplained",
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


@dataclass(frozen=True, slots=True)
class LossBound:
    """How many events may be lost at most once, and how many may come behind later ones of their key."""

    lost: int
    late: int


@dataclass(slots=True)
class Verdict:
    """What was found: how often each anomaly, with the first few examples."""

    messages: int = 0
    committed: int = 0
    repeats: int = 0
    repeats_of_replays: int = 0
    """How many of the repeats are of messages that operators have sent again."""
    lost: int = 0
    """At-most-once: committed events that are on no topic."""
    late: int = 0
    """At-most-once: events that have arrived behind later ones of their key, and were not sent behind them."""
    given_up: dict[str, set[int]] = field(default_factory=dict)
    """The events of which a group has recorded that it may lack the effect, and lacks it."""
    dead: int = 0
    blocked: int = 0
    """Events that wait behind a dead letter of their key, as their route wants it."""
    applied: dict[str, int] = field(default_factory=dict)
    """How many effects of events each group has."""
    strangers: int = 0
    """Messages of other programs in the topics."""
    refused: dict[str, int] = field(default_factory=dict)
    """How many dead letters each group has."""
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    for_audit: set[str] = field(default_factory=set)
    """What `outbox audit` must have found too, as it calls it."""

    @property
    def sound(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.counts

    def found(self, anomaly: str, example: str, times: int = 1, *, audit: str | None = None) -> None:
        """Add an anomaly. ``audit``: what the audit calls it, if it must find it too."""
        assert anomaly in ANOMALIES, anomaly
        self.counts[anomaly] += times
        self.for_audit |= {audit} if audit else set()
        examples = self.examples.setdefault(anomaly, [])
        if len(examples) < _EXAMPLES:
            examples.append(example)

    def __str__(self) -> str:
        if self.sound:
            what = f"{self.lost} lost" if self.lost else f"{self.repeats} repeats"
            return f"sound: {self.messages} messages, {self.committed} committed, {what}"
        lines = [f"{name} ({count}): " + "; ".join(self.examples[name]) for name, count in self.counts.items()]
        return "\n".join(lines)


def check(history: History, bound: RepeatBound, losses: LossBound | None = None) -> Verdict:
    """Return what is wrong with a history. ``bound`` is EXACTLY_ONCE, or what may be repeated.

    ``losses``: what may be lost, where the delivery is at-most-once.
    """
    checker = _Checker(history, bound, losses)
    checker.read_topics()
    checker.read_copies()
    checker.look_for_missing()
    checker.compare_sightings()
    checker.compare_effects()
    return checker.verdict


_Item = tuple[int, str | None]
"""An event, or one replay of it: the header of the replay."""


@dataclass(slots=True)
class _Seen:
    """How often an item was found, where first, whether exactly-once held there, and in which partitions."""

    partition: int
    once: bool
    times: int = 1
    partitions: tuple[int, ...] = ()


class _Checker:
    def __init__(self, history: History, bound: RepeatBound, losses: LossBound | None) -> None:
        self._history = history
        self._bound = bound
        self._losses = losses
        self._rows: dict[int, Committed] = {row.event: row for row in history.committed}
        self._dead = frozenset(history.dead)
        self._discarded = frozenset(history.discarded)
        self._waiting = frozenset(history.waiting)
        self._seen: dict[_Item, _Seen] = {}
        self._last: dict[tuple[object, ...], tuple[int, int]] = {}
        self._partition: dict[tuple[int, str], int] = {}
        self._late: list[tuple[_Item, str, bool]] = []
        self._final = Sightings()
        self._strangers: dict[tuple[Place, int], str] = {}
        self.verdict = Verdict(committed=len(self._rows), dead=len(self._dead))

    def read_topics(self) -> None:
        """Compare each message with the row of its event."""
        for message in self._history.messages:
            place = message.topic, message.partition
            if message.stranger is not None and message.event is None:
                self.verdict.strangers += 1
                self._strangers[place, message.offset] = message.stranger
                continue
            self.verdict.messages += 1
            self._final.add(place, message.offset, message.event)
            row = self._row(message)
            if row is not None:
                self._compare(message, row)
                self._count(message, row)
        for item, example, sent_before in self._late:
            if len(self._seen[item].partitions) == 1 and not (sent_before and self._may_be_late()):
                self.verdict.found("reordered", example, audit=None if item[1] else "order")
        self._compare_replays()
        if self._bound.faults and self.verdict.repeats > self._bound.events:
            self.verdict.found(
                "duplicated",
                f"{self.verdict.repeats} repeats, of which the faults explain {self._bound.events} "
                f"({self._bound.hits} times a worker was hit, {TURNS_IN_FLIGHT} turns of {self._bound.turn_events})",
                self.verdict.repeats - self._bound.events,
            )

    def read_copies(self) -> None:
        """Compare the copies of dead letters with the table of dead letters, and with what operators took from it."""
        copies: Counter[int] = Counter()
        retried = self._history.retried
        gone = self._discarded | retried.keys()
        for message in self._history.copies:
            if message.event is None or message.event not in self._dead | gone:
                self.verdict.found(
                    "dead_letters", f"{_at(message)}: a copy of event {message.event}, which is not dead"
                )
            else:
                copies[message.event] += 1
        for event in self._dead | gone:
            row = self._rows.get(event)
            copied = row is not None and self._history.kinds[row.kind].dead_letter_topic is not None
            least = int(copied and event in self._dead | self._discarded and self._losses is None)
            # One for each time that it died. A copy is an event like any other: at least once, it may be repeated.
            most = copied * (1 + retried.get(event, 0)) + self._bound.faults
            if not least <= copies[event] <= most:
                self.verdict.found("dead_letters", f"event {event} is dead and has {copies[event]} copies")

    def look_for_missing(self) -> None:
        """Find the committed events that are on no topic and should be."""
        first_dead: dict[tuple[int, str], int] = {}
        # Of those that were not published before they died.
        first_unpublished: dict[tuple[int, str], int] = {}
        for event in self._dead:
            row = self._rows.get(event)
            if row is None:
                name = "aborted" if self._history.was_attempted(event) else "invented"
                self.verdict.found(name, f"event {event} is a dead letter and was never committed")
                continue
            key = (row.kind, row.key)
            first_dead[key] = min(row.seq, first_dead.get(key, row.seq))
            if not self._may_be_published(row):
                first_unpublished[key] = min(row.seq, first_unpublished.get(key, row.seq))
            self._look_at_dead(row, "dead")
        for event in self._discarded:
            row = self._rows.get(event)
            if row is None:
                name = "aborted" if self._history.was_attempted(event) else "invented"
                self.verdict.found(name, f"event {event} was discarded and was never committed")
            else:
                self._look_at_dead(row, "discarded")
        for event, row in self._rows.items():
            dead = first_unpublished.get((row.kind, row.key))
            if (
                dead is not None
                and dead < row.seq
                and self._waits(self._history.kinds[row.kind])
                and (event, None) in self._seen
            ):
                shown = f"number {row.seq} of {self._name(row)} is published, and number {dead} is dead"
                self.verdict.found("reordered", shown)
            if event in self._waiting:
                self._look_at_waiting(row, first_dead, unpublished=dead)
            elif (event, None) not in self._seen and event not in self._dead | self._discarded:
                self._look_at_lost(row)

    def compare_sightings(self) -> None:
        """Look whether what a reader saw earlier is still there."""
        for place, offset, event in self._history.seen.items():
            now = -1 if (place, offset) in self._strangers else self._final.at(place, offset)
            if now != event:
                self.verdict.found("unstable", f"{place[0]}/{place[1]}@{offset}: {event} was there, and now {now}")

    def compare_effects(self) -> None:
        """Look whether each group has the effect of each event of its topics once, in their order."""
        for group in self._history.groups:
            self._compare_group(group)

    def _compare_group(self, group: Group) -> None:
        last: dict[tuple[object, ...], int] = {}
        applied: set[object] = set()
        strangers = 0
        for event, place, offset in group.effects:
            shown = f"{group.name}: {place[0]}/{place[1]}@{offset}: event {event}"
            row = None if event is None else self._rows.get(event)
            strange = event is None and self._strangers.get((place, offset)) == "applied"
            if not strange and (row is None or self._final.at(place, offset) != event):
                # Of a topic with messages of others the audit does not know what may be applied.
                known = group.audited and not self._strangers
                what = f"{shown}, which is not there, or not to be applied"
                self.verdict.found("misapplied", what, audit="unknown" if known else None)
                continue
            item = (place, offset) if group.per_message or row is None else event
            if item in applied:
                self.verdict.found("applied_twice", shown)
            strangers += strange and item not in applied
            # Keys are not kept of strangers.
            line = (*place, row and row.key) if group.by_key else place
            if offset < last.get(line, 0) and not (strange and group.by_key):
                self.verdict.found("applied_late", f"{shown} after offset {last[line]}")
            applied.add(item)
            last[line] = offset
        self.verdict.applied[group.name] = len(applied) - strangers
        self._look_for_unapplied(group, applied)
        if group.dead is not None:
            self._compare_dead(group, group.dead)

    def _look_for_unapplied(self, group: Group, applied: set[object]) -> None:
        missing: set[object] = set()
        for place, offset, event in self._final.items():
            item = (place, offset) if group.per_message else event
            if place[0] in group.topics and event in self._rows and item not in applied and item not in missing:
                missing.add(item)
                if group.gave_up(place, offset):
                    self.verdict.given_up.setdefault(group.name, set()).add(event)
                    continue
                shown = f"{group.name}: {place[0]}/{place[1]}@{offset}: event {event} ({self._name(self._rows[event])})"
                self.verdict.found("unapplied", shown, audit="missing" if group.audited else None)
        for (place, offset), outcome in self._strangers.items():
            lacks = place[0] in group.topics and outcome == "applied" and (place, offset) not in applied
            if lacks and not group.gave_up(place, offset):
                self.verdict.found("unapplied", f"{group.name}: {place[0]}/{place[1]}@{offset}: a stranger's")

    def _compare_dead(self, group: Group, dead: Mapping[tuple[Place, int], int]) -> None:
        """Look whether exactly those messages of strangers are the group's dead letters that it can't apply."""
        unfit = {one for one, outcome in self._strangers.items() if one[0][0] in group.topics and outcome == "dead"}
        expected = {one for one in unfit if not group.gave_up(*one)}
        self.verdict.refused[group.name] = len(dead)
        for place, offset in expected | dead.keys():
            times = dead.get((place, offset), 0)
            if times != ((place, offset) in expected):
                what = self._strangers.get((place, offset)) or f"event {self._final.at(place, offset)}"
                shown = f"{group.name}: {place[0]}/{place[1]}@{offset} ({what}) is a dead letter {times} times"
                self.verdict.found("dead_letters", shown)

    def _row(self, message: Message) -> Committed | None:
        event = message.event
        row = None if event is None else self._rows.get(event)
        if row is None:
            attempted = event is not None and self._history.was_attempted(event)
            # The audit does not compare replays, and takes other ids for another outbox's.
            audit = None if event is None or message.replay else "unknown"
            self.verdict.found("aborted" if attempted else "invented", f"{_at(message)}: event {event}", audit=audit)
        return row

    def _compare(self, message: Message, row: Committed) -> None:
        kind = self._history.kinds[row.kind]
        if message.topic != kind.topic:
            self.verdict.found("misrouted", f"{_at(message)}: event {row.event} of {kind.name}")
            return
        if message.key != row.key or message.digest != row.digest:
            what = "payload" if message.key == row.key else f"key {message.key!r}"
            shown = f"{_at(message)}: {what} of event {row.event} ({self._name(row)})"
            self.verdict.found("corrupted", shown, audit=None if message.replay else "payload")
        if row.poisoned and not kind.mended:
            self.verdict.found("dead_letters", f"{_at(message)}: event {row.event} should have been refused")
        if kind.partitions:
            wrong = message.partition not in {partition_of(row.key, count) for count in kind.partitions}
        else:
            wrong = self._partition.setdefault((row.kind, row.key), message.partition) != message.partition
        if wrong:
            self.verdict.found("wrong_partition", f"{_at(message)}: event {row.event} ({self._name(row)})")

    def _count(self, message: Message, row: Committed) -> None:
        """Look whether a message is a repeat, and else whether it follows the earlier events of its key."""
        kind, item, line = self._history.kinds[row.kind], (row.event, message.replay), (row.kind, row.key)
        once = any(message in span for span in self._history.once)
        seen = self._seen.get(item)
        if seen is None:
            seen = self._seen[item] = _Seen(message.partition, once)
        else:
            seen.times += 1
            self.verdict.repeats += 1
            self.verdict.repeats_of_replays += message.replay is not None
            # Between partitions no offset says which was first.
            never = seen.once and (once or message.partition == seen.partition)
            if never or seen.times - 1 > self._bound.faults:
                shown = f"{_at(message)}: event {row.event} for the {seen.times}. time"
                self.verdict.found("duplicated", shown, audit=None if message.replay else "repeated")
        if message.partition in seen.partitions:
            return
        if message.partition != self._partition.get(line, message.partition):
            return  # no order between partitions
        if seen.partitions and len(kind.partitions) <= 1:
            return
        seen.partitions += (message.partition,)
        place = (*line, message.replay, message.partition)
        last, sent = self._last.get(place, (0, 0))
        if row.seq >= last:
            self._last[place] = row.seq, message.milliseconds
        elif self._waits(kind) or message.replay is not None or row.event not in self._history.retried:
            behind = f"number {row.seq} of {self._name(row)} appears behind number {last}"
            shown = f"{_at(message)}: {behind}" + (", replayed" if message.replay else "")
            self._late.append((item, shown, self._losses is not None and message.milliseconds <= sent))

    def _may_be_late(self) -> bool:
        self.verdict.late += 1
        return self._losses is not None and self.verdict.late <= self._losses.late

    def _compare_replays(self) -> None:
        """Compare the messages of replays with what operators have sent again."""
        found = [event for event, mark in self._seen if mark is not None]
        replays = self._history.replays
        for event in found:
            row = self._rows[event]
            if not any(replay.covers(self._history.kinds[row.kind], row.key) for replay in replays):
                self.verdict.found("invented", f"a replay of event {event} ({self._name(row)}), which nobody wanted")
        sent = sum(replay.events for replay in replays)
        if len(found) < sent:
            self.verdict.found("lost", f"{sent} events were replayed, {len(found)} are there", sent - len(found))
        elif len(found) > sent:
            self.verdict.found("invented", f"{sent} events were replayed, {len(found)} are there", len(found) - sent)

    def _look_at_dead(self, row: Committed, what: str) -> None:
        beside = self._losses is not None and self._history.kinds[row.kind].dead_letter_topic is not None
        if not (row.poisoned or beside):
            self.verdict.found("dead_letters", f"event {row.event} is {what}, and could have been published")
        if (row.event, None) in self._seen and not self._may_be_published(row):
            self.verdict.found("dead_letters", f"event {row.event} is {what}, and published")

    def _may_be_published(self, dead: Committed) -> bool:
        """Return whether a dead event is on its topic, as it may be: at least once, a relay that died has published it
        while the topic took it, and the events of its key behind it.
        """
        return bool((dead.event, None) in self._seen and self._bound.faults and self._history.kinds[dead.kind].mended)

    def _look_at_lost(self, row: Committed) -> None:
        self.verdict.lost += 1
        if self._losses is not None and self.verdict.lost <= self._losses.lost:
            return
        if row.poisoned and self._losses is None:
            self.verdict.found("dead_letters", f"event {row.event} was to become a dead letter, and is gone")
        else:
            self.verdict.found("lost", f"event {row.event} ({self._name(row)})", audit="missing")

    def _look_at_waiting(
        self, row: Committed, first_dead: Mapping[tuple[int, str], int], unpublished: int | None
    ) -> None:
        behind = first_dead.get((row.kind, row.key))
        blocked = self._waits(self._history.kinds[row.kind]) and behind is not None and behind < row.seq
        # Behind dead events that were published: see ``_may_be_published``.
        again = blocked and (unpublished is None or row.seq < unpublished)
        if (row.event, None) in self._seen and not again:
            self.verdict.found("stuck", f"event {row.event} is published, and still in the outbox")
        elif blocked:
            self.verdict.blocked += 1
        else:
            self.verdict.found("stuck", f"event {row.event} ({self._name(row)})")

    def _waits(self, kind: Kind) -> bool:
        """Return whether a key waits for its dead letters."""
        return kind.blocks and self._losses is None

    def _name(self, row: Committed) -> str:
        return f"{self._history.kinds[row.kind].name}/{row.key}"


def _at(message: Message) -> str:
    return f"{message.topic}/{message.partition}@{message.offset}"
