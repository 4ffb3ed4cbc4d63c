"""How commands end that work until they are stopped: the first signal lets them finish, the second does not wait."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Final, NoReturn

_SHOW_CURSOR: Final = b"\x1b[?25h"
"""For a terminal whose bar has hidden it."""


def obey_signals(stop: threading.Event, *, first: str, second: str) -> None:
    """Let the first SIGTERM or SIGINT set ``stop``, and a second one end the process at once.

    first, second  what is written then, on stderr.
    """

    def on_signal(*_: object) -> None:
        if stop.is_set():
            die(second)
        stop.set()
        # Not by a logger, whose own line this may be in the middle of.
        os.write(2, f"outbox: {first}\n".encode())

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def die(text: str) -> NoReturn:
    """End as a kill does: the servers take back what is open."""
    if sys.stdout.isatty():
        os.write(1, _SHOW_CURSOR)
    os.write(2, f"outbox: {text}\n".encode())
    os._exit(1)
