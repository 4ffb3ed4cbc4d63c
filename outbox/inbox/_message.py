"""The messages that a handler gets: Kafka's own, and those that come back from the dead letters."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Final, Protocol

from outbox.consumer.messages import Headers

_CREATE_TIME: Final = 1
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class KafkaMessage(Protocol):
    """A message, with the methods of confluent-kafka's."""

    def topic(self) -> str: ...
    def partition(self) -> int: ...
    def offset(self) -> int: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> Headers | None: ...
    def timestamp(self) -> tuple[int, int]: ...
    def leader_epoch(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter to be tried again, as the message that it was.

    id       of its row.
    reason   why it failed the last time.
    blocked  an earlier message of its key is a dead letter that nobody has retried.
    """

    id: int
    reason: str
    blocked: bool
    at: tuple[str, int, int]
    raw_key: bytes | None
    raw_value: bytes | None
    message_headers: Headers
    time: dt.datetime

    def topic(self) -> str:
        return self.at[0]

    def partition(self) -> int:
        return self.at[1]

    def offset(self) -> int:
        return self.at[2]

    def key(self) -> bytes | None:
        return self.raw_key

    def value(self) -> bytes | None:
        return self.raw_value

    def headers(self) -> Headers | None:
        return self.message_headers

    def leader_epoch(self) -> int | None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return _CREATE_TIME, (self.time - _EPOCH) // dt.timedelta(milliseconds=1)
