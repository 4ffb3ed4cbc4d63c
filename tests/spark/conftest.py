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


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A real Spark, local[2,4], whose Python workers have their imports from warm_daemon.

    A shuffle has four partitions, two for each core: all 16 that the consumer sets would be a task and a worker each.
    Spark makes no Java of its plans: each test has plans of its own, and to compile them takes a fifth of this JVM's
    time. It does in the processes of test_cluster.py and test_streaming_state.py, and in those of tests/acceptance.
    """
    from spark_jobs.spark import session

    # Spark looks for the daemon where the workers look for modules, and that it has from the environment.
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)
        jars = ",".join(map(str, [*connector.fetch(), *connector.fetch("delta")]))
        conf = {
            "spark.jars": jars,
            "spark.python.daemon.module": "warm_daemon",
            "spark.sql.shuffle.partitions": "4",
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
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
