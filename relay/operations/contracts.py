"""What a new version of a service's events breaks, from two AsyncAPI documents as `outbox asyncapi` prints them.

A topic has events of both versions: readers of the old one get new events, and readers of the new one get old events,
from the topic's beginning or by a replay. So a change breaks if either can't be: a field that is gone, and a field that
is required from now on.

| place                  | breaks                                                                                      |
|------------------------|---------------------------------------------------------------------------------------------|
| topic, type of events  | removed                                                                                     |
| event                  | another content type or kind of schema; a tombstone that gets a payload, and the reverse    |
| field                  | removed; required from now on, or no longer; added where readers allow no others            |
| value                  | another type, format or const; fewer values of an enum; a bound that is tighter             |
| in Avro                | another name of a record or enum; more symbols of an enum without a default                 |
| header                 | as a field; but one that is added breaks nothing                                            |

JSON's readers are taken to accept values of an enum that they do not know. Texts and examples are not compared. What a
schema says beyond these keywords breaks whenever it differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from outbox.errors import ConfigurationError

_TEXTS: Final = frozenset({"title", "description", "examples", "example", "default", "deprecated", "$comment", "$defs"})
_LOWER: Final = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_UPPER: Final = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_ANY: Final[Mapping[str, Any]] = {}
ALTERNATIVES: Final = ("anyOf", "oneOf")
_COMPARED: Final = (
    {"type", "properties", "required", "items", "enum", "additionalProperties", "allOf", "$ref"}
    | {*ALTERNATIVES, "readOnly", "writeOnly"}
    | _TEXTS
    | _LOWER
    | _UPPER
)


class Breaking(NamedTuple):
    """One change that breaks. ``event`` is empty for a topic, ``place`` for an event as a whole.

    Between two jobs there is only a place.
    """

    topic: str
    event: str
    place: str
    change: str

    def __str__(self) -> str:
        return ": ".join(part for part in self if part)


def read(path: Path) -> dict[str, Any]:
    """Return a document. Raises ConfigurationError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: can't be read as JSON: {error}") from error
    if not isinstance(found, dict) or not str(found.get("asyncapi", "")).startswith("3."):
        raise ConfigurationError(f"{path}: is no AsyncAPI 3 document; `outbox asyncapi` prints one")
    return found


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Breaking]:
    """Return what breaks from one document to the other. Raises ConfigurationError for documents of another form."""
    return listed(_topics(old, new))


def listed(found: Iterator[Breaking]) -> list[Breaking]:
    """Return what a comparison finds, each once: alternatives of a value may lack the same."""
    try:
        return list(dict.fromkeys(found))
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"a document has not the form that `outbox asyncapi` prints: {type(error).__name__} {error}"
        ) from error


def _topics(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Breaking]:
    after = {channel["address"]: channel["messages"] for channel in new["channels"].values()}
    for channel in old["channels"].values():
        topic = channel["address"]
        if topic not in after:
            yield Breaking(topic, "", "", "the topic is removed")
            continue
        for name, message in channel["messages"].items():
            if name not in after[topic]:
                yield Breaking(topic, name, "", "the type of events is removed from the topic")
                continue
            comparison = _Comparison(old, new)
            first, second = resolved(old, message), resolved(new, after[topic][name])
            for place, change in comparison.message(first, second):
                yield Breaking(topic, name, place, change)


class _Comparison:
    """Compares the schemas of one event in two documents."""

    def __init__(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        self._old, self._new = old, new
        # A schema may lead into itself. One that is used twice is compared once, where it comes first.
        self._seen: set[tuple[int, int]] = set()

    def message(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if (kinds := (old.get("contentType"), new.get("contentType")))[0] != kinds[1]:
            yield "", f"content type {shown(kinds[0])} becomes {shown(kinds[1])}"
        yield from self._schema("headers", old.get("headers", _ANY), new.get("headers", _ANY), headers=True)
        first, second = (resolved(*one) for one in ((self._old, old["payload"]), (self._new, new["payload"])))
        formats = first.get("schemaFormat"), second.get("schemaFormat")
        if formats[0] != formats[1]:
            yield "payload", f"schema of {shown(formats[0])} becomes {shown(formats[1])}"
        elif formats[0] is None:
            yield from self._schema("payload", first, second)
        else:
            yield from _avro("payload", first["schema"], second["schema"])

    def _schema(self, place: str, old: Any, new: Any, *, headers: bool = False) -> Iterator[tuple[str, str]]:
        if isinstance(old, bool) or isinstance(new, bool):
            if old != new:
                yield place, f"{shown(old)} becomes {shown(new)}"
            return
        old, new = resolved(self._old, old), resolved(self._new, new)
        if (pair := (id(old), id(new))) in self._seen:
            return
        self._seen.add(pair)
        old, new = merged(self._old, old), merged(self._new, new)
        if (types := (_types(self._old, old), _types(self._new, new)))[0] != types[1]:
            yield place, f"type {shown(types[0])} becomes {shown(types[1])}"
            return
        yield from _values(place, old, new)
        yield from self._fields(place, old, new, headers=headers)
        if "items" in old and "items" in new:
            yield from self._schema(f"{place}[]", old["items"], new["items"])
        elif "items" in new:
            yield place, "the elements have a schema from now on"
        yield from self._alternatives(place, old, new)

    def _alternatives(self, place: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in ALTERNATIVES:
            first, second = old.get(name, ()), new.get(name, ())
            if len(first) != len(second):
                yield place, f"{name}: {len(first)} alternatives become {len(second)}"
                continue
            for number, (one, other) in enumerate(zip(first, second, strict=True)):
                yield from self._schema(f"{place}<{number}>", one, other)

    def _fields(
        self, place: str, old: Mapping[str, Any], new: Mapping[str, Any], *, headers: bool
    ) -> Iterator[tuple[str, str]]:
        before, after = old.get("properties", {}), new.get("properties", {})
        needed, needs = set(old.get("required", ())), set(new.get("required", ()))
        others, may = old.get("additionalProperties", True), new.get("additionalProperties", True)
        for name, schema in before.items():
            inside = f"{place}.{name}"
            if name not in after:
                yield inside, "the field is removed"
                continue
            if name in needed - needs:
                yield inside, "the field is no longer required, and readers rely on it"
            elif name in needs - needed:
                yield inside, "the field is required from now on, and older events may lack it"
            yield from self._schema(inside, schema, after[name])
        for name in after.keys() - before.keys() if not headers else ():
            if name in needs:
                yield f"{place}.{name}", "a new field is required, and older events lack it"
            elif others is False:
                yield f"{place}.{name}", "a new field, and readers allow no others (additionalProperties: false)"
        yield from self._others(place, others, may)

    def _others(self, place: str, old: Any, new: Any) -> Iterator[tuple[str, str]]:
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from self._schema(f"{place}.*", old, new)
        elif new is False and old is not False:
            yield place, "other fields are no longer allowed (additionalProperties: false)"
        elif isinstance(new, Mapping):
            yield place, "other fields have a schema from now on (additionalProperties)"


def _values(place: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a value may no longer be."""
    if "enum" in new:
        gone = [value for value in old["enum"] if value not in new["enum"]] if "enum" in old else None
        if gone is None:
            yield place, f"only {shown(new['enum'])} is allowed from now on"
        elif gone:
            yield place, f"the enum no longer has {', '.join(map(shown, gone))}"
    for name in sorted((_LOWER | _UPPER) & new.keys()):
        before = old.get(name)
        if before is None or (new[name] > before if name in _LOWER else new[name] < before):
            yield place, f"{name} {shown(before)} becomes {shown(new[name])}"
    for name in sorted((old.keys() | new.keys()) - _COMPARED):
        if not name.startswith("x-") and old.get(name) != new.get(name):
            yield place, f"{name} {shown(old.get(name))} becomes {shown(new.get(name))}"


def _types(document: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Return the types of a value, or of its alternatives; none if it may have any."""
    found = schema.get("type")
    if found is not None:
        return sorted([found] if isinstance(found, str) else found)
    parts = [resolved(document, part) for name in ALTERNATIVES for part in schema.get(name, ())]
    types = {str(part.get("type", "")) if isinstance(part, Mapping) else "" for part in parts}
    return [] if "" in types else sorted(types)


def resolved(document: Mapping[str, Any], node: Any) -> Any:
    """Return what a node refers to, or itself. Raises ConfigurationError for a reference that leads nowhere."""
    for _ in range(100):
        if not isinstance(node, Mapping) or not isinstance(reference := node.get("$ref"), str):
            return node
        found: Any = document
        for part in reference.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name) if isinstance(found, list) else name]
            except (KeyError, IndexError, ValueError, TypeError):
                found = None
        if not reference.startswith("#") or found is None:
            raise ConfigurationError(f"the reference {reference!r} leads to nothing in its document")
        node = found
    raise ConfigurationError(f"the reference {node['$ref']!r} leads into itself in its document")


def merged(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with those of its ``allOf`` in it."""
    if "allOf" not in schema:
        return schema
    found: dict[str, Any] = {name: value for name, value in schema.items() if name != "allOf"}
    for part in schema["allOf"]:
        other = merged(document, resolved(document, part))
        # The stricter one of a field's schemas is that of the event itself, which comes last.
        fields = {**found.get("properties", {}), **other.get("properties", {})}
        needed = [*found.get("required", ()), *other.get("required", ())]
        found = {**found, **other}
        if fields:
            found["properties"] = fields
        if needed:
            found["required"] = needed
    return found


def _avro(place: str, old: Any, new: Any) -> Iterator[tuple[str, str]]:
    """Compare two Avro schemas: what a reader with either can't resolve of the other."""
    old, new = _unwrapped(old), _unwrapped(new)
    kinds = tuple(one.get("type") if isinstance(one, Mapping) else one for one in (old, new))
    if isinstance(old, Mapping) and isinstance(new, Mapping) and kinds[0] == kinds[1]:
        if old.get("name") != new.get("name"):
            # Readers with a registry resolve names too.
            yield place, f"the {kinds[0]} {shown(old['name'])} is named {shown(new['name'])}"
        if kinds[0] == "record":
            yield from _avro_fields(place, old["fields"], new["fields"])
            return
        if kinds[0] == "enum":
            if gone := [symbol for symbol in old["symbols"] if symbol not in new["symbols"]]:
                yield place, f"the enum no longer has {', '.join(map(shown, gone))}"
            if "default" not in old and (added := [one for one in new["symbols"] if one not in old["symbols"]]):
                yield place, f"readers without a default do not know the enum's {', '.join(map(shown, added))}"
            return
        if kinds[0] in {"array", "map"}:
            part = "items" if kinds[0] == "array" else "values"
            yield from _avro(f"{place}[]", old[part], new[part])
            return
        old, new = ({name: value for name, value in one.items() if name != "doc"} for one in (old, new))
    if old != new:
        yield place, f"type {shown(old)} becomes {shown(new)}"


def _unwrapped(schema: Any) -> Any:
    """Return the schema inside of objects whose ``type`` is a schema of its own, as ``{"type": {"type": "array"}}``."""
    while isinstance(schema, Mapping) and isinstance(schema.get("type"), Mapping | list):
        schema = schema["type"]
    return schema


def _avro_fields(place: str, old: Any, new: Any) -> Iterator[tuple[str, str]]:
    before, after = ({field["name"]: field for field in fields} for fields in (old, new))
    for name, field in before.items():
        if name in after:
            yield from _avro(f"{place}.{name}", field["type"], after[name]["type"])
        else:
            yield f"{place}.{name}", "the field is removed"
    for name in after.keys() - before.keys():
        if "default" not in after[name]:
            yield f"{place}.{name}", "a new field without a default, and older events lack it"


def shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        return shown(value[0])
    return "none" if value in (None, []) else json.dumps(value, ensure_ascii=False)
