"""What many of these tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from secured import SecuredKafka, secured_kafka
from support import order
from wal_support import wal

__all__ = ["order", "wal"]


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """A Kafka that wants TLS, passwords or tokens, and rights; conftest.group has its tests in one process."""
    with secured_kafka(tmp_path_factory.mktemp("tls")) as kafka:
        yield kafka
