"""What an External refuses when it is declared."""

from __future__ import annotations

from typing import Any

import pytest

from outbox.consumer.errors import JobError
from outbox.external import Done, External

GOOD: dict[str, Any] = {"name": "n", "group": "g", "request": "'{}'", "call": lambda call: Done()}


def test_declarations_that_cannot_work_are_refused():
    External(**GOOD)
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
            External(**GOOD | {name: value})


def test_a_lease_covers_all_that_an_attempt_may_do():
    """With an ``ask`` this is the lookup and the call after it, each with the whole timeout."""
    External(**GOOD, timeout=30.0, lease=31.0)
    with pytest.raises(JobError, match=r"^lease: must be longer than timeout \(30 s\)"):
        External(**GOOD, timeout=30.0, lease=30.0)
    External(**GOOD, timeout=30.0, lease=61.0, ask=lambda call: None)
    for lease in (31.0, 60.0):
        with pytest.raises(JobError, match=r"^lease: must be longer than ask and call together \(60 s\)"):
            External(**GOOD, timeout=30.0, lease=lease, ask=lambda call: None)
