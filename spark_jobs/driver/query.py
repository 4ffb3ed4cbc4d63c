"""``run(job)``: a consumer in a thread of its own, with a handle like Spark's StreamingQuery.

The handle has the names of pyspark's StreamingQuery, camelCase included, so code that waits for queries, stops them or
shows their progress works with both. The differences are those of a consumer:

- ``id`` and ``name`` are the group, which is what survives a restart; ``runId`` is new for each run.
- ``exception()`` returns and ``awaitTermination()`` raises the consumer's own error (spark_jobs.errors), not Spark's.
- ``lastProgress`` also counts applied, duplicates and dead.

No signal handlers or exit hooks are installed. If the process ends, the thread ends like a killed driver: there is
nothing to clean up. Several handles may run in one Spark, each with its own group; a second handle of the same group
takes it over, and the first one ends with Fenced.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from spark_jobs.driver.round_context import Span
from spark_jobs.driver.runner import Options, Report, Runner, Totals, options_of
from spark_jobs.errors import JobError
from spark_jobs.model import Partition
from spark_jobs.spark import session as spark_session
from spark_jobs.spark.installed import require_installed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.job import ConsumerJob

Trigger = Literal["once", "continuous"] | float
_RECENT: Final = 100
_COUNTED: Final = ("read", "applied", "duplicates", "dead")


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
) -> ConsumerQuery:
    """Start a consumer in a thread of its own, and return its handle at once.

    spark    the session, or None: the active one, else a new one as ``outbox consume`` starts it. The consumer works in
             a clone with its own settings and with the session's temporary views and functions of that moment.
    trigger  "once": apply what is committed in Kafka now, then end. "continuous": apply what comes, until stopped. Or a
             number: the same, but a round begins no sooner than this many seconds after the one before.
    report   called in the consumer's thread with what happens: a text and its figures.

    The others are settings: those not given are read from ``OUTBOX_…`` variables and the file, as ``outbox consume``
    does. Raises ConfigurationError and JobError for mistakes that can be found before the start; later errors are in
    ``exception()``.
    """
    if trigger not in {"once", "continuous"}:
        if isinstance(trigger, bool | str) or not (math.isfinite(trigger) and trigger > 0):
            raise JobError(f"trigger: must be 'once', 'continuous', or seconds above 0, not {trigger!r}")
        trigger = float(trigger)
    require_installed()
    # Imported here, because executors import what a job's module imports and have no pydantic.
    from spark_jobs import settings as consumer_settings

    given = {"keep_days": keep_days, "driver_records": driver_records}
    settings = consumer_settings.load(
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
    return ConsumerQuery(spark_session.beside(spark), job, options, trigger, report or (lambda _, __: None))


class ConsumerQuery:
    """A running consumer, created by ``run``. Its methods are those of pyspark's StreamingQuery."""

    def __init__(
        self, session: SparkSession, job: ConsumerJob, options: Options, trigger: Trigger, report: Report
    ) -> None:
        from pyspark import InheritableThread

        self._job = job
        self._trigger = trigger
        self._callback = report
        self._run_id = str(uuid.uuid4())
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._caught_up_at = -math.inf
        self._message = "Initializing consumer"
        self._busy = False
        self._counted = dict.fromkeys(_COUNTED, 0)
        self._last_round_at = time.monotonic()
        self._progress: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._runner = Runner(session, job, options, self._report, self._caught_up)
        # Its JVM thread inherits the local properties of the starting thread, such as the scheduler's pool.
        self._thread = InheritableThread(self._work, name=f"outbox {job.group}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<ConsumerQuery {self.id!r}: {self.status['message']}>"

    @property
    def id(self) -> str:
        """The group, which stays the same when the consumer is started again."""
        return self._job.group

    @property
    def name(self) -> str:
        """The group."""
        return self._job.group

    @property
    def runId(self) -> str:  # noqa: N802  as StreamingQuery spells it, and so below
        """The id of this run, new each time."""
        return self._run_id

    @property
    def isActive(self) -> bool:  # noqa: N802
        """Return whether the consumer is still running."""
        return not self._ended

    @property
    def totals(self) -> Totals:
        """The figures of this run."""
        return self._runner.totals

    @property
    def status(self) -> dict[str, Any]:
        """The current activity: ``message``, ``isDataAvailable``, ``isTriggerActive``."""
        with self._changed:
            return {"message": self._message, "isDataAvailable": self._busy, "isTriggerActive": self._busy}

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802
        """The last round, with the names of StreamingQueryProgress; None before the first one."""
        with self._changed:
            return self._progress[-1] if self._progress else None

    @property
    def recentProgress(self) -> list[dict[str, Any]]:  # noqa: N802
        """The last hundred rounds."""
        with self._changed:
            return list(self._progress)

    def exception(self) -> BaseException | None:
        """Return the error that ended the consumer; None while it runs, and after a normal end."""
        return self._error

    def stop(self) -> None:
        """End the consumer after the running round, and wait for that. Raises none of the consumer's errors."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: N802
        """Wait for the end and raise the error that caused it. With a timeout in seconds: return whether it came."""
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout: must be above 0, not {timeout!r}")
        with self._changed:
            ended = self._changed.wait_for(lambda: self._ended, timeout)
        if self._error is not None:
            raise self._error
        return None if timeout is None else ended

    def processAllAvailable(self) -> None:  # noqa: N802
        """Wait until everything committed in Kafka by now is applied. Raises the error that ended the consumer."""
        asked = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._caught_up_at >= asked)
        if self._error is not None:
            raise self._error

    # In the consumer's thread.

    def _work(self) -> None:
        try:
            with self._runner as runner:
                if self._trigger == "once":
                    runner.once(self._stop)
                elif self._trigger == "continuous":
                    runner.continuous(self._stop)
                else:
                    assert isinstance(self._trigger, float)
                    runner.continuous(self._stop, self._trigger)
        except BaseException as error:  # noqa: BLE001  returned by exception()
            self._error = error
            self._set_status(f"Terminated with exception: {error}", busy=False)
        else:
            self._set_status("Stopped", busy=False)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _set_status(self, message: str, *, busy: bool) -> None:
        with self._changed:
            self._message, self._busy = message, busy

    def _caught_up(self, looked_at: float) -> None:
        with self._changed:
            self._caught_up_at = looked_at
            self._message, self._busy = "Waiting for data to arrive", False
            self._changed.notify_all()

    def _report(self, text: str, figures: Mapping[str, Any]) -> None:
        if text == "round":
            self._add_round(figures, self._runner.span)
            self._set_status("Processing new data", busy=True)
        elif text == "waiting for a server":
            self._set_status(f"Waiting for a server: {figures['error']}", busy=False)
        elif text == "waiting for a lock":
            self._set_status(f"Waiting for a lock: {figures['blocked_by']}", busy=True)
        self._callback(text, figures)

    def _add_round(self, totals: Mapping[str, Any], span: Span | None) -> None:
        now = time.monotonic()
        counts = {name: totals[name] - self._counted[name] for name in _COUNTED}
        self._counted = {name: totals[name] for name in _COUNTED}
        seconds, since = totals["round_seconds"], now - self._last_round_at
        self._last_round_at = now
        milliseconds = round(seconds * 1000)
        rates = {
            "inputRowsPerSecond": round(counts["read"] / since, 1) if since > 0 else 0.0,
            "processedRowsPerSecond": round(counts["read"] / seconds, 1) if seconds > 0 else 0.0,
        }
        began = datetime.fromtimestamp(time.time() - seconds, UTC)
        progress = {
            "id": self.id,
            "runId": self.runId,
            "name": self.name,
            "timestamp": began.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "batchId": totals["rounds"] - 1,
            "batchDuration": milliseconds,
            "durationMs": {"triggerExecution": milliseconds},
            "numInputRows": counts["read"],
            **rates,
            "applied": counts["applied"],
            "duplicates": counts["duplicates"],
            "dead": counts["dead"],
            "sources": [_source(span, self._job, counts["read"], rates)],
            "sink": {"description": "Postgres", "numOutputRows": counts["applied"]},
        }
        with self._changed:
            self._progress.append(progress)


def _source(span: Span | None, job: ConsumerJob, rows: int, rates: Mapping[str, float]) -> dict[str, Any]:
    """Return the offsets of a round, in the form of Spark's Kafka source."""
    ranges = {} if span is None else span.ranges
    return {
        "description": f"Kafka[{', '.join(job.topics)}]" if span is not None else "dead letters",
        "startOffset": _offsets({partition: one.start for partition, one in ranges.items()}),
        "endOffset": _offsets({partition: one.end for partition, one in ranges.items()}),
        "latestOffset": _offsets({} if span is None else span.log_ends),
        "numInputRows": rows,
        **rates,
    }


def _offsets(values: Mapping[Partition, int]) -> str:
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, part), offset in sorted(values.items()):
        by_topic.setdefault(topic, {})[str(part)] = offset
    return json.dumps(by_topic)
