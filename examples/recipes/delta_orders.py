"""Orders into Delta tables, by a Spark stream: each message once in each table, whatever is killed.

Spark repeats a batch that it does not know to have ended. A table keeps the number of a query's last batch, in the
commit of its rows, and skips a batch that it has. With a new checkpoint the query is another one, and begins with the
topic's first messages: empty the tables then.

An event that a relay publishes twice is two messages: let it deliver exactly-once, or MERGE by event_id.

    spark-submit --packages io.delta:delta-spark_2.13:4.4.0,org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0 \
      --conf spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension \
      --conf spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog delta_orders.py
"""

from __future__ import annotations

import os

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


def append(batch: DataFrame, number: int) -> None:
    """Add a batch to the tables, except to those that have it."""
    query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    for name, rows in (("orders", batch), ("cancelled", batch.where("status = 'cancelled'"))):
        once = {"txnAppId": query, "txnVersion": str(number)}
        rows.write.format("delta").mode("append").options(**once).save(f"{os.environ['TABLES']}/{name}")


if __name__ == "__main__":
    session = SparkSession.builder.appName("delta-orders").getOrCreate()
    stream = orders(session, os.environ["KAFKA_SERVERS"], "order-events").writeStream.foreachBatch(append)
    stream.option("checkpointLocation", f"{os.environ['TABLES']}/checkpoint").start().awaitTermination()
