"""Calls of client libraries that may not return in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], late: Callable[[T], object] = lambda _: None) -> T:
    """Return what a call returns, which is made in a thread: one can't be ended. Raises TimeoutError after ``seconds``.

    late  gets what the call returns when the caller has given up.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            found = call()
        except BaseException as error:  # noqa: BLE001  raised below
            if result.set_running_or_notify_cancel():
                result.set_exception(error)
            return
        if result.set_running_or_notify_cancel():
            result.set_result(found)
        else:
            late(found)

    try:
        threading.Thread(target=run, name=f"outbox-{call.__name__}", daemon=True).start()
        return result.result(seconds)
    except TimeoutError:
        if not result.cancel():
            return result.result()
        raise
    except BaseException:
        result.cancel()
        raise
