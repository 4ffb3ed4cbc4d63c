"""What an External refuses when it is declared."""

from __future__ import annotations

from typing import Any

import pytest

from outbox.consumer.errors import JobError
from outbox.external import Done, External


def test_declarations_that_cannot_work_are_refused():
    good: dict[str, Any] = {"name": "n", "group": "g", "request": "'{}'", "call": lambda call: Done()}
    External(**good)
    for name, value in (
        ("name", "a b"),
        ("group", ""),
        ("request", " "),
        ("where", ""),
        ("timeout", 0),
        ("longest_wait", float("inf")),
        ("key_seconds", float("inf")),
        ("key_seconds", 1e12),
        ("workers", 0),
        ("lease", 5.0),
        ("lease", float("inf")),
        ("lease", 1e12),
    ):
        with pytest.raises(JobError, match=name):
            External(**good | {name: value})
