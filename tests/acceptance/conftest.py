"""What many of these tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from secured import SecuredKafka, secured_kafka
from support import order
from wal_support import wal

__all__ = ["order", "wal"]


@contextmanager
def _secured() -> Iterator[SecuredKafka]:
    with tempfile.TemporaryDirectory(prefix="outbox-tls-") as directory, secured_kafka(Path(directory)) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def secured(of_group) -> SecuredKafka:
    """A Kafka that wants TLS, passwords or tokens, and rights; conftest.group has its tests in one process."""
    return of_group.once(_secured)
