"""Several workers on one machine: one process each, which divide the lanes like any other relays.

| what happens                | what follows                                                                  |
|-----------------------------|-------------------------------------------------------------------------------|
| a signal to this process    | goes to every worker: the first one ends the turns in flight, a second one,   |
|                             | as SIGUSR1, leaves them                                                       |
| signals to the workers      | end the turns in flight, however many come: systemd, for one, signals all     |
|                             | processes of a unit                                                           |
| a worker is killed, or ends | its lanes go to the others; the others are stopped, and this process ends     |
|                             | with its status: its supervisor starts all of them again                      |
| this process is killed      | the workers end by themselves, each after the turn in flight, as at a signal: |
|                             | a restart would start as many workers beside them                             |
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Final

import structlog

from relay.config import Settings

log = structlog.get_logger("relay")

ABANDON: Final = signal.SIGUSR1
"""What this process sends to a worker that is to leave its turn in flight."""
_LOOK_SECONDS: Final = 0.1


def run_workers(count: int, environment: Mapping[str, str]) -> int:
    """Run ``outbox relay run`` ``count`` times, until all have ended. Returns the status of the first that failed."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "relay.cli", "relay", "run", "--worker", str(number)],
            env=dict(environment),
            # Nothing is written to it: it is closed when this process ends, for whatever reason.
            stdin=subprocess.PIPE,
            # A signal from the terminal reaches only this process, which passes it on once.
            start_new_session=True,
        )
        for number in range(count)
    ]
    received = reported = False

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        again, received = received, True
        _send(workers, ABANDON if again else signal.SIGTERM)

    previous = {each: signal.signal(each, pass_on) for each in (signal.SIGTERM, signal.SIGINT)}
    log.info("workers started", workers=[worker.pid for worker in workers])
    try:
        status = 0
        while any(worker.poll() is None for worker in workers):
            ended = [worker for worker in workers if worker.poll() is not None]
            if ended and not (received or reported):
                reported = True
                log.error("a worker has ended; the others are stopped", pid=ended[0].pid, status=ended[0].returncode)
                _send(workers, signal.SIGTERM)
            time.sleep(_LOOK_SECONDS)
        for worker in workers:
            if received and worker.returncode == -signal.SIGTERM:
                continue  # the signal came before it had begun
            if worker.returncode and not status:
                status = worker.returncode if worker.returncode > 0 else 128 - worker.returncode
        return status
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def be_worker(number: int, settings: Settings) -> None:
    """Make this process one of several workers: with its own name and port, and ending with its parent."""
    if settings.relay.instance is not None:
        settings.relay.instance += f"-{number}"
    if settings.relay.metrics_address is not None:
        # Only one worker can listen on a port, and each has metrics of its own. At port 0 the system chooses each.
        host, _, port = settings.relay.metrics_address.rpartition(":")
        settings.relay.metrics_address = f"{host}:{int(port) and int(port) + number}"

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        # Last, because the reader of the log may have ended too.
        log.error("the process that started this worker has ended; the worker stops")

    threading.Thread(target=wait, name="starter", daemon=True).start()


def _send(workers: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for worker in workers:
        if worker.poll() is None:
            os.kill(worker.pid, number)
