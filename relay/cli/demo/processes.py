"""The demo's processes: started, killed by SIGKILL, and started again after a moment.

The demo's loop calls ``tend`` all the time; ``crash`` may come from any thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from outbox.errors import OutboxError
from outbox.sandbox._process import Supervised

RESTART_SECONDS: Final = 1.0
"""How long a killed process stays away."""

State = Literal["not started", "starting", "running", "killed", "ended"]


class DemoFailed(OutboxError):
    """A process of the demo failed, or the demo made no progress."""


class Child:
    """One process of the demo, which logs to a file. It ends when the demo does, even by kill -9.

    ready   what its log says once it is ready for work; None: as soon as it runs.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], folder: Path, ready: str | None = None
    ) -> None:
        self.name = name
        self._command = command
        self._env = env
        self._log = folder / f"{name}.log"
        self._ready_text = ready
        self._process: Supervised | None = None
        self._ready = False
        self._read_to = 0
        self._killed = False
        self._restart_at: float | None = None
        self._lock = threading.RLock()
        self.kills = 0

    @property
    def running(self) -> bool:
        """Return whether it runs now."""
        with self._lock:
            return self._process is not None and self._process.running

    @property
    def state(self) -> State:
        """Return what it does now."""
        with self._lock:
            if self._process is None:
                return "not started"
            if not self._process.running:
                return "killed" if self._restart_at is not None else "ended"
            return "running" if self._is_ready() else "starting"

    def start(self) -> None:
        """Start it, or start it again."""
        with self._lock:
            self._read_to = self._log.stat().st_size if self._log.exists() else 0
            self._ready, self._killed, self._restart_at = False, False, None
            self._process = Supervised(self._command, log=self._log, env={**os.environ, **self._env})

    def crash(self) -> bool:
        """Kill it by SIGKILL; ``tend`` starts it again. Returns False if it does not run."""
        with self._lock:
            if not self.running:
                return False
            self._kill()
            self.kills += 1
            self._restart_at = time.monotonic() + RESTART_SECONDS
            return True

    def tend(self, *, forgive: bool = False) -> str | None:
        """Start it again if it is time to. Returns a line of text if it did something.

        Raises DemoFailed with the end of its log if it ended with an error, unless ``forgive``: then it is started
        again, like after a kill.
        """
        with self._lock:
            if self._restart_at is not None:
                if time.monotonic() < self._restart_at:
                    return None
                self.start()
                return f"{self.name} starts again"
            if self._process is None or self._killed or self._process.running:
                return None
            self._process.wait(5)
            status = self._process.exit_code
            if not status:
                return None
            if not forgive:
                raise DemoFailed(f"{self.name} ended with status {status}:\n{self.tail()}")
            self._restart_at = time.monotonic() + RESTART_SECONDS
            return f"{self.name} ended with status {status}"

    def stop(self) -> None:
        """Send it SIGTERM."""
        with self._lock:
            if self._process is not None:
                self._process.signal(signal.SIGTERM)

    def finish(self, seconds: float) -> None:
        """Send it SIGTERM, and kill it after ``seconds``. It is not started again."""
        with self._lock:
            self._restart_at = None
            if not self.running:
                return
            self.stop()
            assert self._process is not None
            if not self._process.wait(seconds):
                self._kill()

    def tail(self, lines: int = 25) -> str:
        """Return the end of its log."""
        if not self._log.exists():
            return ""
        return "\n".join(line[:300] for line in self._log.read_text(errors="replace").splitlines()[-lines:])

    def _kill(self) -> None:
        assert self._process is not None
        self._process.signal(signal.SIGKILL)
        self._process.wait(30)
        self._killed = True

    def _is_ready(self) -> bool:
        if not self._ready:
            self._ready = self._ready_text is None or self._ready_text in self._said()
        return self._ready

    def _said(self) -> str:
        """Return what it has logged since it was started."""
        with self._log.open("rb") as file:
            file.seek(self._read_to)
            return file.read().decode(errors="replace")
