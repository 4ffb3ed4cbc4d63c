"""A slot, and what it delivers: what the tests of messages share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from slots import Slot, opened_slot
from writer_targets import opened


@pytest.fixture
def slot(outbox_postgres) -> Iterator[Slot]:
    with opened_slot(outbox_postgres) as slot:
        yield slot


@contextlib.asynccontextmanager
async def messages_to(name: str, database: Any, slot: Slot):
    async with opened(name, database) as target:
        target.options = slot.options
        yield target
