"""Avro payloads: decoded with the schema they were written with, and resolved to the job's schema."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Final

from fastavro import parse_schema, schemaless_reader
from fastavro._read_py import maybe_promote
from fastavro.read import LOGICAL_READERS
from fastavro.schema import SchemaParseException
from pyspark.sql import types as t

from outbox.consumer.errors import JobError
from spark_jobs.payloads.avro_limits import has_weightless_items, holds_itself, read_bounded
from spark_jobs.payloads.decoding import struct_of, within
from spark_jobs.payloads.framing import unframe
from spark_jobs.payloads.json_text import decimal_that_fits
from spark_jobs.payloads.reading import Convert, Policy, Problem, Reader, Wrong, unchanged
from spark_jobs.payloads.registry import Registry, Schema, remembering

_PLAIN: Final[Mapping[str, t.DataType]] = {
    "boolean": t.BooleanType(),
    "int": t.IntegerType(),
    "long": t.LongType(),
    "float": t.FloatType(),
    "double": t.DoubleType(),
    "bytes": t.BinaryType(),
    "fixed": t.BinaryType(),
    "string": t.StringType(),
    "enum": t.StringType(),
}
"""fixed and enum stand in a schema as definitions, all others as names."""
_LOGICAL: Final[Mapping[str, tuple[t.DataType, type]]] = {
    "date": (t.DateType(), date),
    "timestamp-millis": (t.TimestampType(), datetime),
    "timestamp-micros": (t.TimestampType(), datetime),
    "local-timestamp-millis": (t.TimestampNTZType(), datetime),
    "local-timestamp-micros": (t.TimestampNTZType(), datetime),
    "uuid": (t.StringType(), uuid.UUID),
    "time-millis": (t.StringType(), time),
    "time-micros": (t.StringType(), time),
}
_OURS: Final = "outbox-"
"""Begins the logical types in parsed schemas. fastavro's reader of ``decimal`` rounds to the schema's precision, and
all its readers also convert what the job's schema takes as it was written."""
_SHALLOW: Final = 1000
"""In bytes. Payloads up to this size can't be nested deep enough to overflow the stack."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an executor needs to decode Avro.

    reader    the job's schema: its fields are the columns.
    writer    without a registry: the schema of all payloads, which have no framing.
    """

    reader: Schema
    writer: Schema | None
    registry: Registry | None
    policy: Policy

    def fields(self) -> t.StructType:
        """Return the columns. Raises JobError for a schema that has no counterpart in Spark."""
        return _record(_parsed(self.reader))[0]

    def __call__(self) -> Reader:
        parsed, filled = _parsed(self.reader), _with_read_defaults(_parsed(self.reader))
        _, convert = _record(parsed)
        names = [field["name"] for field in parsed["fields"]]
        if self.writer is not None:
            try:
                resolved_once = _Resolved(_parsed(self.writer), parsed, filled, self.policy)
            except Problem as problem:
                raise JobError(f"schema: no message could ever be read: {problem}") from problem

            def bare(value: bytes, header: bytes | None) -> Sequence[Any]:  # noqa: ARG001
                row = convert(resolved_once.read(value))
                return [row[name] for name in names]

            return bare
        assert self.registry is not None
        client = self.registry.client()
        resolved = remembering(lambda name: _written(client.schema(name), name, parsed, filled, self.policy))

        def read(value: bytes, header: bytes | None) -> Sequence[Any]:
            framed = unframe(value, header, indexes=False)
            row = convert(resolved(framed.schema).read(framed.payload))
            return [row[name] for name in names]

        return read


def _written(schema: Schema, name: int | uuid.UUID, reader: Any, filled: Any, policy: Policy) -> _Resolved:
    if schema.kind != "AVRO":
        raise Problem(f"schema {name} is {schema.kind}, not AVRO")
    try:
        return _Resolved(_parsed(schema), reader, filled, policy)
    except JobError as error:
        raise Problem(f"schema {name} can't be read: {error}") from error


class _Resolved:
    """A writer's schema and the job's, ready to decode payloads. ``filled``: the job's, see ``_with_read_defaults``."""

    def __init__(self, writer: Any, reader: Any, filled: Any, policy: Policy) -> None:
        self._writer = writer
        self._reader = writer if writer == reader else filled
        if name := holds_itself(writer, _names(writer), always=True):
            raise Problem(f"record {name} always holds itself: no payload has an end")
        self._endless = holds_itself(writer, _names(writer)) is not None
        self._weightless = has_weightless_items(writer, _names(writer))
        for path, change in _differences(_names(writer), writer, _names(reader), reader, ""):
            if change == "unknown" and policy.unknown == "dead-letter":
                raise Problem(f"field {path}: is not in the job's schema")
            if change == "missing" and policy.missing == "dead-letter":
                raise Problem(f"field {path}: is missing in the schema it was written with")

    def read(self, payload: bytes) -> Any:
        # With a byte more: fastavro takes what is there for what a length promises, and passes over fields so.
        source = io.BytesIO(payload + b"\0")
        try:
            if self._weightless or (self._endless and len(payload) > _SHALLOW):
                # Each level takes a byte or more. The compiled reader recurses as deep as the payload says, until the
                # stack overflows and the process crashes. The reader in Python ends with a RecursionError, and counts.
                record = read_bounded(source, len(payload), self._writer, self._reader)
            else:
                record = schemaless_reader(source, self._writer, self._reader)
        except Problem:
            raise
        except Exception as error:
            # The error's text may quote the payload. Only this one mentions nothing but the schemas' fields.
            text = str(error)
            said = text if text.startswith("No default value for field ") else type(error).__name__
            raise Problem(f"the payload does not resolve to the job's Avro schema: {said}") from error
        if source.tell() > len(payload):
            raise Problem("the payload does not resolve to the job's Avro schema: EOFError")
        if source.tell() < len(payload):
            raise Problem("the payload goes on behind the record")
        return record


def _parsed(schema: Schema) -> Any:
    """Parse a schema with its references. Raises JobError."""
    for (carrier, logical), read in _READ.items():
        LOGICAL_READERS[f"{carrier}-{_OURS}{logical}"] = read
    named: dict[str, Any] = {}

    def parse(one: Schema) -> Any:
        for _, reference in one.references:
            parse(reference)
        text = one.text.strip()
        return parse_schema(_with_our_types(json.loads(text) if text[:1] in '{["' else text), named_schemas=named)

    try:
        return parse(schema)
    except (ValueError, TypeError, KeyError, AttributeError, SchemaParseException) as error:
        raise JobError(f"schema: this is no Avro schema: {type(error).__name__}: {error}") from error


def _with_our_types(schema: Any) -> Any:
    """Return a schema with the logical types that columns have, each by our name for it. Avro ignores all others."""
    if isinstance(schema, list):
        return [_with_our_types(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {
        name: _with_our_types(inner) if name in {"type", "items", "values", "fields"} else inner
        for name, inner in schema.items()
    }
    logical, of = changed.pop("logicalType", None), changed.get("type")
    known = isinstance(logical, str) and isinstance(of, str) and (of, logical) in _READ
    if known and (logical != "decimal" or _has_digits(changed)):
        changed["logicalType"] = f"{_OURS}{logical}"
    return changed


def _has_digits(schema: Mapping[str, Any]) -> bool:
    try:
        return 0 <= int(schema.get("scale", 0)) <= int(schema["precision"]) != 0
    except (KeyError, TypeError, ValueError):
        return False


def _with_read_defaults(parsed: Any) -> Any:
    """Change the fields' defaults into what would be read: fastavro gives those of a schema as they stand there.

    Without those that are no value of their field.
    """
    named = _names(parsed)
    defaults = []
    for field in (field for schema in named.values() for field in schema.get("fields", ()) if "default" in field):
        try:
            defaults.append((field, {"default": _read_default(field["type"], named, field["default"])}))
        except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError):
            defaults.append((field, {}))
    for field, default in defaults:
        del field["default"]
        field.update(default)
    return parsed


def _read_default(schema: Any, named: Mapping[str, Any], default: Any) -> Any:
    if isinstance(schema, list):
        branch = next((branch for branch in schema if branch != "null"), "null")
        return None if default is None else _read_default(branch, named, default)
    if isinstance(schema, str):
        schema = named.get(schema, {"type": schema})
    of = schema["type"]
    if not isinstance(of, str) or of in named:
        return _read_default(of, named, default)
    match of:
        case "record" | "error":
            given = {field["name"]: field["default"] for field in schema["fields"] if "default" in field} | default
            return {
                field["name"]: _read_default(field["type"], named, given[field["name"]]) for field in schema["fields"]
            }
        case "array":
            return [_read_default(schema["items"], named, item) for item in default]
        case "map":
            return {name: _read_default(schema["values"], named, item) for name, item in dict(default).items()}
        case "bytes" | "fixed":
            # Text, one character for each byte.
            default = bytes(default, "latin-1")
    read = LOGICAL_READERS.get(f"{of}-{schema.get('logicalType')}")
    return default if read is None else read(default, schema, None)


def _exact(data: bytes, writer_schema: Mapping[str, Any] | None = None, reader_schema: Any = None) -> Decimal:  # noqa: ARG001
    assert writer_schema is not None
    digits = int.from_bytes(data, "big", signed=True)
    scale = int(writer_schema.get("scale", 0))
    return Decimal((int(digits < 0), tuple(map(int, str(abs(digits)))), -scale))


def _where_wanted(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reader of a logical type that converts where the job's schema has one, too."""

    def read(data: Any, writer_schema: Any = None, reader_schema: Any = None) -> Any:
        # None: the schemas are the same.
        if reader_schema is not None:
            wanted = reader_schema if isinstance(reader_schema, dict) else {"type": reader_schema}
            if "logicalType" not in wanted:
                return maybe_promote(data, writer_schema["type"], wanted["type"])  # type: ignore[no-untyped-call]
        return convert(data, writer_schema, reader_schema)

    return read


_READ: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
    ("bytes", "decimal"): _where_wanted(_exact),
    ("fixed", "decimal"): _where_wanted(_exact),
    **{
        (carrier, logical): _where_wanted(LOGICAL_READERS[f"{carrier}-{logical}"])
        for carrier in ("int", "long", "string")
        for logical in _LOGICAL
        if f"{carrier}-{logical}" in LOGICAL_READERS
    },
}
"""By the type that carries it and its name, each logical type that a column can have."""


def _names(parsed: Any) -> Mapping[str, Any]:
    return dict(parsed.get("__named_schemas", {})) if isinstance(parsed, dict) else {}


def _record(parsed: Any) -> tuple[t.StructType, Convert]:
    kind, convert = _typed(parsed, _names(parsed), "", ())
    if not isinstance(kind, t.StructType):
        raise JobError("schema: the job's Avro schema must be a record")
    return kind, convert


def _typed(  # noqa: C901  one case for each type
    schema: Any, named: Mapping[str, Any], path: str, inside: tuple[str, ...]
) -> tuple[t.DataType, Convert]:
    """Return the Spark type, and the function from fastavro's value to Arrow's."""
    if isinstance(schema, list):
        return _union(schema, named, path, inside)
    if isinstance(schema, str):
        if schema in _PLAIN:
            return _PLAIN[schema], unchanged
        if schema in inside:
            raise JobError(f"schema: field {path}: record {schema} holds itself, which no column can; use Raw()")
        if schema not in named:
            raise JobError(f"schema: field {path}: {schema} has no counterpart in Spark")
        return _typed(named[schema], named, path, inside)
    of = schema["type"]
    if isinstance(of, (list, dict)):
        return _typed(of, named, path, inside)
    logical = schema.get("logicalType", "").removeprefix(_OURS)
    if logical == "decimal":
        return _decimal(schema, path)
    if logical:
        kind, python = _LOGICAL[logical]
        return kind, _of_type(path, logical, python)
    if of in {"record", "error"}:
        return _struct(schema, named, path, (*inside, schema["name"]))
    if of == "array":
        element, convert = _typed(schema["items"], named, f"{path}[]", inside)
        return t.ArrayType(element), lambda value: [convert(item) for item in value]
    if of == "map":
        element, convert = _typed(schema["values"], named, f"{path}{{}}", inside)
        mapped = t.MapType(t.StringType(), element)
        return mapped, lambda value: [(name, convert(item)) for name, item in value.items()]
    if of in {"fixed", "enum"}:
        return _PLAIN[of], unchanged
    return _typed(of, named, path, inside)


def _union(
    schema: list[Any], named: Mapping[str, Any], path: str, inside: tuple[str, ...]
) -> tuple[t.DataType, Convert]:
    branches = [branch for branch in schema if branch != "null"]
    if len(branches) == 1:
        kind, convert = _typed(branches[0], named, path, inside)
        return kind, lambda value: None if value is None else convert(value)
    for both, kind in ({"int", "long"}, t.LongType()), ({"float", "double"}, t.DoubleType()):
        if all(isinstance(branch, str) for branch in branches) and set(branches) == both:
            return kind, unchanged
    raise JobError(
        f"schema: field {path}: a union of several types is no column; give a reader schema that has one of them"
    )


def _struct(
    schema: Mapping[str, Any], named: Mapping[str, Any], path: str, inside: tuple[str, ...]
) -> tuple[t.DataType, Convert]:
    fields = [(one["name"], *_typed(one["type"], named, within(path, one["name"]), inside)) for one in schema["fields"]]
    kind = struct_of("schema", path, [(name, inner) for name, inner, _ in fields])
    return kind, lambda record: {name: convert(record[name]) for name, _, convert in fields}


def _of_type(path: str, logical: str, python: type) -> Convert:
    def convert(value: Any) -> Any:
        # If the writer's schema does not declare the logical type, the unit of a number is unknown.
        if type(value) is not python:
            raise Wrong(f"field {path}: was not written as {logical}")
        return str(value) if python in {uuid.UUID, time} else value

    return convert


def _decimal(schema: Mapping[str, Any], path: str) -> tuple[t.DataType, Convert]:
    precision, scale = int(schema["precision"]), int(schema.get("scale", 0))
    if precision > 38:
        raise JobError(f"schema: field {path}: Spark's decimals have 38 digits at most, not {precision}")

    def convert(value: Any) -> Decimal:
        if not isinstance(value, Decimal):
            raise Wrong(f"field {path}: was not written as decimal")
        return decimal_that_fits(path, value, precision, scale)

    return t.DecimalType(precision, scale), convert


def _differences(
    writer_names: Mapping[str, Any], writer: Any, reader_names: Mapping[str, Any], reader: Any, path: str
) -> Iterator[tuple[str, str]]:
    """Yield the fields that only one of two schemas has: the path, and ``unknown`` or ``missing``."""
    written, wanted = _inner(writer, writer_names), _inner(reader, reader_names)
    if written is None or wanted is None or written["type"] != wanted["type"]:
        return
    if written["type"] in {"array", "map"}:
        part, sign = ("items", "[]") if written["type"] == "array" else ("values", "{}")
        yield from _differences(writer_names, written[part], reader_names, wanted[part], path + sign)
        return
    fields = {field["name"]: field for field in written["fields"]}
    for field in wanted["fields"]:
        here = within(path, field["name"])
        match = next((name for name in (field["name"], *field.get("aliases", ())) if name in fields), None)
        if match is None:
            yield here, "missing"
        else:
            yield from _differences(writer_names, fields.pop(match)["type"], reader_names, field["type"], here)
    for name in fields:
        yield within(path, name), "unknown"


def _inner(schema: Any, named: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the record, array or map that a name or a union with null refers to; None if it is none of these."""
    if isinstance(schema, list):
        found = [inner for branch in schema if (inner := _inner(branch, named)) is not None]
        return found[0] if len(found) == 1 else None
    if isinstance(schema, str):
        return _inner(named[schema], named) if schema in named else None
    if schema["type"] in {"record", "array", "map"}:
        return dict(schema)
    return _inner(schema["type"], named) if isinstance(schema["type"], (list, dict)) else None
