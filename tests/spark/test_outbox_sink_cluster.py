"""The format "outbox" on a Spark standalone cluster: executors die before and after their tasks have staged rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sink_stream import SinkStream, stream
from spark_cluster import Cluster

__all__ = ["stream"]

pytestmark = pytest.mark.spark

DRIVER = """
import sys
from pyspark.sql import SparkSession
import sink_jobs

source, checkpoint, url, master = sys.argv[1:]
builder = SparkSession.builder.master(master).config("spark.executor.memory", "512m").config("spark.ui.enabled", False)
spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
spark.addArtifacts(sink_jobs.__file__, pyfile=True)
spark.dataSource.register(sink_jobs.Troubled)
rows = spark.readStream.schema("n long").csv(source).repartition(4)
writing = rows.writeStream.format("troubled").option("job", "sink_jobs:plain").option("databaseUrl", url)
query = writing.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
assert query.awaitTermination(240)
"""


def test_executors_that_die(stream: SinkStream, tmp_path: Path):
    for what in ("before", "after"):
        stream.trouble(f"executor dies {what}")
    stream.add(1000)
    support = Path(__file__).parents[1] / "support"
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(support), str(support.parents[1])]),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with Cluster(tmp_path) as cluster:
        arguments = [str(stream.source), str(stream.checkpoint), stream.url, cluster.url]
        subprocess.run([sys.executable, "-c", DRIVER, *arguments], env=env, timeout=300, check=True)
    assert stream.sink("SELECT * FROM trouble") == []
    assert stream.seen() == list(range(1000))
    assert stream.left() == []
