"""Straight into the sink's table, or through ``batch``: the same stands there afterwards, and the same is refused."""

from __future__ import annotations

import random
import threading
from decimal import Decimal
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest
from direct_sink import KINDS, NOT_DIRECT, sink
from psycopg import sql
from support import wait_until
from uuid_utils import uuid7

from outbox.consumer.errors import JobError
from spark_jobs.dedup.strategies import Dedup, DedupStore, Fingerprint, Natural, OffsetsOnly, Version, column_types
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.job import META
from spark_jobs.postgres.batch_table import BatchTable
from spark_jobs.postgres.group_store import PostgresGroupStore

__all__ = ["sink"]


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
            assert sink.apply(effect, rows, direct) == ("fallback", []), kind
        outcome, at = sink.apply(through, rows, None)
        if outcome == "copy error":
            outcome, at = sink.apply(through, rows, None, lenient=frozenset({("t", 0)}))
        assert (outcome, at) == ("rejected", [sink.next + 1]), (kind, value)
    assert sink.run("SELECT count(*) FROM s") == sink.run("SELECT count(*) FROM other") == [(len(good),)], kind


def test_both_ways_give_the_same(sink):
    """Each value alone and all together; and what the table can't hold is refused, never cut to fit."""
    for kind in KINDS:
        both_ways_give_the_same(sink, kind)


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
        assert sink.apply(effect, {name: values}, direct) == ("fallback", []), change
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
    assert sink.apply(effect, {"l": [5]}, sink.direct(effect)) == ("fallback", [])


def test_a_table_that_is_another_thing_now(sink):
    for change in (
        "CREATE RULE r AS ON INSERT TO s DO ALSO SELECT 1",
        "ALTER TABLE s ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE s RENAME TO old; CREATE TABLE s (LIKE old)",
    ):
        sink.run("DROP TABLE IF EXISTS s; CREATE TABLE s (t text)")
        effect = Insert("s", ["t"])
        direct = sink.direct(effect)
        sink.run(change)
        assert sink.apply(effect, {"t": ["a"]}, direct) == ("fallback", []), change


def test_ids_that_are_spelt_unusually_are_for_the_database(sink):
    sink.run("CREATE TABLE s (t text)")
    effect = Insert("s", ["t"])
    direct = sink.direct(effect)
    bare = {"t": ["a"], "message_id": ["0195D9C25C007ABC8DEF0123456789AB"]}
    assert sink.apply(effect, bare, direct) == ("fallback", [])
    lenient = {"lenient": frozenset({("t", 0)})}
    in_binary = {"columns": {"t": "text"} | META}
    assert sink.apply(effect, bare, None, **in_binary) == ("applied", [1])
    assert sink.apply(effect, bare, None) == ("applied", [0])
    none = {"t": ["b", "c"], "message_id": [str(uuid7()), "order-1"]}
    assert sink.apply(effect, none, direct) == ("fallback", [])
    assert sink.apply(effect, none, None, **lenient) == ("rejected", [sink.next + 1])
    assert sink.apply(effect, bare, None, **lenient) == ("applied", [0])


def test_rows_that_can_not_be_taken_are_named_on_the_straight_way_too(sink):
    """They are not among the rows that are copied: forgotten, they would be gone without a word."""
    sink.run("CREATE TABLE s (t text)")
    effect = Insert("s", ["t"])
    rows = {"t": ["a", "b"], "message_id": [str(uuid7()), None]}
    assert sink.apply(effect, rows, sink.direct(effect)) == ("rejected", [1])
    assert sink.run("SELECT count(*) FROM s") == [(0,)]


def test_ids_go_in_by_day_and_in_order(sink):
    """So that two transactions with the same ids never wait for each other in a circle.

    Those without a time are of no day that is forgotten.
    """
    sink.run("CREATE TABLE s (t text); UPDATE consumer.groups SET forgotten_before = '2020-01-01'")
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
    assert told == [("fallback", [])]


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
        assert direct.apply(connection.cursor(), DedupStore("consumer", "g"), Dedup(), streamed()) == 12
        batch = {"i": "integer", "t": "text", "message_id": "uuid"}
        applying = BatchTable(
            connection.cursor(), DedupStore("consumer", "g"), batch, Dedup(), "SELECT 1", bisect=True, max_dead=1
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
    assert sink.apply(effect, bad, None, **plan) == ("rejected", [sink.next + 1])


def refused(sink, effect, rows):
    assert sink.apply(effect, rows, sink.direct(effect)) == ("fallback", [])
    assert sink.apply(effect, rows, None) == ("copy error", [])
    assert sink.apply(effect, rows, None, lenient=frozenset({("t", 0)})) == ("rejected", [sink.next + 1])


def test_times_that_no_calendar_has_are_refused(sink):
    sink.run("CREATE TABLE s (v timestamptz)")
    effect = Insert("s", {"v": "at"})
    for value in (-(2**63), -(2**63) + 946_684_800_000_000, 2**63 - 1):
        refused(sink, effect, {"at": pa.array([0, value], pa.int64()).cast(pa.timestamp("us", "UTC"))})
    sink.run("DROP TABLE s; CREATE TABLE s (v date)")
    for value in (-(2**31), -719_163, 2_932_897, 2**31 - 1):
        refused(sink, Insert("s", {"v": "d"}), {"d": pa.array([0, value], pa.int32()).cast(pa.date32())})


def test_a_type_that_cuts_texts_off_is_refused(sink):
    for kind in ("name", '"char"'):
        sink.run(f"DROP TABLE IF EXISTS s; CREATE TABLE s (v {kind})")
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
                PostgresGroupStore(url, "consumer", "g", "test").require_utf8()
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def test_an_upsert_never_cuts_a_text_to_fit(sink):
    sink.run("CREATE TABLE s (k varchar(3) PRIMARY KEY, v varchar(3))")
    effect = Upsert("s", ["k"], {"k": "t", "v": "t"})
    assert sink.apply(effect, {"t": ["abc", "abcd"]}, None) == ("rejected", [1])
    assert sink.apply(effect, {"t": ["abc", "abc"]}, None) == ("applied", [2])
    assert sink.run("SELECT * FROM s") == [("abc", "abc")]


def test_repeats_and_tombstones(sink):
    sink.run("CREATE TABLE s (t text)")
    effect = Insert("s", ["t"])
    direct = sink.direct(effect)
    names = [str(uuid7()) for _ in range(3)]
    first = {"t": ["a", None, "b"], "message_id": names, "message_tombstone": [False, True, False]}
    assert sink.apply(effect, first, direct) == ("applied", [3])
    assert sink.apply(effect, first, direct) == ("fallback", [])
    assert sink.apply(effect, first, direct, suspects=frozenset({("t", 0)})) == ("applied", [0])
    twice = {"t": ["c", "d"], "message_id": [str(uuid7())] * 2}
    assert sink.apply(effect, twice, direct) == ("fallback", [])
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
    assert sink.apply(effect, {"t": ["a", "bad"]}, direct) == ("fallback", [])
    assert sink.apply(effect, {"t": ["a", "b"]}, direct) == ("applied", [2])
    assert sink.run("SELECT t FROM seen") == [("a",), ("b",)]


def test_not_where_it_would_be_another_thing(sink):
    rule = "CREATE TABLE s (t text); CREATE RULE r AS ON INSERT TO s WHERE NEW.t = 'x' DO INSTEAD NOTHING"
    for made, effect, strategy in (
        ("CREATE TABLE s (t text); ALTER TABLE s ENABLE ROW LEVEL SECURITY", Insert("s", ["t"]), Dedup()),
        (rule, Insert("s", ["t"]), Dedup()),
        ("CREATE TABLE s (l bigint GENERATED ALWAYS AS IDENTITY)", Insert("s", ["l"]), Dedup()),
        ("CREATE TABLE s (t text)", Insert("s", ["t"]), Natural(["t"])),
        ("CREATE TABLE s (t text PRIMARY KEY)", Upsert("s", ["t"], ["t"]), Dedup()),
        ("CREATE TABLE s (t text)", "INSERT INTO s SELECT t FROM batch", Dedup()),
        ("CREATE TABLE t (t text); CREATE VIEW v AS SELECT * FROM t", Insert("v", ["t"]), Dedup()),
    ):
        sink.run(f"DROP TABLE IF EXISTS s; {made}")
        assert sink.direct(effect, strategy) is None, (made, strategy)


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
    assert sink.apply(effect, unusual, sink.direct(effect)) == ("applied", [1])
    broken = {"t": ["{0195D9C25C007ABC8DEF0123456789AB"]}
    assert sink.apply(effect, broken, sink.direct(effect)) == ("fallback", [])
    with pytest.raises(JobError, match="no table nowhere"):
        sink.direct(Insert("nowhere", ["t"]))
