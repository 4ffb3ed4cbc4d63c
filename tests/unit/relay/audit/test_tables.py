"""From which minute on the audit compares the order of keys."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from relay.audit.tables import Tables
from relay.kafka.routing import Router


@pytest.mark.parametrize(("begin", "first"), [(0, 0), (9, 0), (10, 0), (11, 1)])
def test_it_begins_no_earlier_than_times_do(begin: int, first: int) -> None:
    nowhere: Any = None
    tables = Tables(nowhere, "outbox", Router({}), None, range(begin, begin + 60), b"key", order_minutes=10)
    assert tables._of_order["since"] == dt.datetime(1970, 1, 1, 0, first, tzinfo=dt.UTC)
