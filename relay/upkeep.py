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
    """A task besides publishing, which runs every ``seconds``. Failures are logged like those of the control loop.

    Each has its own thread: leases must be renewed while it waits for a lock, and it must alert while everything else
    waits for a standby.
    """

    name: str
    task: Callable[[], None]
    seconds: float

    def start(self, stop: threading.Event, health: WorkerHealth) -> None:
        """Run the task in a thread until ``stop``, whatever happens."""
        threading.Thread(target=self._run, args=(stop, health), name=f"upkeep {self.name}", daemon=True).start()

    def _run(self, stop: threading.Event, health: WorkerHealth) -> None:
        failures = FailureLog("upkeep has to wait", upkeep=self.name)
        while True:
            try:
                self.task()
            except (Unavailable, SchemaError) as error:
                failures.failed(error, health.upkeep_waits(self.name))
            except Exception:
                health.upkeep_waits(self.name)
                log.exception("upkeep failed", upkeep=self.name)
            else:
                failures.over()
                health.upkeep_goes_on(self.name)
            if stop.wait(self.seconds):
                return
