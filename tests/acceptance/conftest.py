"""What many of these tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from secured import SecuredKafka, secured_kafka
from support import order
from wal_support import wal

from outbox.testing.fixtures import token

__all__ = ["order", "wal"]


@contextmanager
def _secured() -> Iterator[SecuredKafka]:
    with tempfile.TemporaryDirectory(prefix="outbox-tls-") as directory, secured_kafka(Path(directory)) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def secured(of_group) -> SecuredKafka:
    """A Kafka that wants TLS, passwords or tokens, and rights; conftest.group has its tests in one process."""
    return of_group.once(_secured)


@pytest.fixture
def another_outbox(outbox_postgres_server, _outbox_template) -> Iterator[Callable[[], str]]:
    """A function that makes an outbox, in a database of its own, and returns its address."""
    made: list[str] = []

    def make() -> str:
        made.append(f"outbox_test_{token()}")
        return outbox_postgres_server.create_database(made[-1], template=_outbox_template)

    yield make
    for name in made:
        outbox_postgres_server.drop_database(name)
