"""What is committed and not visible yet: the stream gives it, and it is not published."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from stream_bench import Outboxed
from support import wait_until


@pytest.fixture(scope="module")
def hanging_server() -> Iterator[Any]:
    from outbox.testing.fixtures import PrivatePostgres

    with PrivatePostgres() as factory:
        yield factory, factory()


def set_standbys(server: Any, value: str) -> None:
    """Every commit waits for a standby of this name, or for none."""
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute(psycopg.sql.SQL("ALTER SYSTEM SET synchronous_standby_names = {}").format(value))
        admin.execute("SELECT pg_reload_conf()")

    def reloaded() -> bool:
        with psycopg.connect(server.url(), autocommit=True) as look:
            return look.execute("SHOW synchronous_standby_names").fetchone() == (value,)

    wait_until(reloaded, what="the setting")


@pytest.mark.parametrize("table", [False, True], ids=["streaming", "table"])
def test_nothing_is_published_that_no_standby_has(hanging_server, table):
    """The commit stands in the WAL, and the stream gives it; until it is visible a failover could undo it."""
    factory, server = hanging_server
    name = f"hanging_{table}".lower()
    database = factory.database(server, name)
    box = Outboxed(database.url, name)
    try:
        box.relay(once=True)
        box.streams()
        if table:
            box.kafka.bad = {"z"}
            box.add("z1")
            box.until(lambda: box.failed() == ["z"], "a failure")
        before = sum(channel.put_count for channel in box.session()._channels.values())
        set_standbys(server, "nobody")
        writer = threading.Thread(target=box.add, args=("a1", "b1"))
        writer.start()
        turning = None
        try:
            box.read(before + 2)
            waits = (
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = current_database()"
            )
            wait_until(lambda: box.rows(waits)[0][0] > 0, what="the commit to hang")
            if table:
                # The commit that makes sure of what the table gave waits for a standby too.
                turning = threading.Thread(target=box.turns, args=(5,))
                turning.start()
                turning.join(1)
            else:
                box.turns(50)
            assert writer.is_alive()
            assert box.kafka.names() == []
            assert box.held_back() == 2
        finally:
            set_standbys(server, "")
            writer.join(20)
            if turning is not None:
                turning.join(20)
        box.published("a1", "b1")
        if not table:
            box.add("a2")
            box.published("a1", "b1", "a2")
            assert box.streaming()
    finally:
        box.close()
        database.close()
