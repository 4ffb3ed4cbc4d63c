"""What the tests of the operations page share: pages to be served, dead letters with a secret, the audit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import strategies as st
from page_support import PageRun
from rows_and_roles import bury

from outbox import Event, Outbox
from outbox.consumer import kafka_admin

SECRET = "s3cret-in-a-payload"
HOSTILE = ("%00", "\0", "../../etc/passwd", "9" * 30, "-1", "1e9", "2026-13-45", "{{7*7}}", "' OR 1=1 --", "\u202ex")
TEXT = st.text(max_size=40) | st.sampled_from(HOSTILE)
FIELDS = (
    "scope",
    "lanes",
    "topic",
    "event_id",
    "number",
    "kind",
    "type",
    "state",
    "reason",
    "confirmed",
    "group",
    "name",
    "message_id",
    "cause",
)
ACTIONS = (
    *(f"dead-letters/{side}/{what}" for side in ("relay", "consumer") for what in ("retry", "discard")),
    *("consumers/calls/retry", "consumers/calls/cancel", "relays/change", "relays/resume"),
)


@pytest.fixture
def environment(outbox_postgres, outbox_kafka, monkeypatch):
    monkeypatch.setenv("OUTBOX_DATABASE_URL", outbox_postgres.url)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", outbox_kafka.bootstrap_servers)
    # The topics of the groups are none of Kafka's: each view would wait for them.
    monkeypatch.setattr(kafka_admin, "_UNHEARD_SECONDS", 0.3)
    return outbox_postgres.url


@pytest.fixture
def serve(environment) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def start(**web: Any) -> PageRun:
            run = PageRun(**web)
            stack.callback(run.close)
            return run

        yield start


def audit(url: str) -> list[Any]:
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT what, who, details FROM outbox.audit ORDER BY id").fetchall()


def failure(url: str) -> str:
    """Write an event and make it a dead letter, as a relay would. Returns its id."""
    with psycopg.connect(url) as connection:
        event_id = str(Outbox().add(connection, Event("Order", "o1", "T", {"card": SECRET}, headers={"h": SECRET})))
        bury(connection)
    return event_id


def failures(url: str, kind: str, error: str, count: int) -> None:
    """Write dead letters with an error."""
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO outbox.dead_letters (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, "
            "created_at, attempts, last_error, first_failed_at) SELECT 0, coalesce((SELECT max(id) FROM "
            "outbox.dead_letters), 0) + g, gen_random_uuid(), %s, 'k', 'T', '{}', now(), 1, replace(%s, '#', g::text), "
            "now() FROM generate_series(1, %s) AS g",
            (kind, error, count),
        )


PROXY = {"proxy_secret": "s3cret-of-the-proxy", "origin": "https://outbox.example.com"}


def through_proxy(user: str | bytes) -> dict[str, str | bytes]:
    """Return the headers of a request as a proxy passes it on."""
    return {
        "Host": "outbox.example.com",
        "Origin": PROXY["origin"],
        "X-Outbox-Proxy-Secret": PROXY["proxy_secret"],
        "X-Forwarded-User": user,
    }
