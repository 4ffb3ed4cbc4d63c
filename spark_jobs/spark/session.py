"""The Spark session of a consumer: started, found, or a clone beside the user's."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spark_jobs.errors import JobError
from spark_jobs.spark.errors import HIDDEN

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER: Final = "local[2,4]"
"""Two cores, and four tries for a task: plain ``local[2]`` gives a task no second try."""

REQUIRED_CONF: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.execution.arrow.useLargeVarTypes": "false",
    "spark.sql.adaptive.enabled": "false",
}
"""What the consumer counts on in every Spark, wherever it runs."""

_JAVA_OPTIONS: Final = (
    *("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"),
    *("SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS"),
)
_COLLECTOR: Final = re.compile(r"-XX:\+Use\w+GC\b")


def start(
    name: str,
    *,
    master: str | None = None,
    jars: Iterable[Path] = (),
    packages: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start or get the session. ``packages`` are Maven coordinates, instead of ``jars``.

    Under spark-submit its own options count: master, jars, packages and Python are left as they were given there.
    """
    if submitted():
        master, jars, packages = None, (), None
    else:
        master = master or DEFAULT_MASTER
        # Workers start with this interpreter, not with any python3 of the path; and they find the user's modules.
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
            # Of a transform that shuffles. Spark's own 200 is for more than a round; each is a task and a connection.
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
    elif jar_list := ",".join(str(jar) for jar in jars):
        settings["spark.jars"] = jar_list
    for key, value in (settings | dict(conf or {})).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    # What goes wrong is raised, and shown once: not also as a page of JSON by Spark's own logger.
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    if not submitted():
        session.sparkContext.setLogLevel("OFF")
    return session


def active() -> SparkSession | None:
    """Return the session that this process has, if it has one. Raises JobError for one of Spark Connect."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:  # noqa: SLF001  there is no other way to ask without making one
        return None
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def beside(session: SparkSession) -> SparkSession:
    """Return a session of the same Spark for a consumer's own use: a clone, with the settings that it counts on.

    Spark does the same for each streaming query. The clone has the session's temporary views and functions. Raises
    JobError for a session of Spark Connect, which has no driver here.
    """
    from pyspark.sql import SparkSession

    if not hasattr(session, "_jsparkSession"):
        raise JobError("spark: a session of Spark Connect is on another machine; a consumer needs Spark's driver here")
    if str(session.sparkContext.master).startswith("local"):
        # There workers begin in this folder.
        require_not_hidden([str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    made = SparkSession(session.sparkContext, session._jsparkSession.cloneSession())  # noqa: SLF001
    for name, value in REQUIRED_CONF.items():
        made.conf.set(name, value)
    return made


def require_not_hidden(paths: Iterable[str]) -> None:
    """Raise JobError where a worker that looks for modules in these folders first would find another spark_jobs."""
    ours = Path(__file__).resolve().parents[1]
    for path in paths:
        for found in (Path(path) / ours.name, Path(path) / f"{ours.name}.py"):
            if found.resolve() == ours:
                return
            if (found / "__init__.py").is_file() or (found.suffix and found.is_file()):
                raise JobError(HIDDEN.format(found=found, ours=ours))


def _collector(conf: Mapping[str, str]) -> dict[str, str]:
    """Choose the garbage collector, where nobody else has: two of them in its options, and a JVM does not start.

    Fetches of MiBs are what G1 is slow with: it took up to half as much CPU again for reading a message.
    """
    given = " ".join([*conf.values(), *(os.environ.get(name, "") for name in _JAVA_OPTIONS)])
    folders = (os.environ.get("SPARK_CONF_DIR"), os.environ.get("SPARK_HOME") and f"{os.environ['SPARK_HOME']}/conf")
    configured = any(folder and (Path(folder) / "spark-defaults.conf").exists() for folder in folders)
    if configured or _COLLECTOR.search(given):
        return {}
    return {"spark.driver.defaultJavaOptions": "-XX:+UseParallelGC"}


def submitted() -> bool:
    """Return whether spark-submit started this process: then Spark's JVM is there already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ
