"""Translate failures of Kafka, Postgres or Spark into ConsumerErrors.

Tasks report the errors that they know as a row of their result. The others come as Spark errors:

| Spark's error                                       | what it becomes                                     |
|-----------------------------------------------------|-----------------------------------------------------|
| a row that does not decode reached a transform      | Undecoded                                           |
| Python code has raised one of MAY_PASS, or JobError | the same                                            |
| ... a psycopg error that may pass when retried      | ConsumerUnavailable                                 |
| ... ConnectionError or TimeoutError                 | ConsumerUnavailable                                 |
| Kafka's Java client: authentication, authorization  | NotAuthorized                                       |
| ... a corrupt record                                | CorruptRecords                                      |
| ... anything else; Java's network                   | ConsumerUnavailable                                 |
| a Python worker or an executor has ended            | WorkerLost                                          |
| the JVM does not answer any more                    | ConsumerError                                       |
| anything else                                       | EffectFailed                                        |
"""

from __future__ import annotations

import builtins
import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psycopg

from outbox.consumer.errors import (
    ConsumerError,
    ConsumerUnavailable,
    CorruptRecords,
    EffectFailed,
    Interrupted,
    JobError,
    NotAuthorized,
    shown,
)
from outbox.consumer.postgres_errors import passing_kind
from spark_jobs.errors import InputCut, WorkerLost

UNDECODED: Final = "outbox: a row that does not decode met a transform"
"""The text in the error of a row that must not reach a transform; see rows.shaped."""

# These errors of Spark's scheduler have no class of their own.
_LOST: Final = re.compile(r"Python worker exited unexpectedly[^\n.]*|ExecutorLostFailure[^\n]{0,200}")
_KAFKA: Final = "org.apache.kafka."
_REFUSED: Final = frozenset(
    f"{_KAFKA}common.errors.{name}" for name in ("AuthenticationException", "AuthorizationException")
)
_CORRUPT: Final = f"{_KAFKA}common.errors.CorruptRecordException"
_NETWORK: Final = ("java.net.", "java.util.concurrent.TimeoutException")
_NOT_OURS: Final = re.compile(
    r"ModuleNotFoundError: No module named 'spark_jobs[^\n]*|"
    r"ImportError: cannot import name \S+ from 'spark_jobs[^\n]*|"
    r"AttributeError: [^\n]* on <module 'spark_jobs[^\n]*"
)
_TRACEBACK: Final = "Traceback (most recent call last):\n"
_CHAINED: Final = re.compile(
    r"\n(?:The above exception was the direct cause of the following exception|"
    r"During handling of the above exception, another exception occurred):\n"
)


MAY_PASS: Final = (ConsumerUnavailable, Interrupted, InputCut, WorkerLost, CorruptRecords, NotAuthorized)
"""The errors after which a retry may succeed."""
HIDDEN: Final = (
    "{found} hides the package spark_jobs of outbox-kafka, which is {ours}: rename yours, or start from another folder"
)


class Undecoded(Exception):
    """A row that does not decode reached a transform."""


@contextmanager
def understood() -> Iterator[None]:
    """Turn Spark's errors into ConsumerErrors, or Undecoded."""
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JNetworkError, ConnectionError) as error:
        if spark_answers():
            if isinstance(error, Py4JNetworkError):
                raise failed(error) from error
            raise
        raise ConsumerError(
            f"the JVM of the Spark session has ended ({shown(error)}); what was not committed is rolled back, run the "
            "job again"
        ) from error
    except (PySparkException, Py4JError) as error:
        raise of_spark(error) from error


def of_spark(error: BaseException) -> Exception:
    """Return the ConsumerError for a Spark error, or Undecoded."""
    text = str(error)
    if UNDECODED in text:
        return Undecoded(text)
    if hidden := _NOT_OURS.search(text):
        return JobError(
            f"Spark's workers import another spark_jobs than this driver's: {hidden[0]}; "
            + HIDDEN.format(
                found="a folder or file of that name in their working directory or on their PYTHONPATH",
                ours=Path(__file__).resolve().parents[1],
            )
        )
    line = first_line(error)
    python = _raised(text)
    if python is not None:
        return _of_python(python, line)
    kinds = list(_causes(error))
    if _CORRUPT in kinds:
        return CorruptRecords(line)
    if any(kind in _REFUSED for kind in kinds):
        return NotAuthorized(f"Kafka: {line}; check the reader's credentials and the ACLs. Nothing was skipped")
    if any(kind.startswith((_KAFKA, *_NETWORK)) for kind in kinds):
        return ConsumerUnavailable(line)
    if lost := _LOST.search(text):
        return WorkerLost(f"{lost[0]}: memory that ran out, perhaps, or a library that crashed")
    return failed(error)


def failed(error: BaseException) -> EffectFailed:
    """Return the error for a Spark error that the job itself has caused."""
    return EffectFailed(f"Spark can't run the job: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Return the line of a Spark error that says what happened: the last one from Python, or else the first line."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    python = [line for line in lines if line.startswith(("psycopg.", "outbox.", "spark_jobs.", "Caused by:"))]
    if not python and (raised := _raised_line(text)):
        # An error that a transform raised.
        python = [raised]
    found = (python or lines or [type(error).__name__])[-1 if python else 0]
    if not python and found.startswith("An error occurred while calling") and len(lines) > 1:
        # Py4J's own first line says nothing.
        found = lines[1].removeprefix(": ")
    return found[:400]


def _of_python(kind: type[BaseException], line: str) -> ConsumerError:
    for known in MAY_PASS:
        if issubclass(kind, known):
            return known(line)
    if issubclass(kind, psycopg.Error) and passing_kind(kind):
        return ConsumerUnavailable(line)
    # Libraries wrap these errors in their own classes, whose texts contain the system's message.
    if issubclass(kind, ConnectionError | TimeoutError) or "Connection refused" in line:
        return ConsumerUnavailable(line)
    if issubclass(kind, JobError):
        return JobError(line)
    return EffectFailed(f"Spark can't run the job: {line}")


def _raised(text: str) -> type[BaseException] | None:
    """Return the class of the exception that Python code has raised in an executor; None if it was not Python.

    ``Exception`` stands for a class that this process has not imported, and which therefore does not matter here.
    """
    line = _raised_line(text)
    if line is None:
        return None
    module, _, name = line.partition(":")[0].strip().rpartition(".")
    if module.startswith("spark_jobs."):
        # A worker may have imported more of the package than the driver.
        with suppress(ImportError):
            importlib.import_module(module)
    found = getattr(sys.modules.get(module) if module else builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else Exception


def _raised_line(text: str) -> str | None:
    """Return the line after the (indented) frames of the last Python traceback."""
    trace = _CHAINED.split(text)[-1]
    _, found, trace = trace.partition(_TRACEBACK)
    return next((line for line in trace.splitlines() if line[:1].strip()), None) if found else None


def _causes(error: BaseException) -> Iterator[str]:
    """Yield the names of the Java classes of a Spark error and its causes, including superclasses."""
    cause: Any = getattr(error, "_origin", None) or getattr(error, "java_exception", None)
    while cause is not None:
        kind = cause.getClass()
        while kind is not None:
            yield kind.getName()
            kind = kind.getSuperclass()
        cause = cause.getCause()


def spark_answers() -> bool:
    """Return whether the JVM of this process's Spark context answers."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    context = SparkContext._active_spark_context  # noqa: SLF001  the only way to get it without a session
    try:
        context._jvm.java.lang.System.nanoTime()  # type: ignore[union-attr]  # noqa: SLF001
    except (Py4JError, OSError, AttributeError):
        return False
    return True
