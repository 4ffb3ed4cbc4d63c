"""What the tests of the chaos checker share: kinds of events, rows, and messages made of them."""

from __future__ import annotations

from dataclasses import replace

from chaos.checker import ANOMALIES, RepeatBound, Verdict
from chaos.history import Committed, History, Kind, Message, event_of

KINDS = {
    0: Kind("Order", "orders"),
    1: Kind("Bill", "bills"),
    2: Kind("Small", "small", dead_letter_topic="dead"),
    3: Kind("Strict", "strict", blocks=True, dead_letter_topic="dead"),
}
LENIENT = RepeatBound(turn_events=100, faults=2, hits=3)


def row(number: int, key: str, seq: int, *, kind: int = 0, poisoned: bool = False) -> Committed:
    return Committed(event_of(0, number), kind, key, seq, b"d%d" % number, poisoned)


def message(of: Committed, offset: int, *, topic: str | None = None, partition: int = 0) -> Message:
    return Message(of.event, topic or KINDS[of.kind].topic, partition, offset, of.key, of.digest)


A1, A2, A3 = row(0, "a", 1), row(1, "a", 2), row(2, "a", 3)
B1 = row(3, "b", 1)
X1 = row(4, "x", 1, kind=1)
FAT = row(5, "s", 2, kind=2, poisoned=True)
S1, S3 = row(6, "s", 1, kind=2), row(7, "s", 3, kind=2)
STRICT1 = row(8, "t", 1, kind=3, poisoned=True)
STRICT2 = row(9, "t", 2, kind=3)
ROWS = [A1, A2, A3, B1, X1, FAT, S1, S3, STRICT1, STRICT2]
SENT = [A1, B1, A2, X1, S1, A3, S3]
ROLLED_BACK = event_of(0, 10)
ROW_ROLLED_BACK = row(10, "a", 4)


def messages(*rows: Committed) -> list[Message]:
    return [message(each, offset) for offset, each in enumerate(rows)]


def history(sent: list[Message] | None = None, **changes: object) -> History:
    """A sound history, but for what is given."""
    sound = History(
        KINDS,
        ROWS,
        {0: 11},
        messages(*SENT) if sent is None else sent,
        dead=[FAT.event, STRICT1.event],
        waiting=[STRICT2.event],
        copies=[message(FAT, 0, topic="dead"), message(STRICT1, 1, topic="dead")],
    )
    return replace(sound, **changes)


def names(verdict: Verdict) -> set[str]:
    assert verdict.sound == (not verdict.counts)
    assert set(verdict.counts) <= set(verdict.examples) <= set(ANOMALIES)
    return set(verdict.counts)
