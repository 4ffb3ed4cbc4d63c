"""The recipes of examples/recipes that are run by Spark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from bench import Bench, ided, order
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from examples.recipes import backfill, lake_orders, regional_sales
from spark_jobs.driver.options import Totals

pytestmark = pytest.mark.spark


def test_a_round_joins_with_reference_data_of_another_database(bench: Bench, monkeypatch):
    bench.run("CREATE SCHEMA crm; CREATE TABLE crm.customers (customer text, region text)")
    reference = psycopg.conninfo.make_conninfo(bench.database.url, options="-c search_path=crm")
    clock = [0.0]
    monkeypatch.setattr(regional_sales, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    regional_sales.customers.cache_clear()
    job = regional_sales.job.with_topics([bench.topic])

    def once() -> dict[str, tuple[int, int]]:
        bench.once(job)
        return {row[0]: row[1:] for row in bench.rows("SELECT region, orders, cents FROM regional_sales")}

    def orders(*customers: str) -> None:
        bench.produce((order("a", 1, customer=one), one, part) for one in customers for part in (0, 1))

    orders("ann", "bob")
    bench.send_raw(None, ided())
    monkeypatch.setenv("REFERENCE_URL", "postgresql://127.0.0.1:1/crm")
    bench.once_waits(job, "127.0.0.1")
    monkeypatch.setenv("REFERENCE_URL", reference)
    # The table is empty: no order is dropped for it.
    assert once() == {"unknown": (4, 40)}
    bench.run("INSERT INTO crm.customers VALUES ('ann', 'north'), ('bob', 'south')")
    orders("ann")
    assert once() == {"unknown": (6, 60)}
    clock[0] = regional_sales.REFRESH_SECONDS
    orders("ann", "bob", "bob", "eve")
    assert once() == {"unknown": (8, 80), "north": (2, 20), "south": (4, 40)}
    # A customer that is there twice does not count twice.
    bench.run("INSERT INTO crm.customers VALUES ('ann', 'south'), ('ann', 'north')")
    clock[0] *= 2
    orders("ann")
    assert once() == {"unknown": (8, 80), "north": (4, 40), "south": (4, 40)}


def test_a_backfill_takes_the_orders_of_a_time_and_moves_no_other_group(bench: Bench):
    begin, end = (int(dt.datetime.fromisoformat(one).timestamp() * 1000) for one in (backfill.FROM, backfill.UNTIL))
    day = 24 * 3600 * 1000
    twice = ided()
    # By partition, in their order: when they were ordered. Published then, except for one of March, published in April,
    # and one of February, replayed in March.
    times = {
        0: [begin - day, begin, begin, begin + day, end, begin + 2 * day],
        1: [begin - 1, begin - day, end - 1, end],
    }
    published = {(0, begin + 2 * day): end + day, (1, begin - day): begin + day}

    def placed(at: int) -> dict[str, object]:
        return order("a", 1, ordered_at=dt.datetime.fromtimestamp(at / 1000, dt.UTC).isoformat())

    # Retention goes by the messages' times.
    bench.topic = bench.topics.create_topic(bench.topics.name("old-orders"), 2, {"retention.ms": "-1"})
    bench.produce(
        (placed(at), "k", part, twice if at == begin else None, published.get((part, at), at))
        for part, of in times.items()
        for at in of
    )
    bench.once(bench.job.with_topics([bench.topic]))

    def figures(totals: Totals) -> tuple[int, int]:
        return totals.applied, totals.duplicates

    positions = "SELECT part, next_offset FROM consumer.offsets WHERE grp = 'order-totals' ORDER BY part"
    before = bench.rows(positions)

    job = backfill.job.with_topics([bench.topic])
    where = ("--topic", bench.topic, "--reason", "backfill")
    bench.command("offsets", "reset", job.group, "--to", backfill.FROM, "--new", "--skip", *where)
    assert figures(bench.once(job, max_records=3)) == (4, 1)
    # Once more, now that there are others behind them; and after it was sent back, as if it had not run.
    bench.produce([(placed(end + day), "k", 0, None, end + day)])
    assert figures(bench.once(job)) == (0, 0)
    bench.command("offsets", "reset", job.group, "--to", backfill.FROM, *where)
    assert figures(bench.once(job)) == (0, 5)
    assert bench.rows("SELECT day::text, orders, cents FROM sales_2026_03 ORDER BY day") == [
        ("2026-03-01", 1, 10),
        ("2026-03-02", 1, 10),
        ("2026-03-03", 1, 10),
        ("2026-03-31", 1, 10),
    ]
    assert bench.rows(positions) == before
    assert bench.rows("SELECT count(*)::int FROM consumer.processed_messages WHERE grp = 'sales-2026-03'") == [(4,)]
    bench.command("offsets", "forget", job.group, *where)


class DeltaTables:
    """The recipe's tables, of which the second can't be written to before ``mend``."""

    append = staticmethod(lake_orders.append_to_delta)

    def __init__(self, session: SparkSession, folder: Path) -> None:
        self._session, self._folder = session, folder
        session.conf.set("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        session.conf.set("spark.databricks.delta.snapshotPartitions", "1")
        (folder / "cancelled").write_text("no table")

    def mend(self) -> None:
        (self._folder / "cancelled").unlink()

    def read(self, name: str) -> DataFrame:
        return self._session.read.format("delta").load(str(self._folder / name))


class IcebergTables:
    """The same, in a catalog of folders."""

    append = staticmethod(lake_orders.append_to_iceberg)

    def __init__(self, session: SparkSession, folder: Path) -> None:
        self._session = session
        session.conf.set("spark.sql.catalog.lake", "org.apache.iceberg.spark.SparkCatalog")
        session.conf.set("spark.sql.catalog.lake.type", "hadoop")
        session.conf.set("spark.sql.catalog.lake.warehouse", str(folder))
        lake_orders.create_iceberg_tables(session)
        session.sql("DROP TABLE lake.shop.cancelled")

    def mend(self) -> None:
        lake_orders.create_iceberg_tables(self._session)

    def read(self, name: str) -> DataFrame:
        self._session.catalog.refreshTable(f"lake.shop.{name}")
        return self._session.table(f"lake.shop.{name}")


@pytest.mark.parametrize("kind", [DeltaTables, IcebergTables])
def test_tables_of_a_lake_have_each_message_once(bench: Bench, tmp_path: Path, monkeypatch, kind: type[Any]):
    """A batch is repeated after it failed between the two tables, and after it was in both."""
    product = kind.__name__.removesuffix("Tables").lower()
    if f"{product}-spark" not in bench.spark.conf.get("spark.jars"):
        pytest.skip(f"the jars of {product} can't be had from this Maven repository, or there are none for this Spark")
    monkeypatch.setenv("TABLES", str(tmp_path))
    session = bench.spark.newSession()
    tables = kind(session, tmp_path)

    def run(then: Callable[[], object] = lambda: None) -> None:
        def append(batch: DataFrame, number: int) -> None:
            tables.append(batch, number)
            then()

        rows = lake_orders.orders(session, bench.topics.bootstrap_servers, bench.topic)
        writing = rows.writeStream.foreachBatch(append).option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert writing.trigger(availableNow=True).start().awaitTermination(240)

    def fail() -> None:
        raise ZeroDivisionError

    def table(name: str) -> list[str]:
        return sorted(row.event_id for row in tables.read(name).collect())

    cancelled = [str(bench.send("a", seq, status="cancelled")) for seq in range(3)]
    others = [str(bench.send("b", seq)) for seq in range(3)]
    bench.send_raw(None, ided())
    aborted = bench.in_transaction()
    bench.send("c", 1, producer=aborted)
    aborted.abort_transaction()
    with pytest.raises(StreamingQueryException, match="cancelled"):
        run()
    assert table("orders") == sorted(cancelled + others)
    tables.mend()
    with pytest.raises(StreamingQueryException, match="ZeroDivisionError"):
        run(fail)
    last = str(bench.send("b", 4))
    run()
    assert table("orders") == sorted([*cancelled, *others, last])
    assert table("cancelled") == sorted(cancelled)
