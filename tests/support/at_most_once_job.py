"""A job at-most-once whose effect calls another system: a file with a line for each message, none of which is undone.

``job`` is for ``outbox consume``: it applies a round at once, in the driver, which kills itself there. Its file is
``called`` in the working directory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from spark_jobs import ConsumerJob, OffsetsOnly, order_totals


def calling(calls: Path, fail: Callable[[int, int], None]) -> Callable[[Any, Any], None]:
    """Return an effect that writes the partition and offset of each message, and then calls ``fail`` with them."""

    def effect(cursor: Any, table: Any) -> None:
        for place in zip(table["message_part"].to_pylist(), table["message_offset"].to_pylist(), strict=True):
            with calls.open("a") as file:
                print(*place, file=file)
            fail(*place)

    return effect


def once_killing(marker: Path) -> Callable[[int, int], None]:
    """The first message of partition 1 at offset 3 or later kills its process."""

    def kill(part: int, offset: int) -> None:
        if part == 1 and offset >= 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def at_most_once(effect: Callable[[Any, Any], None], atomic: Any) -> ConsumerJob:
    most = {"strategy": OffsetsOnly(), "atomic": atomic, "delivery": "at-most-once"}
    return replace(order_totals.job, group="calls", effect=effect, setup=None, **most)


job = at_most_once(calling(Path("called"), once_killing(Path("killed"))), "batch")
