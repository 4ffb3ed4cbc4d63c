"""What a job reads, in the form of a message of AsyncAPI: `outbox contracts check` compares it with the events.

Needs no pyspark, so that a service's pipeline can check the jobs that read its events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from outbox.consumer.errors import JobError
from outbox.errors import ConfigurationError
from spark_jobs.effects.produce import Traced
from spark_jobs.job import find_job
from spark_jobs.payloads.ddl import json_schema
from spark_jobs.payloads.decoding import VARIANT, Avro, Decoder, Json, Protobuf, Raw
from spark_jobs.payloads.reading import Policy

_AVRO: Final = "application/vnd.apache.avro+json"
_PROTOBUF: Final = "application/vnd.google.protobuf"


def read(spec: str) -> tuple[Sequence[str], Sequence[str] | None, dict[str, Any]]:
    """Return the topics and types of ``MODULE:JOB``, and the message that it reads: without a payload, any.

    Raises ConfigurationError.
    """
    try:
        job = find_job(spec)
        return job.topics, job.types, _message(job.schema)
    except ConfigurationError:
        raise
    except Exception as error:  # what a user's module raises must not look like a change that breaks: status 1
        raise ConfigurationError(f"{spec!r}: {type(error).__name__}: {error}") from error


def _message(schema: str | Decoder | None) -> dict[str, Any]:
    if isinstance(schema, Traced):
        return _message(schema.schema)
    if isinstance(schema, str):
        return _message(Json(schema))
    if schema is None or isinstance(schema, Raw):
        return {}
    if isinstance(schema, Json):
        return {"payload": _json(schema), "bindings": _bindings(framed=schema.framed)}
    if isinstance(schema, Avro | Protobuf):
        form = _AVRO if isinstance(schema, Avro) else _PROTOBUF
        return {"payload": {"schemaFormat": form}, "bindings": _bindings(framed=schema.registry is not None)}
    raise JobError(f"schema: {type(schema).__name__} does not say what it reads; only the project's decoders do")


def _json(declared: Json) -> dict[str, Any]:
    if declared.schema.strip().lower() == VARIANT:
        return {"title": VARIANT, "type": ["object"]}
    return json_schema(declared.schema, Policy(declared.unknown, declared.missing))


def _bindings(*, framed: bool) -> dict[str, Any]:
    return {"kafka": {"schemaIdLocation": "payload"}} if framed else {}
