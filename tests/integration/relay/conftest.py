"""What all tests of the relay share."""

from __future__ import annotations

import pytest

from relay.operations import topic_scan


@pytest.fixture(autouse=True)
def _short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads topics takes what is there, and does not wait a fifth of a second for more: there is none."""
    monkeypatch.setattr(topic_scan, "_WAIT_SECONDS", 0.02)
