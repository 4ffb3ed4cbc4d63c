"""exactly_once in a query that runs for weeks: the days of ids are created ahead and forgotten while it runs."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from pyspark.sql import functions as F  # noqa: N812
from stream_to_sink import stream

from outbox.consumer import retention
from outbox.consumer.retention import IdRetention
from spark_jobs.postgres import group_store

__all__ = ["stream"]

pytestmark = pytest.mark.spark

PER_BATCH = 3
STEP = dt.timedelta(days=4)


@pytest.fixture
def moved_clock(stream, monkeypatch) -> dt.datetime:
    """The database's clock, as a table that the test moves. Returns where it begins: noon of a day, two steps ago."""
    monkeypatch.setattr(retention, "_TODAY", "SELECT at::date FROM public.clock")
    with psycopg.connect(stream.url) as connection:
        [(noon,)] = connection.execute(
            "SELECT (now() AT TIME ZONE 'UTC')::date + time '12:00' - %s", (2 * STEP,)
        ).fetchall()
        connection.execute("CREATE TABLE public.clock AS SELECT %s::timestamp AS at", (noon,))
    assert isinstance(noon, dt.datetime)
    return noon


def with_ids(rows: Any, first: dt.datetime) -> Any:
    """Add ids of the days on which the batches come: two on each."""
    start, step = int(first.replace(tzinfo=dt.UTC).timestamp()), int(STEP.total_seconds())
    digits = F.lpad(F.hex((F.lit(start) + F.floor(F.col("n") / (2 * PER_BATCH)) * step) * 1000), 12, "0")
    number = F.lpad(F.col("n").cast("string"), 12, "0")
    made = F.concat(F.substring(digits, 1, 8), F.lit("-"), F.substring(digits, 9, 4), F.lit("-7000-8000-"), number)
    return rows.withColumn("message_id", F.lower(made))


def test_days_are_created_and_forgotten_within_one_run(stream, moved_clock, monkeypatch):
    function = stream.function(keep_days=2)
    calls: list[dt.datetime] = []
    hours: list[int] = [0]
    monkeypatch.setattr(group_store, "time", SimpleNamespace(monotonic=lambda: 3601.0 * hours[-1]))
    real = function._group.store.retention

    def maintained(keep_days: int) -> IdRetention:
        calls.append(stream.sink("SELECT at FROM public.clock")[0][0])
        return real(keep_days)

    function._group.store.retention = maintained

    def moving(rows: Any, batch_id: int) -> None:
        # Two batches in each hour, and four days between the hours.
        hours.append(batch_id // 2)
        with psycopg.connect(stream.url) as connection:
            now = moved_clock + batch_id // 2 * STEP
            connection.execute("UPDATE public.clock SET at = %s", (now,))
            if batch_id and batch_id % 2 == 0:
                connection.execute("UPDATE consumer.processed_messages SET seen_at = seen_at - %s", (STEP,))
        function(rows, batch_id)

    for _ in range(6):
        stream.add(PER_BATCH)
    stream.run(moving, with_ids(stream.rows(), moved_clock))
    assert stream.seen() == list(range(6 * PER_BATCH))
    assert calls == [moved_clock + number * STEP for number in range(3)]
    last = (moved_clock + 2 * STEP).date()
    days = [f"processed_messages_{last + dt.timedelta(days=ahead):%Y%m%d}" for ahead in range(-2, 4)]
    found = stream.sink(
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^processed_messages_[0-9]{8}$' "
        "AND relname <> 'processed_messages_19700101' ORDER BY 1"
    )
    assert [name for (name,) in found if name >= days[0]] == days
    assert stream.sink("SELECT count(*) FROM consumer.processed_messages_default") == [(0,)]
    # The ids of the first day are forgotten, and the group knows it: what is kept counts from the newest one then.
    query = "SELECT day, count(*) FROM consumer.processed_messages GROUP BY 1 ORDER BY 1"
    assert stream.sink(query) == [(last - STEP, 2 * PER_BATCH), (last, 2 * PER_BATCH)]
    assert stream.sink("SELECT forgotten_before FROM consumer.groups") == [(last - 2 * STEP + dt.timedelta(days=1),)]
