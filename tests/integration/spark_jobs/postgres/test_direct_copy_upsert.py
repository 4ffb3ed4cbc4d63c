"""An upsert straight into the sink's table leaves what the messages leave one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from direct_sink import COLUMNS, PAYLOAD, sink
from psycopg import sql

from outbox.consumer.errors import JobError
from spark_jobs.dedup.strategies import Dedup, DedupStore, Natural, Version, column_types
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.job import META, ConsumerJob
from spark_jobs.postgres.batch_table import BatchTable
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.sink import PostgresSinks

__all__ = ["sink"]

UPSERT = Upsert("s", ["i"], ["i", "l", "t"], version="l", deletes=True)
# The same in SQL of one's own, as one writes it who is promised one row of a key: a second one is refused.
BY_HAND = """
DELETE FROM s USING batch WHERE message_tombstone AND s.i = message_key::int;
INSERT INTO s SELECT i, l, t FROM batch WHERE NOT message_tombstone
    ON CONFLICT (i) DO UPDATE SET l = excluded.l, t = excluded.t"""
# What is stored of a key, and versions that come; None is a tombstone.
STORED = ((), (9,), (None,))
COMING = [
    (5, 3),
    (1,),
    (5, None),
    (5, None, 1),
    (None, 1, None),
    (None, 7, None, 2, 3),
    (None,),
    (None, 4),
    (2, 8, None, 6),
]


def test_a_batch_leaves_what_its_messages_leave_one_by_one(sink):
    """A tombstone ends what stands before it and nothing after it; a stored row may have no version."""
    keys = dict(enumerate((stored, coming) for stored in STORED for coming in COMING))
    messages = [(key, number) for number in range(5) for key, (_, coming) in keys.items() if number < len(coming)]
    versions = [keys[key][1][number] for key, number in messages]
    rows = {
        "i": [None if version is None else key for (key, _), version in zip(messages, versions, strict=True)],
        "l": versions,
        "t": [None if version is None else f"v{version}" for version in versions],
        "message_tombstone": [version is None for version in versions],
        "message_key": [str(key) for key, _ in messages],
    }
    left: dict[int, tuple[int | None, str]] = {}
    for key, (stored, coming) in keys.items():
        if stored:
            left[key] = (stored[0], "stored")
        for version in coming:
            if version is None:
                left.pop(key, None)
            elif version > (left.get(key, (None, ""))[0] or 0):
                left[key] = (version, f"v{version}")
    version = Version("s", {"i": "i"}, "l")
    for strategy, effect in ((Dedup(), UPSERT), (version, UPSERT), (version, BY_HAND)):
        sink.run("DROP TABLE IF EXISTS s; CREATE TABLE s (i int PRIMARY KEY, l bigint, t text)")
        with psycopg.connect(sink.url) as connection:
            for key, (stored, _) in keys.items():
                for version in stored:
                    connection.execute("INSERT INTO s VALUES (%s, %s, 'stored')", (key, version))
        assert sink.apply(effect, rows, None, strategy=strategy)[0] == "applied"
        assert {i: (version, text) for i, version, text in sink.run("SELECT * FROM s")} == left, (strategy, effect)
    sink.run("TRUNCATE s")
    assert sink.apply(Upsert("s", ["i"], ["i", "l"], deletes=True), rows, None, strategy=Natural(["i"]))[0] == "applied"
    last = {key: coming[-1] for key, (_, coming) in keys.items() if coming[-1] is not None}
    assert dict(sink.run("SELECT i, l FROM s")) == last


def test_where_tombstones_are_passed_over_they_end_nothing(sink):
    sink.run("CREATE TABLE s (i int PRIMARY KEY, l bigint); INSERT INTO s VALUES (2, 5)")
    version = Version("s", {"i": "i"}, "l")
    job = ConsumerJob("g", ["t"], Upsert("s", ["i"], ["i", "l"]), strategy=version)
    rows = {
        "i": [1, None, 1, None, 2],
        "l": [5, None, 1, None, 1],
        "message_tombstone": [False, True, False, True, False],
        "message_key": ["1", "1", "1", "2", "2"],
    }
    assert sink.apply(job.effect, rows, None, strategy=job.reducing) == ("applied", [3])
    assert sink.run("SELECT * FROM s ORDER BY i") == [(1, 5), (2, 5)]
    assert replace(job, effect=UPSERT).reducing == replace(job, effect="SELECT 1").reducing == version


def test_what_an_upsert_can_not_tell_the_newest_of_is_refused(sink):
    """A message without a version; and one with two rows of one key."""
    sink.run("CREATE TABLE s (i int PRIMARY KEY, l bigint, t text)")
    none = {"i": [1, 2], "l": [1, None], "t": ["a", "b"]}
    assert sink.apply(UPSERT, none, None) == ("rejected", [1])
    two = {"i": [1, 2, 2, 2], "l": [1, 1, 2, 2], "t": ["a", "b", "c", "d"], "message_offset": [0, 1, 2, 2]}
    for effect in (UPSERT, Upsert("s", ["i"], ["i", "t"])):
        for strategy in (Dedup(), Natural(["i"]), Version("s", {"i": "i"}, "l")):
            assert sink.apply(effect, two, None, strategy=strategy) == ("rejected", [2])
    assert sink.run("SELECT * FROM s") == []
    with psycopg.connect(sink.url) as connection:
        types = column_types(connection.cursor(), "s")
    with pytest.raises(JobError, match=r"deletes needs.*message_tombstone"):
        UPSERT.statements(["i", "l", "t"], types, placed=False)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "column", "greatest", "older", "newer"),
    [
        ("numeric", "t", ["NaN", "Infinity"], "9", "10"),
        ("numbered", "t", ["nan"], "9", "10"),
        ("double precision", "f", [NAN, INFINITE], 9.0, 10.0),
        ("real", "f", [NAN, INFINITE], -INFINITE, 10.0),
        ("timestamptz(3)", "t", ["infinity"], "-infinity", "2026-02-01T00:00Z"),
        ("date", "t", ["infinity"], "2026-01-31", "2026-02-01"),
    ],
)
def test_a_version_that_nothing_is_newer_than_costs_its_message(sink, kind, column, greatest, older, newer):
    """Otherwise its key would keep it for good, and drop what comes later."""
    sink.run(f"CREATE DOMAIN numbered AS numeric; CREATE TABLE s (i int PRIMARY KEY, v {kind})")
    upsert = Upsert("s", ["i"], {"i": "i", "v": column}, version="v")
    by_hand = f"INSERT INTO s SELECT i, {column}::{kind} FROM batch ON CONFLICT (i) DO UPDATE SET v = excluded.v"
    version = Version("s", ["i"], column, "v")
    keys, rows = [n % 100 for n in range(200)], 200
    for effect, strategy in ((upsert, Dedup()), (upsert, version), (by_hand, version)):
        sink.run("TRUNCATE s")
        bad = {"i": [*keys, *(7 for _ in greatest), *keys], column: [older] * rows + greatest + [older] * rows}
        found = [sink.next + rows + n for n in range(len(greatest))]
        assert sink.apply(effect, bad, None, strategy=strategy) == ("rejected", found)
        assert sink.apply(effect, {"i": keys, column: [older] * rows}, None, strategy=strategy)[0] == "applied"
        assert sink.apply(effect, {"i": [7], column: [newer]}, None, strategy=strategy) == ("applied", [1])
        stored = f"SELECT v = '{newer}', v > '{older}' FROM s WHERE i = 7"
        assert (sink.run(stored), sink.run("SELECT count(*) FROM s")) == ([(True, True)], [(100,)])


class Explaining(psycopg.Cursor[Any]):
    """Counts the rows that steps of DELETE and INSERT give or throw away."""

    seen: list[int]

    def execute(self, query: Any, params: Any = None, **options: Any) -> Explaining:
        query = query if isinstance(query, sql.Composable) else sql.SQL(query)
        if not query.as_string(self).lstrip().startswith(("DELETE", "INSERT")):
            return super().execute(query, params, **options)
        super().execute(sql.SQL("EXPLAIN (ANALYZE, FORMAT JSON) ") + query, params, **options)
        ((plan,),) = self.fetchall()
        self.seen.append(_rows(plan[0]["Plan"]))
        return self


def _rows(plan: dict[str, Any]) -> int:
    lost = sum(number for name, number in plan.items() if name.startswith("Rows Removed by"))
    return int((plan["Actual Rows"] + lost) * plan["Actual Loops"]) + sum(map(_rows, plan.get("Plans", [])))


def test_messages_of_a_hot_key_are_not_compared_each_with_each(sink):
    """2000 of a key, half of them tombstones, take rows by the thousand and not by the million."""
    sink.run("CREATE TABLE s (i int PRIMARY KEY, l bigint); INSERT INTO s SELECT generate_series(0, 99), 1")
    dedup, version = DedupStore("consumer", "g"), Version("s", {"i": "i"}, "l")
    upsert = sink.statements(Upsert("s", ["i"], ["i", "l"], deletes=True), list(PAYLOAD)).split(";")
    for keys, tombstone in itertools.product((1, 40), ("n % 2 = 0", "n % 2 = 1", "n <= 1000", "n > 1000")):
        with psycopg.connect(sink.url, cursor_factory=Explaining) as connection:
            cursor = connection.cursor()
            cursor.seen = []
            BatchTable(cursor, dedup, COLUMNS, version, "SELECT 1", bisect=True, max_dead=1)
            fill = sql.SQL(
                "WITH made AS (SELECT n, {} AS gone FROM generate_series(1, 2000) AS n) "
                "INSERT INTO batch (i, l, message_topic, message_part, message_offset, message_key, message_tombstone) "
                "SELECT CASE WHEN NOT gone THEN n % {} END, n, 't', 0, n, (n % {})::text, gone FROM made"
            ).format(sql.SQL(tombstone), keys, keys)
            cursor.execute(fill)
            for statement in upsert:
                cursor.execute(statement)
            version.reduce(cursor, dedup, None, suspect=False)
            assert len(cursor.seen) == 6
            assert max(cursor.seen) < 40_000, (keys, tombstone, cursor.seen)
            connection.rollback()


def test_what_a_shuffle_keeps_of_the_messages_is_written_and_needed(sink):
    sink.run("CREATE TABLE s (i int PRIMARY KEY, message_key text, message_id uuid)")
    store = PostgresGroupStore(sink.url, "consumer", "g", "test")
    kept = {"i": "integer", **META}

    def effect(made: Insert | Upsert, *without: str) -> str:
        job = ConsumerJob("g", ["t"], made, atomic="batch")
        sinks = PostgresSinks(job, store)
        return sinks.effect({name: kind for name, kind in kept.items() if name not in without}, "shuffled")

    for made in (Insert("s"), Upsert("s", ["i"], deletes=True)):
        assert '("i", "message_id", "message_key")' in effect(made)
    with pytest.raises(JobError, match="no column message_topic"):
        effect(Insert("s"), "message_part")
    with pytest.raises(JobError, match=r"deletes needs.*message_key"):
        effect(Upsert("s", ["i"], ["i"], deletes=True), "message_key")
    assert "WHERE NOT message_tombstone" in effect(Upsert("s", ["i"], ["i"]), "message_key")
