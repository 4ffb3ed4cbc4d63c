"""Straight into the sink's table, or through ``batch``: the same stands there afterwards, and the same is refused."""

from __future__ import annotations

import datetime as dt
import itertools
import random
import threading
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest
from consumer_group import ConsumerGroup
from psycopg import sql
from support import wait_until
from uuid_utils import uuid7

from spark_jobs.dedup.strategies import Book, Dedup, Fingerprint, Natural, OffsetsOnly, Strategy, Version, column_types
from spark_jobs.driver.batch_rounds import BatchRounds
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.errors import JobError
from spark_jobs.job import META, ConsumerJob
from spark_jobs.postgres.batch_table import Applying
from spark_jobs.postgres.direct_copy import Direct, direct_for
from spark_jobs.postgres.group_store import Store
from spark_jobs.postgres.sink import PostgresSinks
from spark_jobs.task import partition as task
from spark_jobs.task.input import in_memory

NOON = dt.datetime(2026, 3, 4, 12, tzinfo=dt.UTC)
PAYLOAD: dict[str, tuple[str, pa.DataType]] = {
    "t": ("text", pa.string()),
    "i": ("integer", pa.int32()),
    "l": ("bigint", pa.int64()),
    "f": ("double precision", pa.float64()),
    "n": ("numeric(20,4)", pa.decimal128(20, 4)),
    "b": ("boolean", pa.bool_()),
    "at": ("timestamptz", pa.timestamp("us", "UTC")),
    "raw": ("bytea", pa.binary()),
    "d": ("date", pa.date32()),
}
COLUMNS = {name: kind for name, (kind, _) in PAYLOAD.items()} | META
# The sink's column, where it comes from, and values; those in the last list have to be refused.
KINDS: dict[str, tuple[str, str, list[Any], list[Any]]] = {
    "text": ("text", "t", ["", "a", None, "q\"uo'te\\\n\t,", "\\N", "\\.", "ü😀", " x "], []),
    "varchar": ("varchar(5)", "t", ["abcde", "abc  ", "abcde   ", "", None], ["abcdef"]),
    "char": ("char(3)", "t", ["a", "abc", "abc   "], ["abcd"]),
    "domain": ("short", "t", ["abc", None], ["abcd", "no"]),
    "domain of a domain": ("shorter", "t", ["abc"], ["abcd"]),
    "texts": ("varchar(3)[]", "t", ["{abc,d}", "{}"], ["{abcd}", "x"]),
    "bits": ("bit varying(3)", "t", ["101"], ["1011"]),
    "uuid": ("uuid", "t", ["0195d9c2-5c00-7abc-8def-0123456789ab", "0195D9C2-5C00-7ABC-8DEF-0123456789AB"], ["x"]),
    "jsonb": ("jsonb", "t", ['{"a": [1, null]}', "null"], ["{", ""]),
    "numeric from text": ("numeric(6,2)", "t", ["1.005", " 7 ", "1e2"], ["12345.6", "x"]),
    "integer from text": ("integer", "t", ["5", " -7"], ["1.5", "99999999999", ""]),
    "day": ("date", "t", ["2026-01-31", "infinity"], ["2026-02-31"]),
    "time": ("timestamptz", "t", ["2026-01-31T12:00:00+02:00"], ["noon"]),
    "mood": ("mood", "t", ["good"], ["so so"]),
    "smallint": ("smallint", "i", [5, None, -32768], [32768]),
    "numeric": ("numeric(5,1)", "l", [5, -9999], [10**4, 2**62]),
    "text from integer": ("text", "l", [2**62, None], []),
    "double": ("double precision", "f", [0.1, -0.0, 1e308, float("inf"), 5e-324, None], []),
    "numeric from double": ("numeric", "f", [0.1, 1 / 3], []),
    "real": ("real", "f", [0.1], [1e300]),
    "decimal": ("numeric(20,2)", "n", [Decimal("1.0050"), Decimal("-3.1400"), None], []),
    "truth": ("boolean", "b", [True, False, None], []),
    "moment": ("timestamptz", "at", [NOON, NOON.replace(year=1, microsecond=5), NOON.replace(year=9999), None], []),
    "seconds": ("timestamptz(0)", "at", [NOON.replace(microsecond=500_000)], []),
    "date": ("date", "d", [dt.date(1, 1, 1), dt.date(9999, 12, 31), None], []),
    "bytes": ("bytea", "raw", [b"\x00\xff", b"", None], []),
    "checked": ("integer CHECK (v < 100)", "i", [5], [100]),
    "generated": ("integer, w integer GENERATED ALWAYS AS (v * 2) STORED", "i", [5], []),
    "not null": ("integer NOT NULL", "i", [5], [None]),
    "numbered": ("text, w bigint GENERATED ALWAYS AS IDENTITY", "t", ["a", "b"], []),
}
NOT_DIRECT = {"texts", "bits", "mood", "numeric from double", "real", "seconds"}


@dataclass
class Sink(ConsumerGroup):
    """A group, and a table ``s`` for each test."""

    next: int = 0

    def direct(self, effect: object, strategy: Strategy | None = None) -> Direct | None:
        with psycopg.connect(self.url) as connection:
            return direct_for(connection.cursor(), effect, strategy or Dedup(), COLUMNS, list(PAYLOAD))

    def statements(self, effect: Insert | Upsert, payload: list[str]) -> str:
        with psycopg.connect(self.url) as connection:
            types = column_types(connection.cursor(), effect.table)
            return ";".join(one.as_string(connection) for one in effect.statements(payload, types))

    def apply(
        self, effect: Insert | Upsert | str, rows: dict[str, list[Any]], direct: Direct | None, **plan: Any
    ) -> tuple[str, list[int]]:
        """Apply rows at the next offsets. Gives the outcome, and culprits' offsets or the number of fresh rows."""
        size = len(next(iter(rows.values())))
        places = rows.get("message_offset") or range(self.next, self.next + size)
        columns = plan.get("columns", COLUMNS)
        payload = [name for name in columns if name not in META]
        statements = effect if isinstance(effect, str) else self.statements(effect, payload)
        given = {"columns": COLUMNS, "effect": statements, "direct": direct, **plan}
        made = self.plan(0, self.next, size, **given)
        batch = pa.RecordBatch.from_pydict(
            {
                **{
                    name: pa.array(rows.get(name, [None] * size), PAYLOAD.get(name, ("", pa.string()))[1])
                    for name in payload
                },
                "message_id": rows.get("message_id") or [str(uuid7()) for _ in range(size)],
                "message_topic": ["t"] * size,
                "message_part": pa.array([0] * size, pa.int32()),
                "message_offset": pa.array(places, pa.int64()),
                "message_key": rows.get("message_key") or ["k"] * size,
                "message_type": ["x"] * size,
                "message_time": pa.array([NOON] * size, pa.timestamp("us", "UTC")),
                "message_tombstone": rows.get("message_tombstone") or [False] * size,
            }
        )
        (report,) = task.run(made, in_memory([batch]))
        ((outcome, fresh, detail),) = ((one["outcome"], one["fresh"], one["detail"]) for one in report.to_pylist())
        if outcome == "applied":
            self.next += size
            return outcome, [fresh]
        return outcome, [culprit.place[2] for culprit in task.culprits_from(detail)] if outcome == "culprits" else []


@pytest.fixture
def sink(outbox_postgres) -> Sink:
    made = Sink(outbox_postgres.url)
    made.begin([0])
    made.run("CREATE DOMAIN short AS varchar(3) CHECK (VALUE <> 'no'); CREATE DOMAIN shorter AS short")
    made.run("CREATE TYPE mood AS ENUM ('good', 'bad')")
    return made


def test_both_ways_give_the_same(sink):
    """Each value alone and all together; and what the table can't hold is refused, never cut to fit."""
    for kind in KINDS:
        both_ways_give_the_same(sink, kind)


def both_ways_give_the_same(sink, kind):
    declared, name, good, bad = KINDS[kind]
    sink.run(f"DROP TABLE IF EXISTS s, other; CREATE TABLE s (v {declared}); CREATE TABLE other (v {declared})")
    effect, through = Insert("s", {"v": name}), Insert("other", {"v": name})
    direct = sink.direct(effect)
    assert (direct is None) == (kind in NOT_DIRECT), kind
    assert sink.apply(effect, {name: good}, direct) == ("applied", [len(good)]), kind
    assert sink.apply(through, {name: good}, None) == ("applied", [len(good)]), kind
    assert sink.run("SELECT v::text FROM s") == sink.run("SELECT v::text FROM other"), kind
    for value in bad:
        rows = {name: [good[0], value]}
        if direct is not None:
            assert sink.apply(effect, rows, direct) == ("roundabout", []), kind
        outcome, at = sink.apply(through, rows, None)
        if outcome == "uncopyable":
            outcome, at = sink.apply(through, rows, None, lenient=frozenset({("t", 0)}))
        assert (outcome, at) == ("culprits", [sink.next + 1]), (kind, value)
    assert sink.run("SELECT count(*) FROM s") == sink.run("SELECT count(*) FROM other") == [(len(good),)], kind


ALTERED = {
    "numeric": ("l", "bigint", "ALTER v TYPE numeric", [5], [("5",)]),
    "double": ("l", "bigint", "ALTER v TYPE double precision", [2**40], [("1099511627776",)]),
    "wider": ("i", "integer", "ALTER v TYPE bigint", [5], [("5",)]),
    "real": ("i", "integer", "ALTER v TYPE real", [70000], [("70000",)]),
    "whole": ("f", "double precision", "ALTER v TYPE bigint", [5.0], [("5",)]),
    "digits": ("n", "numeric(20,4)", "ALTER v TYPE numeric(20,1)", [Decimal("1.2500")], [("1.3",)]),
    "text": ("t", "text", "ALTER v TYPE varchar(3)", ["abc"], [("abc",)]),
    "another": ("t", "text", "ADD w int DEFAULT 7", ["a"], [("a",)]),
}


def test_a_table_that_was_altered_meanwhile_is_not_taken_for_what_it_was(sink):
    """Values in the binary format are told by their place alone: 5 as bigint would be 0.00000 as numeric."""
    for change, (name, declared, alter, values, stored) in ALTERED.items():
        sink.run(f"DROP TABLE IF EXISTS s; CREATE TABLE s (v {declared})")
        effect = Insert("s", {"v": name})
        direct = sink.direct(effect)
        assert direct is not None
        sink.run(f"ALTER TABLE s {alter}")
        assert sink.apply(effect, {name: values}, direct) == ("roundabout", []), change
        assert sink.apply(effect, {name: values}, None) == ("applied", [1])
        assert sink.run("SELECT v::text FROM s") == stored, change


def test_a_table_that_is_altered_while_it_is_looked_at(sink, monkeypatch):
    sink.run("CREATE TABLE s (v bigint)")

    def altered(cursor, table):
        found = column_types(cursor, table)
        cursor.execute("ALTER TABLE s ALTER v TYPE numeric")
        return found

    monkeypatch.setattr("spark_jobs.postgres.direct_copy.column_types", altered)
    effect = Insert("s", {"v": "l"})
    assert sink.apply(effect, {"l": [5]}, sink.direct(effect)) == ("roundabout", [])


@pytest.mark.parametrize(
    "change",
    [
        "CREATE RULE r AS ON INSERT TO s DO ALSO SELECT 1",
        "ALTER TABLE s ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE s RENAME TO old; CREATE TABLE s (LIKE old)",
    ],
    ids=["rule", "row security", "another table"],
)
def test_a_table_that_is_another_thing_now(sink, change):
    sink.run("CREATE TABLE s (t text)")
    effect = Insert("s", ["t"])
    direct = sink.direct(effect)
    sink.run(change)
    assert sink.apply(effect, {"t": ["a"]}, direct) == ("roundabout", [])


def test_ids_that_are_spelt_unusually_are_for_the_database(sink):
    sink.run("CREATE TABLE s (t text)")
    effect = Insert("s", ["t"])
    direct = sink.direct(effect)
    bare = {"t": ["a"], "message_id": ["0195D9C25C007ABC8DEF0123456789AB"]}
    assert sink.apply(effect, bare, direct) == ("roundabout", [])
    lenient = {"lenient": frozenset({("t", 0)})}
    in_binary = {"columns": {"t": "text"} | META}
    assert sink.apply(effect, bare, None, **in_binary) == ("uncopyable", [])
    assert sink.apply(effect, bare, None, **in_binary, **lenient) == ("applied", [1])
    assert sink.apply(effect, bare, None) == ("applied", [0])
    none = {"t": ["b", "c"], "message_id": [str(uuid7()), "order-1"]}
    assert sink.apply(effect, none, direct) == ("roundabout", [])
    assert sink.apply(effect, none, None, **lenient) == ("culprits", [sink.next + 1])
    assert sink.apply(effect, bare, None, **lenient) == ("applied", [0])


def test_rows_that_can_not_be_taken_are_named_on_the_straight_way_too(sink):
    """They are not among the rows that are copied: forgotten, they would be gone without a word."""
    sink.run("CREATE TABLE s (t text)")
    effect = Insert("s", ["t"])
    rows = {"t": ["a", "b"], "message_id": [str(uuid7()), None]}
    assert sink.apply(effect, rows, sink.direct(effect)) == ("culprits", [1])
    assert sink.run("SELECT count(*) FROM s") == [(0,)]


def test_ids_without_a_time_are_of_no_day_that_is_forgotten(sink):
    sink.run("CREATE TABLE s (t text); UPDATE consumer.groups SET forgotten_before = '2020-01-01'")
    effect = Insert("s", ["t"])
    rows = {"t": ["a", "b"], "message_id": [str(uuid7()), str(uuid4())]}
    assert sink.apply(effect, rows, sink.direct(effect)) == ("applied", [2])


def test_ids_go_in_by_day_and_in_order(sink):
    """So that two transactions with the same ids never wait for each other in a circle."""
    sink.run("CREATE TABLE s (t text)")
    effect = Insert("s", ["t"])
    names = [str(uuid4() if number % 3 else uuid7()) for number in range(300)]
    random.Random(5).shuffle(names)
    assert sink.apply(effect, {"t": ["a"] * 300, "message_id": names}, sink.direct(effect)) == ("applied", [300])
    found = sink.run("SELECT day, message_id FROM consumer.processed_messages ORDER BY tableoid, ctid")
    assert found == sorted(found)


def test_a_server_that_is_away_is_no_reason_for_the_other_way(sink):
    sink.run("CREATE TABLE s (t text)")
    sink.run(
        "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60); RETURN NEW; END $$"
    )
    sink.run("CREATE TRIGGER die BEFORE INSERT ON s FOR EACH ROW EXECUTE FUNCTION die()")
    effect = Insert("s", ["t"])
    assert sink.apply(effect, {"t": ["a"]}, sink.direct(effect))[0] == "unavailable"


def test_a_deadlock_is_a_reason_for_the_other_way(sink):
    """There the ids are first, in order, and two partitions with the same rows do not meet in the sink's table."""
    sink.run("CREATE TABLE s (t text PRIMARY KEY)")
    sink.run("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = 2000', current_database()); END $$")
    effect = Insert("s", ["t"])
    direct, told = sink.direct(effect), []
    with psycopg.connect(sink.url) as other:
        other.execute("SET deadlock_timeout = '600s'")
        other.execute("INSERT INTO s VALUES ('b')")
        thread = threading.Thread(target=lambda: told.append(sink.apply(effect, {"t": ["a", "b"]}, direct)))
        thread.start()
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        wait_until(lambda: sink.run(waiting) == [(1,)], what="the wait for the other's row")
        other.execute("INSERT INTO s VALUES ('a')")
        thread.join(60)
        other.rollback()
    assert told == [("roundabout", [])]


def test_batches_are_let_go_as_they_go_by(sink):
    """Of a batch from a stream every column holds the whole: the ids that are kept must not be parts of it."""
    sink.run("CREATE TABLE s (i integer)")
    effect = Insert("s", ["i"])
    sizes: list[int] = []

    def streamed():
        for number in range(12):
            made = pa.RecordBatch.from_pydict(
                {
                    "i": pa.array([number], pa.int32()),
                    "t": ["x" * 4_000_000],
                    "message_id": [str(uuid7())],
                    "message_tombstone": [False],
                }
            )
            out = pa.BufferOutputStream()
            with pa.ipc.new_stream(out, made.schema) as stream:
                stream.write_batch(made)
            body = out.getvalue()
            del made, out
            yield from pa.ipc.open_stream(body)
            del body
            sizes.append(pa.total_allocated_bytes())

    before = pa.total_allocated_bytes()
    with psycopg.connect(sink.url) as connection:
        direct = sink.direct(effect)
        assert direct.apply(connection.cursor(), Book("consumer", "g"), Dedup(), streamed()) == 12
        batch = {"i": "integer", "t": "text", "message_id": "uuid"}
        applying = Applying(
            connection.cursor(), Book("consumer", "g"), batch, Dedup(), "SELECT 1", bisect=True, max_dead=1
        )
        applying.copy(streamed())
    assert len(sizes) == 24
    assert max(sizes) - before < 20_000_000


def test_a_percent_sign_in_a_name(sink):
    """Where a query has parameters it stands for one."""
    sink.run('CREATE TABLE s ("rate_%" text CHECK ("rate_%" <> \'bad\'))')
    effect = Insert("s", {"rate_%": "rate_%"})
    columns = {"rate_%": "text", **META}
    plan = {"columns": columns, "bisect": True}
    good = {"rate_%": ["a", "b"]}
    assert sink.apply(effect, good, None, **plan) == ("applied", [2])
    assert sink.apply(effect, good, None, lenient=frozenset({("t", 0)}), **plan) == ("applied", [2])
    bad = {"rate_%": ["a", "bad"]}
    assert sink.apply(effect, bad, None, **plan) == ("culprits", [sink.next + 1])


def test_times_that_no_calendar_has_are_refused(sink):
    sink.run("CREATE TABLE s (v timestamptz)")
    effect = Insert("s", {"v": "at"})
    for value in (-(2**63), -(2**63) + 946_684_800_000_000, 2**63 - 1):
        refused(sink, effect, {"at": pa.array([0, value], pa.int64()).cast(pa.timestamp("us", "UTC"))})
    sink.run("DROP TABLE s; CREATE TABLE s (v date)")
    for value in (-(2**31), -719_163, 2_932_897, 2**31 - 1):
        refused(sink, Insert("s", {"v": "d"}), {"d": pa.array([0, value], pa.int32()).cast(pa.date32())})


def refused(sink, effect, rows):
    assert sink.apply(effect, rows, sink.direct(effect)) == ("roundabout", [])
    assert sink.apply(effect, rows, None) == ("uncopyable", [])
    assert sink.apply(effect, rows, None, lenient=frozenset({("t", 0)})) == ("culprits", [sink.next + 1])


@pytest.mark.parametrize("kind", ["name", '"char"'])
def test_a_type_that_cuts_texts_off_is_refused(sink, kind):
    sink.run(f"CREATE TABLE s (v {kind})")
    with pytest.raises(JobError, match="cuts off"):
        sink.direct(Insert("s", {"v": "t"}))
    with psycopg.connect(sink.url) as connection, pytest.raises(JobError, match="cuts off"):
        Version("s", {"t": "v"}, "l", "v").check(connection.cursor())


def test_a_sink_that_has_not_all_characters_is_refused(sink):
    with psycopg.connect(sink.url, autocommit=True) as connection:
        name = f"{connection.info.dbname}_latin"
        connection.execute(
            sql.SQL("CREATE DATABASE {} ENCODING 'LATIN1' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0").format(
                sql.Identifier(name)
            )
        )
        url = psycopg.conninfo.make_conninfo(sink.url, dbname=name)
        try:
            with pytest.raises(JobError, match="LATIN1"):
                Store(url, "consumer", "g", "test").require_utf8()
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def test_an_upsert_never_cuts_a_text_to_fit(sink):
    sink.run("CREATE TABLE s (k varchar(3) PRIMARY KEY, v varchar(3))")
    effect = Upsert("s", ["k"], {"k": "t", "v": "t"})
    assert sink.apply(effect, {"t": ["abc", "abcd"]}, None) == ("culprits", [1])
    assert sink.apply(effect, {"t": ["abc", "abc"]}, None) == ("applied", [2])
    assert sink.run("SELECT * FROM s") == [("abc", "abc")]


def test_repeats_and_tombstones(sink):
    sink.run("CREATE TABLE s (t text)")
    effect = Insert("s", ["t"])
    direct = sink.direct(effect)
    names = [str(uuid7()) for _ in range(3)]
    first = {"t": ["a", None, "b"], "message_id": names, "message_tombstone": [False, True, False]}
    assert sink.apply(effect, first, direct) == ("applied", [3])
    assert sink.apply(effect, first, direct) == ("roundabout", [])
    assert sink.apply(effect, first, direct, suspects=frozenset({("t", 0)})) == ("applied", [0])
    twice = {"t": ["c", "d"], "message_id": [str(uuid7())] * 2}
    assert sink.apply(effect, twice, direct) == ("roundabout", [])
    assert sink.apply(effect, twice, direct, slow=frozenset({("t", 0)})) == ("applied", [1])
    assert sink.run("SELECT t FROM s") == [("a",), ("b",), ("c",)]
    assert sink.run("SELECT applied, duplicates FROM consumer.offsets") == [(4, 4)]


@pytest.mark.parametrize("way", ["direct", "batch", "lenient"])
def test_with_offsets_alone_no_id_is_looked_at(sink, way):
    """Neither one that is not there, nor one that was there before, nor one that is there twice."""
    sink.run("CREATE TABLE s (t text)")
    effect = Insert("s", ["t"])
    direct = sink.direct(effect, OffsetsOnly())
    assert direct is not None
    plan = {
        "strategy": OffsetsOnly(),
        "slow": frozenset({("t", 0)} if way == "batch" else ()),
        "lenient": frozenset({("t", 0)} if way == "lenient" else ()),
    }
    known = str(uuid7())
    rows = {
        "t": ["a", None, "b", "c"],
        "message_id": [None, known, known, None],
        "message_tombstone": [False, True, False, False],
    }
    assert sink.apply(effect, rows, direct, **plan) == ("applied", [4])
    # The same range again, as a task does that Spark starts twice: that is for the offsets to know.
    sink.next = 0
    assert sink.apply(effect, rows, direct, **plan) == ("already", [])
    sink.next = 4
    assert sink.apply(effect, rows, direct, **plan) == ("applied", [4])
    assert sink.run("SELECT t FROM s ORDER BY t") == [("a",), ("a",), ("b",), ("b",), ("c",), ("c",)]
    assert sink.run("SELECT applied, duplicates, dead FROM consumer.offsets") == [(8, 0, 0)]
    assert sink.run("SELECT count(*) FROM consumer.processed_messages") == [(0,)]


def test_triggers_see_the_rows(sink):
    sink.run("CREATE TABLE s (t text); CREATE TABLE seen (t text)")
    sink.run(
        "CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.t = 'bad' THEN RAISE 'refused'; END IF; INSERT INTO seen VALUES (NEW.t); RETURN NEW; END $$"
    )
    sink.run("CREATE TRIGGER look BEFORE INSERT ON s FOR EACH ROW EXECUTE FUNCTION look()")
    effect = Insert("s", ["t"])
    direct = sink.direct(effect)
    assert sink.apply(effect, {"t": ["a", "bad"]}, direct) == ("roundabout", [])
    assert sink.apply(effect, {"t": ["a", "b"]}, direct) == ("applied", [2])
    assert sink.run("SELECT t FROM seen") == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("made", "effect", "strategy"),
    [
        ("CREATE TABLE t (t text); CREATE VIEW s AS SELECT * FROM t", Insert("s", ["t"]), Dedup()),
        ("CREATE TABLE s (t text); ALTER TABLE s ENABLE ROW LEVEL SECURITY", Insert("s", ["t"]), Dedup()),
        (
            "CREATE TABLE s (t text); CREATE RULE r AS ON INSERT TO s WHERE NEW.t = 'x' DO INSTEAD NOTHING",
            Insert("s", ["t"]),
            Dedup(),
        ),
        ("CREATE TABLE s (l bigint GENERATED ALWAYS AS IDENTITY)", Insert("s", ["l"]), Dedup()),
        ("CREATE TABLE s (t text)", Insert("s", ["t"]), Natural(["t"])),
        ("CREATE TABLE s (t text PRIMARY KEY)", Upsert("s", ["t"], ["t"]), Dedup()),
        ("CREATE TABLE s (t text)", "INSERT INTO s SELECT t FROM batch", Dedup()),
    ],
    ids=["view", "row security", "rule", "identity", "natural", "upsert", "sql"],
)
def test_not_where_it_would_be_another_thing(sink, made, effect, strategy):
    sink.run(made)
    assert sink.direct(effect, strategy) is None


def test_where_it_is_the_same(sink):
    sink.run(
        'CREATE TABLE s (t text) PARTITION BY LIST (t); CREATE TABLE s1 PARTITION OF s DEFAULT; CREATE SCHEMA "Ü b"'
    )
    sink.run('CREATE TABLE "Ü b"."S s" ("V" text)')
    straight = sink.direct(Insert("s", ["t"]), Fingerprint())
    assert straight is not None
    assert (straight.table, straight.columns, straight.kinds) == ("s", {"t": "t"}, {"t": "text"})
    effect = Insert("Ü b.S s", {"V": "t"})
    assert sink.apply(effect, {"t": ["a"]}, sink.direct(effect)) == ("applied", [1])
    assert sink.run('SELECT * FROM "Ü b"."S s"') == [("a",)]
    sink.run("CREATE TABLE u (u uuid)")
    effect = Insert("u", {"u": "t"})
    unusual = {"t": ["{0195D9C25C007ABC8DEF0123456789AB}"]}
    assert sink.apply(effect, unusual, sink.direct(effect)) == ("roundabout", [])
    assert sink.apply(effect, unusual, None) == ("applied", [1])
    with pytest.raises(JobError, match="no table nowhere"):
        sink.direct(Insert("nowhere", ["t"]))


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
    assert sink.apply(UPSERT, none, None) == ("culprits", [1])
    two = {"i": [1, 2, 2, 2], "l": [1, 1, 2, 2], "t": ["a", "b", "c", "d"], "message_offset": [0, 1, 2, 2]}
    for effect in (UPSERT, Upsert("s", ["i"], ["i", "t"])):
        for strategy in (Dedup(), Natural(["i"]), Version("s", {"i": "i"}, "l")):
            assert sink.apply(effect, two, None, strategy=strategy) == ("culprits", [2])
    assert sink.run("SELECT * FROM s") == []
    with psycopg.connect(sink.url) as connection:
        types = column_types(connection.cursor(), "s")
    with pytest.raises(JobError, match=r"deletes needs.*message_tombstone"):
        UPSERT.statements(["i", "l", "t"], types, placed=False)


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
    book, version = Book("consumer", "g"), Version("s", {"i": "i"}, "l")
    upsert = sink.statements(Upsert("s", ["i"], ["i", "l"], deletes=True), list(PAYLOAD)).split(";")
    for keys, tombstone in itertools.product((1, 40), ("n % 2 = 0", "n % 2 = 1", "n <= 1000", "n > 1000")):
        with psycopg.connect(sink.url, cursor_factory=Explaining) as connection:
            cursor = connection.cursor()
            cursor.seen = []
            Applying(cursor, book, COLUMNS, version, "SELECT 1", bisect=True, max_dead=1)
            fill = sql.SQL(
                "WITH made AS (SELECT n, {} AS gone FROM generate_series(1, 2000) AS n) "
                "INSERT INTO batch (i, l, message_topic, message_part, message_offset, message_key, message_tombstone) "
                "SELECT CASE WHEN NOT gone THEN n % {} END, n, 't', 0, n, (n % {})::text, gone FROM made"
            ).format(sql.SQL(tombstone), keys, keys)
            cursor.execute(fill)
            for statement in upsert:
                cursor.execute(statement)
            version.reduce(cursor, book, None, suspect=False)
            assert len(cursor.seen) == 6
            assert max(cursor.seen) < 40_000, (keys, tombstone, cursor.seen)
            connection.rollback()


def test_a_shuffle_may_leave_out_tombstones_that_delete_nothing(sink):
    sink.run("CREATE TABLE s (i int PRIMARY KEY, l bigint); INSERT INTO s VALUES (1, 1)")
    store = Store(sink.url, "consumer", "g", "test")
    job = ConsumerJob("g", ["t"], Upsert("s", ["i"], ["i", "l"], deletes=True), atomic="batch")
    insert = (
        "INSERT INTO batch (i, message_topic, message_part, message_offset, message_key, message_tombstone) "
        "VALUES (%s, 't', 0, %s, %s, %s)"
    )
    missed = {}
    # A key, and at which offset the transform has left a row of it.
    for key, row in (("1", None), ("01", None), ("2", None), ("2", 5), ("2", 7), ("3", 5), ("order-1", None)):
        with psycopg.connect(sink.url) as connection:
            cursor = connection.cursor()
            Applying(cursor, Book("consumer", "g"), COLUMNS, Dedup(), "SELECT 1", bisect=True, max_dead=1)
            for offset, gone in ((4, "1"), (6, key), (8, None)):
                cursor.execute(insert, (None, offset, gone, True))
            job.effect.note(cursor)
            # The first one it has kept; without a key the last one deletes nothing.
            cursor.execute("DELETE FROM batch WHERE message_offset > 4")
            if row is not None:
                cursor.execute(insert, (2, row, "2", False))
            missed[key, row] = job.effect.missed(cursor, list(PAYLOAD), store.column_types("s"))
    assert {case for case, place in missed.items() if place == ("t", 0, 6)} == {("1", None), ("01", None), ("2", 5)}
    assert {place for place in missed.values() if place != ("t", 0, 6)} == {None}


def test_what_a_shuffle_keeps_of_the_messages_is_written_and_needed(sink):
    sink.run("CREATE TABLE s (i int PRIMARY KEY, message_key text, message_id uuid)")
    store = Store(sink.url, "consumer", "g", "test")
    kept = {"i": "integer", **META}

    def effect(made: Insert | Upsert, *without: str) -> str:
        job = ConsumerJob("g", ["t"], made, atomic="batch")
        rounds = BatchRounds(None, job, None, store, PostgresSinks(sink.url, "consumer", job, store))
        return rounds._effect_after({name: kind for name, kind in kept.items() if name not in without})

    for made in (Insert("s"), Upsert("s", ["i"], deletes=True)):
        assert '("i", "message_id", "message_key")' in effect(made)
    with pytest.raises(JobError, match="no column message_topic"):
        effect(Insert("s"), "message_part")
    with pytest.raises(JobError, match=r"deletes needs.*message_key"):
        effect(Upsert("s", ["i"], ["i"], deletes=True), "message_key")
    assert "WHERE NOT message_tombstone" in effect(Upsert("s", ["i"], ["i"]), "message_key")
