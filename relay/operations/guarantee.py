"""What is promised of an event's effect, from the relay's delivery, its source, and the strategy of a consumer. No I/O.

docs/explanation/guarantees.md has the same tables; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, assert_never

from outbox._app.text import age_text, bytes_text
from outbox.consumer.model import AT_MOST_ONCE, DEDUP, DEDUP_BY_KEY, DEDUP_BY_OFFSET
from relay.config import Delivery, SourceKind


class Strategy(StrEnum):
    """How a consumer recognizes repeats, as its group's row has it; see docs/guides/strategies.md."""

    DEDUP = DEDUP
    DEDUP_BY_KEY = DEDUP_BY_KEY
    DEDUP_BY_OFFSET = DEDUP_BY_OFFSET
    FINGERPRINT = "Fingerprint"
    VERSION = "Version"
    NATURAL = "Natural"
    OFFSETS_ONLY = "OffsetsOnly"
    STREAM = "Stream"
    """Not a job's own: a stream's batches, with ``exactly_once``."""
    AT_MOST_ONCE = AT_MOST_ONCE
    """Not a strategy: a consumer with ``delivery="at-most-once"``."""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """How often an event has its effect, what that means, and what to set for more, if there is something."""

    word: str
    text: str
    do: str = ""

    @property
    def found(self) -> str:
        return f"{self.word}: {self.text}"


_AT_MOST: Final = "an event in flight when a relay, a broker or a connection fails is lost; none is sent twice"
_SAFE: Final = "OUTBOX_DELIVERY=at-least-once"
_EXACT: Final = "OUTBOX_DELIVERY=exactly-once"
_GIVEN_UP: Final = (
    "a batch of a partition in flight when the consumer fails, and a message whose effect fails, are lost"
)
_ORDER: Final = {
    SourceKind.POLLING: "each key in the order of ids, which is that of commits if its writers exclude each other",
    SourceKind.WAL: "each key in commit order, or in that of ids while its lane reads the table",
}


_BY_ID: Final = Guarantee(
    "exactly-once", "in the sink's tables: a repeat has the same id, and is dropped for consumer.keep_days"
)
_BY_KEY: Final = Guarantee(
    "exactly-once",
    "in the sink's tables: a repeat has the same key, or without one the same id, which is known for "
    "consumer.keep_days, and is dropped, as is another event with its key",
)
_BY_OFFSET: Final = Guarantee(
    "exactly-once", f"{_BY_ID.text}; what a producer repeats without an id is applied again", "an id in each message"
)
_BY_CONTENT: Final = Guarantee(
    "exactly-once",
    "in the sink's tables: a repeat has the same content, and is dropped, as is another event that has it",
)
_BY_VERSION: Final = Guarantee(
    "exactly-once", "in the sink's tables, of the newest version of each key: older ones are passed over"
)


# With a relay that repeats a batch after a crash, and with one that does not.
_IN_SINK: Final[Mapping[Strategy, tuple[Guarantee, Guarantee]]] = {
    Strategy.DEDUP: (_BY_ID, _BY_ID),
    Strategy.DEDUP_BY_KEY: (_BY_KEY, _BY_KEY),
    Strategy.DEDUP_BY_OFFSET: (_BY_OFFSET, _BY_OFFSET),
    Strategy.FINGERPRINT: (_BY_CONTENT, _BY_CONTENT),
    Strategy.VERSION: (_BY_VERSION, _BY_VERSION),
    Strategy.NATURAL: (
        Guarantee(
            "at-least-once",
            "in the sink's tables, of the last state of each key: a batch that is repeated after a crash may set a row "
            "back until its next event",
            f"{_EXACT}, or strategy=Version(…)",
        ),
        Guarantee(
            "exactly-once",
            "in the sink's tables, of the last state of each key; a replay sets a row back until its next event",
            "strategy=Version(…) before a replay",
        ),
    ),
    Strategy.OFFSETS_ONLY: (
        Guarantee(
            "at-least-once",
            "in the sink's tables: a batch may be applied twice after a crash of a relay",
            f"{_EXACT}, or strategy=Dedup()",
        ),
        Guarantee(
            "exactly-once",
            "in the sink's tables; a replay is applied twice, and so is what is read again after `outbox offsets`",
            "strategy=Dedup() before a replay",
        ),
    ),
    Strategy.STREAM: (
        Guarantee(
            "at-least-once",
            "in the sink's tables: a batch may be applied twice after a crash of a relay, unless its rows have a "
            "message_id",
            f"{_EXACT}, or a column message_id",
        ),
        Guarantee(
            "exactly-once",
            "in the sink's tables; a replay is applied twice, unless its rows have a message_id",
            "a column message_id before a replay",
        ),
    ),
    Strategy.AT_MOST_ONCE: (
        Guarantee(
            Delivery.AT_MOST_ONCE,
            f"of any effect: {_GIVEN_UP} and recorded; what a relay repeats after a crash is applied twice unless the "
            "consumer remembers ids",
            _EXACT,
        ),
        Guarantee(
            Delivery.AT_MOST_ONCE,
            f"of any effect: {_GIVEN_UP} and recorded; a replay is applied twice unless the consumer remembers ids",
            "delivery='exactly-once' of the consumer",
        ),
    ),
}


def guarantee(delivery: Delivery, source: SourceKind, strategy: Strategy | None = None) -> Guarantee:
    """Return what a consumer's tables can rely on, or without its strategy what readers of the topics can.

    A crash of the consumer changes nothing: the offsets move in the transaction of the effect, unless at-most-once.
    """
    if strategy is None:
        return _on_kafka(delivery, _ORDER[source])
    if delivery is Delivery.AT_MOST_ONCE and strategy is Strategy.AT_MOST_ONCE:
        return Guarantee(delivery, f"of any effect: {_AT_MOST}; {_GIVEN_UP} too, and recorded", _SAFE)
    if delivery is Delivery.AT_MOST_ONCE:
        return Guarantee(delivery, f"in the sink's tables: {_AT_MOST}", _SAFE)
    repeating, once = _IN_SINK[strategy]
    return once if delivery is Delivery.EXACTLY_ONCE else repeating


def _on_kafka(delivery: Delivery, order: str) -> Guarantee:
    match delivery:
        case Delivery.AT_MOST_ONCE:
            return Guarantee(delivery, f"on Kafka: {_AT_MOST}; {order}", _SAFE)
        case Delivery.AT_LEAST_ONCE:
            return Guarantee(
                delivery,
                "on Kafka: after a crash at most one batch of each lane stands there twice, under the same event ids; "
                f"without these repeats, {order}",
            )
        case Delivery.EXACTLY_ONCE:
            return Guarantee(delivery, f"on Kafka for read_committed readers; {order}")
        case _:
            assert_never(delivery)


def slot_cost(retained: int, limit: int, safe: int | None, bytes_per_second: float) -> str:
    """Return the WAL that a slot retains, its limits, and when they are reached if nothing reads it any more.

    ``safe`` is how much may be written before the server drops the slot; None without max_slot_wal_keep_size.
    """

    def when(left: float) -> str:
        return f"in {age_text(left / bytes_per_second)}" if left > 0 else "now"

    writing = bytes_per_second >= 1
    text = f"{bytes_text(retained)} of WAL are retained, of {bytes_text(limit)} (wal.retained_limit_bytes)"
    if writing:
        text += f"; {bytes_text(bytes_per_second)}/s are written: unread, the limit is reached {when(limit - retained)}"
    if safe is None:
        return f"{text}. The server retains all of it (max_slot_wal_keep_size = -1), until its disk is full"
    lost = f", {when(safe)}" if writing else ""
    return f"{text}. The server drops the slot after {bytes_text(max(safe, 0))} more{lost} (max_slot_wal_keep_size)"
