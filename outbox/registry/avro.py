"""Avro. Nothing is rounded (but a ``float``), cut or left out: fastavro writes 1.7 as the int 1, any text as true."""

from __future__ import annotations

import datetime as dt
import io
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from functools import cached_property
from typing import Any, Final
from uuid import UUID

from outbox.errors import ConfigurationError, MissingExtra, SchemaMismatch
from outbox.registry.client import Definition
from outbox.registry.schema import member, plain

_MOST_LEVELS: Final = 200
_WHOLE: Final = {"int": 31, "long": 63}
_EXACT: Final = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


class _Unfit(Exception):
    """A value does not fit. ``path`` is its place."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(problem)
        self.path = path


@dataclass(frozen=True)
class Avro:
    """An Avro schema of a subject.

    subject  usually ``<topic>-value``, or the record's full name.
    schema   JSON text, or the same as a dict, with all types that it uses.
    """

    subject: str
    schema: str | Mapping[str, Any]

    content_type = "application/vnd.confluent.avro"

    @cached_property
    def definition(self) -> Definition:
        return Definition("AVRO", self.schema if isinstance(self.schema, str) else json.dumps(self.schema))

    def encode(self, payload: object) -> bytes:
        """Return the payload as Avro. Raises SchemaMismatch."""
        parsed, named = self._parsed
        from fastavro import schemaless_writer

        try:
            value = _Walk(named).fitted(parsed, payload, "payload", 0)
            written = io.BytesIO()
            schemaless_writer(written, parsed, value, strict_allow_default=True)
        except _Unfit as error:
            raise SchemaMismatch(error.path, str(error), self.subject) from error
        except Exception as error:
            raise SchemaMismatch(
                "payload", f"can't be written with the schema: {type(error).__name__}", self.subject
            ) from error
        return written.getvalue()

    @cached_property
    def _parsed(self) -> tuple[Any, Mapping[str, Any]]:
        try:
            from fastavro import parse_schema
        except ImportError as error:
            raise MissingExtra("registry", error.name or "fastavro") from error
        named: dict[str, Any] = {}
        try:
            return parse_schema(json.loads(self.definition.text), named_schemas=named), named
        except Exception as error:
            raise ConfigurationError(f"the Avro schema of {self.subject} can't be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _Walk:
    """Compares a payload with a schema."""

    named: Mapping[str, Any]

    def fitted(self, schema: Any, given: object, path: str, level: int) -> Any:  # noqa: C901  one case for each type
        """Return the value as fastavro is to write it. Raises _Unfit."""
        if level > _MOST_LEVELS:
            raise _Unfit(path, f"is nested more than {_MOST_LEVELS} levels deep")
        if isinstance(schema, str):
            schema = self.named.get(schema, {"type": schema})
        value = plain(given)
        if isinstance(schema, list):
            return self._union(schema, value, path, level)
        kind = schema["type"]
        if not isinstance(kind, str):
            return self.fitted(kind, value, path, level)
        match kind:
            case "record" | "error":
                return self._record(schema, value, path, level)
            case "array":
                if not isinstance(value, list | tuple):
                    raise _wrong(path, value, "an array")
                return [
                    self.fitted(schema["items"], item, f"{path}[{place}]", level + 1)
                    for place, item in enumerate(value)
                ]
            case "map":
                if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                    raise _wrong(path, value, "a map with keys of text")
                return {
                    _text(key, path): self.fitted(schema["values"], item, member(path, key), level + 1)
                    for key, item in value.items()
                }
        if (logical := _LOGICAL.get(schema.get("logicalType"))) and isinstance(value, logical.types):
            return logical.check(schema, value, path)
        if kind in self.named:
            return self.fitted(self.named[kind], value, path, level)
        return _primitive(kind, schema, value, path)

    def _record(self, schema: Mapping[str, Any], value: object, path: str, level: int) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(path, value, f"the record {schema['name']}")
        fields = {field["name"]: field for field in schema["fields"]}
        for name in value:
            if name not in fields:
                raise _Unfit(member(path, name), f"is not a field of {schema['name']}")
        for name, field in fields.items():
            if name not in value and "default" not in field:
                raise _Unfit(member(path, name), f"is missing, and {schema['name']} has no default for it")
        left_out = {
            name: self._default(field["type"], field["default"]) for name, field in fields.items() if name not in value
        }
        return left_out | {
            name: self.fitted(fields[name]["type"], item, member(path, name), level + 1) for name, item in value.items()
        }

    def _default(self, schema: Any, default: Any) -> Any:
        """Return a default as fastavro is to write it. Bytes are text in a schema: a character for each."""
        if isinstance(schema, str):
            schema = self.named.get(schema, {"type": schema})
        if isinstance(schema, list):
            return self._default(schema[0], default)
        match schema["type"], default:
            case ("bytes" | "fixed", str()):
                return default.encode("latin-1")
            case ("record" | "error", Mapping()):
                return {
                    field["name"]: self._default(field["type"], default.get(field["name"], field.get("default")))
                    for field in schema["fields"]
                }
            case ("array", list()):
                return [self._default(schema["items"], item) for item in default]
            case ("map", Mapping()):
                return {key: self._default(schema["values"], item) for key, item in default.items()}
            case (str() as kind, _) if kind not in self.named:
                return default
        return self._default(schema["type"], default)

    def _union(self, branches: list[Any], value: object, path: str, level: int) -> Any:
        problem: _Unfit | None = None
        # A double that is no float must not become one.
        for branch in sorted(branches, key=lambda each: _type(each) == "float"):
            try:
                found = self.fitted(branch, value, path, level + 1)
            except _Unfit as error:
                # The problem deepest inside is that of the branch that was meant.
                if problem is None or len(error.path) > len(problem.path):
                    problem = error
                continue
            # With the branch's name: fastavro alone writes a moment as a date where a union has both.
            return (_type(branch) if isinstance(branch, str) else branch.get("name", _type(branch)), found)
        if problem is not None and problem.path != path:
            raise problem
        raise _wrong(path, value, f"one of {', '.join(map(_shown, branches))}")


def _type(branch: Any) -> str:
    return str(branch if isinstance(branch, str) else branch["type"])


def _shown(branch: Any) -> str:
    return branch if isinstance(branch, str) else branch.get("name") or branch.get("logicalType") or branch["type"]


def _wrong(path: str, value: object, wanted: str) -> _Unfit:
    return _Unfit(path, f"is a {type(value).__name__}; the schema requires {wanted}")


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Unfit(path, "contains a lone surrogate, which UTF-8 can't encode") from None
    return value


def _primitive(kind: str, schema: Mapping[str, Any], value: Any, path: str) -> Any:  # noqa: C901  one case for each type
    match kind:
        case "null" if value is None:
            return None
        case "boolean" if isinstance(value, bool):
            return value
        case "int" | "long" if isinstance(value, int) and not isinstance(value, bool):
            bits = _WHOLE[kind]
            if not -(1 << bits) <= value < 1 << bits:
                raise _Unfit(path, f"is out of the range of {kind}")
            return value
        case "float" | "double" if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                # What is finite must not become infinite.
                struct.pack("<f" if kind == "float" else "<d", value)
            except (OverflowError, struct.error):
                raise _Unfit(path, f"is out of the range of {kind}") from None
            if isinstance(value, int) and math.isfinite(value) and int(float(value)) != value:
                raise _Unfit(path, f"is a whole number that {kind} can't hold exactly")
            return float(value)
        case "string" if isinstance(value, str):
            return _text(value, path)
        case "bytes" if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        case "fixed" if isinstance(value, bytes | bytearray | memoryview):
            if len(value) != schema["size"]:
                raise _Unfit(path, f"has {len(value)} bytes, {schema['name']} has {schema['size']}")
            return bytes(value)
        case "enum" if isinstance(value, str):
            if value not in schema["symbols"]:
                raise _Unfit(path, f"is not a symbol of {schema['name']}")
            return value
    raise _wrong(path, value, schema.get("logicalType", kind))


@dataclass(frozen=True, slots=True)
class _Logical:
    """Values of Python's own types for a logical type. Others are taken as the type below."""

    types: type | tuple[type, ...]
    check: Callable[[Mapping[str, Any], Any, str], Any]


def _decimal(schema: Mapping[str, Any], value: Decimal, path: str) -> Decimal:
    precision, scale = schema["precision"], schema.get("scale", 0)
    if not value.is_finite():
        raise _Unfit(path, "is not a number")
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    unscaled = int("".join(map(str, digits)) or "0")
    while exponent < -scale and unscaled % 10 == 0 and unscaled:
        unscaled //= 10
        exponent += 1
    if unscaled and (exponent < -scale or len(str(unscaled)) + exponent + scale > precision):
        raise _Unfit(path, f"has more digits than decimal({precision},{scale})")
    sign = -1 if value.is_signed() else 1
    return Decimal(sign * unscaled * 10 ** (exponent + scale) if unscaled else 0).scaleb(-scale, _EXACT)


def _date(schema: Mapping[str, Any], value: dt.date, path: str) -> dt.date:  # noqa: ARG001  one of _LOGICAL
    if isinstance(value, dt.datetime):
        raise _Unfit(path, "is a datetime; the schema requires a date")
    return value


def _fine(schema: Mapping[str, Any], value: Any, path: str) -> Any:
    """Refuse microseconds where the schema has milliseconds."""
    if schema["logicalType"].endswith("-millis") and value.microsecond % 1000:
        raise _Unfit(path, f"has microseconds; {schema['logicalType']} has milliseconds")
    return value


def _instant(schema: Mapping[str, Any], value: dt.datetime, path: str) -> dt.datetime:
    if value.utcoffset() is None:
        raise _Unfit(path, f"has no time zone; {schema['logicalType']} needs one")
    return _fine(schema, value, path)  # type: ignore[no-any-return]


def _local(schema: Mapping[str, Any], value: dt.datetime | dt.time, path: str) -> dt.datetime | dt.time:
    if value.tzinfo is not None:
        raise _Unfit(path, f"has a time zone; {schema['logicalType']} has none")
    return _fine(schema, value, path)  # type: ignore[no-any-return]


def _uuid(schema: Mapping[str, Any], value: UUID | str, path: str) -> Any:
    try:
        found = value if isinstance(value, UUID) else UUID(value)
    except ValueError:
        raise _Unfit(path, "is not a UUID") from None
    return found.bytes if schema["type"] == "fixed" else found


_LOGICAL: Final[Mapping[Any, _Logical]] = {
    "decimal": _Logical(Decimal, _decimal),
    "date": _Logical(dt.date, _date),
    "time-millis": _Logical(dt.time, _local),
    "time-micros": _Logical(dt.time, _local),
    "timestamp-millis": _Logical(dt.datetime, _instant),
    "timestamp-micros": _Logical(dt.datetime, _instant),
    "local-timestamp-millis": _Logical(dt.datetime, _local),
    "local-timestamp-micros": _Logical(dt.datetime, _local),
    "uuid": _Logical((UUID, str), _uuid),
}
