"""Both who keep a consumer group in Postgres: a member of an inbox, and a Spark job; for the group's contract.

Neither needs Kafka or Spark here: messages are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

import psycopg
import pyarrow as pa
import pytest
from consumer_group import COLUMNS, event_id, numbered

from outbox.consumer.delays import TopicDelays
from outbox.consumer.errors import Fenced
from outbox.consumer.letters import DeadLetter
from outbox.consumer.messages import Headers, stored_headers
from outbox.consumer.model import AT_MOST_ONCE, ClaimedOffset, Loss, Range, RejectedRecord
from outbox.consumer.stalled import Watch
from outbox.inbox._applier import Applier
from outbox.inbox._assigned import Assigned
from outbox.inbox._at_most_once import AtMostOnceApplier
from outbox.inbox._retries import Retries
from outbox.inbox._session import Session
from outbox.inbox._transactions import MessageFailed, Settings
from outbox.inbox._waiting import WaitingLetters
from outbox.inbox.consumer import Consumer
from outbox.testing.fixtures import Database
from spark_jobs.dedup.strategies import Dedup, OffsetsOnly
from spark_jobs.outcomes import RejectedRecords
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.sink import PostgresSink
from spark_jobs.sink import Move, Way
from spark_jobs.task.input import NO_INPUT, in_memory

GROUP, TOPIC, TOPIC_ID = "g", "t", "topic-id"
BEGIN = 5
BAD = 100_000
"""A number that the table of effects refuses."""
PARTS = (0, 1)
EFFECT = "INSERT INTO numbers SELECT n, message_offset, message_part FROM batch ORDER BY message_offset"


@dataclass(frozen=True)
class Message:
    """One of Kafka's: its value is its number, and its id is made of that unless it is given."""

    number: int
    at: int
    part: int = 0
    id: str | None = None
    of: str = "k"

    def topic(self) -> str:
        return TOPIC

    def partition(self) -> int:
        return self.part

    def offset(self) -> int:
        return self.at

    def key(self) -> bytes | None:
        return self.of.encode()

    def value(self) -> bytes | None:
        return str(self.number).encode()

    def headers(self) -> Headers | None:
        return [("id", (self.id or event_id(self.number)).encode()), ("nothing", None), ("raw", b"\0\xff")]

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_700_000_000_123

    def leader_epoch(self) -> int | None:
        return 7


def messages(*numbers: int, at: int = BEGIN, part: int = 0) -> list[Message]:
    return [Message(number, at + n, part) for n, number in enumerate(numbers)]


class Side(Protocol):
    """One holder of the group's partitions t-0 and t-1. ``claim`` first, then the others."""

    def claim(self) -> None: ...
    def next_offset(self, part: int = 0) -> int: ...

    def apply(self, batch: Sequence[Message]) -> int | None:
        """Apply messages in one transaction. Gives how many are new; None if an earlier transaction has applied them.

        Raises Fenced, and RejectedRecords for messages that can't be applied.
        """

    def bury(self, message: Message, *, again: bool = False) -> None:
        """Make a message a dead letter; ``again``: behind offsets that were set back."""

    def retry(self) -> None:
        """Try what is to be retried, of t-0, until nothing is left."""

    def record(self, losses: Sequence[Loss]) -> None: ...
    def close(self) -> None: ...

    def apply_at_most_once(self, batch: Sequence[Message], between: Callable[[], object] = lambda: None) -> None:
        """Apply messages of a side that is at-most-once. ``between`` is called between the two transactions.

        Raises Fenced.
        """


class BetweenApplier(AtMostOnceApplier):
    between: Callable[[], object]

    def _attempt(self, part: Any, strikes: Any, step: Any) -> Any:
        if step.__name__ == "apply":
            self.between()
        return super()._attempt(part, strikes, step)


class OnInbox:
    """A member, without Kafka: what it does with the partitions that it has claimed."""

    def __init__(self, url: str, owner: str, *, at_most_once: bool = False) -> None:
        given: dict[str, Any] = (
            {"delivery": "at-most-once", "dedup": False} if at_most_once else {"on_failure": "dead-letter"}
        )
        self.settings: Settings = Consumer(url, [TOPIC], group=GROUP, kafka={}, **given)._settings
        self.owner = owner
        self.session = Session(self.settings.connect)
        self.rejected: list[RejectedRecord] = []
        self.handled = 0
        self.parts: dict[tuple[str, int], Assigned] = {}
        self.applier = (BetweenApplier if at_most_once else Applier)(
            self.settings,
            self.session,
            self.handle,
            Watch(),
            TopicDelays(),
            log_end=lambda _: None,
            reclaim_seconds=60,
            stopping=Event(),
        )
        retries = Retries(self.settings, self.session, self.handle, Watch(), reclaim_seconds=60, stopping=Event())
        self.waiting = WaitingLetters(self.settings.letters, self.session, retries)

    def handle(self, connection: psycopg.Connection[Any], message: Any) -> None:
        values = (int(message.value()), message.offset(), message.partition())
        connection.execute("INSERT INTO numbers VALUES (%s, %s, %s)", values)
        self.handled += 1

    def claim(self) -> None:
        places = [(TOPIC, part) for part in PARTS]
        with self.session.transaction() as connection:
            claimed = self.settings.group.claim(
                connection, places, dict.fromkeys(places, (TOPIC_ID, BEGIN)), self.settings.strategy
            )
            if self.settings.at_most_once:
                self.settings.letters.require_none(connection)
            keys = self.waiting.read(connection, {TOPIC})
        self.waiting.know(keys)
        self.parts = {
            place: Assigned(place, here, self.waiting.keys[TOPIC], here.next_offset) for place, here in claimed.items()
        }

    def next_offset(self, part: int = 0) -> int:
        return self.here(part).next_offset

    def here(self, part: int) -> ClaimedOffset:
        position = self.parts[TOPIC, part].position
        assert position is not None
        return position

    def apply(self, batch: Sequence[Message]) -> int | None:
        part = self.parts[TOPIC, batch[0].part]
        self.handled = 0
        end = batch[-1].at + 1
        before = self.here(batch[0].part)
        part.position = type(before)(TOPIC_ID, batch[0].at, generation=before.generation)
        part.fetched = batch[0].at
        for message in batch:
            part.add(message)
        try:
            self.applier._attempt(part, part.strikes, lambda connection: self._count(connection, part, batch))
        except MessageFailed as failed:
            part.position = before
            part.queue.clear()
            raise RejectedRecords([failed.why]) from failed
        if part.position is None:
            part.position = before
            if part.due == 0.0:
                # Claimed again at once, because an earlier transaction has moved the position.
                return None
            raise Fenced("another claim")
        part.moved(end)
        return self.handled

    def apply_at_most_once(self, batch: Sequence[Message], between: Callable[[], object] = lambda: None) -> None:
        part = self.parts[TOPIC, batch[0].part]
        for message in batch:
            part.add(message)
        assert isinstance(self.applier, BetweenApplier)
        self.applier.between = between
        self.applier.apply(part)
        if part.position is None:
            raise Fenced("another claim")

    def _count(self, connection: psycopg.Connection[Any], part: Assigned, batch: Sequence[Message]) -> None:
        self.handled = len(self.applier._apply(connection, part, batch))

    def bury(self, message: Message, *, again: bool = False) -> None:
        part = self.parts[TOPIC, message.part]
        here = self.here(message.part)
        if again:
            part.position = type(here)(TOPIC_ID, message.at, generation=here.generation)
        part.attempts = 1
        why = RejectedRecord((TOPIC, message.part, message.at), "failed", "why\0", "22000")
        assert self.applier._bury(part, message, why)

    def retry(self) -> None:
        # All is looked at again at once; a member does so the later, the longer a look takes.
        self.waiting._retried_at = 0.0
        self.waiting._release_at.clear()
        self.waiting.keep_up(self.parts)

    def record(self, losses: Sequence[Loss]) -> None:
        with self.session.transaction() as connection:
            self.settings.group.record_losses(connection, losses)

    def close(self) -> None:
        self.session.close()


class OnSpark:
    """A driver and its tasks, without Spark: the group's store, and the sink's transactions."""

    def __init__(self, url: str, owner: str, *, at_most_once: bool = False) -> None:
        self.at_most_once = at_most_once
        self.store = PostgresGroupStore(url, "consumer", GROUP, owner)
        self.url = url
        self.generation = 0

    def claim(self) -> None:
        self.generation = self.store.take_over(AT_MOST_ONCE if self.at_most_once else "Dedup")
        if not self.store.stored([TOPIC]):
            places = [(TOPIC, part) for part in PARTS]
            self.store.add(places, {TOPIC: TOPIC_ID}, self.generation, dict.fromkeys(places, BEGIN))

    def next_offset(self, part: int = 0) -> int:
        return self.store.stored([TOPIC])[TOPIC, part].next_offset

    def sink(self) -> PostgresSink:
        strategy = OffsetsOnly() if self.at_most_once else Dedup()
        return PostgresSink(
            *(self.url, "consumer", GROUP, self.generation, COLUMNS, EFFECT, strategy),
            bisect=True,
            at_most_once=self.at_most_once,
        )

    def apply(self, batch: Sequence[Message]) -> int | None:
        span = Range(TOPIC_ID, batch[0].at, batch[-1].at + 1, 7)
        place = (TOPIC, batch[0].part)
        given = in_memory([rows(batch)])
        with self.sink().transaction("here", given, most=10) as into:
            if not into.fence(place, span):
                into.rollback()
                return None
            fresh = into.remember(given, Way())
            into.move(Move(place, span, read=len(batch), fresh=fresh))
            if fresh:
                into.apply()
        return fresh

    def apply_at_most_once(self, batch: Sequence[Message], between: Callable[[], object] = lambda: None) -> None:
        span, place = Range(TOPIC_ID, batch[0].at, batch[-1].at + 1, 7), (TOPIC, batch[0].part)
        given = in_memory([rows(batch)])
        with self.sink().transaction("here", given, most=10) as into:
            assert into.fence(place, span)
            fresh = into.remember(given, Way())
            into.move(Move(place, span, read=len(batch), fresh=fresh))
            between()
            into.apply()

    def bury(self, message: Message, *, again: bool = False) -> None:
        place = (TOPIC, message.part)
        span = Range(TOPIC_ID, message.at, message.at + 1, 7)
        why = RejectedRecord((*place, message.at), "failed", "why\0", "22000")
        headers = stored_headers(message.headers() or ())
        time = message.timestamp()[1] * 1000
        letter = DeadLetter(why, message.id or event_id(message.number), message.key(), message.value(), headers, time)
        with self.sink().transaction("here", NO_INPUT, most=10) as into:
            assert into.fence(place, span)
            into.move(Move(place, span, dead=[letter]))

    def retry(self) -> None:
        # As the driver: only when there is something to retry, and one partition at a time.
        while self.store.state([TOPIC], self.generation, keep_order=True)[1]:
            found = self.store.retried([TOPIC], 10, keep_order=True)
            if not found:
                return
            blocked = [(one.id, RejectedRecord(one.place, "behind", "behind")) for one in found if one.behind]
            self.store.failed_again(blocked, self.generation)
            for one in found:
                if one.behind:
                    continue
                requests = {one.place: (one.id, one.reason)}
                given = in_memory([rows([Message(int(one.value or b""), one.place[2], one.place[1])])])
                try:
                    with self.sink().transaction("dead letters", given, most=10) as into:
                        assert into.hold(requests)
                        fresh = into.remember(given, Way(repeats=True))
                        into.resolve()
                        if fresh:
                            into.apply()
                except RejectedRecords as error:
                    self.store.failed_again([(one.id, error.found[0])], self.generation)

    def record(self, losses: Sequence[Loss]) -> None:
        self.store.record_losses(losses, self.generation)

    def close(self) -> None:
        self.store.close()


def rows(batch: Sequence[Message]) -> pa.RecordBatch:
    return numbered(
        [one.number for one in batch],
        [one.id or event_id(one.number) for one in batch],
        message_part=pa.array([one.part for one in batch], pa.int32()),
        message_offset=pa.array([one.at for one in batch], pa.int64()),
        message_key=[one.of for one in batch],
    )


class Bench:
    """The database of the effects, and members of one side."""

    def __init__(self, database: Database, kind: type[OnInbox | OnSpark]) -> None:
        self.database = database
        self.kind = kind
        self.sides: list[Side] = []
        self.run("CREATE TABLE numbers (n int CHECK (n < 100000), place bigint, part int)")

    def side(self, *, at_most_once: bool = False) -> Side:
        self.sides.append(self.kind(self.database.url, f"owner {len(self.sides)}", at_most_once=at_most_once))
        return self.sides[-1]

    def run(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database.url) as connection:
            cursor = connection.execute(query.encode(), values)
            return cursor.fetchall() if cursor.description else []

    def numbers(self) -> list[int]:
        return [number for (number,) in self.run("SELECT n FROM numbers ORDER BY part, place, n")]

    def stands(self, part: int = 0) -> tuple[Any, ...]:
        query = "SELECT next_offset, generation, applied, duplicates, dead FROM consumer.offsets WHERE part = %s"
        return self.run(query, part)[0]

    def letters(self) -> list[tuple[Any, ...]]:
        return self.run("SELECT message_offset, reason, state, attempts FROM consumer.dead_letters ORDER BY id")


@pytest.fixture(params=[OnInbox, OnSpark], ids=["inbox", "spark"])
def bench(request: pytest.FixtureRequest, outbox_postgres: Database) -> Iterator[Bench]:
    found = Bench(outbox_postgres, request.param)
    yield found
    for side in found.sides:
        side.close()


@pytest.fixture
def side(bench: Bench) -> Side:
    found = bench.side()
    found.claim()
    return found
