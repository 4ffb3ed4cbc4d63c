"""What an effect may do in a task and what becomes of it, by the rejected messages that a task names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import psycopg
import pyarrow as pa
import pytest
import sqlalchemy as sa
from consumer_group import COLUMNS, event_id, rows_of
from task_sink import EFFECT, Sink, outcomes, sink

from outbox.consumer.letters import DeadLetter, DeadLetterStore
from outbox.consumer.model import RejectedRecord
from spark_jobs.dedup import strategies
from spark_jobs.errors import Reject
from spark_jobs.postgres import batch_table as applying
from spark_jobs.task import partition as task
from spark_jobs.task.input import in_memory

__all__ = ["sink"]


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

    for bisect, outcome in ((True, "rejected"), (False, "broken")):
        report = sink.apply([(event_id(1), 1)], effect=effect, bisect=bisect)
        assert (report["outcome"], "bad name ?" in report["detail"]) == (outcome, True)
    record = RejectedRecord(("t", 0, 0), "rejected", "bad\0name \ud800")
    with psycopg.connect(sink.url) as connection:
        DeadLetterStore("consumer", "g").write(connection, "id", [DeadLetter(record, None, None, None, "[]", 0)])
    assert sink.run("SELECT error FROM consumer.dead_letters") == [("bad\ufffdname ?",)]


def retry_two(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write two dead letters, and have the sink's task retry both."""
    rejected = [RejectedRecord(("t", 0, offset), "failed", "why") for offset in (0, 1)]
    with psycopg.connect(sink.url) as connection:
        found = [DeadLetter(one, event_id(one.place[2]), b"k", b"payment", "[]", 0) for one in rejected]
        DeadLetterStore("consumer", "g").write(connection, "id", found)
    sink.run("UPDATE consumer.dead_letters SET state = 'retry'")
    ids = dict(sink.run("SELECT message_offset, id FROM consumer.dead_letters"))
    requests = {one.place: (ids[one.place[2]], one.reason) for one in rejected}
    monkeypatch.setattr(task, "apply_rows", lambda plan, rows: task.report_retry(plan, requests, rows))


def test_dead_letters_of_which_one_is_gone_are_not_reported_as_applied(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was discarded meanwhile; or all are, because this is a retry of a task after its COMMIT."""
    retry_two(sink, monkeypatch)
    sink.run("DELETE FROM consumer.dead_letters WHERE message_offset = 1")
    both = [(event_id(0), 7), (event_id(1), 8)]
    assert (sink.apply(both)["outcome"], sink.numbers()) == ("already", [])
    assert sink.run("SELECT message_offset, state FROM consumer.dead_letters") == [(0, "retry")]


def test_a_dead_letter_that_its_job_leaves_out_today_leaves_a_note(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are tried again one is not among the rows: a filter, or another list of types."""
    retry_two(sink, monkeypatch)
    assert (sink.apply([(event_id(0), 7)])["outcome"], sink.numbers()) == ("applied", [7])
    assert sink.run("SELECT count(*) FROM consumer.dead_letters") == [(0,)]
    kept = "what, details ->> 'offset', convert_from(decode(details ->> 'value_base64', 'base64'), 'UTF8')"
    assert sink.run(f"SELECT {kept} FROM consumer.audit") == [("leave out dead letter", "1", "payment")]


def bare(error: psycopg.Error) -> NoReturn:
    raise error


def by_a_repository(error: psycopg.Error) -> NoReturn:
    raise LookupError("the repository failed") from error


def by_sqlalchemy(error: psycopg.Error) -> NoReturn:
    """As an engine over the given connection does, and without the cause."""
    raise sa.exc.OperationalError("INSERT", {}, error) from None


@pytest.mark.parametrize("raised", [bare, by_a_repository, by_sqlalchemy])
@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("40001", "interrupted"),
        ("40P01", "interrupted"),
        ("53100", "unavailable"),
        ("ended", "unavailable"),
        ("42P01", "broken"),
    ],
)
def test_an_error_that_may_pass_repeats_the_range_also_if_the_function_wraps_it(
    sink: Sink, state: str, outcome: str, raised: Callable[[psycopg.Error], NoReturn]
) -> None:
    """In the first call, for all rows, and in a later one, for the half of them in which one is refused."""
    failing = "SELECT pg_terminate_backend(pg_backend_pid())"
    if state != "ended":
        failing = f"DO $$ BEGIN RAISE SQLSTATE '{state}'; END $$"
    calls = 0

    def effect(cursor: psycopg.Cursor[Any], rows: pa.Table) -> None:
        nonlocal calls
        calls += 1
        try:
            if calls in {1, 4}:
                cursor.execute(failing.encode())
        except psycopg.Error as error:
            raised(error)
        values = rows["n"].to_pylist(), rows["message_offset"].to_pylist()
        cursor.execute("INSERT INTO numbers SELECT * FROM unnest(%s::int[], %s::bigint[])", values)

    messages = [(event_id(n), 100 if n == 13 else n) for n in range(20)]
    for tried in (1, 4):
        assert sink.apply(messages, effect=effect)["outcome"] == outcome
        assert (calls, sink.numbers(), sink.position()) == (tried, [], 0)
    assert outcomes(sink.apply(messages, effect=effect)) == [(13, "failed")]
    assert sink.apply([*messages[:13], *messages[14:]], effect=effect)["outcome"] == "applied"
    assert sink.numbers() == [n for n in range(20) if n != 13]


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
    made = sink.plan(0, 0, 100, **{"columns": columns, "effect": "SELECT 1", **plan})
    batch = rows_of(
        len(rows),
        message_id=[event_id(offset) for offset, _ in rows],
        message_offset=[offset for offset, _ in rows],
        message_tombstone=[line is None for _, line in rows],
        **{name: [line for _, line in rows] for name in columns if not name.startswith("message_")},
    )
    (report,) = task.apply_rows(made, in_memory([batch]))
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
    unfit = [(offset, "bad\0" if line == "bad" else line) for offset, line in rows]
    assert outcomes(lines(sink, unfit, lenient=frozenset({("t", 0)}), max_dead=2)) == bad

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
    places = applying.BatchTable.places
    monkeypatch.setattr(applying.BatchTable, "places", lambda self: asked.append(1) or places(self))
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
    letter = DeadLetter(RejectedRecord(("t", 0, 1), "failed", "why"), event_id(2), b"k", b"2", "[]", 0)
    report = sink.apply([(event_id(1), 1)], effect=commit, dead={("t", 0): [letter]})
    assert (report["outcome"], "savepoint" in report["detail"], sink.position()) == ("broken", True, 1)
    assert sink.run("SELECT message_id::text FROM consumer.dead_letters") == [(event_id(2),)]
    assert sink.run("SELECT applied, duplicates, dead FROM consumer.offsets WHERE part = 0") == [(1, 0, 1)]
    # And what was tried again is no dead letter any more.
    ((number,),) = sink.run("UPDATE consumer.dead_letters SET state = 'retry' RETURNING id")
    asked = {("t", 0, 1): (number, "failed")}
    monkeypatch.setattr(task, "apply_rows", lambda plan, rows: task.report_retry(plan, asked, rows))
    assert sink.apply([(event_id(2), 2)], start=1, effect=commit)["outcome"] == "broken"
    assert sink.run("SELECT count(*) FROM consumer.dead_letters") == [(0,)]
    assert sink.run("SELECT applied FROM consumer.offsets WHERE part = 0") == [(2,)]
    assert sink.numbers() == [1, 2]
