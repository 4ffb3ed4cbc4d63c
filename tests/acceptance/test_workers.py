"""``outbox relay run --workers``: several processes that share the lanes, started and stopped as one.

Signals: test_network.py.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from support import backlog, ends, look_up, owners, wait_until, write

from outbox import Event
from outbox.sandbox._process import patience


@pytest.fixture
def workers(outbox_postgres, outbox_relay):
    """The process that has started two workers, which hold lanes."""
    started = outbox_relay("--workers", "2", relay__instance="shop")
    held = {"shop-0", "shop-1"}
    wait_until(lambda: owners(outbox_postgres.url).keys() == held, what="both workers to hold lanes")
    return started


def test_workers_that_have_hardly_begun_end_without_a_failure(outbox_relay):
    started = outbox_relay("--workers", "2")
    started.wait_for_log("workers started")
    ends(started)


def test_workers_end_with_the_process_that_started_them(outbox_postgres, outbox_kafka, order, workers):
    """However that ends: what starts it again starts as many workers beside them."""
    write(outbox_postgres.url, [Event(order[0], f"k{n % 50}", "T", {"n": n}) for n in range(500)])
    children = psutil.Process(workers.pid).children()
    workers.kill()
    _, alive = psutil.wait_procs(children, timeout=60 * patience())
    assert alive == []
    # In order: what is in flight is settled, and the lanes are let go of.
    assert owners(outbox_postgres.url) == {}
    assert backlog(outbox_postgres.url) == 500 - len(outbox_kafka.consume(order[1]))


def test_a_worker_that_dies_ends_them_all_with_its_status(outbox_postgres, workers):
    first, _ = psutil.Process(workers.pid).children()
    os.kill(first.pid, signal.SIGKILL)
    assert workers.wait(60) == 128 + signal.SIGKILL
    # The other one has released its lanes; those of the killed one run out.
    assert look_up(outbox_postgres.url, "SELECT count(DISTINCT owner) FROM outbox.lanes") == [(1,)]
