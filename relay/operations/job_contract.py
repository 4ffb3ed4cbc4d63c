"""What a consumer job can't read of a service's events, from its schema and an AsyncAPI document.

| in the job                                    | breaks                                                              |
|-----------------------------------------------|---------------------------------------------------------------------|
| topic, type of events                         | the document lacks it                                               |
| decoder                                       | the events have another form, or a schema id where none is expected |
| field that is NOT NULL                        | an event lacks it, or may lack it, or it may be null                |
| any other field                               | no event has it                                                     |
| type                                          | a value may have another type or format, or is beyond its bounds    |
| ``unknown="dead-letter"``                     | an event has a field that the job does not                          |

Fields are compared for JSON. Of Avro and Protobuf, their registry knows what is compatible.

What the document leaves open breaks nothing, nor do fields that the job does not read. An event may lack a field that
another one has: the columns of a job that reads several types of events are those of all.

Of two versions of a job the new one must read what the old one reads: then the old one's schema stands for the
document's. Only the document can tell whether events have a field that the old one does not read, so without NOT NULL
that breaks nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

from outbox.errors import ConfigurationError
from relay.operations.contracts import ALTERNATIVES, Breaking, listed, merged, resolved, shown

_SPEC: Final = re.compile(r"[\w.]+:\w+")


class JobContract(NamedTuple):
    """What a job reads. ``types`` None: all types of events; ``message`` in the form of AsyncAPI's."""

    topics: Sequence[str]
    types: Sequence[str] | None
    message: Mapping[str, Any]


def is_job(given: str) -> bool:
    """Return whether an argument names a job, not a file."""
    return _SPEC.fullmatch(given) is not None


def read_job(spec: str) -> JobContract:
    """Import ``MODULE:JOB``. Raises ConfigurationError."""
    # By name: the relay does not know the Spark jobs.
    return JobContract(*import_module("spark_jobs.contract").read(spec))


def compare_jobs(old: JobContract, new: JobContract) -> list[Breaking]:
    """Return what the new version of a job can't read of what the old one reads. Raises ConfigurationError."""
    found = _Reading({}).message(new.message, old.message)
    return listed(Breaking("", "", place, problem) for place, problem in found)


def compare_job(job: JobContract, document: Mapping[str, Any], topics: Sequence[str] = ()) -> list[Breaking]:
    """Return what the job can't read of a document's events. ``topics`` replace the job's own.

    Raises ConfigurationError for a job without topics, and for a document of another form.
    """
    if not (topics or job.topics):
        raise ConfigurationError("the job has no topics: name those that it reads with --topic")
    return listed(_events(job, document, topics or job.topics))


def _events(job: JobContract, document: Mapping[str, Any], topics: Sequence[str]) -> Iterator[Breaking]:
    channels = {channel["address"]: channel["messages"] for channel in document["channels"].values()}
    reading = _Reading(document)
    types = set()
    for topic in topics:
        if topic not in channels:
            yield Breaking(topic, "", "", "the job reads the topic, and the document lacks it")
        for name, reference in channels.get(topic, {}).items():
            message = resolved(document, reference)
            types.add(kind := message.get("name", name))
            if job.types is None or kind in job.types:
                for place, problem in reading.message(job.message, message):
                    yield Breaking(topic, name, place, problem)
    # The events of the job's other topics may have what is missing in these.
    if {*job.topics} <= {*topics}:
        where = ", ".join(topics)
        for kind in job.types or ():
            if kind not in types:
                yield Breaking(where, kind, "", "the job applies this type of events, and the document lacks it")
        for place in reading.missing():
            yield Breaking(where, "", place, "the job reads the field, and no event has it")


class _Reading:
    """Compares events with what a job reads, and collects which fields they have."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        # In order: a dict instead of a set.
        self._absent: dict[str, None] = {}
        self._present: set[str] = set()

    def missing(self) -> list[str]:
        """Return the fields that the job reads and no event has."""
        return [place for place in self._absent if place not in self._present]

    def message(self, reads: Mapping[str, Any], message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the place and what the job can't read there. A tombstone has no payload to be read."""
        if "payload" not in reads or "payload" not in message:
            return
        wanted, payload = reads["payload"], resolved(self._document, message["payload"])
        if payload.get("type") == "null":
            return
        form, expected = _form(payload), _form(wanted)
        if form != expected:
            yield "payload", f"is {form}, and the job reads {expected}"
        elif (framed := _framed(message)) != _framed(reads):
            has, expects = ("a", "none") if framed else ("no", "one")
            yield "payload", f"has {has} schema id, and the job expects {expects}"
        elif form == "JSON":
            yield from self._value("payload", wanted, payload.get("schema", payload))

    def _value(self, place: str, reads: Mapping[str, Any], schema: Any) -> Iterator[tuple[str, str]]:
        found = list(self._alternatives(schema))
        types = sorted({kind for one in found for kind in _types(one)})
        if wrong := [kind for kind in types if kind not in reads["type"]]:
            as_read = f"type {shown(types)}, and the job reads it as {reads['title']}"
            yield place, "may be null, and the job needs a value" if wrong == ["null"] else as_read
            return
        for one in found:
            if "format" in reads and one.get("format", reads["format"]) != reads["format"]:
                yield place, f"format {shown(one['format'])}, and the job reads it as {reads['title']}"
            for name in {"minimum", "maximum"} & reads.keys() & one.keys():
                if one[name] < reads[name] if name == "minimum" else one[name] > reads[name]:
                    yield place, f"{name} {one[name]}, and the job reads it as {reads['title']}"
            yield from self._inside(place, reads, one)

    def _inside(self, place: str, reads: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if "properties" in reads:
            yield from self._fields(place, reads, schema)
        elif isinstance(values := reads.get("additionalProperties"), Mapping):
            for name, part in schema.get("properties", {}).items():
                yield from self._value(f"{place}.{name}", values, part)
            yield from self._value(f"{place}.*", values, schema.get("additionalProperties", True))
        elif "items" in reads:
            yield from self._value(f"{place}[]", reads["items"], schema.get("items", True))

    def _fields(self, place: str, reads: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if "properties" not in schema:
            return
        fields, always = schema["properties"], schema.get("required", ())
        for name, part in reads["properties"].items():
            inside, needed = f"{place}.{name}", name in reads["required"]
            if name not in fields:
                if needed:
                    yield inside, "the field is missing, and the job needs it"
                else:
                    self._absent[inside] = None
                continue
            self._present.add(inside)
            wanted = part
            if needed and name not in always:
                yield inside, "the field is optional, and the job needs it"
                # What is optional is often null, too: that is named once.
                wanted = {**part, "type": [*part["type"], "null"]}
            yield from self._value(inside, wanted, fields[name])
        if reads["additionalProperties"] is False:
            for name in fields:
                if name not in reads["properties"]:
                    yield f"{place}.{name}", "the job refuses events with a field that it does not know"

    def _alternatives(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the schemas of which a value has one. Those that say nothing are left out."""
        if not isinstance(schema, Mapping):
            return
        one = merged(self._document, resolved(self._document, schema))
        parts = [part for name in ALTERNATIVES for part in one.get(name, ()) if isinstance(part, Mapping)]
        rest = {name: value for name, value in one.items() if name not in ALTERNATIVES}
        if not parts:
            yield one
        for part in parts:
            yield from self._alternatives({"allOf": [rest, part]})


def _form(payload: Mapping[str, Any]) -> str:
    given = str(payload.get("schemaFormat", "")).lower()
    return next((form for form in ("Avro", "Protobuf") if form.lower() in given), "JSON")


def _framed(message: Mapping[str, Any]) -> bool:
    return "schemaIdLocation" in message.get("bindings", {}).get("kafka", {})


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    found = schema.get("type", ())
    return [found] if isinstance(found, str) else found
