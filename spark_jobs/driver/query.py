"""``run(job)``: a consumer in a thread of its own, with a handle.

No signal handlers or exit hooks are installed. If the process ends, the thread ends like a killed driver: there is
nothing to clean up. Several consumers may run in one Spark, each with its own group; a second one of the same group
takes it over, and the first one ends with Fenced.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from outbox.consumer.errors import JobError
from spark_jobs.driver.options import Options, Report, Totals, options_of
from spark_jobs.driver.runner import Runner
from spark_jobs.spark import session as spark_session
from spark_jobs.spark.installed import require_installed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.job import ConsumerJob

Trigger = Literal["once", "continuous"] | float


def run(
    job: ConsumerJob,
    spark: SparkSession | None = None,
    trigger: Trigger = "once",
    *,
    database_url: str | None = None,
    kafka: Mapping[str, str] | None = None,
    consumer_schema: str | None = None,
    max_records: int = 200_000,
    keep_days: int | None = None,
    driver_records: int | None = None,
    patience: float = 60.0,
    report: Report | None = None,
) -> RunningConsumer:
    """Start a consumer in a thread of its own, and return its handle at once.

    spark    the session, or None: the active one, else a new one as ``outbox consume`` starts it. The consumer works in
             a clone with its own settings and with the session's temporary views and functions of that moment.
    trigger  "once": apply the events that are in Kafka now, then end. "continuous": apply events as they arrive, until
             stopped. Or a number: the same, but a round begins no sooner than this many seconds after the previous one.
    report   called in the consumer's thread with each thing that happens: a text and its figures.

    The others are settings: those not given are read from ``OUTBOX_…`` variables and the file, as ``outbox consume``
    does. Raises ConfigurationError and JobError for mistakes that can be found before the start; later errors are in
    ``error``.
    """
    if trigger not in {"once", "continuous"}:
        if isinstance(trigger, bool | str) or not (math.isfinite(trigger) and trigger > 0):
            raise JobError(f"trigger: must be 'once', 'continuous', or seconds above 0, not {trigger!r}")
        trigger = float(trigger)
    require_installed()
    # Imported here, because executors import what a job's module imports and have no pydantic.
    from outbox._app.settings import load

    given = {"keep_days": keep_days, "driver_records": driver_records}
    settings = load(
        database_url=database_url,
        kafka=None if kafka is None else dict(kafka),
        consumer_schema=consumer_schema,
        consumer={name: value for name, value in given.items() if value is not None},
    )
    url = settings.require_database(", or give database_url=")
    options = replace(options_of(settings, url, max_records), patience=patience)
    if spark is None:
        spark = spark_session.active() or spark_session.start(
            f"outbox {job.group}",
            packages=settings.spark_packages,
            conf=settings.spark.conf,
        )
    return RunningConsumer(spark_session.beside(spark), job, options, trigger, report or (lambda _, __: None))


class RunningConsumer:
    """A consumer that ``run`` has started. Thread-safe."""

    def __init__(
        self, session: SparkSession, job: ConsumerJob, options: Options, trigger: Trigger, report: Report
    ) -> None:
        from pyspark import InheritableThread

        self._job = job
        self._trigger = trigger
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._caught_up_at = -math.inf
        self._runner = Runner(session, job, options, report, self._caught_up)
        # Its JVM thread inherits the local properties of the starting thread, such as the scheduler's pool.
        self._thread = InheritableThread(self._work, name=f"outbox {job.group}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped" if self._error is None else f"failed: {self._error}"
        return f"<RunningConsumer {self.group!r}: {state}>"

    @property
    def group(self) -> str:
        """Return the consumer's group."""
        return self._job.group

    @property
    def running(self) -> bool:
        """Return whether the consumer is still running."""
        return not self._ended

    @property
    def error(self) -> BaseException | None:
        """Return the error that ended the consumer; None while it runs, and after a normal end."""
        return self._error

    @property
    def totals(self) -> Totals:
        """Return the figures of this run: messages read, applied, duplicates, dead letters, rounds."""
        return self._runner.totals

    def stop(self) -> None:
        """End the consumer after the current round, and wait for that. Raises none of the consumer's errors."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the end of the consumer. Return whether it has ended. Raises the error that ended it."""
        return self._wait(lambda: False, timeout_seconds)

    def wait_until_caught_up(self, timeout_seconds: float | None = None) -> bool:
        """Wait until every event that is in Kafka now is applied. Return whether they are.

        Also returns True if the consumer has ended without an error. Raises the error that ended it.
        """
        called_at = time.monotonic()
        return self._wait(lambda: self._caught_up_at >= called_at, timeout_seconds)

    def _wait(self, condition: Callable[[], bool], timeout_seconds: float | None) -> bool:
        with self._changed:
            met = self._changed.wait_for(lambda: self._ended or condition(), timeout_seconds)
        if self._error is not None:
            raise self._error
        return met

    # In the consumer's thread.

    def _work(self) -> None:
        try:
            with self._runner as runner:
                if self._trigger == "once":
                    runner.once(self._stop)
                else:
                    runner.continuous(self._stop, self._trigger if isinstance(self._trigger, float) else 0.0)
        except BaseException as error:  # noqa: BLE001  returned by ``error``
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _caught_up(self, looked_at: float) -> None:
        with self._changed:
            self._caught_up_at = looked_at
            self._changed.notify_all()
