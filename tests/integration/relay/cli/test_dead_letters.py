"""``outbox dead-letters``: one command for both sides."""

from __future__ import annotations

import json

import psycopg
import pytest
from rows_and_roles import put
from typer.testing import CliRunner

from relay.cli.app import app

IDS = [f"019cb900-0000-7000-8000-00000000000{number}" for number in range(3)]


@pytest.fixture
def command(outbox_postgres, monkeypatch):
    """Run a command over a database with three dead letters on each side. Gives status, stdout and stderr."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", outbox_postgres.url)
    with psycopg.connect(outbox_postgres.url) as connection:
        for number, event_id in enumerate(IDS):
            event = {"id": number + 1, "event_id": event_id, "aggregate_id": str(number)}
            event["aggregate_type"] = "Order" if number else "Invoice"
            for table in ("outbox.dead_letters", "outbox.failures"):
                put(connection, table, **event)
            reason = "failed" if number else "undecodable"
            put(connection, "consumer.dead_letters", grp="orders", message_offset=number, reason=reason)

    def run(text: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, text.split())
        return result.exit_code, result.stdout, result.stderr

    return run


def numbers(command, *options: str) -> list[int]:
    status, found, _ = command(" ".join(["dead-letters list --side consumer --json", *options]))
    assert status == 0
    return [row["id"] for row in json.loads(found)["dead_letters"]]


def test_each_side_lists_and_shows_its_own(command):
    listed = json.loads(command("dead-letters list --json")[1])["failures"]
    assert [row["event_id"] for row in listed] == IDS
    assert len(command("dead-letters list --aggregate-type Order")[1].splitlines()) == 2
    assert json.loads(command(f"dead-letters show {IDS[0]}")[1])["event_id"] == IDS[0]
    assert command("dead-letters retry --all --dry-run")[1].endswith("3 dead letters\n")
    assert len(numbers(command)) == 3
    assert numbers(command, "--cause failed") == numbers(command)[1:]
    assert json.loads(command("dead-letters show --side consumer 1")[1])["id"] == 1
    for unknown in ("77 --side consumer", "019cb900-0000-7000-8000-0000000000ff"):
        status, stdout, stderr = command(f"dead-letters show {unknown}")
        assert (status, stdout, unknown.split()[0] in stderr) == (1, "", True)


@pytest.mark.parametrize("side", ["relay", "consumer"])
def test_a_list_says_if_there_are_more(command, side):
    """Not if there are as many as may be shown."""
    for limit in range(1, 5):
        shown = command(f"dead-letters list --side {side} --limit {limit}")[1].splitlines()
        noted = ["there are more; see --limit"] if limit < 3 else []
        assert (len(shown[: min(limit, 3)]), shown[min(limit, 3) :]) == (min(limit, 3), noted)
        (listed,) = json.loads(command(f"dead-letters list --side {side} --limit {limit} --json")[1]).values()
        assert len(listed) == min(limit, 3)


def test_messages_of_one_cause_are_discarded(command):
    assert command("dead-letters discard --side consumer --all --cause failed --reason x")[1] == (
        "2 messages were discarded\n"
    )
    assert numbers(command) == numbers(command, "--cause undecodable") == [1]


REFUSED = {
    "list --side consumer --cause foo": "--cause foo: must be one of undecodable, no-id,",
    "discard --side consumer --all --cause foo --reason x": "--cause foo: must be one of undecodable, no-id,",
    "discard --all --cause failed --reason x": "--cause has no meaning with --side relay; give --side consumer",
    "list --group orders": "--group has no meaning with --side relay; give --side consumer",
    "list --side consumer --aggregate-type Order": "--aggregate-type has no meaning with --side consumer",
    "retry --side consumer --all --dry-run": "--dry-run has no meaning with --side consumer",
    "show 17": "'17' is not an event id (a UUID); with --side consumer it is the number of a dead letter",
    f"show --side consumer {IDS[0]}": "is not the number of a dead letter; with --side relay",
    "retry x": "'x' is not an event id (a UUID)\n",
    "retry": "say which: event ids, or --all",
    "discard --all --reason": "requires an argument",
    "discard --all": "--reason: say why they may be lost",
}


def test_what_does_not_fit_is_refused_and_changes_nothing(command):
    for text, said in REFUSED.items():
        status, stdout, stderr = command(f"dead-letters {text}")
        assert (status, stdout) == (2, ""), text
        assert said in " ".join(stderr.replace("│", " ").split()) + "\n", text
        assert len(numbers(command)) == 3
