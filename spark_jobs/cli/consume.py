"""``outbox consume MODULE:JOB``: run a consumer job."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outbox._app.console import SinkUrl, print_json, say
from outbox._app.ending import die, obey_signals
from outbox._app.settings import Settings, client_options, load
from outbox.errors import ConfigurationError
from outbox.stopping import Stopping

if TYPE_CHECKING:
    import subprocess

    from pyspark.sql import SparkSession

    from spark_jobs.driver.options import Report, Totals
    from spark_jobs.health import ConsumerHealth
    from spark_jobs.job import ConsumerJob
    from spark_jobs.metrics import ConsumerMetrics


def consume(
    job: Annotated[str, typer.Argument(help="MODULE:JOB, as in spark_jobs.order_totals:job", metavar="MODULE:JOB")],
    once: Annotated[bool, typer.Option("--once", help="Apply the events that are there now, then exit.")] = False,
    continuous: Annotated[
        bool, typer.Option("--continuous", help="Apply events as they arrive, until SIGTERM.")
    ] = False,
    database_url: SinkUrl = None,
    topic: Annotated[list[str] | None, typer.Option(help="Read this topic instead of the job's.")] = None,
    max_records: Annotated[int, typer.Option(min=1, help="Most messages in a round.")] = 200_000,
    master: Annotated[str | None, typer.Option(help="Spark's master; by default local[2,4].")] = None,
    packages: Annotated[
        str | None, typer.Option(help="Maven coordinates of what the job's transform needs; OUTBOX_SPARK_PACKAGES")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Apply events from Kafka to tables, each once: offsets, dedup and effect move in one transaction.

    Needs the consumers' tables: `outbox db upgrade --consumer`.
    """
    if once == continuous:
        raise ConfigurationError("give either --once or --continuous")
    import structlog

    from outbox._app import logs, tracing

    settings = load(database_url=database_url, spark_packages=packages)
    logs.configure(settings.log_level, settings.log_format, settings.given_name)
    tracing.configure("outbox-consumer")
    log = structlog.get_logger("consumer")
    totals = _run(settings, job, topic, once, max_records, master, lambda text, figures: log.info(text, **figures))
    if as_json:
        print_json(totals.as_dict())
        return
    dead = f", dead letters {totals.dead:,}" if totals.dead else ""
    say(
        f"{totals.group}: read {totals.read:,}, applied {totals.applied:,}, duplicates {totals.duplicates:,}{dead} in "
        f"{totals.seconds:.1f} s"
    )
    if dead:
        say(f"see outbox dead-letters list --side consumer --group {totals.group}")


def _run(
    settings: Settings,
    spec: str,
    topics: list[str] | None,
    once: bool,
    max_records: int,
    master: str | None,
    show: Report,
) -> Totals:
    from spark_jobs.spark.installed import require_installed

    require_installed()
    from spark_jobs.driver.options import options_of
    from spark_jobs.driver.runner import Runner
    from spark_jobs.health import ConsumerHealth
    from spark_jobs.job import find_job
    from spark_jobs.spark import session

    if not session.submitted():
        # A job may be in the working directory, as with `python -m`; with spark-submit it is in the zip.
        sys.path.insert(0, str(Path.cwd()))
    job = find_job(spec)
    if topics:
        job = job.with_topics(topics)
    options = options_of(settings, settings.require_database(), max_records)
    health = ConsumerHealth(settings.consumer.ready_seconds)
    metrics = _metrics(settings, job, health)
    stop = Stopping()

    def obey() -> None:
        obey_signals(
            stop,
            first="stopping after this round; another signal ends it at once",
            second="ended in the middle of a round, after two signals; what was not committed is read again",
        )

    def start() -> SparkSession:
        spark = session.start(
            f"outbox {job.group}",
            master=master,
            packages=settings.spark_packages,
            conf=settings.spark.conf,
        )
        # The session's start has set a handler of its own.
        obey()
        started.enter_context(_ending_with_its_jvm(spark))
        return spark

    def report(text: str, figures: Mapping[str, Any]) -> None:
        health.observe(text, figures)
        if metrics is not None:
            metrics.observe(text, figures)
        show(text, figures)

    with ExitStack() as started:
        # Also while Spark starts: Linux drops a signal without a handler for the first process of a container.
        obey()
        # A run that finds nothing to do needs no Spark. Under spark-submit it does: YARN fails a driver without one.
        spark = start if once and not session.submitted() else start()
        delays = metrics.delays if metrics is not None else None
        with Runner(spark, job, options, report, health.succeeded, health.lagging, delays) as runner:
            return runner.once(stop) if once else runner.continuous(stop)


@contextmanager
def _ending_with_its_jvm(spark: SparkSession) -> Iterator[None]:
    """End the process when Spark's JVM ends, and stop Spark at the end. With spark-submit, submitted.py does this.

    A driver that applies small rounds itself would notice late, with an unrelated error.
    """
    from spark_jobs.spark.errors import spark_answers

    jvm: subprocess.Popen[bytes] | None = getattr(spark.sparkContext._gateway, "proc", None)  # noqa: SLF001
    over = threading.Event()

    def watch() -> None:
        assert jvm is not None
        jvm.wait()
        if not over.is_set():
            die("Spark's JVM has ended; nothing is lost, run the job again")

    watching = threading.Thread(target=watch, name="end-with-its-jvm", daemon=True)
    if jvm is not None:
        watching.start()
    try:
        yield
    except BaseException:
        if jvm is not None and not spark_answers():
            watching.join(30)
        raise
    finally:
        over.set()
        spark.stop()


def _metrics(settings: Settings, job: ConsumerJob, health: ConsumerHealth) -> ConsumerMetrics | None:
    """Serve the metrics and /readyz, if an address is set. Raises ConfigurationError for an unusable address."""
    if settings.consumer.metrics_address is None:
        return None
    from prometheus_client import CollectorRegistry

    from outbox._app.prometheus import serve
    from spark_jobs.metrics import ConsumerMetrics

    metrics = ConsumerMetrics(
        job.group, job.topics, settings.require_database(), settings.consumer_schema, client_options(settings)
    )
    registry = CollectorRegistry()
    registry.register(metrics)
    serve(
        settings.consumer.metrics_address,
        registry,
        "OUTBOX_CONSUMER__METRICS_ADDRESS",
        health.look,
        settings.given_name,
    )
    return metrics
