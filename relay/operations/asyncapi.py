"""The AsyncAPI 3.0 document of registered events: topics as channels, events as messages."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import DataclassSchema, ModelSchema

from outbox._app.choices import HeaderSet
from outbox.errors import ConfigurationError
from outbox.event import (
    AGGREGATE_TYPE,
    CE_ID,
    CE_SOURCE,
    CE_SPECVERSION,
    CE_SUBJECT,
    CE_TIME,
    CE_TRACEPARENT,
    CE_TRACESTATE,
    CE_TYPE,
    CONTENT_TYPE,
    EVENT_TYPE,
    ID,
    IDEMPOTENCY_KEY,
    MAX_AGGREGATE_ID,
    TRACEPARENT,
    TRACESTATE,
)
from outbox.models import EventModel, registered
from relay.config import Settings
from relay.core.ports import Claim
from relay.kafka.headers import MessageHeaders
from relay.parts import build_router

VERSION: Final = "3.0.0"
_BINDING: Final = "0.5.0"
_AVRO: Final = "application/vnd.apache.avro+json;version=1.9.0"

_BY_ALIAS: Final = "serialize_by_alias"

_TRACE: Final = {"type": "string", "description": "W3C Trace Context of the write."}
_UUID: Final = {"type": "string", "format": "uuid", "description": "The event's id, the same in each repetition."}
_KEY: Final = {"type": "string", "minLength": 1, "maxLength": MAX_AGGREGATE_ID, "description": "The aggregate's id."}
_HEADERS: Final[Mapping[str, Mapping[str, Any]]] = {
    CE_SPECVERSION: {"type": "string", "const": "1.0"},
    CE_ID: _UUID,
    CE_SOURCE: {"type": "string", "format": "uri-reference", "description": "The system that the event comes from."},
    CE_TYPE: {"type": "string", "description": "The event's type."},
    CE_SUBJECT: _KEY | {"description": "What the event is about: the writer's subject, or else the aggregate's id."},
    CE_TIME: {"type": "string", "format": "date-time", "description": "When the event was written."},
    ID: _UUID,
    EVENT_TYPE: {"type": "string", "description": "The event's type."},
    AGGREGATE_TYPE: {"type": "string", "description": "The aggregate's type."},
    IDEMPOTENCY_KEY: {"type": "string", "description": "The writer's idempotency key, or else the event's id."},
    CE_TRACEPARENT: _TRACE,
    CE_TRACESTATE: _TRACE,
    TRACEPARENT: _TRACE,
    TRACESTATE: _TRACE,
}


def import_models(modules: Iterable[str]) -> tuple[EventModel, ...]:
    """Import modules that register models, and return all that are registered. Raises ConfigurationError."""
    if str(Path.cwd()) not in sys.path:
        # They may be in the working directory, as with `python -m`.
        sys.path.append(str(Path.cwd()))
    for module in modules:
        try:
            importlib.import_module(module)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"--models {module}: {error}") from error
    found = registered()
    if not found:
        raise ConfigurationError("the modules of --models register no models: see outbox.models.register")
    return found


def document(models: Iterable[EventModel], settings: Settings, title: str, version: str) -> dict[str, Any]:
    """Return the document. Raises ConfigurationError for a model without a schema, and NoRoute."""
    router = build_router(settings)
    channels: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    schemas: dict[str, Any] = {"OutboxHeaders": _common_headers(settings)}
    for model in models:
        topic = router.route(model.aggregate_type).topic
        name = _name(model, messages)
        messages[name] = _message(model, name, settings, schemas)
        channel = channels.setdefault(
            topic,
            {"address": topic, "messages": {}, "bindings": {"kafka": {"topic": topic, "bindingVersion": _BINDING}}},
        )
        channel["messages"][name] = {"$ref": f"#/components/messages/{name}"}
    return {
        "asyncapi": VERSION,
        "info": {"title": title, "version": version},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": {
            f"publish-{topic}": {
                "action": "send",
                "channel": {"$ref": f"#/channels/{topic}"},
                "messages": [{"$ref": f"#/channels/{topic}/messages/{name}"} for name in channel["messages"]],
            }
            for topic, channel in channels.items()
        },
        "components": {"messages": messages, "schemas": schemas},
    }


def _name(model: EventModel, taken: Mapping[str, Any]) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{model.aggregate_type}.{model.event_type}")
    if name in taken:
        raise ConfigurationError(f"models: two types of events have the name {name} once their characters are replaced")
    return name


def _message(model: EventModel, name: str, settings: Settings, schemas: dict[str, Any]) -> dict[str, Any]:
    fixed: dict[str, Any] = {}
    names = _header_names(settings)
    if CE_TYPE in names:
        fixed[CE_TYPE] = {"const": model.event_type}
    if EVENT_TYPE in names:
        fixed |= {EVENT_TYPE: {"const": model.event_type}, AGGREGATE_TYPE: {"const": model.aggregate_type}}
    message: dict[str, Any] = {"name": model.event_type, "title": model.event_type}
    if model.description is not None:
        message["description"] = model.description
    kafka: dict[str, Any] = {"key": _KEY, "bindingVersion": _BINDING}
    required = []
    if model.model is None:
        message["payload"] = {"type": "null", "description": "A tombstone: the key is deleted."}
    else:
        content_type, in_registry, schema = _payload(model, f"#/components/schemas/{name}")
        schemas[name] = schema
        message["contentType"] = content_type
        message["payload"] = {"$ref": f"#/components/schemas/{name}"}
        fixed[CONTENT_TYPE] = {"type": "string", "const": content_type}
        required = [CONTENT_TYPE]
        if in_registry:
            kafka |= {"schemaIdLocation": "payload", "schemaIdPayloadEncoding": "4"}
    own = {"type": "object", "properties": fixed | dict(model.headers), "required": required}
    message["headers"] = {"allOf": [{"$ref": "#/components/schemas/OutboxHeaders"}, own]}
    message["bindings"] = {"kafka": kafka}
    return message


def _payload(model: EventModel, place: str) -> tuple[str, bool, dict[str, Any]]:
    """Return the content type, whether the schema is in a registry, and the schema as it stands at ``place``."""
    given = model.model
    definition = getattr(given, "definition", None)
    if definition is not None:
        if definition.kind == "AVRO":
            return given.content_type, True, {"schemaFormat": _AVRO, "schema": json.loads(definition.text)}
        if definition.kind == "JSON":
            return given.content_type, True, _placed(json.loads(definition.text), place)
        raise ConfigurationError(f"models: {model.event_type}: AsyncAPI takes no Protobuf descriptors; leave it out")
    if isinstance(given, Mapping):
        return model.content_type, False, _placed(given, place)
    if isinstance(given, type) and (issubclass(given, BaseModel) or dataclasses.is_dataclass(given)):
        try:
            schema = TypeAdapter(given).json_schema(mode="serialization", by_alias=False, schema_generator=_AsWritten)
        except (PydanticInvalidForJsonSchema, PydanticUserError) as error:
            raise ConfigurationError(
                f"models: {model.event_type}: {given.__name__} has no JSON Schema: {error}"
            ) from error
        return model.content_type, False, _placed(schema, place)
    raise ConfigurationError(
        f"models: {model.event_type}: must be a pydantic model, a dataclass, a JSON Schema, a schema of "
        f"outbox.registry or None, not {given!r}"
    )


class _AsWritten(GenerateJsonSchema):
    """Names properties as the payloads do.

    A pydantic model writes aliases only where its own configuration has ``serialize_by_alias``. A dataclass is written
    by us, its public fields by their names; inside a model it is pydantic's.
    """

    _in_model = False

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        return self._pydantics(schema["cls"].model_config, partial(super().model_schema, schema))

    def dataclass_schema(self, schema: DataclassSchema) -> JsonSchemaValue:
        make = super().dataclass_schema
        if self._in_model:
            return self._pydantics(getattr(schema["cls"], "__pydantic_config__", {}), partial(make, schema))
        inner = schema["schema"]
        if inner["type"] == "dataclass-args":
            public = [part for part in inner["fields"] if not part["name"].startswith("_")]
            schema = {**schema, "schema": {**inner, "fields": public}}
        return make(schema)

    def _pydantics(self, config: Mapping[str, Any], make: Callable[[], JsonSchemaValue]) -> JsonSchemaValue:
        outside = self.by_alias, self._in_model
        # Versions of pydantic that do not know the setting do not follow it.
        known = _BY_ALIAS in ConfigDict.__annotations__
        self.by_alias, self._in_model = known and bool(config.get(_BY_ALIAS)), True
        try:
            return make()
        finally:
            self.by_alias, self._in_model = outside


def _placed(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a JSON Schema whose references lead into itself at its place in the document."""
    # The document has its own dialect, and an id would be what references start from.
    inside: dict[str, Any] = _moved({key: part for key, part in schema.items() if key not in {"$schema", "$id"}}, place)
    return inside


def _moved(node: Any, place: str) -> Any:
    if isinstance(node, Mapping):
        moved = {key: _moved(part, place) for key, part in node.items()}
        reference = node.get("$ref")
        if isinstance(reference, str) and reference[:1] == "#":
            moved["$ref"] = place + reference[1:]
        return moved
    return [_moved(item, place) for item in node] if isinstance(node, list) else node


def _header_names(settings: Settings) -> list[str]:
    traced = {TRACEPARENT: "", TRACESTATE: ""}
    claim = Claim(1, "", "", "", "", "", None, traced)
    return [name for name, _ in MessageHeaders(settings.ce_source, HeaderSet(settings.headers)).of(claim)]


def _common_headers(settings: Settings) -> dict[str, Any]:
    names = _header_names(settings)
    properties = {name: dict(_HEADERS[name]) for name in names}
    if CE_SOURCE in properties:
        properties[CE_SOURCE]["const"] = settings.ce_source
    always = [name for name in names if _HEADERS[name] is not _TRACE]
    return {"type": "object", "properties": properties, "required": always}
