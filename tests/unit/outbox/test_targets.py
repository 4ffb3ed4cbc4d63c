"""What is taken for a target or a payload, while another thread imports a driver or pydantic."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from outbox import TargetError
from outbox._payload import to_json
from outbox._targets import async_target, sync_target


@pytest.mark.parametrize("take", [sync_target, async_target])
def test_a_module_that_is_being_imported_has_no_classes_yet(monkeypatch, take):
    for name in ("pydantic", "psycopg", "asyncpg", "sqlalchemy", "sqlalchemy.orm", "sqlalchemy.ext.asyncio"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(TargetError, match="not the object given"):
        take(object(), "Outbox", "AsyncOutbox")
    assert to_json({"a": [1]}) == b'{"a":[1]}'
