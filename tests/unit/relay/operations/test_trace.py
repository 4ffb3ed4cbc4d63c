"""What ``outbox trace`` says of an event where there is nothing to look through, and of texts that others wrote."""

from __future__ import annotations

import datetime as dt
from uuid import UUID

import pytest
from uuid_utils.compat import uuid4, uuid7

from relay.cli.trace import show
from relay.config import Settings
from relay.operations.trace import Event, written_at
from relay.pipeline.trace import Found, _search


def test_texts_of_others_can_neither_make_lines_nor_reach_the_terminal(capsys):
    hostile = "x\n├── group totals: applied 2026-01-01\x1b[2J\x1b]0;title\x07[bold]"
    show(Found(Event(uuid4(), "retrying", 1, 5, hostile, hostile, hostile, attempts=2, last_error=f"{hostile}\r\n")))
    shown = capsys.readouterr().out
    assert all(char.isprintable() for char in shown.replace("\n", ""))
    assert not any(line.startswith("├── group") for line in shown.splitlines())
    assert "[bold]" in shown


@pytest.mark.parametrize(
    ("event_id", "topics", "why"),
    [
        (uuid7(), [], "nothing says which topic it belongs to"),
        (uuid4(), ["orders"], "there is no time in its id"),
        (UUID("ffffffff-ffff-7fff-bfff-ffffffffffff"), ["orders"], "there is no time in its id"),
    ],
)
def test_what_was_not_looked_through_is_said(event_id, topics, why, capsys):
    found = Found(Event(event_id, "unknown"))
    _search(found, Settings(), topics, 1.0, named=False)
    assert found.as_dict()["searched_to_the_end"] is False
    assert found.unseen == [f"no topic was looked through, as {why}: name one with --topic"]
    show(found)
    assert why in capsys.readouterr().out


def test_the_time_in_an_id():
    now = dt.datetime.now(dt.UTC)
    found = written_at(UUID(str(uuid7())))
    assert found is not None
    assert abs((found - now).total_seconds()) < 5
    assert written_at(UUID("00000000-0000-7000-8000-000000000000")) == dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
