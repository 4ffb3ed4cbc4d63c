"""Protobuf. The schema of a message is its file, as the descriptor that Confluent's serializer registers."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from outbox.errors import ConfigurationError, SchemaMismatch
from outbox.registry.client import Definition
from outbox.registry.schema import member

_BUILT_IN: Final = ("confluent/", "google/protobuf/", "google/type/")
"""Files that every registry has."""
_PARSED: Final = re.compile(r"Failed to parse (\w+) field")
_UNKNOWN: Final = re.compile(r'no field named "([^"]*)"')


@dataclass(frozen=True)
class Protobuf:
    """A Protobuf message of a subject.

    subject  usually ``<topic>-value``.
    message  the generated class, such as ``order_pb2.Order``. Payloads are its instances, or dicts in Protobuf's JSON
             form. The files that its file imports have their names as subjects.
    """

    subject: str
    message: Any = field(repr=False)

    content_type = "application/vnd.confluent.protobuf"

    def __post_init__(self) -> None:
        if not hasattr(self.message, "DESCRIPTOR") or not hasattr(self.message, "SerializeToString"):
            raise ConfigurationError("message: must be a generated Protobuf class, such as order_pb2.Order")

    @cached_property
    def definition(self) -> Definition:
        """The message's file as the registry has it, with the files that it imports."""
        return _definition(self.message.DESCRIPTOR.file)

    def encode(self, payload: object) -> bytes:
        """Return the path to the message in its file, and the message. Raises SchemaMismatch."""
        message = self._parsed(payload) if isinstance(payload, Mapping) else payload
        name = self.message.DESCRIPTOR.full_name
        if not isinstance(message, self.message):
            raise SchemaMismatch("payload", f"is a {type(payload).__name__}; the schema requires {name}", self.subject)
        if missing := message.FindInitializationErrors():
            raise SchemaMismatch(f"payload.{missing[0]}", f"is required by {name} and missing", self.subject)
        return self._path + bytes(message.SerializeToString(deterministic=True))

    def _parsed(self, payload: Mapping[str, Any]) -> Any:
        from google.protobuf.json_format import ParseDict, ParseError

        try:
            return ParseDict(payload, self.message())
        except (ParseError, TypeError, ValueError) as error:
            name = self.message.DESCRIPTOR.full_name
            if unknown := _UNKNOWN.search(str(error)):
                raise SchemaMismatch(
                    member("payload", unknown[1]), f"is not a field of {name}", self.subject
                ) from error
            found = _PARSED.search(str(error))
            place = member("payload", found[1]) if found else "payload"
            raise SchemaMismatch(place, f"does not fit the message {name}", self.subject) from error

    @cached_property
    def _path(self) -> bytes:
        """The message's place in its file: a count, and the index at each level, as zigzag varints."""
        path: list[int] = []
        kind = self.message.DESCRIPTOR
        while kind.containing_type is not None:
            path.insert(0, [each.name for each in kind.containing_type.nested_types].index(kind.name))
            kind = kind.containing_type
        path.insert(0, list(kind.file.message_types_by_name).index(kind.name))
        # The file's first message has a short form.
        return b"\0" if path == [0] else b"".join(map(_varint, [len(path), *path]))


def _varint(number: int) -> bytes:
    number <<= 1
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def _definition(file: Any) -> Definition:
    return Definition(
        "PROTOBUF",
        base64.standard_b64encode(file.serialized_pb).decode(),
        tuple(
            (needed.name, needed.name, _definition(needed))
            for needed in file.dependencies
            if not needed.name.startswith(_BUILT_IN)
        ),
    )
