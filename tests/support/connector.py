"""Spark's own Kafka source: what streams read from in tests, and what the consumer is measured against; Delta; Iceberg.

``python tests/support/connector.py`` writes connector.lock anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyspark

from outbox.sandbox import jars
from release.jars import Roots, resolve
from spark_jobs.spark.installed import SUPPORTED

_DELTA: Final = (
    *("io.delta:delta-storage:4.4.0", "io.delta:delta-kernel-api:4.4.0", "io.delta:delta-kernel-defaults:4.4.0"),
    *("io.delta:delta-kernel-unitycatalog:4.4.0", "io.unitycatalog:unitycatalog-client:0.6.0"),
)
LOCK: Final = Path(__file__).with_name("connector.lock")
ROOTS: Final[Roots] = {
    # What pyspark's own jars lack, so without what these depend on; Kafka's client and the pool as in the connector's
    # POM. It is compiled against Spark's internals, and fits the patch releases of its minor version. Not each of them
    # could be had of everything when this was written.
    "spark-4.1-kafka": (
        False,
        (
            "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.3",
            "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.1.1",
            "org.apache.kafka:kafka-clients:3.9.1",
            "org.apache.commons:commons-pool2:2.12.1",
        ),
    ),
    "spark-4.2-kafka": (
        False,
        (
            "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
            "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.2.0",
            "org.apache.kafka:kafka-clients:3.9.2",
            "org.apache.commons:commons-pool2:2.13.1",
        ),
    ),
    "spark-4.1-delta": (False, ("io.delta:delta-spark_4.1_2.13:4.4.0", *_DELTA)),
    "spark-4.2-delta": (False, ("io.delta:delta-spark_4.2_2.13:4.4.0", *_DELTA)),
    # There is none for Spark 4.2, where this one does not load.
    "spark-4.1-iceberg": (False, ("org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",)),
}
assert list(ROOTS)[:4] == [f"spark-{minor}-{what}" for what in ("kafka", "delta") for minor in SUPPORTED]


def fetch(what: str = "kafka") -> list[Path]:
    """Return the jars for the pyspark that is installed, fetched if need be.

    what   or "delta"; or "iceberg", which is not there for each.
    """
    minor = ".".join(pyspark.__version__.split(".")[:2])
    return jars.fetch(f"spark-{minor}-{what}", lock=LOCK)


if __name__ == "__main__":
    heading = (
        "Spark's Kafka source, for streams and peers, Delta and Iceberg: Maven coordinates, SHA-256, size in bytes.",
        "Written by: python tests/support/connector.py",
    )
    LOCK.write_text(resolve(ROOTS, heading))
