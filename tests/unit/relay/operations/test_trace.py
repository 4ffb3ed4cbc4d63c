"""What ``outbox trace`` says of an event where there is nothing to look through, and of texts that others wrote."""

from __future__ import annotations

import datetime as dt
from uuid import UUID

import pytest
from uuid_utils.compat import uuid4, uuid7

import relay.pipeline.trace
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


def test_what_was_not_looked_through_is_said(monkeypatch, capsys):
    settings = Settings(kafka={"bootstrap.servers": "127.0.0.1:1"})
    monkeypatch.setattr(relay.pipeline.trace, "topics_of", lambda _options, _may_write: [])
    found = Found(Event(uuid7(), "unknown"))
    _search(found, settings, [], seconds=1.0)
    why = "no topic was looked through, as these settings' routes lead to none that exists: name one with --topic"
    assert (found.as_dict()["searched_to_the_end"], found.unseen) == (False, [why])
    show(found)
    assert why in capsys.readouterr().out
    found = Found(Event(uuid7(), "unknown"))
    _search(found, Settings(), [], seconds=1.0)
    assert (found.whole, found.unseen) == (False, ["no Kafka: set OUTBOX_KAFKA__BOOTSTRAP_SERVERS=host:port"])


@pytest.mark.parametrize("event_id", [uuid4(), UUID("ffffffff-ffff-7fff-bfff-ffffffffffff")])
@pytest.mark.parametrize("since", [None, dt.datetime(2026, 1, 1, tzinfo=dt.UTC)])
def test_an_event_without_a_time_is_searched_for_from_the_beginning_or_since_one(event_id, since, monkeypatch, capsys):
    asked = []

    def searched(_options, topics, _event_id, start, seconds):
        asked.append((topics, start, seconds))
        return [], "time is over"

    monkeypatch.setattr(relay.pipeline.trace, "search", searched)
    monkeypatch.setattr(relay.pipeline.trace, "topics_of", lambda _options, _may_write: ["payments", "orders"])
    found = Found(Event(event_id, "unknown"))
    _search(found, Settings(kafka={"bootstrap.servers": "127.0.0.1:1"}), ["orders"], seconds=1.0, since=since)
    # What groups read is searched, and what relays may write.
    assert asked == [(["orders", "payments"], since or dt.datetime(1970, 1, 1, tzinfo=dt.UTC), 1.0)]
    assert not found.whole
    show(found)
    assert "! time is over" in capsys.readouterr().out


def test_the_time_in_an_id():
    now = dt.datetime.now(dt.UTC)
    found = written_at(UUID(str(uuid7())))
    assert found is not None
    assert abs((found - now).total_seconds()) < 5
    assert written_at(UUID("00000000-0000-7000-8000-000000000000")) == dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
