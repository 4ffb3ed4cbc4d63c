"""The messages that a handler gets: Kafka's own, and those that come back from the dead letters."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from outbox.consumer.messages import Headers

if TYPE_CHECKING:
    from outbox.consumer.letters import RetryRecord

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
    def leader_epoch(self) -> int | None:
        """Return the epoch of the leader that the message came from; None from brokers before Kafka 2.1."""


@dataclass(frozen=True, slots=True)
class RetriedMessage:
    """A dead letter that is retried, as the message that it was."""

    letter: RetryRecord

    def topic(self) -> str:
        return self.letter.place[0]

    def partition(self) -> int:
        return self.letter.place[1]

    def offset(self) -> int:
        return self.letter.place[2]

    def key(self) -> bytes | None:
        return self.letter.key

    def value(self) -> bytes | None:
        return self.letter.value

    def headers(self) -> Headers | None:
        return self.letter.message_headers()

    def leader_epoch(self) -> int | None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return _CREATE_TIME, (self.letter.time - _EPOCH) // dt.timedelta(milliseconds=1)
