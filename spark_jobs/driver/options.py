"""How to run a job, and the figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.consumer.retention import KEEP_DAYS

if TYPE_CHECKING:
    from outbox._app.settings import Settings


@dataclass(frozen=True, slots=True)
class Options:
    """How to run a job. All times are in seconds.

    url, schema  the sink's database, and the schema of the consumers' tables there.
    kafka        librdkafka's options for the driver and the tasks: addresses and credentials.
    max_records  messages in a round at most, over all partitions.
    max_bytes    bytes in a round at most, estimated from the average message size of each topic in earlier rounds.
    patience     how long ``once`` waits for a server that is away; see patience.
    keep_days    how long ids are remembered; see retention.
    verdict_seconds  how long a single message must keep failing by itself before the job ends and names it: losing an
                 executor now and then is no message's fault.
    refused_seconds  how long Kafka may refuse the credentials, which may be changing at the moment.
    driver_records  rounds of up to this many messages run in the driver, where the job allows it; see rounds.
    outbox       the outbox's name in spans, if it is given.
    """

    url: str = field(repr=False)
    kafka: Mapping[str, str] = field(repr=False)
    schema: str = "consumer"
    max_records: int = 200_000
    max_bytes: int = 512 * 1024 * 1024
    patience: float = 60.0
    max_backoff_seconds: float = 5.0
    keep_days: int = KEEP_DAYS
    driver_records: int = 2_000
    verdict_seconds: float = 30.0
    refused_seconds: float = 300.0
    outbox: str | None = None


def options_of(settings: Settings, url: str, max_records: int) -> Options:
    from outbox._app.settings import client_options

    return Options(
        url=url,
        kafka=client_options(settings),
        schema=settings.consumer_schema,
        max_records=max_records,
        keep_days=settings.consumer.keep_days,
        driver_records=settings.consumer.driver_records,
        max_bytes=settings.consumer.max_bytes,
        outbox=settings.given_name,
    )


@dataclass
class Totals:
    """The figures of a run.

    applied     new messages, and dead letters that were retried with success.
    duplicates  messages that had been applied before or, with Natural and Version, were not the newest of their key.
    dead        messages that became dead letters.
    """

    group: str
    read: int = 0
    applied: int = 0
    duplicates: int = 0
    dead: int = 0
    rounds: int = 0
    seconds: float = 0.0

    @property
    def rows_per_second(self) -> float:
        return round(self.read / self.seconds, 1) if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The figures for ``--json``."""
        return {**asdict(self), "seconds": round(self.seconds, 3), "rows_per_second": self.rows_per_second}


Report = Callable[[str, Mapping[str, Any]], None]
"""Called with what happens: a short text and its figures."""
