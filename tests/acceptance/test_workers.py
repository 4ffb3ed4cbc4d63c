"""``outbox relay run --workers``: several processes that share the lanes, started and stopped as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import psycopg
from support import drained, owners, wait_until, write

from outbox import Event
from outbox.sandbox._process import patience


def _start(database, kafka, *more: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "OUTBOX_DATABASE_URL": database.url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "OUTBOX_RELAY__INSTANCE": "shop",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "relay.cli", "relay", "run", *more], env=environment, stderr=subprocess.DEVNULL
    )


def test_workers_share_the_lanes_and_end_together(outbox_postgres, outbox_kafka):
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 3)
    workers = _start(outbox_postgres, outbox_kafka, "--workers", "2")
    try:
        wait_until(
            lambda: owners(outbox_postgres.url).keys() == {"shop-0", "shop-1"}, what="both workers to hold lanes"
        )
        write(outbox_postgres.url, [Event(kind, f"k{n % 50}", "T", {"n": n}) for n in range(500)])
        drained(outbox_postgres.url)
        workers.send_signal(signal.SIGTERM)
        assert workers.wait(60 * patience()) == 0
    finally:
        workers.kill()
        workers.wait()
    assert len(outbox_kafka.consume(topic, 500)) == 500
    assert owners(outbox_postgres.url) == {}


def test_workers_end_with_the_process_that_started_them(outbox_postgres, outbox_kafka):
    """However that ends: what starts it again starts as many workers beside them."""
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 3)
    workers = _start(outbox_postgres, outbox_kafka, "--workers", "2")
    try:
        wait_until(lambda: len(owners(outbox_postgres.url)) == 2, what="both workers to hold lanes")
        write(outbox_postgres.url, [Event(kind, f"k{n % 50}", "T", {"n": n}) for n in range(500)])
        children = psutil.Process(workers.pid).children()
    finally:
        workers.kill()
        workers.wait()
    _, alive = psutil.wait_procs(children, timeout=60 * patience())
    assert alive == []
    # In order: what is in flight is settled, and the lanes are let go of.
    assert owners(outbox_postgres.url) == {}
    there = len(outbox_kafka.consume(topic))
    with psycopg.connect(outbox_postgres.url) as connection:
        left = connection.execute("SELECT count(*) FROM outbox.events").fetchone()
    assert left == (500 - there,)


def test_a_worker_that_dies_ends_them_all_with_its_status(outbox_postgres, outbox_kafka):
    workers = _start(outbox_postgres, outbox_kafka, "--workers", "2")
    try:
        wait_until(lambda: len(owners(outbox_postgres.url)) == 2, what="both workers to hold lanes")
        with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
            children = [child.pid for child in psutil.Process(workers.pid).children()]
            assert len(children) == 2
            os.kill(children[0], signal.SIGKILL)
            assert workers.wait(60 * patience()) == 128 + signal.SIGKILL
            # The other one has released its lanes; those of the killed one run out.
            held = connection.execute("SELECT count(DISTINCT owner) FROM outbox.lanes").fetchone()
        assert held == (1,)
    finally:
        workers.kill()
        workers.wait()
