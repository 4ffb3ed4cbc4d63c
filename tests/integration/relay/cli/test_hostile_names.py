"""What others wrote (keys, errors, names) neither breaks a command's output nor reaches a terminal as it is."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from psycopg import sql
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from relay.cli.app import app

# Rich's markup, opened and closed; a terminal's sequences, in both spellings; marks that turn text round.
HOSTILE = "[bold]x[/][/red][link=http://h]\x1b[31m\x1b]0;t\x07\x9b2J\u202eevil\u2066\u200f\r\x08\x7f%s {0}"
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def hostile(outbox_postgres, outbox_kafka, monkeypatch) -> dict[str, str]:
    """Fill the tables of both sides; returns what stands for ids in commands."""
    admin = outbox_postgres.connect(autocommit=True)
    event_id, message_id = uuid7(), uuid7()
    # Postgres has no NUL, Kafka's topics have few characters: the table takes any.
    write(admin, "outbox.events", aggregate_type="Order", aggregate_id=HOSTILE, event_type=HOSTILE)
    common = {"aggregate_type": HOSTILE[:200], "aggregate_id": HOSTILE, "last_error": HOSTILE, "attempts": 1}
    now = {"first_failed_at": "2026-01-01", "event_id": event_id, "lane": 0, "id": 9}
    write(admin, "outbox.dead_letters", **common, **now, event_type=HOSTILE, created_at="2026-01-01")
    write(
        admin,
        "outbox.failures",
        **common,
        **now,
        blocks=True,
        last_failed_at="2026-01-01",
        next_attempt_at="infinity",
    )
    write(admin, "outbox.relays", instance=HOSTILE, version=HOSTILE, alive_until="infinity")
    admin.execute("UPDATE outbox.lanes SET owner = %s, lease_until = 'infinity', last_batch = 1", (HOSTILE,))
    write(admin, "consumer.groups", grp=HOSTILE, owner=HOSTILE)
    place = {"grp": HOSTILE, "topic": HOSTILE, "topic_id": "T", "part": 0}
    write(admin, "consumer.offsets", **place, next_offset=1, generation=1)
    letter = {"message_id": message_id, "message_key": HOSTILE.encode(), "message_value": HOSTILE.encode()}
    header = '[{"key": "name", "value": "eA=="}]'
    write(
        admin,
        "consumer.dead_letters",
        **place,
        **letter,
        message_offset=0,
        message_headers=header,
        message_time="2026-01-01",
        reason="failed",
        error=HOSTILE,
    )
    write(
        admin,
        "consumer.reservations",
        grp=HOSTILE,
        name=HOSTILE,
        topic=HOSTILE,
        part=0,
        message_offset=0,
        message_id=message_id,
        state="stuck",
        request="{}",
        last_error=HOSTILE,
        order_key=HOSTILE,
    )
    write(admin, "consumer.losses", **place, first_offset=0, end_offset=1, kind="retention", detail=HOSTILE)
    monkeypatch.setenv("OUTBOX_DATABASE_URL", outbox_postgres.url)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", outbox_kafka.bootstrap_servers)
    [(number,)] = admin.execute("SELECT id FROM consumer.dead_letters").fetchall()
    return {"EVENT": str(event_id), "MESSAGE": str(message_id), "NUMBER": str(number)}


def write(admin: Any, table: str, **columns: Any) -> None:
    query = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
        sql.Identifier(*table.split(".")),
        sql.SQL(", ").join(map(sql.Identifier, columns)),
        sql.SQL(", ").join(sql.Placeholder() * len(columns)),
    )
    admin.execute(query, [*columns.values()])


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "trace EVENT",
        "trace MESSAGE",
        "dead-letters list",
        "dead-letters show EVENT",
        "dead-letters list --side consumer",
        "dead-letters show NUMBER --side consumer",
        "consumers groups",
        "offsets show",
        "external list",
        "doctor",
        "relay reconcile",
    ],
)
def test_no_command_passes_it_on_to_the_terminal(hostile, command):
    words = [hostile.get(word, word) for word in command.split()]
    done = CliRunner().invoke(app, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in {0, 1}, done.output
    assert RAW.findall(done.output) == []
    if command not in {"doctor", "relay reconcile"}:
        # It is there, as it is written and not as markup.
        assert "[bold]x[/]" in done.output.replace("\n", ""), done.output


@pytest.mark.parametrize("command", ["status", "trace EVENT", "dead-letters list", "offsets show", "external list"])
def test_json_has_the_same_text_escaped(hostile, command):
    words = [hostile.get(word, word) for word in command.split()]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert RAW.findall(done.stdout) == []
    assert HOSTILE in texts(json.loads(done.stdout))


def texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*map(texts, value.values()))
    if isinstance(value, list):
        return set().union(*map(texts, value))
    return {value} if isinstance(value, str) else set()
