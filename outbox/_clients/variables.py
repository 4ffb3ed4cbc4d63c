"""The names of settings in the environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

PREFIX: Final = "OUTBOX_"


def variable(path: Sequence[str]) -> str:
    """Return a setting's variable: OUTBOX_RELAY__BATCH_SIZE for ``("relay", "batch_size")``."""
    return PREFIX + "__".join(part.upper().replace(".", "_") for part in path)
