"""A sink whose groups remember ids, for the tests of how long they do."""

from __future__ import annotations

import datetime as dt
from urllib.parse import quote, urlencode

import psycopg
import pytest
from support import stop_clock

from outbox.consumer.retention import IdRetention
from spark_jobs.postgres.group_store import PostgresGroupStore

KEEP = 5


class Sink:
    """A sink with consumers' tables, and ids of chosen days in it. For its connections the day does not end."""

    def __init__(self, url: str) -> None:
        self.today, self.clock = stop_clock(url)
        self.url = f"{url}?{urlencode({'options': self.clock}, quote_via=quote)}"
        self.memory = IdRetention(self.url, "consumer", KEEP)

    def run(self, query, values=()):
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(query, values)
            return cursor.fetchall() if cursor.description else []

    def one(self, query, values=()):
        return self.run(query, values)[0][0]

    def day(self, ago: int) -> dt.date:
        return self.today - dt.timedelta(days=ago)

    def group(self, name: str) -> None:
        PostgresGroupStore(self.url, "consumer", name, "test").take_over()

    def remember(self, group: str, day: dt.date, seen_ago: float, count: int = 1) -> None:
        self.run(
            "INSERT INTO consumer.processed_messages (grp, day, message_id, seen_at) "
            "SELECT %s, %s, gen_random_uuid(), now() - make_interval(secs => %s) FROM generate_series(1, %s)",
            (group, day, seen_ago * 86400, count),
        )

    def partition(self, day: dt.date) -> None:
        self.run(
            f"CREATE TABLE consumer.processed_messages_{day:%Y%m%d} PARTITION OF consumer.processed_messages "
            f"FOR VALUES FROM ('{day}') TO ('{day + dt.timedelta(days=1)}')"
        )

    def partitions(self) -> set[str]:
        query = "SELECT relname FROM pg_class WHERE relnamespace = 'consumer'::regnamespace AND relispartition"
        return {name.removeprefix("processed_messages_") for (name,) in self.run(query + " AND relkind = 'r'")}

    def forgotten(self) -> dict[str, dt.date | None]:
        return dict(self.run("SELECT grp, forgotten_before FROM consumer.groups"))

    def remembered(self) -> dict[tuple[str, dt.date], int]:
        query = "SELECT grp, day, count(*) FROM consumer.processed_messages GROUP BY grp, day"
        return {(grp, day): count for grp, day, count in self.run(query)}


@pytest.fixture
def sink(outbox_postgres) -> Sink:
    return Sink(outbox_postgres.url)
