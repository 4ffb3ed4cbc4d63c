"""How a consumer appears in Spark's UI: its Spark jobs are one job group, and each round has a description.

A job group belongs to a thread, so the group of a thread that runs a consumer is restored afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from outbox.consumer.model import Partition, Range

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DESCRIPTION: Final = "spark.job.description"
_PROPERTIES: Final = ("spark.jobGroup.id", DESCRIPTION, "spark.job.interruptOnCancel")
_SHOWN: Final = 4


def name(group: str) -> str:
    """Return the job group of a consumer group, such as for ``SparkContext.cancelJobGroup``."""
    return f"outbox {group}"


@contextmanager
def kept(session: SparkSession) -> Iterator[None]:
    """Restore this thread's job group and description at the end."""
    with properties_kept(session, _PROPERTIES):
        yield


@contextmanager
def properties_kept(session: SparkSession, names: tuple[str, ...]) -> Iterator[None]:
    """Restore these local properties of this thread at the end."""
    from py4j.protocol import Py4JError

    context = session.sparkContext
    before = {name: context.getLocalProperty(name) for name in names}
    try:
        yield
    finally:
        # The JVM may be gone: then there is nothing to restore, and the error that ended the consumer must be raised.
        with suppress(Py4JError, OSError):
            for property_, value in before.items():
                # None removes the property.
                context.setLocalProperty(property_, value)  # type: ignore[arg-type]


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
