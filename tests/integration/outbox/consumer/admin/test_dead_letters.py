"""Dead letters of the consumers on real Postgres: what a person does with them. Rows are written by hand; no Kafka."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from rows_and_roles import put
from support import wait_until
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from outbox.consumer.admin.dead_letters import REASONS, DeadLetters, Selection
from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.postgres_errors import connect
from outbox.errors import ConfigurationError, SchemaError
from outbox.testing.fixtures import Database, token
from relay.cli.app import app


class Sink:
    """The consumers' tables of one database, and a desk."""

    def __init__(self, database: Database) -> None:
        self.url = database.url
        self.admin = database.connect(autocommit=True)
        self.admin.execute("TRUNCATE consumer.dead_letters, consumer.audit, consumer.offsets, consumer.groups")
        self.connection = connect(database.url, "desk")
        self.desk = DeadLetters(self.connection, "consumer")

    def close(self) -> None:
        self.admin.close()
        self.connection.close()

    def bury(
        self,
        offset: int,
        key: bytes | None = b"a",
        reason: str = "failed",
        *,
        value: bytes | None = b"{}",
        group: str = "g",
        topic: str = "t",
        part: int = 0,
        **more: Any,
    ) -> int:
        """Write a dead letter; gives its id."""
        columns = {
            "grp": group,
            "topic": topic,
            "part": part,
            "message_offset": offset,
            "reason": reason,
            "message_key": key,
            "message_value": value,
            "message_headers": Jsonb(more.pop("headers", [])),
            "message_id": uuid7(),
            "message_time": "2026-01-02T03:04:05Z",
            **more,
        }
        return put(self.admin, "consumer.dead_letters", error=f"{topic}-{part}@{offset} is bad", **columns)["id"]

    def rows(self, query: str, *values: Any) -> list[Any]:
        return self.admin.execute(query, values).fetchall()

    def states(self) -> dict[int, str]:
        return dict(self.rows("SELECT id, state FROM consumer.dead_letters ORDER BY id"))

    def audit(self) -> list[Any]:
        return self.rows("SELECT what, why, details FROM consumer.audit ORDER BY id")

    def outbox(self, command: str, *arguments: str) -> Any:
        group = ["consumers"] if command == "groups" else ["dead-letters", "--side", "consumer"]
        return CliRunner().invoke(
            app, [group[0], command, *group[1:], *arguments], env={"OUTBOX_DATABASE_URL": self.url}
        )

    def done(self, *arguments: str) -> str:
        result = self.outbox(*arguments)
        assert result.exit_code == 0, result.output
        return result.output

    def json(self, *arguments: str) -> Any:
        (line,) = self.done(*arguments, "--json").splitlines()
        return json.loads(line)


@pytest.fixture(scope="module")
def database(outbox_postgres_server, _outbox_template):
    """One for all tests: each begins with empty tables."""
    name = f"outbox_desk_{token()}"
    with Database(outbox_postgres_server.create_database(name, template=_outbox_template), name) as database:
        yield database
    outbox_postgres_server.drop_database(name)


@pytest.fixture
def sink(database):
    sink = Sink(database)
    yield sink
    sink.close()


# --- retry -----------------------------------------------------------------------------------------------------------


def test_a_retry_takes_what_was_asked_for_and_the_audit_says_who(sink):
    first, second, third = sink.bury(1), sink.bury(2), sink.bury(3, b"b")
    (row,) = sink.desk.retry(Selection([second]))
    assert (row["id"], row["message_offset"]) == (second, 2)
    assert sink.states() == {first: "dead", second: "retry", third: "dead"}
    ((who, what, details),) = sink.rows("SELECT who, what, details FROM consumer.audit")
    assert (who, what) == (sink.rows("SELECT session_user::text")[0][0], "retry dead letters")
    (noted,) = details["dead_letters"]
    assert (noted["id"], noted["group"], noted["topic"], noted["part"], noted["offset"]) == (second, "g", "t", 0, 2)
    # Once more changes nothing, and finds it all the same.
    assert [row["id"] for row in sink.desk.retry(Selection([second]))] == [second]
    assert sink.desk.retry(Selection([10**9])) == []
    assert len(sink.audit()) == 2


def test_a_key_whose_order_is_kept_is_retried_whole_and_in_order(sink):
    # Written in another order than their offsets.
    late, head, behind = sink.bury(9, reason="behind"), sink.bury(2), sink.bury(5, reason="behind")
    others = [
        sink.bury(3, b"b"),
        sink.bury(4, b"a", group="other"),
        sink.bury(4, b"a", topic="other"),
        sink.bury(6, None, "behind"),
        sink.bury(7, None),
    ]
    for asked in (head, late):
        sink.admin.execute("UPDATE consumer.dead_letters SET state = 'dead'")
        rows = sink.desk.retry(Selection([asked]))
        assert [row["id"] for row in rows] == [head, behind, late]
        states = sink.states()
        assert [states[one] for one in (head, behind, late)] == ["retry"] * 3
        assert {states[one] for one in others} == {"dead"}
    assert [row["id"] for row in sink.desk.retry(Selection([others[-1]]))] == [others[-1]]


def test_all_of_a_group_a_topic_or_a_reason(sink):
    rows = {
        "g1": sink.bury(1, group="g1"),
        "g2": sink.bury(1, group="g2", reason="undecodable", key=None),
        "t2": sink.bury(1, group="g2", topic="t2"),
    }

    def retried(**selection: str) -> set[int]:
        return {row["id"] for row in sink.desk.retry(Selection(**selection))}

    assert retried(group="g1") == {rows["g1"]}
    assert retried(topic="t2") == {rows["t2"]}
    assert retried(reason="undecodable") == {rows["g2"]}
    assert retried(group="g2", topic="t") == {rows["g2"]}
    assert retried(group="g1", topic="t2") == set()
    assert retried() == set(rows.values())
    with pytest.raises(ConfigurationError, match="reason 'other': must be one of undecodable, "):
        Selection(reason="other")


def test_the_reasons_are_those_of_the_table(sink):
    for offset, reason in enumerate(REASONS):
        sink.bury(offset, reason=reason)
    ((check,),) = sink.rows(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'dead_letters_reason' "
        "AND conrelid = 'consumer.dead_letters'::regclass"
    )
    assert check.count("::text") >= len(REASONS)
    assert sorted(part for part in check.split("'")[1::2]) == sorted(REASONS)


def test_a_retry_waits_for_the_round_that_is_applying_the_message(sink):
    """The round deletes it, or counts another attempt: the desk decides on what is there afterwards."""
    gone, failed = sink.bury(1), sink.bury(2)
    sink.desk.retry(Selection())
    with psycopg.connect(sink.url) as consumer:
        consumer.execute("SELECT FROM consumer.dead_letters FOR UPDATE")
        consumer.execute("DELETE FROM consumer.dead_letters WHERE id = %s", (gone,))
        consumer.execute(
            "UPDATE consumer.dead_letters SET state = 'dead', attempts = attempts + 1 WHERE id = %s", (failed,)
        )
        found: list[list[int]] = []
        thread = threading.Thread(
            target=lambda: found.append([row["id"] for row in sink.desk.retry(Selection([gone, failed]))])
        )
        thread.start()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'desk' AND wait_event_type = 'Lock'"
        wait_until(lambda: sink.rows(waiting) == [(1,)], 30, "the desk to wait")
        assert found == []
        consumer.commit()
        thread.join(30)
    assert found == [[failed]]
    assert sink.states() == {failed: "retry"}
    assert [details["dead_letters"][0]["id"] for _, _, details in sink.audit()[1:]] == [failed]


def test_the_desk_does_not_wait_for_ever(sink, monkeypatch):
    from outbox.consumer.admin import dead_letters

    monkeypatch.setattr(dead_letters, "_TIMEOUT", "SELECT set_config('lock_timeout', '50ms', true)")
    letter = sink.bury(1)
    with psycopg.connect(sink.url) as consumer:
        consumer.execute("SELECT FROM consumer.dead_letters FOR UPDATE")
        with pytest.raises(ConsumerUnavailable, match="a round of the group is using these rows; nothing was changed"):
            sink.desk.discard(Selection([letter]), "why")
    assert (sink.states(), sink.audit()) == ({letter: "dead"}, [])


# --- discard ---------------------------------------------------------------------------------------------------------


def test_what_is_discarded_is_kept_in_the_audit_whole(sink):
    headers = [{"key": "h", "value": base64.b64encode(b"\xff").decode()}, {"key": "h", "value": None}]
    value = bytes(range(256)) * 3
    letter = sink.bury(7, b"\x00k", value=value, headers=headers, sqlstate="23514", part=3, attempts=4)
    sink.bury(8)
    done = sink.desk.discard(Selection([letter]), "wrong customer")
    assert ([row["id"] for row in done.gone], done.freed) == ([letter], [])
    ((what, why, details),) = sink.audit()
    assert (what, why) == ("discard dead letter", "wrong customer")
    whose = {"id": letter, "group": "g", "topic": "t", "topic_id": "T", "part": 3, "offset": 7}
    assert {name: details[name] for name in whose} == whose
    assert (details["reason"], details["sqlstate"], details["attempts"]) == ("failed", "23514", 4)
    assert details["error"] == "t-3@7 is bad"
    assert details["message_id"] == str(done.gone[0]["message_id"])
    assert base64.b64decode(details["value_base64"]) == value
    assert "\n" not in details["value_base64"]
    assert base64.b64decode(details["key_base64"]) == b"\x00k"
    assert details["headers"] == headers
    assert len(sink.states()) == 1


def test_a_message_with_personal_data_need_not_be_kept(sink):
    sink.bury(1, b"secret", value=b"secret", headers=[{"key": "secret", "value": None}])
    sink.bury(2, None, value=None)
    sink.desk.discard(Selection(), "asked to forget", keep_message=False)
    assert [details["offset"] for _, _, details in sink.audit()] == [1, 2]
    assert "secret" not in str(sink.audit())


def test_discarding_the_first_of_a_key_lets_those_behind_it_go_on(sink):
    # Of another key, and before them all.
    another = sink.bury(0, b"c")
    head, *behind = sink.bury(1), sink.bury(2, reason="behind"), sink.bury(3, reason="behind")
    elsewhere = [sink.bury(4, b"b", "behind"), sink.bury(2, reason="behind", group="h"), sink.bury(5, None, "behind")]
    done = sink.desk.discard(Selection([head]), "why")
    assert done.freed == behind
    assert sink.states() == dict.fromkeys(behind, "retry") | dict.fromkeys([another, *elsewhere], "dead")
    assert [what for what, *_ in sink.audit()] == ["discard dead letter", "retry dead letters"]
    assert sink.audit()[1][2] == {"behind_discarded": [head], "ids": behind}


def test_discarding_a_later_one_frees_nobody(sink):
    head, middle, last = sink.bury(1), sink.bury(2, reason="behind"), sink.bury(3, reason="behind")
    assert sink.desk.discard(Selection([middle]), "why").freed == []
    assert sink.states() == {head: "dead", last: "dead"}
    # With both gone at once the last one goes on.
    assert sink.desk.discard(Selection([head]), "why").freed == [last]


def test_what_waits_for_a_second_dead_one_goes_on_waiting(sink):
    head, behind, second, last = (
        sink.bury(1),
        sink.bury(2, reason="behind"),
        sink.bury(3, reason="rejected"),
        sink.bury(4, reason="behind"),
    )
    assert sink.desk.discard(Selection([head]), "why").freed == [behind]
    assert sink.states() == {behind: "retry", second: "dead", last: "dead"}


def test_a_key_that_has_moved_to_another_partition_waits_as_the_consumers_let_it_wait(sink):
    """Partitions were added: offsets give no order between the two, and the ids of the dead letters do."""
    head, behind = sink.bury(7), sink.bury(8, reason="behind")
    later, last = sink.bury(1, part=1), sink.bury(2, part=1, reason="behind")
    shown = {letter: sink.desk.show(letter) for letter in (head, behind, later, last)}
    assert [row["waits_for"] for row in shown.values()] == [None, head, None, head]
    assert [row["behind_it"] for row in shown.values()] == [2, 1, 1, 0]
    assert sink.desk.discard(Selection([head]), "why").freed == [behind]
    assert sink.states() == {behind: "retry", later: "dead", last: "dead"}
    assert sink.desk.discard(Selection([later]), "why").freed == [last]


# --- looking ---------------------------------------------------------------------------------------------------------


def test_contents_are_shown_as_what_they_are(sink):
    def shown(value: bytes | None, key: bytes | None = b"k") -> tuple[Any, ...]:
        letter = sink.bury(sink.rows("SELECT count(*) FROM consumer.dead_letters")[0][0], key, value=value)
        row = sink.json("show", str(letter))
        return row["value"], row["value_encoding"], row["key"], row["key_encoding"]

    assert shown(b'{"a":\n [1,\r\n 2]}') == ({"a": [1, 2]}, "json", "k", "utf-8")
    assert shown("zwölf".encode(), b"\xff\x00") == ("zwölf", "utf-8", "ff00", "hex")
    assert shown(b"\x00\x00\x00\x00\x07\xff") == ("AAAAAAf/", "base64", "k", "utf-8")
    assert shown(None, None) == (None, None, None, None)
    assert shown(b'{"a": NaN}')[1] == "utf-8"
    # No number is rounded, and no name that repeats is dropped.
    exact = b'{"n": 12345678901234567890.12345678901234567890, "n": 2}'
    letter = sink.bury(99, value=exact)
    assert exact.decode() in sink.done("show", str(letter), "--json")
    assert exact.decode() in sink.done("show", str(letter))


def test_show_has_everything(sink):
    headers = [
        {"key": "ce_type", "value": base64.b64encode(b"Paid").decode()},
        {"key": "raw", "value": base64.b64encode(b"\xfe").decode()},
        {"key": "raw", "value": None},
    ]
    letter = sink.bury(5, headers=headers, sqlstate="22012", reason="rejected")
    row = sink.json("show", str(letter))
    assert row["headers"] == [
        {"key": "ce_type", "value": "Paid", "encoding": "utf-8"},
        {"key": "raw", "value": "fe", "encoding": "hex"},
        {"key": "raw", "value": None, "encoding": None},
    ]
    assert (row["id"], row["group"], row["topic"], row["part"], row["offset"]) == (letter, "g", "t", 0, 5)
    assert (row["error"], row["sqlstate"], row["reason"], row["state"]) == ("t-0@5 is bad", "22012", "rejected", "dead")
    assert (row["attempts"], row["behind_it"], row["waits_for"]) == (1, 0, None)
    assert row["message_time"].startswith("2026-01-02T03:04:05")
    assert set(row) >= {"topic_id", "message_id", "died_at", "last_failed_at"}
    assert json.loads(sink.done("show", str(letter))) == row


# --- the commands ----------------------------------------------------------------------------------------------------


def test_retry_and_discard_by_command(sink):
    head, behind, other = sink.bury(1), sink.bury(2, reason="behind"), sink.bury(1, b"b", group="h")
    text = sink.done("retry", str(head))
    assert "2 messages will be retried in the next round of g" in text
    assert "1 of them because the order of their keys is kept" in text
    assert sink.json("retry", "--all", "--group", "h") == {"retried": [other]}
    assert "no dead letters match" in sink.done("retry", "--all", "--topic", "u")
    sink.admin.execute("UPDATE consumer.dead_letters SET state = 'dead'")
    text = sink.done("discard", str(head), "--reason", "test")
    assert "1 message was discarded" in text
    assert "1 message that waited behind will be retried" in text
    assert sink.states() == {behind: "retry", other: "dead"}
    missing = sink.outbox("discard", str(other), "4711", "--reason", "test", "--drop-payload")
    assert (missing.exit_code, "not among the selected dead letters: 4711" in missing.output) == (1, True)
    assert sink.json("discard", "--all", "--reason", "test") == {"discarded": [behind], "retried": []}
    assert ["value_base64" in details for what, _, details in sink.audit() if what == "discard dead letter"] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["retry"], "say which: ids of dead letters, or --all"),
        (["retry", "1", "--all"], "say which"),
        (["discard", "--all", "--reason", " "], "--reason: say why they may be lost"),
        (["discard", "--all"], "--reason: say why they may be lost"),
        (["list", "--cause", "bad"], "must be one of undecodable"),
    ],
)
def test_commands_that_say_too_little(outbox_postgres, arguments, shown):
    done = CliRunner(env={"OUTBOX_DATABASE_URL": outbox_postgres.url, "COLUMNS": "200"}).invoke(
        app, ["dead-letters", *arguments, "--side", "consumer"]
    )
    assert (done.exit_code, shown in done.output) == (2, True), done.output


def test_a_database_without_the_tables_and_one_that_is_away(outbox_postgres):
    outbox_postgres.connect(autocommit=True).execute("DROP SCHEMA consumer CASCADE")
    with (
        connect(outbox_postgres.url, "desk") as connection,
        pytest.raises(SchemaError, match="run `outbox db upgrade --consumer`"),
    ):
        DeadLetters(connection, "consumer").list(Selection())
    done = CliRunner().invoke(app, ["consumers", "groups", "--database-url", "postgresql://u:secret@127.0.0.1:1/x"])
    assert done.exit_code == 1
    assert done.output.startswith("outbox: Postgres at postgresql://")
    assert "secret" not in done.output


# --- groups ----------------------------------------------------------------------------------------------------------


def test_how_far_the_groups_are(sink):
    assert sink.done("groups") == "no groups\n"
    put(sink.admin, "consumer.groups", owner="me", generation=3)
    put(sink.admin, "consumer.groups", grp="new", generation=1)
    figures = {"next_offset": 10, "log_end": 1025, "applied": 6, "duplicates": 3, "dead": 1}
    put(sink.admin, "consumer.offsets", generation=3, **figures)
    put(sink.admin, "consumer.offsets", generation=3, part=1)
    for offset in (1, 2, 3):
        sink.bury(offset)
    sink.bury(1, part=1, group="another")
    sink.desk.retry(Selection([min(sink.states())]))
    first, second, third = sink.json("groups")["groups"]
    wanted = {"group": "g", "topic": "t", "part": 0, "generation": 3, "owner": "me"}
    wanted |= {"lag": 1015, "dead_letters": 2, "retrying": 1, **figures}
    assert {name: first[name] for name in wanted} == wanted
    assert first["updated_at"]
    assert (second["part"], second["lag"], second["dead_letters"]) == (1, None, 0)
    assert (third["group"], third["topic"], third["next_offset"]) == ("new", None, None)
    assert [row["group"] for row in sink.json("groups", "--group", "new")["groups"]] == ["new"]
    text = sink.done("groups")
    assert "1,015" in text
    assert "2 + 1 to retry" in text
    assert "g: generation 3, taken over by me at " in text
