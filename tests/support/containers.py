"""Containers as processes: what Docker and Kubernetes would run, where neither is."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nursery import NURSERY

_ROOT: Final = Path(__file__).parents[2]
_KEPT: Final = ("PATH", "JAVA_HOME", "JDK_JAVA_OPTIONS", "OUTBOX_PATIENCE", "OUTBOX_PG_BIN", "OUTBOX_CACHE")


@dataclass(frozen=True)
class Container:
    """One container's process.

    command      with the entry point. `outbox` and `python` are those of this environment.
    environment  only what the container names; what a process here needs to start at all is added.
    folder       its home, for its log too.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    folder: Path

    @property
    def _words(self) -> list[str]:
        first, *rest = self.command
        return {"outbox": [sys.executable, "-m", "relay.cli"], "python": [sys.executable]}.get(first, [first]) + rest

    @property
    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        home = {"HOME": str(self.folder), "PYTHONPATH": str(_ROOT), "OUTBOX_CACHE": str(self.folder / "cache")}
        return kept | self.environment | home

    def run(self) -> str:
        """Run a command that ends by itself; as ``running``, forked: imports take longest. Returns what it prints."""
        done = NURSERY.run(self._words[1:], self._environment, cwd=self.folder)
        assert done.returncode == 0, (self.name, done.stdout, done.stderr)
        return done.stdout

    @contextmanager
    def running(self, grace: float = 120, says: str = "") -> Iterator[Path]:
        """Run it until the block ends, then stop it as an engine does; it has ``grace`` seconds. Yields its log.

        says  what it says when it is told to stop; then it ends by itself, with status 0.
        """
        log = self.folder / f"{self.name}.log"
        process = NURSERY.fork(self._words[1:], self._environment, self.folder, log)
        try:
            yield log
            assert process.running, log.read_text()
        finally:
            process.signal(signal.SIGTERM)
            process.wait(grace)
            status = process.exit_code
            process.signal(signal.SIGKILL)
        assert status in ({0} if says else {0, -signal.SIGTERM}), (self.name, status, log.read_text())
        assert says in log.read_text(), (self.name, log.read_text())
