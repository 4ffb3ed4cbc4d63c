"""Ending long-running commands: the first signal lets them finish their work, the second ends them at once."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from outbox.stopping import Stopping


def obey_signals(stop: Stopping, *, first: str, second: str) -> None:
    """Make the first SIGTERM or SIGINT set ``stop``, and the second one end the process at once.

    first, second  written to stderr then.
    """

    def on_signal(*_: object) -> None:
        if stop.is_set():
            die(second)
        stop.set()
        # Not with a logger, which this handler may have interrupted.
        _say(first)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def die(text: str) -> NoReturn:
    """End at once, as after a kill: the servers roll back what is open."""
    _say(text)
    os._exit(1)


def _say(text: str) -> None:
    # The pipe may be closed or the disk full. Without a standard error, its number may be a connection's.
    with suppress(OSError):
        if sys.stderr is not None:
            os.write(2, f"outbox: {text}\n".encode())
