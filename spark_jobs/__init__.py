"""Consumers: from Kafka into tables, each event applied once. How far they got is stored in Postgres alone.

Jobs import their names from here. Each name is imported on first use, so importing this package loads neither pyspark
nor a Kafka client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from outbox.errors import MissingExtra

if TYPE_CHECKING:
    from outbox.consumer.errors import (
        ConsumerError,
        ConsumerUnavailable,
        DataLost,
        EffectFailed,
        Fenced,
        JobError,
        TopicRecreated,
    )
    from spark_jobs.dedup.strategies import Dedup, Fingerprint, Natural, OffsetsOnly, Version
    from spark_jobs.driver.outbox_sink import OutboxSinkSource, register
    from spark_jobs.driver.query import RunningConsumer, run
    from spark_jobs.driver.streaming import exactly_once
    from spark_jobs.effects.mapped import Insert, Upsert
    from spark_jobs.effects.produce import Produce, Traced
    from spark_jobs.errors import BadMessage, CheckpointConflict, Reject, StagedRowsLost
    from spark_jobs.job import ConsumerJob
    from spark_jobs.payloads.decoding import Avro, Json, Protobuf, Raw
    from spark_jobs.payloads.registry import Registry

__all__ = [
    "Avro",
    "BadMessage",
    "CheckpointConflict",
    "ConsumerError",
    "ConsumerJob",
    "ConsumerUnavailable",
    "DataLost",
    "Dedup",
    "EffectFailed",
    "Fenced",
    "Fingerprint",
    "Insert",
    "JobError",
    "Json",
    "Natural",
    "OffsetsOnly",
    "OutboxSinkSource",
    "Produce",
    "Protobuf",
    "Raw",
    "Registry",
    "Reject",
    "RunningConsumer",
    "StagedRowsLost",
    "TopicRecreated",
    "Traced",
    "Upsert",
    "Version",
    "exactly_once",
    "register",
    "run",
]

_MODULES: Final = {
    "outbox.consumer.errors": (
        *("ConsumerError", "ConsumerUnavailable", "DataLost", "EffectFailed", "Fenced", "JobError", "TopicRecreated"),
    ),
    "spark_jobs.payloads.decoding": ("Avro", "Json", "Protobuf", "Raw"),
    "spark_jobs.payloads.registry": ("Registry",),
    "spark_jobs.effects.mapped": ("Insert", "Upsert"),
    "spark_jobs.errors": ("BadMessage", "CheckpointConflict", "Reject", "StagedRowsLost"),
    "spark_jobs.job": ("ConsumerJob",),
    "spark_jobs.effects.produce": ("Produce", "Traced"),
    "spark_jobs.driver.outbox_sink": ("OutboxSinkSource", "register"),
    "spark_jobs.driver.query": ("RunningConsumer", "run"),
    "spark_jobs.dedup.strategies": ("Dedup", "Fingerprint", "Natural", "OffsetsOnly", "Version"),
    "spark_jobs.driver.streaming": ("exactly_once",),
}
_PACKAGES: Final = {"confluent_kafka", "psycopg", "pyarrow", "pydantic", "pyspark"}
"""Packages that the extra `spark` brings and these modules import."""
_WHERE: Final = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it. Raises MissingExtra without the packages that it needs."""
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        raise MissingExtra("spark", error.name) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the module's names, including public ones that were not imported yet."""
    return sorted({*globals(), *__all__})
