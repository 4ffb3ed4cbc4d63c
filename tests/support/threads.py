"""Threads of a test, which go on until they are stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Self

from outbox.sandbox._process import patience

_END_SECONDS: Final = 60.0 * patience()


class Threads:
    """Runs functions, by the names of their threads, until ``stop``; they look at ``_stop``.

    seconds   how long they may take to end; None: as long as it takes.
    stop      the event that ends them, where others look at it too.
    """

    def __init__(
        self,
        work: Mapping[str, Callable[[], None]],
        *,
        seconds: float | None = _END_SECONDS,
        stop: threading.Event | None = None,
    ) -> None:
        self._seconds = seconds
        self._stop = stop or threading.Event()
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
        self._join()

    def stop(self) -> None:
        """End what is under way, and raise what ended a thread before. Raises AssertionError if one does not end."""
        self._join()
        if self._errors:
            raise self._errors[0]
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        assert not alive, f"these do not end: {', '.join(alive)}"

    def _join(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(self._seconds)

    def _noting_errors(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by stop()
            self._errors.append(error)


@contextmanager
def in_background(
    run: Callable[[threading.Event], object], stop: threading.Event | None = None
) -> Iterator[threading.Event]:
    """Run a function in a thread until the block ends, which sets the event, as an error of the function does.

    Raises that error.
    """
    stop = stop or threading.Event()

    def work() -> None:
        try:
            run(stop)
        except BaseException:
            stop.set()
            raise

    with Threads({getattr(run, "__qualname__", "run"): work}, stop=stop) as thread:
        try:
            yield stop
        finally:
            thread.stop()
