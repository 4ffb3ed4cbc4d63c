"""What is committed and not visible yet: the stream gives it, and it is not published."""

from __future__ import annotations

import threading

from standby import set_parameter
from stream_bench import Outboxed
from support import wait_until


def test_nothing_is_published_from_the_table_that_no_standby_has(private_postgres):
    """Until a commit is visible a failover could undo it. For a lane that streams, test_wal_failover.py has it."""
    server = private_postgres()
    database = private_postgres.database(server)
    box = Outboxed(database.url, "hanging")
    try:
        box.relay(once=True)
        box.streams()
        box.kafka.bad = {"z"}
        box.add("z1")
        box.until(lambda: box.failed() == ["z"], "a failure")
        before = box.given()
        set_parameter(server.url(), "synchronous_standby_names", "nobody")
        writer = threading.Thread(target=box.add, args=("a1", "b1"))
        writer.start()
        # The commit that makes sure of what the table gave waits for a standby too.
        turning = threading.Thread(target=box.turns, args=(5,))
        try:
            box.read(before + 2)
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            wait_until(lambda: box.rows(waits)[0][0] > 0, what="the commit to hang")
            turning.start()
            turning.join(1)
            assert writer.is_alive()
            assert box.kafka.names() == []
            assert box.held_back() == 2
        finally:
            set_parameter(server.url(), "synchronous_standby_names", "")
            writer.join(20)
            if turning.ident is not None:
                turning.join(20)
        box.published("a1", "b1")
    finally:
        box.close()
