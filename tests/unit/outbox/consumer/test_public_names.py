"""What ``outbox.consumer`` and ``outbox.inbox`` do not bring along."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"alembic", "confluent_kafka", "numpy", "psycopg", "pyarrow", "pydantic", "pyspark", "sqlalchemy", "typer"}


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [
        ("outbox.consumer, outbox.inbox", set()),
        ("outbox.consumer.groups, outbox.consumer.letters, outbox.consumer.retention", {"psycopg"}),
        ("outbox.consumer.kafka_admin, outbox.consumer.stalled", {"confluent_kafka"}),
    ],
)
def test_importing_it_brings_nothing_heavy(modules, allowed):
    """Each Python worker of Spark's imports it: SQLAlchemy alone takes as long as all of the rest."""
    code = f"import sys, {modules}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {name.partition(".")[0] for name in found} & HEAVY <= allowed
