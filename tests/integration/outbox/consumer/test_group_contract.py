"""The contract of a consumer group in Postgres, for both who keep one: the inbox, and a Spark job.

Both share the tables and the commands of operators. What a claim, a position, an id, a dead letter and a loss mean must
not depend on who reads Kafka. Neither needs Kafka or Spark here: messages are given.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
import pyarrow as pa
import pytest
from consumer_group import COLUMNS
from counting import Counting
from support import wait_until

from outbox.consumer.errors import Fenced
from outbox.consumer.ids import NO_TIME
from outbox.consumer.letters import DeadLetter
from outbox.consumer.messages import Headers, stored_headers
from outbox.consumer.model import ClaimedOffset, Loss, LossKind, Range, RejectedRecord
from outbox.consumer.retention import IdRetention
from outbox.consumer.stalled import Watch
from outbox.inbox._applier import Applier, Settings
from outbox.inbox._assigned import Assigned
from outbox.inbox._session import Session
from outbox.inbox._waiting import WaitingLetters
from outbox.inbox.consumer import Consumer
from outbox.testing.fixtures import Database
from spark_jobs.dedup.strategies import Dedup
from spark_jobs.outcomes import RejectedRecords
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.sink import PostgresSink
from spark_jobs.sink import Way
from spark_jobs.task.input import NO_INPUT, in_memory

GROUP, TOPIC, TOPIC_ID = "g", "t", "topic-id"
BEGIN = 5
BAD = 100_000
"""A number that the table of effects refuses."""
PARTS = (0, 1)
EFFECT = "INSERT INTO numbers SELECT n, message_offset, message_part FROM batch ORDER BY message_offset"


def event_id(number: int) -> str:
    return f"019cb900-0000-7000-8000-{number:012x}"


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


class OnInbox:
    """A member, without Kafka: what it does with the partitions that it has claimed."""

    def __init__(self, url: str, owner: str) -> None:
        self.settings: Settings = Consumer(url, [TOPIC], group=GROUP, kafka={}, on_failure="dead-letter")._settings
        self.owner = owner
        self.session = Session(self.settings.connect)
        self.rejected: list[RejectedRecord] = []
        self.handled = 0
        self.parts: dict[tuple[str, int], Assigned] = {}
        self.applier = Applier(
            self.settings, self.session, self.handle, Watch(), log_end=lambda _: None, reclaim_seconds=60
        )
        self.waiting = WaitingLetters(self.settings.letters, self.session, self.applier)

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
            read = self.waiting.read(connection, {TOPIC})
        self.waiting.claimed(*read)
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
        failed = self.applier._attempt(
            part, part.strikes, lambda connection: self._count(connection, part, batch), self.applier._wait
        )
        if part.position is None:
            part.position = before
            if part.due == 0.0:
                # Claimed again at once, because an earlier transaction has moved the position.
                return None
            raise Fenced("another claim")
        if isinstance(failed, Exception):
            part.position = before
            part.queue.clear()
            raise RejectedRecords([failed.why])
        part.moved(end)
        return self.handled

    def _count(self, connection: psycopg.Connection[Any], part: Assigned, batch: Sequence[Message]) -> None:
        self.handled = self.applier._apply(connection, part, batch)

    def bury(self, message: Message, *, again: bool = False) -> None:
        part = self.parts[TOPIC, message.part]
        here = self.here(message.part)
        if again:
            part.position = type(here)(TOPIC_ID, message.at, generation=here.generation)
        part.attempts = 1
        why = RejectedRecord((TOPIC, message.part, message.at), "failed", "why\0", "22000")
        assert self.applier._bury(part, message, why)

    def retry(self) -> None:
        self.waiting.keep_up(self.parts)

    def record(self, losses: Sequence[Loss]) -> None:
        with self.session.transaction() as connection:
            self.settings.group.record_losses(connection, losses)

    def close(self) -> None:
        self.session.close()


class OnSpark:
    """A driver and its tasks, without Spark: the group's store, and the sink's transactions."""

    def __init__(self, url: str, owner: str) -> None:
        self.store = PostgresGroupStore(url, "consumer", GROUP, owner)
        self.url = url
        self.generation = 0

    def claim(self) -> None:
        self.generation = self.store.take_over("Dedup")
        if not self.store.stored([TOPIC]):
            places = [(TOPIC, part) for part in PARTS]
            self.store.add(places, {TOPIC: TOPIC_ID}, self.generation, dict.fromkeys(places, BEGIN))

    def next_offset(self, part: int = 0) -> int:
        return self.store.stored([TOPIC])[TOPIC, part].next_offset

    def sink(self) -> PostgresSink:
        return PostgresSink(self.url, "consumer", GROUP, self.generation, COLUMNS, EFFECT, Dedup(), bisect=True)

    def apply(self, batch: Sequence[Message]) -> int | None:
        span = Range(TOPIC_ID, batch[0].at, batch[-1].at + 1, 7)
        place = (TOPIC, batch[0].part)
        given = in_memory([rows(batch)])
        with self.sink().transaction("here", given, most=10) as into:
            if not into.fence(place, span):
                into.rollback()
                return None
            fresh = into.remember(given, Way())
            into.move(place, span, log_end=None, read=len(batch), fresh=fresh, dead=(), reached=None)
            if fresh:
                into.apply()
        return fresh

    def bury(self, message: Message, *, again: bool = False) -> None:
        place = (TOPIC, message.part)
        span = Range(TOPIC_ID, message.at, message.at + 1, 7)
        why = RejectedRecord((*place, message.at), "failed", "why\0", "22000")
        headers = stored_headers(message.headers() or ())
        time = message.timestamp()[1] * 1000
        letter = DeadLetter(why, message.id or event_id(message.number), message.key(), message.value(), headers, time)
        with self.sink().transaction("here", NO_INPUT, most=10) as into:
            assert into.fence(place, span)
            into.move(place, span, log_end=None, read=0, fresh=0, dead=[letter], reached=None)

    def retry(self) -> None:
        # As the driver: only when there is something to retry, and one partition at a time.
        while self.store.state([TOPIC], self.generation, keep_order=True).retry_waits:
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
    size = len(batch)
    return pa.RecordBatch.from_pydict(
        {
            "n": pa.array([one.number for one in batch], pa.int32()),
            "message_id": [one.id or event_id(one.number) for one in batch],
            "message_topic": [TOPIC] * size,
            "message_part": pa.array([one.part for one in batch], pa.int32()),
            "message_offset": pa.array([one.at for one in batch], pa.int64()),
            "message_key": [one.of for one in batch],
            "message_type": ["x"] * size,
            "message_time": pa.array([0] * size, pa.timestamp("us", "UTC")),
            "message_tombstone": [False] * size,
        }
    )


class Bench:
    """The database of the effects, and members of one side."""

    def __init__(self, database: Database, kind: type[OnInbox | OnSpark]) -> None:
        self.database = database
        self.kind = kind
        self.sides: list[Side] = []
        self.run("CREATE TABLE numbers (n int CHECK (n < 100000), place bigint, part int)")

    def side(self) -> Side:
        self.sides.append(self.kind(self.database.url, f"owner {len(self.sides)}"))
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


# --- Claims, fences, moves --------------------------------------------------------------------------------------------


def test_a_group_begins_where_it_is_told_and_goes_on_where_it_was(bench, side):
    assert (side.next_offset(), bench.stands()) == (BEGIN, (BEGIN, 1, 0, 0, 0))
    assert side.apply(messages(1, 2)) == 2
    later = bench.side()
    later.claim()
    assert [later.next_offset(part) for part in PARTS] == [BEGIN + 2, BEGIN]
    assert bench.stands() == (BEGIN + 2, 2, 2, 0, 0)
    [(owner, strategy, ended)] = bench.run("SELECT owner, strategy, ended_at FROM consumer.groups")
    assert owner != "owner 0"
    assert (strategy, ended) == ("Dedup", None)


def test_effects_ids_and_position_are_one_transaction(bench, side):
    with pytest.raises(RejectedRecords) as caught:
        side.apply(messages(1, BAD))
    assert [one.place for one in caught.value.found] == [(TOPIC, 0, BEGIN + 1)]
    assert bench.stands() == (BEGIN, 1, 0, 0, 0)
    assert bench.numbers() == []
    assert bench.run("SELECT count(*) FROM consumer.processed_messages") == [(0,)]
    assert side.apply(messages(1)) == 1


def test_an_older_claim_changes_nothing_any_more(bench, side):
    later = bench.side()
    later.claim()
    # Nothing has moved: the generation alone tells the two apart.
    with pytest.raises(Fenced):
        side.apply(messages(1))
    assert (bench.numbers(), bench.stands()) == ([], (BEGIN, 2, 0, 0, 0))
    assert later.apply(messages(1)) == 1


@pytest.mark.parametrize("change", ["SET topic_id = 'another'", "SET next_offset = 3", None])
def test_nor_does_one_whose_row_is_another(bench, side, change):
    bench.run(f"UPDATE consumer.offsets {change}" if change else "DELETE FROM consumer.offsets")
    with pytest.raises(Fenced):
        side.apply(messages(1))
    assert bench.numbers() == []


def test_a_claim_waits_for_a_transaction_that_has_the_position(bench, side):
    """It begins behind what that one commits."""
    bench.run("CREATE TABLE gate (n int)")
    later = bench.side()
    with psycopg.connect(bench.database.url) as gate:
        # The effect stops here, in its transaction.
        gate.execute("LOCK TABLE numbers")
        applying = threading.Thread(target=side.apply, args=(messages(1, 2),))
        applying.start()
        wait_until(lambda: waiting(bench, "relation") == 1, what="the effect")
        claiming = threading.Thread(target=later.claim)
        claiming.start()
        wait_until(lambda: waiting(bench, "transactionid") + waiting(bench, "tuple") >= 1, what="the claim")
        assert claiming.is_alive()
    for thread in (applying, claiming):
        thread.join(60)
    assert later.next_offset() == BEGIN + 2
    assert bench.numbers() == [1, 2]
    with pytest.raises(Fenced):
        side.apply(messages(3, at=BEGIN + 2))


def waiting(bench: Bench, kind: str) -> int:
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND wait_event_type = 'Lock' AND wait_event = %s"
    )
    return int(bench.run(query, kind)[0][0])


def test_what_was_committed_is_not_applied_again(bench, side):
    """The answer to the COMMIT was lost: the same claim tries the same messages."""
    assert side.apply(messages(1, 2)) == 2
    assert side.apply(messages(1, 2)) is None
    assert (bench.numbers(), bench.stands()) == ([1, 2], (BEGIN + 2, 1, 2, 0, 0))


def test_a_transaction_locks_its_position_first_and_moves_it_once(bench):
    """In as few statements as it needs: with BEGIN, and what its session is asked when it is returned."""
    with Counting(bench.database.url) as counting:
        side = bench.kind(counting.url, "owner")
        bench.sides.append(side)
        side.claim()
        side.apply(messages(1))
        counting.statements.clear()
        assert side.apply(messages(2, 3, at=BEGIN + 1)) == 2
        sent = [" ".join(one.decode().split()) for one in counting.statements]
    of_offsets = [one.partition(" ")[0] for one in sent if '"offsets"' in one]
    assert (of_offsets, len(sent)) == (
        (["SELECT", "WITH"], 7) if bench.kind is OnInbox else (["SELECT", "UPDATE"], 19)
    ), "\n".join(sent)


# --- Ids --------------------------------------------------------------------------------------------------------------


def test_a_repeat_has_no_effect_wherever_it_is(bench, side):
    assert side.apply([Message(1, BEGIN), Message(2, BEGIN + 1), Message(7, BEGIN + 2, id=event_id(1))]) == 2
    assert side.apply([Message(3, BEGIN, part=1), Message(8, BEGIN + 1, part=1, id=event_id(2))]) == 1
    assert bench.numbers() == [1, 2, 3]
    assert [bench.stands(part)[2:] for part in PARTS] == [(2, 1, 0), (1, 1, 0)]


def test_ids_survive_a_claim_and_belong_to_the_group(bench, side):
    bench.run("INSERT INTO consumer.groups (grp, owner) VALUES ('other', 'x')")
    bench.run(
        "INSERT INTO consumer.processed_messages (grp, day, message_id) VALUES ('other', '2026-03-05', %s)", event_id(1)
    )
    assert side.apply(messages(1)) == 1
    later = bench.side()
    later.claim()
    assert later.apply([Message(9, BEGIN + 1, id=event_id(1)), Message(2, BEGIN + 2)]) == 1
    assert bench.numbers() == [1, 2]


def test_what_may_have_been_forgotten_is_refused(bench, side):
    """An id without a time is never forgotten."""
    bench.run("UPDATE consumer.groups SET forgotten_before = current_date")
    old = "01900000-0000-7000-8000-000000000000"
    with pytest.raises(RejectedRecords) as caught:
        side.apply([Message(1, BEGIN, id=old)])
    assert [one.reason for one in caught.value.found] == ["too-old"]
    assert (bench.numbers(), bench.stands()[0]) == ([], BEGIN)
    assert side.apply([Message(1, BEGIN, id="00000000-0000-4000-8000-000000000001")]) == 1


def test_retention_forgets_whole_days_and_says_so(bench, side):
    today = bench.run("SELECT (now() AT TIME ZONE 'UTC')::date")[0][0]
    old, fresh = uuid7(today - dt.timedelta(days=20)), uuid7(today)
    assert side.apply([Message(1, BEGIN, id=old), Message(2, BEGIN + 1, id=fresh)]) == 2
    bench.run(
        "UPDATE consumer.processed_messages SET seen_at = seen_at - interval '20 days' WHERE message_id = %s", old
    )
    memory = IdRetention(bench.database.url, "consumer", 7)
    memory.make()
    memory.forget()
    assert bench.run("SELECT message_id::text FROM consumer.processed_messages") == [(fresh,)]
    [(before,)] = bench.run("SELECT forgotten_before FROM consumer.groups")
    assert NO_TIME < before <= today
    with pytest.raises(RejectedRecords, match="too-old"):
        side.apply([Message(3, BEGIN + 2, id=old)])
    assert side.apply([Message(3, BEGIN + 2, id=fresh)]) == 0


def uuid7(day: dt.date) -> str:
    milliseconds = (day - NO_TIME).days * 86_400_000
    digits = f"{milliseconds:012x}"
    return f"{digits[:8]}-{digits[8:]}-7000-8000-000000000001"


# --- Dead letters -----------------------------------------------------------------------------------------------------


def test_a_dead_letter_is_the_whole_message(bench, side):
    side.bury(Message(1, BEGIN))
    [row] = bench.run(
        "SELECT topic, topic_id, part, message_offset, message_id::text, message_key, message_value, message_headers, "
        "extract(epoch FROM message_time), reason, error, sqlstate, state, attempts FROM consumer.dead_letters"
    )
    assert row[:7] == (TOPIC, TOPIC_ID, 0, BEGIN, event_id(1), b"k", b"1")
    assert [(one["key"], one["value"]) for one in row[7]] == [
        ("id", base64.b64encode(event_id(1).encode()).decode()),
        ("nothing", None),
        ("raw", base64.b64encode(b"\0\xff").decode()),
    ]
    assert float(row[8]) == 1_700_000_000.123
    # Postgres takes no NUL.
    assert row[9:] == ("failed", "why\ufffd", "22000", "dead", 1)
    assert bench.stands() == (BEGIN + 1, 1, 0, 0, 1)


def test_the_same_message_again_is_one_dead_letter_with_more_attempts(bench, side):
    """The offsets were set back."""
    side.bury(Message(1, BEGIN))
    bench.run("UPDATE consumer.offsets SET next_offset = %s WHERE part = 0", BEGIN)
    side.bury(Message(1, BEGIN), again=True)
    assert bench.letters() == [(BEGIN, "failed", "dead", 2)]


def test_a_retry_applies_it_in_order_and_deletes_it_with_the_effect(bench, side):
    for number in (1, 2):
        side.bury(Message(number, BEGIN + number - 1, of=f"k{number}"))
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")
    side.retry()
    assert (bench.numbers(), bench.letters()) == ([1, 2], [])
    assert bench.stands() == (BEGIN + 2, 1, 2, 0, 2)


def test_a_retry_is_no_progress_of_the_position(bench, side):
    """What stands still must not look as if it moved."""
    side.bury(Message(1, BEGIN))
    bench.run("UPDATE consumer.offsets SET updated_at = '2020-01-01'")
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")
    side.retry()
    assert bench.numbers() == [1]
    assert bench.run("SELECT count(*) FROM consumer.offsets WHERE updated_at = '2020-01-01'") == [(2,)]
    assert side.apply(messages(2, at=BEGIN + 1)) == 1
    assert bench.run("SELECT part FROM consumer.offsets WHERE updated_at > '2020-01-01'") == [(0,)]


def test_without_ids_a_position_moves_without_the_table_of_ids(bench, side):
    """Who deletes old days must not wait for those that remember nothing."""
    with psycopg.connect(bench.database.url) as blocking:
        blocking.execute("LOCK TABLE consumer.processed_messages")
        burying = threading.Thread(target=side.bury, args=(Message(1, BEGIN),), daemon=True)
        burying.start()
        burying.join(60)
        assert not burying.is_alive()
    assert bench.stands() == (BEGIN + 1, 1, 0, 0, 1)


def test_a_retry_that_fails_stays_and_counts(bench, side):
    side.bury(Message(BAD, BEGIN))
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")
    side.retry()
    assert (bench.numbers(), bench.letters()) == ([], [(BEGIN, "failed", "dead", 2)])


def test_what_is_behind_another_waits_for_it(bench, side):
    """A retried message does not overtake an earlier one of its key; one of another key goes."""
    bury_and_wait(side)
    bench.run("UPDATE consumer.dead_letters SET state = 'retry' WHERE message_offset > %s", BEGIN)
    side.retry()
    assert bench.numbers() == [3]
    assert bench.letters() == [(BEGIN, "failed", "dead", 1), (BEGIN + 1, "behind", "dead", 2)]


def bury_and_wait(side: Side) -> None:
    for number, key in ((1, "k"), (2, "k"), (3, "other")):
        side.bury(Message(number, BEGIN + number - 1, of=key))


def test_what_waits_behind_one_that_is_gone_is_released(bench, side):
    """It was put there while that one was being discarded: nothing else would release it."""
    bury_and_wait(side)
    bench.run("UPDATE consumer.dead_letters SET reason = 'behind' WHERE message_offset = %s", BEGIN + 1)
    side.retry()
    assert bench.numbers() == []
    bench.run("DELETE FROM consumer.dead_letters WHERE message_offset = %s", BEGIN)
    side.retry()
    assert bench.numbers() == [2]
    assert bench.letters() == [(BEGIN + 2, "failed", "dead", 1)]


def test_a_key_that_has_moved_to_another_partition_waits_too(bench, side):
    """Partitions were added: which dead letter came first gives the order, and not the offsets."""
    side.bury(Message(1, BEGIN, part=1))
    side.bury(Message(2, BEGIN))
    bench.run("UPDATE consumer.dead_letters SET state = 'retry' WHERE part = 0")
    side.retry()
    assert bench.numbers() == []
    bench.run("DELETE FROM consumer.dead_letters WHERE part = 1")
    side.retry()
    assert bench.numbers() == [2]


def test_an_older_claim_retries_nothing(bench, side):
    side.bury(Message(1, BEGIN))
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")
    bench.side().claim()
    with contextlib.suppress(Fenced):
        side.retry()
    assert (bench.numbers(), bench.letters()) == ([], [(BEGIN, "failed", "retry", 1)])


# --- Losses -----------------------------------------------------------------------------------------------------------


def loss(first: int, end: int | None, kind: LossKind = LossKind.RETENTION, part: int = 0) -> Loss:
    return Loss(TOPIC, part, TOPIC_ID, first, end, kind, f"{first} to {end}")


def test_a_loss_is_recorded_once_grows_and_is_open_until_it_is_accepted(bench, side):
    def open_losses() -> list[tuple[Any, ...]]:
        return bench.run(
            "SELECT part, kind, first_offset, end_offset, detail FROM consumer.losses WHERE accepted_at IS NULL "
            "ORDER BY part, kind"
        )

    for _ in range(2):
        side.record([loss(5, 8)])
    assert open_losses() == [(0, "retention", 5, 8, "5 to 8")]
    side.record([loss(5, 12), loss(9, None, LossKind.RECREATED), loss(5, 6, part=1)])
    assert open_losses() == [
        (0, "recreated", 9, None, "9 to None"),
        (0, "retention", 5, 12, "5 to 12"),
        (1, "retention", 5, 6, "5 to 6"),
    ]
    bench.run("UPDATE consumer.losses SET accepted_at = now()")
    side.record([loss(5, 12)])
    assert open_losses() == [(0, "retention", 5, 12, "5 to 12")]
    assert bench.run("SELECT count(*) FROM consumer.losses") == [(4,)]
