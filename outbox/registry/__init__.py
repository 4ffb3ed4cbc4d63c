"""A serializer for payloads whose schemas are in a schema registry: Avro, Protobuf, JSON Schema.

    serializer = RegistrySerializer("https://registry:8081", {"Order": Avro("order-events-value", schema)})
    outbox = Outbox(serializer=serializer)

What it writes has the wire format of Confluent's serializers: a zero byte, the schema's id (4 bytes, big-endian), for
Protobuf the path to the message in its file, and the encoded payload.
"""

from __future__ import annotations

from outbox.registry.avro import Avro
from outbox.registry.json_schema import JsonSchema
from outbox.registry.protobuf import Protobuf
from outbox.registry.serializer import RegistrySerializer

__all__ = ["Avro", "JsonSchema", "Protobuf", "RegistrySerializer"]
