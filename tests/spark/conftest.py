"""One Spark session for all tests of this folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import connector
import pytest
from bench import Bench, Consumer, Driver

from spark_jobs.driver.runner import Runner

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def _plain_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of these tests have the session's settings too. Those of tests/acceptance have Spark's own."""
    monkeypatch.setenv("SPARK_CONF_DIR", str(SUPPORT / "spark_conf"))


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A real Spark, local[2,4], whose Python workers have their imports from warm_daemon.

    A shuffle has four partitions, two for each core: all 16 that the consumer sets would be a task and a worker each.
    """
    from spark_jobs.spark import session

    # Spark looks for the daemon where the workers look for modules, and that it has from the environment.
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
        changed.setenv("SPARK_CONF_DIR", str(SUPPORT / "spark_conf"))
        jars = ",".join(map(str, [*connector.fetch(), *connector.fetch("delta")]))
        conf = {
            "spark.jars": jars,
            "spark.python.daemon.module": "warm_daemon",
            "spark.sql.shuffle.partitions": "4",
        }
        started = session.start("tests", conf=conf)
    yield started
    started.stop()


@pytest.fixture
def bench(spark, outbox_postgres, outbox_kafka) -> Bench:
    return Bench(spark, outbox_postgres, outbox_kafka)


@pytest.fixture
def consumer(bench, tmp_path) -> Iterator[Consumer]:
    made = Consumer(bench, tmp_path)
    yield made
    made.kill()


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    """Start runners in threads; they are stopped with the test."""
    with contextlib.ExitStack() as stack:

        def start(runner: Runner, **options: bool) -> Driver:
            driver = Driver(runner, **options)
            stack.callback(driver.close)
            return driver

        yield start
