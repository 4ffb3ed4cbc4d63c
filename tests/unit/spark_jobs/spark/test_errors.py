"""What errors of Kafka, Postgres and Spark mean to the driver, as far as that can be told without them."""

from __future__ import annotations

import psycopg
import pytest
from confluent_kafka import KafkaError
from psycopg import errors

from outbox.consumer.errors import (
    ConsumerUnavailable,
    CorruptRecords,
    EffectFailed,
    Interrupted,
    JobError,
    NotAuthorized,
)
from outbox.consumer.kafka_errors import of_kafka
from outbox.consumer.postgres_errors import of_postgres
from spark_jobs.errors import InputCut, WorkerLost
from spark_jobs.spark import errors as failures


def test_what_ends_a_job_names_the_error_of_its_transform():
    traceback = '\nTraceback (most recent call last):\n  File "job.py", line 3\n    raise\njobs.X: n is 7\nmore\n'
    for text, shown in (
        (f"An exception was thrown from the Python worker:{traceback}\nJVM stacktrace:\n\tat a.B", "jobs.X: n is 7"),
        (f"thrown:{traceback}spark_jobs.errors.InputCut: no end\n", "spark_jobs.errors.InputCut: no end"),
        (
            f"thrown:{traceback}psycopg.OperationalError: gone\n\noutbox.consumer.errors.ConsumerUnavailable: away\n",
            "outbox.consumer.errors.ConsumerUnavailable: away",
        ),
        ("[DIVIDE_BY_ZERO] by zero\n\tat a.B", "[DIVIDE_BY_ZERO] by zero"),
        ("", "Exception"),
    ):
        assert str(failures.failed(Exception(text))) == f"Spark can't run the job: {shown}"


def python(raised: str, before: str = "") -> Exception:
    return Exception(
        f"An exception was thrown from the Python worker:\n{before}Traceback (most recent call last):\n"
        f'  File "x.py", line 1, in f\n    raise error\n{raised}\nmore of it\n'
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (python("psycopg.OperationalError: gone"), ConsumerUnavailable),
        (python("psycopg.errors.AdminShutdown: gone"), ConsumerUnavailable),
        (python("psycopg.errors.IdleInTransactionSessionTimeout: gone"), ConsumerUnavailable),
        (python("psycopg.errors.TransactionTimeout: gone"), ConsumerUnavailable),
        (python("psycopg.errors.UndefinedColumn: no"), EffectFailed),
        (python("psycopg.errors.ProgramLimitExceeded: no"), EffectFailed),
        (python("spark_jobs.errors.InputCut: ended"), InputCut),
        (python("outbox.consumer.errors.CorruptRecords: no"), CorruptRecords),
        (python("outbox.consumer.errors.NotAuthorized: no"), NotAuthorized),
        (python("outbox.consumer.errors.ConsumerUnavailable: away"), ConsumerUnavailable),
        (python("outbox.consumer.errors.JobError: no"), JobError),
        (python("ConnectionRefusedError: no"), ConsumerUnavailable),
        (python("TimeoutError"), ConsumerUnavailable),
        (python("ValueError: psycopg.OperationalError: is only a text here"), EffectFailed),
        (python("nobody.knows.This: no"), EffectFailed),
        # The last one is what was raised; those before are its causes.
        (
            python(
                "ValueError: no",
                "Traceback (most recent call last):\n  File\nConnectionError: away\n\n"
                "The above exception was the direct cause of the following exception:\n\n",
            ),
            EffectFailed,
        ),
        (Exception("Job aborted: Python worker exited unexpectedly (crashed). Consider"), WorkerLost),
        (
            Exception("Lost task: ExecutorLostFailure (executor 1 exited caused by one of the running tasks)"),
            WorkerLost,
        ),
        (Exception("[DIVIDE_BY_ZERO] by zero"), EffectFailed),
    ],
)
def test_an_error_of_spark(error, kind):
    assert type(failures.of_spark(error)) is kind


def test_a_row_that_did_not_decode_is_told_from_all_else():
    assert isinstance(failures.of_spark(Exception(f"x {failures.UNDECODED} 0.5")), failures.Undecoded)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._AUTHENTICATION, NotAuthorized),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, NotAuthorized),
        (KafkaError._BAD_MSG, CorruptRecords),
        (KafkaError._TRANSPORT, ConsumerUnavailable),
        (KafkaError._AUTO_OFFSET_RESET, ConsumerUnavailable),
    ],
)
def test_an_error_of_kafka(code, kind):
    found = of_kafka(KafkaError(code), "reading")
    assert type(found) is kind
    assert str(found).startswith("reading: ")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (psycopg.OperationalError("gone"), ConsumerUnavailable),
        (errors.AdminShutdown("gone"), ConsumerUnavailable),
        (errors.IdleInTransactionSessionTimeout("gone"), Interrupted),
        (errors.TransactionTimeout("gone"), Interrupted),
        (errors.DiskFull("full"), ConsumerUnavailable),
        (errors.OutOfMemory("no locks left"), ConsumerUnavailable),
        # As temp_file_limit: a smaller part of the range may stay below it.
        (errors.ConfigurationLimitExceeded("temporary files"), Interrupted),
        (errors.ObjectNotInPrerequisiteState("currval"), EffectFailed),
        (errors.UndefinedFile("no library"), EffectFailed),
        (errors.QueryCanceled("late"), Interrupted),
        (errors.LockNotAvailable("held"), Interrupted),
        (errors.DeadlockDetected("dead"), Interrupted),
        (errors.UniqueViolation("twice"), EffectFailed),
    ],
)
def test_an_error_of_postgres(error, kind):
    found = of_postgres(error, "t-0 offsets 1 to 2")
    assert type(found) is kind
    assert str(found).startswith("t-0 offsets 1 to 2: ")
