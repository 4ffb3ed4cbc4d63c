"""The format "outbox" through Spark Connect: the client has no JVM, and all of the sink runs on the server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sink_stream import SinkStream, stream

__all__ = ["stream"]

pytestmark = pytest.mark.spark

CLIENT = """
import sys
from pyspark.sql import SparkSession
from spark_jobs import register

source, checkpoint, url = sys.argv[1:]
spark = SparkSession.builder.remote("local[2,4]").getOrCreate()
assert not hasattr(spark, "_jsparkSession")
register(spark)
rows = spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).csv(source)
writing = rows.writeStream.format("outbox").option("job", "sink_jobs:plain").option("databaseUrl", url)
query = writing.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
assert query.awaitTermination(180)
"""


def test_a_query_of_spark_connect(stream: SinkStream):
    support = Path(__file__).parents[1] / "support"
    paths = [str(support), str(support.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    for _ in range(2):
        stream.add()
    subprocess.run(
        [sys.executable, "-c", CLIENT, str(stream.source), str(stream.checkpoint), stream.url],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYSPARK_PYTHON": sys.executable},
        timeout=300,
        check=True,
    )
    assert stream.seen() == list(range(6))
    assert stream.checkpoints() == [("numbers", 1, 6, 0)]
    assert stream.left() == []
