"""What relays must not publish for now, as an operator has requested. No I/O.

The table ``pauses`` has a row for each paused scope: all lanes, one lane, or one topic. Each relay's control loop reads
it with the census that it takes each tick anyway, and again in the statement that takes lanes, so a new holder knows
the pauses before its first turn. The worker's loop obeys from its next turn on: it finishes and settles the turn in
flight, keeps the leases, and reads nothing of paused lanes. Events of a paused topic stay in the table, as those of a
topic that can't be written to; no attempt of theirs is counted.

| what happens                              | what follows                                                             |
|-------------------------------------------|--------------------------------------------------------------------------|
| a pause is committed during a turn        | the turn ends as usual; the next one obeys, at most one tick later       |
| the holder of a paused lane is killed     | the lease expires; the next holder settles what was published, and obeys |
| a relay takes a lane, and the pause was   | it obeys from the first turn on: the taking statement returns the pauses,|
| committed after its last census           | and they are recorded before the lane is given to the worker's loop      |
| a relay sleeps (SIGSTOP) while the pause  | it does not confirm, and the command names it; on waking it may still    |
| is requested                              | publish one turn, if its leases have not expired                         |
| its row in relays is locked, or gone: it  | as long as it holds lanes the command names it; it obeys all the same    |
| has left its lanes with a turn in flight  |                                                                          |
| Postgres is unavailable                   | the pauses that were read last hold                                      |
| source wal, a lane is paused              | it goes over to the table durably; its events are dropped from the       |
|                                           | stream: the slot advances, and other lanes go on. On resume the lane     |
|                                           | catches up                                                               |
| killed while a lane goes over             | as with any lane in the table; see wal/source.py                         |
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class ScopeKind(StrEnum):
    ALL = "all"
    LANE = "lane"
    TOPIC = "topic"


@dataclass(frozen=True, slots=True, order=True)
class Scope:
    """What one pause covers. ``name`` is the lane's number or the topic's name; empty for all lanes."""

    kind: ScopeKind
    name: str = ""

    def __str__(self) -> str:
        return "all lanes" if self.kind is ScopeKind.ALL else f"{self.kind} {self.name}"

    @property
    def option(self) -> str:
        """Return the option of `outbox relay pause` and `resume` that names it, after a space; empty for all lanes."""
        return "" if self.kind is ScopeKind.ALL else f" --{self.kind} {self.name}"


ALL: Final = Scope(ScopeKind.ALL)


def scopes_of(lanes: Sequence[int], topics: Sequence[str]) -> list[Scope]:
    """Return the scopes of these lanes and topics, each once; of all lanes if there are none."""
    found = [Scope(ScopeKind.LANE, str(lane)) for lane in lanes]
    found += [Scope(ScopeKind.TOPIC, topic) for topic in topics]
    return list(dict.fromkeys(found)) or [ALL]


@dataclass(frozen=True, slots=True)
class Paused:
    """One pause. ``unconfirmed`` are the relays that run, or hold lanes, and do not obey it yet."""

    number: int
    scope: Scope
    requested_at: dt.datetime
    requested_by: str
    reason: str | None
    unconfirmed: Sequence[str] = ()

    def __str__(self) -> str:
        when = f"{self.requested_at.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
        verb = "are" if self.scope.kind is ScopeKind.ALL else "is"
        text = f"{self.scope} {verb} paused, by {self.requested_by} since {when}"
        return text if self.reason is None else f"{text}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Pauses:
    numbers: frozenset[int] = frozenset()
    every_lane: bool = False
    lanes: frozenset[int] = frozenset()
    topics: frozenset[str] = frozenset()

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]]) -> Pauses:
        """Return the pauses in these rows: number, scope and name."""
        found = [(number, ScopeKind(kind), name) for number, kind, name in rows]
        return cls(
            numbers=frozenset(number for number, _, _ in found),
            every_lane=any(kind is ScopeKind.ALL for _, kind, _ in found),
            lanes=frozenset(int(name) for _, kind, name in found if kind is ScopeKind.LANE),
            topics=frozenset(name for _, kind, name in found if kind is ScopeKind.TOPIC),
        )

    def covers(self, lane: int) -> bool:
        return self.every_lane or lane in self.lanes


class CurrentPauses:
    """The pauses as one relay knows them. Each is replaced as a whole, so any thread may read both."""

    def __init__(self) -> None:
        self.now = Pauses()
        """The pauses that the control loop read last."""
        self.obeyed = Pauses()
        """The pauses that the current turn obeys. The turns before, which knew others, have ended."""
