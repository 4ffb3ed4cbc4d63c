"""The staging tables of two drivers of one group."""

from __future__ import annotations

import contextlib

import pytest
from consumer_group import ConsumerGroup

from outbox.consumer.errors import Fenced
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.staging import StagingTables


def test_only_the_newest_driver_drops_what_others_have_left(outbox_postgres):
    url = outbox_postgres.url
    with contextlib.ExitStack() as opened:
        older, newer = (StagingTables(PostgresGroupStore(url, "consumer", "g", name)) for name in ("older", "newer"))
        for tables in (older, newer):
            opened.callback(tables.store.close)
        before = older.store.take_over()
        older.create({"n": "integer"}, before, check=True)
        now = newer.store.take_over()
        plan = newer.create({"n": "integer"}, now, check=True)

        def left() -> set[str]:
            tables = "SELECT relname FROM pg_class WHERE relname LIKE 'staged%' AND relkind = 'r'"
            return {name for (name,) in ConsumerGroup(url).run(tables)}

        # The newer driver's tasks are filling its table.
        with pytest.raises(Fenced):
            older.drop_older(before)
        assert len(left()) == 2
        newer.drop_older(now)
        assert left() == {plan.table}
        newer.drop_made()
        assert left() == set()
