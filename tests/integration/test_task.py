"""A consumer's transaction on a real Postgres, without Spark: what it promises, and that each guard is needed.

Every check runs the three ways that rows can go (WAYS); and with one guard taken out, when it has to fail.
"""

from __future__ import annotations

import datetime as dt
import io
import itertools
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from consumer_group import COLUMNS, ConsumerGroup
from psycopg import sql

from spark_jobs import ids as identity
from spark_jobs import letters
from spark_jobs.dedup import processed, strategies
from spark_jobs.dedup.strategies import Book, Dedup
from spark_jobs.effects.mapped import Insert
from spark_jobs.errors import InputCut, Reject
from spark_jobs.letters import Letter
from spark_jobs.outcomes import Broken, Culprit, Culprits
from spark_jobs.postgres import batch_table as applying
from spark_jobs.postgres import direct_copy as direct
from spark_jobs.postgres import sink as postgres_sink
from spark_jobs.postgres.direct_copy import Direct
from spark_jobs.postgres.tables import DAY_OF_ID
from spark_jobs.task import input as task_input
from spark_jobs.task import partition as task
from spark_jobs.task.input import TaskInput, in_memory

EFFECT = "INSERT INTO numbers SELECT n, message_offset FROM batch ORDER BY message_offset"
NOON = dt.datetime(2026, 3, 4, 12, tzinfo=dt.UTC)


def event_id(number: int, when: dt.datetime = NOON) -> str:
    """A UUIDv7 of a time."""
    milliseconds = f"{int(when.timestamp() * 1000):012x}"
    return f"{milliseconds[:8]}-{milliseconds[8:]}-7000-8000-{number:012x}"


WAYS = ("batch", "direct", "lenient")
"""Through ``batch``, ids by COPY; straight into the sink's table; and through ``batch`` with ids by SQL."""


@dataclass
class Sink(ConsumerGroup):
    """A group that stands at offset 0 in generation 1.

    told   the outcomes of all reports.
    given  how a task gets its rows.
    """

    way: str = "batch"
    given: Callable[[list[pa.RecordBatch]], TaskInput] = in_memory
    told: list[str] = field(default_factory=list)

    def apply(
        self,
        messages: list[tuple[str, int]],
        start: int = 0,
        *,
        part: int = 0,
        generation: int = 1,
        when: dt.datetime = NOON,
        keys: list[str] | None = None,
        types: list[str] | None = None,
        **plan: Any,
    ) -> dict[str, Any]:
        """Apply messages (id, n) from an offset on, as a task does, and again as the driver would. Gives the report."""
        rows = pa.RecordBatch.from_pydict(
            {
                "n": pa.array([n for _, n in messages], pa.int32()),
                "message_id": [name for name, _ in messages],
                "message_topic": ["t"] * len(messages),
                "message_part": pa.array([part] * len(messages), pa.int32()),
                "message_offset": pa.array(range(start, start + len(messages)), pa.int64()),
                "message_key": keys or ["k"] * len(messages),
                "message_type": types or ["x"] * len(messages),
                "message_time": pa.array([when] * len(messages), pa.timestamp("us", "UTC")),
                "message_tombstone": [False] * len(messages),
            }
        )
        straight = "effect" not in plan and isinstance(plan.get("strategy", Dedup()), Dedup)
        given = {
            "columns": COLUMNS,
            "effect": EFFECT,
            "generation": generation,
            "lenient": frozenset({("t", part)} if self.way == "lenient" else ()),
            "direct": self.straight() if self.way == "direct" and straight else None,
            **plan,
        }
        made = self.plan(part, start, len(messages), **given)
        (report,) = task.run(made, self.given([rows]))
        found: dict[str, Any] = report.to_pylist()[0]
        self.told.append(found["outcome"])
        if found["outcome"] == "roundabout":
            (report,) = task.run(replace(made, slow=frozenset({("t", part)})), self.given([rows]))
            found = report.to_pylist()[0]
        return found

    def straight(self) -> Direct:
        columns = COLUMNS | {"n": "integer", "message_offset": "bigint"}
        effect = Insert("numbers", {"n": "n", "place": "message_offset"})
        with psycopg.connect(self.url) as connection:
            found = direct.direct_for(connection.cursor(), effect, Dedup(), columns, list(columns))
        assert found is not None
        return found

    def numbers(self) -> list[int]:
        return [n for (n,) in self.run("SELECT n FROM numbers ORDER BY place, n")]

    def position(self) -> int:
        ((position,),) = self.run("SELECT next_offset FROM consumer.offsets WHERE part = 0")
        return int(position)


@pytest.fixture
def sink(outbox_postgres) -> Sink:
    made = Sink(outbox_postgres.url)
    made.begin([0, 1])
    made.run("CREATE TABLE numbers (n int CHECK (n < 100), place bigint)")
    return made


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
    """A zombie of the same generation with an older plan."""
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
    promised((report["outcome"], sink.numbers(), sink.position()), ("culprits", [], 0))
    (culprit,) = task.culprits_from(report["detail"])
    promised((culprit.place, culprit.reason), (("t", 0, 0), "too-old"))


def refused_by_the_sink(sink: Sink) -> None:
    """Bad rows are named one by one, in order, and nothing at all is kept: not the offset, not an id."""
    report = sink.apply([(event_id(n), 100 + n if n in {3, 4, 17} else n) for n in range(20)])
    promised([culprit.place[2] for culprit in task.culprits_from(report["detail"])], [3, 4, 17])
    promised((sink.numbers(), sink.position()), ([], 0))
    promised(sink.run("SELECT count(*) FROM consumer.processed_messages"), [(0,)])


def deferred(sink: Sink) -> None:
    """A constraint that is checked at COMMIT is asked before it, while the culprit can still be found."""
    sink.run("CREATE TABLE parents (n int PRIMARY KEY); INSERT INTO parents VALUES (1)")
    sink.run("ALTER TABLE numbers ADD FOREIGN KEY (n) REFERENCES parents DEFERRABLE INITIALLY DEFERRED")
    report = sink.apply([(event_id(1), 1), (event_id(2), 2)])
    promised(report["outcome"], "culprits")
    promised([culprit.place[2] for culprit in task.culprits_from(report["detail"])], [1])


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
    with suppress(InputCut), postgres_sink.transaction(sink.url, "test", in_memory([])) as cursor:
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


def without(text: str, *pieces: str) -> str:
    for piece in pieces:
        assert text.count(piece) == 1, piece
        text = text.replace(piece, "")
    return text


def other_days() -> Callable[[Any], Any]:
    """A day for each time that ids are asked for theirs: a function of anything but the id."""
    day = itertools.count(20_000)
    return lambda ids: np.full(len(ids), next(day), np.int32)


NO_SQL = "SELECT %(grp)s, {day}, '{processed}' FROM batch"
ANY_START = without(postgres_sink._MOVE, " AND next_offset = %(start)s")
# A guard that is taken out, the check that must find it, and what that sees in place of what was promised.
MUTATIONS: dict[str, tuple[str, object, str, Any, Callable[[Sink], None], object]] = {
    "no generation predicate": (
        "batch",
        postgres_sink,
        "_MOVE",
        without(postgres_sink._MOVE, " AND generation = %(generation)s"),
        fenced,
        ("applied", [1], 1),
    ),
    "no generation predicate, direct": (
        "direct",
        postgres_sink,
        "_MOVE",
        without(postgres_sink._MOVE, " AND generation = %(generation)s"),
        fenced,
        ("applied", [1], 1),
    ),
    "no start-offset predicate": (
        "batch",
        postgres_sink,
        "_MOVE",
        ANY_START,
        behind_the_group,
        ("applied", [0, 1, 7, 2, 8, 9], 4),
    ),
    "no start-offset predicate, direct": (
        "direct",
        postgres_sink,
        "_MOVE",
        ANY_START,
        behind_the_group,
        ("applied", [0, 1, 7, 2, 8, 9], 4),
    ),
    "a range is applied again": (
        "batch",
        postgres_sink,
        "_MOVE",
        ANY_START,
        applied_before,
        ("applied", [1, 1, 2, 2], 2),
    ),
    "no topic id": (
        "batch",
        postgres_sink,
        "_MOVE",
        without(postgres_sink._MOVE, "topic_id = %(topic_id)s AND "),
        another_topic,
        ("applied", [1]),
    ),
    "no dedup insert": ("batch", processed, "copy_ids", lambda *_: None, repeated, (2, 2, [1, 2, 2, 3], 4)),
    "no dedup insert, direct": ("direct", processed, "copy_ids", lambda *_: None, repeated, (2, 2, [1, 2, 2, 3], 4)),
    "no dedup insert, by SQL": ("lenient", strategies, "_REMEMBER", NO_SQL, repeated, (2, 2, [1, 2, 2, 3], 4)),
    "no dedup insert, another partition": (
        "batch",
        processed,
        "copy_ids",
        lambda *_: None,
        repeated_by_another_partition,
        (1, [1, 1]),
    ),
    "repeats in a batch stay": ("batch", strategies, "_DROP_REPEATS", "SELECT 1", repeated_in_one_batch, [2, 1, 2]),
    "the day of anything else": ("batch", identity, "days", other_days(), repeated_after_midnight, [1, 1]),
    "the day of anything else, direct": ("direct", identity, "days", other_days(), repeated_after_midnight, [1, 1]),
    "the day of Kafka's timestamp": (
        "lenient",
        strategies,
        "DAY_OF_ID",
        "(message_time AT TIME ZONE 'UTC')::date",
        repeated_after_midnight,
        [1, 1],
    ),
    "what is forgotten is not asked": (
        "batch",
        strategies,
        "_FORGOTTEN",
        "SELECT 1, 2, 3, 4 FROM {groups} WHERE {day} IS NULL AND grp = %(grp)s".replace("{day}", "owner"),
        forgotten,
        ("applied", [1, 2], 2),
    ),
    "what is forgotten is not asked, direct": (
        "direct",
        processed,
        "any_before",
        lambda *_: False,
        forgotten,
        ("applied", [1, 2], 2),
    ),
    "commit at the iterator's end": (
        "batch",
        task_input,
        "check_end",
        lambda _: None,
        ends_too_early,
        ([1], 1, ["applied"]),
    ),
    "commit at the iterator's end, direct": (
        "direct",
        task_input,
        "check_end",
        lambda _: None,
        ends_too_early,
        ([1], 1, ["applied"]),
    ),
    "commit at the iterator's end, lenient": (
        "lenient",
        task_input,
        "check_end",
        lambda _: None,
        ends_too_early,
        ([1], 1, ["applied"]),
    ),
    "commit before the iterator's end": ("batch", TaskInput, "require_whole", lambda _: None, left_unread, [1]),
    "deferred constraints wait for COMMIT": ("batch", applying, "IMMEDIATE", "SELECT 1", deferred, "broken"),
    "deferred constraints wait for COMMIT, direct": ("direct", direct, "IMMEDIATE", "SELECT 1", deferred, "broken"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_without_its_guard_the_promise_is_broken(sink: Sink, mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink.way, where, name, value, check, seen = MUTATIONS[mutation]
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
    assert len(seen) == 13, "\n".join(seen)
    assert not any("ON CONFLICT" in query for query in seen)
    seen.clear()
    sink.apply([(event_id(n), n) for n in range(50, 60)], start=50, suspects=frozenset({("t", 0)}))
    assert any("ON CONFLICT" in query for query in seen)
    seen.clear()
    straight = sink.straight()
    seen.clear()
    sink.apply([(event_id(n), n) for n in range(60, 90)], start=60, direct=straight)
    assert len(seen) == 10, "\n".join(seen)
    assert not any("batch" in query for query in seen)
    assert sink.numbers() == list(range(90))
    assert sink.told == ["applied"] * 3


def test_the_day_of_an_id_is_that_of_its_time(sink: Sink) -> None:
    for name, day in (
        (event_id(1), "2026-03-04"),
        (event_id(1, dt.datetime(1970, 1, 2, tzinfo=dt.UTC)), "1970-01-02"),
        ("ffffffff-ffff-7fff-bfff-ffffffffffff", "10889-08-02"),
        ("00000000-0000-4000-8000-000000000001", "1970-01-01"),
    ):
        query = f"SELECT ({DAY_OF_ID})::text FROM (SELECT '{name}'::uuid AS message_id) AS one"
        assert sink.run(query) == [(day,)]


def outcomes(report: dict[str, Any]) -> list[tuple[int, str]]:
    assert report["outcome"] == "culprits", report
    return [(culprit.place[2], culprit.reason) for culprit in task.culprits_from(report["detail"])]


def test_a_sinks_table_may_have_any_name(sink: Sink) -> None:
    """A temporary table of ours would hide one of the sink: what goes there would be gone with COMMIT."""
    sink.run("CREATE TABLE incoming (n int CHECK (n < 100)); CREATE TABLE held (n int)")
    effect = "INSERT INTO incoming SELECT n FROM batch; INSERT INTO held SELECT n FROM batch"
    report = sink.apply([(event_id(1), 1), (event_id(2), 200)], effect=effect)
    assert outcomes(report) == [(1, "failed")]
    lenient = {"lenient": frozenset({("t", 0)}), "effect": effect}
    assert sink.apply([(event_id(1), 1), (event_id(2), 2)], **lenient)["outcome"] == "applied"
    assert sink.run("SELECT sum(incoming.n), count(*) FROM incoming JOIN held USING (n)") == [(3, 2)]


def test_a_value_that_is_beyond_a_limit_is_a_dead_letter_and_not_a_server_that_is_away(sink: Sink) -> None:
    sink.run("CREATE TABLE words (word text PRIMARY KEY)")
    incompressible = "SELECT string_agg(md5(g::text), '') FROM generate_series(1, 2000) AS g"
    effect = f"INSERT INTO words SELECT CASE n WHEN 7 THEN ({incompressible}) ELSE n::text END FROM batch"
    report = sink.apply([(event_id(n), n) for n in range(10)], effect=effect)
    assert outcomes(report) == [(7, "failed")]


def test_what_an_effect_says_may_be_no_text(sink: Sink) -> None:
    """Half a surrogate pair, out of a message's JSON: on its way to the driver, and into the dead letter."""

    def effect(_: object, rows: pa.Table) -> None:
        raise Reject("bad name \ud800", *rows["message_id"].to_pylist())

    for bisect, outcome in ((True, "culprits"), (False, "broken")):
        report = sink.apply([(event_id(1), 1)], effect=effect, bisect=bisect)
        assert (report["outcome"], "bad name ?" in report["detail"]) == (outcome, True)
    culprit = Culprit(("t", 0, 0), "rejected", "bad\0name \ud800")
    with psycopg.connect(sink.url) as connection:
        letters.write(connection.cursor(), "consumer", "g", "id", [Letter(culprit, None, None, None, "[]", 0)])
    assert sink.run("SELECT error FROM consumer.dead_letters") == [("bad\ufffdname ?",)]


def test_a_dead_letter_that_its_job_leaves_out_today_leaves_a_note(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are tried again one is not among the rows: a filter, or another list of types."""
    culprits = [Culprit(("t", 0, offset), "failed", "why") for offset in (0, 1)]
    with psycopg.connect(sink.url) as connection:
        found = [Letter(one, event_id(one.place[2]), b"k", b"payment", "[]", 0) for one in culprits]
        letters.write(connection.cursor(), "consumer", "g", "id", found)
    sink.run("UPDATE consumer.dead_letters SET state = 'retry'")
    ids = dict(sink.run("SELECT message_offset, id FROM consumer.dead_letters"))
    wishes = {one.place: (ids[one.place[2]], one.reason) for one in culprits}
    monkeypatch.setattr(task, "run", lambda plan, rows: task.run_retry(plan, wishes, rows))
    assert (sink.apply([(event_id(0), 7)])["outcome"], sink.numbers()) == ("applied", [7])
    assert sink.run("SELECT count(*) FROM consumer.dead_letters") == [(0,)]
    kept = "what, details ->> 'offset', convert_from(decode(details ->> 'value_base64', 'base64'), 'UTF8')"
    assert sink.run(f"SELECT {kept} FROM consumer.audit") == [("leave out dead letter", "1", "payment")]


def test_rows_of_two_partitions_are_no_tasks(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own task would find its range applied, and would leave out what it has itself."""
    run = task.run

    def mixed(plan: task.TaskPlan, batches: Any) -> Any:
        (rows,) = batches
        other = pa.array([1] * rows.num_rows, pa.int32())
        index = rows.schema.names.index("message_part")
        return run(plan, in_memory([rows, rows.set_column(index, "message_part", other)]))

    monkeypatch.setattr(task, "run", mixed)
    for sink.way in WAYS:
        report = sink.apply([(event_id(1), 1)])
        assert (report["outcome"], sink.numbers(), sink.position()) == ("broken", [], 0)
        assert "message_part is not 0: the transform mixes partitions" in report["detail"]


def test_a_shorter_range_that_was_committed_meanwhile_is_no_take_over(sink: Sink) -> None:
    """A task that its driver had given up on: the round is planned anew instead of ending the job."""
    sink.apply([(event_id(1), 1)])
    assert sink.apply([(event_id(1), 1), (event_id(2), 2)])["outcome"] == "moved"
    assert sink.numbers() == [1]


def test_a_text_that_postgres_has_not_is_found_in_any_column(sink: Sink) -> None:
    columns = {**COLUMNS, "message_note": "text"}
    batch = pa.RecordBatch.from_pydict(
        {
            "message_topic": ["t"] * 3,
            "message_part": pa.array([0] * 3, pa.int32()),
            "message_offset": pa.array(range(3), pa.int64()),
            "message_note": pa.Array.from_buffers(
                pa.string(), 3, pa.array([b"good", b"\xff\xfe", b"a\0b"], pa.binary()).buffers()
            ),
        }
    )
    found: list[Culprit] = []
    texts = [name for name, kind in applying.textual(columns).items() if kind == "text" and name in batch.schema.names]
    (left,) = applying.without_unfit([batch], texts, found, max_dead=2)
    assert left.column("message_offset").to_pylist() == [0]
    assert sorted(culprit.place[2] for culprit in found) == [1, 2]
    # Where they are more than may be put aside, one more is enough.
    with pytest.raises(Culprits, match=r"^1 messages can't be applied"):
        list(applying.without_unfit([batch], texts, [], max_dead=0))


def test_a_version_that_is_none_costs_one_message_and_9_is_less_than_10(sink: Sink) -> None:
    sink.run("CREATE TABLE states (key int PRIMARY KEY, version bigint, n int)")
    version = {
        "strategy": strategies.Version("states", {"message_key": "key"}, "message_type", "version"),
        "effect": "INSERT INTO states SELECT message_key::int, message_type::bigint, n FROM batch "
        "ON CONFLICT (key) DO UPDATE SET version = excluded.version, n = excluded.n",
    }
    messages = [(event_id(n), n) for n in range(3)]
    bad = sink.apply(messages, **version, keys=["1", "01", "1"], types=["9", "10", "x"])
    assert outcomes(bad) == [(2, "failed")]
    good = sink.apply(messages, **version, keys=["1", "01", "1"], types=["9", "10", "8"])
    assert (good["outcome"], sink.run("SELECT key, version, n FROM states")) == ("applied", [(1, 10, 1)])


def lines(
    sink: Sink, rows: list[tuple[int, str | None]], columns: dict[str, str] | None = None, **plan: Any
) -> dict[str, Any]:
    """Apply messages as a transform leaves them that gives several rows for each: (offset, line)."""
    columns = {"line": "text", **(columns or {}), **{name: kind for name, kind in COLUMNS.items() if name != "n"}}
    size = len(rows)
    made = sink.plan(0, 0, 100, **{"columns": columns, "effect": "SELECT 1", **plan})
    batch = pa.RecordBatch.from_pydict(
        {
            **{name: [line for _, line in rows] for name in columns if not name.startswith("message_")},
            "message_id": [event_id(offset) for offset, _ in rows],
            "message_topic": ["t"] * size,
            "message_part": pa.array([0] * size, pa.int32()),
            "message_offset": pa.array([offset for offset, _ in rows], pa.int64()),
            "message_key": ["k"] * size,
            "message_type": ["x"] * size,
            "message_time": pa.array([NOON] * size, pa.timestamp("us", "UTC")),
            "message_tombstone": [line is None for _, line in rows],
        }
    )
    (report,) = task.run(made, in_memory([batch]))
    found: dict[str, Any] = report.to_pylist()[0]
    sink.run("UPDATE consumer.offsets SET next_offset = 0; DELETE FROM consumer.processed_messages")
    return found


def credit(cursor: psycopg.Cursor[Any], rows: pa.Table) -> None:
    cursor.execute(
        "INSERT INTO balance AS b SELECT unnest(%s::text[]), 10 ON CONFLICT (line) DO UPDATE SET n = b.n + excluded.n",
        [rows["line"].to_pylist()],
    )


def test_the_rows_of_one_message_stay_together(sink: Sink) -> None:
    """Parts of a batch may pass of which the whole does not: whatever is done for a message is done for all of it."""
    sink.run("CREATE TABLE balance (line text PRIMARY KEY, n int)")
    two = [(offset, line) for offset in range(3) for line in ("debit", "credit")]
    assert lines(sink, two, effect=credit)["outcome"] == "applied"
    assert sink.run("SELECT * FROM balance ORDER BY 1") == [("credit", 30), ("debit", 30)]
    sink.run("CREATE TABLE lines (line text PRIMARY KEY, place bigint)")
    swap = "DELETE FROM lines; INSERT INTO lines SELECT line, message_offset FROM batch"
    assert lines(sink, two, effect=swap)["outcome"] == "applied"
    assert sink.run("SELECT * FROM lines ORDER BY 1") == [("credit", 2), ("debit", 2)]
    # The last message of a key has rows, and not a row.
    natural = lines(sink, [(0, "c"), (1, "a"), (1, "b")], effect=swap, strategy=strategies.Natural(["message_key"]))
    assert (natural["outcome"], natural["fresh"]) == ("applied", 2)
    assert sink.run("SELECT line FROM lines ORDER BY 1") == [("a",), ("b",)]
    # A function gets what SQL gets: of the first message one row is left.
    seen: list[list[str]] = []
    mixed = [(0, "a"), (0, "b"), (1, "a")]
    strategy = strategies.Natural(["line"])
    lines(sink, mixed, effect=lambda _, rows: seen.append(rows["line"].to_pylist()), strategy=strategy)
    assert seen == [["b", "a"]]


def test_a_message_counts_once_however_many_of_its_rows_are_at_fault(sink: Sink) -> None:
    sink.run("CREATE TABLE lines (line text CHECK (line <> 'bad'), n int)")
    rows = [(0, "1"), (1, "bad"), (1, "bad"), (1, "bad"), (2, "bad"), (2, "2"), (3, "3")]
    bad = [(1, "failed"), (2, "failed")]
    assert outcomes(lines(sink, rows, effect="INSERT INTO lines SELECT line FROM batch", max_dead=2)) == bad
    lenient: dict[str, Any] = {"lenient": frozenset({("t", 0)}), "columns": {"line": "integer"}, "max_dead": 2}
    assert outcomes(lines(sink, rows, **lenient)) == bad

    def refuse(_: object, table: pa.Table) -> None:
        raise Reject("no", *[row["message_id"] for row in table.to_pylist() if row["line"] == "bad"])

    assert outcomes(lines(sink, rows, effect=refuse)) == [(1, "rejected"), (2, "rejected")]


def test_a_payload_may_have_any_name_that_is_not_refused(sink: Sink) -> None:
    names = dict.fromkeys(("incoming_at", "held_at", "staged_at", "rank", "place"), "text")
    rows = [(0, "1"), (1, "bad"), (2, "nul\0"), (3, "4")]
    sink.run("CREATE TABLE lines (line text CHECK (line <> 'bad'), held_at text)")
    effect = "INSERT INTO lines SELECT line, held_at FROM batch"
    lenient = frozenset({("t", 0)})
    assert outcomes(lines(sink, rows, names, effect=effect, lenient=lenient)) == [(2, "failed")]
    del rows[2]
    assert outcomes(lines(sink, rows, names, effect=effect, lenient=lenient)) == [(1, "failed")]
    assert outcomes(lines(sink, rows, names, effect=effect)) == [(1, "failed")]


def test_a_function_is_given_what_came_in_and_its_places_are_not_asked_for(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25,000 rows are one Arrow table, and nothing else in Python; only of repeats is looked which they are."""
    given: list[pa.Table] = []
    asked: list[int] = []
    places = applying.Applying.places
    monkeypatch.setattr(applying.Applying, "places", lambda self: asked.append(1) or places(self))
    messages = [(event_id(n), n) for n in range(25_000)]

    def effect(_: object, rows: pa.Table) -> None:
        given.append(rows)

    assert sink.apply(messages, effect=effect)["fresh"] == 25_000
    assert (given[0]["n"].to_pylist(), asked) == (list(range(25_000)), [])
    again = [*messages[:10], (event_id(25_000), 25_000), *messages[10:]]
    assert sink.apply(again, start=25_000, effect=effect)["fresh"] == 1
    assert (given[1]["n"].to_pylist(), asked) == ([25_000], [1])


def commit(cursor: psycopg.Cursor[Any], _: object) -> None:
    cursor.execute(EFFECT)
    cursor.execute("COMMIT")


def test_an_effect_can_not_end_the_transaction(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else offsets would be committed without dead letters and counts; or the effect without the offsets."""
    insert = "INSERT INTO numbers VALUES (1, 1)"
    for effect in (
        f"{insert}; COMMIT",
        f"COMMIT; {insert}",
        f"{insert}; ROLLBACK",
        f"{insert}; DO 'BEGIN COMMIT; END'",
    ):
        report = sink.apply([(event_id(1), 1)], effect=effect)
        assert (report["outcome"], sink.numbers(), sink.position()) == ("broken", [], 0), effect
        assert sink.run("SELECT count(*) FROM consumer.processed_messages") == [(0,)]
    # A function can, and must not: it is told so, and not taken for a server that is away.
    # What it has committed is in the books all the same: the counts, and what was put aside with it.
    letter = Letter(Culprit(("t", 0, 1), "failed", "why"), event_id(2), b"k", b"2", "[]", 0)
    report = sink.apply([(event_id(1), 1)], effect=commit, dead={("t", 0): [letter]})
    assert (report["outcome"], "savepoint" in report["detail"], sink.position()) == ("broken", True, 1)
    assert sink.run("SELECT message_id::text FROM consumer.dead_letters") == [(event_id(2),)]
    assert sink.run("SELECT applied, duplicates, dead FROM consumer.offsets WHERE part = 0") == [(1, 0, 1)]
    # And what was tried again is no dead letter any more.
    ((number,),) = sink.run("UPDATE consumer.dead_letters SET state = 'retry' RETURNING id")
    monkeypatch.setattr(task, "run", lambda plan, rows: task.run_retry(plan, {("t", 0, 1): (number, "failed")}, rows))
    assert sink.apply([(event_id(2), 2)], start=1, effect=commit)["outcome"] == "broken"
    assert sink.run("SELECT count(*) FROM consumer.dead_letters") == [(0,)]
    assert sink.run("SELECT applied FROM consumer.offsets WHERE part = 0") == [(2,)]
    assert sink.numbers() == [1, 2]


STAGED = {"line": "text", "n": "numeric(6,2)", **{name: kind for name, kind in COLUMNS.items() if name != "n"}}


def staged(
    sink: Sink, columns: dict[str, str], rows: list[tuple[str, str, int, str]], effect: Any, **limits: Any
) -> None:
    """Apply rows (task, line, offset, n) as executors have staged them."""
    listed = ", ".join(f"{name} text" for name in columns if name not in applying.META_PLACE)
    sink.run(
        f"DROP TABLE IF EXISTS staged; CREATE TABLE staged ({listed}, message_topic text, message_part int, "
        "message_offset bigint, outbox_batch_staged_by text, "
        "outbox_batch_staged_at bigint GENERATED ALWAYS AS IDENTITY)"
    )
    with psycopg.connect(sink.url) as connection:
        cursor = connection.cursor()
        cursor.executemany(
            "INSERT INTO staged (outbox_batch_staged_by, line, message_offset, n, message_topic, message_part) "
            "VALUES (%s, %s, %s, %s, 't', 0)",
            rows,
        )
        options = {"bisect": True, "max_dead": 2, **limits}
        one = applying.Applying(cursor, Book("consumer", "g"), columns, strategies.Natural(["n"]), effect, **options)
        assert one.take(sql.Identifier("staged"), ["b", "a"]) == len(rows)
        one.apply()


def test_rows_that_were_staged_come_in_their_order(sink: Sink) -> None:
    """That of the messages; or that of the transform's result, where the rows are no messages any more."""
    seen: list[list[str]] = []

    def look(_: object, rows: pa.Table) -> None:
        seen.append(rows["line"].to_pylist())

    # Wide and narrow ones: a table fills the gaps that wide ones leave with what comes later.
    wide = [
        ("ab"[number % 3 % 2], f"{number}-" + "x" * (number * 379 % 1900), number // 2, "1") for number in range(600)
    ]
    shuffled = random.Random(7).sample(wide, len(wide))
    staged(sink, STAGED, shuffled, look)
    assert [int(line.partition("-")[0]) // 2 for line in seen[0]] == [number // 2 for number in range(600)]
    no_messages = {"line": "text", "n": "numeric(6,2)"}
    staged(sink, no_messages, shuffled, look)
    assert seen[1] == [line for task in "ba" for by, line, *_ in shuffled if by == task]

    def refuse(*_: object) -> None:
        raise Reject("not today", "some id")

    with pytest.raises(Broken, match=r"some id \(not today\).*of no one message"):
        staged(sink, no_messages, shuffled[:2], refuse)


def test_what_does_not_fit_of_staged_rows_is_found_message_by_message(sink: Sink) -> None:
    rows = [("a", "x", 0, "1"), ("b", "x", 1, "?"), ("a", "y", 1, "?"), ("a", "z", 1, "?"), ("b", "x", 2, "12345")]
    with pytest.raises(Culprits) as caught:
        staged(sink, STAGED, rows, "SELECT 1")
    assert [culprit.place[2] for culprit in caught.value.found] == [1, 2]
    # All of them fail together and none of them alone: then they are all there, once.
    sink.run(
        "CREATE SEQUENCE tries; CREATE DOMAIN later AS text CHECK (nextval('tries') > 1); CREATE TABLE lines (n bigint)"
    )
    good = [("a", "x", number, "1") for number in range(5)]
    staged(sink, {**STAGED, "line": "later"}, good, "INSERT INTO lines SELECT message_offset FROM batch")
    assert sink.run("SELECT n FROM lines ORDER BY n") == [(number,) for number in range(5)]


@pytest.mark.parametrize("numbers", [[], [3, 4]])
def test_a_task_that_is_not_told_its_number_reads_nothing(monkeypatch: pytest.MonkeyPatch, numbers: list[int]) -> None:
    """No number is no empty range: what came after it would be stepped over."""
    monkeypatch.setattr(task, "from_spark", lambda batches: batches)
    read: list[int] = []

    def reading(number: int) -> Any:
        read.append(number)
        return iter(())

    def given(of: list[int]) -> list[pa.RecordBatch]:
        return [pa.RecordBatch.from_pydict({"n": pa.array([number], pa.int64())}) for number in of]

    assert list(task.of_number(reading, given([7]))) == []
    with pytest.raises(InputCut, match=f"a task got {len(numbers)} numbers of ranges instead of one"):
        list(task.of_number(reading, given(numbers)))
    assert read == [7]
