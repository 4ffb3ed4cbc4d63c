"""Repeat a step while a server is away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import psycopg

from outbox._clients.backoff import FIRST, doubled, jittered
from outbox.consumer.errors import ConsumerUnavailable, shown
from outbox.consumer.patience import NoTimeLeft, Patience
from outbox.consumer.postgres_errors import AWAY
from spark_jobs.driver.options import Report
from spark_jobs.spark.errors import MAY_PASS, first_line

T = TypeVar("T")


def wait_for_servers(
    step: Callable[[], T],
    patience: Patience,
    report: Report,
    *,
    then: str,
    stop: threading.Event | None = None,
    longest: float = 5.0,
    progressed: Callable[[Exception], bool] = lambda _: False,
) -> T | None:
    """Return what a step returns, repeating it while servers are away; None if ``stop`` is set meanwhile.

    then        what the user should do when no patience is left.
    longest     the longest pause between two attempts, in seconds.
    progressed  called with each error. Returns whether the attempt made progress all the same, so that patience and
                pauses start over. What it raises ends the waiting.

    Raises ConsumerUnavailable when no patience is left.
    """
    stop = stop or threading.Event()
    last = ""
    tries = 0
    while True:
        try:
            with patience.attempt():
                result = step()
        except (*AWAY, *MAY_PASS) as error:
            # NoTimeLeft says nothing about the server; the error before it does.
            if not (last and isinstance(error, NoTimeLeft)):
                last = shown(error) if isinstance(error, psycopg.Error) else first_line(error)
            if progressed(error):
                patience.renew()
                tries = 0
            patience.failed()
            if patience.left <= 0:
                raise ConsumerUnavailable(
                    f"gave up after {patience.seconds:g} s; nothing is lost, {then}. Last error: {last}"
                ) from error
            pause = doubled(tries, FIRST, longest)
            tries += 1
            report("waiting for a server", {"error": last, "wait_seconds": round(pause, 1)})
            if stop.wait(min(jittered(pause), patience.left)):
                return None
        else:
            patience.renew()
            return result
