"""Archives of the classes that Spark, Kafka and TLC load: with one, a JVM starts in half the processor time (JEP 350).

The tests start more than a hundred. `make test` runs this first; what there is already it leaves alone. A JVM passes by
an archive that is not for it: another Java, other jars.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

from outbox.sandbox import _broker, jars
from outbox.sandbox._dirs import blocking_directory, hand_over, make_directory, shared_dir, unprivileged_user
from outbox.sandbox.java import java
from outbox.sandbox.kafka import KafkaCluster
from outbox.sandbox.versions import DEFAULT, jars_of

QUIET: Final = ("-Xlog:disable", "-Xlog:all=error:stderr")
"""A JVM says nothing about an archive that is not for it: a test of each says whether it is used."""

_SPARK: Final = """
import sys
from pyspark.sql import SparkSession
session = (
    SparkSession.builder.master("local[2]")
    .config("spark.driver.extraJavaOptions", "-XX:ArchiveClassesAtExit=" + sys.argv[1])
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false")
    .config("spark.sql.warehouse.dir", sys.argv[2])
    .getOrCreate()
)
rows = session.range(0, 1000, 1, 2).selectExpr("id", "to_json(struct(id)) AS text", "id % 7 AS k")
rows.createOrReplaceTempView("events")
read = session.sql("SELECT k, max(from_json(text, 'id long').id) AS most FROM events WHERE id > 3 GROUP BY k")
read.mapInArrow(lambda batches: batches, read.schema).collect()
for compiled in ("true", "false"):
    session.conf.set("spark.sql.codegen.wholeStage", compiled)
    session.conf.set("spark.sql.codegen.factoryMode", "FALLBACK" if compiled == "true" else "NO_CODEGEN")
    lines = session.readStream.text(sys.argv[2] + "/read").groupBy("value").count().writeStream.outputMode("complete")
    lines = lines.option("checkpointLocation", f"{sys.argv[2]}/{compiled}").trigger(availableNow=True)
    lines.foreachBatch(lambda frame, batch: frame.collect()).start().awaitTermination()
session.stop()
"""


_KAFKA: Final = jars_of(os.environ.get("OUTBOX_KAFKA_VERSION") or DEFAULT)


def _directory() -> Path:
    """Return where archives are kept: brokers run as another account than root, and it must be able to read them."""
    ours, user = Path(sys.prefix, "classes"), unprivileged_user()
    return ours if user is None or blocking_directory(ours, user) is None else shared_dir(user) / "classes"


_OURS: Final = Path(sys.prefix, "classes")
ARCHIVES: Final = {
    "spark": _OURS / "spark.jsa",
    "kafka": _directory() / f"{_KAFKA}.jsa",
    "tlc": _OURS / "tlc.jsa",
}


def make() -> None:
    """Make each, unless the one that is there is of this Java and these jars."""
    import tlc  # which asks for its archive here

    runtime = subprocess.run([java(), "-version"], capture_output=True, text=True, check=True).stderr
    found, user = jars.fetch(_KAFKA), unprivileged_user()
    found = found if user is None else jars.readable(found, user)
    made_of = {
        "spark": f"{runtime}\n{version('pyspark')}\n{_SPARK}",
        "kafka": "\n".join([runtime, *map(str, found)]),
        "tlc": f"{runtime}\n{tlc.class_path()}",
    }
    for name, archive in ARCHIVES.items():
        make_directory(archive.parent, user)
        record = archive.with_suffix(".made-of")
        if record.exists() and record.read_text() == made_of[name]:
            continue
        with tempfile.TemporaryDirectory(prefix="outbox-classes-") as directory:
            hand_over(Path(directory), user)  # the brokers' account writes it
            new = Path(directory, archive.name)
            try:
                _MAKERS[name](new, directory)
            except subprocess.CalledProcessError as error:
                # The tests need none; they take longer.
                print(f"no archive of {name}'s classes: {error}\n{error.stderr.decode()}", file=sys.stderr)
            else:
                # In one step: a test run that goes on beside finds all of it or nothing.
                half = archive.with_suffix(f".{os.getpid()}")
                half.write_bytes(new.read_bytes())
                half.rename(archive)
        record.write_text(made_of[name])


def _of_spark(archive: Path, directory: str) -> None:
    Path(directory, "read").mkdir()
    Path(directory, "read", "lines").write_text("1\n2\n")
    # Until the JVM has closed its output too: it writes the archive when it ends.
    subprocess.run(
        [sys.executable, "-c", _SPARK, archive, directory],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )


def _of_kafka(archive: Path, directory: str) -> None:
    options = _broker._JVM
    _broker._JVM = (*options, f"-XX:ArchiveClassesAtExit={archive}")
    try:
        with KafkaCluster(Path(directory, "kafka")) as cluster:
            cluster.stop()
    finally:
        _broker._JVM = options


def _of_tlc(archive: Path, _: str) -> None:
    import tlc

    tlc.ARCHIVE = (f"-XX:ArchiveClassesAtExit={archive}",)
    tlc.check("at_least_once_live", Faults="0")


_MAKERS: Final = {"spark": _of_spark, "kafka": _of_kafka, "tlc": _of_tlc}

if __name__ == "__main__":
    make()
