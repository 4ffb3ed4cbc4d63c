"""What others wrote (keys, errors, names) neither breaks a command's output nor reaches a terminal as it is."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from rows_and_roles import put
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
    # Postgres has no NUL, Kafka's topics have few characters: the table takes any.
    put(admin, "outbox.events", aggregate_id=HOSTILE, event_type=HOSTILE)
    named = {"aggregate_type": HOSTILE[:200], "aggregate_id": HOSTILE, "last_error": HOSTILE, "id": 9}
    event_id = put(admin, "outbox.dead_letters", **named, event_type=HOSTILE)["event_id"]
    put(admin, "outbox.failures", **named, event_id=event_id)
    admin.execute(
        "INSERT INTO outbox.relays (instance, version, alive_until) VALUES (%s, %s, 'infinity')", (HOSTILE, HOSTILE)
    )
    admin.execute("UPDATE outbox.lanes SET owner = %s, lease_until = 'infinity', last_batch = 1", (HOSTILE,))
    put(admin, "consumer.groups", grp=HOSTILE, owner=HOSTILE)
    place = {"grp": HOSTILE, "topic": HOSTILE}
    put(admin, "consumer.offsets", **place, next_offset=1)
    message = {"message_key": HOSTILE.encode(), "message_value": HOSTILE.encode(), "error": HOSTILE}
    header = '[{"key": "name", "value": "eA=="}]'
    letter = put(admin, "consumer.dead_letters", **place, **message, message_id=uuid7(), message_headers=header)
    calls = {"name": HOSTILE, "last_error": HOSTILE, "order_key": HOSTILE}
    put(admin, "consumer.reservations", **place, **calls, message_id=letter["message_id"])
    put(admin, "consumer.losses", **place, detail=HOSTILE)
    monkeypatch.setenv("OUTBOX_DATABASE_URL", outbox_postgres.url)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", outbox_kafka.bootstrap_servers)
    return {"EVENT": str(event_id), "MESSAGE": str(letter["message_id"]), "NUMBER": str(letter["id"])}


COMMANDS = (
    *("status", "trace EVENT", "trace MESSAGE", "dead-letters list", "dead-letters show EVENT"),
    *("dead-letters list --side consumer", "dead-letters show NUMBER --side consumer", "consumers groups"),
    *("offsets show", "external list", "doctor", "relay reconcile"),
)


def test_no_command_passes_it_on_to_the_terminal(hostile):
    for command in COMMANDS:
        words = [hostile.get(word, word) for word in command.split()]
        done = CliRunner().invoke(app, words)
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exception)
        assert done.exit_code in {0, 1}, (command, done.output)
        assert RAW.findall(done.output) == [], command
        if command not in {"doctor", "relay reconcile"}:
            # It is there, as it is written and not as markup.
            assert "[bold]x[/]" in done.output.replace("\n", ""), (command, done.output)
    for command in ("status", "trace EVENT", "dead-letters list", "offsets show", "external list"):
        words = [hostile.get(word, word) for word in command.split()]
        done = CliRunner().invoke(app, [*words, "--json"])
        assert RAW.findall(done.stdout) == [], command
        # JSON has the same text escaped.
        assert HOSTILE in texts(json.loads(done.stdout)), command


def texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*map(texts, value.values()))
    if isinstance(value, list):
        return set().union(*map(texts, value))
    return {value} if isinstance(value, str) else set()
