"""What the sandbox's tests share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can pass through, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="outbox-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)
