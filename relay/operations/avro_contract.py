"""What a job with an Avro schema can't read of events with another one: Avro's resolution, and the job's policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from relay.operations.contracts import shown

_PROMOTED: Final[Mapping[str, frozenset[str]]] = {
    "int": frozenset({"long", "float", "double"}),
    "long": frozenset({"float", "double"}),
    "float": frozenset({"double"}),
    "string": frozenset({"bytes"}),
    "bytes": frozenset({"string"}),
}
"""Types, and as what else a reader may read them."""


class AvroReading:
    """Compares an event's Avro schema with a job's by Avro's rules of resolution, and by the job's policy."""

    def __init__(self, reads: Mapping[str, Any], written: Mapping[str, Any]) -> None:
        self._policy = reads
        self._names = dict(_named(reads["schema"])), dict(_named(written["schema"]))

    def value(self, place: str, reads: Any, written: Any) -> Iterator[tuple[str, str]]:
        """Yield the place and what the job can't read there."""
        wanted = [self._kind(0, one) for one in (reads if isinstance(reads, list) else [reads])]
        for branch in written if isinstance(written, list) else [written]:
            kind, schema = self._kind(1, branch)
            fitting = [one for name, one in wanted if _alike(kind, schema, name, one)]
            if fitting:
                yield from self._inside(place, kind, fitting[0], schema)
            elif kind == "null":
                yield place, "may be null, and the job needs a value"
            else:
                as_read = " or ".join(_label(*one) for one in wanted)
                yield place, f"type {shown(_label(kind, schema))}, and the job reads it as {as_read}"

    def _inside(
        self, place: str, kind: str, reads: Mapping[str, Any], written: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        if kind in {"array", "map"}:
            part, sign = ("items", "[]") if kind == "array" else ("values", ".*")
            yield from self.value(place + sign, reads[part], written[part])
        elif kind == "record":
            yield from self._fields(place, reads, written)
        elif kind == "enum" and "default" not in reads:
            if unknown := [symbol for symbol in written["symbols"] if symbol not in reads["symbols"]]:
                yield place, f"the job does not know the enum's {', '.join(map(shown, unknown))}"
        elif (logical := reads.get("logicalType")) is not None and written.get("logicalType") != logical:
            yield place, f"logicalType {shown(written.get('logicalType'))}, and the job reads it as {logical}"

    def _fields(self, place: str, reads: Mapping[str, Any], written: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        fields = {field["name"]: field for field in written["fields"]}
        for field in reads["fields"]:
            inside = f"{place}.{field['name']}"
            match = next((name for name in (field["name"], *field.get("aliases", ())) if name in fields), None)
            if match is not None:
                yield from self.value(inside, field["type"], fields.pop(match)["type"])
            elif "default" not in field or self._policy["missing"] == "dead-letter":
                yield inside, "the field is missing, and the job needs it"
        for name in fields if self._policy["unknown"] == "dead-letter" else ():
            yield f"{place}.{name}", "the job refuses events with a field that it does not know"

    def _kind(self, side: int, schema: Any) -> tuple[str, Mapping[str, Any]]:
        """Return the name of a type, and its definition."""
        names = self._names[side]
        while True:
            if isinstance(schema, str):
                name = _short(schema)
                if name not in names:
                    return schema, {}
                schema = names[name]
            elif isinstance(inner := schema["type"], str) and inner not in names:
                return inner, schema
            else:
                schema = inner


def _named(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the named types in an Avro schema, by name without namespace."""
    for part in schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ():
        yield from _named(part)
    if isinstance(schema, Mapping) and schema.get("type") in ("record", "enum", "fixed"):
        yield _short(schema["name"]), schema


def _alike(kind: str, schema: Mapping[str, Any], name: str, reads: Mapping[str, Any]) -> bool:
    if kind != name:
        return name in _PROMOTED.get(kind, ())
    # Names count, too, as the last part of each.
    known = [*reads.get("aliases", ()), reads["name"]] if "name" in schema else []
    return not known or _short(schema["name"]) in map(_short, known)


def _label(kind: str, schema: Mapping[str, Any]) -> str:
    return f"{kind} {schema['name']}" if "name" in schema else kind


def _short(name: str) -> str:
    return name.rpartition(".")[2]
