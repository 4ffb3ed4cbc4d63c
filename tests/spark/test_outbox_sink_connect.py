"""The format "outbox" through Spark Connect: the client has no JVM, and all of the sink runs on the server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sink_stream import SinkStream

pytestmark = pytest.mark.spark

JOB = """
from spark_jobs import ConsumerJob

SEEN = "CREATE TABLE IF NOT EXISTS seen (n bigint)"
job = ConsumerJob("numbers", effect="INSERT INTO seen SELECT n FROM batch ORDER BY n", setup=SEEN)
"""
CLIENT = """
import sys
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from spark_jobs import register

source, checkpoint, url, module, server = sys.argv[1:]
spark = SparkSession.builder.remote(server).getOrCreate()
assert not hasattr(spark, "_jsparkSession")
register(spark)
spark.addArtifacts(module, pyfile=True)
rows = spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).csv(source)
writing = rows.writeStream.format("outbox").option("job", "sent_job:job").option("databaseUrl", url)

def run(checkpoint):
    query = writing.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    assert query.awaitTermination(180)

run(checkpoint)
try:
    run(checkpoint + "-other")
except StreamingQueryException as error:
    assert "CheckpointConflict" in str(error), error
else:
    raise AssertionError("another checkpoint was accepted")
"""


@pytest.fixture
def stream(outbox_postgres, tmp_path) -> SinkStream:
    return SinkStream(None, outbox_postgres.url, tmp_path)


def test_a_query_of_spark_connect(stream: SinkStream, connect: str, tmp_path: Path):
    """The client sends the job's module; what ends a query reaches it."""
    module = tmp_path / "sent_job.py"
    module.write_text(JOB)
    stream.add()
    subprocess.run(
        [sys.executable, "-c", CLIENT, str(stream.source), str(stream.checkpoint), stream.url, str(module), connect],
        timeout=400,
        check=True,
    )
    assert stream.seen() == list(range(3))
    assert stream.checkpoints() == [("numbers", 0, 3, 0)]
    assert stream.left() == []
