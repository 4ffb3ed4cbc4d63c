"""The serializer for an outbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from outbox.errors import ConfigurationError, PayloadError
from outbox.event import Event
from outbox.registry.client import Client
from outbox.registry.schema import RegisteredSchema
from outbox.serializing import Serialized


class RegistrySerializer:
    """Serializes payloads with schemas that are in a registry. A serializer for ``Outbox`` and ``AsyncOutbox``.

    url            of the registry; several, separated by commas, are tried in turn.
    schemas        by aggregate type, or by (aggregate type, event type), which wins: ``Avro``, ``Protobuf`` or
                   ``JsonSchema``.
    options        of confluent_kafka's SchemaRegistryClient: ``basic.auth.user.info`` ("user:password"),
                   ``ssl.ca.location``, ``timeout`` (seconds, 5), ``max.retries`` (1), … Never shown.
    auto_register  register schemas that their subjects do not have. Off: such events are refused.
    others         events without a schema: "refuse" them, or write them as "json".

    Each schema is looked up once; after that the registry may be down.
    """

    def __init__(
        self,
        url: str,
        schemas: Mapping[str | tuple[str, str], RegisteredSchema],
        *,
        options: Mapping[str, Any] | None = None,
        auto_register: bool = False,
        others: Literal["refuse", "json"] = "refuse",
    ) -> None:
        """Check and store the arguments, which the class describes. Sends no request to the registry: see ``load``."""
        if others not in {"refuse", "json"}:
            raise ConfigurationError(f"others must be 'refuse' or 'json', not {others!r}")
        self._schemas = dict(schemas)
        self._others = others
        self._client = Client(url, options or {}, auto_register=auto_register)

    def load(self) -> None:
        """Look up all schemas now, so that a missing one fails a service's start and the registry may be down later.

        Raises SchemaRefused and SchemaRegistryUnavailable.
        """
        for schema in self._schemas.values():
            self._client.schema_id(schema.subject, schema.definition)

    def __call__(self, event: Event) -> Serialized | None:
        """Return the schema's id, followed by the encoded payload.

        Raises SchemaMismatch for a payload that does not fit, SchemaRefused for a schema that its subject does not
        have, and SchemaRegistryUnavailable.
        """
        schema = self._schemas.get((event.aggregate_type, event.event_type)) or self._schemas.get(event.aggregate_type)
        if schema is None:
            if self._others == "json":
                return None
            raise PayloadError(
                "payload", f"there is no schema for {event.event_type!r} of aggregate type {event.aggregate_type!r}"
            )
        # First what needs no network.
        encoded = schema.encode(event.payload)
        number = self._client.schema_id(schema.subject, schema.definition)
        return Serialized(b"\0" + number.to_bytes(4, "big") + encoded, schema.content_type)
