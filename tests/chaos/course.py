"""The course of a run: everything that is decided by chance, from one seed and before the run begins.

``course_of`` is a pure function of seed and configuration: what is struck when and for how long, which failpoints each
relay is started with, which topic is created late, and what every transaction of every writer holds. What the machine
makes of it (which turn a kill meets, how many transactions there is time for) is not repeatable.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import relay

NAMES: Final = frozenset(
    name
    for path in Path(relay.__file__).parent.rglob("*.py")
    for name in re.findall(r'failpoint\("([a-z_.]+)"\)', path.read_text())
)
"""The failpoints that the relay has."""

Source = Literal["polling", "wal"]
Delivery = Literal["at-most-once", "at-least-once", "exactly-once"]
Consumers = Literal["inbox", "spark", "both"]

RELAYS: Final = 3
MEMBERS: Final = 6
"""Processes of consumers, two of each kind: the inbox, the transformer, and callers of the payment provider."""
WRITERS: Final = 3
KEYS: Final = 100_000
LATER_KEYS: Final = 200
HOT_KEY: Final = "hot"
HOT_PART: Final = 0.2
MAX_SIZE: Final = 990_000
HELD_KEYS: Final = 6
"""Keys of Strict that are written all the time and are poisoned every few seconds: they wait for an operator."""
REFUSED_BYTES: Final = 150_000
"""The topics that refuse some events take no larger request; what is to be refused is at least twice as large."""

ORDER, BILL, LATER, SMALL, STRICT = range(5)
KIND_NAMES: Final = ("Order", "Bill", "Later", "Small", "Strict")
"""Order has the 100,000 keys and the hot one. Later's topic is created in the course. Small and Strict refuse events:
the keys of Small go on without them (``skip``), those of Strict wait (``block``)."""

# Steps that are reached in the configurations, see ``_failpoints``.
_ONLY_EXACTLY: Final = ("txn.", "takeover.")
_ONLY_WAL: Final = ("stream.",)

# How many of each fault are in the deck they are drawn from.
RELAY_FAULTS: Final = {"relay_kill": 5, "relay_term": 2, "relay_pause": 3}
MEMBER_FAULTS: Final = {"member_kill": 4, "member_term": 1, "member_pause": 3}
_POSTGRES: Final = ("postgres_kill", "postgres_cut", "postgres_blackhole")
_KAFKA: Final = ("broker_kill", "broker_pause", "kafka_cut", "kafka_blackhole")
SERVER_FAULTS: Final = dict.fromkeys((*_POSTGRES, *_KAFKA), 2) | {"kafka_requests": 4}
_ACTS: Final = {
    "discard": 4,
    "mend": 4,
    "retry": 2,
    "pause": 2,
    "drain": 2,
    "replay": 2,
    "partitions": 2,
    "switch": 1,
    "delivery": 1,
    "lanes": 1,
}
# At-most-once reads no WAL, keeps no archive, and what is lost is counted.
_NOT_LOSSY: Final = frozenset({"replay", "switch", "delivery", "retention"})
LANES: Final = (4, 7, 64, 256)
"""How many lanes an outbox has."""

_RETENTION: Final = (0.35, 0.7)
"""After which parts of a run old records are deleted, in one seed of five: there an audit compares less."""
_LANES_EARLY: Final = 0.5
"""How often operators soon change the number of lanes: it takes so long that there may be no time for it later."""
_CALM_PART: Final = 0.4
"""The part of a run with operators in which nothing is struck."""
_BEFORE_CALM_SECONDS: Final = 5.0
_AFTER_PROMOTION_SECONDS: Final = 3.0
_FREED_IN_CALM: Final = 4
# What restarts no relay and frees no key.
_IN_CALM: Final = frozenset({"replay", "partitions"})

BLOCKED_SECONDS: Final = 8.0
"""Operators leave what is dead alone for so long. Then the relay's low-water mark may be above what waits behind it."""
ONCE_AFTER_SECONDS: Final = 15.0
"""So long after the last at-least-once relay has ended, nothing that it has sent arrives any more."""

REQUESTS: Final = ("produce", "init_producer_id", "metadata", "add_partitions_to_txn", "end_txn")
"""The second one is of idempotent producers only, the last two are of transactions."""
_WEIGHTS: Final = {"at-most-once": (4, 0, 1, 0, 0), "at-least-once": (4, 1, 1, 0, 0), "exactly-once": (4, 1, 1, 2, 4)}
ACTIONS: Final = ("drop_request", "drop_response", "duplicate_request", "delay_request", "delay_response")


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is put to the test."""

    source: Source = "polling"
    delivery: Delivery = "exactly-once"
    brokers: int = 1
    seconds: float = 60.0
    operators: bool = True
    consumers: Consumers = "inbox"
    traces: bool = False
    """Relays record their steps."""
    rate: float = 0.0
    """Events a second of a soak; 0: as many as a run bears."""

    @property
    def audited(self) -> bool:
        """Return whether there is an archive, or at-most-once a ledger, by which the audit compares."""
        return self.operators or self.traces or self.lossy or self.rate > 0

    @property
    def lossy(self) -> bool:
        return self.delivery == "at-most-once"

    @property
    def most_lanes(self) -> int:
        # Exactly-once has a partition for each lane: 256 with three replicas take both processors.
        return 64 if self.brokers > 1 and self.delivery == "exactly-once" else max(LANES)

    def __str__(self) -> str:
        return f"{self.source}, {self.delivery}, {self.brokers} broker{'s' if self.brokers > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something is struck ``at`` seconds after the start. ``seconds``: how long it lasts, or until it is started again.

    ``target``: which relay, member or broker; of a network, the broker to which it leads. ``request``, ``action`` and
    ``times`` are kafka_requests'.
    """

    at: float
    name: str
    target: int = 0
    seconds: float = 0.0
    request: str = ""
    action: str = ""
    times: int = 0

    def __str__(self) -> str:
        aimed = self.name.startswith(("relay", "broker", "member")) or self.name in {"kafka_cut", "kafka_blackhole"}
        what = f"{self.name} {self.target}" if aimed else self.name
        if self.request:
            what += f" {self.request} {self.action} x{self.times}"
        return f"{self.at:5.1f} s  {what}" + (f" for {self.seconds:.1f} s" if self.seconds else "")


@dataclass(frozen=True, slots=True)
class Act:
    """Something that an operator does ``at`` seconds after the start, and ends ``seconds`` later (mend, pause, drain).

    ``kind`` is whose topic or dead letters, None for all. ``lane`` and ``key`` are those of pauses and of replays.
    ``times``: how many dead letters, partitions or lanes.
    ``patient``: it waits until a key has been blocked for long.
    """

    at: float
    name: str
    kind: int | None = None
    seconds: float = 0.0
    lane: int | None = None
    key: str | None = None
    times: int = 0
    patient: bool = False

    def __str__(self) -> str:
        what = [self.name]
        what += [] if self.kind is None else [KIND_NAMES[self.kind]]
        what += [] if self.lane is None else [f"lane {self.lane}"]
        what += [] if self.key is None else [self.key]
        what += [f"x{self.times}"] if self.times else []
        what += [f"for {self.seconds:.1f} s"] if self.seconds else []
        return f"{self.at:5.1f} s  operator: {' '.join(what)}"


@dataclass(frozen=True, slots=True)
class Course:
    """The plan of one run."""

    seed: int
    configuration: Configuration
    lanes: int
    standby: bool
    last_relays: int
    topic_created_at: float
    faults: tuple[Fault, ...]
    failpoints: tuple[str, ...]
    """For the first start of a relay, the second one and so on, over all relays; empty: none."""
    acts: tuple[Act, ...] = ()
    member_faults: tuple[Fault, ...] = ()
    """What strikes the consumers, in the calm too."""

    @property
    def gives_up(self) -> bool:
        """Return whether the group in Postgres is at-most-once too: two seeds of four."""
        return self.configuration.lossy and (self.seed + 1) // 2 % 2 == 1

    @property
    def static(self) -> bool:
        """Return whether members of Kafka's groups have a `group.instance.id`: two seeds of four, and each soak."""
        return self.configuration.rate > 0 or self.seed % 4 >= 2

    @property
    def retention(self) -> bool:
        """Return whether records are deleted from Kafka."""
        return any(act.name == "retention" for act in self.acts)

    def failpoint(self, start: int) -> str:
        """Return what the relay gets that is the ``start``-th to be started."""
        return self.failpoints[start] if start < len(self.failpoints) else ""

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.configuration}, {self.lanes} lanes, {self.configuration.seconds:g} s"
        head += ", a standby to be promoted" if self.standby else ""
        armed = [f"start {n}: {text}" for n, text in enumerate(self.failpoints) if text]
        late = f"{self.topic_created_at:5.1f} s  the topic of {KIND_NAMES[LATER]} is created"
        plan = sorted((*self.faults, *self.member_faults, *self.acts), key=lambda each: each.at)
        return "\n  ".join([head, *map(str, plan), late, *armed, f"at the end {self.last_relays} relays"])


def course_of(seed: int, configuration: Configuration) -> Course:
    """Return the course of a seed in a configuration."""
    chance = chance_of(seed, configuration, "faults")
    standby = seed % 5 == 3 and configuration.seconds >= 30
    calm = configuration.operators * round(_CALM_PART * configuration.seconds, 1)
    if calm < 2 * BLOCKED_SECONDS:
        calm = 0.0
    # Without the calm, which is put in afterwards.
    seconds = configuration.seconds - calm
    faults = [
        *track(chance, seconds, RELAY_FAULTS, configuration, first=4.0, pause=(1.0, 4.5)),
        *track(chance, seconds, SERVER_FAULTS, configuration, first=4.0, pause=(1.5, 4.0)),
    ]
    calm_at = seconds / 2
    if standby:
        # In the middle. No other server is down then, and Postgres was not lately: its standby has to be up to date.
        at = round(seconds * chance.uniform(0.4, 0.6), 1)
        faults = [each for each in faults if not _in_the_way(each, at)]
        faults.append(Fault(at, "promote"))
        calm_at = at + _AFTER_PROMOTION_SECONDS
    faults = [_around(each, calm_at, calm) for each in faults]
    acts = [*_acts(seed, configuration, (calm_at, calm_at + calm), standby=standby)]
    if configuration.operators and seed % 5 == 4 and not configuration.lossy:
        acts += [Act(round(part * configuration.seconds, 1), "retention") for part in _RETENTION]
    of_members = chance_of(seed, configuration, "members")
    # Few events a lane, where its steps are to be explained.
    lanes = 256 if configuration.traces else min((4, 256, 4, 64)[seed % 4], configuration.most_lanes)
    return Course(
        seed,
        configuration,
        lanes=lanes,
        standby=standby,
        last_relays=chance.choice((1, RELAYS)),
        topic_created_at=round(seconds * chance.uniform(0.1, 0.3), 1),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        failpoints=tuple(_failpoints(chance, configuration, int(seconds))),
        acts=tuple(sorted(acts, key=lambda act: act.at)),
        member_faults=tuple(
            track(of_members, configuration.seconds, MEMBER_FAULTS, configuration, first=5.0, pause=(0.5, 2.0))
        ),
    )


def _around(fault: Fault, calm_at: float, calm: float) -> Fault:
    """Return a fault that is over when the calm begins, or begins after it."""
    if fault.at >= calm_at:
        return replace(fault, at=round(fault.at + calm, 1))
    return replace(fault, seconds=round(min(fault.seconds, calm_at - fault.at), 1))


def _in_the_way(fault: Fault, promoted_at: float) -> bool:
    """Return whether a fault of a server meets the promotion."""
    if fault.name.startswith("relay"):
        return False
    before = 8.0 if fault.name.startswith("postgres") else 3.0
    return fault.at < promoted_at + 4 and fault.at + fault.seconds > promoted_at - before


def chance_of(seed: int, configuration: Configuration, *more: object) -> random.Random:
    return random.Random(f"{seed}/{configuration}/{configuration.seconds}/{more}")


def track(
    chance: random.Random,
    seconds: float,
    names: dict[str, int],
    configuration: Configuration,
    *,
    first: float,
    pause: tuple[float, float],
) -> Iterator[Fault]:
    """Return faults one after the other: the next one begins when the one before has been over for a while."""
    at = first + chance.uniform(0, 2)
    deck: list[str] = []
    while at < seconds - 2:
        if not deck:
            # Drawn without putting back: five courses have all of them.
            deck = [name for name, count in names.items() for _ in range(count)]
            chance.shuffle(deck)
        fault = _fault(chance, round(at, 1), deck.pop(), configuration)
        yield fault
        at += fault.seconds + chance.uniform(*pause)


def _fault(chance: random.Random, at: float, name: str, configuration: Configuration) -> Fault:
    match name:
        case "relay_kill" | "relay_term":
            return Fault(at, name, chance.randrange(RELAYS))
        case "member_kill" | "member_term":
            return Fault(at, name, chance.randrange(MEMBERS))
        case "member_pause" | "relay_pause":
            target = chance.randrange(RELAYS if name == "relay_pause" else MEMBERS)
            return Fault(at, name, target, round(chance.uniform(0.3, 9), 1))
        case "broker_kill":
            return Fault(at, name, chance.randrange(configuration.brokers), round(chance.uniform(0, 3), 1))
        case "broker_pause" | "kafka_blackhole":
            return Fault(at, name, chance.randrange(configuration.brokers), round(chance.uniform(0.5, 6), 1))
        case "postgres_kill":
            return Fault(at, name, 0, round(chance.uniform(0, 2), 1))
        case "postgres_blackhole":
            return Fault(at, name, 0, round(chance.uniform(0.5, 6), 1))
        case "kafka_cut":
            return Fault(at, name, chance.randrange(configuration.brokers))
        case "kafka_requests":
            request = chance.choices(REQUESTS, _WEIGHTS[configuration.delivery])[0]
            times = chance.randint(1, 4)
            # Only an idempotent producer is safe from a network that doubles requests.
            actions = [each for each in ACTIONS if not configuration.lossy or each != "duplicate_request"]
            return Fault(at, name, 0, 2.0, request, chance.choice(actions), times)
        case _:
            return Fault(at, name)


def _failpoints(chance: random.Random, configuration: Configuration, starts: int) -> Iterator[str]:
    names = [
        name
        for name in sorted(NAMES)
        if not name.startswith(("reconcile.", "heal."))
        and not (configuration.delivery != "exactly-once" and name.startswith(_ONLY_EXACTLY))
        and not (configuration.source != "wal" and name.startswith(_ONLY_WAL))
    ]
    for _ in range(starts):
        action = chance.choice(["kill", "error", "delay:1", "pause"])
        armed = f"{chance.choice(names)}={action}@{chance.randint(1, 30)}"
        yield armed if chance.random() < 0.5 else ""


def _acts(seed: int, configuration: Configuration, calm: tuple[float, float], *, standby: bool) -> Iterator[Act]:
    """Return what operators do, one after the other; what they begin and end overlaps with the next ones.

    In the calm nothing is struck, and first nothing is freed: lanes stay with their relays, whose low-water marks rise
    above what waits behind dead letters, until operators free those keys in the end. A lane that changes hands is read
    from its lowest id again.
    """
    if not configuration.operators:
        return
    left_out = _NOT_LOSSY if configuration.lossy else frozenset()
    if standby:
        # A slot that was made a moment ago is not on the standby yet, and is gone with the primary.
        left_out |= {"switch", "lanes"} if configuration.source == "wal" else {"switch"}
    chance = chance_of(seed, configuration, "acts")
    at = 3.0 + chance.uniform(0, 2)
    deck: list[str] = []
    while at < configuration.seconds - 1:
        if not deck:
            deck = [name for name, count in _ACTS.items() if name not in left_out for _ in range(count)]
            chance.shuffle(deck)
            if "lanes" in deck and chance.random() < _LANES_EARLY:
                deck.remove("lanes")
                # The second, so that some keys are blocked by then.
                deck.insert(-1, "lanes")
        drawn = _act(chance, round(at, 1), deck.pop(), configuration.most_lanes)
        if not calm[0] - _BEFORE_CALM_SECONDS < at < calm[1] or drawn.name in _IN_CALM:
            yield drawn
        elif drawn.name in {"switch", "delivery", "lanes"}:
            yield replace(drawn, at=round(calm[1] + 1, 1))
        at += chance.uniform(1.5, 3.5)
    for number in range(_FREED_IN_CALM if calm[1] > calm[0] else 0):
        name = "discard" if number % 2 else chance.choice(("discard", "mend"))
        freed_at = round(calm[1] - 1.5 * (_FREED_IN_CALM - number) + chance.uniform(0, 1), 1)
        yield Act(freed_at, name, STRICT, 3.0 if name == "mend" else 0.0, times=chance.choice((1, 100)), patient=True)


def _act(chance: random.Random, at: float, name: str, most: int) -> Act:
    match name:
        case "discard" | "retry":
            return Act(at, name, chance.choice((STRICT, STRICT, None)), times=chance.choice((1, 100)))
        case "mend":
            return Act(at, name, chance.choice((STRICT, STRICT, STRICT, SMALL)), round(chance.uniform(2, 8), 1))
        case "pause" | "drain":
            seconds = round(chance.uniform(1, 5), 1)
            match chance.choice(("all", "lane", "topic")):
                case "lane":
                    # One that is there however many lanes there are.
                    return Act(at, name, None, seconds, lane=chance.randrange(min(LANES)))
                case "topic":
                    return Act(at, name, chance.choice((ORDER, BILL, LATER, STRICT)), seconds)
            return Act(at, name, None, seconds)
        case "replay":
            return Act(at, name, LATER, key=chance.choice((None, f"l{chance.randrange(LATER_KEYS)}")))
        case "partitions":
            return Act(at, name, chance.choice((ORDER, BILL, LATER)), times=chance.randint(1, 3))
        case "delivery":
            return Act(at, name, None, ONCE_AFTER_SECONDS)
        case "lanes":
            return Act(at, name, times=chance.choice([number for number in LANES if number <= most]))
        case _:
            return Act(at, name)


# The load


@dataclass(frozen=True, slots=True)
class Write:
    """One event. ``size`` is its payload's in bytes, -1 for a tombstone."""

    kind: int
    key: str
    size: int
    json: bool = False
    poisoned: bool = False


@dataclass(frozen=True, slots=True)
class Transaction:
    """One business transaction.

    ``undone`` are written behind a savepoint that is rolled back. ``hold``: seconds that it stays open before its end,
    while others that have drawn higher ids commit. ``lossy``: it commits asynchronously, and a crash may lose it.
    """

    writes: tuple[Write, ...]
    undone: tuple[Write, ...] = ()
    hold: float = 0.0
    lossy: bool = False
    rolled_back: bool = False


def transactions(seed: int, configuration: Configuration, writer: int) -> Iterator[Transaction]:
    """Return the transactions of a writer, without end."""
    chance = chance_of(seed, configuration, "writer", writer)
    while True:
        late = chance.random() < 0.03
        # Up to 300 events, most of them few. One that commits late holds no key that others wait for.
        count = int(math.exp(chance.uniform(0, math.log(300))))
        writes = tuple(
            _own(chance, writer) if late else _write(chance, operators=configuration.operators) for _ in range(count)
        )
        undone = tuple(_own(chance, writer) for _ in range(chance.randint(1, 5))) if chance.random() < 0.05 else ()
        yield Transaction(
            writes,
            undone,
            hold=round(chance.uniform(0.05, 1.5), 2) if late else 0.0,
            lossy=chance.random() < 0.5,
            rolled_back=chance.random() < 0.07,
        )


def _write(chance: random.Random, *, operators: bool) -> Write:
    kind = chance.choices(range(5), (100, 20, 4, 4, 12 if operators else 2))[0]
    match kind:
        case 2:  # LATER
            key = f"l{chance.randrange(LATER_KEYS)}"
            return Write(kind, key, _size(chance, 2000), json=chance.random() < 0.3)
        case 3 | 4:  # SMALL, STRICT
            held = operators and kind == STRICT and chance.random() < 0.75
            key = f"h{chance.randrange(HELD_KEYS)}" if held else f"s{chance.randrange(300)}"
            poisoned = chance.random() < (0.04 if held else 0.004)
            size = chance.randint(2 * REFUSED_BYTES, 3 * REFUSED_BYTES) if poisoned else chance.randint(1, 200)
            return Write(kind, key, size, poisoned=poisoned)
        case _:
            hot = kind == ORDER and chance.random() < HOT_PART * 1.3
            key = HOT_KEY if hot else f"k{chance.randrange(KEYS)}"
            if chance.random() < 0.02:
                return Write(kind, key, -1)
            return Write(kind, key, _size(chance, 4096 if hot else MAX_SIZE), json=chance.random() < 0.25)


def _own(chance: random.Random, writer: int) -> Write:
    """Return a write of a key that no other writer has."""
    return Write(ORDER, f"w{writer}-{chance.randrange(1000)}", _size(chance, 4096))


def _size(chance: random.Random, most: int) -> int:
    """Return a size: log-uniform in one of three ranges. Three of a thousand are above 64 KB, so a mean of 2 KB."""
    low, high = chance.choices(((1, 4096), (4096, 65_536), (65_536, MAX_SIZE)), (965, 32, 3))[0]
    return min(int(math.exp(chance.uniform(math.log(low), math.log(high)))), most)
