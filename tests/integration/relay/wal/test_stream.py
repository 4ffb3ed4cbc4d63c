"""The stream's parts against a real server: the lane's hash, visibility, the row as the stream gives it."""

from __future__ import annotations

import os
from contextlib import closing
from typing import NoReturn

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from older_postgres import postgres_16
from rows_and_roles import login_role

from outbox.errors import SchemaError
from outbox.sandbox.postgres import PostgresServer
from relay.core.ports import DatabaseUnavailable
from relay.wal.lane_hash import SAMPLES, lane_of
from relay.wal.replication import Replication
from relay.wal.slot import Snapshot

# Postgres can't hold a NUL, and a lone surrogate has no UTF-8.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=60)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(keys=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=200), lanes=st.integers(1, 256))
def test_lanes_are_the_servers(hashing, keys, lanes):
    assert [lane_of(kind, key, lanes) for kind, key in keys] == hashing([*keys], lanes)


def test_the_samples_that_a_relay_compares(hashing):
    assert [lane_of(kind, key, 1 << 30) for kind, key in SAMPLES] == hashing(list(SAMPLES), 1 << 30)


@pytest.fixture
def hashing(outbox_postgres):
    """Lanes of keys as the server computes them, by the expression of the table."""
    with outbox_postgres.connect(autocommit=True) as connection:

        def lanes_of(keys: list[tuple[str, str]], lanes: int) -> list[int]:
            kinds, ids = zip(*keys, strict=True)
            return [
                row[0]
                for row in connection.execute(
                    "SELECT abs(mod(hashtextextended(aggregate_id, hashtextextended(aggregate_type, 0)), %s::bigint)) "
                    "FROM unnest(%s::text[], %s::text[]) WITH ORDINALITY AS k(aggregate_type, aggregate_id, n) "
                    "ORDER BY n",
                    (lanes, list(kinds), list(ids)),
                ).fetchall()
            ]

        yield lanes_of


def test_a_transaction_is_seen_when_the_snapshot_says_so(outbox_postgres):
    """By the 32-bit id that the stream gives, as Postgres itself judges the full one."""
    with outbox_postgres.connect(autocommit=True) as look, psycopg.connect(outbox_postgres.url) as open_one:
        ended = look.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()[0]
        running = open_one.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()[0]
        later = look.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()[0]
        snapshot = look.execute("SELECT pg_current_snapshot()::text").fetchone()[0]
        assert [Snapshot(snapshot).sees(xid) for xid in (ended, running, later, later + 5)] == [
            True,
            False,
            True,
            False,
        ]


@pytest.mark.parametrize(
    ("snapshot", "xid", "seen"),
    [
        ("100:100:", 99, True),
        ("100:105:103", 103, False),
        ("100:105:103", 104, True),
        ("100:105:103", 105, False),
        # The epoch has changed: 4294967290 of the epoch before is far below.
        ("4294967300:4294967300:", 4294967290, True),
        ("4294967290:4294967300:4294967295", 4294967295, False),
        ("4294967290:4294967300:4294967295", 3, True),
        ("4294967290:4294967300:4294967297", 1, False),
        ("4294967290:4294967300:4294967295", 4, False),
    ],
)
def test_32_bits_are_enough(snapshot, xid, seen):
    assert Snapshot(snapshot).sees(xid) is seen


def test_a_missing_slot_is_not_taken_for_a_missing_publication(outbox_postgres):
    """Whatever it is called, and whatever language the server speaks."""
    with (
        closing(Replication(outbox_postgres.url, "test")) as replication,
        pytest.raises(SchemaError, match="see `outbox cdc status`"),
    ):
        replication.start("publication", "publication")


def read_on(replication: Replication) -> NoReturn:
    while True:
        # First: it may have come with the answer to the start.
        replication.read(10)
        assert replication.wait(60)


def test_a_missing_publication_is_called_one(monkeypatch):
    """Postgres 18 only warns of it."""
    if os.environ.get("OUTBOX_DATABASE_URL"):
        pytest.skip("OUTBOX_DATABASE_URL is set: that server is the one to test")
    monkeypatch.setenv("OUTBOX_PG_BIN", str(postgres_16()))
    with PostgresServer(settings={"fsync": "off"}) as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("SELECT pg_create_logical_replication_slot('slot', 'pgoutput')")
            connection.execute("CREATE TABLE written AS SELECT 1 AS number")
        with closing(Replication(server.url(), "test")) as replication:
            replication.start("slot", "missing")
            with pytest.raises(SchemaError, match="makes a new one"):
                read_on(replication)


def test_a_role_that_may_replicate_as_a_member_lacks_nothing(outbox_postgres):
    """A host's role for that, such as rds_replication: what fails then is something else, and passes."""
    with outbox_postgres.connect(autocommit=True) as admin, login_role(admin, "relay") as role:
        url = f"{outbox_postgres.url}?user={role}"
        with pytest.raises(SchemaError, match="needs REPLICATION"):
            Replication(url, "test")
        with login_role(admin, "rds_replication") as host:
            admin.execute(f"GRANT {host} TO {role}")
            with pytest.raises(DatabaseUnavailable):
                Replication(url, "test")
