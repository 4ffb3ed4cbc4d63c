"""The Spark session of a consumer: a new one, the active one, or a clone of the user's."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outbox.consumer.errors import JobError
from spark_jobs.spark.errors import HIDDEN

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER: Final = "local[2,4]"
"""Two cores, and four attempts for a task: plain ``local[2]`` allows only one."""

REQUIRED_CONF: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.execution.arrow.useLargeVarTypes": "false",
    "spark.sql.adaptive.enabled": "false",
}
"""Settings that the consumer requires in every session."""

_JAVA_OPTIONS: Final = (
    *("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"),
    *("SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS"),
)
_COLLECTOR: Final = re.compile(r"-XX:\+Use\w+GC\b")


def start(
    name: str,
    *,
    master: str | None = None,
    packages: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start or get the session. ``packages`` are Maven coordinates.

    Under spark-submit the master, packages and Python are those of its command line.
    """
    if submitted():
        master, packages = None, None
    else:
        master = master or DEFAULT_MASTER
        # Workers use this interpreter instead of any python3 on the PATH, and find the user's modules.
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        paths = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        require_not_hidden(paths)
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    settings = {**REQUIRED_CONF, "spark.ui.showConsoleProgress": "false"}
    if master is not None:
        builder = builder.master(master)
        settings |= {
            "spark.ui.enabled": "false",
            # For a transform that shuffles. Each partition is a task with a connection: Spark's default of 200 is too
            # many.
            "spark.sql.shuffle.partitions": "16",
            "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / "outbox-spark-warehouse"),
        }
        if master.startswith("local"):
            settings |= {
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                **_collector(conf or {}),
            }
    if packages:
        settings["spark.jars.packages"] = packages
    for key, value in (settings | dict(conf or {})).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    # Errors are raised and shown once; Spark's logger would show them again as a page of JSON.
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    if not submitted():
        session.sparkContext.setLogLevel("OFF")
    return session


def active() -> SparkSession | None:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:  # noqa: SLF001  public functions would create one
        return None
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def beside(session: SparkSession) -> SparkSession:
    """Return a clone of the session for a consumer, with the settings that it requires.

    Spark does the same for each streaming query. The clone has the session's temporary views and functions. Raises
    JobError for a session of Spark Connect, whose driver is elsewhere.
    """
    from pyspark.sql import SparkSession

    if not hasattr(session, "_jsparkSession"):
        raise JobError("spark: a session of Spark Connect is on another machine; a consumer needs Spark's driver here")
    if str(session.sparkContext.master).startswith("local"):
        # Local workers start in the working directory.
        require_not_hidden([str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    made = SparkSession(session.sparkContext, session._jsparkSession.cloneSession())  # noqa: SLF001
    for name, value in REQUIRED_CONF.items():
        made.conf.set(name, value)
    return made


def require_not_hidden(paths: Iterable[str]) -> None:
    """Raise JobError if a worker that imports from these folders first would find another spark_jobs there."""
    ours = Path(__file__).resolve().parents[1]
    for path in paths:
        for found in (Path(path) / ours.name, Path(path) / f"{ours.name}.py"):
            if found.resolve() == ours:
                return
            if (found / "__init__.py").is_file() or (found.suffix and found.is_file()):
                raise JobError(HIDDEN.format(found=found, ours=ours))


def _collector(conf: Mapping[str, str]) -> dict[str, str]:
    """Choose the garbage collector, unless one is configured: a JVM with two in its options does not start.

    G1, the default, is slow with fetches of several MiB: it took up to 50 % more CPU to read messages.
    """
    given = " ".join([*conf.values(), *(os.environ.get(name, "") for name in _JAVA_OPTIONS)])
    folders = (os.environ.get("SPARK_CONF_DIR"), os.environ.get("SPARK_HOME") and f"{os.environ['SPARK_HOME']}/conf")
    configured = any(folder and (Path(folder) / "spark-defaults.conf").exists() for folder in folders)
    if configured or _COLLECTOR.search(given):
        return {}
    return {"spark.driver.defaultJavaOptions": "-XX:+UseParallelGC"}


def submitted() -> bool:
    """Return whether spark-submit started this process, with Spark's JVM already running."""
    return "PYSPARK_GATEWAY_PORT" in os.environ
