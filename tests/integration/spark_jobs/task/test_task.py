"""A consumer's transaction on a real Postgres, without Spark: what it promises, and that each guard is needed.

Every check runs the three ways that rows can go (WAYS); and with one guard taken out, when it has to fail.
"""

from __future__ import annotations

import datetime as dt
import io
import itertools
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from consumer_group import NOON, event_id
from task_sink import WAYS, Sink, sink

from outbox.consumer.groups import GroupRows
from outbox.consumer.model import ClaimedOffset, Partition
from spark_jobs import ids as identity
from spark_jobs.dedup import processed, strategies
from spark_jobs.errors import InputCut
from spark_jobs.postgres import batch_table as applying
from spark_jobs.postgres import direct_copy as direct
from spark_jobs.postgres.sink import transaction
from spark_jobs.task import input as task_input
from spark_jobs.task.feed import rejected_from
from spark_jobs.task.input import TaskInput, in_memory

__all__ = ["sink"]


class BrokenPromise(AssertionError):
    """What a check has seen is not what was promised."""

    def __init__(self, seen: Any, promised: Any) -> None:
        super().__init__(f"promised was {promised}, and seen {seen}")
        self.seen = seen


def promised(seen: Any, promise: Any) -> None:
    """Raise BrokenPromise where these differ."""
    if seen != promise:
        raise BrokenPromise(seen, promise)


def fenced(sink: Sink) -> None:
    sink.run("UPDATE consumer.offsets SET generation = 2")
    report = sink.apply([(event_id(1), 1)], generation=1)
    promised((report["outcome"], sink.numbers(), sink.position()), ("fenced", [], 0))


def applied_before(sink: Sink) -> None:
    """The same range again, as after a COMMIT whose answer was lost; with an effect that dedup would not save."""
    forgetful = {"strategy": strategies.Natural(["n"])}
    sink.apply([(event_id(1), 1), (event_id(2), 2)], **forgetful)
    report = sink.apply([(event_id(1), 1), (event_id(2), 2)], **forgetful)
    promised((report["outcome"], sink.numbers(), sink.position()), ("already", [1, 2], 2))


def behind_the_group(sink: Sink) -> None:
    """A zombie of the same generation with an older plan; or the round of a task that its driver had given up on."""
    sink.apply([(event_id(n), n) for n in range(3)])
    report = sink.apply([(event_id(n), n) for n in range(7, 10)], start=1)
    promised((report["outcome"], sink.numbers(), sink.position()), ("moved", [0, 1, 2], 3))
    # Whoever has no more than the group has is late, and no more: it has been applied.
    report = sink.apply([(event_id(7), 7)], start=1)
    promised((report["outcome"], sink.numbers(), sink.position()), ("already", [0, 1, 2], 3))


def another_topic(sink: Sink) -> None:
    sink.run("UPDATE consumer.offsets SET topic_id = 'made anew'")
    promised((sink.apply([(event_id(1), 1)])["outcome"], sink.numbers()), ("fenced", []))


def repeated(sink: Sink) -> None:
    sink.apply([(event_id(1), 1), (event_id(2), 2)])
    report = sink.apply([(event_id(2), 2), (event_id(3), 3)], start=2)
    promised((report["read"], report["fresh"], sink.numbers(), sink.position()), (2, 1, [1, 2, 3], 4))
    counts = "SELECT applied, duplicates, dead FROM consumer.offsets WHERE part = 0"
    promised(sink.run(counts), [(3, 1, 0)])


def repeated_in_one_batch(sink: Sink) -> None:
    sink.apply([(event_id(2), 2), (event_id(1), 1), (event_id(2), 2)])
    promised(sink.numbers(), [2, 1])


def repeated_after_midnight(sink: Sink) -> None:
    """Sent again at one in the morning, with that timestamp of Kafka's: its id is of the day before."""
    sink.apply([(event_id(1), 1)])
    sink.apply([(event_id(1), 1)], start=1, when=NOON + dt.timedelta(hours=13))
    promised(sink.numbers(), [1])


def repeated_by_another_partition(sink: Sink) -> None:
    sink.apply([(event_id(1), 1)])
    promised((sink.apply([(event_id(1), 1)], part=1)["fresh"], sink.numbers()), (0, [1]))


def forgotten(sink: Sink) -> None:
    sink.run("UPDATE consumer.groups SET forgotten_before = '2026-03-05'")
    report = sink.apply([(event_id(1), 1), (event_id(2, NOON + dt.timedelta(days=2)), 2)])
    promised((report["outcome"], sink.numbers(), sink.position()), ("rejected", [], 0))
    (record,) = rejected_from(report["detail"])
    promised((record.place, record.reason), (("t", 0, 0), "too-old"))


def refused_by_the_sink(sink: Sink) -> None:
    """Bad rows are named one by one, in order, and nothing at all is kept: not the offset, not an id."""
    report = sink.apply([(event_id(n), 100 + n if n in {3, 4, 17} else n) for n in range(20)])
    promised([record.place[2] for record in rejected_from(report["detail"])], [3, 4, 17])
    promised((sink.numbers(), sink.position()), ([], 0))
    promised(sink.run("SELECT count(*) FROM consumer.processed_messages"), [(0,)])


def deferred(sink: Sink) -> None:
    """A constraint that is checked at COMMIT is asked before it, while the rejected message can still be found."""
    sink.run("CREATE TABLE parents (n int PRIMARY KEY); INSERT INTO parents VALUES (1)")
    sink.run("ALTER TABLE numbers ADD FOREIGN KEY (n) REFERENCES parents DEFERRABLE INITIALLY DEFERRED")
    report = sink.apply([(event_id(1), 1), (event_id(2), 2)])
    promised(report["outcome"], "rejected")
    promised([record.place[2] for record in rejected_from(report["detail"])], [1])


def from_worker(batches: list[pa.RecordBatch], *, ended: bool) -> TaskInput:
    """Return rows as a Python worker of Spark's reads them; without ``ended`` Spark gives up between two messages."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
        cut = sink.tell()
    sent = sink.getvalue() + task_input.END_OF_STREAM if ended else sink.getvalue()[:cut]
    spark, worker = socket.socketpair()
    with spark, worker:
        spark.sendall(sent)
        stream = worker.makefile("rb")
    return TaskInput(pa.ipc.open_stream(stream), lambda: task_input.check_end(stream))


def ends_too_early(sink: Sink) -> None:
    """Spark's own failure shows only in what does not follow the rows."""
    sink.given = lambda batches: from_worker(batches, ended=False)
    sink.apply([(event_id(1), 1)])
    promised((sink.numbers(), sink.position(), sink.told), ([], 0, ["cut"]))
    sink.given = lambda batches: from_worker(batches, ended=True)
    sink.apply([(event_id(1), 1), (event_id(2), 2)])
    promised((sink.numbers(), sink.position(), sink.told), ([1, 2], 2, ["cut", "applied"]))


def left_unread(sink: Sink) -> None:
    """A COMMIT by a task that has not come to the end of its rows."""
    with suppress(InputCut), transaction(sink.url, "test", in_memory([])) as cursor:
        cursor.execute("INSERT INTO numbers VALUES (1, 1)")
    promised(sink.numbers(), [])


CHECKS = [
    ends_too_early,
    left_unread,
    fenced,
    applied_before,
    behind_the_group,
    another_topic,
    repeated,
    repeated_in_one_batch,
    repeated_after_midnight,
    repeated_by_another_partition,
    forgotten,
    refused_by_the_sink,
    deferred,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("check", CHECKS)
def test_promise(sink: Sink, check: Callable[[Sink], None], way: str) -> None:
    sink.way = way
    check(sink)


def fence_without(compared: str) -> Callable[..., None]:
    """Return a fence that takes one part of the stored offset as it is."""
    fence = GroupRows.fence

    def blind(
        self: GroupRows, connection: psycopg.Connection[Any], place: Partition, here: ClaimedOffset, *, lock: bool
    ) -> None:
        query = f"SELECT {compared} FROM consumer.offsets WHERE grp = %s AND topic = %s AND part = %s FOR UPDATE"
        [(stored,)] = connection.execute(query.encode(), (self.name, *place))
        fence(self, connection, place, replace(here, **{compared: stored}), lock=lock)

    return blind


def other_days() -> Callable[[Any], Any]:
    """A day for each time that ids are asked for theirs: a function of anything but the id."""
    day = itertools.count(20_000)
    return lambda ids: np.full(len(ids), next(day), np.int32)


NO_SQL = "SELECT %(grp)s, {day}, '{processed_messages}' FROM batch"
NO_ROWS = "SELECT 1, 2, 3, 4 FROM {groups} WHERE owner IS NULL AND grp = %(grp)s"
KAFKAS_DAY = "(message_time AT TIME ZONE 'UTC')::date"
AGAIN = (2, 2, [1, 2, 2, 3], 4)
FORGOTTEN = ("applied", [1, 2], 2)
PASSED_OVER = ("applied", [0, 1, 7, 2, 8, 9], 4)
ANY_START = fence_without("next_offset")
BOTH = ("batch", "direct")
# A guard that is taken out, the ways that rely on it, the check that must find it, and what that sees in place of what
# was promised.
MUTATIONS: dict[str, tuple[tuple[str, ...], object, str, Any, Callable[[Sink], None], object]] = {
    "any generation": (BOTH, GroupRows, "fence", fence_without("generation"), fenced, ("applied", [1], 1)),
    "any start offset": (BOTH, GroupRows, "fence", ANY_START, behind_the_group, PASSED_OVER),
    "a range again": (("batch",), GroupRows, "fence", ANY_START, applied_before, ("applied", [1, 1, 2, 2], 2)),
    "any topic id": (("batch",), GroupRows, "fence", fence_without("topic_id"), another_topic, ("applied", [1])),
    "no ids": (BOTH, processed, "copy_ids", lambda *_: None, repeated, AGAIN),
    "no ids by SQL": (("lenient",), strategies, "_REMEMBER", NO_SQL, repeated, AGAIN),
    "no others' ids": (("batch",), processed, "copy_ids", lambda *_: None, repeated_by_another_partition, (1, [1, 1])),
    "repeats stay": (("batch",), strategies, "keep_first", lambda *_: "SELECT 1", repeated_in_one_batch, [2, 1, 2]),
    "the day of anything": (BOTH, identity, "days", other_days(), repeated_after_midnight, [1, 1]),
    "Kafka's day": (("lenient",), strategies, "DAY_OF_ID", KAFKAS_DAY, repeated_after_midnight, [1, 1]),
    "nothing is forgotten": (("batch",), strategies, "_FORGOTTEN", NO_ROWS, forgotten, FORGOTTEN),
    "no day is forgotten": (("direct",), processed, "any_before", lambda *_: False, forgotten, FORGOTTEN),
    "a part commits": (WAYS, task_input, "check_end", lambda _: None, ends_too_early, ([1], 1, ["applied"])),
    "an early commit": (("batch",), TaskInput, "require_whole", lambda _: None, left_unread, [1]),
    "constraints at COMMIT": (("batch",), applying, "IMMEDIATE", "SELECT 1", deferred, "broken"),
    "constraints at COMMIT, direct": (("direct",), direct, "IMMEDIATE", "SELECT 1", deferred, "broken"),
}


@pytest.mark.parametrize(("mutation", "way"), [(name, way) for name, found in MUTATIONS.items() for way in found[0]])
def test_without_its_guard_the_promise_is_broken(sink: Sink, mutation: str, way: str, monkeypatch) -> None:
    sink.way = way
    _, where, name, value, check, seen = MUTATIONS[mutation]
    monkeypatch.setattr(where, name, value)
    with pytest.raises(BrokenPromise) as broken:
        check(sink)
    assert broken.value.seen == seen


def test_a_batch_without_repeats_takes_few_statements(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hot path: what a round costs beside its rows. The slow path is taken for suspects only.

    With BEGIN and DISCARD ALL, and what a new session is asked once; COMMIT is not seen here.
    """
    seen: list[str] = []
    execute, copy = psycopg.Cursor.execute, psycopg.Cursor.copy

    def see(query: Any) -> None:
        seen.append(
            query if isinstance(query, str) else query.as_string() if hasattr(query, "as_string") else str(query)
        )

    def counted(self: psycopg.Cursor[Any], query: Any, *arguments: Any, **options: Any) -> Any:
        see(query)
        return execute(self, query, *arguments, **options)

    def counted_copy(self: psycopg.Cursor[Any], query: Any, *arguments: Any, **options: Any) -> Any:
        see(query)
        return copy(self, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", counted)
    monkeypatch.setattr(psycopg.Cursor, "copy", counted_copy)
    sink.apply([(event_id(n), n) for n in range(50)])
    assert len(seen) == 12, "\n".join(seen)
    assert not any("ON CONFLICT" in query for query in seen)
    seen.clear()
    sink.apply([(event_id(n), n) for n in range(50, 60)], start=50, suspects=frozenset({("t", 0)}))
    assert any("ON CONFLICT" in query for query in seen)
    seen.clear()
    straight = sink.straight()
    seen.clear()
    sink.apply([(event_id(n), n) for n in range(60, 90)], start=60, direct=straight)
    assert len(seen) == 9, "\n".join(seen)
    assert not any("batch" in query for query in seen)
    assert sink.numbers() == list(range(90))
    assert sink.told == ["applied"] * 3
