"""The demo's processes: started, killed by SIGKILL, and started again after a moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from outbox.errors import OutboxError
from outbox.sandbox._process import Supervised
from outbox.sandbox.errors import tail

RESTART_SECONDS: Final = 1.0
"""How long a killed process stays away."""


class DemoFailed(OutboxError):
    """A process of the demo failed, or the demo made no progress."""


class Child:
    """One process of the demo, which logs to a file. It ends when the demo does, even by kill -9.

    ready   the text in its log once it is ready for work.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], folder: Path, ready: str = ""
    ) -> None:
        self.name = name
        self._command = command
        self._env = env
        self.log = folder / f"{name}.log"
        self._ready_text = ready
        self._process: Supervised | None = None
        self._ready = False
        self._log_start = 0
        self._restart_at: float | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    @property
    def ready(self) -> bool:
        """Return whether it runs now, and is ready for work."""
        if self.running and not self._ready:
            with self.log.open("rb") as file:
                file.seek(self._log_start)
                self._ready = self._ready_text in file.read().decode(errors="replace")
        return self.running and self._ready

    def start(self) -> None:
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._ready, self._restart_at = False, None
        self._process = Supervised(self._command, log=self.log, env={**os.environ, **self._env})

    def crash(self) -> None:
        """Kill it by SIGKILL; ``restart_if_due`` starts it again."""
        self._kill()
        self._restart_at = time.monotonic() + RESTART_SECONDS

    def restart_if_due(self) -> str | None:
        """Start it again if it is time to. Returns a line of text if it was started.

        Raises DemoFailed with the end of its log if it ended with an error.
        """
        if self._restart_at is not None:
            if time.monotonic() < self._restart_at:
                return None
            self.start()
            return f"starting {self.name} again"
        if self._process is None or self._process.running:
            return None
        self._process.wait(5)
        if self._process.exit_code:
            raise DemoFailed(f"{self.name} ended with status {self._process.exit_code}:\n{tail(self.log, 25)}")
        return None

    def stop(self) -> None:
        if self._process is not None:
            self._process.signal(signal.SIGTERM)

    def finish(self, seconds: float) -> None:
        """Send it SIGTERM, and kill it after ``seconds``. It is not started again."""
        self._restart_at = None
        if self._process is not None and self._process.running:
            self.stop()
            if not self._process.wait(seconds):
                self._kill()

    def _kill(self) -> None:
        assert self._process is not None
        self._process.signal(signal.SIGKILL)
        self._process.wait(30)
