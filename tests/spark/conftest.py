"""One Spark session for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bench import Bench


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A real Spark, local[2,4]."""
    from outbox.testing import jars
    from spark_jobs import session

    started = session.start("tests", jars=jars.fetch("spark-kafka"))
    yield started
    started.stop()


@pytest.fixture
def bench(spark, outbox_postgres, outbox_kafka) -> Bench:
    return Bench(spark, outbox_postgres, outbox_kafka)
