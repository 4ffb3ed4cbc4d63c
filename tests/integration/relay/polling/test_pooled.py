"""A polling source behind a pooler: reading and settling are one transaction, whose commit proves what was read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from one_lane import OneLane
from pgbouncer import PgBouncer
from polling_support import add, fetched, lanes, settle, source, taken
from rows_and_roles import KEEP
from support import wait_until

from relay.core.ports import StandingError, Unavailable
from relay.settle import settlement

__all__ = ["lanes"]

HERE = "FROM pg_stat_activity WHERE application_name = 'test' AND datname = current_database()"


@pytest.fixture
def pooled(outbox_postgres, lanes) -> Iterator[OneLane]:
    with PgBouncer(outbox_postgres.url, size=4) as pooler:
        one = source(pooler, taken(lanes))
        yield one
        one.close()


@pytest.mark.parametrize("unsettled", [False, True], ids=["read", "read behind a turn"])
def test_a_crash_between_reading_and_settling_is_noticed(outbox_postgres, pooled, monkeypatch, unsettled):
    """Rows of writers with ``synchronous_commit = off`` may be gone after it. The client's connection lives on."""
    add(outbox_postgres, "a")
    if unsettled:
        settle(pooled, pooled.fetch(10))
        add(outbox_postgres, "b")
    admin = outbox_postgres.connect(autocommit=True)
    real = pooled.source.settlement.send

    def crash(*lanes, **options):
        admin.execute(f"SELECT pg_terminate_backend(pid) {HERE}")
        wait_until(lambda: admin.execute(f"SELECT count(*) {HERE}").fetchone() == (0,), what="the session to end")
        return real(*lanes, **options)

    monkeypatch.setattr(pooled.source.settlement, "send", crash)
    with pytest.raises(Unavailable):
        pooled.fetch(10)


def test_a_transaction_that_has_settled_nothing_proves_nothing(outbox_postgres, pooled, monkeypatch):
    """The lane's row is locked until it is tried again, which is another transaction, maybe after a crash."""
    add(outbox_postgres, "a")
    with outbox_postgres.connect() as other:
        other.execute("SELECT FROM outbox.lanes FOR UPDATE")

        class Unlocked:
            def __iter__(self) -> Iterator[float]:
                other.rollback()
                yield 0.0

        with monkeypatch.context() as patch:
            patch.setattr(settlement, "LOCKED_SECONDS", Unlocked())
            assert pooled.fetch(10) == []
    assert fetched(pooled.fetch(10)) == ["a"]


def test_no_row_is_locked_while_a_turn_is_published(outbox_postgres, pooled):
    add(outbox_postgres, "a", "b")
    claims = pooled.fetch(10)
    with outbox_postgres.connect() as other:
        assert other.execute(f"SELECT DISTINCT state {HERE}").fetchall() == [("idle",)]
        other.execute("SELECT FROM outbox.lanes FOR UPDATE NOWAIT")
    settle(pooled, claims)
    assert pooled.fetch(10) == []
    assert outbox_postgres.connect().execute("SELECT count(*) FROM outbox.events").fetchone() == (0,)


def test_rows_that_a_trigger_keeps_are_not_settled(outbox_postgres, pooled):
    add(outbox_postgres, "a")
    settle(pooled, pooled.fetch(10))
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute(KEEP("events"))
        for settling in (pooled.flush, lambda: pooled.fetch(10)):
            with pytest.raises(StandingError, match="rows can't be deleted"):
                settling()
        admin.execute("DROP FUNCTION outbox.keep CASCADE")
        assert pooled.fetch(10) == []
        assert admin.execute("SELECT count(*) FROM outbox.events").fetchone() == (0,)
