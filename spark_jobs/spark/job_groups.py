"""How a consumer appears in Spark's UI: its Spark jobs are one job group, and each round has a description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from outbox.consumer.model import Partition, Range

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DESCRIPTION: Final = "spark.job.description"
_SHOWN: Final = 4


def name(group: str) -> str:
    """Return the job group of a consumer group, such as for ``SparkContext.cancelJobGroup``."""
    return f"outbox {group}"


@contextmanager
def described_as(session: SparkSession, description: str) -> Iterator[None]:
    """Describe this thread's Spark jobs, and restore its description at the end."""
    from py4j.protocol import Py4JError

    context = session.sparkContext
    before = context.getLocalProperty(_DESCRIPTION)
    context.setLocalProperty(_DESCRIPTION, description)
    try:
        yield
    finally:
        # The JVM may be gone: then there is nothing to restore, and the error that ended the consumer must be raised.
        with suppress(Py4JError, OSError):
            context.setLocalProperty(_DESCRIPTION, before)  # type: ignore[arg-type]  # None removes it


def show(session: SparkSession, group: str, description: str) -> None:
    """Assign this thread's next Spark jobs to the group's job group.

    Cancelling them does not interrupt the executors' threads, which may be in a COMMIT.
    """
    session.sparkContext.setJobGroup(name(group), f"{name(group)}: {description}", interruptOnCancel=False)


def described(ranges: Mapping[Partition, Range]) -> str:
    """Return the description of a round: its first few partitions and their offsets."""
    shown = [f"{topic}-{part} {span.start}–{span.end - 1}" for (topic, part), span in sorted(ranges.items())]
    left = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f" and {left} more partitions" if left > 0 else "")
