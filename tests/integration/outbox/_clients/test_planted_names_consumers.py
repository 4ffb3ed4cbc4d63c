"""What somebody plants in an open ``public`` is never called by consumers. See ``planted``."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import planted
import psycopg
import pytest
from consumer_group import COLUMNS, event_id
from direct_sink import Sink as Straight
from external_support import Sink as Provided
from external_support import payments
from inbox_support import Log, apply
from task_sink import WAYS, Sink

from outbox.external import Done
from spark_jobs.dedup.strategies import ColumnType, Dedup, Fingerprint, Natural, OffsetsOnly, Version
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.effects.produce import Produce
from spark_jobs.job import META
from spark_jobs.postgres.group_store import PostgresGroupStore


# What consumes.
@pytest.mark.parametrize(
    ("way", "strategy"),
    list(
        zip(
            itertools.cycle(WAYS),
            [
                None,
                Natural(["n"]),
                Version("numbers", {"n": "n"}, "message_offset", "place"),
                OffsetsOnly(),
                Fingerprint(),
            ],
        )
    ),
)
def test_tasks(hostile, admin, way, strategy):
    sink = Sink(hostile.url, way=way)
    sink.begin([0, 1])
    admin.execute("CREATE TABLE public.numbers (n int CHECK (n < 100), place bigint)")
    admin.execute("INSERT INTO public.numbers VALUES (7, -1)")
    given = {} if strategy is None else {"strategy": strategy}
    # One is repeated, one has no place in the table.
    messages = [(event_id(n), 10 + n) for n in range(5)] + [(event_id(3), 13), (event_id(9), 500)]
    report = sink.apply(messages, **given)
    assert report["outcome"] == "rejected", report
    admin.execute("ALTER TABLE public.numbers DROP CONSTRAINT numbers_n_check")
    report = sink.apply(messages, **given)
    assert report["outcome"] == "applied", report
    assert admin.execute("SELECT count(*) FROM public.numbers WHERE n > 7").fetchone() in {(7,), (6,)}


def test_effects_without_sql(hostile, admin):
    sink = Sink(hostile.url)
    sink.begin([0])
    admin.execute(
        "CREATE TABLE public.states (n varchar(20) PRIMARY KEY, place bigint NOT NULL, kind varchar(9), made date)"
    )
    pairs = {"n": "n", "place": "message_offset", "kind": "message_type"}
    types = {"n": ColumnType("character varying"), "place": ColumnType("bigint")}
    types |= {"kind": ColumnType("character varying"), "made": ColumnType("date")}
    produce = Produce(
        "produced", "Order", "message_key", "Numbered", "pg_catalog.jsonb_build_object('n'::text, n)", part="n::text"
    )
    for effect in (Upsert("states", ["n"], pairs, version="place", deletes=True), Upsert("states", ["n"], pairs)):
        text = ";".join(one.as_string(None) for one in effect.statements(list(COLUMNS), types))
        report = sink.apply(
            [(event_id(n), n % 3) for n in range(5)], sink.position(), effect=f"{text};{produce.insert()}"
        )
        assert report["outcome"] == "applied", report
        admin.execute("DELETE FROM consumer.processed_messages")
    assert Insert("states").table == "states"


# An extension's type, in a schema that is in no search path. Its order is its own.
EXTENSION = """
CREATE SCHEMA extensions;
CREATE EXTENSION vector SCHEMA extensions;
CREATE TYPE extensions.folded;
CREATE FUNCTION extensions.folded_in(cstring) RETURNS extensions.folded LANGUAGE internal IMMUTABLE STRICT AS 'textin';
CREATE FUNCTION extensions.folded_out(extensions.folded) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT
AS 'textout';
CREATE TYPE extensions.folded (INPUT = extensions.folded_in, OUTPUT = extensions.folded_out, LIKE = text);
CREATE CAST (extensions.folded AS text) WITHOUT FUNCTION AS IMPLICIT;
CREATE FUNCTION extensions.folded_cmp(a extensions.folded, b extensions.folded) RETURNS integer LANGUAGE sql IMMUTABLE
RETURN pg_catalog.bttextcmp(pg_catalog.lower(a::text), pg_catalog.lower(b::text))"""
FOLDED = """
CREATE FUNCTION extensions.folded_{name}(a extensions.folded, b extensions.folded) RETURNS boolean LANGUAGE sql
IMMUTABLE RETURN extensions.folded_cmp(a, b) OPERATOR(pg_catalog.{operator}) 0;
CREATE OPERATOR extensions.{operator} (FUNCTION = extensions.folded_{name}, LEFTARG = extensions.folded,
                                       RIGHTARG = extensions.folded)"""
FOLDED_CLASS = """
CREATE OPERATOR CLASS extensions.folded_ops DEFAULT FOR TYPE extensions.folded USING btree AS
OPERATOR 1 extensions.<, OPERATOR 2 extensions.<=, OPERATOR 3 extensions.=, OPERATOR 4 extensions.>=,
OPERATOR 5 extensions.>, FUNCTION 1 extensions.folded_cmp(extensions.folded, extensions.folded)"""

# Of each type two values, one below the other; and the first one in another spelling.
KINDS = {
    "varchar(9)": ("a", "b", "a"),
    "text": ("a", "b", "a"),
    "bpchar": ("a", "b", "a "),
    "numeric(9,2)": ("9", "10", "9.00"),
    "uuid": (f"{0:032}", f"{1:032}", f"{0:032}"),
    "timestamptz": ("2026-01-01 12:00+02", "2026-01-01 11:00+00", "2026-01-01 10:00Z"),
    "public.mood": ("low", "high", "low"),
    "public.lower_case": ("a", "b", "a"),
    "varchar(9)[]": ("{a}", "{b}", "{a}"),
    "public.mood[]": ("{low}", "{high}", "{low}"),
    "int4range": ("[1,2)", "[2,3)", "[1,1]"),
    "public.pair": ("(a,1)", "(a,2)", "(a,1)"),
    "extensions.folded": ("a", "B", "A"),
    "public.folded_domain": ("a", "B", "A"),
    "extensions.folded[]": ("{a}", "{B}", "{A}"),
    "extensions.vector(2)": ("[1,2]", "[1,3]", "[1,2.0]"),
}


def test_keys_and_versions_of_any_type(hostile, admin):
    """Compared by pg_catalog's operators, or those of the type's extension, wherever that is."""
    admin.execute(EXTENSION)
    for name, operator in {"lt": "<", "le": "<=", "eq": "=", "ge": ">=", "gt": ">"}.items():
        admin.execute(FOLDED.format(name=name, operator=operator))
    admin.execute(FOLDED_CLASS)
    admin.execute("GRANT USAGE ON SCHEMA extensions TO PUBLIC")
    admin.execute(
        "CREATE TYPE public.mood AS ENUM ('low', 'high'); CREATE TYPE public.pair AS (name varchar(9), n bigint); "
        "CREATE DOMAIN public.lower_case AS varchar(9); CREATE DOMAIN public.folded_domain AS extensions.folded"
    )
    sink = Straight(hostile.url)
    sink.begin([0])
    effect = Upsert("states", ["k"], ["k", "v"], version="v", deletes=True)
    columns = {"k": "text", "v": "text"} | META
    for kind, (low, high, same) in KINDS.items():
        planted.plant_for(admin, kind.partition("(")[0] + "[]" * kind.endswith("[]"))
        admin.execute(
            f"DROP TABLE IF EXISTS public.states; CREATE TABLE public.states (k {kind} PRIMARY KEY, v {kind})"
        )
        steps: list[tuple[list[tuple[str, str | None]], list[tuple[str, str]]]] = [
            ([(low, low), (high, high)], [(low, low), (high, high)]),
            # A newer one, and one that is not.
            ([(same, high), (high, low)], [(low, high), (high, high)]),
            # A tombstone before a message, and one behind.
            ([(low, same), (high, None), (high, low), (low, high), (same, None)], [(high, low)]),
        ]
        for strategy in (Dedup(), Version("states", {"k": "k"}, "v")):
            admin.execute("DELETE FROM public.states")
            for rows, left in steps:
                given = {
                    "k": [None if version is None else key for key, version in rows],
                    "v": [version for _, version in rows],
                    "message_key": [key for key, _ in rows],
                    "message_tombstone": [version is None for _, version in rows],
                }
                report = sink.apply(effect, given, None, columns=columns, strategy=strategy)
                assert report[0] == "applied", (kind, strategy, report)
                found = admin.execute("SELECT k::text, v::text FROM public.states").fetchall()
                stored = f"SELECT (%s)::{kind}::text, (%s)::{kind}::text"
                wanted = [row for pair in left for row in admin.execute(stored, pair)]
                assert sorted(found) == sorted(wanted), (kind, strategy)


def test_the_drivers_statements(hostile, admin):
    store = PostgresGroupStore(hostile.url, "consumer", "driver", "test")
    admin.execute("CREATE TABLE public.target (n integer, message_id uuid)")
    try:
        store.require_utf8()
        store.setup("CREATE TABLE IF NOT EXISTS made (n int)")
        assert admin.execute("SELECT to_regclass('public.made') IS NOT NULL").fetchone() == (True,)
        generation = store.take_over("Dedup", "partition")
        store.add([("t", 0)], {"t": "T"}, generation)
        assert store.is_new() is False
        assert store.state(["t"], generation, keep_order=True)[0]
        assert store.dead_keys(["t"]) == {}
        assert store.retried(["t"], 10, keep_order=True) == []
        assert store.column_types("target") == {"n": ColumnType("integer"), "message_id": ColumnType("uuid")}
        assert store.direct(Insert("target", {"n": "n"}), OffsetsOnly(), {"n": "integer"}, ["n"]) is not None
        store.maintain_days(3, lambda *_: None)
        store.end(generation)
    finally:
        store.close()


def test_effects_outside(hostile, admin):
    sink = Provided(hostile.url)
    external = payments(
        "http://127.0.0.1:1",
        call=lambda call: Done(call.request),
        request="pg_catalog.jsonb_build_object('order'::text, order_id)",
        on_confirmed="INSERT INTO orders (id, state) VALUES ('o-1', 'paid')",
    )
    sink.reserve(external, ["o-1"])
    assert sink.drain(external) == {"attempts": 1, "confirmed": 1}
    assert admin.execute("SELECT state FROM public.orders").fetchall() == [("paid",)]


def test_the_inbox(hostile, outbox_kafka, monkeypatch):
    log = Log(hostile, outbox_kafka, 2)
    log.produce([f"k{n % 5}" for n in range(300)])
    refused = threading.Event()

    def handle(connection: Any, message: Any) -> None:
        if message.key() == b"k3" and not refused.is_set():
            raise ValueError("not yet")
        apply(connection, message)

    with log.consuming(handle, on_failure="dead-letter", attempts=1) as running:
        running.wait(lambda: len(log.letters()) == 60, "the dead letters")
        refused.set()
        with psycopg.connect(hostile.url, autocommit=True) as connection:
            connection.execute("UPDATE consumer.dead_letters SET state = 'retry' WHERE reason = 'failed'")
        running.wait(lambda: log.count() == 300, "what was retried")
    log.check()
