"""The contract of ``spark_jobs.sink``: what every database that takes rows of a task has to keep.

It runs over Postgres, straight into the table and through ``batch``, and over SQLite: another database must not need
another task.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pytest
from consumer_group import COLUMNS, TOPIC_ID, ConsumerGroup, event_id
from consumer_group import numbered as rows
from pyspark import cloudpickle

from examples.jobs.sqlite_sink import TABLES, SqliteSink, SqliteStore, open_file
from outbox.consumer.errors import Fenced, OffsetMoved
from outbox.consumer.letters import DeadLetter
from outbox.consumer.model import Range, RejectedRecord
from spark_jobs.dedup.strategies import Dedup
from spark_jobs.effects.mapped import Insert
from spark_jobs.errors import InputCut
from spark_jobs.outcomes import RejectedRecords
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.sink import PostgresSink
from spark_jobs.sink import GroupStore, Move, Sink, Way
from spark_jobs.task import partition as task
from spark_jobs.task.input import NO_INPUT, TaskInput, in_memory
from spark_jobs.task.partition import TaskPlan

EFFECT = "INSERT INTO numbers SELECT n, message_offset, message_part FROM batch ORDER BY message_part, message_offset"
PARTITION = ("t", 0)
MORE = 25_000
"""More rows than the Arrow batches of one task's input hold."""


class Database(Protocol):
    """One implementation, with tables: numbers (n < 100000, place, part), group ``g`` at 0 of t-0 and t-1."""

    sink: Sink
    way: Way

    def read(self, what: str) -> list[Any]: ...
    def set(self, what: str) -> None: ...
    def store(self) -> GroupStore: ...


QUERIES = {
    "position": "SELECT next_offset FROM {}offsets WHERE part = 0",
    "figures": "SELECT applied, duplicates, dead FROM {}offsets WHERE part = 0",
    "letters": "SELECT message_offset, reason, error, state FROM {}dead_letters ORDER BY message_offset",
    "letter_ids": "SELECT id FROM {}dead_letters ORDER BY message_offset",
    "numbers": "SELECT n FROM numbers ORDER BY part, place",
    "younger": "UPDATE {0}groups SET generation = 2; UPDATE {0}offsets SET generation = 2",
    "anew": "UPDATE {}offsets SET topic_id = 'another'",
    "no_row": "DELETE FROM {}offsets",
    "retry": "UPDATE {}dead_letters SET state = 'retry'",
}


class OnPostgres:
    queries = {what: query.format("consumer.") for what, query in QUERIES.items()} | {
        "ids": "SELECT count(*) FROM consumer.processed_messages"
    }

    def __init__(self, url: str, *, straight: bool) -> None:
        self._group = ConsumerGroup(url)
        self._group.begin([0, 1])
        self._group.run("CREATE TABLE numbers (n int CHECK (n < 100000), place bigint, part int)")
        direct = None
        if straight:
            effect = Insert("numbers", {"n": "n", "place": "message_offset", "part": "message_part"})
            direct = PostgresGroupStore(url, "consumer", "g", "test").direct(effect, Dedup(), COLUMNS, list(COLUMNS))
            assert direct is not None
        self.sink = PostgresSink(url, "consumer", "g", 1, COLUMNS, EFFECT, Dedup(), bisect=True, direct=direct)
        self.way = Way(straight=straight)
        self._url = url

    def read(self, what: str) -> list[Any]:
        return self._group.run(self.queries[what])

    def set(self, what: str) -> None:
        self._group.run(self.queries[what])

    def store(self) -> GroupStore:
        return PostgresGroupStore(self._url, "consumer", "g", "test")


class OnSqlite:
    queries = {what: query.format("") for what, query in QUERIES.items()} | {"ids": "SELECT count(*) FROM processed"}

    def __init__(self, path: str) -> None:
        self._path = path
        self._script(TABLES + "CREATE TABLE numbers (n INT CHECK (n < 100000), place INT, part INT)")
        self._script("INSERT INTO groups VALUES ('g', 1)")
        for part in (0, 1):
            self._script(
                "INSERT INTO offsets (grp, topic, part, topic_id, next_offset, generation) "
                f"VALUES ('g', 't', {part}, '{TOPIC_ID}', 0, 1)"
            )
        self.sink = SqliteSink(path, "g", 1, tuple(COLUMNS), EFFECT)
        self.way = Way()

    def read(self, what: str) -> list[Any]:
        return SqliteStore(self._path, "g").run(self.queries[what])

    def set(self, what: str) -> None:
        self._script(self.queries[what])

    def store(self) -> GroupStore:
        return SqliteStore(self._path, "g")

    def _script(self, statements: str) -> None:
        connection = open_file(self._path)
        connection.executescript(statements)
        connection.close()


@pytest.fixture(params=["postgres through batch", "postgres straight", "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    if request.param == "sqlite":
        return OnSqlite(str(tmp_path / "sink"))
    url = request.getfixturevalue("outbox_postgres").url
    return OnPostgres(url, straight=request.param == "postgres straight")


def apply(
    database: Database, *batches: pa.RecordBatch, start: int = 0, part: int = 0, most: int = 10, **counted: Any
) -> int | None:
    """Apply a range as a task does. Gives the number of new rows; None where it was applied before."""
    read = sum(batch.num_rows for batch in batches)
    span = Range(TOPIC_ID, start, start + read)
    given = in_memory(batches)
    with database.sink.transaction("here", given, most=most) as into:
        if not into.fence(("t", part), span):
            into.rollback()
            return None
        fresh = into.remember(given, database.way)
        into.move(Move(("t", part), span, read=read, fresh=fresh, **counted))
        if fresh:
            into.apply()
    return fresh


def nothing_happened(database: Database) -> bool:
    found = [database.read(what) for what in ("position", "numbers", "ids", "figures", "letters")]
    return found == [[(0,)], [], [(0,)], [(0, 0, 0)], []]


def test_everything_is_committed_together(database):
    span = Range(TOPIC_ID, 0, 3)
    given = in_memory([rows([1, 2, 3])])
    with database.sink.transaction("here", given, most=10) as into:
        assert into.fence(PARTITION, span)
        assert into.remember(given, database.way) == 3
        into.move(Move(PARTITION, span, read=3, fresh=3, dead=[letter(7)], reached=9))
        into.apply()
        assert nothing_happened(database)
    assert database.read("numbers") == [(1,), (2,), (3,)]
    assert database.read("position") == [(9,)]
    assert database.read("ids") == [(3,)]
    assert database.read("figures") == [(3, 0, 1)]
    assert database.read("letters") == [(7, "failed", "why", "dead")]


def letter(offset: int) -> DeadLetter:
    return DeadLetter(RejectedRecord(("t", 0, offset), "failed", "why"), event_id(offset), b"k", b"v", "[]", 0)


@pytest.mark.parametrize("after", ["fence", "remember", "move", "apply"])
def test_an_error_takes_all_of_it_back(database, after):
    span, given = Range(TOPIC_ID, 0, 1), in_memory([rows([1])])
    steps = {
        "fence": lambda into: into.fence(PARTITION, span),
        "remember": lambda into: into.remember(given, database.way),
        "move": lambda into: into.move(Move(PARTITION, span, read=1, fresh=1, dead=[letter(0)])),
        "apply": lambda into: into.apply(),
    }
    made = list(steps)[: list(steps).index(after) + 1]
    with contextlib.suppress(ZeroDivisionError), database.sink.transaction("here", given, most=10) as into:
        for name in made:
            steps[name](into)
        raise ZeroDivisionError
    assert nothing_happened(database)
    assert apply(database, rows([1])) == 1


def test_nothing_is_committed_without_the_proof_of_the_inputs_end(database):
    def cut() -> None:
        raise InputCut("not all of them came")

    def commit(given: TaskInput, *, read: bool) -> None:
        with database.sink.transaction("here", given, most=10) as into:
            into.fence(PARTITION, Range(TOPIC_ID, 0, 1))
            if read:
                into.remember(given, database.way)
                into.apply()

    with pytest.raises(InputCut, match="not all of them"):
        commit(TaskInput([rows([1])], cut), read=True)
    assert nothing_happened(database)
    with pytest.raises(InputCut, match="not read its input"):
        commit(in_memory([rows([1])]), read=False)
    assert nothing_happened(database)


def test_a_range_is_applied_once(database):
    assert apply(database, rows([1, 2])) == 2
    # It rolls back, which needs no proof of the input's end.
    assert apply(database, rows([1, 2])) is None
    # A task that the driver gave up on may have had more to read.
    assert apply(database, rows([1])) is None
    assert database.read("numbers") == [(1,), (2,)]


def test_a_range_that_moved_in_part_is_planned_anew(database):
    apply(database, rows([1]))
    with pytest.raises(OffsetMoved):
        apply(database, rows([1, 2]))
    assert (database.read("numbers"), database.read("position")) == ([(1,)], [(1,)])


@pytest.mark.parametrize("change", ["younger", "anew", "no_row"])
def test_a_superseded_driver_is_fenced(database, change):
    database.set(change)
    with pytest.raises(Fenced):
        apply(database, rows([1]))
    assert database.read("numbers") == []
    assert database.read("ids") == [(0,)]


def test_a_range_that_begins_behind_the_group_is_fenced(database):
    with pytest.raises(Fenced):
        apply(database, rows([1]), start=5)
    assert nothing_happened(database)


def test_two_attempts_at_once_apply_it_once(database):
    """Speculation, or an executor that was lost and is not: the second waits for the first."""
    found: list[int | None] = []
    ready = threading.Barrier(2)

    def attempt() -> None:
        ready.wait()
        found.append(apply(database, rows(list(range(500)))))

    threads = [threading.Thread(target=attempt) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=str) == [500, None]
    assert len(database.read("numbers")) == 500


def repeats(database: Database, *batches: pa.RecordBatch, **where: int) -> int | None:
    """Apply rows with repeats: as the driver would after Roundabout, where that is what the sink says."""
    if isinstance(database, OnPostgres):
        database.way = Way(repeats=True, straight=False)
    return apply(database, *batches, **where)


def test_what_was_applied_before_is_left_out(database):
    apply(database, rows([1, 2]))
    # Again at later offsets, twice in one batch, and in another partition.
    assert repeats(database, rows([2, 3, 3, 1], start=2), start=2) == 1
    assert repeats(database, rows([3, 4], part=1), part=1) == 1
    assert database.read("numbers") == [(1,), (2,), (3,), (4,)]
    assert database.read("figures") == [(3, 3, 0)]


def test_a_range_without_rows_moves(database):
    with database.sink.transaction("here", NO_INPUT, most=10) as into:
        assert into.fence(PARTITION, Range(TOPIC_ID, 0, 5))
        into.move(Move(PARTITION, Range(TOPIC_ID, 0, 5), dead=[letter(4)]))
    assert (database.read("position"), database.read("letters")) == ([(5,)], [(4, "failed", "why", "dead")])


def through_batch(database: Database) -> None:
    """What fails on the straight way takes the long one."""
    if isinstance(database, OnPostgres):
        database.way = Way(straight=False)


def test_what_the_effect_refuses_is_named_in_order_and_all_is_taken_back(database):
    through_batch(database)
    with pytest.raises(RejectedRecords) as caught:
        apply(database, rows([5, 100_001, 6, 100_002]))
    assert [one.place for one in caught.value.found] == [("t", 0, 1), ("t", 0, 3)]
    assert nothing_happened(database)


def test_one_in_the_middle_of_many(database):
    """More rows than one batch of the input has; the bad one is in the middle."""
    through_batch(database)
    numbers = list(range(MORE))
    numbers[15_000] = 200_000
    parts = [rows(numbers[at : at + 10_000], start=at) for at in range(0, MORE, 10_000)]
    with pytest.raises(RejectedRecords) as caught:
        apply(database, *parts)
    assert [one.place for one in caught.value.found] == [("t", 0, 15_000)]
    assert nothing_happened(database)
    numbers[15_000] = 15_000
    parts = [rows(numbers[at : at + 10_000], start=at) for at in range(0, MORE, 10_000)]
    assert apply(database, *parts) == MORE
    assert database.read("numbers") == [(n,) for n in range(MORE)]


def test_no_more_are_named_than_anybody_needs(database):
    through_batch(database)
    with pytest.raises(Exception, match=r"messages|fail") as caught:
        apply(database, rows([100_000 + n for n in range(20)]), most=3)
    if isinstance(caught.value, RejectedRecords):
        assert len(caught.value.found) == 4
    assert nothing_happened(database)


def test_what_the_rows_raise_passes_through(database):
    def failing() -> Iterator[pa.RecordBatch]:
        yield rows([1])
        raise RejectedRecords([RejectedRecord(("t", 0, 1), "undecodable", "no JSON")])

    given = TaskInput(failing(), NO_INPUT.require_whole)

    def remember() -> None:
        with database.sink.transaction("here", given, most=10) as into:
            into.fence(PARTITION, Range(TOPIC_ID, 0, 2))
            into.remember(given, database.way)

    with pytest.raises(RejectedRecords, match="no JSON"):
        remember()
    assert nothing_happened(database)


def letters(database: Database, *offsets: int) -> Mapping[Any, Any]:
    """Put messages aside, and ask for another try of them. Gives the requests."""
    with database.sink.transaction("here", NO_INPUT, most=10) as into:
        into.fence(PARTITION, Range(TOPIC_ID, 0, 10))
        dead = [letter(one) for one in offsets]
        into.move(Move(PARTITION, Range(TOPIC_ID, 0, 10), dead=dead))
    database.set("retry")
    ids = [number for (number,) in database.read("letter_ids")]
    return {("t", 0, offset): (number, "failed") for offset, number in zip(offsets, ids, strict=True)}


def retried(database: Database, requests: Mapping[Any, Any], *batches: pa.RecordBatch) -> int | None:
    given = in_memory(batches)
    with database.sink.transaction("dead letters", given, most=10) as into:
        if not into.hold(requests):
            into.rollback()
            return None
        fresh = into.remember(given, Way(repeats=True))
        into.resolve()
        if fresh:
            into.apply()
    return fresh


def test_a_dead_letter_goes_with_its_effect(database):
    requests = letters(database, 3, 4)
    assert [one.place[2] for one in database.store().retried(["t"], 10, keep_order=False)] == [3, 4]
    assert database.store().dead_keys(["t"]) == {("t", b"k"): None}
    assert retried(database, requests, rows([3, 4], start=3)) == 2
    assert (database.read("numbers"), database.read("letters")) == ([(3,), (4,)], [])
    # A retry of the task after its COMMIT.
    assert retried(database, requests, rows([3, 4], start=3)) is None
    assert database.store().retried(["t"], 10, keep_order=False) == []


def test_the_driver_reads_how_far_the_group_is(database):
    with database.sink.transaction("here", NO_INPUT, most=10) as into:
        assert into.fence(PARTITION, Range(TOPIC_ID, 0, 5))
        into.move(Move(PARTITION, Range(TOPIC_ID, 0, 5)))
    here = database.store().stored(["t"])[PARTITION]
    assert (here.topic_id, here.next_offset) == (TOPIC_ID, 5)
    assert database.store().stored(["another"]) == {}


def test_a_dead_letter_that_fails_again_stays(database):
    requests = letters(database, 3)
    with pytest.raises(RejectedRecords):
        retried(database, requests, rows([100_000], start=3))
    assert database.read("letters") == [(3, "failed", "why", "retry")]
    ((number, _),) = requests.values()
    database.store().failed_again([(number, RejectedRecord(("t", 0, 3), "failed", "once more"))], 1)
    assert database.read("letters") == [(3, "failed", "once more", "dead")]


def test_who_is_superseded_tries_no_dead_letter_again(database):
    requests = letters(database, 3)
    database.set("younger")
    with pytest.raises(Fenced):
        retried(database, requests, rows([3], start=3))
    ((number, _),) = requests.values()
    with pytest.raises(Fenced):
        database.store().failed_again([(number, RejectedRecord(("t", 0, 3), "failed", "once more"))], 1)
    assert (database.read("numbers"), database.read("letters")) == ([], [(3, "failed", "why", "retry")])


def test_those_of_one_partition_are_tried_together(database):
    for part, offset in ((1, 5), (0, 7), (1, 4)):
        where = (("t", part), Range(TOPIC_ID, 0, 0))
        dead = replace(letter(offset), record=RejectedRecord(("t", part, offset), "failed", "why"))
        with database.sink.transaction("here", NO_INPUT, most=10) as into:
            into.fence(*where)
            into.move(Move(*where, dead=[dead]))
    database.set("retry")
    found = database.store().retried(["another", "t"], 10, keep_order=False)
    assert [one.place for one in found] in ([("t", 0, 7)], [("t", 1, 4), ("t", 1, 5)])
    assert {one.time.year for one in found} == {1970}


def test_a_sink_travels_to_the_executors(database):
    database.sink = cloudpickle.loads(cloudpickle.dumps(database.sink))
    assert apply(database, rows([1])) == 1


def test_a_task_needs_nothing_else(database):
    """The task itself, with its report: applied, again, fenced."""
    plan = TaskPlan(database.sink, {PARTITION: Range(TOPIC_ID, 0, 2)}, {}, ("message_id",), 10)

    def report(made: TaskPlan, *batches: pa.RecordBatch) -> tuple[str, int]:
        ((found,),) = (one.to_pylist() for one in task.apply_rows(made, in_memory(batches)))
        return found["outcome"], found["fresh"]

    assert report(plan, rows([1, 2])) == ("applied", 2)
    assert report(plan, rows([1, 2])) == ("already", 0)
    refused = replace(plan, ranges={PARTITION: Range(TOPIC_ID, 2, 3)}, slow=frozenset({PARTITION}))
    assert report(refused, rows([100_000], start=2)) == ("rejected", 0)
    task.step_over(replace(plan, ranges={PARTITION: Range(TOPIC_ID, 2, 9)}), [PARTITION])
    assert database.read("position") == [(9,)]
    database.set("younger")
    assert report(replace(plan, ranges={PARTITION: Range(TOPIC_ID, 9, 10)}), rows([9], start=9)) == ("fenced", 0)


def test_rows_without_ids_and_rows_of_one_message_are_no_repetitions_in_sqlite(tmp_path):
    database = OnSqlite(str(tmp_path / "sink"))
    # The fourth message has become two rows.
    batches = rows([1, 2, 3], [None, None, event_id(3)]), rows([4], start=3), rows([5], [event_id(4)], start=3)
    assert apply(database, *batches) == 5
    assert database.read("numbers") == [(1,), (2,), (3,), (4,), (5,)]
    assert database.read("ids") == [(2,)]
    assert apply(database, rows([6, 7], [None, event_id(4)], start=5), start=5) == 1
