"""What a job declares about payloads: the columns, and the plan by which tasks read them.

A row that does not decode stays in place, with the reason in PROBLEM.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

from outbox.consumer.errors import JobError
from spark_jobs.payloads.framing import unframe
from spark_jobs.payloads.reading import Policy, Reader
from spark_jobs.payloads.registry import Client, Registry, Schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

PROBLEM: Final = "message_problem"
"""The column with the reason why a row can't be applied, or NULL. Never copied to the sink."""

VARIANT: Final = "variant"
"""Used instead of a DDL: any JSON object, as one column ``payload`` of type VARIANT."""

Plan = Callable[[], Reader]
"""Sent to the executors, and called once in each task to create the reader."""

Unknown = Literal["ignore", "dead-letter"]
Missing = Literal["null", "dead-letter"]
Wrong = Literal["dead-letter", "null"]


@runtime_checkable
class Decoder(Protocol):
    """Declares the payload's columns and how to read them."""

    def task_plan(self) -> tuple[StructType, Plan]:
        """Return the fields, and the plan that tasks read them by. Raises JobError, and ConsumerUnavailable.

        A field of type VARIANT is read as its JSON text, which Spark then parses.
        """


@dataclass(frozen=True, slots=True)
class Raw:
    """The payload as it is, in a column ``payload``."""

    def task_plan(self) -> tuple[StructType, Plan]:
        from pyspark.sql.types import BinaryType, StructType

        return StructType().add("payload", BinaryType()), _Bytes


class _Bytes:
    """Reads a payload as bytes."""

    def __call__(self, value: bytes, header: bytes | None) -> Sequence[bytes]:  # noqa: ARG002  a Reader
        return (value,)

    def many(self, payloads: pa.Array) -> tuple[Sequence[pa.Array], set[int]]:
        """Return the column; no row is left to be read by itself."""
        return [payloads], set()


@dataclass(frozen=True)
class Json:
    """A JSON object.

    schema   Spark DDL of its fields, such as ``"order_id string NOT NULL, amount decimal(12,2)"``; or ``"variant"``:
             any object, in one column ``payload``.
    unknown  what to do with a message that has a field which is not in the schema, at any depth.
    missing  what to do with a message that lacks a field. A field that is null is not missing. Either is a dead letter
             if the schema says NOT NULL.
    wrong    what to do with a value that its field can't represent exactly: a dead letter, or NULL instead. With NOT
             NULL it is a dead letter.
    framed   messages name a schema in a registry, as Confluent's JSON Schema serializer writes them. It is not
             looked up: what the columns declare is checked.

    Raises JobError for an unknown policy.
    """

    schema: str
    unknown: Unknown = "ignore"
    missing: Missing = "null"
    wrong: Wrong = "dead-letter"
    framed: bool = False

    def __post_init__(self) -> None:
        Policy(self.unknown, self.missing, self.wrong)

    @cached_property
    def _declared(self) -> StructType | None:
        """The fields; None for VARIANT."""
        return _from_ddl(self.schema)

    def task_plan(self) -> tuple[StructType, Plan]:
        from pyspark.sql.types import StructType, VariantType

        fields = StructType().add("payload", VariantType()) if self._declared is None else self._declared
        return fields, _JsonPlan(self._declared, Policy(self.unknown, self.missing, self.wrong), self.framed)


@dataclass(frozen=True, slots=True)
class _JsonPlan:
    declared: StructType | None
    policy: Policy
    framed: bool

    def __call__(self) -> Reader:
        from spark_jobs.payloads.json_text import variant_reader
        from spark_jobs.payloads.json_whole import JsonReader

        reader: Reader = variant_reader if self.declared is None else JsonReader(self.declared, self.policy)
        if not self.framed:
            return reader
        return lambda value, header: reader(unframe(value, header, indexes=False).payload, None)


@dataclass(frozen=True)
class Avro:
    """An Avro record; its fields are the columns.

    registry       URL, or a Registry: every message refers to the schema that it was written with.
    subject        its latest schema gives the columns; usually ``<topic>-value``. It is looked up when the job starts:
                   fields that writers add later are unknown until the next start.
    reader_schema  an Avro schema that gives the columns instead: JSON text, or the same as a dict.
    writer_schema  without a registry: the schema of all messages, which have no framing. Default: the reader's.
    unknown        what to do with messages whose schema has a field that the columns lack.
    missing        what to do with messages whose schema lacks a field of the columns; "null" uses the default that
                   the columns' schema must have for it.

    Names, types and defaults are resolved by Avro's rules. Raises JobError for a declaration that can't work.
    """

    registry: str | Registry | None = None
    subject: str | None = None
    reader_schema: str | Mapping[str, Any] | None = None
    writer_schema: str | Mapping[str, Any] | None = None
    unknown: Unknown = "ignore"
    missing: Missing = "null"

    def __post_init__(self) -> None:
        Policy(self.unknown, self.missing)
        if _registry(self.registry) is None:
            if self.reader_schema is None:
                raise JobError("avro: name a registry, or give reader_schema")
            if self.subject is not None:
                raise JobError("subject: goes with a registry")
            return
        if (self.subject is None) == (self.reader_schema is None):
            raise JobError("avro: with a registry give either subject or reader_schema")
        if self.writer_schema is not None:
            raise JobError("writer_schema: with a registry every message names its own")

    @cached_property
    def _planned(self) -> tuple[StructType, Plan]:
        registry = _registry(self.registry)
        if self.reader_schema is not None:
            reader = _avro(self.reader_schema)
        else:
            assert registry is not None
            assert self.subject is not None
            reader = Client(registry, None).latest(self.subject)
            if reader.kind != "AVRO":
                raise JobError(f"subject: the latest schema of {self.subject} is {reader.kind}, not AVRO")
        # Behind the registry's client, which says what to install.
        from spark_jobs.payloads.avro import Plan

        writer = None if registry is not None else _avro(self.writer_schema or self.reader_schema or "")
        plan = Plan(reader, writer, registry, Policy(self.unknown, self.missing))
        plan()
        return plan.fields(), plan

    def task_plan(self) -> tuple[StructType, Plan]:
        return self._planned


@dataclass(frozen=True)
class Protobuf:
    """A Protobuf message; its fields are the columns.

    registry    URL, or a Registry: every message refers to its schema, and is a dead letter if its type is not
                ``message``.
    subject     its latest schema gives the columns; looked up when the job starts.
    message     the full name, such as ``shop.v1.Order``. None: the first message type of the subject's file.
    descriptor  gives the columns instead of a subject, and must be given without a registry (messages then have no
                framing): a generated class such as ``order_pb2.Order``, or the bytes of a FileDescriptorSet
                (``protoc --include_imports -o``) with ``message``.
    unknown     what to do with messages that have fields which are not in the descriptor.

    Raises JobError for a declaration that can't work.
    """

    registry: str | Registry | None = None
    subject: str | None = None
    message: str | None = None
    descriptor: Any = field(default=None, repr=False)
    unknown: Unknown = "ignore"

    def __post_init__(self) -> None:
        Policy(self.unknown)
        if _registry(self.registry) is None and self.subject is not None:
            raise JobError("subject: goes with a registry")
        if (self.subject is None) == (self.descriptor is None):
            raise JobError("protobuf: give either subject, with a registry, or descriptor")
        if isinstance(self.descriptor, bytes):
            if self.message is None:
                raise JobError("message: say which one of the descriptor's")
        elif self.descriptor is not None and not hasattr(self.descriptor, "DESCRIPTOR"):
            raise JobError("descriptor: must be a generated class, or a FileDescriptorSet's bytes")

    @cached_property
    def _planned(self) -> tuple[StructType, Plan]:
        registry, message = _registry(self.registry), self.message
        latest = None
        if self.subject is not None:
            assert registry is not None
            latest = Client(registry, "serialized").latest(self.subject)
        # Behind the registry's client, which says what to install.
        from spark_jobs.payloads import protobuf as protobuf_payload

        if latest is not None:
            files, message = protobuf_payload.from_registry(latest, message)
        elif isinstance(self.descriptor, bytes):
            files = self.descriptor
        else:
            described = self.descriptor.DESCRIPTOR
            files = protobuf_payload.from_descriptor(described.file)
            message = message or described.full_name
        assert message is not None
        plan = protobuf_payload.Plan(files, message, registry, Policy(self.unknown))
        return plan.fields(), plan

    def task_plan(self) -> tuple[StructType, Plan]:
        return self._planned


def decoder_of(schema: str | Decoder | None) -> Decoder:
    """Return the decoder that a job's ``schema`` stands for. Raises JobError."""
    if schema is None:
        return Raw()
    return Json(schema) if isinstance(schema, str) else schema


def _from_ddl(schema: str) -> StructType | None:
    """Return a DDL's fields, None for VARIANT."""
    from pyspark.errors import PySparkException
    from pyspark.sql.types import DataType, StructType

    if schema.strip().lower() == VARIANT:
        return None
    try:
        declared = DataType.fromDDL(schema)
    except PySparkException as error:
        raise JobError(f"schema: Spark can't read it as DDL: {error.getCondition() or error}") from error
    if not isinstance(declared, StructType):
        raise JobError(f"schema: must be fields, such as 'order_id string, amount long', not {schema!r}")
    return declared


def _registry(registry: str | Registry | None) -> Registry | None:
    return Registry(registry) if isinstance(registry, str) else registry


def _avro(schema: str | Mapping[str, Any]) -> Schema:
    return Schema("AVRO", schema if isinstance(schema, str) else json.dumps(schema))


def within(path: str, name: str) -> str:
    """Return the path of a field in a record at ``path``, for errors."""
    return f"{path}.{name}" if path else name


def struct_of(what: str, path: str, fields: Sequence[tuple[str, DataType]]) -> StructType:
    """Return the type of a record. Raises JobError for one without fields, or with two that Spark takes for one."""
    from pyspark.sql.types import StructType

    kind = StructType()
    for name, inner in fields:
        if name.lower() in {known.lower() for known in kind.fieldNames()}:
            where = within(path, name)
            raise JobError(f"{what}: field {where} is there twice; Spark does not tell upper from lower case")
        kind.add(name, inner)
    if not fields:
        raise JobError(f"{what}: {f'field {path}' if path else 'the record'} has no fields")
    return kind


def arrow_type(kind: DataType) -> pa.DataType:
    """Return the Arrow type that Spark uses for values of a type, with timestamps in UTC."""
    from pyspark.sql.pandas.types import to_arrow_type

    # Spark 4.2 needs the time zone as an argument; 4.1 always uses UTC.
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_type).parameters else {}
    return to_arrow_type(kind, **zone)


def as_read(kind: Any) -> Any:
    """Return the type of what a task reads: VARIANT is text, and all is nullable.

    A row that is a tombstone or has a problem has NULL everywhere.
    """
    from pyspark.sql import types as t

    if isinstance(kind, t.StructType):
        return t.StructType([t.StructField(field.name, as_read(field.dataType)) for field in kind.fields])
    if isinstance(kind, t.ArrayType):
        return t.ArrayType(as_read(kind.elementType))
    if isinstance(kind, t.MapType):
        return t.MapType(as_read(kind.keyType), as_read(kind.valueType))
    return t.StringType() if isinstance(kind, t.VariantType) else kind
