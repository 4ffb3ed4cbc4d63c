"""What is taken for a target, while another thread imports a driver."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from outbox import TargetError
from outbox._targets import async_target, sync_target


@pytest.mark.parametrize("take", [sync_target, async_target])
def test_a_module_that_is_being_imported_has_no_classes_yet(monkeypatch, take):
    for name in ("psycopg", "asyncpg", "sqlalchemy", "sqlalchemy.orm", "sqlalchemy.ext.asyncio"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(TargetError, match="not the object given"):
        take(object(), "Outbox", "AsyncOutbox")
