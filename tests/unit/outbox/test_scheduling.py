"""A delay counts by the database's clock: it travels as an interval, and the client's clock is not asked."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import pytest

from outbox import Event, Outbox
from outbox._sending import Step
from outbox._writing import due_values

DELAY = dt.timedelta(days=2, seconds=5, microseconds=7)
INTERVAL = "172805.000007 seconds"
EVENT_ID = uuid.uuid4()


def added(delay: Any, *, unique_keys: bool) -> Step:
    """Return the statement that writes two events."""
    writer = Outbox(unique_keys=unique_keys)._writer
    events = [Event("Order", n, "T", {}, idempotency_key=f"k{n}") for n in range(2)]
    return next(writer.steps(events, [uuid.uuid4(), uuid.uuid4()], {}, delay, lock_key=False))


STEPS = {
    "add": lambda delay: added(delay, unique_keys=False),
    "add with unique keys": lambda delay: added(delay, unique_keys=True),
    "reschedule": lambda _: next(Outbox()._writer.reschedule(EVENT_ID, None, DELAY)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_delay_is_an_interval_that_the_database_adds_to_its_own_time(name):
    step = STEPS[name](due_values(None, DELAY))
    assert (step.values["not_before"], step.values["delay"]) == (None, INTERVAL)
    times = (dt.datetime, dt.date, dt.time, int, float)
    assert [value for value in step.values.values() if isinstance(value, times)] == []
    text = step.statement.psycopg.decode()
    assert "pg_catalog.statement_timestamp() + CAST(CAST(%(delay)s AS text) AS interval)" in text


@pytest.mark.parametrize(
    ("delay", "interval"), [(dt.timedelta(), "0.000000 seconds"), (dt.timedelta(microseconds=1), "0.000001 seconds")]
)
def test_a_short_delay(delay, interval):
    assert due_values(None, delay) == {"not_before": None, "delay": interval}
