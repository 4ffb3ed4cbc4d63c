"""A job on real Spark, Kafka and Postgres: each message applied once, in order, and the offsets with it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.spark


def test_events_become_rows_once_and_in_order(bench):
    for seq in range(1, 6):
        for order in ("a", "b", "c"):
            bench.send(order, seq)
    totals = bench.once()
    assert (totals.read, totals.applied, totals.duplicates) == (15, 15, 0)
    assert bench.totals() == dict.fromkeys(("a", "b", "c"), (50, 5, 5, 0, "s5"))
    assert sum(bench.positions().values()) == 15
    again = bench.once()
    assert (again.read, again.rounds) == (0, 0)
    assert bench.totals() == dict.fromkeys(("a", "b", "c"), (50, 5, 5, 0, "s5"))
    bench.send("a", 6)
    assert bench.once().applied == 1
    assert bench.totals()["a"] == (60, 6, 6, 0, "s6")
