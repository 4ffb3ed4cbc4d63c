"""What the kinds of schemas have in common."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol, cast

from outbox import _payload
from outbox.registry.client import Definition


class RegisteredSchema(Protocol):
    """A schema of a subject, and how a payload is encoded with it."""

    subject: str

    @property
    def content_type(self) -> str:
        """The media type of what ``encode`` returns, with the id before it."""
        ...

    @property
    def definition(self) -> Definition: ...

    def encode(self, payload: object) -> bytes:
        """Return the payload encoded, without the schema's id. Raises SchemaMismatch."""
        ...


def plain(value: object) -> object:
    """Return a dataclass or pydantic model as a dict, an Enum as its value, and anything else as it is."""
    if _payload.is_dataclass(value):
        return {name: getattr(value, name) for name in _payload.fields(value)}
    if _payload.is_pydantic(value):
        return cast("Any", value).model_dump()
    if isinstance(value, Enum):
        return value.value
    return value


def member(path: str, key: object) -> str:
    """Return the path of a value inside a mapping."""
    return f"{path}[{key!r}]"
