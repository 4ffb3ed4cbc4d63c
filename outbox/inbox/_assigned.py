"""One partition that Kafka has assigned to this member: its claim, the messages that wait, and what failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from outbox.consumer.model import ClaimedOffset, Partition
from outbox.consumer.postgres_errors import Strikes
from outbox.inbox._message import KafkaMessage


@dataclass(slots=True)
class Assigned:
    """The state of one partition between two transactions.

    position      None until the partition is claimed again, as while another claim has it.
    queue         messages that were fetched and not applied, in the order of their offsets; ``size`` is in bytes.
    fetched       the offset after the last message in the queue.
    due           when the next transaction may begin, by time.monotonic().
    suspect       the offset of a message that failed: those before it are applied first, and then it alone.
    alone_until   up to this offset each message is tried alone: COMMIT failed, and does not say because of which.
    attempts      how often the first message of the queue has failed.
    interruptions  how often in a row a transaction was interrupted by a cause that is no message's fault.
    strikes       how often in a row a transaction was interrupted after it had found its claim in Postgres.
    letter_strikes  the same of dead letters that are retried.
    deaths        how many messages in a row became dead letters, or were given up; a batch that was lost counts once.
    dead_keys     the keys of dead letters: later messages of these wait behind them.
    end           how far Kafka has been read: there may be no message between the last one and here.
    letters_first  its dead letters are retried before its messages.
    cut_off       Kafka does not have what comes after the queue.
    shown         the position that Kafka's own tools were shown.
    """

    partition: Partition
    position: ClaimedOffset | None
    dead_keys: set[bytes]
    fetched: int
    queue: deque[KafkaMessage] = field(default_factory=deque)
    size: int = 0
    due: float = 0.0
    suspect: int | None = None
    alone_until: int = -1
    attempts: int = 0
    interruptions: int = 0
    strikes: Strikes = field(default_factory=Strikes)
    letter_strikes: Strikes = field(default_factory=Strikes)
    deaths: int = 0
    end: int = 0
    letters_first: bool = False
    cut_off: bool = False
    shown: int = -1
    paused: bool = False

    @property
    def name(self) -> str:
        return f"{self.partition[0]}-{self.partition[1]}"

    def add(self, message: KafkaMessage) -> None:
        """Put a fetched message into the queue. While the partition is not claimed, and for an old one, do nothing."""
        if self.position is not None and message.offset() >= self.fetched:
            self.queue.append(message)
            self.size += size_of(message)
            self.fetched = message.offset() + 1

    def next_batch(self, most: int) -> Sequence[KafkaMessage]:
        first = self.queue[0].offset()
        if first <= self.alone_until:
            return [self.queue[0]]
        suspect = self.suspect
        if suspect is None:
            return list(islice(self.queue, most))
        before = takewhile(lambda message: message.offset() < suspect, self.queue)
        return list(islice(before, most)) or [self.queue[0]]

    def moved(self, next_offset: int) -> None:
        """Note that everything before an offset was committed."""
        assert self.position is not None
        self.position = replace(self.position, next_offset=next_offset)
        while self.queue and self.queue[0].offset() < next_offset:
            self.size -= size_of(self.queue.popleft())
            self.attempts = 0
        if self.suspect is not None and self.suspect < next_offset:
            self.suspect = None
        self.interruptions = self.strikes.count = 0

    def forget_claim(self, until: float) -> None:
        """Forget the claim and what was fetched. If Kafka still assigns the partition by then, it is claimed again."""
        self.position = None
        self.queue.clear()
        self.size = 0
        self.due = until

    def claimed(self, position: ClaimedOffset, dead_keys: set[bytes]) -> None:
        """Begin again at a position."""
        self.position = position
        self.dead_keys = dead_keys
        self.fetched = position.next_offset
        self.end = self.attempts = self.interruptions = self.strikes.count = 0
        self.suspect, self.alone_until, self.due = None, -1, 0.0
        self.letters_first = self.cut_off = False


def size_of(message: KafkaMessage) -> int:
    return len(message.value() or b"")
