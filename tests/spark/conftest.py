"""One Spark session for all tests of a group of this folder."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import connector
import pytest
import warm_daemon
from bench import PLAIN_SPARK, Bench, Consumer, Driver

from outbox.sandbox._ports import free_ports
from outbox.sandbox.errors import ServiceError
from spark_jobs.driver.runner import Runner

CONNECT_PORT = "spark.connect.grpc.binding.port"


@pytest.fixture(autouse=True)
def _plain_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of these tests have the session's settings too. Those of tests/acceptance have Spark's own,
    but for test_demo.py's."""
    monkeypatch.setenv("JDK_JAVA_OPTIONS", PLAIN_SPARK, prepend=" ")


@pytest.fixture
def spark(of_group) -> Any:
    """A real Spark, local[2,4], whose Python workers have their imports from warm_daemon. Its group has one.

    A shuffle has two partitions, one for each core: all 16 that the consumer sets would be a task and a worker each.
    """
    return of_group.once(_session)


@contextlib.contextmanager
def _session() -> Iterator[Any]:
    from pyspark import SparkContext

    from spark_jobs.spark import session

    # Spark looks for the daemon where the workers look for modules, and that it has from the environment.
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", str(Path(connector.__file__).parent), prepend=os.pathsep)
        changed.setenv(warm_daemon.SOCKET, stack.enter_context(warm_daemon.serving()))
        changed.setenv("JDK_JAVA_OPTIONS", PLAIN_SPARK, prepend=" ")
        jars = ",".join(map(str, [*connector.fetch(), *_lake("delta"), *_lake("iceberg")]))
        conf = {"spark.jars": jars, "spark.python.daemon.module": "warm_daemon", "spark.sql.shuffle.partitions": "2"}
        # Nothing listens there before `connect`.
        conf |= {"spark.connect.grpc.binding.address": "127.0.0.1", CONNECT_PORT: str(free_ports(1)[0])}
        started = session.start("tests", conf=conf)
        warm = stack.pop_all()
    yield started
    # Its JVM too, which would be there as long as this process: pyspark keeps it for the next session.
    gateway = SparkContext._gateway
    started.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(60)
    warm.close()
    SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture
def connect(spark) -> str:
    """The address of a server of Spark Connect in the JVM of the other tests."""
    spark._jvm.org.apache.spark.sql.connect.service.SparkConnectService.start(spark.sparkContext._jsc.sc())
    return f"sc://127.0.0.1:{spark.conf.get(CONNECT_PORT)}"


def _lake(product: str) -> list[Path]:
    """Return the jars of Delta or Iceberg, or none where they can't be had: only the recipe's tests need them."""
    try:
        return connector.fetch(product)
    except ServiceError as error:
        print(f"no {product}: {error}", file=sys.stderr)
        return []


BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"


@pytest.fixture
def small_batches(spark, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Spark hand over 1,000 rows at once, and not 10,000. Tasks that read Kafka themselves go on as they do."""
    from spark_jobs.spark import session

    monkeypatch.setitem(session.REQUIRED_CONF, BATCH, "1000")  # type: ignore[arg-type]
    before = spark.conf.get(BATCH)
    spark.conf.set(BATCH, "1000")
    yield
    spark.conf.set(BATCH, before)


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
