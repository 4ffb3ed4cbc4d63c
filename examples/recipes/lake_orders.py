"""Orders into tables of Delta or Iceberg, by a Spark stream: each message once in each table, whatever is killed.

Spark repeats a batch that it does not know to have ended. A table keeps the number of a query's last batch, in the
commit of its rows, and a batch that it has is skipped. With a new checkpoint the query is another one, and begins with
the topic's first messages: empty the tables then.

Delta compares the numbers in its commit. With Iceberg they are compared before it, as by Iceberg's own sink: end a
driver before you start another one, and keep the query's last snapshot when you expire snapshots.

An event that a relay publishes twice is two messages: let it deliver exactly-once, or MERGE by event_id.

    spark-submit --packages io.delta:delta-spark_2.13:4.4.0,org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0 \
      --conf spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension \
      --conf spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog lake_orders.py delta

With Spark 4.1 only, as there is no Iceberg for 4.2:

    iceberg=org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0
    spark-submit --packages $iceberg,org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.3 \
      --conf spark.sql.catalog.lake=org.apache.iceberg.spark.SparkCatalog --conf spark.sql.catalog.lake.type=hadoop \
      --conf spark.sql.catalog.lake.warehouse=$TABLES lake_orders.py iceberg
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

SCHEMA = "order_id string, amount_cents long, status string"


def orders(spark: SparkSession, servers: str, topic: str) -> DataFrame:
    """Return the topic's orders as a stream."""
    source = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
    # By default Spark reads aborted transactions, too.
    source |= {"kafka.isolation.level": "read_committed", "includeHeaders": "true"}
    event_id = F.expr("CAST(filter(headers, h -> h.key = 'ce_id')[0].value AS STRING)").alias("event_id")
    order = F.from_json(F.col("value").cast("string"), SCHEMA, {"mode": "FAILFAST"}).alias("order")
    messages = spark.readStream.format("kafka").options(**source).load()
    return messages.where("value IS NOT NULL").select(event_id, order).select("event_id", "order.*")


def tables(batch: DataFrame) -> Iterator[tuple[str, DataFrame]]:
    """Return the names of the tables, each with its rows of a batch."""
    yield "orders", batch
    yield "cancelled", batch.where("status = 'cancelled'")


def query_of(batch: DataFrame) -> str:
    """Return the id of a batch's query: that of its checkpoint."""
    query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    assert query is not None, "it is no batch of a stream"
    return query


def append_to_delta(batch: DataFrame, number: int) -> None:
    """Add a batch to the tables, except to those that have it."""
    for name, rows in tables(batch):
        once = {"txnAppId": query_of(batch), "txnVersion": str(number)}
        rows.write.format("delta").mode("append").options(**once).save(f"{os.environ['TABLES']}/{name}")


def create_iceberg_tables(spark: SparkSession) -> None:
    """Create the tables, unless they are there."""
    for name in ("orders", "cancelled"):
        spark.sql(f"CREATE TABLE IF NOT EXISTS lake.shop.{name} (event_id string, {SCHEMA}) USING iceberg")


def last_batch(spark: SparkSession, table: str, query: str) -> int:
    """Return the number of a query's last batch in an Iceberg table, -1 if it has none."""
    spark.catalog.refreshTable(table)
    found = f"""
        SELECT max(CAST(summary['outbox-batch'] AS bigint))
          FROM {table}.snapshots JOIN {table}.history USING (snapshot_id)
         WHERE is_current_ancestor AND summary['outbox-query'] = :query"""
    [(number,)] = spark.sql(found, {"query": query}).collect()
    return -1 if number is None else number


def append_to_iceberg(batch: DataFrame, number: int) -> None:
    """Add a batch to the tables, except to those that have it."""
    query = query_of(batch)
    for name, rows in tables(batch):
        table = f"lake.shop.{name}"
        if last_batch(batch.sparkSession, table, query) < number:
            once = {"snapshot-property.outbox-query": query, "snapshot-property.outbox-batch": str(number)}
            rows.writeTo(table).options(**once).append()


if __name__ == "__main__":
    session = SparkSession.builder.appName("lake-orders").getOrCreate()
    append = append_to_delta
    if sys.argv[1] == "iceberg":
        create_iceberg_tables(session)
        append = append_to_iceberg
    stream = orders(session, os.environ["KAFKA_SERVERS"], "order-events").writeStream.foreachBatch(append)
    stream.option("checkpointLocation", f"{os.environ['TABLES']}/checkpoint").start().awaitTermination()
