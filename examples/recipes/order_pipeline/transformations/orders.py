"""Orders from Kafka into a sink of the format "outbox": a flow of a declarative pipeline of Spark.

Run it in a shell, with your folder as ``storage`` in spark-pipeline.yml. The packages are for the server that
spark-pipelines starts, to which its own option does not pass them:

    pip install 'outbox-kafka[spark]' 'pyspark[pipelines]'
    export OUTBOX_DATABASE_URL=postgresql://localhost/shop KAFKA_SERVERS=localhost:9092
    outbox db upgrade --consumer
    cd order_pipeline
    export PYSPARK_SUBMIT_ARGS='--packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0 pyspark-shell'
    spark-pipelines run
"""

from __future__ import annotations

import os

from pyspark.pipelines import append_flow, create_sink
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_jobs import register

spark = SparkSession.active()
register(spark)
spark.addArtifacts("customer_totals.py", pyfile=True)  # or install it where Spark's driver runs
create_sink("customer_totals", "outbox", {"job": "customer_totals:job", "fromBeginning": "true"})


@append_flow(target="customer_totals")
def orders() -> DataFrame:
    """Return the topic's orders. By ``message_id`` those are known that a full refresh reads again."""
    source = {
        "kafka.bootstrap.servers": os.environ["KAFKA_SERVERS"],
        "subscribe": os.environ.get("ORDER_TOPIC", "order-events"),
        "startingOffsets": "earliest",
        "kafka.isolation.level": "read_committed",
        "includeHeaders": "true",
    }
    messages = spark.readStream.format("kafka").options(**source).load().where("value IS NOT NULL")
    message_id = F.expr("CAST(filter(headers, h -> h.key = 'ce_id')[0].value AS STRING)").alias("message_id")
    order = F.from_json(F.col("value").cast("string"), "customer string, amount_cents long", {"mode": "FAILFAST"})
    return messages.select(message_id, order.alias("order")).select("message_id", "order.*")
