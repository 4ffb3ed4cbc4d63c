"""An audit is one session in the database, and its statements have a limit."""

from __future__ import annotations

from typing import Any

import psycopg
from audit_support import pipeline
from support import order

from outbox.urls import sqlalchemy_url
from relay.audit.sessions import sessions
from relay.audit.topics import Topics
from relay.config import load

__all__ = ["order", "pipeline"]

_SESSIONS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'outbox audit' AND datname = current_database()"


def test_an_audit_has_one_session(pipeline, monkeypatch):
    """Also while it compares one by one, and if the consumers' database is named as another."""
    ids = pipeline.sent()
    pipeline.repeat(ids[3])
    real, seen = Topics.since, []

    def since(topics: Topics, *given: Any) -> Any:
        seen.append(pipeline.rows(_SESSIONS))
        return real(topics, *given)

    monkeypatch.setattr(Topics, "since", since)
    monkeypatch.setenv("OUTBOX_RELAY__SINK_URL", sqlalchemy_url(pipeline.database.url))
    assert pipeline.differences() == [("repeated", ids[3])]
    once = [*seen]
    assert sum(found.count for found in pipeline.follower().advance()) == 1
    for looks in (once, seen[len(once) :]):
        assert len(looks) >= 2
        assert {len(pids) for pids in looks} == {1}
        assert len({pid for pids in looks for pid in pids}) == 1


def test_its_statements_have_a_limit(outbox_postgres):
    """In both databases, if there are two."""
    elsewhere = psycopg.conninfo.make_conninfo(outbox_postgres.url, dbname="postgres")
    for sink_url in (None, elsewhere):
        with sessions(load(database_url=outbox_postgres.url, relay={"sink_url": sink_url})) as opened:
            assert (opened.outbox is opened.sink) == (sink_url is None)
            for one in opened:
                shown = [one.execute(f"SHOW {name}").fetchone() for name in ("statement_timeout", "lock_timeout")]
                assert ("0",) not in shown
