"""Runs the relay's tasks besides publishing, each in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from outbox.errors import SchemaError
from relay.core.health import WorkerHealth
from relay.core.ports import Unavailable
from relay.core.reports import FailureLog

log = structlog.get_logger("relay")


@dataclass(frozen=True, slots=True)
class MaintenanceTask:
    """A task besides publishing, which runs every ``seconds``.

    Each has its own thread: leases must be renewed while it waits for a lock, and it must alert while everything else
    waits for a standby.
    """

    name: str
    task: Callable[[], None]
    seconds: float


class UpkeepThread(threading.Thread):
    """Runs a task until ``stop``, whatever happens. Failures are logged like those of the control loop."""

    def __init__(self, upkeep: MaintenanceTask, stop: threading.Event, health: WorkerHealth) -> None:
        super().__init__(name=f"upkeep {upkeep.name}", daemon=True)
        self._upkeep = upkeep
        self._stop_now = stop
        self._health = health
        self._failures = FailureLog("upkeep has to wait", upkeep=upkeep.name)

    def run(self) -> None:
        while True:
            try:
                self._upkeep.task()
            except (Unavailable, SchemaError) as error:
                self._failures.failed(error, self._health.upkeep_waits(self._upkeep.name))
            except Exception:
                self._health.upkeep_waits(self._upkeep.name)
                log.exception("upkeep failed", upkeep=self._upkeep.name)
            else:
                self._failures.over()
                self._health.upkeep_goes_on(self._upkeep.name)
            if self._stop_now.wait(self._upkeep.seconds):
                return
