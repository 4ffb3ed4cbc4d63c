"""Protobuf payloads: decoded with the job's descriptor; the writer's schema only gives the message type."""

from __future__ import annotations

import base64
import functools
import importlib
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from pyspark.sql import types as t

from outbox.consumer.errors import JobError
from spark_jobs.payloads.decoding import struct_of, within
from spark_jobs.payloads.framing import unframe
from spark_jobs.payloads.reading import Convert, Policy, Problem, Reader, Wrong, unchanged
from spark_jobs.payloads.registry import Client, Registry, Schema, remembering

# By FieldDescriptor.CPPTYPE_*: int32, int64, uint32, uint64, double, float, bool, enum, string.
_PLAIN: Final[Mapping[int, t.DataType]] = {
    1: t.IntegerType(),
    2: t.LongType(),
    3: t.LongType(),
    4: t.DecimalType(20, 0),
    5: t.DoubleType(),
    6: t.FloatType(),
    7: t.BooleanType(),
    8: t.StringType(),
    9: t.StringType(),
}
_UINT64, _ENUM, _MESSAGE = 4, 8, 10
_BYTES: Final = 12
"""FieldDescriptor.TYPE_BYTES; its CPPTYPE is that of strings."""
_WRAPPERS: Final = re.compile(r"google\.protobuf\.(Double|Float|Int64|UInt64|Int32|UInt32|Bool|String|Bytes)Value")
_COMMON: Final = re.compile(r"(google|confluent)(/\w+)+\.proto")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Plan:
    """What an executor needs to decode Protobuf. Without a registry payloads have no framing.

    files  a FileDescriptorSet with ``message`` and its imports, each file after those that it imports.
    """

    files: bytes
    message: str
    registry: Registry | None
    policy: Policy

    def fields(self) -> t.StructType:
        """Return the columns. Raises JobError for a message type that has no counterpart in Spark."""
        return _struct(self._class().DESCRIPTOR, "", (), self.policy)[0]

    def __call__(self) -> Reader:
        message = self._class()
        kind, convert = _struct(message.DESCRIPTOR, "", (), self.policy)
        names = kind.fieldNames()
        name = None
        if self.registry is not None:
            name = remembering(functools.partial(_name, self.registry.client("serialized")))

        def read(value: bytes, header: bytes | None) -> Sequence[Any]:
            payload = value
            if name is not None:
                framed = unframe(value, header, indexes=True)
                written = name(framed.schema, framed.indexes)
                if written != self.message:
                    raise Problem(f"the payload is a {written}, not a {self.message}")
                payload = framed.payload
            try:
                parsed = message.FromString(payload)
            except DecodeError as error:
                raise Problem(f"the payload is no {self.message}") from error
            row = convert(parsed)
            return [row[name] for name in names]

        return read

    def _class(self) -> Any:
        pool = descriptor_pool.DescriptorPool()
        try:
            for file in descriptor_pb2.FileDescriptorSet.FromString(self.files).file:
                pool.Add(file)
            return message_factory.GetMessageClass(pool.FindMessageTypeByName(self.message))
        except KeyError as error:
            raise JobError(f"message: the descriptor has no message {self.message}") from error
        except Exception as error:
            raise JobError(f"descriptor: {type(error).__name__}: {error}") from error


def _name(client: Client, schema: int | uuid.UUID, indexes: tuple[int, ...]) -> str:
    """Return the name of a message type, by the schema's id and the path in its file. Raises Problem."""
    found = client.schema(schema)
    if found.kind != "PROTOBUF":
        raise Problem(f"schema {schema} is {found.kind}, not PROTOBUF")
    try:
        file = _file(found)
    except JobError as error:
        raise Problem(f"schema {schema} can't be read: {error}") from error
    names = [file.package] if file.package else []
    inside = file.message_type
    for index in indexes:
        if index >= len(inside):
            raise Problem(f"schema {schema} has no message at the place that the payload names")
        names.append(inside[index].name)
        inside = inside[index].nested_type
    return ".".join(names)


def from_registry(schema: Schema, message: str | None) -> tuple[bytes, str]:
    """Return the FileDescriptorSet of a registered schema, and the message type: the first one if not given."""
    if schema.kind != "PROTOBUF":
        raise JobError(f"registry: the subject's latest schema is {schema.kind}, not PROTOBUF")
    files: dict[str, Any] = {}
    file = _collect(schema, None, files)
    if message is None:
        if not file.message_type:
            raise JobError("registry: the subject's latest schema has no message")
        message = ".".join(filter(None, (file.package, file.message_type[0].name)))
    return descriptor_pb2.FileDescriptorSet(file=files.values()).SerializeToString(), message


def from_descriptor(file: Any) -> bytes:
    """Return a FileDescriptorSet of a FileDescriptor and all that it imports."""
    files: dict[str, Any] = {}
    _add(file, files)
    return bytes(descriptor_pb2.FileDescriptorSet(file=files.values()).SerializeToString())


def _add(file: Any, files: dict[str, Any]) -> None:
    if file.name not in files:
        for imported in file.dependencies:
            _add(imported, files)
        files[file.name] = descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb)


def _collect(schema: Schema, name: str | None, files: dict[str, Any]) -> Any:
    """Add a schema's file after the files that it imports. Returns the file."""
    file = _file(schema)
    file.name = name or file.name or "schema.proto"
    references = dict(schema.references)
    for imported in file.dependency:
        if imported in files:
            continue
        if imported in references:
            _collect(references[imported], imported, files)
        else:
            _common(imported, files)
    files[file.name] = file
    return file


def _common(name: str, files: dict[str, Any]) -> None:
    """Add a file that comes with Protobuf, or with googleapis-common-protos if that is installed."""
    if not _COMMON.fullmatch(name):
        raise JobError(f"descriptor: the schema imports {name}, and has no reference to it")
    try:
        module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    except ImportError as error:
        raise JobError(f"descriptor: the schema imports {name}; install googleapis-common-protos") from error
    _add(module.DESCRIPTOR, files)


def _file(schema: Schema) -> Any:
    try:
        return descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(schema.text, validate=True))
    except (ValueError, DecodeError) as error:
        raise JobError("the registry does not give descriptors (format=serialized)") from error


def _struct(
    descriptor: Any, path: str, inside: tuple[str, ...], policy: Policy
) -> tuple[t.StructType, Callable[[Any], dict[str, Any]]]:
    if descriptor.full_name in inside:
        raise JobError(f"message: field {path}: {descriptor.full_name} holds itself, which no column can; use Raw()")
    inside = (*inside, descriptor.full_name)
    fields = [(one.name, *_field(one, within(path, one.name), inside, policy)) for one in descriptor.fields]
    if not fields:
        raise JobError(f"message: {descriptor.full_name} has no fields")
    strict = policy.unknown == "dead-letter"
    closed = {one.number: found for one in descriptor.fields if (found := _closed(one, within(path, one.name)))}

    def whole(message: Any) -> dict[str, Any]:
        if strict or closed:
            for extra in UnknownFieldSet(message):
                # Protobuf takes an unknown number of a closed enum, or its map's whole entry, for an unknown field.
                if extra.field_number in closed:
                    raise _lacking(closed[extra.field_number])
                if not strict:
                    continue
                where = f" in {path}" if path else ""
                raise Problem(f"field number {extra.field_number}{where}: is not in the job's descriptor")
        return {name: convert(message) for name, _, convert in fields}

    return struct_of("message", path, [(name, kind) for name, kind, _ in fields]), whole


def _closed(field: Any, path: str) -> str | None:
    """Return the path of a field's values if they are of a closed enum, else None."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _closed(field.message_type.fields_by_name["value"], f"{path}{{}}")
    return path if field.enum_type is not None and field.enum_type.is_closed else None


def _field(field: Any, path: str, inside: tuple[str, ...], policy: Policy) -> tuple[t.DataType, Convert]:
    """Return the Spark type, and the function from the message that has the field to the value."""
    name = field.name
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key_kind, key = _value(field.message_type.fields_by_name["key"], f"{path}{{}}", inside, policy)
        kind, convert = _value(field.message_type.fields_by_name["value"], f"{path}{{}}", inside, policy)
        return t.MapType(key_kind, kind), lambda message: [
            (key(entry), convert(value)) for entry, value in getattr(message, name).items()
        ]
    kind, convert = _value(field, path, inside, policy)
    if field.is_repeated:
        return t.ArrayType(kind), lambda message: [convert(item) for item in getattr(message, name)]
    if field.has_presence:
        return kind, lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    return kind, lambda message: convert(getattr(message, name))


def _value(field: Any, path: str, inside: tuple[str, ...], policy: Policy) -> tuple[t.DataType, Convert]:
    if field.cpp_type == _MESSAGE:
        of = field.message_type
        if of.full_name == "google.protobuf.Timestamp":
            return t.TimestampType(), _time(path)
        if _WRAPPERS.fullmatch(of.full_name):
            kind, convert = _value(of.fields_by_name["value"], path, inside, policy)
            return kind, lambda wrapper: convert(wrapper.value)
        return _struct(of, path, inside, policy)
    if field.cpp_type == _ENUM:
        return t.StringType(), _enum(path, {value.number: value.name for value in reversed(field.enum_type.values)})
    if field.cpp_type == _UINT64:
        return _PLAIN[_UINT64], Decimal
    if field.type == _BYTES:
        return t.BinaryType(), unchanged
    return _PLAIN[field.cpp_type], unchanged


def _enum(path: str, names: Mapping[int, str]) -> Convert:
    def convert(number: int) -> str:
        if number not in names:
            raise _lacking(path)
        return names[number]

    return convert


def _lacking(path: str) -> Wrong:
    return Wrong(f"field {path}: is a value that the job's enum lacks")


def _time(path: str) -> Convert:
    def convert(value: Any) -> datetime:
        if value.nanos % 1000:
            raise Wrong(f"field {path}: is finer than microseconds")
        try:
            return _EPOCH + timedelta(seconds=value.seconds, microseconds=value.nanos // 1000)
        except OverflowError as error:
            raise Wrong(f"field {path}: must be a time from year 1 to 9999") from error

    return convert
