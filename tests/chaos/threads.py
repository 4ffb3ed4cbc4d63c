"""Threads of a run that write until they are stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final, Self

from outbox.sandbox._process import patience

_END_SECONDS: Final = 60.0


class Threads:
    """Runs functions, by the names of their threads, until ``stop``; they look at ``_stop``."""

    def __init__(self, work: Mapping[str, Callable[[], None]]) -> None:
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._noting_errors, args=(each,), name=name, daemon=True)
            for name, each in work.items()
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_END_SECONDS * patience())

    def stop(self) -> None:
        """End what is under way, and raise what ended a thread before. Raises AssertionError if one does not end."""
        self.__exit__()
        if self._errors:
            raise self._errors[0]
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        assert not alive, f"these do not end: {', '.join(alive)}"

    def _noting_errors(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by stop()
            self._errors.append(error)
