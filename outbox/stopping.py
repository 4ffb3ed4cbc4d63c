"""The event that ends a command or a consumer, which a signal's handler may set."""

from __future__ import annotations

import threading


class Stopping(threading.Event):
    """An event that a signal's handler may set.

    A handler interrupts the main thread anywhere, also within ``wait``. With the lock of threading.Event, which a
    thread can't take twice, it would then wait for itself for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())
